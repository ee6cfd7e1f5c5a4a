//! A loaded model: packed weights, fingerprint, page geometry.
//!
//! Invariants:
//! - A [`Model`] never changes after loading.
//! - Its fingerprint covers everything that determines its results: the configuration in canonical
//!   form, and the bytes of every tensor it uses.

use crate::config::ModelConfig;
use crate::device::{DeviceChoice, DeviceModel};
use crate::kv::KvPool;
use crate::scratch::ScratchPool;
use crate::weights::{LoadError, Tensor, Tensors, WeightFiles, read_json, read_optional_json};
use larder_format::{KvDtype, MAX_PARTS, PageGeometry};
use larder_kernels::cpu::{PackedMatrix, WeightType};
use larder_kernels::device::{Device, DeviceInfo};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Target size of a page part. Parts are the unit of transfer: small enough to overlap with the
/// computation of later layers, large enough to be worth a request.
const PART_BYTES_TARGET: usize = 256 << 10;
/// Maximum default of the tokens per page. Only whole pages are shared, so a longer page loses more
/// tokens at the end of a prefix.
const PAGE_TOKENS_MAX: u32 = 32;
/// Maximum size of a page with the default number of tokens. Far larger pages keep a get waiting
/// for memory, and gain no throughput.
const PAGE_BYTES_MAX: usize = 2 << 20;

pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights,
    pub(crate) frequencies: Vec<f32>,
    pub(crate) scratch: ScratchPool,
    /// Element type of the pages.
    pub(crate) kv_dtype: KvDtype,
    /// Computes the model in place of the CPU, and has its weights.
    pub(crate) device: Option<DeviceModel>,
    /// Name of the device that was asked for, for messages.
    device_choice: DeviceChoice,
    fingerprint: [u8; 32],
}

/// Choices for loading a model folder.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Element type of keys and values. Default: that of the model's weights.
    pub kv_dtype: Option<KvDtype>,
    pub weights: WeightFormat,
    pub activations: Activations,
    /// Device that computes the model. Default: the CPU.
    pub device: DeviceChoice,
}

/// Format of the weight matrices in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// The type in the files: bf16, f16 or f32.
    #[default]
    Stored,
    /// Eight bits per weight, with a scale per output and 32 inputs. Half the memory of bf16, at
    /// the price of accuracy.
    Q8,
}

/// Rounding of activations before a matrix product on the CPU. It is part of the numerics, so
/// engines with different ones share no pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Activations {
    /// Not rounded. Every processor gives the same bits.
    #[default]
    F32,
    /// As the weights, where this processor has instructions for such products: bf16, or 8 bits for
    /// weights of 8 bits. `f32` elsewhere.
    Narrow,
}

/// Receives the progress of loading: bytes done, and bytes in all. Several threads call it, out of
/// order. Each weight counts twice: it is converted, and hashed for the fingerprint.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

pub(crate) struct Weights {
    /// Embedding matrix. `None` if the model ties it to the output matrix.
    pub(crate) embedding: Option<PackedMatrix>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) norm: Vec<f32>,
    pub(crate) output: PackedMatrix,
}

impl Weights {
    /// No weights, for a model that computes on a device.
    fn none() -> Weights {
        Weights { embedding: None, layers: Vec::new(), norm: Vec::new(), output: PackedMatrix::empty() }
    }
}

/// Weights of one layer. Projections with a common input are concatenated into one matrix.
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) qkv: Linear,
    /// Norm weights of the query heads and of the key heads.
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) attention_output: Linear,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

pub(crate) struct Linear {
    pub(crate) weight: PackedMatrix,
    pub(crate) bias: Option<Vec<f32>>,
}

impl Model {
    /// Loads the model folder `dir`: `config.json`, the optional `generation_config.json`, and the
    /// weights. The matrices keep their element type in memory.
    ///
    /// # Errors
    /// If the folder is incomplete or malformed, or if it needs a feature this engine lacks. The
    /// error names the file, field or tensor.
    pub fn load(dir: &Path) -> Result<Model, LoadError> {
        Model::load_with(dir, &LoadOptions::default(), &|_, _| ())
    }

    /// Loads a model folder as [`load`](Model::load) does, with choices, and reports progress.
    ///
    /// # Errors
    /// Those of [`load`](Model::load).
    pub fn load_with(dir: &Path, options: &LoadOptions, progress: Progress<'_>) -> Result<Model, LoadError> {
        if !dir.is_dir() {
            return Err(LoadError::NoFolder(dir.to_owned()));
        }
        let generation = read_optional_json(&dir.join("generation_config.json"))?;
        let config = ModelConfig::from_json(&read_json(&dir.join("config.json"))?, &generation)?;
        // Before minutes of reading.
        let device = options.device.open(&config, options.weights)?;
        let files = WeightFiles::open(dir)?;
        let tensors = files.tensors()?;
        let meter = Meter { done: AtomicU64::new(0), total: 2 * tensors.bytes(), report: progress };
        let is_narrow = options.activations == Activations::Narrow && device.is_none();
        let mut loader = Loader { tensors, used: Vec::new(), format: options.weights, is_narrow, meter };
        let weights = loader.weights(&config)?;
        let kv_dtype = options.kv_dtype.unwrap_or_else(|| loader.kv_dtype());
        let fingerprint = loader.fingerprint(&config);
        let frequencies = config.rope.frequencies(config.head_dim);
        let on_device = |source| LoadError::Device { device: options.device, source };
        let new = |device: Arc<dyn Device>| {
            let arithmetic = options.device.arithmetic(device.info());
            DeviceModel::new(device, &weights, arithmetic)
        };
        let device = device.map(new).transpose().map_err(on_device)?;
        let weights = if device.is_some() { Weights::none() } else { weights };
        let (scratch, device_choice) = (ScratchPool::default(), options.device);
        Ok(Model { config, weights, frequencies, scratch, kv_dtype, device, device_choice, fingerprint })
    }

    /// Device that computes the model. `None` for the CPU.
    pub fn device(&self) -> Option<&DeviceInfo> {
        self.device.as_ref().map(DeviceModel::info)
    }

    /// Type of the activations in matrix products: the narrowest, if the matrices have several.
    pub fn activations(&self) -> &'static str {
        let of_layer = |layer: &'_ LayerWeights| {
            [&layer.qkv, &layer.attention_output, &layer.gate_up, &layer.down].map(|linear| linear.weight.weight_type())
        };
        let types = self.weights.layers.iter().flat_map(of_layer).chain([self.weights.output.weight_type()]);
        let activations = types.map(|weight_type| match weight_type {
            WeightType::Q8Quads => "int8",
            WeightType::Bf16Pairs => "bf16",
            WeightType::F32 | WeightType::Bf16 | WeightType::F16 | WeightType::Q8 => "f32",
        });
        let activations: Vec<&str> = activations.collect();
        ["int8", "bf16"].into_iter().find(|narrow| activations.contains(narrow)).unwrap_or("f32")
    }

    /// Name of the kernels that compute the model, with their revision. Empty for the CPU with
    /// activations in `f32`, because namespaces contain its revision in any case.
    pub fn kernels(&self) -> String {
        match (&self.device, self.activations()) {
            (Some(device), _) => device.numerics(),
            (None, "f32") => String::new(),
            (None, activations) => format!("activations {activations}"),
        }
    }

    /// Creates the pool of an engine's L1, of at most `pages` pages. If a device computes the
    /// model, the pages lie in pinned memory that it reads by itself.
    pub fn page_pool(&self, page_tokens: u32, pages: usize) -> Arc<KvPool> {
        let device = self.device.as_ref().map(|on_device| Arc::clone(on_device.device()));
        KvPool::for_device(self.geometry(page_tokens), pages, device)
    }

    /// Reserves memory of the device for the pages of an engine's L1. Returns the number of pages
    /// that L1 may have: `pages` for the CPU, and at most what the device has room for otherwise.
    /// Engines that share a model share the memory.
    ///
    /// # Errors
    /// If the device has no room for a page, or fails.
    pub fn reserve_pages(&self, page_tokens: u32, pages: usize) -> Result<usize, LoadError> {
        let Some(device) = &self.device else { return Ok(pages) };
        let on_device = |source| LoadError::Device { device: self.device_choice, source };
        device.reserve(&self.geometry(page_tokens), pages).map_err(on_device)
    }

    /// Checks that the largest pass of an engine fits into the memory of the device beside the
    /// reserved pages: one of at most `rows` tokens, with the logits of at most `logit_rows`.
    /// Always succeeds for the CPU.
    ///
    /// # Errors
    /// If it does not fit, or if the device fails.
    pub fn check_pass(&self, page_tokens: u32, rows: usize, logit_rows: usize) -> Result<(), LoadError> {
        let Some(on_device) = &self.device else { return Ok(()) };
        let device = self.device_choice;
        let needed = DeviceModel::pass_memory(self, &self.geometry(page_tokens), rows, logit_rows).device;
        let free = on_device.free_for_passes().map_err(|source| LoadError::Device { device, source })?;
        if needed > free {
            return Err(LoadError::DevicePass { device, free, needed, rows, logit_rows });
        }
        Ok(())
    }

    /// Maximum memory of the host through which pages and results pass to and from a device, in
    /// bytes, for passes as in [`check_pass`](Self::check_pass). 0 for the CPU.
    pub fn staging_bytes(&self, page_tokens: u32, rows: usize, logit_rows: usize) -> u64 {
        if self.device.is_none() {
            return 0;
        }
        DeviceModel::pass_memory(self, &self.geometry(page_tokens), rows, logit_rows).pinned as u64
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Memory of the weight matrices in the host, in bytes: 0 if they are on a device. Norms and
    /// biases take less than a thousandth of it.
    pub fn weight_bytes(&self) -> u64 {
        let Weights { embedding, layers, output, .. } = &self.weights;
        let of_layer = |layer: &LayerWeights| {
            let linears = [&layer.qkv, &layer.attention_output, &layer.gate_up, &layer.down];
            linears.into_iter().map(|linear| linear.weight.bytes()).sum::<usize>()
        };
        let embedding = embedding.as_ref().map_or(0, PackedMatrix::bytes);
        (embedding + output.bytes() + layers.iter().map(of_layer).sum::<usize>()) as u64
    }

    /// SHA-256 over the canonical configuration and all used tensors. It is part of the namespace,
    /// so models with other weights never share pages.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Returns the default number of tokens per page: the largest power of two up to 32 whose page
    /// has at most 2 MiB. It depends on the model and the type of its pages only, so all
    /// engines of a model agree.
    pub fn default_page_tokens(&self) -> u32 {
        default_page_tokens(|tokens| self.geometry(tokens).page_bytes())
    }

    /// Returns the shape of a page of `page_tokens` tokens. The caller checks it against the
    /// store's limits with [`PageGeometry::validate`].
    pub fn geometry(&self, page_tokens: u32) -> PageGeometry {
        let config = &self.config;
        let layer_bytes = 2 * config.kv_width() * page_tokens as usize * self.kv_dtype.bytes();
        let fitting = PART_BYTES_TARGET / layer_bytes.max(1);
        let layers_per_part = fitting.max(config.layers.div_ceil(MAX_PARTS)).clamp(1, config.layers);
        PageGeometry {
            dtype: self.kv_dtype,
            layers: config.layers as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            page_tokens,
            layers_per_part: layers_per_part as u32,
            head_groups: 1,
        }
    }
}

fn default_page_tokens(page_bytes: impl Fn(u32) -> usize) -> u32 {
    let mut powers = std::iter::successors(Some(PAGE_TOKENS_MAX), |tokens| (*tokens > 1).then_some(tokens / 2));
    powers.find(|tokens| page_bytes(*tokens) <= PAGE_BYTES_MAX).unwrap_or(1)
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Progress of one load.
struct Meter<'a> {
    done: AtomicU64,
    total: u64,
    report: Progress<'a>,
}

impl Meter<'_> {
    fn add(&self, tensors: &[Tensor<'_>]) {
        let bytes: u64 = tensors.iter().map(Tensor::bytes).sum();
        // Relaxed: the figure is for people, and orders nothing.
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        (self.report)(done, self.total);
    }
}

/// Reads tensors by name and records the ones used, for the fingerprint.
struct Loader<'a, 'p> {
    tensors: Tensors<'a>,
    used: Vec<Tensor<'a>>,
    format: WeightFormat,
    /// Products round activations where this processor has instructions for it.
    is_narrow: bool,
    meter: Meter<'p>,
}

impl<'a> Loader<'a, '_> {
    fn weights(&mut self, config: &ModelConfig) -> Result<Weights, LoadError> {
        let embedding = self.take("model.embed_tokens.weight", &[config.vocab, config.hidden])?;
        let (embedding, output) = if config.tied_embeddings {
            (None, embedding)
        } else {
            let output = self.take("lm_head.weight", &[config.vocab, config.hidden])?;
            (Some(self.pack(&[embedding], config.hidden)?), output)
        };
        let layers = (0..config.layers).map(|layer| self.layer(config, layer)).collect::<Result<_, _>>()?;
        let norm = self.take("model.norm.weight", &[config.hidden])?.to_vec();
        Ok(Weights { embedding, layers, norm, output: self.pack(&[output], config.hidden)? })
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<LayerWeights, LoadError> {
        let name = |suffix: &str| format!("model.layers.{layer}.{suffix}");
        let hidden = config.hidden;
        let queries = config.query_width();
        let keys = config.kv_width();
        let mut norm = |suffix: &str, len: usize| Ok(self.take(&name(suffix), &[len])?.to_vec());
        let attention_norm = norm("input_layernorm.weight", hidden)?;
        let mlp_norm = norm("post_attention_layernorm.weight", hidden)?;
        let qk_norm = if config.qk_norm {
            let query_norm = norm("self_attn.q_norm.weight", config.head_dim)?;
            Some((query_norm, norm("self_attn.k_norm.weight", config.head_dim)?))
        } else {
            None
        };
        let qkv = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)];
        let gate_up = [("mlp.gate_proj", config.intermediate), ("mlp.up_proj", config.intermediate)];
        let attention = [("self_attn.o_proj", hidden)];
        let down = [("mlp.down_proj", hidden)];
        Ok(LayerWeights {
            attention_norm,
            qkv: self.linear(&name, &qkv, hidden, config.qkv_bias)?,
            qk_norm,
            attention_output: self.linear(&name, &attention, queries, config.output_bias)?,
            mlp_norm,
            gate_up: self.linear(&name, &gate_up, hidden, config.mlp_bias)?,
            down: self.linear(&name, &down, config.intermediate, config.mlp_bias)?,
        })
    }

    /// Loads several projections of one input as one matrix, with their outputs concatenated.
    fn linear(
        &mut self,
        name: &impl Fn(&str) -> String,
        parts: &[(&str, usize)],
        inputs: usize,
        has_bias: bool,
    ) -> Result<Linear, LoadError> {
        let mut weights = Vec::new();
        let mut bias = Vec::new();
        for &(part, outputs) in parts {
            weights.push(self.take(&name(&format!("{part}.weight")), &[outputs, inputs])?);
            if has_bias {
                bias.extend(self.take(&name(&format!("{part}.bias")), &[outputs])?.to_vec());
            }
        }
        Ok(Linear { weight: self.pack(&weights, inputs)?, bias: has_bias.then_some(bias) })
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, LoadError> {
        let tensor = self.tensors.get(name, shape)?;
        self.used.push(tensor.clone());
        Ok(tensor)
    }

    /// Element type of the matrices in use, or `f32` if they have several: it holds the others
    /// without loss. Keys and values have this type by default.
    fn kv_dtype(&self) -> KvDtype {
        let matrices = self.used.iter().filter(|tensor| tensor.is_matrix());
        let types: Vec<WeightType> = matrices.map(Tensor::weight_type).collect();
        let is_all = |of: WeightType| types.iter().all(|found| *found == of);
        if is_all(WeightType::F16) {
            KvDtype::F16
        } else if is_all(WeightType::Bf16) {
            KvDtype::Bf16
        } else {
            KvDtype::F32
        }
    }

    /// Packs tensors of one input as one matrix. Stored tensors of different types become `f32`,
    /// which holds the others without loss.
    fn pack(&self, parts: &[Tensor<'_>], inputs: usize) -> Result<PackedMatrix, LoadError> {
        let outputs = parts.iter().map(Tensor::rows).sum();
        let weight_type = parts[0].weight_type();
        let is_uniform = parts.iter().all(|part| part.weight_type() == weight_type);
        let weight_type = match self.format {
            WeightFormat::Q8 => WeightType::Q8,
            WeightFormat::Stored if is_uniform => weight_type,
            WeightFormat::Stored => WeightType::F32,
        };
        let weight_type = weight_type.narrow().filter(|_| self.is_narrow).unwrap_or(weight_type);
        let fill = |mut output: usize, row: &mut [f32]| {
            for part in parts {
                if output < part.rows() {
                    return part.read_row(output, row);
                }
                output -= part.rows();
            }
        };
        let packed = PackedMatrix::new(outputs, inputs, weight_type, fill)
            .map_err(|source| LoadError::Memory { name: parts[0].name().to_owned(), source })?;
        self.meter.add(parts);
        Ok(packed)
    }

    fn fingerprint(mut self, config: &ModelConfig) -> [u8; 32] {
        self.used.sort_by(|a, b| a.name().cmp(b.name()));
        let meter = &self.meter;
        let digest = |tensor: &Tensor<'_>| {
            let digest = tensor.digest();
            meter.add(std::slice::from_ref(tensor));
            digest
        };
        let digests: Vec<[u8; 32]> = self.used.par_iter().map(digest).collect();
        let mut hash = Sha256::new();
        hash.update(config.canonical());
        // Stored weights need no mark: their types are part of the tensors' digests.
        if self.format == WeightFormat::Q8 {
            hash.update("weights q8\n");
        }
        digests.iter().for_each(|digest| hash.update(digest));
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_page_has_256_kib_to_2_mib_for_common_models() {
        let of = |token_bytes: usize| default_page_tokens(|tokens| tokens as usize * token_bytes);
        // Layers, KV heads, elements per head, keys and values, bytes of bf16.
        let (qwen3_0_6b, llama_1b) = (28 * 8 * 128 * 2 * 2, 16 * 8 * 64 * 2 * 2);
        let (llama_8b, llama_70b) = (32 * 8 * 128 * 2 * 2, 80 * 8 * 128 * 2 * 2);
        for (token_bytes, tokens) in [(qwen3_0_6b, 16), (llama_1b, 32), (llama_8b, 16), (llama_70b, 4)] {
            assert_eq!(of(token_bytes), tokens);
            assert!((256 << 10..=2 << 20).contains(&(tokens as usize * token_bytes)));
        }
        // A small model has smaller pages, and a token beyond 2 MiB a page of its own.
        assert_eq!([of(1), of(64 << 10), of((64 << 10) + 1), of(3 << 20)], [32, 32, 16, 1]);
    }
}
