//! Removing pages: on request, and because a copy is damaged.

use super::Tiers;
use super::writeback::WriteEnded;
use crate::departures::Reason;
use crate::devices::ForgetError;
use larder_format::PageId;
use larder_runtime::fail_point;
use std::time::Instant;

/// Pages that a forget handles without a pause and under one lock, at a few microseconds each.
const BATCH_PAGES: usize = 64;

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
        for (batch, existed) in ids.chunks(BATCH_PAGES).zip(existed.chunks_mut(BATCH_PAGES)) {
            for (id, existed) in batch.iter().zip(existed) {
                // Step 1: out of L2, so that no further write to L3 begins. A write in flight must
                // end before the tombstone is written, or its record would follow the tombstone and
                // resurrect the page.
                *existed = !fail_point!("node.forget-keeps-l2") && self.drop_l2(id);
                self.holds.withhold(id);
                let writes = self.withhold_writes(id);
                *existed |= !writes.is_empty();
                for ended in writes {
                    late |= !has_ended(&ended, deadline).await;
                }
                *existed |= self.devices.has(id);
            }
            let_others_go_first(batch).await;
        }
        // Step 2: tombstones, even after a late write: most of the pages are gone then.
        let durable = self.devices.forget(ids, deadline).await;
        // Step 3: out of L2 again. A read of L3 that began before the tombstone may have put the
        // page back. The recorded change stops those that end later: see `Tiers::find`.
        let mut returned = Vec::new();
        for batch in ids.chunks(BATCH_PAGES) {
            for ended in self.drop_again(batch) {
                late |= !has_ended(&ended, deadline).await;
            }
            returned.extend(batch.iter().filter(|id| self.has_returned(id)).copied());
            let_others_go_first(batch).await;
        }
        durable?;
        // Step 4: L3 may have found damage in a page that step 3 removed. L2 has written the page
        // again then, and that record may follow the tombstone. No further one can: L2 has lost the
        // page, and its stamp has changed.
        if !returned.is_empty() {
            self.devices.forget(&returned, deadline).await?;
            for batch in returned.chunks(BATCH_PAGES) {
                self.drop_again(batch);
            }
        }
        if late {
            return Err(TiersError::WriteInFlight);
        }
        let count = existed.iter().filter(|&&existed| existed).count();
        self.metrics.pages_forgotten.inc_by(count as u64);
        Ok(count)
    }

    /// Stops serving the writes of a page that are in flight, and returns a handle for each.
    fn withhold_writes(&self, id: &PageId) -> Vec<WriteEnded> {
        if fail_point!("node.forget-misses-page-in-writeback") {
            return Vec::new();
        }
        self.writeback.withhold(id)
    }

    /// Returns `true` if L3 has a page after its tombstone was written.
    fn has_returned(&self, id: &PageId) -> bool {
        !fail_point!("node.forget-misses-page-in-writeback") && self.devices.has(id)
    }

    /// Removes pages from DRAM, after their tombstones were written. Returns a handle for each of
    /// their writes that are in flight.
    fn drop_again(&self, ids: &[PageId]) -> Vec<WriteEnded> {
        let now_ms = self.clock.now_unix_ms();
        let mut writes = Vec::new();
        let mut state = self.state.lock();
        for id in ids {
            let keeps = fail_point!("node.forget-keeps-l2");
            if !keeps {
                state.policy.forget(id);
                self.l2.remove(id);
            }
            self.changes.record(id);
            self.departures.record(self.l2.hash(id), Reason::Forgotten, now_ms);
            // Last, so that no hold of a page that is found before outlives the forget: see `hold`.
            if !keeps {
                self.holds.withhold(id);
            }
            writes.extend(self.withhold_writes(id));
        }
        writes
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

/// Waits for the end of a write to L3. Returns `false` if the deadline passed before.
async fn has_ended(write: &WriteEnded, deadline: Instant) -> bool {
    let ended = write.wait_for(|&ended| ended.then_some(()));
    tokio::time::timeout_at(deadline.into(), ended).await.is_ok()
}

/// Lets other tasks run after a full batch. They may wait for this thread, or for the lock.
async fn let_others_go_first(batch: &[PageId]) {
    if batch.len() == BATCH_PAGES {
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Devices;
    use crate::options::NodeOptions;
    use crate::store::Store;
    use crate::test_support::{open_log, options, put, soon};
    use futures::FutureExt;
    use larder_format::{NamespaceId, PageKey};
    use larder_memory::Arena;
    use larder_runtime::{Clock, now};
    use larder_wire::TierCode;
    use std::time::Duration;

    fn id(number: u32) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
    }

    #[tokio::test]
    async fn other_tasks_go_first_between_the_batches_of_a_forget() {
        const PAGES: u32 = 8192;
        let options = NodeOptions { l2_bytes: 1 << 20, in_flight_bytes: Some(1 << 20), ..NodeOptions::default() };
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let store = Store::new(&options, arena, Devices::of(Vec::new()).unwrap(), Clock::at(5_000), 1);
        let ids: Vec<PageId> = (0..PAGES).map(id).collect();
        let mut forget = Box::pin(store.tiers().forget(&ids, now() + Duration::from_secs(60)));
        let mut pauses = 0;
        let forgotten = loop {
            match forget.as_mut().now_or_never() {
                Some(forgotten) => break forgotten,
                None => pauses += 1,
            }
        };
        assert_eq!((forgotten.unwrap(), pauses), (0, 2 * ids.len() / BATCH_PAGES));
    }

    #[tokio::test]
    async fn page_that_l2_writes_again_during_its_forget_does_not_return() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let options = options(1 << 20);
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let devices = Devices::of(vec![open_log(dir.path(), &arena).await]).unwrap();
        let store = Store::new(&options, arena, devices, Clock::system(), 1);
        let tiers = store.tiers();
        let ids: Vec<PageId> = (0..=BATCH_PAGES as u32).map(id).collect();
        let page = ids[0];
        put(&store, page, &[1; 100]);
        tiers.drain(soon()).await;
        assert!(tiers.devices.has(&page));
        let mut forget = Box::pin(tiers.forget(&ids, soon()));
        // Up to the pause behind the first batch: L2 has lost the page, and L3 has it.
        assert!(futures::poll!(&mut forget).is_pending());
        assert!(tiers.get(&page, soon()).await.is_some());
        while tiers.devices.has(&page) {
            assert!(futures::poll!(&mut forget).is_pending());
            tokio::task::yield_now().await;
        }
        // A read that began before the forget reports damage now.
        tiers.lost_on_l3(&page);
        assert_eq!(tiers.writeback.len(), 1, "L2 writes it again");
        assert_eq!(forget.await.unwrap(), 1);
        tiers.drain(soon()).await;
        assert_eq!(tiers.locate(&page), TierCode::Absent);
        store.close(soon()).await;
    }
}
