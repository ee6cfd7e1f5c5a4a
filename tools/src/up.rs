//! `larder up`: store, engines and router in one process, connected as they would be across machines: over the data port and
//! HTTP, by URL.

use crate::output::say;
use crate::tiers::TierArgs;
use crate::{bundled, signals};
use anyhow::{Context, Result, bail};
use bytesize::ByteSize;
use clap::Parser;
use larder_client::{CONNECTIONS, StoreUrl, Transport};
use larder_model::{Model, Tokenizer};
use larder_node::{Node, NodeOptions};
use larder_router::{Router, RouterHandle, RouterOptions};
use larder_worker::{Engine, EngineHandle, EngineOptions, Preloaded, Role};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where everything is kept, unless said otherwise.
pub const DATA_DIR: &str = "larder-data";
/// File in the data directory with the URL of the admin API, while `up` runs.
pub const ADMIN_URL_FILE: &str = "admin.url";
/// Longer than a page, so that asking twice shows cached tokens.
const PROMPT: &str = "In the beginning God created the heaven and the earth. And the earth was without form, and void; \
                      and darkness was upon the face of the deep. And the Spirit of God";
/// Most time until the router knows its engines.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// `larder up`
#[derive(Debug, Parser)]
pub struct Args {
    /// Address of the OpenAI API
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Address of the admin API; a free port if left out
    #[arg(long, default_value = "127.0.0.1:0", hide_default_value = true)]
    admin_listen: SocketAddr,
    /// Directory of everything that is kept; the next start finds its pages there
    #[arg(long, default_value = DATA_DIR)]
    data_dir: PathBuf,
    /// Model folder as Hugging Face lays it out; the bundled model if left out
    #[arg(long)]
    model: Option<PathBuf>,
    /// Store nodes
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// DRAM for pages (L2) of each store node
    #[arg(long, default_value = "256MiB")]
    l2: ByteSize,
    /// Most disk for pages (L3) of each store node
    #[arg(long, default_value = "1GiB")]
    l3_bytes: ByteSize,
    #[command(flatten)]
    tiers: TierArgs,
    /// Memory for the own pages (L1) of each engine
    #[arg(long, default_value = "128MiB")]
    l1: ByteSize,
    /// Tokens per page
    #[arg(long, default_value_t = 32)]
    page_tokens: u32,
}

/// What runs, in the order in which it was started.
#[derive(Default)]
struct Running {
    nodes: Vec<Node>,
    engines: Vec<EngineHandle>,
    router: Option<RouterHandle>,
}

impl Running {
    /// Stops in the opposite order: nobody loses what it still needs.
    async fn shutdown(self) {
        if let Some(router) = self.router {
            router.shutdown().await;
        }
        for engine in self.engines {
            engine.shutdown().await;
        }
        for node in self.nodes {
            node.shutdown().await;
        }
    }
}

/// Starts everything, says where, and runs until it is asked to stop.
pub async fn run(args: Args) -> Result<()> {
    let begin = Instant::now();
    let mut running = Running::default();
    let admin_file = args.data_dir.join(ADMIN_URL_FILE);
    let started = tokio::select! {
        started = start(&args, &mut running) => started,
        stopped = signals::stop_requested() => stopped.map_err(Into::into).and_then(|()| bail!("stopped while starting")),
    };
    if let Err(error) = started {
        running.shutdown().await;
        return Err(error);
    }
    if let Some(router) = &running.router {
        std::fs::write(&admin_file, format!("http://{}\n", router.admin_addr()))
            .with_context(|| format!("cannot write {}", admin_file.display()))?;
        announce(&args, router, &running, begin.elapsed());
    }
    signals::stop_requested().await?;
    eprintln!("stopping");
    let _ = std::fs::remove_file(&admin_file);
    running.shutdown().await;
    Ok(())
}

async fn start(args: &Args, running: &mut Running) -> Result<()> {
    // Tried first: that the port is in use should not be found out after everything else has been started.
    drop(
        tokio::net::TcpListener::bind(args.listen)
            .await
            .with_context(|| format!("cannot listen on {}", args.listen))?,
    );
    std::fs::create_dir_all(&args.data_dir).with_context(|| format!("cannot make {}", args.data_dir.display()))?;
    let folder = match &args.model {
        Some(folder) => folder.clone(),
        None => bundled::unpack(&args.data_dir)?,
    };
    let loading = tokio::task::spawn_blocking({
        let folder = folder.clone();
        move || load(&folder)
    });
    for number in 0..args.nodes {
        let mut options = NodeOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            data_dir: Some(args.data_dir.join(format!("node-{number}"))),
            l2_bytes: args.l2.as_u64(),
            l3_bytes: args.l3_bytes.as_u64(),
            ..NodeOptions::default()
        };
        args.tiers.apply(&mut options);
        running.nodes.push(Node::start(options).await.with_context(|| format!("store node {number}"))?);
    }
    let nodes = running.nodes.iter().map(|node| node.addr().to_string()).collect();
    let store = StoreUrl { nodes, transport: Transport::Auto, connections: CONNECTIONS };
    let preloaded = loading.await??;
    for role in [Role::Prefill, Role::Decode] {
        let mut options = EngineOptions::new(role, &folder, store.clone());
        options.preloaded = Some(preloaded.clone());
        options.page_tokens = args.page_tokens;
        options.l1_bytes = args.l1.as_u64() as usize;
        running.engines.push(Engine::start(options).await.with_context(|| format!("{role} engine"))?);
    }
    let mut options = RouterOptions::new(store);
    options.listen = args.listen;
    options.admin_listen = args.admin_listen;
    let router = Router::start(options).await.context("router")?;
    let ready = router.wait_ready(READY_TIMEOUT).await;
    running.router = Some(router);
    if !ready {
        bail!("the engines did not register within {} s", READY_TIMEOUT.as_secs());
    }
    Ok(())
}

fn load(folder: &Path) -> Result<Preloaded> {
    let model = Model::load(folder).with_context(|| format!("model {}", folder.display()))?;
    let tokenizer = Tokenizer::load(folder).with_context(|| format!("tokenizer of {}", folder.display()))?;
    Ok(Preloaded { model: Arc::new(model), tokenizer: Arc::new(tokenizer) })
}

fn announce(args: &Args, router: &RouterHandle, running: &Running, took: Duration) {
    let model = running.engines.first().map(|engine| engine.info().model.clone()).unwrap_or_default();
    let address = router.addr();
    let store: Vec<String> = running.nodes.iter().map(|node| node.addr().to_string()).collect();
    say!("larder is up ({:.1} s): http://{address}/v1 serves {model}", took.as_secs_f64());
    say!("  store  larder://{}/   admin  http://{}", store.join(","), router.admin_addr());
    say!("  data   {}   Ctrl-C stops; the next start finds its pages again", args.data_dir.display());
    say!("");
    say!("  curl http://{address}/v1/completions -H 'content-type: application/json' \\");
    say!("    -d '{{\"model\": \"{model}\", \"max_tokens\": 40, \"temperature\": 0.7, \"prompt\": \"{PROMPT}\"}}'");
    say!("");
}
