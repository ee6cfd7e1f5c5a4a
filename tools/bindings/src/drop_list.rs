//! Values that a thread gives up, and another thread drops.
//!
//! Invariant: the list has no lock. A fork may copy it at any time, and the child finds it usable:
//! complete, except for a value that was about to enter it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

struct Entry<T> {
    value: T,
    next: *mut Entry<T>,
}

/// A list that any thread pushes to, and that is taken as a whole. Values that are still in the
/// list when it is dropped leak.
pub struct DropList<T>(AtomicPtr<Entry<T>>);

impl<T: Send> Default for DropList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Send> DropList<T> {
    pub const fn new() -> Self {
        DropList(AtomicPtr::new(ptr::null_mut()))
    }

    /// Adds a value. Never waits.
    pub fn push(&self, value: T) {
        let entry = Box::into_raw(Box::new(Entry { value, next: ptr::null_mut() }));
        let mut first = self.0.load(Ordering::Relaxed);
        loop {
            // SAFETY: the entry is not in the list yet, so only this thread has it.
            unsafe { (*entry).next = first };
            match self.0.compare_exchange_weak(first, entry, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }

    /// Takes all values, the latest first.
    pub fn take(&self) -> Vec<T> {
        let mut values = Vec::new();
        if self.0.load(Ordering::Relaxed).is_null() {
            return values;
        }
        let mut next = self.0.swap(ptr::null_mut(), Ordering::Acquire);
        while !next.is_null() {
            // SAFETY: `push` made the entry from a box. The swap has taken it out of the list, so
            // no other thread has it.
            let entry = unsafe { Box::from_raw(next) };
            next = entry.next;
            values.push(entry.value);
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const THREADS: usize = 3;
    const VALUES: usize = if cfg!(miri) { 20 } else { 20_000 };

    #[test]
    fn values_are_taken_once_while_threads_push() {
        let (list, value) = (DropList::new(), Arc::new(()));
        let mut taken = 0;
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| (0..VALUES).for_each(|_| list.push(value.clone())));
            }
            while taken < THREADS * VALUES {
                taken += list.take().len();
                std::thread::yield_now();
            }
        });
        assert!(list.take().is_empty());
        assert_eq!(Arc::strong_count(&value), 1, "no value leaks");
    }

    #[test]
    fn latest_value_comes_first() {
        let list = DropList::default();
        (1..=3).for_each(|value| list.push(value));
        assert_eq!(list.take(), [3, 2, 1]);
    }
}
