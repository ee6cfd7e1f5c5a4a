//! A store node is asked for ten times what it can do.
//!
//! What must be seen: its memory stays within its budgets, what it does remains nearly what it can do, and what it refuses
//! it refuses at once. Beside clients that behave there are some that never read what they asked for, some that vanish in the
//! middle of what they send, and a probe that times refusals on a connection of its own.
//!
//! The node is a process of its own; the load is made by this one, on the other half of the machine's processors.

mod bad;
mod line;
mod load;
mod node;

use crate::output::say;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use load::{Load, Tally};
use node::Process;
use rustix::thread::CpuSet;
use serde::Serialize;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

/// Settings of the overload.
#[derive(Debug, Parser)]
pub struct Args {
    /// Seconds of overload
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    seconds: u64,
    /// Minutes of overload, instead
    #[arg(long)]
    minutes: Option<u64>,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// How much more is asked for than can be done.
const TIMES: f64 = 10.0;
/// Least part of that which is to be offered in fact.
const TIMES_MIN: f64 = 7.0;
/// Operations at a time among which the best goodput is looked for, and for how long each.
const LEVELS: [usize; 4] = [2, 4, 8, 16];
const LEVEL_TIME: Duration = Duration::from_secs(2);
const RSS_EVERY: Duration = Duration::from_millis(100);
/// Least goodput, of the best.
const GOODPUT_MIN: f64 = 0.8;
/// Least that a node does when the overload is over, of the mean of before and after: less is more than these machines differ by.
const AFTER_MIN: f64 = 0.5;
/// Most resident memory, of the budget.
const RSS_MAX: f64 = 1.05;
/// Refusals that may take longer than a millisecond in the node, of 100.
const LATE_PERCENT_MAX: f64 = 1.0;
/// Most time of 99 of 100 refusals as the probe sees them. It has to be given a processor as well, twice for each, on a machine
/// that has none to spare: the node's own figure is the measure, and this guards it against measuring the wrong thing.
const PROBE_P99_MAX: Duration = Duration::from_millis(25);

/// What was seen.
#[derive(Debug, Serialize)]
struct Seen {
    /// Best goodput without overload, in MB/s (1e6): bytes put and bytes had, checked. The mean of before and after: how much this
    /// machine does differs from one moment to another.
    best_mb_s: f64,
    /// Of these two, that after.
    best_after_mb_s: f64,
    /// Goodput under overload.
    goodput_mb_s: f64,
    /// Operations begun, of those that make the best goodput.
    load_times: f64,
    pages_had: u64,
    pages_put: u64,
    pages_busy: u64,
    pages_missed: u64,
    wrong_bytes: u64,
    /// Most resident memory of the node under overload, and its budget.
    rss_max_mib: f64,
    rss_budget_mib: f64,
    /// Busy answers as the node counts them, and those that took more than a millisecond to the socket, from when the request was
    /// read or the pages ahead for the same client had left.
    refusals: u64,
    refusals_late: u64,
    /// Busy answers as the probe times them.
    probe_refusals: u64,
    probe_p50_us: u64,
    probe_p99_us: u64,
    /// Readers that took nothing and were disconnected.
    readers_given_up: u64,
    /// Clients that vanished half-way.
    vanished: u64,
    /// Bytes under way when all had left.
    left_over: u64,
}

impl Seen {
    fn verdict(&self) -> Result<()> {
        ensure!(self.wrong_bytes == 0, "{} pages were wrong", self.wrong_bytes);
        ensure!(self.load_times >= TIMES_MIN, "the load was only {:.1} times what can be done", self.load_times);
        let rss = self.rss_max_mib / self.rss_budget_mib;
        ensure!(rss <= RSS_MAX, "{:.0} MiB are resident, of a budget of {:.0}", self.rss_max_mib, self.rss_budget_mib);
        let goodput = self.goodput_mb_s / self.best_mb_s;
        ensure!(goodput >= GOODPUT_MIN, "the goodput is {:.0} % of the best", goodput * 100.0);
        let after = self.best_after_mb_s / self.best_mb_s;
        ensure!(after >= AFTER_MIN, "after it, the node does {:.0} % of what it did before and after", after * 100.0);
        let late = self.refusals_late as f64 * 100.0 / self.refusals.max(1) as f64;
        ensure!(self.refusals > 0 && late <= LATE_PERCENT_MAX, "{late:.2} % of {} refusals are late", self.refusals);
        let p99 = Duration::from_micros(self.probe_p99_us);
        ensure!(self.probe_refusals >= 100, "the probe was refused only {} times", self.probe_refusals);
        ensure!(p99 <= PROBE_P99_MAX, "a refusal takes {p99:?} at the probe");
        ensure!(self.left_over == 0, "{} bytes are still counted as under way", self.left_over);
        Ok(())
    }
}

/// Runs it. Fails if anything is not as it must be.
pub async fn run(args: Args) -> Result<()> {
    let time = args.minutes.map_or(Duration::from_secs(args.seconds), |minutes| Duration::from_secs(60 * minutes));
    let [for_node, for_load] = halves()?;
    let threads = load_threads(for_load)?;
    let seen = see(&args, for_node, &threads, time).await;
    threads.shutdown_background();
    let seen = seen?;
    if args.json {
        say!("{}", serde_json::to_string(&seen)?);
    } else {
        say!("{}", serde_json::to_string_pretty(&seen)?);
    }
    seen.verdict()
}

/// The halves of this machine: the node's and the load's, as if each had one of its own; with one processor, they share it.
fn halves() -> Result<[CpuSet; 2]> {
    let ours = rustix::thread::sched_getaffinity(None)?;
    let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&number| ours.is_set(number)).collect();
    let of = |numbers: &[usize]| {
        let mut half = CpuSet::new();
        numbers.iter().for_each(|&number| half.set(number));
        half
    };
    let (node, load) = processors.split_at(processors.len() / 2);
    Ok([of(if node.is_empty() { load } else { node }), of(load)])
}

/// What the load is made with.
fn load_threads(processors: CpuSet) -> Result<Runtime> {
    let here = rustix::thread::sched_getaffinity(None)?;
    rustix::thread::sched_setaffinity(None, &processors).context("the load must stay on its processors")?;
    rustix::thread::sched_setaffinity(None, &here)?;
    let stay = move || {
        let _ = rustix::thread::sched_setaffinity(None, &processors);
    };
    let threads = processors.count() as usize;
    Ok(Builder::new_multi_thread().worker_threads(threads).on_thread_start(stay).enable_all().build()?)
}

async fn see(args: &Args, for_node: CpuSet, threads: &Runtime, time: Duration) -> Result<Seen> {
    let node = Process::start(for_node).await?;
    let (address, json) = (node.address().to_string(), args.json);
    let measured = threads.spawn(async move {
        let mut load = Load::attach(&address).await?;
        let (mut best, mut at_a_time) = (0.0, LEVELS[0]);
        for level in LEVELS {
            let (goodput, _) = load.sustained(level, LEVEL_TIME).await?;
            if !json {
                say!("{level:>3} operations at a time: {:.0} MB/s", goodput / 1e6);
            }
            if goodput > best {
                (best, at_a_time) = (goodput, level);
            }
        }
        // Once more: the best of several is better than it is.
        let (goodput, operations) = load.sustained(at_a_time, LEVEL_TIME).await?;
        anyhow::Ok((load, Sustained { at_a_time, goodput, operations }))
    });
    let (load, best) = measured.await??;
    overload(&node, threads, load, best, time).await
}

/// What can be done: with how many operations at a time, and bytes and operations per second.
struct Sustained {
    at_a_time: usize,
    goodput: f64,
    operations: f64,
}

async fn overload(node: &Process, threads: &Runtime, mut load: Load, best: Sustained, time: Duration) -> Result<Seen> {
    let stop = CancellationToken::new();
    let before = node.counters().await?;
    let (bad, probe) = {
        let _theirs = threads.enter();
        (bad::start(node.address(), &stop), bad::probe(node.address(), &stop))
    };
    load.tally.reset();
    let begin = Instant::now();
    let offering = threads.spawn(async move {
        let offered = load.offer(best.operations * TIMES, time).await?;
        anyhow::Ok((load, offered))
    });
    let mut rss_max = 0;
    while !offering.is_finished() {
        tokio::time::sleep(RSS_EVERY).await;
        rss_max = rss_max.max(node.rss().unwrap_or(0));
    }
    let (mut load, offered) = offering.await??;
    let seconds = begin.elapsed().as_secs_f64();
    let tally: Tally = load.tally.read();
    stop.cancel();
    load.rest().await?;
    let vanished = bad.await?;
    let times = probe.await??;
    let after = node.counters().await?;
    let left_over = node.left_over().await?;
    let again = threads.spawn(async move {
        let (goodput, _) = load.sustained(best.at_a_time, LEVEL_TIME).await?;
        load.rest().await?;
        anyhow::Ok(goodput)
    });
    let again = again.await??;
    let left_over = left_over.max(node.left_over().await?);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let count = |name: &str| {
        let counted = after.get(name).zip(before.get(name)).and_then(|(after, before)| after.checked_sub(before));
        counted.with_context(|| format!("the node does not count {name}"))
    };
    Ok(Seen {
        best_mb_s: (best.goodput + again) / 2e6,
        best_after_mb_s: again / 1e6,
        goodput_mb_s: tally.bytes as f64 / seconds / 1e6,
        load_times: offered as f64 / seconds / best.operations,
        pages_had: tally.had,
        pages_put: tally.put,
        pages_busy: tally.busy,
        pages_missed: tally.missed,
        wrong_bytes: tally.wrong,
        rss_max_mib: mib(rss_max),
        rss_budget_mib: mib(node::BUDGET_BYTES),
        refusals: count("refusals")?,
        refusals_late: count("refusals_late")?,
        probe_refusals: times.len(),
        probe_p50_us: times.value_at_quantile(0.5),
        probe_p99_us: times.value_at_quantile(0.99),
        readers_given_up: count("readers_given_up")?,
        vanished,
        left_over,
    })
}
