//! Ways of a part to a node: an RDMA write, a location in shared client memory that the node copies
//! from, or payload.
//!
//! Invariant: bytes whose location was sent stay unchanged until the commit is answered or the put
//! is abandoned. A node that copies them later finds other bytes. Their checksums reject the put,
//! which was abandoned anyway.

use super::multiplex::Connection;
use super::rdma_writes::{PartSource, PartWrite, write_part};
use larder_format::chunk_crcs;
use larder_wire::{Entry, PartLocation, Request};
use std::sync::Arc;
use std::time::Instant;

pub(crate) enum SentPart<P> {
    Written,
    /// The connection owns the bytes.
    Payload,
    /// The node copies these bytes. The caller keeps them until the put has ended.
    Location(P),
}

/// Location of `bytes` in memory that the node copies from. `None` if they are elsewhere.
fn location_of(connection: &Connection, bytes: &[u8]) -> Option<PartLocation> {
    let offset = connection.client_memory()?.offset_of(bytes)?;
    Some(PartLocation::SharedMemory { offset, bytes: u32::try_from(bytes.len()).ok()? })
}

/// Returns `true` if the client sends the location of `bytes` instead of the bytes.
pub(crate) fn sends_location(connection: &Connection, bytes: &[u8]) -> bool {
    location_of(connection, bytes).is_some()
}

/// Sends a part the cheapest way, with `crcs` or, without them, with checksums of its bytes now.
/// Returns `None` if the part is lost, or if the queue has no room for it before `deadline`.
pub(crate) async fn send_part<P: PartSource>(
    connection: &Arc<Connection>,
    put: Entry,
    part: u32,
    bytes: P,
    crcs: Option<Vec<u32>>,
    deadline: Instant,
) -> Option<SentPart<P>> {
    let bytes = match write_part(connection, put, part, bytes, crcs.as_deref(), deadline).await {
        PartWrite::Written => return Some(SentPart::Written),
        PartWrite::Lost => return None,
        PartWrite::Unavailable(bytes) => bytes,
    };
    // The node compares its copy with these, so they are computed over the caller's bytes.
    let crcs = crcs.unwrap_or_else(|| chunk_crcs(bytes.as_ref()).collect());
    match location_of(connection, bytes.as_ref()) {
        Some(location) => {
            let message = Request::Part { put, part, crcs, bytes: location };
            connection.send(&message, deadline).await.then_some(SentPart::Location(bytes))
        }
        None => {
            let message = Request::Part { put, part, crcs, bytes: PartLocation::Inline };
            connection.outbox().send_payload(put, &message, bytes, deadline).await.then_some(SentPart::Payload)
        }
    }
}
