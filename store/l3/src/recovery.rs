//! What the segments hold at the start.

use crate::L3Error;
use futures::stream::{self, StreamExt, TryStreamExt};
use larder_core::log::{LogConfig, Recovered, ScannedSegment, SegmentScan, recover};
use larder_device::seam::run;
use larder_device::{Arena, Device, Lane, Operation, segment_name};
use larder_format::disk::LogId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Segments that are scanned at a time. Scanning moves small blocks, of which a device takes more at once than of pages.
const SCANS: usize = 64;
/// Bytes of the arena that a scan uses.
const SCAN_BYTES: usize = 1 << 20;

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
    /// Segments removed: unreadable ones, and the oldest that are more than the capacity allows.
    pub segments_removed: u64,
    /// Records that were begun and are not whole.
    pub torn_records: u64,
    /// Reads that the device refused.
    pub io_errors: u64,
    /// The largest generation of a page found; later puts should have larger ones.
    pub generation_max: u64,
    /// Duration in milliseconds.
    pub milliseconds: u64,
}

/// The log as it was found.
pub(crate) struct Found {
    pub(crate) recovered: Recovered,
    pub(crate) report: RecoveryReport,
}

/// Scans every segment, several at a time, and removes what must go.
pub(crate) async fn find(
    device: &Arc<dyn Device>,
    arena: &Arc<Arena>,
    log_id: LogId,
    config: LogConfig,
) -> Result<Found, L3Error> {
    let began = Instant::now();
    let numbers = device.segments().await.map_err(L3Error::io("listing", device.path()))?;
    let io_errors = AtomicU64::new(0);
    let scanned = scan_all(device, arena, log_id, config.segment_bytes, &numbers, &io_errors).await?;
    for segment in &scanned {
        if let Err(problem) = &segment.life {
            let file = device.path().join(segment_name(segment.segment));
            tracing::warn!(file = %file.display(), %problem, "segment has no valid header and is removed");
        }
    }
    let recovered = recover(config, scanned);
    for &segment in &recovered.discard {
        let file = device.path().join(segment_name(segment));
        device.remove(segment).await.map_err(L3Error::io("removing", file))?;
    }
    let report = RecoveryReport {
        created: false,
        pages: recovered.log.counts().pages,
        tombstones: recovered.tombstones,
        segments: recovered.segments,
        segments_removed: recovered.discard.len() as u64,
        torn_records: recovered.torn_records,
        io_errors: io_errors.load(Ordering::Relaxed),
        generation_max: recovered.generation_max,
        milliseconds: began.elapsed().as_millis() as u64,
    };
    Ok(Found { recovered, report })
}

async fn scan_all(
    device: &Arc<dyn Device>,
    arena: &Arc<Arena>,
    log_id: LogId,
    segment_bytes: u64,
    numbers: &[u32],
    io_errors: &AtomicU64,
) -> Result<Vec<ScannedSegment>, L3Error> {
    let scans = SCANS.min(numbers.len()).min(arena.largest_free() / SCAN_BYTES / 2).max(1);
    let scan = |number: u32| async move {
        let path = device.path().join(segment_name(number));
        device.open(number, segment_bytes).await.map_err(L3Error::io("opening", path))?;
        scan_one(device, arena, number, SegmentScan::new(log_id, number, segment_bytes, segment_bytes), io_errors).await
    };
    stream::iter(numbers.iter().copied()).map(scan).buffer_unordered(scans).try_collect().await
}

async fn scan_one(
    device: &Arc<dyn Device>,
    arena: &Arc<Arena>,
    segment: u32,
    mut scan: SegmentScan,
    io_errors: &AtomicU64,
) -> Result<ScannedSegment, L3Error> {
    while let Some(read) = scan.next_read() {
        let slot = arena.allocate(read.len).ok_or(L3Error::NoMemory { bytes: read.len })?;
        let answer = run(&**device, segment, Lane::Demand, Operation::read(read.offset, slot)).await?;
        match (answer.result, answer.operation) {
            (Ok(()), Operation::Read { slot, .. }) => scan.feed(&slot),
            (result, _) => {
                // The rest of the segment is lost, which is a miss for each of its pages.
                io_errors.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(segment, offset = read.offset, ?result, "segment cannot be read to its end");
                scan.stop();
            }
        }
    }
    Ok(scan.finish())
}
