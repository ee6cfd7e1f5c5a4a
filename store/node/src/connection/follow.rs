//! Follow: streams a page that is stored, being written, or about to be written.

use super::Connection;
use super::outbox::{PagePayload, PartPayload, Responder};
use crate::budget::{Charge, Kind};
use crate::puts::{Presence, Progress, Put};
use crate::state::NodeState;
use larder_format::PageId;
use larder_runtime::{fail_point, now};
use larder_wire::{FollowState, Response};
use std::io;
use std::time::{Duration, Instant};

/// Memory of a follower that waits for its page, beside that of its request: its task, its timer
/// and its entry in the table of waiting readers.
const FOLLOW_BYTES: u64 = 4 << 10;

impl Connection {
    pub(super) async fn follow(&mut self, request: u64, id: PageId, deadline: Instant) -> io::Result<()> {
        self.node.metrics.follows.inc();
        let charge = match self.account.charge(Kind::Requests, FOLLOW_BYTES) {
            Ok(charge) => charge,
            Err(busy) => return self.refuse(request, busy).await,
        };
        let (node, account) = (self.node.clone(), self.account.clone());
        let bytes = charge.bytes() + self.charge.as_ref().map_or(0, Charge::bytes);
        let responder = self.responder(request, deadline);
        let work = async move {
            let _charge = charge;
            follow(&node, &responder, id, deadline, || account.wait_for_others(bytes)).await
        };
        self.spawn(request, 1, work).await
    }
}

/// Sends a page part by part, as soon as each part can be sent. Waits for the put of an absent page
/// until `deadline`, and answers a miss then. It has a value of `wait` meanwhile.
async fn follow<W>(
    node: &NodeState,
    responder: &Responder,
    id: PageId,
    deadline: Instant,
    wait: impl Fn() -> W,
) -> io::Result<()> {
    let end = |state, meta| responder.finish(Response::FollowEnd { state, meta });
    loop {
        match node.store.puts().presence(&id) {
            // Boxed: most followers wait for a put, and then need none of this state.
            Presence::Sealed => return Box::pin(follow_sealed(node, responder, id, deadline)).await,
            Presence::Open(put) => match Box::pin(follow_put(node, responder, &put, deadline)).await? {
                Progress::Sealed => {
                    // Another put of the key may be current by now: the client may have taken its
                    // time to receive the parts. They are not parts of that page.
                    let found = Box::pin(node.store.tiers().hand_over(&id, deadline)).await;
                    let followed = found.filter(|page| page.generation() == put.generation());
                    let (state, meta) = match followed {
                        Some(page) => {
                            node.metrics.pages_followed.inc();
                            (FollowState::Sealed, Some(page.meta()))
                        }
                        None => (FollowState::Miss, None),
                    };
                    return end(state, meta).await;
                }
                Progress::Aborted => return end(FollowState::Aborted, None).await,
                Progress::Open(_) => return end(FollowState::Miss, None).await,
            },
            Presence::Absent(waiter) => {
                let waiting = wait();
                let has_started = waiter.put_started(deadline).await;
                drop(waiting);
                if !has_started {
                    return end(FollowState::Miss, None).await;
                }
            }
            // A miss, so that the client computes the page instead of waiting in line.
            Presence::TooManyWaiters => return end(FollowState::Miss, None).await,
        }
    }
}

async fn follow_sealed(node: &NodeState, responder: &Responder, id: PageId, deadline: Instant) -> io::Result<()> {
    let end = |state, meta| responder.finish(Response::FollowEnd { state, meta });
    let Some(page) = node.store.tiers().hand_over(&id, deadline).await else {
        return end(FollowState::Miss, None).await;
    };
    let meta = page.meta();
    for part in 0..meta.part_bytes.len() {
        let bytes = meta.part_range(part).unwrap_or_default();
        let crcs = meta.part_crcs(part).unwrap_or_default().to_vec();
        let head = Response::Part { part: part as u32, crcs };
        let Some(credit) = responder.credit(bytes.len() as u64, bytes.len() as u64).await? else {
            return end(FollowState::Miss, None).await;
        };
        responder.send_bytes(node, head, PagePayload { page: page.clone(), bytes }, credit).await?;
    }
    node.metrics.pages_followed.inc();
    end(FollowState::Sealed, Some(meta)).await
}

/// Sends the parts of a put as they land. Returns the end of the put, or `Open` at the deadline.
async fn follow_put(node: &NodeState, responder: &Responder, put: &Put, deadline: Instant) -> io::Result<Progress> {
    // Read before the parts: one that lands during the loop changes the progress, and the next
    // round finds it.
    let mut progress = put.progress();
    let mut sent = vec![false; put.part_count()];
    loop {
        for (part, sent) in sent.iter_mut().enumerate().filter(|(_, sent)| !**sent) {
            if let Some((bytes, crcs)) = put.landed(part) {
                *sent = true;
                let head = Response::Part { part: part as u32, crcs };
                let Some(credit) = responder.credit(bytes.len() as u64, bytes.len() as u64).await? else {
                    return Ok(Progress::Open(0));
                };
                responder.send_bytes(node, head, PartPayload(bytes), credit).await?;
            }
        }
        if !matches!(progress, Progress::Open(_)) {
            return Ok(progress);
        }
        // A deadline of its own, which ends a follower of a slow writer.
        let deadline = if fail_point!("node.follow-ends-early") { now() + Duration::from_secs(5) } else { deadline };
        match tokio::time::timeout_at(deadline.into(), put.progress_after(progress)).await {
            Ok(changed) => progress = changed,
            Err(_) => return Ok(Progress::Open(0)),
        }
    }
}
