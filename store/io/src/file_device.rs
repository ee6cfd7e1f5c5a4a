//! A device on a directory of files.
//!
//! Invariants:
//! - The directory stays locked until the ring's thread has ended, which is after the last request
//!   completed. If a request never completes, the lock lasts until the process exits.
//! - File system calls that block (create, open, remove, sync) run on a dedicated thread. Neither
//!   the executor nor a caller blocks on them.

use crate::device::{BoxFuture, Device, DeviceCapabilities, SmallFile, TaskClass};
use crate::directory::{Directory, OpenError, segment_name};
use crate::file::DeviceFile;
use crate::request::{Completion, Done, FileId, Operation, Priority, Request, RingClosed};
use crate::ring::{Executor, Ring, RingOptions};
use larder_memory::Arena;
use larder_runtime::lock::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;

/// Bound of file system calls queued for the blocking thread. Callers wait when it is reached.
const CALLS_MAX: usize = 256;

type Call = Box<dyn FnOnce(&Directory) + Send>;

/// Directory lock, ring and executor of one device. Dropping it closes the device, and blocks for
/// up to the close timeout.
pub struct FileDevice {
    path: PathBuf,
    ring: Ring,
    files: RwLock<BTreeMap<u32, FileId>>,
    /// `None` once the device is closed. The blocking thread then waits for the ring to end,
    /// unlocks the directory and ends.
    calls: Mutex<Option<flume::Sender<Call>>>,
    ended: flume::Receiver<()>,
    buffered: AtomicBool,
    close_timeout: Duration,
}

impl FileDevice {
    /// Locks the directory, creating it if it is missing, and starts the executor. Fails with
    /// [`OpenError::Locked`] if another store uses the directory.
    pub fn open(path: &Path, arena: Arc<Arena>, options: RingOptions) -> Result<Arc<FileDevice>, OpenError> {
        let directory = Directory::open(path)?;
        let close_timeout = options.close_timeout;
        let ring = Ring::start(arena, options).map_err(OpenError::io("starting an executor for", path))?;
        let (calls, calls_in) = flume::bounded::<Call>(CALLS_MAX);
        let (end, ended) = flume::bounded(1);
        let ring_ended = ring.end_receiver();
        std::thread::Builder::new()
            .name("larder-files".into())
            .spawn(move || {
                for call in calls_in {
                    call(&directory);
                }
                // Requests in flight may still write to the files. No other process may lock the
                // directory before the ring has ended.
                let _ = ring_ended.recv();
                drop(directory);
                drop(end);
            })
            .map_err(OpenError::io("starting a thread for", path))?;
        Ok(Arc::new(FileDevice {
            path: path.to_path_buf(),
            ring,
            files: RwLock::default(),
            calls: Mutex::new(Some(calls)),
            ended,
            buffered: AtomicBool::new(false),
            close_timeout,
        }))
    }

    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Runs `call` on the blocking thread and returns its result. Dropping the future does not stop
    /// a call that is already queued.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Directory) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (reply, answer) = oneshot::channel();
        // Clone under the lock, send outside it: sending waits when the queue is full.
        let sender = self.calls.lock().clone().ok_or(RingClosed)?;
        let boxed: Call = Box::new(move |directory| {
            let _ = reply.send(call(directory));
        });
        sender.send_async(boxed).await.map_err(|_| RingClosed)?;
        drop(sender);
        answer.await.map_err(|_| RingClosed)?
    }

    fn log_still_locked(&self) {
        tracing::error!(dir = %self.path.display(), "the device does not complete its requests; its directory stays locked until it does or the process exits");
    }

    async fn detach(&self, segment: u32) {
        // The map's lock is not held across the await.
        let attached = self.files.write().remove(&segment);
        if let Some(file) = attached {
            self.ring.detach(file).await;
        }
    }

    async fn attach(&self, segment: u32, file: DeviceFile) -> io::Result<()> {
        if !file.direct() && !self.buffered.swap(true, Ordering::Relaxed) {
            let dir = self.path.display();
            tracing::warn!(%dir, "the file system does not support direct I/O; pages go through the page cache");
        }
        let id = self.ring.attach(file).await?;
        // As in `detach`, the map's lock is released before the await.
        let before = self.files.write().insert(segment, id);
        if let Some(before) = before {
            self.ring.detach(before).await;
        }
        Ok(())
    }
}

impl Device for FileDevice {
    fn path(&self) -> &Path {
        &self.path
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let ring = self.ring.capabilities();
        DeviceCapabilities {
            executor: match ring.executor {
                Executor::Glommio => "glommio",
                Executor::Thread => "thread",
            },
            direct_io: !self.buffered.load(Ordering::Relaxed),
            registered_buffers: ring.registered_buffers,
            registered_files: ring.registered_files,
        }
    }

    fn load(&self, file: SmallFile) -> BoxFuture<'_, io::Result<Option<Vec<u8>>>> {
        Box::pin(self.call(move |directory| directory.load(file)))
    }

    fn save(&self, file: SmallFile, bytes: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(self.call(move |directory| directory.save(file, &bytes)))
    }

    fn segments(&self) -> BoxFuture<'_, io::Result<Vec<u32>>> {
        Box::pin(self.call(Directory::segments))
    }

    fn open(&self, segment: u32, bytes: u64) -> BoxFuture<'_, io::Result<u64>> {
        Box::pin(async move {
            let (file, found) = self.call(move |directory| directory.open_segment(segment, bytes)).await?;
            self.attach(segment, file).await?;
            Ok(found)
        })
    }

    fn create(&self, segment: u32, bytes: u64, header: Vec<u8>) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async move {
            self.detach(segment).await;
            let file = self.call(move |directory| directory.create_segment(segment, bytes, &header)).await?;
            self.attach(segment, file).await
        })
    }

    fn open_read_only(&self, segment: u32) -> BoxFuture<'_, io::Result<DeviceFile>> {
        Box::pin(self.call(move |directory| directory.open_read_only(segment)))
    }

    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async move {
            self.detach(segment).await;
            self.call(move |directory| directory.remove_segment(segment)).await
        })
    }

    fn rename_misplaced(&self, segment: u32) -> BoxFuture<'_, io::Result<PathBuf>> {
        Box::pin(async move {
            self.detach(segment).await;
            self.call(move |directory| directory.rename_misplaced(segment)).await
        })
    }

    fn submit(
        &self,
        segment: u32,
        priority: Priority,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingClosed>> {
        Box::pin(async move {
            // A segment that is not open fails this request alone. The outcome returns the memory.
            let Some(file) = self.files.read().get(&segment).copied() else {
                let problem = format!("{} is not open", self.path.join(segment_name(segment)).display());
                let result = Err(io::Error::new(io::ErrorKind::NotFound, problem));
                on_done(Done { operation, result });
                return Ok(());
            };
            self.ring.submit(Request { file, priority, operation }, on_done).await
        })
    }

    fn spawn(&self, class: TaskClass, task: BoxFuture<'static, ()>) {
        self.ring.spawn(class, task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        self.ring.sleep(duration)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let idle = self.ring.close_async().await;
            // Without a sender, the blocking thread ends after the calls that are already queued.
            self.calls.lock().take();
            // The thread unlocks the directory after its last call. If the ring did not end,
            // neither does the thread: waiting is useless.
            if idle && tokio::time::timeout(self.close_timeout, self.ended.recv_async()).await.is_err() {
                self.log_still_locked();
            }
        })
    }

    fn close_now(&self) {
        let idle = self.ring.close();
        self.calls.lock().take();
        if idle && self.ended.recv_timeout(self.close_timeout) == Err(flume::RecvTimeoutError::Timeout) {
            self.log_still_locked();
        }
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        self.close_now();
    }
}
