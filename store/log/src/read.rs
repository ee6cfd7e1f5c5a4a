//! The read path: a record from the device, verified before a reader sees it.
//!
//! Invariant: a reader gets exactly the page that the index names. Place, record number, page
//! identity and every checksum must match. Anything else is a miss, a counter and a warning with
//! evidence.

use crate::L3Error;
use crate::guards::{HeldRecord, ReadGuard, ReadTarget};
use crate::machine::{Location, ReadTicket, RecordRef};
use crate::memory::RecordMemory;
use crate::shared::LogShared;
use larder_format::disk::{BLOCK_BYTES, RecordBody, RecordHeader};
use larder_format::{PageId, PageMeta};
use larder_io::{Done, Operation, Priority};
use larder_memory::Slot;
use larder_runtime::fail_point;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use tokio::sync::oneshot;

pub(crate) type VerifiedPage = (PageMeta, Slot);

impl LogShared {
    /// Looks up a page and reads it. `None` is a miss: the page does not exist, or neither its
    /// record nor the fallback is intact.
    pub(crate) async fn read_page(self: &Arc<Self>, id: &PageId) -> Result<Option<VerifiedPage>, L3Error> {
        let now = self.clock.now_unix_ms();
        let Some(ticket) = self.entries().begin_read(id, now) else { return Ok(None) };
        self.read_client_record(id, ticket).await
    }

    pub(crate) async fn read_page_at(self: &Arc<Self>, location: &Location) -> Result<Option<VerifiedPage>, L3Error> {
        let now = self.clock.now_unix_ms();
        let Some(ticket) = self.entries().begin_read_at(location, now) else { return Ok(None) };
        self.read_client_record(&location.id, ticket).await
    }

    /// Reads a record for a client. If the record is damaged, or the device cannot read it, reads
    /// the other record of the page, once.
    async fn read_client_record(
        self: &Arc<Self>,
        id: &PageId,
        ticket: ReadTicket,
    ) -> Result<Option<VerifiedPage>, L3Error> {
        let first = ticket.record;
        let mut page = self.read_record(ticket, Priority::Demand).await;
        if may_have_other_record(&page)
            && let Some(other) = self.begin_other_read(id, first)
        {
            page = self.read_record(other, Priority::Demand).await;
        }
        let page = page?;
        if let Some((_, payload)) = &page {
            self.counters.reads.add(1);
            self.counters.read_bytes.add(payload.len() as u64);
        }
        Ok(page)
    }

    /// Reads the header of a page's record, and checks that it is the record that the index names.
    /// The payload is not read, so its checksums are those that it should have. `None` is a miss,
    /// as in [`LogShared::read_page_at`].
    pub(crate) async fn read_meta_at(self: &Arc<Self>, location: &Location) -> Result<Option<PageMeta>, L3Error> {
        let now = self.clock.now_unix_ms();
        let Some(ticket) = self.entries().begin_read_at(location, now) else { return Ok(None) };
        let first = ticket.record;
        let meta = self.read_header(ticket).await;
        // As for a read of the whole page.
        if may_have_other_record(&meta)
            && let Some(other) = self.begin_other_read(&location.id, first)
        {
            return self.read_header(other).await;
        }
        meta
    }

    /// Keeps the record of a page in place, and reads its header as
    /// [`LogShared::read_meta_at`] does. Does not try another record: the caller reads the page
    /// through the log then.
    pub(crate) async fn hold_at(self: &Arc<Self>, location: &Location) -> Result<Option<HeldRecord>, L3Error> {
        let now = self.clock.now_unix_ms();
        let Some(ticket) = self.entries().begin_read_at(location, now) else { return Ok(None) };
        let guard = ReadGuard::new(self, ticket);
        let record = guard.target().record;
        // `None` if the record was replaced just now.
        let Some(ticket) = self.entries().begin_maintenance_read(record) else { return Ok(None) };
        let meta = self.read_header(ticket).await?.filter(|meta| meta.id == location.id);
        Ok(meta.map(|meta| HeldRecord { meta, guard }))
    }

    /// Begins a read of the record that the index names now, unless it is `first`. The read of
    /// `first` has dropped or exchanged it, if it was damaged or unreadable. Otherwise it is
    /// intact, and of another page with the same fingerprint.
    fn begin_other_read(self: &Arc<Self>, id: &PageId, first: RecordRef) -> Option<ReadTicket> {
        let ticket = self.entries().begin_read(id, self.clock.now_unix_ms())?;
        if ticket.record != first {
            return Some(ticket);
        }
        drop(ReadGuard::new(self, ticket));
        None
    }

    async fn read_header(self: &Arc<Self>, ticket: ReadTicket) -> Result<Option<PageMeta>, L3Error> {
        let guard = ReadGuard::new(self, ticket);
        let target = guard.target();
        let memory = RecordMemory::header(&self.arena).ok_or(L3Error::NoMemory { bytes: BLOCK_BYTES })?;
        let Some(RecordMemory { slot, .. }) = self.read_blocks(memory, guard, Priority::Demand).await? else {
            return Ok(None);
        };
        match self.verify_header(&target, &slot) {
            Ok(meta) => Ok(target.is_wanted(&meta).then_some(meta)),
            Err(problem) => {
                self.drop_damaged(&target, &problem, &slot);
                Ok(None)
            }
        }
    }

    /// Reads the record of a ticket into new memory. `None` if the record is damaged; it was
    /// dropped then.
    pub(crate) async fn read_record(
        self: &Arc<Self>,
        ticket: ReadTicket,
        priority: Priority,
    ) -> Result<Option<VerifiedPage>, L3Error> {
        let guard = ReadGuard::new(self, ticket);
        let memory = self.allocate_record(guard.target().entry.payload_bytes as usize)?;
        self.read_record_into(memory, guard, priority).await
    }

    /// Reads the record of the guard into memory of its exact length. `None` if the record is
    /// damaged; it was dropped then.
    pub(crate) async fn read_record_into(
        self: &Arc<Self>,
        memory: RecordMemory,
        guard: ReadGuard,
        priority: Priority,
    ) -> Result<Option<VerifiedPage>, L3Error> {
        let target = guard.target();
        // Header and payload are adjacent: one request reads both.
        let Some(memory) = self.read_blocks(memory, guard, priority).await? else { return Ok(None) };
        let (header, payload) = memory.split();
        match self.verify_record(&target, &header, &payload) {
            Ok(meta) => Ok(target.is_wanted(&meta).then(|| (meta, payload.freeze()))),
            Err(problem) => {
                self.drop_damaged(&target, &problem, &header);
                Ok(None)
            }
        }
    }

    /// Fills memory from the start of the guard's record. `None` if the file ends before it does;
    /// the record was dropped then.
    async fn read_blocks(
        self: &Arc<Self>,
        memory: RecordMemory,
        guard: ReadGuard,
        priority: Priority,
    ) -> Result<Option<RecordMemory>, L3Error> {
        let target = guard.target();
        let place = target.entry.place;
        let segment = place.segment;
        let operation = Operation::read_split(place.offset, memory.block, memory.slot);
        let (reply, answer) = oneshot::channel();
        let on_done = move |done: Done| {
            if fail_point!("log.abandoned-read-leaks") && reply.is_closed() {
                return std::mem::forget(guard);
            }
            // The device is done with the segment, whether or not the reader still waits for the
            // page.
            drop(guard);
            let _ = reply.send(done);
        };
        self.device.submit(segment, priority, operation, Box::new(on_done)).await?;
        let Done { operation, result } = answer.await.map_err(|_| L3Error::Closed)?;
        if let Err(error) = result {
            // The file ends inside the record: an operator truncated it.
            if error.kind() == io::ErrorKind::UnexpectedEof {
                self.drop_damaged(&target, &error, &[]);
                return Ok(None);
            }
            // The record may be readable later, but until then every reader would wait for an
            // error. So it becomes the fallback of the page's other record. The scrub reads all
            // pages of a device that may fail for a moment only, so it drops none.
            if priority != Priority::Idle {
                let now = self.clock.now_unix_ms();
                self.update_log(|log| log.avoid_unreadable(target.record, now));
            }
            return Err(self.io_error("read", segment, error));
        }
        let Operation::Read { block, slot, .. } = operation else { return Ok(None) };
        Ok(Some(RecordMemory { block, slot }))
    }

    /// Checks that header and payload are the record that the index names, with every byte intact.
    /// Returns the metadata of the page, or a description of the damage.
    fn verify_record(&self, target: &ReadTarget, header: &[u8], payload: &[u8]) -> Result<PageMeta, String> {
        let meta = self.verify_header(target, header)?;
        if !fail_point!("log.read-skips-checksum") {
            meta.verify(&meta.id, payload).map_err(|mismatch| mismatch.to_string())?;
        }
        Ok(meta)
    }

    /// Checks that a header is that of the record that the index names. Returns the metadata of its
    /// page, or a description of the damage.
    fn verify_header(&self, target: &ReadTarget, header: &[u8]) -> Result<PageMeta, String> {
        let entry = &target.entry;
        let record = RecordHeader::decode_at_stated_place(header, &self.log_id).map_err(|error| error.to_string())?;
        let RecordBody::Page(meta) = record.body else { return Err("the record is not a page".into()) };
        // Numbers are unique in the log, so this is the record that was indexed. Its header states
        // the page.
        let is_expected = record.place == entry.place && record.number == entry.number;
        if !is_expected && !fail_point!("log.read-skips-identity") {
            return Err(format!(
                "another record is here: number {} of page {:?}, written for {:?}",
                record.number, meta.id, record.place
            ));
        }
        Ok(meta)
    }

    /// Drops a damaged page, counts it, and logs the evidence. Calls the damage listener if the
    /// record was still the current one, and the page is known: maintenance learns its name from
    /// the header only.
    fn drop_damaged(&self, target: &ReadTarget, problem: &dyn Display, header: &[u8]) {
        let entry = &target.entry;
        self.counters.corrupt.add(1);
        let id = target.id.or_else(|| self.stated_page(target, header));
        let was_current = self.update_log(|log| log.drop_damaged(target.record));
        tracing::warn!(
            page = ?id,
            file = %self.segment_path(entry.place.segment).display(),
            offset = entry.place.offset,
            epoch = entry.place.epoch,
            record = entry.number,
            payload_bytes = entry.payload_bytes,
            header_start = ?header.get(..64),
            %problem,
            "L3: dropped a damaged page; readers get a miss. If this repeats, check the device and run `larder verify`"
        );
        if let Some(id) = id.filter(|_| was_current) {
            self.damage.report(id);
        }
    }

    /// The page that an intact header names.
    fn stated_page(&self, target: &ReadTarget, header: &[u8]) -> Option<PageId> {
        self.verify_header(target, header).ok().map(|meta| meta.id)
    }
}

/// Returns `true` if a read found its record damaged or unreadable.
fn may_have_other_record<T>(read: &Result<Option<T>, L3Error>) -> bool {
    matches!(read, Ok(None) | Err(L3Error::Io { .. }))
}

impl ReadTarget {
    /// Returns `true` unless the client asked for another page, which has the same fingerprint. Its
    /// answer is a miss.
    fn is_wanted(&self, meta: &PageMeta) -> bool {
        self.id.is_none_or(|id| id == meta.id) || fail_point!("log.read-skips-identity")
    }
}
