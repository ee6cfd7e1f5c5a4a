//! Copies of a worker, and their ends.

use crate::TransferError;
use larder_kernels::device::{Device, DeviceError, Memory, Place, Slice, Stream};
use std::time::{Duration, Instant};

/// Time between two looks at a stream that does not end. It bounds one call of `Stream::wait` only.
/// The wait itself goes on.
const STEP: Duration = Duration::from_secs(1);

/// Waits until the device has finished all copies of `stream`. The wait has no deadline, because
/// the caller owns memory that the device accesses. Deadlines end the wait of the request instead.
///
/// # Errors
/// [`TransferError::Unsettled`] if the device fails.
pub(crate) fn settle(stream: &dyn Stream) -> Result<(), TransferError> {
    loop {
        match stream.wait(Instant::now() + STEP) {
            Ok(()) => return Ok(()),
            Err(DeviceError::Deadline { .. }) => {}
            Err(error) => return Err(TransferError::Unsettled(error)),
        }
    }
}

/// Direction of copies between one run of bytes and its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Scatter,
    Gather,
}

/// Copies `whole` to `parts` or back, and waits for the end. Earlier copies have ended even if a
/// later one was refused.
///
/// # Errors
/// [`TransferError::Unsettled`] if the device fails, [`TransferError::Device`] if it refuses a
/// copy.
pub(crate) fn copy_parts(
    stream: &dyn Stream,
    whole: &Slice,
    parts: &[Slice],
    direction: Direction,
) -> Result<(), TransferError> {
    let mut start = 0;
    let enqueued = parts.iter().try_for_each(|part| {
        let end = start + part.bytes();
        let piece = whole.slice(start..end)?;
        start = end;
        match direction {
            Direction::Scatter => stream.copy(part, &piece),
            Direction::Gather => stream.copy(&piece, part),
        }
    });
    settle(stream)?;
    enqueued.map_err(TransferError::Device)
}

/// Pinned memory of one worker, which grows to the longest page. It never shrinks. A valid page has
/// at most 16 MiB (`MAX_PAGE_BYTES`).
#[derive(Debug, Default)]
pub(crate) struct Buffer(Option<Memory>);

impl Buffer {
    /// Returns `bytes` bytes of pinned memory, with unspecified content. A longer page replaces the
    /// memory, and the old memory is freed first.
    ///
    /// # Errors
    /// If the device refuses the memory. The buffer is empty then.
    pub(crate) fn slice(&mut self, device: &dyn Device, bytes: usize) -> Result<Slice, TransferError> {
        if self.0.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            self.0 = None;
            self.0 = Some(device.allocate(Place::Pinned, bytes)?);
        }
        let memory = self.0.as_ref().ok_or(TransferError::NoRoom(bytes))?;
        Ok(memory.slice(0..bytes)?)
    }
}
