//! Making, removing and replacing files.
//!
//! Always true: a change is done whole when it is answered; if power fails before, it was done or not.

use super::SimDevice;
use crate::disk::Disk;
use larder_device::SmallFile;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

/// Something that happens to a file.
#[derive(Debug, Clone)]
pub(super) enum FileChange {
    Save(SmallFile, Vec<u8>),
    /// Number, bytes and header: it comes by its name when all of it is durable.
    Make(u32, u64, Vec<u8>),
    Remove(u32),
    /// It is no segment any more.
    SetAside(u32),
}

impl FileChange {
    pub(super) fn apply(self, disk: &mut Disk) {
        match self {
            FileChange::Save(file, bytes) => disk.save(file, bytes),
            FileChange::Make(segment, bytes, header) => disk.create(segment, bytes, &header),
            FileChange::Remove(segment) | FileChange::SetAside(segment) => disk.remove(segment),
        }
    }

    fn number(&self) -> u64 {
        match self {
            FileChange::Save(file, _) => *file as u64,
            FileChange::Make(segment, ..) | FileChange::Remove(segment) | FileChange::SetAside(segment) => {
                u64::from(*segment)
            }
        }
    }
}

impl SimDevice {
    /// Waits as long as a call on files takes; it may fail without having done anything.
    pub(super) async fn file_step(&self, what: &'static str, number: u64) -> io::Result<()> {
        if !self.event(what, [number, 0, 0]) {
            return std::future::pending().await;
        }
        let due = self.due_ms(&mut self.state.lock().dice);
        tokio::time::sleep_until(self.world.instant(due)).await;
        if !self.event("file done", [number, 0, 0]) {
            return std::future::pending().await;
        }
        let fails = self.world.faults.lock().file_error;
        let broken = self.disk().lock().is_broken(self.world.now_ms());
        if self.state.lock().dice.chance(fails) || broken {
            self.world.fault("file error", [number, 0, 0]);
            return Err(io::Error::from_raw_os_error(5));
        }
        Ok(())
    }

    /// Changes a file, with the device stopping before, between or behind.
    pub(super) async fn change_file(&self, what: &'static str, change: FileChange) -> io::Result<()> {
        let number = {
            let mut state = self.state.lock();
            state.taken += 1;
            let number = state.taken;
            state.files.insert(number, change.clone());
            number
        };
        let step = self.file_step(what, change.number()).await;
        self.state.lock().files.remove(&number);
        step?;
        change.apply(&mut self.disk().lock());
        Ok(())
    }

    pub(super) async fn open_segment(&self, segment: u32, bytes: u64) -> io::Result<u64> {
        self.file_step("open", u64::from(segment)).await?;
        let mut disk = self.disk().lock();
        if !disk.has(segment) {
            return Err(io::ErrorKind::NotFound.into());
        }
        disk.make(segment, bytes);
        drop(disk);
        self.state.lock().open.insert(segment);
        Ok(bytes)
    }

    pub(super) async fn create_segment(&self, segment: u32, bytes: u64, header: Vec<u8>) -> io::Result<()> {
        if self.disk().lock().has(segment) {
            self.check_idle(&self.state.lock(), segment);
            self.remove_segment(segment).await?;
        }
        let fails = self.world.faults.lock().no_space;
        let full = self.disk().lock().is_full(self.world.now_ms());
        if self.state.lock().dice.chance(fails) || full {
            self.file_step("create", u64::from(segment)).await?;
            self.world.fault("no space", [u64::from(segment), 0, 0]);
            return Err(io::Error::from_raw_os_error(28));
        }
        self.change_file("create", FileChange::Make(segment, bytes, header)).await?;
        self.state.lock().open.insert(segment);
        self.check_capacity();
        Ok(())
    }

    pub(super) async fn remove_segment(&self, segment: u32) -> io::Result<()> {
        self.detach(segment).await;
        self.change_file("remove", FileChange::Remove(segment)).await
    }

    pub(super) async fn set_segment_aside(&self, segment: u32) -> io::Result<PathBuf> {
        self.detach(segment).await;
        self.change_file("set aside", FileChange::SetAside(segment)).await?;
        self.world.count("strays set aside", 1);
        Ok(self.path.join(format!("{segment:08}.stray")))
    }

    /// Takes no more requests on a segment, and waits for those it has.
    async fn detach(&self, segment: u32) {
        self.state.lock().open.remove(&segment);
        loop {
            let progress = self.progress.notified();
            if !self.state.lock().flights.values().any(|flight| flight.segment == segment) {
                break;
            }
            progress.await;
        }
    }

    /// Files never take more than the node was given.
    pub(super) fn check_capacity(&self) {
        let bytes = self.disk().lock().bytes();
        if bytes > self.capacity_bytes && !self.starting.load(Ordering::Relaxed) {
            self.world.violate(format!("files take {bytes} bytes of {}", self.capacity_bytes));
        }
    }
}
