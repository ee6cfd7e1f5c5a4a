//! Tables that tell the kernels of a pass its tokens, places and sequences. One copy takes them all
//! to the device.
//!
//! A decode step has one row per sequence, with its logits. Its tables are padded to powers of two,
//! so that few shapes occur. Padding rows have no place, no sequence and no tile: kernels compute
//! nothing for them, or results that stay unread.

use super::graphs::StepShape;
use crate::batch::Chunk;
use crate::model::Model;
use larder_kernels::cpu::{AttentionShape, RopeTable};
use larder_kernels::device::{DeviceError, Slice};
use larder_kernels::launch::{Arithmetic, SequenceRows, partial_floats, span_count, tiles};
use std::ops::Range;

/// Most working memory of attention by spans, in bytes. Larger decode steps run like other passes,
/// whose attention gives the same bits.
pub(super) const PARTIAL_BYTES_MAX: usize = 256 << 20;
/// Place, page and sequence of padding: none.
const NOWHERE: u32 = u32::MAX;
/// Tables begin at multiples of this.
const ALIGNMENT: usize = 16;

/// Rows that attention computes.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub(super) count: usize,
    pub(super) sequences: Range<usize>,
    pub(super) tiles: Range<usize>,
    pub(super) tile_count: usize,
    /// Number of spans of the longest sequence. 0 for attention without spans.
    pub(super) spans: usize,
}

/// The tables of a pass. Ranges are of bytes.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) bytes: Vec<u8>,
    pub(super) sequence_count: usize,
    pub(super) tokens: Range<usize>,
    pub(super) slots: Range<usize>,
    pub(super) rope: Range<usize>,
    pub(super) page_table: Range<usize>,
    pub(super) page_entries: usize,
    /// All rows.
    pub(super) all: Rows,
    /// Rows with requested logits. Only these pass the last layer.
    pub(super) last: Rows,
    /// Index of each of them among all rows. Empty for a decode step.
    pub(super) requested: Range<usize>,
    /// Shape of a decode step. All rows of such a pass have requested logits.
    pub(super) step: Option<StepShape>,
    /// Units that compute the attention. The tiles are theirs.
    pub(super) arithmetic: Arithmetic,
}

impl Tables {
    /// Describes a batch whose pages have `places`, chunk by chunk.
    pub(super) fn new(
        model: &Model,
        shape: &AttentionShape,
        arithmetic: Arithmetic,
        batch: &[Chunk<'_>],
        places: &[Vec<u32>],
    ) -> Result<Tables, DeviceError> {
        let page_tokens = batch.first().map_or(1, |chunk| chunk.geometry().page_tokens as usize);
        let mut slots = Vec::new();
        let mut requested = Vec::new();
        let (mut all, mut last) = (Vec::new(), Vec::new());
        let mut first_page = 0;
        for (chunk, places) in batch.iter().zip(places) {
            let first_row = slots.len();
            slots.extend((chunk.position..chunk.end()).map(|position| {
                // Places have been limited so that this fits.
                places[position / page_tokens] * page_tokens as u32 + (position % page_tokens) as u32
            }));
            let wanted = chunk.logit_rows();
            all.push(sequence(first_row, chunk.tokens.len(), chunk.position, first_page)?);
            last.push(sequence(requested.len(), wanted.len(), chunk.position + wanted.start, first_page)?);
            requested.extend(wanted.map(|row| (first_row + row) as u32));
            first_page += places.len();
        }
        let mut tokens: Vec<u32> = batch.iter().flat_map(|chunk| chunk.tokens.iter().copied()).collect();
        let mut rope = RopeTable::default();
        rope.fill(&model.frequencies, batch.iter().flat_map(|chunk| chunk.position..chunk.end()));
        let mut page_table = places.concat();
        let step = decode_step(shape, batch, &all, page_table.len())?;
        let mut angles = rope.values().to_vec();
        if let Some([rows, _, entries]) = step {
            tokens.resize(rows, 0);
            slots.resize(rows, NOWHERE);
            angles.resize(rows * shape.head_dim, 0.0);
            page_table.resize(entries, NOWHERE);
            all.resize(rows, SequenceRows { first_row: 0, rows: 0, position: 0, first_page: 0 });
            // Steps of one shape have tables of one length.
            last.clear();
            requested.clear();
        }
        let mut bytes = Vec::new();
        let tables = Tables {
            sequence_count: all.len(),
            tokens: append(&mut bytes, &tokens),
            slots: append(&mut bytes, &slots),
            rope: append(&mut bytes, &angles),
            page_table: append(&mut bytes, &page_table),
            page_entries: page_table.len(),
            all: Rows::new(&mut bytes, shape, arithmetic, &all, step)?,
            last: Rows::new(&mut bytes, shape, arithmetic, &last, None)?,
            requested: append(&mut bytes, &requested),
            step,
            arithmetic,
            bytes,
        };
        Ok(if step.is_some() { Tables { last: tables.all.clone(), ..tables } } else { tables })
    }
}

/// Padded shape of a decode step. `None` for other batches.
fn decode_step(
    shape: &AttentionShape,
    batch: &[Chunk<'_>],
    sequences: &[SequenceRows],
    page_entries: usize,
) -> Result<Option<StepShape>, DeviceError> {
    let is_decode = batch.iter().all(|chunk| chunk.tokens.len() == 1 && chunk.logit_rows().len() == 1);
    let padded = [batch.len(), span_count(sequences), page_entries].map(usize::checked_next_power_of_two);
    let [Some(rows), Some(spans), Some(entries)] = padded else { return Ok(None) };
    let fits = partial_floats(rows, shape, spans)?.saturating_mul(4) <= PARTIAL_BYTES_MAX;
    // A grid has at most 65,535 blocks for spans.
    Ok((is_decode && fits && u16::try_from(spans).is_ok()).then_some([rows, spans, entries]))
}

impl Rows {
    /// Appends the tables of attention. A decode step has the number of spans and tiles of its
    /// shape.
    fn new(
        bytes: &mut Vec<u8>,
        shape: &AttentionShape,
        arithmetic: Arithmetic,
        sequences: &[SequenceRows],
        step: Option<StepShape>,
    ) -> Result<Rows, DeviceError> {
        let heads_per_kv = shape.heads / shape.kv_heads;
        let (count, spans, tiles) = match step {
            Some([rows, spans, _]) => {
                let tile = arithmetic.split_tile();
                let mut tiles = tiles(sequences, heads_per_kv, tile);
                tiles.resize(rows * heads_per_kv.div_ceil(tile), [NOWHERE, 0]);
                (rows, spans, tiles)
            }
            None => {
                let count: usize = sequences.iter().map(|sequence| sequence.rows as usize).sum();
                (count, 0, tiles(sequences, heads_per_kv, arithmetic.prefill_tile()))
            }
        };
        Ok(Rows {
            count,
            sequences: append(bytes, sequences),
            tile_count: tiles.len(),
            tiles: append(bytes, &tiles),
            spans,
        })
    }

    /// Working memory of the attention, in bytes.
    pub(super) fn partial_bytes(&self, shape: &AttentionShape) -> Result<usize, DeviceError> {
        Ok(4 * partial_floats(self.count, shape, self.spans)?)
    }
}

fn sequence(first_row: usize, rows: usize, position: usize, first_page: usize) -> Result<SequenceRows, DeviceError> {
    let number = |value: usize| u32::try_from(value).map_err(|_| DeviceError::Shape("a batch has 2^32 rows or more"));
    Ok(SequenceRows {
        first_row: number(first_row)?,
        rows: number(rows)?,
        position: number(position)?,
        first_page: number(first_page)?,
    })
}

/// Appends a table, and returns its place.
fn append<T: bytemuck::NoUninit>(bytes: &mut Vec<u8>, values: &[T]) -> Range<usize> {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    let start = bytes.len();
    bytes.extend_from_slice(bytemuck::cast_slice(values));
    start..bytes.len()
}

/// The part of the tables on the device that `range` names.
pub(super) fn part(tables: &Slice, range: &Range<usize>) -> Result<Slice, DeviceError> {
    tables.slice(range.clone())
}
