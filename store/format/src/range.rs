//! Ranges of a page's payload, and the chunks that contain them.
//!
//! Invariant: CRCs cover whole chunks, so a reader of a range fetches every chunk that overlaps it.

use crate::limits::CHUNK_BYTES;
use std::ops::Range;

/// Chunks of a page, in order. Costs nothing beyond the chunks that the caller takes.
pub(crate) fn chunks(part_bytes: &[u32]) -> impl Iterator<Item = Range<u32>> + '_ {
    let parts = part_bytes.iter().scan(0u32, |start, &bytes| {
        let part = *start..start.saturating_add(bytes);
        *start = part.end;
        Some(part)
    });
    parts.flat_map(|part| {
        let end = part.end;
        part.step_by(CHUNK_BYTES).map(move |start| start..end.min(start.saturating_add(CHUNK_BYTES as u32)))
    })
}

/// Smallest range of whole chunks that contains `range`. `None` if `range` is empty or not inside
/// the page.
pub fn whole_chunks(part_bytes: &[u32], range: &Range<u32>) -> Option<Range<u32>> {
    if range.is_empty() {
        return None;
    }
    let mut touched =
        chunks(part_bytes).skip_while(|chunk| chunk.end <= range.start).take_while(|chunk| chunk.start < range.end);
    let first = touched.next()?;
    let end = touched.last().map_or(first.end, |last| last.end);
    (end >= range.end).then_some(first.start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u32 = CHUNK_BYTES as u32;

    #[test]
    fn range_is_widened_to_chunk_boundaries_of_its_parts() {
        let parts = [CHUNK + 10, 5, 3 * CHUNK];
        let end = 4 * CHUNK + 15;
        for (range, chunks) in [
            (0..1, Some(0..CHUNK)),
            (CHUNK - 1..CHUNK, Some(0..CHUNK)),
            (CHUNK - 1..CHUNK + 1, Some(0..CHUNK + 10)),
            (CHUNK + 10..CHUNK + 15, Some(CHUNK + 10..CHUNK + 15)),
            (CHUNK + 14..CHUNK + 16, Some(CHUNK + 10..2 * CHUNK + 15)),
            (end - 1..end, Some(3 * CHUNK + 15..end)),
            (0..end, Some(0..end)),
            (7..7, None),
            #[expect(clippy::reversed_empty_ranges, reason = "a peer may send it")]
            (9..7, None),
            (end - 1..end + 1, None),
            (end..end + 1, None),
            (0..u32::MAX, None),
            (u32::MAX - 1..u32::MAX, None),
        ] {
            assert_eq!(whole_chunks(&parts, &range), chunks, "{range:?}");
        }
        assert_eq!(
            whole_chunks(&[u32::MAX, u32::MAX], &(u32::MAX - 1..u32::MAX)),
            Some(u32::MAX - CHUNK + 1..u32::MAX)
        );
    }

    proptest! {
        #[test]
        fn widened_range_is_the_smallest_that_contains_the_range(
            parts in prop::collection::vec(1u32..200_000, 1..8),
            (from, to) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let bytes = parts.iter().sum::<u32>() as usize;
            let (from, to) = (from.index(bytes) as u32, to.index(bytes) as u32);
            let range = from.min(to)..from.max(to) + 1;
            let wide = whole_chunks(&parts, &range).unwrap();
            prop_assert!(wide.start <= range.start && range.end <= wide.end);
            prop_assert!(range.start - wide.start < CHUNK && wide.end - range.end < CHUNK);
            prop_assert_eq!(whole_chunks(&parts, &wide), Some(wide.clone()));
            // Both ends are chunk boundaries.
            let edges: Vec<u32> = chunks(&parts).map(|chunk| chunk.start).chain([bytes as u32]).collect();
            prop_assert!(edges.contains(&wide.start) && edges.contains(&wide.end));
        }
    }
}
