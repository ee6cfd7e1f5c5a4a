//! Choices that the workers of the log, of a node and of a cluster share.

use crate::payload::{NAMESPACES, namespace_of};
use crate::random::RandomSource;
use crate::setup::Setup;
use std::time::Duration;
use tokio::time::{Instant, timeout};

const LARGE_BYTES: u64 = 200_000;
/// Largest forget that is not one of a whole namespace.
pub(crate) const KEYS_FORGOTTEN_AT_ONCE: usize = 4;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    None,
    Deadline(Duration),
    Cancel(Duration),
}

impl Limit {
    /// Draws a limit: one operation in twenty has a deadline of less than 20 ms, and one in twenty
    /// is cancelled after less than 20 ms.
    pub(crate) fn draw(random: &mut RandomSource) -> Limit {
        match random.below(20) {
            0 => Limit::Deadline(Duration::from_millis(random.below(20))),
            1 => Limit::Cancel(Duration::from_millis(random.below(20))),
            _ => Limit::None,
        }
    }

    pub(crate) fn deadline_within(self, patience: Duration) -> std::time::Instant {
        let duration = match self {
            Limit::Deadline(duration) => duration,
            Limit::None | Limit::Cancel(_) => patience,
        };
        (Instant::now() + duration).into_std()
    }

    /// Runs `work`. Returns `None` if the limit cancelled it.
    pub(crate) async fn run<T>(self, work: impl Future<Output = T>) -> Option<T> {
        match self {
            Limit::Cancel(after) => timeout(after, work).await.ok(),
            Limit::None | Limit::Deadline(_) => Some(work.await),
        }
    }
}

/// Draws a key: one of all, one of the first eighth, or the smaller of two, with equal probability.
/// So some keys are hot.
pub(crate) fn draw_key(setup: &Setup, random: &mut RandomSource) -> u64 {
    let keys = setup.keys;
    match random.below(3) {
        0 => random.below(keys),
        1 => random.below(keys / 8 + 1),
        _ => random.below(keys).min(random.below(keys)),
    }
}

/// Draws the keys of one forget: a few keys, or now and then all keys of a namespace. The latter
/// leave the log and L2 without a page of it, so that both drop what they know of the namespace.
pub(crate) fn draw_forgotten_keys(setup: &Setup, key: u64, random: &mut RandomSource) -> Vec<u64> {
    if random.chance(setup.forget_namespace_rate) {
        let namespace = random.below(NAMESPACES);
        return (0..setup.keys).filter(|&key| namespace_of(key) == namespace).collect();
    }
    let mut keys = vec![key];
    (0..random.below(4)).for_each(|_| keys.push(draw_key(setup, random)));
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// Draws the lengths of the parts of a page, in bytes: one of the fixed size, or one to four of
/// random sizes. Five pages in a thousand may have up to 200,000 bytes.
pub(crate) fn parts(setup: &Setup, random: &mut RandomSource) -> Vec<u32> {
    if let Some(bytes) = setup.uniform_bytes {
        return vec![bytes];
    }
    let most = if random.chance(5_000) { LARGE_BYTES } else { setup.payload_max };
    let parts = random.between(1, 4);
    (0..parts).map(|_| random.between(1, most / parts) as u32).collect()
}
