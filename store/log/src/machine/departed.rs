//! Pages that lately left the log for lack of room, and when.
//!
//! The table has a fixed size. A page takes the place of an older one, so the absence of a page
//! tells nothing. Times are exact to the last part of an [`ExpirySweep`](super::ExpirySweep).

use super::entry::Fingerprint;
use larder_runtime::sync::MODELLED;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Places of the table: 256 KiB.
const PLACES: usize = if MODELLED { 64 } else { 1 << 15 };

#[derive(Debug)]
pub(super) struct Departed {
    /// Second since 1970 of the departures to come. 0 until it is known.
    now_unix_s: AtomicU32,
    /// Upper half: a part of the fingerprint. Lower half: the second. 0 without a page.
    places: Box<[AtomicU64]>,
}

impl Departed {
    pub(super) fn new() -> Departed {
        Departed { now_unix_s: AtomicU32::new(0), places: (0..PLACES).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(super) fn set_time(&self, now_unix_ms: u64) {
        // Relaxed, here and below: each word has a meaning of its own.
        self.now_unix_s.store(u32::try_from(now_unix_ms / 1000).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Records that a page leaves now.
    pub(super) fn record(&self, page: Fingerprint) {
        let second = self.now_unix_s.load(Ordering::Relaxed);
        if second != 0 {
            let hash = page.hash();
            self.place(hash).store(hash << 32 | u64::from(second), Ordering::Relaxed);
        }
    }

    /// Time at which the page left, in milliseconds since 1970.
    pub(super) fn find(&self, page: Fingerprint) -> Option<u64> {
        let hash = page.hash();
        let found = self.place(hash).load(Ordering::Relaxed);
        let second = found & u64::from(u32::MAX);
        (second != 0 && found >> 32 == hash & u64::from(u32::MAX)).then_some(second * 1000)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.places)
    }

    fn place(&self, hash: u64) -> &AtomicU64 {
        &self.places[(hash >> 32) as usize % PLACES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageId, PageKey};

    fn fingerprint(number: u32) -> Fingerprint {
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) };
        Fingerprint::of(7, &id)
    }

    #[test]
    fn departure_has_its_time_until_another_page_takes_its_place() {
        let departed = Departed::new();
        departed.record(fingerprint(1));
        assert_eq!(departed.find(fingerprint(1)), None, "the time is unknown");
        departed.set_time(1_900_000_000_500);
        departed.record(fingerprint(1));
        departed.set_time(1_900_000_007_000);
        departed.record(fingerprint(2));
        let found = [1, 2, 3].map(|number| departed.find(fingerprint(number)));
        assert_eq!(found, [Some(1_900_000_000_000), Some(1_900_000_007_000), None]);
        let pages = 4 * PLACES as u32;
        (0..pages).for_each(|number| departed.record(fingerprint(number)));
        let known = (0..pages).filter(|&number| departed.find(fingerprint(number)).is_some()).count();
        assert!(known > PLACES / 2 && known <= PLACES, "{known} of {PLACES} places");
    }
}
