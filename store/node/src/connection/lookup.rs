//! Lookup: the longest servable prefix of a sequence, and a lease on its pages.
//!
//! The lease holds the memory of its pages. So L2 may refuse pages that are read from L3 for a
//! lease: they are in memory until their client has read them, and then on L3 alone again.

use super::Connection;
use super::get::READS_AT_ONCE;
use super::turn::KEYS_PER_TURN;
use crate::budget::Kind;
use crate::tiers::Turns;
use futures::StreamExt;
use larder_format::PageId;
use larder_runtime::now;
use larder_wire::{MAX_HOLD_MS, Response};
use std::io;
use std::time::{Duration, Instant};

impl Connection {
    /// Answers with the longest servable prefix. With `hold_ms` above 0 it leases the prefix: pages
    /// in L2 at once, and with `load_l3` pages on L3 when they have been loaded. The lease ends
    /// after that time, or with the request's cancellation.
    pub(super) async fn lookup(
        &mut self,
        request: u64,
        ids: Vec<PageId>,
        hold_ms: u32,
        load_l3: bool,
        deadline: Instant,
    ) -> io::Result<()> {
        let node = self.node.clone();
        let mut tiers = Vec::new();
        for ids in ids.chunks(KEYS_PER_TURN) {
            let found = node.store.tiers().locate_prefix(ids);
            let (count, is_whole) = (found.len(), found.len() == ids.len());
            tiers.extend(found);
            self.turn.looked_up(count + 1).await;
            if !is_whole {
                break;
            }
        }
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
                None if load_l3 => on_l3.push(*id),
                None => {}
            }
            self.turn.looked_up(1).await;
        }
        let lease = self.holdings.start_lease(request, holds);
        let lease_end = now() + Duration::from_millis(hold_ms.min(MAX_HOLD_MS).into());
        let account = self.account.clone();
        let page_bytes = self.page_bytes();
        let mut charge = self.charge.take();
        self.spawn_task(request, async move {
            let mut turns = Turns::default();
            futures::stream::iter(on_l3.into_iter().map(|id| (id, turns.next_turn())))
                .for_each_concurrent(READS_AT_ONCE, |(id, turn)| {
                    let node = &node;
                    let lease = &lease;
                    let account = &account;
                    async move {
                        // Loads in advance must not compete with readers. A page without memory now
                        // is not held, and can be read all the same.
                        let Some(_charge) = account.try_charge(Kind::Reads, page_bytes) else { return };
                        let page = node.store.tiers().fetch(&id, turn, deadline.min(lease_end)).await;
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
