//! Which node has which key: rendezvous (highest random weight) hashing.
//!
//! Every client that sees the same nodes picks the same one for a key, without asking anybody; when a node goes, only its
//! keys move, and they move back when it returns. (Thaler and Ravishankar, "Using name-based mappings to increase hit
//! rates", 1998.)

use larder_format::PageKey;
use sha2::{Digest, Sha256};
use std::time::Duration;

/// A node's name as a number.
pub(crate) fn seed(node_id: &str) -> u64 {
    let digest = Sha256::digest(node_id.as_bytes());
    u64::from_le_bytes(digest[..8].try_into().expect("8 of 32 bytes"))
}

/// The finaliser of SplitMix64: every input bit changes every output bit with probability one half.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Between half of `time` and one and a half.
pub(crate) fn jittered(time: Duration, chance: u64) -> Duration {
    time.mul_f64(0.5 + (mix(chance) >> 11) as f64 / (1u64 << 53) as f64)
}

/// Index of the node that owns `key`, among nodes with these seeds; `None` if there are none.
pub(crate) fn owner(key: &PageKey, seeds: &[u64]) -> Option<usize> {
    // Foreign engines bring keys of their own: all 32 bytes count.
    let folded = key
        .0
        .chunks_exact(8)
        .fold(0u64, |folded, word| mix(folded ^ u64::from_le_bytes(word.try_into().expect("chunks of 8"))));
    let weights = seeds.iter().enumerate().map(|(index, seed)| (mix(folded ^ seed), index));
    weights.max().map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Vec<PageKey> {
        (0u32..4000).map(|i| PageKey::chain(None, &[i])).collect()
    }

    #[test]
    fn keys_spread_evenly_and_move_only_when_they_must() {
        let seeds: Vec<u64> = ["a", "b", "c", "d"].iter().map(|n| seed(n)).collect();
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
    fn who_comes_back_does_so_about_when_it_was_told_to() {
        let second = Duration::from_secs(1);
        let times: Vec<u128> = (0..1000).map(|chance| jittered(second, chance).as_millis()).collect();
        assert!(times.iter().all(|time| (500..=1500).contains(time)));
        assert!((950..1050).contains(&(times.iter().sum::<u128>() / 1000)) && times[0] != times[1]);
    }

    #[test]
    fn the_order_of_the_url_does_not_matter() {
        let (a, b) = (seed("a"), seed("b"));
        for key in keys() {
            assert_eq!(owner(&key, &[a, b]).unwrap(), 1 - owner(&key, &[b, a]).unwrap());
        }
    }
}
