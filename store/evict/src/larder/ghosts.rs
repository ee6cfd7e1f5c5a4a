//! How often pages that were evicted had been asked for, and when last.
//!
//! A table without chains: a page's place follows from its hash, the latest one there stays. An entry is 16 bits of the
//! hash, 12 of the time and 4 of the number of requests. Time is counted in ticks that grow with the table, so that it
//! goes round only after most entries have given way to others.

/// Places, at least. What the table takes does not grow before there are half as many pages.
const PLACES_MIN: usize = 1 << 16;
/// Places per resident page, at least.
const PLACES_PER_PAGE: usize = 2;
/// Ticks in as many accesses as there are places.
const TICKS_PER_PLACES: u32 = 1 << 8;
/// The tag is the hash from here on.
const TAG_SHIFT: u32 = 40;
const TICK_BITS: u32 = 12;
const ACCESSES_BITS: u32 = 4;

#[derive(Debug)]
pub(super) struct Ghosts {
    /// Tag, tick of the last request, and requests; zero for none.
    places: Vec<u32>,
}

/// What is known of a page that returns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Before {
    /// Requests before its eviction, 15 for more, 0 if it is not known.
    pub(super) accesses: u8,
    /// Accesses since the last of them, to the tick.
    pub(super) gap: u64,
}

impl Ghosts {
    pub(super) fn new() -> Ghosts {
        Ghosts { places: vec![0; PLACES_MIN] }
    }

    /// A page went after so many requests, the last of them at `run`.
    pub(super) fn put(&mut self, hash: u64, accesses: u8, run: u64) {
        let accesses = u32::from(accesses).min((1 << ACCESSES_BITS) - 1);
        let place = self.place(hash);
        self.places[place] = tag(hash) | (self.tick(run) << ACCESSES_BITS) | accesses;
    }

    /// A page returns at `run`: what is known of it, which the table forgets.
    pub(super) fn take(&mut self, hash: u64, run: u64) -> Before {
        let place = self.place(hash);
        let entry = self.places[place];
        if entry == 0 || tag(hash) != entry & tag(u64::MAX) {
            return Before::default();
        }
        self.places[place] = 0;
        let ticks = self.tick(run).wrapping_sub(entry >> ACCESSES_BITS) & ((1 << TICK_BITS) - 1);
        let accesses = entry & ((1 << ACCESSES_BITS) - 1);
        Before { accesses: accesses as u8, gap: u64::from(ticks) << self.tick_shift() }
    }

    /// Doubles, and forgets all, if there are many pages. That is while the cache still fills: little was evicted.
    pub(super) fn grow_for(&mut self, residents: usize) {
        if residents * PLACES_PER_PAGE > self.places.len() {
            let places = 2 * self.places.len();
            self.places = Vec::new();
            self.places.resize(places, 0);
        }
    }

    fn place(&self, hash: u64) -> usize {
        hash as usize & (self.places.len() - 1)
    }

    fn tick(&self, run: u64) -> u32 {
        (run >> self.tick_shift()) as u32 & ((1 << TICK_BITS) - 1)
    }

    fn tick_shift(&self) -> u32 {
        (self.places.len() as u64 / u64::from(TICKS_PER_PLACES)).ilog2()
    }
}

fn tag(hash: u64) -> u32 {
    ((hash >> TAG_SHIFT) as u32) << (TICK_BITS + ACCESSES_BITS)
}

const _: () = assert!(PLACES_MIN.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: u64 = 0x1234_5678_9abc_def0;
    /// Accesses of a tick of the smallest table.
    const TICK: u64 = PLACES_MIN as u64 / TICKS_PER_PLACES as u64;

    #[test]
    fn a_page_that_returns_is_known_once() {
        let mut ghosts = Ghosts::new();
        ghosts.put(HASH, 7, 5 * TICK);
        assert_eq!(ghosts.take(HASH ^ (1 << TAG_SHIFT), 9 * TICK), Before::default());
        assert_eq!(ghosts.take(HASH, 9 * TICK), Before { accesses: 7, gap: 4 * TICK });
        assert_eq!(ghosts.take(HASH, 9 * TICK), Before::default());
    }

    #[test]
    fn requests_end_at_a_most_and_time_goes_round() {
        let mut ghosts = Ghosts::new();
        ghosts.put(HASH, 200, 4095 * TICK);
        assert_eq!(ghosts.take(HASH, 4098 * TICK + 1), Before { accesses: 15, gap: 3 * TICK });
    }

    #[test]
    fn it_grows_with_the_pages() {
        let mut ghosts = Ghosts::new();
        ghosts.grow_for(PLACES_MIN / PLACES_PER_PAGE);
        assert_eq!(ghosts.places.len(), PLACES_MIN);
        ghosts.grow_for(PLACES_MIN);
        assert_eq!(ghosts.places.len(), 2 * PLACES_MIN);
        ghosts.put(HASH, 1, 0);
        assert_eq!(ghosts.take(HASH, 4 * TICK), Before { accesses: 1, gap: 4 * TICK });
    }
}
