//! Holding the memory of pages for readers, without the `state` lock.
//!
//! A forgotten page must not be held, or `holds` would serve it again. The steps that make a put
//! go away come in this order:
//!
//! 1. Remove the put from every place where it can be found.
//! 2. Record the change: [`ChangeCounters::record`](super::changes::ChangeCounters::record).
//! 3. Withhold the page: [`Holds::withhold`](crate::holds::Holds::withhold).
//!
//! A hold reads the stamp, then finds the put, then holds it under the lock of `holds` if the stamp
//! is unchanged. If the hold comes before step 3, that step withholds it. If it comes after step 3,
//! it sees the change of step 2, unless it read the stamp after step 2. In that case it looked for
//! the put after step 1, and did not find it.

use super::{ReadRecord, Tiers};
use crate::holds::{Hold, HoldOutcome};
use crate::page::Page;
use larder_format::PageId;
use std::sync::Arc;

/// Attempts to hold a page whose change counter moves. Each failure needs another put, load or
/// forget of a page with the same counter at that very moment.
const ATTEMPTS: usize = 8;

impl Tiers {
    /// Holds a page: its memory stays in place and readable until the hold is dropped. Returns
    /// `None` if too many bytes are held, or if the page is no longer current. It may have been
    /// forgotten since it was found.
    pub(crate) fn hold(&self, page: &Arc<Page>) -> Option<Hold> {
        let id = page.id();
        for _ in 0..ATTEMPTS {
            let stamp = self.changes.stamp(&id);
            if !self.is_current(&id, page.generation()) {
                return None;
            }
            match self.holds.hold(page, || self.changes.stamp(&id) == stamp) {
                HoldOutcome::Held(hold) => return Some(hold),
                HoldOutcome::Refused => return None,
                HoldOutcome::Changed => {}
            }
        }
        None
    }

    /// Returns `true` if this put can be found. Takes no lock that is held during another one.
    fn is_current(&self, id: &PageId, generation: u64) -> bool {
        let is_same_put = |found: Arc<Page>| found.generation() == generation;
        // The cheapest probe first; most pages are in L2.
        self.l2.get(id).is_some_and(is_same_put)
            || self.writeback.get(id).is_some_and(is_same_put)
            || self.holds.get(id).is_some_and(is_same_put)
            || self.devices.generation(id) == Some(generation)
    }

    pub(crate) fn hold_l2(&self, id: &PageId) -> Option<Hold> {
        self.get_l2(id).and_then(|page| self.hold(&page))
    }

    /// Holds those of `ids` that are in DRAM and for which `wanted` (index in `ids`, page) returns
    /// `true`. Records a read of each.
    pub(crate) fn hold_all_l2(
        &self,
        ids: &[PageId],
        wanted: impl Fn(usize, &Page) -> bool,
        record: ReadRecord,
    ) -> Vec<Option<Hold>> {
        let hold = |(index, id)| self.hold(&self.get_l2(id).filter(|page| wanted(index, page))?);
        let holds: Vec<Option<Hold>> = ids.iter().enumerate().map(hold).collect();
        self.record_reads(holds.iter().flatten().map(|hold| &**hold.page()), record);
        holds
    }
}
