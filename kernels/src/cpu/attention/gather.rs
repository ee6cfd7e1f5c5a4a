//! Copies of the keys and values of one block, in the order in which the kernels read them.

use super::super::vector::{Kernel, LANES_MAX, Vector};
use super::{BLOCK, ChunkInput, HeadLayout, KvElement, LANES};

/// Distance from the token in use to the one that is requested from memory. Other heads lie between
/// the tokens of a head, so the processor's own prefetch does not see the pattern.
const PREFETCH_TOKENS: usize = 8;
const CACHE_LINE: usize = 64;
const _: () = assert!(LANES.is_multiple_of(LANES_MAX) && BLOCK.is_multiple_of(LANES));

/// Copies the keys and values of the tokens from `start` on to a task's workspace.
///
/// Contract of [`Kernel::run`]: nothing beyond the instruction set.
pub(super) struct GatherBlock<'a, E> {
    pub(super) input: &'a ChunkInput<'a, E>,
    pub(super) key_layout: HeadLayout,
    pub(super) value_layout: HeadLayout,
    pub(super) head_dim: usize,
    pub(super) start: usize,
    /// Tokens to copy, at least one and at most [`BLOCK`].
    pub(super) len: usize,
    /// `[lane groups][head_dim][LANES]`: the keys, transposed. Lanes beyond the last token get
    /// unspecified values.
    pub(super) keys: &'a mut [f32],
    /// `[BLOCK][padded]`.
    pub(super) values: &'a mut [f32],
}

/// Place of a token in the pages. Steps from token to token without a division.
#[derive(Clone, Copy)]
pub(super) struct Place {
    page: usize,
    slot: usize,
}

impl Place {
    #[inline(always)]
    pub(super) fn of(token: usize, page_tokens: usize) -> Place {
        Place { page: token / page_tokens, slot: token % page_tokens }
    }

    #[inline(always)]
    pub(super) fn step(&mut self, page_tokens: usize) {
        self.slot += 1;
        if self.slot == page_tokens {
            self.page += 1;
            self.slot = 0;
        }
    }
}

impl<E: KvElement> Kernel for GatherBlock<'_, E> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let GatherBlock { input, key_layout, value_layout, head_dim, start, len, keys, values } = self;
        let padded = values.len() / BLOCK;
        assert!((1..=BLOCK).contains(&len), "the block has tokens");
        assert!(keys.len() == BLOCK * head_dim && head_dim <= padded, "the workspace has the size of a block");
        let mut place = Place::of(start, input.page_tokens);
        let mut ahead = Place::of(start + PREFETCH_TOKENS, input.page_tokens);
        for first in (0..len).step_by(V::LANES) {
            let mut rows: [&[E]; LANES_MAX] = [&[]; LANES_MAX];
            for lane in 0..V::LANES {
                if first + lane >= len {
                    // Lanes without a token repeat the last one. Their scores get no weight.
                    rows[lane] = rows[lane - 1];
                    continue;
                }
                // SAFETY: the caller guarantees the instruction set.
                unsafe {
                    prefetch::<V, E>(input, key_layout, head_dim, ahead);
                    prefetch::<V, E>(input, value_layout, head_dim, ahead);
                }
                rows[lane] = elements(input, key_layout, head_dim, place);
                let to = &mut values[(first + lane) * padded..][..head_dim];
                // SAFETY: as above.
                unsafe { copy::<V, E>(elements(input, value_layout, head_dim, place), to) };
                place.step(input.page_tokens);
                ahead.step(input.page_tokens);
            }
            let group = &mut keys[first / LANES * LANES * head_dim..][..LANES * head_dim];
            // SAFETY: as above. Every row has `head_dim` elements.
            unsafe { transpose::<V, E>(&rows, head_dim, group, first % LANES) };
        }
    }
}

#[inline(always)]
pub(super) fn elements<'a, E>(input: &ChunkInput<'a, E>, layout: HeadLayout, head_dim: usize, place: Place) -> &'a [E] {
    &input.pages[place.page][layout.start + place.slot * layout.stride..][..head_dim]
}

/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn prefetch<V: Vector, E>(
    input: &ChunkInput<'_, E>,
    layout: HeadLayout,
    head_dim: usize,
    place: Place,
) {
    let Some(page) = input.pages.get(place.page) else { return };
    let start = page.as_ptr().wrapping_add(layout.start + place.slot * layout.stride).cast::<u8>();
    for byte in (0..head_dim * size_of::<E>()).step_by(CACHE_LINE) {
        // SAFETY: the caller guarantees the instruction set.
        unsafe { V::prefetch(start.wrapping_add(byte)) };
    }
}

/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
unsafe fn copy<V: Vector, E: KvElement>(from: &[E], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "a value fits its row");
    let whole = from.len() / V::LANES * V::LANES;
    for element in (0..whole).step_by(V::LANES) {
        // SAFETY: both have more than `element + V::LANES - 1` elements.
        unsafe { E::load::<V>(from.as_ptr().add(element)).store(to.as_mut_ptr().add(element)) };
    }
    for element in whole..from.len() {
        to[element] = from[element].to_f32();
    }
}

/// Writes the first `V::LANES` of `rows` to the lanes of `group` from `lane` on.
///
/// # Safety
/// The machine has the instruction set of `V`, these rows have `head_dim` elements each, and
/// `group` is `[head_dim][LANES]`.
// Constant indices keep the vectors in registers. Iterators over the arrays may not.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn transpose<V: Vector, E: KvElement>(
    rows: &[&[E]; LANES_MAX],
    head_dim: usize,
    group: &mut [f32],
    lane: usize,
) {
    let whole = head_dim / V::LANES * V::LANES;
    for element in (0..whole).step_by(V::LANES) {
        // SAFETY: `element + V::LANES` is at most `head_dim`, and `lane + V::LANES` at most
        // `LANES`.
        unsafe {
            let mut vectors = [V::splat(0.0); LANES_MAX];
            for row in 0..V::LANES {
                vectors[row] = E::load(rows[row].as_ptr().add(element));
            }
            V::transpose(&mut vectors);
            for row in 0..V::LANES {
                vectors[row].store(group.as_mut_ptr().add((element + row) * LANES + lane));
            }
        }
    }
    for element in whole..head_dim {
        for row in 0..V::LANES {
            group[element * LANES + lane + row] = rows[row][element].to_f32();
        }
    }
}
