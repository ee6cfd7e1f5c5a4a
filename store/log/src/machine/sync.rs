//! Durability: syncs of segments, and their results.

use super::*;

/// A sync to perform on one segment. The caller passes it to [`Log::sync_done`]. It notes the state
/// before the sync, which covers no write that completes meanwhile.
#[derive(Debug, PartialEq, Eq)]
pub struct SyncTicket {
    pub segment: u32,
    pub(super) epoch: u64,
    pub(super) writes_completed: u64,
    pub(super) written_end: u64,
}

impl Log {
    /// A ticket for each segment with completed writes that no sync covers.
    pub fn sync_plan(&self) -> Vec<SyncTicket> {
        self.segments.sync_plan()
    }

    /// Reports a sync. After a failed one it is unknown which writes the device kept, so the
    /// segment takes no more records.
    pub fn sync_done(&mut self, ticket: SyncTicket, succeeded: bool) {
        let SyncTicket { segment, epoch, writes_completed, written_end } = ticket;
        let Some(state) = self.segments.epoch_mut(segment).filter(|state| state.number() == epoch) else { return };
        if succeeded {
            state.sync_completed(writes_completed, written_end);
        } else {
            state.sync_failed();
            self.abandon(segment);
        }
        self.plan_footer(segment);
    }

    /// Returns `true` if a sync of this epoch of the segment has failed, so that its records may
    /// never become durable.
    pub fn has_failed_sync(&self, place: &RecordPlace) -> bool {
        self.segments.epoch_at(place).is_some_and(|epoch| epoch.has_failed_sync())
    }
}
