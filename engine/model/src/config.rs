//! `config.json` of a model folder, in its older and newer shapes.
//!
//! Invariant: this engine computes every accepted [`ModelConfig`] exactly. It refuses an
//! unsupported architecture, position encoding, sliding window or quantisation by name, and ignores
//! none of them.

use crate::weights::LoadError;
use serde_json::Value;
use std::fmt;

/// Architectures this engine computes. Others are refused with [`LoadError::Architecture`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Architecture {
    pub const ALL: [Architecture; 4] =
        [Architecture::Llama, Architecture::Mistral, Architecture::Qwen2, Architecture::Qwen3];

    pub fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mistral => "MistralForCausalLM",
            Architecture::Qwen2 => "Qwen2ForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

pub use larder_kernels::cpu::Rope;

#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    /// Key and value heads per layer. Divides `heads`.
    pub kv_heads: usize,
    /// Elements per head. Even, because rotary embedding needs pairs.
    pub head_dim: usize,
    pub vocab: usize,
    /// Maximum tokens of a sequence (`max_position_embeddings`). Positions beyond it were not
    /// trained, so the engine refuses them.
    pub max_context: usize,
    /// Tokens that end a generation, from `generation_config.json` or `config.json`. May be empty.
    pub eos_token_ids: Vec<u32>,
    pub rms_eps: f32,
    pub rope: Rope,
    pub tied_embeddings: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub qk_norm: bool,
}

/// Largest accepted values. They are far above any real model, and keep arithmetic on sizes from
/// overflowing.
const LAYERS_MAX: u64 = 1024;
const HEADS_MAX: u64 = 1024;
const HEAD_DIM_MAX: u64 = 4096;
const WIDTH_MAX: u64 = 1 << 20;
const VOCAB_MAX: u64 = 1 << 24;
const CONTEXT_MAX: u64 = 1 << 24;
/// Sliding window of Mistral and Qwen, in tokens, if `config.json` has no such field.
const SLIDING_WINDOW_DEFAULT: u32 = 4096;

impl ModelConfig {
    /// Parses the content of `config.json` and of `generation_config.json` (`null` if that file
    /// does not exist).
    pub fn from_json(config: &Value, generation: &Value) -> Result<ModelConfig, LoadError> {
        let fields = ConfigFields(config);
        let architecture = architecture(config)?;
        fields.refuse_unsupported_features(architecture)?;
        let is_llama = architecture == Architecture::Llama;
        let hidden = fields.size("hidden_size", None, WIDTH_MAX)?;
        let heads = fields.size("num_attention_heads", None, HEADS_MAX)?;
        let kv_heads = fields.size("num_key_value_heads", is_llama.then_some(heads), HEADS_MAX)?;
        let head_dim_default = match architecture {
            Architecture::Qwen3 => 128,
            _ => hidden / heads,
        };
        let head_dim = fields.size("head_dim", Some(head_dim_default), HEAD_DIM_MAX)?;
        let max_context = fields.size("max_position_embeddings", None, CONTEXT_MAX)?;
        fields.refuse_sliding_window(architecture, max_context)?;
        let attention_bias = fields.flag("attention_bias", false)?;
        let parsed = ModelConfig {
            architecture,
            layers: fields.size("num_hidden_layers", None, LAYERS_MAX)?,
            hidden,
            intermediate: fields.size("intermediate_size", None, WIDTH_MAX)?,
            heads,
            kv_heads,
            head_dim,
            vocab: fields.size("vocab_size", None, VOCAB_MAX)?,
            max_context,
            eos_token_ids: eos_token_ids(generation, config),
            rms_eps: fields.number(config, "rms_norm_eps", Some(1e-6))?,
            rope: fields.rope()?,
            tied_embeddings: fields.flag("tie_word_embeddings", false)?,
            qkv_bias: match architecture {
                Architecture::Qwen2 => true,
                Architecture::Mistral => false,
                _ => attention_bias,
            },
            output_bias: matches!(architecture, Architecture::Llama | Architecture::Qwen3) && attention_bias,
            mlp_bias: is_llama && fields.flag("mlp_bias", false)?,
            qk_norm: architecture == Architecture::Qwen3,
        };
        parsed.check()
    }

    fn check(self) -> Result<ModelConfig, LoadError> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            let reason = format!("{} does not divide the {} heads", self.kv_heads, self.heads);
            return Err(invalid("num_key_value_heads", reason));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(invalid(
                "head_dim",
                format!("{} is odd; rotary position embedding needs pairs", self.head_dim),
            ));
        }
        Ok(self)
    }

    /// Width of all query heads of a token, in elements.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads of a token, in elements.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Canonical text of every parameter that affects results. The older and newer shape of one
    /// model give the same text.
    pub(crate) fn canonical(&self) -> String {
        let bits = |x: f32| format!("{:08x}", x.to_bits());
        let rope = match self.rope {
            Rope::Default { theta } => format!("default {}", bits(theta)),
            Rope::Linear { theta, factor } => format!("linear {} {}", bits(theta), bits(factor)),
            Rope::Llama3 { theta, factor, low_freq_factor, high_freq_factor, original_context } => {
                let values = [theta, factor, low_freq_factor, high_freq_factor, original_context];
                format!("llama3 {}", values.map(bits).join(" "))
            }
        };
        format!(
            "larder-model 1\n{}\nlayers {} hidden {} intermediate {} heads {} kv_heads {} head_dim {} vocab {}\n\
             eps {} rope {rope}\ntied {} qkv_bias {} output_bias {} mlp_bias {} qk_norm {}\n",
            self.architecture,
            self.layers,
            self.hidden,
            self.intermediate,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.vocab,
            bits(self.rms_eps),
            self.tied_embeddings,
            self.qkv_bias,
            self.output_bias,
            self.mlp_bias,
            self.qk_norm,
        )
    }
}

/// Returns the end-of-sequence ids, given as a number or a list. `generation_config.json` takes
/// precedence over `config.json`.
pub(crate) fn eos_token_ids(generation: &Value, config: &Value) -> Vec<u32> {
    let ids = |file: &Value| -> Vec<u32> {
        let id = &file["eos_token_id"];
        let one = std::slice::from_ref(id);
        let list = id.as_array().map_or(one, Vec::as_slice);
        list.iter().filter_map(|v| u32::try_from(v.as_u64()?).ok()).collect()
    };
    let from_generation = ids(generation);
    if from_generation.is_empty() { ids(config) } else { from_generation }
}

fn architecture(config: &Value) -> Result<Architecture, LoadError> {
    let found = config["architectures"][0].as_str().unwrap_or("(none)");
    let known = Architecture::ALL.into_iter().find(|a| a.name() == found);
    known.ok_or_else(|| LoadError::Architecture {
        found: found.chars().take(100).collect(),
        supported: Architecture::ALL.map(Architecture::name).join(", "),
    })
}

fn invalid(field: &str, reason: impl Into<String>) -> LoadError {
    LoadError::Config { field: field.to_owned(), reason: reason.into() }
}

/// Typed access to the fields of `config.json`. Treats a `null` field as absent.
struct ConfigFields<'a>(&'a Value);

impl ConfigFields<'_> {
    fn size(&self, name: &str, default: Option<usize>, max: u64) -> Result<usize, LoadError> {
        let value = match (&self.0[name], default) {
            (Value::Null, Some(value)) => value as u64,
            (Value::Null, None) => return Err(invalid(name, "is missing")),
            (value, _) => value.as_u64().ok_or_else(|| invalid(name, format!("{value} is not a count")))?,
        };
        if value == 0 || value > max {
            return Err(invalid(name, format!("{value} is not between 1 and {max}")));
        }
        Ok(value as usize)
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, LoadError> {
        match &self.0[name] {
            Value::Null => Ok(default),
            Value::Bool(value) => Ok(*value),
            other => Err(invalid(name, format!("{other} is not true or false"))),
        }
    }

    fn number(&self, object: &Value, name: &str, default: Option<f32>) -> Result<f32, LoadError> {
        let value = match (&object[name], default) {
            (Value::Null, Some(value)) => value,
            (Value::Null, None) => return Err(invalid(name, "is missing")),
            (value, _) => value.as_f64().ok_or_else(|| invalid(name, format!("{value} is not a number")))? as f32,
        };
        if value > 0.0 && value.is_finite() {
            return Ok(value);
        }
        Err(invalid(name, format!("{value} is not a positive number")))
    }

    fn refuse_unsupported_features(&self, architecture: Architecture) -> Result<(), LoadError> {
        match self.0["hidden_act"].as_str().unwrap_or("silu") {
            "silu" => {}
            other => return Err(invalid("hidden_act", format!("{other:?} is not supported; only silu is"))),
        }
        if !self.0["quantization_config"].is_null() {
            return Err(invalid("quantization_config", "quantised weights are not supported; f32, bf16 and f16 are"));
        }
        let rotary = &self.0["partial_rotary_factor"];
        if !rotary.is_null() && rotary.as_f64() != Some(1.0) {
            return Err(invalid("partial_rotary_factor", format!("{rotary} is not supported; only 1 is")));
        }
        let kinds = self.0["layer_types"].as_array().map_or(&[][..], Vec::as_slice);
        match kinds.iter().find(|kind| *kind != "full_attention") {
            Some(kind) => {
                Err(invalid("layer_types", format!("this engine does not support {kind} for {architecture}")))
            }
            None => Ok(()),
        }
    }

    /// Refuses an active sliding window that is shorter than the context. A longer one has no
    /// effect.
    fn refuse_sliding_window(&self, architecture: Architecture, max_context: usize) -> Result<(), LoadError> {
        let is_on = match architecture {
            Architecture::Llama => false,
            Architecture::Mistral => true,
            Architecture::Qwen2 | Architecture::Qwen3 => self.flag("use_sliding_window", false)?,
        };
        // transformers assumes this default if the field is absent, but not if it is null.
        let absent = Value::from(SLIDING_WINDOW_DEFAULT);
        let window = self.0.get("sliding_window").unwrap_or(&absent);
        if !is_on || window.is_null() || window.as_u64().is_some_and(|window| window >= max_context as u64) {
            return Ok(());
        }
        Err(invalid(
            "sliding_window",
            format!("a window of {window} tokens is not supported; only null or a disabled window is"),
        ))
    }

    fn rope(&self) -> Result<Rope, LoadError> {
        // Newer files put everything in `rope_parameters`. Older ones put `rope_theta` beside
        // `rope_scaling`.
        let newer = &self.0["rope_parameters"];
        let scaling = if newer.is_null() { &self.0["rope_scaling"] } else { newer };
        let theta_in = if newer["rope_theta"].is_null() { self.0 } else { newer };
        let theta = self.number(theta_in, "rope_theta", Some(10_000.0))?;
        let kind = &scaling[if scaling["rope_type"].is_null() { "type" } else { "rope_type" }];
        match kind.as_str() {
            None if kind.is_null() && (scaling.is_null() || !newer.is_null()) => Ok(Rope::Default { theta }),
            Some("default") => Ok(Rope::Default { theta }),
            Some("linear") => Ok(Rope::Linear { theta, factor: self.number(scaling, "factor", None)? }),
            Some("llama3") => self.llama3(theta, scaling),
            _ => Err(invalid("rope_type", format!("{kind} is not supported; default, linear and llama3 are"))),
        }
    }

    fn llama3(&self, theta: f32, scaling: &Value) -> Result<Rope, LoadError> {
        let low_freq_factor = self.number(scaling, "low_freq_factor", None)?;
        let high_freq_factor = self.number(scaling, "high_freq_factor", None)?;
        if high_freq_factor <= low_freq_factor {
            return Err(invalid("high_freq_factor", "is not above low_freq_factor"));
        }
        Ok(Rope::Llama3 {
            theta,
            factor: self.number(scaling, "factor", None)?,
            low_freq_factor,
            high_freq_factor,
            original_context: self.number(scaling, "original_max_position_embeddings", None)?,
        })
    }
}
