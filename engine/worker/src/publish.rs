//! Puts computed pages into the store part by part, during the step that computes them.
//!
//! Invariants:
//! - A part is written only when all its layers hold all tokens of the page.
//! - No page with a value that is not finite is committed.
//! - Each part leaves with the checksums that also seal its page in L1. They are computed once,
//!   when the part is full. So the store refuses a page that was damaged in memory since.
//! - The written bytes are identical on every engine (see batch invariance in
//!   docs/internals/engines.md).
//! - Nothing here waits for the network.
//! - A failed put affects only a counter and the number of lost pages in the reply. The page is
//!   reported, so that `republish` puts it again.

use crate::commits::Commits;
use crate::metrics::Metrics;
use crate::store::{OpenPut, PageStore, PutSource};
use larder_client::{NewPage, PutOutcome};
use larder_format::{PageGeometry, PageKey, PageOrigin, chunk_crcs};
use larder_model::{Chunk, KvPage, LayerHooks, SealedPage};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

#[derive(Clone)]
pub(crate) struct Publisher {
    store: Arc<dyn PageStore>,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
    parts: Arc<PartTable>,
    commits: Arc<Commits>,
    unpublished: flume::Sender<Unpublished>,
    limit: Duration,
}

/// Page whose put found the store busy, or whose outcome is unknown.
pub(crate) struct Unpublished {
    pub(crate) page: NewPage,
    /// Weak: a page that waits for its next put may be evicted.
    pub(crate) content: Weak<SealedPage>,
    pub(crate) outcome: PutOutcome,
    /// Puts so far.
    pub(crate) attempts: u32,
}

/// Byte range of each part of a page, and the layer that completes the part. Computed once, because
/// all pages of an engine have one geometry.
pub(crate) struct PartTable {
    entries: Vec<(Range<usize>, usize)>,
}

impl PartTable {
    pub(crate) fn new(geometry: &PageGeometry) -> Self {
        let mut start = 0;
        let place = |part: usize| {
            let range = start..start + geometry.part_bytes(part);
            start = range.end;
            let last_layer = geometry.part_layers(part).end - 1;
            (range, last_layer)
        };
        Self { entries: (0..geometry.part_count()).map(place).collect() }
    }

    fn ended_by(&self, layer: usize) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.entries
            .iter()
            .enumerate()
            .filter(move |(_, (_, last_layer))| *last_layer == layer)
            .map(|(part, (range, _))| (part, range.clone()))
    }
}

impl Publisher {
    pub(crate) fn new(
        store: Arc<dyn PageStore>,
        metrics: Arc<Metrics>,
        tasks: TaskTracker,
        geometry: &PageGeometry,
        unpublished: flume::Sender<Unpublished>,
        limit: Duration,
    ) -> Self {
        let parts = Arc::new(PartTable::new(geometry));
        Self { store, metrics, tasks, parts, commits: Arc::default(), unpublished, limit }
    }

    pub(crate) fn commits(&self) -> &Arc<Commits> {
        &self.commits
    }

    /// Opens a put of a page that the engine computes next. Returns at once.
    pub(crate) fn open(&self, page: NewPage) -> Box<dyn OpenPut> {
        self.store.put(page, PutSource::Computed, Instant::now() + self.limit)
    }

    /// Puts a page of L1 that the store lacks, after `attempts` puts without success. The caller
    /// has verified it just now. The node refuses a page that is damaged by then, but does not tell
    /// why the put was lost.
    pub(crate) fn put_copy(&self, page: NewPage, content: &Arc<SealedPage>, attempts: u32) -> JoinHandle<PutOutcome> {
        let source = PutSource::Copy { origin: content.copy_origin() };
        let mut put = self.store.put(page.clone(), source, Instant::now() + self.limit);
        write_parts(&mut *put, content);
        self.finish(page, put, content, attempts)
    }

    /// Commits the put of a computed page whose parts are all written. The commit runs in the
    /// background; the handle yields its outcome. The page learns its origin, for later copies.
    pub(crate) fn commit(
        &self,
        page: NewPage,
        put: Box<dyn OpenPut>,
        content: &Arc<SealedPage>,
    ) -> JoinHandle<PutOutcome> {
        self.finish(page, put, content, 0)
    }

    /// Tells the store that a generation has ended, once the commits of its pages are known.
    /// Returns at once. Nothing depends on the report, so it is dropped if it takes longer than a
    /// put.
    pub(crate) fn report_end(&self, keys: Vec<PageKey>, tokens: u32) {
        if keys.is_empty() {
            return;
        }
        let (store, commits) = (self.store.clone(), self.commits.clone());
        let deadline = Instant::now() + self.limit;
        self.tasks.spawn(async move {
            let names: HashSet<PageKey> = keys.iter().copied().collect();
            let report = async {
                commits.wait_for(&names).await;
                store.generation_ended(keys, tokens, deadline).await;
            };
            _ = tokio::time::timeout_at(deadline.into(), report).await;
        });
    }

    fn finish(
        &self,
        page: NewPage,
        put: Box<dyn OpenPut>,
        content: &Arc<SealedPage>,
        attempts: u32,
    ) -> JoinHandle<PutOutcome> {
        let metrics = self.metrics.clone();
        let unpublished = self.unpublished.clone();
        // Weak: the page may be evicted while its commit is in flight.
        let content = Arc::downgrade(content);
        let running = self.commits.begin(page.key);
        // Start the commit here, not in the task: its time limit runs from now.
        let sealing = put.commit(Instant::now() + self.limit);
        self.tasks.spawn(async move {
            let (outcome, origin) = sealing.await;
            drop(running);
            let ended = Unpublished { page, content, outcome, attempts: attempts + 1 };
            settle(ended, origin, &unpublished, &metrics);
            outcome
        })
    }

    pub(crate) fn hooks(&self) -> PublishHooks {
        PublishHooks { parts: self.parts.clone(), pages: Vec::new() }
    }
}

/// Writes all parts of a page of L1, with the checksums that it has had since it was sealed.
fn write_parts(put: &mut dyn OpenPut, content: &SealedPage) {
    for (part, (bytes, crcs)) in content.parts().enumerate() {
        put.write_part(part, bytes, crcs);
    }
}

/// Notes the end of a put at its page. Reports a page that the store has not taken, for another
/// put. Counts it where none can follow.
fn settle(ended: Unpublished, origin: Option<PageOrigin>, unpublished: &flume::Sender<Unpublished>, metrics: &Metrics) {
    metrics.page_published(ended.outcome);
    let (Some(origin), Some(sealed)) = (origin, ended.content.upgrade()) else {
        // Without an origin, the store would refuse a copy.
        if matches!(ended.outcome, PutOutcome::Busy { .. } | PutOutcome::Lost | PutOutcome::InProgress) {
            metrics.abandoned_pages.inc();
        }
        return;
    };
    if matches!(ended.outcome, PutOutcome::Stored | PutOutcome::AlreadyThere) {
        return sealed.set_origin(origin);
    }
    sealed.set_unconfirmed_origin(origin);
    drop(sealed);
    // Beyond the bound of the queue, the page stays unpublished.
    if unpublished.try_send(ended).is_err() {
        metrics.abandoned_pages.inc();
    }
}

pub(crate) struct CompletingPage {
    pub(crate) chunk: usize,
    pub(crate) page: usize,
    pub(crate) put: Box<dyn OpenPut>,
    /// False once the pass has written a value into it that is not finite.
    is_usable: bool,
    /// Checksums of the parts so far. Parts end in order.
    crcs: Vec<u32>,
}

impl CompletingPage {
    pub(crate) fn new(chunk: usize, page: usize, put: Box<dyn OpenPut>) -> Self {
        Self { chunk, page, put, is_usable: true, crcs: Vec::new() }
    }
}

/// Hooks of the forward pass that write parts as their last layers finish. Network transfer thus
/// overlaps with the computation of later layers.
pub(crate) struct PublishHooks {
    parts: Arc<PartTable>,
    pub(crate) pages: Vec<CompletingPage>,
}

impl LayerHooks for PublishHooks {
    fn layer_done(&mut self, layer: usize, batch: &[Chunk<'_>]) {
        for (part, range) in self.parts.ended_by(layer) {
            for completing in &mut self.pages {
                // The forward pass waits for this hook, so the bytes cannot change during the copy.
                let page = batch[completing.chunk].pages[completing.page].page();
                let payload: &[u8] = page.as_ref();
                completing.is_usable &= page.is_finite_in(range.clone());
                if completing.is_usable {
                    let bytes = &payload[range.clone()];
                    let first = completing.crcs.len();
                    completing.crcs.extend(chunk_crcs(bytes));
                    completing.put.write_part(part, bytes, &completing.crcs[first..]);
                }
            }
        }
    }
}

impl PublishHooks {
    /// Returns `true` if the pass wrote values into the completed pages of this chunk that are not
    /// finite.
    pub(crate) fn found_unusable(&self, chunk: usize) -> bool {
        self.pages.iter().any(|page| page.chunk == chunk && !page.is_usable)
    }

    /// Seals a page that the pass has completed, once. A page with a put gets the checksums of its
    /// parts. They are computed here for a page without.
    pub(crate) fn seal(&mut self, chunk: usize, index: usize, page: KvPage) -> SealedPage {
        let completing = self.pages.iter_mut().find(|own| own.chunk == chunk && own.page == index);
        match completing {
            Some(completing) => SealedPage::with_crcs(page, std::mem::take(&mut completing.crcs)),
            None => SealedPage::compute(page),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Role;
    use futures::future::BoxFuture;
    use larder_format::KvDtype;
    use larder_model::{KvPool, LogitRows, PageSeal, PageSlot};
    use larder_runtime::lock::Mutex;

    /// Number, bytes and checksums of each part.
    type RecordedParts = Arc<Mutex<Vec<(usize, Vec<u8>, Vec<u32>)>>>;

    struct Recorder(RecordedParts);

    impl OpenPut for Recorder {
        fn write_part(&mut self, part: usize, bytes: &[u8], crcs: &[u32]) {
            self.0.lock().push((part, bytes.to_vec(), crcs.to_vec()));
        }

        fn commit(self: Box<Self>, _deadline: Instant) -> BoxFuture<'static, (PutOutcome, Option<PageOrigin>)> {
            Box::pin(async { (PutOutcome::Stored, None) })
        }
    }

    const GEOMETRY: PageGeometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 5,
        kv_heads: 2,
        head_dim: 4,
        page_tokens: 4,
        layers_per_part: 2,
        head_groups: 1,
    };

    /// Runs the hooks over all layers of a pass that completes `page`. Returns the hooks, the parts
    /// that they have written, and their number after each layer.
    fn run_hooks(page: KvPage, spare: KvPage) -> (PublishHooks, RecordedParts, Vec<usize>) {
        let mut slots = [PageSlot::Open(spare), PageSlot::Open(page)];
        let batch = [Chunk { tokens: &[1], position: 7, pages: &mut slots, logits: LogitRows::None }];
        let parts = RecordedParts::default();
        let put = Box::new(Recorder(parts.clone()));
        let mut hooks =
            PublishHooks { parts: Arc::new(PartTable::new(&GEOMETRY)), pages: vec![CompletingPage::new(0, 1, put)] };
        let mut sent = Vec::new();
        for layer in 0..5 {
            hooks.layer_done(layer, &batch);
            sent.push(parts.lock().len());
        }
        (hooks, parts, sent)
    }

    #[test]
    fn parts_are_written_after_their_last_layer_and_tile_the_page() {
        let pool = KvPool::new(GEOMETRY, 2);
        let mut page = pool.allocate().unwrap();
        let mut next = 0..;
        page.fill_with(|| next.next().unwrap_or(0) as f32);
        let expected = page.as_ref().to_vec();
        let (hooks, parts, sent) = run_hooks(page, pool.allocate().unwrap());
        assert_eq!(sent, [0, 1, 1, 2, 3]);
        let parts = parts.lock();
        assert_eq!(parts.iter().map(|(part, ..)| *part).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(parts.iter().flat_map(|(_, bytes, _)| bytes.clone()).collect::<Vec<_>>(), expected);
        assert!(parts.iter().all(|(_, bytes, crcs)| chunk_crcs(bytes).eq(crcs.iter().copied())));
        assert!(!hooks.found_unusable(0));
    }

    fn filled(pool: &Arc<KvPool>) -> KvPage {
        let mut page = pool.allocate().unwrap();
        page.fill_with(|| 1.0);
        page
    }

    fn page_crcs(sealed: &SealedPage) -> Vec<u32> {
        sealed.parts().flat_map(|(_, crcs)| crcs.to_vec()).collect()
    }

    fn put_crcs(parts: &RecordedParts) -> Vec<u32> {
        parts.lock().iter().flat_map(|(_, _, crcs)| crcs.clone()).collect()
    }

    #[test]
    fn completed_page_is_sealed_with_the_checksums_of_its_put() {
        let pool = KvPool::new(GEOMETRY, 2);
        let (mut hooks, parts, _) = run_hooks(filled(&pool), filled(&pool));
        let mut damaged = filled(&pool);
        damaged.as_mut()[0] ^= 1;
        let sealed = hooks.seal(0, 1, damaged);
        assert_eq!(page_crcs(&sealed), put_crcs(&parts));
        assert!(sealed.verify().is_err(), "a bit flipped between the put and the seal");
        assert_eq!(hooks.seal(0, 0, filled(&pool)).verify(), Ok(()), "a page without a put");
    }

    #[test]
    fn copy_damaged_after_its_verification_is_put_with_its_first_checksums() {
        let pool = KvPool::new(GEOMETRY, 2);
        let good = SealedPage::compute(filled(&pool));
        let mut page = filled(&pool);
        page.as_mut()[0] ^= 1;
        let damaged = SealedPage::received(page, PageSeal { chunk_crcs: page_crcs(&good), origin: None });
        let parts = RecordedParts::default();
        write_parts(&mut Recorder(parts.clone()), &damaged);
        assert_eq!(put_crcs(&parts), page_crcs(&good));
        let is_intact = |(_, bytes, crcs): &(usize, Vec<u8>, Vec<u32>)| chunk_crcs(bytes).eq(crcs.iter().copied());
        assert_eq!(parts.lock().iter().map(is_intact).collect::<Vec<_>>(), [false, true, true]);
    }

    #[test]
    fn pages_that_no_put_can_follow_are_counted() {
        let metrics = Metrics::new(Role::Decode);
        let (sender, reports) = flume::bounded(1);
        let pool = KvPool::new(GEOMETRY, 1);
        let mut page = pool.allocate().unwrap();
        page.fill_with(|| 1.0);
        let sealed = Arc::new(SealedPage::compute(page));
        let end = |content: &Weak<SealedPage>, outcome, origin| {
            let key = PageKey([1; 32]);
            let page = NewPage::first(key);
            settle(Unpublished { page, content: content.clone(), outcome, attempts: 1 }, origin, &sender, &metrics);
            (metrics.abandoned_pages.get(), reports.len())
        };
        let (held, origin) = (Arc::downgrade(&sealed), Some(PageOrigin { run: 1, generation: 1 }));
        assert_eq!(end(&held, PutOutcome::Stored, origin), (0, 0));
        assert_eq!(end(&held, PutOutcome::Lost, origin), (0, 1));
        assert_eq!(end(&held, PutOutcome::Lost, origin), (1, 1), "too many wait");
        assert_eq!(end(&held, PutOutcome::Lost, None), (2, 1), "the store would refuse it");
        drop(sealed);
        assert_eq!(end(&held, PutOutcome::Lost, origin), (3, 1), "it left L1");
        assert_eq!(end(&held, PutOutcome::Stored, origin), (3, 1));
        assert_eq!(end(&held, PutOutcome::Forgotten, None), (3, 1), "that is no loss");
    }

    #[test]
    fn parts_from_one_that_is_not_finite_on_are_not_written() {
        let pool = KvPool::new(GEOMETRY, 2);
        let mut page = pool.allocate().unwrap();
        let second = GEOMETRY.part_bytes(0) / 4;
        page.as_mut()[4 * second..4 * second + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        let (hooks, _, sent) = run_hooks(page, pool.allocate().unwrap());
        assert_eq!(sent, [0, 1, 1, 1, 1]);
        assert!(hooks.found_unusable(0) && !hooks.found_unusable(1));
    }
}
