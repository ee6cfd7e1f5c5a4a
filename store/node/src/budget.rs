//! Bytes in flight: who has how many, and whether more may begin.
//!
//! Always true:
//! - what is under way is counted by a [`Charge`], and counted no more when that is dropped, however that comes about;
//! - of each [`Kind`], a node's charges are within its bound, but for one piece of work when there is no other, so that a page
//!   larger than a bound still moves, and for requests that must be heard;
//! - who asks is answered at once: granted, or [`Busy`];
//! - a tenant alone may use all there is; when others want some too, no more than its share;
//! - however many readers are slow, something is left for the others: what waits for one is at most a part of what is free
//!   (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998);
//! - a reader that takes nothing, while others are refused for want of what waits for it, is given up.

use crate::clock::now;
use crate::metrics::Metrics;
use crate::options::NodeOptions;
use larder_format::planted::{Bug, has};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What an open connection is counted for beside its requests: buffers, queues and its task.
pub(crate) const CONNECTION_BYTES: u64 = 48 << 10;
/// What a request is counted for: so much, and its body so many times: as bytes, as what they say, and as the answer.
const REQUEST_BYTES: u64 = 1 << 10;
const BODY_TIMES: u64 = 4;
/// Of the memory for requests, connections may take 3 of 4 parts, and the requests of one connection 1 of 4 by default.
const QUARTERS: u64 = 4;
/// What waits for one reader is at most such a part of what is free.
const FREE_FOR_ONE: u64 = 4;
/// However many tenants there are, each may have a 16th.
const TENANTS_SHARING_MAX: u64 = 16;
/// A tenant that was refused wants something for so long.
const WANTED: Duration = Duration::from_secs(1);
/// A reader that has taken nothing for so long may be given up.
const SLOW_AFTER: Duration = Duration::from_secs(1);
const RETRY_MIN: Duration = Duration::from_millis(1);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Over how long the rate at which bytes leave is measured.
const RATE_WINDOW: Duration = Duration::from_millis(100);

/// What bytes are counted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Reserved by puts that are not sealed: memory of the arena.
    Puts,
    /// Pages that are read from L3 for readers, or wait to leave: memory of the arena.
    Reads,
    /// Pages that readers asked for and that have not left yet: no memory, but time.
    Asked,
    /// Connections and requests, and what is made of them: memory beside the arena.
    Requests,
}

const KINDS: [(Kind, &str); 4] =
    [(Kind::Puts, "puts"), (Kind::Reads, "reads"), (Kind::Asked, "asked"), (Kind::Requests, "requests")];

/// Bytes of each kind.
type Amounts = [u64; KINDS.len()];

/// Not now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy {
    /// When so much will have ended that it is worth trying again, going by how much ended lately.
    pub(crate) retry_after: Duration,
}

impl Busy {
    pub(crate) fn milliseconds(self) -> u32 {
        u32::try_from(self.retry_after.as_millis()).unwrap_or(u32::MAX)
    }
}

/// The accounts of a node.
pub(crate) struct Budget {
    node_max: Amounts,
    connection_max: Amounts,
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct State {
    used: Amounts,
    drains: [Drain; KINDS.len()],
    tenants: BTreeMap<Arc<str>, Tenant>,
    connections: BTreeMap<u64, Connection>,
    connections_ever: u64,
}

#[derive(Default)]
struct Tenant {
    connections: usize,
    used: Amounts,
    wanted: [Option<Instant>; KINDS.len()],
}

struct Connection {
    tenant: Arc<str>,
    used: Amounts,
    /// Bytes that wait for this reader to take them, and when it last took some or had none.
    queued: u64,
    progress: Instant,
    given_up: CancellationToken,
}

/// How fast bytes of a kind come back.
#[derive(Default)]
struct Drain {
    since: Option<Instant>,
    bytes: u64,
    per_second: u64,
}

impl Drain {
    fn add(&mut self, now: Instant, bytes: u64) {
        let since = *self.since.get_or_insert(now);
        self.bytes += bytes;
        let passed = now.saturating_duration_since(since);
        if passed >= RATE_WINDOW {
            let measured = u128::from(self.bytes) * 1_000_000 / passed.as_micros();
            // What was measured over a long time counts for all of it.
            let before = if passed >= RATE_WINDOW * 8 { measured } else { u128::from(self.per_second) };
            self.per_second = u64::try_from((before + measured) / 2).unwrap_or(u64::MAX);
            (self.since, self.bytes) = (Some(now), 0);
        }
    }

    fn time_for(&mut self, now: Instant, bytes: u64) -> Duration {
        self.add(now, 0);
        if self.per_second == 0 {
            return RETRY_MAX;
        }
        let micros = u128::from(bytes) * 1_000_000 / u128::from(self.per_second);
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)).clamp(RETRY_MIN, RETRY_MAX)
    }
}

impl State {
    /// Most bytes that a tenant may have now, out of `max`.
    fn share(&self, tenant: &str, kind: Kind, max: u64, now: Instant) -> u64 {
        if self.tenants.len() < 2 {
            return max;
        }
        let wants = |tenant: &Tenant| {
            let wanted = tenant.wanted[kind as usize];
            tenant.used[kind as usize] > 0 || wanted.is_some_and(|at| now.saturating_duration_since(at) < WANTED)
        };
        let others = self.tenants.iter().filter(|(name, other)| &***name != tenant && wants(other)).count() as u64;
        max / (1 + others).min(TENANTS_SHARING_MAX)
    }

    fn count(&mut self, number: u64, kind: Kind, bytes: u64) {
        let kind = kind as usize;
        self.used[kind] += bytes;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.used[kind] += bytes;
        if let Some(tenant) = self.tenants.get_mut(&connection.tenant) {
            tenant.used[kind] += bytes;
        }
    }

    fn give_back(&mut self, number: u64, kind: Kind, bytes: u64, now: Instant) {
        let kind = kind as usize;
        self.used[kind] -= bytes;
        self.drains[kind].add(now, bytes);
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.used[kind] -= bytes;
        if let Some(tenant) = self.tenants.get_mut(&connection.tenant) {
            tenant.used[kind] -= bytes;
        }
    }

    /// The reader that has taken nothing for longest, if that is too long.
    fn slowest(&self, now: Instant) -> Option<&Connection> {
        let idle = |connection: &&Connection| now.saturating_duration_since(connection.progress);
        let waited_for = self.connections.values().filter(|connection| connection.queued > 0);
        waited_for.filter(|one| idle(one) >= SLOW_AFTER && !one.given_up.is_cancelled()).max_by_key(idle)
    }

    fn leave(&mut self, tenant: &str) {
        if let Some(left) = self.tenants.get_mut(tenant) {
            left.connections -= 1;
            if left.connections == 0 {
                self.tenants.remove(tenant);
            }
        }
    }
}

impl Budget {
    pub(crate) fn new(options: &NodeOptions, metrics: Arc<Metrics>) -> Arc<Budget> {
        let puts = options.dirty_bytes_max();
        let (reads, asked) = (options.in_flight_bytes() - puts, options.asked_bytes());
        let requests = options.request_bytes;
        Arc::new(Budget {
            node_max: [puts, reads, asked, requests],
            connection_max: [
                options.connection_bytes(),
                reads,
                asked,
                options.connection_request_bytes.unwrap_or(requests / QUARTERS),
            ],
            state: Mutex::default(),
            metrics,
        })
    }

    /// The account of a connection of which nothing is known yet; `None` if there is no memory for one more.
    pub(crate) fn open(self: &Arc<Self>) -> Option<Arc<Account>> {
        let mut state = self.state.lock();
        let for_connections = self.node_max[Kind::Requests as usize] / QUARTERS * (QUARTERS - 1);
        if (state.connections.len() as u64 + 1) * CONNECTION_BYTES > for_connections {
            return None;
        }
        let number = state.connections_ever;
        state.connections_ever += 1;
        let tenant: Arc<str> = "".into();
        let given_up = CancellationToken::new();
        let connection =
            Connection { tenant: tenant.clone(), used: [0; 4], queued: 0, progress: now(), given_up: given_up.clone() };
        state.connections.insert(number, connection);
        state.tenants.entry(tenant).or_default().connections += 1;
        state.used[Kind::Requests as usize] += CONNECTION_BYTES;
        drop(state);
        Some(Arc::new(Account { budget: self.clone(), number, given_up, left: Notify::new() }))
    }

    /// Bytes under way and their bounds, for people and scripts. Connections are counted by their number.
    pub(crate) fn status(&self) -> serde_json::Value {
        let state = self.state.lock();
        let mut status = json!({ "connections": state.connections.len(), "tenants": state.tenants.len() });
        for (kind, name) in KINDS {
            status[name] = json!({ "bytes": state.bytes(kind), "bytes_max": self.node_max[kind as usize] });
        }
        status
    }

    /// Bytes under way by kind.
    pub(crate) fn usage(&self) -> Vec<(&'static str, u64)> {
        let state = self.state.lock();
        KINDS.iter().map(|&(kind, name)| (name, state.bytes(kind))).collect()
    }
}

impl State {
    /// Bytes under way, without what connections are counted for by themselves.
    fn bytes(&self, kind: Kind) -> u64 {
        let connections = if kind == Kind::Requests { self.connections.len() as u64 * CONNECTION_BYTES } else { 0 };
        self.used[kind as usize] - connections
    }
}

/// What one connection has under way.
pub(crate) struct Account {
    budget: Arc<Budget>,
    number: u64,
    given_up: CancellationToken,
    /// Told when bytes that were read for it have left.
    left: Notify,
}

impl Drop for Account {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.used[Kind::Requests as usize] -= CONNECTION_BYTES;
        if let Some(connection) = state.connections.remove(&self.number) {
            state.leave(&connection.tenant);
        }
    }
}

impl Account {
    /// It said whose it is, before it asked for anything.
    pub(crate) fn belongs_to(&self, tenant: &str) {
        let mut state = self.budget.state.lock();
        let tenant: Arc<str> = tenant.into();
        let Some(connection) = state.connections.get_mut(&self.number) else { return };
        let before = std::mem::replace(&mut connection.tenant, tenant.clone());
        state.tenants.entry(tenant).or_default().connections += 1;
        state.leave(&before);
    }

    /// Ends when this reader was given up.
    pub(crate) async fn given_up(&self) {
        self.given_up.cancelled().await;
    }

    /// Counts bytes, if they may be under way now.
    pub(crate) fn charge(self: &Arc<Self>, kind: Kind, bytes: u64) -> Result<Charge, Busy> {
        let (of, now) = (kind as usize, now());
        let mut state = self.budget.state.lock();
        let (own, others) = self.beyond(&state, kind, bytes, now);
        if own.max(others) == 0 {
            state.count(self.number, kind, bytes);
            drop(state);
            return Ok(Charge { account: self.clone(), kind, bytes, queued: false });
        }
        let tenant = state.connections.get(&self.number).map(|connection| connection.tenant.clone());
        if let Some(tenant) = tenant.and_then(|tenant| state.tenants.get_mut(&tenant)) {
            tenant.wanted[of] = Some(now);
        }
        if kind == Kind::Reads
            && others > 0
            && let Some(slowest) = state.slowest(now)
        {
            slowest.given_up.cancel();
            self.budget.metrics.readers_given_up.inc();
        }
        Err(Busy { retry_after: state.drains[of].time_for(now, own.max(others)) })
    }

    /// Counts bytes that are to be read and sent. While some of its own are on their way, it is a matter of the reader itself to
    /// take them, and this waits for that; else it is said at once whether there is room.
    pub(crate) async fn charge_read(self: &Arc<Self>, bytes: u64) -> Result<Charge, Busy> {
        loop {
            let mut left = std::pin::pin!(self.left.notified());
            left.as_mut().enable();
            let refused = match self.charge(Kind::Reads, bytes) {
                Ok(charge) => return Ok(charge),
                Err(busy) => busy,
            };
            let own = |connection: &Connection| connection.used[Kind::Reads as usize] > 0;
            if !self.budget.state.lock().connections.get(&self.number).is_some_and(own) {
                return Err(refused);
            }
            left.await;
        }
    }

    /// How many bytes too many there would be with `bytes` more: for this connection, and for its tenant or the node.
    fn beyond(&self, state: &State, kind: Kind, bytes: u64, now: Instant) -> (u64, u64) {
        let of = kind as usize;
        let node_max = self.budget.node_max[of];
        let over = |used: u64, max: u64| if used == 0 || bytes == 0 { 0 } else { (used + bytes).saturating_sub(max) };
        let node = over(state.used[of], node_max);
        let Some(connection) = state.connections.get(&self.number) else { return (0, node) };
        let connection_max = match kind {
            Kind::Reads => node_max.saturating_sub(state.used[of]) / FREE_FOR_ONE,
            _ => self.budget.connection_max[of],
        };
        let tenant_used = state.tenants.get(&connection.tenant).map_or(0, |tenant| tenant.used[of]);
        let share = state.share(&connection.tenant, kind, node_max, now);
        (over(connection.used[of], connection_max), node.max(over(tenant_used, share)))
    }

    /// When it is worth trying again to reserve `bytes` that there was no room for.
    pub(crate) fn retry_after(&self, kind: Kind, bytes: u64) -> Busy {
        let mut state = self.budget.state.lock();
        Busy { retry_after: state.drains[kind as usize].time_for(now(), bytes) }
    }

    /// Counts a request with a body of `body_bytes`, if it may be worked on now, or must be.
    pub(crate) fn request(self: &Arc<Self>, body_bytes: u32, must: bool) -> Result<Charge, Busy> {
        let (kind, bytes) = (Kind::Requests, REQUEST_BYTES + BODY_TIMES * u64::from(body_bytes));
        if !must {
            return self.charge(kind, bytes);
        }
        self.budget.state.lock().count(self.number, kind, bytes);
        Ok(Charge { account: self.clone(), kind, bytes, queued: false })
    }
}

/// Bytes that are under way until this is dropped.
pub(crate) struct Charge {
    account: Arc<Account>,
    kind: Kind,
    bytes: u64,
    queued: bool,
}

impl Charge {
    /// From now on it is for the reader to take them.
    pub(crate) fn queue(&mut self) {
        let mut state = self.account.budget.state.lock();
        let Some(connection) = state.connections.get_mut(&self.account.number) else { return };
        if connection.queued == 0 {
            connection.progress = now();
        }
        connection.queued += self.bytes;
        self.queued = true;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if has(Bug::ChargeLeaks) && self.kind == Kind::Reads {
            return;
        }
        let now = now();
        let mut state = self.account.budget.state.lock();
        state.give_back(self.account.number, self.kind, self.bytes, now);
        if self.queued
            && let Some(connection) = state.connections.get_mut(&self.account.number)
        {
            connection.queued -= self.bytes;
            connection.progress = now;
        }
        drop(state);
        if self.kind == Kind::Reads {
            self.account.left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests;
