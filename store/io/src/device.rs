//! The interface between the log and its storage: numbered segments, small files, prioritized
//! requests and an executor.
//!
//! Invariants:
//! - A request owns its memory until it is completed, and completes at most once.
//! - [`Device::save`], [`Device::create`], [`Device::remove`] and [`Device::rename_misplaced`] are
//!   atomic. Once they return, their effect survives a crash of the machine.
//! - A write is durable once an [`Operation::Sync`] of its segment has completed that started after
//!   the write completed.
//!
//! [`FileDevice`](crate::FileDevice) implements the trait on real files. The simulation has a
//! device that tears, loses and delays writes.

use crate::file::DeviceFile;
use crate::request::{Completion, Done, Operation, Priority, RingClosed};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::oneshot;

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Metadata files beside the segments. [`Device::save`] replaces one as a whole, so a reader sees
/// the old content or the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SmallFile {
    Superblock,
    /// Second copy of the superblock.
    SuperblockCopy,
    Scrub,
}

impl SmallFile {
    pub const ALL: [SmallFile; 3] = [SmallFile::Superblock, SmallFile::SuperblockCopy, SmallFile::Scrub];

    pub fn name(self) -> &'static str {
        match self {
            SmallFile::Superblock => "larder.sb",
            SmallFile::SuperblockCopy => "larder.sb2",
            SmallFile::Scrub => "larder.scrub",
        }
    }
}

/// Features that a device was granted by its system. They affect speed, never correctness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCapabilities {
    /// Driver of requests and tasks: "glommio", "thread" or "simulated".
    pub executor: &'static str,
    pub direct_io: bool,
    /// True if the arena is registered with the kernel, which saves pinning its pages per request.
    pub registered_buffers: bool,
    pub registered_files: bool,
}

/// Scheduling class of a task: its share of the executor's time when other classes have ready
/// tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskClass {
    /// A caller waits for the task. Polled before all others.
    Foreground,
    Background,
    Idle,
}

impl TaskClass {
    pub(crate) const COUNT: usize = 3;

    pub(crate) const ALL: [TaskClass; TaskClass::COUNT] =
        [TaskClass::Foreground, TaskClass::Background, TaskClass::Idle];
}

/// Storage of one log. All methods may be called from any thread and any executor, except those on
/// small files and [`Device::close`], which need a tokio runtime.
pub trait Device: Send + Sync + 'static {
    fn path(&self) -> &Path;

    fn capabilities(&self) -> DeviceCapabilities;

    fn load(&self, file: SmallFile) -> BoxFuture<'_, io::Result<Option<Vec<u8>>>>;

    /// Creates or replaces a small file. A crash leaves the old content or the new one, and the new
    /// one is durable once the call returns.
    fn save(&self, file: SmallFile, bytes: Vec<u8>) -> BoxFuture<'_, io::Result<()>>;

    /// Returns the numbers of existing segments in ascending order.
    fn segments(&self) -> BoxFuture<'_, io::Result<Vec<u32>>>;

    /// Opens a segment for requests. Returns the number of its bytes that exist, at most `bytes`: a
    /// longer file is used up to that length.
    fn open(&self, segment: u32, bytes: u64) -> BoxFuture<'_, io::Result<u64>>;

    /// Replaces a segment by a new one and opens it. All `bytes` are allocated and `header` is the
    /// first block.
    ///
    /// On failure the segment is gone as far as the device can tell. The caller makes sure with
    /// [`Device::remove`].
    fn create(&self, segment: u32, bytes: u64, header: Vec<u8>) -> BoxFuture<'_, io::Result<()>>;

    /// Opens an existing segment for reads only, for another process. The default has no files.
    ///
    /// # Errors
    /// `Unsupported` without files. Any error of the file system.
    fn open_read_only(&self, _segment: u32) -> BoxFuture<'_, io::Result<DeviceFile>> {
        Box::pin(std::future::ready(Err(io::ErrorKind::Unsupported.into())))
    }

    /// Removes a segment if it exists, after the requests on it that were accepted before. The
    /// removal is durable once the call returns.
    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>>;

    /// Renames a file that has a segment's name but does not belong to this log. The file is kept
    /// for the operator, beside files renamed earlier. Returns the new path.
    fn rename_misplaced(&self, segment: u32) -> BoxFuture<'_, io::Result<PathBuf>>;

    /// Queues a request on an open segment. Waits while the queue of its priority is full.
    ///
    /// The device drops `on_done` without a call only if it closes before the request starts.
    fn submit(
        &self,
        segment: u32,
        priority: Priority,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingClosed>>;

    /// Runs a task on the device's executor until the task ends or the device is closed. Closing
    /// drops an unfinished task.
    fn spawn(&self, class: TaskClass, task: BoxFuture<'static, ()>);

    /// Returns a future that completes after `duration`, for tasks of [`Device::spawn`].
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;

    /// Refuses new requests, completes accepted ones, drops the tasks and unlocks the directory.
    /// Several devices can be closed concurrently.
    fn close(&self) -> BoxFuture<'_, ()>;

    fn close_now(&self);
}

/// Submits a request and waits for its outcome. Dropping the future does not cancel the request:
/// the device owns the memory until it completes.
pub async fn run(
    device: &dyn Device,
    segment: u32,
    priority: Priority,
    operation: Operation,
) -> Result<Done, RingClosed> {
    let (reply, answer) = oneshot::channel();
    let on_done = Box::new(move |done| {
        // The caller may have dropped the future. The request has completed, so its memory can be
        // freed.
        let _ = reply.send(done);
    });
    device.submit(segment, priority, operation, on_done).await?;
    answer.await.map_err(|_| RingClosed)
}
