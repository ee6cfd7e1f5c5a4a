//! `larder status` and `larder prefix …`: a router's admin API for people and scripts.

use crate::nodes;
use crate::output::say;
use crate::tiers::time;
use crate::up::{ADMIN_URL_FILE, DATA_DIR};
use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args, Subcommand};
use comfy_table::{Table, presets};
use larder_router::admin::api::{
    EngineStatus, ErrorResponse, ForgetResponse, InspectResponse, PATH_FORGET, PATH_INSPECT, PATH_PIN, PATH_STATUS,
    PATH_UNPIN, PATH_WARM, PageStatus, PinRequest, PinResponse, PrefixRequest, StatusResponse, WarmResponse,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

/// Warming computes what nobody has: it may take a while.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Where the admin API is, and how to print.
#[derive(Debug, Args)]
pub struct Target {
    /// URL of the admin API; if left out, that of the `larder up` that runs in the data directory
    #[arg(long, env = "LARDER_ADMIN")]
    admin: Option<String>,
    /// Data directory of `larder up`
    #[arg(long, default_value = DATA_DIR)]
    data_dir: PathBuf,
    /// One JSON document, for scripts
    #[arg(long)]
    json: bool,
}

/// `larder status`
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    target: Target,
}

/// `larder prefix …`
#[derive(Debug, Subcommand)]
pub enum Prefix {
    /// Show which pages of a prefix are where
    Inspect(PrefixArgs),
    /// Bring the pages of a prefix into DRAM; what nobody has is computed by a prefill engine
    Warm(PrefixArgs),
    /// Hold the pages of a prefix in DRAM for a while, after those on NVMe were brought there
    Pin(PinArgs),
    /// End the pins of a prefix
    Unpin(PrefixArgs),
    /// Forget the pages of a prefix, durably
    Forget(PrefixArgs),
}

/// Which prefix to pin, and for how long.
#[derive(Debug, Args)]
pub struct PinArgs {
    /// How long: a number with s, m, h or d behind it, at most 30d
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    time: Duration,
    /// Let them go when nothing else can. Otherwise they stay; a node refuses what would hold more than a quarter of its L2
    #[arg(long)]
    soft: bool,
    #[command(flatten)]
    prefix: PrefixArgs,
}

/// Which prefix.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("prefix").required(true))]
pub struct PrefixArgs {
    /// The text, tokenised like a prompt of /v1/completions
    #[arg(group = "prefix")]
    text: Option<String>,
    /// Token ids, separated by commas
    #[arg(long, group = "prefix", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
    /// File with the text; `-` reads standard input
    #[arg(long, group = "prefix")]
    file: Option<PathBuf>,
    /// The model; may be left out if there is only one
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    target: Target,
}

impl PrefixArgs {
    fn request(&self) -> Result<PrefixRequest> {
        let text = match &self.file {
            Some(path) if path.as_os_str() == "-" => {
                let mut text = String::new();
                std::io::stdin().read_to_string(&mut text).context("standard input")?;
                Some(text)
            }
            Some(path) => Some(std::fs::read_to_string(path).with_context(|| path.display().to_string())?),
            None => self.text.clone(),
        };
        Ok(PrefixRequest { model: self.model.clone(), text, tokens: self.tokens.clone(), messages: None })
    }
}

impl Target {
    fn url(&self) -> Result<String> {
        if let Some(url) = &self.admin {
            return Ok(url.trim_end_matches('/').to_string());
        }
        let file = self.data_dir.join(ADMIN_URL_FILE);
        let url = std::fs::read_to_string(&file).with_context(|| {
            format!("{} is not there: start `larder up`, or give --admin URL or LARDER_ADMIN", file.display())
        })?;
        Ok(url.trim().to_string())
    }

    async fn send<T: DeserializeOwned>(&self, path: &str, body: Option<&impl Serialize>) -> Result<T> {
        let url = self.url()?;
        let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?;
        let request = match body {
            Some(body) => http.post(format!("{url}{path}")).json(body),
            None => http.get(format!("{url}{path}")),
        };
        let response = request.send().await.with_context(|| format!("no admin API at {url}"))?;
        let status = response.status();
        let bytes = response.bytes().await?;
        if !status.is_success() {
            match serde_json::from_slice::<ErrorResponse>(&bytes) {
                Ok(failure) => bail!("{}", failure.error.message),
                Err(_) => bail!("{url} answered {status}"),
            }
        }
        serde_json::from_slice(&bytes).with_context(|| format!("{url} does not answer like a Larder router"))
    }

    /// Prints as JSON, or by `human`.
    fn print<T: Serialize>(&self, answer: &T, human: impl FnOnce(&T)) -> Result<()> {
        match self.json {
            true => say!("{}", serde_json::to_string_pretty(answer)?),
            false => human(answer),
        }
        Ok(())
    }
}

/// `larder status`
pub async fn status(args: StatusArgs) -> Result<()> {
    let status: StatusResponse = args.target.send(PATH_STATUS, None::<&()>).await?;
    args.target.print(&status, show_status)
}

/// `larder prefix …`
pub async fn prefix(command: Prefix) -> Result<()> {
    match command {
        Prefix::Inspect(args) => {
            let answer: InspectResponse = args.target.send(PATH_INSPECT, Some(&args.request()?)).await?;
            args.target.print(&answer, show_inspection)
        }
        Prefix::Warm(args) => {
            let answer: WarmResponse = args.target.send(PATH_WARM, Some(&args.request()?)).await?;
            args.target.print(&answer, |warm| {
                say!(
                    "{} pages: {} were in L2, {} loaded from L3, {} computed, {} missing",
                    warm.pages,
                    warm.in_l2,
                    warm.loaded,
                    warm.computed,
                    warm.missing
                );
            })
        }
        Prefix::Pin(args) => {
            let PinArgs { time, soft, prefix } = args;
            let request = PinRequest { prefix: prefix.request()?, seconds: time.as_secs(), soft };
            let answer: PinResponse = prefix.target.send(PATH_PIN, Some(&request)).await?;
            show_pins(&prefix.target, &answer, "pinned")
        }
        Prefix::Unpin(args) => {
            let answer: PinResponse = args.target.send(PATH_UNPIN, Some(&args.request()?)).await?;
            show_pins(&args.target, &answer, "no longer pinned")
        }
        Prefix::Forget(args) => {
            let answer: ForgetResponse = args.target.send(PATH_FORGET, Some(&args.request()?)).await?;
            args.target.print(&answer, |forget| say!("{} of {} pages forgotten", forget.forgotten, forget.pages))?;
            if !answer.complete {
                bail!("not every store node answered: some pages may still be there; try again when all are up");
            }
            Ok(())
        }
    }
}

fn show_pins(target: &Target, answer: &PinResponse, what: &str) -> Result<()> {
    target.print(answer, |pins| say!("{} of {} pages {what}", pins.pinned, pins.pages))?;
    if !answer.complete {
        bail!("not every store node answered; try again when all are up");
    }
    Ok(())
}

/// A table without lines.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    table
}

fn show_status(status: &StatusResponse) {
    say!("larder {}, router up {} s, store {}", status.version, status.uptime_seconds, status.store);
    nodes::show(&status.nodes);
    say!("\nengines");
    let mut engines = table(&["NAME", "ROLE", "URL", "MODEL", "STATE", "STORE NODES", "RUNNING", "L1 PAGES"]);
    for engine in &status.engines {
        engines.add_row(engine_row(engine));
    }
    say!("{engines}\n\nmodels");
    let mut models = table(&["NAME", "PAGE TOKENS", "PREFILL", "DECODE", "NAMESPACE"]);
    for model in &status.models {
        models.add_row([
            model.name.clone(),
            model.page_tokens.to_string(),
            model.prefill_engines.to_string(),
            model.decode_engines.to_string(),
            model.namespace.chars().take(16).collect(),
        ]);
    }
    say!("{models}");
}

fn engine_row(engine: &EngineStatus) -> [String; 8] {
    let (nodes, running, pages) = match &engine.state {
        Some(state) => (
            state.store_nodes.to_string(),
            format!("{} (+{} waiting)", state.running, state.queue),
            format!("{} of {}", state.l1_pages - state.l1_pages_free.min(state.l1_pages), state.l1_pages),
        ),
        None => ("-".into(), "-".into(), "-".into()),
    };
    let state = if engine.up { "up" } else { "left alone after a failure" };
    let (name, url, model) = (engine.name.clone(), engine.url.clone(), engine.model.clone());
    [name, engine.role.to_string(), url, model, state.to_string(), nodes, running, pages]
}

fn show_inspection(answer: &InspectResponse) {
    let servable = answer.pages.iter().take_while(|page| page.tier.is_some()).count();
    say!(
        "{}: {} tokens, {} whole pages of {}; the store can serve the first {} ({} tokens)",
        answer.model,
        answer.tokens,
        answer.pages.len(),
        answer.page_tokens,
        servable,
        servable as u32 * answer.page_tokens
    );
    let mut pages = table(&["PAGE", "TOKENS", "TIER", "KEY"]);
    for page in &answer.pages {
        pages.add_row(page_row(page));
    }
    if !answer.pages.is_empty() {
        say!("{pages}");
    }
}

fn page_row(page: &PageStatus) -> [String; 4] {
    let tier = page.tier.map_or("-".to_string(), |tier| format!("{tier:?}"));
    [page.index.to_string(), format!("{}..{}", page.token_start, page.token_end), tier, page.key.clone()]
}
