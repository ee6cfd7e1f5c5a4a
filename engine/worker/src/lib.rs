//! Prefill and decode engines: paged KV pool (L1), radix tree, continuous batching.
//!
//! Invariants:
//! - The generated tokens do not depend on the source of the pages. A page holds bit-identical KV
//!   on every engine, whether it came from L1, from the store, from a put in progress, or from the
//!   forward pass.
//! - No failure of the store fails a request. The engine computes the pages that it cannot read,
//!   and counts those that it cannot put.
//!
//! Path of a request:
//!
//! 1. `http` validates it and sends it to the scheduler thread.
//! 2. `scheduler` reserves L1 pages and starts a load.
//! 3. `load` looks up, reads and follows pages in the store.
//! 4. `batch` plans chunks of the remaining tokens, and the forward pass computes them.
//! 5. `publish` puts each page into the store while it is being computed.
//! 6. `radix` keeps finished pages for later requests. In the background, `scrub` verifies them,
//!    and `republish` puts those again that the store did not take.
//!
//! Layout: [`api`] holds the types of the HTTP interface, which the router shares. [`store`] is the
//! interface to the page store, and [`redis_store`] implements it with a Redis server. `sequence`
//! holds the states of a request and `pages` its pages. `sampling` is the work on the logits of a
//! sequence, and `guides` compiles constraints. Before that, [`trials`] tries them out in a
//! [`worker_process`]. Routers do so as well. `commits` counts the puts in flight. `engine`
//! starts and stops everything, with settings from `options`. `request_memory` and `forgets` bound
//! the memory of requests, and [`memory_plan`] adds up that of the engine. `metrics` defines the
//! Prometheus metrics.

pub mod api;
mod batch;
mod commits;
mod engine;
mod forgets;
mod guides;
mod http;
mod l3_reads;
mod load;
pub mod memory_plan;
mod metrics;
mod node_store;
mod options;
mod pages;
mod publish;
mod radix;
pub mod redis_store;
mod republish;
mod request_memory;
mod sampling;
mod scheduler;
mod scrub;
mod sequence;
pub mod store;
pub mod trials;
pub mod worker_process;

pub use api::{EngineInfo, EngineState, Role};
pub use engine::{Engine, EngineError, EngineHandle};
pub use l3_reads::{L3Path, L3Reads};
pub use metrics::metrics_registry;
pub use options::{EngineOptions, OptionsError, Preloaded};
pub use redis_store::url::{EngineStore, EngineStoreError, RedisUrl};
