//! Options of the commands that load a model.

use clap::{Args, ValueEnum};
use larder_format::KvDtype;
use larder_model::{LoadOptions, WeightFormat};

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

impl ModelArgs {
    pub fn load_options(self) -> LoadOptions {
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
        }
    }
}
