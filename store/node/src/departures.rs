//! Pages that lately left DRAM or were forgotten, with the reason and the time.
//!
//! The table has a fixed size. A page takes the place of an older one, so the absence of a page
//! tells nothing. Each page that leaves costs one store to memory, and readers cost nothing.

use std::sync::atomic::{AtomicU64, Ordering};

const PLACES_MIN: u64 = 1 << 10;
/// 1 MiB.
const PLACES_MAX: u64 = 1 << 17;
/// Bytes of L2 for which the table has a place.
const L2_BYTES_PER_PLACE: u64 = 16 << 10;
/// Bits of a place for the time, in seconds since 1970.
const TIME_BITS: u32 = 32;
/// Bits of a place for the reason. The rest is a part of the page's hash.
const REASON_BITS: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// L2 had no room for it, or its namespace was at its quota.
    Evicted = 1,
    Expired = 2,
    Forgotten = 3,
}

pub(crate) struct Departures {
    places: Box<[AtomicU64]>,
}

impl Departures {
    pub(crate) fn new(l2_bytes: u64) -> Departures {
        let places = (l2_bytes / L2_BYTES_PER_PLACE).clamp(PLACES_MIN, PLACES_MAX).next_power_of_two();
        Departures { places: (0..places).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Records that the page with this [`page_hash`](crate::policy::page_hash) leaves.
    pub(crate) fn record(&self, hash: u64, reason: Reason, now_unix_ms: u64) {
        let second = (now_unix_ms / 1000).min(u64::from(u32::MAX));
        let place = tag(hash) << (TIME_BITS + REASON_BITS) | (reason as u64) << TIME_BITS | second;
        // Relaxed, here and below: a place is one word, and orders nothing else.
        self.place(hash).store(place, Ordering::Relaxed);
    }

    /// Reason why the page left, and the time in milliseconds since 1970, to the second.
    pub(crate) fn find(&self, hash: u64) -> Option<(Reason, u64)> {
        let place = self.place(hash).load(Ordering::Relaxed);
        if place >> (TIME_BITS + REASON_BITS) != tag(hash) {
            return None;
        }
        let reason = match place >> TIME_BITS & ((1 << REASON_BITS) - 1) {
            1 => Reason::Evicted,
            2 => Reason::Expired,
            3 => Reason::Forgotten,
            _ => return None,
        };
        Some((reason, (place & u64::from(u32::MAX)) * 1000))
    }

    fn place(&self, hash: u64) -> &AtomicU64 {
        // The number of places is a power of two, so these are the lowest bits.
        &self.places[hash as usize % self.places.len()]
    }
}

/// The upper bits of a hash, which do not choose its place.
fn tag(hash: u64) -> u64 {
    hash >> (TIME_BITS + REASON_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn departure_is_known_until_another_page_takes_its_place() {
        let departures = Departures::new(1 << 30);
        let hash = 0xdead_beef_0123_4567;
        assert_eq!(departures.find(hash), None);
        departures.record(hash, Reason::Evicted, 1_900_000_000_999);
        assert_eq!(departures.find(hash), Some((Reason::Evicted, 1_900_000_000_000)));
        let same_place = hash ^ 1 << 63;
        assert_eq!(departures.find(same_place), None);
        departures.record(hash, Reason::Forgotten, 1_900_000_001_000);
        departures.record(hash ^ 1, Reason::Expired, 5_000);
        assert_eq!(departures.find(hash), Some((Reason::Forgotten, 1_900_000_001_000)));
        assert_eq!(departures.find(hash ^ 1), Some((Reason::Expired, 5_000)));
        departures.record(same_place, Reason::Evicted, u64::MAX);
        assert_eq!((departures.find(hash), departures.find(same_place).is_some()), (None, true));
    }

    #[test]
    fn table_has_a_bounded_size_whatever_the_size_of_l2() {
        let places = |l2_bytes| Departures::new(l2_bytes).places.len() as u64;
        assert_eq!([places(0), places(u64::MAX)], [PLACES_MIN, PLACES_MAX]);
        assert!(places(100 << 20).is_power_of_two());
    }
}
