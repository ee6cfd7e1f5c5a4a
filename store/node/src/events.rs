//! KV events: a stream of the pages that enter and leave L2, and L3 by choice, for indexers of
//! other systems.
//!
//! The node publishes on a ZeroMQ PUB socket, in the form of vLLM and SGLang, and answers requests
//! for older batches on a ROUTER socket. `docs/attach/kv-events.md` describes both.
//!
//! ```text
//! tiers ─ change ─▶ ChangeQueue ─ every 10 ms ─▶ publisher ─ batch ─▶ Batches ─▶ subscribers
//! ```
//!
//! Invariants:
//! - The store never waits for a subscriber, nor for the publisher.
//! - The stream alone tells which pages a tier has. It begins with the end of all pages. After lost
//!   changes, it states the end of all pages and then describes those of each tier anew.
//! - A subscriber that misses a batch notices by its number. It asks for a replay, which begins
//!   with a snapshot if the batch is gone.
//! - Memory, subscribers and replays have bounds: see [`crate::event_limits`].
//! - One task at a time walks over a tier, for one batch, and waits for no client meanwhile. A
//!   replay then pauses for as long as its walk took, so replays use half of a thread at most.
//!
//! A snapshot is not of one moment: the tiers change while the publisher walks over them. All
//! changes since its begin follow in order, some of them between its batches. A walk describes a
//! page as it is, and the changes of the page since then come later. So its last event tells
//! whether the tier has it.
//!
//! | module | contents |
//! | --- | --- |
//! | `encode` | batches in msgpack |
//! | `batches` | the newest batches, by number |
//! | `seats` | bounds on connections |
//! | `subscriber` | one connection |
//!
//! Records 0077 and 0099 give the reasons.

mod batches;
mod encode;
mod seats;
mod subscriber;

use crate::connection::record_failed_accept;
use crate::event_limits::{BATCH_EVENTS, REPLAYS_MAX, SUBSCRIBERS_MAX, UNUSED_TIMEOUT};
use crate::page_changes::{ChangeQueue, PageChange};
use crate::places::Peer;
use crate::state::NodeState;
use batches::Batches;
use larder_runtime::{LogLimit, now};
use larder_zmtp::SocketKind;
use seats::Seats;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Time in which changes gather into a batch.
const GATHER_TIME: Duration = Duration::from_millis(10);
/// Pause after a failed accept, as for the other ports.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Place of a walk over the pages of L2, and then those of each device of L3.
#[derive(Debug, Clone, Copy)]
enum Place {
    L2(usize),
    L3 { device: usize, place: u64 },
}

/// Publisher of the events of a node, with its subscribers.
pub(crate) struct EventServer {
    node: Arc<NodeState>,
    changes: Arc<ChangeQueue>,
    batches: Batches,
    topic: Vec<u8>,
    subscribers: Arc<Seats>,
    replays: Arc<Seats>,
    /// Turn to walk over L2. Waiting tasks get it in their order.
    walker: tokio::sync::Mutex<()>,
    overflows: LogLimit,
    refusals: LogLimit,
    /// [`UNUSED_TIMEOUT`], or less in tests.
    unused_timeout: Duration,
}

impl EventServer {
    /// Creates a publisher of the changes that the tiers of `node` record. `None` if they record
    /// none, because events are off.
    pub(crate) fn new(node: Arc<NodeState>) -> Option<Arc<EventServer>> {
        let changes = node.store.tiers().recorded_changes()?.clone();
        let topic = node.store.options().kv_events_topic.clone();
        let topic = topic.unwrap_or_else(|| format!("kv@{}@", node.identity.node_id)).into_bytes();
        let server = EventServer {
            node,
            changes,
            batches: Batches::default(),
            topic,
            subscribers: Seats::new(SUBSCRIBERS_MAX),
            replays: Seats::new(REPLAYS_MAX),
            walker: tokio::sync::Mutex::default(),
            overflows: LogLimit::default(),
            refusals: LogLimit::default(),
            unused_timeout: UNUSED_TIMEOUT,
        };
        // L2 is empty at the start. A subscriber may know pages of the run before.
        server.append(true, &[]);
        Some(Arc::new(server))
    }

    /// Publishes changes of L2 until `stop` is cancelled.
    pub(crate) async fn publish(self: Arc<Self>, stop: CancellationToken) {
        stop.run_until_cancelled(self.publish_all()).await;
    }

    async fn publish_all(&self) {
        let mut changes = ChangeQueue::buffer();
        if self.node.store.options().kv_events_l3 {
            // L3 has the pages of the run before, and has not announced them.
            self.publish_snapshot(&mut changes).await;
        }
        loop {
            self.changes.wait().await;
            tokio::time::sleep(GATHER_TIME).await;
            if !self.publish_changes(&mut changes).await {
                self.publish_snapshot(&mut changes).await;
            }
        }
    }

    /// Publishes the queued changes, with a buffer for them. Returns `false` if some were lost: the
    /// pages of each tier must follow.
    async fn publish_changes(&self, changes: &mut Vec<PageChange>) -> bool {
        let overflowed = self.changes.take(changes);
        if overflowed && let Some(times) = self.overflows.record() {
            tracing::warn!(times, "the publisher of KV events lacks changes; it publishes all pages anew");
        }
        let mut rest = &changes[..];
        while !rest.is_empty() {
            let (batch, later) = rest.split_at(encode::fitting(rest));
            self.node.metrics.kv_events_published.inc_by(batch.len() as u64);
            self.append(false, batch);
            rest = later;
            tokio::task::yield_now().await;
        }
        // Their token ids are needed no longer.
        changes.clear();
        !overflowed
    }

    /// Publishes the end of all pages, and then the pages of each tier. Publishes changes between
    /// them, with this buffer: the queue would overflow during a long walk, and another walk follow
    /// each one.
    async fn publish_snapshot(&self, changes: &mut Vec<PageChange>) {
        self.append(true, &[]);
        let mut place = Some(Place::L2(0));
        while let Some(from) = place {
            // The wait is short: each of the few tasks before this one has the turn for a batch.
            let turn = self.walker.lock().await;
            let (pages, next) = self.walk(from);
            drop(turn);
            if !pages.is_empty() {
                self.append(false, &pages);
            }
            place = next;
            tokio::task::yield_now().await;
            if self.changes.is_half_full() && !self.publish_changes(changes).await {
                self.append(true, &[]);
                place = Some(Place::L2(0));
            }
        }
    }

    fn append(&self, is_cleared: bool, changes: &[PageChange]) {
        self.batches.append(self.encode(is_cleared, changes));
    }

    fn encode(&self, is_cleared: bool, changes: &[PageChange]) -> Vec<u8> {
        encode::batch(self.node.store.tiers().clock().now_unix_ms(), is_cleared, changes)
    }

    /// As [`walk`](Self::walk), when no other task walks. Keeps the turn afterwards for as long as
    /// the walk took: each step of a walk takes the lock of L2, which requests need.
    async fn walk_for_replay(&self, place: Place) -> (Vec<PageChange>, Option<Place>) {
        let _turn = self.walker.lock().await;
        let begin = now();
        let walked = self.walk(place);
        tokio::time::sleep(now() - begin).await;
        walked
    }

    /// Describes the next pages from a place on, enough for a batch at most. Returns the place
    /// behind them, `None` at the end.
    fn walk(&self, place: Place) -> (Vec<PageChange>, Option<Place>) {
        match place {
            Place::L2(place) => self.walk_l2(place),
            Place::L3 { device, place } => self.walk_l3(device, place),
        }
    }

    fn walk_l3(&self, device: usize, place: u64) -> (Vec<PageChange>, Option<Place>) {
        let devices = self.node.store.tiers().devices();
        let Some((named, next)) = devices.names_from(device, place, BATCH_EVENTS) else { return (Vec::new(), None) };
        let pages = named.iter().filter_map(|page| self.changes.describe_named(page)).collect();
        let next = match next {
            Some(place) => Place::L3 { device, place },
            None => Place::L3 { device: device + 1, place: 0 },
        };
        (pages, Some(next))
    }

    fn walk_l2(&self, place: usize) -> (Vec<PageChange>, Option<Place>) {
        let mut pages = Vec::with_capacity(BATCH_EVENTS);
        let mut size = encode::BatchSize::default();
        let mut next = Some(place);
        for _ in 0..BATCH_EVENTS {
            let Some(place) = next.filter(|_| !size.is_full()) else { break };
            let (page, behind) = self.node.store.tiers().next_from(place);
            pages.extend(page.and_then(|page| self.changes.describe(&page)).filter(|change| size.add(change)));
            next = behind;
        }
        let l3 = self.node.store.options().kv_events_l3.then_some(Place::L3 { device: 0, place: 0 });
        (pages, next.map(Place::L2).or(l3))
    }

    /// Accepts connections to one of the two sockets until `stop` is cancelled.
    pub(crate) async fn accept(
        self: Arc<Self>,
        kind: SocketKind,
        listener: TcpListener,
        stop: CancellationToken,
        tasks: TaskTracker,
    ) {
        let seats = match kind {
            SocketKind::Pub => &self.subscribers,
            SocketKind::Router => &self.replays,
        };
        while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    record_failed_accept(&self.node, &error);
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            let Some(seat) = seats.take(Peer::of(peer)) else {
                self.node.metrics.kv_events_connections_refused.inc();
                if let Some(refused) = self.refusals.record() {
                    tracing::warn!(
                        %peer, refused,
                        "connections for KV events refused: too many are open, or too many of their address"
                    );
                }
                continue;
            };
            let (server, stop) = (self.clone(), stop.clone());
            tasks.spawn(async move {
                stop.run_until_cancelled(subscriber::serve(server, kind, stream, seat)).await;
            });
        }
    }
}

#[cfg(test)]
mod tests;
