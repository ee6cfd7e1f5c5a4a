//! Classes of pages, and spans of ages.
//!
//! The best predictor of a page with several accesses is their number and the gap between the last
//! two: fast accesses go on fast, slow ones slow. A page with one access has no such history. It
//! behaves like the sequence that it continues.

use std::ops::Range;

pub(super) const HITS: usize = 6;
/// Number of classes of pages with one access, by the popularity of their sequence.
const HEATS: usize = 5;
/// Number of classes of the other pages, by the gap between their last two accesses.
const GAPS: usize = SPANS / SPANS_PER_GAP;
const POSITIONS: usize = 4;
pub(super) const HISTORIES: usize = HEATS + (HITS - 1) * GAPS;
pub(super) const CLASSES: usize = HISTORIES * POSITIONS;

/// Spans of ages that form one class of gaps.
const SPANS_PER_GAP: usize = 4;
pub(super) const SPANS: usize = 40;
/// Length of the first span in accesses.
const SPAN_FIRST: u64 = 64;

/// A class of pages whose density is estimated together. Pages of one class have a similar number
/// of accesses, a similar gap and a similar position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class(pub u8);

impl Class {
    /// Class of a page. `gap` matters with several accesses, `heat` with one.
    pub(super) fn of(accesses: u8, gap: u64, heat: u8, position: u32) -> Class {
        let position_class = match position {
            0 => 0,
            1..=7 => 1,
            8..=31 => 2,
            _ => 3,
        };
        let history = match hits_class(accesses) {
            0 => heat as usize,
            hits => HEATS + (hits - 1) * GAPS + span_of(gap) / SPANS_PER_GAP,
        };
        Class((history * POSITIONS + position_class) as u8)
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

pub(super) fn classes_of(history: usize) -> Range<usize> {
    history * POSITIONS..(history + 1) * POSITIONS
}

pub(super) fn hits_of(history: usize) -> usize {
    history.checked_sub(HEATS).map_or(0, |history| 1 + history / GAPS)
}

fn hits_class(accesses: u8) -> usize {
    match accesses {
        0..=1 => 0,
        2 => 1,
        3 => 2,
        4..=5 => 3,
        6..=9 => 4,
        _ => 5,
    }
}

const _: () = assert!(CLASSES <= 1 << u8::BITS);

/// Popularity class of a page whose parent has this access count and class. Pages that arrive in
/// one run share it.
pub(super) fn heat_of_child(parent_accesses: u8, parent_heat: u8) -> u8 {
    match parent_accesses {
        0..=1 => parent_heat.max(1),
        2..=3 => 2,
        4..=15 => 3,
        _ => 4,
    }
}

pub(super) fn span_of(age: u64) -> usize {
    if age < SPAN_FIRST {
        return 0;
    }
    let doublings = (age / SPAN_FIRST).ilog2();
    let base = SPAN_FIRST << doublings;
    let upper = age - base >= half_step(base);
    (1 + 2 * doublings as usize + usize::from(upper)).min(SPANS - 1)
}

/// First age of a span. One past the last span it is the age at which that span is taken to end.
pub(super) fn span_start(span: usize) -> u64 {
    if span == 0 {
        return 0;
    }
    let base = SPAN_FIRST << ((span - 1) / 2);
    base + if span.is_multiple_of(2) { half_step(base) } else { 0 }
}

/// Distance from a power of two to its product with the square root of two.
fn half_step(base: u64) -> u64 {
    // `base` is a multiple of 64, so the order loses nothing and cannot overflow.
    base / 64 * 27
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_all_ages_in_order() {
        for span in 0..SPANS {
            assert!(span_start(span) < span_start(span + 1));
            assert_eq!(span_of(span_start(span)), span);
            assert_eq!(span_of(span_start(span + 1) - 1), span);
        }
        assert_eq!(span_of(u64::MAX), SPANS - 1);
    }

    #[test]
    fn every_page_has_a_class() {
        for accesses in 0..=u8::MAX {
            for heat in (0..=u8::MAX).map(|parent| heat_of_child(parent, 0)) {
                for (position, gap) in
                    [0, 1, 7, 8, 31, 32, u32::MAX].into_iter().zip((0..).map(|gap| 1u64 << (gap * 9)))
                {
                    let class = Class::of(accesses, gap, heat, position);
                    assert!(class.index() < CLASSES);
                    let history = (0..HISTORIES).find(|history| classes_of(*history).contains(&class.index())).unwrap();
                    assert_eq!(hits_of(history), hits_class(accesses));
                }
            }
        }
    }

    #[test]
    fn gap_of_the_last_accesses_separates_classes() {
        assert_ne!(Class::of(2, 100, 0, 0), Class::of(2, 10_000, 0, 0));
        assert_eq!(Class::of(1, 100, 0, 0), Class::of(1, 10_000, 0, 0));
        assert_ne!(Class::of(1, 0, 1, 0), Class::of(1, 0, 2, 0));
    }
}
