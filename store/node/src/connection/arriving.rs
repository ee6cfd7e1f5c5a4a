//! Bodies of requests that are arriving, and the end of those that stall while others need memory.
//!
//! A body is charged as it arrives, and a client that stalls keeps the charge. So when the node
//! refuses a request for lack of memory, it disconnects the clients whose bodies arrive more slowly
//! than [`BYTES_PER_SECOND_MIN`].
//!
//! Small bodies are not tracked: they hold little, and arrive in one piece.

use larder_runtime::now;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Minimum pace while others need the memory: half of the rate that requests are promised to pass
/// at, because bytes of a slow link arrive in lumps.
const BYTES_PER_SECOND_MIN: u64 = 32 << 10;
/// Time over which the pace is measured, at least.
const WINDOW: Duration = Duration::from_secs(1);
/// Minimum time between two searches. Each looks at all tracked bodies.
const SEARCH_PAUSE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(crate) struct ArrivingBodies(Mutex<Table>);

#[derive(Default)]
struct Table {
    bodies: BTreeMap<u64, Body>,
    next_number: u64,
    last_search: Option<Instant>,
}

struct Body {
    /// Bytes that the connection has received.
    received: Arc<AtomicU64>,
    /// Their number at the last look that found the pace good.
    seen: u64,
    seen_at: Instant,
    disconnect: CancellationToken,
}

/// A body that arrives. Dropping it ends its tracking.
pub(crate) struct ArrivingBody<'a> {
    bodies: &'a ArrivingBodies,
    number: u64,
    disconnect: CancellationToken,
}

impl ArrivingBodies {
    /// Tracks a body on a connection that counts its bytes in `received`.
    pub(crate) fn track(&self, received: Arc<AtomicU64>) -> ArrivingBody<'_> {
        let disconnect = CancellationToken::new();
        // Relaxed: the counter orders nothing, and an old value only favours the client.
        let seen = received.load(Ordering::Relaxed);
        let mut table = self.0.lock();
        let number = table.next_number;
        table.next_number += 1;
        table.bodies.insert(number, Body { received, seen, seen_at: now(), disconnect: disconnect.clone() });
        ArrivingBody { bodies: self, number, disconnect }
    }

    /// Disconnects the clients whose bodies stall. Returns their number.
    pub(crate) fn end_stalled(&self) -> u64 {
        let now = now();
        let mut table = self.0.lock();
        if table.last_search.is_some_and(|last| now.saturating_duration_since(last) < SEARCH_PAUSE) {
            return 0;
        }
        table.last_search = Some(now);
        let mut ended = 0;
        for body in table.bodies.values_mut().filter(|body| !body.disconnect.is_cancelled()) {
            let time = now.saturating_duration_since(body.seen_at);
            if time < WINDOW {
                continue;
            }
            // Relaxed: as in `track`.
            let received = body.received.load(Ordering::Relaxed);
            if (received - body.seen) as f64 >= BYTES_PER_SECOND_MIN as f64 * time.as_secs_f64() {
                (body.seen, body.seen_at) = (received, now);
            } else {
                body.disconnect.cancel();
                ended += 1;
            }
        }
        ended
    }
}

impl ArrivingBody<'_> {
    /// Resolves when the client must be disconnected.
    pub(crate) async fn stalled(&self) {
        self.disconnect.cancelled().await;
    }
}

impl Drop for ArrivingBody<'_> {
    fn drop(&mut self) {
        self.bodies.0.lock().bodies.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stalled_body_ends_and_one_that_arrives_stays() {
        let bodies = ArrivingBodies::default();
        let [stalls, trickles, arrives] = [(); 3].map(|()| Arc::new(AtomicU64::new(1 << 20)));
        let tracked = [&stalls, &trickles, &arrives].map(|received| bodies.track(received.clone()));
        assert_eq!(bodies.end_stalled(), 0, "too early");
        for _ in 0..4 {
            tokio::time::sleep(WINDOW / 2).await;
            trickles.fetch_add(100, Ordering::Relaxed);
            arrives.fetch_add(BYTES_PER_SECOND_MIN / 2, Ordering::Relaxed);
        }
        assert_eq!(bodies.end_stalled(), 2);
        let ended = tracked.each_ref().map(|body| body.disconnect.is_cancelled());
        assert_eq!(ended, [true, true, false]);
        tokio::time::sleep(SEARCH_PAUSE).await;
        assert_eq!(bodies.end_stalled(), 0, "they are closing");
        tokio::time::sleep(WINDOW).await;
        assert_eq!(bodies.end_stalled(), 1, "it stalls now");
        drop(tracked);
        assert!(bodies.0.lock().bodies.is_empty());
    }
}
