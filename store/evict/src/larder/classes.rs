//! Classes of pages, and spans of ages.
//!
//! A page that was asked for more than once is best known by how often, and by how long it then waited: what comes in
//! quick succession goes on so, and what takes its time does too. One that was asked for once has no such past; it
//! takes after the sequence that it continues.

use std::ops::Range;

/// Classes by requests so far.
pub(super) const HITS: usize = 6;
/// Classes of pages that were asked for once, by requests of the sequence that they continue.
const HEATS: usize = 5;
/// Classes of the others, by the time between their last two requests.
const GAPS: usize = SPANS / SPANS_PER_GAP;
/// Classes by position.
const PLACES: usize = 4;
/// Classes by all but position.
pub(super) const TRAILS: usize = HEATS + (HITS - 1) * GAPS;
/// All classes.
pub(super) const CLASSES: usize = TRAILS * PLACES;

/// Spans of ages that are one class of gaps.
const SPANS_PER_GAP: usize = 4;
/// Spans of ages: two to a doubling.
pub(super) const SPANS: usize = 40;
/// The first span is this many page accesses long.
const SPAN_FIRST: u64 = 64;

/// What is learnt together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class(pub u8);

impl Class {
    /// Of a page that was asked for so often, if more than once then the last time after `gap`, and that continues a
    /// sequence of such heat.
    pub(super) fn of(accesses: u8, gap: u64, heat: u8, position: u32) -> Class {
        let place = match position {
            0 => 0,
            1..=7 => 1,
            8..=31 => 2,
            _ => 3,
        };
        let trail = match hits_class(accesses) {
            0 => heat as usize,
            hits => HEATS + (hits - 1) * GAPS + span_of(gap) / SPANS_PER_GAP,
        };
        Class((trail * PLACES + place) as u8)
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The classes of a trail.
pub(super) fn classes_of(trail: usize) -> Range<usize> {
    trail * PLACES..(trail + 1) * PLACES
}

/// The class by requests alone of a trail.
pub(super) fn hits_of(trail: usize) -> usize {
    trail.checked_sub(HEATS).map_or(0, |trail| 1 + trail / GAPS)
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

/// Heat of a page whose parent was asked for this often and has this heat. What arrives in one run shares its heat.
pub(super) fn heat_of_child(parent_accesses: u8, parent_heat: u8) -> u8 {
    match parent_accesses {
        0..=1 => parent_heat.max(1),
        2..=3 => 2,
        4..=15 => 3,
        _ => 4,
    }
}

/// The span that an age falls into.
pub(super) fn span_of(age: u64) -> usize {
    if age < SPAN_FIRST {
        return 0;
    }
    let doublings = (age / SPAN_FIRST).ilog2();
    let base = SPAN_FIRST << doublings;
    let upper = age - base >= half_step(base);
    (1 + 2 * doublings as usize + usize::from(upper)).min(SPANS - 1)
}

/// Its first age. One past the last span it is the age at which that is taken to end.
pub(super) fn span_start(span: usize) -> u64 {
    if span == 0 {
        return 0;
    }
    let base = SPAN_FIRST << ((span - 1) / 2);
    base + if span.is_multiple_of(2) { half_step(base) } else { 0 }
}

/// From a power of two to that times the square root of two.
fn half_step(base: u64) -> u64 {
    base * 27 / 64
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
                    let trail = (0..TRAILS).find(|trail| classes_of(*trail).contains(&class.index())).unwrap();
                    assert_eq!(hits_of(trail), hits_class(accesses));
                }
            }
        }
    }

    #[test]
    fn what_returned_soon_is_of_another_class_than_what_took_long() {
        assert_ne!(Class::of(2, 100, 0, 0), Class::of(2, 10_000, 0, 0));
        assert_eq!(Class::of(1, 100, 0, 0), Class::of(1, 10_000, 0, 0));
        assert_ne!(Class::of(1, 0, 1, 0), Class::of(1, 0, 2, 0));
    }
}
