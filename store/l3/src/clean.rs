//! Rescuing what will be asked for again out of a segment that is about to be written anew.
//!
//! Always true: a page is copied only as it was verified just now; the segment goes on to be written anew only once the
//! copies are durable, or could not be made. A page that cannot be copied is evicted, which is a miss. Writers wait for the
//! segment, and may hold the memory that copies want: so the wait for memory is bounded for a cleaning as a whole, however
//! many pages it has, and there is none once the log is being closed.

use crate::L3Error;
use crate::shared::{Preparations, ReadGuard, Shared, WriteGuard};
use futures::stream::{self, StreamExt};
use larder_core::log::{Clean, ReadTicket};
use larder_device::{Lane, Slot};
use larder_format::disk::BLOCK_BYTES;
use larder_format::{PageId, PageMeta};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Pages that are copied at a time.
const COPIES_AT_ONCE: usize = 4;
/// Times that the copies of one cleaning together ask again for memory, and the pause before each.
const MEMORY_TRIES: u32 = 400;
const MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// Copies the pages that the log wants to keep, and reports to it, whatever came of them.
pub(crate) async fn clean(shared: Arc<Shared>, clean: Clean, ended: Ended) {
    let tries = AtomicU32::new(MEMORY_TRIES);
    let copies = stream::iter(clean.pages).map(|(id, number)| copy(&shared, id, number, &tries));
    let copied: Vec<_> = copies.buffer_unordered(COPIES_AT_ONCE).collect().await;
    let (mut targets, mut without_memory) = (BTreeSet::new(), 0);
    for outcome in copied {
        match outcome {
            Ok(Some(segment)) => {
                targets.insert(segment);
            }
            Ok(None) => {}
            Err(L3Error::NoMemory { .. }) => without_memory += 1,
            Err(error) => tracing::warn!(segment = clean.segment, %error, "page not rescued from the oldest segment"),
        }
    }
    if without_memory > 0 {
        let segment = clean.segment;
        tracing::warn!(segment, pages = without_memory, "not rescued from the oldest segment: no memory to copy with");
    }
    // Not durable in its new place, a page would be lost by a crash of the machine that the old place survives.
    let plan = shared.look(|log| log.sync_plan());
    for ticket in plan.into_iter().filter(|ticket| targets.contains(&ticket.segment)) {
        let _ = shared.sync_segment(ticket).await;
    }
    drop(ended);
}

/// The end of a cleaning, however it comes: a log that never heard of it would make writers wait for ever.
pub(crate) struct Ended {
    shared: Arc<Shared>,
    segment: u32,
    life: u64,
}

impl Ended {
    pub(crate) fn of(shared: &Arc<Shared>, clean: &Clean) -> Ended {
        Ended { shared: shared.clone(), segment: clean.segment, life: clean.life }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.shared.change(|log| log.cleaned(self.segment, self.life));
        // Room that was kept for copies may be had by writers now.
        self.shared.prepared.change(Preparations::next_turn);
    }
}

/// Readers may have all memory for a moment; a page that is worth rescuing is worth waiting for that, as long as there are
/// `tries` left.
async fn read_patiently(
    shared: &Arc<Shared>,
    ticket: ReadTicket,
    tries: &AtomicU32,
) -> Result<Option<(PageMeta, Slot)>, L3Error> {
    let bytes = BLOCK_BYTES + ticket.entry.payload_bytes as usize;
    let guard = ReadGuard::new(shared, ticket);
    loop {
        if let Some(slot) = shared.arena.allocate(bytes) {
            return shared.read_into(slot, guard, Lane::Background).await;
        }
        shared.open()?;
        if tries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |tries| tries.checked_sub(1)).is_err() {
            return Err(L3Error::NoMemory { bytes });
        }
        shared.device.sleep(MEMORY_PAUSE).await;
    }
}

/// The segment it was copied to; `None` if there is nothing to copy any more.
async fn copy(shared: &Arc<Shared>, id: PageId, number: u64, tries: &AtomicU32) -> Result<Option<u32>, L3Error> {
    let Some(ticket) = shared.change(|log| log.hold(&id, number)) else { return Ok(None) };
    let Some((meta, payload)) = read_patiently(shared, ticket, tries).await? else { return Ok(None) };
    let Some(planned) = shared.change(|log| log.copy(&id, number, &meta)) else { return Ok(None) };
    let segment = planned.header.place.segment;
    let bytes = payload.len() as u64;
    let answer = shared.write_record(WriteGuard::new(shared, planned, None), Some(payload)).await?;
    let result = answer.await.map_err(|_| L3Error::Closed)?;
    result.map_err(|error| shared.io_error("writing", segment, error))?;
    shared.counters.rescued_pages.add(1);
    shared.counters.rescued_bytes.add(bytes);
    Ok(Some(segment))
}
