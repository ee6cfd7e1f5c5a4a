//! `bench-pages`: pages through a store node over loopback TCP beside a bare socket that moves as many bytes, or by way of
//! shared memory beside one thread that copies them.
//!
//! Node and client run on runtimes of their own in one process, one thread each; they share nothing but what two processes
//! would. All checks are on. Every figure is the median of several rounds; the bare socket is measured between them.

use anyhow::{Result, ensure};
use bytes::Bytes;
use clap::Parser;
use larder_client::{Client, ClientOptions, NewPage, PutOptions, PutOutcome, StoreUrl, Transport, UrlError};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
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
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

const PAGE_BYTES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
const L2_BYTES: u64 = 1 << 30;
/// Keys asked for at a time, and how often.
const EXISTS_BATCH: usize = 512;
const EXISTS_BATCHES: usize = 400;
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
        "{}, batches of {}, {} MB a round, median of {} rounds, GB/s (GB = 1e9 bytes)\n",
        args.transport, args.batch, args.megabytes, args.rounds
    );
    println!("| page KiB | put | get | view | bare | put / bare | get / bare | view / bare | exists, M keys/s |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for page_bytes in PAGE_BYTES {
        let options =
            NodeOptions { listen: SocketAddr::from(([127, 0, 0, 1], 0)), l2_bytes: L2_BYTES, ..NodeOptions::default() };
        let node = server.block_on(Node::start(options))?;
        let mut figures = [const { Vec::new() }; 5];
        for round in 0..args.rounds {
            let seen = client.block_on(round_trip(&args, node.addr(), page_bytes, round))?;
            let pages = pages_of(&args, page_bytes);
            let bare = match args.transport {
                Transport::Tcp => bare_socket(pages, page_bytes, args.batch)?,
                _ => bare_copy(pages, page_bytes, args.batch),
            };
            let all = [seen.put, seen.get, seen.view, bare, seen.exists];
            figures.iter_mut().zip(all).for_each(|(figures, figure)| figures.push(figure));
        }
        let [put, get, view, bare, exists] = figures.map(median);
        let (kib, of) = (page_bytes >> 10, |figure: f64| figure / bare);
        println!(
            "| {kib} | {put:.2} | {get:.2} | {view:.2} | {bare:.2} | {:.2} | {:.2} | {:.2} | {exists:.2} |",
            of(put),
            of(get),
            of(view)
        );
        server.block_on(node.shutdown());
    }
    Ok(())
}

/// Figures of one round: GB/s, and millions of keys a second.
struct Seen {
    put: f64,
    get: f64,
    view: f64,
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

fn gigabytes_per_second(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e9 / time.as_secs_f64()
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
    let url = StoreUrl { nodes: vec![node.to_string()], transport: args.transport };
    let client = Client::attach(url, Some(namespace), ClientOptions::default());
    ensure!(client.ready(Duration::from_secs(5)).await, "the node answers");
    // No more than fits into L2 beside the rounds before it; those are evicted.
    let pages = pages_of(args, page_bytes);
    let keys: Vec<PageKey> = (0..pages as u32).map(|i| PageKey::chain(None, &[round as u32, i])).collect();
    let payload = Bytes::from((0..page_bytes).map(|i| (i * 31) as u8).collect::<Vec<u8>>());

    let begin = Instant::now();
    for batch in keys.chunks(args.batch) {
        let pages = batch.iter().map(|&key| (NewPage { key, parent: PageKey::NONE, position: 0 }, payload.clone()));
        for outcome in client.put_pages(pages.collect(), PutOptions::default(), soon()).await {
            ensure!(outcome == PutOutcome::Stored, "put: {outcome:?}");
        }
    }
    let put = gigabytes_per_second(pages * page_bytes, begin.elapsed());

    let mut buffers: Vec<Vec<u8>> = (0..args.batch).map(|_| vec![1u8; page_bytes]).collect();
    let begin = Instant::now();
    for batch in keys.chunks(args.batch) {
        let wanted = batch.iter().copied().zip(buffers.drain(..batch.len())).collect();
        for (buffer, tier) in client.get(wanted, soon()).await {
            ensure!(tier.is_some(), "a page that was just put is there");
            buffers.push(buffer);
        }
    }
    let get = gigabytes_per_second(pages * page_bytes, begin.elapsed());
    ensure!(buffers[0][..] == payload[..], "the bytes are those that were put");

    let begin = Instant::now();
    for batch in keys.chunks(args.batch) {
        let views = client.view(batch, soon()).await;
        ensure!(views.iter().all(Option::is_some), "a page that was just put is there");
    }
    let view = gigabytes_per_second(pages * page_bytes, begin.elapsed());

    let asked: Vec<PageKey> = keys.iter().copied().cycle().take(EXISTS_BATCH).collect();
    let begin = Instant::now();
    for _ in 0..EXISTS_BATCHES {
        ensure!(client.exists(&asked, soon()).await.iter().all(|&there| there), "they exist");
    }
    let exists = (EXISTS_BATCH * EXISTS_BATCHES) as f64 / 1e6 / begin.elapsed().as_secs_f64();
    Ok(Seen { put, get, view, exists })
}

/// One thread that copies pages from where each lies into a batch's buffers; GB/s.
fn bare_copy(pages: usize, page_bytes: usize, batch: usize) -> f64 {
    let from = vec![7u8; pages * page_bytes];
    let mut into = vec![1u8; batch * page_bytes];
    let begin = Instant::now();
    for (page, from) in from.chunks(page_bytes).enumerate() {
        let at = page % batch * page_bytes;
        into[at..at + page_bytes].copy_from_slice(from);
    }
    std::hint::black_box(&into);
    gigabytes_per_second(pages * page_bytes, begin.elapsed())
}

/// One blocking stream that sends pages from where each lies and receives them into a batch's buffers, as a client and a node
/// would; GB/s.
fn bare_socket(pages: usize, page_bytes: usize, batch: usize) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let from = vec![7u8; pages * page_bytes];
    let mut into = vec![1u8; batch * page_bytes];
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        from.chunks(page_bytes.max(BARE_CHUNK_BYTES)).try_for_each(|chunk| stream.write_all(chunk))
    });
    let mut stream = TcpStream::connect(address)?;
    let begin = Instant::now();
    let mut received = 0;
    while received < pages * page_bytes {
        let at = received % into.len();
        let end = into.len().min(at + BARE_CHUNK_BYTES);
        received += match stream.read(&mut into[at..end])? {
            0 => break,
            read => read,
        };
    }
    let speed = gigabytes_per_second(received, begin.elapsed());
    sender.join().expect("the sender does not panic")?;
    Ok(speed)
}
