//! States of store nodes that tests wait for, read from the nodes' status.
//!
//! A field that the status lacks counts as "not yet": a renamed field fails the test that waits.

use crate::{PATIENCE, eventually, soon};
use larder_client::{Client, ClientOptions};
use larder_format::NamespaceDescriptor;
use serde_json::Value;
use std::cell::RefCell;

/// Attaches to the node at `url`, and waits until it has recovered.
///
/// # Panics
/// Panics if the node does not answer, or has not recovered, within [`PATIENCE`] each.
pub async fn attach(url: &str, namespace: NamespaceDescriptor) -> Client {
    let url = url.parse().expect("a node prints its URL");
    let client = Client::attach(url, Some(namespace), ClientOptions::default());
    assert!(client.ready(PATIENCE).await, "the node answers");
    wait_for_node(&client, "the node has recovered", is_recovered).await;
    client
}

/// Returns `true` if recovery of every L3 device has ended. Before, a node serves and answers
/// misses for pages that it has not found yet.
pub fn is_recovered(status: &Value) -> bool {
    let devices = status["tiers"]["l3"]["devices"].as_array();
    devices.is_some_and(|devices| devices.iter().all(|device| device["recovery"]["report"].is_object()))
}

/// Returns `true` if no put is open and no page waits for its write to L3. SIGKILL then loses no
/// page that L3 had room for.
pub fn is_flushed(status: &Value) -> bool {
    let tiers = &status["tiers"];
    let pending = [
        &status["puts_open"],
        &tiers["l2"]["in_flight_bytes"],
        &tiers["l2"]["dirty_pages"],
        &tiers["writes_in_flight"],
    ];
    pending.into_iter().all(|count| *count == 0)
}

/// Waits until the status of the one node of `client` meets `condition`, and returns that status.
///
/// # Panics
/// Panics if it does not within [`PATIENCE`].
pub async fn wait_for_node(client: &Client, condition_name: &str, condition: impl Fn(&Value) -> bool) -> Value {
    let latest = RefCell::new(Value::Null);
    eventually(condition_name, || async {
        let answer = client.status(soon()).await.pop().and_then(|node| node.status);
        let met = answer.as_ref().is_some_and(&condition);
        latest.replace(answer.unwrap_or_default());
        met
    })
    .await;
    latest.into_inner()
}
