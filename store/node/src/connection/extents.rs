//! Extents of pages on L3, which a client of the same machine reads by itself.
//!
//! Invariants:
//! - A connection gets extents only with an arena session, over which the files travel.
//! - Each extent is that of a held record. Its hold ends with the task of its request: by Cancel,
//!   with the connection, and `NodeOptions::extent_hold_time` after the first hold. So the time
//!   includes all waits up to the answer.
//! - A record without a file for its client is released before the answer.
//! - The held records are bounded, for the node and per connection.
//!
//! Holds only keep pages readable. The client verifies what it has read, so a segment that is
//! reused under a late reader costs a miss. A hold without an end would cost more: the log
//! reclaims its segments in order, and writers wait for it.

use super::Connection;
use super::get::READS_AT_ONCE;
use crate::state::NodeState;
use futures::StreamExt;
use larder_format::PageId;
use larder_format::disk::LogId;
use larder_io::DeviceFile;
use larder_log::HeldRecord;
use larder_memory::share::ArenaSession;
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use larder_wire::{Extent, MAX_EXTENT_FILES, Response};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of records that a node holds for clients that read L3 by themselves.
const HELD_RECORDS_MAX: usize = 1024;
/// Maximum number of records that it holds for one connection.
const HELD_RECORDS_PER_CLIENT_MAX: usize = 256;
/// Time without extents for a client that let the time of a hold pass: writers may have waited for
/// it.
const PAUSE: Duration = Duration::from_secs(60);

/// Bounds of a node that all connections share.
pub(crate) struct ExtentLimits {
    records: Arc<Semaphore>,
    /// Requests that have files open, one at a time: at most [`MAX_EXTENT_FILES`] descriptors.
    opening: Semaphore,
}

impl Default for ExtentLimits {
    fn default() -> Self {
        Self { records: Arc::new(Semaphore::new(HELD_RECORDS_MAX)), opening: Semaphore::new(1) }
    }
}

/// Session of one client, with its bounds.
pub(super) struct ExtentSession {
    session: Arc<ArenaSession>,
    records: Arc<Semaphore>,
    paused_until: Mutex<Option<Instant>>,
}

impl ExtentSession {
    pub(super) fn new(session: Arc<ArenaSession>) -> Arc<Self> {
        let records = Arc::new(Semaphore::new(HELD_RECORDS_PER_CLIENT_MAX));
        Arc::new(Self { session, records, paused_until: Mutex::new(None) })
    }

    fn is_paused(&self) -> bool {
        self.paused_until.lock().is_some_and(|until| now() < until)
    }
}

/// A held record, with its shares of the bounds.
struct Held {
    record: HeldRecord,
    _permits: [OwnedSemaphorePermit; 2],
}

impl Connection {
    /// Answers with the extents of those pages that only L3 has, and holds their records.
    pub(super) async fn extents(&mut self, request: u64, ids: Vec<PageId>, deadline: Instant) -> io::Result<()> {
        let Some(client) = self.extents.clone().filter(|client| !client.is_paused()) else {
            return self.outbox.respond(request, no_extents(ids.len())).await;
        };
        let (node, responder) = (self.node.clone(), self.responder(request, deadline));
        self.spawn_or_inline(request, ids.len(), false, async move {
            let held_until = now() + node.store.options().extent_hold_time;
            let until = deadline.min(held_until);
            let mut held = hold_all(&node, &client, &ids, until).await;
            let response = describe(&node, &client, request, &mut held, until).await;
            if held.iter().all(Option::is_none) {
                return responder.finish(response).await;
            }
            // Waits while the client does not read its answers.
            let is_answered = match tokio::time::timeout_at(until.into(), responder.finish(response)).await {
                Ok(answered) => {
                    answered?;
                    // Cancel and the end of the connection abort this task.
                    tokio::time::sleep_until(held_until.into()).await;
                    true
                }
                Err(_) => false,
            };
            drop(held);
            *client.paused_until.lock() = Some(now() + PAUSE);
            node.metrics.extent_holds_expired.inc();
            if is_answered { Ok(()) } else { responder.finish(no_extents(ids.len())).await }
        })
        .await
    }
}

fn no_extents(pages: usize) -> Response {
    Response::Extents { files: 0, extents: vec![None; pages] }
}

/// Holds the records of pages, in the order of `ids`. `None` for a page that is not on L3 alone, or
/// beyond a bound.
async fn hold_all(node: &NodeState, client: &ExtentSession, ids: &[PageId], until: Instant) -> Vec<Option<Held>> {
    let hold = |id: PageId| async move {
        let of_client = client.records.clone().try_acquire_owned().ok()?;
        let of_node = node.extents.records.clone().try_acquire_owned().ok()?;
        let record = node.store.tiers().hold_record(&id, until).await?;
        Some(Held { record, _permits: [of_client, of_node] })
    };
    futures::stream::iter(ids.iter().copied()).map(hold).buffered(READS_AT_ONCE).collect().await
}

/// Sends the files of held records to the client, and returns the answer that names their extents.
/// Releases the records without a file at once.
async fn describe(
    node: &NodeState,
    client: &ExtentSession,
    request: u64,
    held: &mut [Option<Held>],
    until: Instant,
) -> Response {
    let opening = tokio::time::timeout_at(until.into(), node.extents.opening.acquire()).await;
    let mut files: Vec<((LogId, u32), DeviceFile)> = Vec::new();
    let mut extents = vec![None; held.len()];
    for (slot, extent) in held.iter_mut().zip(&mut extents) {
        if let (Some(Held { record, .. }), Ok(Ok(_))) = (&*slot, &opening) {
            *extent = file_of(record, &mut files, until).await.map(|file| Extent {
                file,
                offset: record.payload_offset(),
                meta: record.meta().clone(),
            });
        }
        if extent.is_none() {
            *slot = None;
        }
    }
    let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|(_, file)| file.as_fd()).collect();
    if !descriptors.is_empty()
        && let Err(error) = client.session.send_files(request, &descriptors)
    {
        tracing::debug!(%error, "cannot send files of L3 to a local client; it reads through the node");
        held.fill_with(|| None);
        return no_extents(held.len());
    }
    let pages = extents.iter().flatten().count() as u64;
    node.metrics.pages_extents.inc_by(pages);
    node.metrics.pages_hit_l3.inc_by(pages);
    Response::Extents { files: files.len() as u32, extents }
}

/// Position of the file of a record in `files`, where it is added if it is new. `None` if it cannot
/// be opened by then, or beyond [`MAX_EXTENT_FILES`].
async fn file_of(record: &HeldRecord, files: &mut Vec<((LogId, u32), DeviceFile)>, until: Instant) -> Option<u32> {
    let segment = record.segment();
    if let Some(known) = files.iter().position(|(known, _)| *known == segment) {
        return Some(known as u32);
    }
    if files.len() == MAX_EXTENT_FILES {
        return None;
    }
    let opened = tokio::time::timeout_at(until.into(), record.open_file()).await;
    match opened.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(file) => files.push((segment, file)),
        Err(error) => {
            tracing::debug!(?record, %error, "cannot open a file of L3 for a local client; it reads through the node");
            return None;
        }
    }
    Some(files.len() as u32 - 1)
}
