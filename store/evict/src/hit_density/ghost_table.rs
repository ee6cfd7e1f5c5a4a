//! Ghost entries: access count and last access of evicted pages.
//!
//! A direct-mapped table: the hash gives the slot, and the latest entry stays. An entry holds 16
//! bits of the hash, 12 bits of the time and 4 bits of the access count. Time is counted in ticks
//! that grow with the table, so that it wraps around only after most entries were overwritten.

/// Minimum number of slots. Up to half as many resident pages, the table has this fixed size.
const SLOTS_MIN: usize = 1 << 16;
const SLOTS_PER_PAGE: usize = 2;
const TICKS_PER_SLOTS: u32 = 1 << 8;
const TAG_SHIFT: u32 = 40;
const TICK_BITS: u32 = 12;
const ACCESSES_BITS: u32 = 4;

#[derive(Debug)]
pub(super) struct GhostTable {
    /// Tag, tick of the last access, access count. Zero: empty.
    slots: Vec<u32>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PastUse {
    /// Accesses before the eviction, at most 15. 0: unknown.
    pub(super) accesses: u8,
    /// Accesses of the cache since the last of them, to the tick.
    pub(super) gap: u64,
}

impl GhostTable {
    pub(super) fn new() -> GhostTable {
        GhostTable { slots: vec![0; SLOTS_MIN] }
    }

    /// Records an evicted page that had `accesses` accesses, the last at `run`.
    pub(super) fn put(&mut self, hash: u64, accesses: u8, run: u64) {
        let accesses = u32::from(accesses).min((1 << ACCESSES_BITS) - 1);
        let slot = self.slot(hash);
        self.slots[slot] = tag(hash) | (self.tick(run) << ACCESSES_BITS) | accesses;
    }

    pub(super) fn take(&mut self, hash: u64, run: u64) -> PastUse {
        let slot = self.slot(hash);
        let entry = self.slots[slot];
        if entry == 0 || tag(hash) != entry & tag(u64::MAX) {
            return PastUse::default();
        }
        self.slots[slot] = 0;
        let ticks = self.tick(run).wrapping_sub(entry >> ACCESSES_BITS) & ((1 << TICK_BITS) - 1);
        let accesses = entry & ((1 << ACCESSES_BITS) - 1);
        PastUse { accesses: accesses as u8, gap: u64::from(ticks) << self.tick_shift() }
    }

    /// Doubles the table for many residents, and drops all entries. It grows only while the cache
    /// fills, when few pages were evicted.
    pub(super) fn grow_for(&mut self, residents: usize) {
        if residents * SLOTS_PER_PAGE > self.slots.len() {
            let slots = 2 * self.slots.len();
            self.slots = Vec::new();
            self.slots.resize(slots, 0);
        }
    }

    fn slot(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }

    fn tick(&self, run: u64) -> u32 {
        (run >> self.tick_shift()) as u32 & ((1 << TICK_BITS) - 1)
    }

    fn tick_shift(&self) -> u32 {
        (self.slots.len() as u64 / u64::from(TICKS_PER_SLOTS)).ilog2()
    }
}

fn tag(hash: u64) -> u32 {
    ((hash >> TAG_SHIFT) as u32) << (TICK_BITS + ACCESSES_BITS)
}

const _: () = assert!(SLOTS_MIN.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: u64 = 0x1234_5678_9abc_def0;
    const TICK: u64 = SLOTS_MIN as u64 / TICKS_PER_SLOTS as u64;

    #[test]
    fn a_page_that_returns_is_known_once() {
        let mut ghost_table = GhostTable::new();
        ghost_table.put(HASH, 7, 5 * TICK);
        assert_eq!(ghost_table.take(HASH ^ (1 << TAG_SHIFT), 9 * TICK), PastUse::default());
        assert_eq!(ghost_table.take(HASH, 9 * TICK), PastUse { accesses: 7, gap: 4 * TICK });
        assert_eq!(ghost_table.take(HASH, 9 * TICK), PastUse::default());
    }

    #[test]
    fn requests_end_at_a_most_and_time_goes_round() {
        let mut ghost_table = GhostTable::new();
        ghost_table.put(HASH, 200, 4095 * TICK);
        assert_eq!(ghost_table.take(HASH, 4098 * TICK + 1), PastUse { accesses: 15, gap: 3 * TICK });
    }

    #[test]
    fn it_grows_with_the_pages() {
        let mut ghost_table = GhostTable::new();
        ghost_table.grow_for(SLOTS_MIN / SLOTS_PER_PAGE);
        assert_eq!(ghost_table.slots.len(), SLOTS_MIN);
        ghost_table.grow_for(SLOTS_MIN);
        assert_eq!(ghost_table.slots.len(), 2 * SLOTS_MIN);
        ghost_table.put(HASH, 1, 0);
        assert_eq!(ghost_table.take(HASH, 4 * TICK), PastUse { accesses: 1, gap: 4 * TICK });
    }
}
