//! Attention of few queries, which reads keys and values in place. A copy would cost more than the
//! products: this is the case of decode.
//!
//! Invariant: the operations and their order are those of the kernels over copies, so the bits are
//! the same.

use super::super::vector::{Kernel, LANES_MAX, Vector};
use super::gather::{Place, elements, prefetch};
use super::{BLOCK, ChunkInput, HeadLayout, KvElement, QUERY_GROUP};

/// Most queries with which scores take two vectors of tokens at once. A chain of additions per
/// query would leave the processor waiting for them.
const FEW_QUERIES: usize = 3;
/// Rows of values that are added before the kernel requests as many keys. All requests at once
/// would fill the queue of the processor, in which its own loads wait, too.
const VALUES_PER_REQUEST: usize = 8;

/// Calls `$name::<N, G>` with the number of queries as a constant, at most [`QUERY_GROUP`]. `G`
/// follows if there is one.
macro_rules! by_queries {
    ($count:expr, $name:ident::<$($type:ty),* $(; $group:literal)?>($($argument:expr),*)) => {
        match $count {
            1 => $name::<$($type,)* 1 $(, $group)?>($($argument),*),
            2 => $name::<$($type,)* 2 $(, $group)?>($($argument),*),
            3 => $name::<$($type,)* 3 $(, $group)?>($($argument),*),
            4 => $name::<$($type,)* 4 $(, $group)?>($($argument),*),
            5 => $name::<$($type,)* 5 $(, $group)?>($($argument),*),
            _ => $name::<$($type,)* QUERY_GROUP $(, $group)?>($($argument),*),
        }
    };
}

/// Tokens of one block whose keys or values a kernel reads.
pub(super) struct Tokens<'a, E> {
    pub(super) input: &'a ChunkInput<'a, E>,
    pub(super) layout: HeadLayout,
    pub(super) head_dim: usize,
    pub(super) start: usize,
    /// At least one, and at most [`BLOCK`].
    pub(super) len: usize,
}

/// Computes the scores of all queries with the keys of a block.
///
/// Contract of [`Kernel::run`]: nothing beyond the instruction set.
pub(super) struct Scores<'a, E> {
    pub(super) keys: Tokens<'a, E>,
    /// Place of the values of the same tokens. The kernel requests them from memory meanwhile.
    pub(super) values: HeadLayout,
    /// `[head_dim]`: elements of each query, already scaled.
    pub(super) queries: &'a [[f32; QUERY_GROUP]],
    /// Scores of each query. Those beyond the last token are unspecified.
    pub(super) out: &'a mut [[f32; BLOCK]],
}

impl<E: KvElement> Kernel for Scores<'_, E> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Scores { keys: Tokens { input, layout, head_dim, start, len }, values, queries, out } = self;
        assert!((1..=BLOCK).contains(&len) && queries.len() == head_dim, "the block and the queries have their sizes");
        let mut place = Place::of(start, input.page_tokens);
        let mut first = 0;
        while first < len {
            let lanes = if out.len() <= FEW_QUERIES && len - first > V::LANES { 2 * V::LANES } else { V::LANES };
            let mut rows: [&[E]; 2 * LANES_MAX] = [&[]; 2 * LANES_MAX];
            for lane in 0..lanes {
                if first + lane >= len {
                    // Lanes without a token repeat the last one. Their scores get no weight.
                    rows[lane] = rows[lane - 1];
                    continue;
                }
                rows[lane] = elements(input, layout, head_dim, place);
                // SAFETY: the caller guarantees the instruction set.
                unsafe { prefetch::<V, E>(input, values, head_dim, place) };
                place.step(input.page_tokens);
            }
            let rows = &rows[..lanes];
            // SAFETY: the caller guarantees the instruction set. The rows have `head_dim` elements.
            unsafe {
                if lanes == V::LANES {
                    by_queries!(out.len(), score_lanes::<V, E; 1>(rows, queries, out, first));
                } else {
                    match out.len() {
                        1 => score_lanes::<V, E, 1, 2>(rows, queries, out, first),
                        2 => score_lanes::<V, E, 2, 2>(rows, queries, out, first),
                        _ => score_lanes::<V, E, FEW_QUERIES, 2>(rows, queries, out, first),
                    }
                }
            }
            first += lanes;
        }
    }
}

/// Computes the scores of `N` queries with the keys in `rows`, `G` vectors of tokens from `first`
/// on.
///
/// # Safety
/// The machine has the instruction set of `V`. There are `G · V::LANES` rows, each with an element
/// for each of `queries`.
///
/// # Panics
/// If there are fewer rows, or the tokens exceed the block.
// Constant indices keep the vectors in registers. Iterators over the arrays may not.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn score_lanes<V: Vector, E: KvElement, const N: usize, const G: usize>(
    rows: &[&[E]],
    queries: &[[f32; QUERY_GROUP]],
    out: &mut [[f32; BLOCK]],
    first: usize,
) {
    let out: &mut [[f32; BLOCK]; N] = (&mut out[..N]).try_into().expect("N queries");
    let rows = &rows[..G * V::LANES];
    let (whole, rest) = queries.split_at(queries.len() / V::LANES * V::LANES);
    // SAFETY: the caller guarantees the instruction set and the rows. A block has whole vectors.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; G];
        for (index, queries) in whole.chunks_exact(V::LANES).enumerate() {
            for group in 0..G {
                let mut keys = [V::splat(0.0); LANES_MAX];
                for row in 0..V::LANES {
                    keys[row] = E::load(rows[group * V::LANES + row].as_ptr().add(index * V::LANES));
                }
                V::transpose(&mut keys);
                for element in 0..V::LANES {
                    for n in 0..N {
                        sums[group][n] = V::splat(queries[element][n]).mul_add(keys[element], sums[group][n]);
                    }
                }
            }
        }
        for (element, query) in (whole.len()..).zip(rest) {
            for group in 0..G {
                let mut keys = [0.0; LANES_MAX];
                for row in 0..V::LANES {
                    keys[row] = rows[group * V::LANES + row][element].to_f32();
                }
                for n in 0..N {
                    sums[group][n] = V::splat(query[n]).mul_add(V::load_f32(keys.as_ptr()), sums[group][n]);
                }
            }
        }
        for group in 0..G {
            for n in 0..N {
                sums[group][n].store(out[n][first + group * V::LANES..][..V::LANES].as_mut_ptr());
            }
        }
    }
}

/// Adds the weighted values of a block to the sums of all queries.
///
/// Contract of [`Kernel::run`]: nothing beyond the instruction set.
pub(super) struct WeightedValues<'a, E> {
    pub(super) values: Tokens<'a, E>,
    /// Place and first token of the keys that the task needs next. The kernel requests a block of
    /// them from memory meanwhile.
    pub(super) next_keys: (HeadLayout, usize),
    /// Weights of each query.
    pub(super) weights: &'a [[f32; BLOCK]],
    /// `[queries][padded]`, with `padded` at least `head_dim`.
    pub(super) sums: &'a mut [f32],
}

impl<E: KvElement> Kernel for WeightedValues<'_, E> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let WeightedValues { values: Tokens { input, layout, head_dim, start, len }, next_keys, weights, sums } = self;
        let mut place = Place::of(start, input.page_tokens);
        let mut rows: [&[E]; BLOCK] = [&[]; BLOCK];
        for row in &mut rows[..len] {
            *row = elements(input, layout, head_dim, place);
            place.step(input.page_tokens);
        }
        let mut place = Place::of(next_keys.1, input.page_tokens);
        for (index, values) in rows[..len].chunks(VALUES_PER_REQUEST).enumerate() {
            for _ in 0..VALUES_PER_REQUEST {
                // SAFETY: the caller guarantees the instruction set.
                unsafe { prefetch::<V, E>(input, next_keys.0, head_dim, place) };
                place.step(input.page_tokens);
            }
            let first = index * VALUES_PER_REQUEST;
            // SAFETY: as above. The rows have `head_dim` elements.
            unsafe { by_queries!(weights.len(), add_rows::<V, E>(values, weights, first, head_dim, sums)) };
        }
    }
}

/// # Safety
/// The machine has the instruction set of `V`, and every row has `head_dim` elements.
#[inline(always)]
unsafe fn add_rows<V: Vector, E: KvElement, const N: usize>(
    rows: &[&[E]],
    weights: &[[f32; BLOCK]],
    first: usize,
    head_dim: usize,
    sums: &mut [f32],
) {
    let weights: [&[f32]; N] = std::array::from_fn(|n| &weights[n][first..first + rows.len()]);
    let padded = sums.len() / N;
    assert!(rows.len() <= BLOCK && head_dim <= padded, "the sums have a place for each element");
    let mut column = 0;
    // SAFETY: the caller guarantees the instruction set. Every call ends at or before `head_dim`.
    unsafe {
        // As many sums as tiles of matrix products keep in registers.
        if 8 * N <= 3 * V::TILE_ROWS {
            column = add_columns::<V, E, N, 8>(rows, &weights, head_dim, column, sums);
        }
        if 4 * N <= 3 * V::TILE_ROWS {
            column = add_columns::<V, E, N, 4>(rows, &weights, head_dim, column, sums);
        }
        column = add_columns::<V, E, N, 2>(rows, &weights, head_dim, column, sums);
        column = add_columns::<V, E, N, 1>(rows, &weights, head_dim, column, sums);
    }
    for column in column..head_dim {
        for (n, weights) in weights.iter().enumerate() {
            let sum = &mut sums[n * padded + column];
            *sum = weights.iter().zip(rows).fold(*sum, |sum, (weight, row)| weight.mul_add(row[column].to_f32(), sum));
        }
    }
}

/// Adds the weighted values in whole groups of `G` vectors, from `column` on. Returns the first
/// column that is left.
///
/// # Safety
/// As for [`add_rows`]. There are at most `BLOCK` rows, and `sums` is `[N][padded]`, with `padded`
/// at least `head_dim`.
// Constant indices keep the vectors in registers. Iterators over the arrays may not.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn add_columns<V: Vector, E: KvElement, const N: usize, const G: usize>(
    rows: &[&[E]],
    weights: &[&[f32]; N],
    head_dim: usize,
    mut column: usize,
    sums: &mut [f32],
) -> usize {
    let padded = sums.len() / N;
    let sums = sums.as_mut_ptr();
    while column + G * V::LANES <= head_dim {
        // SAFETY: the columns of the group lie in every row and in the sums of every query.
        unsafe {
            let at = |n: usize, group: usize| n * padded + column + group * V::LANES;
            let mut lanes = [[V::splat(0.0); G]; N];
            for n in 0..N {
                for group in 0..G {
                    lanes[n][group] = V::load_f32(sums.add(at(n, group)));
                }
            }
            for (key, row) in rows.iter().enumerate() {
                for group in 0..G {
                    let value = E::load::<V>(row.as_ptr().add(column + group * V::LANES));
                    for n in 0..N {
                        lanes[n][group] = V::splat(weights[n][key]).mul_add(value, lanes[n][group]);
                    }
                }
            }
            for n in 0..N {
                for group in 0..G {
                    lanes[n][group].store(sums.add(at(n, group)));
                }
            }
        }
        column += G * V::LANES;
    }
    column
}
