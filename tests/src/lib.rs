//! Real `larder` processes for tests, and a reference implementation to compare their answers with.
//!
//! Invariants:
//! - A [`Process`] is killed when it is dropped.
//! - No step of a test waits longer than [`PATIENCE`].
//! - No test judges how long a step took: the machine may be busy. Tests wait for states, and
//!   compare outcomes and counters. `larder bench` measures time.

mod node_state;
mod process;
mod raw;
pub mod redis;
mod reference;
mod request;
pub mod zmq;

pub use node_state::{attach, is_flushed, is_recovered, wait_for_node};
pub use process::{Process, Stack, bench_report, data_dir, larder, larder_command, unused_address};
pub use raw::{RawConnection, hello};
pub use reference::{Reference, tiny_model_dir};
pub use request::{Completion, CompletionRequest, complete, get_json, metric, node_statuses};

use larder_format::PageKey;
use std::time::{Duration, Instant};

/// Deadline of every step of a test. A step that takes longer hangs, however busy the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Deadline of a step that begins now.
pub fn soon() -> Instant {
    Instant::now() + PATIENCE
}

pub fn key(number: u32) -> PageKey {
    PageKey::chain(None, &[number])
}

/// Polls until `condition` holds.
///
/// # Panics
/// Panics if it does not hold within [`PATIENCE`].
pub async fn eventually<F>(condition_name: &str, mut condition: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "timed out waiting for: {condition_name}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
