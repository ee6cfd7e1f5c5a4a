//! Loads the pages of one request into L1: lookup, read, follow.
//!
//! To follow a page is to wait for it while another engine writes it.
//!
//! Invariants:
//! - A load ends by the time limits of its [`LoadJob`], whatever the store does.
//! - A page counts as loaded only if the store client has verified every byte of it.
//! - A load never fails a request. The scheduler computes the pages that did not arrive.

use crate::metrics::PageSource;
use crate::store::{Fetched, Followed, PageStore};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use larder_client::Tier;
use larder_format::PageKey;
use larder_model::{KvPage, SealedPage};
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Maximum number of pages that one load follows at the same time. The writer seals pages in order,
/// so a short window at the front keeps up with it.
const FOLLOWS_MAX: usize = 64;
/// Delay before an absent or aborted page is followed again. Another engine may have begun to write
/// it.
const FOLLOW_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Maximum time for a lookup. The store answers within milliseconds; beyond a second, recomputing
/// is likely cheaper.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Multiple of the stall timeout granted to a writer that has sealed a page and neither aborted nor
/// skipped one.
const STALL_FACTOR_UNSUSPECTED: u32 = 4;

pub(crate) struct LoadJob {
    pub(crate) keys: Vec<PageKey>,
    /// Number of leading pages that L1 has already.
    pub(crate) present: usize,
    pub(crate) buffers: Vec<KvPage>,
    /// Number of leading pages that are in the store or that a prefill engine is writing.
    pub(crate) await_pages: usize,
    pub(crate) load_timeout: Duration,
    pub(crate) follow_until: Instant,
    pub(crate) follow_stall_timeout: Duration,
    /// Time limit for the first page of a writer.
    pub(crate) follow_start_timeout: Duration,
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
    // Enforced here as well: a store that ignores its deadline must not hold up the request.
    let lookup = tokio::time::timeout_at(lookup_until.into(), store.lookup(job.keys.clone(), lookup_until));
    let lookup = lookup.await.unwrap_or_default();
    let found = lookup.tiers.len().min(job.keys.len());
    loaded.in_store = found;
    loaded.answered = lookup.answered;
    if !lookup.answered && found == 0 {
        // No node is reachable, so there is nothing to read or to follow.
        loaded.unused.extend(buffers);
        return loaded;
    }
    let mut missing: VecDeque<usize> = VecDeque::new();
    if found > job.present {
        let wanted: Vec<(PageKey, KvPage)> =
            job.keys[job.present..found].iter().copied().zip(buffers.drain(..found - job.present)).collect();
        for (offset, (page, fetched)) in store.get(wanted, deadline).await.into_iter().enumerate() {
            let index = job.present + offset;
            match fetched {
                Some(Fetched { tier, seal }) => {
                    let page = SealedPage::received(page, seal);
                    loaded.pages.push(LoadedPage { index, page, source: source_of(tier) });
                }
                // The store evicted the page after the lookup. It becomes a candidate for
                // following.
                None => {
                    missing.push_back(index);
                    buffers.push_back(page);
                }
            }
        }
    }
    let awaited = job.await_pages.min(job.keys.len());
    // The caller promised the awaited pages only. No engine may be writing the others.
    missing.retain(|&index| index < awaited);
    missing.extend(found.max(job.present)..awaited);
    let timeouts =
        FollowTimeouts { stall: job.follow_stall_timeout, first: job.follow_start_timeout, until: job.follow_until };
    let following = Follower { store, keys: &job.keys, timeouts };
    let waiting = missing.into_iter().filter_map(|index| Some((index, buffers.pop_front()?))).collect();
    loaded.unused.extend(buffers);
    following.run(waiting, &mut loaded).await;
    loaded
}

fn source_of(tier: Tier) -> PageSource {
    match tier {
        Tier::L2 => PageSource::L2,
        Tier::L3 => PageSource::L3,
    }
}

struct Follower<'a> {
    store: &'a dyn PageStore,
    keys: &'a [PageKey],
    timeouts: FollowTimeouts,
}

#[derive(Debug, Clone, Copy)]
struct FollowTimeouts {
    stall: Duration,
    first: Duration,
    until: Instant,
}

struct WriterProgress {
    progress: Instant,
    wrote: bool,
    /// Start of the suspicion that it is dead: it aborted or skipped a page.
    suspect_since: Option<Instant>,
}

impl WriterProgress {
    fn deadline(&self, timeouts: FollowTimeouts) -> Instant {
        let at = match self.suspect_since {
            // Progress after the suspicion began restarts the clock: another engine may have taken
            // over.
            Some(since) => since.max(self.progress) + timeouts.stall,
            None if self.wrote => self.progress + timeouts.stall * STALL_FACTOR_UNSUSPECTED,
            // The prefill may still wait in its own queue.
            None => self.progress + timeouts.first,
        };
        at.min(timeouts.until)
    }
}

impl Follower<'_> {
    /// Follows the pages in `waiting`, which are ordered by index, until all are sealed or the
    /// writer counts as dead.
    async fn run(&self, mut waiting: VecDeque<(usize, KvPage)>, loaded: &mut Loaded) {
        let mut writer = WriterProgress { progress: Instant::now(), wrote: false, suspect_since: None };
        let mut running = FuturesUnordered::new();
        let mut unsealed: BTreeSet<usize> = waiting.iter().map(|(index, _)| *index).collect();
        loop {
            while running.len() < FOLLOWS_MAX
                && let Some((index, buffer)) = waiting.pop_front()
            {
                // Start in order: the writer seals the first pages first.
                running.push(self.follow(index, buffer, Duration::ZERO));
            }
            let give_up = tokio::time::Instant::from_std(writer.deadline(self.timeouts));
            let Ok(Some((index, page, end))) = tokio::time::timeout_at(give_up, running.next()).await else {
                break;
            };
            if let Followed::Sealed(seal) = end {
                unsealed.remove(&index);
                writer.progress = Instant::now();
                writer.wrote = true;
                // The engine writes pages in order, so an earlier unsealed page was lost.
                let skipped = unsealed.first().is_some_and(|&first| first < index);
                writer.suspect_since = skipped.then(|| writer.suspect_since.unwrap_or(writer.progress));
                let page = SealedPage::received(page, seal);
                loaded.pages.push(LoadedPage { index, page, source: PageSource::Followed });
                continue;
            }
            // An abort may mean that the writer died. Another engine may take over, so keep trying
            // for a while.
            writer.suspect_since.get_or_insert_with(Instant::now);
            // Without a connected node no writer can deliver a page: compute at once.
            if Instant::now() >= self.timeouts.until || self.store.nodes_connected() == 0 {
                loaded.unused.push(page);
                break;
            }
            running.push(self.follow(index, page, FOLLOW_RETRY_DELAY));
        }
        // Dropping a running follow returns its buffer to the pool once no transfer can touch it.
        loaded.unused.extend(waiting.drain(..).map(|(_, page)| page));
    }

    fn follow(
        &self,
        index: usize,
        buffer: KvPage,
        pause: Duration,
    ) -> impl Future<Output = (usize, KvPage, Followed)> + use<'_> {
        let store = self.store;
        let key = self.keys[index];
        let until = self.timeouts.until;
        async move {
            // A timer would delay even a zero sleep to its next tick.
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            let (page, end) = store.follow(key, buffer, until).await;
            (index, page, end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writer_deadline_shrinks_as_suspicion_grows() {
        let start = Instant::now();
        let seconds = Duration::from_secs;
        let timeouts = FollowTimeouts { stall: seconds(2), first: seconds(30), until: start + seconds(100) };
        let mut writer = WriterProgress { progress: start, wrote: false, suspect_since: None };
        assert_eq!(writer.deadline(timeouts), start + seconds(30), "it may be queued");
        writer.wrote = true;
        assert_eq!(writer.deadline(timeouts), start + seconds(8), "it may be stuck");
        writer.suspect_since = Some(start + seconds(1));
        assert_eq!(writer.deadline(timeouts), start + seconds(3), "it gave a page up");
        writer.progress = start + seconds(5);
        assert_eq!(writer.deadline(timeouts), start + seconds(7), "another goes on from there");
        let short = FollowTimeouts { until: start + seconds(6), ..timeouts };
        assert_eq!(writer.deadline(short), start + seconds(6));
    }
}
