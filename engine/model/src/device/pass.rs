//! One forward pass on a device.
//!
//! The host enqueues a layer, and then waits for the keys and values of the layer before. So the
//! device computes while the host copies these into their pages and calls the hook.
//!
//! A decode step runs as one graph. Its keys and values are few, so they are copied after it.

use super::DeviceModel;
use super::graphs::{Graphs, StepShape};
use super::lengths::{Extent, Lengths};
use super::loads::Loads;
use super::pool::DevicePool;
use super::room::Room;
use super::tables::{Rows, Tables, part};
use super::weights::DeviceLayer;
use crate::batch::{Chunk, ForwardError, LayerHooks};
use crate::kv::{KvKind, PageSlot, head_layout};
use crate::model::Model;
use larder_format::PageGeometry;
use larder_kernels::cpu::AttentionShape;
use larder_kernels::device::{Device, DeviceError, Event, Place, Slice, Stream};
use larder_kernels::launch::{Attention, DevicePages, Element, Embedding, KvRows, KvTarget, RmsNorm, Rotate, SiluMul};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

pub(super) fn attention_shape(model: &Model) -> AttentionShape {
    let config = model.config();
    AttentionShape {
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        scale: 1.0 / (config.head_dim as f32).sqrt(),
    }
}

/// Width of a row of queries, keys and values, in elements.
pub(super) fn qkv_width(model: &Model) -> usize {
    model.config().query_width() + 2 * model.config().kv_width()
}

/// Memory of passes.
pub(super) struct Buffers {
    /// On the device, in the order of [`Lengths::device`].
    device: [Room; 11],
    partials: Room,
    tables: Room,
    /// Keys and values of two layers in turn.
    kv_rows: [Room; 2],
    /// Keys and values of all layers of a decode step.
    step_kv_rows: Room,
    logits: Room,
}

/// Memory of one pass.
pub(super) struct Spaces {
    tables: Slice,
    stream: Slice,
    normed: Slice,
    qkv: Slice,
    attended: Slice,
    projected: Slice,
    gate_up: Slice,
    activated: Slice,
    /// The rows with requested logits.
    last_stream: Slice,
    last_qkv: Slice,
    logits: Slice,
    partials: Slice,
    host_tables: Slice,
    host_kv_rows: [Slice; 2],
    host_step_kv_rows: Slice,
    host_logits: Slice,
}

impl Spaces {
    /// Addresses that a graph of this pass would use.
    fn addresses(&self) -> Vec<u64> {
        let of_activations = [&self.stream, &self.normed, &self.qkv, &self.attended, &self.projected];
        let of_mlp = [&self.gate_up, &self.activated, &self.logits, &self.partials, &self.tables];
        let of_host = [&self.host_tables, &self.host_step_kv_rows, &self.host_logits];
        let all = of_activations.into_iter().chain(of_mlp).chain(of_host);
        all.map(Slice::address).collect()
    }
}

impl Buffers {
    pub(super) fn new() -> Buffers {
        let pinned = || Room::new(Place::Pinned);
        Buffers {
            device: std::array::from_fn(|_| Room::new(Place::Device)),
            partials: Room::new(Place::Device),
            tables: pinned(),
            kv_rows: [pinned(), pinned()],
            step_kv_rows: pinned(),
            logits: pinned(),
        }
    }

    pub(super) fn spaces(
        &mut self,
        device: &dyn Device,
        model: &Model,
        geometry: &PageGeometry,
        tables: &Tables,
    ) -> Result<Spaces, DeviceError> {
        let lengths = Lengths::new(model, geometry, &Extent::of(tables, &attention_shape(model))?);
        let mut rooms = self.device.iter_mut().zip(lengths.device);
        let mut next = || match rooms.next() {
            Some((room, bytes)) => room.of(device, bytes),
            None => Err(DeviceError::Shape("a pass has more buffers than rooms")),
        };
        let [first_rows, second_rows] = &mut self.kv_rows;
        Ok(Spaces {
            tables: next()?,
            stream: next()?,
            normed: next()?,
            qkv: next()?,
            attended: next()?,
            projected: next()?,
            gate_up: next()?,
            activated: next()?,
            last_stream: next()?,
            last_qkv: next()?,
            logits: next()?,
            partials: self.partials.of(device, lengths.partials)?,
            host_tables: self.tables.of(device, lengths.tables)?,
            host_kv_rows: [first_rows.of(device, lengths.kv_rows)?, second_rows.of(device, lengths.kv_rows)?],
            host_step_kv_rows: self.step_kv_rows.of(device, lengths.step_kv_rows)?,
            host_logits: self.logits.of(device, lengths.logits)?,
        })
    }
}

/// The rows that go through a layer after its keys and values are written.
struct Selected<'a> {
    rows: &'a Rows,
    stream: &'a Slice,
    qkv: &'a Slice,
}

pub(super) struct Pass<'a> {
    pub(super) backend: &'a DeviceModel,
    pub(super) model: &'a Model,
    pub(super) pool: &'a DevicePool,
    pub(super) tables: &'a Tables,
    pub(super) spaces: &'a Spaces,
    /// Copies of the pages that the device lacked.
    pub(super) loads: &'a Loads,
    pub(super) shape: AttentionShape,
    pub(super) deadline: Instant,
}

impl Pass<'_> {
    pub(super) fn run(
        &self,
        graphs: &mut Graphs,
        batch: &mut [Chunk<'_>],
        hooks: &mut dyn LayerHooks,
    ) -> Result<Vec<Vec<f32>>, ForwardError> {
        self.spaces.host_tables.write(&self.tables.bytes)?;
        match self.tables.step {
            Some(shape) => self.run_step(shape, graphs, batch, hooks)?,
            None => self.run_layers(batch, hooks)?,
        }
        Ok(self.logits(batch)?)
    }

    /// Runs a decode step, recorded at the first step of its shape.
    fn run_step(
        &self,
        shape: StepShape,
        graphs: &mut Graphs,
        batch: &mut [Chunk<'_>],
        hooks: &mut dyn LayerHooks,
    ) -> Result<(), ForwardError> {
        let compute = self.compute();
        // A graph waits for nothing.
        (0..self.backend.weights.layers.len()).try_for_each(|layer| self.loads.check(layer, self.deadline))?;
        let mut addresses = self.spaces.addresses();
        addresses.extend([self.pool.layer(0)?.address(), self.pool.count() as u64]);
        let graph = graphs.get(compute, &addresses, shape, || self.enqueue_step())?;
        compute.replay(&*graph)?;
        compute.wait(self.deadline)?;
        let mut rows = vec![0; self.spaces.host_kv_rows[0].bytes()];
        for layer in 0..self.backend.weights.layers.len() {
            self.step_kv_rows(layer)?.read(&mut rows)?;
            self.publish(layer, &rows, batch, hooks);
        }
        Ok(())
    }

    fn enqueue_step(&self) -> Result<(), DeviceError> {
        self.begin()?;
        for (layer, weights) in self.backend.weights.layers.iter().enumerate() {
            let layer_pool = self.pool.layer(layer)?;
            let pages = self.pool.pages(&layer_pool)?;
            self.keys_and_values(layer, weights, pages)?;
            self.copy_out(self.compute(), pages, &self.step_kv_rows(layer)?)?;
            let Spaces { stream, qkv, .. } = self.spaces;
            self.finish_layer(&Selected { rows: &self.tables.all, stream, qkv }, weights, pages)?;
        }
        self.enqueue_logits(&self.spaces.stream)
    }

    /// Space for the keys and values of one layer of a decode step.
    fn step_kv_rows(&self, layer: usize) -> Result<Slice, DeviceError> {
        let bytes = self.spaces.host_kv_rows[0].bytes();
        self.spaces.host_step_kv_rows.slice(layer * bytes..(layer + 1) * bytes)
    }

    fn run_layers(&self, batch: &mut [Chunk<'_>], hooks: &mut dyn LayerHooks) -> Result<(), ForwardError> {
        self.begin()?;
        let mut rows = vec![0; self.spaces.host_kv_rows[0].bytes()];
        let mut previous: Option<Arc<dyn Event>> = None;
        let layers = &self.backend.weights.layers;
        for (layer, weights) in layers.iter().enumerate() {
            self.loads.check(layer, self.deadline)?;
            let copied = self.layer(layer, weights)?;
            if layer + 1 == layers.len() {
                self.enqueue_logits(&self.spaces.last_stream)?;
            }
            if let Some(previous) = previous.replace(copied) {
                self.read_rows(layer - 1, &*previous, &mut rows)?;
                self.publish(layer - 1, &rows, batch, hooks);
            }
        }
        if let Some(last) = previous {
            self.read_rows(layers.len() - 1, &*last, &mut rows)?;
            self.publish(layers.len() - 1, &rows, batch, hooks);
        }
        Ok(self.compute().wait(self.deadline)?)
    }

    fn compute(&self) -> &dyn Stream {
        &*self.backend.compute
    }

    fn table(&self, range: &Range<usize>) -> Result<Slice, DeviceError> {
        part(&self.spaces.tables, range)
    }

    /// Enqueues the tables and the embedding.
    fn begin(&self) -> Result<(), DeviceError> {
        let Spaces { tables, stream, host_tables, .. } = self.spaces;
        self.compute().copy(tables, host_tables)?;
        let embedding = self.backend.weights.embedding();
        Embedding {
            element: Element::F32,
            table_element: embedding.element,
            vocab: embedding.outputs,
            width: embedding.inputs,
            rows: self.tables.all.count,
            table: &embedding.weight,
            tokens: &self.table(&self.tables.tokens)?,
            out: stream,
        }
        .launch(self.compute())
    }

    /// Enqueues a layer. Returns an event behind the copy of its keys and values.
    fn layer(&self, layer: usize, weights: &DeviceLayer) -> Result<Arc<dyn Event>, DeviceError> {
        let Spaces { stream, qkv, last_stream, last_qkv, .. } = self.spaces;
        let layer_pool = self.pool.layer(layer)?;
        let pages = self.pool.pages(&layer_pool)?;
        self.keys_and_values(layer, weights, pages)?;
        let (written, copies) = (self.compute().record()?, &*self.backend.copies);
        copies.wait_for(&*written)?;
        self.copy_out(copies, pages, &self.spaces.host_kv_rows[layer % 2])?;
        let copied = copies.record()?;
        let is_last = layer + 1 == self.backend.weights.layers.len();
        let selected = if is_last {
            self.select_requested()?;
            Selected { rows: &self.tables.last, stream: last_stream, qkv: last_qkv }
        } else {
            Selected { rows: &self.tables.all, stream, qkv }
        };
        if selected.rows.count > 0 {
            self.finish_layer(&selected, weights, pages)?;
        }
        Ok(copied)
    }

    /// Enqueues what writes the keys and values of a layer to the pages on the device.
    fn keys_and_values(&self, layer: usize, weights: &DeviceLayer, pages: DevicePages<'_>) -> Result<(), DeviceError> {
        let (rows, Spaces { stream, normed, qkv, gate_up, .. }) = (self.tables.all.count, self.spaces);
        // The projection of the previous layer's MLP is added with the norm.
        self.norm(rows, stream, layer > 0, &weights.attention_norm)?;
        weights.qkv.multiply(self.compute(), rows, normed, gate_up, qkv)?;
        self.rotate(weights, pages)
    }

    fn norm(&self, rows: usize, stream: &Slice, adds: bool, weight: &Slice) -> Result<(), DeviceError> {
        let config = self.model.config();
        RmsNorm {
            element: Element::F32,
            rows,
            width: config.hidden,
            x: stream,
            residual: adds.then_some(&self.spaces.projected),
            weight,
            eps: config.rms_eps,
            out: &self.spaces.normed,
        }
        .launch(self.compute())
    }

    /// Enqueues the rotation, which writes keys and values to their pages on the device.
    fn rotate(&self, weights: &DeviceLayer, pages: DevicePages<'_>) -> Result<(), DeviceError> {
        Rotate {
            element: Element::F32,
            rows: self.tables.all.count,
            heads: self.shape.heads,
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
            qkv: &self.spaces.qkv,
            row_stride: qkv_width(self.model),
            table: &self.table(&self.tables.rope)?,
            query_norm: weights.qk_norm.as_ref().map(|norms| &norms.0),
            key_norm: weights.qk_norm.as_ref().map(|norms| &norms.1),
            eps: self.model.config().rms_eps,
            target: Some(KvTarget { pages, slots: &self.table(&self.tables.slots)? }),
        }
        .launch(self.compute())
    }

    /// Enqueues the copy of a layer's new keys and values to the host.
    fn copy_out(&self, stream: &dyn Stream, pages: DevicePages<'_>, out: &Slice) -> Result<(), DeviceError> {
        KvRows {
            pages,
            rows: self.tables.all.count,
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
            slots: &self.table(&self.tables.slots)?,
            out,
        }
        .launch(stream)
    }

    /// Enqueues the copy of the rows with requested logits.
    fn select_requested(&self) -> Result<(), DeviceError> {
        let Spaces { stream, qkv, last_stream, last_qkv, .. } = self.spaces;
        let rows = self.table(&self.tables.requested)?;
        let widths = [self.model.config().hidden, qkv_width(self.model)];
        for (width, (table, out)) in widths.into_iter().zip([(stream, last_stream), (qkv, last_qkv)]) {
            Embedding {
                element: Element::F32,
                table_element: Element::F32,
                vocab: self.tables.all.count,
                width,
                rows: self.tables.last.count,
                table,
                tokens: &rows,
                out,
            }
            .launch(self.compute())?;
        }
        Ok(())
    }

    fn attend(&self, selected: &Selected<'_>, pages: DevicePages<'_>) -> Result<(), DeviceError> {
        let rows = selected.rows;
        let attention = Attention {
            arithmetic: self.tables.arithmetic,
            element: Element::F32,
            shape: self.shape,
            rows: rows.count,
            queries: selected.qkv,
            query_stride: qkv_width(self.model),
            sequences: &self.table(&rows.sequences)?,
            sequence_count: self.tables.sequence_count,
            tiles: &self.table(&rows.tiles)?,
            tile_count: rows.tile_count,
            pages,
            page_table: &self.table(&self.tables.page_table)?,
            page_entries: self.tables.page_entries,
            out: &self.spaces.attended,
        };
        if rows.spans > 0 {
            attention.split(self.compute(), rows.spans, &self.spaces.partials)
        } else {
            attention.prefill(self.compute())
        }
    }

    /// Enqueues attention and the MLP. Products take the buffer of the MLP that is free as their
    /// working memory. The projection of the MLP stays to be added to the stream.
    fn finish_layer(
        &self,
        selected: &Selected<'_>,
        weights: &DeviceLayer,
        pages: DevicePages<'_>,
    ) -> Result<(), DeviceError> {
        let Spaces { normed, attended, projected, gate_up, activated, .. } = self.spaces;
        let (rows, compute) = (selected.rows.count, self.compute());
        self.attend(selected, pages)?;
        weights.attention_output.multiply(compute, rows, attended, gate_up, projected)?;
        self.norm(rows, selected.stream, true, &weights.mlp_norm)?;
        weights.gate_up.multiply(compute, rows, normed, activated, gate_up)?;
        let width = self.model.config().intermediate;
        SiluMul { element: Element::F32, rows, width, gate_up, out: activated }.launch(compute)?;
        weights.down.multiply(compute, rows, activated, gate_up, projected)
    }

    /// Enqueues the logits of the rows in `stream`, and their copy to the host.
    fn enqueue_logits(&self, stream: &Slice) -> Result<(), DeviceError> {
        let Spaces { normed, gate_up, logits, host_logits, .. } = self.spaces;
        let rows = self.tables.last.count;
        if rows == 0 {
            return Ok(());
        }
        let weights = &self.backend.weights;
        self.norm(rows, stream, true, &weights.norm)?;
        weights.output.multiply(self.compute(), rows, normed, gate_up, logits)?;
        self.compute().copy(host_logits, logits)
    }

    /// Waits for the keys and values of a layer, and reads them.
    fn read_rows(&self, layer: usize, copied: &dyn Event, rows: &mut [u8]) -> Result<(), DeviceError> {
        copied.wait(self.deadline)?;
        self.spaces.host_kv_rows[layer % 2].read(rows)
    }

    /// Writes the keys and values of a layer to their pages, and calls the hook.
    fn publish(&self, layer: usize, rows: &[u8], batch: &mut [Chunk<'_>], hooks: &mut dyn LayerHooks) {
        write_pages(self.pool.geometry(), layer, batch, rows);
        hooks.layer_done(layer, batch);
    }

    /// The requested logits of each chunk, from the host's copy.
    fn logits(&self, batch: &[Chunk<'_>]) -> Result<Vec<Vec<f32>>, DeviceError> {
        let vocab = self.model.config().vocab;
        let mut all = vec![0.0f32; self.tables.last.count * vocab];
        if !all.is_empty() {
            self.spaces.host_logits.read(bytemuck::cast_slice_mut(&mut all))?;
        }
        let mut rest = &all[..];
        let of_chunk = |chunk: &Chunk<'_>| {
            let (own, others) = rest.split_at(chunk.logit_rows().len() * vocab);
            rest = others;
            own.to_vec()
        };
        Ok(batch.iter().map(of_chunk).collect())
    }
}

/// Writes the keys and values of a layer, row after row of the batch, to their pages.
fn write_pages(geometry: &PageGeometry, layer: usize, batch: &mut [Chunk<'_>], rows: &[u8]) {
    let element = geometry.dtype.bytes();
    let page_tokens = geometry.page_tokens as usize;
    // With one group of heads, those of a token follow each other.
    let width = (geometry.kv_heads * geometry.head_dim) as usize * element;
    let starts = [KvKind::Key, KvKind::Value].map(|kind| head_layout(geometry, layer, kind, 0).start * element);
    let mut rows = rows.chunks_exact(2 * width);
    for chunk in batch {
        for position in chunk.position..chunk.end() {
            let PageSlot::Open(page) = &mut chunk.pages[position / page_tokens] else {
                unreachable!("validation has checked that the pages to write are open");
            };
            let page = page.bytes_in_step();
            let Some(row) = rows.next() else {
                unreachable!("the copy of a layer has a row for each token of the batch");
            };
            for (start, values) in starts.iter().zip(row.chunks_exact(width)) {
                page[start + position % page_tokens * width..][..width].copy_from_slice(values);
            }
        }
    }
}
