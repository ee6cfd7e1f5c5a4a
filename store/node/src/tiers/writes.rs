//! Writes of pages to L3, from the decision to the recorded outcome.

use super::Tiers;
use super::writeback::WriteTicket;
use crate::page::Page;
use larder_runtime::sync;
use std::sync::Arc;

impl Tiers {
    /// Enters a write to L3. Called under the `state` lock, before the page may leave L2. The guard
    /// must be dropped without that lock. `None` while the tiers are being dropped.
    pub(super) fn begin_write(&self, page: Arc<Page>) -> Option<WriteGuard> {
        let tiers = self.this.upgrade()?;
        let ticket = self.writeback.begin(&page);
        Some(WriteGuard { tiers, page, stored: false, ticket })
    }

    /// Starts a task that writes a page to L3, with the quota of its namespace. The guard ends the
    /// write even if the task is cancelled or panics.
    pub(super) fn run_write(&self, write: WriteGuard, quota: Option<u64>) {
        sync::spawn(&self.runtime, async move {
            // The whole guard: a block that captures its fields would change a copy of `stored`.
            let mut write = write;
            let meta = write.page.meta_with_token_ids();
            match write.tiers.devices.write(&meta, &write.page.payload, quota).await {
                Ok(()) => write.stored = true,
                Err(error) => {
                    write.tiers.metrics.l3_writes_failed.inc();
                    tracing::warn!(id = ?meta.id, %error, "cannot write a page to L3; DRAM has the only copy");
                }
            }
        });
    }
}

/// A write to L3 in flight. Dropping it records the outcome.
pub(super) struct WriteGuard {
    tiers: Arc<Tiers>,
    page: Arc<Page>,
    stored: bool,
    ticket: WriteTicket,
}

impl Drop for WriteGuard {
    fn drop(&mut self) {
        let (id, generation) = (self.page.id(), self.page.generation());
        // The policy first: when `writeback` loses the page, the policy knows whether L3 has it.
        self.tiers.state.lock().policy.written(&id, generation, self.page.bytes(), self.stored);
        self.tiers.writeback.end(&self.ticket);
        self.tiers.in_flight_ended.notify_waiters();
    }
}
