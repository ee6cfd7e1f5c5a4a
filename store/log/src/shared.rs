//! State of an open log that reads, writes and background tasks share.
//!
//! Invariants:
//! - The lock of the log is held for short computations only, never across an await.
//! - Every planned write and every read ticket returns to the log exactly once, see `guards.rs`.

use crate::damage::DamageReports;
use crate::lock::LogLock;
use crate::machine::{Log, SharedIndex, SyncTicket};
use crate::options::WRITE_QUEUE_BYTES_MAX;
use crate::report::RecoveryProgress;
use crate::stats::Counters;
use crate::{L3Error, L3Options};
use larder_format::disk::{BLOCK_BYTES, LogId};
use larder_io::device::run;
use larder_io::{Device, Done, Operation, Priority, RingClosed, segment_name};
use larder_memory::Arena;
use larder_runtime::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use larder_runtime::{Clock, OrderedWatch, fail_point};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::{Notify, Semaphore, oneshot};

/// Results of all preparations so far, for writers that wait for room.
#[derive(Debug, Clone, Default)]
pub(crate) struct Preparations {
    /// Grows with every event after which a writer should try again: a segment is ready, a
    /// preparation failed, copies ended, recovery ended, or the log was closed.
    pub(crate) turn: u64,
    pub(crate) failures: u64,
    /// Error of the last failure.
    pub(crate) error: Option<Arc<io::Error>>,
}

impl Preparations {
    pub(crate) fn next_turn(&mut self) {
        self.turn += 1;
    }
}

pub(crate) struct LogShared {
    pub(crate) arena: Arc<Arena>,
    pub(crate) device: Arc<dyn Device>,
    log: LogLock,
    pub(crate) log_id: LogId,
    pub(crate) segment_bytes: u64,
    pub(crate) counters: Counters,
    /// Free room of the write queue, in blocks. A writer takes its permits before it plans, and
    /// returns them when the device has answered.
    pub(crate) write_queue: Arc<Semaphore>,
    pub(crate) intents: Notify,
    pub(crate) preparations: OrderedWatch<Preparations>,
    closed: AtomicBool,
    pub(crate) clock: Clock,
    pub(crate) recovery: OrderedWatch<RecoveryProgress>,
    /// Largest generation of a put that recovery has found so far, current or not.
    pub(crate) generation_max: AtomicU64,
    pub(crate) damage: DamageReports,
}

impl LogShared {
    pub(crate) fn new(
        arena: Arc<Arena>,
        device: Arc<dyn Device>,
        log: Log,
        log_id: LogId,
        options: &L3Options,
    ) -> LogShared {
        LogShared {
            arena,
            device,
            segment_bytes: log.config().segment_bytes,
            log: LogLock::new(log),
            log_id,
            counters: Counters::default(),
            write_queue: Arc::new(Semaphore::new(WRITE_QUEUE_BYTES_MAX / BLOCK_BYTES)),
            intents: Notify::new(),
            preparations: OrderedWatch::default(),
            closed: AtomicBool::new(false),
            clock: options.clock,
            recovery: OrderedWatch::default(),
            generation_max: AtomicU64::new(0),
            damage: DamageReports::default(),
        }
    }

    /// For lookups and reads, which do not wait for the log's lock.
    pub(crate) fn entries(&self) -> &SharedIndex {
        self.log.entries()
    }

    /// Calls `read` with the log, under its lock. It must be short and must not use this log again.
    pub(crate) fn with_log<R>(&self, read: impl FnOnce(&Log) -> R) -> R {
        read(&self.log.lock())
    }

    /// Changes the log under its lock, and wakes the background task if there is work for it.
    pub(crate) fn update_log<R>(&self, change: impl FnOnce(&mut Log) -> R) -> R {
        let mut log = self.log.lock();
        let result = change(&mut log);
        let has_intents = log.has_intents();
        // Unlocked first: the woken task needs the lock at once.
        drop(log);
        if has_intents {
            // `notify_one` keeps one wake-up for a task that is busy, so no intent is overlooked.
            self.intents.notify_one();
        }
        result
    }

    pub(crate) fn ensure_open(&self) -> Result<(), L3Error> {
        // Acquire pairs with the release in `mark_closed`: a caller that sees the flag sees all
        // that preceded it.
        if self.closed.load(Ordering::Acquire) { Err(L3Error::Closed) } else { Ok(()) }
    }

    /// Refuses new requests from now on. Returns `true` if the log was closed before.
    pub(crate) fn mark_closed(&self) -> bool {
        self.closed.swap(true, Ordering::AcqRel)
    }

    pub(crate) async fn run(&self, segment: u32, priority: Priority, operation: Operation) -> Result<Done, RingClosed> {
        run(&*self.device, segment, priority, operation).await
    }

    pub(crate) fn segment_path(&self, segment: u32) -> PathBuf {
        self.device.path().join(segment_name(segment))
    }

    /// Counts and logs a failed request, and returns the error for the caller. `action` is an
    /// infinitive.
    pub(crate) fn io_error(&self, action: &'static str, segment: u32, source: io::Error) -> L3Error {
        self.counters.io_errors.add(1);
        let path = self.segment_path(segment);
        tracing::warn!(file = %path.display(), error = %source, "L3: cannot {action} a segment; check the device");
        L3Error::Io { action, path, source }
    }

    /// Syncs one segment, and reports the result to the log even if this future is dropped. After a
    /// failed sync the segment takes no more records.
    pub(crate) async fn sync_segment(self: &Arc<Self>, ticket: SyncTicket) -> Result<(), L3Error> {
        let segment = ticket.segment;
        let (reply, answer) = oneshot::channel();
        let shared = self.clone();
        // The device's completion reports to the log, not this future, because the future may be
        // dropped. If a failed sync went unreported, a later sync would make the lost writes look
        // durable.
        let on_done = move |done: Done| {
            let result = if fail_point!("log.failed-sync-counts") { Ok(()) } else { done.result };
            shared.counters.syncs.add(1);
            shared.update_log(|log| log.sync_done(ticket, result.is_ok()));
            let _ = reply.send(result);
        };
        self.device.submit(segment, Priority::Demand, Operation::Sync, Box::new(on_done)).await?;
        let result = answer.await.map_err(|_| L3Error::Closed)?;
        result.map_err(|error| self.io_error("sync", segment, error))
    }

    /// Tickets for the wanted segments that have unsynced writes.
    pub(crate) fn sync_tickets(&self, mut is_wanted: impl FnMut(u32) -> bool) -> Vec<SyncTicket> {
        let plan = self.with_log(|log| log.sync_plan());
        plan.into_iter().filter(|ticket| is_wanted(ticket.segment)).collect()
    }

    /// Syncs every segment with unsynced writes. Failed syncs are counted and logged, and reported
    /// to the log.
    pub(crate) async fn sync_all(self: &Arc<Self>) {
        for ticket in self.sync_tickets(|_| true) {
            let _ = self.sync_segment(ticket).await;
        }
    }
}
