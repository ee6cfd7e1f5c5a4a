//! Floors of namespaces: the part of a tier that other namespaces cannot take from one.
//!
//! Each namespace with a floor has a *weight*. Its part of all floors is the weight divided by the
//! total weight. So a change of the total changes each floor, and no entry of the table.
//!
//! One table serves all logs of a node. Its lock is a leaf: no other lock is taken under it.

use larder_format::NamespaceId;
use larder_runtime::sync::RwLock;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Part of the floors of a tier, in units of 2^-32. All parts together are at most 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FloorPart(u64);

/// All floors of a tier: they take half of it.
const ALL: u128 = 1 << 32;

impl FloorPart {
    fn new(weight: u64, total: u64) -> FloorPart {
        // At most `ALL`, because no weight exceeds the total.
        FloorPart((ALL * u128::from(weight) / u128::from(total.max(1))) as u64)
    }

    /// Floor in a tier of `capacity_bytes`.
    pub fn of(self, capacity_bytes: u64) -> u64 {
        let bytes = u128::from(capacity_bytes / 2) * u128::from(self.0) / ALL;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

#[derive(Debug, Default)]
struct FloorTable {
    /// Weights of the namespaces that have a floor, without zeros.
    weights: BTreeMap<NamespaceId, u64>,
    total: u64,
}

impl FloorTable {
    fn part(&self, weight: u64) -> FloorPart {
        FloorPart::new(weight, self.total)
    }
}

/// Floors of the namespaces that have one, for all tiers that keep them.
#[derive(Debug, Default)]
pub struct SharedFloors {
    table: RwLock<FloorTable>,
}

impl SharedFloors {
    /// Takes the weights of `before` from namespaces, gives them those of `after`, and sets the
    /// total. Costs O(log n) per weight, for n namespaces with a floor.
    ///
    /// # Panics
    /// If a namespace has less weight than it loses.
    pub fn change(&self, before: &[(NamespaceId, u64)], after: &[(NamespaceId, u64)], total: u64) {
        let mut table = self.table.write();
        for (namespace, weight) in after {
            *table.weights.entry(*namespace).or_default() += *weight;
        }
        for (namespace, weight) in before {
            let had = table.weights.get(namespace).copied().unwrap_or(0);
            assert!(had >= *weight, "a floor loses more weight than it has");
            match had - *weight {
                0 => table.weights.remove(namespace),
                left => table.weights.insert(*namespace, left),
            };
        }
        table.total = total;
    }

    /// Weight of all floors together.
    pub fn total(&self) -> u64 {
        self.table.read().total
    }

    /// Part of a namespace, 0 if it has no floor.
    pub fn part_of(&self, namespace: &NamespaceId) -> FloorPart {
        let table = self.table.read();
        table.weights.get(namespace).map_or(FloorPart::default(), |weight| table.part(*weight))
    }

    /// First namespace with a floor behind `after`, in the order of their names.
    pub fn next_after(&self, after: Bound<NamespaceId>) -> Option<NamespaceId> {
        let table = self.table.read();
        let next = table.weights.range((after, Bound::Unbounded)).next();
        next.map(|(namespace, _)| *namespace)
    }

    /// Number of namespaces with a floor.
    pub fn count(&self) -> usize {
        self.table.read().weights.len()
    }

    /// Returns `true` if `is_wanted` holds for any namespace with a floor. It must take no lock.
    pub(super) fn any(&self, is_wanted: impl Fn(&NamespaceId, FloorPart) -> bool) -> bool {
        let table = self.table.read();
        table.weights.iter().any(|(namespace, weight)| is_wanted(namespace, table.part(*weight)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(number: u8) -> NamespaceId {
        NamespaceId([number; 32])
    }

    #[test]
    fn parts_follow_the_weights_and_their_total() {
        let floors = SharedFloors::default();
        floors.change(&[], &[(id(1), 3), (id(2), 1)], 4);
        let bytes = |floors: &SharedFloors| [1, 2, 3].map(|number| floors.part_of(&id(number)).of(8000));
        assert_eq!(bytes(&floors), [3000, 1000, 0]);
        // A further weight changes all floors, and only its own entry.
        floors.change(&[], &[(id(3), 4)], 8);
        assert_eq!(bytes(&floors), [1500, 500, 2000]);
        floors.change(&[(id(1), 3), (id(3), 2)], &[(id(2), 5)], 8);
        assert_eq!(bytes(&floors), [0, 3000, 1000]);
        assert_eq!((floors.count(), floors.next_after(Bound::Excluded(id(2)))), (2, Some(id(3))));
    }

    proptest! {
        #[test]
        fn floors_take_at_most_half_of_a_tier(
            weights in prop::collection::vec(1..1_000_000u64, 1..20),
            capacity in any::<u64>(),
        ) {
            let floors = SharedFloors::default();
            let total: u64 = weights.iter().sum();
            let weights: Vec<_> = (0..).map(id).zip(weights).collect();
            floors.change(&[], &weights, total);
            let sum: u128 = weights.iter().map(|(id, _)| u128::from(floors.part_of(id).of(capacity))).sum();
            prop_assert!(sum <= u128::from(capacity / 2), "{sum}");
        }
    }
}
