//! The handle of an L3.

use crate::HeldRecord;
use crate::background::{carry_out_intents, finish, sync_and_expire_periodically};
use crate::machine::{Entry, Location, LogConfig, NamedPage, PageListener, Pin, Recovery, SharedFloors, Worth};
use crate::options::{SMALL_FILES_BYTES, WRITE_QUEUE_BYTES_MAX};
use crate::recovery::{self, RecoveryIo};
use crate::report::{RecoveryProgress, RecoveryReport};
use crate::scrub::{self, ScrubControl, ScrubProgress, ScrubRate};
use crate::shared::{LogShared, Preparations};
use crate::{L3Error, L3Options, L3Stats, superblock};
use larder_format::disk::BLOCK_BYTES;
use larder_format::{NamespaceId, PageId, PageMeta};
use larder_io::{BoxFuture, Device, FileDevice, TaskClass};
use larder_memory::{Arena, Slot};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time limit of each of the two waits of [`L3::close`]: for writes in flight, and for the last
/// syncs.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L3Entry {
    pub payload_bytes: u32,
    pub generation: u64,
}

impl From<&Entry> for L3Entry {
    fn from(entry: &Entry) -> L3Entry {
        let Entry { payload_bytes, generation, .. } = *entry;
        L3Entry { payload_bytes, generation }
    }
}

/// Location of a page in a log, as of one [`L3::lookup`].
///
/// A location holds nothing: the page may move or vanish at any time. [`L3::read_at`] checks it
/// without a hash probe, and looks the page up again if it is stale. It is valid only for the log
/// that returned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L3Location(Location);

impl L3Location {
    pub fn id(&self) -> &PageId {
        &self.0.id
    }

    pub fn generation(&self) -> u64 {
        self.0.entry.generation
    }

    pub fn payload_bytes(&self) -> u32 {
        self.0.entry.payload_bytes
    }

    pub fn entry(&self) -> L3Entry {
        L3Entry::from(&self.0.entry)
    }
}

/// A bounded log of pages on one device. Clones share the log. It closes when the last clone is
/// dropped, or with [`close`](L3::close).
#[derive(Clone)]
pub struct L3 {
    running: Arc<Running>,
}

struct Running {
    shared: Arc<LogShared>,
    scrub: Arc<ScrubControl>,
    capacity_bytes: u64,
}

impl L3 {
    /// Opens or creates the log in `options.dir`, on a device of its own. Fails if another process
    /// uses the directory.
    // Boxed and never inlined: see `L3::open_on`.
    #[inline(never)]
    pub fn open(options: L3Options, arena: Arc<Arena>) -> BoxFuture<'static, Result<L3, L3Error>> {
        Box::pin(async move {
            options.check()?;
            let device = FileDevice::open(&options.dir, arena.clone(), options.ring())?;
            L3::start(device, options, arena).await
        })
    }

    /// Opens or creates the log on `device`.
    ///
    /// The log serves reads at once. Recovery scans the segments in the background, newest first,
    /// and writers wait for its end: see [`L3::recovery`] and [`L3::recovered`].
    // Boxed and never inlined. The compiler generates the code of an `async fn` in each crate that
    // polls it: the whole log, in every test program.
    #[inline(never)]
    pub fn open_on(
        device: Arc<dyn Device>,
        options: L3Options,
        arena: Arc<Arena>,
    ) -> BoxFuture<'static, Result<L3, L3Error>> {
        Box::pin(L3::start(device, options, arena))
    }

    async fn start(device: Arc<dyn Device>, options: L3Options, arena: Arc<Arena>) -> Result<L3, L3Error> {
        options.check()?;
        let began = tokio::time::Instant::now();
        let (superblock, created) = superblock::load_or_create(&*device, &options).await?;
        let log_id = superblock.log_id;
        let config = LogConfig {
            segment_bytes: superblock.segment_bytes,
            segments_max: options.segments_max(superblock.segment_bytes)?,
            keep_percent: options.keep_percent,
            quota_default: options.quota_default,
            pages_max: options.pages_max,
            hash_seed: larder_runtime::random::seed(options.seed),
        };
        let memory = recovery::scan_memory(&arena).map_err(L3Error::io("map memory to scan", device.path()))?;
        let io = RecoveryIo { device: &*device, memory: &memory, log_id };
        let found = recovery::find_segments(io, superblock.segment_bytes).await?;
        let Recovery { mut log, discard, misplaced, header_repairs, scan_order } = Recovery::new(config, found);
        if options.keep_names {
            log.keep_names();
        }
        // In this order: a misplaced segment may be the reason for the removals, so it must be
        // there until they are done.
        recovery::discard_segments(&*device, &discard, &scan_order).await?;
        recovery::rename_misplaced(&*device, &misplaced).await?;
        recovery::repair_headers(&*device, log_id, &header_repairs).await;
        let report = RecoveryReport {
            created,
            segments_removed: discard.len() as u64,
            misplaced_files: misplaced.len() as u64,
            ..RecoveryReport::default()
        };
        let shared = Arc::new(LogShared::new(arena, device, log, log_id, &options));
        let segments = scan_order.len() as u64;
        shared.recovery.update(|progress| progress.segments = segments);
        let scrub = Arc::new(ScrubControl::new(&options));
        let spawn = |class, task: BoxFuture<'static, ()>| shared.device.spawn(class, task);
        spawn(TaskClass::Foreground, Box::pin(recovery::recover(shared.clone(), scan_order, report, began, memory)));
        spawn(TaskClass::Background, Box::pin(carry_out_intents(shared.clone())));
        spawn(TaskClass::Background, Box::pin(sync_and_expire_periodically(shared.clone())));
        spawn(TaskClass::Idle, Box::pin(scrub::run_scrub(shared.clone(), scrub.clone())));
        let running = Running { shared, scrub, capacity_bytes: options.capacity_bytes };
        Ok(L3 { running: Arc::new(running) })
    }

    pub fn recovery(&self) -> RecoveryProgress {
        self.shared().recovery.get()
    }

    /// Largest generation of a put that recovery has found so far. 0 if it found none. Puts of this
    /// start are not included.
    pub fn generation_max(&self) -> u64 {
        self.shared().generation_max.load(Ordering::Relaxed)
    }

    /// Waits for the end of recovery. Fails if the log is closed before. If recovery fails, this
    /// waits until the log is closed, so callers need a deadline.
    pub async fn recovered(&self) -> Result<RecoveryReport, L3Error> {
        let shared = self.shared();
        shared
            .recovery
            .wait_for(|progress| progress.report.map(Ok).or_else(|| shared.ensure_open().err().map(Err)))
            .await
    }

    pub fn scrub(&self) -> ScrubProgress {
        self.running.scrub.progress()
    }

    /// Rate of the scrub for the pages that the log has now.
    pub fn scrub_rate(&self) -> ScrubRate {
        let shared = self.shared();
        let log_bytes = shared.with_log(|log| log.counts().page_bytes);
        self.running.scrub.rate(log_bytes, shared.clock.now_unix_ms())
    }

    /// Requests a pass of the scrub. Has no effect on a pass in progress.
    pub fn scrub_now(&self) {
        self.running.scrub.request();
    }

    /// Limits the bytes of a namespace's pages. `u64::MAX` for no limit. The excess is dropped.
    ///
    /// The quota does not survive a restart. The log also forgets the quota of a namespace without
    /// pages, once thousands of other quotas were set after it.
    pub fn set_quota(&self, namespace: NamespaceId, bytes: u64) {
        self.shared().update_log(|log| log.set_quota(namespace, bytes));
    }

    /// Quota of a namespace in bytes. [`L3Options::quota_default`] if none was set, or the log
    /// forgot it.
    pub fn quota(&self, namespace: &NamespaceId) -> u64 {
        self.shared().with_log(|log| log.quota(namespace))
    }

    /// Keeps these floors, also as they change later. When the log reclaims a segment, it copies
    /// the pages without which a namespace would fall below its floor. Floors count bytes of
    /// records, and shrink with a log whose file system is full. They do not survive a restart.
    pub fn share_floors(&self, floors: Arc<SharedFloors>) {
        self.shared().update_log(|log| log.share_floors(floors));
    }

    /// Sets the pin of pages, and returns the number of pages that have it now.
    ///
    /// Hard pins are refused beyond a quarter of the log. No pin survives a restart.
    pub fn pin(&self, ids: &[PageId], pin: Pin) -> usize {
        self.shared().update_log(|log| ids.iter().filter(|id| log.pin(id, pin).is_ok()).count())
    }

    /// Records a use of pages that a faster tier served. Without it, retention would take the most
    /// used pages for unused ones. Does not wait: while another thread changes a page's shard of
    /// the index, its use is lost.
    pub fn touch(&self, ids: &[PageId]) {
        let entries = self.shared().entries();
        ids.iter().for_each(|id| entries.touch(id));
    }

    /// Records uses of pages as [`L3::touch`] does, with their worth from now on. If a reclaimed
    /// segment has more used pages than copies have room, those of higher worth are kept. A page
    /// that was copied has [`Worth::Usual`] again.
    pub fn rank(&self, pages: &[(PageId, Worth)]) {
        let entries = self.shared().entries();
        pages.iter().for_each(|(id, worth)| entries.rank(id, *worth));
    }

    /// Sets the listener for pages that were dropped because of damage. It runs on the device's
    /// executor, so it must neither block nor compute for long.
    pub fn on_damage(&self, listener: impl Fn(PageId) + Send + Sync + 'static) {
        self.shared().damage.set_listener(listener);
    }

    /// Sets the listener for pages that enter and leave the log. It hears of those from now on, if
    /// [`L3Options::keep_names`] is set.
    pub fn listen(&self, listener: Arc<dyn PageListener>) {
        self.shared().update_log(|log| log.listen(listener));
    }

    /// Names of pages in the log, for a walk over all of them: see [`Log::names_from`].
    ///
    /// [`Log::names_from`]: crate::machine::Log::names_from
    pub fn names_from(&self, place: u64, max: usize) -> (Vec<NamedPage>, Option<u64>) {
        self.shared().with_log(|log| log.names_from(place, max))
    }

    pub(crate) fn shared(&self) -> &Arc<LogShared> {
        &self.running.shared
    }

    /// Looks up a page. Costs one probe of the index. Waits for no other work of the log.
    pub fn lookup(&self, id: &PageId) -> Option<L3Location> {
        let now = self.shared().clock.now_unix_ms();
        self.shared().entries().lookup(id, now).map(L3Location)
    }

    /// Returns `true` if a lookup would find the same put as `location` names, even if its record
    /// was copied since.
    pub fn is_current(&self, location: &L3Location) -> bool {
        let now = self.shared().clock.now_unix_ms();
        self.shared().entries().is_current(&location.0, now)
    }

    /// Facts about a page, from the index. It may be gone by the time it is read.
    pub fn find(&self, id: &PageId) -> Option<L3Entry> {
        self.lookup(id).map(|location| location.entry())
    }

    /// Maximum bytes of a page's payload: a segment without its header, the header of the record,
    /// and a footer of one record.
    pub fn page_bytes_max(&self) -> usize {
        self.shared().with_log(|log| log.record_bytes_max()) as usize - BLOCK_BYTES
    }

    /// Reads a page into a slot of the arena. `None` is a miss: the page does not exist, or it was
    /// damaged. Damage is counted and logged.
    ///
    /// After the deadline the read continues on the device. Its memory and its segment stay
    /// reserved until then.
    pub async fn read(&self, id: &PageId, deadline: Instant) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        self.shared().ensure_open()?;
        within(deadline, "a read", self.shared().read_page(id)).await
    }

    /// Like [`read`](L3::read), for a page that was looked up. If the location is stale, reads the
    /// current put of the page, which may have another generation.
    pub async fn read_at(&self, location: &L3Location, deadline: Instant) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        self.shared().ensure_open()?;
        within(deadline, "a read", self.shared().read_page_at(&location.0)).await
    }

    /// Reads the metadata of a page that was looked up, with its checksums, without its payload.
    /// Costs one block of I/O. Damage of the payload stays unnoticed.
    pub async fn read_meta_at(&self, location: &L3Location, deadline: Instant) -> Result<Option<PageMeta>, L3Error> {
        self.shared().ensure_open()?;
        within(deadline, "a read", self.shared().read_meta_at(&location.0)).await
    }

    /// Keeps the record of a page that was looked up in place, so that another process can read it.
    /// `None` as for [`read_at`](L3::read_at), and if the record is damaged or was just replaced.
    pub async fn hold_at(&self, location: &L3Location, deadline: Instant) -> Result<Option<HeldRecord>, L3Error> {
        self.shared().ensure_open()?;
        within(deadline, "a read", self.shared().hold_at(&location.0)).await
    }

    /// Writes a page, and returns when the device has it. Readers find it from then on. It is
    /// durable within a second.
    ///
    /// A put that the log already has, by key and generation, is not written again. After the
    /// deadline the page may still be written.
    pub async fn write(&self, meta: PageMeta, payload: Slot, deadline: Instant) -> Result<(), L3Error> {
        self.shared().ensure_open()?;
        within(deadline, "a write", self.shared().write_page(meta, payload)).await
    }

    /// Forgets pages durably, and returns the number of those that could be found.
    ///
    /// After an error or the deadline, some pages may still be found, or come back after a crash.
    /// The caller must try again.
    pub async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<usize, L3Error> {
        self.shared().ensure_open()?;
        within(deadline, "a forget", self.shared().forget_pages(ids)).await
    }

    pub fn stats(&self) -> L3Stats {
        let shared = self.shared();
        let (counts, index_bytes) = shared.with_log(|log| (log.counts(), log.index_bytes()));
        let index_bytes = index_bytes + shared.entries().memory_bytes() as u64;
        let capabilities = shared.device.capabilities();
        let free_bytes = shared.write_queue.available_permits() * BLOCK_BYTES;
        assert!(free_bytes <= WRITE_QUEUE_BYTES_MAX, "more permits returned to the write queue than it has");
        L3Stats {
            bytes_capacity: self.running.capacity_bytes,
            bytes_on_device: counts.segments * shared.segment_bytes + SMALL_FILES_BYTES,
            write_queue_bytes: (WRITE_QUEUE_BYTES_MAX - free_bytes) as u64,
            index_bytes,
            direct_io: capabilities.direct_io,
            registered_buffers: capabilities.registered_buffers,
            ..shared.counters.stats(counts)
        }
    }

    /// Closes all clones: refuses requests, waits for writes in flight, syncs, and unlocks the
    /// directory. Takes at most 20 s and the time that the device needs for requests in flight.
    pub async fn close(&self) {
        let shared = self.shared();
        if shared.mark_closed() {
            return;
        }
        // Writers that wait for a segment try again, and find the log closed.
        shared.preparations.update(Preparations::next_turn);
        let dir = shared.device.path().display();
        // All permits are free once no write is in flight.
        let all = (WRITE_QUEUE_BYTES_MAX / BLOCK_BYTES) as u32;
        if tokio::time::timeout(CLOSE_TIMEOUT, shared.write_queue.acquire_many(all)).await.is_err() {
            tracing::warn!(%dir, "L3: closing with writes in flight, because the device does not complete them");
        }
        let last_work = async {
            finish(shared).await;
            scrub::save_progress(shared, &self.running.scrub.progress()).await;
        };
        if tokio::time::timeout(CLOSE_TIMEOUT, last_work).await.is_err() {
            tracing::warn!(%dir, "L3: closing without the last sync, because the device does not respond");
        }
        // Wakes the background task, which ends because the log is closed.
        shared.intents.notify_one();
        // Callers that wait for recovery find the log closed.
        shared.recovery.update(|_| ());
        // Last, because the steps above still submit requests.
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
        // A drop cannot await, so it neither drains writes nor syncs. `close` does both.
        self.shared.mark_closed();
        self.shared.intents.notify_one();
        self.shared.device.close_now();
    }
}

async fn within<T>(
    deadline: Instant,
    activity: &'static str,
    work: impl Future<Output = Result<T, L3Error>>,
) -> Result<T, L3Error> {
    // Only the caller stops waiting. The device completes the request and reports it to the log.
    tokio::time::timeout_at(deadline.into(), work).await.unwrap_or(Err(L3Error::Deadline(activity)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::PageKey;

    fn id(n: u8) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey([n; 32]) }
    }

    async fn open(dir: &std::path::Path, arena: &Arc<Arena>) -> L3 {
        let options = L3Options { segment_bytes: 1 << 20, ..L3Options::new(dir, (6 << 20) + SMALL_FILES_BYTES) };
        let l3 = L3::open(options, arena.clone()).await.unwrap();
        l3.recovered().await.unwrap();
        l3
    }

    async fn put(l3: &L3, arena: &Arc<Arena>, n: u8) {
        let payload = [n; 5000];
        let mut meta = PageMeta::describe(id(n), PageKey::NONE, 0, vec![5000], &payload);
        meta.generation = u64::from(n);
        let mut slot = arena.allocate(5000).unwrap();
        slot.copy_from_slice(&payload);
        l3.write(meta, slot.freeze(), Instant::now() + Duration::from_secs(60)).await.unwrap();
    }

    async fn get(l3: &L3, n: u8) -> Option<u8> {
        let (meta, slot) = l3.read(&id(n), Instant::now() + Duration::from_secs(60)).await.unwrap()?;
        assert_eq!(meta.id, id(n));
        Some(slot[0])
    }

    /// Pages with the same fingerprint share an index entry. A reader of one of them never gets the
    /// other, and a forget deletes the named page only.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn page_with_the_fingerprint_of_another_is_a_miss() {
        let dir = tempfile::tempdir().unwrap();
        let arena = Arena::new(4 << 20).unwrap();
        let l3 = open(dir.path(), &arena).await;
        l3.shared().entries().make_fingerprints_equal();
        put(&l3, &arena, 1).await;
        assert_eq!((get(&l3, 1).await, get(&l3, 2).await), (Some(1), None));
        assert!(l3.lookup(&id(2)).is_some(), "the lookup cannot tell");
        let location = l3.lookup(&id(2)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        assert!(l3.read_meta_at(&location, deadline).await.unwrap().is_none());
        assert_eq!((l3.stats().corrupt, get(&l3, 1).await), (0, Some(1)), "no damage");
        assert_eq!(l3.forget(&[id(2)], deadline).await.unwrap(), 1);
        assert_eq!(get(&l3, 1).await, None, "they shared the entry");
        l3.close().await;
        drop(l3);

        let l3 = open(dir.path(), &arena).await;
        assert_eq!((get(&l3, 1).await, get(&l3, 2).await), (Some(1), None), "the tombstone names the other page");
        l3.close().await;
    }
}
