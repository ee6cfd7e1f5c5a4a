//! Randomness.

use rand::SeedableRng;
use rand::rngs::StdRng;

/// Returns `fixed`, or a seed from the operating system.
///
/// Options carry `fixed`: a simulation sets it, production leaves it empty.
pub fn seed(fixed: Option<u64>) -> u64 {
    fixed.unwrap_or_else(rand::random)
}

/// Creates a generator from `fixed`, or from the operating system's randomness.
///
/// The generator is suitable for identifiers that must not collide between machines.
pub fn generator(fixed: Option<u64>) -> StdRng {
    match fixed {
        Some(seed) => StdRng::seed_from_u64(seed),
        None => StdRng::from_os_rng(),
    }
}
