//! Index entries over their life: inserted, moved, used, pinned, dropped.
//!
//! Every change of an entry goes through this module, because index, retention and segment must
//! agree: see the invariants of `retention.rs`.
//!
//! Words: an entry is *inserted* when a page becomes visible, *relocated* when a copy of its record
//! becomes the current one, and *removed* when nothing may serve the page. A page is *dropped* if
//! it is removed while its record stays on the device. A dropped record is *unindexed*, see
//! `unindexed.rs`.

use super::entry::PackedEntry;
use super::index::FallbackRecord;
use super::*;
use larder_format::footer::PageSummary;

impl Log {
    /// Inserts a page that is not indexed.
    pub(super) fn insert_page(&mut self, segment: u32, page: &PageSummary) -> u32 {
        let slot = self.index.insert(segment, page);
        if let Some(names) = &mut self.names {
            names.set(slot, &page.id.key);
        }
        self.update_quota_order(slot);
        if let Some(epoch) = self.segments.epoch_mut(segment) {
            epoch.add_slot(slot);
        }
        slot
    }

    /// Moves the entry in `slot` to `page`, if that is another record of the same put. Retention
    /// and pin stay. Returns `false` if it is a record of another put.
    pub(super) fn relocate_page(&mut self, slot: u32, segment: u32, page: &PageSummary) -> bool {
        let entry = self.index.entries.get(slot);
        if !entry.is_same_put(page) {
            return false;
        }
        self.index.set_fallback(slot, FallbackRecord::of_entry(&entry));
        self.relocate_entry(slot, &FallbackRecord::of(segment, page));
        if let Some(epoch) = self.segments.epoch_mut(segment) {
            epoch.add_slot(slot);
        }
        true
    }

    /// Changes the place of an entry, and its position in the quota order.
    fn relocate_entry(&mut self, slot: u32, to: &FallbackRecord) {
        self.retention.remove_from_quota_order(slot, &self.index.entries.get(slot));
        self.index.entries.relocate(slot, to.segment, to.offset, to.number);
        self.update_quota_order(slot);
    }

    /// Moves the entry in `slot`, found by recovery, to an older record of the same put. The newest
    /// record becomes the fallback.
    pub(super) fn relocate_to_original(&mut self, slot: u32, segment: u32, page: &PageSummary) {
        self.index.set_newest_fallback(slot, FallbackRecord::of_entry(&self.index.entries.get(slot)));
        self.relocate_entry(slot, &FallbackRecord::of(segment, page));
        if let Some(epoch) = self.segments.epoch_mut(segment) {
            epoch.add_slot(slot);
        }
    }

    /// Points the entry in `slot` to the other record of its put. Returns `false` if that record is
    /// gone.
    pub(super) fn fall_back(&mut self, slot: u32) -> bool {
        let before = self.index.entries.get(slot);
        let Some(other) = self.relocate_to_fallback(slot) else { return false };
        if before.number > other.number
            && let Some(epoch) = self.segments.epoch(before.segment())
        {
            self.unindexed.add(before.fingerprint, before.number + 1, epoch.number());
        }
        true
    }

    /// Exchanges the record of the page in `slot`, which the device failed to read, with the other
    /// one. Returns `false` if that one is gone, or was unreadable lately.
    pub(super) fn swap_fallback(&mut self, slot: u32, now_unix_ms: u64) -> bool {
        let before = FallbackRecord::of_entry(&self.index.entries.get(slot));
        let both_failed = self.index.fallback(slot).is_some_and(|other| other.is_unreadable(now_unix_ms));
        if both_failed || self.relocate_to_fallback(slot).is_none() {
            return false;
        }
        self.index.set_fallback(slot, before.failed(now_unix_ms));
        true
    }

    /// Moves the entry in `slot` to its fallback, which ends. Returns `None` if there is none that
    /// stays on the device.
    fn relocate_to_fallback(&mut self, slot: u32) -> Option<FallbackRecord> {
        let other = self.index.take_fallback(slot).filter(|other| !self.segments.is_reclaiming(other.segment))?;
        if let Some(epoch) = self.segments.epoch_mut(other.segment) {
            epoch.add_slot(slot);
        }
        self.relocate_entry(slot, &other);
        Some(other)
    }

    pub(super) fn remove_page(&mut self, slot: u32) -> PackedEntry {
        self.announce_removal(slot);
        let entry = self.index.entries.get(slot);
        self.retention.remove(slot, &entry);
        if self.index.namespace(entry.namespace).pages == 1 {
            // Numbers of namespaces are reused.
            self.retention.forget_namespace(entry.namespace);
            self.quota_steps.remove(&{ entry.namespace });
        }
        self.index.remove(slot)
    }

    /// Removes a page whose records stay on the device. They count as unindexed from then on, so
    /// that a later forget writes a tombstone.
    pub(super) fn drop_page(&mut self, slot: u32) {
        let fallback = self.index.fallback(slot).copied();
        let entry = self.remove_page(slot);
        if let Some(recovery) = &mut self.recovery {
            recovery.page_dropped(&entry);
        }
        // A restart may bring the records back, so a later forget must write a tombstone.
        let records = [FallbackRecord::of_entry(&entry)].into_iter().chain(fallback);
        for record in records.filter(|_| !fail_point!("log.damage-needs-no-tombstone")) {
            if let Some(epoch) = self.segments.epoch(record.segment) {
                self.unindexed.add(entry.fingerprint, record.number + 1, epoch.number());
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
        let slot = self.index.entries.find(id).ok_or(PinError::NotFound)?;
        self.pin_slot(slot, pin)
    }

    pub(super) fn pin_slot(&mut self, slot: u32, pin: Pin) -> Result<(), PinError> {
        if pin == self.retention.pin_of(slot) {
            return Ok(());
        }
        if pin == Pin::Hard {
            let bytes = self.retention.pinned_bytes() + self.index.entries.get(slot).record_bytes();
            let max = self.pinned_bytes_max();
            let pages = self.retention.pinned_pages() + 1;
            // In pages too: pinned pages that fill the index would leave no room to writers.
            if bytes > max || pages > (self.config.pages_max - pages_reserve(self.config.segment_bytes)) / 4 {
                return Err(PinError::Full { bytes, max });
            }
            if self.is_excluded_from_copy(slot) {
                return Err(PinError::NotKept);
            }
        }
        if pin != Pin::None && (self.config.keep_percent == 0 || !self.can_copy_forward()) {
            return Err(PinError::NotKept);
        }
        self.retention.set_pin(slot, &self.index.entries.get(slot), pin);
        self.update_quota_order(slot);
        Ok(())
    }
}
