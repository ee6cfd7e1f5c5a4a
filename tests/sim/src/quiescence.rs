//! Checks that a node's status shows no work in flight once faults have stopped and clients are
//! idle.

use larder_node::WritePolicy;
use serde_json::Value;
use std::time::Duration;
use tokio::time::sleep;

/// JSON pointers (RFC 6901) of the status values that must be 0 on an idle node. `busy_counters`
/// exempts the dirty pages of write-back.
const ZERO_WHEN_IDLE: [&str; 13] = [
    "/puts_open",
    "/readers_waiting",
    "/tiers/writes_in_flight",
    "/tiers/l2/in_flight_bytes",
    "/tiers/l2/pinned_pages",
    "/tiers/l2/hard_pinned_bytes",
    "/tiers/l2/held_pages",
    "/tiers/l2/held_bytes",
    "/tiers/l2/dirty_pages",
    "/budget/puts/bytes",
    "/budget/reads/bytes",
    "/budget/outstanding/bytes",
    "/budget/requests/bytes",
];

/// Number at a JSON pointer of a status. A missing value reads as `u64::MAX`, so that it violates
/// every bound.
pub(crate) fn status_number(status: &Value, pointer: &str) -> u64 {
    status.pointer(pointer).and_then(Value::as_u64).unwrap_or(u64::MAX)
}

/// Returns `true` if a node reports that one of its logs takes no writes until a restart: it has
/// stopped, or its recovery has not ended, or its device could not be opened or has no identity. A
/// quarantine is no such reason: it ends once the device works.
pub(crate) fn has_stopped(status: &Value) -> bool {
    let devices = status.pointer("/tiers/l3/devices").and_then(Value::as_array);
    let takes_writes = |device: &Value| {
        let has_identity = !device["reason"].as_str().is_some_and(|reason| reason.contains("identity"));
        device["log"]["stopped"] == false && !device["recovery"]["report"].is_null() && has_identity
    };
    devices.is_none_or(|devices| !devices.iter().all(takes_writes))
}

/// Descriptions of the status values that are not 0. Write-back leaves dirty pages in an idle node,
/// so they are allowed under that policy.
pub(crate) fn busy_counters(status: &Value, write_policy: WritePolicy) -> Vec<String> {
    let dirty = write_policy == WritePolicy::Back;
    let expected_zero = ZERO_WHEN_IDLE.into_iter().filter(|pointer| !(dirty && pointer.ends_with("dirty_pages")));
    let found = expected_zero.map(|pointer| (pointer, status_number(status, pointer))).filter(|(_, found)| *found != 0);
    found.map(|(pointer, found)| format!("{pointer} is {found}")).collect()
}

/// Waits until `remaining_work` is empty, for at most `seconds`. Returns the remaining problems.
/// Checks once per virtual second.
pub(crate) async fn wait_until_idle(seconds: u64, remaining_work: impl Fn() -> Vec<String>) -> Vec<String> {
    let mut problems = remaining_work();
    for _ in 0..seconds {
        if problems.is_empty() {
            break;
        }
        sleep(Duration::from_secs(1)).await;
        problems = remaining_work();
    }
    problems.into_iter().map(|problem| format!("not idle: {problem}")).collect()
}
