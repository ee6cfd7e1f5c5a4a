//! Reading pages, and bytes of pages: into callers' memory, or where they lie.

use crate::Transport;
use crate::buffer::{DynBuffer, downcast};
use crate::client::{Client, Namespace, Tier, tier};
use crate::clock::now;
use crate::link::Live;
use crate::memory::Buffer;
use crate::sink::{Found, Got, Lying, PageEnd, PageSink, Sink, Wanted};
use crate::stats::count;
use crate::view::{Later, PageView, ViewBytes, copy_checked};
use futures::future::join_all;
use larder_format::{PageId, PageKey, whole_chunks};
use larder_share::{Block, Memory};
use larder_wire::{Delivery, PageRange, Request, VERSION_OF_RANGES};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long after its deadline a get still checks and copies pages that are there.
const COPY_GRACE: Duration = Duration::from_secs(1);
/// Pages asked for in one Get.
const GET_PAGES_MAX: usize = 1024;

impl Client {
    /// Reads whole pages, each into its own buffer of exactly the page's size. The answer has the buffers in the order of
    /// the request, with where the page came from, or `None` for a miss (the buffer then holds nothing of use).
    pub async fn get<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        self.read(pages.into_iter().map(|(key, buffer)| (key, None, buffer)).collect(), deadline).await
    }

    /// Like [`Client::get`], but reads only these bytes of each page, into a buffer of just that length:
    /// [`PageGeometry::part_range`] says where a part lies. What is empty, or not all in a page, is a miss.
    ///
    /// Nodes send the chunks that a range touches (see [`CHUNK_BYTES`]), so ranges of whole chunks, and parts, cost nothing
    /// beside their bytes.
    pub async fn get_ranges<B: AsMut<[u8]> + Send + 'static>(
        &self,
        ranges: Vec<(PageKey, Range<u32>, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        self.read(ranges.into_iter().map(|(key, bytes, buffer)| (key, Some(bytes), buffer)).collect(), deadline).await
    }

    /// Reads pages, or bytes of them.
    async fn read<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, Option<Range<u32>>, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        let keys: Vec<PageKey> = pages.iter().map(|(key, ..)| *key).collect();
        let ranges: Vec<Option<Range<u32>>> = pages.iter().map(|(_, bytes, _)| bytes.clone()).collect();
        let mut buffers: Vec<Option<(B, Option<Tier>)>> = pages.into_iter().map(|(.., b)| Some((b, None))).collect();
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
                    let wanted = indices.iter().map(|&index| {
                        let (buffer, _) = buffers[index].take().expect("each index is in one batch");
                        let id = PageId { namespace: namespace.id, key: keys[index] };
                        Wanted { id, bytes: ranges[index].clone(), buffer: Box::new(buffer) }
                    });
                    let wanted: Vec<Wanted> = wanted.collect();
                    let (keys, ranges, part_table) = (&keys, &ranges, &part_table);
                    async move {
                        let pages = get_from(&node, wanted, part_table, deadline).await;
                        let ids = indices.iter().map(|&index| PageId { namespace: namespace.id, key: keys[index] });
                        let asked: Vec<_> = ids.zip(indices.iter().map(|&index| ranges[index].as_ref())).collect();
                        let copied = copy_from(&node, &asked, pages, deadline).await;
                        (indices, copied)
                    }
                });
            let gets: Vec<_> = gets.collect();
            for (indices, pages) in join_all(gets).await {
                for (index, (buffer, got)) in indices.into_iter().zip(pages) {
                    buffers[index] = Some((downcast(buffer), self.note(got)));
                }
            }
        }
        let answer: Vec<_> = buffers.into_iter().map(|b| b.expect("every batch hands its buffers back")).collect();
        self.count_gets(answer.iter().filter(|(_, tier)| tier.is_some()).count(), answer.len());
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
                    let pages = get_from(&node, wanted, part_table, deadline).await;
                    (node, indices, pages)
                }
            });
        for (node, indices, pages) in join_all(gets).await {
            for (index, PageEnd { buffer, got, found, .. }) in indices.into_iter().zip(pages) {
                let id = PageId { namespace, key: keys[index] };
                let (bytes, got) = match found {
                    Some(_) if now() > deadline + COPY_GRACE => (None, Got::Missed),
                    Some(Found { lying, meta, tier, .. }) if meta.verify(&id, lying.bytes()).is_ok() => {
                        (ViewBytes::of(lying), Got::Had(tier))
                    }
                    Some(_) => {
                        node.suspect(&id);
                        (None, Got::Corrupt)
                    }
                    None => (Some(ViewBytes::Copied(downcast::<Later>(buffer).bytes)), got),
                };
                views[index] = self.note(got).zip(bytes).map(|(tier, bytes)| PageView { bytes, tier });
                tokio::task::yield_now().await;
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
            Got::Had(code) => tier(code),
            Got::Missed => None,
            Got::Corrupt => {
                count(&self.inner.counters.corrupt, 1);
                None
            }
        }
    }
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

/// Pages, or bytes of pages, of one node. Always hands every buffer back.
async fn get_from(node: &Arc<Live>, wanted: Vec<Wanted>, part_table: &[u32], deadline: Instant) -> Vec<PageEnd> {
    let Some((lines, devices)) = node.lines.for_reading() else {
        let by = if node.transport() == Transport::Shm { Delivery::InPlace } else { Delivery::Sent };
        return ask(node, wanted, Vec::new(), part_table, by, deadline).await;
    };
    // Those for which there is memory that devices know are read; the others are sent.
    let (mut read, mut blocks, mut sent, mut is_read) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for mut wanted in wanted {
        let block = block_for(&mut wanted, part_table, &devices.memory);
        is_read.push(block.is_some());
        if block.is_some() { &mut read } else { &mut sent }.push(wanted);
        blocks.extend(block);
    }
    let read = ask(node, read, blocks, part_table, Delivery::Read(lines), deadline);
    let (read, sent) = futures::join!(read, ask(node, sent, Vec::new(), part_table, Delivery::Sent, deadline));
    let (mut read, mut sent) = (read.into_iter(), sent.into_iter());
    is_read.into_iter().filter_map(|is_read| if is_read { read.next() } else { sent.next() }).collect()
}

/// One Get, with a block for each page if they are to be read by RDMA.
async fn ask(
    node: &Arc<Live>,
    wanted: Vec<Wanted>,
    blocks: Vec<Block>,
    part_table: &[u32],
    by: Delivery,
    deadline: Instant,
) -> Vec<PageEnd> {
    if wanted.is_empty() {
        return Vec::new();
    }
    let request = request(node, &wanted, part_table, by);
    let (mut sink, done) = PageSink::new(wanted);
    blocks.into_iter().enumerate().for_each(|(index, block)| sink.provide(index, block));
    let begun = node.begin(node.number(), &request, Sink::Pages(sink), deadline).await;
    let mut ends = node.settle(begun, done, deadline).await;
    for end in &mut ends {
        end.come(deadline).await;
    }
    ends
}

/// Checks what lies elsewhere than in the buffers, and copies it there, unless it is these buffers' own memory.
async fn copy_from(
    node: &Live,
    asked: &[(PageId, Option<&Range<u32>>)],
    pages: Vec<PageEnd>,
    deadline: Instant,
) -> Vec<(DynBuffer, Got)> {
    let mut copied = Vec::with_capacity(pages.len());
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
            Some(true) => Got::Had(tier),
            Some(false) => {
                node.suspect(id);
                Got::Corrupt
            }
        };
        copied.push((buffer, got));
        // Copying takes the processor as long as it takes: others want it too.
        tokio::task::yield_now().await;
    }
    copied
}
