//! Prefill and decode engines: paged KV pool, radix tree, continuous batching.
//!
//! What must always hold: the tokens that come out do not depend on where pages came from. A page is computed from the same
//! tokens on every engine and is bit-identical wherever it was computed; so L1, the store, a page read while it is being
//! written, and computing it here are four ways to the same numbers. And nothing that happens to the store fails a request:
//! what cannot be had is computed, what cannot be put is counted.
//!
//! How a request travels: `http` checks it and hands it to the one `scheduler` thread, which reserves pages for it and
//! starts a load (`transfer`: lookup, read, follow). What did not come is computed in chunks planned by `batch`, put
//! page by page while it is computed (`publish`), and kept for others in the `radix` tree.
//!
//! - [`api`]: the HTTP interface as types; the router uses it too.
//! - `options`: settings. `engine`: starting and ending. `metrics`: what is counted.
//! - `sequence`: one request's states; `pages`: its pages. [`store`]: the seam to the page store.

pub mod api;
mod batch;
mod engine;
mod http;
mod metrics;
mod options;
mod pages;
mod publish;
mod radix;
mod scheduler;
mod sequence;
pub mod store;
mod transfer;

pub use api::{EngineInfo, EngineState, Role};
pub use engine::{Engine, EngineError, EngineHandle};
pub use options::{EngineOptions, OptionsError, Preloaded};
