//! Durable deletion of pages.
//!
//! Invariant: a forget writes a tombstone unless no record of the page can be on the device. See
//! `unindexed.rs` for the records that the index does not know.

use super::{AppendError, Log, PlannedWrite};
use larder_format::PageId;
use larder_format::disk::{BLOCK_BYTES, RecordBody};
use larder_runtime::fail_point;

#[derive(Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "it is moved once")]
pub enum Forget {
    NotThere,
    /// The page cannot be found any more. The caller writes and syncs the tombstone, then calls
    /// [`Log::forgotten`]. Until then a crash may bring the page back.
    Write {
        tombstone: PlannedWrite,
        was_found: bool,
    },
    /// No segment has room for a tombstone, or recovery is running. Nothing changed. Try again
    /// after the next [`Log::prepared`], [`Log::copy_forward_done`] or [`Log::finish_recovery`].
    Wait,
}

impl Log {
    /// Treats the index as incomplete: every forget writes a tombstone until all segments of today
    /// were reclaimed. For a caller that could not make recovered segments durable.
    pub fn mark_index_incomplete(&mut self) {
        self.unindexed.mark_incomplete_up_to(self.segments.next_epoch() - 1);
    }

    /// Forgets a page. No reader finds it from now on, even if a write of it is in flight. A later
    /// put is visible again.
    pub fn forget(&mut self, id: &PageId) -> Result<Forget, AppendError> {
        let page = self.index.entries.fingerprint(id);
        let was_indexed = self.index.entries.find_fingerprint(page).is_some();
        // Segments that recovery has not read yet may hold records of the page.
        if self.recovery.is_some() {
            return if self.stopped { Err(AppendError::Stopped) } else { Ok(Forget::Wait) };
        }
        if !was_indexed && !self.unindexed.may_exist(page) {
            return Ok(Forget::NotThere);
        }
        if fail_point!("log.forget-writes-no-tombstone") {
            self.index.entries.find(id).map(|slot| self.remove_page(slot));
            return Ok(Forget::NotThere);
        }
        let Some(tombstone) = self.plan(RecordBody::Tombstone(*id), &id.namespace, BLOCK_BYTES as u64)? else {
            return Ok(Forget::Wait);
        };
        let number = tombstone.header.number;
        // The plan may have evicted the page to make room, so the lookup above may be stale.
        let slot = self.index.entries.find_fingerprint(page);
        slot.map(|slot| self.remove_page(slot));
        let was_found = slot.is_some();
        self.unindexed.delete_in_flight_below(page, number);
        // Until the tombstone is durable, a crash may bring older records back.
        self.unindexed.add(page, number, tombstone.header.place.epoch);
        Ok(Forget::Write { tombstone, was_found })
    }

    /// Reports that tombstone `number` of a page is durable. From now on no crash brings an older
    /// record of the page back.
    pub fn forgotten(&mut self, id: &PageId, number: u64) {
        self.unindexed.tombstone_durable(self.index.entries.fingerprint(id), number);
    }
}
