//! `larder doctor`: checks a store from the machine of a client, and says what to change.
//!
//! Invariants:
//! - Every step ends by the deadline of the command, and a node that is away delays no other.
//! - A fact about the machine of a node comes from that node. Checks of this machine say so.
//! - A check that cannot be made is reported, never left out in silence.

mod engine;
mod machine;
mod node;
mod round_trip;
mod transport;

use crate::admin::normalized_url;
use crate::output::{escape, say};
use clap::Args;
use futures::StreamExt;
use larder_client::StoreUrl;
use serde::Serialize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Nodes and engines that are checked at the same time.
const CONCURRENT_CHECKS: usize = 32;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Store to check: larder://HOST:PORT[,HOST:PORT…]/[?transport=auto|tcp|rdma|shm]
    #[arg(long, env = "LARDER_STORE", hide_env_values = true, value_name = "URL")]
    store: String,
    /// Prefill or decode engine to check: its URL or HOST:PORT. May be repeated
    #[arg(long, value_name = "URL")]
    engine: Vec<String>,
    /// Limit of the whole command, in seconds from 1 to 600
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=600), value_name = "SECONDS")]
    timeout: u64,
    /// Exit with 1 if there is a warning, too
    #[arg(long)]
    strict: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Warning,
    Failed,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Warning => "warning",
            State::Failed => "failed",
        }
    }
}

#[derive(Debug, Serialize)]
struct Check {
    /// Address of the node, URL of the engine, or "this machine".
    subject: String,
    name: &'static str,
    state: State,
    fact: String,
    /// Remedy, unless the state is ok.
    action: Option<String>,
}

/// Checks of one subject, in the order in which they were made.
struct Findings {
    subject: String,
    checks: Vec<Check>,
}

impl Findings {
    fn of(subject: impl Into<String>) -> Findings {
        Findings { subject: subject.into(), checks: Vec::new() }
    }

    fn add(&mut self, state: State, name: &'static str, fact: impl Into<String>, action: Option<String>) {
        self.checks.push(Check { subject: self.subject.clone(), name, state, fact: fact.into(), action });
    }

    fn ok(&mut self, name: &'static str, fact: impl Into<String>) {
        self.add(State::Ok, name, fact, None);
    }

    fn warn(&mut self, name: &'static str, fact: impl Into<String>, action: impl Into<String>) {
        self.add(State::Warning, name, fact, Some(action.into()));
    }

    fn fail(&mut self, name: &'static str, fact: impl Into<String>, action: impl Into<String>) {
        self.add(State::Failed, name, fact, Some(action.into()));
    }
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    store: String,
    checks: Vec<Check>,
    warnings: usize,
    failures: usize,
}

impl Report {
    fn new(store: String, findings: Vec<Findings>) -> Report {
        let checks: Vec<Check> = findings.into_iter().flat_map(|findings| findings.checks).collect();
        let count = |state| checks.iter().filter(|check| check.state == state).count();
        let (warnings, failures) = (count(State::Warning), count(State::Failed));
        Report { version: env!("CARGO_PKG_VERSION"), store, checks, warnings, failures }
    }

    fn print(&self) {
        let mut subject = "";
        for check in &self.checks {
            if check.subject != subject {
                subject = &check.subject;
                say!("{}", escape(subject));
            }
            let action = check.action.as_ref().map(|action| format!(" → {action}")).unwrap_or_default();
            say!("  {:<8} {:<15} {}", check.state.name(), check.name, escape(&format!("{}{action}", check.fact)));
        }
        let counted = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
        say!("{}, {}", counted(self.failures, "failure"), counted(self.warnings, "warning"));
    }
}

pub async fn run(args: DoctorArgs) -> ExitCode {
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    let report = Report::new(args.store.clone(), check(&args, deadline).await);
    match serde_json::to_string_pretty(&report) {
        Ok(json) if args.json => say!("{json}"),
        _ => report.print(),
    }
    let is_bad = report.failures > 0 || (args.strict && report.warnings > 0);
    if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

async fn check(args: &DoctorArgs, deadline: Instant) -> Vec<Findings> {
    let mut all = vec![machine::check(deadline)];
    let store: StoreUrl = match args.store.parse() {
        Ok(store) => store,
        Err(error) => {
            let mut findings = Findings::of("store URL");
            findings.fail("url", format!("'{}': {error}", args.store), "use the URL that `larder store` prints");
            all.push(findings);
            return all;
        }
    };
    let nodes = futures::stream::iter(store.nodes.iter().map(|address| {
        let url = StoreUrl { nodes: vec![address.clone()], ..store.clone() };
        within(deadline, address.clone(), move |findings| Box::pin(node::check(url, deadline, findings)))
    }));
    all.extend(nodes.buffered(CONCURRENT_CHECKS).collect::<Vec<_>>().await);
    let nodes = store.nodes.len();
    let engines = futures::stream::iter(args.engine.iter().map(|engine| {
        let url = normalized_url(engine);
        within(deadline, engine.clone(), move |findings| Box::pin(engine::check(url, nodes, deadline, findings)))
    }));
    all.extend(engines.buffered(CONCURRENT_CHECKS).collect::<Vec<_>>().await);
    all
}

/// Checks one subject. Keeps what it has found if the deadline ends the checks.
async fn within<F>(deadline: Instant, subject: String, checks: F) -> Findings
where
    F: for<'a> FnOnce(&'a mut Findings) -> futures::future::BoxFuture<'a, ()>,
{
    let mut findings = Findings::of(subject);
    // The steps have deadlines of their own, and report what did not answer.
    let grace = Duration::from_millis(500);
    if tokio::time::timeout_at((deadline + grace).into(), checks(&mut findings)).await.is_err() {
        findings.fail("deadline", "the time was over before all checks were made", "raise --timeout");
    }
    findings
}

/// Bytes with a unit, for people.
fn size(bytes: u64) -> String {
    bytesize::ByteSize(bytes).to_string()
}
