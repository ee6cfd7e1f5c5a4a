//! The paths `pinned` and `host`: direct I/O to a slot of the arena, then copies by the device.
//!
//! Invariant: a slot returns to the arena after the ring and the device have finished with it.
//!
//! If the memory of the device is the host's, a target at a multiple of a block needs no slot: the
//! worker reads the file straight to it, and waits for the kernel.
//!
//! ```text
//!  file ── io_uring, O_DIRECT ──▶ slot ── CRC ──▶ copy engine ──▶ targets          pinned arena
//!  file ── io_uring, O_DIRECT ──▶ slot ── CRC ──▶ pinned buffer ──▶ targets        otherwise
//!  file ── pread, O_DIRECT ──▶ target ── CRC                                       host
//! ```
//!
//! Each worker has one page on its way, so the workers of [`Transfers`](crate::Transfers) are the
//! pipeline: one reads while another copies.

use crate::files::{FILES_MAX, Files};
use crate::settle::{Buffer, Direction, copy_parts};
use crate::{FileNumber, PageRead, PathKind, PathWorker, TransferError, TransferPath};
use futures::executor::block_on;
use larder_format::disk::BLOCK_BYTES;
use larder_io::{Block, DeviceFile, FileId, Operation, Priority, Request, Ring, RingClosed, RingOptions};
use larder_kernels::device::{Device, DeviceError, Keep, Memory, Place, Slice, Stream};
use larder_memory::{Arena, SlotMut};
use std::sync::Arc;

/// Direct I/O through the arena. Dropping it closes the ring, which waits for at most 10 s.
#[derive(Debug)]
pub struct Staged {
    device: Arc<dyn Device>,
    arena: Arc<Arena>,
    ring: Ring,
    files: Files<AttachedFile>,
    /// The arena as memory that the device reads by itself.
    pinned: Option<Memory>,
    kind: PathKind,
}

#[derive(Debug, Clone)]
struct AttachedFile {
    id: FileId,
    /// The same file, for reads straight to memory of the host. `None` for any other memory.
    straight: Option<Arc<DeviceFile>>,
}

impl Staged {
    /// Starts a ring, and pins the arena for the device.
    ///
    /// # Errors
    /// If the kernel refuses a ring, or if the driver cannot pin the arena.
    pub fn pinned(device: Arc<dyn Device>, arena: Arc<Arena>) -> Result<Staged, TransferError> {
        let memory = adopt(&*device, &arena)?;
        Staged::new(device, arena, Some(memory), PathKind::Pinned)
    }

    /// Starts a ring. A device whose memory is the host's copies from the arena; any other gets the
    /// bytes through a small pinned buffer.
    ///
    /// # Errors
    /// If the kernel refuses a ring.
    pub fn host(device: Arc<dyn Device>, arena: Arc<Arena>) -> Result<Staged, TransferError> {
        let memory = if is_host(&*device) { Some(adopt(&*device, &arena)?) } else { None };
        Staged::new(device, arena, memory, PathKind::Host)
    }

    fn new(
        device: Arc<dyn Device>,
        arena: Arc<Arena>,
        pinned: Option<Memory>,
        kind: PathKind,
    ) -> Result<Staged, TransferError> {
        let ring = Ring::start(Arc::clone(&arena), RingOptions::new("larder-gds-ring", FILES_MAX as u32))?;
        Ok(Staged { device, arena, ring, files: Files::new(), pinned, kind })
    }
}

fn is_host(device: &dyn Device) -> bool {
    device.info().kind == "host"
}

/// Makes the arena known to the device. The memory that it returns covers the whole arena, and
/// keeps it mapped.
fn adopt(device: &dyn Device, arena: &Arc<Arena>) -> Result<Memory, DeviceError> {
    let keep: Keep = Arc::clone(arena) as Keep;
    let address = arena.start().as_ptr() as u64;
    // SAFETY: the arena's bytes are mapped while `keep` lives. The device accesses them only by the
    // copies of a worker. The worker owns the slot until the copies have ended.
    unsafe { device.adopt(Place::Pinned, address, arena.capacity(), keep) }
}

impl TransferPath for Staged {
    fn kind(&self) -> PathKind {
        self.kind
    }

    fn mode(&self) -> String {
        let registered = if self.ring.capabilities().registered_buffers { "registered" } else { "unregistered" };
        let way = match (self.kind, &self.pinned) {
            (PathKind::Host, Some(_)) => "copied by the CPU; straight to aligned targets",
            (PathKind::Host, None) => "copied to a pinned buffer, then by the device",
            _ => "copied by the device from the pinned arena",
        };
        format!("io_uring to {registered} memory, {way}")
    }

    fn attach(&self, file: DeviceFile) -> Result<FileNumber, TransferError> {
        let straight = is_host(&*self.device).then(|| file.try_clone()).transpose()?.map(Arc::new);
        let id = block_on(self.ring.attach(file))?;
        let added = self.files.add(AttachedFile { id, straight });
        if added.is_err() {
            block_on(self.ring.detach(id));
        }
        added
    }

    fn detach(&self, file: FileNumber) -> Result<(), TransferError> {
        block_on(self.ring.detach(self.files.remove(file)?.id));
        Ok(())
    }

    fn register(&self, _memory: &Memory) -> Result<(), TransferError> {
        // Copies reach all memory of a device alike.
        Ok(())
    }

    fn worker(self: Arc<Self>, number: usize) -> Result<Box<dyn PathWorker>, TransferError> {
        let stream = self.device.stream(&format!("{} {number}", self.kind))?;
        Ok(Box::new(Worker { path: self, stream, buffer: Buffer::default() }))
    }
}

struct Worker {
    path: Arc<Staged>,
    stream: Arc<dyn Stream>,
    /// For an arena that is not pinned.
    buffer: Buffer,
}

impl Worker {
    fn read_slot(&self, file: FileId, page: &PageRead) -> Result<SlotMut, TransferError> {
        let path = &self.path;
        let slot = path.arena.allocate(page.bytes()).ok_or(TransferError::NoRoom(page.bytes()))?;
        let request = Request { file, priority: Priority::Demand, operation: Operation::read(page.offset, slot) };
        let mut done = block_on(path.ring.run(request)).map_err(|RingClosed| TransferError::Stopped)?;
        std::mem::replace(&mut done.result, Ok(()))?;
        done.into_slot().ok_or(TransferError::Stopped)
    }

    fn copy(&mut self, slot: SlotMut, page: &PageRead) -> Result<(), TransferError> {
        let Some(pinned) = &self.path.pinned else {
            let buffer = self.buffer.slice(&*self.path.device, page.bytes())?;
            buffer.write(&slot)?;
            drop(slot);
            return copy_parts(&*self.stream, &buffer, &page.targets, Direction::Scatter);
        };
        let start = slot.arena_offset();
        let source = pinned.slice(start..start + page.bytes())?;
        let copied = copy_parts(&*self.stream, &source, &page.targets, Direction::Scatter);
        if matches!(copied, Err(TransferError::Unsettled(_))) {
            // The device may still read the slot, so the arena never reuses it.
            std::mem::forget(slot);
        }
        copied
    }
}

impl PathWorker for Worker {
    fn read(&mut self, page: &PageRead) -> Result<(), TransferError> {
        page.check()?;
        let file = self.path.files.get(page.file)?;
        if let (Some(file), [target]) = (&file.straight, &page.targets[..])
            && target.address().is_multiple_of(BLOCK_BYTES as u64)
        {
            return read_straight(file, page, target);
        }
        let slot = self.read_slot(file.id, page)?;
        page.verify(&slot)?;
        self.copy(slot, page)
    }
}

/// Reads a page to memory of the host without a slot, and verifies it there. Returns when the
/// kernel has finished.
fn read_straight(file: &DeviceFile, page: &PageRead, target: &Slice) -> Result<(), TransferError> {
    // SAFETY: the target is memory of the host, mapped as long as the slice exists, and any byte is
    // a valid `u8`. The caller of `Transfers::read` grants the right to write to it until this
    // returns: no stream uses it, and no other thread accesses it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(target.address() as *mut u8, target.bytes()) };
    let (blocks, rest) = bytes.split_at_mut(page.bytes() / BLOCK_BYTES * BLOCK_BYTES);
    file.read_exact_at(blocks, page.offset)?;
    if !rest.is_empty() {
        let mut block = Block::of(&[]);
        file.read_exact_at(&mut block[..], page.offset + blocks.len() as u64)?;
        rest.copy_from_slice(&block[..rest.len()]);
    }
    page.verify(bytes)
}
