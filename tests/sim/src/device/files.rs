//! Creation, removal and replacement of files.
//!
//! Invariant: a change is complete when it is acknowledged. A power loss before that leaves it done
//! in full or not at all.

use super::SimDevice;
use crate::disk::Disk;
use larder_io::SmallFile;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

#[derive(Debug, Clone)]
pub(super) enum FileChange {
    Save(SmallFile, Vec<u8>),
    /// Segment number, bytes and header. The file appears under its name once it is durable.
    Create(u32, u64, Vec<u8>),
    Remove(u32),
    Quarantine(u32),
}

impl FileChange {
    pub(super) fn apply(self, disk: &mut Disk) {
        match self {
            FileChange::Save(file, bytes) => disk.save(file, bytes),
            FileChange::Create(segment, bytes, header) => disk.create(segment, bytes, &header),
            FileChange::Remove(segment) | FileChange::Quarantine(segment) => disk.remove(segment),
        }
    }

    fn number(&self) -> u64 {
        match self {
            FileChange::Save(file, _) => *file as u64,
            FileChange::Create(segment, ..) | FileChange::Remove(segment) | FileChange::Quarantine(segment) => {
                u64::from(*segment)
            }
        }
    }
}

impl SimDevice {
    /// Waits for the latency of a file operation. An injected error leaves the file unchanged.
    pub(super) async fn file_step(&self, name: &'static str, number: u64) -> io::Result<()> {
        // Two events, so that power can fail before and after the operation.
        if !self.event(name, [number, 0, 0]) {
            return std::future::pending().await;
        }
        let due = self.due_ms(&mut self.state.lock().random);
        tokio::time::sleep_until(self.world.instant(due)).await;
        if !self.event("file done", [number, 0, 0]) {
            return std::future::pending().await;
        }
        let fails = self.world.faults.lock().file_error;
        let broken = self.disk().lock().is_broken(self.world.now_ms());
        if self.state.lock().random.chance(fails) || broken {
            self.world.fault("file error", [number, 0, 0]);
            return Err(io::Error::from_raw_os_error(5));
        }
        Ok(())
    }

    pub(super) async fn change_file(&self, name: &'static str, change: FileChange) -> io::Result<()> {
        let number = {
            let mut state = self.state.lock();
            state.accepted += 1;
            let number = state.accepted;
            state.files.insert(number, change.clone());
            number
        };
        let step = self.file_step(name, change.number()).await;
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
        disk.resize(segment, bytes);
        drop(disk);
        self.state.lock().open.insert(segment);
        Ok(bytes)
    }

    pub(super) async fn create_segment(&self, segment: u32, bytes: u64, header: Vec<u8>) -> io::Result<()> {
        if self.disk().lock().has(segment) {
            self.check_segment_idle(&self.state.lock(), segment);
            self.remove_segment(segment).await?;
        }
        let fails = self.world.faults.lock().no_space;
        let full = self.disk().lock().is_full(self.world.now_ms());
        if self.state.lock().random.chance(fails) || full {
            self.file_step("create", u64::from(segment)).await?;
            self.world.fault("no space", [u64::from(segment), 0, 0]);
            return Err(io::Error::from_raw_os_error(28));
        }
        self.change_file("create", FileChange::Create(segment, bytes, header)).await?;
        self.state.lock().open.insert(segment);
        self.check_capacity();
        Ok(())
    }

    pub(super) async fn remove_segment(&self, segment: u32) -> io::Result<()> {
        self.detach(segment).await;
        self.change_file("remove", FileChange::Remove(segment)).await
    }

    pub(super) async fn quarantine_segment(&self, segment: u32) -> io::Result<PathBuf> {
        self.detach(segment).await;
        self.change_file("quarantine", FileChange::Quarantine(segment)).await?;
        self.world.count("misplaced segments quarantined", 1);
        Ok(self.path.join(format!("{segment:08}.stray")))
    }

    async fn detach(&self, segment: u32) {
        self.state.lock().open.remove(&segment);
        loop {
            let progress = self.progress.notified();
            if !self.state.lock().in_flight.values().any(|request| request.segment == segment) {
                break;
            }
            progress.await;
        }
    }

    pub(super) fn check_capacity(&self) {
        let bytes = self.disk().lock().bytes();
        if bytes > self.capacity_bytes && !self.starting.load(Ordering::Relaxed) {
            self.world.violate(format!("files use {bytes} bytes, and the capacity is {}", self.capacity_bytes));
        }
    }
}
