//! Attention over pages: chunks, cached prefixes, decoding by spans.

use crate::support::{Check, Emulated, Number, Random, close, close_within, same, text, widened};
use half::{bf16, f16};
use larder_kernels::cpu::{self, AttentionChunk, AttentionShape, HeadLayout};
use larder_kernels::device::Slice;
use larder_kernels::launch::{
    Arithmetic, Attention, DevicePages, SequenceRows, head_starts, partial_floats, span_count, tiles,
};

/// A batch of sequences over a pool of shuffled pages. Slots without a token hold NaN.
struct Batch<T, E> {
    shape: AttentionShape,
    page_tokens: usize,
    page_elements: usize,
    layouts: [Vec<HeadLayout>; 2],
    query_stride: usize,
    arithmetic: Arithmetic,
    queries: Vec<T>,
    pool: Vec<E>,
    page_table: Vec<u32>,
    sequences: Vec<SequenceRows>,
}

/// Chunks as (position, rows).
const SHORT: &[(usize, usize)] = &[(0, 7), (33, 5), (0, 1), (61, 1)];
const LONG: &[(usize, usize)] = &[(250, 9), (511, 1), (0, 3), (255, 1)];

impl<T: Number, E: Number> Batch<T, E> {
    fn new(random: &mut Random, chunks: &[(usize, usize)]) -> Batch<T, E> {
        Batch::of(random, chunks, Arithmetic::Plain)
    }

    fn of(random: &mut Random, chunks: &[(usize, usize)], arithmetic: Arithmetic) -> Batch<T, E> {
        let heads_per_kv = [1, 2, 3, 4, 7][random.below(5)];
        let kv_heads = 1 + random.below(2);
        let (heads, head_dim) = (heads_per_kv * kv_heads, 8 * (1 + random.below(16)));
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() };
        let page_tokens = [1, 5, 16, 64][random.below(4)];
        let (stride, query_stride) = (kv_heads * head_dim, heads * head_dim + random.below(9));
        // Two layers per page, of which the second counts.
        let page_elements = 4 * page_tokens * stride;
        let layout = |kind: usize| {
            let start = (2 + kind) * page_tokens * stride;
            (0..kv_heads).map(|head| HeadLayout { start: start + head * head_dim, stride }).collect::<Vec<_>>()
        };
        let layouts = [layout(0), layout(1)];
        let mut sequences = Vec::new();
        let (mut row, mut entries) = (0, 0);
        for &(position, rows) in chunks {
            let [first_row, rows_of, position_of, first_page] = [row, rows, position, entries].map(|x| x as u32);
            sequences.push(SequenceRows { first_row, rows: rows_of, position: position_of, first_page });
            row += rows;
            entries += (position + rows).div_ceil(page_tokens);
        }
        let mut page_table: Vec<u32> = (0..entries as u32 + 2).collect();
        random.shuffle(&mut page_table);
        let mut pool = vec![E::from_f32(f32::NAN); (entries + 2) * page_elements];
        for (sequence, &(position, rows)) in sequences.iter().zip(chunks) {
            for token in 0..position + rows {
                let page = page_table[sequence.first_page as usize + token / page_tokens] as usize;
                for layout in layouts.iter().flatten() {
                    let at = page * page_elements + layout.start + token % page_tokens * stride;
                    pool[at..at + head_dim].copy_from_slice(&random.numbers::<E>(head_dim));
                }
            }
        }
        page_table.truncate(entries);
        let queries = random.numbers(row * query_stride);
        Batch {
            shape,
            page_tokens,
            page_elements,
            layouts,
            query_stride,
            arithmetic,
            queries,
            pool,
            page_table,
            sequences,
        }
    }

    fn rows(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.rows as usize).sum()
    }

    fn reference(&self) -> Vec<f32> {
        let width = self.shape.heads * self.shape.head_dim;
        let mut queries = widened(&self.queries);
        if self.arithmetic == Arithmetic::Tensor {
            queries.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        let pages: Vec<&[E]> = self.pool.chunks_exact(self.page_elements).collect();
        let mut out = vec![0.0; self.rows() * width];
        for sequence in &self.sequences {
            let (first, rows) = (sequence.first_row as usize, sequence.rows as usize);
            let own: Vec<&[E]> =
                self.page_table[sequence.first_page as usize..].iter().map(|&page| pages[page as usize]).collect();
            let chunk = AttentionChunk {
                position: sequence.position as usize,
                queries: &queries[first * self.query_stride..(first + rows) * self.query_stride],
                query_stride: self.query_stride,
                pages: &own,
                page_tokens: self.page_tokens,
                keys: &self.layouts[0],
                values: &self.layouts[1],
                out: &mut out[first * width..(first + rows) * width],
            };
            cpu::attention(&self.shape, &mut [chunk]);
        }
        out
    }

    /// Computes the rows of `sequences` on the device, with one of the two kernels. Other rows of
    /// the result stay NaN.
    fn run(&self, gpu: &Emulated, sequences: &[SequenceRows], by_spans: bool) -> Result<Vec<T>, String> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let (starts, token_stride) = head_starts(&self.layouts[0], &self.layouts[1]).map_err(text)?;
        let tile = if by_spans { self.arithmetic.split_tile() } else { self.arithmetic.prefill_tile() };
        let tiles = tiles(sequences, heads / kv_heads, tile);
        let (queries, pool, table) =
            (gpu.upload(&self.queries)?, gpu.upload(&self.pool)?, gpu.upload(&self.page_table)?);
        let (rows_of, tiles_of, starts) = (gpu.upload(sequences)?, gpu.upload(&tiles)?, gpu.upload(&starts)?);
        let out: Slice = gpu.empty::<T>(self.rows() * heads * head_dim)?;
        let pages = DevicePages {
            element: E::ELEMENT,
            pool: &pool,
            page_elements: self.page_elements,
            page_tokens: self.page_tokens,
            starts: &starts,
            token_stride,
        };
        let attention = Attention {
            arithmetic: self.arithmetic,
            element: T::ELEMENT,
            shape: self.shape,
            rows: self.rows(),
            queries: &queries,
            query_stride: self.query_stride,
            sequences: &rows_of,
            sequence_count: sequences.len(),
            tiles: &tiles_of,
            tile_count: tiles.len(),
            pages,
            page_table: &table,
            page_entries: self.page_table.len(),
            out: &out,
        };
        if by_spans {
            let spans = span_count(sequences);
            // Working memory may hold the sums of an earlier launch, which no result may contain.
            let partials = vec![1.0_f32; partial_floats(self.rows(), &self.shape, spans).map_err(text)?];
            let partials = gpu.upload(&partials)?;
            attention.split(gpu.stream(), spans, &partials).map_err(text)?;
        } else {
            attention.prefill(gpu.stream()).map_err(text)?;
        }
        gpu.download(&out)
    }
}

/// Attention of a random batch: against the CPU, by both kernels, and each sequence alone.
fn batch<T: Number, E: Number>(gpu: &Emulated, seed: u64, chunks: &[(usize, usize)]) -> Check {
    let batch = Batch::<T, E>::new(&mut Random::new(seed), chunks);
    let found = batch.run(gpu, &batch.sequences, false)?;
    close("attention", &found, &batch.reference())?;
    same_in_all_launches(gpu, &batch, &found)
}

/// The same on tensor cores. Weights of attention are rounded to bf16, and values are below 2.
fn tensor_batch<T: Number>(gpu: &Emulated, seed: u64, chunks: &[(usize, usize)]) -> Check {
    let batch = Batch::<T, bf16>::of(&mut Random::new(seed), chunks, Arithmetic::Tensor);
    let found = batch.run(gpu, &batch.sequences, false)?;
    close_within("attention on tensor cores", &found, &batch.reference(), 1.0 / 128.0, 1.0)?;
    same_in_all_launches(gpu, &batch, &found)
}

/// Compares the result of a batch with attention by spans, and with that of each sequence alone.
fn same_in_all_launches<T: Number, E: Number>(gpu: &Emulated, batch: &Batch<T, E>, found: &[T]) -> Check {
    let width = batch.shape.heads * batch.shape.head_dim;
    same("attention by spans", &batch.run(gpu, &batch.sequences, true)?, found)?;
    for sequence in &batch.sequences {
        let rows = sequence.first_row as usize * width..(sequence.first_row + sequence.rows) as usize * width;
        let alone = batch.run(gpu, &[*sequence], false)?;
        same("attention of a sequence alone", &alone[rows.clone()], &found[rows])?;
    }
    Ok(())
}

/// A random batch on tensor cores, with several spans and rows.
pub fn long_tensor_batch(gpu: &Emulated, seed: u64) -> Check {
    tensor_batch::<bf16>(gpu, seed, LONG)
}

/// A random batch with several spans and rows.
pub fn long_batch<T: Number>(gpu: &Emulated, seed: u64) -> Check {
    batch::<T, T>(gpu, seed, LONG)
}

#[test]
fn attention_agrees_with_the_cpu_whatever_the_batch_and_the_kernel() {
    let gpu = Emulated::new();
    for seed in 0..4 {
        batch::<f32, f32>(&gpu, seed, SHORT).unwrap();
        batch::<f32, f16>(&gpu, 10 + seed, SHORT).unwrap();
        batch::<f32, bf16>(&gpu, 20 + seed, SHORT).unwrap();
        batch::<f16, f16>(&gpu, 30 + seed, SHORT).unwrap();
        batch::<bf16, bf16>(&gpu, 40 + seed, SHORT).unwrap();
    }
    long_batch::<f32>(&gpu, 1).unwrap();
    long_batch::<f16>(&gpu, 2).unwrap();
}

#[test]
fn attention_on_tensor_cores_agrees_with_the_cpu_whatever_the_batch_and_the_kernel() {
    let gpu = Emulated::new();
    for seed in 0..6 {
        tensor_batch::<f32>(&gpu, seed, SHORT).unwrap();
        tensor_batch::<bf16>(&gpu, 10 + seed, SHORT).unwrap();
    }
    tensor_batch::<f32>(&gpu, 1, LONG).unwrap();
    long_tensor_batch(&gpu, 2).unwrap();
}

#[test]
fn attention_of_a_row_is_independent_of_its_chunk() {
    for arithmetic in [Arithmetic::Plain, Arithmetic::Tensor] {
        row_is_independent_of_its_chunk(arithmetic);
    }
}

fn row_is_independent_of_its_chunk(arithmetic: Arithmetic) {
    let gpu = Emulated::new();
    // Tiles of 64 queries begin at other rows in the parts.
    let batch = Batch::<f32, bf16>::of(&mut Random::new(5), &[(251, 12)], arithmetic);
    let width = batch.shape.heads * batch.shape.head_dim;
    let whole = batch.run(&gpu, &batch.sequences, false).unwrap();
    let all = batch.sequences[0];
    let parts = [0..5, 5..6, 6..12].map(|rows: std::ops::Range<u32>| SequenceRows {
        first_row: rows.start,
        rows: rows.end - rows.start,
        position: all.position + rows.start,
        first_page: all.first_page,
    });
    for by_spans in [false, true] {
        same("chunks", &batch.run(&gpu, &parts, by_spans).unwrap(), &whole).unwrap();
        let last = batch.run(&gpu, &parts[2..], by_spans).unwrap();
        same("last chunk", &last[6 * width..], &whole[6 * width..]).unwrap();
    }
}

#[test]
fn tables_that_lead_outside_compute_nothing() {
    let gpu = Emulated::new();
    let mut batch = Batch::<f32, f32>::new(&mut Random::new(6), &[(3, 2)]);
    let good = batch.sequences[0];
    for bad in [
        SequenceRows { first_row: 1, ..good },
        SequenceRows { first_row: u32::MAX, ..good },
        SequenceRows { position: u32::MAX, ..good },
        SequenceRows { first_page: good.first_page + 1, ..good },
        SequenceRows { first_page: u32::MAX, ..good },
    ] {
        let found = batch.run(&gpu, &[bad], false).unwrap();
        assert!(found.iter().all(|x| x.is_nan()), "{bad:?}");
        // Working memory for its spans would be larger than the host has.
        if bad.position < u32::MAX {
            let found = batch.run(&gpu, &[bad], true).unwrap();
            assert!(found.iter().all(|x| x.is_nan()), "{bad:?} by spans");
        }
    }
    batch.page_table.fill(u32::MAX);
    let found = batch.run(&gpu, &[good], false).unwrap();
    assert!(found.iter().all(|&x| x == 0.0), "pages outside the pool count as zeros");
}
