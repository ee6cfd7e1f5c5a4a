//! Memory of the host that a driver has pinned on behalf of another owner.
//!
//! A driver pins a range once, for all of its devices, and refuses a second time. So the devices of
//! a process share a registration. The last one that drops it ends it.
//!
//! Invariant: no two registered ranges overlap.

use super::DeviceError;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Call that ends a registration.
pub(super) type Undo = Box<dyn FnOnce() + Send>;

/// Registered ranges of one driver, by their first address.
pub(super) struct Registrations {
    ranges: Mutex<BTreeMap<u64, Registered>>,
}

struct Registered {
    bytes: usize,
    /// Devices that use it.
    users: usize,
    undo: Undo,
}

impl Registrations {
    pub(super) const fn new() -> Registrations {
        Registrations { ranges: Mutex::new(BTreeMap::new()) }
    }

    /// Adds a user of a range. Its first user calls `register`, which returns the call that ends
    /// the registration. Other callers wait meanwhile: a driver takes a second for gigabytes.
    ///
    /// # Errors
    /// Those of `register`, or if the range overlaps another one.
    pub(super) fn add(
        &self,
        address: u64,
        bytes: usize,
        register: impl FnOnce() -> Result<Undo, DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut ranges = self.lock();
        if let Some(known) = ranges.get_mut(&address).filter(|known| known.bytes == bytes) {
            known.users += 1;
            return Ok(());
        }
        let end = address.saturating_add(bytes as u64);
        let before = ranges.range(..end).next_back();
        if before.is_some_and(|(start, known)| start.saturating_add(known.bytes as u64) > address) {
            return Err(DeviceError::Shape("memory to pin that overlaps a pinned range of another length"));
        }
        let undo = register()?;
        ranges.insert(address, Registered { bytes, users: 1, undo });
        Ok(())
    }

    /// Removes a user of the range that begins at `address`.
    pub(super) fn remove(&self, address: u64) {
        let mut ranges = self.lock();
        let Some(known) = ranges.get_mut(&address) else { return };
        known.users -= 1;
        if known.users == 0
            && let Some(last) = ranges.remove(&address)
        {
            // Under the lock, so that no new registration of the range comes before.
            (last.undo)();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Registered>> {
        // Ignoring poison is sound: a call of the driver that panics leaves the map unchanged.
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn devices_share_a_registration_and_the_last_one_ends_it() {
        let registrations = Registrations::new();
        let (begun, ended) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let add = |address: u64, bytes: usize| {
            registrations.add(address, bytes, || {
                begun.fetch_add(1, Ordering::Relaxed);
                let ended = Arc::clone(&ended);
                let undo: Undo = Box::new(move || {
                    ended.fetch_add(1, Ordering::Relaxed);
                });
                Ok(undo)
            })
        };
        let counts = || (begun.load(Ordering::Relaxed), ended.load(Ordering::Relaxed));
        assert_eq!((add(4096, 100), add(4096, 100), counts()), (Ok(()), Ok(()), (1, 0)));
        for (address, bytes) in [(4096, 99), (4096, 101), (4000, 97), (4195, 1), (0, 10_000), (4100, 2)] {
            assert!(matches!(add(address, bytes), Err(DeviceError::Shape(_))), "{bytes} bytes at {address}");
        }
        assert_eq!((add(4196, 10), add(4000, 96), counts()), (Ok(()), Ok(()), (3, 0)));
        registrations.remove(4096);
        assert_eq!(counts(), (3, 0), "another device uses it");
        registrations.remove(4096);
        assert_eq!(counts(), (3, 1));
        assert_eq!((add(4096, 50), counts()), (Ok(()), (4, 1)));
        registrations.remove(1);
        assert_eq!(counts(), (4, 1), "no range begins there");
    }

    #[test]
    fn refused_registration_leaves_no_entry() {
        let registrations = Registrations::new();
        let refused = registrations.add(64, 64, || Err(DeviceError::Driver("refused".to_string())));
        assert!(matches!(refused, Err(DeviceError::Driver(_))));
        assert_eq!(registrations.add(64, 64, || Ok(Box::new(|| ()))), Ok(()));
    }
}
