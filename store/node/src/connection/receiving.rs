//! Puts: reservations, and parts straight into their slots, from the stream or from the client's memory.

use super::conversation::Connection;
use super::{STALL_TIMEOUT, invalid};
use crate::puts::Put;
use larder_device::PieceMut;
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_format::{Arriving, PageId};
use larder_share::Lender;
use larder_wire::{Entry, FrameReader, ReserveOutcome, Reserved, Source};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Most puts of one connection that are open at a time; more are answered "busy".
const PUTS_MAX: usize = 4096;
/// Most bytes that are copied from a client's memory before others have their turn: some 50 µs.
const PIECE_BYTES: usize = 256 << 10;

/// A part of a put, as its frame says.
pub(super) struct Part {
    pub(super) put: Entry,
    pub(super) part: u32,
    pub(super) crcs: Vec<u32>,
    pub(super) bytes: u32,
    /// Where in the client's memory; `None`: they are the payload.
    pub(super) lent_at: Option<u64>,
}
/// Most time for the memory of a part to come back from a window, if its bytes come another way.
const WITHDRAW_MAX: Duration = Duration::from_secs(1);

impl Connection {
    pub(super) fn reserve(&mut self, name: Entry, id: PageId, page: Reserved) -> ReserveOutcome {
        // The parts are those of the namespace's geometry, or readers could make nothing of the page.
        if page.part_bytes != self.part_table || self.puts.contains_key(&name) {
            return ReserveOutcome::Malformed;
        }
        if self.puts.len() >= PUTS_MAX {
            return ReserveOutcome::Busy;
        }
        match self.shared.store.reserve_for(&self.account, id, page) {
            Ok(put) => {
                self.puts.insert(name, put);
                ReserveOutcome::Granted
            }
            Err(outcome) => outcome,
        }
    }

    /// Receives a part into its memory. One that is not wanted is read and thrown away; one that is damaged ends its put.
    pub(super) async fn receive_part<S: Source>(&mut self, reader: &mut FrameReader<S>, part: Part) -> io::Result<()> {
        let Part { put: name, part, crcs, bytes, lent_at } = part;
        let lent = match (lent_at, &self.lent) {
            (None, _) => None,
            (Some(offset), Some(lent)) => Some((offset, lent.clone())),
            (Some(_), None) => return Err(invalid(DecodeError::Invalid("a part in memory that was not lent"))),
        };
        let stalled = |_| io::Error::from(io::ErrorKind::TimedOut);
        let taken = match self.puts.get(&name).cloned() {
            Some(put) => self.take(&put, part as usize, bytes as usize).await.map(|slot| (put, slot)),
            None => None,
        };
        let Some((put, mut slot)) = taken else {
            let discard = reader.discard(if lent.is_some() { 0 } else { bytes as usize });
            return tokio::time::timeout(STALL_TIMEOUT, discard).await.map_err(stalled)?;
        };
        let lengths = [bytes];
        let mut arriving = Arriving::new(&lengths, &crcs);
        let unchecked = match &lent {
            Some((offset, lent)) => {
                self.copy_part(&**lent, *offset, &mut slot, &mut arriving).await;
                has(Bug::LentUnchecked)
            }
            None => {
                let receive = reader.payload(&mut slot, |piece| arriving.take(piece));
                tokio::time::timeout(STALL_TIMEOUT, receive).await.map_err(stalled)??;
                self.shared.metrics.bytes_received.inc_by(bytes.into());
                has(Bug::PartUnchecked)
            }
        };
        if let Err(mismatch) = arriving.finish()
            && !unchecked
        {
            self.shared.metrics.parts_corrupt.inc();
            tracing::warn!(id = ?put.id, part, %mismatch, "part damaged on its way: put given up");
            self.shared.store.give_up(&put);
            if !put.lingers() {
                self.puts.remove(&name);
            }
        } else {
            put.land_checked(part as usize, slot, crcs);
        }
        Ok(())
    }

    /// Copies a part from the client's memory, piece by piece, so that its checksums are computed while a piece is in the
    /// processor's cache, and other connections have their turns. What cannot be read is left out: the part is damaged then.
    ///
    /// The client may change these bytes meanwhile: what counts is what was copied, and nothing is read twice.
    async fn copy_part(&mut self, lent: &dyn Lender, offset: u64, slot: &mut [u8], arriving: &mut Arriving<'_>) {
        let mut at = offset;
        for piece in slot.chunks_mut(PIECE_BYTES) {
            if let Err(error) = lent.read(at, piece) {
                return tracing::warn!(%error, "a part is not where its client says");
            }
            arriving.take(piece);
            at = at.saturating_add(piece.len() as u64);
            self.shared.metrics.bytes_copied.inc_by(piece.len() as u64);
            self.copied += piece.len();
            if self.copied >= PIECE_BYTES {
                self.copied = 0;
                tokio::task::yield_now().await;
            }
        }
    }

    /// The memory of a part to receive into. If the client may write it, it may not any more.
    async fn take(&self, put: &Arc<Put>, part: usize, bytes: usize) -> Option<PieceMut> {
        if let Some(slot) = put.take_part(part, bytes) {
            return Some(slot);
        }
        if put.part_bytes(part) != Some(bytes) {
            return None;
        }
        // Nothing of this client's is heard meanwhile: its own choice, and mostly some microseconds.
        match tokio::time::timeout(WITHDRAW_MAX, put.take_lent(part)?.withdraw()).await {
            Ok(Ok(kept)) => return Some(kept.bytes),
            Ok(Err(error)) => {
                tracing::warn!(id = ?put.id, part, %error, "memory of a part did not come back: put given up");
            }
            Err(_) => tracing::warn!(id = ?put.id, part, "memory of a part is slow to come back: put given up"),
        }
        self.shared.store.abort(put);
        None
    }
}
