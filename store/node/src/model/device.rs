//! A device in memory, for models of the log.
//!
//! Each request is a task of the model: it transfers its bytes at one moment after its submission,
//! and completes at a later one. A read of a segment that is reused in between gets the new bytes,
//! as it would on a drive.

use larder_format::disk::BLOCK_BYTES;
use larder_io::{
    BoxFuture, Completion, Device, DeviceCapabilities, Done, Operation, Priority, RingClosed, SmallFile, TaskClass,
};
use shuttle::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The lock is one of std, because it is never held at a step of the model.
#[derive(Default)]
struct Files {
    small: BTreeMap<&'static str, Vec<u8>>,
    segments: BTreeMap<u32, Vec<u8>>,
    writes_submitted: u64,
}

pub(crate) struct MemoryDevice {
    files: Arc<Mutex<Files>>,
    /// Each change is a step of the model, at which another thread may run. A yield would also rank
    /// the thread behind all others, and so hide schedules in which a request is late.
    steps: Arc<AtomicU64>,
}

impl MemoryDevice {
    pub(crate) fn new() -> Arc<MemoryDevice> {
        Arc::new(MemoryDevice { files: Arc::default(), steps: Arc::default() })
    }

    /// Writes that the log has submitted so far.
    pub(crate) fn writes_submitted(&self) -> u64 {
        self.files.lock().unwrap().writes_submitted
    }

    fn step(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
    }

    fn change<'a, T: Send + 'a>(
        &'a self,
        change: impl FnOnce(&mut Files) -> T + Send + 'a,
    ) -> BoxFuture<'a, io::Result<T>> {
        Box::pin(async move {
            self.step();
            Ok(change(&mut self.files.lock().unwrap()))
        })
    }
}

impl Files {
    fn transfer(&mut self, segment: u32, operation: &mut Operation) -> io::Result<()> {
        let file = self.segments.get_mut(&segment).ok_or(io::ErrorKind::NotFound)?;
        match operation {
            Operation::Read { offset, block, slot, range } => {
                let mut at = *offset as usize;
                if let Some(block) = block {
                    block.copy_from_slice(&file[at..at + BLOCK_BYTES]);
                    at += BLOCK_BYTES;
                }
                slot.whole()[range.clone()].copy_from_slice(&file[at..at + range.len()]);
            }
            Operation::Write { offset, block, payload } => {
                let mut at = *offset as usize;
                if let Some(block) = block {
                    file[at..at + BLOCK_BYTES].copy_from_slice(&block[..]);
                    at += BLOCK_BYTES;
                }
                if let Some((slot, range)) = payload {
                    file[at..at + range.len()].copy_from_slice(&slot.whole()[range.clone()]);
                }
            }
            Operation::Sync => {}
        }
        Ok(())
    }
}

impl Device for MemoryDevice {
    fn path(&self) -> &Path {
        Path::new("model")
    }

    fn capabilities(&self) -> DeviceCapabilities {
        DeviceCapabilities { executor: "model", direct_io: true, registered_buffers: true, registered_files: true }
    }

    fn load(&self, file: SmallFile) -> BoxFuture<'_, io::Result<Option<Vec<u8>>>> {
        self.change(move |files| files.small.get(file.name()).cloned())
    }

    fn save(&self, file: SmallFile, bytes: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        self.change(move |files| drop(files.small.insert(file.name(), bytes)))
    }

    fn segments(&self) -> BoxFuture<'_, io::Result<Vec<u32>>> {
        self.change(|files| files.segments.keys().copied().collect())
    }

    fn open(&self, segment: u32, bytes: u64) -> BoxFuture<'_, io::Result<u64>> {
        self.change(move |files| files.segments.get(&segment).map_or(0, |file| file.len() as u64).min(bytes))
    }

    fn create(&self, segment: u32, bytes: u64, header: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        self.change(move |files| {
            let mut file = vec![0; bytes as usize];
            file[..header.len()].copy_from_slice(&header);
            files.segments.insert(segment, file);
        })
    }

    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>> {
        self.change(move |files| drop(files.segments.remove(&segment)))
    }

    fn rename_misplaced(&self, _segment: u32) -> BoxFuture<'_, io::Result<PathBuf>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }

    fn submit(
        &self,
        segment: u32,
        _priority: Priority,
        mut operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingClosed>> {
        let files = self.files.clone();
        let steps = self.steps.clone();
        Box::pin(async move {
            files.lock().unwrap().writes_submitted += u64::from(matches!(operation, Operation::Write { .. }));
            let request = async move {
                let result = files.lock().unwrap().transfer(segment, &mut operation);
                steps.fetch_add(1, Ordering::SeqCst);
                on_done(Done { operation, result });
            };
            drop(shuttle::future::spawn(request));
            Ok(())
        })
    }

    fn spawn(&self, _class: TaskClass, task: BoxFuture<'static, ()>) {
        drop(shuttle::future::spawn(task));
    }

    /// Never ends: time stands still in a model.
    fn sleep(&self, _duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn close_now(&self) {}
}
