//! Attention of one layer over pages of bf16: decoding against memory bandwidth, prefill against
//! the rates of arithmetic.

use crate::Measurement;
use crate::bench::{Bench, Random};
use crate::ceilings::{FMA, MEMORY, MMA};
use crate::check::Verified;
use crate::report::{Figure, Rate};
use crate::sizes::{AttentionSize, CHECKED_DECODE, CHECKED_PREFILL};
use anyhow::Result;
use half::bf16;
use larder_kernels::cpu::{self, AttentionChunk, AttentionShape, HeadLayout};
use larder_kernels::device::Slice;
use larder_kernels::launch::{
    Arithmetic, Attention, DevicePages, Element, SequenceRows, head_starts, partial_floats, span_count, tiles,
};

/// Least ratio of decoding to the bandwidth of the memory.
const DECODE_TARGET: f64 = 0.8;
/// Least ratio of prefill to the bf16 matrix rate.
const PREFILL_TARGET: f64 = 0.6;
/// Values of the random block that fills pages and queries. A batch that is compared has fewer.
const TILE_VALUES: usize = 1 << 20;

/// Numbers of a batch before they are on the device.
struct Plan {
    size: AttentionSize,
    shape: AttentionShape,
    page_elements: usize,
    layouts: [Vec<HeadLayout>; 2],
    page_table: Vec<u32>,
    sequences: Vec<SequenceRows>,
}

impl Plan {
    fn new(size: AttentionSize) -> Plan {
        let AttentionSize { heads, kv_heads, head_dim, page_tokens, sequences, position, rows } = size;
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() };
        let stride = kv_heads * head_dim;
        let layout =
            |start: usize| (0..kv_heads).map(move |head| HeadLayout { start: start + head * head_dim, stride });
        let layouts = [layout(0).collect(), layout(page_tokens * stride).collect()];
        let pages = (position + rows).div_ceil(page_tokens);
        let mut page_table: Vec<u32> = (0..(sequences * pages) as u32).collect();
        Random::new(7).shuffle(&mut page_table);
        let sequence = |number: usize| SequenceRows {
            first_row: (number * rows) as u32,
            rows: rows as u32,
            position: position as u32,
            first_page: (number * pages) as u32,
        };
        let sequences = (0..sequences).map(sequence).collect();
        Plan { size, shape, page_elements: 2 * page_tokens * stride, layouts, page_table, sequences }
    }

    fn rows(&self) -> usize {
        self.size.sequences * self.size.rows
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    fn pool_elements(&self) -> usize {
        self.page_table.len() * self.page_elements
    }

    /// Bytes of keys and values that the queries see.
    fn kv_bytes(&self) -> usize {
        2 * 2 * self.size.sequences * (self.size.position + self.size.rows) * self.shape.kv_heads * self.shape.head_dim
    }

    /// Multiplications and additions of the two products, without those of masked keys.
    fn operations(&self) -> f64 {
        let (position, rows) = (self.size.position as f64, self.size.rows as f64);
        let pairs = rows * position + rows * (rows + 1.0) / 2.0;
        4.0 * pairs * self.width() as f64 * self.size.sequences as f64
    }

    /// Result of the CPU, over pages and queries that repeat `values`.
    fn reference(&self, values: &[f32]) -> Vec<f32> {
        let repeated = |count: usize| values.iter().copied().cycle().take(count);
        let pool: Vec<bf16> = repeated(self.pool_elements()).map(bf16::from_f32).collect();
        let queries: Vec<f32> = repeated(self.rows() * self.width()).collect();
        let pages: Vec<&[bf16]> = pool.chunks_exact(self.page_elements).collect();
        let mut out = vec![0.0; queries.len()];
        let per_sequence = self.size.rows * self.width();
        let parts = queries.chunks_exact(per_sequence).zip(out.chunks_exact_mut(per_sequence));
        for (sequence, (queries, out)) in self.sequences.iter().zip(parts) {
            let table = &self.page_table[sequence.first_page as usize..];
            let own: Vec<&[bf16]> = table.iter().map(|&page| pages[page as usize]).collect();
            let chunk = AttentionChunk {
                position: self.size.position,
                queries,
                query_stride: self.width(),
                pages: &own,
                page_tokens: self.size.page_tokens,
                keys: &self.layouts[0],
                values: &self.layouts[1],
                out,
            };
            cpu::attention(&self.shape, &mut [chunk]);
        }
        out
    }
}

/// Kernels of a batch.
#[derive(Debug, Clone, Copy)]
struct Kernels {
    arithmetic: Arithmetic,
    /// Type of the queries: f32 in engines, or bf16.
    element: Element,
    by_spans: bool,
}

impl Kernels {
    /// All kernels for pages of bf16, with a name.
    const ALL: [(Arithmetic, Element, &'static str); 4] = [
        (Arithmetic::Tensor, Element::F32, "f32 queries, tensor cores"),
        (Arithmetic::Tensor, Element::Bf16, "bf16 queries, tensor cores"),
        (Arithmetic::Plain, Element::F32, "f32 queries"),
        (Arithmetic::Plain, Element::Bf16, "bf16 queries"),
    ];

    fn tile(self) -> usize {
        if self.by_spans { self.arithmetic.split_tile() } else { self.arithmetic.prefill_tile() }
    }

    /// Largest error of a result, see [`Checker::close`](crate::check::Checker::close).
    fn tolerance(self) -> f32 {
        match (self.arithmetic, self.element) {
            // The weights are rounded to bf16 as well, and the values are below 1.
            (Arithmetic::Tensor, _) => 1.0 / 32.0,
            // The different order of sums in f32.
            (Arithmetic::Plain, Element::F32) => 2e-4,
            // The rounding of the result.
            (Arithmetic::Plain, _) => 1.0 / 128.0,
        }
    }
}

/// A batch on the device.
struct Batch {
    plan: Plan,
    kernels: Kernels,
    queries: Slice,
    pool: Slice,
    starts: Slice,
    token_stride: usize,
    page_table: Slice,
    sequences: Slice,
    tiles: Slice,
    tile_count: usize,
    out: Slice,
    /// Number of spans and working memory, for attention by spans.
    spans: Option<(usize, Slice)>,
}

impl Batch {
    /// Pages and queries repeat `values`, which are exact in bf16.
    fn new(bench: &Bench, size: AttentionSize, kernels: Kernels, values: &[f32]) -> Result<Batch> {
        let Kernels { element, by_spans, .. } = kernels;
        let plan = Plan::new(size);
        let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let (starts, token_stride) = head_starts(&plan.layouts[0], &plan.layouts[1])?;
        let tiles = tiles(&plan.sequences, plan.shape.heads / plan.shape.kv_heads, kernels.tile());
        let query_bytes = plan.rows() * plan.width() * element.bytes();
        let queries = match element {
            Element::F32 => bench.tiled(query_bytes, values)?,
            Element::F16 | Element::Bf16 => bench.tiled(query_bytes, &narrow)?,
        };
        let spans = span_count(&plan.sequences);
        let floats = partial_floats(plan.rows(), &plan.shape, spans)?;
        let spans = if by_spans { Some((spans, bench.allocate(4 * floats)?)) } else { None };
        Ok(Batch {
            kernels,
            queries,
            pool: bench.tiled(2 * plan.pool_elements(), &narrow)?,
            starts: bench.upload(&starts)?,
            token_stride,
            page_table: bench.upload(&plan.page_table)?,
            sequences: bench.upload(&plan.sequences)?,
            tiles: bench.upload(&tiles)?,
            tile_count: tiles.len(),
            out: bench.allocate(query_bytes)?,
            spans,
            plan,
        })
    }

    fn launch(&self, bench: &Bench) -> Result<()> {
        let pages = DevicePages {
            element: Element::Bf16,
            pool: &self.pool,
            page_elements: self.plan.page_elements,
            page_tokens: self.plan.size.page_tokens,
            starts: &self.starts,
            token_stride: self.token_stride,
        };
        let attention = Attention {
            arithmetic: self.kernels.arithmetic,
            element: self.kernels.element,
            shape: self.plan.shape,
            rows: self.plan.rows(),
            queries: &self.queries,
            query_stride: self.plan.width(),
            sequences: &self.sequences,
            sequence_count: self.plan.sequences.len(),
            tiles: &self.tiles,
            tile_count: self.tile_count,
            pages,
            page_table: &self.page_table,
            page_entries: self.plan.page_table.len(),
            out: &self.out,
        };
        match &self.spans {
            Some((spans, partials)) => attention.split(&*bench.stream, *spans, partials)?,
            None => attention.prefill(&*bench.stream)?,
        }
        Ok(())
    }

    fn result(&self, bench: &Bench) -> Result<Vec<f32>> {
        if self.kernels.element == Element::F32 {
            return bench.download(&self.out);
        }
        Ok(bench.download::<bf16>(&self.out)?.into_iter().map(bf16::to_f32).collect())
    }
}

/// Compares a small batch with the CPU.
fn verify(bench: &Bench, size: AttentionSize, kernels: Kernels, name: &str) -> Result<Verified> {
    let values = Random::new(8).numbers(TILE_VALUES);
    let batch = Batch::new(bench, size, kernels, &values)?;
    batch.launch(bench)?;
    bench.checker.close(name, &batch.result(bench)?, &batch.plan.reference(&values), kernels.tolerance())
}

pub fn measure(run: &mut Measurement) -> Result<()> {
    let bench = &run.bench;
    let values = Random::new(9).numbers(TILE_VALUES);
    for (arithmetic, element, name_of) in Kernels::ALL {
        let size = run.sizes.decode;
        let tokens = size.position + size.rows;
        let name = format!("decode attention, {} × {tokens} tokens, {name_of}", size.sequences);
        let kernels = Kernels { arithmetic, element, by_spans: true };
        let verified = verify(bench, CHECKED_DECODE, kernels, &name)?;
        let batch = Batch::new(bench, size, kernels, &values)?;
        let times = bench.device_time(&|| batch.launch(bench))?;
        let figure = Figure::new(name, Rate::bytes(batch.plan.kv_bytes(), &times));
        run.report.figure(verified, &figure.against(MEMORY, run.ceilings.memory).target(DECODE_TARGET))?;
        drop(batch);

        let size = run.sizes.prefill;
        let name = format!("prefill attention, {} × {} tokens, {name_of}", size.sequences, size.rows);
        let kernels = Kernels { by_spans: false, ..kernels };
        let verified = verify(bench, CHECKED_PREFILL, kernels, &name)?;
        let batch = Batch::new(bench, size, kernels, &values)?;
        let times = bench.device_time(&|| batch.launch(bench))?;
        let figure = Figure::new(name, Rate::operations(batch.plan.operations(), &times));
        run.report.figure(verified, &figure.clone().against(MMA, run.ceilings.mma).target(PREFILL_TARGET))?;
        run.report.figure(verified, &figure.against(FMA, run.ceilings.fma))?;
    }
    Ok(())
}
