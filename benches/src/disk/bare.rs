//! The limit: a loop that keeps a ring full and does nothing else.
//!
//! One thread, registered buffers on huge pages, a registered file opened past the page cache, completions run when the
//! thread asks for them.

use super::QUEUE_DEPTH;
use super::figures::{Direction, Measured, Round, histogram};
use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};
use larder_device::{Arena, SlotMut};
use rand::Rng;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Writes a whole file, so that nobody measures the first use of its blocks.
pub fn make_file(path: &Path, bytes: u64) -> Result<()> {
    let file = File::create_new(path).with_context(|| path.display().to_string())?;
    let chunk: Vec<u8> = (0..4 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for at in (0..bytes).step_by(chunk.len()) {
        let len = chunk.len().min((bytes - at) as usize);
        file.write_all_at(&chunk[..len], at).with_context(|| path.display().to_string())?;
    }
    Ok(file.sync_all()?)
}

/// The ring is dropped before the memory. Were a request still with the kernel then, after an error, it would write to the
/// pages that registering has pinned, whatever is mapped.
pub struct Bare {
    ring: IoUring,
    memory: SlotMut,
    bytes: u64,
}

impl Bare {
    /// Opens the file and registers it and the whole arena.
    pub fn new(path: &Path, arena: Arc<Arena>) -> Result<Bare> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let file = file.with_context(|| format!("{}: no direct I/O?", path.display()))?;
        let bytes = file.metadata()?.len();
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(QUEUE_DEPTH as u32)?;
        let mut memory = arena.allocate(arena.capacity()).context("a fresh arena is free")?;
        let buffer = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
        // SAFETY: the memory lives as long as this, and the ring is dropped before it.
        unsafe { ring.submitter().register_buffers(&[buffer])? };
        // The ring keeps the file open from here on.
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        Ok(Bare { ring, memory, bytes })
    }

    /// Moves `count` pages of `size` bytes from or to random places.
    pub fn run(&mut self, direction: Direction, size: usize, count: usize) -> Result<Measured> {
        // One place of the arena after the other, as a store's pages lie: what is in flight is long done when a place's turn
        // comes again.
        let places = self.memory.len() / size;
        ensure!(2 * QUEUE_DEPTH <= places, "the arena holds all requests in flight");
        let mut latencies = histogram()?;
        let mut began = [Instant::now(); QUEUE_DEPTH];
        let mut free: Vec<usize> = (0..QUEUE_DEPTH).collect();
        let (mut asked, mut done) = (0, 0);
        let round = Round::begin();
        while done < count {
            while asked < count
                && let Some(place) = free.pop()
            {
                began[place] = Instant::now();
                self.push(direction, place, asked % places, size)?;
                asked += 1;
            }
            self.wait()?;
            for entry in self.ring.completion() {
                let place = entry.user_data() as usize;
                ensure!(entry.result() == size as i32, "{}: {}", direction.name(), entry.result());
                latencies.saturating_record(began[place].elapsed().as_nanos() as u64);
                free.push(place);
                done += 1;
            }
        }
        Ok(round.end(count * size).with(&latencies))
    }

    fn push(&mut self, direction: Direction, number: usize, place: usize, size: usize) -> Result<()> {
        let offset = rand::rng().random_range(0..self.bytes / size as u64) * size as u64;
        let start = self.memory[place * size..].as_mut_ptr();
        let entry = match direction {
            Direction::Read => opcode::ReadFixed::new(types::Fixed(0), start, size as u32, 0).offset(offset).build(),
            Direction::Write => opcode::WriteFixed::new(types::Fixed(0), start, size as u32, 0).offset(offset).build(),
        };
        // SAFETY: place < places, so `size` bytes from `start` lie in the memory, which lives longer than the ring; nobody
        // looks at them.
        unsafe { self.ring.submission().push(&entry.user_data(number as u64))? };
        Ok(())
    }

    fn wait(&self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }
}
