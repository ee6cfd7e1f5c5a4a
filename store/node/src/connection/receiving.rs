//! Puts: reservations, and parts straight into their slots.

use super::STALL_TIMEOUT;
use super::conversation::Connection;
use crate::puts::Put;
use larder_device::PieceMut;
use larder_format::planted::{Bug, has};
use larder_format::{Arriving, PageId};
use larder_wire::{Entry, FrameHeader, FrameReader, ReserveOutcome, Reserved, Source};
use std::io;
use std::sync::Arc;

/// Most puts of one connection that are open at a time; more are answered "busy".
const PUTS_MAX: usize = 4096;

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

    /// Receives a payload into the memory of its part. A part that is not wanted is read and thrown away; one that is
    /// damaged ends its put.
    pub(super) async fn receive_part<S: Source>(
        &mut self,
        reader: &mut FrameReader<S>,
        header: &FrameHeader,
        name: Entry,
        part: u32,
        crcs: Vec<u32>,
    ) -> io::Result<()> {
        let bytes = header.payload_bytes as usize;
        let stalled = |_| io::Error::from(io::ErrorKind::TimedOut);
        let taken = match self.puts.get(&name).cloned() {
            Some(put) => self.take(&put, part as usize, bytes).await.map(|slot| (put, slot)),
            None => None,
        };
        let Some((put, mut slot)) = taken else {
            return tokio::time::timeout(STALL_TIMEOUT, reader.discard(bytes)).await.map_err(stalled)?;
        };
        let lengths = [header.payload_bytes];
        let mut arriving = Arriving::new(&lengths, &crcs);
        let receive = reader.payload(&mut slot, |piece| arriving.take(piece));
        tokio::time::timeout(STALL_TIMEOUT, receive).await.map_err(stalled)??;
        self.shared.metrics.bytes_received.inc_by(bytes as u64);
        if let Err(mismatch) = arriving.finish()
            && !has(Bug::PartUnchecked)
        {
            self.shared.metrics.parts_corrupt.inc();
            tracing::warn!(id = ?put.id, part, %mismatch, "part damaged on its way: put given up");
            self.puts.remove(&name);
            self.shared.store.abort(&put);
        } else {
            put.land_checked(part as usize, slot, crcs);
        }
        Ok(())
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
        match put.take_lent(part)?.withdraw().await {
            Ok(kept) => Some(kept.bytes),
            Err(error) => {
                tracing::warn!(id = ?put.id, part, %error, "memory of a part did not come back: put given up");
                self.shared.store.abort(put);
                None
            }
        }
    }
}
