//! How an L3 is set up.

use crate::L3Error;
use larder_device::{Clock, Executor, RingOptions};
use larder_format::disk::{BLOCK_BYTES, SEGMENT_BYTES_MIN};
use std::path::PathBuf;
use std::time::Duration;

/// Most bytes of pages that were taken for writing and are not on the device yet. Writers wait for room.
pub const WRITE_QUEUE_BYTES_MAX: usize = 64 << 20;

const SEGMENT_BYTES_DEFAULT: u64 = 64 << 20;
/// A log should have at least this many segments, so that giving one up costs little of it …
const SEGMENTS_WANTED_MIN: u64 = 16;
/// … and at most this many, so that files and start-up work stay few.
const SEGMENTS_WANTED_MAX: u64 = 4096;
/// One is written while another is made ready.
const SEGMENTS_MIN: u64 = 2;
/// Most segments, each of which is an open file.
const FILES_MAX: u32 = 1 << 16;
const KEEP_PERCENT_MAX: u8 = 75;
/// Room for the small files: superblock, progress of the scrub, and the copies by which they are replaced.
pub(crate) const SMALL_FILES_BYTES: u64 = 4 * BLOCK_BYTES as u64;
const QUEUE_DEPTH_MAX: u32 = 1024;

/// Where the log lies and how large it may grow.
#[derive(Debug, Clone)]
pub struct L3Options {
    /// Directory of the log; made if it is missing. One store at a time may use it.
    pub dir: PathBuf,
    /// Most bytes of all files together. May differ from start to start: if it is smaller, the oldest segments go.
    pub capacity_bytes: u64,
    /// Bytes of a segment: a multiple of 4 KiB, at least 1 MiB, or 0 to choose by the capacity (64 MiB, less for
    /// capacities under 1 GiB, more for those over 256 GiB). Pages must fit into one. Counts when the log is made;
    /// an existing log keeps what it was made with.
    pub segment_bytes: u64,
    /// Most requests with the device at a time, 1..=1024. 16 is good.
    pub queue_depth: u32,
    /// Percent of the log that is kept for pages which will be asked for again: they are copied when their segment's turn to
    /// be written anew has come. 0 to 75. More keeps more and writes more: at most 1 / (1 - keep) times what is put.
    pub keep_percent: u8,
    /// Most bytes of the pages of a namespace that was given no quota of its own. Default `u64::MAX`: no limit.
    pub quota_default: u64,
    /// Bytes per second that the scrub reads at most; 0 means only when asked. Default 32 MiB.
    pub scrub_bytes_per_second: u64,
    /// Time between two passes of the scrub. Default one day.
    pub scrub_interval: Duration,
    /// What runs the device's requests and background.
    pub executor: Executor,
    /// What time it is.
    pub clock: Clock,
    /// Where randomness comes from; the system by default. With a seed, runs can be repeated, and strangers can guess.
    pub seed: Option<u64>,
}

impl L3Options {
    /// A log of `capacity_bytes` in `dir`, the rest by default.
    pub fn new(dir: impl Into<PathBuf>, capacity_bytes: u64) -> L3Options {
        L3Options {
            dir: dir.into(),
            capacity_bytes,
            segment_bytes: 0,
            queue_depth: 16,
            keep_percent: 50,
            quota_default: u64::MAX,
            scrub_bytes_per_second: 32 << 20,
            scrub_interval: Duration::from_secs(24 * 3600),
            executor: Executor::default(),
            clock: Clock::system(),
            seed: None,
        }
    }

    /// Bytes of a segment for a new log.
    pub(crate) fn segment_bytes(&self) -> u64 {
        if self.segment_bytes != 0 {
            return self.segment_bytes;
        }
        let usable = self.capacity_bytes.saturating_sub(SMALL_FILES_BYTES);
        let largest = (usable / SEGMENTS_WANTED_MIN).min(SEGMENT_BYTES_DEFAULT);
        let wanted = largest.max(usable / SEGMENTS_WANTED_MAX).max(SEGMENT_BYTES_MIN);
        // As large as the same number of segments can be.
        let segments = (usable / wanted).max(1);
        let fitting = usable / segments / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        fitting.max(SEGMENT_BYTES_MIN)
    }

    /// How the device's ring is set up. An existing log may have other segments than a new one would; there is room for
    /// four times as many.
    pub(crate) fn ring(&self) -> RingOptions {
        let segments = self.segments_max(self.segment_bytes()).unwrap_or(0);
        let files_max = segments.clamp(16, FILES_MAX / 4) * 4;
        RingOptions {
            queue_depth: self.queue_depth,
            executor: self.executor,
            ..RingOptions::new("larder-l3", files_max)
        }
    }

    /// Segments of `segment_bytes` that the capacity allows, beside the superblock.
    pub(crate) fn segments_max(&self, segment_bytes: u64) -> Result<u32, L3Error> {
        let segments = self.capacity_bytes.saturating_sub(SMALL_FILES_BYTES) / segment_bytes.max(1);
        if segments < SEGMENTS_MIN {
            let least = SEGMENTS_MIN * segment_bytes + SMALL_FILES_BYTES;
            let message = format!(
                "capacity of {} bytes is too small for segments of {segment_bytes} bytes: at least {least} are needed",
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
    fn default_segments_never_exceed_the_capacity_and_use_most_of_it() {
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
    fn nonsense_is_refused_with_a_reason() {
        assert!(
            L3Options::new("x", 1 << 20).segments_max(1 << 20).unwrap_err().to_string().contains("at least 2113536")
        );
        assert!(L3Options { segment_bytes: 4097, ..L3Options::new("x", 1 << 30) }.check().is_err());
        assert!(L3Options { queue_depth: 0, ..L3Options::new("x", 1 << 30) }.check().is_err());
    }
}
