//! Misbehaving clients, and the probe that measures the latency of refusals. All use raw frames.

use super::connection::{FrameConnection, VERSION};
use super::workload::{namespace, tenant};
use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;
use larder_format::PageKey;
use larder_wire::{Delivery, Entry, Frame, PartLocation, Request, ReserveOutcome, Reserved, Response};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const PAGE_BYTES: usize = 256 << 10;
/// Number of clients that never read, and the gets and pages per get of each. The node must
/// disconnect them, or it buffers pages without a bound.
const NON_READING: usize = 8;
const NON_READING_GETS: u64 = 8;
const NON_READING_PAGES: u64 = 100;
/// Number of clients that disconnect in the middle of a page, and the interval of each. The node
/// must free the memory of these puts.
const DISCONNECTING: usize = 4;
const DISCONNECT_INTERVAL: Duration = Duration::from_millis(100);
const PROBE_INTERVAL: Duration = Duration::from_millis(5);

fn reserve(request: u64, key: PageKey) -> Frame {
    let page = Reserved::first(key, vec![PAGE_BYTES as u32]);
    Request::Reserve(vec![page]).frame(VERSION, request, 1000, None)
}

fn key(client: &str, number: u64) -> PageKey {
    let mut name = [0; 32];
    name[..8].copy_from_slice(&number.to_le_bytes());
    name[8..8 + client.len()].copy_from_slice(client.as_bytes());
    PageKey(name)
}

/// Starts the misbehaving clients, which run until `stop`. Returns how many times one disconnected
/// in the middle of a put.
pub fn start(address: &str, stop: &CancellationToken) -> JoinHandle<u64> {
    let disconnected = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for _ in 0..NON_READING {
        let address = address.to_string();
        tasks.push(tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            // The node disconnects such a client, which then connects again.
            loop {
                let _ = request_without_reading(&address).await;
                tokio::time::sleep(DISCONNECT_INTERVAL).await;
            }
        })));
    }
    for number in 0..DISCONNECTING {
        let address = address.to_string();
        let disconnected = disconnected.clone();
        tasks.push(tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            for sequence in 0.. {
                let key = key("vanish", (number as u64) << 32 | sequence);
                if disconnect(&address, key).await.is_ok() {
                    disconnected.fetch_add(1, Ordering::Relaxed);
                }
                tokio::time::sleep(DISCONNECT_INTERVAL).await;
            }
        })));
    }
    tokio::spawn(async move {
        for task in tasks {
            let _ = task.await;
        }
        disconnected.load(Ordering::Relaxed)
    })
}

/// Requests pages without reading the answers, until the node closes the connection. The node must
/// not buffer them without a bound.
async fn request_without_reading(address: &str) -> Result<()> {
    // The pages of this tenant exist, so the node has something to send.
    let mut connection = FrameConnection::attach(address, namespace(PAGE_BYTES, &tenant(PAGE_BYTES))).await?;
    let keys: Vec<PageKey> = (0..NON_READING_PAGES).map(|number| PageKey::chain(None, &[number as u32, 0])).collect();
    for request in 1..=NON_READING_GETS {
        connection
            .send(Request::Get { keys: keys.clone(), by: Delivery::Inline }.frame(VERSION, request, 60_000, None))
            .await?;
    }
    // Sending reveals when the node has closed the connection.
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        connection.send(Request::Cancel(u64::MAX).frame(VERSION, 0, 0, None)).await?;
    }
}

async fn disconnect(address: &str, key: PageKey) -> Result<()> {
    let mut connection =
        FrameConnection::attach_truncated(address, namespace(PAGE_BYTES, "vanishing"), PAGE_BYTES / 2).await?;
    connection.send(reserve(1, key)).await?;
    let part = Request::Part {
        put: Entry { request: 1, index: 0 },
        part: 0,
        crcs: vec![0; PAGE_BYTES >> 16],
        bytes: PartLocation::Inline,
    };
    let sent = connection.send(part.frame(VERSION, 2, 0, Some(Box::new(vec![7u8; PAGE_BYTES])))).await;
    ensure!(sent.is_err(), "the whole page was sent");
    Ok(())
}

/// Measures the latency of refusals in microseconds until `stop`. Has its own thread and
/// connection, so that other load does not delay it.
pub fn probe(address: &str, stop: &CancellationToken) -> JoinHandle<Result<Histogram<u64>>> {
    let address = address.to_string();
    let stop = stop.clone();
    tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async move {
            let mut times = Histogram::new(3)?;
            let mut connection = FrameConnection::attach(&address, namespace(PAGE_BYTES, &tenant(PAGE_BYTES))).await?;
            for request in 1.. {
                if stop.run_until_cancelled(tokio::time::sleep(PROBE_INTERVAL)).await.is_none() {
                    break;
                }
                let begin = Instant::now();
                connection.send(reserve(request, key("probe", request))).await?;
                let outcome = match connection.receive().await? {
                    Response::Reserved { outcomes, .. } => outcomes.first().copied(),
                    Response::Busy { .. } => Some(ReserveOutcome::Busy),
                    other => bail!("the node sent the probe an unexpected answer: {other:?}"),
                };
                match outcome {
                    Some(ReserveOutcome::Busy) => times.record(begin.elapsed().as_micros() as u64)?,
                    _ => {
                        let put = Entry { request, index: 0 };
                        connection.send(Request::Abort(put).frame(VERSION, 0, 0, None)).await?;
                    }
                }
            }
            Ok(times)
        })
    })
}
