//! Parts of puts: received into the page's memory from the stream, or copied from shared client
//! memory.

use super::requests::DEADLINE_MAX;
use super::{Connection, protocol_error, timed_out};
use crate::puts::Put;
use larder_format::codec::DecodeError;
use larder_format::{CHUNK_BYTES, Mismatch, PayloadVerifier};
use larder_memory::SlotPartMut;
use larder_memory::share::PeerMemory;
use larder_runtime::{fail_point, now};
use larder_wire::{ByteSource, Entry, FrameReader, Piece};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that are copied between two yields: about 50 µs of work, so that the other connections of
/// the thread are not delayed noticeably. Also the unit of verification: it fits into a core's
/// cache.
const COPY_STEP_BYTES: usize = 256 << 10;
/// Maximum time to revoke a grant whose part arrives another way. The device answers within
/// microseconds, or it is broken.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Memory that a client of the same machine shares, and the progress of copies from it.
pub(super) struct SharedParts {
    memory: Option<Arc<dyn PeerMemory>>,
    /// Bytes copied since the last yield, over all parts.
    copied_since_yield: usize,
}

impl SharedParts {
    pub(super) fn new(memory: Option<Arc<dyn PeerMemory>>) -> Self {
        Self { memory, copied_since_yield: 0 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartPiece {
    /// Number of bytes received.
    Bytes(usize),
    /// The client gave up the part.
    Abandoned,
    /// The put was aborted or sealed.
    PutEnded,
}

/// Waits until the put has ended. Without a put, it never returns.
async fn ended(put: Option<&Put>) {
    match put {
        Some(put) => put.ended().await,
        None => std::future::pending().await,
    }
}

impl Connection {
    /// Receives a part from the stream into its page's memory. Without an open put for it, the
    /// bytes are discarded. A damaged part aborts its put.
    pub(super) async fn receive_part<S: ByteSource>(
        &mut self,
        reader: &mut FrameReader<S>,
        entry: Entry,
        part: u32,
        crcs: Vec<u32>,
        bytes: u32,
    ) -> io::Result<()> {
        if bytes == 0 {
            // No part is empty. The payload that may be open is that of another part.
            return Ok(());
        }
        // No put lasts longer, so a part that trickles in cannot occupy its memory forever.
        let deadline = now() + DEADLINE_MAX;
        let Some((put, mut memory)) = self.take_part(&entry, part, bytes).await else {
            // The payload must be consumed to find the next frame.
            return self.discard_part(reader, deadline).await;
        };
        let lengths = [bytes];
        let mut verifier = PayloadVerifier::new(&lengths, &crcs);
        let mut at = 0;
        while at < memory.len() {
            match self.receive_piece(reader, &mut memory[at..], Some(&put), deadline).await? {
                PartPiece::Bytes(received) => {
                    self.account.record_received(received);
                    put.record_activity();
                    verifier.take(&memory[at..at + received]);
                    at += received;
                }
                PartPiece::Abandoned => {
                    // The client gave up the part, and with it the put. It sends Cancel once none
                    // of its RDMA writes to other parts is under way.
                    self.abort_unannounced(&entry, &put);
                    return Ok(());
                }
                PartPiece::PutEnded => {
                    // Others got the put's room, so its memory must return although the client is
                    // silent.
                    drop(memory);
                    return self.discard_part(reader, deadline).await;
                }
            }
        }
        self.node.metrics.bytes_received.inc_by(bytes.into());
        match verifier.finish() {
            Err(mismatch) if !fail_point!("node.accept-damaged-wire-part") => {
                self.abort_damaged(&entry, &put, part, &mismatch);
            }
            _ => put.land_verified(part as usize, memory, crcs),
        }
        Ok(())
    }

    /// Receives the next bytes of a part, at most until `put` ends. Serves the requests that come
    /// between its fragments.
    async fn receive_piece<S: ByteSource>(
        &mut self,
        reader: &mut FrameReader<S>,
        memory: &mut [u8],
        put: Option<&Put>,
        deadline: Instant,
    ) -> io::Result<PartPiece> {
        loop {
            // Any byte is progress: the time starts anew with each piece.
            let until = deadline.min(now() + self.node.stall_timeout());
            // Only the wait for bytes may be interrupted, never a request that is being served.
            let piece = tokio::select! {
                // Biased: a part that is complete must not be dropped.
                biased;
                piece = tokio::time::timeout_at(until.into(), reader.piece(memory)) => piece.map_err(timed_out)??,
                () = ended(put) => return Ok(PartPiece::PutEnded),
            };
            match piece {
                Piece::Bytes(bytes) => return Ok(PartPiece::Bytes(bytes)),
                Piece::Abandoned => return Ok(PartPiece::Abandoned),
                Piece::Frame(head) => self.serve_between(reader, &head).await?,
            }
        }
    }

    async fn discard_part<S: ByteSource>(&mut self, reader: &mut FrameReader<S>, deadline: Instant) -> io::Result<()> {
        let mut scratch = vec![0; reader.payload_left().min(CHUNK_BYTES)];
        while reader.payload_left() > 0
            && self.receive_piece(reader, &mut scratch, None, deadline).await? != PartPiece::Abandoned
        {}
        Ok(())
    }

    /// Copies a part from the client's shared memory into its page's memory. A damaged part aborts
    /// its put.
    pub(super) async fn copy_part(
        &mut self,
        entry: Entry,
        part: u32,
        crcs: Vec<u32>,
        bytes: u32,
        offset: u64,
    ) -> io::Result<()> {
        let Some(source) = self.shared_parts.memory.clone() else {
            return Err(protocol_error(DecodeError::Invalid("a part in memory that was not shared")));
        };
        let Some((put, mut memory)) = self.take_part(&entry, part, bytes).await else { return Ok(()) };
        let lengths = [bytes];
        let mut verifier = PayloadVerifier::new(&lengths, &crcs);
        self.copy(&*source, offset, &mut memory, &mut verifier).await;
        match verifier.finish() {
            Err(mismatch) if !fail_point!("node.accept-damaged-shared-part") => {
                self.abort_damaged(&entry, &put, part, &mismatch);
            }
            _ => put.land_verified(part as usize, memory, crcs),
        }
        Ok(())
    }

    /// Copies and verifies a part step by step, so that each step is still in the cache when it is
    /// verified. Bytes that cannot be read are left out, which makes the part damaged.
    ///
    /// The client may change the bytes meanwhile. Only the copy counts, and nothing is read twice.
    async fn copy(
        &mut self,
        source: &dyn PeerMemory,
        offset: u64,
        memory: &mut [u8],
        verifier: &mut PayloadVerifier<'_>,
    ) {
        let mut at = offset;
        for step in memory.chunks_mut(COPY_STEP_BYTES) {
            if let Err(error) = source.read(at, step) {
                let peer = &self.peer;
                if let Some(parts) = self.node.refusals.damaged_parts.record() {
                    tracing::warn!(%peer, parts, %error, "cannot read parts from a client's shared memory");
                }
                return;
            }
            verifier.take(step);
            self.account.record_received(step.len());
            // A range that overflows is outside the client's memory, and the next read fails.
            at = at.saturating_add(step.len() as u64);
            self.node.metrics.bytes_copied.inc_by(step.len() as u64);
            self.shared_parts.copied_since_yield += step.len();
            if self.shared_parts.copied_since_yield >= COPY_STEP_BYTES {
                self.shared_parts.copied_since_yield = 0;
                tokio::task::yield_now().await;
            }
        }
    }

    fn abort_damaged(&mut self, entry: &Entry, put: &Arc<Put>, part: u32, mismatch: &Mismatch) {
        self.node.metrics.parts_corrupt.inc();
        if let Some(parts) = self.node.refusals.damaged_parts.record() {
            let peer = &self.peer;
            let key = put.id.key;
            tracing::warn!(
                %peer, parts, %key, part, %mismatch,
                "puts aborted: parts arrived damaged; check the network and the client"
            );
        }
        self.abort_unannounced(entry, put);
    }

    /// Aborts a put whose client may still write parts of it by RDMA.
    fn abort_unannounced(&mut self, entry: &Entry, put: &Arc<Put>) {
        self.node.store.puts().abort_unannounced(put);
        // A draining put stays known: the client's later messages end its grants. The name may
        // stand for another put by now: a Cancel can come between the fragments of a part.
        if !put.is_draining() && self.puts.get(entry).is_some_and(|current| Arc::ptr_eq(current, put)) {
            self.puts.remove(entry);
        }
    }

    /// Takes the memory of a part to receive into. If the client may write it by RDMA, that grant
    /// is revoked first.
    async fn take_part(&self, entry: &Entry, part: u32, bytes: u32) -> Option<(Arc<Put>, SlotPartMut)> {
        let put = self.puts.get(entry)?.clone();
        let part = part as usize;
        if let Some(memory) = put.take_part(part, bytes as usize) {
            return Some((put, memory));
        }
        if put.part_bytes(part) != Some(bytes as usize) {
            return None;
        }
        let key = put.id.key;
        // The connection's other requests wait meanwhile. The client chose that by sending the part
        // twice, and it rarely takes more than microseconds.
        let (grant, _) = put.take_grant(part)?;
        match tokio::time::timeout(REVOKE_TIMEOUT, grant.revoke()).await {
            Ok(Ok(granted)) => return Some((put, granted.bytes)),
            Ok(Err(error)) => {
                tracing::warn!(%key, part, %error, "put aborted: the RDMA device did not return a part's memory");
            }
            Err(_) => {
                tracing::warn!(%key, part, "put aborted: the RDMA device did not return a part's memory within 1 s");
            }
        }
        self.node.store.puts().abort(&put);
        None
    }
}
