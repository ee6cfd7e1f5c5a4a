//! Keys in the order of their ages.
//!
//! Invariant: both indices have the same keys and times.

use std::collections::{BTreeMap, BTreeSet};

/// Keys with a time each, the oldest first, and among those of one time the smallest first.
///
/// A time is an `Instant`, or a number that grows. Each call costs O(log n) for n keys.
#[derive(Debug)]
pub struct AgeOrder<K, T> {
    times: BTreeMap<K, T>,
    by_age: BTreeSet<(T, K)>,
}

impl<K, T> Default for AgeOrder<K, T> {
    fn default() -> Self {
        AgeOrder { times: BTreeMap::new(), by_age: BTreeSet::new() }
    }
}

impl<K: Ord + Copy, T: Ord + Copy> AgeOrder<K, T> {
    /// Gives a key this time. Returns its time until now.
    pub fn set(&mut self, key: K, time: T) -> Option<T> {
        let before = self.times.insert(key, time);
        if let Some(before) = before {
            self.by_age.remove(&(before, key));
        }
        self.by_age.insert((time, key));
        before
    }

    /// Like [`AgeOrder::set`], but then removes the oldest key if there are more than `keys_max`.
    pub fn set_within(&mut self, keys_max: usize, key: K, time: T) {
        self.set(key, time);
        if self.len() > keys_max {
            self.pop_oldest();
        }
    }

    /// Removes a key. Returns its time.
    pub fn remove(&mut self, key: &K) -> Option<T> {
        let time = self.times.remove(key)?;
        self.by_age.remove(&(time, *key));
        Some(time)
    }

    pub fn oldest(&self) -> Option<(T, K)> {
        self.by_age.first().copied()
    }

    pub fn pop_oldest(&mut self) -> Option<(T, K)> {
        let oldest = self.by_age.pop_first()?;
        self.times.remove(&oldest.1);
        Some(oldest)
    }

    pub fn time_of(&self, key: &K) -> Option<T> {
        self.times.get(key).copied()
    }

    pub fn len(&self) -> usize {
        self.times.len()
    }

    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEYS_MAX: usize = 12;

    #[derive(Debug, Clone, Copy)]
    enum Call {
        Set { key: u8, time: u8 },
        SetWithin { key: u8, time: u8 },
        Remove { key: u8 },
        PopOldest,
    }

    fn call() -> impl Strategy<Value = Call> {
        prop_oneof![
            2 => (0..30u8, 0..10u8).prop_map(|(key, time)| Call::Set { key, time }),
            4 => (0..30u8, 0..10u8).prop_map(|(key, time)| Call::SetWithin { key, time }),
            2 => (0..30u8).prop_map(|key| Call::Remove { key }),
            1 => Just(Call::PopOldest),
        ]
    }

    /// Searches all keys for the oldest one.
    fn oldest(model: &BTreeMap<u8, u8>) -> Option<(u8, u8)> {
        model.iter().map(|(&key, &time)| (time, key)).min()
    }

    proptest! {
        #[test]
        fn random_calls_agree_with_a_search_of_all_keys(calls in prop::collection::vec(call(), 1..300)) {
            let (mut order, mut model) = (AgeOrder::default(), BTreeMap::new());
            for call in calls {
                match call {
                    Call::Set { key, time } => prop_assert_eq!(order.set(key, time), model.insert(key, time)),
                    Call::SetWithin { key, time } => {
                        order.set_within(KEYS_MAX, key, time);
                        model.insert(key, time);
                        if model.len() > KEYS_MAX
                            && let Some((_, key)) = oldest(&model)
                        {
                            model.remove(&key);
                        }
                    }
                    Call::Remove { key } => prop_assert_eq!(order.remove(&key), model.remove(&key)),
                    Call::PopOldest => {
                        let expected = oldest(&model);
                        expected.into_iter().for_each(|(_, key)| _ = model.remove(&key));
                        prop_assert_eq!(order.pop_oldest(), expected);
                    }
                }
                prop_assert_eq!(order.oldest(), oldest(&model));
                prop_assert_eq!(order.by_age.len(), model.len());
                prop_assert_eq!((order.len(), order.is_empty()), (model.len(), model.is_empty()));
                prop_assert!((0..30).all(|key| order.time_of(&key) == model.get(&key).copied()));
            }
        }
    }
}
