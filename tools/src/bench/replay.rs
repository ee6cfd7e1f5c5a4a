//! Replays a recorded trace at a real node, and compares its hit rate with the simulator's.
//!
//! The node runs in this process and is reached over TCP. Its clock is set to the time of each
//! request, so ages are those of the trace, and a day takes only as long as its requests. A clock
//! that runs faster would not do: gaps of seconds would fall below the resolution of ages, or a
//! busy machine would distort them. Small pages stand for real ones.
//!
//! One client serves the requests in turn, as an engine would: it gets all pages of the prompt,
//! then puts the missing ones. A page counts as a hit if L2 had it and all pages before it.
//!
//! The simulator has the rules of the node: without an L3 it refuses no page.

use super::trace;
use crate::output::say;
use crate::sizes::L2_BYTES_MIN;
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use bytesize::ByteSize;
use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use larder_client::{
    Client, ClientOptions, Fetched, GetOptions, Hint, NewPage, PutOptions, PutOutcome, StoreUrl, Tier, Transport,
};
use larder_evict::replay::{Event, Replay, Request, Trace, replay as simulate};
use larder_evict::{HitDensity, Lru};
use larder_format::{MAX_PAGE_BYTES, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{L3Device, Node, NodeOptions};
use larder_runtime::{Clock, SteppedClock};
use serde::Serialize;
use serde_json::Value;
use std::net::SocketAddr;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
pub struct Args {
    /// Trace in Mooncake's format, as for `larder bench trace`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Sizes of L2 in tokens of the trace, with suffix `k`, `M` or `G` for thousands, millions or
    /// billions
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = trace::token_count, default_value = "1M,3M")]
    capacity: Vec<u64>,
    /// Tokens per block. By default the power of two that fits the lengths of the prompts
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<NonZeroU64>,
    /// Size of a page, which stands for a block. It is larger where L2 would have less than its
    /// minimum of 32 MiB
    #[arg(long, default_value = "4KiB", value_name = "SIZE")]
    page_size: ByteSize,
    /// Replay only so many requests, from the first on
    #[arg(long, value_name = "REQUESTS")]
    requests: Option<NonZeroUsize>,
    /// Report the end of each generation, 20 ms per token after its request
    #[arg(long)]
    ends: bool,
    /// Directory for L3. Without it, the node has no L3
    #[arg(long, value_name = "DIRECTORY")]
    l3_dir: Option<PathBuf>,
    /// Maximum size of L3. By default it has room for all pages
    #[arg(long, requires = "l3_dir", value_name = "SIZE")]
    l3_size: Option<ByteSize>,
    /// Bytes per day of the trace that may be written to L3. The node then refuses other pages than
    /// the simulator, so the rates are only reported
    #[arg(long, requires = "l3_dir", value_name = "SIZE")]
    l3_write_budget: Option<ByteSize>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Most by which the hit rates may differ, in points.
const POINTS_APART_MAX: f64 = 2.0;
/// Seed of the node. That of the simulator is 0, but their names of pages differ anyway.
const SEED: u64 = 0;
/// Slots in L2 and records on L3 have sizes that are multiples of this.
const PAGE_UNIT: u64 = 4096;
/// Maximum of L2. No machine maps a larger arena: a process has 128 TiB of addresses.
const L2_BYTES_MAX: u64 = 64 << 40;
/// Bytes of an L3 beside its pages: more than its open and its free segments take.
const L3_SPARE_BYTES: u64 = 2 << 30;
/// Pages of one put, and their bytes. After a put that fails, the client puts no further pages of
/// the request, as the simulator does.
const PUT_PAGES: u64 = 64;
const PUT_BYTES: u64 = 4 << 20;
const GET: GetOptions = GetOptions { hedge_after: None, busy_retries: 1000 };
const PUT: PutOptions = PutOptions { ttl: None, busy_retries: 1000 };
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the client to close its connection.
const CLOSE_TIME: Duration = Duration::from_millis(500);

/// Conditions of one replay, for the node and for the simulator.
#[derive(Debug, Clone, Copy)]
struct Setup {
    capacity_tokens: u64,
    capacity_blocks: u64,
    page_bytes: u64,
    /// L2 of the node: all pages of the capacity.
    l2_bytes: u64,
    /// L3 of the node, 0 for none.
    l3_bytes: u64,
    l3_write_bytes_per_day: Option<u64>,
    ends: bool,
}

impl Setup {
    fn new(args: &Args, trace: &Trace, capacity_tokens: u64) -> Result<Setup> {
        let capacity_blocks = capacity_tokens / trace.block_tokens();
        ensure!(capacity_blocks > 0, "--capacity {capacity_tokens} is less than a block");
        let page_bytes = args.page_size.as_u64().max(L2_BYTES_MIN.div_ceil(capacity_blocks)).max(1);
        let page_bytes = page_bytes.checked_next_multiple_of(PAGE_UNIT).unwrap_or(u64::MAX);
        ensure!(
            page_bytes <= MAX_PAGE_BYTES as u64,
            "a page would take {page_bytes} bytes; raise --capacity or lower --page-size"
        );
        let l2_bytes = page_bytes.checked_mul(capacity_blocks).filter(|bytes| *bytes <= L2_BYTES_MAX);
        let l2_bytes = l2_bytes.with_context(|| {
            format!(
                "an L2 of {capacity_blocks} pages of {page_bytes} bytes exceeds {}; lower --capacity or --page-size",
                ByteSize(L2_BYTES_MAX)
            )
        })?;
        let record_bytes = page_bytes + PAGE_UNIT;
        let l3_bytes = match (&args.l3_dir, args.l3_size) {
            (None, _) => 0,
            (Some(_), Some(size)) => size.as_u64(),
            (Some(_), None) => trace.blocks_distinct() as u64 * record_bytes + L3_SPARE_BYTES,
        };
        let l3_write_bytes_per_day = args.l3_write_budget.map(|budget| budget.as_u64());
        let ends = args.ends;
        Ok(Setup { capacity_tokens, capacity_blocks, page_bytes, l2_bytes, l3_bytes, l3_write_bytes_per_day, ends })
    }

    fn ends_of(&self, trace: &Trace) -> Vec<(u64, usize)> {
        if self.ends { trace.ends_ms() } else { Vec::new() }
    }
}

/// Hit rates of the simulator.
#[derive(Debug, Clone, Copy)]
struct Simulated {
    policy: f64,
    /// The same policy, if it may refuse pages: `larder bench trace` reports this rate.
    refusing: f64,
    lru: f64,
}

fn simulate_all(trace: &Trace, setup: &Setup) -> Simulated {
    let ends = setup.ends_of(trace);
    let replay = |may_refuse| Replay { capacity_blocks: setup.capacity_blocks, ends: &ends, may_refuse };
    let policy = |may_refuse| simulate(trace, HitDensity::new(SEED), &replay(may_refuse)).rate();
    Simulated {
        policy: policy(setup.l3_bytes > 0),
        refusing: policy(true),
        lru: simulate(trace, Lru::new(), &replay(false)).rate(),
    }
}

/// Counts of a replay at the node.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    pages: u64,
    /// Pages of prompts that L2 had, with all pages before them.
    hits: u64,
    /// Pages that came from L3.
    from_l3: u64,
    /// Pages that no tier took.
    puts_failed: u64,
}

struct Replayer<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    client: Client,
    clock: SteppedClock,
    /// Time on the node's clock at the trace's time 0, in Unix milliseconds.
    start_ms: u64,
    /// Keys by number of the block.
    keys: Vec<PageKey>,
    /// Content of every page. The client verifies what it gets.
    page: Bytes,
    /// Buffers that no get uses now.
    buffers: Vec<Vec<u8>>,
    counts: Counts,
}

impl Replayer<'_> {
    async fn run(&mut self) -> Result<()> {
        let trace = self.trace;
        let ends = self.setup.ends_of(trace);
        for event in trace.events(&ends) {
            match event {
                Event::Arrived(request) => self.serve(request).await?,
                Event::GenerationEnded { request, now_ms } => self.end_generation(request, now_ms).await,
            }
        }
        Ok(())
    }

    async fn serve(&mut self, request: &Request) -> Result<()> {
        self.advance_to(request.timestamp_ms);
        let tiers = self.get(&request.blocks).await?;
        self.counts.pages += tiers.len() as u64;
        self.counts.hits += tiers.iter().take_while(|tier| **tier == Some(Tier::L2)).count() as u64;
        self.counts.from_l3 += tiers.iter().filter(|tier| **tier == Some(Tier::L3)).count() as u64;
        self.put_missing(&request.blocks, &tiers).await
    }

    fn advance_to(&self, trace_ms: u64) {
        self.clock.advance_to(self.start_ms.saturating_add(trace_ms));
    }

    fn key(&self, block: u32) -> PageKey {
        self.keys[block as usize]
    }

    async fn get(&mut self, blocks: &[u32]) -> Result<Vec<Option<Tier>>> {
        let mut wanted = Vec::with_capacity(blocks.len());
        for block in blocks {
            let buffer = self.buffers.pop().unwrap_or_else(|| vec![0; self.page.len()]);
            wanted.push((self.key(*block), buffer));
        }
        let got = self.client.get_with(wanted, GET, Instant::now() + TIMEOUT).await;
        let mut tiers = Vec::with_capacity(blocks.len());
        for (buffer, fetched) in got {
            ensure!(!matches!(fetched, Fetched::Busy { .. }), "the node stayed too busy for a get");
            tiers.push(fetched.tier());
            self.buffers.push(buffer);
        }
        Ok(tiers)
    }

    /// Puts the pages that no tier has, as far as L2 has room for the whole request.
    async fn put_missing(&mut self, blocks: &[u32], tiers: &[Option<Tier>]) -> Result<()> {
        let positions = blocks.len().min(usize::try_from(self.setup.capacity_blocks).unwrap_or(usize::MAX));
        let missing: Vec<(NewPage, Bytes)> = (0..positions)
            .filter(|position| tiers[*position].is_none())
            .map(|position| {
                let parent = position.checked_sub(1).map_or(PageKey::NONE, |before| self.key(blocks[before]));
                let page = NewPage {
                    key: self.key(blocks[position]),
                    parent,
                    position: position as u32,
                    token_ids: Vec::new(),
                };
                (page, self.page.clone())
            })
            .collect();
        let at_once = (PUT_BYTES / self.setup.page_bytes).clamp(1, PUT_PAGES) as usize;
        for pages in missing.chunks(at_once) {
            let outcomes = self.client.put_pages(pages.to_vec(), PUT, Instant::now() + TIMEOUT).await;
            ensure!(self.client.nodes_connected() == 1, "the connection to the node was lost");
            let failed = outcomes.iter().filter(|outcome| is_failed(outcome)).count();
            self.counts.puts_failed += failed as u64;
            if failed > 0 {
                break;
            }
        }
        Ok(())
    }

    async fn end_generation(&self, request: &Request, now_ms: u64) {
        self.advance_to(now_ms);
        let keys: Vec<PageKey> = request.blocks.iter().map(|block| self.key(*block)).collect();
        let tokens = u32::try_from(request.output_tokens).unwrap_or(u32::MAX);
        self.client.hint(&keys, Some(tokens), Hint::None, Instant::now() + TIMEOUT).await;
    }
}

fn is_failed(outcome: &PutOutcome) -> bool {
    !matches!(outcome, PutOutcome::Stored | PutOutcome::AlreadyThere | PutOutcome::InProgress)
}

/// Result of a replay at one capacity.
#[derive(Debug, Serialize)]
struct Report {
    capacity_tokens: u64,
    page_bytes: u64,
    pages: u64,
    /// Hits in L2 per page of all prompts, at the node and in the simulator.
    node_hit_rate: f64,
    simulator_hit_rate: f64,
    /// By how many points the node's rate is higher.
    points_apart: f64,
    /// Simulated rates, for comparison: of LRU, and of a policy that may refuse pages.
    lru_hit_rate: f64,
    refusing_hit_rate: f64,
    pages_from_l3: u64,
    puts_failed: u64,
    /// Payload bytes written to L3, with the copies that the log made to reclaim segments, per byte
    /// put. `None` without an L3.
    written_per_byte_put: Option<f64>,
    /// Figures of the node's status: `tiers.l2.eviction` and `tiers.l2.touches_dropped`.
    eviction: Value,
    touches_dropped: Option<u64>,
    /// Duration of the replay at the node.
    seconds: f64,
}

impl Report {
    fn cells(&self) -> Vec<Cell> {
        let percent = |rate: f64| format!("{:.2} %", rate * 100.0);
        let dash = || "-".to_string();
        let refused = self.eviction["pages_refused"].as_u64();
        let cells = [
            self.capacity_tokens.to_string(),
            ByteSize(self.page_bytes).to_string(),
            percent(self.node_hit_rate),
            percent(self.simulator_hit_rate),
            format!("{:+.2}", self.points_apart),
            percent(self.lru_hit_rate),
            percent(self.refusing_hit_rate),
            refused.map_or_else(dash, |refused| refused.to_string()),
            percent(self.pages_from_l3 as f64 / self.pages.max(1) as f64),
            self.written_per_byte_put.map_or_else(dash, |ratio| format!("{ratio:.2}")),
            format!("{:.0}", self.seconds),
        ];
        cells.into_iter().map(|text| Cell::new(text).set_alignment(CellAlignment::Right)).collect()
    }
}

async fn measure(args: &Args, trace: &Arc<Trace>, setup: Setup) -> Result<Report> {
    let shared = trace.clone();
    let simulated = tokio::task::spawn_blocking(move || simulate_all(&shared, &setup)).await?;
    let l3_dir = args.l3_dir.as_ref().map(tempfile::tempdir_in).transpose();
    let l3_dir = l3_dir.context("cannot create a directory for L3; choose another --l3-dir")?;
    let start_ms = Clock::system().now_unix_ms();
    let clock = SteppedClock::at(start_ms);
    let l3 = l3_dir.iter().map(|dir| L3Device { dir: dir.path().to_path_buf(), bytes: setup.l3_bytes });
    let options = NodeOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        l2_bytes: setup.l2_bytes,
        l3: l3.collect(),
        l3_mean_page_bytes: PAGE_UNIT,
        l3_write_bytes_per_day: setup.l3_write_bytes_per_day,
        scrub_bytes_per_second: 0,
        l3_scrub_bytes_per_second: 0,
        share_memory: Some(false),
        seed: Some(SEED),
        clock: Some(clock.clock()),
        ..NodeOptions::default()
    };
    let node = Node::start(options).await.context("the store node cannot start")?;
    let namespace = NamespaceDescriptor {
        model: "replay".into(),
        weights: [1; 32],
        geometry: PageGeometry::opaque(setup.page_bytes as u32, 1),
        tenant: "replay".into(),
    };
    let url = StoreUrl { nodes: vec![node.addr().to_string()], transport: Transport::Tcp, connections: 1 };
    let client = Client::attach(url, Some(namespace), ClientOptions::default());
    ensure!(client.ready(TIMEOUT).await, "the node cannot be reached");
    let mut replayer = Replayer {
        trace,
        setup: &setup,
        client,
        clock,
        start_ms,
        keys: (0..trace.blocks_distinct() as u32).map(|block| PageKey::chain(None, &[block])).collect(),
        page: Bytes::from(vec![7; setup.page_bytes as usize]),
        buffers: Vec::new(),
        counts: Counts::default(),
    };
    let begin = Instant::now();
    replayer.run().await?;
    let seconds = begin.elapsed().as_secs_f64();
    let counts = replayer.counts;
    let node_hit_rate = counts.hits as f64 / counts.pages.max(1) as f64;
    let mut status = node.status();
    drop(replayer);
    // A client that still closes its connection when the node ends would report it as lost.
    tokio::time::sleep(CLOSE_TIME).await;
    node.shutdown().await;
    Ok(Report {
        capacity_tokens: setup.capacity_tokens,
        page_bytes: setup.page_bytes,
        pages: counts.pages,
        node_hit_rate,
        simulator_hit_rate: simulated.policy,
        points_apart: (node_hit_rate - simulated.policy) * 100.0,
        lru_hit_rate: simulated.lru,
        refusing_hit_rate: simulated.refusing,
        pages_from_l3: counts.from_l3,
        puts_failed: counts.puts_failed,
        written_per_byte_put: written_per_byte_put(&status),
        eviction: status["tiers"]["l2"]["eviction"].take(),
        touches_dropped: status["tiers"]["l2"]["touches_dropped"].as_u64(),
        seconds,
    })
}

fn written_per_byte_put(status: &Value) -> Option<f64> {
    let l3 = &status["tiers"]["l3"];
    let written = l3["written_bytes"].as_u64()? + l3["copied_forward_bytes"].as_u64()?;
    let put = status["counters"]["put_bytes"].as_u64().filter(|put| *put > 0)?;
    Some(written as f64 / put as f64)
}

/// Fails if a hit rate of the node is more than [`POINTS_APART_MAX`] from the simulator's.
pub async fn run(args: Args) -> Result<()> {
    let (file, block_tokens) = (args.file.clone(), args.block_tokens);
    let mut trace = tokio::task::spawn_blocking(move || trace::read(&file, block_tokens)).await??;
    if let Some(requests) = args.requests {
        trace = trace.part(0..requests.get().min(trace.requests().len()));
    }
    let trace = Arc::new(trace);
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "capacity (tokens)",
        "page",
        "node",
        "simulator",
        "points apart",
        "lru",
        "refusing",
        "refused",
        "from L3",
        "written / put",
        "seconds",
    ]);
    let mut apart = Vec::new();
    for &capacity in &args.capacity {
        let setup = Setup::new(&args, &trace, capacity)?;
        if !args.json {
            say!("replaying {} requests with an L2 of {capacity} tokens …", trace.requests().len());
        }
        let report = measure(&args, &trace, setup).await?;
        if args.json {
            say!("{}", serde_json::to_string(&report)?);
        } else {
            table.add_row(report.cells());
        }
        if args.l3_write_budget.is_none() && report.points_apart.abs() > POINTS_APART_MAX {
            apart.push(format!("{:+.2} at {capacity} tokens", report.points_apart));
        }
    }
    if !args.json {
        say!("{table}");
        say!(
            "node, simulator: hits in L2. lru, refusing: simulated; `larder bench trace` reports these rates\n\
             from L3: pages of all prompts. written / put: payload bytes, with the copies of the log"
        );
    }
    if !apart.is_empty() {
        bail!("hit rates of node and simulator are more than {POINTS_APART_MAX} points apart: {}", apart.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l2_beyond_every_machine_is_refused() {
        let line = r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}"#;
        let trace = Trace::read(line.as_bytes()).unwrap();
        let args = Args::parse_from(["replay", "trace.jsonl", "--page-size", "1MiB"]);
        assert_eq!(Setup::new(&args, &trace, 100 * trace.block_tokens()).unwrap().l2_bytes, 100 << 20);
        // The products are 100 TiB, and more than 64 bits have.
        for blocks in [100 << 20, 1 << 44] {
            let error = Setup::new(&args, &trace, blocks * trace.block_tokens()).unwrap_err().to_string();
            assert!(error.contains("lower --capacity or --page-size"), "{error}");
        }
    }
}
