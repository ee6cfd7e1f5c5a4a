//! Readers in the order of their progress: the search for the one that is stalled for longest.
//!
//! Each piece of a page is progress. Recording it must not take the budget's lock, so the order
//! lags behind: it has for each reader a time that is not later than its last progress. A search
//! looks at the first reader only. If that reader made progress since, it moves back, and the next
//! one is first. On a busy machine its connection may not have looked for progress long enough. The
//! reader then moves back for a short time.
//!
//! Invariants:
//! - Every reader with read memory is in the order, unless it is being disconnected. A reader may
//!   stay in it without memory until a search meets it.
//! - A search moves a reader behind the limit of [`STALLED_AFTER`], so that it meets each at most
//!   once per that time. One search looks at [`VISITS_MAX`] readers, whatever the connections.

use super::tenants::TenantNumber;
use super::{BudgetState, Kind, LOOK_INTERVAL, STALLED_AFTER, subtract};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Readers that one search looks at, at most. The next search continues.
const VISITS_MAX: usize = 64;

#[derive(Default)]
pub(super) struct ReaderOrder {
    all: BTreeSet<(Instant, u64)>,
    by_tenant: BTreeMap<TenantNumber, BTreeSet<(Instant, u64)>>,
    entries: BTreeMap<u64, (TenantNumber, Instant)>,
    leaving: Leaving,
    #[cfg(test)]
    pub(super) visits: usize,
}

/// Read memory of readers that are being disconnected. It comes back soon.
#[derive(Default)]
struct Leaving {
    readers: BTreeSet<u64>,
    bytes: u64,
    by_tenant: BTreeMap<TenantNumber, u64>,
}

impl Leaving {
    fn remove(&mut self, connection: u64, tenant: TenantNumber, bytes: u64) {
        if !self.readers.contains(&connection) {
            return;
        }
        subtract(&mut self.bytes, bytes);
        if let Some(of_tenant) = self.by_tenant.get_mut(&tenant) {
            subtract(of_tenant, bytes);
            if *of_tenant == 0 {
                self.by_tenant.remove(&tenant);
            }
        }
    }

    fn add(&mut self, connection: u64, tenant: TenantNumber, bytes: u64) {
        if self.readers.contains(&connection) && bytes > 0 {
            self.bytes += bytes;
            *self.by_tenant.entry(tenant).or_default() += bytes;
        }
    }
}

impl ReaderOrder {
    /// Records a charge of read memory.
    pub(super) fn add(&mut self, connection: u64, tenant: TenantNumber, bytes: u64, now: Instant) {
        if self.leaving.readers.contains(&connection) {
            self.leaving.add(connection, tenant, bytes);
        } else if !self.entries.contains_key(&connection) {
            self.place(connection, tenant, now);
        }
    }

    /// Records the return of read memory.
    pub(super) fn remove(&mut self, connection: u64, tenant: TenantNumber, bytes: u64) {
        self.leaving.remove(connection, tenant, bytes);
    }

    /// Removes a connection that has ended. It has no charge any more.
    pub(super) fn end(&mut self, connection: u64) {
        self.take(connection);
        self.leaving.readers.remove(&connection);
    }

    fn place(&mut self, connection: u64, tenant: TenantNumber, progress: Instant) {
        self.all.insert((progress, connection));
        self.by_tenant.entry(tenant).or_default().insert((progress, connection));
        self.entries.insert(connection, (tenant, progress));
    }

    fn take(&mut self, connection: u64) {
        let Some((tenant, progress)) = self.entries.remove(&connection) else { return };
        self.all.remove(&(progress, connection));
        if let Some(of_tenant) = self.by_tenant.get_mut(&tenant) {
            of_tenant.remove(&(progress, connection));
            if of_tenant.is_empty() {
                self.by_tenant.remove(&tenant);
            }
        }
    }

    fn first(&self, tenant: Option<TenantNumber>) -> Option<(Instant, u64)> {
        let readers = match tenant {
            Some(tenant) => self.by_tenant.get(&tenant)?,
            None => &self.all,
        };
        readers.first().copied()
    }

    fn leaving_bytes(&self, tenant: Option<TenantNumber>) -> u64 {
        match tenant {
            Some(tenant) => self.leaving.by_tenant.get(&tenant).copied().unwrap_or_default(),
            None => self.leaving.bytes,
        }
    }

    /// Moves a reader from the order to those that are being disconnected.
    fn disconnect(&mut self, connection: u64, tenant: TenantNumber, bytes: u64) {
        self.take(connection);
        self.leaving.readers.insert(connection);
        self.leaving.add(connection, tenant, bytes);
    }
}

impl BudgetState {
    /// Disconnects the reader that is stalled for longest, of one tenant or of all. Returns `false`
    /// if none is stalled. Does nothing while readers that are already being disconnected hold the
    /// needed `bytes`: those come back soon.
    pub(super) fn disconnect_stalled(&mut self, tenant: Option<TenantNumber>, bytes: u64, now: Instant) -> bool {
        if self.readers_order.leaving_bytes(tenant) >= bytes {
            return false;
        }
        for _ in 0..VISITS_MAX {
            let Some((since, number)) = self.readers_order.first(tenant) else { return false };
            // All others made progress later.
            if now.saturating_duration_since(since) < STALLED_AFTER {
                return false;
            }
            #[cfg(test)]
            {
                self.readers_order.visits += 1;
            }
            self.readers_order.take(number);
            let Some(connection) = self.connections.get(&number) else { continue };
            let used = connection.used[Kind::Reads as usize];
            if used == 0 {
                continue;
            }
            let reader = connection.progress.reader.lock();
            // A reader without queued bytes has nothing to receive.
            let progress = if reader.queued == 0 { now } else { reader.last_progress };
            let is_stalled = reader.stalled_for() >= STALLED_AFTER;
            drop(reader);
            if progress > since {
                self.readers_order.place(number, connection.tenant, progress);
                continue;
            }
            if !is_stalled {
                // Due again after the next look. The order holds times of STALLED_AFTER ago.
                let again = now.checked_sub(STALLED_AFTER).map_or(now, |due| due + LOOK_INTERVAL);
                self.readers_order.place(number, connection.tenant, again);
                continue;
            }
            connection.disconnect.cancel();
            self.readers_order.disconnect(number, connection.tenant, used);
            return true;
        }
        false
    }
}
