//! Removing pages: on request, and because a copy is damaged.

use super::Tiers;
use crate::devices::ForgetError;
use larder_format::PageId;
use larder_runtime::fail_point;
use std::time::Instant;

/// Reason why pages were not forgotten durably. The caller must try again.
#[derive(Debug, thiserror::Error)]
pub enum TiersError {
    /// A write of a page was in flight and did not end before the deadline.
    #[error("the deadline passed while a write to L3 was in flight; try again")]
    WriteInFlight,
    #[error(transparent)]
    Device(#[from] ForgetError),
}

impl Tiers {
    /// Forgets pages in all tiers, durably. Returns how many of them existed. After an error some
    /// may still be served, or return after a crash: the caller must try again.
    pub async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, TiersError> {
        let mut existed = vec![false; ids.len()];
        let mut late = false;
        for (id, existed) in ids.iter().zip(&mut existed) {
            // Step 1: out of L2, so that no further write to L3 begins. A write in flight must end
            // before the tombstone is written, or its record would follow the tombstone and
            // resurrect the page.
            *existed = !fail_point!("node.forget-keeps-l2") && self.drop_l2(id);
            self.holds.withhold(id);
            let writes = if fail_point!("node.forget-misses-page-in-writeback") {
                Vec::new()
            } else {
                self.writeback.withhold(id)
            };
            *existed |= !writes.is_empty();
            for ended in writes {
                let ended = ended.wait_for(|&ended| ended.then_some(()));
                late |= tokio::time::timeout_at(deadline.into(), ended).await.is_err();
            }
            *existed |= self.devices.has(id);
        }
        // Step 2: tombstones, even after a late write: most of the pages are gone then.
        let durable = self.devices.forget(ids, deadline).await;
        // Step 3: out of L2 again. A read of L3 that began before the tombstone may have put the
        // page back. The recorded change stops those that end later: see `Tiers::lookup`.
        let mut state = self.state.lock();
        for id in ids {
            let keeps = fail_point!("node.forget-keeps-l2");
            if !keeps {
                state.policy.forget(id);
                self.l2.remove(id);
            }
            self.changes.record(id);
            // Last, so that no hold of a page that is found before outlives the forget: see `hold`.
            if !keeps {
                self.holds.withhold(id);
            }
        }
        drop(state);
        durable?;
        if late {
            return Err(TiersError::WriteInFlight);
        }
        let count = existed.iter().filter(|&&existed| existed).count();
        self.metrics.pages_forgotten.inc_by(count as u64);
        Ok(count)
    }

    fn drop_l2(&self, id: &PageId) -> bool {
        let mut state = self.state.lock();
        let was_resident = state.policy.forget(id);
        let removed = self.l2.remove(id);
        // The page's memory is freed without the lock.
        drop(state);
        was_resident || removed.is_some()
    }

    /// Verifies the copies in DRAM and drops the page from L2 if one is damaged. Returns the number
    /// of pages dropped, 0 or 1.
    pub fn recheck(&self, id: &PageId) -> usize {
        // The copies differ if the page was read from L3 again while a reader held the first copy.
        let copies = [self.l2.get(id), self.writeback.get(id), self.holds.get(id)];
        let damaged = copies.into_iter().flatten().find_map(|page| page.meta().verify(id, &page.payload).err());
        let Some(mismatch) = damaged else { return 0 };
        tracing::error!(?id, %mismatch, "page damaged in memory: dropped from DRAM; check the machine's memory");
        self.metrics.pages_corrupt_l2.inc();
        // All copies go: a reader must not get the damaged one from another table.
        self.writeback.withhold(id);
        self.holds.withhold(id);
        if !fail_point!("node.recheck-keeps-damaged") {
            self.drop_l2(id);
        }
        1
    }
}
