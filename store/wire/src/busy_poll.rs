//! Adaptive busy polling: spinning on a socket for its next message before sleeping.
//!
//! A sleeping thread on an idle virtual machine resumes some 30 µs after bytes arrive. A round trip
//! pays that twice, while 64 KiB move in less. So a reader polls its socket for a while before it
//! sleeps, as Seastar (`--idle-poll-time-us`) and glommio (`spin_before_park`) do.
//!
//! The policy spins only where it pays off:
//! - the last message arrived soon,
//! - no other thread waits for this processor,
//! - a spin in vain is followed by an exponentially growing number of waits without spinning.
//!
//! It applies to TCP only. Peers that share memory run on one machine, where a spinning client
//! would take the processor from its node.

use crate::stream::{ByteSource, TryReceive};
use std::io::{self, IoSliceMut};
use std::time::{Duration, Instant};

/// Default limit of one spin: about a round trip between two peers that sleep.
pub const DEFAULT_BUSY_POLL: Duration = Duration::from_micros(200);
/// A yield to other threads that takes longer than this ran one of them: the processor is needed
/// elsewhere.
const CONTENDED_YIELD: Duration = Duration::from_micros(20);
/// Waits without spinning after the first spin in vain. Doubles with each further one, so a quiet
/// connection costs almost no processor time.
const BACKOFF_MIN: u32 = 4;
/// Maximum number of waits without spinning after a spin in vain. A connection that becomes busy
/// again spins after at most so many messages.
const BACKOFF_MAX: u32 = 1024;

/// A byte source that spins for its next message if the message is likely to arrive soon. Spinning
/// saves the wake-up of a sleeping thread.
#[derive(Debug)]
pub struct BusyPollSource<R> {
    socket: R,
    policy: PollPolicy,
}

impl<R> BusyPollSource<R> {
    /// Wraps a socket. One spin lasts at most `limit`; zero disables spinning. The first wait
    /// spins, because nothing is known of the peer yet.
    pub fn new(socket: R, limit: Duration) -> Self {
        Self { socket, policy: PollPolicy::new(limit, CONTENDED_YIELD) }
    }
}

// The policy measures the machine it runs on, so it reads the real clock. Simulated streams do not
// spin.
#[expect(clippy::disallowed_methods, reason = "a spin is bounded in real time")]
impl<R: ByteSource + TryReceive> ByteSource for BusyPollSource<R> {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.socket.receive(into).await
    }

    async fn receive_next(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let begin = Instant::now();
        if self.policy.should_spin() {
            let mut polls = 0;
            loop {
                if let Some(received) = self.socket.try_receive(into) {
                    self.policy.received_spinning(begin.elapsed(), polls);
                    return received;
                }
                polls += 1;
                // This thread's own tasks run first: one of them may be about to send the request
                // whose response this spin waits for.
                tokio::task::yield_now().await;
                let before_yield = begin.elapsed();
                if before_yield < self.policy.limit {
                    std::thread::yield_now();
                    if begin.elapsed() - before_yield < self.policy.contended_yield {
                        continue;
                    }
                }
                self.policy.spun_in_vain();
                break;
            }
        }
        let received = self.socket.receive(into).await;
        self.policy.received_sleeping(begin.elapsed());
        received
    }
}

/// Decides from past waits whether the next one spins. It spins after a short wait, and backs off
/// after each spin in vain.
#[derive(Debug)]
struct PollPolicy {
    limit: Duration,
    contended_yield: Duration,
    last_wait: Duration,
    backoff_left: u32,
    /// Number of waits without spinning after the last spin in vain. 0: the last spin was not in
    /// vain.
    backoff: u32,
}

impl PollPolicy {
    fn new(limit: Duration, contended_yield: Duration) -> Self {
        Self { limit, contended_yield, last_wait: Duration::ZERO, backoff_left: 0, backoff: 0 }
    }

    /// Begins a wait. Returns `true` if it should spin.
    fn should_spin(&mut self) -> bool {
        let backed_off = self.backoff_left > 0;
        if backed_off {
            self.backoff_left -= 1;
        }
        // Until the wait ends it counts as long. The caller may cancel it, which then reads as "not
        // soon".
        let last_wait = std::mem::replace(&mut self.last_wait, self.limit);
        !backed_off && last_wait < self.limit
    }

    fn received_sleeping(&mut self, wait: Duration) {
        self.last_wait = wait;
    }

    /// A message that the first poll found would have been found without spinning. So it does not
    /// reset the backoff.
    fn received_spinning(&mut self, wait: Duration, failed_polls: u32) {
        self.last_wait = wait;
        if failed_polls > 0 {
            self.backoff = 0;
        }
    }

    fn spun_in_vain(&mut self) {
        self.backoff = (2 * self.backoff).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.backoff_left = self.backoff;
    }
}

#[cfg(test)]
mod tests;
