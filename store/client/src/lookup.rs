//! What nodes have, and keeping it there.

use crate::client::{Client, Tier, tier};
use crate::link::Live;
use crate::put::hint;
use futures::future::join_all;
use larder_format::PageKey;
use larder_wire::{MAX_HOLD_MS, MAX_KEYS, Request, Response, TierCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the nodes hold of a chain of pages.
#[derive(Debug, Default)]
pub struct Lookup {
    /// Tier of each page of the longest servable prefix; its length is the prefix in pages.
    pub tiers: Vec<Tier>,
    /// Whether every node that owns one of the keys answered in time. If not, an empty prefix does not mean that nothing
    /// is there.
    pub answered: bool,
    /// If not because a node was too busy: when it is worth trying again.
    pub retry_after: Option<Duration>,
    /// How many of these pages, from the first on, are held in L2 already. The others are brought there, one after the other.
    pub held: usize,
    /// How long each of these pages is expected to take to come into DRAM: nothing if it is there, and what its node says of
    /// its L3 otherwise.
    pub expected: Vec<Duration>,
    /// Keeps the pages readable. They are let go of when this is dropped, or the time is over that was asked for.
    pub lease: Lease,
}

/// Pages that nodes keep readable for this client.
#[derive(Default)]
pub struct Lease {
    lookups: Vec<(Arc<Live>, u64)>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("nodes", &self.lookups.len()).finish()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        for (node, request) in &self.lookups {
            node.tell_surely(&Request::Cancel(*request));
        }
    }
}

impl Client {
    /// Where each page lies: `None` is nowhere, or not known by the deadline; a node that is too busy to say is asked again
    /// until then.
    pub async fn locate(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<Tier>> {
        let mut located = vec![None; keys.len()];
        for (indices, answer) in self.ask_owners(keys, deadline, Request::Locate).await {
            if let Some(Response::Located(tiers)) = answer {
                for (index, code) in indices.into_iter().zip(tiers) {
                    located[index] = tier(code);
                }
            }
        }
        located
    }

    /// The longest prefix of `keys` that the nodes can serve, which they hold for `hold` (at most a minute; nothing is held
    /// if it is zero) or until the lease is dropped.
    pub async fn lookup(&self, keys: &[PageKey], hold: Duration, deadline: Instant) -> Lookup {
        let hold_ms = u32::try_from(hold.as_millis()).unwrap_or(u32::MAX).min(MAX_HOLD_MS);
        let nodes = self.nodes();
        nodes.or_pause().await;
        let asks = Self::batches(&nodes, keys, MAX_KEYS, 0).into_iter().map(|(node, indices)| {
            let keys = indices.iter().map(|&index| keys[index]).collect();
            async move {
                let request = node.number();
                // From now on, whatever comes of it, the node is told when it is over.
                let lease = (hold_ms > 0).then(|| Lease { lookups: vec![(node.clone(), request)] });
                let answer = node.ask_as(request, &Request::Lookup { keys, hold_ms }, deadline).await;
                (indices, lease, answer)
            }
        });
        let (mut located, mut is_held, mut answered) = (vec![None; keys.len()], vec![false; keys.len()], 0);
        let mut lookup = Lookup::default();
        for (indices, lease, answer) in join_all(asks).await {
            if let Some(Response::Busy { retry_after_ms, .. }) = answer {
                lookup.retry_after = lookup.retry_after.max(Some(hint(retry_after_ms)));
            }
            let Some(Response::Looked { tiers, held, l3_expected_us }) = answer else { continue };
            answered += indices.len();
            let l3_expected = Duration::from_micros(l3_expected_us.into());
            for (place, (index, code)) in indices.into_iter().zip(tiers).enumerate() {
                let expected = if code == TierCode::L3 { l3_expected } else { Duration::ZERO };
                located[index] = tier(code).map(|tier| (tier, expected));
                is_held[index] = place < held as usize;
            }
            lookup.lease.lookups.extend(lease.into_iter().flat_map(|mut lease| std::mem::take(&mut lease.lookups)));
        }
        lookup.answered = answered == keys.len();
        let prefix = located.into_iter().map_while(|found| found);
        (lookup.tiers, lookup.expected) = prefix.unzip();
        lookup.held = is_held.iter().take(lookup.tiers.len()).take_while(|&&held| held).count();
        lookup
    }

    /// Which of `keys` exist.
    pub async fn exists(&self, keys: &[PageKey], deadline: Instant) -> Vec<bool> {
        self.locate(keys, deadline).await.into_iter().map(|tier| tier.is_some()).collect()
    }
}
