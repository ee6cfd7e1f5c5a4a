//! Handlers of the responses to one request, and the checks at the client's end.
//!
//! Invariants:
//! - While a payload is being received, its buffer belongs to the handler, and the handler to the
//!   receiving task.
//! - However a handler ends, its buffers return to the caller: after the last response, on
//!   cancellation, and when the connection ends.
//! - Only a page whose identity and checksums match counts as a hit.

use crate::buffer::DynBuffer;
use crate::stats::PartsReceived;
use larder_format::{PageGeometry, PageId, PageKey, PageMeta, PayloadVerifier};
use larder_memory::share::{HeldBytes, SharedBlock};
use larder_wire::{FollowState, Response, TierCode};
use std::ops::Range;
use std::time::Instant;
use tokio::sync::oneshot;

/// Destination of the responses to one request. Dropping it tells the caller that no further
/// response comes.
pub(crate) enum ResponseHandler {
    Reply(oneshot::Sender<Response>),
    Pages(PagesHandler),
    Parts(PartsHandler),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageResult {
    /// Tier that served the page, and the page's generation. Each put of a key has another
    /// generation.
    Hit(TierCode, u64),
    Missed,
    /// The node refuses the page for now. The number is its retry hint in milliseconds, 0 for none.
    Busy(u32),
    Corrupt,
}

/// A page of a Get with the buffer that receives it.
pub(crate) struct PageRequest {
    pub(crate) id: PageId,
    /// Bytes of the page to read, or `None` for the whole page.
    pub(crate) range: Option<Range<u32>>,
    pub(crate) buffer: DynBuffer,
}

struct PageSlot {
    id: PageId,
    range: Option<Range<u32>>,
    response: PageResponse,
}

pub(crate) struct PageResponse {
    pub(crate) buffer: DynBuffer,
    pub(crate) result: PageResult,
    /// Bytes outside the buffer, not verified yet. The buffer has no content then.
    pub(crate) uncopied: Option<UncopiedBytes>,
    /// Description of the page whose verified bytes are in the buffer.
    pub(crate) meta: Option<PageMeta>,
    block: Option<SharedBlock>,
}

impl PageResponse {
    /// Returns the buffer's own memory to it, unless a device still owns that memory.
    fn restore_block(&mut self) {
        if let (Some(block), Some(buffer)) = (self.block.take(), self.buffer.as_client_buffer()) {
            buffer.restore_block(block);
        }
    }

    /// Waits until `deadline` for an RDMA read. If it does not finish, the page is a miss, and its
    /// buffer gets other memory: the device may still write to the old one.
    pub(crate) async fn finish_read(&mut self, deadline: Instant) {
        self.restore_block();
        self.uncopied = match self.uncopied.take() {
            Some(UncopiedBytes { location: StoredAt::Reading(read), meta, tier, range }) => {
                let read = tokio::time::timeout_at(deadline.into(), read).await;
                let block = read.ok().and_then(Result::ok);
                block.map(|block| UncopiedBytes { location: StoredAt::ClientMemory(block), meta, tier, range })
            }
            uncopied => uncopied,
        };
        if self.uncopied.is_none()
            && let Some(buffer) = self.buffer.as_client_buffer()
        {
            buffer.replace_block();
        }
    }
}

/// Location of bytes that are not in the caller's buffer.
pub(crate) enum StoredAt {
    /// The node's arena, mapped by this client. The node holds the bytes until this is dropped.
    Arena(HeldBytes),
    /// Shared memory of this client, after an RDMA read.
    ClientMemory(SharedBlock),
    /// Shared memory of this client that an RDMA read is filling.
    Reading(oneshot::Receiver<SharedBlock>),
}

impl StoredAt {
    /// The bytes, or an empty slice while they are being read.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            StoredAt::Arena(held) => held,
            StoredAt::ClientMemory(block) => block,
            StoredAt::Reading(_) => &[],
        }
    }
}

/// Bytes of a page outside the caller's buffer, not verified yet. The caller verifies them, so the
/// connection can read on meanwhile.
pub(crate) struct UncopiedBytes {
    pub(crate) location: StoredAt,
    pub(crate) meta: PageMeta,
    pub(crate) tier: TierCode,
    /// The part of the page that these bytes are.
    pub(crate) range: Range<u32>,
}

/// Destination of a payload. The node sends whole chunks, so there may be bytes before and after
/// the wanted ones. Those are only checked.
pub(super) struct PayloadTarget<'a> {
    pub(super) before: usize,
    pub(super) memory: &'a mut [u8],
    pub(super) after: usize,
    pub(super) verifier: PayloadVerifier<'a>,
    pub(super) is_range: bool,
}

pub(crate) struct PagesHandler {
    slots: Vec<PageSlot>,
    /// The node has sent at least one response.
    has_begun: bool,
    done: Option<oneshot::Sender<Vec<PageResponse>>>,
}

impl PagesHandler {
    /// Returns the handler, and the channel that gets all buffers back when the handler is dropped.
    pub(crate) fn new(pages: Vec<PageRequest>) -> (Self, oneshot::Receiver<Vec<PageResponse>>) {
        let (done, receiver) = oneshot::channel();
        let slot = |PageRequest { id, range, buffer }| PageSlot {
            id,
            range,
            response: PageResponse { buffer, result: PageResult::Missed, uncopied: None, meta: None, block: None },
        };
        let slots = pages.into_iter().map(slot).collect();
        (Self { slots, has_begun: false, done: Some(done) }, receiver)
    }

    /// Provides memory for an RDMA read of page `index`: its buffer's own, or a substitute.
    pub(crate) fn provide_block(&mut self, index: usize, block: SharedBlock) {
        // The index is ours, not the node's, so it is in bounds.
        self.slots[index].response.block = Some(block);
    }

    /// Returns `true` if page `index` was requested by RDMA and its read has not begun.
    pub(super) fn expects_grant(&self, index: u32) -> bool {
        self.slots.get(index as usize).is_some_and(|slot| slot.response.block.is_some())
    }

    /// Prepares the receiving of a payload with bytes `sent` of a page. Returns `None` if this is
    /// not the requested page, or if wanted bytes are missing. Until
    /// [`PagesHandler::finish_payload`] the page counts as missed.
    pub(super) fn begin_payload<'a>(
        &'a mut self,
        index: u32,
        meta: &'a PageMeta,
        sent: &Range<u32>,
        payload_bytes: usize,
    ) -> Option<PayloadTarget<'a>> {
        let PageSlot { id, range, response } = self.slots.get_mut(index as usize)?;
        response.uncopied = None;
        response.result = PageResult::Corrupt;
        response.restore_block();
        let verifier = PayloadVerifier::of(meta, sent)?;
        let is_range = range.is_some();
        let wanted = range.clone().unwrap_or(0..meta.payload_bytes() as u32);
        let has_all = sent.start <= wanted.start && wanted.end <= sent.end;
        let memory = response.buffer.bytes();
        if meta.id != *id || !has_all || sent.len() != payload_bytes || memory.len() != wanted.len() {
            return None;
        }
        // Nothing is wrong so far, but a connection that ends now must not leave a hit.
        response.result = PageResult::Missed;
        let before = (wanted.start - sent.start) as usize;
        let after = (sent.end - wanted.end) as usize;
        Some(PayloadTarget { before, memory, after, verifier, is_range })
    }

    /// Records the end of a payload. `is_valid` tells if all checksums matched.
    pub(super) fn finish_payload(&mut self, index: u32, tier: TierCode, generation: u64, is_valid: bool) -> bool {
        let Some(slot) = self.slots.get_mut(index as usize) else { return false };
        slot.response.result = if is_valid { PageResult::Hit(tier, generation) } else { PageResult::Corrupt };
        is_valid
    }

    /// Keeps the description of a page whose bytes were verified on arrival, for the caller.
    pub(super) fn keep_meta(&mut self, index: u32, meta: PageMeta) {
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.response.meta = Some(meta);
        }
    }

    /// Records a grant for an RDMA read of `uncopied` bytes. `read` begins the read, if the
    /// provided memory has exactly the announced length.
    pub(super) fn begin_read(
        &mut self,
        index: u32,
        meta: PageMeta,
        tier: TierCode,
        range: Range<u32>,
        read: impl FnOnce(SharedBlock) -> oneshot::Receiver<SharedBlock>,
    ) {
        let Some(PageSlot { response, .. }) = self.slots.get_mut(index as usize) else { return };
        response.uncopied = None;
        response.result = PageResult::Missed;
        if let Some(block) = response.block.take_if(|block| block.len() == range.len()) {
            let location = StoredAt::Reading(read(block));
            response.uncopied = Some(UncopiedBytes { location, meta, tier, range });
        }
    }

    /// Records bytes in the node's arena, or `None` if their location is outside of it.
    pub(super) fn set_uncopied(&mut self, index: u32, uncopied: Option<UncopiedBytes>) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        slot.response.result = if uncopied.is_some() { PageResult::Missed } else { PageResult::Corrupt };
        slot.response.uncopied = uncopied;
    }

    /// Records that the node refuses page `from` and all after it.
    pub(super) fn set_busy(&mut self, from: u32, retry_after_ms: u32) {
        for slot in self.slots.get_mut(from as usize..).unwrap_or_default() {
            slot.response.uncopied = None;
            slot.response.result = PageResult::Busy(retry_after_ms);
        }
    }

    pub(super) fn record_response(&mut self) {
        self.has_begun = true;
    }

    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    pub(super) fn id(&self, index: u32) -> Option<PageId> {
        self.slots.get(index as usize).map(|slot| slot.id)
    }
}

impl Drop for PagesHandler {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            // The caller may have stopped waiting. Then its buffers are dropped here.
            let _ = done.send(self.slots.drain(..).map(|slot| slot.response).collect());
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FollowResult {
    Sealed,
    Aborted,
    Missed,
    /// The node has no memory for the follow now.
    Busy,
    Corrupt,
}

pub(crate) struct PartsHandler {
    id: PageId,
    geometry: PageGeometry,
    buffer: Option<DynBuffer>,
    /// Chunk checksums of each part that has arrived intact.
    crcs: Vec<Option<Vec<u32>>>,
    received: PartsReceived,
    result: FollowResult,
    /// Description of the sealed page. Present only with [`FollowResult::Sealed`]. Boxed, because
    /// the handlers of all requests take the space of the largest one.
    meta: Option<Box<PageMeta>>,
    done: Option<oneshot::Sender<FollowedPage>>,
}

/// Buffer and result of a follow, with the description of a sealed page.
pub(crate) type FollowedPage = (DynBuffer, FollowResult, Option<PageMeta>);

impl PartsHandler {
    /// Returns the handler, and the channel that gets the buffer back when the handler is dropped.
    pub(crate) fn new(
        id: PageId,
        geometry: PageGeometry,
        buffer: DynBuffer,
        received: PartsReceived,
    ) -> (Self, oneshot::Receiver<FollowedPage>) {
        let (done, receiver) = oneshot::channel();
        let crcs = vec![None; geometry.part_count()];
        let result = FollowResult::Missed;
        (Self { id, geometry, buffer: Some(buffer), crcs, received, result, meta: None, done: Some(done) }, receiver)
    }

    fn range(&self, part: usize) -> Range<usize> {
        self.geometry.part_range(part).map_or(0..0, |range| range.start as usize..range.end as usize)
    }

    /// Memory for an announced part. `None` if the page has no such part of that length.
    pub(super) fn begin_part(&mut self, part: u32, bytes: usize) -> Option<&mut [u8]> {
        let part = part as usize;
        if part >= self.crcs.len() || self.geometry.part_bytes(part) != bytes {
            self.result = FollowResult::Corrupt;
            return None;
        }
        // A part that is sent again replaces the first one, so the old checksums are void.
        self.crcs[part] = None;
        let range = self.range(part);
        self.buffer.as_mut()?.bytes().get_mut(range)
    }

    /// Records a part that was received. `crcs` is `None` if its bytes do not match its checksums.
    pub(super) fn finish_part(&mut self, part: u32, crcs: Option<Vec<u32>>) -> bool {
        let is_valid = crcs.is_some();
        match crcs {
            Some(crcs) => {
                self.crcs[part as usize] = Some(crcs);
                self.received.count();
            }
            None => self.result = FollowResult::Corrupt,
        }
        is_valid
    }

    /// Records the end of the page. The client believes `Sealed` only if it has every part, and the
    /// sealed page is the requested one and consists of exactly these parts.
    pub(super) fn finish(&mut self, state: FollowState, meta: Option<PageMeta>) {
        let is_complete = meta.as_ref().is_some_and(|meta| {
            let received = self.crcs.iter().flatten().flatten();
            meta.id == self.id
                && meta.part_bytes == self.geometry.part_table()
                && self.crcs.iter().all(Option::is_some)
                && meta.chunk_crcs.iter().eq(received)
        });
        self.result = match (self.result, state) {
            // Damage outlasts whatever the node says later.
            (FollowResult::Corrupt, _) => FollowResult::Corrupt,
            (_, FollowState::Sealed) if is_complete => FollowResult::Sealed,
            (_, FollowState::Sealed) => FollowResult::Corrupt,
            (_, FollowState::Aborted) => FollowResult::Aborted,
            (_, FollowState::Miss) => FollowResult::Missed,
        };
        self.meta = meta.filter(|_| self.result == FollowResult::Sealed).map(Box::new);
    }

    /// Records that the node refuses the follow for now.
    pub(super) fn set_busy(&mut self) {
        // Damage outlasts whatever the node says later.
        if self.result == FollowResult::Missed {
            self.result = FollowResult::Busy;
        }
    }

    pub(super) fn key(&self) -> PageKey {
        self.id.key
    }
}

impl Drop for PartsHandler {
    fn drop(&mut self) {
        if let (Some(done), Some(buffer)) = (self.done.take(), self.buffer.take()) {
            // The caller may have stopped waiting. Then its buffer is dropped here.
            let _ = done.send((buffer, self.result, self.meta.take().map(|meta| *meta)));
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

    fn get(meta: &PageMeta, payload: &[u8]) -> PageResult {
        get_bytes(meta, payload, &(0..payload.len() as u32), None, payload.len()).0
    }

    /// Result of a request for `wanted` when the node sends `bytes`.
    fn get_bytes(
        meta: &PageMeta,
        payload: &[u8],
        bytes: &Range<u32>,
        wanted: Option<Range<u32>>,
        buffer: usize,
    ) -> (PageResult, Vec<u8>) {
        let wanted = PageRequest { id: id(7), range: wanted, buffer: Box::new(vec![0u8; buffer]) };
        let (mut handler, mut done) = PagesHandler::new(vec![wanted]);
        let sent = payload.get(bytes.start as usize..bytes.end as usize).unwrap_or_default();
        if let Some(PayloadTarget { before, memory, after, mut verifier, .. }) =
            handler.begin_payload(0, meta, bytes, sent.len())
        {
            memory.copy_from_slice(&sent[before..sent.len() - after]);
            verifier.take(sent);
            let is_valid = verifier.finish().is_ok();
            handler.finish_payload(0, TierCode::L2, meta.generation, is_valid);
        }
        drop(handler);
        let response = done.try_recv().unwrap().remove(0);
        (response.result, crate::buffer::downcast(response.buffer))
    }

    #[test]
    fn range_is_hit_only_if_whole_chunks_cover_it_and_match() {
        let (meta, payload) = page(7);
        // Each part is one chunk of 64 bytes.
        let part = geometry().part_range(0).unwrap().end;
        let got = |bytes: Range<u32>, wanted: Range<u32>| {
            let (result, buffer) = get_bytes(&meta, &payload, &bytes, Some(wanted.clone()), wanted.len());
            assert!(
                !matches!(result, PageResult::Hit(..)) || buffer == payload[wanted.start as usize..wanted.end as usize]
            );
            result
        };
        let hit = PageResult::Hit(TierCode::L2, meta.generation);
        assert_eq!(got(0..part, 3..9), hit);
        assert_eq!(got(part..2 * part, part..2 * part), hit);
        assert_eq!(got(0..2 * part, part - 1..part + 1), hit, "surplus chunks are ignored");
        assert_eq!(got(0..part, part - 1..part + 1), PageResult::Corrupt, "part of the range is missing");
        assert_eq!(got(part..2 * part, 3..9), PageResult::Corrupt, "other chunks");
        assert_eq!(got(3..9, 3..9), PageResult::Corrupt, "not whole chunks");
        assert_eq!(
            get_bytes(&meta, &payload, &(0..part), Some(3..9), 7).0,
            PageResult::Corrupt,
            "buffer of another length"
        );
        let mut damaged = payload.clone();
        damaged[1] ^= 1;
        assert_eq!(
            get_bytes(&meta, &damaged, &(0..part), Some(3..9), 6).0,
            PageResult::Corrupt,
            "damage beside the range, in its chunk"
        );
    }

    #[test]
    fn page_is_hit_only_if_identity_and_bytes_match() {
        let (meta, mut payload) = page(7);
        assert_eq!(get(&meta, &payload), PageResult::Hit(TierCode::L2, meta.generation));
        payload[5] ^= 1;
        assert_eq!(get(&meta, &payload), PageResult::Corrupt);
        let (other, payload) = page(8);
        assert_eq!(get(&other, &payload), PageResult::Corrupt);
    }

    fn followed(parts: &[(u32, u8)], state: FollowState, meta: Option<PageMeta>) -> FollowResult {
        let (mut handler, mut done) = PartsHandler::new(
            id(7),
            geometry(),
            Box::new(vec![0u8; geometry().page_bytes()]),
            PartsReceived::default(),
        );
        for &(part, from) in parts {
            let (source, payload) = page(from);
            let bytes = &payload[source.part_range(part as usize).unwrap()];
            handler.begin_part(part, bytes.len()).unwrap().copy_from_slice(bytes);
            handler.finish_part(part, source.part_crcs(part as usize).map(<[u32]>::to_vec));
        }
        handler.finish(state, meta);
        drop(handler);
        done.try_recv().unwrap().1
    }

    #[test]
    fn refused_follow_is_no_miss() {
        let buffer = Box::new(vec![0u8; geometry().page_bytes()]);
        let (mut handler, mut done) = PartsHandler::new(id(7), geometry(), buffer, PartsReceived::default());
        handler.set_busy();
        drop(handler);
        assert_eq!(done.try_recv().unwrap().1, FollowResult::Busy);
    }

    #[test]
    fn sealed_requires_all_parts_of_the_requested_page() {
        let (meta, _) = page(7);
        let sealed = |parts: &[(u32, u8)]| followed(parts, FollowState::Sealed, Some(meta.clone()));
        assert_eq!(sealed(&[(1, 7), (0, 7)]), FollowResult::Sealed);
        assert_eq!(sealed(&[(0, 7)]), FollowResult::Corrupt, "a part is missing");
        assert_eq!(sealed(&[(0, 7), (1, 9)]), FollowResult::Corrupt, "a part of another put");
        assert_eq!(followed(&[(0, 7), (1, 7)], FollowState::Sealed, None), FollowResult::Corrupt);
        assert_eq!(followed(&[(0, 7)], FollowState::Aborted, None), FollowResult::Aborted);
    }
}
