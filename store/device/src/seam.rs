//! What a log needs of a device: numbered segments, a few small files, a queue of requests, and an executor.
//!
//! Always true: a request owns its memory until it is answered, and is answered at most once; what [`Device::save`],
//! [`Device::create`], [`Device::remove`] and [`Device::set_aside`] did stays so after a crash of the machine, once they
//! returned, and before that it was done whole or not at all; a write stays
//! only once a [`Operation::Sync`] of its segment that began after its answer was answered.
//!
//! [`FileDevice`](crate::FileDevice) is the real one. The simulation has another, which tears, loses and delays.

use crate::request::{Done, Lane, Operation};
use crate::ring::{RingGone, Share};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::oneshot;

/// A future that may be sent to another thread.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
/// Called once, on the device's executor, when a request is answered; it must be quick.
pub type Completion = Box<dyn FnOnce(Done) + Send>;

/// The small files beside the segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SmallFile {
    /// `larder.sb`, the superblock.
    Superblock,
    /// `larder.scrub`, how far the scrub is.
    Scrub,
}

impl SmallFile {
    /// Its name in the directory.
    pub fn name(self) -> &'static str {
        match self {
            SmallFile::Superblock => "larder.sb",
            SmallFile::Scrub => "larder.scrub",
        }
    }
}

/// What a device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Who runs its requests and tasks: "glommio", "thread", "simulated".
    pub executor: &'static str,
    /// Reads and writes go past the page cache.
    pub direct_io: bool,
    /// The arena is registered with it.
    pub registered_buffers: bool,
    /// So are its files.
    pub registered_files: bool,
}

/// A device. All methods but those on small files, and [`Device::close`], may be called from any thread and any executor.
pub trait Device: Send + Sync + 'static {
    /// The directory, for people.
    fn path(&self) -> &Path;

    /// What it can do.
    fn facts(&self) -> DeviceFacts;

    /// The whole content of a small file, `None` if there is none.
    fn load(&self, file: SmallFile) -> BoxFuture<'_, io::Result<Option<Vec<u8>>>>;

    /// Makes or replaces a small file, whole or not at all, and durably.
    fn save(&self, file: SmallFile, bytes: Vec<u8>) -> BoxFuture<'_, io::Result<()>>;

    /// Numbers of the segments that exist, in order.
    fn segments(&self) -> BoxFuture<'_, io::Result<Vec<u32>>>;

    /// Opens a segment for requests; how many of its `bytes` there are. What is behind them counts for nothing.
    fn open(&self, segment: u32, bytes: u64) -> BoxFuture<'_, io::Result<u64>>;

    /// Makes a segment in place of what is there, all of it allocated and with `header` as its first block, and opens it.
    /// If that fails, none is left as far as the device can tell; [`Device::remove`] makes sure.
    fn create(&self, segment: u32, bytes: u64, header: Vec<u8>) -> BoxFuture<'_, io::Result<()>>;

    /// Removes a segment if it exists. Requests on it that were taken before are done first.
    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>>;

    /// Makes a file with the name of a segment none of the segments, and keeps it for people, beside those that were set aside
    /// before: where it is then.
    fn set_aside(&self, segment: u32) -> BoxFuture<'_, io::Result<PathBuf>>;

    /// Hands over a request on an open segment; waits while too many are waiting. `on_done` is dropped without a call only
    /// if the device goes before the request was started.
    fn submit(
        &self,
        segment: u32,
        lane: Lane,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingGone>>;

    /// Runs a task on the device's executor until it ends or the device is closed.
    fn spawn(&self, share: Share, task: BoxFuture<'static, ()>);

    /// Ends after `duration`; for tasks of [`Device::spawn`].
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;

    /// Takes no more requests, finishes those it has, ends its tasks, and lets go of the directory. Needs a tokio runtime;
    /// several devices can be waited for at once.
    fn close(&self) -> BoxFuture<'_, ()>;

    /// The same for those who cannot wait otherwise: blocks.
    fn close_now(&self);
}

/// Hands over a request and waits for its answer. Dropping the future does not stop the request.
pub async fn run(device: &dyn Device, segment: u32, lane: Lane, operation: Operation) -> Result<Done, RingGone> {
    let (reply, answer) = oneshot::channel();
    let on_done = Box::new(move |done| {
        // The asker may be gone; the memory is then free, as the device has answered.
        let _ = reply.send(done);
    });
    device.submit(segment, lane, operation, on_done).await?;
    answer.await.map_err(|_| RingGone)
}
