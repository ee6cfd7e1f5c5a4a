//! Reading pages, and ranges of pages, into the caller's buffers.
//!
//! Invariants:
//! - Every buffer returns to the caller, whatever happens.
//! - A page is a hit only after all chunks that the caller wants were verified.

use super::durations::retry_delay;
use super::lookup::{Tier, tier};
use super::verify::copy_verified;
use crate::buffer::{Buffer, DynBuffer, downcast};
use crate::client::{Client, Namespace};
use crate::connection::{
    Connection, PageRequest, PageResponse, PageResult, PagesHandler, ResponseHandler, StoredAt, UncopiedBytes,
};
use crate::stats::{Counters, count};
use crate::url::Transport;
use futures::future::join_all;
use larder_format::{PageId, PageKey, PageMeta, PageOrigin, whole_chunks};
use larder_memory::share::{SharedBlock, SharedMemory};
use larder_runtime::now;
use larder_wire::{Delivery, PageRange, Request, VERSION_PAGE_RANGES, YieldBudget};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time after the deadline of a get during which it still verifies and copies pages that arrived in
/// time. Pages not copied by then are misses.
pub(super) const COPY_GRACE: Duration = Duration::from_secs(1);
/// Maximum number of pages in one Get request. Larger batches become several requests.
pub(super) const GET_PAGES_MAX: usize = 1024;

/// Options of [`Client::get_with`] and its like. The default waits until the deadline and does not
/// return to nodes that are too busy for any page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// Time after which the client abandons a node that has not begun to answer, so that the
    /// caller can hedge: ask elsewhere, or compute the pages. The pages are misses, and their
    /// buffers return at once. The client itself sends no second request. Default: `None`, the
    /// deadline only.
    pub hedge_after: Option<Duration>,
    /// Retries at a node that was too busy for any page. The client waits for the node's hint
    /// before each, times a random factor between 1 and 1.25, and never beyond the deadline.
    /// Default: 0.
    ///
    /// A request that brought some pages is no such retry. The node sends a reader as many pages as
    /// it can receive soon, and refuses the rest. The client requests the rest then, as long as
    /// each request brings pages. [`GetOptions::hedge_after`] applies to each of these requests.
    pub busy_retries: u32,
}

/// Result for one page of a get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// The buffer holds the verified page.
    Hit(Tier),
    /// The page does not exist, did not arrive in time, or failed verification. The buffer's
    /// content is undefined.
    Miss,
    /// The node is too busy to serve the page now. Callers that do not retry treat it as a miss.
    Busy {
        /// Pause that the node suggests.
        retry_after: Duration,
    },
}

impl Fetched {
    /// Tier that served the page, or `None` if the client did not get it.
    pub fn tier(self) -> Option<Tier> {
        match self {
            Fetched::Hit(tier) => Some(tier),
            Fetched::Miss | Fetched::Busy { .. } => None,
        }
    }
}

/// Description of a page that was read. With it, its holder can verify the page and put it again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageDescription {
    /// Source of the page. `None` if the node has not said it.
    pub origin: Option<PageOrigin>,
    /// CRC-32 of each chunk of the page, part by part.
    pub chunk_crcs: Vec<u32>,
}

impl PageDescription {
    pub(super) fn of(meta: PageMeta, connection: &Connection) -> Self {
        PageDescription { origin: connection.origin(meta.generation), chunk_crcs: meta.chunk_crcs }
    }
}

/// A requested page, or range of one, with its index in the caller's request.
struct IndexedPage {
    index: usize,
    id: PageId,
    range: Option<Range<u32>>,
    buffer: DynBuffer,
}

/// Result of one page at one node, with the description of a hit.
type PageEnd = (IndexedPage, PageResult, Option<PageDescription>);

impl Client {
    /// Reads whole pages, each into a buffer of exactly the bytes of a page.
    ///
    /// Returns the buffers in the order of the request, with the tier that served the page, or
    /// `None` for a miss. The content of a missed page's buffer is undefined. All nodes work at the
    /// same time, and large batches use several connections.
    pub async fn get<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        let fetched = self.get_with(pages, GetOptions::default(), deadline).await;
        fetched.into_iter().map(|(buffer, fetched)| (buffer, fetched.tier())).collect()
    }

    /// Like [`Client::get`], with options. The result tells a busy node from a miss.
    pub async fn get_with<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        options: GetOptions,
        deadline: Instant,
    ) -> Vec<(B, Fetched)> {
        let ends = self.get_described(pages, options, deadline).await;
        ends.into_iter().map(|(buffer, fetched, _)| (buffer, fetched)).collect()
    }

    /// Like [`Client::get_with`], and returns the description of each hit. A caller that keeps the
    /// page can verify it later, and put it again with [`Client::put_copy`].
    pub async fn get_described<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        options: GetOptions,
        deadline: Instant,
    ) -> Vec<(B, Fetched, Option<PageDescription>)> {
        self.read(pages.into_iter().map(|(key, buffer)| (key, None, buffer)).collect(), options, deadline).await
    }

    /// Like [`Client::get`], but reads only a range of bytes of each page, into a buffer of exactly
    /// that length. [`PageGeometry::part_range`](larder_format::PageGeometry::part_range) is the
    /// range of a part. An empty range, and one that leaves its page, is a miss.
    ///
    /// Ranges of one page in one call belong to the same put, or are misses.
    ///
    /// Nodes send whole chunks of [`CHUNK_BYTES`](larder_format::CHUNK_BYTES). A range of whole
    /// chunks, or a part, costs nothing beyond its bytes.
    pub async fn get_ranges<B: AsMut<[u8]> + Send + 'static>(
        &self,
        ranges: Vec<(PageKey, Range<u32>, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        let fetched = self.get_ranges_with(ranges, GetOptions::default(), deadline).await;
        fetched.into_iter().map(|(buffer, fetched)| (buffer, fetched.tier())).collect()
    }

    /// Like [`Client::get_ranges`], with options. The result tells a busy node from a miss.
    pub async fn get_ranges_with<B: AsMut<[u8]> + Send + 'static>(
        &self,
        ranges: Vec<(PageKey, Range<u32>, B)>,
        options: GetOptions,
        deadline: Instant,
    ) -> Vec<(B, Fetched)> {
        let ranges = ranges.into_iter().map(|(key, bytes, buffer)| (key, Some(bytes), buffer)).collect();
        let fetched = self.read(ranges, options, deadline).await;
        fetched.into_iter().map(|(buffer, fetched, _)| (buffer, fetched)).collect()
    }

    /// Describes stored pages, in the order of `keys`. `None`: the page does not exist, or its node
    /// did not answer before `deadline`.
    ///
    /// Costs a read of one chunk per page, which the node counts as a hit.
    pub async fn describe(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<PageDescription>> {
        let first_byte = |key: &PageKey| (*key, Some(0..1), vec![0u8]);
        let read = self.read(keys.iter().map(first_byte).collect(), GetOptions::default(), deadline).await;
        read.into_iter().map(|(_, _, description)| description).collect()
    }

    async fn read<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, Option<Range<u32>>, B)>,
        options: GetOptions,
        deadline: Instant,
    ) -> Vec<(B, Fetched, Option<PageDescription>)> {
        let mut keys = Vec::with_capacity(pages.len());
        let mut ranges = Vec::with_capacity(pages.len());
        let mut slots: Vec<Option<(B, Fetched, Option<PageDescription>)>> = Vec::with_capacity(pages.len());
        for (key, range, buffer) in pages {
            keys.push(key);
            ranges.push(range);
            slots.push(Some((buffer, Fetched::Miss, None)));
        }
        if let Some(namespace) = self.namespace_if_any() {
            self.read_from_owners(namespace, &keys, &ranges, &mut slots, options, deadline).await;
        } else {
            // Nothing above waited. Without this yield, a caller that retries in a loop would block
            // its thread.
            tokio::task::yield_now().await;
        }
        let answer: Vec<_> = slots.into_iter().map(|slot| slot.expect("every batch returns its buffers")).collect();
        let hits = answer.iter().filter(|(_, fetched, _)| fetched.tier().is_some()).count();
        let busy = answer.iter().filter(|(_, fetched, _)| matches!(fetched, Fetched::Busy { .. })).count();
        self.counters().count_gets(hits, answer.len());
        count(&self.counters().gets_busy, busy);
        answer
    }

    /// Reads pages at their owners, all at once, and updates the slots.
    async fn read_from_owners<B: AsMut<[u8]> + Send + 'static>(
        &self,
        namespace: &Namespace,
        keys: &[PageKey],
        ranges: &[Option<Range<u32>>],
        slots: &mut [Option<(B, Fetched, Option<PageDescription>)>],
        options: GetOptions,
        deadline: Instant,
    ) {
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let page_bytes = namespace.geometry.page_bytes();
        let part_table = &namespace.geometry.part_table();
        let lengths = ranges.iter().map(|range| range.as_ref().map_or(page_bytes, |r| r.len().min(page_bytes)));
        // An average is enough: it only decides how many connections a batch uses.
        let bytes_each = lengths.sum::<usize>() / keys.len().max(1);
        let is_in_page = |index: &usize| ranges[*index].as_ref().is_none_or(|r| whole_chunks(part_table, r).is_some());
        let counters = self.counters();
        let mut gets = Vec::new();
        for (connection, mut indices) in nodes.batches(keys, GET_PAGES_MAX, bytes_each) {
            // An invalid range is a miss here. The node would refuse the whole request for it.
            indices.retain(is_in_page);
            let take = |index: usize| {
                let (buffer, ..) = slots[index].take().expect("each index is in one batch");
                let id = PageId { namespace: namespace.id, key: keys[index] };
                IndexedPage { index, id, range: ranges[index].clone(), buffer: Box::new(buffer) }
            };
            let pages: Vec<IndexedPage> = indices.into_iter().map(take).collect();
            gets.push(
                async move { get_with_retries(&connection, pages, part_table, options, counters, deadline).await },
            );
        }
        let ends: Vec<PageEnd> = join_all(gets).await.into_iter().flatten().collect();
        // Across all batches: ranges of one page may travel over several connections.
        let mixed = pages_of_mixed_puts(&ends);
        for (IndexedPage { index, id, buffer, .. }, result, description) in ends {
            let result = if mixed.contains(&id) { PageResult::Missed } else { result };
            let fetched = match (result, self.record(result)) {
                (PageResult::Busy(ms), _) => Fetched::Busy { retry_after: retry_delay(ms) },
                (_, Some(tier)) => Fetched::Hit(tier),
                (_, None) => Fetched::Miss,
            };
            let description = description.filter(|_| fetched.tier().is_some());
            slots[index] = Some((downcast(buffer), fetched, description));
        }
    }

    /// Counts a corrupt page. Returns the tier of a hit.
    pub(super) fn record(&self, result: PageResult) -> Option<Tier> {
        match result {
            PageResult::Hit(code, _) => tier(code),
            PageResult::Missed | PageResult::Busy(_) => None,
            PageResult::Corrupt => {
                count(&self.counters().corrupt, 1);
                None
            }
        }
    }
}

/// Pages whose ranges come from different puts. A page can be forgotten between two ranges and put
/// again, perhaps with other bytes.
fn pages_of_mixed_puts(ends: &[PageEnd]) -> BTreeSet<PageId> {
    let mut mixed = BTreeSet::new();
    let mut generations = BTreeMap::new();
    for (page, result, _) in ends.iter().filter(|(page, ..)| page.range.is_some()) {
        if let PageResult::Hit(_, generation) = *result
            && *generations.entry(page.id).or_insert(generation) != generation
        {
            mixed.insert(page.id);
        }
    }
    mixed
}

#[derive(Clone, Copy)]
struct GetLimits {
    hedge_at: Instant,
    deadline: Instant,
}

/// Builds the request. A node that does not know ranges gets a request for whole pages.
fn build_request(connection: &Connection, pages: &[PageRequest], part_table: &[u32], by: Delivery) -> Request {
    let range = |PageRequest { id, range, .. }: &PageRequest| {
        let bytes = whole_chunks(part_table, range.as_ref()?)?;
        Some(PageRange { key: id.key, bytes })
    };
    let knows_ranges = connection.version() >= VERSION_PAGE_RANGES;
    let ranges = knows_ranges.then(|| pages.iter().map(range).collect()).flatten();
    match ranges {
        Some(ranges) => Request::GetRanges { ranges, by },
        None => Request::Get { keys: pages.iter().map(|page| page.id.key).collect(), by },
    }
}

/// Reads pages at one node, with retries of those that it is too busy for.
async fn get_with_retries(
    connection: &Arc<Connection>,
    mut pages: Vec<IndexedPage>,
    part_table: &[u32],
    options: GetOptions,
    counters: &Counters,
    deadline: Instant,
) -> Vec<PageEnd> {
    let mut ends = Vec::with_capacity(pages.len());
    let mut retries = options.busy_retries;
    loop {
        let names: Vec<_> = pages.iter().map(|page| (page.index, page.id, page.range.clone())).collect();
        let request = |IndexedPage { id, range, buffer, .. }| PageRequest { id, range, buffer };
        let requests = pages.into_iter().map(request).collect();
        let requested_at = now();
        let (responses, was_hedged) = get_from_node(connection, requests, part_table, options, deadline).await;
        count(&counters.gets_hedged, was_hedged.into());
        let wanted: Vec<_> = names.iter().map(|(_, id, range)| (*id, range.as_ref())).collect();
        let copied = copy_to_buffers(connection, &wanted, responses, deadline).await;
        let ended = names.into_iter().zip(copied);
        let with_name = |((index, id, range), (buffer, result, meta)): (_, (_, _, Option<PageMeta>))| {
            let description = meta.map(|meta| PageDescription::of(meta, connection));
            (IndexedPage { index, id, range, buffer }, result, description)
        };
        let before = ends.len();
        ends.extend(ended.map(with_name));
        let brought_pages = ends[before..].iter().any(|end| matches!(end.1, PageResult::Hit(..)));
        let hint = |end: &PageEnd| if let PageResult::Busy(ms) = end.1 { Some(ms) } else { None };
        let pause = ends.iter().filter_map(hint).max().map(|ms| connection.jittered(retry_delay(ms)));
        // The pages that arrived took a part of the pause already.
        let passed = if brought_pages { now().saturating_duration_since(requested_at) } else { Duration::ZERO };
        let pause = pause.map(|pause| pause.saturating_sub(passed));
        let may_return = brought_pages || retries > 0;
        let Some(pause) = pause.filter(|&pause| may_return && now() + pause < deadline) else { return ends };
        // Only the busy pages are requested again.
        retries -= u32::from(!brought_pages);
        tokio::time::sleep(pause).await;
        pages = ends.extract_if(.., |end| hint(end).is_some()).map(|(page, ..)| page).collect();
    }
}

/// Memory for the RDMA read of a page. This is the memory of its buffer, if that is the client's
/// and takes the whole page. Otherwise it is spare shared memory.
fn block_for_read(page: &mut PageRequest, part_table: &[u32], memory: &Arc<SharedMemory>) -> Option<SharedBlock> {
    let page_bytes: usize = part_table.iter().map(|&bytes| bytes as usize).sum();
    match &page.range {
        Some(range) => memory.allocate(whole_chunks(part_table, range)?.len()),
        None => {
            let own = page.buffer.as_client_buffer().filter(|own| own.len() == page_bytes);
            own.and_then(Buffer::take_block).or_else(|| memory.allocate(page_bytes))
        }
    }
}

/// Reads pages at one node: by RDMA if it is connected, else in shared memory, else inline. The
/// second value is `true` if the client abandoned the node because it had not begun to answer by
/// `hedge_after`.
pub(super) async fn get_from_node(
    connection: &Arc<Connection>,
    pages: Vec<PageRequest>,
    part_table: &[u32],
    options: GetOptions,
    deadline: Instant,
) -> (Vec<PageResponse>, bool) {
    let hedge_at = options.hedge_after.map_or(deadline, |after| deadline.min(now() + after));
    let limits = GetLimits { hedge_at, deadline };
    let Some((channels, devices)) = connection.rdma().for_reading() else {
        let is_shared = connection.transport() == Transport::Shm;
        let delivery = if is_shared { Delivery::InPlace } else { Delivery::Inline };
        return request_pages(connection, pages, Vec::new(), part_table, delivery, limits).await;
    };
    // `read` has the pages that the client reads by RDMA. `sent` has those without registered
    // memory, which the node sends inline.
    let mut read = Vec::new();
    let mut blocks = Vec::new();
    let mut sent = Vec::new();
    let mut is_read = Vec::new();
    for mut page in pages {
        let block = block_for_read(&mut page, part_table, &devices.memory);
        is_read.push(block.is_some());
        if block.is_some() { &mut read } else { &mut sent }.push(page);
        blocks.extend(block);
    }
    // Both at once. They share the connection, but one waits for the device and one for the stream.
    let read = request_pages(connection, read, blocks, part_table, Delivery::Rdma(channels), limits);
    let sent = request_pages(connection, sent, Vec::new(), part_table, Delivery::Inline, limits);
    let ((read, read_hedged), (sent, sent_hedged)) = futures::join!(read, sent);
    let mut read = read.into_iter();
    let mut sent = sent.into_iter();
    let ends = is_read.into_iter().filter_map(|is_read| if is_read { read.next() } else { sent.next() }).collect();
    (ends, read_hedged || sent_hedged)
}

/// Sends one Get and waits for its pages. `blocks` has memory for each page of an RDMA read, and is
/// empty otherwise.
async fn request_pages(
    connection: &Arc<Connection>,
    pages: Vec<PageRequest>,
    blocks: Vec<SharedBlock>,
    part_table: &[u32],
    delivery: Delivery,
    limits: GetLimits,
) -> (Vec<PageResponse>, bool) {
    if pages.is_empty() {
        return (Vec::new(), false);
    }
    let request = build_request(connection, &pages, part_table, delivery);
    let (mut handler, done) = PagesHandler::new(pages);
    blocks.into_iter().enumerate().for_each(|(index, block)| handler.provide_block(index, block));
    let handler = ResponseHandler::Pages(handler);
    let (mut ends, was_hedged) = connection.get(&request, handler, done, limits.hedge_at, limits.deadline).await;
    for end in &mut ends {
        end.finish_read(limits.deadline).await;
    }
    (ends, was_hedged)
}

/// Verifies bytes outside the buffers and copies them there. A buffer whose own memory was read
/// into needs no copy.
async fn copy_to_buffers(
    connection: &Connection,
    wanted: &[(PageId, Option<&Range<u32>>)],
    pages: Vec<PageResponse>,
    deadline: Instant,
) -> Vec<(DynBuffer, PageResult, Option<PageMeta>)> {
    let mut copied = Vec::with_capacity(pages.len());
    // Copying megabytes without a yield would delay the other tasks of this thread.
    let mut yields = YieldBudget::default();
    for ((id, wanted), PageResponse { mut buffer, result, uncopied, meta, .. }) in wanted.iter().zip(pages) {
        let Some(UncopiedBytes { location, meta, tier, range }) = uncopied else {
            copied.push((buffer, result, meta));
            continue;
        };
        let is_in_time = now() <= deadline + COPY_GRACE;
        let is_valid = match (location, buffer.as_client_buffer().filter(|own| own.is_detached())) {
            (StoredAt::ClientMemory(block), Some(own)) => {
                let is_valid = is_in_time.then(|| meta.verify(id, &block).is_ok());
                // In every case: the buffer is the caller's, hit or not.
                own.restore_block(block);
                is_valid
            }
            (location, _) => {
                let copy = || copy_verified(id, &meta, &range, location.bytes(), *wanted, buffer.bytes());
                is_in_time.then(copy)
            }
        };
        let result = match is_valid {
            None => PageResult::Missed,
            Some(true) => PageResult::Hit(tier, meta.generation),
            Some(false) => {
                connection.report_corrupt(id);
                PageResult::Corrupt
            }
        };
        copied.push((buffer, result, Some(meta)));
        yields.spend(range.len()).await;
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::NamespaceId;
    use larder_wire::TierCode;

    #[test]
    fn ranges_from_two_puts_of_a_page_are_misses() {
        let end = |key: u8, range, result| {
            let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([key; 32]) };
            (IndexedPage { index: 0, id, range, buffer: Box::new(Vec::<u8>::new()) }, result, None)
        };
        let hit = |generation| PageResult::Hit(TierCode::L2, generation);
        let ends = [
            end(1, Some(0..1), hit(7)),
            end(1, Some(1..2), hit(7)),
            end(1, Some(2..3), PageResult::Missed),
            end(2, Some(0..1), hit(7)),
            end(2, Some(1..2), hit(8)),
            end(3, None, hit(1)),
            end(3, None, hit(2)),
        ];
        assert_eq!(pages_of_mixed_puts(&ends).iter().map(|id| id.key.0[0]).collect::<Vec<u8>>(), [2]);
    }
}
