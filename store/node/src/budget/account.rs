//! Budget of one connection: its charges, and the wait for read memory.

use super::line::{Ahead, RoomOf};
use super::tenants::TenantNumber;
use super::{
    Budget, BudgetState, Busy, BusyBound, CONNECTION_BYTES, DEADLINE_FRACTION, KINDS, Kind, LosingWriter,
    OUTSTANDING_MIN, OWN_REQUEST_BYTES, Overrun, PAGES_IN_FLIGHT_MIN, Progress, REQUEST_BODY_COPIES, REQUEST_BYTES,
    STALLED_AFTER, Scope, subtract,
};
use crate::places::Peer;
use crate::tiers::SLOT_UNIT;
use larder_runtime::{fail_point, now, race_point};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

/// Longest delay that a refused put suggests. The line is as long as the writers of this time. A
/// longer one would leave room unused: see "Longest delay" in `docs/internals/budgets.md`.
const PUT_RETRY_MAX: Duration = Duration::from_secs(10);
const PUT_RETRY_MIN: Duration = Duration::from_millis(1);
/// Delay if the budget has room and another part of the node refused: L3 is not writable, or the
/// arena has no free run of bytes.
const NO_ROOM_RETRY: Duration = Duration::from_millis(20);
/// A returning writer that finds no room waits for at least this part of the time since its first
/// refusal, as a divisor.
const WAITED_PART: u32 = 4;
/// Part of the delay for which a place outlasts it, as a divisor.
const RETURN_PART: u32 = 4;
/// Time for which a place outlasts its delay, beyond [`RETURN_PART`]. Clients return late: they
/// add up to a quarter of the delay as jitter, and the request takes time.
const RETURN_TIME: Duration = Duration::from_millis(100);

/// End of a place whose connection is told to return after `time`.
fn place_end(now: Instant, time: Duration) -> Instant {
    now + time + time / RETURN_PART + RETURN_TIME
}

/// Memory of a request of whose body so many bytes have arrived.
fn request_bytes(body_bytes: usize) -> u64 {
    REQUEST_BYTES + REQUEST_BODY_COPIES * body_bytes as u64
}

/// Memory that a page of so many bytes takes in the arena. A small page takes far more than its
/// bytes.
fn arena_bytes(page_bytes: u64) -> u64 {
    page_bytes.next_multiple_of(SLOT_UNIT as u64)
}

/// Account of one connection. Charges keep it alive. Its drop, after the last charge, returns the
/// fixed charge of the connection.
pub(crate) struct Account {
    budget: Arc<Budget>,
    connection: u64,
    progress: Arc<Progress>,
    disconnect: CancellationToken,
    released: Notify,
    /// Bytes of requests that wait for another client, in [`Kind::Requests`].
    waiting_bytes: AtomicU64,
    /// Held by the oldest read that waits for `released`. The others queue behind it in FIFO order.
    first_waiter: tokio::sync::Mutex<()>,
}

impl Drop for Account {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        subtract(&mut state.used[Kind::Requests as usize], CONNECTION_BYTES);
        // No charge is left that could have used a part of it.
        subtract(&mut state.own_requests_left, OWN_REQUEST_BYTES);
        state.line.leave(self.connection);
        state.readers_order.end(self.connection);
        state.writers_order.remove(self.connection);
        if let Some(connection) = state.connections.remove(&self.connection) {
            state.tenants.leave(connection.tenant);
        }
    }
}

impl Account {
    pub(super) fn new(
        budget: Arc<Budget>,
        connection: u64,
        progress: Arc<Progress>,
        disconnect: CancellationToken,
    ) -> Account {
        let (released, waiting_bytes, first_waiter) = Default::default();
        Account { budget, connection, progress, disconnect, released, waiting_bytes, first_waiter }
    }

    pub(crate) fn connection(&self) -> u64 {
        self.connection
    }

    /// Moves the connection to its tenant. Must be called before the first charge for a page:
    /// earlier charges would be subtracted from the wrong tenant.
    pub(crate) fn set_tenant(&self, peer: Peer, tenant: &str) {
        let mut state = self.budget.state.lock();
        let tenant = state.tenants.join(peer, tenant);
        let Some(connection) = state.connections.get_mut(&self.connection) else { return };
        let before = std::mem::replace(&mut connection.tenant, tenant);
        state.tenants.leave(before);
    }

    /// Peer of the connection's tenant. Before the handshake, and after the end, that of local
    /// sockets.
    pub(crate) fn peer(&self) -> Peer {
        let state = self.budget.state.lock();
        let tenant = state.connections.get(&self.connection).map(|connection| connection.tenant);
        tenant.and_then(|tenant| state.tenants.peer(tenant)).unwrap_or_default()
    }

    /// Tenant of the connection. `None` if it has ended.
    pub(crate) fn tenant(&self) -> Option<TenantNumber> {
        self.budget.state.lock().connections.get(&self.connection).map(|connection| connection.tenant)
    }

    /// Records that the client's socket took bytes of its send queue. Any byte is progress: on a
    /// slow link the socket takes few at a time.
    pub(crate) fn record_progress(&self) {
        self.progress.reader.lock().record(now());
    }

    /// Records that the client's full socket was asked for progress, and had none to report.
    pub(crate) fn record_no_progress(&self) {
        self.progress.reader.lock().last_look = now();
    }

    /// Records bytes that the client sent for its puts.
    pub(crate) fn record_received(&self, bytes: usize) {
        self.progress.writer.lock().record(bytes as u64, now());
    }

    /// Resolves when the budget wants this connection closed, because its client receives nothing.
    pub(crate) async fn disconnect_requested(&self) {
        self.disconnect.cancelled().await;
    }

    /// Charges `bytes` if they fit into all bounds now. A refusal counts as demand, which reserves
    /// a share for the tenant's retry.
    pub(crate) fn charge(self: &Arc<Self>, kind: Kind, bytes: u64) -> Result<Charge, Busy> {
        let now = now();
        // One lock for check and charge: two concurrent requests must not both take the last bytes.
        let mut state = self.budget.state.lock();
        let overrun = match kind {
            // Without a look at the line, which can be long: no caller finds room.
            Kind::Puts if self.budget.is_full(&state, bytes) => Overrun { node: bytes, ..Overrun::default() },
            _ => self.budget.overrun(&mut state, self.connection, kind, bytes, now),
        };
        if race_point!("node.charge-after-unlock") {
            drop(state);
            state = self.budget.state.lock();
        }
        if overrun.max() == 0 {
            return Ok(self.grant(&mut state, kind, bytes, now));
        }
        state.record_demand(self.connection, kind, now);
        if kind == Kind::Puts
            && let Some(own) = state.connections.get_mut(&self.connection)
        {
            own.put_refused = true;
        }
        let retry_after = state.request_release_rate.time_for(now, overrun.max());
        let bound = match (overrun, state.connections.get(&self.connection)) {
            (Overrun { connection: 1.., .. }, _) => BusyBound::Connection,
            (Overrun { node: 1.., .. }, _) => BusyBound::Node,
            (_, Some(own)) => BusyBound::Tenant(own.tenant),
            (_, None) => BusyBound::Connection,
        };
        Err(Busy { retry_after, bound })
    }

    /// Charges requested bytes if the reader can be expected to receive them before `deadline`. A
    /// refusal suggests the time in which it receives the excess.
    pub(crate) fn charge_outstanding(self: &Arc<Self>, bytes: u64, deadline: Instant) -> Result<Charge, Busy> {
        let kind = Kind::Outstanding;
        let now = now();
        let mut state = self.budget.state.lock();
        state.read_rate.record(now, 0);
        let time = deadline.saturating_duration_since(now) / DEADLINE_FRACTION;
        let all = state.read_rate.bytes_in(time);
        let readers = state.readers;
        if let Some(own) = state.connections.get_mut(&self.connection) {
            own.read_rate.record(now, 0);
            let used = own.used[kind as usize];
            let readers = readers + u64::from(used == 0);
            // The node's rate is shared at once when a reader joins. Its own rate follows later.
            let share = all.map_or(u64::MAX, |all| all / readers.max(1));
            let in_time = own.read_rate.bytes_in(time).unwrap_or(u64::MAX).min(share);
            let max = in_time
                .max(OUTSTANDING_MIN)
                .min(self.budget.connection_max[kind as usize])
                .max(PAGES_IN_FLIGHT_MIN * bytes);
            if used > 0 && used + bytes > max {
                return Err(Busy::after(own.refused_reads.refuse(&own.read_rate, bytes, used + bytes - max, now)));
            }
        }
        Ok(self.grant(&mut state, kind, bytes, now))
    }

    /// Charges `bytes` if they fit and no read is queued. A failure leaves no trace: it neither
    /// reserves a share nor disconnects a stalled reader.
    pub(crate) fn try_charge(self: &Arc<Self>, kind: Kind, bytes: u64) -> Option<Charge> {
        let now = now();
        let bytes = if kind == Kind::Reads { arena_bytes(bytes) } else { bytes };
        let mut state = self.budget.state.lock();
        let fits = state.tenant_queue.is_empty()
            && self.budget.overrun(&mut state, self.connection, kind, bytes, now).max() == 0;
        fits.then(|| self.grant(&mut state, kind, bytes, now))
    }

    /// Charges bytes without any check. Takes the state to make check and charge one step.
    pub(super) fn grant(self: &Arc<Self>, state: &mut BudgetState, kind: Kind, bytes: u64, now: Instant) -> Charge {
        // A charge of 0 would look like no charge, and the reader count would drift.
        let bytes = bytes.max(1);
        state.add(self.connection, kind, bytes, now);
        let counts_for_rate = kind != Kind::Outstanding;
        Charge { account: self.clone(), kind, bytes, since: now, queued: false, counts_for_rate }
    }

    /// Waits for memory to read and send `bytes`: first until this client has received enough of
    /// its send queue, then for the node. Reads of one connection are granted in FIFO order,
    /// whatever their sizes.
    pub(crate) async fn charge_read(self: &Arc<Self>, bytes: u64) -> Charge {
        let bytes = arena_bytes(bytes);
        loop {
            let mut grant = match self.wait_for_reader(bytes).await {
                Ok(charge) => return charge,
                Err(grant) => grant,
            };
            self.budget.serve_queue();
            loop {
                match tokio::time::timeout(STALLED_AFTER, &mut grant).await {
                    Ok(Ok(charge)) => return charge,
                    // The connection is over its own bound again.
                    Ok(Err(_)) => break,
                    // Nothing was released for so long that a reader may count as stalled now.
                    Err(_) => self.budget.serve_queue(),
                }
            }
        }
    }

    /// Waits until `bytes` fit into the connection's own bound. Returns the charge if they also fit
    /// into the node, and otherwise the receiver of a queued read.
    async fn wait_for_reader(self: &Arc<Self>, bytes: u64) -> Result<Charge, oneshot::Receiver<Charge>> {
        // Only the first waiter listens, so a release wakes one task and not thousands.
        let _first = self.first_waiter.lock().await;
        loop {
            let mut released = std::pin::pin!(self.released.notified());
            // Registered before the check, so that a release in between is not lost.
            released.as_mut().enable();
            {
                let now = now();
                let mut state = self.budget.state.lock();
                let overrun = self.budget.overrun(&mut state, self.connection, Kind::Reads, bytes, now);
                if overrun.max() == 0 && state.tenant_queue.is_empty() {
                    return Ok(self.grant(&mut state, Kind::Reads, bytes, now));
                }
                if overrun.connection == 0 {
                    let (grant, receiver) = oneshot::channel();
                    state.enqueue(self, bytes, grant, now);
                    return Err(receiver);
                }
                // Stalled readers may hold most of the memory. They lower the bound of this one
                // then, and no read would ever queue behind them.
                self.budget.relieve_reads(&mut state, self.connection, now);
            }
            released.await;
        }
    }

    /// Gives the connection a place in the line for `bytes`, after a refusal of puts. Returns the
    /// delay after which it finds room. In a full line it queues for a place, and the delay is the
    /// time for that. `page_bytes` are those that a page takes in the arena.
    ///
    /// A connection at its own bound gets no place: no other connection can take its room. It is
    /// told the time until its own puts end.
    pub(crate) fn wait_in_line(&self, bytes: u64, page_bytes: u64) -> Busy {
        let kind = Kind::Puts;
        let now = now();
        let mut guard = self.budget.state.lock();
        let state = &mut *guard;
        let Some(connection) = state.connections.get_mut(&self.connection) else {
            return Busy::after(PUT_RETRY_MAX);
        };
        let tenant = connection.tenant;
        let refused_by_tiers = !std::mem::take(&mut connection.put_refused);
        let served = connection.served.take().filter(|_| refused_by_tiers);
        let connection_max = self.budget.connection_max[kind as usize];
        state.tenants.expire(now);
        let own = self.budget.overrun_behind(Ahead::default(), state, self.connection, kind, page_bytes);
        if own.connection > 0 {
            state.line.leave(self.connection);
            let time = state.time_for_own_room(self.connection, own.connection, now);
            return Busy::after(time.clamp(PUT_RETRY_MIN, PUT_RETRY_MAX));
        }
        let share = state.tenants.share(tenant, kind, self.budget.node_max[kind as usize]);
        // More cannot be granted at once, and would hold room of others.
        let bytes = bytes.min(connection_max).min(share).max(page_bytes);
        // A newcomer may be gone by then. One that has returned will return again.
        let has_returned = state.line.has_waiting(self.connection);
        // Looks at the line last, because it may be long.
        let overrun = match own.max() {
            0 => self.budget.overrun(state, self.connection, kind, page_bytes, now),
            _ => own,
        };
        state.line.expire(now);
        state.line.enter(self.connection, (tenant, bytes), served, now);
        let time = match overrun.max() == 0 {
            true if refused_by_tiers => NO_ROOM_RETRY.max(state.line.waited(self.connection, now)),
            // The room became free since the refusal.
            true => PUT_RETRY_MIN,
            false => {
                let time = self.time_for_room(state, tenant, (bytes, page_bytes), now);
                // A caller that only its tenant's share refuses needs no place.
                let for_place = state.line.time_for_place(self.connection, time).filter(|_| overrun.node > 0);
                let time = for_place.unwrap_or(time).max(PUT_RETRY_MIN);
                // An estimate that failed before is too short: writers differ. The time so far
                // bounds the number of returns.
                time.max(state.line.misjudged(self.connection, now) / WAITED_PART)
            }
        };
        let time = if fail_point!("node.time-told-too-short") { PUT_RETRY_MIN } else { time };
        let told = time.min(PUT_RETRY_MAX);
        let holds_until = place_end(now, told);
        if told < time && !has_returned {
            // Most clients give up before. Their places would hold room in vain.
            state.line.queue_instead(self.connection, now);
        } else {
            state.tenants.record_demand(tenant, kind, holds_until);
        }
        state.line.keep_until(self.connection, (now + told, holds_until), told == time, now);
        Busy::after(told)
    }

    /// Time until this connection, which waits in the line for `bytes`, finds room for them.
    fn time_for_room(
        &self,
        state: &mut BudgetState,
        tenant: TenantNumber,
        (bytes, page_bytes): (u64, u64),
        now: Instant,
    ) -> Duration {
        let max = self.budget.node_max[Kind::Puts as usize];
        let share = state.tenants.share(tenant, Kind::Puts, max);
        // With the place: those behind it do not count.
        let ahead = state.line.promised((self.connection, tenant), &state.tenants, max, (now, None));
        let before_in_node = ahead.expected_before(RoomOf::Node, bytes, max, now);
        let before_in_tenant = ahead.expected_before(RoomOf::Tenant, bytes, share, now);
        let overrun = self.budget.overrun_behind(ahead.bytes(), state, self.connection, Kind::Puts, bytes);
        let mut time = PUT_RETRY_MIN;
        for (scope, room, excess, before) in [
            (Scope::Node, max, overrun.node, before_in_node),
            (Scope::Tenant(tenant), share, overrun.tenant, before_in_tenant),
        ] {
            if excess == 0 {
                continue;
            }
            let forecast = self.budget.forecast(state, scope, now);
            let whole_pages = (room / page_bytes.max(1) * page_bytes).max(page_bytes);
            time = time.max(forecast.time_for(excess, whole_pages));
            // Room that is free already stays promised to connections ahead until they return.
            if let Some(before) = before {
                let left = before.saturating_duration_since(now);
                // They return later than told. Half a turn of that counts at most, or the times
                // would grow exponentially with the length of the line.
                let late = (left / RETURN_PART).min(forecast.turn / 2);
                time = time.max(left + late + forecast.turn);
            }
        }
        time
    }

    /// Returns the writers that may lose reservations, so that this one finds room for `bytes`: the
    /// silent ones, or else those of tenants above their share. A tenant at its share takes room of
    /// its own writers only.
    pub(crate) fn losing_writers(&self, bytes: u64) -> Vec<LosingWriter> {
        let now = now();
        let mut guard = self.budget.state.lock();
        let state = &mut *guard;
        state.tenants.expire(now);
        let max = self.budget.node_max[Kind::Puts as usize];
        let may_take_excess = state.may_take_excess(self.connection, now) && state.tenants.is_any_above_share(max);
        // Both lists would be empty. Found without a look at the line, which may be long.
        if !may_take_excess && !state.may_have_silent_writer(now) {
            return Vec::new();
        }
        let overrun = self.budget.overrun(state, self.connection, Kind::Puts, bytes, now);
        if overrun.connection > 0 || overrun.max() == 0 {
            return Vec::new();
        }
        let tenant = state.connections.get(&self.connection).map(|connection| connection.tenant);
        let silent = state.silent_writers(self.connection, tenant.filter(|_| overrun.tenant > 0), now);
        if !silent.is_empty() || overrun.tenant > 0 {
            return silent;
        }
        state.excess_writers(self.connection, (overrun.node, max), now)
    }

    /// Returns `true` while this connection lacks room for `bytes` and `writer` may lose more.
    pub(crate) fn takes_from(&self, writer: LosingWriter, bytes: u64) -> bool {
        let now = now();
        let mut guard = self.budget.state.lock();
        let state = &mut *guard;
        if self.budget.overrun(state, self.connection, Kind::Puts, bytes, now).max() == 0 {
            return false;
        }
        let tenant = state.connections.get(&writer.connection).map(|connection| connection.tenant);
        let max = self.budget.node_max[Kind::Puts as usize];
        writer.is_silent || tenant.is_some_and(|tenant| state.tenants.excess(tenant, max) > 0)
    }

    /// Charges a request of whose body `body_bytes` will be in memory. A `mandatory` request always
    /// passes.
    pub(crate) fn charge_request(self: &Arc<Self>, body_bytes: usize, mandatory: bool) -> Result<Charge, Busy> {
        self.charge_or_force(request_bytes(body_bytes), mandatory)
    }

    /// Raises the charge of a request to that of a body with more bytes in memory. On a refusal the
    /// charge stays as it is.
    pub(crate) fn grow_request(
        self: &Arc<Self>,
        charge: &mut Charge,
        body_bytes: usize,
        mandatory: bool,
    ) -> Result<(), Busy> {
        let bytes = request_bytes(body_bytes);
        if bytes > charge.bytes {
            charge.absorb(self.charge_or_force(bytes - charge.bytes, mandatory)?);
        }
        Ok(())
    }

    fn charge_or_force(self: &Arc<Self>, bytes: u64, mandatory: bool) -> Result<Charge, Busy> {
        match mandatory {
            true => Ok(self.charge_unchecked(Kind::Requests, bytes)),
            false => self.charge(Kind::Requests, bytes),
        }
    }

    /// Charges bytes that exist already, beyond the bound if need be.
    pub(crate) fn charge_unchecked(self: &Arc<Self>, kind: Kind, bytes: u64) -> Charge {
        self.grant(&mut self.budget.state.lock(), kind, bytes, now())
    }

    /// Counts a request that only waits for another client: its bytes keep the connection from
    /// being idle no longer. The request ends the wait before it goes on.
    pub(crate) fn wait_for_others(&self, bytes: u64) -> WaitingForOthers<'_> {
        // Relaxed: a late value only delays the end of an idle connection.
        self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        WaitingForOthers { account: self, bytes }
    }

    /// Returns `true` if nothing of the connection is in flight, except requests that wait for
    /// other clients.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.budget.state.lock();
        let Some(connection) = state.connections.get(&self.connection) else { return true };
        let waiting = self.waiting_bytes.load(Ordering::Relaxed);
        let idle = |kind: Kind| if kind == Kind::Requests { waiting } else { 0 };
        KINDS.iter().all(|&(kind, _)| connection.used[kind as usize] <= idle(kind))
    }

    #[cfg(test)]
    pub(super) fn is_disconnecting(&self) -> bool {
        self.disconnect.is_cancelled()
    }
}

/// Wait of a request for another client. See [`Account::wait_for_others`].
pub(crate) struct WaitingForOthers<'a> {
    account: &'a Account,
    bytes: u64,
}

impl Drop for WaitingForOthers<'_> {
    fn drop(&mut self) {
        self.account.waiting_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes in flight. Dropping the charge returns them and wakes waiting reads.
///
/// Must not be dropped while the budget's lock is held: the drop takes that lock.
pub(crate) struct Charge {
    account: Arc<Account>,
    kind: Kind,
    bytes: u64,
    since: Instant,
    queued: bool,
    /// True if its release is a sample of the release rate, of the reader's rate, or of the time
    /// that a put takes.
    counts_for_rate: bool,
}

impl Charge {
    /// Returns the number of the connection that the bytes belong to.
    pub(crate) fn connection(&self) -> u64 {
        self.account.connection
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of work that did not happen. They are no sample of any rate.
    pub(crate) fn release_unused(mut self) {
        self.counts_for_rate = false;
    }

    /// Takes over the bytes of another charge of the same connection and kind.
    fn absorb(&mut self, mut other: Charge) {
        debug_assert!(self.kind == other.kind && self.kind == Kind::Requests && !self.queued && !other.queued);
        self.bytes += other.bytes;
        // Its drop then returns nothing.
        other.bytes = 0;
    }

    /// Returns the bytes beyond the first `bytes`. Does nothing if the charge is smaller already.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let returned = self.bytes.saturating_sub(bytes.max(1));
        self.bytes -= returned;
        self.account.budget.state.lock().remove(self.account.connection, self.kind, returned);
    }

    /// Returns outstanding bytes that the client received.
    pub(crate) fn release_sent(mut self) {
        self.counts_for_rate = true;
    }

    /// Records that the bytes are in the send queue, so that only the client delays them.
    pub(crate) fn mark_queued(&mut self) {
        let mut reader = self.account.progress.reader.lock();
        if reader.queued == 0 {
            reader.record(now());
        }
        reader.queued += self.bytes;
        self.queued = true;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if fail_point!("node.read-charge-leaks") && self.kind == Kind::Reads {
            return;
        }
        if self.bytes == 0 {
            // Another charge has absorbed this one.
            return;
        }
        let budget = &self.account.budget;
        let connection = self.account.connection;
        let now = now();
        if self.queued {
            let mut reader = self.account.progress.reader.lock();
            subtract(&mut reader.queued, self.bytes);
            reader.record(now);
        }
        let mut state = budget.state.lock();
        match self.kind {
            Kind::Requests if self.counts_for_rate => state.request_release_rate.record(now, self.bytes),
            Kind::Puts if self.counts_for_rate => {
                state.put_time.record(now.saturating_duration_since(self.since), now);
                state.written_puts.record(self.bytes, budget.writes.begun_bytes());
            }
            Kind::Outstanding => {
                let received = if self.counts_for_rate { self.bytes } else { 0 };
                if let Some(connection) = state.connections.get_mut(&connection) {
                    connection.read_rate.record(now, received);
                }
                state.read_rate.record(now, received);
            }
            Kind::Puts | Kind::Reads | Kind::Requests => {}
        }
        state.remove(connection, self.kind, self.bytes);
        let reads_wait = self.kind == Kind::Reads && !state.tenant_queue.is_empty();
        drop(state);
        // Both wake tasks that take the lock, so they come after it.
        if self.kind == Kind::Reads {
            self.account.released.notify_waiters();
        }
        if reads_wait {
            budget.serve_queue();
        }
    }
}
