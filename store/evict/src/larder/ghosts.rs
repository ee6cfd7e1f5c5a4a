//! How often pages that were evicted had been asked for.
//!
//! A table without chains: a page's place follows from its hash, the latest one there stays. An entry is a tag of 24
//! bits of the hash and the number of requests.

/// Places, at least. What the table takes does not grow before there are half as many pages.
const PLACES_MIN: usize = 1 << 16;
/// Places per resident page, at least.
const PLACES_PER_PAGE: usize = 2;
const TAG_SHIFT: u32 = 40;

#[derive(Debug)]
pub(super) struct Ghosts {
    /// Tag and requests; zero for none.
    places: Vec<u32>,
}

impl Ghosts {
    pub(super) fn new() -> Ghosts {
        Ghosts { places: vec![0; PLACES_MIN] }
    }

    /// A page went after so many requests.
    pub(super) fn put(&mut self, hash: u64, accesses: u8) {
        let place = self.place(hash);
        self.places[place] = tag(hash) | u32::from(accesses);
    }

    /// A page returns: its requests so far, which the table forgets.
    pub(super) fn take(&mut self, hash: u64) -> u8 {
        let place = self.place(hash);
        if self.places[place] & !0xff != tag(hash) {
            return 0;
        }
        std::mem::take(&mut self.places[place]) as u8
    }

    /// Doubles if there are many pages. Which half an entry belongs to is not known: it goes to both.
    pub(super) fn grow_for(&mut self, residents: usize) {
        if residents * PLACES_PER_PAGE > self.places.len() {
            let places = self.places.len();
            self.places.reserve_exact(places);
            self.places.extend_from_within(..);
        }
    }

    fn place(&self, hash: u64) -> usize {
        hash as usize & (self.places.len() - 1)
    }
}

fn tag(hash: u64) -> u32 {
    ((hash >> TAG_SHIFT) as u32) << 8
}

const _: () = assert!(PLACES_MIN.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_returns_is_known_once_and_across_growth() {
        let mut ghosts = Ghosts::new();
        let hash = 0x1234_5678_9abc_def0;
        ghosts.put(hash, 7);
        ghosts.grow_for(PLACES_MIN);
        assert_eq!(ghosts.places.len(), 2 * PLACES_MIN);
        assert_eq!(ghosts.take(hash ^ (1 << 63)), 0);
        assert_eq!(ghosts.take(hash), 7);
        assert_eq!(ghosts.take(hash), 0);
    }
}
