//! The state that reads, writes and the background share, and guards for what is under way.
//!
//! Always true: every planned write and every read ticket goes back to the log exactly once, whichever future is dropped
//! and whichever thread ends: the guards see to it. The log is locked for short, never across an await.

use crate::options::WRITE_QUEUE_BYTES_MAX;
use crate::scrub::ScrubProgress;
use crate::stats::Counters;
use crate::{L3Error, L3Options, RecoveryProgress};
use larder_core::log::{Entry, Log, PlannedWrite, PrepareOutcome, ReadTicket, SyncTicket, WriteOutcome};
use larder_core::planted::{Bug, has};
use larder_device::seam::run;
use larder_device::{Arena, Bell, Block, Clock, Device, Done, Lane, Operation, RingGone, Slot, segment_name};
use larder_format::PageId;
use larder_format::disk::{BLOCK_BYTES, LogId};
use parking_lot::{Mutex, RwLock};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

pub(crate) struct Shared {
    pub(crate) arena: Arc<Arena>,
    pub(crate) device: Arc<dyn Device>,
    /// Readers look pages up; whoever plans or reports something locks it for writing.
    log: RwLock<Log>,
    pub(crate) log_id: LogId,
    pub(crate) segment_bytes: u64,
    pub(crate) counters: Counters,
    /// Room in the write queue, in blocks.
    pub(crate) write_queue: Arc<Semaphore>,
    /// Rung when the log wants something done.
    pub(crate) intents: Notify,
    /// Changes whenever a segment was made ready, or could not be.
    pub(crate) prepared: Bell<Preparations>,
    pub(crate) closed: AtomicBool,
    pub(crate) clock: Clock,
    /// How far the recovery is; writers wait for its end.
    pub(crate) progress: Bell<RecoveryProgress>,
    pub(crate) scrub: Mutex<ScrubProgress>,
    /// A pass was asked for.
    pub(crate) scrub_wanted: AtomicBool,
    pub(crate) scrub_bytes_per_second: u64,
    pub(crate) scrub_interval: Duration,
    /// Hears of every page that was dropped since it was damaged.
    pub(crate) on_damage: RwLock<Option<DamageListener>>,
}

/// Called with a page that was dropped since it was damaged; must be quick.
pub(crate) type DamageListener = Arc<dyn Fn(PageId) + Send + Sync>;

/// How preparing segments went so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Preparations {
    /// Grows with every change.
    pub(crate) turn: u64,
    pub(crate) failures: u64,
    /// Of the last failure.
    pub(crate) error: Option<(io::ErrorKind, String)>,
}

impl Preparations {
    pub(crate) fn next_turn(&mut self) {
        self.turn += 1;
    }
}

impl Shared {
    pub(crate) fn new(
        arena: Arc<Arena>,
        device: Arc<dyn Device>,
        log: Log,
        log_id: LogId,
        options: &L3Options,
    ) -> Shared {
        Shared {
            arena,
            device,
            segment_bytes: log.config().segment_bytes,
            log: RwLock::new(log),
            log_id,
            counters: Counters::default(),
            write_queue: Arc::new(Semaphore::new(WRITE_QUEUE_BYTES_MAX / BLOCK_BYTES)),
            intents: Notify::new(),
            prepared: Bell::default(),
            closed: AtomicBool::new(false),
            clock: options.clock,
            progress: Bell::default(),
            scrub: Mutex::default(),
            scrub_wanted: AtomicBool::new(false),
            scrub_bytes_per_second: options.scrub_bytes_per_second,
            scrub_interval: options.scrub_interval,
            on_damage: RwLock::new(None),
        }
    }

    /// Looks at the log.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&Log) -> R) -> R {
        look(&self.log.read())
    }

    /// Changes the log, and wakes the background if that left something to do.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut Log) -> R) -> R {
        let mut log = self.log.write();
        let result = change(&mut log);
        let wanted = log.has_intents();
        drop(log);
        if wanted {
            self.intents.notify_one();
        }
        result
    }

    /// An error once it is closed.
    pub(crate) fn open(&self) -> Result<(), L3Error> {
        match self.closed.load(Ordering::Acquire) {
            true => Err(L3Error::Closed),
            false => Ok(()),
        }
    }

    /// Asks the device, and waits for its answer.
    pub(crate) async fn run(&self, segment: u32, lane: Lane, operation: Operation) -> Result<Done, RingGone> {
        run(&*self.device, segment, lane, operation).await
    }

    pub(crate) fn segment_path(&self, segment: u32) -> PathBuf {
        self.device.path().join(segment_name(segment))
    }

    pub(crate) fn io_error(&self, doing: &'static str, segment: u32, source: io::Error) -> L3Error {
        self.counters.io_errors.add(1);
        let path = self.segment_path(segment);
        tracing::warn!(file = %path.display(), error = %source, "{doing} failed");
        L3Error::Io { doing, path, source }
    }

    /// Hands a planned record to the device. The receiver tells what came of it, after the log was told.
    pub(crate) async fn write_record(
        self: &Arc<Self>,
        write: WriteGuard,
        payload: Option<Slot>,
    ) -> Result<oneshot::Receiver<io::Result<()>>, L3Error> {
        let header = write.header();
        let block = Block::of(&header.encode(&self.log_id));
        let operation = Operation::write(header.place.offset, block, payload);
        let segment = header.place.segment;
        let (reply, answer) = oneshot::channel();
        let on_done = move |done: Done| {
            write.finish(if done.result.is_ok() { WriteOutcome::Written } else { WriteOutcome::Failed });
            // Nobody may wait any more; the log knows.
            let _ = reply.send(done.result);
        };
        self.device.submit(segment, Lane::Background, operation, Box::new(on_done)).await?;
        Ok(answer)
    }

    /// Syncs one segment and tells the log.
    pub(crate) async fn sync_segment(self: &Arc<Self>, ticket: SyncTicket) -> Result<(), L3Error> {
        let segment = ticket.segment;
        let (reply, answer) = oneshot::channel();
        let shared = self.clone();
        // The log hears of it from the device, in the device's order, whether or not the asker still waits: a failed sync
        // that nobody noted would make a later one look as if all were durable.
        let on_done = move |done: Done| {
            let result = if has(Bug::FailedSyncCounts) { Ok(()) } else { done.result };
            shared.counters.syncs.add(1);
            shared.change(|log| log.sync_done(ticket, result.is_ok()));
            let _ = reply.send(result);
        };
        self.device.submit(segment, Lane::Demand, Operation::Sync, Box::new(on_done)).await?;
        let result = answer.await.map_err(|_| L3Error::Closed)?;
        result.map_err(|error| self.io_error("syncing", segment, error))
    }

    pub(crate) fn report_prepared(&self, prepare: &larder_core::log::Prepare, result: Result<(), PrepareFailure>) {
        let outcome = match &result {
            Ok(()) => PrepareOutcome::Ready,
            Err(PrepareFailure { removed: false, .. }) => PrepareOutcome::Stuck,
            Err(PrepareFailure { error, .. }) => match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => PrepareOutcome::Full,
                _ => PrepareOutcome::Removed,
            },
        };
        self.change(|log| log.prepared(prepare, outcome));
        self.prepared.change(|preparations| {
            preparations.next_turn();
            if let Err(PrepareFailure { error, .. }) = result {
                preparations.failures += 1;
                preparations.error = Some((error.kind(), error.to_string()));
            }
        });
    }
}

/// Why a segment could not be made ready.
pub(crate) struct PrepareFailure {
    pub(crate) error: io::Error,
    /// Its file is gone for good.
    pub(crate) removed: bool,
}

/// A planned write under way. Dropped without an outcome, it was never handed to the device.
pub(crate) struct WriteGuard {
    shared: Arc<Shared>,
    planned: Option<PlannedWrite>,
    _queued: Option<OwnedSemaphorePermit>,
}

impl WriteGuard {
    pub(crate) fn new(shared: &Arc<Shared>, planned: PlannedWrite, queued: Option<OwnedSemaphorePermit>) -> WriteGuard {
        WriteGuard { shared: shared.clone(), planned: Some(planned), _queued: queued }
    }

    fn header(&self) -> &larder_format::disk::RecordHeader {
        &self.planned.as_ref().expect("present until finish, which consumes the guard").header
    }

    fn finish(mut self, outcome: WriteOutcome) {
        self.report(outcome);
    }

    fn report(&mut self, outcome: WriteOutcome) {
        if let Some(planned) = self.planned.take() {
            self.shared.change(|log| log.write_done(planned, outcome));
        }
    }
}

impl Drop for WriteGuard {
    fn drop(&mut self) {
        self.report(WriteOutcome::NotSent);
    }
}

/// A read under way.
pub(crate) struct ReadGuard {
    shared: Arc<Shared>,
    ticket: Option<ReadTicket>,
}

impl ReadGuard {
    pub(crate) fn new(shared: &Arc<Shared>, ticket: ReadTicket) -> ReadGuard {
        ReadGuard { shared: shared.clone(), ticket: Some(ticket) }
    }

    /// What it holds.
    pub(crate) fn page(&self) -> Option<(PageId, Entry)> {
        self.ticket.as_ref().map(|ticket| (ticket.id, ticket.entry))
    }
}

impl ReadGuard {
    /// For a planted bug: the log does not hear of its end.
    pub(crate) fn leak(mut self) {
        let _ = self.ticket.take();
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.shared.change(|log| log.end_read(ticket));
        }
    }
}
