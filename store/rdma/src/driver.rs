//! The task that drives a connection: it processes completions, notices stalls and shuts the
//! connection down.
//!
//! Invariants:
//! - The task sleeps when there is nothing to do.
//! - No completion is missed between the last poll and the sleep.
//! - However the task ends, the queue pair is destroyed.

use crate::blocking;
use crate::connection::{Connection, Phase};
use crate::error::DisconnectReason;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, sleep_until};

/// Maximum time to flush requests of a dead connection. After that, the queue pair is destroyed
/// with requests in it.
const DRAIN_MAX: Duration = Duration::from_secs(1);
const DRAIN_STEP: Duration = Duration::from_millis(1);

/// The descriptor on which completion events arrive. It belongs to the connection, which is kept
/// with it.
pub(crate) struct CompletionEvents(Arc<Connection>);

impl AsRawFd for CompletionEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for CompletionEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.pair.completions.event_fd()
    }
}

/// Destroys the queue pair if the task is dropped before it did, as when the runtime shuts down.
struct Guard(Arc<Connection>);

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.0.is_ended() {
            self.0.retire(DisconnectReason::Runtime);
            self.0.destroy();
        }
    }
}

/// Registers the descriptor. This happens before the task starts, so that the caller of
/// `Endpoint::new` sees an error.
pub(crate) fn completion_events(connection: &Arc<Connection>) -> std::io::Result<AsyncFd<CompletionEvents>> {
    // SAFETY: the descriptor stays open and unchanged while the connection, which is kept with it,
    // lives.
    let registered =
        unsafe { AsyncFd::register_with_interest(CompletionEvents(connection.clone()), Interest::READABLE) };
    Ok(registered?)
}

pub(crate) async fn drive(connection: Arc<Connection>, completion_events: AsyncFd<CompletionEvents>) {
    let guard = Guard(connection.clone());
    while !is_dead(&connection) {
        if let Err(error) = run_once(&connection, &completion_events).await {
            connection.retire(error);
        }
    }
    drop(completion_events);
    shut_down(&connection).await;
    drop(guard);
}

fn is_dead(connection: &Connection) -> bool {
    matches!(connection.phase(), Phase::Dead(_))
}

/// Processes completions, then sleeps until there are more, the connection has stalled, or the
/// task is woken.
async fn run_once(
    connection: &Arc<Connection>,
    completion_events: &AsyncFd<CompletionEvents>,
) -> Result<(), DisconnectReason> {
    let spin_end = Instant::now() + connection.options.spin;
    loop {
        if connection.poll() > 0 {
            // The completions may have woken other tasks of this thread. They go first.
            tokio::task::yield_now().await;
            return Ok(());
        }
        if connection.options.spin.is_zero() || connection.is_idle() || Instant::now() >= spin_end {
            break;
        }
        tokio::task::yield_now().await;
    }
    // A completion before the queue was armed raises no event. Polling once more after arming
    // closes that race.
    connection.pair.completions.arm().map_err(|error| error.into_reason())?;
    if connection.poll() > 0 {
        return Ok(());
    }
    let stalled_at = connection.stalled_at();
    tokio::select! {
        // A random order of polling would keep simulations from replaying.
        biased;
        ready = completion_events.readable() => {
            let mut ready = ready.map_err(|_| DisconnectReason::Runtime)?;
            // The flag is cleared before the events are read. An event in between sets it again;
            // the other order would lose it.
            ready.clear_ready();
            connection.pair.completions.take_events();
        }
        () = connection.wake.notified() => {}
        () = sleep_until(stalled_at.unwrap_or_else(Instant::now)), if stalled_at.is_some() => {
            // A completion may have arrived just now, or another task has posted after an idle
            // time.
            let is_stalled = || connection.stalled_at().is_some_and(|at| at <= Instant::now());
            if connection.poll() == 0 && is_stalled() {
                return Err(DisconnectReason::Deadline);
            }
        }
    }
    Ok(())
}

/// Flushes the requests with the device, so that their memory returns soon, and destroys the queue
/// pair.
async fn shut_down(connection: &Arc<Connection>) {
    let begin = Instant::now();
    let pair = connection.clone();
    let failed = blocking(move || {
        // In the error state, the device completes all requests with a flush error instead of
        // retrying them until their timers expire.
        let to = ibverbs_sys::ibv_qp_attr { qp_state: ibverbs_sys::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        pair.pair.modify(to, ibverbs_sys::ibv_qp_attr_mask(0))
    });
    if let Ok(Err(error)) = failed.await {
        tracing::debug!(%error, "the requests of a dead queue pair could not be flushed");
    }
    while !connection.is_idle() && begin.elapsed() < DRAIN_MAX {
        if connection.poll() == 0 {
            sleep(DRAIN_STEP).await;
        }
    }
    let ended = connection.clone();
    if blocking(move || ended.destroy()).await.is_err() {
        tracing::debug!("the runtime shut down before an RDMA connection");
    }
}
