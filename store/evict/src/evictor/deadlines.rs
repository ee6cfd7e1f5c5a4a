//! Deadlines of resident pages, and the offered page with the earliest one.
//!
//! A tree of degree 64 over the slots. A leaf has the deadlines of 64 slots. It exists while one of
//! its pages has a deadline. Each entry above is the earliest deadline of an offered page below it.
//! So a page with a deadline takes some 8 bytes, any other page less than one, and a call reads at
//! most 64 entries per level. Record 0107 compares this with other orders.
//!
//! Invariant: an entry above the leaves is the least of the 64 values below it, where the values of
//! pages that are not offered count as [`NEVER`].

use crate::policy::Slot;
use crate::push_tight;

const DEGREE: usize = 64;
/// Value of a slot without a deadline, and of a part of the tree in which no page can expire.
const NEVER: u64 = u64::MAX;
/// Bit in the value of a page that is not offered.
const WITHHELD: u64 = 1 << 63;
/// Deadlines are earlier than this one, which is beyond any clock.
pub(super) const DEADLINE_END: u64 = WITHHELD - 1;

type Leaf = [u64; DEGREE];

#[derive(Debug, Default)]
pub(super) struct Deadlines {
    leaves: Vec<Option<Box<Leaf>>>,
    /// Entries above the leaves, the lowest level first: one for each leaf. The last level has at
    /// most one entry.
    levels: Vec<Vec<u64>>,
}

impl Deadlines {
    /// Extends the tree to a slot. The table of pages grows slot by slot, and so must the tree: a
    /// late start would take a long step.
    pub(super) fn extend_to(&mut self, slot: Slot) {
        while self.leaves.len() * DEGREE <= slot.index() {
            push_tight(&mut self.leaves, None);
            let mut entries = self.leaves.len();
            for level in 0.. {
                if level == self.levels.len() {
                    // Another level above the top: its first entry is the top until now.
                    let top = level.checked_sub(1).map_or(NEVER, |top| self.levels[top][0]);
                    self.levels.push(vec![top]);
                }
                if self.levels[level].len() < entries {
                    push_tight(&mut self.levels[level], NEVER);
                }
                if entries == 1 {
                    break;
                }
                entries = entries.div_ceil(DEGREE);
            }
        }
    }

    /// Adds the deadline of a page that is not offered yet. The tree must extend to its slot.
    pub(super) fn insert(&mut self, slot: Slot, deadline_ms: u64) {
        assert!(deadline_ms < DEADLINE_END, "a deadline beyond all clocks");
        self.set(slot, deadline_ms | WITHHELD);
    }

    pub(super) fn remove(&mut self, slot: Slot) {
        self.set(slot, NEVER);
        let leaf = &mut self.leaves[slot.index() / DEGREE];
        if leaf.as_ref().is_some_and(|leaf| leaf.iter().all(|value| *value == NEVER)) {
            *leaf = None;
        }
    }

    /// Returns the deadline of a page, offered or not.
    pub(super) fn get(&self, slot: Slot) -> Option<u64> {
        let leaf = self.leaves.get(slot.index() / DEGREE)?.as_ref()?;
        Some(leaf[slot.index() % DEGREE]).filter(|value| *value != NEVER).map(|value| value & !WITHHELD)
    }

    /// Records that a page with a deadline is offered, so that [`Deadlines::due`] may return it.
    pub(super) fn offer(&mut self, slot: Slot) {
        if let Some(deadline_ms) = self.get(slot) {
            self.set(slot, deadline_ms);
        }
    }

    pub(super) fn withdraw(&mut self, slot: Slot) {
        if let Some(deadline_ms) = self.get(slot) {
            self.set(slot, deadline_ms | WITHHELD);
        }
    }

    /// Returns the offered page with the earliest deadline, if that is over. Of several it returns
    /// the one with the lowest slot.
    pub(super) fn due(&self, now_ms: u64) -> Option<Slot> {
        let earliest = *self.levels.last()?.first()?;
        if earliest == NEVER || now_ms < earliest {
            return None;
        }
        let mut at = 0;
        for level in self.levels.iter().rev().skip(1) {
            at = at * DEGREE + place_of(entries_below(level, at), earliest)?;
        }
        let leaf = self.leaves[at].as_ref()?;
        Some(Slot((at * DEGREE + place_of(&leaf[..], earliest)?) as u32))
    }

    /// Sets the value of a slot, and the entries above it from the lowest level upwards.
    fn set(&mut self, slot: Slot, value: u64) {
        let mut at = slot.index() / DEGREE;
        let leaf = self.leaves[at].get_or_insert_with(|| Box::new([NEVER; DEGREE]));
        let mut before = offered(std::mem::replace(&mut leaf[slot.index() % DEGREE], value));
        let mut after = offered(value);
        for level in 0..self.levels.len() {
            let entry = self.levels[level][at];
            let least = if after <= entry {
                after
            } else if before == entry {
                match level.checked_sub(1) {
                    None => self.leaves[at].as_ref().map_or(NEVER, |leaf| least_of(&leaf[..])),
                    Some(below) => least_of(entries_below(&self.levels[below], at)),
                }
            } else {
                entry
            };
            if least == entry {
                return;
            }
            self.levels[level][at] = least;
            (before, after) = (entry, least);
            at /= DEGREE;
        }
    }
}

/// Value as the entries above a leaf count it.
fn offered(value: u64) -> u64 {
    if value < WITHHELD { value } else { NEVER }
}

fn least_of(values: &[u64]) -> u64 {
    offered(values.iter().copied().min().unwrap_or(NEVER))
}

/// Returns the entries of a level that an entry of the next level stands for.
fn entries_below(level: &[u64], at: usize) -> &[u64] {
    &level[at * DEGREE..level.len().min((at + 1) * DEGREE)]
}

fn place_of(values: &[u64], value: u64) -> Option<usize> {
    values.iter().position(|other| *other == value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// Three levels above the leaves.
    const SLOTS: u32 = 3 * (DEGREE * DEGREE) as u32;

    #[derive(Debug, Clone, Copy)]
    enum Call {
        Insert { slot: u32, deadline_ms: u64 },
        Remove { slot: u32 },
        Offer { slot: u32 },
        Withdraw { slot: u32 },
        Due { now_ms: u64 },
    }

    fn call() -> impl Strategy<Value = Call> {
        // Few slots, so that calls meet: neighbours, and slots of other parts of the tree.
        let slot = || prop_oneof![0..6u32, 60..70u32, Just(SLOTS - 1), (0..3u32).prop_map(|part| part * 4096 + 5)];
        let deadline_ms = prop_oneof![8 => 0..30u64, 1 => Just(DEADLINE_END - 1)];
        prop_oneof![
            4 => (slot(), deadline_ms).prop_map(|(slot, deadline_ms)| Call::Insert { slot, deadline_ms }),
            1 => slot().prop_map(|slot| Call::Remove { slot }),
            4 => slot().prop_map(|slot| Call::Offer { slot }),
            2 => slot().prop_map(|slot| Call::Withdraw { slot }),
            2 => (0..40u64).prop_map(|now_ms| Call::Due { now_ms }),
        ]
    }

    fn extended() -> Deadlines {
        let mut deadlines = Deadlines::default();
        (0..SLOTS).for_each(|slot| deadlines.extend_to(Slot(slot)));
        deadlines
    }

    proptest! {
        #[test]
        fn random_calls_agree_with_an_ordered_set(calls in prop::collection::vec(call(), 1..200)) {
            let mut tree = extended();
            let (mut deadline_of, mut offered) = (BTreeMap::new(), BTreeSet::new());
            for call in calls {
                match call {
                    Call::Insert { slot, deadline_ms } => {
                        tree.insert(Slot(slot), deadline_ms);
                        offered.retain(|(_, other)| *other != slot);
                        deadline_of.insert(slot, deadline_ms);
                    }
                    Call::Remove { slot } => {
                        tree.remove(Slot(slot));
                        offered.retain(|(_, other)| *other != slot);
                        deadline_of.remove(&slot);
                    }
                    Call::Offer { slot } => {
                        tree.offer(Slot(slot));
                        offered.extend(deadline_of.get(&slot).map(|deadline_ms| (*deadline_ms, slot)));
                    }
                    Call::Withdraw { slot } => {
                        tree.withdraw(Slot(slot));
                        offered.retain(|(_, other)| *other != slot);
                    }
                    Call::Due { now_ms } => {
                        let first = offered.first().filter(|(deadline_ms, _)| *deadline_ms <= now_ms);
                        prop_assert_eq!(tree.due(now_ms), first.map(|(_, slot)| Slot(*slot)));
                    }
                }
                let first = offered.first().map(|(_, slot)| Slot(*slot));
                prop_assert_eq!(tree.due(u64::MAX), first);
                for slot in (0..80).chain([4101, 8197, SLOTS - 1]) {
                    prop_assert_eq!(tree.get(Slot(slot)), deadline_of.get(&slot).copied());
                }
                let leaves: BTreeSet<_> = deadline_of.keys().map(|slot| *slot as usize / DEGREE).collect();
                let has_leaf = |at: &usize| tree.leaves[*at].is_some();
                prop_assert!((0..tree.leaves.len()).filter(has_leaf).eq(leaves), "a leaf per 64 slots with a deadline");
            }
        }
    }

    #[test]
    fn order_survives_growth_of_the_tree() {
        let mut tree = Deadlines::default();
        let deadline_ms = |slot: u32| u64::from(slot).wrapping_mul(0x9e37_79b9) % 1000;
        let mut earliest = (u64::MAX, Slot(0));
        for slot in 0..SLOTS {
            tree.extend_to(Slot(slot));
            tree.insert(Slot(slot), deadline_ms(slot));
            tree.offer(Slot(slot));
            earliest = earliest.min((deadline_ms(slot), Slot(slot)));
            assert_eq!(tree.due(u64::MAX), Some(earliest.1));
        }
        assert_eq!(tree.levels.iter().map(Vec::len).collect::<Vec<_>>(), [192, 3, 1]);
        let mut order: Vec<(u64, Slot)> = (0..SLOTS).map(|slot| (deadline_ms(slot), Slot(slot))).collect();
        order.sort_unstable();
        for (deadline_ms, slot) in order {
            assert!(deadline_ms == 0 || tree.due(deadline_ms - 1).is_none());
            assert_eq!(tree.due(deadline_ms), Some(slot));
            tree.remove(slot);
        }
        assert!(tree.due(u64::MAX).is_none() && tree.leaves.iter().all(Option::is_none));
    }
}
