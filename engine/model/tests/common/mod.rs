//! Test support: the golden models, and sequences over pages of their own.
#![allow(dead_code)]

use larder_format::KvDtype;
use larder_model::{Activations, Chunk, DeviceChoice, KvPool, LoadOptions, LogitRows, Model, PageSlot, WeightFormat};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tolerance for keys and values in f32, where no rounding can differ.
pub const TOLERANCE: f32 = 1e-5;

/// A way to load a model.
#[derive(Clone, Copy)]
pub struct Variant {
    pub kv_dtype: KvDtype,
    pub weights: WeightFormat,
    pub activations: Activations,
    /// Tensor of `golden.safetensors` with its logits at some positions.
    pub tensor: Option<&'static str>,
    pub tolerance: f32,
}

impl Variant {
    pub fn options(&self) -> LoadOptions {
        let Variant { kv_dtype, weights, activations, .. } = *self;
        LoadOptions { kv_dtype: Some(kv_dtype), weights, activations, ..LoadOptions::default() }
    }
}

pub const EXACT: Variant = Variant {
    kv_dtype: KvDtype::F32,
    weights: WeightFormat::Stored,
    activations: Activations::F32,
    tensor: None,
    tolerance: TOLERANCE,
};

pub fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

pub struct Golden {
    pub name: String,
    pub model: Model,
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub logits: Vec<f32>,
    pub last_logits: Vec<f32>,
    /// Positions at which `variant_logits` holds the logits of the variant.
    pub rows: Vec<u32>,
    pub variant_logits: Vec<f32>,
}

pub fn golden(dir: &Path, variant: Variant) -> Golden {
    golden_on(dir, variant, DeviceChoice::Cpu)
}

pub fn golden_on(dir: &Path, variant: Variant, device: DeviceChoice) -> Golden {
    let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = |name: &str| file.tensor(name).unwrap().data();
    let floats = |name: &str| data(name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let tokens = |name| data(name).as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
    Golden {
        name: dir.file_name().unwrap().to_string_lossy().into_owned(),
        model: Model::load_with(dir, &LoadOptions { device, ..variant.options() }, &|_, _| ()).unwrap(),
        prompt: tokens("prompt"),
        greedy: tokens("greedy"),
        logits: floats("logits"),
        last_logits: floats("last_logits"),
        rows: tokens("rows"),
        variant_logits: variant.tensor.map(floats).unwrap_or_default(),
    }
}

pub struct Sequence {
    pub pages: Vec<PageSlot>,
    pub page_tokens: usize,
    pub tokens: Vec<u32>,
    pub computed: usize,
}

impl Sequence {
    pub fn new(model: &Model, page_tokens: u32, tokens: &[u32], room: usize) -> Sequence {
        let count = room.div_ceil(page_tokens as usize);
        let pool: Arc<KvPool> = KvPool::new(model.geometry(page_tokens), count);
        let page = || {
            let mut page = pool.allocate().unwrap();
            // NaN makes a read of a slot that was not computed visible in the result.
            page.fill_with(|| f32::NAN);
            PageSlot::Open(page)
        };
        let pages = (0..count).map(|_| page()).collect();
        Sequence { pages, page_tokens: page_tokens as usize, tokens: tokens.to_vec(), computed: 0 }
    }

    pub fn chunk(&mut self, len: usize, logits: LogitRows) -> Chunk<'_> {
        let position = self.computed;
        self.computed += len;
        // An engine seals pages once they are full.
        for slot in &mut self.pages[..position / self.page_tokens] {
            if let PageSlot::Open(_) = slot {
                let filler = KvPool::new(*slot.page().geometry(), 1).allocate().unwrap();
                let full = std::mem::replace(slot, PageSlot::Open(filler));
                *slot = full.seal();
            }
        }
        Chunk { tokens: &self.tokens[position..position + len], position, pages: &mut self.pages, logits }
    }

    pub fn run(&mut self, model: &Model, len: usize, logits: LogitRows) -> Vec<f32> {
        model.forward(&mut [self.chunk(len, logits)], &mut ()).unwrap().remove(0)
    }

    /// A sequence with the first `computed` tokens in pages of its own.
    pub fn copied(&self, computed: usize) -> Sequence {
        let copy = |slot: &PageSlot| {
            let mut page = KvPool::new(*slot.page().geometry(), 1).allocate().unwrap();
            page.as_mut().copy_from_slice(slot.page().as_ref());
            PageSlot::Open(page)
        };
        let pages = self.pages.iter().map(copy).collect();
        Sequence { pages, page_tokens: self.page_tokens, tokens: self.tokens.clone(), computed }
    }

    /// Returns the bytes of the keys and values computed so far, token by token.
    pub fn kv_bytes(&self) -> Vec<u8> {
        let geometry = *self.pages[0].page().geometry();
        let width = (geometry.kv_heads * geometry.head_dim) as usize * geometry.dtype.bytes();
        let mut bytes = Vec::new();
        for position in 0..self.computed {
            let page: &[u8] = self.pages[position / self.page_tokens].page().as_ref();
            for block in 0..2 * geometry.layers as usize {
                let start = (block * self.page_tokens + position % self.page_tokens) * width;
                bytes.extend_from_slice(&page[start..start + width]);
            }
        }
        bytes
    }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Largest difference, relative to the largest absolute logit of its row.
pub fn worst_difference(found: &[f32], expected: &[f32], vocab: usize) -> f32 {
    assert_eq!(found.len(), expected.len());
    let of_row = |(found, expected): (&[f32], &[f32])| {
        let scale = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        found.iter().zip(expected).fold(0.0f32, |worst, (a, b)| {
            let difference = (a - b).abs() / scale;
            if difference.is_nan() { f32::INFINITY } else { worst.max(difference) }
        })
    };
    found.chunks(vocab).zip(expected.chunks(vocab)).map(of_row).fold(0.0, f32::max)
}
