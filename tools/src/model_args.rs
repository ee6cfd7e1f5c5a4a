//! Options of the commands that load a model, and the load itself.

use crate::output::escape;
use crate::sizes::ModelShape;
use anyhow::{Context, Result};
use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use larder_format::KvDtype;
use larder_model::{Activations, DeviceChoice, LoadOptions, Model, Tokenizer, WeightFormat};
use larder_worker::Preloaded;
use std::path::Path;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, Args)]
pub struct ModelArgs {
    /// Element type of keys and values in all tiers. Engines share pages only if it is the same.
    /// f32 doubles the size of the pages of a model in bf16 or f16, and removes the rounding of its
    /// keys and values
    #[arg(long, default_value = "model", value_name = "TYPE")]
    kv_dtype: KvDtypeArg,
    /// Weights in memory: `stored` keeps the type of the files. `q8` rounds each weight to 8 bits,
    /// with a scale per 32 weights: about half the memory of bf16, and other results
    #[arg(long, default_value = "stored", value_name = "FORMAT")]
    weights: WeightsArg,
    /// Element type of activations in matrix products on the CPU. `auto` rounds them to the type of
    /// the weights if the processor has instructions for it: bf16 weights with AVX-512-BF16,
    /// `--weights q8` with AVX-512-VNNI. Otherwise they stay f32. Engines share pages only if they
    /// round alike. `f32` gives the same results on every processor
    #[arg(long, default_value = "auto", value_name = "TYPE")]
    activations: ActivationsArg,
    /// Device that computes the model: `cpu`, `cuda`, `cuda:N`, `emulated` or `auto`. `emulated`
    /// runs the CUDA kernels on the CPU, for tests; `emulated:mma` those for tensor cores. `auto`
    /// takes a CUDA device if it can be used, otherwise the CPU. Engines share pages only if their
    /// devices are of one kind. CUDA has not run on a GPU yet
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Tokens per page. Must be the same for all engines of a model. Default: 32, or the largest
    /// power of two below it whose page has at most 2 MiB
    #[arg(long, value_name = "TOKENS")]
    page_tokens: Option<u32>,
    /// Memory for the KV pages (L1) of each engine. It bounds the context. Default: half of the
    /// free memory, a quarter if `up` starts the engine, at most 16 sequences of full length
    #[arg(long, value_name = "SIZE")]
    pub l1: Option<ByteSize>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum KvDtypeArg {
    /// The type of the model's weights
    Model,
    Bf16,
    F16,
    F32,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum WeightsArg {
    Stored,
    Q8,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ActivationsArg {
    Auto,
    F32,
}

impl ModelArgs {
    /// Loads the model in `folder` and its tokenizer. Shows a bar if standard error is a terminal.
    /// Takes minutes for a large model.
    pub fn load(self, folder: &Path) -> Result<Preloaded> {
        let message = format!("loading {}", escape(&folder.display().to_string()));
        // `with_message` does not draw: the length is not known yet.
        let bar = ProgressBar::new(0).with_style(bar_style()).with_message(message);
        let progress = |done: u64, total: u64| {
            // Each byte counts twice, as it is converted and hashed.
            bar.set_length(total / 2);
            bar.set_position(done / 2);
        };
        let model = Model::load_with(folder, &self.load_options(), &progress)
            .with_context(|| format!("cannot load the model {}", folder.display()));
        bar.finish_and_clear();
        let tokenizer =
            Tokenizer::load(folder).with_context(|| format!("cannot load the tokenizer of {}", folder.display()));
        Ok(Preloaded { model: Arc::new(model?), tokenizer: Arc::new(tokenizer?) })
    }

    /// Describes the pages of `model`, with the tokens that the options or the model give.
    pub fn shape(self, model: &Model) -> ModelShape {
        ModelShape::new(model, self.page_tokens.unwrap_or_else(|| model.default_page_tokens()))
    }

    fn load_options(self) -> LoadOptions {
        LoadOptions {
            kv_dtype: match self.kv_dtype {
                KvDtypeArg::Model => None,
                KvDtypeArg::Bf16 => Some(KvDtype::Bf16),
                KvDtypeArg::F16 => Some(KvDtype::F16),
                KvDtypeArg::F32 => Some(KvDtype::F32),
            },
            weights: match self.weights {
                WeightsArg::Stored => WeightFormat::Stored,
                WeightsArg::Q8 => WeightFormat::Q8,
            },
            activations: match self.activations {
                ActivationsArg::Auto => Activations::Narrow,
                ActivationsArg::F32 => Activations::F32,
            },
            device: self.device,
        }
    }
}

fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{msg} {wide_bar} {binary_bytes} of {binary_total_bytes}, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
