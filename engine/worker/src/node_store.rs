//! Store nodes as the store of an engine: the client, and reads of L3 beside it.
//!
//! Invariant: the engine reads no page by itself unless a node has told it the extent. All other
//! pages, and those whose read failed, come from the nodes.

use crate::l3_reads::{L3Read, L3Reads};
use crate::store::{Fetched, Followed, Got, LookupPurpose, OpenPut, PageStore, PutSource};
use futures::future::BoxFuture;
use larder_client::{
    Client, FollowEnd, GetOptions, Hint, Lookup, NewPage, PageDescription, PagePut, PartsReceived, PutOptions,
    PutOutcome, Tier,
};
use larder_format::{PageKey, PageOrigin};
use larder_model::{KvPage, PageSeal};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A put whose parts lie in shared client memory, from which a node on the same host copies them.
struct ClientPut {
    client: Client,
    put: PagePut,
}

impl OpenPut for ClientPut {
    fn write_part(&mut self, part: usize, bytes: &[u8], crcs: &[u32]) {
        // Copy: the page stays in L1 and may be evicted before the node has read it.
        let mut copy = self.client.buffer(bytes.len());
        copy.copy_from_slice(bytes);
        // The caller's checksums: those of the copy would hide damage from before it.
        self.put.part_with_crcs(part, copy.freeze(), crcs.to_vec());
    }

    fn commit(self: Box<Self>, deadline: Instant) -> BoxFuture<'static, (PutOutcome, Option<PageOrigin>)> {
        Box::pin(self.put.commit_described(deadline))
    }
}

/// Maximum retries at a busy node. Few suffice: computing a page takes longer than a short backoff.
const BUSY_RETRIES: u32 = 3;
/// Lease on looked-up pages, which keeps them readable until the reads that follow the lookup.
const LOOKUP_LEASE: Duration = Duration::from_secs(30);

fn seal(page: PageDescription) -> PageSeal {
    PageSeal { chunk_crcs: page.chunk_crcs, origin: page.origin }
}

/// Store nodes, as the store of an engine. Clones share the connections.
#[derive(Clone)]
pub struct NodeStore {
    client: Client,
    l3_reads: Option<Arc<L3Reads>>,
}

impl NodeStore {
    /// With `l3_reads`, the engine reads pages by itself that a node of this machine has on L3.
    pub fn new(client: Client, l3_reads: Option<Arc<L3Reads>>) -> NodeStore {
        NodeStore { client, l3_reads }
    }

    async fn get_from_nodes(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> Vec<Got> {
        let options = GetOptions { busy_retries: BUSY_RETRIES, ..GetOptions::default() };
        let got = self.client.get_described(pages, options, deadline).await;
        let fetched = |tier, description| Some(Fetched { tier, is_direct: false, seal: seal(description?) });
        let result = |(page, end, description): (_, larder_client::Fetched, _)| {
            Got::from((page, end.tier().and_then(|tier| fetched(tier, description))))
        };
        got.into_iter().map(result).collect()
    }
}

impl PageStore for NodeStore {
    fn lookup(&self, keys: Vec<PageKey>, purpose: LookupPurpose, deadline: Instant) -> BoxFuture<'_, Lookup> {
        let lease = match purpose {
            LookupPurpose::Reuse => LOOKUP_LEASE,
            // Nodes count misses only for lookups with a lease.
            LookupPurpose::HandOver => Duration::ZERO,
        };
        // A lease that loads pages of L3 to DRAM would read them before this engine does.
        let reads_l3 = self.l3_reads.as_ref().is_some_and(|reads| reads.is_usable());
        Box::pin(async move {
            match reads_l3 {
                true => self.client.lookup_without_loads(&keys, lease, deadline).await,
                false => self.client.lookup(&keys, lease, deadline).await,
            }
        })
    }

    fn get(&self, pages: Vec<(PageKey, KvPage)>, deadline: Instant) -> BoxFuture<'_, Vec<Got>> {
        Box::pin(async move {
            let Some(reads) = &self.l3_reads else { return self.get_from_nodes(pages, deadline).await };
            let mut ends: Vec<Option<Got>> = Vec::with_capacity(pages.len());
            let (mut left, mut indices) = (Vec::new(), Vec::new());
            for (index, (key, read)) in reads.read(&self.client, pages, deadline).await.into_iter().enumerate() {
                ends.push(match read {
                    L3Read::Hit(page, description) => {
                        let fetched = Fetched { tier: Tier::L3, is_direct: true, seal: seal(description) };
                        Some(Got::Hit(page, fetched))
                    }
                    L3Read::StillRead => Some(Got::Miss(None)),
                    L3Read::Unread(page) => {
                        left.push((key, page));
                        indices.push(index);
                        None
                    }
                });
            }
            for (index, got) in indices.into_iter().zip(self.get_from_nodes(left, deadline).await) {
                ends[index] = Some(got);
            }
            ends.into_iter().map(|end| end.unwrap_or(Got::Miss(None))).collect()
        })
    }

    fn follow(
        &self,
        key: PageKey,
        buffer: KvPage,
        parts: PartsReceived,
        deadline: Instant,
    ) -> BoxFuture<'_, (KvPage, Followed)> {
        let follow = self.client.follow_counted(key, buffer, parts, deadline);
        Box::pin(async move {
            let (page, end, description) = follow.finish_described().await;
            let followed = match (end, description) {
                (FollowEnd::Sealed, Some(description)) => Followed::Sealed(seal(description)),
                (FollowEnd::Aborted, _) => Followed::Aborted,
                (FollowEnd::Busy, _) => Followed::Refused,
                (FollowEnd::Sealed | FollowEnd::Miss, _) => Followed::Missed,
            };
            (page, followed)
        })
    }

    fn put(&self, page: NewPage, source: PutSource, deadline: Instant) -> Box<dyn OpenPut> {
        let put = match source {
            PutSource::Computed => self.client.put(page, deadline),
            PutSource::Copy { origin } => self.client.put_copy(page, origin, PutOptions::default(), deadline),
        };
        Box::new(ClientPut { client: self.client.clone(), put })
    }

    fn forget_copies(&self, pages: Vec<(PageKey, Option<PageOrigin>)>, deadline: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let keys: Vec<PageKey> = pages.iter().map(|(key, _)| *key).collect();
            let stored = self.client.describe(&keys, deadline).await;
            // Another put may replace a page between this look and the forget. That page is then
            // computed once more.
            let is_copy = |origin: &Option<PageOrigin>, page: &PageDescription| {
                origin.is_none() || page.origin.is_none() || *origin == page.origin
            };
            let same = pages.into_iter().zip(stored);
            let same = same.filter(|((_, origin), page)| page.as_ref().is_some_and(|page| is_copy(origin, page)));
            let same: Vec<PageKey> = same.map(|((key, _), _)| key).collect();
            if !same.is_empty() {
                self.client.forget(&same, deadline).await;
            }
            same.len()
        })
    }

    fn generation_ended(&self, keys: Vec<PageKey>, tokens: u32, deadline: Instant) -> BoxFuture<'_, ()> {
        Box::pin(async move { _ = self.client.hint(&keys, Some(tokens), Hint::None, deadline).await })
    }

    fn can_judge_copy(&self, key: &PageKey, origin: PageOrigin) -> Option<bool> {
        self.client.can_judge_copy(key, origin)
    }

    fn nodes_connected(&self) -> usize {
        self.client.nodes_connected()
    }

    fn pages_damaged(&self) -> u64 {
        self.client.stats().corrupt
    }
}
