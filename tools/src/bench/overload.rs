//! Overload test: offers a store node ten times its capacity.
//!
//! The node passes if its memory stays within its budgets, its goodput stays close to its capacity,
//! and refusals are immediate. Three kinds of clients run besides the regular ones:
//!
//! - clients that request pages and never read them,
//! - clients that disconnect in the middle of a put,
//! - a probe that measures the latency of refusals on its own connection.
//!
//! The node is a child process. It and the load generator each use half of the machine's
//! processors.

pub mod connection;
mod misbehaving;
pub mod node;
mod workload;

use crate::output::say;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use node::{CpuSeconds, NodeProcess};
use rustix::thread::CpuSet;
use serde::Serialize;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;
use workload::{LoadTotals, Workload};

#[derive(Debug, Parser)]
pub struct Args {
    /// Duration of the overload, in seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    seconds: u64,
    /// Duration of the overload, in minutes. Overrides --seconds
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<u64>,
    /// Print the report as one line of JSON, without progress
    #[arg(long)]
    json: bool,
}

/// Offered load, as a multiple of the capacity measured before. The node must then refuse most
/// operations.
const OVERLOAD_FACTOR: f64 = 10.0;
/// Minimum multiple that must actually be offered for the result to count. Below it the load
/// generator was the bottleneck.
const OVERLOAD_FACTOR_MIN: f64 = 7.0;
const CONCURRENCY_LEVELS: [usize; 4] = [2, 4, 8, 16];
const LEVEL_DURATION: Duration = Duration::from_secs(2);
const RSS_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum goodput under overload, as a share of the capacity. Below it, refusing operations costs
/// the node too much.
const GOODPUT_MIN: f64 = 0.8;
/// Minimum goodput after the overload, as a share of the mean of before and after. Test machines
/// vary by less than that.
const RECOVERED_GOODPUT_MIN: f64 = 0.5;
/// Maximum resident memory, as a share of the budget. A higher value means that some memory has no
/// budget.
const RSS_MAX: f64 = 1.05;
/// Maximum percentage of refusals that take the node longer than a millisecond.
const LATE_PERCENT_MAX: f64 = 1.0;
/// Maximum 99th percentile of the refusal latency that the probe measures. On a machine without an
/// idle processor the probe itself waits to be scheduled, so this limit is generous. The node's own
/// figure is the measure, and the probe guards against a wrong figure.
const PROBE_P99_MAX: Duration = Duration::from_millis(25);

#[derive(Debug, Serialize)]
struct OverloadReport {
    /// Capacity: best goodput without overload, in MB/s (1e6). Counts verified bytes of gets and
    /// bytes of puts. Mean of before and after, because the speed of the machine drifts.
    best_mb_s: f64,
    best_after_mb_s: f64,
    goodput_mb_s: f64,
    /// Operations started per second, as a multiple of those at the best goodput.
    load_factor: f64,
    /// Processor time of the node and of the load generator, in milliseconds per GB (1e9) of
    /// goodput, at the best goodput and under overload.
    node_cpu_best_ms_gb: f64,
    node_cpu_ms_gb: f64,
    load_cpu_best_ms_gb: f64,
    load_cpu_ms_gb: f64,
    pages_read: u64,
    pages_put: u64,
    pages_busy: u64,
    /// Pages that the node gave up at their deadline, and those that came after it. Each was work
    /// for nothing.
    pages_missed: u64,
    pages_read_late: u64,
    pages_put_late: u64,
    wrong_bytes: u64,
    /// Regular clients that the node disconnected. It takes a client that reads nothing for a
    /// second for stalled, so this is 0 unless the machine starves the load generator.
    connections_lost: u64,
    /// Peak resident memory of the node under overload, and its budget.
    rss_max_mib: f64,
    rss_budget_mib: f64,
    /// Refusals counted by the node. Late ones took more than a millisecond to reach the socket,
    /// measured from the later of two events: the request was read, or earlier pages for the same
    /// client were sent.
    refusals: u64,
    refusals_late: u64,
    probe_refusals: u64,
    probe_p50_us: u64,
    probe_p99_us: u64,
    readers_disconnected: u64,
    disconnected: u64,
    /// Bytes that the node still counted as in flight after all clients had left. Anything but 0 is
    /// a leak of a budget.
    bytes_in_flight: u64,
}

impl OverloadReport {
    fn check(&self) -> Result<()> {
        ensure!(self.wrong_bytes == 0, "{} pages had wrong bytes", self.wrong_bytes);
        ensure!(
            self.load_factor >= OVERLOAD_FACTOR_MIN,
            "the offered load was only {:.1} times the capacity",
            self.load_factor
        );
        ensure!(
            self.connections_lost == 0,
            "the node disconnected {} clients that read their answers",
            self.connections_lost
        );
        let rss = self.rss_max_mib / self.rss_budget_mib;
        ensure!(
            rss <= RSS_MAX,
            "resident memory is {:.0} MiB, the budget is {:.0} MiB",
            self.rss_max_mib,
            self.rss_budget_mib
        );
        let goodput = self.goodput_mb_s / self.best_mb_s;
        ensure!(goodput >= GOODPUT_MIN, "goodput under overload is {:.0} % of the capacity", goodput * 100.0);
        let after = self.best_after_mb_s / self.best_mb_s;
        ensure!(
            after >= RECOVERED_GOODPUT_MIN,
            "goodput after the overload is {:.0} % of the mean of before and after",
            after * 100.0
        );
        let late = self.refusals_late as f64 * 100.0 / self.refusals.max(1) as f64;
        ensure!(
            self.refusals > 0 && late <= LATE_PERCENT_MAX,
            "{late:.2} % of {} refusals took more than 1 ms",
            self.refusals
        );
        let p99 = Duration::from_micros(self.probe_p99_us);
        ensure!(
            self.probe_refusals >= 100,
            "the probe was refused only {} times, too few to judge",
            self.probe_refusals
        );
        ensure!(p99 <= PROBE_P99_MAX, "the probe measures {p99:?} for the 99th percentile of refusals");
        ensure!(
            self.bytes_in_flight == 0,
            "the node still counts {} bytes as in flight after all clients left",
            self.bytes_in_flight
        );
        Ok(())
    }
}

pub async fn run(args: Args) -> Result<()> {
    let time = args.minutes.map_or(Duration::from_secs(args.seconds), |minutes| Duration::from_secs(60 * minutes));
    let [node_cpus, workload_cpus] = split_processors()?;
    let threads = load_threads(workload_cpus, 0)?;
    let report = measure(&args, node_cpus, &threads, time).await;
    threads.shutdown_background();
    let report = report?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?);
    } else {
        say!("{}", serde_json::to_string_pretty(&report)?);
    }
    report.check()
}

/// Returns the processors of the node and of the load generator. With a single processor they share
/// it.
pub fn split_processors() -> Result<[CpuSet; 2]> {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&number| allowed.is_set(number)).collect();
    let of = |numbers: &[usize]| {
        let mut half = CpuSet::new();
        numbers.iter().for_each(|&number| half.set(number));
        half
    };
    let (node, load) = processors.split_at(processors.len() / 2);
    Ok([of(if node.is_empty() { load } else { node }), of(load)])
}

/// Starts the threads of the load generator, bound to their processors. The node has others where
/// the machine has at least two, so the load cannot starve it. `niceness` is that of the threads.
pub fn load_threads(processors: CpuSet, niceness: i32) -> Result<Runtime> {
    // Tried on this thread first: the threads cannot report an error when they start.
    let here = rustix::thread::sched_getaffinity(None)?;
    rustix::thread::sched_setaffinity(None, &processors).context("cannot bind the load generator to its processors")?;
    rustix::thread::sched_setaffinity(None, &here)?;
    let stay = move || {
        let _ = rustix::thread::sched_setaffinity(None, &processors);
        // Without an argument Linux changes the calling thread only.
        let _ = rustix::process::setpriority_process(None, niceness);
    };
    let threads = processors.count() as usize;
    Ok(Builder::new_multi_thread().worker_threads(threads).on_thread_start(stay).enable_all().build()?)
}

async fn measure(args: &Args, node_cpus: CpuSet, threads: &Runtime, time: Duration) -> Result<OverloadReport> {
    let node = NodeProcess::start(None, node_cpus, &node::OPTIONS).await?;
    let address = node.address().to_string();
    let json = args.json;
    let cpu = node.cpu_clock();
    let measured = threads.spawn(async move {
        let mut load = Workload::attach(&address).await?;
        let mut best = 0.0;
        let mut concurrency = CONCURRENCY_LEVELS[0];
        for level in CONCURRENCY_LEVELS {
            let (goodput, _) = load.sustained(level, LEVEL_DURATION).await?;
            if !json {
                say!("{level:>3} concurrent operations: {:.0} MB/s", goodput / 1e6);
            }
            if goodput > best {
                (best, concurrency) = (goodput, level);
            }
        }
        // Measured again: the best of several tries overstates the capacity.
        let before = cpu.now()?;
        let (goodput, operations) = load.sustained(concurrency, LEVEL_DURATION).await?;
        let cpu = cpu.now()?.since(before);
        let gigabytes = load.counters.totals().bytes as f64 / 1e9;
        anyhow::Ok((load, Sustained { concurrency, goodput, operations, gigabytes, cpu }))
    });
    let (load, best) = measured.await??;
    overload(&node, threads, load, best, time).await
}

struct Sustained {
    concurrency: usize,
    goodput: f64,
    operations: f64,
    gigabytes: f64,
    cpu: CpuSeconds,
}

async fn overload(
    node: &NodeProcess,
    threads: &Runtime,
    mut load: Workload,
    best: Sustained,
    time: Duration,
) -> Result<OverloadReport> {
    let stop = CancellationToken::new();
    let before = node.counters().await?;
    let entered = threads.enter();
    let misbehaving_clients = misbehaving::start(node.address(), &stop);
    let probe = misbehaving::probe(node.address(), &stop);
    drop(entered);
    load.counters.reset();
    let begin = Instant::now();
    let cpu_before = node.cpu_clock().now()?;
    let offering = threads.spawn(async move {
        let offered = load.offer(best.operations * OVERLOAD_FACTOR, time).await?;
        anyhow::Ok((load, offered))
    });
    let mut rss_max = 0;
    while !offering.is_finished() {
        tokio::time::sleep(RSS_INTERVAL).await;
        rss_max = rss_max.max(node.rss().unwrap_or(0));
    }
    let (mut load, offered) = offering.await??;
    let seconds = begin.elapsed().as_secs_f64();
    let totals: LoadTotals = load.counters.totals();
    let cpu = node.cpu_clock().now()?.since(cpu_before);
    let gigabytes = totals.bytes as f64 / 1e9;
    stop.cancel();
    load.wait_idle().await?;
    let disconnected = misbehaving_clients.await?;
    let times = probe.await??;
    let after = node.counters().await?;
    let bytes_in_flight = node.bytes_in_flight().await?;
    let again = threads.spawn(async move {
        let (goodput, _) = load.sustained(best.concurrency, LEVEL_DURATION).await?;
        load.wait_idle().await?;
        anyhow::Ok(goodput)
    });
    let again = again.await??;
    let bytes_in_flight = bytes_in_flight.max(node.bytes_in_flight().await?);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let count = |name: &str| {
        let counted = after.get(name).zip(before.get(name)).and_then(|(after, before)| after.checked_sub(before));
        counted.with_context(|| format!("the node reports no counter {name}"))
    };
    Ok(OverloadReport {
        best_mb_s: (best.goodput + again) / 2e6,
        best_after_mb_s: again / 1e6,
        goodput_mb_s: totals.bytes as f64 / seconds / 1e6,
        load_factor: offered as f64 / seconds / best.operations,
        node_cpu_best_ms_gb: best.cpu.node * 1e3 / best.gigabytes,
        node_cpu_ms_gb: cpu.node * 1e3 / gigabytes,
        load_cpu_best_ms_gb: best.cpu.load * 1e3 / best.gigabytes,
        load_cpu_ms_gb: cpu.load * 1e3 / gigabytes,
        pages_read: totals.read_pages,
        pages_put: totals.put,
        pages_busy: totals.busy,
        pages_missed: totals.missed,
        pages_read_late: totals.late_reads,
        pages_put_late: totals.late_puts,
        wrong_bytes: totals.wrong,
        connections_lost: totals.connections_lost,
        rss_max_mib: mib(rss_max),
        rss_budget_mib: mib(node::BUDGET_BYTES),
        refusals: count("refusals")?,
        refusals_late: count("refusals_late")?,
        probe_refusals: times.len(),
        probe_p50_us: times.value_at_quantile(0.5),
        probe_p99_us: times.value_at_quantile(0.99),
        readers_disconnected: count("slow_readers_disconnected")?,
        disconnected,
        bytes_in_flight,
    })
}
