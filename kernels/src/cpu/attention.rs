//! Causal attention over paged keys and values, with grouped query heads. Keys and values become
//! `f32` as they are read.
//!
//! Invariants:
//! - The result of a query does not depend on its chunk or on the page size, not even in one bit.
//! - Keys are taken in spans of [`SPAN`] absolute positions, and there in blocks of [`BLOCK`]. A
//!   running maximum, sum and weighted value carry over from block to block (online softmax). Each
//!   span begins afresh, and the spans are merged in order. So threads can share one long sequence.
//! - Inside a block, a score sums the head's elements in order. Weights are summed in lanes by
//!   absolute position, values position by position.
//!
//! One task computes some rows of one chunk for one key head. It copies each block of keys and
//! values once, transposes the keys, and uses the copy for all of its queries. With a single row,
//! a task has several key heads and reads them in place: neighbouring heads are neighbours in
//! memory, too.

mod gather;
mod in_place;

use super::disjoint::DisjointSlice;
use super::element::KvElement;
use super::math::{LANES, exp, larger, max_lanes, sum_lanes};
use super::vector::InstructionSet;
use gather::GatherBlock;
use half::{bf16, f16};
use in_place::{Scores, Tokens, WeightedValues};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Keys per block, a multiple of [`LANES`]. A block's copies of keys and values stay in the L1 or
/// L2 cache.
const BLOCK: usize = 64;
/// Keys per span, a multiple of [`BLOCK`]. Fixed, because it decides the order of the sums.
pub const ATTENTION_SPAN: usize = 1024;
const SPAN: usize = ATTENTION_SPAN;
const _: () = assert!(SPAN.is_multiple_of(BLOCK));
/// Spans per thread that threads compute before they merge them. More leave fewer waits for the
/// slowest thread, fewer keep less memory.
const SPANS_PER_THREAD: usize = 4;
/// Target number of queries per task (rows times query heads per key head). More queries amortise
/// the copy of a block, fewer leave enough tasks for all threads.
const TASK_QUERIES: usize = 96;
/// Queries that share one pass over the keys. Six accumulators of [`LANES`] fit into the vector
/// registers of AVX2 and AVX-512.
const QUERY_GROUP: usize = 6;

/// Position of one head's keys (or values) in a page, in elements from the start of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLayout {
    pub start: usize,
    /// Distance from one token to the next.
    pub stride: usize,
}

/// Head counts and scaling, common to all chunks of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    /// Key heads, and as many value heads. Divides `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor applied to the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// Consecutive queries of one sequence, over keys and values of type `E`.
pub struct AttentionChunk<'a, E> {
    pub position: usize,
    /// `[rows][query_stride]`. Each row begins with its `[heads][head_dim]` queries.
    pub queries: &'a [f32],
    /// Distance from one row of `queries` to the next, in elements.
    pub query_stride: usize,
    /// The sequence's pages from position 0. They hold the keys and values up to the last query's
    /// position.
    pub pages: &'a [&'a [E]],
    pub page_tokens: usize,
    /// Layout of each key head in a page.
    pub keys: &'a [HeadLayout],
    /// Layout of each value head in a page.
    pub values: &'a [HeadLayout],
    /// Result, `[rows][heads][head_dim]`.
    pub out: &'a mut [f32],
}

/// Computes causal attention for every chunk. Query `r` of a chunk sees the keys up to position
/// `position + r`.
///
/// Memory: a workspace per thread (190 KiB for heads of 128 elements), and at most eight results
/// of tasks per thread (48 KiB each). The length of the sequences does not matter.
///
/// # Panics
/// If the shapes disagree, or if the pages do not cover the positions.
pub fn attention<E: AttentionElement>(shape: &AttentionShape, chunks: &mut [AttentionChunk<'_, E>]) {
    E::attend(shape, chunks);
}

/// Element of pages that [`attention`] reads.
pub trait AttentionElement: KvElement {
    #[doc(hidden)]
    fn attend(shape: &AttentionShape, chunks: &mut [AttentionChunk<'_, Self>]);
}

// Never inlined. The compiler generates the code of a generic function in each crate that calls it:
// three elements, each for three instruction sets.
macro_rules! attention_element {
    ($($element:ty),*) => {$(
        impl AttentionElement for $element {
            #[inline(never)]
            fn attend(shape: &AttentionShape, chunks: &mut [AttentionChunk<'_, $element>]) {
                compute(shape, chunks);
            }
        }
    )*};
}

attention_element!(f32, f16, bf16);

fn compute<E: KvElement>(shape: &AttentionShape, chunks: &mut [AttentionChunk<'_, E>]) {
    let row_width = shape.heads * shape.head_dim;
    let rows_per_task = (TASK_QUERIES * shape.kv_heads / shape.heads).max(1);
    let threads = rayon::current_num_threads();
    let is_single = |chunk: &AttentionChunk<'_, E>| chunk.out.len() == row_width;
    let single_spans: usize = chunks.iter().filter(|chunk| is_single(chunk)).map(|c| c.position / SPAN + 1).sum();
    // The last span of a sequence has few keys, so threads need some spans each to end together.
    let heads_per_single_row = (shape.kv_heads * single_spans / (2 * threads)).clamp(1, shape.kv_heads);
    let mut tasks = Vec::new();
    for chunk in chunks.iter_mut() {
        let rows = chunk.out.len() / row_width;
        assert_eq!(chunk.out.len(), rows * row_width, "the result has whole rows");
        let AttentionChunk { position, queries, query_stride, pages, page_tokens, keys, values, .. } = *chunk;
        let input = ChunkInput { position, queries, query_stride, pages, page_tokens, keys, values };
        let out = Arc::new(DisjointSlice::new(&mut *chunk.out));
        // The last rows see the most keys. Starting with them keeps the longest task off the end of
        // the call, where other threads would wait for it.
        for first in (0..rows).step_by(rows_per_task).rev() {
            let count = rows_per_task.min(rows - first);
            let heads_per_task = if rows == 1 && shape.reads_in_place(1) { heads_per_single_row } else { 1 };
            for head in (0..shape.kv_heads).step_by(heads_per_task) {
                let heads = head..shape.kv_heads.min(head + heads_per_task);
                tasks.push((input, Arc::clone(&out), first, count, heads));
            }
        }
    }
    let tasks: Vec<AttentionTask<'_, E>> = (tasks.iter())
        .map(|(input, out, first, rows, kv_heads)| AttentionTask {
            shape,
            input,
            out,
            first: *first,
            rows: *rows,
            kv_heads: kv_heads.clone(),
        })
        .collect();
    let spans: usize = tasks.iter().map(AttentionTask::spans).sum();
    if tasks.len() == 1 && spans == 1 {
        return tasks.into_iter().for_each(|task| Arch::new().dispatch(task));
    }
    if tasks.len() >= 2 * threads || spans == tasks.len() {
        return tasks.into_par_iter().with_max_len(1).for_each(|task| Arch::new().dispatch(task));
    }
    // Few queries with many keys: one long sequence in decode, for example.
    let spans_at_once = (SPANS_PER_THREAD * threads).div_ceil(tasks.len());
    tasks.into_par_iter().with_max_len(1).for_each(|task| task.run_on_all_threads(spans_at_once));
}

impl AttentionShape {
    fn heads_per_kv(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns `true` for a task of so few queries that a copy of the keys would not pay.
    fn reads_in_place(&self, rows: usize) -> bool {
        rows == 1 && self.heads_per_kv() <= QUERY_GROUP
    }
}

/// Read-only part of an [`AttentionChunk`], shared by the tasks of the chunk.
#[derive(Clone, Copy)]
struct ChunkInput<'a, E> {
    position: usize,
    queries: &'a [f32],
    query_stride: usize,
    pages: &'a [&'a [E]],
    page_tokens: usize,
    keys: &'a [HeadLayout],
    values: &'a [HeadLayout],
}

struct AttentionTask<'a, E> {
    shape: &'a AttentionShape,
    input: &'a ChunkInput<'a, E>,
    out: &'a DisjointSlice<'a>,
    first: usize,
    rows: usize,
    /// One, unless the task reads in place.
    kv_heads: Range<usize>,
}

/// Buffers of one task. Query `q` is row `q / heads_per_kv`, head `q % heads_per_kv` of the task.
/// In a task that reads in place, it is query `q % heads_per_kv` of key head `q / heads_per_kv`.
struct Workspace {
    head_dim: usize,
    /// `[groups][head_dim][QUERY_GROUP]`, already scaled, zero beyond the last query. Each key head
    /// begins with a group.
    queries: Vec<f32>,
    /// `[queries][BLOCK]`: scores of the current block, replaced in place by weights.
    scores: Vec<f32>,
    /// `[lane groups][head_dim][LANES]`: transposed keys of the current block. Empty for a task
    /// that reads in place, as are the values.
    keys: Vec<f32>,
    /// `[BLOCK][padded]`: values of the current block.
    values: Vec<f32>,
    /// Result of the current span.
    span: Totals,
    #[cfg(test)]
    _live: tests::Live,
}

/// Sums of a task's queries over some spans.
struct Totals {
    /// `head_dim` rounded up to whole lanes.
    padded: usize,
    /// `[queries][padded]`: weighted sum of the values.
    sums: Vec<f32>,
    /// Per query: the largest score, and the sum of the weights relative to it.
    running: Vec<(f32, f32)>,
    #[cfg(test)]
    _live: tests::Live,
}

impl Totals {
    /// Sums over no keys.
    fn new(queries: usize, padded: usize) -> Totals {
        Totals {
            padded,
            sums: vec![0.0; queries * padded],
            running: vec![(f32::NEG_INFINITY, 0.0); queries],
            #[cfg(test)]
            _live: tests::Live::new(tests::Buffer::Totals),
        }
    }

    fn clear(&mut self) {
        self.sums.fill(0.0);
        self.running.fill((f32::NEG_INFINITY, 0.0));
    }

    /// Adds the sums of the next span, for the queries from `first` on. The first span is copied
    /// exactly: its factor is 1, and that of nothing is 0.
    #[inline(always)]
    fn merge(&mut self, span: &Totals, first: usize) {
        let padded = self.padded;
        for query in first..self.running.len() {
            let ((max, sum), (span_max, span_sum)) = (self.running[query], span.running[query]);
            let new_max = larger(max, span_max);
            let (scale, span_scale) = (exp(max - new_max), exp(span_max - new_max));
            self.running[query] = (new_max, sum * scale + span_sum * span_scale);
            let range = query * padded..(query + 1) * padded;
            for (total, part) in self.sums[range.clone()].iter_mut().zip(&span.sums[range]) {
                *total = *total * scale + part * span_scale;
            }
        }
    }
}

/// Computes one span of a task. The caller merges the spans.
struct SpanTask<'a, E> {
    task: &'a AttentionTask<'a, E>,
    span: usize,
}

impl<E: KvElement> NullaryFnOnce for SpanTask<'_, E> {
    type Output = Totals;

    #[inline(always)]
    fn call(self) -> Totals {
        let mut work = self.task.gather_queries();
        self.task.compute_span(&mut work, self.span);
        work.span
    }
}

impl<E: KvElement> NullaryFnOnce for AttentionTask<'_, E> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut work = self.gather_queries();
        let mut totals = Totals::new(self.queries(), work.span.padded);
        for span in 0..self.spans() {
            self.compute_span(&mut work, span);
            totals.merge(&work.span, self.first_query(span * SPAN));
        }
        self.write_results(&totals);
    }
}

impl<E: KvElement> AttentionTask<'_, E> {
    /// Computes the task with all threads of the pool, `spans_at_once` spans at a time. Merges the
    /// spans one by one in their order, so the number changes no bit.
    fn run_on_all_threads(&self, spans_at_once: usize) {
        let mut totals = Totals::new(self.queries(), self.padded());
        for first in (0..self.spans()).step_by(spans_at_once) {
            let spans = first..self.spans().min(first + spans_at_once);
            let compute = |span| Arch::new().dispatch(SpanTask { task: self, span });
            let results: Vec<Totals> = spans.clone().into_par_iter().with_max_len(1).map(compute).collect();
            for (span, result) in spans.zip(&results) {
                totals.merge(result, self.first_query(span * SPAN));
            }
        }
        self.write_results(&totals);
    }

    fn heads_per_kv(&self) -> usize {
        self.shape.heads_per_kv()
    }

    fn queries(&self) -> usize {
        self.rows * self.heads_per_kv() * self.kv_heads.len()
    }

    fn padded(&self) -> usize {
        self.shape.head_dim.next_multiple_of(LANES)
    }

    fn first_position(&self) -> usize {
        self.input.position + self.first
    }

    fn spans(&self) -> usize {
        (self.first_position() + self.rows).div_ceil(SPAN)
    }

    /// First query that sees the key at position `start`. Earlier rows lie before it.
    #[inline(always)]
    fn first_query(&self, start: usize) -> usize {
        start.saturating_sub(self.first_position()) * self.heads_per_kv()
    }

    /// Computes the sums of the queries over the keys of one span, into `work`.
    #[inline(always)]
    fn compute_span(&self, work: &mut Workspace, span: usize) {
        work.span.clear();
        let first_position = self.first_position();
        let heads_per_kv = self.heads_per_kv();
        let end = (first_position + self.rows).min((span + 1) * SPAN);
        let mut limits = Vec::with_capacity(self.queries());
        for start in (span * SPAN..end).step_by(BLOCK) {
            let len = BLOCK.min(end - start);
            if self.shape.reads_in_place(self.rows) {
                self.compute_in_place(work, start..start + len);
                continue;
            }
            self.gather_block(work, start, len);
            let first_query = self.first_query(start);
            limits.clear();
            limits.extend(
                (first_query..self.queries()).map(|q| (first_position + q / heads_per_kv + 1 - start).min(len)),
            );
            scores(work, first_query, len.div_ceil(LANES));
            weights(work, first_query, &limits);
            weighted_values(work, first_query, &limits);
        }
    }

    /// Adds a block to the sums of the only row, which sees all of its keys.
    #[inline(always)]
    fn compute_in_place(&self, work: &mut Workspace, block: Range<usize>) {
        let (set, input, head_dim, padded) = (InstructionSet::best(), self.input, work.head_dim, work.span.padded);
        let count = self.shape.heads_per_kv();
        for (index, head) in self.kv_heads.clone().enumerate() {
            let next_keys = match head + 1 {
                next if next < self.kv_heads.end => (input.keys[next], block.start),
                _ => (input.keys[self.kv_heads.start], block.end),
            };
            let tokens = |layout| Tokens { input, layout, head_dim, start: block.start, len: block.len() };
            let (queries, _) = work.queries[index * QUERY_GROUP * head_dim..][..QUERY_GROUP * head_dim].as_chunks();
            let first = index * count;
            let scores = first * BLOCK..(first + count) * BLOCK;
            let (out, _) = work.scores[scores.clone()].as_chunks_mut();
            let kernel = Scores { keys: tokens(input.keys[head]), values: input.values[head], queries, out };
            // SAFETY: the machine has its best instruction set. The kernel demands nothing else.
            unsafe { set.run(kernel) };
            weights(work, first, &[block.len(); QUERY_GROUP][..count]);
            let (weights, _) = work.scores[scores].as_chunks();
            let sums = &mut work.span.sums[first * padded..(first + count) * padded];
            // SAFETY: as above.
            unsafe { set.run(WeightedValues { values: tokens(input.values[head]), next_keys, weights, sums }) };
        }
    }

    #[inline(always)]
    fn gather_queries(&self) -> Workspace {
        let copied = if self.shape.reads_in_place(self.rows) { 0 } else { BLOCK };
        let heads_per_kv = self.heads_per_kv();
        let head_dim = self.shape.head_dim;
        let (padded, count) = (self.padded(), self.queries());
        let groups = self.kv_heads.len() * (self.rows * heads_per_kv).div_ceil(QUERY_GROUP);
        let mut queries = vec![0.0; groups * QUERY_GROUP * head_dim];
        for row in 0..self.rows {
            let start = (self.first + row) * self.input.query_stride + self.kv_heads.start * heads_per_kv * head_dim;
            let heads = &self.input.queries[start..start + self.kv_heads.len() * heads_per_kv * head_dim];
            for (index, head) in heads.chunks_exact(head_dim).enumerate() {
                // The first part counts with several key heads, the second with several rows.
                let query = index / heads_per_kv * QUERY_GROUP + row * heads_per_kv + index % heads_per_kv;
                let group = &mut queries[query / QUERY_GROUP * QUERY_GROUP * head_dim..][..QUERY_GROUP * head_dim];
                for (elements, element) in group.chunks_exact_mut(QUERY_GROUP).zip(head) {
                    elements[query % QUERY_GROUP] = element * self.shape.scale;
                }
            }
        }
        Workspace {
            head_dim,
            queries,
            scores: vec![0.0; count * BLOCK],
            keys: vec![0.0; copied * head_dim],
            values: vec![0.0; copied * padded],
            span: Totals::new(count, padded),
            #[cfg(test)]
            _live: tests::Live::new(tests::Buffer::Workspace),
        }
    }

    #[inline(always)]
    fn gather_block(&self, work: &mut Workspace, start: usize, len: usize) {
        let gather = GatherBlock {
            input: self.input,
            key_layout: self.input.keys[self.kv_heads.start],
            value_layout: self.input.values[self.kv_heads.start],
            head_dim: work.head_dim,
            start,
            len,
            keys: &mut work.keys,
            values: &mut work.values,
        };
        // SAFETY: the machine has its best instruction set, and the kernel demands nothing else.
        unsafe { InstructionSet::best().run(gather) };
    }

    #[inline(always)]
    fn write_results(&self, totals: &Totals) {
        let heads_per_kv = self.heads_per_kv();
        let head_dim = self.shape.head_dim;
        let row_width = self.shape.heads * head_dim;
        let width = heads_per_kv * head_dim;
        for row in 0..self.rows {
            let at = (self.first + row) * row_width + self.kv_heads.start * width;
            // SAFETY: tasks differ in their rows or in their key heads, so no two write the same
            // range.
            let out = unsafe { self.out.range_mut(at, self.kv_heads.len() * width) };
            for (index, out) in out.chunks_exact_mut(head_dim).enumerate() {
                let query = row * heads_per_kv + index;
                let scale = 1.0 / totals.running[query].1;
                let sums = &totals.sums[query * totals.padded..];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * scale);
            }
        }
    }
}

/// Calls `$kernel::<N, G>` with `N` as a constant, so that the compiler keeps the accumulators in
/// registers. With few queries, `G` groups of lanes at a time hide the latency of an addition.
macro_rules! by_count {
    ($count:expr, $kernel:ident($($argument:expr),*)) => {
        match $count {
            1 => $kernel::<1, 4>($($argument),*),
            2 => $kernel::<2, 2>($($argument),*),
            3 => $kernel::<3, 2>($($argument),*),
            4 => $kernel::<4, 1>($($argument),*),
            5 => $kernel::<5, 1>($($argument),*),
            _ => $kernel::<QUERY_GROUP, 1>($($argument),*),
        }
    };
}

/// Computes the scores of the queries from `first` on with the keys of the first `groups` lane
/// groups, at least. Also recomputes earlier queries in `first`'s group; their scores are not read
/// again.
#[inline(always)]
fn scores(work: &mut Workspace, first: usize, groups: usize) {
    let total = work.span.running.len();
    for query in (first / QUERY_GROUP * QUERY_GROUP..total).step_by(QUERY_GROUP) {
        let count = QUERY_GROUP.min(total - query);
        let (queries, _) =
            work.queries[query * work.head_dim..][..QUERY_GROUP * work.head_dim].as_chunks::<QUERY_GROUP>();
        let (out, _) = work.scores[query * BLOCK..(query + count) * BLOCK].as_chunks_mut::<BLOCK>();
        let (keys, _) = work.keys.as_chunks::<LANES>();
        by_count!(count, score_groups(queries, keys, groups, out));
    }
}

/// Computes the scores of `N` queries, with `G` lane groups at a time.
// Constant indices keep the sums in registers. Iterators over the arrays may not.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn score_groups<const N: usize, const G: usize>(
    queries: &[[f32; QUERY_GROUP]],
    keys: &[[f32; LANES]],
    groups: usize,
    out: &mut [[f32; BLOCK]],
) {
    const { assert!((BLOCK / LANES).is_multiple_of(G)) };
    for first in (0..groups).step_by(G) {
        let keys: [_; G] = std::array::from_fn(|group| &keys[(first + group) * queries.len()..][..queries.len()]);
        let mut sums = [[[0.0f32; LANES]; N]; G];
        for (element, query) in queries.iter().enumerate() {
            for group in 0..G {
                for n in 0..N {
                    for lane in 0..LANES {
                        sums[group][n][lane] = query[n].mul_add(keys[group][element][lane], sums[group][n][lane]);
                    }
                }
            }
        }
        for (group, sums) in (first..).zip(&sums) {
            for (out, sums) in out.iter_mut().zip(sums) {
                out[group * LANES..][..LANES].copy_from_slice(sums);
            }
        }
    }
}

/// Turns scores into weights relative to the running maximum, and rescales earlier sums to the new
/// maximum. `limits` holds, per query, the number of visible keys in this block.
#[inline(always)]
fn weights(work: &mut Workspace, first: usize, limits: &[usize]) {
    for (query, &limit) in (first..).zip(limits) {
        let scores = &mut work.scores[query * BLOCK..(query + 1) * BLOCK];
        let (lanes, _) = scores.as_chunks_mut::<LANES>();
        let lanes = &mut lanes[..limit.div_ceil(LANES)];
        let last = lanes.len() - 1;
        // Keys behind the limit belong to later positions. A weight of exp(-inf) = 0 hides them.
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
        let (old_max, old_sum) = work.span.running[query];
        let max = larger(old_max, max_lanes(largest));
        let mut sums = [0.0f32; LANES];
        for group in lanes.iter_mut() {
            for lane in 0..LANES {
                group[lane] = exp(group[lane] - max);
                sums[lane] += group[lane];
            }
        }
        let correction = exp(old_max - max);
        work.span.running[query] = (max, old_sum * correction + sum_lanes(sums));
        // The first block has nothing to rescale, and most later blocks bring no new maximum.
        if correction != 1.0 {
            let padded = work.span.padded;
            work.span.sums[query * padded..(query + 1) * padded].iter_mut().for_each(|sum| *sum *= correction);
        }
    }
}

#[inline(always)]
fn weighted_values(work: &mut Workspace, first: usize, limits: &[usize]) {
    for (index, limits) in limits.chunks(QUERY_GROUP).enumerate() {
        let query = first + index * QUERY_GROUP;
        let (padded, count) = (work.span.padded, limits.len());
        let (weights, _) = work.scores[query * BLOCK..(query + count) * BLOCK].as_chunks::<BLOCK>();
        let sums = &mut work.span.sums[query * padded..(query + count) * padded];
        // Limits never decrease from query to query, so every query sees the keys that the first
        // sees.
        let common = limits[0];
        by_count!(count, add_values(weights, &work.values, padded, 0..common, sums));
        for (n, &limit) in limits.iter().enumerate().filter(|&(_, &limit)| limit > common) {
            let sums = &mut sums[n * padded..(n + 1) * padded];
            add_values::<1, 4>(&weights[n..], &work.values, padded, common..limit, sums);
        }
    }
}

/// Adds the weighted values of the keys in `seen` to the sums of the first `N` queries, with `G`
/// vectors at a time.
#[inline(always)]
fn add_values<const N: usize, const G: usize>(
    weights: &[[f32; BLOCK]],
    values: &[f32],
    padded: usize,
    seen: Range<usize>,
    sums: &mut [f32],
) {
    let weights: &[[f32; BLOCK]; N] = weights[..N].try_into().expect("N queries");
    let several = padded / (G * LANES) * (G * LANES);
    for column in (0..several).step_by(G * LANES) {
        add_columns::<N, G>(weights, values, padded, column, seen.clone(), sums);
    }
    for column in (several..padded).step_by(LANES) {
        add_columns::<N, 1>(weights, values, padded, column, seen.clone(), sums);
    }
}

/// Adds the weighted values in `G` groups of lanes, from `column` on.
// Constant indices keep the sums in registers. Iterators over the arrays may not.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn add_columns<const N: usize, const G: usize>(
    weights: &[[f32; BLOCK]; N],
    values: &[f32],
    padded: usize,
    column: usize,
    seen: Range<usize>,
    sums: &mut [f32],
) {
    let mut lanes = [[[0.0f32; LANES]; G]; N];
    for n in 0..N {
        lanes[n].as_flattened_mut().copy_from_slice(&sums[n * padded + column..][..G * LANES]);
    }
    for key in seen.start..seen.end.min(BLOCK) {
        let (value, _) = values[key * padded + column..][..G * LANES].as_chunks::<LANES>();
        for n in 0..N {
            let weight = weights[n][key];
            for group in 0..G {
                for lane in 0..LANES {
                    lanes[n][group][lane] = weight.mul_add(value[group][lane], lanes[n][group][lane]);
                }
            }
        }
    }
    for n in 0..N {
        sums[n * padded + column..][..G * LANES].copy_from_slice(lanes[n].as_flattened());
    }
}

#[cfg(test)]
mod tests;
