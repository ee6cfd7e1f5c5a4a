//! Guards for reads and writes in flight: they report to the log on drop, so that no ticket is
//! lost.
//!
//! A ticket that never returns would keep its segment from being reclaimed, and the log would stop
//! when it is full. A dropped future, a closed device and a panic all drop the guard.

use crate::machine::{Entry, PlannedWrite, ReadTicket, RecordRef, WriteOutcome};
use crate::shared::LogShared;
use larder_format::disk::{BLOCK_BYTES, LogId, RecordHeader};
use larder_format::{PageId, PageMeta};
use larder_io::DeviceFile;
use std::io;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// A planned write. If dropped without an outcome, it counts as never sent to the device. The log
/// then leaves a hole there, and seals the segment if it is open.
pub(crate) struct WriteGuard {
    shared: Arc<LogShared>,
    planned: Option<PlannedWrite>,
    /// The record's share of the write queue, returned on drop. `None` for tombstones and copies,
    /// which take no room in the queue.
    _queue_permit: Option<OwnedSemaphorePermit>,
}

impl WriteGuard {
    pub(crate) fn new(
        shared: &Arc<LogShared>,
        planned: PlannedWrite,
        queue_permit: Option<OwnedSemaphorePermit>,
    ) -> WriteGuard {
        WriteGuard { shared: shared.clone(), planned: Some(planned), _queue_permit: queue_permit }
    }

    pub(crate) fn header(&self) -> &RecordHeader {
        &self.planned.as_ref().expect("present until finish, which consumes the guard").header
    }

    pub(crate) fn finish(mut self, outcome: WriteOutcome) {
        self.report(outcome);
    }

    fn report(&mut self, outcome: WriteOutcome) {
        if let Some(planned) = self.planned.take() {
            self.shared.update_log(|log| log.write_done(planned, outcome));
        }
    }
}

impl Drop for WriteGuard {
    fn drop(&mut self) {
        self.report(WriteOutcome::NotSent);
    }
}

/// The record that a read is to find.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadTarget {
    /// The page that a client asked for. `None` in maintenance.
    pub(crate) id: Option<PageId>,
    pub(crate) record: RecordRef,
    pub(crate) entry: Entry,
}

/// A read in flight. It keeps its segment from being reclaimed until the device has answered, even
/// if the reader has given up.
pub(crate) struct ReadGuard {
    shared: Arc<LogShared>,
    target: ReadTarget,
    ticket: Option<ReadTicket>,
}

impl ReadGuard {
    pub(crate) fn new(shared: &Arc<LogShared>, ticket: ReadTicket) -> ReadGuard {
        let target = ReadTarget { id: ticket.id, record: ticket.record, entry: ticket.entry };
        ReadGuard { shared: shared.clone(), target, ticket: Some(ticket) }
    }

    pub(crate) fn target(&self) -> ReadTarget {
        self.target
    }
}

/// Record of a page that another process reads by itself. The log does not reuse its segment until
/// this is dropped. Owners must drop it in bounded time: a log of few segments waits for it.
pub struct HeldRecord {
    pub(crate) meta: PageMeta,
    pub(crate) guard: ReadGuard,
}

impl HeldRecord {
    /// Metadata of the page, with the checksums that prove its payload.
    pub fn meta(&self) -> &PageMeta {
        &self.meta
    }

    /// Identity of the log, and the number of its segment.
    pub fn segment(&self) -> (LogId, u32) {
        (self.guard.shared.log_id, self.guard.target.entry.place.segment)
    }

    /// Start of the payload in the file of the segment, in bytes: a multiple of [`BLOCK_BYTES`].
    pub fn payload_offset(&self) -> u64 {
        // The header takes the first block of the record.
        self.guard.target.entry.place.offset + BLOCK_BYTES as u64
    }

    /// Opens the file of the segment for reads. It stays the same file while this is held.
    pub async fn open_file(&self) -> io::Result<DeviceFile> {
        self.guard.shared.device.open_read_only(self.guard.target.entry.place.segment).await
    }
}

impl std::fmt::Debug for HeldRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldRecord").field("id", &self.meta.id).field("target", &self.guard.target).finish()
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        // Without the lock of the log: this runs on the thread that completes I/O.
        if self.ticket.take().is_some_and(ReadTicket::end) {
            self.shared.update_log(|log| log.reads_ended());
        }
    }
}
