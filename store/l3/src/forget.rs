//! Forgetting pages for good.

use crate::L3Error;
use crate::shared::{Shared, WriteGuard};
use crate::write::Planned;
use larder_core::log::Forget;
use larder_core::planted::{Bug, has};
use larder_format::PageId;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

impl Shared {
    /// Writes a tombstone for each page that may be on the device, and makes them durable. Returns how many pages could
    /// be found until now.
    pub(crate) async fn forget(self: &Arc<Self>, ids: &[PageId]) -> Result<usize, L3Error> {
        let (mut found, mut tombstones, mut segments) = (0, Vec::new(), BTreeSet::new());
        for id in ids {
            let planned = self.plan(|shared| {
                Ok(match shared.change(|log| log.forget(id))? {
                    Forget::NotThere => Planned::Done(None),
                    Forget::Write { tombstone, was_found } => Planned::Done(Some((tombstone, was_found))),
                    Forget::Wait => Planned::Wait,
                })
            });
            let Some((tombstone, was_found)) = planned.await? else { continue };
            let (place, number) = (tombstone.header.place, tombstone.header.number);
            let answer = self.write_record(WriteGuard::new(self, tombstone, None), None).await?;
            found += usize::from(was_found);
            segments.insert(place.segment);
            tombstones.push((id, number, place, answer));
        }
        let mut written = Vec::with_capacity(tombstones.len());
        for (id, number, place, answer) in tombstones {
            let result = answer.await.map_err(|_| L3Error::Closed)?;
            result.map_err(|error| self.io_error("writing a tombstone", place.segment, error))?;
            written.push((id, number, place));
        }
        let plan = self.look(|log| log.sync_plan());
        for ticket in plan.into_iter().filter(|ticket| segments.contains(&ticket.segment)) {
            if has(Bug::ForgetWithoutSync) {
                break;
            }
            self.sync_segment(ticket).await?;
        }
        // A sync that somebody else asked for may have failed with these tombstones; one that succeeds later says nothing
        // about them.
        if let Some((_, _, place)) = written.iter().find(|(_, _, place)| self.look(|log| log.sync_failed(place))) {
            let error = io::Error::other("an earlier sync of the segment failed");
            return Err(self.io_error("syncing a tombstone", place.segment, error));
        }
        self.change(|log| written.iter().for_each(|(id, number, _)| log.forgotten(id, *number)));
        self.counters.forgotten_pages.add(found as u64);
        Ok(found)
    }
}
