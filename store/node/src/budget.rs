//! Admission control: bounds on the bytes in flight of each connection, tenant and node.
//!
//! Invariants:
//! - Every byte in flight belongs to a [`Charge`]. Dropping the charge returns it, on every path.
//! - The charges of a [`Kind`] stay within the node's bound, with two exceptions. A single page
//!   larger than the bound is admitted alone, and requests that release resources always are.
//! - Each connection has [`OWN_REQUEST_BYTES`] of request memory that no other client can take. So
//!   the bodies of others never delay its small requests.
//! - Admission answers at once: granted or [`Busy`]. An admitted read then waits for memory,
//!   tenants in round-robin order, and each tenant in FIFO order.
//! - A tenant may use a whole bound while it is alone, and its share otherwise: peers share
//!   equally, and so do the tenants of a peer.
//! - A reader may request as many bytes as it can receive in a quarter of its deadline, by the
//!   measured rates. Other slow readers never lower that share.
//! - Slow readers never use up the memory for reads: each may hold a quarter of the free bytes
//!   (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
//!   1998).
//! - A reader that receives nothing for a second, while others wait for its memory, is
//!   disconnected. Others wait if a read is queued, or if little memory bounds a connection.
//! - A writer that sends less than 8 KiB in a second, while others wait for its room, loses its
//!   puts. A tenant above its share loses the excess.
//! - A writer that was refused has a place in a bounded line, or queues for one. Free room goes to
//!   the line in order, and free places to the queue.
//!
//! `account` has the calls of one connection, `tenants` the shares, `line`, `place_queue` and
//! `writers` the room for puts, `readers` the order of readers by progress, `rates` the throughput
//! estimates.
//!
//! One lock guards all counters, and under it only the locks of [`Progress`] are taken, which are
//! leaves. No charge is dropped under it, because that would lock it again.

mod account;
mod line;
mod place_queue;
mod rates;
mod readers;
mod tenants;
mod writers;

use crate::metrics::Metrics;
use crate::options::NodeOptions;
use crate::places::Peer;
use crate::tiers::WriteLoad;
pub(crate) use account::{Account, Charge};
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use line::{Ahead, Line, Served};
use rates::{ReadRate, RefusedReads, ReleaseRate};
use readers::ReaderOrder;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
pub(crate) use tenants::TenantNumber;
use tenants::TenantTable;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
pub(crate) use writers::{EXPOSED_MAX, LosingWriter};
use writers::{Forecast, MeanTime, Scope, WriterOrder, WriterProgress, WrittenPuts};

/// Memory charged to an open connection in addition to its requests: buffers, queues and its task.
pub(crate) const CONNECTION_BYTES: u64 = 48 << 10;
/// Request memory that each connection always finds, however much the others hold. Enough for six
/// gets of one page, or for one request with a body of 1.75 KiB: a lookup of 50 pages, or a
/// reservation of 15.
///
/// Connections take three quarters of the request memory at most. So this part takes an eighth at
/// most, and the last eighth is left to larger requests.
pub(crate) const OWN_REQUEST_BYTES: u64 = 8 << 10;
const _: () = assert!(2 * (QUARTERS - 1) * OWN_REQUEST_BYTES <= CONNECTION_BYTES);
/// Memory charged to a request in addition to its body.
const REQUEST_BYTES: u64 = 1 << 10;
/// Copies of a request's body that may exist at once: raw bytes, decoded message, answer, and slack
/// for collections that grow by doubling.
const REQUEST_BODY_COPIES: u64 = 4;
/// Connections may take three quarters of the request memory, so that requests always find some.
/// One connection's requests may take one quarter by default.
const QUARTERS: u64 = 4;
/// Requests leave this fraction of the request memory to new connections, as long as more may open.
const FRACTION_FOR_CONNECTIONS: u64 = 8;
/// A reader may hold this fraction of the free read memory. With a quarter, N stuck readers leave
/// (3/4)^N of it, which is never nothing.
const FREE_READ_FRACTION: u64 = 4;
/// A refused tenant counts as active this long, or until its place in the line ends. It covers the
/// retry delays of all other refusals, so the tenant's share is still reserved when it returns.
const DEMAND_TIME: Duration = Duration::from_secs(3);
/// Time without progress after which a reader may be disconnected.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// Interval in which a connection asks its full socket for progress, and in which a search comes
/// back to a reader that nothing is known of.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between two searches for a stalled reader. One search disconnects at most one reader,
/// so that its memory returns before the next one is chosen.
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
    pub(crate) bound: BusyBound,
}

/// Bound that was in the way of a refused charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BusyBound {
    /// The bound of the caller's own connection, possibly among others.
    Connection,
    /// The share of the caller's tenant.
    Tenant(TenantNumber),
    Node,
}

impl Busy {
    pub(crate) fn after(retry_after: Duration) -> Busy {
        Busy { retry_after, bound: BusyBound::Connection }
    }

    pub(crate) fn milliseconds(self) -> u32 {
        // Rounded up: 0 means that the node gives no delay.
        u32::try_from(self.retry_after.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
    }
}

/// Budget of a node, shared by the accounts of its connections. One lock guards all counters, so
/// that a check and the charge after it are one step.
pub(crate) struct Budget {
    node_max: BytesByKind,
    connection_max: BytesByKind,
    state: Mutex<BudgetState>,
    /// Writes to L3 in flight. They take the room of puts.
    writes: Arc<WriteLoad>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct BudgetState {
    used: BytesByKind,
    /// Unused part of all connections' [`OWN_REQUEST_BYTES`].
    own_requests_left: u64,
    request_release_rate: ReleaseRate,
    tenants: TenantTable,
    /// Tenants with queued reads. The front is served next.
    tenant_queue: VecDeque<TenantNumber>,
    connections: BTreeMap<u64, ConnectionUsage>,
    connections_opened: u64,
    /// Connections with outstanding bytes, and their combined rate.
    readers: u64,
    read_rate: ReadRate,
    last_stalled_search: Option<Instant>,
    readers_order: ReaderOrder,
    /// Connections with reserved pages: tenant, reserved bytes, and number of the connection.
    writers: BTreeSet<(TenantNumber, u64, u64)>,
    writers_order: WriterOrder,
    line: Line,
    /// Mean time from a reservation to the end of its put.
    put_time: MeanTime,
    written_puts: WrittenPuts,
    forecasts: BTreeMap<Scope, Forecast>,
    /// Writers that all forecasts so far visited.
    #[cfg(test)]
    forecast_visits: usize,
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
    tenant: TenantNumber,
    used: BytesByKind,
    puts: u64,
    /// True if the budget refused the latest charge for a put, until the client is told. If it did
    /// not, and the put was refused, the tiers had no room.
    put_refused: bool,
    /// Position of the place in the line, if the latest charge for a put took its first bytes.
    served: Option<Served>,
    read_rate: ReadRate,
    refused_reads: RefusedReads,
    progress: Arc<Progress>,
    disconnect: CancellationToken,
}

impl ConnectionUsage {
    /// Unused part of [`OWN_REQUEST_BYTES`].
    fn own_requests_left(&self) -> u64 {
        // Saturates because larger requests exceed it.
        OWN_REQUEST_BYTES.saturating_sub(self.used[Kind::Requests as usize])
    }
}

/// Progress of a connection's transfers. It has its own locks: each piece of a page updates it, and
/// the node's lock would make all connections wait for that.
struct Progress {
    reader: Mutex<ReaderProgress>,
    writer: Mutex<WriterProgress>,
}

struct ReaderProgress {
    queued: u64,
    /// Last time at which the reader made progress, or had nothing to receive.
    last_progress: Instant,
    /// Last time at which the node asked for progress, or saw it.
    last_look: Instant,
}

impl ReaderProgress {
    fn record(&mut self, now: Instant) {
        self.last_progress = now;
        self.last_look = now;
    }

    /// Time for which the reader had bytes to receive and is known to have received none. A node
    /// that has had no processor to look is no reason to disconnect the reader.
    fn stalled_for(&self) -> Duration {
        if self.queued == 0 {
            return Duration::ZERO;
        }
        self.last_look.saturating_duration_since(self.last_progress)
    }
}

impl Progress {
    fn new(now: Instant) -> Arc<Progress> {
        Arc::new(Progress {
            reader: Mutex::new(ReaderProgress { queued: 0, last_progress: now, last_look: now }),
            writer: Mutex::new(WriterProgress::new(now)),
        })
    }
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
    fn add(&mut self, number: u64, kind: Kind, bytes: u64, now: Instant) {
        let index = kind as usize;
        self.used[index] += bytes;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if kind == Kind::Outstanding && connection.used[index] == 0 {
            connection.read_rate.start(now);
            if self.readers == 0 {
                self.read_rate.start(now);
            }
            self.readers += 1;
        }
        if kind == Kind::Puts {
            let is_first = connection.used[index] == 0;
            connection.progress.writer.lock().begin(is_first, now);
            connection.puts += 1;
            connection.put_refused = false;
            let used = connection.used[index];
            self.writers.remove(&(connection.tenant, used, number));
            self.writers.insert((connection.tenant, used + bytes, number));
            self.writers_order.add(number, connection.tenant, now);
            connection.served = self.line.record_grant(number, bytes);
        }
        if kind == Kind::Reads {
            self.readers_order.add(number, connection.tenant, bytes, now);
        }
        let own_left = connection.own_requests_left();
        connection.used[index] += bytes;
        subtract(&mut self.own_requests_left, own_left - connection.own_requests_left());
        self.tenants.add(connection.tenant, kind, bytes);
    }

    fn remove(&mut self, number: u64, kind: Kind, bytes: u64) {
        let index = kind as usize;
        subtract(&mut self.used[index], bytes);
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let own_left = connection.own_requests_left();
        subtract(&mut connection.used[index], bytes);
        self.own_requests_left += connection.own_requests_left() - own_left;
        if kind == Kind::Outstanding && connection.used[index] == 0 {
            connection.read_rate.stop();
            connection.refused_reads.clear();
            subtract(&mut self.readers, 1);
            if self.readers == 0 {
                self.read_rate.stop();
            }
        }
        if kind == Kind::Puts {
            connection.progress.writer.lock().end(bytes);
            subtract(&mut connection.puts, 1);
            let used = connection.used[index];
            self.writers.remove(&(connection.tenant, used + bytes, number));
            if used > 0 {
                self.writers.insert((connection.tenant, used, number));
            } else {
                self.writers_order.remove(number);
            }
        }
        if kind == Kind::Reads {
            self.readers_order.remove(number, connection.tenant, bytes);
        }
        self.tenants.remove(connection.tenant, kind, bytes);
    }

    /// Records that a connection was refused or waits, so that its tenant's share is reserved.
    fn record_demand(&mut self, connection: u64, kind: Kind, now: Instant) {
        if let Some(connection) = self.connections.get(&connection) {
            self.tenants.record_demand(connection.tenant, kind, now + DEMAND_TIME);
        }
    }

    fn enqueue(&mut self, account: &Arc<Account>, bytes: u64, grant: oneshot::Sender<Charge>, now: Instant) {
        self.record_demand(account.connection(), Kind::Reads, now);
        let Some(connection) = self.connections.get(&account.connection()) else { return };
        let Some(queue) = self.tenants.queue(connection.tenant) else { return };
        if queue.is_empty() && !self.tenant_queue.contains(&connection.tenant) {
            self.tenant_queue.push_back(connection.tenant);
        }
        queue.push_back(QueuedRead { account: Arc::downgrade(account), bytes, grant });
        if queue.len().is_multiple_of(QUEUE_CLEANUP_STEP) {
            queue.retain(|read| !read.grant.is_closed());
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
    pub(crate) fn new(options: &NodeOptions, writes: Arc<WriteLoad>, metrics: Arc<Metrics>) -> Arc<Budget> {
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
            writes,
            metrics,
        })
    }

    /// Opens the account of a new connection, with the empty tenant until the handshake names one.
    /// Returns `None` if there is no memory for another connection.
    pub(crate) fn open(self: &Arc<Self>) -> Option<Arc<Account>> {
        let mut state = self.state.lock();
        let node_max = self.node_max[Kind::Requests as usize];
        let held = state.used[Kind::Requests as usize] + state.own_requests_left;
        let is_full = held + CONNECTION_BYTES + OWN_REQUEST_BYTES > node_max;
        if is_full || state.connections.len() as u64 >= self.connections_max() {
            return None;
        }
        let number = state.connections_opened;
        state.connections_opened += 1;
        let disconnect = CancellationToken::new();
        let progress = Progress::new(now());
        let connection = ConnectionUsage {
            tenant: state.tenants.join(Peer::Local, ""),
            used: [0; KINDS.len()],
            puts: 0,
            put_refused: false,
            served: None,
            read_rate: ReadRate::default(),
            refused_reads: RefusedReads::default(),
            progress: progress.clone(),
            disconnect: disconnect.clone(),
        };
        state.connections.insert(number, connection);
        state.used[Kind::Requests as usize] += CONNECTION_BYTES;
        state.own_requests_left += OWN_REQUEST_BYTES;
        drop(state);
        Some(Arc::new(Account::new(self.clone(), number, progress, disconnect)))
    }

    /// Time since a connection sent a byte for its puts, or reserved one. `None` if it has ended.
    pub(crate) fn writer_silence(&self, connection: u64, now: Instant) -> Option<Duration> {
        let state = self.state.lock();
        let silence = state.connections.get(&connection)?.progress.writer.lock().quiet_for(now);
        Some(silence)
    }

    /// Most connections that the request memory has room for.
    fn connections_max(&self) -> u64 {
        self.node_max[Kind::Requests as usize] / QUARTERS * (QUARTERS - 1) / CONNECTION_BYTES
    }

    /// Returns the request memory that requests leave to new connections. So connections that open
    /// while bodies fill the memory stay within the bound.
    fn room_for_connections(&self, state: &BudgetState) -> u64 {
        // `open` keeps the number of connections within the maximum.
        let more = self.connections_max() - state.connections.len() as u64;
        let room = self.node_max[Kind::Requests as usize] / FRACTION_FOR_CONNECTIONS;
        room.min(more * (CONNECTION_BYTES + OWN_REQUEST_BYTES))
    }

    fn overrun(&self, state: &mut BudgetState, number: u64, kind: Kind, bytes: u64, now: Instant) -> Overrun {
        state.tenants.expire(now);
        let mut ahead = Ahead::default();
        if kind == Kind::Puts
            && let Some(connection) = state.connections.get(&number)
        {
            state.line.expire(now);
            let place = (number, connection.tenant);
            // A put that begins now ends before the others return, and its write to L3 does, too.
            let (written, write_time) = self.writes.load();
            let write_time = write_time.filter(|_| written > 0).unwrap_or_default();
            let times = (now, Some(now + state.time_of_put(now) + write_time));
            ahead = state.line.promised(place, &state.tenants, self.node_max[kind as usize], times).bytes();
        }
        self.overrun_behind(ahead, state, number, kind, bytes)
    }

    /// Returns the overrun of a connection behind known places in the line. The caller has called
    /// [`TenantTable::expire`].
    fn overrun_behind(&self, ahead: Ahead, state: &BudgetState, number: u64, kind: Kind, bytes: u64) -> Overrun {
        let index = kind as usize;
        let node_max = self.node_max[index];
        // The first charge is always within the bound, so that a page larger than the bound moves.
        // It needs no more than the bytes in use. The subtraction saturates because a total below
        // the bound is the normal case.
        let over = |used: u64, max: u64| if bytes == 0 { 0 } else { (used + bytes).saturating_sub(max).min(used) };
        let writes = if kind == Kind::Puts { self.writes.bytes() } else { 0 };
        let mut node_used = state.used[index] + ahead.of_all + writes;
        let Some(connection) = state.connections.get(&number) else {
            return Overrun { node: over(node_used, node_max), ..Overrun::default() };
        };
        if kind == Kind::Requests {
            let own_left = connection.own_requests_left();
            if bytes <= own_left {
                return Overrun::default();
            }
            // Its own part goes first. Those of the others stay free.
            node_used += state.own_requests_left - own_left + self.room_for_connections(state);
        }
        let tenant_used = state.tenants.used(connection.tenant, kind) + ahead.of_tenant;
        let connection_max = match kind {
            // Saturates because a single oversized page or a mandatory request may exceed the
            // bound.
            Kind::Reads => (node_max.saturating_sub(node_used) / FREE_READ_FRACTION).max(PAGES_IN_FLIGHT_MIN * bytes),
            Kind::Puts | Kind::Outstanding | Kind::Requests => self.connection_max[index],
        };
        Overrun {
            connection: over(connection.used[index], connection_max),
            tenant: over(tenant_used, state.tenants.share(connection.tenant, kind, node_max)),
            node: over(node_used, node_max),
        }
    }

    /// Returns `true` if a put of `bytes` finds no room, even if no caller waits.
    fn is_full(&self, state: &BudgetState, bytes: u64) -> bool {
        let used = state.used[Kind::Puts as usize] + self.writes.bytes();
        used > 0 && used + bytes > self.node_max[Kind::Puts as usize]
    }

    /// Returns the forecast of the room for puts, as far as `scope` frees it.
    fn forecast<'a>(&self, state: &'a mut BudgetState, scope: Scope, now: Instant) -> &'a Forecast {
        if state.forecasts.first_key_value().is_some_and(|(_, forecast)| !forecast.is_current(now)) {
            state.forecasts.clear();
        }
        if !state.forecasts.contains_key(&scope) {
            let forecast = state.forecast(scope, self.node_max[Kind::Puts as usize], &self.writes, now);
            #[cfg(test)]
            {
                state.forecast_visits += forecast.visits;
            }
            state.forecasts.insert(scope, forecast);
        }
        &state.forecasts[&scope]
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
            let next = state.tenants.queue(name).and_then(VecDeque::pop_front);
            let Some(next) = next else { continue };
            let account = next.account.upgrade();
            seen.extend(account.clone());
            let Some(account) = account.filter(|_| !next.grant.is_closed()) else {
                state.tenant_queue.push_front(name);
                continue;
            };
            let overrun = self.overrun(&mut state, account.connection(), Kind::Reads, next.bytes, now);
            if overrun.connection > 0 {
                // More was charged to this connection since the read was queued. Dropping the
                // sender makes the read wait for its own reader first.
                state.tenant_queue.push_front(name);
                served.push((next.grant, None));
            } else if overrun.tenant > 0 || overrun.node > 0 {
                // A tenant at its share waits for its own readers only.
                let node_full = overrun.node > 0 && overrun.tenant == 0;
                self.disconnect_stalled(&mut state, (!node_full).then_some(name), overrun.max(), now);
                if let Some(queue) = state.tenants.queue(name) {
                    queue.push_front(next);
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

    /// Disconnects a stalled reader while less than [`FREE_READ_FRACTION`] of the read memory is
    /// free. To be called for a reader that waits because of its own bound, which follows from the
    /// free memory.
    fn relieve_reads(&self, state: &mut BudgetState, connection: u64, now: Instant) {
        let max = self.node_max[Kind::Reads as usize];
        let used = state.used[Kind::Reads as usize];
        let wanted = (used + max / FREE_READ_FRACTION).saturating_sub(max);
        let Some(tenant) = state.connections.get(&connection).map(|connection| connection.tenant) else { return };
        // A tenant at its share gains nothing from the memory of others.
        let share = state.tenants.share(tenant, Kind::Reads, max);
        let is_at_share = state.tenants.used(tenant, Kind::Reads) >= share;
        if wanted > 0 {
            self.disconnect_stalled(state, is_at_share.then_some(tenant), wanted, now);
        }
    }

    fn disconnect_stalled(&self, state: &mut BudgetState, tenant: Option<TenantNumber>, bytes: u64, now: Instant) {
        let searched = state.last_stalled_search;
        if searched.is_some_and(|at| now.saturating_duration_since(at) < STALLED_SEARCH_INTERVAL) {
            return;
        }
        state.last_stalled_search = Some(now);
        if state.disconnect_stalled(tenant, bytes, now) {
            self.metrics.slow_readers_disconnected.inc();
        }
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let state = self.state.lock();
        let mut status = json!({
            "connections": state.connections.len(),
            "tenants": state.tenants.len(),
            "writers_waiting": state.line.len(),
        });
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
mod account_tests;
#[cfg(test)]
mod crowd_tests;
#[cfg(test)]
mod room_tests;
#[cfg(test)]
mod share_tests;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "shuttle"))]
mod threads;
#[cfg(test)]
mod write_tests;
