//! Reasons why the node cannot serve pages. Only for those who ask: a get costs no such search.

use crate::departures::Reason;
use crate::store::Store;
use larder_format::{NamespaceFields, NamespaceId, PageId};
use larder_wire::{Explanation, MissReason, TierCode};

/// Pages that are explained without a pause, at a few microseconds each.
const BATCH_PAGES: usize = 64;

impl Store {
    /// Explains pages of one namespace, in their order. Lets other tasks go first between batches.
    pub async fn explain(&self, ids: &[PageId]) -> Vec<Explanation> {
        let namespaces = self.tiers().namespaces();
        let nearest = ids.first().map(|id| namespaces.nearest(&id.namespace)).unwrap_or_default();
        let mut explained = Vec::with_capacity(ids.len());
        for batch in ids.chunks(BATCH_PAGES) {
            explained.extend(batch.iter().map(|id| self.explain_page(id, &nearest)));
            if explained.len() < ids.len() {
                tokio::task::yield_now().await;
            }
        }
        explained
    }

    fn explain_page(&self, id: &PageId, nearest: &[(NamespaceId, NamespaceFields)]) -> Explanation {
        let tiers = self.tiers();
        let plain = |reason| event(reason, 0);
        if let Some(at_unix_ms) = tiers.namespaces().retired_unix_ms(&id.namespace) {
            return event(MissReason::Retired, at_unix_ms);
        }
        if tiers.locate(id) != TierCode::Absent {
            return plain(MissReason::Present);
        }
        if self.puts().is_open(id) {
            return plain(MissReason::BeingPut);
        }
        // Lookups ask healthy devices only.
        if tiers.devices().has(id) {
            return plain(MissReason::DeviceFailing);
        }
        if let Some((reason, at_unix_ms)) = tiers.departure(id) {
            let reason = match reason {
                Reason::Evicted => MissReason::Evicted,
                Reason::Expired => MissReason::Expired,
                Reason::Forgotten => MissReason::Forgotten,
            };
            return event(reason, at_unix_ms);
        }
        if self.puts().has_forgotten(id) {
            return plain(MissReason::Forgotten);
        }
        let has_page = |namespace| tiers.locate(&PageId { namespace, key: id.key }) != TierCode::Absent;
        if let Some((_, differing)) = nearest.iter().find(|(namespace, _)| has_page(*namespace)) {
            return Explanation { reason: MissReason::OtherNamespace, at_unix_ms: 0, differing: *differing };
        }
        let is_recovering = tiers.devices().is_recovering();
        plain(if is_recovering { MissReason::Recovering } else { MissReason::NeverStored })
    }
}

fn event(reason: MissReason, at_unix_ms: u64) -> Explanation {
    Explanation { reason, at_unix_ms, differing: NamespaceFields::default() }
}
