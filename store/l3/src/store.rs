//! The handle of an L3.

use crate::background::{carry_out_intents, finish, sync_regularly};
use crate::options::{SMALL_FILES_BYTES, WRITE_QUEUE_BYTES_MAX};
use crate::recovery::{self, RecoveryProgress};
use crate::scrub::{self, ScrubProgress};
use crate::shared::{Preparations, Shared};
use crate::{L3Error, L3Options, L3Stats, RecoveryReport, superblock};
use larder_core::log::{Entry, LogConfig, Pin, Recovery};
use larder_device::{Arena, BoxFuture, Device, FileDevice, Share, Slot};
use larder_format::disk::BLOCK_BYTES;
use larder_format::{NamespaceId, PageId, PageMeta};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long closing waits for writes that are under way.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);

/// What is known of a page without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L3Entry {
    /// Bytes of the payload.
    pub payload_bytes: u32,
    /// Number of the put.
    pub generation: u64,
    /// Place in its sequence, in pages.
    pub position: u32,
}

impl From<&Entry> for L3Entry {
    fn from(entry: &Entry) -> L3Entry {
        let Entry { payload_bytes, generation, position, .. } = *entry;
        L3Entry { payload_bytes, generation, position }
    }
}

/// A bounded log of pages on one device. A cheap handle; the store ends when the last clone is dropped or
/// [`close`](L3::close) is called.
#[derive(Clone)]
pub struct L3 {
    running: Arc<Running>,
}

struct Running {
    shared: Arc<Shared>,
    capacity_bytes: u64,
}

impl L3 {
    /// Opens the log in `options.dir`, or makes one, on a device of its own.
    pub async fn open(options: L3Options, arena: Arc<Arena>) -> Result<L3, L3Error> {
        options.check()?;
        let device = FileDevice::open(&options.dir, arena.clone(), options.ring())?;
        L3::open_on(device, options, arena).await
    }

    /// Opens the log on `device`, or makes one. It can be read from then on; what it holds is found while its segments are
    /// scanned, newest first, and writers wait for the end of that: see [`L3::recovery`] and [`L3::recovered`].
    pub async fn open_on(device: Arc<dyn Device>, options: L3Options, arena: Arc<Arena>) -> Result<L3, L3Error> {
        options.check()?;
        let began = tokio::time::Instant::now();
        let (superblock, created) = superblock::find_or_make(&*device, &options).await?;
        let segment_bytes = superblock.segment_bytes;
        let config = LogConfig {
            segment_bytes,
            segments_max: options.segments_max(segment_bytes)?,
            keep_percent: options.keep_percent,
            quota_default: options.quota_default,
            hash_seed: options.seed.unwrap_or_else(rand::random),
        };
        let found = recovery::find_segments(&device, &arena, superblock.log_id, segment_bytes).await?;
        let Recovery { log, discard, strays, mend, order } = Recovery::new(config, found);
        recovery::discard(&device, &discard, &order).await?;
        recovery::set_aside(&device, &strays).await?;
        recovery::mend(&device, superblock.log_id, &mend).await;
        let (segments_removed, strays) = (discard.len() as u64, strays.len() as u64);
        let report = RecoveryReport { created, segments_removed, strays, ..RecoveryReport::default() };
        let shared = Arc::new(Shared::new(arena, device, log, superblock.log_id, &options));
        let segments = order.len() as u64;
        shared.progress.change(|progress| progress.segments = segments);
        let spawn = |share, task: BoxFuture<'static, ()>| shared.device.spawn(share, task);
        spawn(Share::Foreground, Box::pin(recovery::restore(shared.clone(), order, report, began)));
        spawn(Share::Background, Box::pin(carry_out_intents(shared.clone())));
        spawn(Share::Background, Box::pin(sync_regularly(shared.clone())));
        spawn(Share::Idle, Box::pin(scrub::scrub(shared.clone())));
        let running = Running { shared, capacity_bytes: options.capacity_bytes };
        Ok(L3 { running: Arc::new(running) })
    }

    /// How far the recovery is.
    pub fn recovery(&self) -> RecoveryProgress {
        self.shared().progress.now()
    }

    /// Waits until everything was scanned.
    pub async fn recovered(&self) -> Result<RecoveryReport, L3Error> {
        let shared = self.shared();
        shared.progress.wait(|progress| progress.report.map(Ok).or_else(|| shared.open().err().map(Err))).await
    }

    /// How far the scrub is.
    pub fn scrub(&self) -> ScrubProgress {
        *self.shared().scrub.lock()
    }

    /// Begins a pass of the scrub, or lets the one that is under way go on.
    pub fn scrub_now(&self) {
        self.shared().scrub_wanted.store(true, Ordering::Relaxed);
    }

    /// Most bytes of a namespace's pages; `u64::MAX` for no limit. What is over it goes. If it has no pages, that is forgotten
    /// when thousands of others were told of after it.
    pub fn set_quota(&self, namespace: NamespaceId, bytes: u64) {
        self.shared().change(|log| log.set_quota(namespace, bytes));
    }

    /// What holds for a namespace: [`L3Options::quota_default`], unless it was told of and is not forgotten.
    pub fn quota(&self, namespace: &NamespaceId) -> u64 {
        self.shared().look(|log| log.quota(namespace))
    }

    /// Holds pages, or lets them go; the number of pages that are held so now. Hard pins are refused beyond a quarter of the
    /// log. They do not survive a restart.
    pub fn pin(&self, ids: &[PageId], pin: Pin) -> usize {
        self.shared().change(|log| ids.iter().filter(|id| log.pin(id, pin).is_ok()).count())
    }

    /// Pages were asked for and found in a faster tier.
    pub fn touch(&self, ids: &[PageId]) {
        self.shared().change(|log| ids.iter().for_each(|id| log.touch(id)));
    }

    /// Who is told of every page that was dropped since it was damaged; must be quick.
    pub fn on_damage(&self, listener: impl Fn(PageId) + Send + Sync + 'static) {
        *self.shared().on_damage.write() = Some(Arc::new(listener));
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.running.shared
    }

    /// What is known of a page. It may be gone by the time it is read.
    pub fn find(&self, id: &PageId) -> Option<L3Entry> {
        let now = self.shared().clock.now_unix_ms();
        self.shared().look(|log| log.find(id, now).map(|entry| L3Entry::from(&entry)))
    }

    /// Most bytes of a page's payload.
    pub fn page_bytes_max(&self) -> usize {
        self.shared().look(|log| log.record_bytes_max()) as usize - BLOCK_BYTES
    }

    /// Reads a page into a slot of the arena. `None` is a miss: not there, or damaged, which is counted and warned of.
    /// Past the deadline the read goes on without a taker; its memory and its segment are held until the device is done.
    pub async fn read(&self, id: &PageId, deadline: Instant) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        self.shared().open()?;
        until(deadline, "a read", self.read_whichever(id)).await
    }

    /// A copy that is damaged may have its original still, which is found then.
    async fn read_whichever(&self, id: &PageId) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        let found = self.shared().read(id).await?;
        match found.is_none() && self.find(id).is_some() {
            true => self.shared().read(id).await,
            false => Ok(found),
        }
    }

    /// Writes a page; returns when the device has it. It can be found from then on, and is durable within a second. A
    /// put (by key and generation) that is there already is not written again. Past the deadline the page may still
    /// be written.
    pub async fn write(&self, meta: PageMeta, payload: Slot, deadline: Instant) -> Result<(), L3Error> {
        self.shared().open()?;
        until(deadline, "a write", self.shared().write(meta, payload)).await
    }

    /// Forgets pages; durable before it returns. The answer is how many of them could be found. After an error or past
    /// the deadline some may still be found, or come back after a crash: ask again.
    pub async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, L3Error> {
        self.shared().open()?;
        until(deadline, "forgetting", self.shared().forget(ids)).await
    }

    /// Figures.
    pub fn stats(&self) -> L3Stats {
        let shared = self.shared();
        let (counts, index_bytes) = shared.look(|log| (log.counts(), log.index_bytes()));
        let facts = shared.device.facts();
        let queued = WRITE_QUEUE_BYTES_MAX.saturating_sub(shared.write_queue.available_permits() * BLOCK_BYTES);
        L3Stats {
            bytes_capacity: self.running.capacity_bytes,
            bytes_on_device: counts.segments * shared.segment_bytes + SMALL_FILES_BYTES,
            write_queue_bytes: queued as u64,
            index_bytes,
            direct_io: facts.direct_io,
            registered_buffers: facts.registered_buffers,
            ..shared.counters.stats(counts)
        }
    }

    /// Takes no more requests, waits for writes under way, syncs, and lets go of the directory. All clones are closed.
    pub async fn close(&self) {
        let shared = self.shared();
        if shared.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Writers that wait for a segment find out that it is closed.
        shared.prepared.change(Preparations::next_turn);
        let all = (WRITE_QUEUE_BYTES_MAX / BLOCK_BYTES) as u32;
        if tokio::time::timeout(CLOSE_PATIENCE, shared.write_queue.acquire_many(all)).await.is_err() {
            tracing::warn!("closing L3 while writes are under way");
        }
        let last = async {
            finish(shared).await;
            let scrub = *shared.scrub.lock();
            scrub::save(shared, &scrub).await;
        };
        if tokio::time::timeout(CLOSE_PATIENCE, last).await.is_err() {
            tracing::warn!("closing L3 though the device does not answer");
        }
        shared.intents.notify_one();
        // Who waits for the recovery finds out, too.
        shared.progress.change(|_| ());
        shared.device.close().await;
    }
}

impl std::fmt::Debug for L3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("L3").field("dir", &self.shared().device.path()).finish_non_exhaustive()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.intents.notify_one();
        self.shared.device.close_now();
    }
}

async fn until<T>(
    deadline: Instant,
    what: &'static str,
    work: impl Future<Output = Result<T, L3Error>>,
) -> Result<T, L3Error> {
    tokio::time::timeout_at(deadline.into(), work).await.unwrap_or(Err(L3Error::Deadline(what)))
}
