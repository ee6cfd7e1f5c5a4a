//! When a footer is written.
//!
//! Always true: a planned footer counts as a write of its segment, so the segment is not written anew under it; and
//! what it lists was durable when it was planned. A segment of which a write or a sync failed gets none: what such a
//! write left may be whole, and must be found again by whoever looks, or forgetting could not say that it is not there.

use super::*;
use crate::planted::{Bug, has};

/// A footer to be written. Goes back into [`Log::footer_done`] exactly once; until then its segment is not reclaimed.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a planned footer must be reported, or its segment is never reclaimed"]
pub struct PlannedFooter {
    /// What to write: [`Footer::encode`] at [`offset`](PlannedFooter::offset).
    pub footer: Footer,
    /// Byte offset in the segment; what is written ends with the segment.
    pub offset: u64,
}

impl Log {
    /// Plans the footer of a sealed segment, if it wants one and nothing of it is under way or not durable.
    pub(super) fn plan_footer(&mut self, segment: u32) {
        let segment_bytes = self.config.segment_bytes;
        // Before that a segment may get records, or it may have more than was seen.
        let Some(Segment::Sealed(life)) = self.segments.get_mut(&segment) else { return };
        if !life.wants_footer || life.writes > 0 || life.completed > life.synced || self.restoring.is_some() {
            return;
        }
        life.wants_footer = false;
        let mut records = std::mem::take(&mut life.records);
        records.sort_unstable_by_key(RecordSummary::offset);
        if has(Bug::FooterWithoutTombstones) {
            records.retain(|record| matches!(record, RecordSummary::Page(_)));
        }
        let footer = Footer { segment, life: life.number, records };
        // Room was kept for it; but what was found at a start was kept by somebody else.
        let Some(offset) = segment_bytes.checked_sub(footer.encoded_bytes()).filter(|&offset| offset >= life.end)
        else {
            return;
        };
        life.writes += 1;
        self.intents.push_back(Intent::Footer(PlannedFooter { footer, offset }));
    }

    /// Reports a planned footer. A failed one is not tried again: the segment will be hopped through.
    pub fn footer_done(&mut self, planned: PlannedFooter, outcome: WriteOutcome) {
        let Footer { segment, life, .. } = planned.footer;
        let Some(life) = self.life_of(&RecordPlace { segment, life, offset: 0 }) else { return };
        life.writes = life.writes.saturating_sub(1);
        if outcome == WriteOutcome::Written {
            life.completed += 1;
            self.counts.footers += 1;
        }
        self.reclaim_when_idle();
    }
}
