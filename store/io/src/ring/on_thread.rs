//! The executor without glommio: one loop that submits, sleeps in the kernel, completes requests
//! and polls tasks.
//!
//! Invariants:
//! - Ready foreground tasks are polled before all others.
//! - Requests make progress between any two rounds of tasks.

use super::executor::{Ready, RingCore};
use super::options::Executor;
use crate::device::TaskClass;

/// Once in this many rounds, an idle task is polled before background tasks.
const IDLE_ROUND: usize = 4;

pub(super) fn run(core: &RingCore, ready: &Ready) {
    let _ = ready.send(Ok(core.capabilities(Executor::Thread)));
    let mut rounds = 0usize;
    loop {
        core.run_once();
        rounds = rounds.wrapping_add(1);
        poll(core, rounds);
        if core.is_done() {
            return;
        }
        if let Err(error) = core.wait() {
            // Requests with the kernel keep their memory (see `InFlightTable`). Their callers run
            // into their own deadlines.
            tracing::error!(%error, "io_uring of the device failed; the device stops");
            return;
        }
    }
}

/// Polls the foreground tasks that are ready now, then one task of another class.
fn poll(core: &RingCore, round: usize) {
    // Counted once: a task that wakes itself must not keep the ring from its requests.
    for _ in 0..core.tasks.queues().ready(TaskClass::Foreground) {
        core.tasks.poll_one(TaskClass::Foreground);
    }
    let order = match round.is_multiple_of(IDLE_ROUND) {
        true => [TaskClass::Idle, TaskClass::Background],
        false => [TaskClass::Background, TaskClass::Idle],
    };
    let _ = order.into_iter().any(|class| core.tasks.poll_one(class));
}
