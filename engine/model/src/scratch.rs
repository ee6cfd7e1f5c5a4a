//! Buffers of forward passes.

use larder_kernels::cpu::RopeTable;
use std::sync::{Mutex, PoisonError};

/// Buffers of one forward pass, reused by later passes.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) stream: Vec<f32>,
    pub(crate) normed: Vec<f32>,
    pub(crate) qkv: Vec<f32>,
    pub(crate) attended: Vec<f32>,
    pub(crate) projected: Vec<f32>,
    pub(crate) gate_up: Vec<f32>,
    pub(crate) activated: Vec<f32>,
    pub(crate) logits: Vec<f32>,
    pub(crate) rope: RopeTable,
}

/// Maximum number of buffer sets kept. Up to this many concurrent passes run without allocating.
const SCRATCH_KEPT_MAX: usize = 4;

/// Buffer sets that no pass uses at the moment. A pass holds the lock only to take or return a set.
#[derive(Default)]
pub(crate) struct ScratchPool(Mutex<Vec<Scratch>>);

impl ScratchPool {
    pub(crate) fn take(&self) -> Scratch {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    pub(crate) fn put(&self, scratch: Scratch) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < SCRATCH_KEPT_MAX {
            kept.push(scratch);
        }
    }
}
