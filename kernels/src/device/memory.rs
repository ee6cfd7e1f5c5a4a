//! Memory of a device, and pinned memory of the host.
//!
//! Invariants:
//! - Memory is freed after the last handle is dropped and after every stream that uses it has
//!   passed its last use. No deadline shortens this.
//! - The host reads and writes pinned memory only while no stream uses it.
//! - A [`Slice`] lies inside its memory.

use super::DeviceError;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::copy_nonoverlapping;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Alignment of every allocation in bytes.
pub const MEMORY_ALIGNMENT: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Memory of the device. Only streams access it.
    Device,
    /// Memory of the host that the device reads and writes directly, at the same address.
    Pinned,
}

/// Position of a stream among its operations.
pub(super) trait Progress: fmt::Debug + Send + Sync {
    /// Returns `true` if the first `operations` operations of the stream have ended.
    fn has_reached(&self, operations: u64) -> bool;
}

/// Last use of some memory by one stream.
#[derive(Debug)]
pub(super) struct Use {
    stream: Arc<dyn Progress>,
    operations: u64,
}

impl Use {
    pub(super) fn has_ended(&self) -> bool {
        self.stream.has_reached(self.operations)
    }
}

/// An allocation as its device knows it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) device: u64,
    pub(super) place: Place,
    pub(super) address: u64,
    pub(super) bytes: usize,
    /// The device checks bytes behind the region.
    pub(super) guarded: bool,
}

/// The device's side of an allocation.
pub(super) trait Owner: fmt::Debug + Send + Sync {
    /// Frees `region` as soon as all `uses` have ended. Does not wait.
    fn release(&self, region: Region, uses: Vec<Use>);
}

struct Allocation {
    region: Option<Region>,
    owner: Arc<dyn Owner>,
    uses: Mutex<Vec<Use>>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let uses = std::mem::take(self.uses.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Some(region) = self.region.take() {
            self.owner.release(region, uses);
        }
    }
}

/// Handle of an allocation. Clones share it. The content of new memory is unspecified.
#[derive(Clone)]
pub struct Memory {
    allocation: Arc<Allocation>,
    device: u64,
    place: Place,
    address: u64,
    bytes: usize,
    guarded: bool,
    read_only: bool,
}

impl Memory {
    pub(super) fn new(region: Region, owner: Arc<dyn Owner>) -> Memory {
        let Region { device, place, address, bytes, guarded } = region;
        let allocation = Allocation { region: Some(region), owner, uses: Mutex::default() };
        Memory { allocation: Arc::new(allocation), device, place, address, bytes, guarded, read_only: false }
    }

    /// The same memory, which streams then only read. Call it before the handle is cloned: a clone
    /// keeps its rights.
    pub(super) fn into_read_only(mut self) -> Memory {
        self.read_only = true;
        self
    }

    /// Fails if streams and slices may not write through this handle.
    pub(super) fn check_writable(&self) -> Result<(), DeviceError> {
        if self.read_only { Err(DeviceError::ReadOnly) } else { Ok(()) }
    }

    /// Returns `true` if this is the only handle, and no stream uses the memory.
    pub(super) fn is_exclusive(&mut self) -> bool {
        let Some(allocation) = Arc::get_mut(&mut self.allocation) else { return false };
        let uses = allocation.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
        uses.retain(|known| !known.has_ended());
        uses.is_empty()
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn place(&self) -> Place {
        self.place
    }

    /// Address for the device, and for the host if the memory is pinned.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn device(&self) -> u64 {
        self.device
    }

    pub(super) fn is_guarded(&self) -> bool {
        self.guarded
    }

    /// The whole memory.
    pub fn all(&self) -> Slice {
        Slice { memory: self.clone(), offset: 0, bytes: self.bytes }
    }

    /// The bytes `range` of the memory.
    ///
    /// # Errors
    /// If the range leaves the memory.
    pub fn slice(&self, range: Range<usize>) -> Result<Slice, DeviceError> {
        self.all().slice(range)
    }

    /// Notes that `stream` uses the memory in its operation number `operations`, counted from 1.
    /// Call this before the operation is enqueued, so that the host sees the use in time.
    pub(super) fn mark(&self, stream: &Arc<dyn Progress>, operations: u64) {
        let mut uses = self.lock();
        if let Some(known) = uses.iter_mut().find(|known| Arc::ptr_eq(&known.stream, stream)) {
            known.operations = known.operations.max(operations);
            return;
        }
        uses.retain(|known| !known.has_ended());
        uses.push(Use { stream: Arc::clone(stream), operations });
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Use>> {
        // Ignoring poison is sound: no holder of the lock panics between two related changes.
        self.allocation.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks out every stream, or fails if one uses the memory.
    fn host_access(&self) -> Result<MutexGuard<'_, Vec<Use>>, DeviceError> {
        if self.place != Place::Pinned {
            return Err(DeviceError::NotHostMemory);
        }
        let mut uses = self.lock();
        uses.retain(|known| !known.has_ended());
        if uses.is_empty() { Ok(uses) } else { Err(DeviceError::InUse) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} memory of {} bytes at {:#x}", self.place, self.bytes, self.address)
    }
}

/// Range of bytes inside some memory. Keeps the memory allocated.
#[derive(Clone)]
pub struct Slice {
    memory: Memory,
    offset: usize,
    bytes: usize,
}

impl Slice {
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn address(&self) -> u64 {
        self.memory.address + self.offset as u64
    }

    /// The bytes `range` of this slice.
    ///
    /// # Errors
    /// If the range leaves the slice.
    pub fn slice(&self, range: Range<usize>) -> Result<Slice, DeviceError> {
        let Range { start, end } = range;
        if start > end || end > self.bytes {
            return Err(DeviceError::OutOfRange { start, end, bytes: self.bytes });
        }
        Ok(Slice { memory: self.memory.clone(), offset: self.offset + start, bytes: end - start })
    }

    /// Copies the slice of pinned memory to `target`, on the calling thread.
    ///
    /// # Errors
    /// If the lengths differ, if the memory is not pinned, or if a stream still uses the memory.
    pub fn read(&self, target: &mut [u8]) -> Result<(), DeviceError> {
        self.check_length(target.len())?;
        let _exclusive = self.memory.host_access()?;
        // SAFETY: the slice lies inside pinned memory of the host, which `memory` keeps. The guard
        // excludes other accesses by the host, and no stream uses the memory.
        unsafe { copy_nonoverlapping(self.address() as *const u8, target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// Copies `source` to the slice of pinned memory, on the calling thread.
    ///
    /// # Errors
    /// As for [`read`](Self::read), or if the memory belongs to
    /// [`PinnedBytes`](super::PinnedBytes).
    pub fn write(&self, source: &[u8]) -> Result<(), DeviceError> {
        self.check_length(source.len())?;
        self.memory.check_writable()?;
        let _exclusive = self.memory.host_access()?;
        // SAFETY: as in `read`.
        unsafe { copy_nonoverlapping(source.as_ptr(), self.address() as *mut u8, source.len()) };
        Ok(())
    }

    fn check_length(&self, bytes: usize) -> Result<(), DeviceError> {
        if bytes == self.bytes {
            return Ok(());
        }
        Err(DeviceError::OutOfRange { start: 0, end: bytes, bytes: self.bytes })
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bytes {}..{} of {:?}", self.offset, self.offset + self.bytes, self.memory)
    }
}

/// Object that keeps adopted memory valid.
pub type Keep = Arc<dyn Any + Send + Sync>;
