//! The executor without glommio: one loop that submits, sleeps in the kernel, answers, and polls tasks.
//!
//! Always true: foreground tasks that are ready are polled before all others, and requests go on between two polls of any.

use super::executor::{Device, Executor, Ready};
use super::tasks::Share;

/// Every this many rounds an idle task goes before background tasks.
const IDLE_ROUND: usize = 4;

pub(super) fn run(device: &Device, ready: &Ready) {
    let _ = ready.send(Ok(device.facts(Executor::Thread)));
    let mut rounds = 0usize;
    loop {
        device.round();
        rounds = rounds.wrapping_add(1);
        poll(device, rounds);
        if device.is_done() {
            return;
        }
        if let Err(error) = device.wait() {
            // The requests with the kernel keep their memory (see `Table`); their askers meet their deadlines.
            tracing::error!(%error, "device ring failed and stops");
            return;
        }
    }
}

/// The foreground tasks that are ready now, then one of another share.
fn poll(device: &Device, round: usize) {
    for _ in 0..device.tasks.queues().ready(Share::Foreground) {
        device.tasks.poll_one(Share::Foreground);
    }
    let order = match round.is_multiple_of(IDLE_ROUND) {
        true => [Share::Idle, Share::Background],
        false => [Share::Background, Share::Idle],
    };
    let _ = order.into_iter().any(|share| device.tasks.poll_one(share));
}
