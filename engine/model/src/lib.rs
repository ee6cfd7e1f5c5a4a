//! Hugging Face model folders: configuration, weights, tokenizer, chat template, forward pass.
//!
//! What must always hold: the logits and the keys and values of a token are **bit-identical** whatever chunks, batch
//! neighbours, page size or number of threads they were computed with. So a page computed by one engine continues a
//! sequence on another exactly as if the other had computed it. And nothing here panics on what is read from a folder:
//! a hostile one gives a [`LoadError`] or a [`TokenizerError`].
//!
//! - [`config`]: `config.json`, in its older and newer shapes.
//! - [`weights`]: safetensors files, checked against the configuration.
//! - [`model`]: a loaded [`Model`]: weights laid out for the kernels, fingerprint, page geometry.
//! - [`batch`]: what is computed together: [`Chunk`]s of sequences, and the rules they must keep.
//! - [`forward`]: the forward pass over a batch.
//! - [`kv`]: pages of keys and values in memory ([`KvPool`], [`KvPage`]), in the store's layout.
//! - [`sampling`]: from logits to a token.
//! - [`tokenizer`], [`chat`], [`stream`], [`stop`]: text on its way in and out.

pub mod batch;
pub mod chat;
pub mod config;
pub mod forward;
pub mod kv;
pub mod model;
pub mod sampling;
pub mod stop;
pub mod stream;
pub mod tokenizer;
pub mod weights;

pub use batch::{Chunk, ForwardError, LayerHooks, LogitRows};
pub use chat::ChatMessage;
pub use config::{Architecture, ModelConfig, Rope};
pub use kv::{KvPage, KvPool, PageSlot};
pub use model::Model;
pub use sampling::{Sampler, SamplingParams};
pub use stop::{StopMatcher, StopStep};
pub use stream::TokenStream;
pub use tokenizer::{Tokenizer, TokenizerError};
pub use weights::LoadError;
