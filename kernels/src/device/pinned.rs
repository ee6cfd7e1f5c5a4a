//! Pinned memory that the host uses as plain bytes.

use super::{Device, DeviceError, Memory, Place, Slice};
use std::fmt;

/// Pinned memory of the host. Streams read it through [`source`](Self::source), and no stream can
/// write it.
///
/// Invariant: the host writes only while no [`Slice`] of the memory exists and no stream reads it.
pub struct PinnedBytes {
    memory: Memory,
}

impl PinnedBytes {
    /// Allocates `bytes` bytes, which are 0. A driver takes up to a millisecond per MiB.
    ///
    /// # Errors
    /// If the memory is not free, or if the driver cannot pin it.
    pub fn new(device: &dyn Device, bytes: usize) -> Result<PinnedBytes, DeviceError> {
        let mut pinned = PinnedBytes { memory: device.allocate(Place::Pinned, bytes)?.into_read_only() };
        if let Some(content) = pinned.bytes_mut() {
            content.fill(0);
        }
        Ok(pinned)
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is pinned memory of the host with this length, initialised by `new`,
        // and lives as long as `self`. It is read-only for streams and slices. Only `bytes_mut`
        // writes, and it borrows `self` exclusively.
        unsafe { std::slice::from_raw_parts(self.memory.address() as *const u8, self.memory.bytes()) }
    }

    /// The bytes for writing. `None` while a slice of the memory exists or a stream reads it.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if !self.memory.is_exclusive() {
            return None;
        }
        // SAFETY: as in `bytes`. `new` calls this before the memory is shared; the driver returns
        // mapped memory, and any byte is a valid `u8`. `self` is the only handle, so no stream can
        // begin to read before this borrow ends.
        Some(unsafe { std::slice::from_raw_parts_mut(self.memory.address() as *mut u8, self.memory.bytes()) })
    }

    /// The whole memory, for streams to read.
    pub fn source(&self) -> Slice {
        self.memory.all()
    }
}

impl fmt::Debug for PinnedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host;
    use std::time::{Duration, Instant};

    #[test]
    fn streams_read_the_memory_and_the_host_writes_it_while_none_can() {
        let device = host::open(64 << 20);
        let stream = device.stream("test").unwrap();
        let mut pinned = PinnedBytes::new(&*device, 1000).unwrap();
        assert!(pinned.bytes().iter().all(|byte| *byte == 0));
        pinned.bytes_mut().unwrap().fill(7);
        let source = pinned.source();
        assert!(pinned.bytes_mut().is_none(), "a stream could read it");
        let copy = device.allocate(Place::Pinned, 1000).unwrap();
        stream.copy(&copy.all(), &source).unwrap();
        for refused in
            [stream.fill(&source, 1), stream.copy(&source, &copy.all()), source.slice(0..4).unwrap().write(&[1; 4])]
        {
            assert_eq!(refused, Err(DeviceError::ReadOnly));
        }
        drop(source);
        stream.wait(Instant::now() + Duration::from_secs(60)).unwrap();
        pinned.bytes_mut().unwrap()[0] = 8;
        let mut found = vec![0; 1000];
        copy.all().read(&mut found).unwrap();
        assert_eq!((found, pinned.bytes()[..2].to_vec()), (vec![7; 1000], vec![8, 7]));
    }

    #[test]
    fn the_host_does_not_write_what_a_stream_is_still_to_read() {
        let device = host::open(256 << 20);
        let stream = device.stream("test").unwrap();
        let slow = device.allocate(Place::Device, 64 << 20).unwrap();
        let target = device.allocate(Place::Device, 16).unwrap();
        let mut pinned = PinnedBytes::new(&*device, 16).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        // Many, so that the copy is not done when the host looks.
        for _ in 0..20 {
            stream.fill(&slow.all(), 1).unwrap();
        }
        stream.copy(&target.all(), &pinned.source()).unwrap();
        assert!(pinned.bytes_mut().is_none());
        stream.wait(deadline).unwrap();
        assert!(pinned.bytes_mut().is_some());
    }
}
