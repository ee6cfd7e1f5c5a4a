//! `larder namespace …`: list namespaces, retire them, and roll that back.
//!
//! The commands ask the admin addresses of the store nodes, each by itself: no node knows the
//! others. A change is complete once every node has confirmed it, and may be repeated.

use crate::admin::normalized_url;
use crate::errors::http_cause;
use crate::output::say;
use crate::table::{self, column};
use crate::time::{ago, unix_ms};
use crate::up::{DATA_DIR, node_admin_urls};
use anyhow::{Context, Result, anyhow, bail};
use bytesize::ByteSize;
use clap::{Args, Subcommand};
use futures::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Digits of a namespace that the table shows.
const SHOWN_DIGITS: usize = 16;
/// Digits that a name on the command line has at least.
const DIGITS_MIN: usize = 4;
const DIGITS: usize = 64;

#[derive(Debug, Subcommand)]
pub enum Namespace {
    /// List the namespaces with their pages and their last use
    Ls(NodesArgs),
    /// Make all pages of a namespace unreadable, and refuse its puts, until the rollback. Takes the
    /// same time whatever the namespace has
    Retire(ChangeArgs),
    /// Accept puts of a retired namespace again, and serve those of its pages that are still there
    Rollback(ChangeArgs),
}

#[derive(Debug, Args)]
pub struct NodesArgs {
    /// Admin addresses of all store nodes, separated by commas: URL or HOST:PORT. Default: the
    /// nodes of the `larder up` that uses --data-dir
    #[arg(long, env = "LARDER_NODE_ADMIN", hide_env_values = true, value_delimiter = ',', value_name = "URLS")]
    nodes: Vec<String>,
    /// Data directory of `larder up`
    #[arg(long, default_value = DATA_DIR, value_name = "DIRECTORY")]
    data_dir: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct ChangeArgs {
    /// Namespace: its first hex digits, at least 4, as `larder namespace ls` shows them
    #[arg(value_name = "NAMESPACE")]
    namespace: String,
    #[command(flatten)]
    nodes: NodesArgs,
}

pub async fn run(command: Namespace) -> Result<()> {
    match command {
        Namespace::Ls(args) => list(args).await,
        Namespace::Retire(args) => change(args, "retire").await,
        Namespace::Rollback(args) => change(args, "rollback").await,
    }
}

impl NodesArgs {
    fn urls(&self) -> Result<Vec<String>> {
        if !self.nodes.is_empty() {
            return self.nodes.iter().map(|address| normalized_url(address)).collect();
        }
        let urls = node_admin_urls(&self.data_dir);
        if urls.is_empty() {
            bail!(
                "no `larder up` runs in {}: start it, or name the admin addresses of the nodes with --nodes or \
                 LARDER_NODE_ADMIN [LRD0603]",
                self.data_dir.display()
            );
        }
        Ok(urls)
    }
}

/// Answer of a node, with its URL.
type Answer = (String, Result<Value>);

/// Sends a request to all nodes at once.
async fn ask(urls: Vec<String>, method: Method, path: &str) -> Result<Vec<Answer>> {
    let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?;
    let requests = urls.into_iter().map(|url| {
        let (http, method) = (http.clone(), method.clone());
        async move {
            let answer = request(&http, method, &url, path).await;
            (url, answer)
        }
    });
    Ok(join_all(requests).await)
}

async fn request(http: &reqwest::Client, method: Method, url: &str, path: &str) -> Result<Value> {
    let unreachable = |error: reqwest::Error| {
        anyhow!("cannot reach the node at {url}: {}; is this its --admin-listen? [LRD0601]", http_cause(&error))
    };
    let response = http.request(method, format!("{url}{path}")).send().await.map_err(unreachable)?;
    let status = response.status();
    let bytes = response.bytes().await.map_err(unreachable)?;
    if !status.is_success() {
        let text = String::from_utf8_lossy(&bytes);
        bail!("the server at {url} answered {status}: {}; is it a store node's admin address? [LRD0602]", text.trim());
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| anyhow!("the server at {url} is not a store node of this version: {error} [LRD0602]"))
}

async fn list(args: NodesArgs) -> Result<()> {
    let answers = ask(args.urls()?, Method::GET, "/namespaces").await?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&json!({ "nodes": of_nodes(&answers) }))?);
    } else {
        say!("{}", format_list(&answers, unix_ms()));
    }
    check(answers, "list")
}

async fn change(args: ChangeArgs, action: &'static str) -> Result<()> {
    let urls = args.nodes.urls()?;
    let namespace = match is_complete(&args.namespace) {
        true => args.namespace.to_lowercase(),
        false => {
            let lists = ask(urls.clone(), Method::GET, "/namespaces").await?;
            let namespace = find(&args.namespace, &lists);
            // A name may be unique only because a node is away.
            check(lists, "list")?;
            namespace?
        }
    };
    let answers = ask(urls, Method::POST, &format!("/namespaces/{namespace}/{action}")).await?;
    if args.nodes.json {
        let document = json!({ "namespace": namespace, "nodes": of_nodes(&answers) });
        say!("{}", serde_json::to_string_pretty(&document)?);
    } else {
        let confirmed = answers.iter().filter(|(_, answer)| answer.is_ok()).count();
        let is_changed = |answer: &Result<Value>| answer.as_ref().is_ok_and(|answer| answer["changed"] == true);
        let changed = answers.iter().filter(|(_, answer)| is_changed(answer)).count();
        say!("{action} of {namespace}: confirmed by {confirmed} of {} nodes, {changed} changed", answers.len());
    }
    check(answers, action)
}

fn is_complete(name: &str) -> bool {
    name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The only namespace of the lists whose name begins with these digits.
fn find(digits: &str, lists: &[Answer]) -> Result<String> {
    if digits.len() < DIGITS_MIN || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        bail!("'{digits}' is not a namespace: give at least {DIGITS_MIN} of its hex digits");
    }
    let digits = digits.to_lowercase();
    let names = lists.iter().filter_map(|(_, list)| list.as_ref().ok()).flat_map(rows).map(name);
    let found: BTreeSet<&str> = names.filter(|name| name.starts_with(&digits)).collect();
    match found.len() {
        0 => bail!("no node has a namespace '{digits}'; `larder namespace ls` shows them"),
        1 => found.first().map(|name| (*name).to_string()).context("a set of one has a first"),
        count => bail!("{count} namespaces begin with '{digits}'; give more digits"),
    }
}

/// Fails if a node did. The error names each of them.
fn check(answers: Vec<Answer>, action: &str) -> Result<()> {
    let failed: Vec<String> = answers.into_iter().filter_map(|(_, answer)| Some(answer.err()?.to_string())).collect();
    if failed.is_empty() {
        return Ok(());
    }
    bail!("{}; {action} is incomplete: repeat it when all nodes are up", failed.join("; "))
}

fn of_nodes(answers: &[Answer]) -> Vec<Value> {
    let of_node = |(url, answer): &Answer| match answer {
        Ok(answer) => json!({ "node": url, "answer": answer }),
        Err(error) => json!({ "node": url, "error": error.to_string() }),
    };
    answers.iter().map(of_node).collect()
}

fn rows(list: &Value) -> impl Iterator<Item = &Value> {
    list["namespaces"].as_array().into_iter().flatten()
}

fn name(row: &Value) -> &str {
    row["namespace"].as_str().unwrap_or_default()
}

/// A namespace on all nodes together.
#[derive(Default)]
struct Row {
    name: String,
    model: Option<String>,
    tenant: Option<String>,
    nodes: u64,
    retired: u64,
    connections: u64,
    l2_bytes: u64,
    l3_bytes: u64,
    /// Pages on L3, or in L2 without one. A page in both tiers counts once per tier.
    pages: [u64; 2],
    last_use_unix_ms: u64,
    now_unix_ms: u64,
}

impl Row {
    fn add(&mut self, row: &Value) {
        let number = |field: &str| row[field].as_u64().unwrap_or_default();
        let text = |field: &str| row[field].as_str().map(str::to_string);
        self.model = self.model.take().or_else(|| text("model"));
        self.tenant = self.tenant.take().or_else(|| text("tenant"));
        self.nodes += 1;
        self.retired += u64::from(row["retired_unix_ms"].is_u64());
        self.connections += number("connections");
        self.l2_bytes += number("l2_bytes");
        self.l3_bytes += number("l3_bytes");
        self.pages[0] += number("l2_pages");
        self.pages[1] += number("l3_pages");
        self.last_use_unix_ms = self.last_use_unix_ms.max(number("last_use_unix_ms"));
    }

    fn state(&self) -> String {
        match (self.retired, self.connections) {
            (0, 0) => "idle".into(),
            (0, _) => "in use".into(),
            (retired, _) if retired == self.nodes => "retired".into(),
            (retired, _) => format!("retired on {retired} of {}", self.nodes),
        }
    }

    fn last_use(&self) -> String {
        if self.last_use_unix_ms == 0 {
            return "-".into();
        }
        ago(self.last_use_unix_ms, self.now_unix_ms)
    }
}

fn format_list(answers: &[Answer], now_unix_ms: u64) -> String {
    let mut merged = BTreeMap::<&str, Row>::new();
    let mut left_out = 0;
    for list in answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()) {
        left_out += list["left_out"].as_u64().unwrap_or_default();
        for row in rows(list) {
            let sum = merged.entry(name(row)).or_default();
            sum.name = name(row).to_string();
            sum.now_unix_ms = now_unix_ms;
            sum.add(row);
        }
    }
    let mut rows: Vec<Row> = merged.into_values().collect();
    // The latest use first.
    rows.sort_by(|a, b| (b.last_use_unix_ms, &a.name).cmp(&(a.last_use_unix_ms, &b.name)));
    let columns = [
        column("NAMESPACE", |row: &Row| row.name.chars().take(SHOWN_DIGITS).collect()),
        column("MODEL", |row| row.model.clone().unwrap_or_else(|| "-".into())),
        column("TENANT", |row| row.tenant.clone().unwrap_or_else(|| "-".into())),
        column("STATE", Row::state),
        column("L2 PAGES", |row| row.pages[0].to_string()),
        column("L2", |row| ByteSize(row.l2_bytes).to_string()),
        column("L3 PAGES", |row| row.pages[1].to_string()),
        column("L3", |row| ByteSize(row.l3_bytes).to_string()),
        column("LAST USE", Row::last_use),
    ];
    let table = table::format(&columns, &rows, false);
    match left_out {
        0 => table,
        _ => format!("{table}\n{left_out} namespaces with fewer bytes are left out"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(digit: &str, retired: Value) -> Value {
        json!({
            "namespace": digit.repeat(32), "model": "m@step-7", "tenant": "default", "connections": 0,
            "last_use_unix_ms": 60_000, "retired_unix_ms": retired, "l2_pages": 3, "l2_bytes": 3 << 20,
            "l3_pages": 40, "l3_bytes": 40 << 20,
        })
    }

    fn answer(rows: Vec<Value>) -> Answer {
        ("http://node".into(), Ok(json!({ "namespaces": rows, "left_out": 2 })))
    }

    #[test]
    fn list_adds_up_the_nodes_and_tells_what_is_retired() {
        let first = answer(vec![row("ab", json!(5)), row("cd", Value::Null), row("ef", json!(5))]);
        let second = answer(vec![row("ab", json!(6)), row("ef", Value::Null)]);
        let text = format_list(&[first, second], 3_660_000);
        let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_string();
        assert!(line("abab").contains(" retired ") && line("abab").contains("m@step-7"), "{text}");
        assert!(line("abab").contains(" 80 ") && line("abab").contains("1 h 0 min ago"), "{text}");
        assert!(line("cdcd").contains(" idle ") && line("efef").contains("retired on 1 of 2"), "{text}");
        assert!(text.contains("4 namespaces with fewer bytes") && text.lines().all(|line| line.len() <= 120), "{text}");
    }

    #[test]
    fn namespace_is_found_by_its_first_digits() {
        let lists = [answer(vec![row("ab", Value::Null), row("cd", Value::Null)]), answer(vec![row("ab", json!(1))])];
        assert_eq!(find("ABab", &lists).unwrap(), "ab".repeat(32));
        for (digits, reason) in [("aba", "at least 4"), ("zzzz", "not a namespace"), ("0123", "no node has")] {
            let error = find(digits, &lists).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let twins = [answer(vec![row("ab", Value::Null)]), answer(vec![json!({"namespace": "abab00"})])];
        assert!(find("abab", &twins).unwrap_err().to_string().contains("2 namespaces"));
        assert!(is_complete(&"aB".repeat(32)) && !is_complete("abab"));
    }

    #[test]
    fn node_that_fails_makes_the_command_fail() {
        let failed = ("http://b".to_string(), Err(anyhow!("cannot reach the node at http://b")));
        let error = check(vec![answer(Vec::new()), failed], "retire").unwrap_err().to_string();
        assert!(error.contains("http://b") && error.contains("retire is incomplete"), "{error}");
        assert!(check(vec![answer(Vec::new())], "retire").is_ok());
    }
}
