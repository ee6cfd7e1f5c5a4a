//! Where the answers of a request go, and what counts as had at the far end.
//!
//! While a payload is being received, its buffer belongs to the sink, and the sink to the receiving task. Whatever ends a
//! sink (the last answer, a cancelled request, a dead connection), its buffers go back to the caller, and only pages that
//! were checked count as had.

use crate::buffer::DynBuffer;
use larder_format::{Arriving, PageGeometry, PageId, PageKey, PageMeta};
use larder_share::{Block, Held};
use larder_wire::{FollowState, Response, TierCode};
use std::ops::Range;
use std::time::Instant;
use tokio::sync::oneshot;

/// Where answers go.
pub(crate) enum Sink {
    /// One answer.
    Reply(oneshot::Sender<Response>),
    /// Pages of a Get.
    Pages(PageSink),
    /// Parts of a Follow.
    Parts(PartSink),
}

/// How one page of a Get ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Got {
    /// The tier it came from, and the generation of the page: which put it is of.
    Had(TierCode, u64),
    Missed,
    /// The node does not take it on before so many milliseconds are over.
    Busy(u32),
    /// Something came, and it was not the page.
    Corrupt,
}

/// A page that is asked for, or bytes of it, and where they are to go.
pub(crate) struct Wanted {
    pub(crate) id: PageId,
    /// `None`: the whole page.
    pub(crate) bytes: Option<Range<u32>>,
    pub(crate) buffer: DynBuffer,
}

struct PageSlot {
    id: PageId,
    wanted: Option<Range<u32>>,
    end: PageEnd,
}

/// How one page of a Get ended.
pub(crate) struct PageEnd {
    pub(crate) buffer: DynBuffer,
    pub(crate) got: Got,
    /// The bytes lie elsewhere than in the buffer, and are not checked yet; the buffer holds nothing then.
    pub(crate) found: Option<Found>,
    /// Memory to read them into by RDMA.
    block: Option<Block>,
}

impl PageEnd {
    /// The buffer has its own memory back, if no device has got it.
    fn restore(&mut self) {
        if let (Some(block), Some(buffer)) = (self.block.take(), self.buffer.own()) {
            buffer.restore(block);
        }
    }

    /// Waits until `deadline` for bytes that are being read. If they do not come, the page was missed, and the buffer has other
    /// memory than before.
    pub(crate) async fn come(&mut self, deadline: Instant) {
        self.restore();
        self.found = match self.found.take() {
            Some(Found { lying: Lying::Coming(read), meta, tier, bytes }) => {
                let read = tokio::time::timeout_at(deadline.into(), read).await;
                let block = read.ok().and_then(Result::ok);
                block.map(|block| Found { lying: Lying::Here(block), meta, tier, bytes })
            }
            found => found,
        };
        if self.found.is_none()
            && let Some(buffer) = self.buffer.own()
        {
            buffer.replace();
        }
    }
}

/// Where bytes lie that are not in the caller's buffer.
pub(crate) enum Lying {
    /// In the node's memory.
    Held(Held),
    /// In this client's memory.
    Here(Block),
    /// They are being read into it.
    Coming(oneshot::Receiver<Block>),
}

impl Lying {
    /// The bytes, if they are there.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Lying::Held(held) => held,
            Lying::Here(block) => block,
            Lying::Coming(_) => &[],
        }
    }
}

/// Bytes of a page that are not in the caller's buffer.
pub(crate) struct Found {
    pub(crate) lying: Lying,
    pub(crate) meta: PageMeta,
    pub(crate) tier: TierCode,
    /// Which bytes of the page.
    pub(crate) bytes: Range<u32>,
}

/// Where an answer's payload goes: what is before and behind the wanted bytes is only checked.
pub(crate) struct Landing<'a> {
    pub(crate) before: usize,
    pub(crate) memory: &'a mut [u8],
    pub(crate) behind: usize,
    /// Checks all of it.
    pub(crate) arriving: Arriving<'a>,
    pub(crate) is_range: bool,
}

/// Collects the pages of a Get.
pub(crate) struct PageSink {
    slots: Vec<PageSlot>,
    /// Whether the node has begun to answer.
    begun: bool,
    done: Option<oneshot::Sender<Vec<PageEnd>>>,
}

impl PageSink {
    pub(crate) fn new(pages: Vec<Wanted>) -> (Self, oneshot::Receiver<Vec<PageEnd>>) {
        let (done, receiver) = oneshot::channel();
        let slot = |Wanted { id, bytes, buffer }| PageSlot {
            id,
            wanted: bytes,
            end: PageEnd { buffer, got: Got::Missed, found: None, block: None },
        };
        let slots = pages.into_iter().map(slot).collect();
        (Self { slots, begun: false, done: Some(done) }, receiver)
    }

    /// Gives the page of index `index` memory to be read into by RDMA: that of its buffer, or what stands in for it.
    pub(crate) fn provide(&mut self, index: usize, block: Block) {
        self.slots[index].end.block = Some(block);
    }

    /// Whether this page was asked for by RDMA, and is not being read yet.
    pub(crate) fn is_to_be_read(&self, index: u32) -> bool {
        self.slots.get(index as usize).is_some_and(|slot| slot.end.block.is_some())
    }

    /// Memory for the announced bytes of a page, if it is the page that was asked for and has what is wanted of it. Until
    /// [`PageSink::landed`] it counts as missed.
    pub(crate) fn expect<'a>(
        &'a mut self,
        index: u32,
        meta: &'a PageMeta,
        bytes: &Range<u32>,
        payload_bytes: usize,
    ) -> Option<Landing<'a>> {
        let PageSlot { id, wanted, end } = self.slots.get_mut(index as usize)?;
        (end.found, end.got) = (None, Got::Corrupt);
        end.restore();
        let arriving = Arriving::of(meta, bytes)?;
        let is_range = wanted.is_some();
        let wanted = wanted.clone().unwrap_or(0..meta.payload_bytes() as u32);
        let has_all = bytes.start <= wanted.start && wanted.end <= bytes.end;
        let memory = end.buffer.bytes();
        if meta.id != *id || !has_all || bytes.len() != payload_bytes || memory.len() != wanted.len() {
            return None;
        }
        end.got = Got::Missed;
        let (before, behind) = ((wanted.start - bytes.start) as usize, (bytes.end - wanted.end) as usize);
        Some(Landing { before, memory, behind, arriving, is_range })
    }

    /// A page was received into the memory that was expected; `good` says whether its bytes were what was put.
    pub(crate) fn landed(&mut self, index: u32, (tier, generation): (TierCode, u64), good: bool) -> bool {
        let Some(slot) = self.slots.get_mut(index as usize) else { return false };
        slot.end.got = if good { Got::Had(tier, generation) } else { Got::Corrupt };
        good
    }

    /// The announced bytes of a page can be read by RDMA, which `read` begins if they are as many as there is memory for.
    pub(crate) fn open(
        &mut self,
        index: u32,
        (meta, tier, bytes): (PageMeta, TierCode, Range<u32>),
        read: impl FnOnce(Block) -> oneshot::Receiver<Block>,
    ) {
        let Some(PageSlot { end, .. }) = self.slots.get_mut(index as usize) else { return };
        (end.found, end.got) = (None, Got::Missed);
        if let Some(block) = end.block.take_if(|block| block.len() == bytes.len()) {
            end.found = Some(Found { lying: Lying::Coming(read(block)), meta, tier, bytes });
        }
    }

    /// A page lies in the node's memory; `None` if it cannot be reached there.
    pub(crate) fn found(&mut self, index: u32, found: Option<Found>) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        slot.end.got = if found.is_some() { Got::Missed } else { Got::Corrupt };
        slot.end.found = found;
    }

    /// The node does not take on pages now, from this one on.
    pub(crate) fn busy(&mut self, from: u32, retry_after_ms: u32) {
        for slot in self.slots.get_mut(from as usize..).unwrap_or_default() {
            slot.end.found = None;
            slot.end.got = Got::Busy(retry_after_ms);
        }
    }

    /// An answer came.
    pub(crate) fn heard(&mut self) {
        self.begun = true;
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    pub(crate) fn id(&self, index: u32) -> Option<PageId> {
        self.slots.get(index as usize).map(|slot| slot.id)
    }
}

impl Drop for PageSink {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let _ = done.send(self.slots.drain(..).map(|slot| slot.end).collect());
        }
    }
}

/// How a Follow ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FollowResult {
    Sealed,
    Aborted,
    Missed,
    Corrupt,
}

/// Collects the parts of a Follow.
pub(crate) struct PartSink {
    id: PageId,
    geometry: PageGeometry,
    buffer: Option<DynBuffer>,
    crcs: Vec<Option<Vec<u32>>>,
    result: FollowResult,
    done: Option<oneshot::Sender<(DynBuffer, FollowResult)>>,
}

impl PartSink {
    pub(crate) fn new(
        id: PageId,
        geometry: PageGeometry,
        buffer: DynBuffer,
    ) -> (Self, oneshot::Receiver<(DynBuffer, FollowResult)>) {
        let (done, receiver) = oneshot::channel();
        let crcs = vec![None; geometry.part_count()];
        let result = FollowResult::Missed;
        (Self { id, geometry, buffer: Some(buffer), crcs, result, done: Some(done) }, receiver)
    }

    fn range(&self, part: usize) -> Range<usize> {
        self.geometry.part_range(part).map_or(0..0, |range| range.start as usize..range.end as usize)
    }

    /// Memory for an announced part, if there is such a part of that length.
    pub(crate) fn expect(&mut self, part: u32, bytes: usize) -> Option<&mut [u8]> {
        let part = part as usize;
        if part >= self.crcs.len() || self.geometry.part_bytes(part) != bytes {
            self.result = FollowResult::Corrupt;
            return None;
        }
        self.crcs[part] = None;
        let range = self.range(part);
        self.buffer.as_mut()?.bytes().get_mut(range)
    }

    /// A part was received; its CRCs, if its bytes were what they say.
    pub(crate) fn landed(&mut self, part: u32, crcs: Option<Vec<u32>>) -> bool {
        let good = crcs.is_some();
        match crcs {
            Some(crcs) => self.crcs[part as usize] = Some(crcs),
            None => self.result = FollowResult::Corrupt,
        }
        good
    }

    /// The node says how it ended. "Sealed" is believed only if every part is here and the sealed page is the one that was
    /// asked for, made of just these parts.
    pub(crate) fn end(&mut self, state: FollowState, meta: Option<PageMeta>) {
        let complete = meta.is_some_and(|meta| {
            let received = self.crcs.iter().flatten().flatten();
            meta.id == self.id
                && meta.part_bytes == self.geometry.part_table()
                && self.crcs.iter().all(Option::is_some)
                && meta.chunk_crcs.iter().eq(received)
        });
        self.result = match (self.result, state) {
            (FollowResult::Corrupt, _) => FollowResult::Corrupt,
            (_, FollowState::Sealed) if complete => FollowResult::Sealed,
            (_, FollowState::Sealed) => FollowResult::Corrupt,
            (_, FollowState::Aborted) => FollowResult::Aborted,
            (_, FollowState::Miss) => FollowResult::Missed,
        };
    }

    pub(crate) fn key(&self) -> PageKey {
        self.id.key
    }
}

impl Drop for PartSink {
    fn drop(&mut self) {
        if let (Some(done), Some(buffer)) = (self.done.take(), self.buffer.take()) {
            let _ = done.send((buffer, self.result));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{KvDtype, NamespaceId};

    fn id(byte: u8) -> PageId {
        PageId { namespace: NamespaceId([1; 32]), key: PageKey([byte; 32]) }
    }

    fn geometry() -> PageGeometry {
        PageGeometry {
            dtype: KvDtype::F32,
            layers: 2,
            kv_heads: 1,
            head_dim: 4,
            page_tokens: 2,
            layers_per_part: 1,
            head_groups: 1,
        }
    }

    fn page(byte: u8) -> (PageMeta, Vec<u8>) {
        let payload: Vec<u8> = (0..geometry().page_bytes()).map(|i| i as u8 ^ byte).collect();
        (PageMeta::describe(id(byte), PageKey::NONE, 0, geometry().part_table(), &payload), payload)
    }

    fn get(meta: &PageMeta, payload: &[u8]) -> Got {
        get_bytes(meta, payload, &(0..payload.len() as u32), None, payload.len()).0
    }

    /// What a page is worth of which `wanted` was asked for, and `bytes` came.
    fn get_bytes(
        meta: &PageMeta,
        payload: &[u8],
        bytes: &Range<u32>,
        wanted: Option<Range<u32>>,
        buffer: usize,
    ) -> (Got, Vec<u8>) {
        let wanted = Wanted { id: id(7), bytes: wanted, buffer: Box::new(vec![0u8; buffer]) };
        let (mut sink, mut done) = PageSink::new(vec![wanted]);
        let come = payload.get(bytes.start as usize..bytes.end as usize).unwrap_or_default();
        if let Some(Landing { before, memory, behind, mut arriving, .. }) = sink.expect(0, meta, bytes, come.len()) {
            memory.copy_from_slice(&come[before..come.len() - behind]);
            arriving.take(come);
            let good = arriving.finish().is_ok();
            sink.landed(0, (TierCode::L2, meta.generation), good);
        }
        drop(sink);
        let end = done.try_recv().unwrap().remove(0);
        (end.got, crate::buffer::downcast(end.buffer))
    }

    #[test]
    fn a_range_is_had_only_if_all_of_it_came_in_whole_chunks_and_every_byte_checks() {
        let (meta, payload) = page(7);
        // Each part is one chunk of 64 bytes.
        let part = geometry().part_range(0).unwrap().end;
        let got = |bytes: Range<u32>, wanted: Range<u32>| {
            let (got, buffer) = get_bytes(&meta, &payload, &bytes, Some(wanted.clone()), wanted.len());
            assert!(!matches!(got, Got::Had(..)) || buffer == payload[wanted.start as usize..wanted.end as usize]);
            got
        };
        let had = Got::Had(TierCode::L2, meta.generation);
        assert_eq!(got(0..part, 3..9), had);
        assert_eq!(got(part..2 * part, part..2 * part), had);
        assert_eq!(got(0..2 * part, part - 1..part + 1), had, "more than was asked for does no harm");
        assert_eq!(got(0..part, part - 1..part + 1), Got::Corrupt, "not all of it");
        assert_eq!(got(part..2 * part, 3..9), Got::Corrupt, "other chunks");
        assert_eq!(got(3..9, 3..9), Got::Corrupt, "not whole chunks");
        assert_eq!(get_bytes(&meta, &payload, &(0..part), Some(3..9), 7).0, Got::Corrupt, "another length");
        let mut damaged = payload.clone();
        damaged[1] ^= 1;
        assert_eq!(
            get_bytes(&meta, &damaged, &(0..part), Some(3..9), 6).0,
            Got::Corrupt,
            "beside the range, in its chunk"
        );
    }

    #[test]
    fn a_page_is_had_only_if_it_is_the_page_and_every_byte_checks() {
        let (meta, mut payload) = page(7);
        assert_eq!(get(&meta, &payload), Got::Had(TierCode::L2, meta.generation));
        payload[5] ^= 1;
        assert_eq!(get(&meta, &payload), Got::Corrupt);
        let (other, payload) = page(8);
        assert_eq!(get(&other, &payload), Got::Corrupt);
    }

    fn followed(parts: &[(u32, u8)], state: FollowState, meta: Option<PageMeta>) -> FollowResult {
        let (mut sink, mut done) = PartSink::new(id(7), geometry(), Box::new(vec![0u8; geometry().page_bytes()]));
        for &(part, from) in parts {
            let (source, payload) = page(from);
            let bytes = &payload[source.part_range(part as usize).unwrap()];
            sink.expect(part, bytes.len()).unwrap().copy_from_slice(bytes);
            sink.landed(part, source.part_crcs(part as usize).map(<[u32]>::to_vec));
        }
        sink.end(state, meta);
        drop(sink);
        done.try_recv().unwrap().1
    }

    #[test]
    fn sealed_is_believed_only_of_all_the_parts_of_that_very_page() {
        let (meta, _) = page(7);
        let sealed = |parts: &[(u32, u8)]| followed(parts, FollowState::Sealed, Some(meta.clone()));
        assert_eq!(sealed(&[(1, 7), (0, 7)]), FollowResult::Sealed);
        assert_eq!(sealed(&[(0, 7)]), FollowResult::Corrupt, "a part is missing");
        assert_eq!(sealed(&[(0, 7), (1, 9)]), FollowResult::Corrupt, "a part of another put");
        assert_eq!(followed(&[(0, 7), (1, 7)], FollowState::Sealed, None), FollowResult::Corrupt);
        assert_eq!(followed(&[(0, 7)], FollowState::Aborted, None), FollowResult::Aborted);
    }
}
