//! Classes of pages, and spans of ages.
//!
//! The best predictor of a page's next access is the gap between its accesses: fast accesses go on
//! fast, slow ones slow. A page keeps an average of its gaps. A page with one access takes that of
//! the page before it: the pages of one session return together.
//!
//! A session cannot return before its generation has ended. Once an engine has reported the end,
//! the page is in another class, its age counts from the end, and so does its next gap.

use crate::policy::TICKS_PER_MS;
use std::ops::Range;

/// Number of classes of access counts. Pages with one access are in the first two: without a gap,
/// and with that of their sequence.
pub(super) const HITS: usize = 7;
/// Number of classes of pages without a gap: first pages of sequences, and others.
const NEW: usize = 2;
/// Number of classes of the other pages, by the average of their gaps.
const GAPS: usize = SPANS / SPANS_PER_GAP;
const POSITIONS: usize = 4;
pub(super) const HISTORIES: usize = NEW + (HITS - 1) * GAPS;
/// Number of classes of pages without a reported end.
pub(super) const OPEN_CLASSES: usize = HISTORIES * POSITIONS;
/// Each class of open pages, then each class of pages whose generation has ended.
pub(super) const CLASSES: usize = 2 * OPEN_CLASSES;

/// Spans of ages that form one class of gaps.
const SPANS_PER_GAP: usize = 4;
pub(super) const SPANS: usize = 40;
/// Length of the first span in ticks.
const SPAN_FIRST: u64 = 64 * TICKS_PER_MS;

/// Resolution of an average gap, in parts of a span. The average must move by less than a span.
const PARTS_PER_SPAN: usize = 6;
/// Share of the latest gap in the average, in tenths.
const LATEST_TENTHS: usize = 3;
const NO_GAP: u8 = u8::MAX;
const _: () = assert!(SPANS * PARTS_PER_SPAN <= NO_GAP as usize);

/// Maximum of a known access count.
const ACCESSES_MAX: u8 = 15;
/// The page is behind another page.
const BEHIND: u8 = 1 << 4;
/// The generation of the last access has ended.
const ENDED: u8 = 1 << 6;
const REFUSED: u8 = 1 << 7;

/// History of a page: its access count, including accesses before an earlier eviction, and its
/// average gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct History {
    /// Access count in the lowest four bits, and flags. [`REFUSED`] marks ghost entries only.
    packed: u8,
    /// Average gap in parts of a span, or [`NO_GAP`].
    gap: u8,
}

impl History {
    /// The first access to the first page of a sequence.
    pub(super) const FIRST: History = History { packed: 1, gap: NO_GAP };

    /// First access to a page behind a page with this history.
    pub(super) fn of_child(self) -> History {
        History { packed: 1 | BEHIND, gap: self.gap }
    }

    /// One more access, an unknown time after the last one.
    pub(super) fn after_demotion(self) -> History {
        History { packed: (self.accesses() + 1).min(ACCESSES_MAX) | (self.packed & BEHIND), gap: self.gap }
    }

    /// One more access, `gap` ticks after the last one, or after the end of its generation.
    pub(super) fn after(self, gap: u64) -> History {
        let latest = span_of(gap) * PARTS_PER_SPAN + PARTS_PER_SPAN / 2;
        let gap = match self.gap {
            NO_GAP => latest,
            before => (usize::from(before) * (10 - LATEST_TENTHS) + latest * LATEST_TENTHS + 5) / 10,
        };
        History { gap: gap as u8, ..self.after_demotion() }
    }

    pub(super) fn accesses(self) -> u8 {
        self.packed & ACCESSES_MAX
    }

    /// Marks the history of a page that was refused.
    pub(super) fn refused(self) -> History {
        History { packed: self.packed | REFUSED, ..self }
    }

    pub(super) fn is_refused(self) -> bool {
        self.packed & REFUSED != 0
    }

    /// The generation of the last access has ended.
    pub(super) fn ended(self) -> History {
        History { packed: self.packed | ENDED, ..self }
    }

    pub(super) fn has_ended(self) -> bool {
        self.packed & ENDED != 0
    }

    fn hits_class(self) -> usize {
        match self.accesses() {
            _ if self.gap == NO_GAP => 0,
            0..=1 => 1,
            2 => 2,
            3 => 3,
            4..=5 => 4,
            6..=9 => 5,
            _ => 6,
        }
    }
}

/// A class of pages whose density is estimated together. Pages of one class have a similar history
/// and a similar position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class(pub u16);

impl Class {
    pub(super) fn of(history: History, position: u32) -> Class {
        let position_class = match position {
            0 => 0,
            1..=7 => 1,
            8..=31 => 2,
            _ => 3,
        };
        let index = match history.hits_class() {
            0 => usize::from(history.packed & BEHIND != 0),
            hits => NEW + (hits - 1) * GAPS + usize::from(history.gap) / PARTS_PER_SPAN / SPANS_PER_GAP,
        };
        let open = Class((index * POSITIONS + position_class) as u16);
        if history.has_ended() { open.ended() } else { open }
    }

    /// The class after the end of the generation. An open class has an index below
    /// [`OPEN_CLASSES`].
    pub(super) fn ended(self) -> Class {
        Class(self.0 + if self.has_ended() { 0 } else { OPEN_CLASSES as u16 })
    }

    pub(super) fn has_ended(self) -> bool {
        self.index() >= OPEN_CLASSES
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Open classes of a history.
pub(super) fn classes_of(history: usize) -> Range<usize> {
    history * POSITIONS..(history + 1) * POSITIONS
}

pub(super) fn hits_of(history: usize) -> usize {
    history.checked_sub(NEW).map_or(0, |history| 1 + history / GAPS)
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
        for packed in 0..=u8::MAX {
            for gap in (0..(SPANS * PARTS_PER_SPAN) as u8).chain([NO_GAP]) {
                let history = History { packed, gap };
                assert_eq!(Class::of(history, 0).has_ended(), history.has_ended());
                for position in [0, 1, 7, 8, 31, 32, u32::MAX] {
                    let class = Class::of(history, position);
                    assert!(class.index() < CLASSES);
                    let open = class.index() % OPEN_CLASSES;
                    let index = (0..HISTORIES).find(|index| classes_of(*index).contains(&open)).unwrap();
                    assert_eq!(hits_of(index), history.hits_class());
                }
            }
        }
    }

    #[test]
    fn average_gap_follows_the_gaps_and_separates_classes() {
        let mut slow = History::FIRST;
        (0..20).for_each(|_| slow = slow.after(span_start(20)));
        assert_eq!(usize::from(slow.gap) / PARTS_PER_SPAN, 20);
        let mut fast = slow;
        (0..20).for_each(|_| fast = fast.after(0));
        assert!(usize::from(fast.gap) / PARTS_PER_SPAN < SPANS_PER_GAP);
        assert_ne!(Class::of(slow, 0), Class::of(fast, 0));
        // One outlier moves a page by few spans.
        let gap = slow.after(0).gap;
        assert!(gap < slow.gap && usize::from(gap) / PARTS_PER_SPAN >= 12, "{gap}");
    }

    #[test]
    fn page_with_one_access_takes_the_gap_of_its_sequence() {
        let parent = History::FIRST.after(span_start(20));
        assert_eq!(parent.of_child().gap, parent.gap);
        assert_ne!(Class::of(parent.of_child(), 9), Class::of(History::FIRST.of_child(), 9));
        assert_eq!(Class::of(parent.refused(), 9), Class::of(parent, 9));
    }

    #[test]
    fn reported_end_counts_until_the_next_access() {
        let ended = History::FIRST.after(span_start(20)).ended();
        let class = Class::of(ended, 9);
        assert!(class.has_ended() && class.ended() == class);
        assert!(!Class::of(ended.after(span_start(20)), 9).has_ended());
        assert!(!Class::of(ended.of_child(), 9).has_ended());
        assert_eq!(ended.after_demotion().gap, ended.gap);
    }
}
