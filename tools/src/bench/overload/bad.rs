//! Clients that do not behave, and a probe: they speak frames themselves.

use super::line::Line;
use super::load::tenant;
use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;
use larder_format::PageKey;
use larder_wire::{Delivery, Entry, Frame, PROTOCOL_VERSION, PartBytes, Request, ReserveOutcome, Reserved, Response};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const PAGE_BYTES: usize = 256 << 10;
/// Clients that never read what they asked for, and of which each asks for so many pages so many times.
const NEVER_READ: usize = 8;
const NEVER_READ_GETS: u64 = 8;
const NEVER_READ_PAGES: u64 = 100;
/// Those that vanish in the middle of a page, and how often each does.
const VANISH: usize = 4;
const VANISH_EVERY: Duration = Duration::from_millis(100);
/// How often the probe asks.
const PROBE_EVERY: Duration = Duration::from_millis(5);

/// Asks for room for one page.
fn reserve(request: u64, key: PageKey) -> Frame {
    let part_bytes = vec![PAGE_BYTES as u32];
    let page = Reserved { key, parent: PageKey::NONE, position: 0, ttl_ms: 0, part_bytes };
    Request::Reserve(vec![page]).frame(PROTOCOL_VERSION, request, 1000, None)
}

fn key(of: &str, number: u64) -> PageKey {
    let mut name = [0; 32];
    name[..8].copy_from_slice(&number.to_le_bytes());
    name[8..8 + of.len()].copy_from_slice(of.as_bytes());
    PageKey(name)
}

/// Starts those that do not behave, until `stop`; how many vanished half-way.
pub fn start(address: &str, stop: &CancellationToken) -> JoinHandle<u64> {
    let vanished = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for _ in 0..NEVER_READ {
        let address = address.to_string();
        tasks.push(tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            // Who is disconnected comes back.
            loop {
                let _ = never_read(&address).await;
                tokio::time::sleep(VANISH_EVERY).await;
            }
        })));
    }
    for number in 0..VANISH {
        let (address, vanished) = (address.to_string(), vanished.clone());
        tasks.push(tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            for turn in 0.. {
                let key = key("vanish", (number as u64) << 32 | turn);
                if vanish(&address, key).await.is_ok() {
                    vanished.fetch_add(1, Ordering::Relaxed);
                }
                tokio::time::sleep(VANISH_EVERY).await;
            }
        })));
    }
    tokio::spawn(async move {
        for task in tasks {
            let _ = task.await;
        }
        vanished.load(Ordering::Relaxed)
    })
}

/// Asks for much and takes none of it, until the node has enough.
async fn never_read(address: &str) -> Result<()> {
    // Of the tenant whose pages there are.
    let mut line = Line::attach(address, PAGE_BYTES, &tenant(PAGE_BYTES)).await?;
    let keys: Vec<PageKey> = (0..NEVER_READ_PAGES).map(|number| PageKey::chain(None, &[number as u32, 0])).collect();
    for request in 1..=NEVER_READ_GETS {
        line.say(Request::Get { keys: keys.clone(), by: Delivery::Sent }.frame(
            PROTOCOL_VERSION,
            request,
            60_000,
            None,
        ))
        .await?;
    }
    // The node ends it, or nothing does.
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        line.say(Request::Cancel(u64::MAX).frame(PROTOCOL_VERSION, 0, 0, None)).await?;
    }
}

/// Begins a put and is gone in the middle of its bytes.
async fn vanish(address: &str, key: PageKey) -> Result<()> {
    let mut line = Line::attach_for(address, PAGE_BYTES, "vanishing", PAGE_BYTES / 2).await?;
    line.say(reserve(1, key)).await?;
    let part = Request::Part {
        put: Entry { request: 1, index: 0 },
        part: 0,
        crcs: vec![0; PAGE_BYTES >> 16],
        bytes: PartBytes::Payload,
    };
    let said = line.say(part.frame(PROTOCOL_VERSION, 2, 0, Some(Box::new(vec![7u8; PAGE_BYTES])))).await;
    ensure!(said.is_err(), "all of the page was sent");
    Ok(())
}

/// Times refusals on a thread and a connection of its own, until `stop`, in microseconds.
pub fn probe(address: &str, stop: &CancellationToken) -> JoinHandle<Result<Histogram<u64>>> {
    let (address, stop) = (address.to_string(), stop.clone());
    tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async move {
            let mut times = Histogram::new(3)?;
            let mut line = Line::attach(&address, PAGE_BYTES, &tenant(PAGE_BYTES)).await?;
            for request in 1.. {
                if stop.run_until_cancelled(tokio::time::sleep(PROBE_EVERY)).await.is_none() {
                    break;
                }
                let begin = Instant::now();
                line.say(reserve(request, key("probe", request))).await?;
                let outcome = match line.hear().await? {
                    Response::Reserved { outcomes, .. } => outcomes.first().copied(),
                    Response::Busy { .. } => Some(ReserveOutcome::Busy),
                    other => bail!("the probe was answered {other:?}"),
                };
                match outcome {
                    Some(ReserveOutcome::Busy) => times.record(begin.elapsed().as_micros() as u64)?,
                    _ => {
                        let put = Entry { request, index: 0 };
                        line.say(Request::Abort(put).frame(PROTOCOL_VERSION, 0, 0, None)).await?;
                    }
                }
            }
            Ok(times)
        })
    })
}
