//! Durable forgets: tombstones, written and synced.

use crate::L3Error;
use crate::guards::WriteGuard;
use crate::machine::Forget;
use crate::shared::LogShared;
use crate::write::PlanAttempt;
use larder_format::PageId;
use larder_format::disk::RecordPlace;
use larder_runtime::fail_point;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use tokio::sync::oneshot;

struct Tombstone {
    id: PageId,
    number: u64,
    place: RecordPlace,
    written: oneshot::Receiver<io::Result<()>>,
    was_found: bool,
}

impl LogShared {
    /// Writes a tombstone for each page that may be on the device, and syncs them. Returns the
    /// number of pages that readers could find until now.
    pub(crate) async fn forget_pages(self: &Arc<Self>, ids: &[PageId]) -> Result<usize, L3Error> {
        // All tombstones are submitted before the first one is awaited, so that one sync covers
        // them all.
        let mut tombstones = Vec::new();
        for id in ids {
            tombstones.extend(self.submit_tombstone(id).await?);
        }
        let found = tombstones.iter().filter(|tombstone| tombstone.was_found).count();
        let segments: BTreeSet<u32> = tombstones.iter().map(|tombstone| tombstone.place.segment).collect();
        let mut written = Vec::with_capacity(tombstones.len());
        for Tombstone { id, number, place, written: result, .. } in tombstones {
            let result = result.await.map_err(|_| L3Error::Closed)?;
            result.map_err(|error| self.io_error("write a tombstone to", place.segment, error))?;
            written.push((id, number, place));
        }
        if !fail_point!("log.forget-skips-sync") {
            for ticket in self.sync_tickets(|segment| segments.contains(&segment)) {
                self.sync_segment(ticket).await?;
            }
        }
        // A concurrent sync may have failed after these tombstones were written. A later sync that
        // succeeds does not make them durable.
        if let Some((_, _, place)) =
            written.iter().find(|(_, _, place)| self.with_log(|log| log.has_failed_sync(place)))
        {
            let error = io::Error::other("an earlier sync of the segment failed");
            return Err(self.io_error("sync a tombstone in", place.segment, error));
        }
        self.update_log(|log| written.iter().for_each(|(id, number, _)| log.forgotten(id, *number)));
        self.counters.forgotten_pages.add(found as u64);
        Ok(found)
    }

    /// Plans and submits the tombstone of a page. Returns `None` if no record of the page can be on
    /// the device.
    async fn submit_tombstone(self: &Arc<Self>, id: &PageId) -> Result<Option<Tombstone>, L3Error> {
        let planned = self.plan_when_room(|shared| {
            Ok(match shared.update_log(|log| log.forget(id))? {
                Forget::NotThere => PlanAttempt::Done(None),
                Forget::Write { tombstone, was_found } => PlanAttempt::Done(Some((tombstone, was_found))),
                Forget::Wait => PlanAttempt::Wait,
            })
        });
        let Some((tombstone, was_found)) = planned.await? else { return Ok(None) };
        let place = tombstone.header.place;
        let number = tombstone.header.number;
        let written = self.submit_record(WriteGuard::new(self, tombstone, None), None).await?;
        Ok(Some(Tombstone { id: *id, number, place, written, was_found }))
    }
}
