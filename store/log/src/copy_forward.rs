//! Copy-forward: copies pages out of the segment that is reclaimed next.
//!
//! Invariants:
//! - A page is copied only as it was just verified.
//! - The segment is reclaimed only after the copies are durable or have failed. A page that was not
//!   copied is evicted, which is a miss.
//! - The end is reported to the log in any case, because writers wait for the segment.
//!
//! Writers may hold all the memory that copies need. So the wait for memory is bounded for a
//! copy-forward as a whole, and ends at once when the log is closed.

use crate::L3Error;
use crate::guards::{ReadGuard, WriteGuard};
use crate::machine::{CopyForward, ReadTicket, RecordRef};
use crate::read::VerifiedPage;
use crate::shared::{LogShared, Preparations};
use futures::stream::{self, StreamExt};
use larder_io::Priority;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Number of pages copied concurrently. More would take memory from clients for little gain.
const COPIES_IN_FLIGHT: usize = 4;
/// Number of retries for memory that all copies of one copy-forward share: 4 s in total.
const MEMORY_RETRIES: u32 = 400;
const MEMORY_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Copies pages to the open segment, and syncs the copies. The guard then reports the end to the
/// log.
pub(crate) async fn copy_forward(shared: Arc<LogShared>, work: CopyForward, guard: CopyForwardGuard) {
    let retries = AtomicU32::new(MEMORY_RETRIES);
    let copies = stream::iter(work.pages).map(|record| copy_page(&shared, record, &retries));
    let copied: Vec<_> = copies.buffer_unordered(COPIES_IN_FLIGHT).collect().await;
    let file = shared.segment_path(work.segment);
    let file = file.display();
    let mut targets = BTreeSet::new();
    let mut without_memory = 0;
    for result in copied {
        match result {
            Ok(Some(segment)) => {
                targets.insert(segment);
            }
            Ok(None) => {}
            Err(L3Error::NoMemory { .. }) => without_memory += 1,
            Err(error) => {
                tracing::warn!(%file, %error, "L3: cannot copy a page from the oldest segment; it is evicted")
            }
        }
    }
    if without_memory > 0 {
        tracing::warn!(
            %file, pages = without_memory,
            "L3: no memory to copy pages from the oldest segment; they are evicted. Raise the L2 capacity if this repeats"
        );
    }
    // The original is overwritten next. A crash of the machine must not find neither.
    for ticket in shared.sync_tickets(|segment| targets.contains(&segment)) {
        // A failed sync is counted and logged. The copies stay readable until a crash.
        let _ = shared.sync_segment(ticket).await;
    }
    drop(guard);
}

/// Reports the end of a copy-forward when dropped. Writers would wait for ever for a segment whose
/// copy-forward never ends.
pub(crate) struct CopyForwardGuard {
    shared: Arc<LogShared>,
    segment: u32,
    epoch: u64,
}

impl CopyForwardGuard {
    pub(crate) fn new(shared: &Arc<LogShared>, work: &CopyForward) -> CopyForwardGuard {
        CopyForwardGuard { shared: shared.clone(), segment: work.segment, epoch: work.epoch }
    }
}

impl Drop for CopyForwardGuard {
    fn drop(&mut self) {
        self.shared.update_log(|log| log.copy_forward_done(self.segment, self.epoch));
        // Writers may now use the room that was reserved for copies.
        self.shared.preparations.update(Preparations::next_turn);
    }
}

/// Copies one page. Returns the segment of the copy, or `None` if the page no longer needs one.
async fn copy_page(shared: &Arc<LogShared>, record: RecordRef, retries: &AtomicU32) -> Result<Option<u32>, L3Error> {
    let Some(ticket) = shared.entries().begin_maintenance_read(record) else { return Ok(None) };
    let Some((meta, payload)) = read_when_memory(shared, ticket, retries).await? else { return Ok(None) };
    let Some(planned) = shared.update_log(|log| log.plan_copy(record, &meta)) else { return Ok(None) };
    let segment = planned.header.place.segment;
    let bytes = payload.len() as u64;
    let answer = shared.submit_record(WriteGuard::new(shared, planned, None), Some(payload)).await?;
    let result = answer.await.map_err(|_| L3Error::Closed)?;
    result.map_err(|error| shared.io_error("write", segment, error))?;
    shared.counters.copied_forward_pages.add(1);
    shared.counters.copied_forward_bytes.add(bytes);
    Ok(Some(segment))
}

/// Reads a record, and waits for memory while there are `retries` left. Readers may hold all memory
/// for a moment, and a page that is worth a copy is worth that wait.
async fn read_when_memory(
    shared: &Arc<LogShared>,
    ticket: ReadTicket,
    retries: &AtomicU32,
) -> Result<Option<VerifiedPage>, L3Error> {
    let bytes = ticket.entry.payload_bytes as usize;
    // The guard exists before the wait, so a dropped future still ends the read.
    let guard = ReadGuard::new(shared, ticket);
    loop {
        let error = match shared.allocate_record(bytes) {
            Ok(memory) => return shared.read_record_into(memory, guard, Priority::Background).await,
            Err(error) => error,
        };
        shared.ensure_open()?;
        // Relaxed: the count orders no other memory access.
        if retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            return Err(error);
        }
        shared.device.sleep(MEMORY_RETRY_PAUSE).await;
    }
}
