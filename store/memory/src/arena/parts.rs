//! A slot that several owners fill, part by part.
//!
//! Invariants:
//! - The parts of a slot do not overlap, and each byte has at most one writer.
//! - A frozen part can be read while other parts are still being written.
//! - The whole slot can be read once every part is frozen.

use super::{Slot, SlotMut};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use triomphe::Arc;

/// Exclusive memory of one part of a slot.
pub struct SlotPartMut {
    whole: Arc<SlotMut>,
    range: Range<usize>,
}

/// Shared, read-only memory of one part of a slot.
#[derive(Clone)]
pub struct SlotPart {
    whole: Arc<SlotMut>,
    range: Range<usize>,
}

impl SlotMut {
    /// Splits the slot into parts of these lengths, in order. The memory returns to the arena when
    /// all parts, and every [`Slot`] joined from them, are dropped.
    ///
    /// # Panics
    /// If the lengths do not add up to the length of the slot.
    pub fn into_parts(self, lengths: &[usize]) -> Vec<SlotPartMut> {
        let total = lengths.iter().try_fold(0, |sum: usize, &length| sum.checked_add(length));
        assert_eq!(total, Some(self.len()), "parts tile the slot");
        // From here on, the slot's bytes are reached only through parts, or through `Slot::join`
        // once no part is writable.
        let whole = Arc::new(self);
        let mut start = 0;
        let part = |&length: &usize| {
            let range = start..start + length;
            start += length;
            SlotPartMut { whole: whole.clone(), range }
        };
        lengths.iter().map(part).collect()
    }
}

fn pointer(whole: &SlotMut, range: &Range<usize>) -> NonNull<u8> {
    // SAFETY: ranges of parts lie inside the slot (see `into_parts`), and `whole` keeps its memory.
    unsafe { whole.extent.pointer().add(range.start) }
}

impl SlotPartMut {
    /// Converts the part into a shared, read-only one.
    pub fn freeze(self) -> SlotPart {
        SlotPart { whole: self.whole, range: self.range }
    }
}

impl Deref for SlotPartMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialized memory that `whole` keeps. This range belongs to this part alone:
        // ranges are disjoint, a part is not `Clone`, and a `Slot` of the whole exists only after
        // every part was frozen.
        unsafe { std::slice::from_raw_parts(pointer(&self.whole, &self.range).as_ptr(), self.range.len()) }
    }
}

impl DerefMut for SlotPartMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference into the range.
        unsafe { std::slice::from_raw_parts_mut(pointer(&self.whole, &self.range).as_ptr(), self.range.len()) }
    }
}

impl Deref for SlotPart {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialized memory that `whole` keeps; a frozen range has no writer.
        unsafe { std::slice::from_raw_parts(pointer(&self.whole, &self.range).as_ptr(), self.range.len()) }
    }
}

impl Slot {
    /// Joins the parts into the whole slot. Returns `None` unless they are all the parts of one
    /// slot, in order.
    pub fn join(parts: &[SlotPart]) -> Option<Slot> {
        let whole = &parts.first()?.whole;
        let mut end = 0;
        for part in parts {
            if !Arc::ptr_eq(whole, &part.whole) || part.range.start != end {
                return None;
            }
            end = part.range.end;
        }
        (end == whole.len()).then(|| Slot { shared: whole.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Arena;
    use super::*;

    #[test]
    fn parts_tile_the_slot_and_return_it() {
        let arena = Arena::new(1 << 20).unwrap();
        let lengths = [5000, 1, 4097];
        let mut parts = arena.allocate(9098).unwrap().into_parts(&lengths);
        for (i, part) in parts.iter_mut().enumerate() {
            part.fill(i as u8 + 1);
        }
        let first = parts.remove(0).freeze();
        parts[0].fill(9);
        assert!(first.iter().all(|&b| b == 1), "a frozen part is read while another is written");
        let frozen: Vec<SlotPart> = std::iter::once(first).chain(parts.into_iter().map(SlotPartMut::freeze)).collect();
        assert!(Slot::join(&frozen[..2]).is_none(), "a part is missing");
        assert!(Slot::join(&[frozen[1].clone(), frozen[0].clone(), frozen[2].clone()]).is_none(), "out of order");
        let slot = Slot::join(&frozen).unwrap();
        drop(frozen);
        assert_eq!((slot.len(), slot[4999], slot[5000], slot[5001]), (9098, 1, 9, 3));
        drop(slot);
        assert_eq!(arena.used(), 0);
    }

    #[test]
    fn parts_are_written_while_other_threads_read_frozen_ones() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut parts = arena.allocate(300).unwrap().into_parts(&[100; 3]);
        let mut first = parts.remove(0);
        first.fill(1);
        let first = first.freeze();
        let frozen: Vec<SlotPart> = std::thread::scope(|scope| {
            let write = |mut part: SlotPartMut| {
                part.fill(1);
                part.freeze()
            };
            let writers: Vec<_> = parts.into_iter().map(|part| scope.spawn(move || write(part))).collect();
            assert!(first.iter().all(|&byte| byte == 1));
            let written = writers.into_iter().map(|writer| writer.join().unwrap());
            std::iter::once(first.clone()).chain(written).collect()
        });
        assert!(Slot::join(&frozen).unwrap().iter().all(|&byte| byte == 1));
    }

    #[test]
    fn parts_of_different_slots_do_not_join() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut halves = Vec::new();
        for _ in 0..2 {
            halves.push(arena.allocate(8).unwrap().into_parts(&[4, 4]));
        }
        let mut frozen: Vec<Vec<SlotPart>> =
            halves.into_iter().map(|h| h.into_iter().map(SlotPartMut::freeze).collect()).collect();
        let foreign = frozen[1].remove(1);
        frozen[0][1] = foreign;
        assert!(Slot::join(&frozen[0]).is_none());
    }
}
