//! Bytes in flight: who has how many, and whether more may begin.
//!
//! Always true:
//! - what is under way is counted by a [`Charge`], and counted no more when that is dropped, however that comes about;
//! - of each [`Kind`], a node's charges are within its bound, but for one piece of work when there is no other, so that a page
//!   larger than a bound still moves, and for requests that must be heard;
//! - who asks is answered at once: granted, or [`Busy`]. What was granted to a reader waits for its turn: tenants in turns,
//!   each in its order;
//! - a tenant alone may use all there is; when others want some too, no more than its share;
//! - a reader may ask for what it can be expected to take in a part of the time it has, going by how fast it and all took bytes
//!   lately; that others take nothing is no reason to refuse it something;
//! - however many readers are slow, something is left for the others: what waits for one is at most a part of what is free
//!   (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998);
//! - a reader that takes nothing, while others wait for want of what waits for it, is given up.

mod pace;

use crate::clock::now;
use crate::metrics::Metrics;
use crate::options::NodeOptions;
use larder_format::planted::{Bug, has};
use pace::{Drain, Pace};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

/// What an open connection is counted for beside its requests: buffers, queues and its task.
pub(crate) const CONNECTION_BYTES: u64 = 48 << 10;
/// What a request is counted for: so much, and its body so many times: as bytes, as what they say, and as the answer.
const REQUEST_BYTES: u64 = 1 << 10;
const BODY_TIMES: u64 = 4;
/// Of the memory for requests, connections may take 3 of 4 parts, and the requests of one connection 1 of 4 by default.
const QUARTERS: u64 = 4;
/// What is read and waits for one reader is at most such a part of what is free.
const FREE_FOR_ONE: u64 = 4;
/// However many tenants there are, each may have a 16th.
const TENANTS_SHARING_MAX: u64 = 16;
/// A tenant that was refused wants something for so long: until it comes back, however it was told to.
const WANTED: Duration = Duration::from_secs(3);
/// A reader that has taken nothing for so long may be given up.
const SLOW_AFTER: Duration = Duration::from_secs(1);
/// So many bytes are something; of a page that is smaller, all of it.
const PROGRESS_BYTES: u64 = 256 << 10;
/// It is looked for no oftener, as all connections are looked at for that.
const SEEK_EVERY: Duration = Duration::from_millis(20);
/// A reader may ask for what it can be expected to take in a quarter of the time it has, as much waits beyond what is seen
/// here: at the pace that it had lately, or the readers have together, which changes at once when there are more of them.
const TIME_PARTS: u32 = 4;
/// However slowly a reader takes bytes, it may ask for so many.
const ASKED_MIN: u64 = 4 << 20;
/// However little is free, so many pages may be under way for one reader: one while another is read.
const PAGES_FOR_ONE: u64 = 2;
/// Those that no longer wait for their turn are looked for whenever so many do.
const WAITING_STEP: usize = 64;

/// What bytes are counted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Reserved by puts that are not sealed: memory of the arena.
    Puts,
    /// Pages that are read from L3 for readers, or wait to leave: memory of the arena.
    Reads,
    /// Pages that readers asked for and that have not left yet: no memory, but the reader's time. Bounded for each alone.
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
    /// Tenants with readers that wait for their turn; the first one is next.
    turns: VecDeque<Arc<str>>,
    connections: BTreeMap<u64, Connection>,
    connections_ever: u64,
    /// Readers that asked for something that has not left yet, and how fast they take it together.
    readers: u64,
    pace: Pace,
    /// When a reader that takes nothing was last looked for.
    sought: Option<Instant>,
}

#[derive(Default)]
struct Tenant {
    connections: usize,
    used: Amounts,
    wanted: [Option<Instant>; KINDS.len()],
    waiting: VecDeque<Waiting>,
}

/// A page that is to be read for a reader, when there is room.
struct Waiting {
    account: Weak<Account>,
    bytes: u64,
    /// Dropped: the reader has to take something first.
    turn: oneshot::Sender<Charge>,
}

struct Connection {
    tenant: Arc<str>,
    used: Amounts,
    /// How fast it takes what it asked for.
    pace: Pace,
    /// Bytes that wait for this reader to take them, and when it last took some or had none.
    queued: u64,
    progress: Instant,
    /// Bytes taken since then.
    taken: u64,
    given_up: CancellationToken,
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

    fn count(&mut self, number: u64, kind: Kind, bytes: u64, now: Instant) {
        let of = kind as usize;
        self.used[of] += bytes;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if kind == Kind::Asked && connection.used[of] == 0 {
            connection.pace.since = Some(now);
            if self.readers == 0 {
                self.pace.since = Some(now);
            }
            self.readers += 1;
        }
        connection.used[of] += bytes;
        if let Some(tenant) = self.tenants.get_mut(&connection.tenant) {
            tenant.used[of] += bytes;
        }
    }

    fn give_back(&mut self, number: u64, kind: Kind, bytes: u64) {
        let of = kind as usize;
        self.used[of] -= bytes;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.used[of] -= bytes;
        if kind == Kind::Asked && connection.used[of] == 0 {
            connection.pace.since = None;
            self.readers -= 1;
            if self.readers == 0 {
                self.pace.since = None;
            }
        }
        if let Some(tenant) = self.tenants.get_mut(&connection.tenant) {
            tenant.used[of] -= bytes;
        }
    }

    /// A connection is told that there is no room now, or waits for it.
    fn wants(&mut self, number: u64, kind: Kind, now: Instant) {
        let tenant = self.connections.get(&number).and_then(|connection| self.tenants.get_mut(&connection.tenant));
        if let Some(tenant) = tenant {
            tenant.wanted[kind as usize] = Some(now);
        }
    }

    /// A connection waits for its turn.
    fn wait(&mut self, account: &Arc<Account>, bytes: u64, turn: oneshot::Sender<Charge>, now: Instant) {
        self.wants(account.number, Kind::Reads, now);
        let Some(connection) = self.connections.get(&account.number) else { return };
        let Some(tenant) = self.tenants.get_mut(&connection.tenant) else { return };
        if tenant.waiting.is_empty() && !self.turns.contains(&connection.tenant) {
            self.turns.push_back(connection.tenant.clone());
        }
        tenant.waiting.push_back(Waiting { account: Arc::downgrade(account), bytes, turn });
        if tenant.waiting.len().is_multiple_of(WAITING_STEP) {
            tenant.waiting.retain(|waiting| !waiting.turn.is_closed());
        }
    }

    /// The reader, out of all or of a tenant's, that has taken nothing for longest, if that is too long; `None` as well while
    /// those that were given up have yet to give back the `bytes` there are too many.
    fn slowest(&self, kind: Kind, tenant: Option<&Arc<str>>, bytes: u64, now: Instant) -> Option<&Connection> {
        let idle = |connection: &&Connection| now.saturating_duration_since(connection.progress);
        let whose = |connection: &&Connection| tenant.is_none_or(|tenant| connection.tenant == *tenant);
        let (given_up, others): (Vec<&Connection>, Vec<&Connection>) =
            self.connections.values().filter(whose).partition(|one| one.given_up.is_cancelled());
        if given_up.iter().map(|one| one.used[kind as usize]).sum::<u64>() >= bytes {
            return None;
        }
        others.into_iter().filter(|one| one.queued > 0 && idle(one) >= SLOW_AFTER).max_by_key(idle)
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
            node_max: [puts, reads, u64::MAX, requests],
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
        let connection = Connection {
            tenant: tenant.clone(),
            used: [0; 4],
            pace: Pace::default(),
            queued: 0,
            progress: now(),
            taken: 0,
            given_up: given_up.clone(),
        };
        state.connections.insert(number, connection);
        state.tenants.entry(tenant).or_default().connections += 1;
        state.used[Kind::Requests as usize] += CONNECTION_BYTES;
        drop(state);
        Some(Arc::new(Account {
            budget: self.clone(),
            number,
            given_up,
            left: Notify::new(),
            first: Default::default(),
        }))
    }

    /// How many bytes too many there would be with `bytes` more of a connection.
    fn excess(&self, state: &State, number: u64, kind: Kind, bytes: u64, now: Instant) -> Excess {
        let of = kind as usize;
        let node_max = self.node_max[of];
        let over = |used: u64, max: u64| if used == 0 || bytes == 0 { 0 } else { (used + bytes).saturating_sub(max) };
        let node = over(state.used[of], node_max);
        let Some(connection) = state.connections.get(&number) else {
            return Excess { node, ..Excess::default() };
        };
        let free = node_max.saturating_sub(state.used[of]);
        let connection_max = match kind {
            Kind::Reads => (free / FREE_FOR_ONE).max(PAGES_FOR_ONE * bytes),
            Kind::Puts | Kind::Asked | Kind::Requests => self.connection_max[of],
        };
        let tenant_used = state.tenants.get(&connection.tenant).map_or(0, |tenant| tenant.used[of]);
        let share = state.share(&connection.tenant, kind, node_max, now);
        Excess { connection: over(connection.used[of], connection_max), tenant: over(tenant_used, share), node }
    }

    /// Gives readers their turns, as far as there is room, and gives up one that takes nothing if there is none.
    fn serve(&self) {
        // Dropped without the lock.
        let (mut served, mut seen) = (Vec::new(), Vec::new());
        let mut state = self.state.lock();
        let (now, mut passed) = (now(), 0);
        while passed < state.turns.len() {
            let Some(name) = state.turns.pop_front() else { break };
            let next = state.tenants.get_mut(&name).and_then(|tenant| tenant.waiting.pop_front());
            let Some(next) = next else { continue };
            let account = next.account.upgrade();
            seen.extend(account.clone());
            let Some(account) = account.filter(|_| !next.turn.is_closed()) else {
                state.turns.push_front(name);
                continue;
            };
            let excess = self.excess(&state, account.number, Kind::Reads, next.bytes, now);
            if excess.connection > 0 {
                // Since it began to wait, its reader was sent something.
                state.turns.push_front(name);
                served.push((next.turn, None));
            } else if excess.tenant > 0 || excess.node > 0 {
                // Who has his share waits for his like, and for nobody else.
                let node_full = excess.node > 0 && excess.tenant == 0;
                self.give_up(&mut state, (!node_full).then_some(&name), excess.most(), now);
                if let Some(tenant) = state.tenants.get_mut(&name) {
                    tenant.waiting.push_front(next);
                }
                if node_full {
                    // Nobody overtakes it, or a large page would wait for ever.
                    state.turns.push_front(name);
                    break;
                }
                state.turns.push_back(name);
                passed += 1;
            } else {
                let charge = account.granted(&mut state, Kind::Reads, next.bytes, now);
                served.push((next.turn, Some(charge)));
                state.turns.push_back(name);
                passed = 0;
            }
        }
        drop(state);
        for (turn, charge) in served {
            // Who does not wait any more gives it back by that.
            let _ = charge.map(|charge| turn.send(charge));
        }
    }

    fn give_up(&self, state: &mut State, tenant: Option<&Arc<str>>, bytes: u64, now: Instant) {
        if state.sought.is_some_and(|at| now.saturating_duration_since(at) < SEEK_EVERY) {
            return;
        }
        state.sought = Some(now);
        if let Some(slowest) = state.slowest(Kind::Reads, tenant, bytes, now) {
            slowest.given_up.cancel();
            self.metrics.readers_given_up.inc();
        }
    }

    /// Bytes under way and their bounds, for people and scripts. Connections are counted by their number.
    pub(crate) fn status(&self) -> serde_json::Value {
        let state = self.state.lock();
        let mut status = json!({ "connections": state.connections.len(), "tenants": state.tenants.len() });
        for (kind, name) in KINDS {
            status[name] = json!({ "bytes": state.bytes(kind) });
            if kind != Kind::Asked {
                status[name]["bytes_max"] = self.node_max[kind as usize].into();
            }
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
    /// Of its pages that wait for that, the first.
    first: tokio::sync::Mutex<()>,
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

    /// Its reader took so many of the bytes that wait for it.
    pub(crate) fn took(&self, bytes: u64) {
        let mut state = self.budget.state.lock();
        let Some(connection) = state.connections.get_mut(&self.number) else { return };
        connection.taken += bytes;
        if connection.taken >= PROGRESS_BYTES {
            (connection.taken, connection.progress) = (0, now());
        }
    }

    /// Ends when this reader was given up.
    pub(crate) async fn given_up(&self) {
        self.given_up.cancelled().await;
    }

    /// Counts bytes, if they may be under way now.
    pub(crate) fn charge(self: &Arc<Self>, kind: Kind, bytes: u64) -> Result<Charge, Busy> {
        let (of, now) = (kind as usize, now());
        let mut state = self.budget.state.lock();
        let excess = self.budget.excess(&state, self.number, kind, bytes, now).most();
        if excess == 0 {
            return Ok(self.granted(&mut state, kind, bytes, now));
        }
        state.wants(self.number, kind, now);
        Err(Busy { retry_after: state.drains[of].time_for(now, excess) })
    }

    /// Counts bytes that its reader asks for, if it can be expected to take them by `deadline`.
    pub(crate) fn charge_asked(self: &Arc<Self>, bytes: u64, deadline: Instant) -> Result<Charge, Busy> {
        let (kind, now) = (Kind::Asked, now());
        let mut state = self.budget.state.lock();
        state.pace.took(now, 0);
        let time = deadline.saturating_duration_since(now) / TIME_PARTS;
        let (all, readers) = (state.pace.bytes_in(time), state.readers);
        if let Some(own) = state.connections.get_mut(&self.number) {
            own.pace.took(now, 0);
            let used = own.used[kind as usize];
            let readers = readers + u64::from(used == 0);
            let share = all.map_or(u64::MAX, |all| all / readers.max(1));
            let in_time = own.pace.bytes_in(time).unwrap_or(u64::MAX).min(share);
            let max = in_time.max(ASKED_MIN).min(self.budget.connection_max[kind as usize]).max(PAGES_FOR_ONE * bytes);
            if used > 0 && used + bytes > max {
                return Err(Busy { retry_after: own.pace.time_for(used + bytes - max) });
            }
        }
        Ok(self.granted(&mut state, kind, bytes, now))
    }

    /// Counts bytes, if they may be under way now, and nobody waits for his turn; nothing comes of it if not.
    pub(crate) fn try_charge(self: &Arc<Self>, kind: Kind, bytes: u64) -> Option<Charge> {
        let now = now();
        let mut state = self.budget.state.lock();
        let fits = state.turns.is_empty() && self.budget.excess(&state, self.number, kind, bytes, now).most() == 0;
        fits.then(|| self.granted(&mut state, kind, bytes, now))
    }

    fn granted(self: &Arc<Self>, state: &mut State, kind: Kind, bytes: u64, now: Instant) -> Charge {
        // Nothing would be taken for not having been there.
        let bytes = bytes.max(1);
        state.count(self.number, kind, bytes, now);
        Charge { account: self.clone(), kind, bytes, queued: false, counts: kind != Kind::Asked }
    }

    /// Counts bytes that are to be read and sent, as soon as its reader has taken enough of what is on its way to it, and then
    /// as there is room in the node; in the order in which it was asked, whatever the sizes.
    pub(crate) async fn charge_read(self: &Arc<Self>, bytes: u64) -> Charge {
        loop {
            let mut turn = match self.reader_took_enough(bytes).await {
                Ok(charge) => return charge,
                Err(turn) => turn,
            };
            self.budget.serve();
            loop {
                match tokio::time::timeout(SLOW_AFTER, &mut turn).await {
                    Ok(Ok(charge)) => return charge,
                    Ok(Err(_)) => break,
                    Err(_) => self.budget.serve(),
                }
            }
        }
    }

    /// Waits until its reader has taken so much that `bytes` more may be on their way to it. Then they are granted, or what is
    /// returned is the turn for which they wait.
    async fn reader_took_enough(self: &Arc<Self>, bytes: u64) -> Result<Charge, oneshot::Receiver<Charge>> {
        // However many wait, one of them is woken when something has left, and the others when it is done.
        let _first = self.first.lock().await;
        loop {
            let mut left = std::pin::pin!(self.left.notified());
            left.as_mut().enable();
            {
                let now = now();
                let mut state = self.budget.state.lock();
                let excess = self.budget.excess(&state, self.number, Kind::Reads, bytes, now);
                if excess.most() == 0 && state.turns.is_empty() {
                    return Ok(self.granted(&mut state, Kind::Reads, bytes, now));
                }
                if excess.connection == 0 {
                    let (turn, wait) = oneshot::channel();
                    state.wait(self, bytes, turn, now);
                    return Err(wait);
                }
            }
            left.await;
        }
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
        Ok(self.counted(kind, bytes))
    }

    /// Counts bytes that are there, whether they may be or not.
    pub(crate) fn counted(self: &Arc<Self>, kind: Kind, bytes: u64) -> Charge {
        self.granted(&mut self.budget.state.lock(), kind, bytes, now())
    }
}

/// Bytes too many: for a connection, its tenant and the node.
#[derive(Default)]
struct Excess {
    connection: u64,
    tenant: u64,
    node: u64,
}

impl Excess {
    fn most(&self) -> u64 {
        self.connection.max(self.tenant).max(self.node)
    }
}

/// Bytes that are under way until this is dropped.
pub(crate) struct Charge {
    account: Arc<Account>,
    kind: Kind,
    bytes: u64,
    queued: bool,
    /// Whether giving it back says something about how fast bytes come back.
    counts: bool,
}

impl Charge {
    /// Nothing came of it.
    pub(crate) fn unused(mut self) {
        self.counts = false;
    }

    /// From now on it is for no more than `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let back = self.bytes.saturating_sub(bytes.max(1));
        self.bytes -= back;
        self.account.budget.state.lock().give_back(self.account.number, self.kind, back);
    }

    /// What was asked for has been sent.
    pub(crate) fn sent(mut self) {
        self.counts = true;
    }

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
        let (budget, number, now) = (&self.account.budget, self.account.number, now());
        let mut state = budget.state.lock();
        if self.counts {
            state.drains[self.kind as usize].add(now, self.bytes);
        }
        if let Some(connection) = state.connections.get_mut(&number) {
            if self.queued {
                connection.queued -= self.bytes;
                connection.progress = now;
            }
            if self.kind == Kind::Asked {
                let taken = if self.counts { self.bytes } else { 0 };
                connection.pace.took(now, taken);
                state.pace.took(now, taken);
            }
        }
        state.give_back(number, self.kind, self.bytes);
        let somebody_waits = self.kind == Kind::Reads && !state.turns.is_empty();
        drop(state);
        if self.kind == Kind::Reads {
            self.account.left.notify_waiters();
        }
        if somebody_waits {
            budget.serve();
        }
    }
}

#[cfg(test)]
mod tests;
