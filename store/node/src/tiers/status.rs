//! Status of the tiers, for operators and scripts.

use super::Tiers;
use larder_format::NamespaceId;
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
            "eviction_order": if policy.follows_lru() { "lru" } else { "hit-density" },
            "write_policy": policy.write_policy().to_string(),
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

    pub(crate) fn namespace_bytes(&self) -> Vec<(NamespaceId, u64)> {
        let uses = self.state.lock().policy.namespaces(STATUS_NAMESPACES_MAX);
        uses.into_iter().map(|used| (used.namespace, used.bytes)).collect()
    }
}
