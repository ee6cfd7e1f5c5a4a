//! Locks of the standard library that ignore poison: a poisoned lock would hide the first panic.
//!
//! These locks have no state outside of themselves. Those of `parking_lot` share a table of all
//! threads that wait. A fork may copy that table while another thread has locked a part of it. The
//! child then hangs at its first wait, so the client libraries contain no such lock.

use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

fn ignore_poison<G>(result: LockResult<G>) -> G {
    result.unwrap_or_else(PoisonError::into_inner)
}

fn ignore_poison_if_free<G>(result: TryLockResult<G>) -> Option<G> {
    match result {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        ignore_poison(self.0.lock())
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        ignore_poison_if_free(self.0.try_lock())
    }

    pub fn into_inner(self) -> T {
        ignore_poison(self.0.into_inner())
    }
}

#[derive(Debug, Default)]
pub struct RwLock<T>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(std::sync::RwLock::new(value))
    }

    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        ignore_poison(self.0.read())
    }

    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        ignore_poison_if_free(self.0.try_read())
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        ignore_poison(self.0.write())
    }

    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        ignore_poison_if_free(self.0.try_write())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_usable_after_a_panic() {
        let (mutex, shared) = (Mutex::new(1), RwLock::new(2));
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _guards = (mutex.lock(), shared.write());
                panic!("poisons both locks");
            });
            assert!(panics.join().is_err());
        });
        assert_eq!((mutex.try_lock().as_deref(), shared.try_read().as_deref()), (Some(&1), Some(&2)));
        assert_eq!((*mutex.lock(), *shared.read()), (1, 2));
        assert_eq!(*shared.write(), 2);
        assert_eq!(mutex.into_inner(), 1);
    }

    #[test]
    fn taken_locks_are_refused() {
        let (mutex, shared) = (Mutex::new(()), RwLock::new(()));
        let _guards = (mutex.lock(), shared.write());
        assert!(mutex.try_lock().is_none() && shared.try_read().is_none() && shared.try_write().is_none());
    }
}
