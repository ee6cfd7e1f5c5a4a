//! Lengths of the buffers of a pass, and their bound for all passes of an engine.

use super::pass::qkv_width;
use super::room::rounded;
use super::tables::{PARTIAL_BYTES_MAX, Tables};
use crate::model::Model;
use larder_format::PageGeometry;
use larder_kernels::cpu::AttentionShape;
use larder_kernels::device::DeviceError;
use larder_kernels::launch::{SPAN, SequenceRows, partial_floats};

/// Numbers of a pass from which the lengths of its buffers follow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    rows: usize,
    /// Rows with requested logits.
    last: usize,
    /// Rows of a decode step. 0 for other passes.
    step_rows: usize,
    table_bytes: usize,
    /// Working memory of attention by spans, in bytes.
    partial_bytes: usize,
}

impl Extent {
    pub(super) fn of(tables: &Tables, shape: &AttentionShape) -> Result<Extent, DeviceError> {
        Ok(Extent {
            rows: tables.all.count,
            last: tables.last.count,
            step_rows: if tables.step.is_some() { tables.all.count } else { 0 },
            table_bytes: tables.bytes.len(),
            partial_bytes: tables.all.partial_bytes(shape)?.max(tables.last.partial_bytes(shape)?),
        })
    }

    /// Bound for passes over at most `rows` tokens, of which at most `logit_rows` have requested
    /// logits. A pass has at most `logit_rows` sequences.
    pub(super) fn largest(
        model: &Model,
        shape: &AttentionShape,
        geometry: &PageGeometry,
        rows: usize,
        logit_rows: usize,
    ) -> Extent {
        let context = model.config().max_context;
        // The tables of a decode step are padded.
        let padded = |count: usize| count.checked_next_power_of_two().unwrap_or(usize::MAX);
        let step_rows = padded(logit_rows);
        let rows = rows.max(step_rows);
        let pages = padded(logit_rows.saturating_mul(context.div_ceil(geometry.page_tokens.max(1) as usize)));
        let spans = padded(context.div_ceil(SPAN));
        let partials = partial_floats(step_rows, shape, spans).map_or(usize::MAX, |floats| floats.saturating_mul(4));
        Extent {
            rows,
            last: step_rows,
            step_rows,
            table_bytes: table_bytes_max(shape, rows, pages),
            // Steps beyond this limit use attention without spans.
            partial_bytes: partials.min(PARTIAL_BYTES_MAX),
        }
    }
}

/// Bound of the tables of a pass, in bytes.
fn table_bytes_max(shape: &AttentionShape, rows: usize, page_entries: usize) -> usize {
    // Tables of all rows, and of those with requested logits. A tile has a query at least.
    let sequences = 2 * size_of::<SequenceRows>();
    let tiles = 2 * size_of::<[u32; 2]>() * (shape.heads / shape.kv_heads.max(1));
    // Token, slot and index of a row; its angles.
    let row = 3 * size_of::<u32>() + shape.head_dim * size_of::<f32>() + sequences + tiles;
    // Tables begin at multiples of 16 bytes.
    let alignment = 16 * 16;
    rows.saturating_mul(row).saturating_add(page_entries.saturating_mul(4)).saturating_add(alignment)
}

/// Lengths of the buffers of a pass in bytes.
#[derive(Debug)]
pub(super) struct Lengths {
    /// On the device: the tables, stream, normed, qkv, attended, projected, gate and up, activated,
    /// and for rows with requested logits the stream, qkv and logits.
    pub(super) device: [usize; 11],
    pub(super) partials: usize,
    // The others are in pinned memory.
    pub(super) tables: usize,
    /// Each of two buffers.
    pub(super) kv_rows: usize,
    pub(super) step_kv_rows: usize,
    pub(super) logits: usize,
}

impl Lengths {
    pub(super) fn new(model: &Model, geometry: &PageGeometry, extent: &Extent) -> Lengths {
        let config = model.config();
        let Extent { rows, last, step_rows, table_bytes, partial_bytes } = *extent;
        let floats = |rows: usize, width: usize| rows.saturating_mul(width).saturating_mul(size_of::<f32>());
        let kv_rows = |rows: usize| rows.saturating_mul(2 * config.kv_width() * geometry.dtype.bytes());
        Lengths {
            device: [
                table_bytes,
                floats(rows, config.hidden),
                floats(rows, config.hidden),
                floats(rows, qkv_width(model)),
                floats(rows, config.query_width()),
                floats(rows, config.hidden),
                floats(rows, 2 * config.intermediate),
                floats(rows, config.intermediate),
                floats(last, config.hidden),
                floats(last, qkv_width(model)),
                floats(last, config.vocab),
            ],
            partials: partial_bytes,
            tables: table_bytes,
            kv_rows: kv_rows(rows),
            step_kv_rows: kv_rows(step_rows).saturating_mul(config.layers),
            logits: floats(last, config.vocab),
        }
    }

    /// Memory of the device that the buffers take at most, in bytes.
    pub(super) fn device_bytes(&self) -> usize {
        self.device.iter().chain([&self.partials]).fold(0, |sum: usize, bytes| sum.saturating_add(rounded(*bytes)))
    }

    /// Pinned memory of the host that the buffers take at most, in bytes.
    pub(super) fn pinned_bytes(&self) -> usize {
        let all = [self.tables, self.kv_rows, self.kv_rows, self.step_kv_rows, self.logits];
        all.into_iter().fold(0, |sum: usize, bytes| sum.saturating_add(rounded(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::pass::{Buffers, attention_shape};
    use super::*;
    use crate::batch::{Chunk, LogitRows};
    use crate::kv::{KvPool, PageSlot};
    use larder_kernels::device::host;
    use larder_kernels::launch::Arithmetic;
    use std::path::Path;

    #[test]
    fn buffers_of_passes_stay_within_their_bound() {
        let model = Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny")).unwrap();
        let (geometry, shape) = (model.geometry(16), attention_shape(&model));
        let bound = Lengths::new(&model, &geometry, &Extent::largest(&model, &shape, &geometry, 45, 5));
        let kv = KvPool::new(geometry, 15);
        let prompt = [1u32; 40];
        for (tokens, chunks) in [(40, 1), (9, 5), (1, 5), (1, 1)] {
            let mut pages: Vec<Vec<PageSlot>> =
                (0..chunks).map(|_| (0..3).map(|_| PageSlot::Open(kv.allocate().unwrap())).collect()).collect();
            let batch: Vec<Chunk<'_>> = pages
                .iter_mut()
                .map(|pages| Chunk { tokens: &prompt[..tokens], position: 0, pages, logits: LogitRows::Last })
                .collect();
            let places = vec![vec![0, 1, 2]; chunks];
            let tables = Tables::new(&model, &shape, Arithmetic::Plain, &batch, &places).unwrap();
            let device = host::open(1 << 30);
            let mut buffers = Buffers::new();
            let free = device.free_bytes().unwrap();
            let _spaces = buffers.spaces(&*device, &model, &geometry, &tables).unwrap();
            let used = free - device.free_bytes().unwrap();
            let own = Lengths::new(&model, &geometry, &Extent::of(&tables, &shape).unwrap());
            assert_eq!(used, own.device_bytes() + own.pinned_bytes(), "{chunks} chunks of {tokens}");
            assert!(own.device_bytes() <= bound.device_bytes(), "{chunks} chunks of {tokens}: {own:?} {bound:?}");
            assert!(own.pinned_bytes() <= bound.pinned_bytes(), "{chunks} chunks of {tokens}: {own:?} {bound:?}");
        }
    }
}
