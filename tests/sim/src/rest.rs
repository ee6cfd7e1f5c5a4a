//! What a node's status says when all is at rest: nothing is under way.

use larder_node::WritePolicy;
use serde_json::Value;
use std::time::Duration;
use tokio::time::sleep;

/// What is 0 at rest.
const NOTHING: [&str; 13] = [
    "/puts_open",
    "/readers_waiting",
    "/tiers/writing",
    "/tiers/l2/in_flight_bytes",
    "/tiers/l2/pinned_pages",
    "/tiers/l2/hard_pinned_bytes",
    "/tiers/l2/held_pages",
    "/tiers/l2/held_bytes",
    "/tiers/l2/dirty_pages",
    "/budget/puts/bytes",
    "/budget/reads/bytes",
    "/budget/asked/bytes",
    "/budget/requests/bytes",
];

/// A number of a status; one that is not there is far above any bound.
pub(crate) fn figure(status: &Value, pointer: &str) -> u64 {
    status.pointer(pointer).and_then(Value::as_u64).unwrap_or(u64::MAX)
}

/// What is under way in a node of that write policy: write-back leaves pages dirty.
pub(crate) fn under_way(status: &Value, write_policy: WritePolicy) -> Vec<String> {
    let dirty = write_policy == WritePolicy::Back;
    let nothing = NOTHING.into_iter().filter(|what| !(dirty && what.ends_with("dirty_pages")));
    let found = nothing.map(|what| (what, figure(status, what))).filter(|(_, found)| *found != 0);
    found.map(|(what, found)| format!("{what} is {found}")).collect()
}

/// Waits until nothing is left over, for so many seconds; what still is then.
pub(crate) async fn settled(seconds: u64, left_over: impl Fn() -> Vec<String>) -> Vec<String> {
    let mut problems = left_over();
    for _ in 0..seconds {
        if problems.is_empty() {
            break;
        }
        sleep(Duration::from_secs(1)).await;
        problems = left_over();
    }
    problems.into_iter().map(|problem| format!("at rest, {problem}")).collect()
}
