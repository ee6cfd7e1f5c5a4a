//! Background tasks of an open log: its intents, periodic syncs and expiry, and the work of a clean
//! stop.

use crate::copy_forward::{CopyForwardGuard, copy_forward};
use crate::machine::{ExpirySweep, Intent, PlannedFooter, WriteOutcome};
use crate::memory::private_memory;
use crate::shared::{LogShared, Preparations};
use larder_io::{Operation, Priority, TaskClass};
use larder_runtime::fail_point;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Interval of background syncs. A written page is durable after it and the duration of the sync:
/// within a second.
const SYNC_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of pages that expire under one lock of the log. Writers get their turn between
/// two batches.
const EXPIRE_PAGES: usize = 512;

/// Carries out the intents of the log until the log is closed. Runs one at a time, except
/// copy-forwards: these may wait for memory, so each is a task of its own.
///
/// A closed log begins no other intent. Otherwise a clean stop could overwrite a segment whose
/// pages were found until then: the reclaim of a segment waits behind footers, page by page.
pub(crate) async fn carry_out_intents(shared: Arc<LogShared>) {
    while shared.ensure_open().is_ok() {
        while shared.ensure_open().is_ok()
            && let Some(intent) = shared.update_log(|log| log.next_intent())
        {
            match intent {
                Intent::Prepare(prepare) => shared.prepare_segment(&prepare).await,
                Intent::Footer(planned) => shared.write_footer(planned).await,
                Intent::Reclaim => shared.reclaim_in_steps().await,
                Intent::CopyForward(work) => {
                    // The guard exists before the task: a task that never runs still reports its
                    // end.
                    let guard = CopyForwardGuard::new(&shared, &work);
                    let task = copy_forward(shared.clone(), work, guard);
                    shared.device.spawn(TaskClass::Background, Box::pin(task));
                }
            }
        }
        // `Notify` keeps a wake-up that arrives before this await, so none is lost.
        shared.intents.notified().await;
    }
}

/// Syncs written data, drops expired pages and enforces new quotas, periodically, until the log is
/// closed.
pub(crate) async fn sync_and_expire_periodically(shared: Arc<LogShared>) {
    let mut sweep = ExpirySweep::default();
    while shared.ensure_open().is_ok() {
        shared.device.sleep(SYNC_INTERVAL).await;
        if !fail_point!("log.no-background-sync") {
            shared.sync_all().await;
        }
        let now = shared.clock.now_unix_ms();
        sweep.begin_part(shared.entries(), now);
        while let Some(expired) = sweep.next_step(shared.entries(), now) {
            // Unlocks between batches, so that writers need not wait for all of them.
            for batch in expired.chunks(EXPIRE_PAGES) {
                shared.update_log(|log| log.drop_expired(batch));
                tokio::task::yield_now().await;
            }
            tokio::task::yield_now().await;
        }
        while shared.update_log(|log| log.quota_step()) {
            tokio::task::yield_now().await;
        }
    }
}

/// Last work before a clean stop: makes everything durable, and writes the footer of every segment.
/// The next start then reads footers instead of record headers.
pub(crate) async fn finish(shared: &Arc<LogShared>) {
    // Footers are planned only after their records are durable.
    shared.sync_all().await;
    shared.update_log(|log| log.seal_open());
    while let Some(intent) = shared.update_log(|log| log.next_intent()) {
        // Other intents begin new work. The next start does not need their results.
        if let Intent::Footer(planned) = intent {
            shared.write_footer(planned).await;
        }
    }
    shared.sync_all().await;
}

impl LogShared {
    /// Chooses pages to copy, or evicts pages, and unlocks the log between two slices.
    async fn reclaim_in_steps(&self) {
        while self.ensure_open().is_ok() && self.update_log(|log| log.reclaim_step()) {
            tokio::task::yield_now().await;
        }
        // Writers wait while room is reserved for pinned pages.
        self.preparations.update(Preparations::next_turn);
    }

    /// Writes a footer, and reports the result to the log. After a failure, the next start scans
    /// the segment record by record.
    async fn write_footer(&self, planned: PlannedFooter) {
        let outcome = match self.try_write_footer(&planned).await {
            Ok(()) => WriteOutcome::Written,
            // The log was closed meanwhile. That is no fault of the device.
            Err(_) if self.ensure_open().is_err() => WriteOutcome::Failed,
            Err(error) => {
                self.counters.io_errors.add(1);
                let file = self.segment_path(planned.footer.segment);
                let file = file.display();
                tracing::warn!(%file, %error, "L3: cannot write a footer; the next start will take longer");
                WriteOutcome::Failed
            }
        };
        self.update_log(|log| log.footer_done(planned, outcome));
    }

    async fn try_write_footer(&self, planned: &PlannedFooter) -> io::Result<()> {
        let bytes = planned.footer.encode(&self.log_id);
        let memory = private_memory(&self.arena, bytes.len())?;
        let mut slot = memory.allocate(bytes.len()).ok_or(io::ErrorKind::OutOfMemory)?;
        slot.copy_from_slice(&bytes);
        let slot = slot.freeze();
        let range = 0..slot.capacity();
        let write = Operation::Write { offset: planned.offset, block: None, payload: Some((slot, range)) };
        self.run(planned.footer.segment, Priority::Background, write).await?.result
    }
}
