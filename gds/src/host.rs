//! The host way: direct I/O between files and the arena, on a ring of its own.

use larder_device::{Arena, DeviceFile, Done, FileId, Lane, Operation, Request, Ring, RingOptions, Slot, SlotMut};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Most files of a mover at a time.
const FILES_MAX: u32 = 64;

/// Why bytes were not moved.
#[derive(Debug, Error)]
pub enum MoveError {
    /// The arena has no room for them now.
    #[error("no room for {0} bytes in the arena")]
    NoRoom(usize),
    /// The device did not do it.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Not done in time. The memory stays with the device until it answers.
    #[error("not moved before the deadline")]
    Deadline,
    /// The ring has stopped.
    #[error("the mover has stopped")]
    Stopped,
}

/// Moves whole blocks between files and arena memory. Dropping it stops its ring.
pub struct HostMover {
    arena: Arc<Arena>,
    ring: Ring,
}

impl HostMover {
    /// A mover into and out of `arena`.
    pub fn new(arena: Arc<Arena>) -> io::Result<HostMover> {
        let ring = Ring::start(arena.clone(), RingOptions::new("larder-mover", FILES_MAX))?;
        Ok(HostMover { arena, ring })
    }

    /// Opens a file for moving.
    pub async fn open(&self, path: &Path) -> io::Result<FileId> {
        self.ring.attach(DeviceFile::open(path)?).await
    }

    /// Reads `bytes` at `offset` into a slot of their own; both are multiples of 4096.
    pub async fn read(&self, file: FileId, offset: u64, bytes: usize, deadline: Instant) -> Result<SlotMut, MoveError> {
        let slot = self.arena.allocate(bytes).ok_or(MoveError::NoRoom(bytes))?;
        let done = self.run(file, Operation::read(offset, slot), deadline).await?;
        done.into_slot().ok_or(MoveError::Stopped)
    }

    /// Writes a slot at `offset`, a multiple of 4096.
    pub async fn write(&self, file: FileId, offset: u64, slot: Slot, deadline: Instant) -> Result<(), MoveError> {
        let range = 0..slot.capacity();
        let operation = Operation::Write { offset, block: None, payload: Some((slot, range)) };
        self.run(file, operation, deadline).await.map(drop)
    }

    async fn run(&self, file: FileId, operation: Operation, deadline: Instant) -> Result<Done, MoveError> {
        let request = Request { file, lane: Lane::Demand, operation };
        let mut done = tokio::time::timeout_at(deadline.into(), self.ring.run(request))
            .await
            .map_err(|_| MoveError::Deadline)?
            .map_err(|_| MoveError::Stopped)?;
        std::mem::replace(&mut done.result, Ok(()))?;
        Ok(done)
    }
}

impl Drop for HostMover {
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
    async fn what_is_written_is_read_back() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("bytes");
        std::fs::write(&path, vec![0u8; 64 << 10]).unwrap();
        let arena = Arena::new(1 << 20).unwrap();
        let mover = HostMover::new(arena.clone()).unwrap();
        let file = mover.open(&path).await.unwrap();
        let mut slot = arena.allocate(16 << 10).unwrap();
        slot.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8);
        let slot = slot.freeze();
        mover.write(file, 8192, slot.clone(), soon()).await.unwrap();
        let back = mover.read(file, 8192, 16 << 10, soon()).await.unwrap();
        assert!(back[..] == slot[..]);
        let before = mover.read(file, 4096, 4096, soon()).await.unwrap();
        assert!(before.iter().all(|&b| b == 0));
    }

    #[tokio::test]
    async fn errors_are_told() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("bytes");
        std::fs::write(&path, vec![0u8; 8192]).unwrap();
        let mover = HostMover::new(Arena::new(1 << 20).unwrap()).unwrap();
        assert!(mover.open(&dir.path().join("absent")).await.is_err());
        let file = mover.open(&path).await.unwrap();
        assert!(matches!(mover.read(file, 0, 2 << 20, soon()).await, Err(MoveError::NoRoom(_))));
        assert!(matches!(mover.read(file, 1 << 20, 4096, soon()).await, Err(MoveError::Io(_))), "behind the end");
    }
}
