//! The forward pass on a device with CUDA kernels, real or emulated.
//!
//! Invariants:
//! - Activations, norms and sums are f32. Weights have the type of the files, and keys and values
//!   that of the pages, as on the CPU. With [`Arithmetic::Tensor`], products and attention round
//!   their operands to bf16.
//! - No row influences another row's bits: every kernel treats rows on their own. So chunking,
//!   batch and page size change no bit, as on the CPU. The bits differ from those of the CPU.
//! - The pages of L1 stay in the memory of the host, and are complete when a hook sees them.
//! - No kernel computes with a page before the host has compared the checksums of what the device
//!   has read of it.
//! - Every wait has a deadline. After an error the device keeps no page.
//!
//! Three streams share the work. One computes. One copies pages to the device, some layers ahead
//! (`loads`).
//! One copies the new keys and values of each layer back while the next layer is computed.

mod choice;
mod graphs;
mod lengths;
mod loads;
mod pass;
mod places;
mod pool;
mod revision;
mod room;
mod tables;
mod weights;

pub use choice::DeviceChoice;

use crate::batch::{Chunk, ForwardError, LayerHooks};
use crate::model::{Model, Weights};
use graphs::Graphs;
use larder_format::PageGeometry;
use larder_kernels::device::{Device, DeviceError, DeviceInfo, Stream};
use larder_kernels::launch::Arithmetic;
use lengths::{Extent, Lengths};
use pass::{Buffers, Pass};
use pool::DevicePool;
use revision::KERNEL_REVISION;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tables::Tables;
use weights::DeviceWeights;

/// Maximum time of a pass. An emulated device takes seconds for a long chunk.
const PASS_LIMIT: Duration = Duration::from_secs(300);
/// Share of the free memory that pages may take. The rest is for working memory, and the start of
/// an engine checks that its largest pass fits.
const PAGE_SHARE: (usize, usize) = (3, 4);

/// Memory that the passes of an engine take at most, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PassMemory {
    /// On the device, beside the weights and the pages.
    pub(crate) device: usize,
    /// Pinned memory of the host: staging of pages, and results.
    pub(crate) pinned: usize,
}

/// A model's weights on a device, and the state of its passes.
pub(crate) struct DeviceModel {
    device: Arc<dyn Device>,
    compute: Arc<dyn Stream>,
    /// Copies pages to the device.
    loads: Arc<dyn Stream>,
    /// Copies new keys and values to the host.
    copies: Arc<dyn Stream>,
    weights: DeviceWeights,
    /// One pass runs at a time.
    state: Mutex<State>,
}

struct State {
    pool: Option<DevicePool>,
    /// Shape and number of the pages that engines have reserved.
    reserved: Option<(PageGeometry, usize)>,
    buffers: Buffers,
    graphs: Graphs,
    /// False during a pass, and after one that failed until all of its operations have ended.
    is_settled: bool,
}

impl State {
    fn reserved_pages(&self, geometry: &PageGeometry) -> usize {
        self.reserved.as_ref().filter(|(of, _)| of == geometry).map_or(0, |(_, pages)| *pages)
    }
}

impl DeviceModel {
    /// Copies the weights to the device. Takes seconds for a large model. Matrices of bf16 are
    /// computed by `arithmetic`.
    ///
    /// # Errors
    /// If the memory is not free, or if the device fails.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        weights: &Weights,
        arithmetic: Arithmetic,
    ) -> Result<DeviceModel, DeviceError> {
        let (compute, loads, copies) = (device.stream("compute")?, device.stream("loads")?, device.stream("copies")?);
        let weights = DeviceWeights::new(&*device, &*compute, weights, arithmetic)?;
        let (buffers, graphs) = (Buffers::new(), Graphs::default());
        let state = State { pool: None, reserved: None, buffers, graphs, is_settled: true };
        Ok(DeviceModel { device, compute, loads, copies, weights, state: Mutex::new(state) })
    }

    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// Name of the kernels, of their revision, of other units than the plain ones, and of the
    /// library that computes products.
    ///
    /// The name of matrix instructions has the compute capability of the device, because their
    /// rounding and the order of their sums are unspecified:
    /// <https://docs.nvidia.com/cuda/parallel-thread-execution/>, section on mma.
    pub(crate) fn numerics(&self) -> String {
        let plain = format!("{} {KERNEL_REVISION}", self.info().kind);
        if !self.weights.uses_tensor() {
            return plain;
        }
        let (major, minor) = self.info().compute_capability;
        let units = format!("{plain} {} {major}.{minor}", Arithmetic::Tensor.name());
        let parts = [units.as_str()].into_iter().chain(self.weights.library());
        parts.collect::<Vec<_>>().join(" ")
    }

    /// Reserves memory for the pages of an engine. Returns the number of pages that a pass of this
    /// engine may use: `pages`, or fewer if the memory is smaller. A later call for another shape
    /// of pages replaces this one.
    ///
    /// # Errors
    /// If the memory has no room for a page, or if the device fails.
    pub(crate) fn reserve(&self, geometry: &PageGeometry, pages: usize) -> Result<usize, DeviceError> {
        let mut state = self.lock();
        let held = state.reserved_pages(geometry);
        // Before the question for free memory.
        self.free_pool(&mut state)?;
        let (share, of) = PAGE_SHARE;
        let room = self.device.free_bytes()? / of * share / geometry.page_bytes();
        let count = held.saturating_add(pages).min(room.min(pool::pages_max(geometry))).max(held);
        if count == 0 {
            return Err(DeviceError::OutOfMemory { wanted: geometry.page_bytes() });
        }
        state.pool = Some(self.new_pool(geometry, count)?);
        state.reserved = Some((*geometry, count));
        Ok(pages.min(count))
    }

    /// Memory of passes over at most `rows` tokens, of which at most `logit_rows` have requested
    /// logits.
    pub(crate) fn pass_memory(model: &Model, geometry: &PageGeometry, rows: usize, logit_rows: usize) -> PassMemory {
        let extent = Extent::largest(model, &pass::attention_shape(model), geometry, rows, logit_rows);
        let lengths = Lengths::new(model, geometry, &extent);
        let pinned = lengths.pinned_bytes().saturating_add(loads::staging_bytes_max(geometry));
        PassMemory { device: lengths.device_bytes(), pinned }
    }

    /// Memory of the device that is free for passes, in bytes. Drops the buffers and graphs of
    /// earlier ones.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn free_for_passes(&self) -> Result<usize, DeviceError> {
        let mut state = self.lock();
        let deadline = Instant::now() + PASS_LIMIT;
        self.settle(&mut state, deadline)?;
        self.wait_for_streams(deadline)?;
        state.graphs.clear();
        state.buffers = Buffers::new();
        self.device.free_bytes()
    }

    /// As [`Model::forward`], for a batch that has been checked.
    pub(crate) fn forward(
        &self,
        model: &Model,
        batch: &mut [Chunk<'_>],
        hooks: &mut dyn LayerHooks,
    ) -> Result<Vec<Vec<f32>>, ForwardError> {
        let Some(first) = batch.first() else { return Ok(Vec::new()) };
        let geometry = *first.geometry();
        if let Some(chunk) = batch.iter().position(|chunk| *chunk.geometry() != geometry) {
            return Err(ForwardError::Geometry { chunk, page: 0 });
        }
        let mut state = self.lock();
        self.settle(&mut state, Instant::now() + PASS_LIMIT)?;
        // Stays so if the pass panics.
        state.is_settled = false;
        let result = self.run(&mut state, model, &geometry, batch, hooks);
        state.is_settled = result.is_ok();
        // Its error follows from that of the pass.
        let _ = self.settle(&mut state, Instant::now() + PASS_LIMIT);
        result
    }

    /// Ends what a pass that failed has left: operations that may still write, and pages of unknown
    /// content. Until their end no other pass may have the memory.
    fn settle(&self, state: &mut State, deadline: Instant) -> Result<(), DeviceError> {
        if state.is_settled {
            return Ok(());
        }
        self.wait_for_streams(deadline)?;
        if let Some(pool) = &mut state.pool {
            pool.clear();
        }
        state.is_settled = true;
        Ok(())
    }

    fn wait_for_streams(&self, deadline: Instant) -> Result<(), DeviceError> {
        [&self.loads, &self.compute, &self.copies].into_iter().try_for_each(|stream| stream.wait(deadline))
    }

    /// Frees the pages, and the graphs that use them. Waits first: memory is free only after the
    /// host has seen the end of its uses.
    fn free_pool(&self, state: &mut State) -> Result<(), DeviceError> {
        self.wait_for_streams(Instant::now() + PASS_LIMIT)?;
        state.graphs.clear();
        state.pool = None;
        Ok(())
    }

    fn run(
        &self,
        state: &mut State,
        model: &Model,
        geometry: &PageGeometry,
        batch: &mut [Chunk<'_>],
        hooks: &mut dyn LayerHooks,
    ) -> Result<Vec<Vec<f32>>, ForwardError> {
        let deadline = Instant::now() + PASS_LIMIT;
        self.provide_places(state, geometry, pool::distinct_pages(batch))?;
        let State { pool: Some(pool), buffers, graphs, .. } = state else {
            return Err(DeviceError::OutOfMemory { wanted: geometry.page_bytes() }.into());
        };
        let (places, loads) = pool.load(&*self.device, &*self.loads, batch, deadline)?;
        let shape = pass::attention_shape(model);
        let arithmetic = self.weights.arithmetic().for_pages(pool.element()?);
        let tables = Tables::new(model, &shape, arithmetic, batch, &places)?;
        let spaces = match buffers.spaces(&*self.device, model, geometry, &tables) {
            Err(DeviceError::OutOfMemory { .. }) => {
                // Graphs hold the memory that grows.
                graphs.clear();
                buffers.spaces(&*self.device, model, geometry, &tables)?
            }
            result => result?,
        };
        let (tables, spaces, loads) = (&tables, &spaces, &loads);
        Pass { backend: self, model, pool, tables, spaces, loads, shape, deadline }.run(graphs, batch, hooks)
    }

    /// Ensures that the device has places for `needed` pages of a shape.
    fn provide_places(&self, state: &mut State, geometry: &PageGeometry, needed: usize) -> Result<(), DeviceError> {
        let is_enough = |pool: &DevicePool| pool.geometry() == geometry && pool.count() >= needed;
        if state.pool.as_ref().is_some_and(is_enough) {
            return Ok(());
        }
        let needed = needed.max(state.reserved_pages(geometry));
        // Before the allocation, so that both do not have to fit.
        self.free_pool(state)?;
        let rounded = needed.checked_next_power_of_two().unwrap_or(needed);
        let pool = match self.new_pool(geometry, rounded) {
            Err(DeviceError::OutOfMemory { .. }) => self.new_pool(geometry, needed)?,
            result => result?,
        };
        state.pool = Some(pool);
        Ok(())
    }

    fn new_pool(&self, geometry: &PageGeometry, count: usize) -> Result<DevicePool, DeviceError> {
        DevicePool::new(&*self.device, &*self.compute, geometry, count, Instant::now() + PASS_LIMIT)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Ignoring poison is sound: a pass that panics leaves `is_settled` false, so the next one
        // waits for its operations and forgets all pages.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::LogitRows;
    use crate::kv::{KvPool, PageSlot};
    use larder_kernels::cpu::{PackedMatrix, WeightType};
    use larder_kernels::device::{Place, host};
    use std::path::Path;

    #[test]
    fn numerics_name_matrix_instructions_if_any_matrix_uses_them() {
        let mut model = Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny")).unwrap();
        let name = |model: &Model, arithmetic| {
            DeviceModel::new(host::open(1 << 30), &model.weights, arithmetic).unwrap().numerics()
        };
        assert_eq!(name(&model, Arithmetic::Plain), format!("host {KERNEL_REVISION}"));
        let units = format!("host {KERNEL_REVISION} mma 0.0");
        assert_eq!(name(&model, Arithmetic::Tensor), units);
        // Some checkpoints keep a few matrices in f32.
        let stored = &model.weights.layers[0].qkv.weight;
        let (outputs, inputs) = (stored.outputs(), stored.inputs());
        let of_f32 = PackedMatrix::new(outputs, inputs, WeightType::F32, |output, row| stored.copy_row(output, row));
        model.weights.layers[0].qkv.weight = of_f32.unwrap();
        assert_eq!(name(&model, Arithmetic::Tensor), units);
    }

    #[test]
    fn no_pass_begins_before_the_operations_of_a_failed_one_ended() {
        let model = Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny")).unwrap();
        // It runs no kernels, so every pass fails.
        let device = host::open(1 << 30);
        let backend = DeviceModel::new(Arc::clone(&device), &model.weights, Arithmetic::Plain).unwrap();
        let pool = KvPool::new(model.geometry(16), 1);
        let mut pages = [PageSlot::Open(pool.allocate().unwrap())];
        let chunk = Chunk { tokens: &[1], position: 0, pages: &mut pages, logits: LogitRows::Last };
        let failed = backend.forward(&model, &mut [chunk], &mut ());
        assert!(matches!(failed, Err(ForwardError::Device(DeviceError::RunsNoKernels(_)))), "{failed:?}");

        let mut state = backend.lock();
        assert!(state.is_settled, "all operations of the pass ended");
        let slow = device.allocate(Place::Device, 64 << 20).unwrap();
        // A thread that stands still after the fill finds nothing to wait for. It tries again then.
        let is_late = (0..20).any(|_| {
            backend.copies.fill(&slow.all(), 1).unwrap();
            state.is_settled = false;
            matches!(backend.settle(&mut state, Instant::now()), Err(DeviceError::Deadline { .. }))
        });
        assert!(is_late && !state.is_settled, "the pass must wait for the operations");
        backend.settle(&mut state, Instant::now() + PASS_LIMIT).unwrap();
        assert!(state.is_settled);
    }
}
