//! Overload test: offers a store node ten times its capacity.
//!
//! The node passes if its memory stays within the plan that it states, its goodput stays close to
//! its capacity, and refusals are immediate. Three kinds of clients run besides the regular ones:
//!
//! - clients that request pages and never read them,
//! - clients that disconnect in the middle of a put,
//! - a probe that measures the latency of refusals on its own connection.
//!
//! The node is a child process. It and the load generator each use half of the machine's
//! processors.

pub mod connection;
mod counters;
mod misbehaving;
pub mod node;
mod workload;

use crate::output::say;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use counters::LoadTotals;
use hdrhistogram::Histogram;
pub use node::TICKS_PER_SECOND;
use node::{Counters, CpuSeconds, NodeProcess};
use rustix::thread::CpuSet;
use serde::Serialize;
use std::time::{Duration, Instant};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy, thread_native_id,
};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;
use workload::Workload;

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
/// Duration of one measurement of the capacity, before and after each slice of overload.
const BEST_DURATION: Duration = Duration::from_secs(1);
/// Length of a slice of overload, up to [`SLICES_MAX`] of them. The speed of a virtual machine can
/// halve from one second to the next, so both sides of the ratio alternate. The node needs a second
/// to disconnect the clients that read nothing, so a slice must be longer than that.
const SLICE: Duration = Duration::from_millis(2500);
/// Maximum number of slices. A longer overload has longer ones.
const SLICES_MAX: f64 = 12.0;
const RSS_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum goodput under overload, as a share of the capacity. Below it, refusing operations costs
/// the node too much.
const GOODPUT_MIN: f64 = 0.8;
/// Minimum goodput after the overload, as a share of the mean of all measurements. Test machines
/// vary by less than that.
const RECOVERED_GOODPUT_MIN: f64 = 0.5;
/// Maximum percentage of refusals that take the node longer than a millisecond.
const LATE_PERCENT_MAX: f64 = 1.0;
/// Maximum 99th percentile of the refusal latency that the probe measures. On a machine without an
/// idle processor the probe itself waits to be scheduled, so this limit is generous. The node's own
/// figure is the measure, and the probe guards against a wrong figure.
const PROBE_P99_MAX: Duration = Duration::from_millis(25);

#[derive(Debug, Serialize)]
struct OverloadReport {
    /// Capacity: best goodput without overload, in MB/s (1e6). Counts verified bytes of gets and
    /// bytes of puts. Mean of the measurements before, between and after the slices of overload.
    best_mb_s: f64,
    best_after_mb_s: f64,
    goodput_mb_s: f64,
    /// Share of puts in the bytes of both, in percent. A put and a get differ in cost, so the two
    /// goodputs compare only while these shares are close.
    best_put_percent: f64,
    put_percent: f64,
    /// Operations started per second, as a multiple of those at the best goodput just before.
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
    /// Peak resident memory of the node under overload, and the most that its plan states. Memory
    /// beyond the plan has no bound.
    rss_max_mib: f64,
    memory_plan_mib: f64,
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
        ensure!(
            self.rss_max_mib <= self.memory_plan_mib,
            "resident memory is {:.1} MiB, and the node's plan states at most {:.1} MiB",
            self.rss_max_mib,
            self.memory_plan_mib
        );
        let goodput = self.goodput_mb_s / self.best_mb_s;
        ensure!(goodput >= GOODPUT_MIN, "goodput under overload is {:.0} % of the capacity", goodput * 100.0);
        let after = self.best_after_mb_s / self.best_mb_s;
        ensure!(
            after >= RECOVERED_GOODPUT_MIN,
            "goodput after the overload is {:.0} % of the mean capacity",
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
    let threads = load_threads(workload_cpus, Priority::Nice(0))?;
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

/// Priority of a thread that makes load.
#[derive(Debug, Clone, Copy)]
pub enum Priority {
    Nice(i32),
    /// Runs only where no other thread wants the processor, and gives way at once to one that wakes
    /// up. A thread of the lowest nice value would first use up its time slice of milliseconds.
    Idle,
}

impl Priority {
    /// Gives the calling thread this priority. A thread that may not change it keeps its own.
    pub fn apply(self) {
        match self {
            // Without an argument Linux changes the calling thread only.
            Priority::Nice(niceness) => drop(rustix::process::setpriority_process(None, niceness)),
            Priority::Idle => {
                let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
                drop(set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy));
            }
        }
    }
}

/// Name of the threads of the load generator.
pub const LOAD_THREAD: &str = "load";

/// Starts the threads of the load generator, bound to their processors. The node has others where
/// the machine has at least two, so the load cannot starve it.
pub fn load_threads(processors: CpuSet, priority: Priority) -> Result<Runtime> {
    // Tried on this thread first: the threads cannot report an error when they start.
    let here = rustix::thread::sched_getaffinity(None)?;
    rustix::thread::sched_setaffinity(None, &processors).context("cannot bind the load generator to its processors")?;
    rustix::thread::sched_setaffinity(None, &here)?;
    let stay = move || {
        let _ = rustix::thread::sched_setaffinity(None, &processors);
        priority.apply();
    };
    let threads = processors.count() as usize;
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name(LOAD_THREAD).on_thread_start(stay);
    Ok(builder.enable_all().build()?)
}

async fn measure(args: &Args, node_cpus: CpuSet, threads: &Runtime, time: Duration) -> Result<OverloadReport> {
    let node = NodeProcess::start(None, node_cpus, &node::OPTIONS).await?;
    let address = node.address().to_string();
    let json = args.json;
    let chosen = threads.spawn(async move {
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
        anyhow::Ok((load, concurrency))
    });
    let (load, concurrency) = chosen.await??;
    let before = node.counters().await?;
    let mut run = Run { node: &node, threads, concurrency, best: Vec::new(), slices: Vec::new() };
    // Measured again: the best of several tries overstates the capacity.
    let mut load = run.measure_best(load).await?;
    let slices = (time.as_secs_f64() / SLICE.as_secs_f64()).ceil().clamp(1.0, SLICES_MAX);
    for _ in 0..slices as usize {
        load = run.overload(load, time.div_f64(slices)).await?;
        load = run.measure_best(load).await?;
    }
    run.report(&before).await
}

/// Alternating phases of one run: best, overload, best, and so on.
struct Run<'a> {
    node: &'a NodeProcess,
    threads: &'a Runtime,
    /// Concurrent operations at the best goodput.
    concurrency: usize,
    best: Vec<Best>,
    slices: Vec<Slice>,
}

/// One phase without overload.
struct Best {
    goodput: f64,
    operations: f64,
    totals: LoadTotals,
    cpu: CpuSeconds,
}

/// One phase of overload.
struct Slice {
    seconds: f64,
    totals: LoadTotals,
    cpu: CpuSeconds,
    /// Operations started, and those at the best goodput in the same time.
    offered: u64,
    capacity: f64,
    rss_max: u64,
    bytes_in_flight: u64,
    disconnected: u64,
    probe_times: Histogram<u64>,
}

impl Run<'_> {
    async fn measure_best(&mut self, mut load: Workload) -> Result<Workload> {
        let concurrency = self.concurrency;
        let before = self.node.cpu_clock().now()?;
        let sustained = self.threads.spawn(async move {
            let (goodput, operations) = load.sustained(concurrency, BEST_DURATION).await?;
            load.wait_idle().await?;
            anyhow::Ok((load, goodput, operations))
        });
        let (load, goodput, operations) = sustained.await??;
        let cpu = self.node.cpu_clock().now()?.since(before);
        let totals = load.counters.totals();
        self.best.push(Best { goodput, operations, totals, cpu });
        Ok(load)
    }

    async fn overload(&mut self, mut load: Workload, time: Duration) -> Result<Workload> {
        let node = self.node;
        let operations = self.best.last().context("the best goodput is measured first")?.operations;
        let stop = CancellationToken::new();
        let entered = self.threads.enter();
        let misbehaving_clients = misbehaving::start(node.address(), &stop);
        let probe = misbehaving::probe(node.address(), &stop);
        drop(entered);
        load.counters.reset();
        let begin = Instant::now();
        let cpu_before = node.cpu_clock().now()?;
        let mut offering = self.threads.spawn(async move {
            let offered = load.offer(operations * OVERLOAD_FACTOR, time).await?;
            anyhow::Ok((load, offered))
        });
        let mut rss_max = 0;
        // Not polled: time after the last operation would count as time of the overload.
        let (mut load, offered) = loop {
            match tokio::time::timeout(RSS_INTERVAL, &mut offering).await {
                Ok(offered) => break offered??,
                Err(_) => rss_max = rss_max.max(node.rss().unwrap_or(0)),
            }
        };
        let seconds = begin.elapsed().as_secs_f64();
        let totals = load.counters.totals();
        let cpu = node.cpu_clock().now()?.since(cpu_before);
        stop.cancel();
        load.wait_idle().await?;
        let disconnected = misbehaving_clients.await?;
        let probe_times = probe.await??;
        let bytes_in_flight = node.bytes_in_flight().await?;
        let capacity = operations * seconds;
        self.slices.push(Slice {
            seconds,
            totals,
            cpu,
            offered,
            capacity,
            rss_max,
            bytes_in_flight,
            disconnected,
            probe_times,
        });
        Ok(load)
    }

    async fn report(self, before: &Counters) -> Result<OverloadReport> {
        let after = self.node.counters().await?;
        let at_end = self.node.bytes_in_flight().await?;
        let memory_plan = self.node.memory_plan().await?;
        let Run { best, slices, .. } = &self;
        let mut probe_times = Histogram::<u64>::new(3)?;
        for slice in slices {
            probe_times.add(&slice.probe_times)?;
        }
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let count = |name: &str| {
            let counted = after.get(name).zip(before.get(name)).and_then(|(after, before)| after.checked_sub(before));
            counted.with_context(|| format!("the node reports no counter {name}"))
        };
        let pages = |of: fn(&LoadTotals) -> u64| slices.iter().map(|slice| of(&slice.totals)).sum::<u64>();
        let best_bytes = best.iter().map(|best| best.totals.bytes()).sum::<u64>() as f64;
        let best_put_bytes = best.iter().map(|best| best.totals.put_bytes).sum::<u64>() as f64;
        let best_cpu = |of: fn(&CpuSeconds) -> f64| best.iter().map(|best| of(&best.cpu)).sum::<f64>();
        let cpu = |of: fn(&CpuSeconds) -> f64| slices.iter().map(|slice| of(&slice.cpu)).sum::<f64>();
        let bytes = pages(LoadTotals::bytes) as f64;
        let seconds: f64 = slices.iter().map(|slice| slice.seconds).sum();
        let capacity: f64 = slices.iter().map(|slice| slice.capacity).sum();
        Ok(OverloadReport {
            best_mb_s: best.iter().map(|best| best.goodput).sum::<f64>() / best.len() as f64 / 1e6,
            best_after_mb_s: best.last().map_or(0.0, |best| best.goodput) / 1e6,
            goodput_mb_s: bytes / seconds / 1e6,
            best_put_percent: best_put_bytes * 100.0 / best_bytes,
            put_percent: pages(|totals| totals.put_bytes) as f64 * 100.0 / bytes,
            load_factor: slices.iter().map(|slice| slice.offered).sum::<u64>() as f64 / capacity,
            node_cpu_best_ms_gb: best_cpu(|cpu| cpu.node) * 1e12 / best_bytes,
            node_cpu_ms_gb: cpu(|cpu| cpu.node) * 1e12 / bytes,
            load_cpu_best_ms_gb: best_cpu(|cpu| cpu.load) * 1e12 / best_bytes,
            load_cpu_ms_gb: cpu(|cpu| cpu.load) * 1e12 / bytes,
            pages_read: pages(|totals| totals.read_pages),
            pages_put: pages(|totals| totals.put),
            pages_busy: pages(|totals| totals.busy),
            pages_missed: pages(|totals| totals.missed),
            pages_read_late: pages(|totals| totals.late_reads),
            pages_put_late: pages(|totals| totals.late_puts),
            wrong_bytes: pages(|totals| totals.wrong),
            connections_lost: pages(|totals| totals.connections_lost),
            rss_max_mib: mib(slices.iter().map(|slice| slice.rss_max).max().unwrap_or(0)),
            memory_plan_mib: mib(memory_plan),
            refusals: count("refusals")?,
            refusals_late: count("refusals_late")?,
            probe_refusals: probe_times.len(),
            probe_p50_us: probe_times.value_at_quantile(0.5),
            probe_p99_us: probe_times.value_at_quantile(0.99),
            readers_disconnected: count("slow_readers_disconnected")?,
            disconnected: slices.iter().map(|slice| slice.disconnected).sum(),
            bytes_in_flight: slices.iter().map(|slice| slice.bytes_in_flight).max().unwrap_or(0).max(at_end),
        })
    }
}
