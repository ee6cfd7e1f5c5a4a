//! Bodies of requests that are arriving, and the end of those that stall while others need memory.
//!
//! A body is charged as it arrives, and a client that stalls keeps the charge. So when the node
//! refuses a request for lack of memory, it disconnects the clients whose bodies arrive more slowly
//! than [`BYTES_PER_SECOND_MIN`]. If only a tenant has no memory left, these are its own clients.
//!
//! Most bodies arrive at once and cost nothing here. The table has those that are incomplete after
//! [`WINDOW`], however short: many of them hold much memory together.

use super::timed_out;
use crate::budget::TenantNumber;
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Minimum pace while others need the memory: an eighth of the rate that requests are promised to
/// pass at. Several connections may share a slow link, and its bytes arrive in lumps.
const BYTES_PER_SECOND_MIN: u64 = 8 << 10;
/// Time over which the pace is measured, at least.
const WINDOW: Duration = Duration::from_secs(1);
/// Minimum time between two searches for one tenant, or for all. Each looks at all tracked bodies.
const SEARCH_PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct ArrivingBodies {
    /// Maximum time of a body. Page bytes are no body.
    timeout: Duration,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    bodies: BTreeMap<u64, Body>,
    next_number: u64,
    /// Last search for a tenant, or for all, if it is not longer ago than [`SEARCH_PAUSE`]. One
    /// that fills its share all the time must not keep the others from a search.
    searches: BTreeMap<Option<TenantNumber>, Instant>,
}

struct Body {
    /// `None` if the connection has ended.
    tenant: Option<TenantNumber>,
    /// Bytes that the connection has received.
    received: Arc<AtomicU64>,
    /// Their number at the last look that found the pace good.
    seen: u64,
    seen_at: Instant,
    disconnect: CancellationToken,
}

/// Entry of a body in the table. Dropping it removes the entry.
struct Tracked<'a> {
    bodies: &'a ArrivingBodies,
    number: u64,
    disconnect: CancellationToken,
}

impl Drop for Tracked<'_> {
    fn drop(&mut self) {
        self.bodies.table.lock().bodies.remove(&self.number);
    }
}

impl ArrivingBodies {
    /// Without bodies. Each may take `timeout`, more than a second.
    pub(crate) fn new(timeout: Duration) -> ArrivingBodies {
        ArrivingBodies { timeout, table: Mutex::default() }
    }

    /// Runs `receive`, which receives a body on a connection that counts its bytes in `received`.
    /// Asks for its tenant only if the body is slow.
    ///
    /// # Errors
    /// Those of `receive`, and `TimedOut` if the body takes longer than it may, or stalls while
    /// others need its memory.
    pub(crate) async fn receive<T>(
        &self,
        received: Arc<AtomicU64>,
        tenant: impl FnOnce() -> Option<TenantNumber>,
        receive: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        // Relaxed: the counter orders nothing, and an old value only favours the client.
        let seen = received.load(Ordering::Relaxed);
        let begun_at = now();
        let mut receive = pin!(receive);
        if let Ok(ended) = tokio::time::timeout(WINDOW, &mut receive).await {
            return ended;
        }
        // From the beginning of the body: its pace is known already.
        let tracked = self.track(tenant(), received, seen, begun_at);
        tokio::select! {
            // Biased: a body that is complete is served.
            biased;
            ended = tokio::time::timeout(self.timeout - WINDOW, receive) => ended.map_err(timed_out)?,
            () = tracked.disconnect.cancelled() => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn track(
        &self,
        tenant: Option<TenantNumber>,
        received: Arc<AtomicU64>,
        seen: u64,
        seen_at: Instant,
    ) -> Tracked<'_> {
        let disconnect = CancellationToken::new();
        let mut table = self.table.lock();
        let number = table.next_number;
        table.next_number += 1;
        table.bodies.insert(number, Body { tenant, received, seen, seen_at, disconnect: disconnect.clone() });
        Tracked { bodies: self, number, disconnect }
    }

    /// Disconnects the clients whose bodies stall, those of `tenant` only if it is given. Returns
    /// their number.
    pub(crate) fn end_stalled(&self, tenant: Option<TenantNumber>) -> u64 {
        let now = now();
        let mut table = self.table.lock();
        let is_recent = |last: &Instant| now.saturating_duration_since(*last) < SEARCH_PAUSE;
        if table.searches.get(&tenant).is_some_and(is_recent) {
            return 0;
        }
        table.searches.retain(|_, last| is_recent(last));
        table.searches.insert(tenant, now);
        let mut ended = 0;
        let is_meant = |body: &&mut Body| tenant.is_none() || body.tenant == tenant;
        for body in table.bodies.values_mut().filter(is_meant).filter(|body| !body.disconnect.is_cancelled()) {
            let time = now.saturating_duration_since(body.seen_at);
            if time < WINDOW {
                continue;
            }
            // Relaxed: as in `receive`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::STALL_TIMEOUT_MIN as STALL_TIMEOUT;
    use tokio::task::JoinHandle;

    const OWN: TenantNumber = 7;

    fn begin(bodies: &Arc<ArrivingBodies>, received: &Arc<AtomicU64>, time: Duration) -> JoinHandle<io::Result<()>> {
        let bodies = bodies.clone();
        let received = received.clone();
        tokio::spawn(async move {
            let complete = async {
                tokio::time::sleep(time).await;
                Ok(())
            };
            bodies.receive(received, || Some(OWN), complete).await
        })
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_body_ends_and_one_that_arrives_stays() {
        let bodies = Arc::new(ArrivingBodies::new(STALL_TIMEOUT));
        let counters = [(); 3].map(|()| Arc::new(AtomicU64::new(1 << 20)));
        let [_stalls, trickles, arrives] = &counters;
        let received = counters.each_ref().map(|counter| begin(&bodies, counter, 2 * STALL_TIMEOUT));
        tokio::time::sleep(WINDOW / 2).await;
        assert_eq!(bodies.end_stalled(None), 0, "too early");
        for _ in 0..4 {
            tokio::time::sleep(WINDOW / 2).await;
            trickles.fetch_add(100, Ordering::Relaxed);
            arrives.fetch_add(BYTES_PER_SECOND_MIN, Ordering::Relaxed);
        }
        assert_eq!(bodies.end_stalled(Some(OWN + 1)), 0, "another tenant");
        tokio::time::sleep(SEARCH_PAUSE).await;
        assert_eq!(bodies.end_stalled(Some(OWN)), 2);
        tokio::task::yield_now().await;
        assert_eq!(received.each_ref().map(|body| body.is_finished()), [true, true, false]);
        tokio::time::sleep(SEARCH_PAUSE).await;
        assert_eq!(bodies.end_stalled(None), 0, "they have ended");
        tokio::time::sleep(WINDOW).await;
        assert_eq!(bodies.end_stalled(None), 1, "it stalls now");
        for body in received {
            assert_eq!(body.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        assert!(bodies.table.lock().bodies.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn body_is_in_the_table_from_one_second_on_until_it_ends() {
        let bodies = Arc::new(ArrivingBodies::new(STALL_TIMEOUT));
        let tracked = || bodies.table.lock().bodies.len();
        let counter = Arc::default();
        let received = [WINDOW / 2, WINDOW * 3, 2 * STALL_TIMEOUT].map(|time| begin(&bodies, &counter, time));
        let mut counts = Vec::new();
        for _ in 0..5 {
            tokio::time::sleep(WINDOW * 3 / 4).await;
            counts.push(tracked());
        }
        assert_eq!(counts, [0, 2, 2, 2, 1]);
        let [fast, slow, stuck] = received;
        assert!(fast.await.unwrap().is_ok() && slow.await.unwrap().is_ok());
        assert_eq!(stuck.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut, "nobody needed its memory");
        assert_eq!(tracked(), 0);
    }
}
