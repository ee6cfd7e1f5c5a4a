//! Hostile test: attacks on every port at once, beside honest clients.
//!
//! A store node, two engines and a router run as processes of this binary. Honest clients measure
//! alone and beside the attackers, in turns: the speed of a machine changes within seconds. The
//! samples of all turns count together. The servers pass if
//!
//! - every honest request succeeds with the right answer, within twice its time alone,
//! - no process exceeds the memory that it states as its maximum,
//! - connections, descriptors, threads, child processes, bytes in flight and reservations return to
//!   their numbers from before the attacks.
//!
//! All run on one machine. The threads of the attackers have the lowest priority, and may still
//! delay honest clients by themselves. So each turn has a third part, beside a load that takes the
//! same processor time as those threads and attacks nothing. The difference between the two is the
//! servers' part.

mod attacker;
mod cpu;
mod data;
mod honest;
mod http;
mod redis;
mod servers;
mod templates;

use super::overload::{LOAD_THREAD, Priority, load_threads};
use crate::output::say;
use anyhow::{Context, Result, bail, ensure};
use attacker::{Attack, AttackCounts, Attackers, Target};
use clap::Parser;
use honest::{AllSamples, Honest, Samples};
use serde::Serialize;
use serde_json::Value;
use servers::{Resources, Servers};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

#[derive(Debug, Parser)]
pub struct Args {
    /// Duration of the attacks, in seconds. The honest clients also run alone for as long, at most
    /// for a minute. Both run in turns of 10 s and more
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    seconds: u64,
    /// Duration of the attacks, in minutes. Overrides --seconds
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<u64>,
    /// Run only this attack, e.g. `stalled bodies`. May be given several times. Default: all
    #[arg(long, value_name = "NAME")]
    attack: Vec<String>,
    /// Run all attacks but this one. May be given several times
    #[arg(long, value_name = "NAME", conflicts_with = "attack")]
    without: Vec<String>,
    /// Parent directory of the store's data and the servers' logs. L3 uses direct I/O, so it should
    /// be on a real file system
    #[arg(long, default_value = "/var/tmp", value_name = "DIRECTORY")]
    dir: PathBuf,
    /// Print the report as one line of JSON, without progress
    #[arg(long)]
    json: bool,
}

/// Priority of the attackers' threads. In a network the attackers have their own processors.
const ATTACKER_PRIORITY: Priority = Priority::Idle;
/// Maximum of the 99th percentile beside the attackers, as a multiple of that alone.
const P99_RATIO_MAX: f64 = 2.0;
/// Maximum memory of a router or engine beyond its memory alone, in MiB: bodies of 64 MiB, each in
/// two buffers for a moment while one grows, parsed prompts, L1 of an engine, and connections. The
/// attacks do not fill all limits at once, so this is less than the stated maximum.
const MEMORY_BEYOND_ALONE_MAX_MIB: f64 = 256.0;
/// Time of honest requests before the first measurement.
const WARM_UP_TIME: Duration = Duration::from_secs(3);
/// Maximum time alone, of all turns together.
const ALONE_MAX: Duration = Duration::from_secs(60);
/// Minimum time of the attacks in one turn: most deadlines of the servers pass within it.
const TURN_MIN: Duration = Duration::from_secs(10);
const TURNS_MAX: u32 = 6;
/// Maximum time that attacks go on after a measurement until each kind has had an effect. The
/// attackers' threads get little time on busy processors.
const EFFECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after attacks in which servers end the work that these left.
const SETTLE_TIME: Duration = Duration::from_secs(5);
/// Time without requests before the baseline. Idle threads and idle HTTP connections end sooner.
const QUIET_TIME: Duration = Duration::from_secs(12);
/// Maximum time in which all resources must return.
const RETURN_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of looks at the resources.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of lines in the log of a process, per second of the attacks. Each limit logs at
/// most once per ten seconds.
const LOG_LINES_PER_SECOND_MAX: f64 = 5.0;

#[derive(Debug, Serialize)]
struct HostileReport {
    seconds: f64,
    attacks: BTreeMap<&'static str, AttackCounts>,
    requests: BTreeMap<&'static str, RequestReport>,
    processes: BTreeMap<&'static str, ProcessReport>,
    /// Processors that the attackers' threads took.
    attacker_processors: f64,
    /// Processors that the load in their place took.
    control_processors: f64,
    left: NodeUse,
    /// Violated expectations, apart from times.
    failures: Vec<String>,
    /// Requests that took too long beside the attackers.
    slow: Vec<String>,
}

/// Honest requests of one kind. Times are in microseconds.
#[derive(Debug, Serialize)]
struct RequestReport {
    alone: u64,
    beside: u64,
    p50_alone_us: u64,
    p50_beside_us: u64,
    p99_alone_us: u64,
    /// Beside a load that takes the processor time of the attackers' threads.
    p99_control_us: u64,
    p99_beside_us: u64,
    /// The slowest request beside the attackers.
    max_beside_us: u64,
    /// Beside the attackers and alone.
    p99_ratio: f64,
    /// Least and greatest ratio that the number of samples leaves possible.
    p99_ratio_range: [f64; 2],
    /// Beside the attackers and beside the load in their place: the part that the attackers' own
    /// processor time does not explain.
    p99_ratio_to_control: f64,
    /// Requests that servers refused at first and served on a retry.
    refused: u64,
    /// Puts of pages that a stranger had reserved, and gets of these pages.
    missed: u64,
    failed: u64,
    causes: Vec<String>,
    wrong: u64,
}

#[derive(Debug, Serialize)]
struct ProcessReport {
    memory_alone_mib: f64,
    /// Largest resident memory since the start.
    memory_peak_mib: f64,
    /// Maximum that the process states, from its options.
    memory_bound_mib: f64,
    /// Processors taken, children included, while honest clients were alone.
    processors_alone: f64,
    processors_beside: f64,
    /// Threads that waited for a processor, on average. They show how much of the delay of honest
    /// requests is a lack of processors.
    waiting_alone: f64,
    waiting_beside: f64,
    /// Resources beyond those before the attacks that had not returned within a minute.
    left: Resources,
    log_lines: usize,
}

/// Resources of the node that its status tells, in bytes or as a number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct NodeUse {
    bytes_in_flight: u64,
    request_bytes: u64,
    puts_open: u64,
    readers_waiting: u64,
}

impl NodeUse {
    fn of(status: &Value) -> Result<NodeUse> {
        let budget = status["budget"].as_object().context("the node reports no budget")?;
        let bytes = |name: &str| budget.get(name).and_then(|kind| kind["bytes"].as_u64());
        let request_bytes = bytes("requests").context("the node reports no request memory")?;
        let transfers = budget.keys().filter(|name| *name != "requests");
        let count = |name: &str| status[name].as_u64().with_context(|| format!("the node reports no {name}"));
        Ok(NodeUse {
            bytes_in_flight: transfers.filter_map(|name| bytes(name)).sum(),
            request_bytes,
            puts_open: count("puts_open")?,
            readers_waiting: count("readers_waiting")?,
        })
    }

    fn beyond(&self, baseline: &NodeUse) -> NodeUse {
        NodeUse {
            bytes_in_flight: self.bytes_in_flight.saturating_sub(baseline.bytes_in_flight),
            request_bytes: self.request_bytes.saturating_sub(baseline.request_bytes),
            puts_open: self.puts_open.saturating_sub(baseline.puts_open),
            readers_waiting: self.readers_waiting.saturating_sub(baseline.readers_waiting),
        }
    }
}

impl HostileReport {
    fn find_failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        let mut expect = |is_met: bool, failure: String| {
            if !is_met {
                failures.push(failure);
            }
        };
        for (name, AttackCounts { begun, effective, last_error }) in &self.attacks {
            let error = last_error.as_deref().unwrap_or("no error");
            expect(*effective > 0, format!("none of {begun} attacks '{name}' had an effect; the last one: {error}"));
        }
        for (name, RequestReport { beside, failed, wrong, causes, .. }) in &self.requests {
            expect(*wrong == 0, format!("{wrong} {name} had wrong answers"));
            expect(*failed == 0, format!("{failed} {name} failed: {}", causes.join("; ")));
            expect(*beside > 0, format!("no {name} succeeded"));
        }
        for (name, process) in &self.processes {
            let ProcessReport { memory_alone_mib, memory_peak_mib, memory_bound_mib, left, log_lines, .. } = process;
            expect(
                memory_peak_mib <= memory_bound_mib,
                format!("{name} took {memory_peak_mib:.0} MiB of memory; its bound is {memory_bound_mib:.0} MiB"),
            );
            // Alone, a node has not filled L2.
            let grown = memory_peak_mib - memory_alone_mib;
            expect(
                *name == "store" || grown <= MEMORY_BEYOND_ALONE_MAX_MIB,
                format!(
                    "{name} took {grown:.0} MiB more than alone; at most {MEMORY_BEYOND_ALONE_MAX_MIB:.0} are expected"
                ),
            );
            expect(*left == Resources::default(), format!("{name} kept resources: {left:?}"));
            let lines_max = LOG_LINES_PER_SECOND_MAX * self.seconds;
            let is_quiet = *log_lines as f64 <= lines_max;
            expect(is_quiet, format!("{name} logged {log_lines} lines; the bound is {lines_max:.0}"));
        }
        expect(self.left == NodeUse::default(), format!("the node kept resources: {:?}", self.left));
        failures
    }

    fn find_slow(&self) -> Vec<String> {
        let slow = self.requests.iter().filter(|(_, request)| request.p99_ratio > P99_RATIO_MAX);
        let text =
            |(name, RequestReport { p99_ratio, p99_ratio_range: [least, most], .. }): (&&str, &RequestReport)| {
                format!("the 99th percentile of {name} is {p99_ratio:.1} times that alone ({least:.1} to {most:.1})")
            };
        slow.map(text).collect()
    }

    fn check(&self) -> Result<()> {
        let problems = [&self.failures[..], &self.slow[..]].concat();
        if problems.is_empty() { Ok(()) } else { bail!("{}", problems.join("\n")) }
    }
}

pub async fn run(args: Args) -> Result<()> {
    let time = args.minutes.map_or(Duration::from_secs(args.seconds), |minutes| Duration::from_secs(60 * minutes));
    let dir = tempfile::Builder::new().prefix("larder-hostile-").tempdir_in(&args.dir);
    let dir = dir.context("cannot create a directory for the store; choose another --dir")?;
    let processors = rustix::thread::sched_getaffinity(None)?;
    let threads = load_threads(processors, ATTACKER_PRIORITY)?;
    let measured = measure(&args, dir.path(), &threads, time).await;
    threads.shutdown_background();
    let report = measured?;
    match args.json {
        true => say!("{}", serde_json::to_string(&report)?),
        false => print(&report),
    }
    report.check()
}

async fn measure(
    args: &Args,
    dir: &std::path::Path,
    threads: &tokio::runtime::Runtime,
    time: Duration,
) -> Result<HostileReport> {
    let progress = |text: &str| {
        if !args.json {
            say!("{text}");
        }
    };
    let servers = Servers::start(dir).await?;
    let target = Arc::new(Target {
        ports: servers.ports.clone(),
        model_dir: servers.model_dir.clone(),
        next_page: Arc::<AtomicU64>::default(),
        next_prompt: Arc::<AtomicU64>::default(),
        next_value: Arc::<AtomicU64>::default(),
    });
    let attacks = selected_attacks(&args.attack, &args.without)?;
    // The first requests wait for the engines' connections and for the template worker.
    let here = tokio::runtime::Handle::current();
    let Honest { chats, .. } = honest::run(&target, BTreeMap::new(), WARM_UP_TIME, &here).await?;
    let mut turns = Turns::new(&servers, &target, &attacks, threads, chats);
    let times = TurnTimes::of(time);
    progress("honest clients alone …");
    turns.alone(times.alone).await?;
    if attacks.iter().any(|attack| attack.name == templates::NAME) {
        // A router keeps models whose engines have ended, in bounds, and a client of the store with
        // each.
        templates::introduce(&target).await?;
    }
    tokio::time::sleep(QUIET_TIME).await;
    let memory_alone = peak_memory(&servers)?;
    let resources = servers.resources()?;
    let node_use = NodeUse::of(&servers.node_status().await?)?;
    for turn in 1..=times.count {
        progress(&format!("turn {turn} of {}: beside attackers, beside a load in their place, alone …", times.count));
        let recording = turns.beside(times.beside).await?;
        tokio::time::sleep(SETTLE_TIME).await;
        turns.control(times.alone, &recording).await?;
        turns.alone(times.alone).await?;
    }
    progress("waiting until all resources have returned …");
    let (left, node_left) = resources_left(&servers, &resources, &node_use).await?;
    let memory_max = servers.memory_max().await?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut processes = BTreeMap::new();
    let memory = memory_alone.into_iter().zip(peak_memory(&servers)?).zip(memory_max);
    let Turns { mut alone, mut beside, mut control, counts, .. } = turns;
    for (number, ((server, ((alone_bytes, peak), bound)), left)) in servers.all.iter().zip(memory).zip(left).enumerate()
    {
        let report = ProcessReport {
            memory_alone_mib: mib(alone_bytes),
            memory_peak_mib: mib(peak),
            memory_bound_mib: mib(bound),
            processors_alone: alone.processors(number),
            processors_beside: beside.processors(number),
            waiting_alone: alone.waiting(number),
            waiting_beside: beside.waiting(number),
            left,
            log_lines: server.log_lines(),
        };
        processes.insert(server.name, report);
    }
    progress("comparing answers with those of an engine without a cache …");
    for phase in [&mut alone, &mut beside, &mut control] {
        let samples = phase.samples.get_mut("prompts").context("there are samples of prompts")?;
        honest::check_prompts(&target, &phase.prompts, samples).await?;
    }
    let report = HostileReport {
        seconds: beside.seconds,
        attacks: counts,
        attacker_processors: beside.load_seconds / beside.seconds,
        control_processors: control.load_seconds / control.seconds,
        requests: request_reports(alone.samples, control.samples, beside.samples),
        processes,
        left: node_left,
        failures: Vec::new(),
        slow: Vec::new(),
    };
    Ok(HostileReport { failures: report.find_failures(), slow: report.find_slow(), ..report })
}

/// Number of turns, and the time of each part of one. There is one more time alone, before the
/// first turn.
#[derive(Debug, PartialEq, Eq)]
struct TurnTimes {
    count: u32,
    beside: Duration,
    alone: Duration,
}

impl TurnTimes {
    fn of(time: Duration) -> TurnTimes {
        let count = (time.as_secs() / TURN_MIN.as_secs()).clamp(1, u64::from(TURNS_MAX)) as u32;
        TurnTimes { count, beside: time / count, alone: ALONE_MAX.min(time) / (count + 1) }
    }
}

/// Honest requests in the same part of all turns.
#[derive(Debug, Default)]
struct Phase {
    samples: AllSamples,
    prompts: honest::PromptAnswers,
    seconds: f64,
    /// Processor time of each server, in seconds.
    cpu_seconds: Vec<f64>,
    /// Time for which the threads of each server waited for a processor, in seconds.
    waited_seconds: Vec<f64>,
    /// Processor time of the attackers, or of the load in their place, in seconds.
    load_seconds: f64,
}

impl Phase {
    fn add_samples(&mut self, samples: AllSamples) -> Result<()> {
        for (name, samples) in samples {
            match self.samples.entry(name) {
                Entry::Occupied(mut pooled) => pooled.get_mut().add(samples)?,
                Entry::Vacant(first) => {
                    first.insert(samples);
                }
            }
        }
        Ok(())
    }

    /// Processors that a server took.
    fn processors(&self, server: usize) -> f64 {
        self.cpu_seconds.get(server).map_or(0.0, |seconds| seconds / self.seconds)
    }

    /// Threads of a server that waited for a processor, on average.
    fn waiting(&self, server: usize) -> f64 {
        self.waited_seconds.get(server).map_or(0.0, |seconds| seconds / self.seconds)
    }
}

/// Turns of the honest clients: alone, beside the attackers, and beside a load in their place.
struct Turns<'a> {
    servers: &'a Servers,
    target: &'a Arc<Target>,
    attacks: &'a [Attack],
    /// Threads of the attackers.
    threads: &'a tokio::runtime::Runtime,
    chats: honest::ChatAnswers,
    alone: Phase,
    beside: Phase,
    control: Phase,
    counts: BTreeMap<&'static str, AttackCounts>,
    /// Number of the next turn of the attackers.
    next: u64,
}

impl<'a> Turns<'a> {
    fn new(
        servers: &'a Servers,
        target: &'a Arc<Target>,
        attacks: &'a [Attack],
        threads: &'a tokio::runtime::Runtime,
        chats: honest::ChatAnswers,
    ) -> Turns<'a> {
        let [alone, beside, control] = [(); 3].map(|()| Phase::default());
        let counts = BTreeMap::new();
        Turns { servers, target, attacks, threads, chats, alone, beside, control, counts, next: 0 }
    }

    /// Runs the honest clients, and adds what they measured to a phase.
    async fn measure(&mut self, time: Duration, phase: fn(&mut Self) -> &mut Phase) -> Result<()> {
        let (cpu_before, waits_before) = (self.servers.cpu_seconds()?, self.servers.waits()?);
        let begin = Instant::now();
        let chats = std::mem::take(&mut self.chats);
        let here = tokio::runtime::Handle::current();
        let Honest { samples, chats, prompts } = honest::run(self.target, chats, time, &here).await?;
        self.chats = chats;
        let (cpu, waits) = (self.servers.cpu_seconds()?, self.servers.waits()?);
        let phase = phase(self);
        phase.seconds += begin.elapsed().as_secs_f64();
        phase.cpu_seconds.resize(cpu.len(), 0.0);
        for (total, (after, before)) in phase.cpu_seconds.iter_mut().zip(cpu.iter().zip(cpu_before)) {
            *total += after - before;
        }
        phase.waited_seconds.resize(waits.len(), 0.0);
        for (total, (after, before)) in phase.waited_seconds.iter_mut().zip(waits.iter().zip(&waits_before)) {
            *total += cpu::waited(before, after);
        }
        phase.prompts.extend(prompts);
        phase.add_samples(samples)
    }

    async fn alone(&mut self, time: Duration) -> Result<()> {
        self.measure(time, |turns| &mut turns.alone).await
    }

    /// Returns the processor time of the attackers' threads.
    async fn beside(&mut self, time: Duration) -> Result<cpu::Recording> {
        let recorded = CancellationToken::new();
        let recording = cpu::Threads::named(LOAD_THREAD)?.record(recorded.clone());
        let entered = self.threads.enter();
        let attackers = Attackers::start(self.attacks, self.target, self.next);
        drop(entered);
        self.next += 1;
        let measured = self.measure(time, |turns| &mut turns.beside).await;
        attackers.effective(EFFECT_TIMEOUT).await;
        for (name, counts) in attackers.stop().await {
            self.counts.entry(name).or_default().add(counts);
        }
        recorded.cancel();
        let recording = recording.await?;
        self.beside.load_seconds += recording.seconds();
        measured.map(|()| recording)
    }

    /// Runs the honest clients beside threads that take the attackers' processor time.
    async fn control(&mut self, time: Duration, recording: &cpu::Recording) -> Result<()> {
        let stop = CancellationToken::new();
        // The replay ends with this future, too.
        let stop_on_drop = stop.clone().drop_guard();
        let replay = recording.replay(ATTACKER_PRIORITY, &stop)?;
        self.measure(time, |turns| &mut turns.control).await?;
        drop(stop_on_drop);
        self.control.load_seconds += tokio::task::spawn_blocking(|| replay.join()).await?;
        Ok(())
    }
}

/// Returns the attacks of these names, or all, except those `without`.
fn selected_attacks(names: &[String], without: &[String]) -> Result<Vec<Attack>> {
    let mut attacks: Vec<_> =
        [http::attacks(), data::attacks(), redis::attacks(), templates::attacks()].into_iter().flatten().collect();
    for name in names.iter().chain(without) {
        let known: Vec<_> = attacks.iter().map(|attack| attack.name).collect();
        ensure!(known.contains(&name.as_str()), "there is no attack '{name}'; the attacks are: {}", known.join(", "));
    }
    attacks.retain(|attack| names.is_empty() || names.iter().any(|name| name == attack.name));
    attacks.retain(|attack| without.iter().all(|name| name != attack.name));
    Ok(attacks)
}

fn peak_memory(servers: &Servers) -> Result<Vec<u64>> {
    servers.all.iter().map(|server| server.peak_memory()).collect()
}

/// Waits until all resources have returned. Returns those that have not.
async fn resources_left(
    servers: &Servers,
    baseline: &[Resources],
    node_baseline: &NodeUse,
) -> Result<(Vec<Resources>, NodeUse)> {
    let begin = Instant::now();
    loop {
        let now = servers.resources()?;
        let left: Vec<_> = now.iter().zip(baseline).map(|(now, before)| now.beyond(before)).collect();
        let node_left = NodeUse::of(&servers.node_status().await?)?.beyond(node_baseline);
        let has_returned = left.iter().all(|left| *left == Resources::default()) && node_left == NodeUse::default();
        if has_returned || begin.elapsed() > RETURN_TIMEOUT {
            return Ok((left, node_left));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

fn request_reports(
    alone: AllSamples,
    control: AllSamples,
    beside: AllSamples,
) -> BTreeMap<&'static str, RequestReport> {
    let p99 = |samples: &Samples| samples.microseconds.value_at_quantile(0.99);
    let p50 = |samples: &Samples| samples.microseconds.value_at_quantile(0.5);
    let ratio = |above: u64, below: u64| above as f64 / below.max(1) as f64;
    let range = |above: &Samples, below: &Samples| {
        let ([least, most], [below_least, below_most]) = (above.p99_range(), below.p99_range());
        [ratio(least, below_most), ratio(most, below_least)]
    };
    let report = |(((name, alone), control), beside): (((&'static str, Samples), Samples), Samples)| {
        let report = RequestReport {
            alone: alone.microseconds.len(),
            beside: beside.microseconds.len(),
            p50_alone_us: p50(&alone),
            p50_beside_us: p50(&beside),
            p99_alone_us: p99(&alone),
            p99_control_us: p99(&control),
            p99_beside_us: p99(&beside),
            max_beside_us: beside.microseconds.max(),
            p99_ratio: ratio(p99(&beside), p99(&alone)),
            p99_ratio_range: range(&beside, &alone),
            p99_ratio_to_control: ratio(p99(&beside), p99(&control)),
            refused: alone.refused + control.refused + beside.refused,
            missed: alone.missed + control.missed + beside.missed,
            failed: alone.failed + control.failed + beside.failed,
            wrong: alone.wrong + control.wrong + beside.wrong,
            causes: [alone.causes, control.causes, beside.causes].concat(),
        };
        (name, report)
    };
    // All have the same kinds of requests.
    alone.into_iter().zip(control.into_values()).zip(beside.into_values()).map(report).collect()
}

fn print(report: &HostileReport) {
    let HostileReport { seconds, attacks, requests, processes, left, .. } = report;
    let total: u64 = attacks.values().map(|counts| counts.begun).sum();
    say!("\n{total} attacks in {seconds:.0} s\n  {:24} {:>8} {:>9}", "", "begun", "effective");
    for (name, AttackCounts { begun, effective, .. }) in attacks {
        say!("  {name:24} {begun:>8} {effective:>9}");
    }
    say!(
        "\n{:10} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>11} {:>7} {:>8} {:>7} {:>7} {:>6}",
        "requests",
        "number",
        "p50 ms",
        "beside",
        "p99 ms",
        "control",
        "beside",
        "max",
        "ratio",
        "possible",
        "to ctrl",
        "refused",
        "missed",
        "failed",
        "wrong"
    );
    for (name, of) in requests {
        let ms = |us: u64| us as f64 / 1000.0;
        let [least, most] = of.p99_ratio_range;
        let range = format!("{least:.1} to {most:.1}");
        say!(
            "{name:10} {:>7} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>6.2} {range:>11} {:>7.2} {:>8} {:>7} {:>7} {:>6}",
            of.beside,
            ms(of.p50_alone_us),
            ms(of.p50_beside_us),
            ms(of.p99_alone_us),
            ms(of.p99_control_us),
            ms(of.p99_beside_us),
            ms(of.max_beside_us),
            of.p99_ratio,
            of.p99_ratio_to_control,
            of.refused,
            of.missed,
            of.failed,
            of.wrong
        );
    }
    say!(
        "\n{:10} {:>10} {:>9} {:>9} {:>9} {:>7} {:>10} {:>7} {:>8} {:>12} {:>8} {:>9} {:>10}",
        "process",
        "alone MiB",
        "peak MiB",
        "bound MiB",
        "CPU alone",
        "beside",
        "wait alone",
        "beside",
        "sockets",
        "descriptors",
        "threads",
        "children",
        "log lines"
    );
    for (name, of) in processes {
        say!(
            "{name:10} {:>10.0} {:>9.0} {:>9.0} {:>9.3} {:>7.3} {:>10.3} {:>7.3} {:>8} {:>12} {:>8} {:>9} {:>10}",
            of.memory_alone_mib,
            of.memory_peak_mib,
            of.memory_bound_mib,
            of.processors_alone,
            of.processors_beside,
            of.waiting_alone,
            of.waiting_beside,
            of.left.sockets,
            of.left.descriptors,
            of.left.threads,
            of.left.children,
            of.log_lines
        );
    }
    say!("{:10} {:>50.3}  (in the control {:.3})", "attackers", report.attacker_processors, report.control_processors);
    let NodeUse { bytes_in_flight, request_bytes, puts_open, readers_waiting } = left;
    say!(
        "\nleft in the node: {bytes_in_flight} bytes in flight, {request_bytes} bytes of requests, {puts_open} puts, {readers_waiting} readers"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_share_the_time() {
        let seconds = Duration::from_secs;
        let times = |count, beside, alone| TurnTimes { count, beside: seconds(beside), alone: seconds(alone) };
        assert_eq!(TurnTimes::of(seconds(6)), times(1, 6, 3));
        assert_eq!(TurnTimes::of(seconds(21)), TurnTimes { beside: seconds(21) / 2, ..times(2, 0, 7) });
        assert_eq!(TurnTimes::of(seconds(600)), TurnTimes { alone: seconds(60) / 7, ..times(6, 100, 0) });
    }

    #[test]
    fn few_samples_leave_a_wide_range() {
        let uniform = |count: u64| {
            let mut samples = Samples::new().unwrap();
            (1..=count).for_each(|number| samples.microseconds.record(100_000 * number / count).unwrap());
            samples
        };
        // Three digits of a histogram are exact.
        let [least, most] = uniform(10_000).p99_range();
        assert!((98_600..98_900).contains(&least) && (99_100..99_300).contains(&most), "{least} {most}");
        let [least, most] = uniform(200).p99_range();
        assert!((97_000..98_500).contains(&least) && most >= 100_000, "{least} {most}");
        assert_eq!(Samples::new().unwrap().p99_range(), [0, 0]);
    }

    #[test]
    fn samples_of_turns_count_together() {
        let turn = |microseconds, failed| {
            let mut samples = Samples::new().unwrap();
            samples.microseconds.record(microseconds).unwrap();
            AllSamples::from([("gets", Samples { failed, ..samples })])
        };
        let mut phase = Phase::default();
        for (microseconds, failed) in [(100, 1), (300, 0), (200, 2)] {
            phase.add_samples(turn(microseconds, failed)).unwrap();
        }
        let gets = &phase.samples["gets"];
        assert_eq!((gets.microseconds.len(), gets.microseconds.value_at_quantile(0.5), gets.failed), (3, 200, 3));
    }
}
