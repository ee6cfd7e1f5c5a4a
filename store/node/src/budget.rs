//! Admission control: bounds on the bytes in flight of each connection, tenant and node.
//!
//! Invariants:
//! - Every byte in flight belongs to a [`Charge`]. Dropping the charge returns it, on every path.
//! - The charges of a [`Kind`] stay within the node's bound, with two exceptions. A single page
//!   larger than the bound is admitted alone, and requests that release resources always are.
//! - Admission answers at once: granted or [`Busy`]. An admitted read then waits for memory,
//!   tenants in round-robin order, and each tenant in FIFO order.
//! - A tenant may use a whole bound while it is alone, and its equal share otherwise.
//! - A reader may request as many bytes as it can receive in a quarter of its deadline, by the
//!   measured rates. Other slow readers never lower that share.
//! - Slow readers never use up the memory for reads: each may hold a quarter of the free bytes
//!   (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
//!   1998).
//! - A reader that receives nothing for a second, while others wait for its memory, is
//!   disconnected.
//!
//! `account` has the calls of one connection, `rates` the throughput estimates.
//!
//! One lock guards all counters. It is a leaf: no other lock is taken under it, and no charge is
//! dropped under it, because that would lock it again.

mod account;
mod rates;

use crate::metrics::Metrics;
use crate::options::NodeOptions;
pub(crate) use account::{Account, Charge};
use larder_runtime::now;
use parking_lot::Mutex;
use rates::{ReadRate, ReleaseRate};
use serde_json::json;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Memory charged to an open connection in addition to its requests: buffers, queues and its task.
pub(crate) const CONNECTION_BYTES: u64 = 48 << 10;
/// Memory charged to a request in addition to its body.
const REQUEST_BYTES: u64 = 1 << 10;
/// Copies of a request's body that may exist at once: raw bytes, decoded message, answer, and slack
/// for collections that grow by doubling.
const REQUEST_BODY_COPIES: u64 = 4;
/// Connections may take three quarters of the request memory, so that requests always find some.
/// One connection's requests may take one quarter by default.
const QUARTERS: u64 = 4;
/// A reader may hold this fraction of the free read memory. With a quarter, N stuck readers leave
/// (3/4)^N of it, which is never nothing.
const FREE_READ_FRACTION: u64 = 4;
/// Bounds the loss by many idle tenants: each active tenant has at least a sixteenth.
const TENANT_SHARES_MAX: u64 = 16;
/// A refused tenant counts as active this long. It covers the longest retry delay that a refusal
/// suggests, so the tenant's share is still reserved when it returns.
const DEMAND_TIME: Duration = Duration::from_secs(3);
/// Time without progress after which a reader may be disconnected.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// Interval between two searches for a stalled reader: each search visits all connections.
const STALLED_SEARCH_INTERVAL: Duration = Duration::from_millis(20);
/// Fraction of its deadline for which a reader may request bytes. As much again waits in queues
/// that this module cannot see, and the rate drops when more readers arrive.
const DEADLINE_FRACTION: u32 = 4;
/// A reader may always request this many bytes, or a slow start could never speed up.
const OUTSTANDING_MIN: u64 = 4 << 20;
/// Pages that one reader may always have in flight: one is sent while the next one is read.
const PAGES_IN_FLIGHT_MIN: u64 = 2;
/// Cancelled entries are removed from a tenant's queue each time its length is a multiple of this,
/// which keeps the cost per entry constant.
const QUEUE_CLEANUP_STEP: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Arena memory of reserved pages that are not sealed.
    Puts,
    /// Arena memory of pages that are being read from L3 for a reader, or queued for sending.
    Reads,
    /// Pages that a reader requested and that have not left yet. They cost time, not memory, and
    /// are bounded per connection only.
    Outstanding,
    /// Memory outside the arena: connections, requests and their answers.
    Requests,
}

const KINDS: [(Kind, &str); 4] =
    [(Kind::Puts, "puts"), (Kind::Reads, "reads"), (Kind::Outstanding, "outstanding"), (Kind::Requests, "requests")];

type BytesByKind = [u64; KINDS.len()];

/// Refusal, with a delay after which a retry has a fair chance. The delay follows from the measured
/// rate at which bytes become free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy {
    pub(crate) retry_after: Duration,
}

impl Busy {
    pub(crate) fn milliseconds(self) -> u32 {
        u32::try_from(self.retry_after.as_millis()).unwrap_or(u32::MAX)
    }
}

/// Budget of a node, shared by the accounts of its connections. One lock guards all counters, so
/// that a check and the charge after it are one step.
pub(crate) struct Budget {
    node_max: BytesByKind,
    connection_max: BytesByKind,
    state: Mutex<BudgetState>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct BudgetState {
    used: BytesByKind,
    release_rates: [ReleaseRate; KINDS.len()],
    tenants: BTreeMap<Arc<str>, TenantUsage>,
    /// Tenants with queued reads. The front is served next.
    tenant_queue: VecDeque<Arc<str>>,
    connections: BTreeMap<u64, ConnectionUsage>,
    connections_opened: u64,
    /// Connections with outstanding bytes, and their combined rate.
    readers: u64,
    read_rate: ReadRate,
    last_stalled_search: Option<Instant>,
}

#[derive(Default)]
struct TenantUsage {
    connections: usize,
    used: BytesByKind,
    last_demand: [Option<Instant>; KINDS.len()],
    queue: VecDeque<QueuedRead>,
}

/// A read that waits for memory. It refers to its account weakly, so a queue entry does not keep a
/// closed connection alive.
struct QueuedRead {
    account: Weak<Account>,
    bytes: u64,
    /// Dropped without a charge when the connection itself is over its bound again.
    grant: oneshot::Sender<Charge>,
}

struct ConnectionUsage {
    tenant: Arc<str>,
    used: BytesByKind,
    read_rate: ReadRate,
    queued: u64,
    /// Last time at which the reader made progress, or had nothing to receive.
    last_progress: Instant,
    disconnect: CancellationToken,
}

/// Subtracts returned bytes from a counter.
///
/// # Panics
/// If more bytes return than were added. A clamped counter would hide the leak.
fn subtract(counter: &mut u64, bytes: u64) {
    assert!(*counter >= bytes, "budget: {bytes} bytes returned, {counter} counted");
    *counter -= bytes;
}

impl BudgetState {
    /// Returns the bytes that a tenant may use of `max`, split equally among tenants with demand. A
    /// tenant has demand while it has bytes in flight, and for [`DEMAND_TIME`] after a refusal.
    fn tenant_share(&self, tenant: &str, kind: Kind, max: u64, now: Instant) -> u64 {
        if self.tenants.len() < 2 {
            return max;
        }
        let has_demand = |tenant: &TenantUsage| {
            let last = tenant.last_demand[kind as usize];
            tenant.used[kind as usize] > 0 || last.is_some_and(|at| now.saturating_duration_since(at) < DEMAND_TIME)
        };
        let others = self.tenants.iter().filter(|(name, other)| &***name != tenant && has_demand(other)).count() as u64;
        max / (1 + others).min(TENANT_SHARES_MAX)
    }

    fn add(&mut self, connection: u64, kind: Kind, bytes: u64, now: Instant) {
        let index = kind as usize;
        self.used[index] += bytes;
        let Some(connection) = self.connections.get_mut(&connection) else { return };
        if kind == Kind::Outstanding && connection.used[index] == 0 {
            connection.read_rate.start(now);
            if self.readers == 0 {
                self.read_rate.start(now);
            }
            self.readers += 1;
        }
        connection.used[index] += bytes;
        if let Some(tenant) = self.tenants.get_mut(&connection.tenant) {
            tenant.used[index] += bytes;
        }
    }

    fn remove(&mut self, connection: u64, kind: Kind, bytes: u64) {
        let index = kind as usize;
        subtract(&mut self.used[index], bytes);
        let Some(connection) = self.connections.get_mut(&connection) else { return };
        subtract(&mut connection.used[index], bytes);
        if kind == Kind::Outstanding && connection.used[index] == 0 {
            connection.read_rate.stop();
            subtract(&mut self.readers, 1);
            if self.readers == 0 {
                self.read_rate.stop();
            }
        }
        if let Some(tenant) = self.tenants.get_mut(&connection.tenant) {
            subtract(&mut tenant.used[index], bytes);
        }
    }

    /// Records that a connection was refused or waits, so that its tenant's share is reserved.
    fn record_demand(&mut self, connection: u64, kind: Kind, now: Instant) {
        let tenant = self.connections.get(&connection).and_then(|found| self.tenants.get_mut(&found.tenant));
        if let Some(tenant) = tenant {
            tenant.last_demand[kind as usize] = Some(now);
        }
    }

    fn enqueue(&mut self, account: &Arc<Account>, bytes: u64, grant: oneshot::Sender<Charge>, now: Instant) {
        self.record_demand(account.connection(), Kind::Reads, now);
        let Some(connection) = self.connections.get(&account.connection()) else { return };
        let Some(tenant) = self.tenants.get_mut(&connection.tenant) else { return };
        if tenant.queue.is_empty() && !self.tenant_queue.contains(&connection.tenant) {
            self.tenant_queue.push_back(connection.tenant.clone());
        }
        tenant.queue.push_back(QueuedRead { account: Arc::downgrade(account), bytes, grant });
        if tenant.queue.len().is_multiple_of(QUEUE_CLEANUP_STEP) {
            tenant.queue.retain(|read| !read.grant.is_closed());
        }
    }

    /// Returns the reader that is stalled for longest, of one tenant or of all. Returns `None`
    /// while readers that are already being disconnected hold the needed `bytes`: those come back
    /// soon.
    fn stalled_reader(
        &self,
        kind: Kind,
        tenant: Option<&Arc<str>>,
        bytes: u64,
        now: Instant,
    ) -> Option<&ConnectionUsage> {
        let idle = |connection: &&ConnectionUsage| now.saturating_duration_since(connection.last_progress);
        let is_candidate = |connection: &&ConnectionUsage| tenant.is_none_or(|tenant| connection.tenant == *tenant);
        let (leaving, others): (Vec<&ConnectionUsage>, Vec<&ConnectionUsage>) =
            self.connections.values().filter(is_candidate).partition(|one| one.disconnect.is_cancelled());
        if leaving.iter().map(|one| one.used[kind as usize]).sum::<u64>() >= bytes {
            return None;
        }
        others.into_iter().filter(|one| one.queued > 0 && idle(one) >= STALLED_AFTER).max_by_key(idle)
    }

    fn leave_tenant(&mut self, tenant: &str) {
        if let Some(left) = self.tenants.get_mut(tenant) {
            left.connections -= 1;
            if left.connections == 0 {
                self.tenants.remove(tenant);
            }
        }
    }

    /// Returns the bytes in flight, without the fixed charge of each connection.
    fn in_flight(&self, kind: Kind) -> u64 {
        let connections = if kind == Kind::Requests { self.connections.len() as u64 * CONNECTION_BYTES } else { 0 };
        let used = self.used[kind as usize];
        // Both change under one lock.
        assert!(used >= connections, "budget: {used} bytes charged, connections alone take {connections}");
        used - connections
    }
}

#[derive(Default)]
struct Overrun {
    connection: u64,
    tenant: u64,
    node: u64,
}

impl Overrun {
    fn max(&self) -> u64 {
        self.connection.max(self.tenant).max(self.node)
    }
}

impl Budget {
    pub(crate) fn new(options: &NodeOptions, metrics: Arc<Metrics>) -> Arc<Budget> {
        let puts = options.dirty_bytes_max();
        let reads = options.in_flight_bytes() - puts;
        let requests = options.request_bytes;
        Arc::new(Budget {
            node_max: [puts, reads, u64::MAX, requests],
            connection_max: [
                options.connection_put_bytes(),
                reads,
                options.connection_outstanding_bytes(),
                options.connection_request_bytes.unwrap_or(requests / QUARTERS),
            ],
            state: Mutex::default(),
            metrics,
        })
    }

    /// Opens the account of a new connection, with the empty tenant until the handshake names one.
    /// Returns `None` if there is no memory for another connection.
    pub(crate) fn open(self: &Arc<Self>) -> Option<Arc<Account>> {
        let mut state = self.state.lock();
        let for_connections = self.node_max[Kind::Requests as usize] / QUARTERS * (QUARTERS - 1);
        if (state.connections.len() as u64 + 1) * CONNECTION_BYTES > for_connections {
            return None;
        }
        let number = state.connections_opened;
        state.connections_opened += 1;
        let tenant: Arc<str> = "".into();
        let disconnect = CancellationToken::new();
        let connection = ConnectionUsage {
            tenant: tenant.clone(),
            used: [0; KINDS.len()],
            read_rate: ReadRate::default(),
            queued: 0,
            last_progress: now(),
            disconnect: disconnect.clone(),
        };
        state.connections.insert(number, connection);
        state.tenants.entry(tenant).or_default().connections += 1;
        state.used[Kind::Requests as usize] += CONNECTION_BYTES;
        drop(state);
        Some(Arc::new(Account::new(self.clone(), number, disconnect)))
    }

    fn overrun(&self, state: &BudgetState, connection: u64, kind: Kind, bytes: u64, now: Instant) -> Overrun {
        let index = kind as usize;
        let node_max = self.node_max[index];
        // The first charge is always within the bound, so that a page larger than the bound moves.
        // The subtraction saturates because a total below the bound is the normal case.
        let over = |used: u64, max: u64| if used == 0 || bytes == 0 { 0 } else { (used + bytes).saturating_sub(max) };
        let node = over(state.used[index], node_max);
        let Some(connection) = state.connections.get(&connection) else {
            return Overrun { node, ..Overrun::default() };
        };
        // Saturates because a single oversized page or a mandatory request may exceed the bound.
        let free = node_max.saturating_sub(state.used[index]);
        let connection_max = match kind {
            Kind::Reads => (free / FREE_READ_FRACTION).max(PAGES_IN_FLIGHT_MIN * bytes),
            Kind::Puts | Kind::Outstanding | Kind::Requests => self.connection_max[index],
        };
        let tenant_used = state.tenants.get(&connection.tenant).map_or(0, |tenant| tenant.used[index]);
        let share = state.tenant_share(&connection.tenant, kind, node_max, now);
        Overrun { connection: over(connection.used[index], connection_max), tenant: over(tenant_used, share), node }
    }

    /// Grants queued reads while there is memory, tenants in round-robin order. Disconnects a
    /// stalled reader if there is none.
    fn serve_queue(&self) {
        // Both lists are dropped after the lock: a dropped charge or account locks the state again.
        let mut served = Vec::new();
        let mut seen = Vec::new();
        let mut state = self.state.lock();
        let now = now();
        // Tenants that were skipped since the last grant. After a full round the state cannot
        // change.
        let mut skipped = 0;
        while skipped < state.tenant_queue.len() {
            let Some(name) = state.tenant_queue.pop_front() else { break };
            let next = state.tenants.get_mut(&name).and_then(|tenant| tenant.queue.pop_front());
            let Some(next) = next else { continue };
            let account = next.account.upgrade();
            seen.extend(account.clone());
            let Some(account) = account.filter(|_| !next.grant.is_closed()) else {
                state.tenant_queue.push_front(name);
                continue;
            };
            let overrun = self.overrun(&state, account.connection(), Kind::Reads, next.bytes, now);
            if overrun.connection > 0 {
                // More was charged to this connection since the read was queued. Dropping the
                // sender makes the read wait for its own reader first.
                state.tenant_queue.push_front(name);
                served.push((next.grant, None));
            } else if overrun.tenant > 0 || overrun.node > 0 {
                // A tenant at its share waits for its own readers only.
                let node_full = overrun.node > 0 && overrun.tenant == 0;
                self.disconnect_stalled(&mut state, (!node_full).then_some(&name), overrun.max(), now);
                if let Some(tenant) = state.tenants.get_mut(&name) {
                    tenant.queue.push_front(next);
                }
                if node_full {
                    // No read overtakes this one, or small reads would starve a large page.
                    state.tenant_queue.push_front(name);
                    break;
                }
                state.tenant_queue.push_back(name);
                skipped += 1;
            } else {
                let charge = account.grant(&mut state, Kind::Reads, next.bytes, now);
                served.push((next.grant, Some(charge)));
                state.tenant_queue.push_back(name);
                skipped = 0;
            }
        }
        drop(state);
        for (grant, charge) in served {
            // If the receiver is gone, the charge comes back in the error and is dropped, which
            // returns its bytes.
            let _ = charge.map(|charge| grant.send(charge));
        }
    }

    fn disconnect_stalled(&self, state: &mut BudgetState, tenant: Option<&Arc<str>>, bytes: u64, now: Instant) {
        let searched = state.last_stalled_search;
        if searched.is_some_and(|at| now.saturating_duration_since(at) < STALLED_SEARCH_INTERVAL) {
            return;
        }
        state.last_stalled_search = Some(now);
        if let Some(stalled) = state.stalled_reader(Kind::Reads, tenant, bytes, now) {
            stalled.disconnect.cancel();
            self.metrics.slow_readers_disconnected.inc();
        }
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let state = self.state.lock();
        let mut status = json!({ "connections": state.connections.len(), "tenants": state.tenants.len() });
        for (kind, name) in KINDS {
            status[name] = json!({ "bytes": state.in_flight(kind) });
            // Outstanding pages have no bound for the node as a whole.
            if kind != Kind::Outstanding {
                status[name]["bytes_max"] = self.node_max[kind as usize].into();
            }
        }
        status
    }

    pub(crate) fn usage(&self) -> Vec<(&'static str, u64)> {
        let state = self.state.lock();
        KINDS.iter().map(|&(kind, name)| (name, state.in_flight(kind))).collect()
    }
}

#[cfg(test)]
mod tests;
