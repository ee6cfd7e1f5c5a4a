//! Isolation test: the cost of one client's requests beside the load of others.
//!
//! Three measurements on one node:
//!
//! - The latency of an L2 hit and of a lookup, on an idle node and beside writers that fill L3. The
//!   log reclaims segments meanwhile, because it was full before.
//! - L2 hits per second from 1, 2 and 4 clients, each with a thread.
//! - The time per page of an L2 hit, without and with 900 connected tenants that do nothing.
//!
//! The node is a child process. `--node` names another build of it: two builds are compared by two
//! runs on one machine. The threads of the writers have a lower priority, so that they delay the
//! probe by their load on the node only.

use super::overload::node::NodeProcess;
use super::overload::{Priority, load_threads, split_processors};
use crate::output::say;
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use bytesize::ByteSize;
use clap::Parser;
use hdrhistogram::Histogram;
use larder_client::{
    Client, ClientOptions, GetOptions, NewPage, PinKind, PutOptions, PutOutcome, StoreUrl, Tier, Transport,
};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

#[derive(Debug, Parser)]
pub struct Args {
    /// Size of L3. The test fills it before it measures
    #[arg(long, default_value = "4GiB", value_name = "SIZE")]
    l3: ByteSize,
    /// Size of the pages. Small ones make many index entries
    #[arg(long, default_value = "16KiB", value_name = "SIZE")]
    page_size: ByteSize,
    /// Duration of each measurement, in seconds
    #[arg(long, default_value_t = 5, value_name = "SECONDS")]
    seconds: u64,
    /// Directory for L3, on the device to test. Default: a temporary one in /var/tmp
    #[arg(long, value_name = "DIRECTORY")]
    dir: Option<PathBuf>,
    /// Binary of the node, to compare builds. Default: this one
    #[arg(long, value_name = "FILE")]
    node: Option<PathBuf>,
    /// Print the report as one line of JSON, without progress
    #[arg(long)]
    json: bool,
}

/// Tenant of the probe's pages.
const PROBE: &str = "probe";
const L2_BYTES: &str = "512MiB";
/// Pages that the probe reads from L2. They are pinned, or the writers would push them out.
const PROBE_PAGES: u32 = 256;
const HIT_CLIENTS: [usize; 3] = [1, 2, 4];
/// Pages of one get of the throughput measurements.
const BATCH: u32 = 64;
const WRITERS: u32 = 4;
/// Bytes of one batch of puts.
const PUT_BYTES: u64 = 1 << 20;
const BYSTANDERS: u32 = 900;
/// Nice value of the writers' threads.
const WRITER_NICENESS: i32 = 10;
/// Time for which the probe sleeps after each request. Without it, the probe's processor is left
/// with no time for the writers.
const PROBE_PAUSE: Duration = Duration::from_micros(200);
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time for clients to close their connections.
const CLOSE_TIME: Duration = Duration::from_millis(500);
/// Bytes of KV per token in the geometry of the test pages.
const TOKEN_BYTES: u64 = 256;

#[derive(Debug, Serialize)]
struct IsolationReport {
    pages_in_l3: u64,
    idle: Latencies,
    loaded: Latencies,
    /// Rate of the puts beside the loaded measurement, in MB/s (1e6).
    puts_mb_s: f64,
    /// Rate of the puts that filled L3, without the probe: what machine and device can take.
    puts_alone_mb_s: f64,
    /// L2 hits per second, by the number of clients.
    hits_per_second: Vec<(usize, f64)>,
    get_us_alone: f64,
    get_us_beside_idle_tenants: f64,
}

/// Percentiles in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Latencies {
    hit_p50: u64,
    hit_p999: u64,
    lookup_p50: u64,
    lookup_p999: u64,
}

#[derive(Clone)]
struct Target {
    address: String,
    page_bytes: u64,
}

impl Target {
    async fn attach(&self, tenant: &str) -> Result<Client> {
        let geometry = PageGeometry {
            dtype: KvDtype::F16,
            layers: 1,
            kv_heads: 1,
            head_dim: 64,
            page_tokens: (self.page_bytes / TOKEN_BYTES) as u32,
            layers_per_part: 1,
            head_groups: 1,
        };
        let namespace =
            NamespaceDescriptor { model: "isolation".into(), weights: [1; 32], geometry, tenant: tenant.into() };
        let url = StoreUrl { nodes: vec![self.address.clone()], transport: Transport::Tcp, connections: 1 };
        let client = Client::attach(url, Some(namespace), ClientOptions::default());
        ensure!(client.ready(TIMEOUT).await, "the node cannot be reached");
        Ok(client)
    }

    fn pages(&self, numbers: std::ops::Range<u64>) -> Vec<(NewPage, Bytes)> {
        let bytes = Bytes::from(vec![7; self.page_bytes as usize]);
        let page = |number| (NewPage::first(key(number)), bytes.clone());
        numbers.map(page).collect()
    }

    async fn put(&self, client: &Client, numbers: std::ops::Range<u64>) -> Result<()> {
        let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
        let outcomes = client.put_pages(self.pages(numbers), options, Instant::now() + TIMEOUT).await;
        ensure!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "the node did not store a page");
        Ok(())
    }

    /// Gets pages that L2 has.
    async fn hit(&self, client: &Client, numbers: std::ops::Range<u64>) -> Result<()> {
        let wanted = numbers.map(|number| (key(number), vec![0; self.page_bytes as usize])).collect();
        let options = GetOptions { busy_retries: 1000, ..GetOptions::default() };
        let got = client.get_with(wanted, options, Instant::now() + TIMEOUT).await;
        ensure!(got.iter().all(|(_, fetched)| fetched.tier() == Some(Tier::L2)), "a pinned page is not in L2");
        Ok(())
    }

    /// Measures single hits and lookups in turn, on the calling thread.
    fn probe(&self, numbers: std::ops::Range<u64>, time: Duration) -> Result<Latencies> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let client = self.attach(PROBE).await?;
            // A quarter of the pages is its own, and the others are absent for it.
            let searcher = self.attach(&writer_name(0)).await?;
            let (mut hits, mut lookups) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
            let begin = Instant::now();
            for round in 0u64.. {
                let at = Instant::now();
                if at - begin > time {
                    break;
                }
                let number = round % u64::from(PROBE_PAGES);
                self.hit(&client, number..number + 1).await?;
                let between = Instant::now();
                // Spread over all pages without a random generator.
                let wanted = numbers.start + round.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (numbers.end - numbers.start);
                searcher.locate(&[key(wanted)], between + TIMEOUT).await;
                hits.record((between - at).as_micros() as u64)?;
                lookups.record(between.elapsed().as_micros() as u64)?;
                // The thread sleeps, not the task: tokio's timers round up to a millisecond.
                std::thread::sleep(PROBE_PAUSE);
            }
            Ok(Latencies {
                hit_p50: hits.value_at_quantile(0.5),
                hit_p999: hits.value_at_quantile(0.999),
                lookup_p50: lookups.value_at_quantile(0.5),
                lookup_p999: lookups.value_at_quantile(0.999),
            })
        })
    }

    /// L2 hits per second of one client, on the calling thread.
    fn hits_per_second(&self, time: Duration) -> Result<f64> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let client = self.attach(PROBE).await?;
            let begin = Instant::now();
            let mut pages = 0u64;
            while begin.elapsed() < time {
                let first = pages % u64::from(PROBE_PAGES);
                self.hit(&client, first..first + u64::from(BATCH)).await?;
                pages += u64::from(BATCH);
            }
            Ok(pages as f64 / begin.elapsed().as_secs_f64())
        })
    }
}

fn writer_name(number: u32) -> String {
    format!("writer {number}")
}

fn key(number: u64) -> PageKey {
    PageKey::chain(None, &[number as u32, (number >> 32) as u32])
}

/// Puts new pages until `stop`. Counts them in `next`, which numbers them.
async fn write(target: Target, writer: u32, next: Arc<AtomicU64>, last: u64, stop: CancellationToken) -> Result<()> {
    let client = target.attach(&writer_name(writer)).await?;
    let batch = (PUT_BYTES / target.page_bytes).max(1);
    while !stop.is_cancelled() {
        let first = next.fetch_add(batch, Ordering::Relaxed);
        if first >= last {
            break;
        }
        target.put(&client, first..first + batch).await?;
    }
    Ok(())
}

pub async fn run(args: Args) -> Result<()> {
    let page_bytes = args.page_size.as_u64();
    ensure!(
        page_bytes.is_multiple_of(TOKEN_BYTES) && (4096..=1 << 20).contains(&page_bytes),
        "--page-size is {page_bytes} bytes; it must be a multiple of {TOKEN_BYTES}, from 4KiB to 1MiB"
    );
    let dir = match args.dir.clone() {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir_in("/var/tmp"),
    };
    let dir = dir.context("cannot create a directory for L3; choose another --dir")?;
    let [node_cpus, load_cpus] = split_processors()?;
    let data_dir = dir.path().to_str().context("the path of --dir is not UTF-8")?;
    let l3_bytes = args.l3.as_u64().to_string();
    // The bystanders share an address, which by default has three quarters of the places.
    let options =
        ["--l2", L2_BYTES, "--data-dir", data_dir, "--l3-bytes", &l3_bytes, "--max-connections-per-peer", "1024"];
    let node = NodeProcess::start(args.node.as_deref(), node_cpus, &options).await?;
    let threads = load_threads(load_cpus, Priority::Nice(WRITER_NICENESS))?;
    let target = Target { address: node.address().to_string(), page_bytes };
    let report = measure(&args, target, &node, &threads).await;
    threads.shutdown_background();
    let report = report?;
    match args.json {
        true => say!("{}", serde_json::to_string(&report)?),
        false => print(&report),
    }
    Ok(())
}

async fn measure(
    args: &Args,
    target: Target,
    node: &NodeProcess,
    threads: &tokio::runtime::Runtime,
) -> Result<IsolationReport> {
    let time = Duration::from_secs(args.seconds);
    let client = target.attach(PROBE).await?;
    target.put(&client, 0..u64::from(PROBE_PAGES)).await?;
    let keys: Vec<PageKey> = (0..u64::from(PROBE_PAGES)).map(key).collect();
    let pinned = client.pin(&keys, PinKind::Hard, Duration::from_secs(3600), Instant::now() + TIMEOUT).await;
    ensure!(pinned.pages == keys.len(), "the node pinned {} of {} pages", pinned.pages, keys.len());
    let next = Arc::new(AtomicU64::new(1 << 32));
    let start_writers = |last: u64, stop: &CancellationToken| -> Vec<_> {
        let start = |writer| threads.spawn(write(target.clone(), writer, next.clone(), last, stop.clone()));
        (0..WRITERS).map(start).collect()
    };
    let progress = |text: &str| {
        if !args.json {
            say!("{text}");
        }
    };
    progress("filling L3 …");
    // A quarter more than fits, so that the log reclaims segments from now on.
    let filled = (1 << 32) + args.l3.as_u64() / (target.page_bytes + 4096) * 5 / 4;
    let begin = Instant::now();
    for writer in start_writers(filled, &CancellationToken::new()) {
        writer.await??;
    }
    let puts_alone_mb_s = ((filled - (1 << 32)) * target.page_bytes) as f64 / begin.elapsed().as_secs_f64() / 1e6;
    let newest = filled - (filled - (1 << 32)) / 2..filled;
    let probe = |numbers: std::ops::Range<u64>| {
        let target = target.clone();
        tokio::task::spawn_blocking(move || target.probe(numbers, time))
    };
    progress("latency on the idle node …");
    let idle = probe(newest.clone()).await??;
    progress("latency beside puts …");
    let stop = CancellationToken::new();
    let before = next.load(Ordering::Relaxed);
    let begin = Instant::now();
    let writers = start_writers(u64::MAX, &stop);
    let loaded = probe(newest).await??;
    let puts = next.load(Ordering::Relaxed) - before;
    let puts_mb_s = (puts * target.page_bytes) as f64 / begin.elapsed().as_secs_f64() / 1e6;
    stop.cancel();
    for writer in writers {
        writer.await??;
    }
    let pages_in_l3 = node.status().await?["tiers"]["l3"]["pages"].as_u64().unwrap_or(0);
    progress("throughput of L2 hits …");
    let mut hits_per_second = Vec::new();
    for clients in HIT_CLIENTS {
        hits_per_second.push((clients, hits_from(&target, clients, time).await?));
    }
    progress("cost beside idle tenants …");
    let us = |hits: f64| 1e6 / hits;
    let get_us_alone = us(hits_from(&target, 1, time).await?);
    let mut bystanders = Vec::new();
    for number in 0..BYSTANDERS {
        let bystander = target.attach(&format!("tenant {number}")).await?;
        target.put(&bystander, 0..1).await?;
        bystanders.push(bystander);
    }
    let get_us_beside_idle_tenants = us(hits_from(&target, 1, time).await?);
    drop((client, bystanders));
    // A client that still closes its connection when the node ends would report it as lost.
    tokio::time::sleep(CLOSE_TIME).await;
    Ok(IsolationReport {
        pages_in_l3,
        idle,
        loaded,
        puts_mb_s,
        puts_alone_mb_s,
        hits_per_second,
        get_us_alone,
        get_us_beside_idle_tenants,
    })
}

async fn hits_from(target: &Target, clients: usize, time: Duration) -> Result<f64> {
    let measure = |_| {
        let target = target.clone();
        tokio::task::spawn_blocking(move || target.hits_per_second(time))
    };
    let mut total = 0.0;
    for client in futures::future::join_all((0..clients).map(measure)).await {
        total += client??;
    }
    Ok(total)
}

fn print(report: &IsolationReport) {
    let IsolationReport { pages_in_l3, idle, loaded, puts_mb_s, puts_alone_mb_s, hits_per_second, .. } = report;
    say!(
        "\n{pages_in_l3} pages in L3, puts of {puts_mb_s:.0} MB/s beside the loaded figures, {puts_alone_mb_s:.0} MB/s alone\n"
    );
    say!("{:24} {:>10} {:>10} {:>8}", "microseconds", "idle", "loaded", "ratio");
    let rows = [
        ("L2 hit, median", idle.hit_p50, loaded.hit_p50),
        ("L2 hit, p99.9", idle.hit_p999, loaded.hit_p999),
        ("lookup, median", idle.lookup_p50, loaded.lookup_p50),
        ("lookup, p99.9", idle.lookup_p999, loaded.lookup_p999),
    ];
    for (name, idle, loaded) in rows {
        say!("{name:24} {idle:>10} {loaded:>10} {:>8.2}", loaded as f64 / idle.max(1) as f64);
    }
    for (clients, hits) in hits_per_second {
        say!("L2 hits/s from {clients} clients: {hits:.0}");
    }
    let IsolationReport { get_us_alone, get_us_beside_idle_tenants, .. } = report;
    say!(
        "L2 hit alone: {get_us_alone:.2} us per page; beside {BYSTANDERS} idle tenants: {get_us_beside_idle_tenants:.2} us"
    );
}
