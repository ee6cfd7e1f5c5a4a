//! Baseline: a loop that keeps an io_uring queue full and does nothing else.
//!
//! It has one thread, registered buffers on huge pages, and a registered file opened with O_DIRECT.
//! Completions are processed only when the thread asks for them (DEFER_TASKRUN).

use super::QUEUE_DEPTH;
use super::figures::{Direction, RoundFigures, Stopwatch, histogram};
use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};
use larder_memory::{Arena, SlotMut};
use rand::Rng;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Writes a whole file and syncs it. Blocks that were never written would be slower to write and
/// faster to read.
pub fn make_file(path: &Path, bytes: u64) -> Result<()> {
    let file = File::create_new(path).with_context(|| path.display().to_string())?;
    let chunk: Vec<u8> = (0..4 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for at in (0..bytes).step_by(chunk.len()) {
        let len = chunk.len().min((bytes - at) as usize);
        file.write_all_at(&chunk[..len], at).with_context(|| path.display().to_string())?;
    }
    Ok(file.sync_all()?)
}

/// An open file with its ring and memory.
///
/// The field order matters: the ring is dropped before the memory. After an error, requests may
/// still be in flight. The kernel completes them to pages that it pinned at registration, so they
/// never reach memory that was mapped again.
pub struct Bare {
    ring: IoUring,
    memory: SlotMut,
    bytes: u64,
}

impl Bare {
    /// Opens the file with O_DIRECT, and registers it and the whole arena with a new ring. Fails if
    /// another user holds a part of the arena.
    pub fn new(path: &Path, arena: Arc<Arena>) -> Result<Bare> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let file = file.with_context(|| format!("open {} with O_DIRECT", path.display()))?;
        let bytes = file.metadata()?.len();
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(QUEUE_DEPTH as u32)?;
        let mut memory = arena.allocate(arena.capacity()).context("the arena is in use")?;
        let buffer = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
        // SAFETY: the memory is a field of the result, and the ring is dropped before it.
        unsafe { ring.submitter().register_buffers(&[buffer])? };
        // The ring holds its own reference, so the file can be closed.
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        Ok(Bare { ring, memory, bytes })
    }

    pub fn run(&mut self, direction: Direction, size: usize, count: usize) -> Result<RoundFigures> {
        // Requests use one buffer of the arena after the other, as pages of a store do. With twice
        // the queue depth, a buffer is normally free again when its turn comes.
        let buffers = self.memory.len() / size;
        ensure!(2 * QUEUE_DEPTH <= buffers, "the arena is too small for pages of {size} bytes");
        let mut latencies = histogram()?;
        let mut began = [Instant::now(); QUEUE_DEPTH];
        let mut free: Vec<usize> = (0..QUEUE_DEPTH).collect();
        let mut submitted = 0;
        let mut done = 0;
        let round = Stopwatch::start();
        while done < count {
            while submitted < count
                && let Some(request) = free.pop()
            {
                began[request] = Instant::now();
                self.push(direction, request, submitted % buffers, size)?;
                submitted += 1;
            }
            self.wait()?;
            for entry in self.ring.completion() {
                let request = entry.user_data() as usize;
                ensure!(entry.result() == size as i32, "{} returned {}", direction.name(), entry.result());
                latencies.saturating_record(began[request].elapsed().as_nanos() as u64);
                free.push(request);
                done += 1;
            }
        }
        Ok(round.stop(count * size).with(&latencies))
    }

    fn push(&mut self, direction: Direction, request: usize, buffer: usize, size: usize) -> Result<()> {
        let offset = rand::rng().random_range(0..self.bytes / size as u64) * size as u64;
        let start = self.memory[buffer * size..].as_mut_ptr();
        let entry = match direction {
            Direction::Read => opcode::ReadFixed::new(types::Fixed(0), start, size as u32, 0).offset(offset).build(),
            Direction::Write => opcode::WriteFixed::new(types::Fixed(0), start, size as u32, 0).offset(offset).build(),
        };
        // SAFETY: the buffer is inside the memory, which outlives the ring. Nothing ever looks at
        // its bytes, so a late request that still uses it does no harm.
        unsafe { self.ring.submission().push(&entry.user_data(request as u64))? };
        Ok(())
    }

    fn wait(&self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }
}
