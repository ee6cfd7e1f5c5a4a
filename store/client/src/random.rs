//! Mixing of bits, and jitter.

use std::time::Duration;

/// The finaliser of SplitMix64: every input bit changes every output bit with probability 1/2.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Scales `time` by a factor between 1 and 1.25 that `seed` selects. Clients that a node has
/// refused at the same moment then do not all return at the same moment. None returns before the
/// time that the node told it: the node has no room for it yet.
pub(crate) fn jittered(time: Duration, seed: u64) -> Duration {
    time.mul_f64(1.0 + (mix(seed) >> 11) as f64 / (1u64 << 55) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_adds_up_to_a_quarter_of_the_time() {
        let second = Duration::from_secs(1);
        let times: Vec<u128> = (0..1000).map(|seed| jittered(second, seed).as_millis()).collect();
        assert!(times.iter().all(|time| (1000..=1250).contains(time)));
        assert!((1100..1150).contains(&(times.iter().sum::<u128>() / 1000)) && times[0] != times[1]);
    }
}
