//! `bench-pages`: pages through one store node, over loopback TCP or shared memory, beside a
//! baseline that moves as many bytes.
//!
//! - The baseline is one blocking TCP stream, or one thread that copies pages.
//! - Node and client are in one process. Each has its own runtime with one thread, and they share
//!   only memory that two processes would share.
//! - All checks are on.
//! - Figures are medians of the rounds. The baseline is measured in each round.

use anyhow::{Result, ensure};
use bytes::Bytes;
use clap::Parser;
use larder_benches::cpu::cpu_time;
use larder_benches::zero_copy::{self, Sends};
use larder_client::{
    Client, ClientOptions, DEFAULT_CONNECTIONS, NewPage, PutOptions, PutOutcome, StoreUrl, Transport, UrlError,
};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use std::fmt::{self, Display};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

#[derive(Parser)]
#[command(
    name = "bench-pages",
    about = "Measure pages through one node over TCP or shared memory, beside a plain stream or copy"
)]
struct Args {
    /// Number of pages per batch
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Megabytes (1e6 bytes) that each operation moves per round
    #[arg(long, default_value_t = 512)]
    megabytes: usize,
    /// Transport: tcp, shm or auto
    #[arg(long, default_value = "tcp", value_parser = transport)]
    transport: Transport,
    /// Page sizes in KiB
    #[arg(long = "page", default_values_t = [64, 256, 1024, 4096])]
    pages_kib: Vec<usize>,
    /// Number of TCP connections of the client
    #[arg(long, default_value_t = DEFAULT_CONNECTIONS)]
    connections: usize,
    /// Also measure a TCP stream with zero-copy sends
    #[arg(long)]
    zero_copy: bool,
    /// Number of rounds; medians are printed
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

const L2_BYTES: u64 = 1 << 30;
const EXISTS_BATCH: usize = 512;
const EXISTS_BATCHES: usize = 400;
/// Rounds that do not count. The node writes to the memory of L2 for the first time in them.
const WARM_UP_ROUNDS: usize = 2;
const STREAM_CHUNK_BYTES: usize = 1 << 20;

fn transport(name: &str) -> Result<Transport, UrlError> {
    format!("larder://bench:1/?transport={name}").parse::<StoreUrl>().map(|url| url.transport)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let client = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    println!(
        "{}, batches of {}, {} MB per round, medians of {} rounds, GB/s (CPU seconds per GiB, both sides), GB = 1e9 bytes\n",
        args.transport, args.batch, args.megabytes, args.rounds
    );
    println!(
        "| page KiB | put | put from private memory | get | view | baseline | put / baseline | get / baseline | view / baseline | exists, M keys/s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for page_bytes in args.pages_kib.iter().map(|kib| kib << 10) {
        let options =
            NodeOptions { listen: SocketAddr::from(([127, 0, 0, 1], 0)), l2_bytes: L2_BYTES, ..NodeOptions::default() };
        let node = server.block_on(Node::start(options))?;
        let mut figures = [const { Vec::new() }; 5];
        let mut exists_rates = Vec::new();
        for round in 0..WARM_UP_ROUNDS + args.rounds {
            let result = client.block_on(measure_round(&args, node.addr(), page_bytes, round))?;
            let pages = pages_of(&args, page_bytes);
            let baseline = match args.transport {
                Transport::Tcp => tcp_stream(pages, page_bytes, args.batch, false)?.0,
                _ => memory_copy(pages, page_bytes, args.batch),
            };
            if round >= WARM_UP_ROUNDS {
                figures
                    .iter_mut()
                    .zip([result.put, result.put_private, result.get, result.view, baseline])
                    .for_each(|(all, one)| all.push(one));
                exists_rates.push(result.exists);
            }
        }
        let [put, put_private, get, view, baseline] = figures.map(Speed::median);
        let kib = page_bytes >> 10;
        let exists = median(exists_rates);
        let of = |speed: Speed| format!("{:.2}", speed.gb_per_s / baseline.gb_per_s);
        println!(
            "| {kib} | {put} | {put_private} | {get} | {view} | {baseline} | {} | {} | {} | {exists:.2} |",
            of(put),
            of(get),
            of(view)
        );
        server.block_on(node.shutdown());
        if args.zero_copy {
            let (speed, sends) = tcp_stream(pages_of(&args, page_bytes), page_bytes, args.batch, true)?;
            println!(
                "TCP stream with zero-copy sends: {speed}; the kernel copied {} of {} sends",
                sends.copied, sends.all
            );
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Speed {
    gb_per_s: f64,
    cpu_s_per_gib: f64,
}

impl Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} ({:.2})", self.gb_per_s, self.cpu_s_per_gib)
    }
}

impl Speed {
    fn of(bytes: usize, stopwatch: &Stopwatch) -> Speed {
        // CPU time never decreases within a process, so a plain subtraction is safe.
        let cpu_s = (cpu_time() - stopwatch.cpu).as_secs_f64();
        Speed {
            gb_per_s: bytes as f64 / 1e9 / stopwatch.began.elapsed().as_secs_f64(),
            cpu_s_per_gib: cpu_s * f64::from(1 << 30) / bytes as f64,
        }
    }

    fn median(all: Vec<Speed>) -> Speed {
        Speed {
            gb_per_s: median(all.iter().map(|speed| speed.gb_per_s).collect()),
            cpu_s_per_gib: median(all.iter().map(|speed| speed.cpu_s_per_gib).collect()),
        }
    }
}

struct Stopwatch {
    began: Instant,
    cpu: Duration,
}

impl Stopwatch {
    fn start() -> Self {
        Self { began: Instant::now(), cpu: cpu_time() }
    }
}

struct RoundResult {
    put: Speed,
    put_private: Speed,
    get: Speed,
    view: Speed,
    exists: f64,
}

fn pages_of(args: &Args, page_bytes: usize) -> usize {
    (args.megabytes * 1_000_000 / page_bytes).max(args.batch)
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
/// Puts the pages of a round twice, then measures `get`, `view` and `exists` of them, all in
/// batches.
async fn measure_round(args: &Args, node: SocketAddr, page_bytes: usize, round: usize) -> Result<RoundResult> {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 8,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: (page_bytes / (2 * 8 * 8 * 128 * 2)) as u32,
        layers_per_part: 8,
        head_groups: 1,
    };
    ensure!(
        geometry.page_bytes() == page_bytes,
        "--page: {page_bytes} bytes are not a multiple of the bytes of one token"
    );
    let namespace =
        NamespaceDescriptor { model: "bench".into(), weights: [round as u8; 32], geometry, tenant: "bench".into() };
    let url = StoreUrl { nodes: vec![node.to_string()], transport: args.transport, connections: args.connections };
    let client = Client::attach(url, Some(namespace), ClientOptions::default());
    ensure!(client.ready(Duration::from_secs(5)).await, "the node did not answer within 5 s");
    // Each round has its own namespace. L2 evicts the pages of earlier rounds.
    let pages = pages_of(args, page_bytes);
    let keys: Vec<PageKey> = (0..pages as u32).map(|i| PageKey::chain(None, &[round as u32, i])).collect();
    let payload = Bytes::from((0..page_bytes).map(|i| (i * 31) as u8).collect::<Vec<u8>>());

    let mut shared = client.buffer(page_bytes);
    shared.copy_from_slice(&payload);
    let put_private = put_all(args, &client, &keys, &payload).await?;
    ensure!(client.forget(&keys, deadline()).await.pages > 0, "the node forgot no page");
    let put = put_all(args, &client, &keys, &shared.freeze()).await?;

    let mut buffers: Vec<Vec<u8>> = (0..args.batch).map(|_| vec![1u8; page_bytes]).collect();
    let begin = Stopwatch::start();
    for batch in keys.chunks(args.batch) {
        let wanted = batch.iter().copied().zip(buffers.drain(..batch.len())).collect();
        for (buffer, tier) in client.get(wanted, deadline()).await {
            ensure!(tier.is_some(), "get missed a page that was put");
            buffers.push(buffer);
        }
    }
    let get = Speed::of(pages * page_bytes, &begin);
    ensure!(buffers[0][..] == payload[..], "the bytes differ from those that were put");

    let begin = Stopwatch::start();
    for batch in keys.chunks(args.batch) {
        let views = client.view(batch, deadline()).await;
        ensure!(views.iter().all(Option::is_some), "view missed a page that was put");
    }
    let view = Speed::of(pages * page_bytes, &begin);

    let checked: Vec<PageKey> = keys.iter().copied().cycle().take(EXISTS_BATCH).collect();
    let begin = Instant::now();
    for _ in 0..EXISTS_BATCHES {
        ensure!(
            client.exists(&checked, deadline()).await.iter().all(|&there| there),
            "exists missed a page that was put"
        );
    }
    let exists = (EXISTS_BATCH * EXISTS_BATCHES) as f64 / 1e6 / begin.elapsed().as_secs_f64();
    Ok(RoundResult { put, put_private, get, view, exists })
}

async fn put_all(args: &Args, client: &Client, keys: &[PageKey], payload: &Bytes) -> Result<Speed> {
    let begin = Stopwatch::start();
    for batch in keys.chunks(args.batch) {
        let pages = batch.iter().map(|&key| (NewPage::first(key), payload.clone()));
        for outcome in client.put_pages(pages.collect(), PutOptions::default(), deadline()).await {
            ensure!(outcome == PutOutcome::Stored, "put failed: {outcome:?}");
        }
    }
    Ok(Speed::of(keys.len() * payload.len(), &begin))
}

fn memory_copy(pages: usize, page_bytes: usize, batch: usize) -> Speed {
    let from = vec![7u8; pages * page_bytes];
    let mut into = vec![1u8; batch * page_bytes];
    let begin = Stopwatch::start();
    for (page, from) in from.chunks(page_bytes).enumerate() {
        let at = page % batch * page_bytes;
        into[at..at + page_bytes].copy_from_slice(from);
    }
    // Keeps the compiler from removing copies whose result is not read.
    std::hint::black_box(&into);
    Speed::of(pages * page_bytes, &begin)
}

/// Sends pages from a data set over one blocking stream and receives them into the buffers of a
/// batch, as a node and a client do.
fn tcp_stream(pages: usize, page_bytes: usize, batch: usize, zero_copy: bool) -> Result<(Speed, Sends)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let from = vec![7u8; pages * page_bytes];
    let mut into = vec![1u8; batch * page_bytes];
    let sender = std::thread::spawn(move || -> Result<Sends> {
        let (mut stream, _) = listener.accept()?;
        larder_wire::prepare_socket(&stream)?;
        let mut chunks = from.chunks(page_bytes.max(STREAM_CHUNK_BYTES));
        if zero_copy {
            return zero_copy::send_all(&stream, &chunks.collect::<Vec<_>>());
        }
        chunks.try_for_each(|chunk| stream.write_all(chunk))?;
        Ok(Sends::default())
    });
    let mut stream = TcpStream::connect(address)?;
    larder_wire::prepare_socket(&stream)?;
    let begin = Stopwatch::start();
    let mut received = 0;
    // Ends early if the sender fails, whose error is returned below.
    while received < pages * page_bytes {
        let at = received % into.len();
        let end = into.len().min(at + STREAM_CHUNK_BYTES);
        received += match stream.read(&mut into[at..end])? {
            0 => break,
            read => read,
        };
    }
    let speed = Speed::of(received, &begin);
    let sends = sender.join().expect("the sender does not panic")?;
    Ok((speed, sends))
}
