//! Reading a page, and refusing what is not that page.

use crate::L3Error;
use crate::shared::{ReadGuard, Shared};
use larder_core::log::{Entry, ReadTicket};
use larder_core::planted::{Bug, has};
use larder_device::{Done, Lane, Operation, Slot, SlotMut};
use larder_format::disk::{BLOCK_BYTES, RecordBody, RecordHeader, RecordPlace};
use larder_format::{PageId, PageMeta};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tokio::sync::oneshot;

impl Shared {
    /// Reads header and payload at once, and verifies both.
    pub(crate) async fn read(self: &Arc<Self>, id: &PageId) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        let now = self.clock.now_unix_ms();
        let Some(ticket) = self.change(|log| log.begin_read(id, now)) else { return Ok(None) };
        let found = self.read_record(ticket, Lane::Demand).await?;
        if let Some((_, payload)) = &found {
            self.counters.reads.add(1);
            self.counters.read_bytes.add(payload.len() as u64);
        }
        Ok(found)
    }

    /// Reads the record that the ticket holds. `None`: it is damaged and was dropped.
    pub(crate) async fn read_record(
        self: &Arc<Self>,
        ticket: ReadTicket,
        lane: Lane,
    ) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        let bytes = BLOCK_BYTES + ticket.entry.payload_bytes as usize;
        let guard = ReadGuard::new(self, ticket);
        let slot = self.arena.allocate(bytes).ok_or(L3Error::NoMemory { bytes })?;
        self.read_into(slot, guard, lane).await
    }

    /// Reads the record that the guard holds into a slot of its length.
    pub(crate) async fn read_into(
        self: &Arc<Self>,
        slot: SlotMut,
        guard: ReadGuard,
        lane: Lane,
    ) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        let Some((id, entry)) = guard.page() else { return Ok(None) };
        let operation = Operation::read(entry.place.offset, slot);
        let (reply, answer) = oneshot::channel();
        let on_done = move |done: Done| {
            if has(Bug::LeakRead) && reply.is_closed() {
                return guard.leak();
            }
            // The device has let go of the segment, whether or not anybody still waits for the page.
            drop(guard);
            let _ = reply.send(done);
        };
        self.device.submit(entry.place.segment, lane, operation, Box::new(on_done)).await?;
        let Done { operation, result } = answer.await.map_err(|_| L3Error::Closed)?;
        match result {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.damaged(&id, &entry, &error, &[]);
                return Ok(None);
            }
            // What cannot be read now may be readable later, but whoever asks for it is better off with a miss.
            Err(error) => {
                // A look at everything that finds the device failing for a while says nothing of the pages.
                if lane != Lane::Idle {
                    self.change(|log| log.drop_damaged(&id, entry.number));
                }
                return Err(self.io_error("reading", entry.place.segment, error));
            }
        }
        let Operation::Read { slot, .. } = operation else { return Ok(None) };
        let (header, payload) = slot.split_at(BLOCK_BYTES);
        match self.verify(&id, &entry, &header, &payload) {
            Ok(meta) => Ok(Some((meta, payload.freeze()))),
            Err(problem) => {
                self.damaged(&id, &entry, &problem, &header);
                Ok(None)
            }
        }
    }

    /// Checks that this is the record the index means, of the page that was asked for, and every byte of it.
    fn verify(&self, id: &PageId, entry: &Entry, header: &SlotMut, payload: &SlotMut) -> Result<PageMeta, String> {
        let place = if has(Bug::SkipIdentity) { place_said_by(header) } else { entry.place };
        let record = RecordHeader::decode(header, &self.log_id, place).map_err(|error| error.to_string())?;
        let RecordBody::Page(meta) = record.body else { return Err("the record is not a page".into()) };
        if record.number != entry.number && !has(Bug::SkipIdentity) {
            return Err(format!("record number: expected {}, found {}", entry.number, record.number));
        }
        let id = if has(Bug::SkipIdentity) { &meta.id } else { id };
        if !has(Bug::SkipCrc) {
            meta.verify(id, payload).map_err(|mismatch| mismatch.to_string())?;
        }
        Ok(meta)
    }

    /// A miss, a counter, and evidence.
    fn damaged(&self, id: &PageId, entry: &Entry, problem: &dyn std::fmt::Display, header: &[u8]) {
        self.counters.corrupt.add(1);
        let was_current = self.change(|log| log.drop_damaged(id, entry.number));
        tracing::warn!(
            page = ?id,
            file = %self.segment_path(entry.place.segment).display(),
            offset = entry.place.offset,
            life = entry.place.life,
            record = entry.number,
            payload_bytes = entry.payload_bytes,
            header_start = ?header.get(..64),
            %problem,
            "damaged page dropped"
        );
        let listener = self.on_damage.read().clone();
        if let (true, Some(listener)) = (was_current, listener) {
            // It is somebody else's code, and what runs here must go on.
            if catch_unwind(AssertUnwindSafe(|| listener(*id))).is_err() {
                tracing::error!("who listens for damaged pages panicked");
            }
        }
    }
}

/// For a planted bug: the place that a header says it is of, whatever it is of.
fn place_said_by(header: &[u8]) -> RecordPlace {
    let number = |at: usize, len: usize| header[at..at + len].iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte));
    RecordPlace { segment: number(28, 4) as u32, life: number(32, 8), offset: number(40, 8) }
}
