//! The log alone, on one simulated device.
//!
//! - `incarnation`: its start, its work and its end.
//! - `operations`: operations of its workers.

mod incarnation;
mod operations;

pub(crate) use incarnation::LogRun;

use crate::model::Model;
use crate::setup::Setup;
use crate::world::World;
use larder_log::L3;
use larder_memory::Arena;
use larder_runtime::lock::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

struct LogIncarnation {
    world: Arc<World>,
    model: Arc<Mutex<Model>>,
    arena: Arc<Arena>,
    setup: Arc<Setup>,
    l3: L3,
    number: u64,
    /// Virtual time at which recovery ended, `u64::MAX` until then.
    recovered_ms: AtomicU64,
    operations: Arc<AtomicU64>,
}
