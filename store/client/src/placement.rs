//! Placement of keys on nodes: rendezvous (highest random weight) hashing.
//!
//! Invariants:
//! - Clients that see the same nodes pick the same node for a key, without a coordinator.
//! - When a node leaves, only its keys move. They move back when it returns.
//! - The order of nodes in the URL does not matter.
//!
//! Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.

use crate::random::mix;
use larder_format::PageKey;
use sha2::{Digest, Sha256};

/// Hash of a node's id. It is stable across clients, restarts and versions.
pub(crate) fn node_seed(node_id: &str) -> u64 {
    let digest = Sha256::digest(node_id.as_bytes());
    u64::from_le_bytes(digest[..8].try_into().expect("8 of 32 bytes"))
}

/// Hash of one run of a node, from its start to its end.
pub(crate) fn node_run(node_id: &str, epoch: u64) -> u64 {
    mix(node_seed(node_id) ^ mix(epoch))
}

pub(crate) fn owner(key: &PageKey, node_seeds: &[u64]) -> Option<usize> {
    // Foreign engines bring keys that are not uniform hashes, so all 32 bytes count.
    let folded = key
        .0
        .chunks_exact(8)
        .fold(0u64, |folded, word| mix(folded ^ u64::from_le_bytes(word.try_into().expect("chunks of 8"))));
    let weights = node_seeds.iter().enumerate().map(|(index, seed)| (mix(folded ^ seed), index));
    weights.max().map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Vec<PageKey> {
        (0u32..4000).map(|i| PageKey::chain(None, &[i])).collect()
    }

    #[test]
    fn keys_spread_evenly_and_move_only_when_their_node_leaves() {
        let seeds: Vec<u64> = ["a", "b", "c", "d"].iter().map(|n| node_seed(n)).collect();
        let mut counts = [0; 4];
        for key in keys() {
            let with_all = owner(&key, &seeds).unwrap();
            counts[with_all] += 1;
            let without_last = owner(&key, &seeds[..3]).unwrap();
            assert!(with_all == 3 || with_all == without_last);
        }
        assert!(counts.iter().all(|&c| (850..1150).contains(&c)), "{counts:?}");
        assert_eq!(owner(&keys()[0], &[]), None);
    }

    #[test]
    fn order_of_nodes_does_not_matter() {
        let a = node_seed("a");
        let b = node_seed("b");
        for key in keys() {
            assert_eq!(owner(&key, &[a, b]).unwrap(), 1 - owner(&key, &[b, a]).unwrap());
        }
    }
}
