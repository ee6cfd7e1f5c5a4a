//! Pages that are read where they lie.

use crate::client::Tier;
use crate::sink::Lying;
use larder_format::planted::{Bug, has};
use larder_format::{PageId, PageMeta, whole_chunks};
use larder_share::{Block, Held, copy_out};
use larder_wire::Entry;
use parking_lot::Mutex;
use std::ops::{Deref, Range};
use tokio::sync::Notify;

/// A page, checked: the bytes that were put. On the node's machine they are the node's memory, which it keeps until this is
/// dropped; otherwise a copy.
#[derive(Debug)]
pub struct PageView {
    pub(crate) bytes: ViewBytes,
    pub(crate) tier: Tier,
}

#[derive(Debug)]
pub(crate) enum ViewBytes {
    Held(Held),
    Read(Block),
    Copied(Vec<u8>),
}

impl ViewBytes {
    /// Bytes that are there.
    pub(crate) fn of(lying: Lying) -> Option<ViewBytes> {
        match lying {
            Lying::Held(held) => Some(ViewBytes::Held(held)),
            Lying::Here(block) => Some(ViewBytes::Read(block)),
            Lying::Coming(_) => None,
        }
    }
}

impl PageView {
    /// Where the page was.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Whether these are the node's own bytes.
    pub fn in_place(&self) -> bool {
        matches!(self.bytes, ViewBytes::Held(_))
    }
}

impl Deref for PageView {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            ViewBytes::Held(held) => held,
            ViewBytes::Read(block) => block,
            ViewBytes::Copied(bytes) => bytes,
        }
    }
}

/// A buffer that is made when it is needed.
pub(crate) struct Later {
    pub(crate) length: usize,
    pub(crate) bytes: Vec<u8>,
}

impl AsMut<[u8]> for Later {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes.resize(self.length, 0);
        &mut self.bytes
    }
}

/// Checks the chunks of a page that `wanted` touches, of which the bytes `there` lie at `from`, and copies what is wanted,
/// chunk by chunk, so that memory is read once. `false` if they are not what was put.
pub(crate) fn copy_checked(
    id: &PageId,
    meta: &PageMeta,
    (there, from): (&Range<u32>, &[u8]),
    wanted: Option<&Range<u32>>,
    into: &mut [u8],
) -> bool {
    let is_range = wanted.is_some();
    let wanted = wanted.cloned().unwrap_or(0..meta.payload_bytes() as u32);
    let Some(needed) = whole_chunks(&meta.part_bytes, &wanted) else { return false };
    let has_all = there.start <= needed.start && needed.end <= there.end;
    if meta.id != *id || !has_all || from.len() != there.len() || into.len() != wanted.len() {
        return false;
    }
    for (chunk, crc) in meta.chunks_in(&wanted) {
        let at = |from: u32, byte: u32| (byte - from) as usize;
        let checked = &from[at(there.start, chunk.start)..at(there.start, chunk.end)];
        if crc32fast::hash(checked) != crc && !(is_range && has(Bug::RangeUnchecked)) {
            return false;
        }
        let (start, end) = (chunk.start.max(wanted.start), chunk.end.min(wanted.end));
        let copied = &checked[at(chunk.start, start)..at(chunk.start, end)];
        copy_out(copied, &mut into[at(wanted.start, start)..at(wanted.start, end)]);
    }
    true
}

/// Pages that were read in place and are to be released: the node hears of many at a time.
#[derive(Debug, Default)]
pub(crate) struct Releases {
    waiting: Mutex<Vec<Entry>>,
    bell: Notify,
}

impl Releases {
    pub(crate) fn add(&self, entry: Entry) {
        self.waiting.lock().push(entry);
        self.bell.notify_one();
    }

    /// Waits until there are some, and takes at most `max` of them.
    pub(crate) async fn take(&self, max: usize) -> Vec<Entry> {
        loop {
            let taken: Vec<Entry> = {
                let mut waiting = self.waiting.lock();
                let now = waiting.len().min(max);
                waiting.drain(..now).collect()
            };
            if !taken.is_empty() {
                return taken;
            }
            self.bell.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};
    use proptest::prelude::*;

    #[test]
    fn a_copy_is_the_page_or_a_mismatch() {
        let parts = [150_000u32, 65_536, 1];
        let payload: Vec<u8> = (0..parts.iter().sum()).map(|i: u32| (i * 31) as u8).collect();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let meta = PageMeta::describe(id, PageKey::NONE, 0, parts.to_vec(), &payload);
        let mut into = vec![0; payload.len()];
        let all = 0..payload.len() as u32;
        assert!(copy_checked(&id, &meta, (&all, &payload), None, &mut into) && into == payload);
        for at in [0, 65_536, 149_999, 150_000, payload.len() - 1] {
            let mut bad = payload.clone();
            bad[at] ^= 1;
            assert!(!copy_checked(&id, &meta, (&all, &bad), None, &mut into), "byte {at}");
        }
        let other = PageId { key: PageKey([3; 32]), ..id };
        assert!(!copy_checked(&other, &meta, (&all, &payload), None, &mut into));
        assert!(!copy_checked(&id, &meta, (&all, &payload[1..]), None, &mut into));
        assert!(!copy_checked(&id, &meta, (&all, &payload), None, &mut into[1..]));
    }

    proptest! {
        #[test]
        fn a_copied_range_is_the_plain_slice_or_nothing(
            parts in prop::collection::vec(1u32..200_000, 1..6),
            ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            flip in prop::option::of(any::<prop::sample::Index>()),
            whole: bool,
        ) {
            let payload: Vec<u8> = (0..parts.iter().sum()).map(|i: u32| ((i * 31) >> 3) as u8).collect();
            let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
            let meta = PageMeta::describe(id, PageKey::NONE, 0, parts, &payload);
            let (from, to) = (ends.0.index(payload.len()) as u32, ends.1.index(payload.len()) as u32);
            let wanted = from.min(to)..from.max(to) + 1;
            let needed = whole_chunks(&meta.part_bytes, &wanted).unwrap();
            // A node may show more than was asked for.
            let there = if whole { 0..payload.len() as u32 } else { needed.clone() };
            let mut memory = payload[there.start as usize..there.end as usize].to_vec();
            let flipped = flip.map(|at| at.index(memory.len()));
            flipped.into_iter().for_each(|at| memory[at] ^= 4);
            let hit = flipped.is_some_and(|at| needed.contains(&(there.start + at as u32)));
            let mut into = vec![0; wanted.len()];
            let good = copy_checked(&id, &meta, (&there, &memory), Some(&wanted), &mut into);
            prop_assert_eq!(good, !hit, "damage in a chunk of the range, and no other, is found");
            prop_assert!(!good || into == payload[wanted.start as usize..wanted.end as usize]);
            let less = needed.start + 1..needed.end;
            let bytes = &payload[less.start as usize..less.end as usize];
            prop_assert!(!copy_checked(&id, &meta, (&less, bytes), Some(&wanted), &mut into), "not whole chunks");
        }
    }
}
