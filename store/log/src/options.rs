//! Options of an L3, their checks, and the sizes that follow from them.

use crate::L3Error;
use crate::machine::{KEEP_PERCENT_DEFAULT, LogConfig, PageName};
use larder_format::disk::{BLOCK_BYTES, SEGMENT_BYTES_MIN, record_bytes};
use larder_io::{Executor, RingOptions};
use larder_runtime::Clock;
use std::path::PathBuf;
use std::time::Duration;

/// Memory of a page that the log keeps track of, in bytes, at most, without its pin. The index
/// takes 63, and the order by quota at most 30. The example `index_cost` measures both. The rest is
/// for small logs: until a segment has its footer, each of its pages takes 144 more.
pub const PAGE_MEMORY_BYTES: u64 = 128;
/// Memory of a pin, in bytes, at most. A leaf of the tree of pins takes a chunk of 80 bytes and
/// holds 5 to 11 pins of 5 bytes. An inner node takes 176 bytes and has 6 children or more. So the
/// least full tree takes 19.2 bytes per pin.
pub const PIN_MEMORY_BYTES: u64 = 20;
/// Memory of a page's name, in bytes, at most: a list that grows doubles, and then has its old
/// memory too.
const NAME_MEMORY_BYTES: u64 = 3 * size_of::<PageName>() as u64;
/// Memory for scans, and for the header blocks of queued writes. Each record of the write queue has
/// a block, and the smallest takes two blocks.
const BUFFER_BYTES_MAX: u64 = (16 << 20) + WRITE_QUEUE_BYTES_MAX as u64 / 2;
/// Maximum bytes of records that are queued or in flight to the device. Writers wait for room,
/// which bounds the memory that a slow device holds.
pub const WRITE_QUEUE_BYTES_MAX: usize = 64 << 20;

const SEGMENT_BYTES_DEFAULT: u64 = 64 << 20;
/// Segments of a new log, at least: the reclaim of one should cost only a small share of the pages.
const SEGMENTS_WANTED_MIN: u64 = 16;
/// Segments of a new log, at most: each is an open file, and costs a read at the start.
const SEGMENTS_WANTED_MAX: u64 = 4096;
/// One segment is written while another is prepared.
const SEGMENTS_MIN: u64 = 2;
/// Descriptors of a log beside its segments: the directory with its reserve, the lock, the rings
/// and the events of the executor.
const DESCRIPTORS_BESIDE_SEGMENTS: u64 = 48;
/// Maximum number of segments, each of which is an open file.
const FILES_MAX: u32 = 1 << 16;
const KEEP_PERCENT_MAX: u8 = 75;
/// Bytes for the small files: two superblocks, progress of the scrub, and the temporary file that
/// replaces one of them.
pub(crate) const SMALL_FILES_BYTES: u64 = 4 * BLOCK_BYTES as u64;
/// Default of [`L3Options::queue_depth`]. No measurement on several drives chose it.
pub const QUEUE_DEPTH_DEFAULT: u32 = 16;
const QUEUE_DEPTH_MAX: u32 = 1024;

#[derive(Debug, Clone)]
pub struct L3Options {
    /// Directory of the log, created if it is missing. One process at a time may use it.
    pub dir: PathBuf,
    /// Maximum bytes of all files. It may change between starts: a smaller capacity removes the
    /// oldest segments.
    pub capacity_bytes: u64,
    /// Bytes of a segment: a multiple of 4 KiB, at least 1 MiB, or 0 to choose by the capacity. The
    /// choice is 64 MiB, less for capacities under 1 GiB, more for those over 256 GiB. A page must
    /// fit into a segment. An existing log keeps the size that it was created with.
    pub segment_bytes: u64,
    /// Maximum number of requests in flight to the device, 1..=1024. Default
    /// [`QUEUE_DEPTH_DEFAULT`].
    pub queue_depth: u32,
    /// Percentage of the segments, on average, for copies of pages that were used, 0..=75. They are
    /// copied when their segment is reclaimed. A higher value keeps more and writes more: at most 1
    /// / (1 - keep) times the bytes of all puts.
    pub keep_percent: u8,
    /// Quota in bytes of a namespace for which [`L3::set_quota`](crate::L3::set_quota) set none.
    /// Default `u64::MAX`: no limit.
    pub quota_default: u64,
    /// Maximum number of pages that take memory. At the bound, the log reclaims its oldest segment
    /// although it has unused ones, so small pages leave a part of the capacity unused. The log
    /// raises it to the pages that eight segments can hold. Default `u64::MAX`: no bound but the
    /// capacity.
    pub pages_max: u64,
    /// Maximum rate of the scrub, in bytes per second. 0 scrubs only on request. The scrub is as
    /// fast as its interval and the bytes of the log ask for, see [`ScrubRate`](crate::ScrubRate).
    /// Default 256 MiB.
    pub scrub_bytes_per_second: u64,
    /// Time between two passes of the scrub. Default one day.
    pub scrub_interval: Duration,
    /// Keeps names of the pages, for [`L3::listen`](crate::L3::listen). Default: false.
    pub keep_names: bool,
    pub executor: Executor,
    /// Source of the wall-clock time, by which pages expire.
    pub clock: Clock,
    /// Seed of all random choices. Default `None`: the system's randomness. A seed makes a
    /// simulation repeatable, and the choices guessable for clients.
    pub seed: Option<u64>,
}

impl L3Options {
    pub fn new(dir: impl Into<PathBuf>, capacity_bytes: u64) -> L3Options {
        L3Options {
            dir: dir.into(),
            capacity_bytes,
            segment_bytes: 0,
            queue_depth: QUEUE_DEPTH_DEFAULT,
            keep_percent: KEEP_PERCENT_DEFAULT,
            quota_default: u64::MAX,
            pages_max: u64::MAX,
            scrub_bytes_per_second: 256 << 20,
            scrub_interval: Duration::from_secs(24 * 3600),
            keep_names: false,
            executor: Executor::default(),
            clock: Clock::system(),
            seed: None,
        }
    }

    /// Maximum memory of the index and of all else that the log keeps per page, in bytes, without
    /// pins.
    pub fn index_memory_max(&self) -> u64 {
        let name_bytes = if self.keep_names { NAME_MEMORY_BYTES } else { 0 };
        self.pages_in_memory_max() * (PAGE_MEMORY_BYTES + name_bytes)
    }

    /// Maximum memory of pins, in bytes. Any page may have one, because only hard pins have a bound
    /// of their own.
    pub fn pin_memory_max(&self) -> u64 {
        self.pages_in_memory_max() * PIN_MEMORY_BYTES
    }

    /// Maximum number of pages that the log keeps track of.
    fn pages_in_memory_max(&self) -> u64 {
        let smallest = record_bytes(1) as u64;
        let pages_max = self.pages_max.max(LogConfig::pages_max_min(self.segment_bytes()));
        pages_max.min(self.capacity_bytes / smallest)
    }

    /// Maximum memory of the log's buffers, in bytes.
    pub fn buffer_memory_max(&self) -> u64 {
        BUFFER_BYTES_MAX
    }

    /// Maximum number of descriptors that the log has open: its segments, and those of its
    /// directory and executor.
    pub fn descriptors_max(&self) -> u64 {
        self.segments_max(self.segment_bytes()).map_or(0, u64::from) + DESCRIPTORS_BESIDE_SEGMENTS
    }

    /// Bytes of a segment of a new log: the field `segment_bytes`, or the choice that it leaves.
    pub fn segment_bytes(&self) -> u64 {
        if self.segment_bytes != 0 {
            return self.segment_bytes;
        }
        let usable = self.capacity_bytes.saturating_sub(SMALL_FILES_BYTES);
        let largest = (usable / SEGMENTS_WANTED_MIN).min(SEGMENT_BYTES_DEFAULT);
        let wanted = largest.max(usable / SEGMENTS_WANTED_MAX).max(SEGMENT_BYTES_MIN);
        // The same number of segments leaves the least of the capacity unused if they are as large
        // as possible.
        let segments = (usable / wanted).max(1);
        let fitting = usable / segments / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        fitting.max(SEGMENT_BYTES_MIN)
    }

    /// Options of the device's ring. An existing log may have smaller segments than a new one
    /// would, so the ring has room for four times as many.
    pub(crate) fn ring(&self) -> RingOptions {
        let segments = self.segments_max(self.segment_bytes()).unwrap_or(0);
        let files_max = segments.clamp(16, FILES_MAX / 4) * 4;
        RingOptions {
            queue_depth: self.queue_depth,
            executor: self.executor,
            ..RingOptions::new("larder-l3", files_max)
        }
    }

    /// Number of segments of `segment_bytes` that the capacity allows, beside the small files.
    pub(crate) fn segments_max(&self, segment_bytes: u64) -> Result<u32, L3Error> {
        let segments = self.capacity_bytes.saturating_sub(SMALL_FILES_BYTES) / segment_bytes.max(1);
        if segments < SEGMENTS_MIN {
            let least = SEGMENTS_MIN * segment_bytes + SMALL_FILES_BYTES;
            let message = format!(
                "the capacity of {} bytes is too small for segments of {segment_bytes} bytes: configure at least {least}",
                self.capacity_bytes
            );
            return Err(L3Error::Options(message));
        }
        Ok(u32::try_from(segments).unwrap_or(u32::MAX).min(FILES_MAX - 1))
    }

    pub(crate) fn check(&self) -> Result<(), L3Error> {
        let bytes = self.segment_bytes;
        if bytes != 0 && (bytes < SEGMENT_BYTES_MIN || !bytes.is_multiple_of(BLOCK_BYTES as u64)) {
            let message = format!("segment_bytes is {bytes}: it must be 0 or a multiple of 4096, at least 1048576");
            return Err(L3Error::Options(message));
        }
        if !(1..=QUEUE_DEPTH_MAX).contains(&self.queue_depth) {
            let message = format!("queue_depth is {}: it must be in 1..={QUEUE_DEPTH_MAX}", self.queue_depth);
            return Err(L3Error::Options(message));
        }
        if self.keep_percent > KEEP_PERCENT_MAX {
            let message = format!("keep_percent is {}: it must be in 0..={KEEP_PERCENT_MAX}", self.keep_percent);
            return Err(L3Error::Options(message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_segments_fit_the_capacity_and_use_most_of_it() {
        for capacity in [2_200_000, 5 << 20, 100 << 20, 1 << 30, (1 << 30) + 4096, 100 << 30, 3 << 40] {
            let options = L3Options::new("x", capacity);
            let segment = options.segment_bytes();
            let count = u64::from(options.segments_max(segment).unwrap());
            assert!(segment >= SEGMENT_BYTES_MIN && segment.is_multiple_of(4096), "{capacity}: {segment}");
            assert!(count * segment + 4096 <= capacity, "{capacity}: {count} x {segment}");
            assert!(count <= SEGMENTS_WANTED_MAX);
            assert!(capacity < 16 << 20 || count * segment > capacity / 100 * 99, "{capacity}: {count} x {segment}");
        }
    }

    #[test]
    fn invalid_options_are_refused_with_a_reason() {
        assert!(
            L3Options::new("x", 1 << 20).segments_max(1 << 20).unwrap_err().to_string().contains("at least 2113536")
        );
        assert!(L3Options { segment_bytes: 4097, ..L3Options::new("x", 1 << 30) }.check().is_err());
        assert!(L3Options { queue_depth: 0, ..L3Options::new("x", 1 << 30) }.check().is_err());
    }
}
