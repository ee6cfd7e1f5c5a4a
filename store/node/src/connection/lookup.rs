//! Lookups, and what they promise.

use super::conversation::Connection;
use super::reading::GET_PAGES_AT_ONCE;
use crate::budget::Kind;
use crate::clock::now;
use crate::holds::Hold;
use futures::StreamExt;
use larder_format::PageId;
use larder_format::planted::{Bug, has};
use larder_wire::{MAX_HOLD_MS, Response};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most lookups of one connection that hold pages at a time; more hold nothing.
const LEASES_MAX: usize = 64;

/// Pages held for a lookup, until it is cancelled or its time is over.
#[derive(Default)]
pub(super) struct Lease {
    /// `None` when it has ended.
    pub(super) holds: Mutex<Option<Vec<Hold>>>,
}

impl Lease {
    fn add(&self, hold: Hold) {
        if let Some(holds) = self.holds.lock().as_mut() {
            holds.push(hold);
        }
    }

    /// Memory that it takes beside the pages, about.
    fn bytes(&self) -> u64 {
        let holds = self.holds.lock().as_ref().map_or(0, Vec::capacity);
        (size_of::<Self>() + holds * size_of::<Hold>()) as u64
    }

    pub(super) fn end(&self) {
        if has(Bug::LeaseStays) {
            return;
        }
        let holds = self.holds.lock().take();
        drop(holds);
    }
}

impl Connection {
    /// Tells the longest servable prefix, and holds it: what is in L2 at once, what is on L3 as it comes into L2.
    pub(super) async fn lookup(
        &mut self,
        request: u64,
        ids: Vec<PageId>,
        hold_ms: u32,
        deadline: Instant,
    ) -> io::Result<()> {
        let shared = self.shared.clone();
        let tiers = shared.store.lookup(&ids);
        let l3_expected_us = u32::try_from(shared.store.l3_expected().as_micros()).unwrap_or(u32::MAX);
        self.leases.retain(|_, lease| lease.holds.lock().is_some());
        let may_hold = hold_ms > 0 && self.leases.len() < LEASES_MAX && !self.leases.contains_key(&request);
        let permit = (may_hold && !tiers.is_empty()).then(|| self.permit(ids.len())).flatten();
        let Some(permit) = permit else {
            return self.answer(request, Response::Looked { tiers, held: 0, l3_expected_us }).await;
        };
        let lease = Arc::new(Lease { holds: Mutex::new(Some(Vec::new())) });
        let prefix = &ids[..tiers.len()];
        let mut on_l3 = Vec::new();
        let mut held = 0;
        for (index, id) in (0..).zip(prefix) {
            match shared.store.hold_l2(id) {
                Some(hold) => {
                    held += u32::from(held == index);
                    lease.add(hold);
                }
                None => on_l3.push(*id),
            }
        }
        self.leases.insert(request, lease.clone());
        let until = now() + Duration::from_millis(hold_ms.min(MAX_HOLD_MS).into());
        let (account, page_bytes, mut charge) = (self.account.clone(), self.page_bytes(), self.charge.take());
        self.start(request, async move {
            futures::stream::iter(on_l3)
                .for_each_concurrent(GET_PAGES_AT_ONCE, |id| {
                    let (shared, lease, account) = (&shared, &lease, &account);
                    async move {
                        // What there is no room for now is not held: it can be read all the same.
                        let Some(_read) = account.try_charge(Kind::Reads, page_bytes) else { return };
                        let page = shared.store.fetch(&id, deadline.min(until)).await;
                        if let Some(hold) = page.and_then(|page| shared.store.hold(&page)) {
                            lease.add(hold);
                        }
                    }
                })
                .await;
            // What waits now is the holds, not a request.
            drop(permit);
            if let Some(charge) = &mut charge {
                charge.shrink_to(lease.bytes());
            }
            tokio::time::sleep_until(until.into()).await;
            lease.end();
            Ok(())
        });
        self.answer(request, Response::Looked { tiers, held, l3_expected_us }).await
    }
}
