//! Queries for pages: which exist, in which tier, and how long they stay.

use super::durations::retry_delay;
use super::extents::gives_extents;
use crate::client::Client;
use crate::connection::Connection;
use futures::future::join_all;
use larder_format::PageKey;
use larder_wire::{MAX_HOLD_MS, MAX_KEYS, Request, Response, TierCode};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tier of a store node that holds a page. It tells the cost of reading the page, not the validity
/// of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tier {
    /// DRAM of a store node: microseconds away.
    L2,
    /// NVMe of a store node: a device read away.
    L3,
}

pub(super) fn tier(code: TierCode) -> Option<Tier> {
    match code {
        TierCode::Absent => None,
        TierCode::L2 => Some(Tier::L2),
        TierCode::L3 => Some(Tier::L3),
    }
}

/// Result of [`Client::lookup`]: the longest servable prefix of a chain of pages.
#[derive(Debug, Default)]
pub struct Lookup {
    /// Tier of each page of the prefix. Its length is the prefix in pages.
    pub tiers: Vec<Tier>,
    /// `true` if every node that owns one of the keys answered in time. If it is `false`, an empty
    /// prefix does not mean that the pages do not exist.
    pub answered: bool,
    /// Longest retry hint of a busy node. `None` if no node was busy.
    pub retry_after: Option<Duration>,
    /// Number of leading pages of the prefix that are in L2 and held there by the lease. Nodes
    /// bring the others from L3 one after the other.
    pub held: usize,
    /// Expected time until each page of the prefix is in DRAM: zero for L2, and the node's estimate
    /// of its L3 latency otherwise.
    pub expected: Vec<Duration>,
    /// Keeps the pages readable until it is dropped, or until the requested time is over.
    pub lease: Lease,
}

/// Pages that nodes keep readable for this client. Dropping the lease releases them without
/// waiting.
#[derive(Default)]
pub struct Lease {
    /// Connection and number of each Lookup request.
    lookups: Vec<(Arc<Connection>, u64)>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("nodes", &self.lookups.len()).finish()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        for (connection, request) in &self.lookups {
            connection.send_detached(&Request::Cancel(*request));
        }
    }
}

impl Client {
    /// Tier of each page. `None` means that it does not exist, or that its owner did not answer
    /// before `deadline`. The client retries at busy nodes until then.
    ///
    /// Sends one request per node and 8,192 keys. No page is read.
    pub async fn locate(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<Tier>> {
        let mut located = vec![None; keys.len()];
        for (indices, answer) in self.request_owners(keys, deadline, Request::Locate).await {
            if let Some(Response::Located(tiers)) = answer {
                for (index, code) in indices.into_iter().zip(tiers) {
                    located[index] = tier(code);
                }
            }
        }
        located
    }

    /// Finds the longest prefix of `keys` that the nodes can serve, and holds it for `hold`, at
    /// most 60 s. Zero holds nothing. Dropping [`Lookup::lease`] ends the hold early.
    ///
    /// Does not retry at busy nodes: see [`Lookup::retry_after`].
    pub async fn lookup(&self, keys: &[PageKey], hold: Duration, deadline: Instant) -> Lookup {
        self.lookup_holding(keys, hold, true, deadline).await
    }

    /// Like [`Client::lookup`], but nodes that give extents leave their pages on L3 there, and hold
    /// only those in L2. For a caller that reads L3 by itself, with [`Client::extents`].
    pub async fn lookup_without_loads(&self, keys: &[PageKey], hold: Duration, deadline: Instant) -> Lookup {
        self.lookup_holding(keys, hold, false, deadline).await
    }

    async fn lookup_holding(&self, keys: &[PageKey], hold: Duration, load_l3: bool, deadline: Instant) -> Lookup {
        let hold_ms = u32::try_from(hold.as_millis()).unwrap_or(u32::MAX).min(MAX_HOLD_MS);
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let requests = nodes.batches(keys, MAX_KEYS, 0).into_iter().map(|(connection, indices)| {
            let keys = indices.iter().map(|&index| keys[index]).collect();
            let load_l3 = load_l3 || !gives_extents(&connection);
            async move {
                let request = connection.next_request();
                // Before the request leaves: if this future is dropped, the node must hear of it.
                let lease = (hold_ms > 0).then(|| Lease { lookups: vec![(connection.clone(), request)] });
                let lookup = Request::Lookup { keys, hold_ms, load_l3 };
                let answer = connection.request_as(request, &lookup, deadline).await;
                (indices, lease, answer)
            }
        });
        let mut located = vec![None; keys.len()];
        let mut is_held = vec![false; keys.len()];
        let mut answered = 0;
        let mut lookup = Lookup::default();
        for (indices, lease, answer) in join_all(requests).await {
            if let Some(Response::Busy { retry_after_ms, .. }) = answer {
                lookup.retry_after = lookup.retry_after.max(Some(retry_delay(retry_after_ms)));
            }
            // A node that fails to answer ends the prefix at its first key.
            let Some(Response::LookedUp { tiers, held, l3_expected_us }) = answer else { continue };
            answered += indices.len();
            let l3_expected = Duration::from_micros(l3_expected_us.into());
            for (position, (index, code)) in indices.into_iter().zip(tiers).enumerate() {
                let expected = if code == TierCode::L3 { l3_expected } else { Duration::ZERO };
                located[index] = tier(code).map(|tier| (tier, expected));
                is_held[index] = position < held as usize;
            }
            lookup.lease.lookups.extend(lease.into_iter().flat_map(|mut lease| std::mem::take(&mut lease.lookups)));
        }
        lookup.answered = answered == keys.len();
        // A prefix only: KV cache of a page is useless without the pages before it.
        let prefix = located.into_iter().map_while(|found| found);
        (lookup.tiers, lookup.expected) = prefix.unzip();
        lookup.held = is_held.iter().take(lookup.tiers.len()).take_while(|&&held| held).count();
        lookup
    }

    /// Tells for each key if its page exists, like [`Client::locate`].
    pub async fn exists(&self, keys: &[PageKey], deadline: Instant) -> Vec<bool> {
        self.locate(keys, deadline).await.into_iter().map(|tier| tier.is_some()).collect()
    }
}
