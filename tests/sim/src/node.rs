//! A whole node without its sockets, [`larder_node::sim::Store`], on one or two simulated devices
//! with a small L2.
//!
//! Workers act as connections do. They reserve pages, send parts in any order, damage or omit some,
//! and commit, abort or disappear. They also get, follow, locate, compare, warm, pin and forget.
//! Like a client, they verify each page from L2 and report damage.
//!
//! Invariants that the workers check, in addition to those of the model:
//! - A page is visible only after its put was sealed. A put is sealed only with all parts, and
//!   never after an abort.
//! - A key has at most one open put, and none while its page is present.
//! - A sealed page is present in some tier until it is forgotten, expires or is evicted. The check
//!   needs reliable devices and a log that evicted nothing.
//! - A page that left L2, or was in L2 at a clean close, is on L3 if the write policy requires it.
//! - A page that was reported as damaged is not served again.
//! - No request ends later than its deadline.
//! - L2, pages in flight, quotas and hard pins stay within their bounds.
//! - An idle node has no work in flight, no waiting reader and no pin. Its arena holds the pages of
//!   L2 and nothing else.

mod check;
mod incarnation;
mod operations;
mod put;

pub(crate) use incarnation::NodeRun;

use crate::model::{Model, RequestTime};
use crate::payload::page_id;
use crate::setup::{NodeSetup, Setup};
use crate::world::World;
use larder_log::L3;
use larder_memory::Arena;
use larder_node::WritePolicy;
use larder_node::sim::Store;
use larder_runtime::Clock;
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Largest delay between a deadline and the end of the request, in milliseconds.
const LATE_MS: u64 = 50;

pub(crate) struct NodeIncarnation {
    world: Arc<World>,
    model: Arc<Mutex<Model>>,
    arena: Arc<Arena>,
    setup: Arc<Setup>,
    node_setup: NodeSetup,
    store: Store,
    logs: Vec<L3>,
    clock: Clock,
    number: u64,
    /// Generation of the first put.
    first_generation: u64,
    began: u64,
    recovered_ms: AtomicU64,
    operations: Arc<AtomicU64>,
    /// Puts that their writers abandoned, by key, and the time when.
    abandoned_puts: Mutex<BTreeMap<u64, u64>>,
}

impl NodeIncarnation {
    fn request_time(&self) -> RequestTime {
        self.model.lock().request_time(self.clock.now_unix_ms())
    }

    fn on_l3(&self, key: u64) -> Option<u64> {
        let generation = self.generation_on_l3(key)?;
        Some(self.model.lock().version_of(generation))
    }

    fn generation_on_l3(&self, key: u64) -> Option<u64> {
        self.logs.iter().filter_map(|l3| l3.find(&page_id(key))).map(|entry| entry.generation).max()
    }

    fn memory_fails(&self) -> bool {
        self.setup.profile.memory_fails()
    }

    fn violate(&self, problem: String) {
        self.world.violate(problem);
    }

    fn check_end(&self, operation: &str, deadline: Instant) {
        let late = tokio::time::Instant::now().into_std().saturating_duration_since(deadline).as_millis() as u64;
        if late > LATE_MS {
            self.violate(format!("{operation} ended {late} ms after its deadline"));
        }
    }

    fn is_recovered(&self) -> bool {
        self.recovered_ms.load(Ordering::Relaxed) != u64::MAX
    }

    /// Returns `true` if every page sealed in this incarnation must still be present: devices are
    /// reliable, L3 has evicted nothing, and the policy writes every page.
    fn is_lossless(&self) -> bool {
        let gave_up = |l3: &L3| {
            let stats = l3.stats();
            stats.evicted_pages + stats.quota_pages > 0
        };
        self.setup.profile.is_reliable()
            && self.node_setup.write_policy != WritePolicy::Selective
            && self.is_recovered()
            && !self.logs.iter().any(gave_up)
    }
}
