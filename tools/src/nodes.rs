//! Store nodes in `larder status`.

use crate::admin::table;
use crate::output::say;
use bytesize::ByteSize;
use larder_client::NodeView;
use serde_json::Value;

/// Letters of a namespace's name that are shown: enough for `--quota`.
const NAMESPACE_DIGITS: usize = 16;

/// Prints the nodes, their L3 devices, and what namespaces have in L2.
pub fn show(nodes: &[NodeView]) {
    say!("\nstore nodes");
    let header =
        ["ADDRESS", "NODE", "STATE", "BY", "PAGES L2", "L2 USED", "PAGES L3", "L3 USED", "HITS L2/L3", "MISSES"];
    let mut rows = table(&[&header[..], &["WRITES", "DIRTY", "PINNED", "HELD"]].concat());
    for node in nodes {
        rows.add_row(node_row(node));
    }
    say!("{rows}");
    section("L3 devices", &["ADDRESS", "DIRECTORY", "STATE", "PAGES", "USED", "ERRORS"], rows_of(nodes, device_rows));
    let header = ["ADDRESS", "NAMESPACE", "PAGES", "BYTES", "QUOTA"];
    section("namespaces in L2", &header, rows_of(nodes, namespace_rows));
}

fn rows_of(nodes: &[NodeView], rows: fn(&str, &Value) -> Vec<Vec<String>>) -> Vec<Vec<String>> {
    let states = nodes.iter().filter_map(|node| Some((node.address.as_str(), node.status.as_ref()?)));
    states.flat_map(|(address, state)| rows(address, state)).collect()
}

fn section(title: &str, header: &[&str], rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    let mut shown = table(header);
    shown.add_rows(rows);
    say!("\n{title}\n{shown}");
}

fn number(state: &Value, pointer: &str) -> Option<u64> {
    state.pointer(pointer).and_then(Value::as_u64)
}

fn count(state: &Value, pointer: &str) -> String {
    number(state, pointer).map_or("-".to_string(), |number| number.to_string())
}

fn bytes(state: &Value, pointer: &str) -> String {
    number(state, pointer).map_or("-".to_string(), |bytes| ByteSize(bytes).to_string())
}

fn text(state: &Value, pointer: &str) -> String {
    state.pointer(pointer).and_then(Value::as_str).unwrap_or("-").to_string()
}

fn used(state: &Value, tier: &str) -> String {
    match (number(state, &format!("{tier}/bytes_used")), number(state, &format!("{tier}/bytes_capacity"))) {
        (Some(used), Some(of)) => format!("{} of {}", ByteSize(used), ByteSize(of)),
        _ => "-".to_string(),
    }
}

fn node_row(node: &NodeView) -> Vec<String> {
    let state = node.status.as_ref().unwrap_or(&Value::Null);
    vec![
        node.address.clone(),
        node.node_id.clone().unwrap_or_else(|| "-".into()),
        if node.up { format!("up, epoch {}", node.epoch.unwrap_or_default()) } else { "away".into() },
        node.transport.map_or("-".to_string(), |transport| transport.to_string()),
        count(state, "/tiers/l2/pages"),
        used(state, "/tiers/l2"),
        count(state, "/tiers/l3/pages"),
        used(state, "/tiers/l3"),
        format!("{}/{}", count(state, "/counters/pages_hit_l2"), count(state, "/counters/pages_hit_l3")),
        count(state, "/counters/pages_missed"),
        text(state, "/tiers/l2/write_policy"),
        count(state, "/tiers/l2/dirty_pages"),
        count(state, "/tiers/l2/pinned_pages"),
        count(state, "/tiers/l2/held_pages"),
    ]
}

fn list<'a>(state: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    state.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

fn device_rows(address: &str, state: &Value) -> Vec<Vec<String>> {
    let row = |device: &Value| {
        let reason = device["reason"].as_str().map(|reason| format!(": {reason}")).unwrap_or_default();
        vec![
            address.to_string(),
            text(device, "/dir"),
            format!("{}{reason}", text(device, "/state")),
            count(device, "/log/pages"),
            used(device, "/log"),
            count(device, "/errors"),
        ]
    };
    list(state, "/tiers/l3/devices").map(row).collect()
}

fn namespace_rows(address: &str, state: &Value) -> Vec<Vec<String>> {
    let row = |used: &Value| {
        vec![
            address.to_string(),
            text(used, "/namespace").chars().take(NAMESPACE_DIGITS).collect(),
            count(used, "/pages"),
            bytes(used, "/bytes"),
            bytes(used, "/quota_bytes"),
        ]
    };
    list(state, "/tiers/namespaces").map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_device_that_is_left_out_is_shown_with_its_reason() {
        let well = json!({"dir": "/a", "state": "well", "reason": null, "errors": 1, "log":
            {"pages": 7, "bytes_used": 1024, "bytes_capacity": 2048}});
        let out = json!({"dir": "/b", "state": "left out", "reason": "no such device"});
        let rows = device_rows("n:1", &json!({"tiers": {"l3": {"devices": [well, out]}}}));
        assert_eq!(rows[0], ["n:1", "/a", "well", "7", "1.0 KiB of 2.0 KiB", "1"]);
        assert_eq!(rows[1], ["n:1", "/b", "left out: no such device", "-", "-", "-"]);
        let namespace = json!({"namespace": "ab".repeat(32), "pages": 1, "bytes": 1024, "quota_bytes": null});
        let rows = namespace_rows("n:1", &json!({"tiers": {"namespaces": [namespace]}}));
        assert_eq!(rows, [["n:1", "abababababababab", "1", "1.0 KiB", "-"]]);
        assert!(device_rows("n:1", &Value::Null).is_empty());
    }
}
