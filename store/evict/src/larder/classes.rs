//! Classes of pages, and spans of ages.

/// Classes by requests so far.
pub(super) const HITS: usize = 6;
/// Classes by requests of the sequence that a page continues.
const HEATS: usize = 5;
/// Classes by position.
const PLACES: usize = 4;
/// All classes.
pub(super) const CLASSES: usize = HITS * HEATS * PLACES;

/// Spans of ages: two to a doubling.
pub(super) const SPANS: usize = 40;
/// The first span is this many page accesses long.
const SPAN_FIRST: u64 = 64;

/// What is learnt together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class(pub u8);

impl Class {
    pub(super) fn of(accesses: u8, heat: u8, position: u32) -> Class {
        let hits = match accesses {
            0..=1 => 0,
            2 => 1,
            3 => 2,
            4..=5 => 3,
            6..=9 => 4,
            _ => 5,
        };
        let place = match position {
            0 => 0,
            1..=7 => 1,
            8..=31 => 2,
            _ => 3,
        };
        Class(((hits * HEATS + heat as usize) * PLACES + place) as u8)
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }

    /// Its class by requests alone.
    pub(super) fn hits_of(index: usize) -> usize {
        index / (HEATS * PLACES)
    }
}

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
            for parent in 0..=u8::MAX {
                for position in [0, 1, 7, 8, 31, 32, u32::MAX] {
                    let class = Class::of(accesses, heat_of_child(parent, 0), position);
                    assert!(class.index() < CLASSES);
                    assert!(Class::hits_of(class.index()) < HITS);
                }
            }
        }
    }
}
