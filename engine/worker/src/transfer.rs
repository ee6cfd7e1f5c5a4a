//! Bringing the pages of one request into L1: look up, read, follow.
//!
//! What always holds: it ends by its limit, and a page counts as loaded only if the store says that every byte of it was
//! checked. What is not loaded is computed by the scheduler; so nothing that happens here fails a request.

use crate::metrics::PageSource;
use crate::store::PageStore;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use larder_client::{FollowEnd, Tier};
use larder_format::PageKey;
use larder_model::KvPage;
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Pages of one request that are followed at the same time.
const FOLLOWS_MAX: usize = 64;
/// Pause before a page that was not there, or was given up by its writer, is followed again: another writer may begin.
const FOLLOW_RETRY: Duration = Duration::from_millis(50);
/// Most time for the store to say what it has: an answer takes milliseconds, and what takes longer is computed sooner.
const LOOKUP_LIMIT: Duration = Duration::from_secs(1);
/// Graces without a new page after which a writer that did write is taken for stuck.
const STALL_GRACES: u32 = 4;

/// What to bring.
pub(crate) struct LoadJob {
    /// Keys of the pages of the prompt that may come from the store, from its start.
    pub(crate) keys: Vec<PageKey>,
    /// How many of them the engine has already.
    pub(crate) present: usize,
    /// One buffer for each of the others.
    pub(crate) buffers: Vec<KvPage>,
    /// The first so many pages are in the store or being written now.
    pub(crate) await_pages: usize,
    /// Most time for looking up and reading.
    pub(crate) load_limit: Duration,
    /// When following ends.
    pub(crate) follow_until: Instant,
    /// Time without progress after which the writer is taken for dead.
    pub(crate) follow_grace: Duration,
    /// Time after which a writer that wrote nothing at all is no longer waited for.
    pub(crate) follow_limit: Duration,
}

/// A page that came.
pub(crate) struct LoadedPage {
    /// Place in its sequence.
    pub(crate) index: usize,
    /// Its bytes.
    pub(crate) page: KvPage,
    /// Where it was.
    pub(crate) source: PageSource,
}

/// What came.
#[derive(Default)]
pub(crate) struct Loaded {
    /// Pages that came, in no order.
    pub(crate) pages: Vec<LoadedPage>,
    /// Buffers that were not needed.
    pub(crate) spare: Vec<KvPage>,
    /// Pages from the start that the store has.
    pub(crate) in_store: usize,
    /// Whether every node that was asked said what it has: only then is a page known to be missing.
    pub(crate) answered: bool,
}

/// Brings what can be brought.
pub(crate) async fn load(store: &dyn PageStore, job: LoadJob) -> Loaded {
    let mut loaded = Loaded::default();
    let mut buffers = VecDeque::from(job.buffers);
    let deadline = Instant::now() + job.load_limit;
    let lookup_until = deadline.min(Instant::now() + LOOKUP_LIMIT);
    let lookup = tokio::time::timeout_at(lookup_until.into(), store.lookup(job.keys.clone(), lookup_until));
    let lookup = lookup.await.unwrap_or_default();
    let found = lookup.tiers.len().min(job.keys.len());
    (loaded.in_store, loaded.answered) = (found, lookup.answered);
    if !lookup.answered && found == 0 {
        // Nobody is there to read from or to follow.
        loaded.spare.extend(buffers);
        return loaded;
    }
    let mut missing: VecDeque<usize> = VecDeque::new();
    if found > job.present {
        let wanted: Vec<(PageKey, KvPage)> =
            job.keys[job.present..found].iter().copied().zip(buffers.drain(..found - job.present)).collect();
        for (offset, (page, tier)) in store.get(wanted, deadline).await.into_iter().enumerate() {
            let index = job.present + offset;
            match tier {
                Some(tier) => loaded.pages.push(LoadedPage { index, page, source: source_of(tier) }),
                None => {
                    missing.push_back(index);
                    buffers.push_back(page);
                }
            }
        }
    }
    let awaited = job.await_pages.min(job.keys.len());
    missing.retain(|&index| index < awaited);
    missing.extend(found.max(job.present)..awaited);
    let patience = Patience { grace: job.follow_grace, first: job.follow_limit, until: job.follow_until };
    let following = Following { store, keys: &job.keys, patience };
    let waiting = missing.into_iter().filter_map(|index| Some((index, buffers.pop_front()?))).collect();
    loaded.spare.extend(buffers);
    following.run(waiting, &mut loaded).await;
    loaded
}

fn source_of(tier: Tier) -> PageSource {
    match tier {
        Tier::L2 => PageSource::L2,
        Tier::L3 => PageSource::L3,
    }
}

struct Following<'a> {
    store: &'a dyn PageStore,
    keys: &'a [PageKey],
    patience: Patience,
}

/// How long to wait for a writer.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// Without a new page, once there is doubt.
    grace: Duration,
    /// For the first page.
    first: Duration,
    /// At most.
    until: Instant,
}

/// What is known of the writer that is followed.
struct Writer {
    /// When it last ended a page.
    progress: Instant,
    /// Whether it ended any page.
    wrote: bool,
    /// Since when there is reason to think it dead: a page was given up, or skipped.
    doubt: Option<Instant>,
}

impl Writer {
    /// When to stop waiting for it.
    fn give_up_at(&self, patience: Patience) -> Instant {
        let at = match self.doubt {
            Some(since) => since.max(self.progress) + patience.grace,
            None if self.wrote => self.progress + patience.grace * STALL_GRACES,
            None => self.progress + patience.first,
        };
        at.min(patience.until)
    }
}

impl Following<'_> {
    /// Follows the pages in `waiting`, which are in order.
    async fn run(&self, mut waiting: VecDeque<(usize, KvPage)>, loaded: &mut Loaded) {
        let mut writer = Writer { progress: Instant::now(), wrote: false, doubt: None };
        let mut running = FuturesUnordered::new();
        let mut unsealed: BTreeSet<usize> = waiting.iter().map(|(index, _)| *index).collect();
        loop {
            while running.len() < FOLLOWS_MAX
                && let Some((index, buffer)) = waiting.pop_front()
            {
                running.push(self.follow(index, buffer, Duration::ZERO));
            }
            let give_up = tokio::time::Instant::from_std(writer.give_up_at(self.patience));
            let Ok(Some((index, page, end))) = tokio::time::timeout_at(give_up, running.next()).await else {
                break;
            };
            if end == FollowEnd::Sealed {
                unsealed.remove(&index);
                writer.progress = Instant::now();
                writer.wrote = true;
                // The writer goes in order: a page before this one that is not there was lost on its way.
                let skipped = unsealed.first().is_some_and(|&first| first < index);
                writer.doubt = skipped.then(|| writer.doubt.unwrap_or(writer.progress));
                loaded.pages.push(LoadedPage { index, page, source: PageSource::Followed });
                continue;
            }
            writer.doubt.get_or_insert_with(Instant::now);
            if Instant::now() >= self.patience.until || self.store.nodes_connected() == 0 {
                loaded.spare.push(page);
                break;
            }
            running.push(self.follow(index, page, FOLLOW_RETRY));
        }
        // What still runs is dropped: its buffers go back to the pool when no transfer can touch them any more.
        loaded.spare.extend(waiting.drain(..).map(|(_, page)| page));
    }

    fn follow(
        &self,
        index: usize,
        buffer: KvPage,
        pause: Duration,
    ) -> impl Future<Output = (usize, KvPage, FollowEnd)> + use<'_> {
        let (store, key, until) = (self.store, self.keys[index], self.patience.until);
        async move {
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
    fn patience_ends_sooner_the_more_there_is_to_doubt() {
        let start = Instant::now();
        let seconds = Duration::from_secs;
        let patience = Patience { grace: seconds(2), first: seconds(30), until: start + seconds(100) };
        let mut writer = Writer { progress: start, wrote: false, doubt: None };
        assert_eq!(writer.give_up_at(patience), start + seconds(30), "it may be queued");
        writer.wrote = true;
        assert_eq!(writer.give_up_at(patience), start + seconds(8), "it may be stuck");
        writer.doubt = Some(start + seconds(1));
        assert_eq!(writer.give_up_at(patience), start + seconds(3), "it gave a page up");
        writer.progress = start + seconds(5);
        assert_eq!(writer.give_up_at(patience), start + seconds(7), "another goes on from there");
        let short = Patience { until: start + seconds(6), ..patience };
        assert_eq!(writer.give_up_at(short), start + seconds(6));
    }
}
