//! Verification of page bytes while they are copied to the caller.

use larder_format::{PageId, PageMeta, whole_chunks};
use larder_memory::share::copy_out;
use larder_runtime::fail_point;
use std::ops::Range;

/// Copies bytes of a page to `into`, and checks every chunk that they touch. It works chunk by
/// chunk, so that each is read from memory once.
///
/// `source` has the bytes `stored` of the page. `wanted` is the range to copy, or `None` for the
/// whole page. Returns `false` if identity, length or a checksum does not match. The content of
/// `into` is undefined then.
pub(super) fn copy_verified(
    id: &PageId,
    meta: &PageMeta,
    stored: &Range<u32>,
    source: &[u8],
    wanted: Option<&Range<u32>>,
    into: &mut [u8],
) -> bool {
    let is_range = wanted.is_some();
    let wanted = wanted.cloned().unwrap_or(0..meta.payload_bytes() as u32);
    let Some(needed) = whole_chunks(&meta.part_bytes, &wanted) else { return false };
    let has_all = stored.start <= needed.start && needed.end <= stored.end;
    if meta.id != *id || !has_all || source.len() != stored.len() || into.len() != wanted.len() {
        return false;
    }
    for (chunk, crc) in meta.chunks_in(&wanted) {
        let at = |from: u32, byte: u32| (byte - from) as usize;
        let checked = &source[at(stored.start, chunk.start)..at(stored.start, chunk.end)];
        if crc32fast::hash(checked) != crc && !(is_range && fail_point!("client.range-skips-checksum")) {
            return false;
        }
        let start = chunk.start.max(wanted.start);
        let end = chunk.end.min(wanted.end);
        let copied = &checked[at(chunk.start, start)..at(chunk.start, end)];
        copy_out(copied, &mut into[at(wanted.start, start)..at(wanted.start, end)]);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};
    use proptest::prelude::*;

    #[test]
    fn copy_succeeds_only_for_the_page_that_was_put() {
        let parts = [150_000u32, 65_536, 1];
        let payload: Vec<u8> = (0..parts.iter().sum()).map(|i: u32| (i * 31) as u8).collect();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let meta = PageMeta::describe(id, PageKey::NONE, 0, parts.to_vec(), &payload);
        let mut into = vec![0; payload.len()];
        let all = 0..payload.len() as u32;
        assert!(copy_verified(&id, &meta, &all, &payload, None, &mut into) && into == payload);
        for at in [0, 65_536, 149_999, 150_000, payload.len() - 1] {
            let mut bad = payload.clone();
            bad[at] ^= 1;
            assert!(!copy_verified(&id, &meta, &all, &bad, None, &mut into), "byte {at}");
        }
        let other = PageId { key: PageKey([3; 32]), ..id };
        assert!(!copy_verified(&other, &meta, &all, &payload, None, &mut into));
        assert!(!copy_verified(&id, &meta, &all, &payload[1..], None, &mut into));
        assert!(!copy_verified(&id, &meta, &all, &payload, None, &mut into[1..]));
    }

    proptest! {
        #[test]
        fn copied_range_equals_the_slice_or_fails(
            parts in prop::collection::vec(1u32..200_000, 1..6),
            ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            flip in prop::option::of(any::<prop::sample::Index>()),
            whole: bool,
        ) {
            let payload: Vec<u8> = (0..parts.iter().sum()).map(|i: u32| ((i * 31) >> 3) as u8).collect();
            let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
            let meta = PageMeta::describe(id, PageKey::NONE, 0, parts, &payload);
            let from = ends.0.index(payload.len()) as u32;
            let to = ends.1.index(payload.len()) as u32;
            let wanted = from.min(to)..from.max(to) + 1;
            let needed = whole_chunks(&meta.part_bytes, &wanted).unwrap();
            // A node may deliver more than the requested chunks.
            let stored = if whole { 0..payload.len() as u32 } else { needed.clone() };
            let mut memory = payload[stored.start as usize..stored.end as usize].to_vec();
            let flipped = flip.map(|at| at.index(memory.len()));
            flipped.into_iter().for_each(|at| memory[at] ^= 4);
            let hit = flipped.is_some_and(|at| needed.contains(&(stored.start + at as u32)));
            let mut into = vec![0; wanted.len()];
            let is_valid = copy_verified(&id, &meta, &stored, &memory, Some(&wanted), &mut into);
            prop_assert_eq!(is_valid, !hit, "exactly the damage in chunks of the range is found");
            prop_assert!(!is_valid || into == payload[wanted.start as usize..wanted.end as usize]);
            let less = needed.start + 1..needed.end;
            let bytes = &payload[less.start as usize..less.end as usize];
            prop_assert!(!copy_verified(&id, &meta, &less, bytes, Some(&wanted), &mut into), "not whole chunks");
        }
    }
}
