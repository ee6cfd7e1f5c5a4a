//! A bare io_uring loop: one thread, one ring, a registered file, and nothing else. It is the lower
//! bound of the cost, and compares kinds of memory and flags of the ring.

use crate::Options;
use crate::measure::{measured, report};
use io_uring::{IoUring, opcode, squeue, types};
use larder_io::Block;
use larder_memory::{Arena, SlotMut};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const HEADER: usize = crate::HEADER;
/// Memory for headers at the start of the arena.
const HEADERS_BYTES: usize = 2 << 20;
/// Pages of one merged request.
const RUN: usize = 4;
const SQPOLL_IDLE_MS: u32 = 100;

/// Memory of a page that is transferred.
#[derive(Clone, Copy, PartialEq)]
pub enum Memory {
    /// Header and payload are one range of a registered buffer.
    Contiguous,
    /// The header lies on the heap, so that one entry with two ranges pins all memory.
    HeapHeader,
    /// The header lies elsewhere in the registered buffer: one entry with two ranges (Linux 6.15).
    RegisteredHeader,
    /// As before, with one entry for the header and one for the payload.
    TwoEntries,
    /// As before, and the kernel starts the second entry after the first has ended.
    TwoLinkedEntries,
    /// Four adjacent pages: one entry with four ranges, which pins the memory.
    Run,
    /// Four adjacent pages: one entry with four ranges of a registered buffer (Linux 6.15).
    RunRegistered,
    /// Four adjacent pages: four entries, submitted together.
    RunOfEntries,
}

impl Memory {
    fn pages(self) -> usize {
        match self {
            Memory::Run | Memory::RunRegistered | Memory::RunOfEntries => RUN,
            _ => 1,
        }
    }

    fn entries(self) -> usize {
        match self {
            Memory::TwoEntries | Memory::TwoLinkedEntries => 2,
            Memory::RunOfEntries => RUN,
            _ => 1,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
pub enum Flags {
    /// The setup of [`larder_io::Ring`].
    Cooperative,
    None,
    Deferred,
    SubmissionThread,
    PolledDevice,
}

impl Flags {
    fn build(self, depth: usize) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        match self {
            Flags::None => {}
            Flags::Cooperative => _ = builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag(),
            Flags::Deferred => _ = builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
            Flags::SubmissionThread => _ = builder.setup_single_issuer().setup_sqpoll(SQPOLL_IDLE_MS),
            Flags::PolledDevice => _ = builder.setup_single_issuer().setup_iopoll(),
        }
        builder.build((depth * RUN) as u32)
    }
}

pub const SETUPS: [(&str, Memory, Flags); 12] = [
    ("one range", Memory::Contiguous, Flags::Cooperative),
    ("heap header", Memory::HeapHeader, Flags::Cooperative),
    ("registered header", Memory::RegisteredHeader, Flags::Cooperative),
    ("two entries", Memory::TwoEntries, Flags::Cooperative),
    ("two linked", Memory::TwoLinkedEntries, Flags::Cooperative),
    ("run, pinned", Memory::Run, Flags::Cooperative),
    ("run, registered", Memory::RunRegistered, Flags::Cooperative),
    ("run, entries", Memory::RunOfEntries, Flags::Cooperative),
    ("no flags", Memory::Contiguous, Flags::None),
    ("DEFER_TASKRUN", Memory::Contiguous, Flags::Deferred),
    ("SQPOLL", Memory::Contiguous, Flags::SubmissionThread),
    ("IOPOLL", Memory::Contiguous, Flags::PolledDevice),
];

/// Measures all setups, alternating, and prints the medians.
pub fn compare(arena: &Arc<Arena>, path: &Path, size: usize, options: &Options) {
    let mut found: Vec<Vec<(f64, f64)>> = vec![Vec::new(); SETUPS.len()];
    let mut refused: Vec<Option<io::Error>> = SETUPS.iter().map(|_| None).collect();
    for round in 0..options.rounds {
        for turn in 0..SETUPS.len() {
            // Another setup is first in each round. A refused one leaves work behind that would
            // count for the next, so it is not tried again.
            let number = (turn + round) % SETUPS.len();
            if refused[number].is_some() {
                continue;
            }
            let (_, memory, flags) = SETUPS[number];
            let order = crate::order(options.bytes, size * memory.pages(), round as u64 + 1);
            let mut result = Ok(());
            let taken = measured(options.bytes, || result = run(arena, path, &order, size, options, memory, flags));
            match result {
                Ok(()) => found[number].push(taken),
                Err(error) => {
                    refused[number] = Some(error);
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
        }
    }
    for (number, (name, ..)) in SETUPS.iter().enumerate() {
        match &refused[number] {
            Some(error) => println!("{:>5} KiB {name:<18} refused: {error}", size >> 10),
            None => report(size, name, &found[number], &found[0]),
        }
    }
}

/// Transfers `size` bytes, or a run of pages of that size, at each offset.
pub fn run(
    arena: &Arc<Arena>,
    path: &Path,
    order: &[u64],
    size: usize,
    options: &Options,
    memory: Memory,
    flags: Flags,
) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut slot = arena.allocate(arena.capacity()).expect("the arena is free");
    let ring = flags.build(options.depth)?;
    let whole = libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.capacity() };
    // SAFETY: this function owns the memory until after the ring is dropped.
    unsafe { ring.submitter().register_buffers(&[whole]) }?;
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    let transfers = (0..options.depth).map(|_| Transfer::default()).collect();
    let mut bare = Bare { ring, slot: &mut slot, size, write: options.write, memory, transfers };
    bare.run(order)
}

/// Memory of one transfer in flight. The kernel reads the ranges at submission.
#[derive(Default)]
struct Transfer {
    ranges: Vec<libc::iovec>,
    header: Option<Box<Block>>,
    entries_left: usize,
    bytes_left: usize,
}

struct Bare<'a> {
    ring: IoUring,
    slot: &'a mut SlotMut,
    size: usize,
    write: bool,
    memory: Memory,
    transfers: Vec<Transfer>,
}

impl Bare<'_> {
    fn run(&mut self, order: &[u64]) -> io::Result<()> {
        let mut free: Vec<usize> = (0..self.transfers.len()).collect();
        let (mut next, mut done) = (0, 0);
        while done < order.len() {
            while next < order.len()
                && let Some(number) = free.pop()
            {
                self.start(number, next, order[next]);
                next += 1;
            }
            self.ring.submit_and_wait(1)?;
            for answer in self.ring.completion() {
                let moved =
                    usize::try_from(answer.result()).map_err(|_| io::Error::from_raw_os_error(-answer.result()))?;
                let transfer = &mut self.transfers[answer.user_data() as usize];
                transfer.entries_left -= 1;
                transfer.bytes_left -= moved;
                if transfer.entries_left == 0 {
                    assert_eq!(transfer.bytes_left, 0, "short transfer");
                    transfer.header = None;
                    free.push(answer.user_data() as usize);
                    done += 1;
                }
            }
        }
        Ok(())
    }

    /// Collects the memory of the transfer and pushes its entries.
    fn start(&mut self, number: usize, turn: usize, offset: u64) {
        let base = self.slot.as_mut_ptr();
        let bytes = self.size * self.memory.pages();
        let room = self.slot.capacity() - HEADERS_BYTES;
        // Different arena memory for every transfer in flight: there is more of it than the depth
        // needs.
        let at = HEADERS_BYTES + (turn * bytes) % (room / bytes * bytes);
        // SAFETY: at + bytes <= capacity of the slot.
        let at = unsafe { base.add(at) };
        let range = |start: *mut u8, len: usize| libc::iovec { iov_base: start.cast(), iov_len: len };
        let transfer = &mut self.transfers[number];
        transfer.bytes_left = bytes;
        transfer.entries_left = self.memory.entries();
        transfer.ranges.clear();
        match self.memory {
            Memory::Contiguous => transfer.ranges.push(range(at, bytes)),
            Memory::HeapHeader => {
                let mut header = Block::of(b"page");
                transfer.ranges.push(range(header.as_mut_ptr(), HEADER));
                transfer.ranges.push(range(at, bytes - HEADER));
                transfer.header = Some(header);
            }
            Memory::RegisteredHeader | Memory::TwoEntries | Memory::TwoLinkedEntries => {
                // SAFETY: number < depth, and HEADERS_BYTES has 512 headers.
                transfer.ranges.push(range(unsafe { base.add(number * HEADER) }, HEADER));
                transfer.ranges.push(range(at, bytes - HEADER));
            }
            Memory::Run | Memory::RunRegistered | Memory::RunOfEntries => {
                // Last page first, so that the ranges are not one.
                let pages = (0..RUN).rev();
                // SAFETY: all pages lie in the bytes above.
                transfer.ranges.extend(pages.map(|page| range(unsafe { at.add(page * self.size) }, self.size)));
            }
        }
        self.push(number, offset);
    }

    fn push(&mut self, number: usize, offset: u64) {
        let transfer = &self.transfers[number];
        let file = types::Fixed(0);
        let (list, len) = (transfer.ranges.as_ptr(), transfer.ranges.len() as u32);
        let entries: Vec<squeue::Entry> = match self.memory {
            Memory::HeapHeader | Memory::Run => vec![match self.write {
                true => opcode::Writev::new(file, list, len).offset(offset).build(),
                false => opcode::Readv::new(file, list, len).offset(offset).build(),
            }],
            Memory::RegisteredHeader | Memory::RunRegistered => vec![match self.write {
                true => opcode::WritevFixed::new(file, list, len, 0).offset(offset).build(),
                false => opcode::ReadvFixed::new(file, list, len, 0).offset(offset).build(),
            }],
            _ => {
                let mut offset = offset;
                let one = |range: &libc::iovec| {
                    let (start, len) = (range.iov_base.cast::<u8>(), range.iov_len as u32);
                    let entry = match self.write {
                        true => opcode::WriteFixed::new(file, start, len, 0).offset(offset).build(),
                        false => opcode::ReadFixed::new(file, start, len, 0).offset(offset).build(),
                    };
                    offset += u64::from(len);
                    entry
                };
                transfer.ranges.iter().map(one).collect()
            }
        };
        let last = entries.len() - 1;
        for (turn, entry) in entries.into_iter().enumerate() {
            let linked = self.memory == Memory::TwoLinkedEntries && turn < last;
            let entry = if linked { entry.flags(squeue::Flags::IO_LINK) } else { entry };
            // SAFETY: the slot, the block and the list of ranges stay in place until the entry has
            // completed. If the loop fails first, the ring is dropped before the slot.
            unsafe { self.ring.submission().push(&entry.user_data(number as u64)) }.expect("there is room");
        }
    }
}
