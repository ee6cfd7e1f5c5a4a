//! Index entries over their life: inserted, moved, ranked, used, pinned, dropped.
//!
//! Every change of an entry goes through this module, because index, retention and segment must
//! agree: see the invariants of `retention.rs`.
//!
//! Words: an entry is *inserted* when a page becomes visible, *relocated* when a copy of its record
//! becomes the current one, and *removed* when nothing may serve the page. A page is *dropped* if
//! it is removed while its record stays on the device. A dropped record is *unindexed*, see
//! `unindexed.rs`.

use super::index::{FallbackRecord, Index, NONE, PackedEntry};
use super::*;
use larder_evict::{Evicted, EvictionReason, NamespaceIndex, NewPage};
use larder_format::footer::PageSummary;

impl Log {
    /// Inserts a page that is not indexed. Does not rank it yet.
    pub(super) fn insert_page(&mut self, segment: u32, page: &PageSummary) -> u32 {
        let slot = self.index.insert(segment, page);
        let entry = *self.index.get(slot);
        let namespace = self.index.namespace(entry.namespace);
        if namespace.pages == 1 {
            // Namespace numbers are reused, so the ranking may still have the quota of another one.
            // A namespace without ranked pages has nothing to evict.
            self.retention.set_quota(entry.namespace, namespace.quota_bytes);
        }
        if self.has_quota(&entry) {
            self.retention.retire(slot, &entry);
        }
        self.retention.add(slot, &entry);
        if let Some(epoch) = self.segments.epoch_mut(segment) {
            epoch.add_slot(slot);
        }
        slot
    }

    /// Moves the entry in `slot` to `page`, if that is another record of the same put. Retention
    /// and pin stay. Returns `false` if it is a record of another put.
    pub(super) fn relocate_page(&mut self, slot: u32, segment: u32, page: &PageSummary) -> bool {
        if !self.index.is_same_put(slot, page) {
            return false;
        }
        let &PackedEntry { segment: from, number, generation, .. } = self.index.get(slot);
        let offset = self.index.get(slot).offset();
        self.index.set_fallback(slot, FallbackRecord { segment: from, offset, number, generation });
        self.relocate_entry(slot, |index| index.relocate(slot, &FallbackRecord::of(segment, page)));
        if let Some(epoch) = self.segments.epoch_mut(segment) {
            epoch.add_slot(slot);
        }
        true
    }

    /// Changes the place of an entry, and its position in the retired list.
    fn relocate_entry(&mut self, slot: u32, change: impl FnOnce(&mut Index)) {
        let before = *self.index.get(slot);
        change(&mut self.index);
        if before.retained_at == NONE && self.has_quota(&before) {
            self.retention.unretire(slot, &before);
            self.retention.retire(slot, self.index.get(slot));
        }
    }

    /// Points the entry in `slot` back to the record that its current one was copied from. Returns
    /// `false` if that record is gone.
    pub(super) fn fall_back(&mut self, slot: u32) -> bool {
        let id = self.index.id_of(slot);
        let before = *self.index.get(slot);
        let Some(original) = self.index.take_fallback(slot) else { return false };
        if self.segments.is_reclaiming(original.segment) {
            return false;
        }
        if let Some(epoch) = self.segments.epoch_mut(original.segment) {
            epoch.add_slot(slot);
        }
        if let Some(epoch) = self.segments.epoch(before.segment) {
            self.unindexed.add(id, before.number + 1, epoch.number());
        }
        self.relocate_entry(slot, |index| index.relocate(slot, &original));
        true
    }

    pub(super) fn remove_page(&mut self, slot: u32) -> PackedEntry {
        let entry = *self.index.get(slot);
        self.retention.remove(slot, &entry);
        self.index.remove(slot)
    }

    /// Removes a page whose record stays on the device. The record counts as unindexed from then
    /// on, so that a later forget writes a tombstone.
    pub(super) fn drop_page(&mut self, slot: u32) {
        let id = self.index.id_of(slot);
        let entry = self.remove_page(slot);
        if let Some(recovery) = &mut self.recovery {
            // Recovery has yet to read older segments. An older record of the page must not take
            // its place.
            recovery.delete_below(id, entry.number, true);
        }
        // A restart may bring the record back, so a later forget must write a tombstone.
        if let Some(epoch) = self.segments.epoch(entry.segment)
            && !fail_point!("log.damage-needs-no-tombstone")
        {
            self.unindexed.add(id, entry.number + 1, epoch.number());
        }
    }

    pub(super) fn has_quota(&self, entry: &PackedEntry) -> bool {
        self.index.namespace(entry.namespace).quota_bytes != u64::MAX
    }

    /// Ranks a page, at the cost of others. Returns `true` if the page is ranked now, `false` if
    /// the ranking refuses it.
    pub(super) fn rank_page(&mut self, slot: u32) -> bool {
        let entry = *self.index.get(slot);
        if entry.retained_at != NONE {
            return true;
        }
        let parent = self.index.parent_of(slot).and_then(|parent| self.retention.handle(self.index.get(parent)));
        let page = NewPage {
            name: slot,
            fingerprint: self.index.hash(&self.index.id_of(slot)),
            namespace: NamespaceIndex(entry.namespace),
            parent,
            position: entry.position,
            bytes: entry.record_bytes() as u32,
            // The log expires pages itself. A page that outlives its parent is still worth its
            // room.
            deadline_ms: None,
        };
        let mut evicted = Vec::new();
        let ranked = self.retention.rank(page, &mut evicted);
        if let Some(at) = ranked {
            self.index.get_mut(slot).retained_at = at;
            self.retention.unretire(slot, &entry);
        }
        self.handle_evictions(evicted);
        ranked.is_some()
    }

    /// Retires the pages that the ranking evicted. Drops those whose namespace is over its quota.
    pub(super) fn handle_evictions(&mut self, evicted: Vec<Evicted<u32>>) {
        for Evicted { name: slot, reason, .. } in evicted {
            self.index.get_mut(slot).retained_at = NONE;
            self.retention.evicted(slot);
            let entry = *self.index.get(slot);
            if reason == EvictionReason::Quota {
                self.counts.quota_pages += 1;
                self.drop_page(slot);
            } else if self.has_quota(&entry) {
                self.retention.retire(slot, &entry);
            }
        }
    }

    /// Records a use of a page. A page outside the ranking tries to enter it again, and may
    /// displace others.
    pub(super) fn use_page(&mut self, slot: u32) {
        self.index.get_mut(slot).set_used();
        match self.retention.handle(self.index.get(slot)) {
            Some(handle) => self.retention.touch(handle),
            None => {
                self.rank_page(slot);
            }
        }
    }

    /// Maximum bytes of the records of hard-pinned pages: a quarter of the log. 0 if the log has
    /// too few segments to copy pages.
    pub fn pinned_bytes_max(&self) -> u64 {
        if !self.can_copy_forward() {
            return 0;
        }
        self.config.segment_bytes.saturating_mul(u64::from(self.config.segments_max)) / 4
    }

    /// Sets the pin of a page, whatever it was. After an error the old pin still holds.
    pub fn pin(&mut self, id: &PageId, pin: Pin) -> Result<(), PinError> {
        let slot = self.index.find(id).ok_or(PinError::NotFound)?;
        self.pin_slot(slot, pin)
    }

    pub(super) fn pin_slot(&mut self, slot: u32, pin: Pin) -> Result<(), PinError> {
        if pin == self.retention.pin_of(slot) {
            return Ok(());
        }
        if pin == Pin::Hard {
            let bytes = self.retention.pinned_bytes() + self.index.get(slot).record_bytes();
            let max = self.pinned_bytes_max();
            if bytes > max {
                return Err(PinError::Full { bytes, max });
            }
            if self.is_excluded_from_copy(slot) {
                return Err(PinError::NotKept);
            }
        }
        if pin != Pin::None && !self.rank_page(slot) {
            return Err(PinError::NotKept);
        }
        let entry = *self.index.get(slot);
        self.retention.unpin(slot, &entry);
        let Some(handle) = self.retention.handle(&entry) else { return Ok(()) };
        self.retention.pin(slot, handle, &entry, pin);
        if pin == Pin::Hard {
            self.mark_ancestors_used(slot);
        }
        Ok(())
    }

    /// Marks the pages before a pinned one as used: readers reach a page only through them.
    fn mark_ancestors_used(&mut self, slot: u32) {
        // Parents are found by 32 hash bits, so a chain may be a ring. No sequence is longer than
        // the position of its last page.
        let mut steps = self.index.get(slot).position;
        let mut at = self.index.parent_of(slot);
        while let Some(slot) = at.filter(|_| steps > 0) {
            self.index.get_mut(slot).set_used();
            at = self.index.parent_of(slot);
            steps -= 1;
        }
    }
}
