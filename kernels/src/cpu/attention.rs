//! Causal attention over paged keys and values, with several query heads per key head.
//!
//! A query meets its keys in blocks of [`BLOCK`] absolute positions, and carries a running maximum, sum and weighted
//! value from block to block (an online softmax). Inside a block a score is summed over the head's elements in order, the
//! weights in lanes by absolute position, the values position by position. None of that depends on the chunk a query is
//! computed in, nor on the size of a page.
//!
//! A task is some rows of one chunk times one key head: it copies each block of keys and values once, the keys
//! transposed, and uses the copy for all its queries.

use super::math::{LANES, exp, larger, max_lanes, sum_lanes};
use super::share::Shared;
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;
use std::ops::Range;

/// Keys of a block; a multiple of [`LANES`].
const BLOCK: usize = 64;
/// Queries a task should have (rows times query heads per key head).
const TASK_QUERIES: usize = 96;
/// Queries that go through the inner loops together; their sums stay in registers.
const TOGETHER: usize = 6;

/// Where keys (or values) of one head lie in a page, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadPlace {
    /// First element of the page's first token.
    pub start: usize,
    /// Elements from one token to the next.
    pub stride: usize,
}

/// What all chunks of a call share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key (and value) heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Multiplies the scores; usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// Consecutive queries of one sequence.
pub struct AttentionChunk<'a> {
    /// Position of the first query.
    pub position: usize,
    /// `[rows][query_stride]`; a row begins with its `[heads][head_dim]` queries.
    pub queries: &'a [f32],
    /// Elements from one row of `queries` to the next.
    pub query_stride: usize,
    /// The sequence's pages from its start, with keys and values of all positions up to the last query's.
    pub pages: &'a [&'a [f32]],
    /// Tokens per page.
    pub page_tokens: usize,
    /// Where each key head lies in a page.
    pub keys: &'a [HeadPlace],
    /// Where each value head lies in a page.
    pub values: &'a [HeadPlace],
    /// `[rows][heads][head_dim]`: the result.
    pub out: &'a mut [f32],
}

/// Query `r` of a chunk sees the keys at positions `0 ..= position + r`.
///
/// # Panics
/// If shapes do not agree, or if pages do not cover the positions.
pub fn attention(shape: &AttentionShape, chunks: &mut [AttentionChunk<'_>]) {
    let row_width = shape.heads * shape.head_dim;
    let rows_per_task = (TASK_QUERIES * shape.kv_heads / shape.heads).max(1);
    let mut tasks = Vec::new();
    for chunk in chunks.iter_mut() {
        let rows = chunk.out.len() / row_width;
        assert_eq!(chunk.out.len(), rows * row_width, "the result has whole rows");
        let AttentionChunk { position, queries, query_stride, pages, page_tokens, keys, values, .. } = *chunk;
        let source = Source { position, queries, query_stride, pages, page_tokens, keys, values };
        let out = std::sync::Arc::new(Shared::new(&mut *chunk.out));
        // The last rows have the most keys: they come first, so that no thread is left with the longest piece.
        for first in (0..rows).step_by(rows_per_task).rev() {
            let count = rows_per_task.min(rows - first);
            for head in 0..shape.kv_heads {
                tasks.push((source, std::sync::Arc::clone(&out), first, count, head));
            }
        }
    }
    let run = |(source, out, first, count, head): &(Source<'_>, std::sync::Arc<Shared<'_>>, usize, usize, usize)| {
        let op = Attend { shape, source, out, first: *first, rows: *count, kv_head: *head };
        Arch::new().dispatch(op);
    };
    if tasks.len() == 1 {
        return tasks.iter().for_each(run);
    }
    tasks.par_iter().with_max_len(1).for_each(run);
}

/// The parts of an [`AttentionChunk`] that are read.
#[derive(Clone, Copy)]
struct Source<'a> {
    position: usize,
    queries: &'a [f32],
    query_stride: usize,
    pages: &'a [&'a [f32]],
    page_tokens: usize,
    keys: &'a [HeadPlace],
    values: &'a [HeadPlace],
}

impl Source<'_> {
    /// The elements of the token at `position`.
    #[inline(always)]
    fn token(&self, place: HeadPlace, head_dim: usize, position: usize) -> &[f32] {
        let start = place.start + position % self.page_tokens * place.stride;
        &self.pages[position / self.page_tokens][start..start + head_dim]
    }
}

struct Attend<'a> {
    shape: &'a AttentionShape,
    source: &'a Source<'a>,
    out: &'a Shared<'a>,
    first: usize,
    rows: usize,
    kv_head: usize,
}

/// What a task works on. Query `q` is row `q / heads_per_kv`, head `q % heads_per_kv` of the task.
struct Work {
    head_dim: usize,
    /// `head_dim` in whole lanes.
    padded: usize,
    /// `[queries / TOGETHER][head_dim][TOGETHER]`, scaled; zero beyond the last query.
    queries: Vec<f32>,
    /// `[queries][padded]`: weighted values so far.
    sums: Vec<f32>,
    /// Per query: the largest score so far, and the sum of weights relative to it.
    running: Vec<(f32, f32)>,
    /// `[queries][BLOCK]`: scores, then weights, of this block.
    scores: Vec<f32>,
    /// `[lane groups][head_dim][LANES]`: keys of this block.
    keys: Vec<f32>,
    /// `[BLOCK][padded]`: values of this block.
    values: Vec<f32>,
}

impl NullaryFnOnce for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let heads_per_kv = self.shape.heads / self.shape.kv_heads;
        let mut work = self.gather_queries(heads_per_kv);
        let first_position = self.source.position + self.first;
        let end = first_position + self.rows;
        let mut limits = Vec::with_capacity(work.running.len());
        for start in (0..end).step_by(BLOCK) {
            let len = BLOCK.min(end - start);
            self.gather_block(&mut work, start, len);
            // Rows before `row` end before this block.
            let row = start.saturating_sub(first_position);
            let first_query = row * heads_per_kv;
            limits.clear();
            limits.extend(
                (first_query..work.running.len()).map(|q| (first_position + q / heads_per_kv + 1 - start).min(len)),
            );
            scores(&mut work, first_query, len.div_ceil(LANES));
            weights(&mut work, first_query, &limits);
            weighted_values(&mut work, first_query, &limits);
        }
        self.scatter(&work, heads_per_kv);
    }
}

impl Attend<'_> {
    #[inline(always)]
    fn gather_queries(&self, heads_per_kv: usize) -> Work {
        let head_dim = self.shape.head_dim;
        let padded = head_dim.next_multiple_of(LANES);
        let count = self.rows * heads_per_kv;
        let mut queries = vec![0.0; count.next_multiple_of(TOGETHER) * head_dim];
        for row in 0..self.rows {
            let start = (self.first + row) * self.source.query_stride + self.kv_head * heads_per_kv * head_dim;
            let heads = &self.source.queries[start..start + heads_per_kv * head_dim];
            for (index, head) in heads.chunks_exact(head_dim).enumerate() {
                let query = row * heads_per_kv + index;
                let group = &mut queries[query / TOGETHER * TOGETHER * head_dim..][..TOGETHER * head_dim];
                for (together, element) in group.chunks_exact_mut(TOGETHER).zip(head) {
                    together[query % TOGETHER] = element * self.shape.scale;
                }
            }
        }
        Work {
            head_dim,
            padded,
            queries,
            sums: vec![0.0; count * padded],
            running: vec![(f32::NEG_INFINITY, 0.0); count],
            scores: vec![0.0; count * BLOCK],
            keys: vec![0.0; BLOCK * head_dim],
            values: vec![0.0; BLOCK * padded],
        }
    }

    #[inline(always)]
    fn gather_block(&self, work: &mut Work, start: usize, len: usize) {
        let (key_place, value_place) = (self.source.keys[self.kv_head], self.source.values[self.kv_head]);
        for index in 0..len {
            let key = self.source.token(key_place, work.head_dim, start + index);
            let group = &mut work.keys[index / LANES * LANES * work.head_dim..][..LANES * work.head_dim];
            for (lanes, element) in group.chunks_exact_mut(LANES).zip(key) {
                lanes[index % LANES] = *element;
            }
            let value = self.source.token(value_place, work.head_dim, start + index);
            work.values[index * work.padded..][..work.head_dim].copy_from_slice(value);
        }
    }

    #[inline(always)]
    fn scatter(&self, work: &Work, heads_per_kv: usize) {
        let row_width = self.shape.heads * work.head_dim;
        let width = heads_per_kv * work.head_dim;
        for row in 0..self.rows {
            let at = (self.first + row) * row_width + self.kv_head * width;
            // SAFETY: every task has rows and a key head of its own.
            let out = unsafe { self.out.part(at, width) };
            for (index, out) in out.chunks_exact_mut(work.head_dim).enumerate() {
                let query = row * heads_per_kv + index;
                let scale = 1.0 / work.running[query].1;
                let sums = &work.sums[query * work.padded..];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * scale);
            }
        }
    }
}

/// Calls `$kernel::<N>` for N queries at a time.
macro_rules! by_count {
    ($count:expr, $kernel:ident($($argument:expr),*)) => {
        match $count {
            1 => $kernel::<1>($($argument),*),
            2 => $kernel::<2>($($argument),*),
            3 => $kernel::<3>($($argument),*),
            4 => $kernel::<4>($($argument),*),
            5 => $kernel::<5>($($argument),*),
            _ => $kernel::<TOGETHER>($($argument),*),
        }
    };
}

/// Scores of all queries from `first` on (and of those that share its group) with the keys of the first `groups` lane
/// groups.
#[inline(always)]
fn scores(work: &mut Work, first: usize, groups: usize) {
    let total = work.running.len();
    for query in (first / TOGETHER * TOGETHER..total).step_by(TOGETHER) {
        let count = TOGETHER.min(total - query);
        let (queries, _) = work.queries[query * work.head_dim..][..TOGETHER * work.head_dim].as_chunks::<TOGETHER>();
        let (out, _) = work.scores[query * BLOCK..(query + count) * BLOCK].as_chunks_mut::<BLOCK>();
        for group in 0..groups {
            let (keys, _) = work.keys[group * LANES * work.head_dim..][..LANES * work.head_dim].as_chunks::<LANES>();
            by_count!(count, score_group(queries, keys, group, out));
        }
    }
}

#[inline(always)]
fn score_group<const N: usize>(
    queries: &[[f32; TOGETHER]],
    keys: &[[f32; LANES]],
    group: usize,
    out: &mut [[f32; BLOCK]],
) {
    let mut sums = [[0.0f32; LANES]; N];
    for (query, keys) in queries.iter().zip(keys) {
        for n in 0..N {
            for lane in 0..LANES {
                sums[n][lane] = query[n].mul_add(keys[lane], sums[n][lane]);
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(&sums) {
        out[group * LANES..][..LANES].copy_from_slice(sums);
    }
}

/// Turns scores into weights relative to the running maximum, and brings earlier sums to the new maximum. `limits` are
/// the keys of this block that each query sees.
#[inline(always)]
fn weights(work: &mut Work, first: usize, limits: &[usize]) {
    for (query, &limit) in (first..).zip(limits) {
        let scores = &mut work.scores[query * BLOCK..(query + 1) * BLOCK];
        let (lanes, _) = scores.as_chunks_mut::<LANES>();
        let lanes = &mut lanes[..limit.div_ceil(LANES)];
        let last = lanes.len() - 1;
        for (lane, score) in lanes[last].iter_mut().enumerate() {
            if last * LANES + lane >= limit {
                *score = f32::NEG_INFINITY;
            }
        }
        let mut largest = [f32::NEG_INFINITY; LANES];
        for group in lanes.iter() {
            for lane in 0..LANES {
                largest[lane] = larger(group[lane], largest[lane]);
            }
        }
        let (old_max, old_sum) = work.running[query];
        let max = larger(old_max, max_lanes(largest));
        let mut sums = [0.0f32; LANES];
        for group in lanes.iter_mut() {
            for lane in 0..LANES {
                group[lane] = exp(group[lane] - max);
                sums[lane] += group[lane];
            }
        }
        let correction = exp(old_max - max);
        work.running[query] = (max, old_sum * correction + sum_lanes(sums));
        // In the first block there is nothing to correct; after it most blocks bring no new maximum.
        if correction != 1.0 {
            work.sums[query * work.padded..(query + 1) * work.padded].iter_mut().for_each(|sum| *sum *= correction);
        }
    }
}

#[inline(always)]
fn weighted_values(work: &mut Work, first: usize, limits: &[usize]) {
    for (index, limits) in limits.chunks(TOGETHER).enumerate() {
        let query = first + index * TOGETHER;
        let (padded, count) = (work.padded, limits.len());
        let (weights, _) = work.scores[query * BLOCK..(query + count) * BLOCK].as_chunks::<BLOCK>();
        let sums = &mut work.sums[query * padded..(query + count) * padded];
        // Limits only grow from query to query: what all see is what the first sees.
        let common = limits[0];
        by_count!(count, add_values(weights, &work.values, padded, 0..common, sums));
        for (n, &limit) in limits.iter().enumerate().filter(|&(_, &limit)| limit > common) {
            let sums = &mut sums[n * padded..(n + 1) * padded];
            add_values::<1>(&weights[n..], &work.values, padded, common..limit, sums);
        }
    }
}

/// Adds the weighted values of the keys `seen` of this block to the sums of the first `N` queries.
#[inline(always)]
fn add_values<const N: usize>(
    weights: &[[f32; BLOCK]],
    values: &[f32],
    padded: usize,
    seen: Range<usize>,
    sums: &mut [f32],
) {
    let weights: &[[f32; BLOCK]; N] = weights[..N].try_into().expect("N queries");
    for column in (0..padded).step_by(LANES) {
        let mut lanes = [[0.0f32; LANES]; N];
        for n in 0..N {
            lanes[n].copy_from_slice(&sums[n * padded + column..][..LANES]);
        }
        for key in seen.start..seen.end.min(BLOCK) {
            let value: &[f32; LANES] = values[key * padded + column..][..LANES].try_into().expect("LANES elements");
            for n in 0..N {
                let weight = weights[n][key];
                for lane in 0..LANES {
                    lanes[n][lane] = weight.mul_add(value[lane], lanes[n][lane]);
                }
            }
        }
        for n in 0..N {
            sums[n * padded + column..][..LANES].copy_from_slice(&lanes[n]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 20, scale: 0.22 };

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 22) as f32 - 2.0
        };
        (0..len).map(|_| next()).collect()
    }

    /// Keys and values `[token][head][element]` put into pages; what no token has written is NaN.
    fn pages(shape: &AttentionShape, keys: &[f32], values: &[f32], page_tokens: usize) -> Vec<Vec<f32>> {
        let width = shape.kv_heads * shape.head_dim;
        let tokens = keys.len() / width;
        let mut pages = vec![vec![f32::NAN; 2 * page_tokens * width]; tokens.div_ceil(page_tokens)];
        for t in 0..tokens {
            let page = &mut pages[t / page_tokens];
            let at = t % page_tokens * width;
            page[at..at + width].copy_from_slice(&keys[t * width..(t + 1) * width]);
            let at = at + page_tokens * width;
            page[at..at + width].copy_from_slice(&values[t * width..(t + 1) * width]);
        }
        pages
    }

    fn run(
        shape: &AttentionShape,
        queries: &[f32],
        pages: &[Vec<f32>],
        page_tokens: usize,
        position: usize,
    ) -> Vec<f32> {
        let width = shape.kv_heads * shape.head_dim;
        let place =
            |start| (0..shape.kv_heads).map(move |h| HeadPlace { start: start + h * shape.head_dim, stride: width });
        let (keys, values): (Vec<_>, Vec<_>) = (place(0).collect(), place(page_tokens * width).collect());
        let pages: Vec<&[f32]> = pages.iter().map(Vec::as_slice).collect();
        let mut out = vec![f32::NAN; queries.len()];
        let chunk = AttentionChunk {
            position,
            queries,
            query_stride: shape.heads * shape.head_dim,
            pages: &pages,
            page_tokens,
            keys: &keys,
            values: &values,
            out: &mut out,
        };
        attention(shape, &mut [chunk]);
        out
    }

    fn naive(
        shape: &AttentionShape,
        query: &[f32],
        head: usize,
        keys: &[f32],
        values: &[f32],
        seen: usize,
    ) -> Vec<f64> {
        let (width, dim) = (shape.kv_heads * shape.head_dim, shape.head_dim);
        let at = |t: usize| t * width + head / (shape.heads / shape.kv_heads) * dim;
        let score = |t: usize| {
            let dot: f64 = (0..dim).map(|d| f64::from(query[d]) * f64::from(keys[at(t) + d])).sum();
            dot * f64::from(shape.scale)
        };
        let scores: Vec<f64> = (0..seen).map(score).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        (0..dim)
            .map(|d| (0..seen).map(|t| (scores[t] - max).exp() / sum * f64::from(values[at(t) + d])).sum())
            .collect()
    }

    #[test]
    fn agrees_with_the_formula() {
        for (shape, tokens) in [
            (SHAPE, 150),
            (AttentionShape { heads: 1, kv_heads: 1, head_dim: 1, scale: 1.0 }, 3),
            (AttentionShape { heads: 4, kv_heads: 4, head_dim: 32, scale: 0.2 }, 70),
            (AttentionShape { heads: 8, kv_heads: 1, head_dim: 16, scale: 0.3 }, 65),
        ] {
            let width = shape.kv_heads * shape.head_dim;
            let (keys, values) = (noise(tokens * width, 1), noise(tokens * width, 2));
            let queries = noise(tokens * shape.heads * shape.head_dim, 3);
            let out = run(&shape, &queries, &pages(&shape, &keys, &values, 16), 16, 0);
            for (index, (out, query)) in out.chunks(shape.head_dim).zip(queries.chunks(shape.head_dim)).enumerate() {
                let (row, head) = (index / shape.heads, index % shape.heads);
                let exact = naive(&shape, query, head, &keys, &values, row + 1);
                assert!(out.iter().zip(exact).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5), "row {row} head {head}");
            }
        }
    }

    #[test]
    fn chunks_and_pages_change_no_bit() {
        let tokens = 211;
        let (width, row) = (SHAPE.kv_heads * SHAPE.head_dim, SHAPE.heads * SHAPE.head_dim);
        let (keys, values) = (noise(tokens * width, 4), noise(tokens * width, 5));
        let queries = noise(tokens * row, 6);
        let whole = run(&SHAPE, &queries, &pages(&SHAPE, &keys, &values, 16), 16, 0);
        for (page_tokens, chunk) in [(16, 1), (7, 13), (64, 64), (300, 100), (1, 33)] {
            for first in (0..tokens).step_by(chunk) {
                let end = (first + chunk).min(tokens);
                // Only what lies before the chunk's end is in the pages: the rest is NaN.
                let pages = pages(&SHAPE, &keys[..end * width], &values[..end * width], page_tokens);
                let part = run(&SHAPE, &queries[first * row..end * row], &pages, page_tokens, first);
                let same = part.iter().zip(&whole[first * row..]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "pages of {page_tokens}, chunk {first}..{end}");
            }
        }
    }
}
