//! Working memory of passes, kept between them.

use larder_kernels::device::{Device, DeviceError, Memory, Place, Slice};

/// Memory that grows with the largest pass so far. Its content is unspecified at the start of a
/// pass.
pub(super) struct Room {
    place: Place,
    memory: Option<Memory>,
}

/// Bytes that a [`Room`] takes for a pass of `bytes` bytes, if they are free.
pub(super) fn rounded(bytes: usize) -> usize {
    bytes.max(1).checked_next_power_of_two().unwrap_or(bytes)
}

impl Room {
    pub(super) const fn new(place: Place) -> Room {
        Room { place, memory: None }
    }

    /// The first `bytes` bytes.
    ///
    /// # Errors
    /// If the memory is not free.
    pub(super) fn of(&mut self, device: &dyn Device, bytes: usize) -> Result<Slice, DeviceError> {
        if let Some(memory) = self.memory.as_ref().filter(|memory| memory.bytes() >= bytes) {
            return memory.slice(0..bytes);
        }
        // Before the allocation, so that both do not have to fit.
        self.memory = None;
        let memory = match device.allocate(self.place, rounded(bytes)) {
            Err(DeviceError::OutOfMemory { .. }) => device.allocate(self.place, bytes.max(1))?,
            result => result?,
        };
        self.memory.insert(memory).slice(0..bytes)
    }
}
