//! Tenants with open connections: their bytes in flight, and the share of each.
//!
//! Invariants:
//! - `active` counts the tenants with demand exactly. So a share costs O(1), and a charge
//!   O(log n) for n tenants, however many of them are idle.
//! - A tenant has demand while it has bytes in flight, and until the end of its recorded demand.

use super::{BytesByKind, KINDS, Kind, QueuedRead, TENANT_SHARES_MAX, subtract};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Number of a tenant in the table. A tenant that leaves and returns gets another one.
pub(super) type TenantNumber = u64;

pub(super) struct Tenant {
    name: Arc<str>,
    connections: usize,
    used: BytesByKind,
    puts: u64,
    /// End of the demand that was recorded, until [`TenantTable::expire`] removes it.
    demand_until: [Option<Instant>; KINDS.len()],
    pub(super) queue: VecDeque<QueuedRead>,
}

impl Tenant {
    pub(super) fn used(&self, kind: Kind) -> u64 {
        self.used[kind as usize]
    }

    fn is_active(&self, kind: usize) -> bool {
        self.used[kind] > 0 || self.demand_until[kind].is_some()
    }
}

#[derive(Default)]
pub(super) struct TenantTable {
    numbers: BTreeMap<Arc<str>, TenantNumber>,
    tenants: BTreeMap<TenantNumber, Tenant>,
    joined: u64,
    /// Number of tenants with demand, by kind.
    active: [u64; KINDS.len()],
    /// End, kind and tenant of all recorded demand, the earliest end first.
    demand_ends: BTreeSet<(Instant, usize, TenantNumber)>,
}

impl TenantTable {
    pub(super) fn len(&self) -> usize {
        self.tenants.len()
    }

    /// Counts one more connection of a tenant. The caller pairs it with [`TenantTable::leave`].
    pub(super) fn join(&mut self, name: &str) -> TenantNumber {
        if let Some(&number) = self.numbers.get(name) {
            if let Some(tenant) = self.tenants.get_mut(&number) {
                tenant.connections += 1;
            }
            return number;
        }
        let number = self.joined;
        self.joined += 1;
        let name: Arc<str> = name.into();
        let tenant = Tenant {
            name: name.clone(),
            connections: 1,
            used: [0; KINDS.len()],
            puts: 0,
            demand_until: [None; KINDS.len()],
            queue: VecDeque::new(),
        };
        self.numbers.insert(name, number);
        self.tenants.insert(number, tenant);
        number
    }

    /// Removes a connection of a tenant, and the tenant with its last connection.
    pub(super) fn leave(&mut self, number: TenantNumber) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        tenant.connections -= 1;
        if tenant.connections > 0 {
            return;
        }
        let Some(tenant) = self.tenants.remove(&number) else { return };
        self.numbers.remove(&tenant.name);
        for (kind, until) in tenant.demand_until.into_iter().enumerate() {
            subtract(&mut self.active[kind], u64::from(tenant.is_active(kind)));
            if let Some(until) = until {
                self.demand_ends.remove(&(until, kind, number));
            }
        }
    }

    pub(super) fn queue(&mut self, number: TenantNumber) -> Option<&mut VecDeque<QueuedRead>> {
        self.tenants.get_mut(&number).map(|tenant| &mut tenant.queue)
    }

    pub(super) fn used(&self, number: TenantNumber, kind: Kind) -> u64 {
        self.tenants.get(&number).map_or(0, |tenant| tenant.used(kind))
    }

    /// Adds a charge of `bytes`.
    pub(super) fn add(&mut self, number: TenantNumber, kind: Kind, bytes: u64) {
        self.update(number, kind as usize, |tenant| {
            tenant.used[kind as usize] += bytes;
            tenant.puts += u64::from(kind == Kind::Puts);
        });
    }

    /// Removes `bytes` of a charge. A charge of [`Kind::Puts`] is removed as a whole.
    pub(super) fn remove(&mut self, number: TenantNumber, kind: Kind, bytes: u64) {
        self.update(number, kind as usize, |tenant| {
            subtract(&mut tenant.used[kind as usize], bytes);
            subtract(&mut tenant.puts, u64::from(kind == Kind::Puts));
        });
    }

    /// Bytes of a tenant's puts above its share of `max`. A single page is never too much: a page
    /// larger than a share could not move otherwise.
    pub(super) fn excess(&self, number: TenantNumber, max: u64) -> u64 {
        let Some(tenant) = self.tenants.get(&number).filter(|tenant| tenant.puts > 1) else { return 0 };
        let used = tenant.used(Kind::Puts);
        let fair = self.share(number, Kind::Puts, max).max(used / tenant.puts);
        // Saturates because a tenant below its share is the normal case.
        used.saturating_sub(fair)
    }

    /// Records that a tenant wants bytes, which reserves its share until `until` or longer.
    pub(super) fn record_demand(&mut self, number: TenantNumber, kind: Kind, until: Instant) {
        let kind = kind as usize;
        let Some(tenant) = self.tenants.get(&number) else { return };
        let before = tenant.demand_until[kind];
        if before.is_some_and(|before| before >= until) {
            return;
        }
        if let Some(before) = before {
            self.demand_ends.remove(&(before, kind, number));
        }
        self.demand_ends.insert((until, kind, number));
        self.update(number, kind, |tenant| tenant.demand_until[kind] = Some(until));
    }

    /// Ends recorded demand that is over. Each record ends once, so a charge costs O(log n) on
    /// average.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(&(until, kind, number)) = self.demand_ends.first()
            && until <= now
        {
            self.demand_ends.pop_first();
            self.update(number, kind, |tenant| tenant.demand_until[kind] = None);
        }
    }

    /// Returns the bytes that a tenant may use of `max`: equal shares of all tenants with demand.
    /// The caller has called [`TenantTable::expire`].
    pub(super) fn share(&self, number: TenantNumber, kind: Kind, max: u64) -> u64 {
        let index = kind as usize;
        let is_active = self.tenants.get(&number).is_some_and(|tenant| tenant.is_active(index));
        let others = self.active[index] - u64::from(is_active);
        max / (1 + others).min(TENANT_SHARES_MAX)
    }

    fn update(&mut self, number: TenantNumber, kind: usize, change: impl FnOnce(&mut Tenant)) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        let was_active = tenant.is_active(kind);
        change(tenant);
        match (was_active, tenant.is_active(kind)) {
            (false, true) => self.active[kind] += 1,
            (true, false) => subtract(&mut self.active[kind], 1),
            (false, false) | (true, true) => {}
        }
    }
}
