//! Recovery of the index at the start of a log. Reads are served while it runs.
//!
//! Steps:
//!
//! 1. [`find_segments`] reads the header of every segment, and searches headerless segments for
//!    their epoch.
//! 2. The log decides which files do not belong to it or are not trusted. [`discard_segments`] and
//!    [`rename_misplaced`] remove them from the log before it is used.
//! 3. [`recover`] scans the segments, several at a time, and passes them to the log newest first. A
//!    tombstone is never older than the records that it deletes, so each page is served as soon as
//!    it is found.
//! 4. After the last segment, writers continue. Retention then learns the recovered pages in the
//!    background.

use crate::L3Error;
use crate::machine::{FoundSegment, ScannedSegment, SegmentEpoch, SegmentScan};
use crate::memory::private_memory;
use crate::report::RecoveryReport;
use crate::shared::{LogShared, Preparations};
use futures::stream::{self, StreamExt, TryStreamExt};
use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, LogId, SegmentHeader};
use larder_format::epoch::EpochSearch;
use larder_format::footer::RecordSummary;
use larder_io::device::run;
use larder_io::{Block, Device, Done, Operation, Priority, segment_name};
use larder_memory::{Arena, SlotMut};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// Number of headers read concurrently. These are single blocks, and a device takes more of them
/// than of pages.
const HEADER_READS: usize = 64;
/// Maximum number of segments scanned concurrently. The free memory may lower it, see
/// [`scan_segments`].
const SCANS: usize = 16;
/// Maximum bytes of memory per scan. A scan that gets less proceeds in smaller steps and
/// takes longer.
const SCAN_BYTES: usize = 1 << 20;
/// Retries of a scan for memory: 10 s in total. Other devices and clients may hold all of it for a
/// while.
const MEMORY_RETRIES: u32 = 1000;
const MEMORY_RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Attempts per read. A single failed read could cost all older segments their trust.
const READ_ATTEMPTS: u32 = 4;
const READ_RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Returns the memory for scans: the arena, or 16 MiB apart from it if clients may map the arena.
pub(crate) fn scan_memory(arena: &Arc<Arena>) -> io::Result<Arc<Arena>> {
    private_memory(arena, SCANS * SCAN_BYTES)
}

#[derive(Clone, Copy)]
pub(crate) struct RecoveryIo<'a> {
    pub(crate) device: &'a dyn Device,
    /// Memory that no client maps, see [`scan_memory`].
    pub(crate) memory: &'a Arc<Arena>,
    pub(crate) log_id: LogId,
}

impl RecoveryIo<'_> {
    /// Reads a part of a segment. Tries several times, because a device that fails once may succeed
    /// a moment later.
    async fn read_segment(&self, segment: u32, offset: u64, mut slot: SlotMut) -> io::Result<SlotMut> {
        let mut attempt = 1;
        loop {
            let done = run(self.device, segment, Priority::Demand, Operation::read(offset, slot)).await?;
            let Done { operation: Operation::Read { slot: back, .. }, result } = done else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            match result {
                Ok(()) => return Ok(back),
                Err(error) if attempt == READ_ATTEMPTS => return Err(error),
                Err(error) => {
                    let file = self.device.path().join(segment_name(segment));
                    let file = file.display();
                    tracing::warn!(%file, offset, %error, attempt, "L3 recovery: a read failed; trying again");
                }
            }
            slot = back;
            attempt += 1;
            // A device that has just failed often fails again at once, for instance while it
            // resets.
            self.device.sleep(READ_RETRY_PAUSE).await;
        }
    }

    /// Allocates memory for a read. If there is less than `bytes`, allocates the half, or a
    /// quarter, and so on: the scan then proceeds in smaller steps. Waits while there is none.
    /// Returns `None` after [`MEMORY_RETRIES`].
    async fn allocate(&self, bytes: usize) -> Option<SlotMut> {
        for _ in 0..MEMORY_RETRIES {
            let halves = std::iter::successors(Some(bytes), |bytes| Some(bytes / 2 / BLOCK_BYTES * BLOCK_BYTES));
            let mut halves = halves.take_while(|&bytes| bytes > 0);
            if let Some(slot) = halves.find_map(|bytes| self.memory.allocate(bytes)) {
                return Some(slot);
            }
            // Readers return their slots meanwhile, and other devices finish their scans.
            self.device.sleep(MEMORY_RETRY_PAUSE).await;
        }
        let dir = self.device.path().display();
        tracing::warn!(%dir, bytes, "L3 recovery: no memory for a scan; raise the L2 capacity");
        None
    }

    /// Reads the header of a segment, or searches a headerless segment for its epoch.
    async fn find_segment(&self, segment: u32, segment_bytes: u64) -> io::Result<FoundSegment> {
        let file_bytes = self.device.open(segment, segment_bytes).await?;
        let truncated = file_bytes < segment_bytes;
        let mut search = EpochSearch::new(self.log_id, segment, segment_bytes, file_bytes);
        let mut epoch = Err(DecodeError::Short("segment header"));
        if file_bytes >= BLOCK_BYTES as u64 {
            let slot = self.allocate(BLOCK_BYTES).await.ok_or(io::ErrorKind::OutOfMemory)?;
            let slot = self.read_segment(segment, 0, slot).await?;
            epoch = SegmentHeader::decode_epoch(&slot, &self.log_id, segment);
            search.header(&slot);
        }
        let error = match epoch {
            Ok(epoch) => return Ok(FoundSegment { segment, epoch: Ok(epoch), truncated }),
            Err(error) => error,
        };
        let file = self.device.path().join(segment_name(segment));
        let file = file.display();
        tracing::warn!(%file, %error, "L3 recovery: a segment has no valid header; searching its records for the epoch");
        while let Some((offset, len)) = search.next_read() {
            let slot = match self.memory.allocate(len) {
                Some(slot) => slot,
                None => self.allocate(BLOCK_BYTES).await.ok_or(io::ErrorKind::OutOfMemory)?,
            };
            let slot = self.read_segment(segment, offset, slot).await?;
            search.feed(&slot);
        }
        Ok(FoundSegment { segment, epoch: Err(search.finish()), truncated })
    }
}

/// Reads the header of every segment, and searches those that have none. One unreadable segment
/// fails the start, so that no tombstone is lost.
pub(crate) async fn find_segments(io: RecoveryIo<'_>, segment_bytes: u64) -> Result<Vec<FoundSegment>, L3Error> {
    let device = io.device;
    let numbers = device.segments().await.map_err(L3Error::io("list the segments in", device.path()))?;
    let find = |segment: u32| async move {
        let found = io.find_segment(segment, segment_bytes).await;
        // A segment that cannot be read fails the start. If it were taken for a damaged one, it
        // would be removed with all its tombstones.
        found.map_err(L3Error::io("read the header of", device.path().join(segment_name(segment))))
    };
    stream::iter(numbers).map(find).buffer_unordered(HEADER_READS).try_collect().await
}

/// Writes damaged headers anew and syncs them. A failure is only logged, because the next start
/// searches these segments again.
pub(crate) async fn repair_headers(device: &dyn Device, log_id: LogId, segments: &[SegmentEpoch]) {
    for &SegmentEpoch { segment, epoch } in segments {
        let header = SegmentHeader { log_id, segment, epoch };
        let write = Operation::write(0, Block::of(&header.encode()), None);
        for operation in [write, Operation::Sync] {
            let done = run(device, segment, Priority::Demand, operation).await;
            if let Err(error) = done.map_err(io::Error::from).and_then(|done| done.result) {
                let file = device.path().join(segment_name(segment));
                let file = file.display();
                tracing::warn!(%file, %error, "L3 recovery: cannot repair a segment header; the next start tries again");
            }
        }
    }
}

/// Renames files that do not belong to the log, so that no later start considers them.
pub(crate) async fn rename_misplaced(device: &dyn Device, segments: &[u32]) -> Result<(), L3Error> {
    for &segment in segments {
        let file = device.path().join(segment_name(segment));
        let renamed = device.rename_misplaced(segment).await.map_err(L3Error::io("rename", &file))?;
        tracing::warn!(
            file = %file.display(), renamed = %renamed.display(),
            "L3 recovery: a copied or renamed file does not belong to this log; it was renamed, and can be removed"
        );
    }
    Ok(())
}

/// Removes segments before the log is used, durably and in this order. A failure fails the start,
/// and the next start decides again.
pub(crate) async fn discard_segments(
    device: &dyn Device,
    segments: &[u32],
    kept: &[SegmentEpoch],
) -> Result<(), L3Error> {
    // The kept segments are made durable first. A power failure could otherwise revert the header
    // of one to an older epoch, whose tombstones stand in a segment that is removed now.
    for at in kept.iter().filter(|_| !segments.is_empty()) {
        let done = run(device, at.segment, Priority::Demand, Operation::Sync).await;
        let synced = done.map_err(io::Error::from).and_then(|done| done.result);
        synced.map_err(L3Error::io("sync", device.path().join(segment_name(at.segment))))?;
    }
    for &segment in segments {
        let file = device.path().join(segment_name(segment));
        tracing::warn!(
            file = %file.display(),
            "L3 recovery: removing a segment, because it is empty, beyond the capacity, or its tombstones may be lost"
        );
        device.remove(segment).await.map_err(L3Error::io("remove", file))?;
    }
    Ok(())
}

/// Scans the segments and passes them to the log, newest first. Then lets writers continue.
///
/// `begun` is the report of the work before. After an error the log stays readable as far as it was
/// recovered, and takes no writes.
pub(crate) async fn recover(
    shared: Arc<LogShared>,
    scan_order: Vec<SegmentEpoch>,
    begun: RecoveryReport,
    began: Instant,
    memory: Arc<Arena>,
) {
    let Some(empty) = scan_segments(&shared, scan_order, &memory).await else { return };
    drop(memory);
    sync_empty_segments(&shared, empty).await;
    let result = match shared.update_log(|log| log.finish_recovery()) {
        Ok(result) => result,
        Err(error) => return log_failure(&shared, &error),
    };
    let report = RecoveryReport {
        pages: shared.with_log(|log| log.counts().pages),
        io_errors: shared.counters.recovery_io_errors.get(),
        milliseconds: began.elapsed().as_millis() as u64,
        ..begun.with_result(result)
    };
    tracing::info!(dir = %shared.device.path().display(), ?report, "L3 recovered");
    shared.recovery.update(|progress| progress.report = Some(report));
    // Writers that came during recovery try again.
    shared.preparations.update(Preparations::next_turn);
    // The last writes of a crashed process may still be in the device's cache. A power failure must
    // not take them now, after they were served.
    shared.sync_all().await;
}

/// Scans all segments. Returns the numbers of the empty ones, or `None` if recovery cannot
/// continue.
async fn scan_segments(
    shared: &Arc<LogShared>,
    scan_order: Vec<SegmentEpoch>,
    memory: &Arc<Arena>,
) -> Option<Vec<u32>> {
    // Scans take at most half of the free memory: clients are served meanwhile.
    let concurrent = SCANS.min(memory.largest_free() / SCAN_BYTES / 2).max(1);
    let mut scans = stream::iter(scan_order).map(|segment| scan_segment(shared, segment, memory)).buffered(concurrent);
    let mut empty = Vec::new();
    while let Some(scanned) = scans.next().await {
        let Ok(scanned) = scanned else { return None };
        if scanned.records.is_empty() && !scanned.cut_short {
            empty.push(scanned.segment);
        }
        // Of all records, also of pages that are gone: their generations were used.
        let generations = scanned.records.iter().filter_map(|record| match record {
            RecordSummary::Page(page) => Some(page.generation),
            _ => None,
        });
        // Relaxed: callers that need the result of all segments wait for the report, which orders
        // it.
        shared.generation_max.fetch_max(generations.max().unwrap_or(0), Ordering::Relaxed);
        let now = shared.clock.now_unix_ms();
        if let Err(error) = shared.update_log(|log| log.recover_segment(scanned, now)) {
            log_failure(shared, &error);
            return None;
        }
        shared.recovery.update(|progress| progress.segments_scanned += 1);
        // Readers get their turn between two segments.
        tokio::task::yield_now().await;
    }
    Some(empty)
}

fn log_failure(shared: &LogShared, error: &dyn std::fmt::Display) {
    let dir = shared.device.path().display();
    tracing::error!(%dir, %error, "L3 recovery failed: the log stays readable and takes no writes; restart the node");
}

/// Makes the headers of empty segments durable. A power failure could otherwise revert one to its
/// previous epoch, whose pages the index does not know.
async fn sync_empty_segments(shared: &LogShared, empty: Vec<u32>) {
    for segment in empty {
        let synced = shared.run(segment, Priority::Demand, Operation::Sync).await;
        let synced = synced.map_err(io::Error::from).and_then(|done| done.result);
        if let Err(error) = synced {
            let file = shared.segment_path(segment);
            let file = file.display();
            tracing::warn!(%file, %error, "L3 recovery: cannot sync an empty segment; forgets will be slower for a while");
            shared.update_log(|log| log.mark_index_incomplete());
        }
    }
}

/// Scans one segment. An error means that the log was closed. Failed reads and a lack of memory
/// only cut the scan short.
async fn scan_segment(shared: &LogShared, at: SegmentEpoch, memory: &Arc<Arena>) -> Result<ScannedSegment, L3Error> {
    let SegmentEpoch { segment, epoch } = at;
    let io = RecoveryIo { device: &*shared.device, memory, log_id: shared.log_id };
    let mut scan = SegmentScan::new(shared.log_id, segment, epoch, shared.segment_bytes, shared.segment_bytes);
    while let Some(read) = scan.next_read() {
        let Some(slot) = io.allocate(read.len).await else {
            scan.read_failed();
            continue;
        };
        match io.read_segment(segment, read.offset, slot).await {
            Ok(slot) => scan.feed(&slot),
            Err(error) => {
                shared.ensure_open()?;
                shared.counters.recovery_io_errors.add(1);
                let file = shared.segment_path(segment);
                let file = file.display();
                tracing::warn!(
                    %file, offset = read.offset, %error,
                    "L3 recovery: cannot read a segment; pages in it and in older ones may be lost. Check the device"
                );
                scan.read_failed();
            }
        }
    }
    Ok(scan.finish())
}
