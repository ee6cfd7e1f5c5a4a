//! Host path: direct I/O between files and the arena, on an io_uring ring of its own.

use larder_io::{DeviceFile, Done, FileId, Operation, Priority, Request, Ring, RingOptions};
use larder_memory::{Arena, Slot, SlotMut};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

const FILES_MAX: u32 = 64;

#[derive(Debug, Error)]
pub enum TransferError {
    #[error("the arena has no free range of {0} bytes; retry later or enlarge the arena")]
    NoRoom(usize),
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The deadline passed first. The kernel still owns the memory until the request completes, so
    /// the slot is not returned.
    #[error("the transfer did not finish before its deadline")]
    Deadline,
    #[error("the transfer ring has stopped")]
    Stopped,
}

/// Transfers whole blocks between files and arena memory with direct I/O. Dropping it stops the
/// ring, and blocks until requests in flight have completed or the ring's close timeout has passed.
pub struct HostTransfer {
    arena: Arc<Arena>,
    ring: Ring,
}

impl HostTransfer {
    pub fn new(arena: Arc<Arena>) -> io::Result<HostTransfer> {
        let ring = Ring::start(arena.clone(), RingOptions::new("larder-transfer", FILES_MAX))?;
        Ok(HostTransfer { arena, ring })
    }

    /// Opens a file for direct I/O and attaches it to the ring.
    pub async fn open(&self, path: &Path) -> io::Result<FileId> {
        self.ring.attach(DeviceFile::open(path)?).await
    }

    /// Reads `bytes` at `offset` into a newly allocated slot. Both must be multiples of 4096, as
    /// direct I/O requires. The slot returns to the arena when it is dropped.
    pub async fn read(
        &self,
        file: FileId,
        offset: u64,
        bytes: usize,
        deadline: Instant,
    ) -> Result<SlotMut, TransferError> {
        let slot = self.arena.allocate(bytes).ok_or(TransferError::NoRoom(bytes))?;
        let done = self.run(file, Operation::read(offset, slot), deadline).await?;
        done.into_slot().ok_or(TransferError::Stopped)
    }

    /// Writes a whole slot at `offset`, which must be a multiple of 4096.
    pub async fn write(&self, file: FileId, offset: u64, slot: Slot, deadline: Instant) -> Result<(), TransferError> {
        let range = 0..slot.capacity();
        let operation = Operation::Write { offset, block: None, payload: Some((slot, range)) };
        self.run(file, operation, deadline).await.map(drop)
    }

    async fn run(&self, file: FileId, operation: Operation, deadline: Instant) -> Result<Done, TransferError> {
        let request = Request { file, priority: Priority::Demand, operation };
        let mut done = tokio::time::timeout_at(deadline.into(), self.ring.run(request))
            .await
            .map_err(|_| TransferError::Deadline)?
            .map_err(|_| TransferError::Stopped)?;
        std::mem::replace(&mut done.result, Ok(()))?;
        Ok(done)
    }
}

impl Drop for HostTransfer {
    fn drop(&mut self) {
        self.ring.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[tokio::test]
    async fn read_returns_the_written_bytes() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("bytes");
        std::fs::write(&path, vec![0u8; 64 << 10]).unwrap();
        let arena = Arena::new(1 << 20).unwrap();
        let transfer = HostTransfer::new(arena.clone()).unwrap();
        let file = transfer.open(&path).await.unwrap();
        let mut slot = arena.allocate(16 << 10).unwrap();
        slot.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8);
        let slot = slot.freeze();
        transfer.write(file, 8192, slot.clone(), soon()).await.unwrap();
        let back = transfer.read(file, 8192, 16 << 10, soon()).await.unwrap();
        assert!(back[..] == slot[..]);
        let before = transfer.read(file, 4096, 4096, soon()).await.unwrap();
        assert!(before.iter().all(|&b| b == 0));
    }

    #[tokio::test]
    async fn failed_transfers_report_their_cause() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("bytes");
        std::fs::write(&path, vec![0u8; 8192]).unwrap();
        let transfer = HostTransfer::new(Arena::new(1 << 20).unwrap()).unwrap();
        assert!(transfer.open(&dir.path().join("absent")).await.is_err());
        let file = transfer.open(&path).await.unwrap();
        assert!(matches!(transfer.read(file, 0, 2 << 20, soon()).await, Err(TransferError::NoRoom(_))));
        assert!(
            matches!(transfer.read(file, 1 << 20, 4096, soon()).await, Err(TransferError::Io(_))),
            "beyond the end of the file"
        );
    }
}
