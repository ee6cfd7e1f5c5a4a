//! Loads the pages of one request into L1: lookup, read, follow.
//!
//! To follow a page is to wait for it while another engine writes it. A page that was written for
//! this request is followed even if it is complete: nodes count reads as reuse, and follows as
//! hand-over.
//!
//! Invariants:
//! - A load ends by the time limits of its [`LoadJob`], whatever the store does.
//! - A follow without progress lasts no longer than the engine needs to compute the missing pages,
//!   or [`FollowLimits::grace`] if that is longer. A reservation without bytes is no progress.
//! - A follow that the store refuses for lack of memory says nothing about the writer. It begins
//!   again when another follow of the load has its page, or after [`FOLLOW_REFUSED_DELAY`] without
//!   another one. Without either, the first refused one does after [`FOLLOW_RETRY_DELAY`].
//! - A page counts as loaded only if the store client has verified every byte of it.
//! - A load never fails a request. The scheduler computes the pages that did not arrive.

use crate::metrics::PageSource;
use crate::store::{Fetched, Followed, Got, LookupPurpose, PageStore};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use larder_client::{Lookup, PartsReceived, Tier};
use larder_format::PageKey;
use larder_model::{KvPage, SealedPage};
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Maximum number of pages that one load follows at the same time. The writer seals pages in order,
/// so a short window at the front keeps up with it.
const FOLLOWS_MAX: usize = 64;
/// Delay before an absent or aborted page is followed again. Another engine may have begun to write
/// it. Also the longest time without a try while follows are refused: other clients may have given
/// memory back.
const FOLLOW_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Delay before a refused follow begins again, if the load has no other one whose end would free
/// memory.
const FOLLOW_REFUSED_DELAY: Duration = Duration::from_millis(10);
/// Maximum time for a lookup. The store answers within milliseconds; beyond a second, recomputing
/// is likely cheaper.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Multiple of the stall timeout granted to a writer that has sealed a page and neither aborted nor
/// skipped one.
const STALL_FACTOR_UNSUSPECTED: u32 = 4;
/// Maximum duration of a follow with progress, as a multiple of the time to compute the pages here.
/// A writer on a busy engine may be slower than that. One that sends a part now and then is not
/// worth the wait.
const FOLLOW_FACTOR_MAX: u32 = 4;

pub(crate) struct LoadJob {
    pub(crate) keys: Vec<PageKey>,
    /// Number of leading pages that L1 has already.
    pub(crate) present: usize,
    pub(crate) buffers: Vec<KvPage>,
    /// Number of leading pages that are in the store or that a prefill engine is writing.
    pub(crate) await_pages: usize,
    /// Number of leading pages that earlier requests may have left in the store. A prefill engine
    /// writes the others for this request.
    pub(crate) reusable: usize,
    pub(crate) load_timeout: Duration,
    pub(crate) follow: FollowLimits,
}

/// Limits of the wait for pages that another engine writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FollowLimits {
    /// End of the follow, whatever its progress.
    pub(crate) until: Instant,
    /// Minimum patience. A prefill engine needs this time to receive the request and to begin.
    pub(crate) grace: Duration,
    /// Maximum wait for the first part.
    pub(crate) start: Duration,
    /// Maximum wait after a fault of the writer.
    pub(crate) stall: Duration,
    pub(crate) cost: ComputeCost,
}

impl FollowLimits {
    /// Time at which the follow of so many pages ends, even if it makes progress.
    fn end_of_follow(&self, pages: usize, begin: Instant) -> Instant {
        let longest = self.cost.of(pages).saturating_mul(FOLLOW_FACTOR_MAX).max(self.stall).max(self.grace);
        // The cost is unbounded while the engine's speed is unknown.
        begin.checked_add(longest).map_or(self.until, |end| end.min(self.until))
    }
}

/// Time that this engine needs to compute pages by itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ComputeCost {
    /// Time for the requests that are ready already.
    pub(crate) backlog: Duration,
    pub(crate) page: Duration,
}

impl ComputeCost {
    fn of(self, pages: usize) -> Duration {
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        self.backlog.saturating_add(self.page.saturating_mul(pages))
    }
}

pub(crate) struct LoadedPage {
    pub(crate) index: usize,
    pub(crate) page: SealedPage,
    pub(crate) source: PageSource,
}

/// Result of [`load`]. The default value means that nothing was loaded and the store did not
/// answer.
#[derive(Default)]
pub(crate) struct Loaded {
    pub(crate) pages: Vec<LoadedPage>,
    pub(crate) unused: Vec<KvPage>,
    /// Number of leading pages that the lookup found in the store. Some may be gone since.
    pub(crate) in_store: usize,
    /// True if every queried node answered. Only then is a page known to be missing.
    pub(crate) answered: bool,
}

pub(crate) async fn load(store: &dyn PageStore, job: LoadJob) -> Loaded {
    let mut loaded = Loaded::default();
    let mut buffers = VecDeque::from(job.buffers);
    let deadline = Instant::now() + job.load_timeout;
    let lookup_until = deadline.min(Instant::now() + LOOKUP_TIMEOUT);
    let (reusable, handed_over) = job.keys.split_at(job.reusable.min(job.keys.len()));
    // Both live to the end of the load, because they hold leases.
    let (reused, handed) = futures::join!(
        look_up(store, reusable, LookupPurpose::Reuse, lookup_until),
        look_up(store, handed_over, LookupPurpose::HandOver, lookup_until),
    );
    let is_whole = reused.tiers.len() >= reusable.len();
    let more = if is_whole { handed.tiers.len().min(handed_over.len()) } else { 0 };
    let readable = reused.tiers.len().min(reusable.len());
    let found = readable + more;
    loaded.in_store = found;
    loaded.answered = reused.answered && handed.answered;
    if !loaded.answered && found == 0 {
        // No node is reachable, so there is nothing to read or to follow.
        loaded.unused.extend(buffers);
        return loaded;
    }
    let mut missing: VecDeque<usize> = VecDeque::new();
    if readable > job.present {
        let wanted: Vec<(PageKey, KvPage)> =
            job.keys[job.present..readable].iter().copied().zip(buffers.drain(..readable - job.present)).collect();
        for (offset, got) in store.get(wanted, deadline).await.into_iter().enumerate() {
            let index = job.present + offset;
            match got {
                Got::Hit(page, fetched) => {
                    let source = source_of(&fetched);
                    let page = SealedPage::received(page, fetched.seal);
                    loaded.pages.push(LoadedPage { index, page, source });
                }
                // The store evicted the page after the lookup. It becomes a candidate for
                // following.
                Got::Miss(page) => {
                    missing.push_back(index);
                    buffers.extend(page);
                }
            }
        }
    }
    let awaited = job.await_pages.min(job.keys.len());
    // The caller promised the awaited pages only. No engine may be writing the others.
    missing.retain(|&index| index < awaited);
    // Pages that are found and not reusable were sealed between the router's lookup and this one.
    missing.extend(readable.max(job.present)..awaited.max(found));
    let following = Follower { store, keys: &job.keys, limits: job.follow, parts: PartsReceived::default() };
    let waiting = missing.into_iter().filter_map(|index| Some((index, buffers.pop_front()?))).collect();
    loaded.unused.extend(buffers);
    following.run(waiting, &mut loaded).await;
    loaded
}

/// Looks pages up until `deadline`. An empty list needs no question.
async fn look_up(store: &dyn PageStore, keys: &[PageKey], purpose: LookupPurpose, deadline: Instant) -> Lookup {
    if keys.is_empty() {
        return Lookup { answered: true, ..Lookup::default() };
    }
    // Enforced here as well: a store that ignores its deadline must not hold up the request.
    let lookup = tokio::time::timeout_at(deadline.into(), store.lookup(keys.to_vec(), purpose, deadline));
    lookup.await.unwrap_or_default()
}

fn source_of(fetched: &Fetched) -> PageSource {
    match fetched.tier {
        Tier::L2 => PageSource::L2,
        Tier::L3 if fetched.is_direct => PageSource::L3Direct,
        Tier::L3 => PageSource::L3,
    }
}

struct Follower<'a> {
    store: &'a dyn PageStore,
    keys: &'a [PageKey],
    limits: FollowLimits,
    /// Parts of all followed pages.
    parts: PartsReceived,
}

struct WriterProgress {
    progress: Instant,
    /// Parts that had arrived at the last look.
    parts: u64,
    wrote: bool,
    /// Start of the suspicion that it is dead: it aborted or skipped a page.
    suspect_since: Option<Instant>,
}

impl WriterProgress {
    fn new(now: Instant) -> Self {
        Self { progress: now, parts: 0, wrote: false, suspect_since: None }
    }

    /// Time at which this engine stops to wait for `missing` pages. Each progress moves it.
    fn deadline(&self, limits: &FollowLimits, missing: usize) -> Instant {
        let (since, longest) = match self.suspect_since {
            // Progress after the suspicion began restarts the clock: another engine may have taken
            // over.
            Some(since) => (since.max(self.progress), limits.stall),
            None if self.wrote => (self.progress, limits.stall.saturating_mul(STALL_FACTOR_UNSUSPECTED)),
            // The prefill may still wait in its own queue.
            None => (self.progress, limits.start),
        };
        // A wait as long as the computation costs at most twice the better choice, whatever the
        // writer does later.
        let patience = limits.cost.of(missing).min(longest).max(limits.grace);
        (since + patience).min(limits.until)
    }

    /// Notes parts that arrived since the last look. Returns `false` if there are none.
    fn sees(&mut self, parts: u64, now: Instant) -> bool {
        let has_more = parts > self.parts;
        if has_more {
            self.progress = now;
            self.parts = parts;
            self.wrote = true;
        }
        has_more
    }
}

impl Follower<'_> {
    /// Follows the pages in `waiting`, which are ordered by index, until all are sealed or the
    /// writer counts as dead.
    async fn run(&self, mut waiting: VecDeque<(usize, KvPage)>, loaded: &mut Loaded) {
        let mut writer = WriterProgress::new(Instant::now());
        let until = self.limits.end_of_follow(waiting.len(), writer.progress);
        let limits = FollowLimits { until, ..self.limits };
        let mut running = FuturesUnordered::new();
        let mut unsealed: BTreeSet<usize> = waiting.iter().map(|(index, _)| *index).collect();
        // Follows for which the store has memory, as far as is known.
        let mut window = FOLLOWS_MAX;
        let mut probe_at = tokio::time::Instant::now();
        loop {
            while running.len() < window
                && let Some((index, buffer)) = waiting.pop_front()
            {
                // Start in order: the writer seals the first pages first.
                running.push(self.follow(index, buffer, Duration::ZERO, until));
            }
            let give_up = tokio::time::Instant::from_std(writer.deadline(&limits, unsealed.len()));
            // The follows in the window may wait for pages that no engine writes.
            let probes = window < FOLLOWS_MAX && !waiting.is_empty() && probe_at < give_up;
            let wait_end = if probes { probe_at } else { give_up };
            let ended = tokio::time::timeout_at(wait_end, running.next()).await;
            let is_sending = writer.sees(self.parts.get(), Instant::now());
            let (index, page, end) = match ended {
                Ok(Some(ended)) => ended,
                Err(_) if probes => {
                    window += 1;
                    probe_at = tokio::time::Instant::now() + FOLLOW_RETRY_DELAY;
                    continue;
                }
                // Parts of a page that is not complete yet.
                Err(_) if is_sending && Instant::now() < until => continue,
                Ok(None) | Err(_) => break,
            };
            let is_refused = matches!(end, Followed::Refused);
            if let Followed::Sealed(seal) = end {
                window = FOLLOWS_MAX.min(window + 1);
                unsealed.remove(&index);
                writer.progress = Instant::now();
                writer.wrote = true;
                // The engine writes pages in order, so an earlier unsealed page was lost. One whose
                // follow was refused may be sealed.
                let refused = waiting.front().map(|(index, _)| *index);
                let skipped = unsealed.first().is_some_and(|&first| first < index && refused != Some(first));
                writer.suspect_since = skipped.then(|| writer.suspect_since.unwrap_or(writer.progress));
                let page = SealedPage::received(page, seal);
                loaded.pages.push(LoadedPage { index, page, source: PageSource::Followed });
                continue;
            }
            if is_refused && !running.is_empty() {
                window = running.len();
                probe_at = tokio::time::Instant::now() + FOLLOW_RETRY_DELAY;
                let at = waiting.partition_point(|(other, _)| *other < index);
                waiting.insert(at, (index, page));
                continue;
            }
            let pause = if is_refused { FOLLOW_REFUSED_DELAY } else { FOLLOW_RETRY_DELAY };
            if !is_refused {
                // An abort may mean that the writer died. Another engine may take over, so keep
                // trying for a while.
                writer.suspect_since.get_or_insert_with(Instant::now);
            }
            // Without a connected node no writer can deliver a page: compute at once.
            if Instant::now() >= until || self.store.nodes_connected() == 0 {
                loaded.unused.push(page);
                break;
            }
            running.push(self.follow(index, page, pause, until));
        }
        // Dropping a running follow returns its buffer to the pool once no transfer can touch it.
        loaded.unused.extend(waiting.drain(..).map(|(_, page)| page));
    }

    fn follow(
        &self,
        index: usize,
        buffer: KvPage,
        pause: Duration,
        until: Instant,
    ) -> impl Future<Output = (usize, KvPage, Followed)> + use<'_> {
        let store = self.store;
        let key = self.keys[index];
        let parts = self.parts.clone();
        async move {
            // A timer would delay even a zero sleep to its next tick.
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            let (page, end) = store.follow(key, buffer, parts, until).await;
            (index, page, end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{OpenPut, PutSource};
    use futures::future::BoxFuture;
    use larder_client::NewPage;
    use larder_format::{KvDtype, PageGeometry, PageOrigin};
    use larder_model::{KvPool, PageSeal};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    const GEOMETRY: PageGeometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 1,
        kv_heads: 1,
        head_dim: 4,
        page_tokens: 2,
        layers_per_part: 1,
        head_groups: 1,
    };

    /// Store with all pages and memory for one follow at a time. A follow takes one turn of the
    /// runtime.
    #[derive(Default)]
    struct OneFollow {
        is_busy: AtomicBool,
        /// Follows to refuse, whatever the memory.
        refusals_left: AtomicUsize,
        /// Page that no engine writes. Its follow does not end, and takes no memory.
        unwritten: Option<PageKey>,
        refused: AtomicUsize,
    }

    impl PageStore for OneFollow {
        fn lookup(&self, _: Vec<PageKey>, _: LookupPurpose, _: Instant) -> BoxFuture<'_, Lookup> {
            Box::pin(async { Lookup::default() })
        }

        fn get(&self, pages: Vec<(PageKey, KvPage)>, _: Instant) -> BoxFuture<'_, Vec<Got>> {
            Box::pin(async move { pages.into_iter().map(|(_, page)| Got::Miss(Some(page))).collect() })
        }

        fn follow(
            &self,
            key: PageKey,
            buffer: KvPage,
            _: PartsReceived,
            _: Instant,
        ) -> BoxFuture<'_, (KvPage, Followed)> {
            Box::pin(async move {
                if self.unwritten == Some(key) {
                    std::future::pending::<()>().await;
                }
                let left = self.refusals_left.load(Ordering::Relaxed);
                self.refusals_left.store(left.saturating_sub(1), Ordering::Relaxed);
                if left > 0 || self.is_busy.swap(true, Ordering::Relaxed) {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    return (buffer, Followed::Refused);
                }
                tokio::task::yield_now().await;
                self.is_busy.store(false, Ordering::Relaxed);
                (buffer, Followed::Sealed(PageSeal { chunk_crcs: Vec::new(), origin: None }))
            })
        }

        fn put(&self, _: NewPage, _: PutSource, _: Instant) -> Box<dyn OpenPut> {
            unreachable!("a load puts nothing")
        }

        fn forget_copies(&self, _: Vec<(PageKey, Option<PageOrigin>)>, _: Instant) -> BoxFuture<'_, usize> {
            Box::pin(async { 0 })
        }

        fn generation_ended(&self, _: Vec<PageKey>, _: u32, _: Instant) -> BoxFuture<'_, ()> {
            Box::pin(async {})
        }

        fn can_judge_copy(&self, _: &PageKey, _: PageOrigin) -> Option<bool> {
            None
        }

        fn nodes_connected(&self) -> usize {
            1
        }

        fn pages_damaged(&self) -> u64 {
            0
        }
    }

    /// Follows so many pages. Returns the numbers of those that were followed, in order, and the
    /// time that the load has waited for timers.
    async fn follow_all(store: &OneFollow, pages: usize) -> (Vec<usize>, Duration) {
        let pool = KvPool::new(GEOMETRY, pages);
        let keys: Vec<PageKey> = (0..pages).map(|page| PageKey([page as u8; 32])).collect();
        let waiting = (0..pages).map(|index| (index, pool.allocate().unwrap())).collect();
        let limits = limits(Instant::now());
        let follower = Follower { store, keys: &keys, limits, parts: PartsReceived::default() };
        let (begin, mut loaded) = (tokio::time::Instant::now(), Loaded::default());
        follower.run(waiting, &mut loaded).await;
        let mut followed: Vec<usize> = loaded.pages.iter().map(|page| page.index).collect();
        followed.sort_unstable();
        (followed, begin.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn refused_follow_begins_again_when_another_one_ends() {
        const PAGES: usize = 20;
        let store = OneFollow::default();
        let (followed, waited) = follow_all(&store, PAGES).await;
        assert_eq!(followed, (0..PAGES).collect::<Vec<_>>());
        assert_eq!(waited, Duration::ZERO);
        // All but one at first, then at most one per page.
        let refused = store.refused.into_inner();
        assert!((1..2 * PAGES).contains(&refused), "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn follow_that_is_refused_alone_begins_again_soon() {
        let store = OneFollow { refusals_left: AtomicUsize::new(3), ..OneFollow::default() };
        let (followed, waited) = follow_all(&store, 1).await;
        assert_eq!(followed, [0]);
        assert!((3 * FOLLOW_REFUSED_DELAY..FOLLOW_RETRY_DELAY).contains(&waited), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn refused_follow_begins_again_beside_one_that_does_not_end() {
        let unwritten = Some(PageKey([0; 32]));
        let store = OneFollow { refusals_left: AtomicUsize::new(5), unwritten, ..OneFollow::default() };
        let (followed, _) = follow_all(&store, 3).await;
        assert_eq!(followed, [1, 2], "the first page is not written");
    }

    fn limits(start: Instant) -> FollowLimits {
        let seconds = Duration::from_secs;
        FollowLimits {
            until: start + seconds(100),
            grace: Duration::from_millis(100),
            start: seconds(30),
            stall: seconds(2),
            cost: ComputeCost { backlog: Duration::ZERO, page: seconds(60) },
        }
    }

    #[test]
    fn writer_deadline_shrinks_as_suspicion_grows() {
        let start = Instant::now();
        let seconds = Duration::from_secs;
        let limits = limits(start);
        let mut writer = WriterProgress::new(start);
        assert_eq!(writer.deadline(&limits, 1), start + seconds(30), "it may be queued");
        writer.wrote = true;
        assert_eq!(writer.deadline(&limits, 1), start + seconds(8), "it may be stuck");
        writer.suspect_since = Some(start + seconds(1));
        assert_eq!(writer.deadline(&limits, 1), start + seconds(3), "it gave a page up");
        writer.progress = start + seconds(5);
        assert_eq!(writer.deadline(&limits, 1), start + seconds(7), "another goes on from there");
        let short = FollowLimits { until: start + seconds(6), ..limits };
        assert_eq!(writer.deadline(&short, 1), start + seconds(6));
    }

    #[test]
    fn follow_ends_in_time_if_the_speed_of_the_engine_is_unknown() {
        let start = Instant::now();
        let unknown = ComputeCost { backlog: Duration::ZERO, page: Duration::MAX };
        let limits = FollowLimits { cost: unknown, ..limits(start) };
        assert_eq!(limits.end_of_follow(2, start), limits.until);
        let quick = ComputeCost { backlog: Duration::ZERO, page: Duration::from_millis(1) };
        let limits = FollowLimits { cost: quick, ..limits };
        assert_eq!(limits.end_of_follow(2, start), start + limits.stall);
    }

    #[test]
    fn patience_ends_when_computing_would_be_done() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let cost = ComputeCost { backlog: ms(30), page: ms(10) };
        let limits = FollowLimits { cost, ..limits(start) };
        let mut writer = WriterProgress::new(start);
        assert_eq!(writer.deadline(&limits, 50), start + ms(530), "for the first part as well");
        assert_eq!(writer.deadline(&limits, 3), start + ms(100), "the grace period");
        assert!(!writer.sees(0, start + ms(50)) && writer.sees(1, start + ms(60)));
        assert_eq!(writer.deadline(&limits, 50), start + ms(590), "a part is progress");
        assert_eq!(limits.cost.of(usize::MAX), ms(30) + ms(10) * u32::MAX);
    }
}
