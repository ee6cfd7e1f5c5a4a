//! Ghost entries: the past of pages that were evicted or refused.
//!
//! A direct-mapped table: the hash gives the slot, and the latest entry stays. An entry holds a tag
//! of the hash, the time of the last access in units of [`UNIT_TICKS`], and the history. The time
//! wraps around after 4.6 hours, when most entries were overwritten.

use super::classes::History;
use crate::policy::TICKS_PER_MS;

/// Minimum number of slots. Up to as many resident pages, the table has this fixed size. Smaller
/// tables forget refused pages before they return.
const SLOTS_MIN: usize = 1 << 20;
const UNIT_TICKS: u64 = 256 * TICKS_PER_MS;
const TAG_SHIFT: u32 = 44;

#[derive(Debug, Clone, Copy, Default)]
struct Ghost {
    tag: u16,
    /// Time of the last access, in units.
    at: u16,
    history: History,
}

const _: () = assert!(size_of::<Ghost>() <= 6);

#[derive(Debug)]
pub(super) struct GhostTable {
    slots: Vec<Ghost>,
}

/// Past of a page that the table remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Past {
    pub(super) history: History,
    /// Ticks since the last access, to the unit.
    pub(super) gap: u64,
}

impl GhostTable {
    pub(super) fn new() -> GhostTable {
        GhostTable { slots: vec![Ghost::default(); SLOTS_MIN] }
    }

    /// Records a page whose last access was at `run`.
    pub(super) fn put(&mut self, hash: u64, history: History, run: u64) {
        let slot = self.slot(hash);
        self.slots[slot] = Ghost { tag: tag(hash), at: unit(run), history };
    }

    pub(super) fn find(&self, hash: u64, run: u64) -> Option<Past> {
        let ghost = self.slots[self.slot(hash)];
        if ghost.tag != tag(hash) {
            return None;
        }
        // Half a unit stands for the rounded part.
        let units = unit(run).wrapping_sub(ghost.at);
        let gap = (u64::from(units) * UNIT_TICKS).max(UNIT_TICKS / 2);
        Some(Past { history: ghost.history, gap })
    }

    pub(super) fn remove(&mut self, hash: u64) {
        let slot = self.slot(hash);
        if self.slots[slot].tag == tag(hash) {
            self.slots[slot] = Ghost::default();
        }
    }

    /// Doubles the table for many residents, and drops all entries. It grows only while the cache
    /// fills, when few pages were evicted.
    pub(super) fn grow_for(&mut self, residents: usize) {
        if residents > self.slots.len() {
            let slots = 2 * self.slots.len();
            self.slots = Vec::new();
            self.slots.resize(slots, Ghost::default());
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Ghost>()
    }

    fn slot(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }
}

fn unit(run: u64) -> u16 {
    (run / UNIT_TICKS) as u16
}

/// Tag of a hash. It is never 0, which marks an empty slot.
fn tag(hash: u64) -> u16 {
    ((hash >> TAG_SHIFT) as u16).max(1)
}

const _: () = assert!(SLOTS_MIN.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: u64 = 0x1234_5678_9abc_def0;
    const HISTORY: History = History::FIRST;

    #[test]
    fn page_is_known_until_it_is_removed() {
        let mut ghosts = GhostTable::new();
        ghosts.put(HASH, HISTORY.refused(), 5 * UNIT_TICKS);
        assert_eq!(ghosts.find(HASH ^ (1 << TAG_SHIFT), 9 * UNIT_TICKS), None);
        let past = Past { history: HISTORY.refused(), gap: 4 * UNIT_TICKS };
        assert_eq!(ghosts.find(HASH, 9 * UNIT_TICKS), Some(past));
        ghosts.remove(HASH ^ (1 << TAG_SHIFT));
        assert_eq!(ghosts.find(HASH, 9 * UNIT_TICKS), Some(past));
        ghosts.remove(HASH);
        assert_eq!(ghosts.find(HASH, 9 * UNIT_TICKS), None);
    }

    #[test]
    fn time_wraps_around() {
        let mut ghosts = GhostTable::new();
        ghosts.put(HASH, HISTORY, 65_535 * UNIT_TICKS);
        assert_eq!(ghosts.find(HASH, 65_538 * UNIT_TICKS + 1), Some(Past { history: HISTORY, gap: 3 * UNIT_TICKS }));
    }

    #[test]
    fn table_grows_with_the_pages() {
        let mut ghosts = GhostTable::new();
        ghosts.grow_for(SLOTS_MIN);
        assert_eq!(ghosts.slots.len(), SLOTS_MIN);
        ghosts.grow_for(SLOTS_MIN + 1);
        assert_eq!(ghosts.slots.len(), 2 * SLOTS_MIN);
        ghosts.put(HASH, HISTORY, 0);
        assert!(ghosts.find(HASH, 4 * UNIT_TICKS).is_some());
    }
}
