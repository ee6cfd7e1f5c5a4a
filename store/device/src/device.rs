//! A device that is a directory of files.
//!
//! Always true: the directory is locked until the device is closed and the ring's thread has ended, that is until every
//! request was answered, if need be until the process ends; what blocks (making, opening and removing files) runs on a
//! thread of its own, so that neither the executor nor a caller stands still.

use crate::arena::Arena;
use crate::directory::{Directory, OpenError, segment_name};
use crate::file::DeviceFile;
use crate::request::{FileId, Lane, Operation, Request};
use crate::ring::{Executor, Ring, RingGone, RingOptions, Share};
use crate::seam::{BoxFuture, Completion, Device, DeviceFacts, SmallFile};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;

/// Most calls that wait for the thread that blocks.
const CALLS_MAX: usize = 256;

type Call = Box<dyn FnOnce(&Directory) + Send>;

/// Directory, ring and executor of one device.
pub struct FileDevice {
    path: PathBuf,
    ring: Ring,
    files: RwLock<BTreeMap<u32, FileId>>,
    /// `None` once it is closed; when the ring has ended, the thread then lets go of the directory and ends.
    calls: Mutex<Option<flume::Sender<Call>>>,
    ended: flume::Receiver<()>,
    buffered: AtomicBool,
    patience: Duration,
}

impl FileDevice {
    /// Locks the directory, making it if it is missing, and starts the executor.
    pub fn open(path: &Path, arena: Arc<Arena>, options: RingOptions) -> Result<Arc<FileDevice>, OpenError> {
        let directory = Directory::open(path)?;
        let patience = options.patience;
        let ring = Ring::start(arena, options).map_err(OpenError::io("starting an executor for", path))?;
        let (calls, calls_in) = flume::bounded::<Call>(CALLS_MAX);
        let (end, ended) = flume::bounded(1);
        let ring_ended = ring.end();
        std::thread::Builder::new()
            .name("larder-files".into())
            .spawn(move || {
                for call in calls_in {
                    call(&directory);
                }
                // What is under way may still be written: nobody else must have the directory.
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
            patience,
        }))
    }

    /// The executor and its ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Runs `call` where it may block.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Directory) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (reply, answer) = oneshot::channel();
        let sender = self.calls.lock().clone().ok_or(RingGone)?;
        let boxed: Call = Box::new(move |directory| {
            let _ = reply.send(call(directory));
        });
        sender.send_async(boxed).await.map_err(|_| RingGone)?;
        drop(sender);
        answer.await.map_err(|_| RingGone)?
    }

    fn say_locked(&self) {
        tracing::error!(dir = %self.path.display(), "the directory does not answer, and stays locked until it does");
    }

    async fn detach(&self, segment: u32) {
        let attached = self.files.write().remove(&segment);
        if let Some(file) = attached {
            self.ring.detach(file).await;
        }
    }

    async fn attach(&self, segment: u32, file: DeviceFile) -> io::Result<()> {
        if !file.direct() && !self.buffered.swap(true, Ordering::Relaxed) {
            let dir = self.path.display();
            tracing::warn!(%dir, "the file system refuses direct I/O; pages go through the page cache");
        }
        let id = self.ring.attach(file).await?;
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

    fn facts(&self) -> DeviceFacts {
        let ring = self.ring.facts();
        DeviceFacts {
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

    fn remove(&self, segment: u32) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async move {
            self.detach(segment).await;
            self.call(move |directory| directory.remove_segment(segment)).await
        })
    }

    fn set_aside(&self, segment: u32) -> BoxFuture<'_, io::Result<PathBuf>> {
        Box::pin(async move {
            self.detach(segment).await;
            self.call(move |directory| directory.set_aside(segment)).await
        })
    }

    fn submit(
        &self,
        segment: u32,
        lane: Lane,
        operation: Operation,
        on_done: Completion,
    ) -> BoxFuture<'_, Result<(), RingGone>> {
        Box::pin(async move {
            let Some(file) = self.files.read().get(&segment).copied() else {
                let problem = format!("{} is not open", self.path.join(segment_name(segment)).display());
                let result = Err(io::Error::new(io::ErrorKind::NotFound, problem));
                on_done(crate::Done { operation, result });
                return Ok(());
            };
            self.ring.submit(Request { file, lane, operation }, on_done).await
        })
    }

    fn spawn(&self, share: Share, task: BoxFuture<'static, ()>) {
        self.ring.spawn(share, task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        self.ring.sleep(duration)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let idle = self.ring.closed().await;
            self.calls.lock().take();
            // The thread ends when its last call is done, and lets go of the directory.
            if idle && tokio::time::timeout(self.patience, self.ended.recv_async()).await.is_err() {
                self.say_locked();
            }
        })
    }

    fn close_now(&self) {
        let idle = self.ring.close();
        self.calls.lock().take();
        if idle && self.ended.recv_timeout(self.patience) == Err(flume::RecvTimeoutError::Timeout) {
            self.say_locked();
        }
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        self.close_now();
    }
}
