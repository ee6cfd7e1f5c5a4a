//! `larder prefix …`: inspect, warm, pin and forget the cached pages of a prompt.

use crate::admin::Target;
use crate::output::say;
use crate::table::{self, column};
use crate::tiers::duration;
use crate::time::{ago, unix_ms};
use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgGroup, Args, Subcommand};
use larder_model::ChatMessage;
use larder_router::admin::api::{
    ForgetResponse, InspectRequest, InspectResponse, MissStatus, PATH_FORGET, PATH_INSPECT, PATH_PIN, PATH_UNPIN,
    PATH_WARM, PageStatus, PinRequest, PinResponse, PinStatus, PinStrength, PrefixRequest, WarmResponse,
};
use larder_router::openai::fields::Fields;
use larder_router::openai::messages::take_messages;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Subcommand)]
pub enum Prefix {
    /// Show the tier of each page of a prefix
    Inspect(InspectArgs),
    /// Load the pages of a prefix into DRAM. A prefill engine computes those that the store lacks
    Warm(PrefixArgs),
    /// Protect the pages of a prefix from eviction for a limited time. Pages on NVMe are loaded
    /// first
    Pin(PinArgs),
    /// Remove the pins of a prefix
    Unpin(PrefixArgs),
    /// Delete the pages of a prefix from all tiers, durably
    Forget(PrefixArgs),
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Show why pages are missing: never stored, evicted, expired, forgotten, or of a namespace
    /// that differs in the fields named. For the first 1024 missing pages
    #[arg(long)]
    why: bool,
    #[command(flatten)]
    prefix: PrefixArgs,
}

#[derive(Debug, Args)]
pub struct PinArgs {
    /// Duration of the pin: a number followed by s, m, h or d, at most the
    /// node's --max-pin-time
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    duration: Duration,
    /// Evict the pages when nothing else can be evicted. Without it they always stay, and a node
    /// refuses pins beyond the namespace's share of a quarter of its L2
    #[arg(long)]
    soft: bool,
    #[command(flatten)]
    prefix: PrefixArgs,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("prefix").required(true))]
pub struct PrefixArgs {
    /// Text of the prompt, tokenized as by /v1/completions
    #[arg(group = "prefix", value_name = "TEXT")]
    text: Option<String>,
    /// Token ids, separated by commas
    #[arg(long, group = "prefix", value_delimiter = ',', value_name = "IDS")]
    tokens: Option<Vec<u32>>,
    /// File with the text. `-` reads standard input
    #[arg(long, group = "prefix", value_name = "FILE")]
    file: Option<PathBuf>,
    /// JSON file with a chat: the messages of a /v1/chat/completions request, or the whole request.
    /// `-` reads standard input
    #[arg(long, group = "prefix", value_name = "FILE")]
    messages: Option<PathBuf>,
    /// Model name. Required if the router serves several models
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    #[command(flatten)]
    target: Target,
}

impl PrefixArgs {
    fn request(&self) -> Result<PrefixRequest> {
        let text = match &self.file {
            Some(path) => Some(read(path)?),
            None => self.text.clone(),
        };
        let messages = match &self.messages {
            Some(path) => Some(parse_chat(&read(path)?).with_context(|| path.display().to_string())?),
            None => None,
        };
        Ok(PrefixRequest { model: self.model.clone(), text, tokens: self.tokens.clone(), messages })
    }
}

fn read(path: &Path) -> Result<String> {
    if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Parses a list of messages, or a whole request, by the rules of `/v1/chat/completions`. Other
/// rules could name another prompt, and so other pages.
fn parse_chat(text: &str) -> Result<Vec<ChatMessage>> {
    serde_json::from_str::<IgnoredAny>(text).context("not valid JSON")?;
    let request = match text.trim_start().as_bytes().first() {
        Some(b'[') => format!("{{\"messages\": {text}}}"),
        Some(b'{') => text.to_owned(),
        _ => bail!("not a chat: expected [{{\"role\": \"user\", \"content\": \"…\"}}, …]"),
    };
    let messages = Fields::parse(request.as_bytes()).and_then(|mut fields| take_messages(&mut fields));
    let messages = messages.map_err(|error| anyhow!(error.body.message))?;
    messages.context("'messages' is required")
}

pub async fn run(command: Prefix) -> Result<()> {
    match command {
        Prefix::Inspect(InspectArgs { why, prefix }) => {
            let request = InspectRequest { prefix: prefix.request()?, why };
            // Kept as JSON, so that `--json` also prints fields that this version does not know.
            let json: Value = prefix.target.send(PATH_INSPECT, Some(&request)).await?;
            let answer = InspectResponse::deserialize(&json).context("the router sent an unexpected answer")?;
            let text = format_inspection(&answer, &json);
            prefix.target.print(&json, |_| say!("{text}"))
        }
        Prefix::Warm(args) => {
            let answer: WarmResponse = args.target.send(PATH_WARM, Some(&args.request()?)).await?;
            args.target.print(&answer, |warm| {
                let WarmResponse { pages, in_l2, loaded, computed, missing } = warm;
                say!(
                    "{pages} pages: {in_l2} already in L2, {loaded} loaded from L3, {computed} computed, {missing} missing"
                );
            })
        }
        Prefix::Pin(args) => {
            let PinArgs { duration, soft, prefix } = args;
            let request = PinRequest { prefix: prefix.request()?, seconds: duration.as_secs(), soft };
            let answer: PinResponse = prefix.target.send(PATH_PIN, Some(&request)).await?;
            print_pins(&prefix.target, &answer, "pinned")
        }
        Prefix::Unpin(args) => {
            let answer: PinResponse = args.target.send(PATH_UNPIN, Some(&args.request()?)).await?;
            print_pins(&args.target, &answer, "unpinned")
        }
        Prefix::Forget(args) => {
            let answer: ForgetResponse = args.target.send(PATH_FORGET, Some(&args.request()?)).await?;
            args.target.print(&answer, |forget| say!("{} of {} pages deleted", forget.forgotten, forget.pages))?;
            if !answer.engines_unconfirmed.is_empty() {
                let engines = answer.engines_unconfirmed.join(", ");
                bail!("these engines did not confirm and may still have pages in L1: {engines}; repeat the command");
            }
            if !answer.complete {
                bail!("a store node did not answer and may still have pages; repeat the command when all nodes are up");
            }
            Ok(())
        }
    }
}

fn print_pins(target: &Target, answer: &PinResponse, action: &str) -> Result<()> {
    target.print(answer, |pins| say!("{} of {} pages {action}", pins.pinned, pins.pages))?;
    if !answer.complete {
        bail!("a store node did not answer; repeat the command when all nodes are up");
    }
    Ok(())
}

fn format_inspection(answer: &InspectResponse, json: &Value) -> String {
    let servable = answer.pages.iter().take_while(|page| page.tier.is_some()).count();
    let summary = format!(
        "{}: {} tokens; full pages: {}, each of {} tokens; leading pages in the store: {servable} ({} tokens)",
        answer.model,
        answer.tokens,
        answer.pages.len(),
        answer.page_tokens,
        servable as u32 * answer.page_tokens
    );
    if answer.pages.is_empty() {
        return summary;
    }
    let pages = json["pages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let rows: Vec<&PageStatus> = answer.pages.iter().collect();
    let mut columns = vec![
        column("PAGE", |page: &&PageStatus| page.index.to_string()),
        column("TOKENS", |page| format!("{}..{}", page.token_start, page.token_end)),
        column("TIER", |page| page.tier.map_or("-".to_string(), |tier| format!("{tier:?}"))),
    ];
    // Routers of the first version report no pins.
    if pages.iter().any(|page| page.get("pin").is_some()) {
        columns.push(column("PIN", |page| page.pin.map_or("-".to_string(), format_pin)));
    }
    if answer.pages.iter().any(|page| page.miss.is_some()) {
        columns.push(column("WHY", |page| page.miss.as_ref().map_or("-".to_string(), format_miss)));
    }
    columns.push(column("KEY", |page| page.key.clone()));
    format!("{summary}\n{}", table::format(&columns, &rows, false))
}

fn format_miss(miss: &MissStatus) -> String {
    let reason = miss.reason.replace('_', " ");
    match miss.at_unix_ms {
        Some(at_unix_ms) => format!("{reason} {}", ago(at_unix_ms, unix_ms())),
        None if miss.differing.is_empty() => reason,
        None => format!("{reason}: {}", miss.differing.join(", ")),
    }
}

fn format_pin(pin: PinStatus) -> String {
    let kind = match pin.kind {
        PinStrength::Hard => "hard",
        PinStrength::Soft => "soft",
    };
    format!("{kind}, {} s left", pin.seconds_left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_model::{MessageContent, TextPart};
    use serde_json::json;

    #[test]
    fn inspection_shows_tiers_and_pins() {
        let page = |index: u32, tier: Value, pin: Value| json!({"index": index, "key": "ab".repeat(32), "token_start": 0, "token_end": 32, "tier": tier, "pin": pin});
        let pages =
            [page(0, json!("L2"), json!({"kind": "hard", "seconds_left": 60})), page(1, Value::Null, Value::Null)];
        let mut answer = json!({"model": "m", "namespace": "", "tokens": 70, "page_tokens": 32, "pages": pages});
        let format = |answer: &Value| format_inspection(&serde_json::from_value(answer.clone()).unwrap(), answer);
        let text = format(&answer);
        assert!(
            text.contains("in the store: 1 (32 tokens)") && text.contains("PIN") && text.contains("hard, 60 s left"),
            "{text}"
        );
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        answer["pages"][1]["miss"] =
            json!({"reason": "other_namespace", "at_unix_ms": null, "differing": ["weights", "tenant"]});
        let text = format(&answer);
        // A narrow column breaks its text between words.
        assert!(["WHY", "other", "weights,", "tenant"].iter().all(|word| text.contains(word)), "{text}");
        answer["pages"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .for_each(|page| drop(page.as_object_mut().unwrap().remove("pin")));
        assert!(!format(&answer).contains("PIN"));
    }

    #[test]
    fn chat_files_hold_messages_or_a_whole_request() {
        let messages = r#"[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]"#;
        let parsed = parse_chat(messages).unwrap();
        assert_eq!(parsed.len(), 2);
        assert_eq!(parse_chat(&format!("{{\"model\": \"m\", \"messages\": {messages}}}")).unwrap(), parsed);
        let parts = r#"[{"role": "developer", "content": [{"type": "text", "text": "a"}]}]"#;
        let content = MessageContent::Parts(vec![TextPart { text: "a".into() }]);
        let message = ChatMessage { content, ..ChatMessage::new("system", "") };
        assert_eq!(parse_chat(parts).unwrap(), [message], "as /v1/chat/completions reads it");
        for bad in ["", "{}", "[]", "[1]", "\"text\"", r#"[{"role": "user"}]"#] {
            let error = format!("{:#}", parse_chat(bad).unwrap_err());
            assert!(!error.contains("enum") && !error.contains("Chat"), "{bad}: {error}");
        }
    }
}
