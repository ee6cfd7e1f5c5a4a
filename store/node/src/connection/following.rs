//! Streaming a page that is there, being written, or about to be.

use super::sending::{PagePayload, PiecePayload, ToClient};
use crate::node::Shared;
use crate::puts::{Presence, Progress, Put};
use larder_format::PageId;
use larder_wire::{FollowState, Response};
use std::io;
use std::time::Instant;

/// Sends a page that is there, being written, or about to be, part by part.
pub(super) async fn follow(shared: &Shared, client: &ToClient, id: PageId, deadline: Instant) -> io::Result<()> {
    let end = |state, meta| client.end(Response::FollowEnd { state, meta });
    loop {
        match shared.store.presence(&id) {
            Presence::Sealed => {
                let Some((page, _)) = shared.store.get(&id, deadline).await else {
                    return end(FollowState::Miss, None).await;
                };
                for part in 0..page.meta.part_bytes.len() {
                    let bytes = page.meta.part_range(part).unwrap_or_default();
                    let crcs = page.meta.part_crcs(part).unwrap_or_default().to_vec();
                    let head = Response::Part { part: part as u32, crcs };
                    let Some(leave) = client.leave(bytes.len() as u64).await? else {
                        return end(FollowState::Miss, None).await;
                    };
                    client.send_bytes(shared, head, PagePayload { page: page.clone(), bytes }, leave).await?;
                }
                return end(FollowState::Sealed, Some(page.meta.clone())).await;
            }
            Presence::Open(put) => match follow_put(shared, client, &put, deadline).await? {
                Progress::Sealed => {
                    // The client believes this only if it is the page whose parts it was just sent.
                    let found = shared.store.get(&id, deadline).await;
                    let (state, meta) = match found {
                        Some((page, _)) => (FollowState::Sealed, Some(page.meta.clone())),
                        None => (FollowState::Miss, None),
                    };
                    return end(state, meta).await;
                }
                Progress::Aborted => return end(FollowState::Aborted, None).await,
                Progress::Open(_) => return end(FollowState::Miss, None).await,
            },
            Presence::Nothing(waiter) => {
                if !waiter.begun(deadline).await {
                    return end(FollowState::Miss, None).await;
                }
            }
            Presence::Crowded => return end(FollowState::Miss, None).await,
        }
    }
}

/// Sends parts as they land; returns how the put ended, or `Open` at the deadline.
async fn follow_put(shared: &Shared, client: &ToClient, put: &Put, deadline: Instant) -> io::Result<Progress> {
    let mut now = put.progress();
    let mut sent = vec![false; put.part_count()];
    loop {
        for (part, sent) in sent.iter_mut().enumerate().filter(|(_, sent)| !**sent) {
            if let Some((bytes, crcs)) = put.landed(part) {
                *sent = true;
                let head = Response::Part { part: part as u32, crcs };
                let Some(leave) = client.leave(bytes.len() as u64).await? else {
                    return Ok(Progress::Open(0));
                };
                client.send_bytes(shared, head, PiecePayload(bytes), leave).await?;
            }
        }
        if !matches!(now, Progress::Open(_)) {
            return Ok(now);
        }
        match tokio::time::timeout_at(deadline.into(), put.progress_after(now)).await {
            Ok(changed) => now = changed,
            Err(_) => return Ok(Progress::Open(0)),
        }
    }
}
