//! Footers of sealed segments.
//!
//! Invariants:
//! - A planned footer counts as a write of its segment, so the segment is not reused under it.
//! - Every record that a footer lists was durable when the footer was planned.
//! - A segment with a failed write or sync gets no footer. The failed record may be whole on the
//!   device, so recovery must look for it. Otherwise a forget could not tell that the record does
//!   not exist.

use super::*;

/// A footer to write. The caller must pass it to [`Log::footer_done`] exactly once. Until then its
/// segment is not reclaimed.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a planned footer must be reported, or its segment is never reclaimed"]
pub struct PlannedFooter {
    /// Its encoding ([`Footer::encode`]) goes to [`offset`](PlannedFooter::offset).
    pub footer: Footer,
    /// Byte offset in the segment. The footer ends with the segment.
    pub offset: u64,
}

impl Log {
    /// Plans the footer of a sealed segment, if it wants one, nothing of it is in flight, and all
    /// is durable.
    pub(super) fn plan_footer(&mut self, segment: u32) {
        // An open segment may get more records. During recovery a segment may have more than was
        // scanned.
        if !self.segments.is_sealed(segment) || self.recovery.is_some() {
            return;
        }
        let segment_bytes = self.config.segment_bytes;
        let footer = self.segments.epoch_mut(segment).and_then(|epoch| epoch.take_footer(segment, segment_bytes));
        if let Some((footer, offset)) = footer {
            self.intents.push_back(Intent::Footer(PlannedFooter { footer, offset }));
        }
    }

    /// Reports a planned footer. A failed one is not retried: recovery scans the segment record by
    /// record.
    pub fn footer_done(&mut self, planned: PlannedFooter, outcome: WriteOutcome) {
        let Footer { segment, epoch, .. } = planned.footer;
        let Some(epoch) = self.segments.epoch_at_mut(&RecordPlace { segment, epoch, offset: 0 }) else { return };
        let written = outcome == WriteOutcome::Written;
        epoch.footer_ended(written);
        self.counts.footers += u64::from(written);
        self.reclaim_if_idle();
    }
}
