//! A whole node without its sockets, [`larder_node::sim::Store`], on one or two simulated devices with a small L2.
//!
//! Workers do what connections do: they reserve pages and send their parts in any order, damage some and leave some out,
//! commit, abort or go away; they get, follow, locate, compare, warm, pin and forget. What a client must check it checks:
//! a page from L2 that is not what its metadata says is reported, and must not be served again.
//!
//! Beside the promise, these must hold:
//! - a page is found only after it was sealed, and a put is sealed only with all its parts and before it was given up;
//! - a key has one put at a time, and none while the page is there;
//! - what was sealed is found, in whatever tier, until something took it (asked of runs without faults in which L3 had
//!   room), and what left L2 or was closed is on L3, if the write policy says so;
//! - nothing ends later than its deadline;
//! - L2, the room for pages on their way, quotas and hard pins keep their bounds; when all is at rest, nothing is under
//!   way, nobody waits, no pin is left, and memory holds what L2 has and nothing else.

mod check;
mod life;
mod operations;
mod put;

pub(crate) use life::NodeRun;

use crate::model::{Asked, Model};
use crate::payload::page_id;
use crate::setup::{NodeSetup, Setup};
use crate::world::World;
use larder_device::{Arena, Clock};
use larder_l3::L3;
use larder_node::WritePolicy;
use larder_node::sim::Store;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A deadline is heard of this late at most.
const LATE_MS: u64 = 50;

/// What the tasks of a life share.
pub(crate) struct NodeLife {
    world: Arc<World>,
    model: Arc<Mutex<Model>>,
    arena: Arc<Arena>,
    setup: Arc<Setup>,
    node: NodeSetup,
    store: Store,
    /// Of the devices that could be opened.
    logs: Vec<L3>,
    clock: Clock,
    /// Its number, from 1.
    number: u64,
    /// The model's clock at its begin.
    began: u64,
    /// When all that was stored had been found; `u64::MAX` until then.
    recovered_ms: AtomicU64,
    operations: Arc<AtomicU64>,
    /// Puts whose writers went away without a word, by key, and when.
    left: Mutex<BTreeMap<u64, u64>>,
}

impl NodeLife {
    fn asks(&self) -> Asked {
        self.model.lock().asks(self.clock.now_unix_ms())
    }

    /// The newest version of a key that any device has.
    fn on_l3(&self, key: u64) -> Option<u64> {
        self.logs.iter().filter_map(|l3| l3.find(&page_id(key))).map(|entry| entry.generation).max()
    }

    /// Whether bits flip in memory.
    fn memory_fails(&self) -> bool {
        self.setup.profile.memory_fails()
    }

    fn violate(&self, what: String) {
        self.world.violate(what);
    }

    fn check_end(&self, what: &str, deadline: Instant) {
        let late = tokio::time::Instant::now().into_std().saturating_duration_since(deadline).as_millis() as u64;
        if late > LATE_MS {
            self.violate(format!("a {what} ends {late} ms after its deadline"));
        }
    }

    fn is_recovered(&self) -> bool {
        self.recovered_ms.load(Ordering::Relaxed) != u64::MAX
    }

    /// Whether what was sealed in this life must still be there: nothing fails, L3 has given nothing up, and every page
    /// gets there.
    fn loses_nothing(&self) -> bool {
        let gave_up = |l3: &L3| {
            let stats = l3.stats();
            stats.evicted_pages + stats.quota_pages > 0
        };
        self.setup.profile.honest()
            && self.node.write_policy != WritePolicy::Selective
            && self.is_recovered()
            && !self.logs.iter().any(gave_up)
    }
}
