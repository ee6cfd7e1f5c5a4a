//! Status of the tiers, for operators and scripts.

use super::Tiers;
use crate::departures::Reason;
use larder_evict::{EvictionOrder, HitDensity};
use larder_format::{NamespaceId, PageId};
use serde_json::json;

/// Cap on the namespaces in the status, and on the samples with their names in the metrics. A node
/// may have a namespace per tenant and model, and each sample costs the scraper memory.
const STATUS_NAMESPACES_MAX: usize = 64;

impl Tiers {
    pub(crate) fn status(&self) -> serde_json::Value {
        // One lock for all figures of L2, so that they are of one moment.
        let state = self.state.lock();
        let policy = &state.policy;
        let (pinned_pages, pinned_bytes) = policy.pinned();
        let (held_pages, held_bytes) = self.holds.usage();
        let namespaces = policy.namespaces(STATUS_NAMESPACES_MAX);
        let l2 = json!({
            "bytes_used": policy.used_bytes(),
            "bytes_capacity": policy.capacity_bytes(),
            "pages": policy.len(),
            "dirty_pages": policy.dirty_pages(),
            "in_flight_bytes": policy.in_flight_bytes(),
            "pinned_pages": pinned_pages,
            "hard_pinned_bytes": pinned_bytes,
            "eviction": eviction(policy.eviction()),
            "touches_dropped": self.metrics.touches_dropped_l2.get(),
            "write_policy": policy.write_policy().to_string(),
            "writes_denied": policy.writes_denied(),
            "arena_bytes": self.arena.capacity(),
            "arena_used": self.arena.used(),
            "huge_pages": self.arena.huge_pages(),
            "shared": self.arena.file().is_some(),
            "held_pages": held_pages,
            "held_bytes": held_bytes,
        });
        drop(state);
        let namespaces: Vec<_> = namespaces
            .into_iter()
            .map(|used| {
                json!({
                    "namespace": used.namespace.to_string(),
                    "pages": used.pages,
                    "bytes": used.bytes,
                    "quota_bytes": used.quota_bytes,
                    "floor_bytes": used.floor_bytes,
                    "hard_pinned_bytes": used.hard_pinned_bytes,
                })
            })
            .collect();
        json!({
            "l2": l2,
            "l3": self.devices.status(),
            "namespaces": namespaces,
            "writes_in_flight": self.writeback.len(),
        })
    }

    /// Latest departure of a page from DRAM or from L3, with its time in milliseconds since 1970.
    /// `None` if no record of one is left.
    pub(crate) fn departure(&self, id: &PageId) -> Option<(Reason, u64)> {
        let expiry = self.l2.get(id).map(|page| page.expires_unix_ms()).filter(|&expiry| !self.is_live(expiry));
        let expired = expiry.map(|at_unix_ms| (Reason::Expired, at_unix_ms));
        let in_dram = expired.or_else(|| self.departures.find(self.l2.hash(id)));
        let on_l3 = self.devices.departed_unix_ms(id).map(|at_unix_ms| (Reason::Evicted, at_unix_ms));
        in_dram.into_iter().chain(on_l3).max_by_key(|(_, at_unix_ms)| *at_unix_ms)
    }

    pub(crate) fn namespace_bytes(&self) -> Vec<(NamespaceId, u64)> {
        let uses = self.state.lock().policy.namespaces(STATUS_NAMESPACES_MAX);
        uses.into_iter().map(|used| (used.namespace, used.bytes)).collect()
    }
}

/// Figures of the eviction policy, and its state in words.
fn eviction(policy: &HitDensity) -> serde_json::Value {
    let counters = policy.counters();
    let (order, reason) = match policy.order() {
        EvictionOrder::NotFull => ("lru", "L2 is not full yet"),
        EvictionOrder::Watching => ("lru", "it has seen too little traffic"),
        EvictionOrder::LruAhead => ("lru", "LRU recently hit more often than the learnt order"),
        EvictionOrder::LruSuffices => ("lru", "LRU answers nearly all pages that return"),
        EvictionOrder::Learnt { refuses: false } => ("hit-density", "LRU would miss pages that return"),
        EvictionOrder::Learnt { refuses: true } => {
            ("hit-density", "LRU would miss many pages that return, so pages of low value are refused")
        }
    };
    json!({
        "order": order,
        "reason": reason,
        "pages_admitted": counters.admitted,
        "pages_refused": counters.refused,
        "pages_ended": counters.ended,
        "pages_demoted": counters.demoted,
        "gaps_ms": policy.gaps_ms(),
    })
}
