//! Calls that move pages. They end by their deadline, and return one result per page.

use crate::InvalidArgument;
use bytes::Bytes;
use futures::future::join_all;
use larder_client::{Client, FollowEnd, GetOptions, NewPage, PutOptions, PutOutcome, Tier};
use larder_format::{PageGeometry, PageKey};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Maximum timeout of a call. Nothing waits longer, so a mistaken unit cannot hang a caller.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Refuses durations above a day. `None` is a duration that its language could not convert.
pub fn bounded(duration: Option<Duration>, name: &str) -> Result<Duration, InvalidArgument> {
    let is_bounded = |duration: &Duration| *duration <= TIMEOUT_MAX;
    duration.filter(is_bounded).ok_or_else(|| InvalidArgument(format!("{name} must be 0 to 86400 seconds")))
}

/// Target of a get: a page, or a part of one.
pub struct PageTarget<T> {
    /// Index of the page in the call.
    pub page: usize,
    /// Key of the page.
    pub key: PageKey,
    /// Range of the page in bytes.
    pub range: Range<u32>,
    /// Memory of exactly that length.
    pub memory: T,
}

/// Targets of the parts of page number `page`, in order. `parts` has one memory for each part.
pub fn targets_of_parts<T>(
    geometry: &PageGeometry,
    page: usize,
    key: PageKey,
    parts: impl IntoIterator<Item = T>,
) -> impl Iterator<Item = PageTarget<T>> {
    let mut start = 0;
    parts.into_iter().zip(geometry.part_table()).map(move |(memory, length)| {
        let range = start..start + length;
        start += length;
        PageTarget { page, key, range, memory }
    })
}

/// Reads `pages` pages into `targets`, and returns the tier of each page whose targets are all
/// hits. When it returns, nothing writes to the targets any more.
///
/// The targets are either whole pages, in the order of the call, or parts.
pub async fn get<T: AsMut<[u8]> + Send + 'static>(
    client: Client,
    pages: usize,
    targets: Vec<PageTarget<T>>,
    options: GetOptions,
    deadline: Instant,
) -> Vec<Option<Tier>> {
    if targets.len() == pages {
        let whole = targets.into_iter().map(|target| (target.key, target.memory)).collect();
        let fetched = client.get_with(whole, options, deadline).await;
        return fetched.into_iter().map(|(_, fetched)| fetched.tier()).collect();
    }
    let indices: Vec<usize> = targets.iter().map(|target| target.page).collect();
    let ranges = targets.into_iter().map(|target| (target.key, target.range, target.memory)).collect();
    let fetched = client.get_ranges_with(ranges, options, deadline).await;
    let mut tiers = vec![None; pages];
    let mut misses = vec![false; pages];
    for (index, (_, fetched)) in indices.into_iter().zip(fetched) {
        let tier = fetched.tier();
        // The slower tier of two: the page may move between them meanwhile.
        tiers[index] = if tiers[index] == Some(Tier::L3) { tiers[index] } else { tier };
        misses[index] |= tier.is_none();
    }
    tiers.into_iter().zip(misses).map(|(tier, is_miss)| tier.filter(|_| !is_miss)).collect()
}

/// Pages to put. With a position, the keys follow each other in one sequence, and `parent` is the
/// key before the first. Without one, the pages are unrelated. `token_ids` has those of each page,
/// and pages without a list have none.
pub fn new_pages(
    keys: Vec<PageKey>,
    parent: Option<PageKey>,
    position: Option<u32>,
    token_ids: Vec<Vec<u32>>,
) -> Vec<NewPage> {
    let mut token_ids = token_ids.into_iter();
    let mut before = parent.unwrap_or(PageKey::NONE);
    let page = |(at, key): (u32, PageKey)| match position {
        Some(first) => NewPage {
            key,
            parent: std::mem::replace(&mut before, key),
            position: first.saturating_add(at),
            token_ids: token_ids.next().unwrap_or_default(),
        },
        None => NewPage { token_ids: token_ids.next().unwrap_or_default(), ..NewPage::first(key) },
    };
    (0..).zip(keys).map(page).collect()
}

/// Puts pages, each as its parts. After a lost put, transfers may still read the parts.
pub async fn put(
    client: Client,
    pages: Vec<(NewPage, Vec<Bytes>)>,
    options: PutOptions,
    deadline: Instant,
) -> Vec<PutOutcome> {
    let count = pages.len();
    // The client ends a put by its deadline, but not always at once.
    let put = client.put_parts(pages, options, deadline);
    let ended = tokio::time::timeout_at(deadline.into(), put).await;
    ended.unwrap_or_else(|_| vec![PutOutcome::Lost; count])
}

/// Follows pages into `targets`, which are whole pages.
pub async fn follow<T: AsMut<[u8]> + Send + 'static>(
    client: Client,
    targets: Vec<PageTarget<T>>,
    deadline: Instant,
) -> Vec<FollowEnd> {
    let follow = |target: PageTarget<T>| client.follow(target.key, target.memory, deadline).finish();
    let ends = join_all(targets.into_iter().map(follow)).await;
    ends.into_iter().map(|(_, end)| end).collect()
}
