//! Forgetting pages for good.

use crate::L3Error;
use crate::shared::{Shared, WriteGuard};
use crate::write::Planned;
use larder_core::log::Forget;
use larder_format::PageId;
use std::collections::BTreeSet;
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
            let (segment, number) = (tombstone.header.place.segment, tombstone.header.number);
            let answer = self.write_record(WriteGuard::new(self, tombstone, None), None).await?;
            found += usize::from(was_found);
            segments.insert(segment);
            tombstones.push((id, number, segment, answer));
        }
        let mut written = Vec::with_capacity(tombstones.len());
        for (id, number, segment, answer) in tombstones {
            let result = answer.await.map_err(|_| L3Error::Closed)?;
            result.map_err(|error| self.io_error("writing a tombstone", segment, error))?;
            written.push((id, number));
        }
        let plan = self.look(|log| log.sync_plan());
        for ticket in plan.into_iter().filter(|ticket| segments.contains(&ticket.segment)) {
            self.sync_segment(ticket).await?;
        }
        self.change(|log| written.iter().for_each(|(id, number)| log.forgotten(id, *number)));
        self.counters.forgotten_pages.add(found as u64);
        Ok(found)
    }
}
