//! States of the node under test that the loop waits for, read from the node's status.
//!
//! Invariants:
//! - A field that the status lacks counts as "not yet": a renamed field ends the run with an error.

use super::workload::OPERATION_TIMEOUT;
use anyhow::{Result, bail};
use larder_client::Client;
use serde_json::Value;
use std::time::{Duration, Instant};

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until recovery of every L3 device has ended. Before, the node answers misses for pages
/// that it has not found yet.
pub async fn wait_until_recovered(client: &Client) -> Result<()> {
    wait_for(client, "its recovery has ended", is_recovered).await.map(drop)
}

/// Waits until no put is open and no page waits for its write to L3. A put acknowledged before the
/// returned time survives SIGKILL. Fails if writers do not pause meanwhile.
pub async fn wait_until_flushed(client: &Client) -> Result<Instant> {
    wait_for(client, "all pages are on L3", is_flushed).await
}

/// Returns the time before the request whose answer met `condition`: the node has handled all that
/// it acknowledged before.
async fn wait_for(client: &Client, condition_name: &str, condition: impl Fn(&Value) -> bool) -> Result<Instant> {
    let deadline = Instant::now() + OPERATION_TIMEOUT;
    loop {
        let requested_at = Instant::now();
        let status = client.status(deadline).await.pop().and_then(|node| node.status);
        if status.as_ref().is_some_and(&condition) {
            return Ok(requested_at);
        }
        if Instant::now() >= deadline {
            bail!("the node did not report within {OPERATION_TIMEOUT:?} that {condition_name}; its status: {status:?}");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn is_recovered(status: &Value) -> bool {
    let devices = status["tiers"]["l3"]["devices"].as_array();
    devices.is_some_and(|devices| devices.iter().all(|device| device["recovery"]["report"].is_object()))
}

fn is_flushed(status: &Value) -> bool {
    let tiers = &status["tiers"];
    let pending = [
        &status["puts_open"],
        &tiers["l2"]["in_flight_bytes"],
        &tiers["l2"]["dirty_pages"],
        &tiers["writes_in_flight"],
    ];
    pending.into_iter().all(|count| *count == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn node_with_a_write_in_flight_or_an_unknown_status_is_not_flushed() {
        let flushed = json!({
            "puts_open": 0,
            "tiers": { "l2": { "in_flight_bytes": 0, "dirty_pages": 0 }, "writes_in_flight": 0 },
        });
        assert!(is_flushed(&flushed) && !is_flushed(&json!({})));
        for pointer in ["/puts_open", "/tiers/l2/in_flight_bytes", "/tiers/l2/dirty_pages", "/tiers/writes_in_flight"] {
            let mut status = flushed.clone();
            *status.pointer_mut(pointer).unwrap() = 1.into();
            assert!(!is_flushed(&status), "{pointer}");
        }
    }

    #[test]
    fn node_is_recovered_when_each_device_has_a_report() {
        let devices = |devices: Value| json!({ "tiers": { "l3": { "devices": devices } } });
        let with_report = json!({ "recovery": { "report": { "pages": 1 } } });
        assert!(is_recovered(&devices(json!([with_report]))));
        assert!(!is_recovered(&devices(json!([with_report, { "recovery": { "report": null } }]))));
        assert!(!is_recovered(&json!({})));
    }
}
