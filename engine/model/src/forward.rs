//! The forward pass over a batch.
//!
//! Invariant: no row influences another row's bits. Every step is either a kernel that treats rows
//! independently, or attention. The attention of a query depends only on its position and on its
//! sequence's keys and values.
//!
//! The tokens of all chunks form the rows of one matrix, chunk after chunk. The last layer writes
//! the keys and values of all rows, then continues only with the rows whose logits are requested.

use crate::batch::{self, Chunk, ForwardError, LayerHooks};
use crate::kv::{KvKind, PageElement, PageSlot, head_layout, with_element};
use crate::model::{LayerWeights, Linear, Model};
use crate::scratch::Scratch;
use crate::turns::{self, Turn};
use larder_format::PageGeometry;
use larder_kernels::cpu::{AttentionChunk, AttentionShape, HeadLayout, add, attention, matmul, rms_norm, silu_mul};
use rayon::prelude::*;
use std::ops::Range;

/// Memory of a thread that selects a token, per token of the vocabulary: a copy of the logit, and
/// the candidate with its probability.
const SELECTION_BYTES: usize = size_of::<f32>() + size_of::<(u32, f32)>() + size_of::<(u32, f64)>();
/// Workspaces of a thread: see [`attention`]. Heads of 128 elements take half of it.
const THREAD_BYTES: usize = 1 << 20;

/// Returns the first `len` elements of a buffer and grows it if needed. Their content is
/// unspecified.
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// State of a pass between two layers.
struct Pass {
    /// Next layer.
    layer: usize,
    /// Rows of each chunk that the next layer computes.
    rows: Vec<Range<usize>>,
    scratch: Scratch,
}

impl Model {
    /// Computes the keys and values of all tokens of `batch` into their pages, and the requested
    /// logits. Returns per chunk its rows of `vocab` logits, concatenated. Calls `hooks` after each
    /// layer, on one thread at a time. Waits for passes of other callers, and gives way to shorter
    /// ones between two layers. A pass on a device does not give way.
    ///
    /// # Errors
    /// If the batch is invalid, and no page has changed then. If the device fails.
    pub fn forward(&self, batch: &mut [Chunk<'_>], hooks: &mut dyn LayerHooks) -> Result<Vec<Vec<f32>>, ForwardError> {
        batch::check(batch, self)?;
        if let Some(device) = &self.device {
            return device.forward(self, batch, hooks);
        }
        let rows: Vec<Range<usize>> = batch.iter().map(|chunk| 0..chunk.tokens.len()).collect();
        let count = rows.iter().map(Range::len).sum();
        let mut pass = Pass { layer: 0, rows, scratch: self.scratch.take() };
        let logits = turns::run(count, |turn| self.advance(&mut pass, batch, hooks, turn));
        self.scratch.put(pass.scratch);
        Ok(logits)
    }

    /// Computes the next layers of a pass, and the logits after the last. Returns `None` where it
    /// gives way to a shorter pass.
    fn advance(
        &self,
        pass: &mut Pass,
        batch: &mut [Chunk<'_>],
        hooks: &mut dyn LayerHooks,
        turn: Option<&Turn<'_>>,
    ) -> Option<Vec<Vec<f32>>> {
        if pass.layer == 0 {
            self.embed(batch, &mut pass.scratch);
        }
        while let Some(weights) = self.weights.layers.get(pass.layer) {
            self.layer(weights, pass, batch, hooks);
            pass.layer += 1;
            if turn.is_some_and(Turn::is_wanted) {
                return None;
            }
        }
        Some(self.logits(&pass.rows, &mut pass.scratch))
    }

    fn layer(&self, weights: &LayerWeights, pass: &mut Pass, batch: &mut [Chunk<'_>], hooks: &mut dyn LayerHooks) {
        let Pass { layer, rows, scratch } = pass;
        self.keys_and_values(*layer, weights, batch, scratch);
        // After all keys and values of the layer are written, before attention: the hook may
        // already publish them.
        hooks.layer_done(*layer, batch);
        if *layer + 1 == self.weights.layers.len() {
            self.retain_requested_rows(batch, rows, scratch);
        }
        if rows.iter().any(|rows| !rows.is_empty()) {
            with_element!(self.kv_dtype, E => self.attend::<E>(*layer, batch, rows, scratch));
            self.finish_layer(weights, rows, scratch);
        }
    }

    /// Maximum memory of a pass over `rows` tokens with the logits of `logit_rows` of them, and of
    /// the selection of tokens from these, in bytes.
    pub fn workspace_bytes(&self, rows: usize, logit_rows: usize) -> u64 {
        let config = &self.config;
        let threads = rayon::current_num_threads();
        // As in `Scratch`: stream, normed and projected; gate, up and activated; the rope table.
        let row = 3 * config.hidden + 3 * config.intermediate + config.head_dim;
        let row = (row + self.qkv_width() + config.query_width()) * size_of::<f32>();
        // The rounded inputs of a product take at most half of their f32, in whole blocks of 32.
        let widest = config.hidden.max(config.intermediate).max(config.query_width());
        let row = row + widest.next_multiple_of(32) * size_of::<f32>() / 2;
        // The pass has all logits in one buffer, and returns copies.
        let logit_row = 2 * config.vocab * size_of::<f32>();
        let of_rows = rows.saturating_mul(row).saturating_add(logit_rows.saturating_mul(logit_row));
        of_rows.saturating_add(threads * (config.vocab * SELECTION_BYTES + THREAD_BYTES)) as u64
    }

    fn qkv_width(&self) -> usize {
        self.config.query_width() + 2 * self.config.kv_width()
    }

    fn embed(&self, batch: &[Chunk<'_>], scratch: &mut Scratch) {
        let hidden = self.config.hidden;
        let tokens: Vec<u32> = batch.iter().flat_map(|chunk| chunk.tokens.iter().copied()).collect();
        let positions = batch.iter().flat_map(|chunk| chunk.position..chunk.end());
        scratch.rope.fill(&self.frequencies, positions);
        let stream = sized(&mut scratch.stream, tokens.len() * hidden);
        stream.par_chunks_exact_mut(hidden).with_min_len(64).zip(&tokens).for_each(|(row, &token)| {
            self.weights.embedding.as_ref().unwrap_or(&self.weights.output).copy_row(token as usize, row);
        });
    }

    fn keys_and_values(&self, layer: usize, weights: &LayerWeights, batch: &mut [Chunk<'_>], scratch: &mut Scratch) {
        let config = &self.config;
        let rows: usize = batch.iter().map(|chunk| chunk.tokens.len()).sum();
        let Scratch { stream, normed, qkv, rope, .. } = scratch;
        let normed = sized(normed, rows * config.hidden);
        rms_norm(&stream[..rows * config.hidden], &weights.attention_norm, config.rms_eps, normed);
        let width = self.qkv_width();
        let qkv = sized(qkv, rows * width);
        project(normed, &weights.qkv, qkv);
        let rotated_width = config.query_width() + config.kv_width();
        qkv.par_chunks_exact_mut(width).with_min_len(32).enumerate().for_each_init(
            || vec![0.0; config.head_dim],
            |copy, (row, values)| {
                for (head, values) in values[..rotated_width].chunks_exact_mut(config.head_dim).enumerate() {
                    if let Some((query_norm, key_norm)) = &weights.qk_norm {
                        let norm = if head < config.heads { query_norm } else { key_norm };
                        copy.copy_from_slice(values);
                        rms_norm(copy, norm, config.rms_eps, values);
                    }
                    rope.apply(row, values);
                }
            },
        );
        let mut rest = &*qkv;
        for chunk in batch {
            let (own, others) = rest.split_at(chunk.tokens.len() * width);
            rest = others;
            with_element!(self.kv_dtype, E => self.write_pages::<E>(layer, chunk, own));
        }
    }

    fn write_pages<E: PageElement>(&self, layer: usize, chunk: &mut Chunk<'_>, qkv: &[f32]) {
        let geometry = *chunk.geometry();
        let page_tokens = geometry.page_tokens as usize;
        let (keys, values) = head_layouts(&geometry, layer);
        let head_dim = self.config.head_dim;
        for (index, row) in qkv.chunks_exact(self.qkv_width()).enumerate() {
            let position = chunk.position + index;
            let PageSlot::Open(page) = &mut chunk.pages[position / page_tokens] else {
                unreachable!("validation has checked that the pages to write are open");
            };
            let page = page.elements_mut::<E>();
            let slot = position % page_tokens;
            let heads = row[self.config.query_width()..].chunks_exact(head_dim);
            for (layout, head) in keys.iter().chain(&values).zip(heads) {
                let elements = &mut page[layout.start + slot * layout.stride..][..head_dim];
                elements.iter_mut().zip(head).for_each(|(element, value)| *element = E::from_f32(*value));
            }
        }
    }

    /// Drops the rows without requested logits by moving the requested ones, the last of each
    /// chunk, to the front.
    fn retain_requested_rows(&self, batch: &[Chunk<'_>], rows: &mut [Range<usize>], scratch: &mut Scratch) {
        let hidden = self.config.hidden;
        let width = self.qkv_width();
        let mut source = 0;
        let mut target = 0;
        for (chunk, rows) in batch.iter().zip(rows) {
            let requested = chunk.logit_rows();
            let from = source + requested.start..source + requested.end;
            scratch.stream.copy_within(from.start * hidden..from.end * hidden, target * hidden);
            scratch.qkv.copy_within(from.start * width..from.end * width, target * width);
            source += chunk.tokens.len();
            target += requested.len();
            *rows = requested;
        }
    }

    fn attend<E: PageElement>(&self, layer: usize, batch: &[Chunk<'_>], rows: &[Range<usize>], scratch: &mut Scratch) {
        let config = &self.config;
        let count: usize = rows.iter().map(Range::len).sum();
        let query_width = config.query_width();
        let width = self.qkv_width();
        let pages: Vec<Vec<&[E]>> =
            batch.iter().map(|chunk| chunk.pages.iter().map(|slot| slot.page().elements::<E>()).collect()).collect();
        let layouts: Vec<_> = batch.iter().map(|chunk| head_layouts(chunk.geometry(), layer)).collect();
        let mut queries = &scratch.qkv[..count * width];
        let mut out = sized(&mut scratch.attended, count * query_width);
        let mut chunks = Vec::with_capacity(batch.len());
        for (index, chunk) in batch.iter().enumerate().filter(|(index, _)| !rows[*index].is_empty()) {
            let (own, others) = queries.split_at(rows[index].len() * width);
            queries = others;
            let (own_out, others) = out.split_at_mut(rows[index].len() * query_width);
            out = others;
            chunks.push(AttentionChunk {
                position: chunk.position + rows[index].start,
                queries: own,
                query_stride: width,
                pages: &pages[index],
                page_tokens: chunk.geometry().page_tokens as usize,
                keys: &layouts[index].0,
                values: &layouts[index].1,
                out: own_out,
            });
        }
        let shape = AttentionShape {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: 1.0 / (config.head_dim as f32).sqrt(),
        };
        attention(&shape, &mut chunks);
    }

    fn finish_layer(&self, weights: &LayerWeights, rows: &[Range<usize>], scratch: &mut Scratch) {
        let config = &self.config;
        let count: usize = rows.iter().map(Range::len).sum();
        let stream = &mut scratch.stream[..count * config.hidden];
        let projected = sized(&mut scratch.projected, count * config.hidden);
        project(&scratch.attended[..count * config.query_width()], &weights.attention_output, projected);
        add(stream, projected);
        let normed = sized(&mut scratch.normed, count * config.hidden);
        rms_norm(stream, &weights.mlp_norm, config.rms_eps, normed);
        let gate_up = sized(&mut scratch.gate_up, count * 2 * config.intermediate);
        project(normed, &weights.gate_up, gate_up);
        let activated = sized(&mut scratch.activated, count * config.intermediate);
        silu_mul(gate_up, config.intermediate, activated);
        project(activated, &weights.down, projected);
        add(stream, projected);
    }

    fn logits(&self, rows: &[Range<usize>], scratch: &mut Scratch) -> Vec<Vec<f32>> {
        let (hidden, vocab) = (self.config.hidden, self.config.vocab);
        let count: usize = rows.iter().map(Range::len).sum();
        let normed = sized(&mut scratch.normed, count * hidden);
        rms_norm(&scratch.stream[..count * hidden], &self.weights.norm, self.config.rms_eps, normed);
        // One product for all chunks, because it reads the whole matrix from memory.
        let logits = sized(&mut scratch.logits, count * vocab);
        matmul(normed, &self.weights.output, None, logits);
        let mut rest = &*logits;
        let of_chunk = |rows: &Range<usize>| {
            let (own, others) = rest.split_at(rows.len() * vocab);
            rest = others;
            own.to_vec()
        };
        rows.iter().map(of_chunk).collect()
    }
}

fn project(x: &[f32], linear: &Linear, out: &mut [f32]) {
    matmul(x, &linear.weight, linear.bias.as_deref(), out);
}

fn head_layouts(geometry: &PageGeometry, layer: usize) -> (Vec<HeadLayout>, Vec<HeadLayout>) {
    let of_kind = |kind| (0..geometry.kv_heads as usize).map(|head| head_layout(geometry, layer, kind, head)).collect();
    (of_kind(KvKind::Key), of_kind(KvKind::Value))
}
