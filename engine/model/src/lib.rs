//! Hugging Face model folders: configuration, weights, tokenizer, chat template, forward pass.
//!
//! Invariants:
//! - The logits, keys and values of a token are **bit-identical** on a device for every chunking,
//!   batch, page size and number of threads. So one engine can continue a sequence from the pages
//!   of another, and gets the same tokens.
//! - No content of a model folder causes a panic. A hostile folder gives a [`LoadError`] or a
//!   [`TokenizerError`].
//!
//! Layout:
//! - [`config`]: `config.json`, in its older and newer shapes.
//! - [`weights`]: safetensors files, checked against the configuration.
//! - [`model`]: a loaded [`Model`]: packed weights, fingerprint, page geometry.
//! - [`batch`]: the input of a forward pass, [`Chunk`]s of sequences, and its validation.
//! - [`forward`]: the forward pass over a batch on the CPU, in the buffers of `scratch`.
//! - `device`: the forward pass on a device with CUDA kernels, real or emulated.
//! - [`kv`]: pages of keys and values ([`KvPool`], [`KvPage`]) in the store's layout, in the memory
//!   of `page_memory`.
//! - [`numerics`]: fingerprint of the rounding of this build on this machine.
//! - [`speed`]: prompt tokens per second of this machine.
//! - [`sampling`]: selection of a token from logits.
//! - [`constraint`], [`guide`]: constraints on the text of an answer, and the tokens they allow.
//! - [`tokenizer`], [`chat`], [`stream`], [`stop`]: text to tokens and back, with the `rules` that
//!   the tokenizers of strangers must keep.
//! - [`template_worker`]: the process that renders chat templates and tries out constraints.

pub mod batch;
pub mod chat;
pub mod config;
pub mod constraint;
mod device;
pub mod forward;
pub mod guide;
pub mod kv;
pub mod model;
pub mod numerics;
mod page_memory;
pub mod sampling;
mod scratch;
pub mod speed;
pub mod stop;
pub mod stream;
pub mod template_worker;
pub mod tokenizer;
mod tokenizer_rules;
mod turns;
pub mod weights;

pub use batch::{Chunk, ForwardError, LayerHooks, LogitRows};
pub use chat::{
    ChatMessage, ChatTemplate, ChatTemplateSource, FunctionCall, MessageContent, RESERVED_VARIABLES, RenderError,
    RenderOptions, TextPart, ToolCall,
};
pub use config::{Architecture, ModelConfig, Rope};
pub use constraint::{CallConstraint, CallForm, CallableFunction, Constraint, Otherwise};
pub use device::DeviceChoice;
pub use guide::{GUIDE_BYTES_MAX, GUIDE_STEP_BYTES_MAX, Guide, GuideError, GuideFactory};
pub use kv::{KvPage, KvPool, PageSeal, PageSlot, SealedPage, is_finite};
pub use model::{Activations, LoadOptions, Model, Progress, WeightFormat};
pub use sampling::{Sampler, SamplingParams, TokenLogprobs};
pub use stop::{StopMatcher, StopStep};
pub use stream::TokenStream;
pub use tokenizer::{GenerationDefaults, Tokenizer, TokenizerError};
pub use weights::LoadError;
