use super::*;
use std::cell::RefCell;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

#[derive(Clone, Copy)]
pub(super) enum Buffer {
    Workspace,
    Totals,
}

/// Buffers in use, and the most so far, by [`Buffer`].
#[derive(Default)]
struct Gauge([(AtomicIsize, AtomicIsize); 2]);

thread_local! {
    /// Gauge of the threads of one pool. Other tests run meanwhile.
    static GAUGE: RefCell<Option<Arc<Gauge>>> = const { RefCell::new(None) };
}

/// Counts a buffer in the gauge of the thread that makes it.
pub(super) struct Live(Option<Arc<Gauge>>, Buffer);

impl Live {
    pub(super) fn new(buffer: Buffer) -> Live {
        let gauge = GAUGE.with_borrow(Clone::clone);
        if let Some(gauge) = &gauge {
            let (live, most) = &gauge.0[buffer as usize];
            most.fetch_max(live.fetch_add(1, Relaxed) + 1, Relaxed);
        }
        Live(gauge, buffer)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(gauge) = &self.0 {
            gauge.0[self.1 as usize].0.fetch_sub(1, Relaxed);
        }
    }
}

const SHAPE: AttentionShape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 20, scale: 0.22 };

fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..len).map(|_| next()).collect()
}

/// Stores keys and values `[token][head][element]` in pages. Slots without a token hold NaN.
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

fn run<E: AttentionElement>(
    shape: &AttentionShape,
    queries: &[f32],
    pages: &[Vec<E>],
    page_tokens: usize,
    position: usize,
) -> Vec<f32> {
    let width = shape.kv_heads * shape.head_dim;
    let layouts =
        |start| (0..shape.kv_heads).map(move |h| HeadLayout { start: start + h * shape.head_dim, stride: width });
    let (keys, values): (Vec<_>, Vec<_>) = (layouts(0).collect(), layouts(page_tokens * width).collect());
    let pages: Vec<&[E]> = pages.iter().map(Vec::as_slice).collect();
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

fn reference(
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
    (0..dim).map(|d| (0..seen).map(|t| (scores[t] - max).exp() / sum * f64::from(values[at(t) + d])).sum()).collect()
}

#[test]
fn attention_agrees_with_the_formula_in_f64() {
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
            let exact = reference(&shape, query, head, &keys, &values, row + 1);
            assert!(out.iter().zip(exact).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5), "row {row} head {head}");
        }
    }
}

#[test]
fn elements_of_two_bytes_give_the_bits_of_the_same_values_in_f32() {
    fn check<E: AttentionElement>(name: &str) {
        let (width, row) = (SHAPE.kv_heads * SHAPE.head_dim, SHAPE.heads * SHAPE.head_dim);
        let round = |x: &f32| E::from_f32(*x).to_f32();
        let keys: Vec<f32> = noise(90 * width, 7).iter().map(round).collect();
        let values: Vec<f32> = noise(90 * width, 8).iter().map(round).collect();
        let pages = pages(&SHAPE, &keys, &values, 16);
        let narrow: Vec<Vec<E>> = pages.iter().map(|page| page.iter().map(|x| E::from_f32(*x)).collect()).collect();
        let queries = noise(90 * row, 9);
        let (wide, narrow) = (run(&SHAPE, &queries, &pages, 16, 0), run(&SHAPE, &queries, &narrow, 16, 0));
        assert!(wide.iter().zip(&narrow).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
    }
    check::<half::bf16>("bf16");
    check::<half::f16>("f16");
}

#[test]
fn threads_that_share_a_sequence_change_no_bit() {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 8, scale: 0.3 };
    let tokens = 2 * SPAN + 300;
    let (keys, values) = (noise(tokens * 8, 10), noise(tokens * 8, 11));
    let queries = noise(tokens * 16, 12);
    let pages = pages(&shape, &keys, &values, 32);
    let at = |position: usize, rows: usize| {
        run(&shape, &queries[position * 16..(position + rows) * 16], &pages, 32, position)
    };
    let with_threads = |threads: usize, position: usize, rows: usize| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| at(position, rows))
    };
    let whole = with_threads(1, 0, tokens);
    for threads in [1, 2, 40] {
        for (position, rows) in [(0, tokens), (tokens - 1, 1), (SPAN - 3, 7), (2 * SPAN, 1), (SPAN - 1, 1)] {
            let part = with_threads(threads, position, rows);
            let same = part.iter().zip(&whole[position * 16..]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{threads} threads, {rows} rows from {position}");
        }
    }
    let exact = reference(&shape, &queries[(tokens - 1) * 16..][..8], 0, &keys, &values, tokens);
    assert!(whole[(tokens - 1) * 16..].iter().zip(exact).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5));
}

#[test]
fn memory_for_a_long_sequence_follows_from_the_threads() {
    let shape = AttentionShape { heads: 2, kv_heads: 2, head_dim: 2, scale: 0.3 };
    let tokens = 64 * SPAN - 100;
    let (keys, values) = (noise(tokens * 4, 13), noise(tokens * 4, 14));
    let pages = pages(&shape, &keys, &values, 64);
    let queries = noise(5 * 4, 15);
    let run = |threads| {
        let gauge = Arc::new(Gauge::default());
        let (sent, set) = (Arc::clone(&gauge), |gauge| GAUGE.set(Some(gauge)));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.start_handler(move |_| set(Arc::clone(&sent))).build().unwrap();
        let out = pool.install(|| run(&shape, &queries, &pages, 64, tokens - 5));
        (out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), gauge)
    };
    // One thread computes both tasks whole, so this is the order without groups.
    let (expected, _) = run(1);
    for threads in [2, 3, 7, 20] {
        let (out, gauge) = run(threads);
        assert!(out == expected, "{threads} threads");
        let [(_, workspaces), (live, totals)] = &gauge.0;
        let (workspaces, totals) = (workspaces.load(Relaxed), totals.load(Relaxed));
        let threads = threads as isize;
        // Per task, rounding adds less than one result, and the merged sums are one.
        assert!((1..=threads).contains(&workspaces), "{threads} threads: {workspaces} workspaces");
        assert!((2..=4 * threads + 4).contains(&totals), "{threads} threads: {totals} results");
        assert_eq!(live.load(Relaxed), 0);
    }
}

#[test]
fn merged_spans_have_the_bits_of_this_revision() {
    let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 8, scale: 0.3 };
    let tokens = 3 * SPAN + 70;
    let (keys, values) = (noise(tokens * 16, 16), noise(tokens * 16, 17));
    let pages = pages(&shape, &keys, &values, 32);
    let out = run(&shape, &noise(7 * 32, 18), &pages, 32, tokens - 7);
    // FNV-1a over the bits.
    let hash = out
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
    // Other bits need a new revision in `larder_model::numerics`.
    assert_eq!(hash, 4_213_869_487_152_824_386);
}

#[test]
fn result_is_bit_identical_for_every_chunk_and_page_size() {
    let tokens = 211;
    let (width, row) = (SHAPE.kv_heads * SHAPE.head_dim, SHAPE.heads * SHAPE.head_dim);
    let (keys, values) = (noise(tokens * width, 4), noise(tokens * width, 5));
    let queries = noise(tokens * row, 6);
    let whole = run(&SHAPE, &queries, &pages(&SHAPE, &keys, &values, 16), 16, 0);
    for (page_tokens, chunk) in [(16, 1), (7, 13), (64, 64), (300, 100), (1, 33)] {
        for first in (0..tokens).step_by(chunk) {
            let end = (first + chunk).min(tokens);
            // The pages hold only positions before the chunk's end. A read beyond it would
            // return NaN.
            let pages = pages(&SHAPE, &keys[..end * width], &values[..end * width], page_tokens);
            let part = run(&SHAPE, &queries[first * row..end * row], &pages, page_tokens, first);
            let same = part.iter().zip(&whole[first * row..]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "pages of {page_tokens}, chunk {first}..{end}");
        }
    }
}

#[test]
fn row_that_is_read_in_place_gives_the_bits_of_the_same_row_in_a_copy() {
    fn check<E: AttentionElement>(name: &str) {
        let tokens = 2 * BLOCK + 41;
        for (heads_per_kv, head_dim) in [(1, 128), (2, 128), (3, 80), (4, 64), (5, 17), (6, 40), (2, 3)] {
            let shape = AttentionShape { heads: 2 * heads_per_kv, kv_heads: 2, head_dim, scale: 0.2 };
            let (width, row) = (2 * head_dim, shape.heads * head_dim);
            let pages = pages(&shape, &noise(tokens * width, 19), &noise(tokens * width, 20), 24);
            let pages: Vec<Vec<E>> = pages.iter().map(|page| page.iter().map(|x| E::from_f32(*x)).collect()).collect();
            let queries = noise(tokens * row, 21);
            let whole = run(&shape, &queries, &pages, 24, 0);
            for position in [0, 1, 15, 16, BLOCK - 1, BLOCK, 2 * BLOCK + 1, tokens - 1] {
                let range = position * row..(position + 1) * row;
                let alone = run(&shape, &queries[range.clone()], &pages, 24, position);
                let same = alone.iter().zip(&whole[range]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{name}: {heads_per_kv} queries of {head_dim} elements at {position}");
            }
        }
    }
    check::<f32>("f32");
    check::<half::bf16>("bf16");
    check::<half::f16>("f16");
}
