//! Pages held for one client: those that it reads in place, and those that its lookups leased.

use super::open_puts::entries_of;
use super::protocol_error;
use crate::holds::Hold;
use larder_format::codec::DecodeError;
use larder_runtime::fail_point;
use larder_runtime::sync::Mutex;
use larder_wire::Entry;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// Maximum number of leases of one connection. Further lookups answer without a lease.
const LEASES_MAX: usize = 64;

pub(super) struct Holdings {
    /// `None` for a client that has not mapped the arena.
    in_place: Option<Arc<InPlaceHolds>>,
    /// By the number of the lookup request.
    leases: BTreeMap<u64, Arc<Lease>>,
}

impl Holdings {
    pub(super) fn new(in_place: Option<Arc<InPlaceHolds>>) -> Self {
        Self { in_place, leases: BTreeMap::new() }
    }

    pub(super) fn in_place(&self) -> Option<&Arc<InPlaceHolds>> {
        self.in_place.as_ref()
    }

    pub(super) fn has_request(&self, request: u64) -> bool {
        self.in_place.as_ref().is_some_and(|holds| holds.has_request(request))
    }

    /// Ends holds that the client no longer needs. Unknown entries are ignored: the page was sent.
    pub(super) fn release(&self, entries: &[Entry]) {
        if let Some(holds) = &self.in_place
            && !fail_point!("node.ignore-release")
        {
            holds.release(entries);
        }
    }

    /// Returns `true` if this lookup request may have a lease. Removes leases that have ended.
    pub(super) fn may_lease(&mut self, request: u64) -> bool {
        self.leases.retain(|_, lease| lease.is_active());
        self.leases.len() < LEASES_MAX && !self.leases.contains_key(&request)
    }

    /// Starts the lease of a lookup. Its task ends it after the lease time.
    pub(super) fn start_lease(&mut self, request: u64, holds: Vec<Hold>) -> Arc<Lease> {
        let lease = Arc::new(Lease { holds: Mutex::new(Some(holds)) });
        self.leases.insert(request, lease.clone());
        lease
    }

    pub(super) fn end_lease(&mut self, request: u64) {
        if !fail_point!("node.lease-never-ends")
            && let Some(lease) = self.leases.remove(&request)
        {
            lease.end();
        }
    }
}

/// Pages that a client reads in place. Shared with the task that waits until the client's process
/// unmaps the arena, so the holds outlive the connection.
#[derive(Default)]
pub(super) struct InPlaceHolds(Mutex<BTreeMap<Entry, Hold>>);

impl InPlaceHolds {
    pub(super) fn len(&self) -> usize {
        self.0.lock().len()
    }

    fn has_request(&self, request: u64) -> bool {
        self.0.lock().range(entries_of(request)).next().is_some()
    }

    /// Adds holds of one request, by page index: all or none.
    ///
    /// # Errors
    /// If the request number is in use. To replace its hold would free memory that the client
    /// reads.
    pub(super) fn insert_all(&self, request: u64, pages: Vec<(u32, Hold)>) -> io::Result<()> {
        let mut held = self.0.lock();
        let entry = |index| Entry { request, index };
        if pages.iter().any(|(index, _)| held.contains_key(&entry(*index))) {
            // The refused holds are dropped after the guard: freeing memory can take long.
            drop(held);
            return Err(request_number_in_use());
        }
        if !fail_point!("node.location-without-hold") {
            held.extend(pages.into_iter().map(|(index, hold)| (entry(index), hold)));
        }
        Ok(())
    }

    fn release(&self, entries: &[Entry]) {
        // Collected and dropped without the lock: the last hold of a page frees arena memory.
        let released: Vec<Option<Hold>> = {
            let mut held = self.0.lock();
            entries.iter().map(|entry| held.remove(entry)).collect()
        };
        drop(released);
    }

    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}

/// Error of a client that reuses a request number while it holds pages under it.
pub(super) fn request_number_in_use() -> io::Error {
    protocol_error(DecodeError::Invalid("a request number whose pages are still held"))
}

/// Pages leased to a lookup, until it is cancelled or the lease time ends. Shared by the connection
/// and the task that waits for that time.
pub(super) struct Lease {
    /// `None` after its end. A page that is loaded later is then not held.
    holds: Mutex<Option<Vec<Hold>>>,
}

impl Lease {
    fn is_active(&self) -> bool {
        self.holds.lock().is_some()
    }

    pub(super) fn add(&self, hold: Hold) {
        if let Some(holds) = self.holds.lock().as_mut() {
            holds.push(hold);
        }
    }

    /// Approximate memory of the lease in bytes, without the pages.
    pub(super) fn bytes(&self) -> u64 {
        let holds = self.holds.lock().as_ref().map_or(0, Vec::capacity);
        (size_of::<Self>() + holds * size_of::<Hold>()) as u64
    }

    pub(super) fn end(&self) {
        if fail_point!("node.lease-never-ends") {
            return;
        }
        // Two statements: the holds are dropped after the lock.
        let holds = self.holds.lock().take();
        drop(holds);
    }
}
