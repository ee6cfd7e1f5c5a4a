//! A slot that is filled by several owners, piece by piece.
//!
//! Always true: the pieces of a slot do not overlap, and each byte has at most one writer. A piece that is frozen can be
//! read by anyone while others are still being written; the whole slot can be read once every piece is frozen.

use super::{Slot, SlotMut};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

/// Exclusive memory of one piece of a slot.
pub struct PieceMut {
    whole: Arc<SlotMut>,
    range: Range<usize>,
}

/// Shared, read-only memory of one piece of a slot.
#[derive(Clone)]
pub struct Piece {
    whole: Arc<SlotMut>,
    range: Range<usize>,
}

impl SlotMut {
    /// Cuts the slot into pieces of these lengths, in order. The memory goes back to the arena when the last piece, and
    /// every [`Slot`] made of them, is gone.
    ///
    /// # Panics
    /// If the lengths do not add up to the length of the slot.
    pub fn into_pieces(self, lengths: &[usize]) -> Vec<PieceMut> {
        let total = lengths.iter().try_fold(0, |sum: usize, &length| sum.checked_add(length));
        assert_eq!(total, Some(self.len), "pieces tile the slot");
        // From here on the slot's own bytes are only reached through pieces, or by `Slot::join` when none can be written.
        let whole = Arc::new(self);
        let mut start = 0;
        let piece = |&length: &usize| {
            let range = start..start + length;
            start += length;
            PieceMut { whole: whole.clone(), range }
        };
        lengths.iter().map(piece).collect()
    }
}

fn pointer(whole: &SlotMut, range: &Range<usize>) -> NonNull<u8> {
    // SAFETY: ranges of pieces lie inside the slot (see `into_pieces`), whose memory `whole` keeps.
    unsafe { whole.extent.pointer().add(range.start) }
}

impl PieceMut {
    /// Makes it shared and read-only.
    pub fn freeze(self) -> Piece {
        Piece { whole: self.whole, range: self.range }
    }
}

impl Deref for PieceMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory that `whole` keeps; this range belongs to this piece alone (ranges are disjoint, a
        // piece is not `Clone`, and a `Slot` of the whole exists only after every piece was frozen).
        unsafe { std::slice::from_raw_parts(pointer(&self.whole, &self.range).as_ptr(), self.range.len()) }
    }
}

impl DerefMut for PieceMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference into the range.
        unsafe { std::slice::from_raw_parts_mut(pointer(&self.whole, &self.range).as_ptr(), self.range.len()) }
    }
}

impl Deref for Piece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory that `whole` keeps; a frozen range has no writer any more.
        unsafe { std::slice::from_raw_parts(pointer(&self.whole, &self.range).as_ptr(), self.range.len()) }
    }
}

impl Slot {
    /// The whole slot, of all its pieces in order; `None` if these are not all the pieces of one slot.
    pub fn join(pieces: &[Piece]) -> Option<Slot> {
        let whole = &pieces.first()?.whole;
        let mut end = 0;
        for piece in pieces {
            if !Arc::ptr_eq(whole, &piece.whole) || piece.range.start != end {
                return None;
            }
            end = piece.range.end;
        }
        (end == whole.len).then(|| Slot { shared: whole.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Arena;
    use super::*;

    #[test]
    fn pieces_tile_the_slot_and_give_it_back() {
        let arena = Arena::new(1 << 20).unwrap();
        let lengths = [5000, 1, 4097];
        let mut pieces = arena.allocate(9098).unwrap().into_pieces(&lengths);
        for (i, piece) in pieces.iter_mut().enumerate() {
            piece.fill(i as u8 + 1);
        }
        let first = pieces.remove(0).freeze();
        pieces[0].fill(9);
        assert!(first.iter().all(|&b| b == 1), "a frozen piece is read while another is written");
        let frozen: Vec<Piece> = std::iter::once(first).chain(pieces.into_iter().map(PieceMut::freeze)).collect();
        assert!(Slot::join(&frozen[..2]).is_none(), "a piece is missing");
        assert!(Slot::join(&[frozen[1].clone(), frozen[0].clone(), frozen[2].clone()]).is_none(), "out of order");
        let slot = Slot::join(&frozen).unwrap();
        drop(frozen);
        assert_eq!((slot.len(), slot[4999], slot[5000], slot[5001]), (9098, 1, 9, 3));
        drop(slot);
        assert_eq!(arena.used(), 0);
    }

    #[test]
    fn pieces_of_different_slots_do_not_join() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut halves = Vec::new();
        for _ in 0..2 {
            halves.push(arena.allocate(8).unwrap().into_pieces(&[4, 4]));
        }
        let mut frozen: Vec<Vec<Piece>> =
            halves.into_iter().map(|h| h.into_iter().map(PieceMut::freeze).collect()).collect();
        let stranger = frozen[1].remove(1);
        frozen[0][1] = stranger;
        assert!(Slot::join(&frozen[0]).is_none());
    }
}
