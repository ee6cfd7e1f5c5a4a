//! Budget of one connection: its charges, and the wait for read memory.

use super::{
    Budget, BudgetState, Busy, CONNECTION_BYTES, DEADLINE_FRACTION, Kind, OUTSTANDING_MIN, PAGES_IN_FLIGHT_MIN,
    REQUEST_BODY_COPIES, REQUEST_BYTES, STALLED_AFTER, subtract,
};
use larder_runtime::{fail_point, now};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

/// Account of one connection. Charges keep it alive. Its drop, after the last charge, returns the
/// fixed charge of the connection.
pub(crate) struct Account {
    budget: Arc<Budget>,
    connection: u64,
    disconnect: CancellationToken,
    released: Notify,
    /// Held by the oldest read that waits for `released`. The others queue behind it in FIFO order.
    first_waiter: tokio::sync::Mutex<()>,
}

impl Drop for Account {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        subtract(&mut state.used[Kind::Requests as usize], CONNECTION_BYTES);
        if let Some(connection) = state.connections.remove(&self.connection) {
            state.leave_tenant(&connection.tenant);
        }
    }
}

impl Account {
    pub(super) fn new(budget: Arc<Budget>, connection: u64, disconnect: CancellationToken) -> Account {
        Account { budget, connection, disconnect, released: Notify::new(), first_waiter: Default::default() }
    }

    pub(super) fn connection(&self) -> u64 {
        self.connection
    }

    /// Moves the connection to its tenant. Must be called before the first charge for a page:
    /// earlier charges would be subtracted from the wrong tenant.
    pub(crate) fn set_tenant(&self, tenant: &str) {
        let mut state = self.budget.state.lock();
        let tenant: Arc<str> = tenant.into();
        let Some(connection) = state.connections.get_mut(&self.connection) else { return };
        let before = std::mem::replace(&mut connection.tenant, tenant.clone());
        state.tenants.entry(tenant).or_default().connections += 1;
        state.leave_tenant(&before);
    }

    /// Records that the client's socket took bytes of its send queue. Any byte is progress: on a
    /// slow link the socket takes few at a time.
    pub(crate) fn record_progress(&self) {
        let mut state = self.budget.state.lock();
        if let Some(connection) = state.connections.get_mut(&self.connection) {
            connection.last_progress = now();
        }
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
        let overrun = self.budget.overrun(&state, self.connection, kind, bytes, now).max();
        if overrun == 0 {
            return Ok(self.grant(&mut state, kind, bytes, now));
        }
        state.record_demand(self.connection, kind, now);
        Err(Busy { retry_after: state.release_rates[kind as usize].time_for(now, overrun) })
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
                return Err(Busy { retry_after: own.read_rate.time_for(used + bytes - max) });
            }
        }
        Ok(self.grant(&mut state, kind, bytes, now))
    }

    /// Charges `bytes` if they fit and no read is queued. A failure leaves no trace: it neither
    /// reserves a share nor disconnects a stalled reader.
    pub(crate) fn try_charge(self: &Arc<Self>, kind: Kind, bytes: u64) -> Option<Charge> {
        let now = now();
        let mut state = self.budget.state.lock();
        let fits =
            state.tenant_queue.is_empty() && self.budget.overrun(&state, self.connection, kind, bytes, now).max() == 0;
        fits.then(|| self.grant(&mut state, kind, bytes, now))
    }

    /// Charges bytes without any check. Takes the state to make check and charge one step.
    pub(super) fn grant(self: &Arc<Self>, state: &mut BudgetState, kind: Kind, bytes: u64, now: Instant) -> Charge {
        // A charge of 0 would look like no charge, and the reader count would drift.
        let bytes = bytes.max(1);
        state.add(self.connection, kind, bytes, now);
        Charge { account: self.clone(), kind, bytes, queued: false, counts_for_rate: kind != Kind::Outstanding }
    }

    /// Waits for memory to read and send `bytes`: first until this client has received enough of
    /// its send queue, then for the node. Reads of one connection are granted in FIFO order,
    /// whatever their sizes.
    pub(crate) async fn charge_read(self: &Arc<Self>, bytes: u64) -> Charge {
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
                let overrun = self.budget.overrun(&state, self.connection, Kind::Reads, bytes, now);
                if overrun.max() == 0 && state.tenant_queue.is_empty() {
                    return Ok(self.grant(&mut state, Kind::Reads, bytes, now));
                }
                if overrun.connection == 0 {
                    let (grant, receiver) = oneshot::channel();
                    state.enqueue(self, bytes, grant, now);
                    return Err(receiver);
                }
            }
            released.await;
        }
    }

    pub(crate) fn retry_after(&self, kind: Kind, bytes: u64) -> Busy {
        let mut state = self.budget.state.lock();
        Busy { retry_after: state.release_rates[kind as usize].time_for(now(), bytes) }
    }

    /// Charges a request with a body of `body_bytes`. A `mandatory` request always passes.
    pub(crate) fn charge_request(self: &Arc<Self>, body_bytes: u32, mandatory: bool) -> Result<Charge, Busy> {
        let bytes = REQUEST_BYTES + REQUEST_BODY_COPIES * u64::from(body_bytes);
        if !mandatory {
            return self.charge(Kind::Requests, bytes);
        }
        Ok(self.charge_unchecked(Kind::Requests, bytes))
    }

    /// Charges bytes that exist already, beyond the bound if need be.
    pub(crate) fn charge_unchecked(self: &Arc<Self>, kind: Kind, bytes: u64) -> Charge {
        self.grant(&mut self.budget.state.lock(), kind, bytes, now())
    }

    #[cfg(test)]
    pub(super) fn is_disconnecting(&self) -> bool {
        self.disconnect.is_cancelled()
    }
}

/// Bytes in flight. Dropping the charge returns them and wakes waiting reads.
///
/// Must not be dropped while the budget's lock is held: the drop takes that lock.
pub(crate) struct Charge {
    account: Arc<Account>,
    kind: Kind,
    bytes: u64,
    queued: bool,
    /// True if its release is a sample of the release rate, or of the reader's rate.
    counts_for_rate: bool,
}

impl Charge {
    /// Returns the bytes of work that did not happen. They are no sample of any rate.
    pub(crate) fn release_unused(mut self) {
        self.counts_for_rate = false;
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
        let mut state = self.account.budget.state.lock();
        let Some(connection) = state.connections.get_mut(&self.account.connection) else { return };
        if connection.queued == 0 {
            connection.last_progress = now();
        }
        connection.queued += self.bytes;
        self.queued = true;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if fail_point!("node.read-charge-leaks") && self.kind == Kind::Reads {
            return;
        }
        let budget = &self.account.budget;
        let connection = self.account.connection;
        let now = now();
        let mut state = budget.state.lock();
        if self.counts_for_rate {
            state.release_rates[self.kind as usize].record(now, self.bytes);
        }
        if let Some(connection) = state.connections.get_mut(&connection) {
            if self.queued {
                subtract(&mut connection.queued, self.bytes);
                connection.last_progress = now;
            }
            if self.kind == Kind::Outstanding {
                let received = if self.counts_for_rate { self.bytes } else { 0 };
                connection.read_rate.record(now, received);
                state.read_rate.record(now, received);
            }
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
