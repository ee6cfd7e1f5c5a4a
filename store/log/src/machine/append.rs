//! The write path.
//!
//! Steps of a write, and what a crash leaves after each of them:
//!
//! 1. [`Log::append`] assigns place and number. Nothing is on the device.
//! 2. The device writes header and payload. A crash leaves a hole, a torn record, a header without
//!    its whole payload, or a whole record. Records around it may be whole in any combination.
//!    Recovery accepts a header without its payload; the reader's checksums then find the damage.
//! 3. [`Log::write_done`] makes the page visible. A crash has the same results as in step 2.
//! 4. [`Log::sync_plan`], a sync of the device, [`Log::sync_done`]. Recovery finds the record.
//! 5. The segment was sealed: [`Intent::Footer`](super::Intent::Footer), then [`Log::footer_done`].
//!    Recovery finds the record whether the footer is whole, torn or missing.

use super::*;
use larder_format::PageMeta;
use larder_format::disk::{RecordBody, record_bytes};
use larder_format::footer::RecordSummary;

/// A record to write: its header block at `header.place`, followed by the payload of the page.
///
/// The caller must pass it to [`Log::write_done`] exactly once. Until then its segment is not
/// reclaimed.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a planned write must be reported, or its segment is never reclaimed"]
pub struct PlannedWrite {
    pub header: RecordHeader,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The device has all of the record.
    Written,
    /// The device reported an error. It may have any part of the record.
    Failed,
    /// The device never got the record.
    NotSent,
}

#[derive(Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "it is moved once")]
pub enum Append {
    Write(PlannedWrite),
    AlreadyThere,
    /// No segment has room, or recovery is running. Try again after the next [`Log::prepared`],
    /// [`Log::copy_forward_done`] or [`Log::finish_recovery`].
    Wait,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AppendError {
    #[error(
        "the page needs a record of {bytes} bytes, but a segment takes at most {max}: put smaller pages, or create the \
         log with larger segments"
    )]
    TooLarge { bytes: u64, max: u64 },
    /// A segment could neither be prepared nor removed. New records could let its old content win
    /// over a tombstone at the next start.
    #[error(
        "the log takes no more writes because a segment file could neither be written nor removed: check the file \
         system and the preceding warnings, then restart the node"
    )]
    Stopped,
}

impl Log {
    /// Plans the record of a page. If the log is full, this may reclaim its oldest segment. A put
    /// that the index has, by key and generation, is not planned again.
    pub fn append(&mut self, meta: &PageMeta) -> Result<Append, AppendError> {
        if self
            .index
            .entries
            .find(&meta.id)
            .is_some_and(|slot| self.index.entries.get(slot).generation == meta.generation)
        {
            return Ok(Append::AlreadyThere);
        }
        let bytes = record_bytes(meta.payload_bytes()) as u64;
        let planned = self.plan(RecordBody::Page(meta.clone()), &meta.id.namespace, bytes)?;
        Ok(match planned {
            Some(write) => {
                self.unindexed.write_planned(self.index.entries.fingerprint(&meta.id));
                if fail_point!("log.visible-before-write") {
                    self.publish_page(&write.header);
                }
                Append::Write(write)
            }
            None => Append::Wait,
        })
    }

    /// Assigns place and number to a record. Returns `None` if no segment has room now.
    pub(super) fn plan(
        &mut self,
        body: RecordBody,
        namespace: &NamespaceId,
        bytes: u64,
    ) -> Result<Option<PlannedWrite>, AppendError> {
        if self.stopped {
            return Err(AppendError::Stopped);
        }
        let max = self.record_bytes_max();
        if bytes > max {
            return Err(AppendError::TooLarge { bytes, max });
        }
        // A write could reclaim a segment that recovery has not read yet.
        if self.recovery.is_some() {
            return Ok(None);
        }
        Ok(self.reserve_place(namespace, bytes).map(|place| self.planned(place, body)))
    }

    pub(super) fn planned(&mut self, place: RecordPlace, body: RecordBody) -> PlannedWrite {
        let number = self.segments.take_record_number(place.epoch);
        let durable = self.segments.epoch_at(&place).map_or(0, |epoch| epoch.durable_end());
        PlannedWrite { header: RecordHeader { place, number, durable, body } }
    }

    fn reserve_place(&mut self, namespace: &NamespaceId, bytes: u64) -> Option<RecordPlace> {
        if let Some(open) = self.segments.open()
            && !self.segments.fits(open, namespace, bytes)
        {
            if self.is_copy_target(open) {
                // The rest of the segment is reserved for copies. The next segment comes after
                // them.
                return None;
            }
            self.seal(open);
        }
        if self.segments.open().is_none() && self.open_next() {
            self.copy_forward_ahead(namespace, bytes);
        }
        if self.must_await_choice(namespace, bytes) {
            return None;
        }
        let place = self.segments.allocate(namespace, bytes);
        if place.is_some() {
            self.next_record_placed(namespace, bytes);
        }
        self.prepare_ahead();
        place
    }

    /// Seals the open segment. For a clean stop: the next start opens another segment anyway.
    pub fn seal_open(&mut self) {
        if let Some(open) = self.segments.open() {
            self.seal(open);
        }
    }

    pub(super) fn seal(&mut self, segment: u32) {
        self.segments.seal(segment);
        self.plan_footer(segment);
    }

    /// Seals the open segment early, after a failed write or sync. Its pages stay readable, because
    /// every read is verified.
    pub(super) fn abandon(&mut self, segment: u32) {
        if self.segments.is_open(segment) {
            self.counts.segments_abandoned += 1;
            self.seal(segment);
        }
    }

    /// Reports a planned write. The page of a completed write is visible from now on, unless it was
    /// forgotten meanwhile.
    pub fn write_done(&mut self, write: PlannedWrite, outcome: WriteOutcome) {
        let PlannedWrite { header } = write;
        let segment = header.place.segment;
        let Some(epoch) = self.segments.epoch_at_mut(&header.place) else { return };
        match outcome {
            WriteOutcome::Written => epoch.write_completed(&header),
            WriteOutcome::Failed => epoch.write_failed(),
            WriteOutcome::NotSent => {
                epoch.end_write();
                // Recovery could not tell damage from a crash behind a hole that no write will
                // fill, so further records go to another segment.
                if self.segments.is_open(segment) {
                    self.seal(segment);
                }
            }
        }
        if let RecordBody::Page(meta) = &header.body {
            self.page_write_ended(&header, &meta.id, outcome);
        }
        if outcome == WriteOutcome::Failed {
            self.abandon(segment);
        }
        self.plan_footer(segment);
        self.reclaim_if_idle();
    }

    fn page_write_ended(&mut self, header: &RecordHeader, id: &PageId, outcome: WriteOutcome) {
        let page = self.index.entries.fingerprint(id);
        let forgotten = self.unindexed.write_ended(page, header.number);
        let evicted = self.segments.is_reclaiming(header.place.segment);
        match outcome {
            WriteOutcome::NotSent => {}
            WriteOutcome::Written if forgotten => {}
            WriteOutcome::Written if !evicted => self.publish_page(header),
            WriteOutcome::Written | WriteOutcome::Failed => {
                self.counts.evicted_pages += u64::from(evicted);
                self.unindexed.add(page, header.number + 1, header.place.epoch);
                if outcome == WriteOutcome::Written {
                    self.drop_older_put(header, id);
                }
            }
        }
    }

    /// Drops the put that a written record replaces, if the record itself is evicted at once.
    fn drop_older_put(&mut self, header: &RecordHeader, id: &PageId) {
        let Some(RecordSummary::Page(page)) = RecordSummary::of(header) else { return };
        let Some(slot) = self.index.entries.find(id) else { return };
        if self.supersedes(slot, header.number) && !self.index.entries.get(slot).is_same_put(&page) {
            self.drop_page(slot);
        }
    }

    /// Makes the page of a written record visible, unless a newer record of the page is.
    fn publish_page(&mut self, header: &RecordHeader) {
        let Some(RecordSummary::Page(page)) = RecordSummary::of(header) else { return };
        let segment = header.place.segment;
        let mut pin = Pin::None;
        if let Some(slot) = self.index.entries.find(&page.id) {
            if !self.supersedes(slot, page.number) || self.relocate_page(slot, segment, &page) {
                return;
            }
            pin = self.retention.pin_of(slot);
            if pin == Pin::Hard && self.exceeds_quota_with(slot, &page) {
                // The pinned page stays. The new one would be dropped for the quota at once.
                self.counts.quota_pages += 1;
                let fingerprint = self.index.entries.fingerprint(&page.id);
                return self.unindexed.add(fingerprint, page.number + 1, header.place.epoch);
            }
            self.remove_page(slot);
        }
        self.make_quota_room(&page.id.namespace, record_bytes(page.payload_bytes as usize) as u64);
        let slot = self.insert_page(segment, &page);
        if let (Some(listener), RecordBody::Page(meta)) = (self.listener(), &header.body) {
            listener.stored(&page, &meta.token_ids);
        }
        // While a new quota is being enforced, older pages go first.
        let is_enforced = !self.quota_steps.contains_key(&{ self.index.entries.get(slot).namespace });
        if is_enforced && self.index.namespace_bytes(&page.id.namespace) > self.index.quota(&page.id.namespace) {
            self.counts.quota_pages += 1;
            self.drop_page(slot);
        } else if pin != Pin::None {
            // The new put inherits the pin. A put that is too large for it is served unpinned.
            let _ = self.pin_slot(slot, pin);
        }
    }
}
