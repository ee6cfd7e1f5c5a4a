//! Lookup: the longest servable prefix of a sequence, and a lease on its pages.

use super::Connection;
use super::get::READS_AT_ONCE;
use crate::budget::Kind;
use futures::StreamExt;
use larder_format::PageId;
use larder_runtime::now;
use larder_wire::{MAX_HOLD_MS, Response};
use std::io;
use std::time::{Duration, Instant};

impl Connection {
    /// Answers with the longest servable prefix. With `hold_ms` above 0 it leases the prefix: pages
    /// in L2 at once, and pages on L3 when they have been loaded. The lease ends after that time,
    /// or with the request's cancellation.
    pub(super) async fn lookup(
        &mut self,
        request: u64,
        ids: Vec<PageId>,
        hold_ms: u32,
        deadline: Instant,
    ) -> io::Result<()> {
        let node = self.node.clone();
        let tiers = node.store.tiers().locate_prefix(&ids);
        // A lookup with a lease announces reads. Those that cannot come are misses of these reads.
        // Other lookups only ask.
        if hold_ms > 0 {
            node.store.tiers().count_misses(ids.len() - tiers.len());
        }
        let l3_expected_us = u32::try_from(node.store.tiers().l3_expected().as_micros()).unwrap_or(u32::MAX);
        let may_hold = self.holdings.may_lease(request) && hold_ms > 0 && !tiers.is_empty();
        let permit = if may_hold { self.tasks.permit(ids.len()) } else { None };
        let Some(permit) = permit else {
            // Without a lease the answer is only a hint, which is still useful.
            return self.outbox.respond(request, Response::LookedUp { tiers, held: 0, l3_expected_us }).await;
        };
        let mut on_l3 = Vec::new();
        let mut holds = Vec::new();
        let mut held = 0;
        for (index, id) in (0..).zip(&ids[..tiers.len()]) {
            match node.store.tiers().hold_l2(id) {
                Some(hold) => {
                    // Counts the held pages from the start of the prefix without a gap.
                    held += u32::from(held == index);
                    holds.push(hold);
                }
                None => on_l3.push(*id),
            }
        }
        let lease = self.holdings.start_lease(request, holds);
        let lease_end = now() + Duration::from_millis(hold_ms.min(MAX_HOLD_MS).into());
        let account = self.account.clone();
        let page_bytes = self.page_bytes();
        let mut charge = self.charge.take();
        self.spawn_task(request, async move {
            futures::stream::iter(on_l3)
                .for_each_concurrent(READS_AT_ONCE, |id| {
                    let node = &node;
                    let lease = &lease;
                    let account = &account;
                    async move {
                        // Loads in advance must not compete with readers. A page without memory now
                        // is not held, and can be read all the same.
                        let Some(_charge) = account.try_charge(Kind::Reads, page_bytes) else { return };
                        let page = node.store.tiers().fetch(&id, deadline.min(lease_end)).await;
                        if let Some(hold) = page.and_then(|page| node.store.tiers().hold(&page)) {
                            lease.add(hold);
                        }
                    }
                })
                .await;
            // Only the holds remain from here on. They must not block requests.
            drop(permit);
            if let Some(charge) = &mut charge {
                charge.shrink_to(lease.bytes());
            }
            tokio::time::sleep_until(lease_end.into()).await;
            lease.end();
            Ok(())
        });
        self.outbox.respond(request, Response::LookedUp { tiers, held, l3_expected_us }).await
    }
}
