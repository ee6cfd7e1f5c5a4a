//! What the segments hold at the start.

use crate::L3Error;
use crate::directory::Directory;
use larder_core::log::{LogConfig, Recovered, ScannedSegment, SegmentScan, recover};
use larder_device::{Arena, DeviceFile, Done, FileId, Lane, Operation, Request, Ring, RingOptions};
use larder_format::disk::LogId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::task::JoinSet;

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

/// The log as it was found, and the files that remain.
pub(crate) struct Found {
    pub(crate) recovered: Recovered,
    pub(crate) files: BTreeMap<u32, DeviceFile>,
    pub(crate) report: RecoveryReport,
}

/// Scans every segment, several at a time, and removes what must go.
pub(crate) async fn find(
    dir: &Arc<Directory>,
    arena: &Arc<Arena>,
    log_id: LogId,
    config: LogConfig,
) -> Result<Found, L3Error> {
    let began = Instant::now();
    let numbers = dir.segments()?;
    let io_errors = Arc::new(AtomicU64::new(0));
    let scanned = scan_all(dir, arena, log_id, config.segment_bytes, &numbers, &io_errors).await?;
    for segment in &scanned {
        if let Err(problem) = &segment.life {
            let file = dir.segment_path(segment.segment);
            tracing::warn!(file = %file.display(), %problem, "segment has no valid header and is removed");
        }
    }
    let segment_bytes = config.segment_bytes;
    let recovered = recover(config, scanned);
    for &segment in &recovered.discard {
        dir.remove_segment(segment)?;
    }
    let kept = numbers.into_iter().filter(|number| !recovered.discard.contains(number));
    let opened: Result<BTreeMap<_, _>, L3Error> =
        kept.map(|number| Ok((number, dir.open_segment(number, segment_bytes)?))).collect();
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
    Ok(Found { recovered, files: opened?, report })
}

async fn scan_all(
    dir: &Arc<Directory>,
    arena: &Arc<Arena>,
    log_id: LogId,
    segment_bytes: u64,
    numbers: &[u32],
    io_errors: &Arc<AtomicU64>,
) -> Result<Vec<ScannedSegment>, L3Error> {
    let scans = SCANS.min(numbers.len()).min(arena.largest_free() / SCAN_BYTES / 2).max(1);
    let options = RingOptions {
        queue_depth: scans as u32,
        register_arena: false,
        ..RingOptions::new("larder-scan", SCANS as u32 * 2)
    };
    let ring = Ring::start(arena.clone(), options).map_err(L3Error::io("starting a ring for", dir.path()))?;
    let ring = Arc::new(ring);
    let (mut running, mut found, mut left) = (JoinSet::new(), Vec::with_capacity(numbers.len()), numbers.iter());
    loop {
        while running.len() < scans
            && let Some(&number) = left.next()
        {
            let path = dir.segment_path(number);
            let file = DeviceFile::open(&path).map_err(L3Error::io("opening", &path))?;
            let file_bytes = file.len().map_err(L3Error::io("reading the length of", &path))?;
            let scan = SegmentScan::new(log_id, number, segment_bytes, file_bytes);
            running.spawn(scan_one(ring.clone(), arena.clone(), file, scan, io_errors.clone()));
        }
        match running.join_next().await {
            Some(Ok(result)) => found.push(result?),
            Some(Err(error)) => return Err(L3Error::io("scanning", dir.path())(std::io::Error::other(error))),
            None => return Ok(found),
        }
    }
}

async fn scan_one(
    ring: Arc<Ring>,
    arena: Arc<Arena>,
    file: DeviceFile,
    mut scan: SegmentScan,
    io_errors: Arc<AtomicU64>,
) -> Result<ScannedSegment, L3Error> {
    let file = ring.attach(file).await.map_err(L3Error::io("attaching a segment to", "the scan ring"))?;
    while let Some(read) = scan.next_read() {
        let slot = arena.allocate(read.len).ok_or(L3Error::NoMemory { bytes: read.len })?;
        let Done { operation, result } = read_at(&ring, file, read.offset, slot).await?;
        match (result, operation) {
            (Ok(()), Operation::Read { slot, .. }) => scan.feed(&slot),
            (result, _) => {
                // The rest of the segment is lost, which is a miss for each of its pages.
                io_errors.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(offset = read.offset, ?result, "segment cannot be read to its end");
                scan.stop();
            }
        }
    }
    ring.detach(file).await;
    Ok(scan.finish())
}

async fn read_at(ring: &Ring, file: FileId, offset: u64, slot: larder_device::SlotMut) -> Result<Done, L3Error> {
    Ok(ring.run(Request { file, lane: Lane::Demand, operation: Operation::read(offset, slot) }).await?)
}
