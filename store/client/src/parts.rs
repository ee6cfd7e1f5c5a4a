//! Parts on their way to a node: written by RDMA, as places in this client's memory from where the node copies them, or as
//! payload.
//!
//! A node may copy from a place until it has answered the put's commit, or its connection has ended. So bytes whose place was
//! told are kept as they are until the commit is answered or the put is given up. A node that copies only after that finds
//! what lies there then: the checksums say so, and the put that is lost is one that was given up already.

use crate::link::Live;
use crate::rdma::{PartSource, Written};
use larder_format::chunk_crcs;
use larder_wire::{Entry, PartBytes, Request};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;

/// Most bytes whose places one node was told in batches and has not answered for, and the unit in which they are counted: what
/// it copies before it hears anything else.
pub(crate) const LENT_BYTES_MAX: usize = 64 << 20;
pub(crate) const LENT_UNIT_BYTES: usize = 4096;

/// A part that is on its way, or there.
pub(crate) enum Sent<P> {
    /// It was written.
    Written,
    /// The bytes themselves.
    Payload,
    /// Their place: they are to be kept until the put has ended.
    Place(P),
}

impl Live {
    /// Where `bytes` lie in the memory that this node copies from.
    fn place_of(&self, bytes: &[u8]) -> Option<PartBytes> {
        let offset = self.lent.as_ref()?.offset_of(bytes)?;
        Some(PartBytes::Lent { offset, bytes: u32::try_from(bytes.len()).ok()? })
    }

    /// Whether parts of `bytes` are sent as places.
    pub(crate) fn copies_from(&self, bytes: &[u8]) -> bool {
        self.place_of(bytes).is_some()
    }

    /// Leave to tell the places of `bytes` bytes, until it is dropped; `None` if there is none before `deadline`.
    pub(crate) async fn lend(&self, bytes: usize, deadline: Instant) -> Option<OwnedSemaphorePermit> {
        let units = bytes.min(LENT_BYTES_MAX).div_ceil(LENT_UNIT_BYTES) as u32;
        let leave = self.lending.clone().acquire_many_owned(units);
        tokio::time::timeout_at(deadline.into(), leave).await.ok()?.ok()
    }

    /// Sends a part the best way there is; `None` if it is lost, or there was no room for it on the way before `by`.
    pub(crate) async fn send_part<P: PartSource>(
        self: &Arc<Self>,
        put: Entry,
        part: u32,
        bytes: P,
        by: Instant,
    ) -> Option<Sent<P>> {
        let bytes = match self.write_part(put, part, bytes, by).await {
            Written::Told => return Some(Sent::Written),
            Written::Lost => return None,
            Written::No(bytes) => bytes,
        };
        let crcs = chunk_crcs(bytes.as_ref()).collect();
        match self.place_of(bytes.as_ref()) {
            Some(place) => {
                let message = Request::Part { put, part, crcs, bytes: place };
                self.send(&message, by).await.then_some(Sent::Place(bytes))
            }
            None => {
                let message = Request::Part { put, part, crcs, bytes: PartBytes::Payload };
                self.send_bytes(&message, bytes, by).await.then_some(Sent::Payload)
            }
        }
    }
}
