//! What the segments hold at the start.
//!
//! First every segment's header is read: then it is known which segments there are, in which order they were written, and
//! which must go. The log can be asked from then on. The segments are scanned in the background, several at a time, and
//! handed to the log newest first: whatever was forgotten was forgotten in a newer segment than it stands in, so a page may
//! be served as soon as it is found. Writers wait until the last one was scanned.

use crate::L3Error;
use crate::background::sync_all;
use crate::shared::{Preparations, Shared};
use futures::stream::{self, StreamExt, TryStreamExt};
use larder_core::log::{FoundSegment, ScannedSegment, SegmentLife, SegmentScan};
use larder_device::seam::run;
use larder_device::{Arena, Block, Device, Done, Lane, Operation, SlotMut, segment_name};
use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, LogId, SegmentHeader};
use larder_format::life::LifeSearch;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Headers that are read at a time. They are small blocks, of which a device takes more at once than of pages.
const HEADERS_AT_ONCE: usize = 64;
/// Segments that are scanned at a time.
const SCANS: usize = 16;
/// Bytes of the arena that a scan uses.
const SCAN_BYTES: usize = 1 << 20;
/// Pages that enter the keeper between two looks at what else there is to do.
const SETTLE_PAGES: usize = 512;
/// Times that a scan asks for memory, and the pause between.
const MEMORY_TRIES: u32 = 1000;
const MEMORY_PAUSE: Duration = Duration::from_millis(10);
/// Times that a read is tried, and the pause between.
const READ_TRIES: u32 = 4;
const READ_PAUSE: Duration = Duration::from_millis(50);

/// What was found at the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryReport {
    /// The log was made just now.
    pub created: bool,
    /// Pages that can be found.
    pub pages: u64,
    /// Tombstones found.
    pub tombstones: u64,
    /// Segments with records.
    pub segments: u64,
    /// Segments that were read from their footers; the others were scanned record by record.
    pub segments_by_footer: u64,
    /// Segments removed: those that hold nothing, the oldest that are more than the capacity allows, and those that a
    /// damaged one may have held tombstones for.
    pub segments_removed: u64,
    /// Files with the name of a segment that are none of the log's: copies, or renamed. They were set aside.
    pub strays: u64,
    /// Segments that could not be read to their end, or in which something is lost.
    pub segments_cut_short: u64,
    /// Pages in these and in older ones, which are not served: they may have been forgotten.
    pub pages_distrusted: u64,
    /// Records that were begun and are not whole.
    pub torn_records: u64,
    /// Reads that the device refused.
    pub io_errors: u64,
    /// Duration in milliseconds.
    pub milliseconds: u64,
}

/// How far the recovery is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryProgress {
    /// Segments scanned.
    pub segments_scanned: u64,
    /// Segments to scan.
    pub segments: u64,
    /// Present when all was scanned.
    pub report: Option<RecoveryReport>,
}

/// Reads every segment's header, and looks through those that have none.
pub(crate) async fn find_segments(
    device: &Arc<dyn Device>,
    arena: &Arc<Arena>,
    log_id: LogId,
    segment_bytes: u64,
) -> Result<Vec<FoundSegment>, L3Error> {
    let numbers = device.segments().await.map_err(L3Error::io("listing", device.path()))?;
    let find = |segment: u32| async move {
        let found = find_segment(device, arena, segment, log_id, segment_bytes).await;
        // Not to be taken for a damaged one: that would be removed, and with it what it says is forgotten.
        found.map_err(L3Error::io("reading the header of", device.path().join(segment_name(segment))))
    };
    stream::iter(numbers).map(find).buffer_unordered(HEADERS_AT_ONCE).try_collect().await
}

async fn find_segment(
    device: &Arc<dyn Device>,
    arena: &Arc<Arena>,
    segment: u32,
    log_id: LogId,
    segment_bytes: u64,
) -> io::Result<FoundSegment> {
    let file_bytes = device.open(segment, segment_bytes).await?;
    let mut search = LifeSearch::new(log_id, segment, segment_bytes, file_bytes);
    let mut life = Err(DecodeError::Short("segment header"));
    if file_bytes >= BLOCK_BYTES as u64 {
        let slot = memory(&**device, arena, BLOCK_BYTES).await.ok_or(io::ErrorKind::OutOfMemory)?;
        let slot = read_patiently(&**device, segment, 0, slot).await?;
        life = SegmentHeader::decode_life(&slot, &log_id, segment);
        search.header(&slot);
    }
    let short = file_bytes < segment_bytes;
    let error = match life {
        Ok(life) => return Ok(FoundSegment { segment, life: Ok(life), short }),
        Err(error) => error,
    };
    tracing::warn!(segment, %error, "recovery: the segment has no header, and is looked through");
    while let Some((offset, len)) = search.next_read() {
        let slot = match arena.allocate(len) {
            Some(slot) => slot,
            None => memory(&**device, arena, BLOCK_BYTES).await.ok_or(io::ErrorKind::OutOfMemory)?,
        };
        let slot = read_patiently(&**device, segment, offset, slot).await?;
        search.feed(&slot);
    }
    Ok(FoundSegment { segment, life: Err(search.finish()), short })
}

/// Writes headers again that were damaged. If that fails, the next start looks through their segments again.
pub(crate) async fn mend(device: &Arc<dyn Device>, log_id: LogId, segments: &[SegmentLife]) {
    for &SegmentLife { segment, life } in segments {
        let header = SegmentHeader { log_id, segment, life };
        let write = Operation::write(0, Block::of(&header.encode()), None);
        for operation in [write, Operation::Sync] {
            let done = run(&**device, segment, Lane::Demand, operation).await;
            if let Err(error) = done.map_err(io::Error::from).and_then(|done| done.result) {
                tracing::warn!(segment, %error, "recovery: the header of the segment stays damaged");
            }
        }
    }
}

/// Reads, and tries again: a device that failed once may do it a moment later, and at a start much depends on it.
async fn read_patiently(device: &dyn Device, segment: u32, offset: u64, mut slot: SlotMut) -> io::Result<SlotMut> {
    let mut tries = 1;
    loop {
        let done = run(device, segment, Lane::Demand, Operation::read(offset, slot)).await?;
        let Done { operation: Operation::Read { slot: back, .. }, result } = done else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        match result {
            Ok(()) => return Ok(back),
            Err(error) if tries == READ_TRIES => return Err(error),
            Err(error) => tracing::warn!(segment, offset, %error, tries, "recovery: read failed"),
        }
        slot = back;
        tries += 1;
        device.sleep(READ_PAUSE).await;
    }
}

/// Sets aside what is none of the log's segments.
pub(crate) async fn set_aside(device: &Arc<dyn Device>, strays: &[u32]) -> Result<(), L3Error> {
    for &segment in strays {
        let file = device.path().join(segment_name(segment));
        let stray = device.set_aside(segment).await.map_err(L3Error::io("renaming", &file))?;
        let (file, stray) = (file.display(), stray.display());
        tracing::warn!(%file, %stray, "a copied or renamed file is none of the log's segments; it is set aside, to be removed");
    }
    Ok(())
}

/// Removes what must go before the log is used, durably and in this order. What stays is made durable as it was found before
/// that: a header that a loss of power takes away would bring a life back whose tombstones may stand in what is removed.
pub(crate) async fn discard(device: &Arc<dyn Device>, segments: &[u32], kept: &[SegmentLife]) -> Result<(), L3Error> {
    for at in kept.iter().filter(|_| !segments.is_empty()) {
        let done = run(&**device, at.segment, Lane::Demand, Operation::Sync).await;
        let synced = done.map_err(io::Error::from).and_then(|done| done.result);
        synced.map_err(L3Error::io("syncing", device.path().join(segment_name(at.segment))))?;
    }
    for &segment in segments {
        let file = device.path().join(segment_name(segment));
        tracing::warn!(file = %file.display(), "segment is removed: empty, not to be trusted, or more than the capacity allows");
        device.remove(segment).await.map_err(L3Error::io("removing", file))?;
    }
    Ok(())
}

/// Scans the segments, newest first, and gives the log what they hold.
pub(crate) async fn restore(shared: Arc<Shared>, order: Vec<SegmentLife>, begun: RecoveryReport, began: Instant) {
    let at_once = SCANS.min(shared.arena.largest_free() / SCAN_BYTES / 2).max(1);
    let mut scans = stream::iter(order).map(|segment| scan(&shared, segment)).buffered(at_once);
    let mut empty = Vec::new();
    while let Some(scanned) = scans.next().await {
        let Ok(scanned) = scanned else { return };
        if scanned.records.is_empty() && !scanned.cut_short {
            empty.push(scanned.segment);
        }
        let now = shared.clock.now_unix_ms();
        if let Err(error) = shared.change(|log| log.restore(scanned, now)) {
            tracing::error!(%error, "recovery: the log stays readable as far as it was scanned, and takes no writes");
            return;
        }
        shared.progress.change(|progress| progress.segments_scanned += 1);
        tokio::task::yield_now().await;
    }
    drop(scans);
    // A new header that a loss of power takes away would bring the pages of the life before back, of which nobody knows.
    for segment in empty {
        let synced = shared.run(segment, Lane::Demand, Operation::Sync).await;
        if !matches!(&synced, Ok(done) if done.result.is_ok()) {
            tracing::warn!(segment, ?synced, "recovery: an empty segment cannot be synced");
            shared.change(|log| log.distrust_index());
        }
    }
    let restored = match shared.change(|log| log.restored()) {
        Ok(restored) => restored,
        Err(error) => return tracing::error!(%error, "recovery: the log takes no writes"),
    };
    let report = RecoveryReport {
        pages: shared.look(|log| log.counts().pages),
        tombstones: restored.tombstones,
        segments: restored.segments,
        segments_by_footer: restored.footers,
        segments_cut_short: restored.cut_short,
        pages_distrusted: restored.distrusted,
        torn_records: restored.torn_records,
        io_errors: shared.counters.recovery_io_errors.get(),
        milliseconds: began.elapsed().as_millis() as u64,
        ..begun
    };
    tracing::info!(dir = %shared.device.path().display(), ?report, "L3 recovered");
    // Writers wait for this.
    shared.progress.change(|progress| progress.report = Some(report));
    shared.prepared.change(Preparations::next_turn);
    // Only the process may have died, with its last writes in the device's cache: a loss of power must not take them now.
    sync_all(&shared).await;
    while shared.change(|log| log.settle(SETTLE_PAGES)) {
        tokio::task::yield_now().await;
    }
}

/// An error means that the device is gone.
async fn scan(shared: &Shared, at: SegmentLife) -> Result<ScannedSegment, L3Error> {
    let SegmentLife { segment, life } = at;
    let mut scan = SegmentScan::new(shared.log_id, segment, life, shared.segment_bytes, shared.segment_bytes);
    while let Some(read) = scan.next_read() {
        let Some(slot) = memory(&*shared.device, &shared.arena, read.len).await else {
            scan.stop();
            continue;
        };
        match read_patiently(&*shared.device, segment, read.offset, slot).await {
            Ok(slot) => scan.feed(&slot),
            Err(error) => {
                shared.open()?;
                shared.counters.recovery_io_errors.add(1);
                tracing::warn!(segment, offset = read.offset, %error, "segment cannot be read to its end");
                scan.stop();
            }
        }
    }
    Ok(scan.finish())
}

/// Memory for a scan, less than was asked for if there is no more: then it searches in smaller steps, and does without a
/// footer. The node is up while it scans, or scans other devices, and others may have all of it for a while.
async fn memory(device: &dyn Device, arena: &Arc<Arena>, bytes: usize) -> Option<SlotMut> {
    for _ in 0..MEMORY_TRIES {
        let halves = std::iter::successors(Some(bytes), |bytes| Some(bytes / 2 / BLOCK_BYTES * BLOCK_BYTES));
        if let Some(slot) = halves.take_while(|&bytes| bytes > 0).find_map(|bytes| arena.allocate(bytes)) {
            return Some(slot);
        }
        device.sleep(MEMORY_PAUSE).await;
    }
    tracing::warn!(bytes, "recovery: no memory to scan with");
    None
}
