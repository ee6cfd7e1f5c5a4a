//! `bench-pages`: pages through a store node over loopback TCP beside a bare socket that moves as many bytes, or by way of
//! shared memory beside one thread that copies them.
//!
//! Node and client run on runtimes of their own in one process, one thread each; they share nothing but what two processes
//! would. All checks are on. Every figure is the median of several rounds; the bare socket is measured between them.

use anyhow::{Result, ensure};
use bytes::Bytes;
use clap::Parser;
use larder_benches::cpu::cpu_time;
use larder_benches::zero_copy::{self, Sends};
use larder_client::{
    CONNECTIONS, Client, ClientOptions, NewPage, PutOptions, PutOutcome, StoreUrl, Transport, UrlError,
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
    about = "Pages over loopback TCP or shared memory, beside bare ways of moving as many bytes"
)]
struct Args {
    /// Pages in one batch
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Megabytes moved per round
    #[arg(long, default_value_t = 512)]
    megabytes: usize,
    /// How pages move: tcp, shm or auto
    #[arg(long, default_value = "tcp", value_parser = transport)]
    transport: Transport,
    /// Sizes of a page in KiB
    #[arg(long = "page", default_values_t = [64, 256, 1024, 4096])]
    pages_kib: Vec<usize>,
    /// Connections of the client
    #[arg(long, default_value_t = CONNECTIONS)]
    connections: usize,
    /// Show what the bare socket does with sends that leave the bytes where they are
    #[arg(long)]
    zero_copy: bool,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

const L2_BYTES: u64 = 1 << 30;
/// Keys asked for at a time, and how often.
const EXISTS_BATCH: usize = 512;
const EXISTS_BATCHES: usize = 400;
/// Rounds that do not count: in them L2's memory is touched for the first time.
const WARM_UP_ROUNDS: usize = 2;
/// Most bytes the bare socket moves with one call.
const BARE_CHUNK_BYTES: usize = 1 << 20;

fn transport(name: &str) -> Result<Transport, UrlError> {
    format!("larder://bench:1/?transport={name}").parse::<StoreUrl>().map(|url| url.transport)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let client = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    println!(
        "{}, batches of {}, {} MB a round, median of {} rounds, GB/s (CPU seconds per GiB, both sides), GB = 1e9 bytes\n",
        args.transport, args.batch, args.megabytes, args.rounds
    );
    println!(
        "| page KiB | put | put, other memory | get | view | bare | put / bare | get / bare | view / bare | exists, M keys/s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for page_bytes in args.pages_kib.iter().map(|kib| kib << 10) {
        let options =
            NodeOptions { listen: SocketAddr::from(([127, 0, 0, 1], 0)), l2_bytes: L2_BYTES, ..NodeOptions::default() };
        let node = server.block_on(Node::start(options))?;
        let mut figures = [const { Vec::new() }; 5];
        let mut exist = Vec::new();
        for round in 0..WARM_UP_ROUNDS + args.rounds {
            let seen = client.block_on(round_trip(&args, node.addr(), page_bytes, round))?;
            let pages = pages_of(&args, page_bytes);
            let bare = match args.transport {
                Transport::Tcp => bare_socket(pages, page_bytes, args.batch, false)?.0,
                _ => bare_copy(pages, page_bytes, args.batch),
            };
            if round >= WARM_UP_ROUNDS {
                figures
                    .iter_mut()
                    .zip([seen.put, seen.put_plain, seen.get, seen.view, bare])
                    .for_each(|(all, one)| all.push(one));
                exist.push(seen.exists);
            }
        }
        let [put, plain, get, view, bare] = figures.map(Speed::median);
        let (kib, exists) = (page_bytes >> 10, median(exist));
        let of = |speed: Speed| format!("{:.2}", speed.gb_per_s / bare.gb_per_s);
        println!(
            "| {kib} | {put} | {plain} | {get} | {view} | {bare} | {} | {} | {} | {exists:.2} |",
            of(put),
            of(get),
            of(view)
        );
        server.block_on(node.shutdown());
        if args.zero_copy {
            let (speed, sends) = bare_socket(pages_of(&args, page_bytes), page_bytes, args.batch, true)?;
            println!("bare, zero-copy sends: {speed}; of {} the kernel copied {}", sends.all, sends.copied);
        }
    }
    Ok(())
}

/// How fast bytes were moved, and what it cost.
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
    /// Of `bytes` that were moved since `stopwatch` was started.
    fn of(bytes: usize, stopwatch: &Stopwatch) -> Speed {
        let cpu_s = cpu_time().saturating_sub(stopwatch.cpu).as_secs_f64();
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

/// Time and processor time at which something began.
struct Stopwatch {
    began: Instant,
    cpu: Duration,
}

impl Stopwatch {
    fn start() -> Self {
        Self { began: Instant::now(), cpu: cpu_time() }
    }
}

/// Figures of one round.
struct Seen {
    /// From memory of the client's own.
    put: Speed,
    /// From any other.
    put_plain: Speed,
    get: Speed,
    view: Speed,
    /// Millions of keys a second.
    exists: f64,
}

/// Pages of a round.
fn pages_of(args: &Args, page_bytes: usize) -> usize {
    (args.megabytes * 1_000_000 / page_bytes).max(args.batch)
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Puts a round's pages, gets them, looks at them in place, and asks whether they exist, in batches.
async fn round_trip(args: &Args, node: SocketAddr, page_bytes: usize, round: usize) -> Result<Seen> {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 8,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: (page_bytes / (2 * 8 * 8 * 128 * 2)) as u32,
        layers_per_part: 8,
        head_groups: 1,
    };
    ensure!(geometry.page_bytes() == page_bytes, "the geometry makes pages of {page_bytes} bytes");
    let namespace =
        NamespaceDescriptor { model: "bench".into(), weights: [round as u8; 32], geometry, tenant: "bench".into() };
    let url = StoreUrl { nodes: vec![node.to_string()], transport: args.transport, connections: args.connections };
    let client = Client::attach(url, Some(namespace), ClientOptions::default());
    ensure!(client.ready(Duration::from_secs(5)).await, "the node answers");
    // No more than fits into L2 beside the rounds before it; those are evicted.
    let pages = pages_of(args, page_bytes);
    let keys: Vec<PageKey> = (0..pages as u32).map(|i| PageKey::chain(None, &[round as u32, i])).collect();
    let payload = Bytes::from((0..page_bytes).map(|i| (i * 31) as u8).collect::<Vec<u8>>());

    let mut lent = client.buffer(page_bytes);
    lent.copy_from_slice(&payload);
    let put_plain = put_all(args, &client, &keys, &payload).await?;
    ensure!(client.forget(&keys, soon()).await.pages > 0, "what was put is forgotten");
    let put = put_all(args, &client, &keys, &lent.freeze()).await?;

    let mut buffers: Vec<Vec<u8>> = (0..args.batch).map(|_| vec![1u8; page_bytes]).collect();
    let begin = Stopwatch::start();
    for batch in keys.chunks(args.batch) {
        let wanted = batch.iter().copied().zip(buffers.drain(..batch.len())).collect();
        for (buffer, tier) in client.get(wanted, soon()).await {
            ensure!(tier.is_some(), "a page that was just put is there");
            buffers.push(buffer);
        }
    }
    let get = Speed::of(pages * page_bytes, &begin);
    ensure!(buffers[0][..] == payload[..], "the bytes are those that were put");

    let begin = Stopwatch::start();
    for batch in keys.chunks(args.batch) {
        let views = client.view(batch, soon()).await;
        ensure!(views.iter().all(Option::is_some), "a page that was just put is there");
    }
    let view = Speed::of(pages * page_bytes, &begin);

    let asked: Vec<PageKey> = keys.iter().copied().cycle().take(EXISTS_BATCH).collect();
    let begin = Instant::now();
    for _ in 0..EXISTS_BATCHES {
        ensure!(client.exists(&asked, soon()).await.iter().all(|&there| there), "they exist");
    }
    let exists = (EXISTS_BATCH * EXISTS_BATCHES) as f64 / 1e6 / begin.elapsed().as_secs_f64();
    Ok(Seen { put, put_plain, get, view, exists })
}

/// Puts the same bytes under all keys, in batches.
async fn put_all(args: &Args, client: &Client, keys: &[PageKey], payload: &Bytes) -> Result<Speed> {
    let begin = Stopwatch::start();
    for batch in keys.chunks(args.batch) {
        let pages = batch.iter().map(|&key| (NewPage { key, parent: PageKey::NONE, position: 0 }, payload.clone()));
        for outcome in client.put_pages(pages.collect(), PutOptions::default(), soon()).await {
            ensure!(outcome == PutOutcome::Stored, "put: {outcome:?}");
        }
    }
    Ok(Speed::of(keys.len() * payload.len(), &begin))
}

/// One thread that copies pages from where each lies into a batch's buffers.
fn bare_copy(pages: usize, page_bytes: usize, batch: usize) -> Speed {
    let from = vec![7u8; pages * page_bytes];
    let mut into = vec![1u8; batch * page_bytes];
    let begin = Stopwatch::start();
    for (page, from) in from.chunks(page_bytes).enumerate() {
        let at = page % batch * page_bytes;
        into[at..at + page_bytes].copy_from_slice(from);
    }
    std::hint::black_box(&into);
    Speed::of(pages * page_bytes, &begin)
}

/// One blocking stream that sends pages from where each lies and receives them into a batch's buffers, as a client and a node
/// would.
fn bare_socket(pages: usize, page_bytes: usize, batch: usize, zero_copy: bool) -> Result<(Speed, Sends)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let from = vec![7u8; pages * page_bytes];
    let mut into = vec![1u8; batch * page_bytes];
    let sender = std::thread::spawn(move || -> Result<Sends> {
        let (mut stream, _) = listener.accept()?;
        let mut chunks = from.chunks(page_bytes.max(BARE_CHUNK_BYTES));
        if zero_copy {
            return zero_copy::send_all(&stream, &chunks.collect::<Vec<_>>());
        }
        chunks.try_for_each(|chunk| stream.write_all(chunk))?;
        Ok(Sends::default())
    });
    let mut stream = TcpStream::connect(address)?;
    let begin = Stopwatch::start();
    let mut received = 0;
    while received < pages * page_bytes {
        let at = received % into.len();
        let end = into.len().min(at + BARE_CHUNK_BYTES);
        received += match stream.read(&mut into[at..end])? {
            0 => break,
            read => read,
        };
    }
    let speed = Speed::of(received, &begin);
    let sends = sender.join().expect("the sender does not panic")?;
    Ok((speed, sends))
}
