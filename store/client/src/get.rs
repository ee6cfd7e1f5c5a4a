//! Reading pages, and bytes of pages: into callers' memory, or where they lie.

use crate::Transport;
use crate::buffer::{DynBuffer, downcast};
use crate::client::{Client, Namespace, Tier, tier};
use crate::clock::now;
use crate::link::Live;
use crate::memory::Buffer;
use crate::put::hint;
use crate::sink::{Found, Got, Lying, PageEnd, PageSink, Sink, Wanted};
use crate::stats::{Counters, count};
use crate::view::{Later, PageView, ViewBytes, copy_checked};
use futures::future::join_all;
use larder_format::{PageId, PageKey, whole_chunks};
use larder_share::{Block, Memory};
use larder_wire::{Delivery, PageRange, Request, Turn, VERSION_OF_RANGES};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long after its deadline a get still checks and copies pages that are there.
const COPY_GRACE: Duration = Duration::from_secs(1);
/// Pages asked for in one Get.
const GET_PAGES_MAX: usize = 1024;

/// What a get may do beside waiting for its deadline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// A node that has not begun to answer after so long is waited for no more: its pages are misses. They come back with
    /// their buffers at once, for nothing is being received into these. Default: only at the deadline.
    pub hedge_after: Option<Duration>,
    /// How often pages that a node was too busy for are asked for again, before the deadline: each time after as long as the
    /// node says, give or take half of it. Default 0.
    pub busy_retries: u32,
}

/// How a page was had, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// It is in the buffer and checked.
    Had(Tier),
    /// It is not there, or cannot be had in time.
    Miss,
    /// The node has too much under way to say. To be taken for a miss by who does not want to try again.
    Busy {
        /// When it is worth trying again, as the node says.
        retry_after: Duration,
    },
}

impl Fetched {
    /// Where the page came from, if it was had.
    pub fn tier(self) -> Option<Tier> {
        match self {
            Fetched::Had(tier) => Some(tier),
            Fetched::Miss | Fetched::Busy { .. } => None,
        }
    }
}

/// A page of a get, or bytes of it, by its place in there.
struct Ask {
    index: usize,
    id: PageId,
    bytes: Option<Range<u32>>,
    buffer: DynBuffer,
}

impl Client {
    /// Reads whole pages, each into its own buffer of exactly the page's size. The answer has the buffers in the order of
    /// the request, with where the page came from, or `None` for a miss (the buffer then holds nothing of use).
    pub async fn get<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        let got = self.get_with(pages, GetOptions::default(), deadline).await;
        got.into_iter().map(|(buffer, fetched)| (buffer, fetched.tier())).collect()
    }

    /// Like [`Client::get`], with options; a miss because a node is too busy says so.
    pub async fn get_with<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        options: GetOptions,
        deadline: Instant,
    ) -> Vec<(B, Fetched)> {
        self.read(pages.into_iter().map(|(key, buffer)| (key, None, buffer)).collect(), options, deadline).await
    }

    /// Like [`Client::get`], but reads only these bytes of each page, into a buffer of just that length:
    /// [`PageGeometry::part_range`] says where a part lies. What is empty, or not all in a page, is a miss.
    ///
    /// Ranges of one page that are asked for together are of one put of it, or misses.
    ///
    /// Nodes send the chunks that a range touches (see [`CHUNK_BYTES`]), so ranges of whole chunks, and parts, cost nothing
    /// beside their bytes.
    pub async fn get_ranges<B: AsMut<[u8]> + Send + 'static>(
        &self,
        ranges: Vec<(PageKey, Range<u32>, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        let ranges = ranges.into_iter().map(|(key, bytes, buffer)| (key, Some(bytes), buffer)).collect();
        let got = self.read(ranges, GetOptions::default(), deadline).await;
        got.into_iter().map(|(buffer, fetched)| (buffer, fetched.tier())).collect()
    }

    /// Reads pages, or bytes of them.
    async fn read<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, Option<Range<u32>>, B)>,
        options: GetOptions,
        deadline: Instant,
    ) -> Vec<(B, Fetched)> {
        let keys: Vec<PageKey> = pages.iter().map(|(key, ..)| *key).collect();
        let ranges: Vec<Option<Range<u32>>> = pages.iter().map(|(_, bytes, _)| bytes.clone()).collect();
        let mut buffers: Vec<Option<(B, Fetched)>> =
            pages.into_iter().map(|(.., b)| Some((b, Fetched::Miss))).collect();
        let nodes = self.nodes();
        nodes.or_pause().await;
        if let Some(namespace) = &self.inner.namespace {
            let page_bytes = namespace.geometry.page_bytes();
            let lengths = ranges.iter().map(|range| range.as_ref().map_or(page_bytes, |r| r.len().min(page_bytes)));
            let bytes_each = lengths.sum::<usize>() / keys.len().max(1);
            let part_table = namespace.geometry.part_table();
            let in_page =
                |index: &usize| ranges[*index].as_ref().is_none_or(|r| whole_chunks(&part_table, r).is_some());
            let gets =
                Self::batches(&nodes, &keys, GET_PAGES_MAX, bytes_each).into_iter().map(|(node, mut indices)| {
                    indices.retain(in_page);
                    let asks = indices.into_iter().map(|index| {
                        let (buffer, _) = buffers[index].take().expect("each index is in one batch");
                        let id = PageId { namespace: namespace.id, key: keys[index] };
                        Ask { index, id, bytes: ranges[index].clone(), buffer: Box::new(buffer) }
                    });
                    let (asks, part_table): (Vec<Ask>, _) = (asks.collect(), &part_table);
                    async move { get_at(&node, asks, part_table, options, &self.inner.counters, deadline).await }
                });
            let gets: Vec<_> = gets.collect();
            let ends: Vec<(Ask, Got)> = join_all(gets).await.into_iter().flatten().collect();
            let mixed = mixed(&ends);
            for (Ask { index, id, buffer, .. }, got) in ends {
                let got = if mixed.contains(&id) { Got::Missed } else { got };
                let fetched = match (got, self.note(got)) {
                    (Got::Busy(ms), _) => Fetched::Busy { retry_after: hint(ms) },
                    (_, Some(tier)) => Fetched::Had(tier),
                    (_, None) => Fetched::Miss,
                };
                buffers[index] = Some((downcast(buffer), fetched));
            }
        }
        let answer: Vec<_> = buffers.into_iter().map(|b| b.expect("every batch hands its buffers back")).collect();
        self.count_gets(answer.iter().filter(|(_, fetched)| fetched.tier().is_some()).count(), answer.len());
        let busy = answer.iter().filter(|(_, fetched)| matches!(fetched, Fetched::Busy { .. })).count();
        count(&self.inner.counters.gets_busy, busy);
        answer
    }

    /// Reads whole pages where they lie: in the memory of nodes on this machine, which keep them there until the views are
    /// dropped; others are copied. `None` is a miss.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub async fn view(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<PageView>> {
        let Namespace { id: namespace, geometry } = *self.namespace();
        let part_table = geometry.part_table();
        let mut views: Vec<Option<PageView>> = keys.iter().map(|_| None).collect();
        let nodes = self.nodes();
        nodes.or_pause().await;
        let gets =
            Self::batches(&nodes, keys, GET_PAGES_MAX, geometry.page_bytes()).into_iter().map(|(node, indices)| {
                let buffer = || Box::new(Later { length: geometry.page_bytes(), bytes: Vec::new() }) as DynBuffer;
                let id = |index: usize| PageId { namespace, key: keys[index] };
                let wanted =
                    indices.iter().map(|&index| Wanted { id: id(index), bytes: None, buffer: buffer() }).collect();
                let part_table = &part_table;
                async move {
                    let (pages, _) = get_from(&node, wanted, part_table, GetOptions::default(), deadline).await;
                    (node, indices, pages)
                }
            });
        for (node, indices, pages) in join_all(gets).await {
            let mut turn = Turn::default();
            for (index, PageEnd { buffer, got, found, .. }) in indices.into_iter().zip(pages) {
                let id = PageId { namespace, key: keys[index] };
                let (bytes, got) = match found {
                    Some(_) if now() > deadline + COPY_GRACE => (None, Got::Missed),
                    Some(Found { lying, meta, tier, .. }) if meta.verify(&id, lying.bytes()).is_ok() => {
                        (ViewBytes::of(lying), Got::Had(tier, meta.generation))
                    }
                    Some(_) => {
                        node.suspect(&id);
                        (None, Got::Corrupt)
                    }
                    None => (Some(ViewBytes::Copied(downcast::<Later>(buffer).bytes)), got),
                };
                views[index] = self.note(got).zip(bytes).map(|(tier, bytes)| PageView { bytes, tier });
                turn.moved(geometry.page_bytes()).await;
            }
        }
        self.count_gets(views.iter().filter(|view| view.is_some()).count(), views.len());
        views
    }

    fn count_gets(&self, hits: usize, all: usize) {
        count(&self.inner.counters.get_hits, hits);
        count(&self.inner.counters.get_misses, all - hits);
    }

    fn note(&self, got: Got) -> Option<Tier> {
        match got {
            Got::Had(code, _) => tier(code),
            Got::Missed | Got::Busy(_) => None,
            Got::Corrupt => {
                count(&self.inner.counters.corrupt, 1);
                None
            }
        }
    }
}

/// Pages of which several ranges were had, and not all of the same put: one that was forgotten between two of them, and put anew,
/// perhaps with other bytes.
fn mixed(ends: &[(Ask, Got)]) -> BTreeSet<PageId> {
    let mut mixed = BTreeSet::new();
    let mut seen = BTreeMap::new();
    for (ask, got) in ends.iter().filter(|(ask, _)| ask.bytes.is_some()) {
        if let Got::Had(_, generation) = *got
            && *seen.entry(ask.id).or_insert(generation) != generation
        {
            mixed.insert(ask.id);
        }
    }
    mixed
}

/// Until when an answer must have begun, and until when it must be there.
#[derive(Clone, Copy)]
struct Patience {
    hedge_at: Instant,
    deadline: Instant,
}

/// What to ask a node for. One that does not know of ranges is asked for the pages.
fn request(node: &Live, wanted: &[Wanted], part_table: &[u32], by: Delivery) -> Request {
    let range = |Wanted { id, bytes, .. }: &Wanted| {
        let bytes = whole_chunks(part_table, bytes.as_ref()?)?;
        Some(PageRange { key: id.key, bytes })
    };
    let ranges = (node.version >= VERSION_OF_RANGES).then(|| wanted.iter().map(range).collect()).flatten();
    match ranges {
        Some(ranges) => Request::GetRanges { ranges, by },
        None => Request::Get { keys: wanted.iter().map(|wanted| wanted.id.key).collect(), by },
    }
}

/// Gets pages at one node, and again those that it is too busy for, as often as the options say.
async fn get_at(
    node: &Arc<Live>,
    mut asks: Vec<Ask>,
    part_table: &[u32],
    options: GetOptions,
    counters: &Counters,
    deadline: Instant,
) -> Vec<(Ask, Got)> {
    let (mut ends, mut retries) = (Vec::with_capacity(asks.len()), options.busy_retries);
    loop {
        let names: Vec<_> = asks.iter().map(|ask| (ask.index, ask.id, ask.bytes.clone())).collect();
        let wanted = asks.into_iter().map(|Ask { id, bytes, buffer, .. }| Wanted { id, bytes, buffer }).collect();
        let (pages, hedged) = get_from(node, wanted, part_table, options, deadline).await;
        count(&counters.gets_hedged, hedged.into());
        let asked: Vec<_> = names.iter().map(|(_, id, bytes)| (*id, bytes.as_ref())).collect();
        let copied = copy_from(node, &asked, pages, deadline).await;
        let ended = names.into_iter().zip(copied);
        ends.extend(ended.map(|((index, id, bytes), (buffer, got))| (Ask { index, id, bytes, buffer }, got)));
        let busy = |end: &(Ask, Got)| if let Got::Busy(ms) = end.1 { Some(ms) } else { None };
        let longest = ends.iter().filter_map(busy).max().map(|ms| node.jittered(hint(ms)));
        let Some(pause) = longest.filter(|&pause| retries > 0 && now() + pause < deadline) else { return ends };
        retries -= 1;
        tokio::time::sleep(pause).await;
        asks = ends.extract_if(.., |end| busy(end).is_some()).map(|(ask, _)| ask).collect();
    }
}

/// Memory to read a page, or bytes of it, into by RDMA: that of its buffer if it is this client's and is to have all of it, else
/// what the client has to spare.
fn block_for(wanted: &mut Wanted, part_table: &[u32], memory: &Arc<Memory>) -> Option<Block> {
    let page_bytes: usize = part_table.iter().map(|&bytes| bytes as usize).sum();
    match &wanted.bytes {
        Some(bytes) => memory.allocate(whole_chunks(part_table, bytes)?.len()),
        None => {
            let own = wanted.buffer.own().filter(|own| own.len() == page_bytes).and_then(Buffer::take);
            own.or_else(|| memory.allocate(page_bytes))
        }
    }
}

/// Pages, or bytes of pages, of one owner. Always hands every buffer back; and says whether it was given up before it had begun
/// to answer, so that another owner could be asked, if there was one.
async fn get_from(
    node: &Arc<Live>,
    wanted: Vec<Wanted>,
    part_table: &[u32],
    options: GetOptions,
    deadline: Instant,
) -> (Vec<PageEnd>, bool) {
    let by = Patience { hedge_at: options.hedge_after.map_or(deadline, |after| deadline.min(now() + after)), deadline };
    let Some((lines, devices)) = node.lines.for_reading() else {
        let way = if node.transport() == Transport::Shm { Delivery::InPlace } else { Delivery::Sent };
        return ask(node, wanted, Vec::new(), part_table, way, by).await;
    };
    // Those for which there is memory that devices know are read; the others are sent.
    let (mut read, mut blocks, mut sent, mut is_read) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for mut wanted in wanted {
        let block = block_for(&mut wanted, part_table, &devices.memory);
        is_read.push(block.is_some());
        if block.is_some() { &mut read } else { &mut sent }.push(wanted);
        blocks.extend(block);
    }
    let read = ask(node, read, blocks, part_table, Delivery::Read(lines), by);
    let sent = ask(node, sent, Vec::new(), part_table, Delivery::Sent, by);
    let ((read, read_hedged), (sent, sent_hedged)) = futures::join!(read, sent);
    let (mut read, mut sent) = (read.into_iter(), sent.into_iter());
    let ends = is_read.into_iter().filter_map(|is_read| if is_read { read.next() } else { sent.next() }).collect();
    (ends, read_hedged || sent_hedged)
}

/// One Get, with a block for each page if they are to be read by RDMA.
async fn ask(
    node: &Arc<Live>,
    wanted: Vec<Wanted>,
    blocks: Vec<Block>,
    part_table: &[u32],
    way: Delivery,
    by: Patience,
) -> (Vec<PageEnd>, bool) {
    if wanted.is_empty() {
        return (Vec::new(), false);
    }
    let request = request(node, &wanted, part_table, way);
    let (mut sink, done) = PageSink::new(wanted);
    blocks.into_iter().enumerate().for_each(|(index, block)| sink.provide(index, block));
    let (mut ends, hedged) = node.get(&request, Sink::Pages(sink), done, by.hedge_at, by.deadline).await;
    for end in &mut ends {
        end.come(by.deadline).await;
    }
    (ends, hedged)
}

/// Checks what lies elsewhere than in the buffers, and copies it there, unless it is these buffers' own memory.
async fn copy_from(
    node: &Live,
    asked: &[(PageId, Option<&Range<u32>>)],
    pages: Vec<PageEnd>,
    deadline: Instant,
) -> Vec<(DynBuffer, Got)> {
    let (mut copied, mut turn) = (Vec::with_capacity(pages.len()), Turn::default());
    for ((id, wanted), PageEnd { mut buffer, got, found, .. }) in asked.iter().zip(pages) {
        let Some(Found { lying, meta, tier, bytes }) = found else {
            copied.push((buffer, got));
            continue;
        };
        let in_time = now() <= deadline + COPY_GRACE;
        let good = match (lying, buffer.own().filter(|own| own.is_away())) {
            (Lying::Here(block), Some(own)) => {
                let good = in_time.then(|| meta.verify(id, &block).is_ok());
                own.restore(block);
                good
            }
            (lying, _) => in_time.then(|| copy_checked(id, &meta, (&bytes, lying.bytes()), *wanted, buffer.bytes())),
        };
        let got = match good {
            None => Got::Missed,
            Some(true) => Got::Had(tier, meta.generation),
            Some(false) => {
                node.suspect(id);
                Got::Corrupt
            }
        };
        copied.push((buffer, got));
        turn.moved(bytes.len()).await;
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::NamespaceId;
    use larder_wire::TierCode;

    #[test]
    fn ranges_of_two_puts_of_a_page_are_not_had_together() {
        let end = |key: u8, bytes, got| {
            let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([key; 32]) };
            (Ask { index: 0, id, bytes, buffer: Box::new(Vec::<u8>::new()) }, got)
        };
        let had = |generation| Got::Had(TierCode::L2, generation);
        let ends = [
            end(1, Some(0..1), had(7)),
            end(1, Some(1..2), had(7)),
            end(1, Some(2..3), Got::Missed),
            end(2, Some(0..1), had(7)),
            end(2, Some(1..2), had(8)),
            end(3, None, had(1)),
            end(3, None, had(2)),
        ];
        assert_eq!(mixed(&ends).iter().map(|id| id.key.0[0]).collect::<Vec<u8>>(), [2]);
    }
}
