//! `larder status`: store nodes, engines and models as tables.
//!
//! The state of a store node arrives as JSON from the node itself, which may have another version
//! than this command. Every missing field is shown as `-`.

use crate::admin::Target;
use crate::output::say;
use crate::table::{Column, column, section, wide_column};
use crate::time::duration_text;
use crate::up::node_admin_urls;
use anyhow::Result;
use bytesize::ByteSize;
use clap::Args;
use larder_client::NodeView;
use larder_router::admin::api::{EngineStatus, ModelStatus, PATH_STATUS, StatusResponse};
use serde_json::Value;
use std::fmt::Write;

/// Width of the lines in words.
const LINE_WIDTH: usize = 114;
/// Digits of a namespace's name that are shown. They are enough for `--quota`, and keep the default
/// view within its width.
const NAMESPACE_DIGITS: usize = 16;

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show all columns, L3 devices and namespaces. The default view fits 120 columns
    #[arg(long)]
    wide: bool,
    #[command(flatten)]
    target: Target,
}

pub async fn run(args: StatusArgs) -> Result<()> {
    let status: StatusResponse = args.target.send(PATH_STATUS, None::<&()>).await?;
    let node_urls = args.target.local_data_dir().map(node_admin_urls).unwrap_or_default();
    args.target.print(&status, |status| say!("{}", format_status(status, &node_urls, args.wide)))
}

fn format_status(status: &StatusResponse, node_urls: &[String], wide: bool) -> String {
    let uptime = duration_text(status.uptime_seconds);
    let mut text = format!("larder {}, router up {uptime}, store {}", status.version, status.store);
    if wide && status.memory_max.bytes > 0 {
        let _ = write!(text, "\nmemory of the router, at most: {}", ByteSize(status.memory_max.bytes));
    }
    text += &section("STORE NODES", &node_columns(), &status.nodes, wide);
    text += &eviction(&status.nodes);
    let mut devices = entries(&status.nodes, "/tiers/l3/devices");
    if !wide {
        // The default view leaves out healthy devices but never hides a failed one.
        devices.retain(|device| device.state["reason"].is_string());
    }
    let title = if wide { "L3 DEVICES" } else { "L3 DEVICES WITH PROBLEMS" };
    text += &section(title, &device_columns(), &devices, wide);
    text += &section("ENGINES", &engine_columns(), &status.engines, wide);
    text += &section("MODELS", &model_columns(), &status.models, wide);
    if wide {
        text += &section("NAMESPACES IN L2", &namespace_columns(), &entries(&status.nodes, "/tiers/namespaces"), wide);
        if !node_urls.is_empty() {
            let _ = write!(text, "\n\nNODE METRICS (/metrics, /status, POST /scrub)\n  {}", node_urls.join("\n  "));
        }
    }
    text
}

fn node_columns() -> [Column<NodeView>; 17] {
    [
        column("ADDRESS", |node| node.address.clone()),
        wide_column("NODE", |node| node.node_id.clone().unwrap_or_else(|| "-".into())),
        column("STATE", |node| if node.up { "up" } else { "unreachable" }.into()),
        wide_column("EPOCH", |node| node.epoch.map_or("-".into(), |epoch| epoch.to_string())),
        wide_column("TRANSPORT", |node| node.transport.map_or("-".into(), |transport| transport.to_string())),
        column("L2 USED", |node| used(state(node), "/tiers/l2")),
        column("L2 PAGES", |node| count(state(node), "/tiers/l2/pages")),
        column("L3 USED", |node| used(state(node), "/tiers/l3")),
        column("L3 PAGES", |node| count(state(node), "/tiers/l3/pages")),
        column("HITS L2/L3", |node| {
            let state = state(node);
            format!("{}/{}", count(state, "/counters/pages_hit_l2"), count(state, "/counters/pages_hit_l3"))
        }),
        column("MISSES", |node| count(state(node), "/counters/pages_missed")),
        wide_column("HANDED OVER", |node| count(state(node), "/counters/pages_followed")),
        wide_column("WRITE POLICY", |node| text(state(node), "/tiers/l2/write_policy")),
        wide_column("UNFLUSHED", |node| count(state(node), "/tiers/l2/dirty_pages")),
        wide_column("PINNED", |node| count(state(node), "/tiers/l2/pinned_pages")),
        wide_column("LEASED", |node| count(state(node), "/tiers/l2/held_pages")),
        wide_column("MEMORY MAX", |node| bytes(state(node), "/memory_max/bytes")),
    ]
}

struct Entry<'a> {
    address: &'a str,
    state: &'a Value,
}

fn entries<'a>(nodes: &'a [NodeView], pointer: &str) -> Vec<Entry<'a>> {
    let lists = nodes.iter().filter_map(|node| Some((node.address.as_str(), state(node).pointer(pointer)?)));
    let entries = lists
        .flat_map(|(address, list)| list.as_array().into_iter().flatten().map(move |state| Entry { address, state }));
    entries.collect()
}

fn device_columns<'a>() -> [Column<Entry<'a>>; 6] {
    [
        column("ADDRESS", |device: &Entry<'_>| device.address.to_string()),
        column("DIRECTORY", |device| text(device.state, "/dir")),
        column("STATE", |device| {
            let reason = device.state["reason"].as_str().map(|reason| format!(": {reason}")).unwrap_or_default();
            format!("{}{reason}", text(device.state, "/state"))
        }),
        column("PAGES", |device| count(device.state, "/log/pages")),
        column("USED", |device| used(device.state, "/log")),
        column("ERRORS", |device| count(device.state, "/errors")),
    ]
}

fn namespace_columns<'a>() -> [Column<Entry<'a>>; 7] {
    [
        column("ADDRESS", |namespace: &Entry<'_>| namespace.address.to_string()),
        column("NAMESPACE", |namespace| text(namespace.state, "/namespace").chars().take(NAMESPACE_DIGITS).collect()),
        column("PAGES", |namespace| count(namespace.state, "/pages")),
        column("SIZE", |namespace| bytes(namespace.state, "/bytes")),
        column("PINNED", |namespace| bytes(namespace.state, "/hard_pinned_bytes")),
        column("FLOOR", |namespace| bytes(namespace.state, "/floor_bytes")),
        column("QUOTA", |namespace| bytes(namespace.state, "/quota_bytes")),
    ]
}

/// Tells in words what the eviction policy of each node does.
fn eviction(nodes: &[NodeView]) -> String {
    let mut text = String::new();
    for node in nodes {
        let sentences = eviction_sentences(state(node));
        if sentences.is_empty() {
            continue;
        }
        let title = if text.is_empty() { "\n\nEVICTION FROM L2" } else { "" };
        let _ = write!(text, "{title}\n  {}", node.address);
        for sentence in sentences {
            let _ = write!(text, "\n    {}", sentence.chars().take(LINE_WIDTH).collect::<String>());
        }
    }
    text
}

fn eviction_sentences(state: &Value) -> Vec<String> {
    let Some(eviction) = state.pointer("/tiers/l2/eviction") else { return Vec::new() };
    let order = if eviction["order"] == "lru" { "least recently used first" } else { "lowest expected hits first" };
    let mut sentences = vec![format!("Order: {order}. Reason: {}.", self::text(eviction, "/reason"))];
    if let (Some(refused), Some(admitted)) = (number(eviction, "/pages_refused"), number(eviction, "/pages_admitted")) {
        sentences.push(format!("Admission: {refused} of {} pages refused.", refused + admitted));
    }
    let gap = |index: usize| number(eviction, &format!("/gaps_ms/{index}"));
    if let (Some(fast), Some(half), Some(slow)) = (gap(0), gap(1), gap(2)) {
        let [fast, half, slow] = [fast, half, slow].map(|ms| duration_text(ms.div_ceil(1000)));
        sentences.push(format!(
            "Pages that return do so within {half} in half of the cases, {fast} in a tenth, {slow} in nine tenths."
        ));
    }
    if let (Some(written), Some(put)) = (number(state, "/tiers/l3/written_bytes"), number(state, "/counters/put_bytes"))
        && put > 0
    {
        let denied = number(state, "/tiers/l2/writes_denied").unwrap_or(0);
        let copied = number(state, "/tiers/l3/copied_forward_bytes").unwrap_or(0);
        let [all, copied] = [written + copied, copied].map(|bytes| bytes as f64 / put as f64);
        sentences.push(format!(
            "L3: {all:.2} bytes written per byte put, {copied:.2} of them copies; \
             {denied} writes beyond the write budget."
        ));
    }
    sentences
}

fn engine_columns() -> [Column<EngineStatus>; 12] {
    [
        wide_column("NAME", |engine| engine.name.clone()),
        column("ROLE", |engine: &EngineStatus| engine.role.to_string()),
        column("URL", |engine| engine.url.clone()),
        column("MODEL", |engine| engine.model.clone()),
        column("STATE", |engine| if engine.up { "up" } else { "failed, retrying" }.into()),
        column("RUNNING", |engine| engine.state.as_ref().map_or("-".into(), |state| state.running.to_string())),
        column("QUEUED", |engine| engine.state.as_ref().map_or("-".into(), |state| state.queue.to_string())),
        column("L1 PAGES USED", |engine| match &engine.state {
            // The engine reads both numbers at slightly different moments.
            Some(state) => format!("{} of {}", state.l1_pages.saturating_sub(state.l1_pages_free), state.l1_pages),
            None => "-".into(),
        }),
        column("STORE NODES", |engine| engine.state.as_ref().map_or("-".into(), |state| state.store_nodes.to_string())),
        wide_column("OUTSTANDING TOKENS", |engine| engine.outstanding_tokens.to_string()),
        wide_column("MAX CONTEXT", |engine| engine.max_context.to_string()),
        wide_column("MEMORY MAX", |engine| match &engine.state {
            Some(state) if state.memory_max.bytes > 0 => ByteSize(state.memory_max.bytes).to_string(),
            _ => "-".into(),
        }),
    ]
}

fn model_columns() -> [Column<ModelStatus>; 5] {
    [
        column("NAME", |model| model.name.clone()),
        column("PREFILL ENGINES", |model| model.prefill_engines.to_string()),
        column("DECODE ENGINES", |model| model.decode_engines.to_string()),
        column("TOKENS PER PAGE", |model| model.page_tokens.to_string()),
        wide_column("NAMESPACE", |model| model.namespace.chars().take(NAMESPACE_DIGITS).collect()),
    ]
}

fn state(node: &NodeView) -> &Value {
    node.status.as_ref().unwrap_or(&Value::Null)
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status() -> StatusResponse {
        let node = |number: u64, device: Value| {
            json!({
                "address": format!("store-{number}.eu-central.example.com:7700"), "up": true,
                "node_id": "node-012351a9810f", "epoch": 1_795_363_376u64, "transport": "tcp",
                "status": {
                    "counters": {
                        "pages_hit_l2": 123_456_789, "pages_hit_l3": 98_765_432, "pages_missed": 55_555_555,
                        "put_bytes": 200,
                    },
                    "tiers": {
                        "l2": {
                            "pages": 12_345_678, "bytes_used": 200u64 << 30, "bytes_capacity": 256u64 << 30,
                            "writes_denied": 3,
                            "eviction": {
                                "order": "hit-density", "reason": "LRU would miss pages that return",
                                "pages_admitted": 60, "pages_refused": 40, "gaps_ms": [5_500, 18_000, 125_000],
                            },
                        },
                        "l3": {
                            "pages": 123_456_789, "bytes_used": 7u64 << 40, "bytes_capacity": 8u64 << 40,
                            "devices": [device], "written_bytes": 50, "copied_forward_bytes": 10,
                        },
                        "namespaces": [{"namespace": "ab".repeat(32), "pages": 1, "bytes": 1024, "quota_bytes": null, "floor_bytes": 512, "hard_pinned_bytes": 0}],
                    },
                },
            })
        };
        let healthy = json!({"dir": "/a", "state": "healthy", "reason": null, "errors": 1, "log":
            {"pages": 7, "bytes_used": 1024, "bytes_capacity": 2048}});
        let failed = json!({"dir": "/b", "state": "offline", "reason": "no such device"});
        let engine = json!({
            "name": "decode-67b02a13", "role": "decode", "url": "http://gpu-17.eu-central.example.com:7720",
            "model": "Qwen3-235B-A22B-Instruct", "namespace": "cd".repeat(32), "max_context": 262_144, "up": false,
            "outstanding_tokens": 1, "requests": 1, "state": null,
        });
        let counters = serde_json::to_value(larder_router::metrics::Counters::default()).unwrap();
        let status = json!({
            "version": "0.1.0", "uptime_seconds": 7500, "store": "larder://store-0.eu-central.example.com:7700/",
            "nodes": [node(0, healthy), node(1, failed)], "engines": [engine], "router": counters,
            "models": [{"name": "m", "namespace": "cd".repeat(32), "page_tokens": 32, "prefill_engines": 0,
                "decode_engines": 1}],
        });
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn default_view_fits_120_columns_and_names_failed_devices() {
        let text = format_status(&status(), &[], false);
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        assert!(text.contains("router up 2 h 5 min") && text.contains("failed, retrying"), "{text}");
        assert!(text.contains("offline: no such device") && !text.contains("/a "), "{text}");
        assert!(!text.contains("EPOCH") && !text.contains("NAMESPACE"), "{text}");
    }

    #[test]
    fn wide_view_shows_devices_namespaces_and_node_metrics() {
        let text = format_status(&status(), &["http://127.0.0.1:1".into()], true);
        for expected in ["EPOCH", "/a ", "offline: no such device", "abababababababab", "  http://127.0.0.1:1"] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }

    #[test]
    fn eviction_is_told_in_words() {
        let text = format_status(&status(), &[], false);
        for expected in [
            "Order: lowest expected hits first. Reason: LRU would miss pages that return.",
            "Admission: 40 of 100 pages refused.",
            "return do so within 18 s in half of the cases, 6 s in a tenth, 2 min in nine tenths.",
            "L3: 0.30 bytes written per byte put, 0.05 of them copies; 3 writes beyond the write budget.",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(eviction_sentences(&json!({"tiers": {"l2": {}}})).is_empty(), "an older node");
    }

    #[test]
    fn missing_fields_are_shown_as_dashes() {
        assert_eq!((count(&Value::Null, "/a"), used(&Value::Null, "/a"), text(&Value::Null, "/a")), {
            ("-".to_string(), "-".to_string(), "-".to_string())
        });
    }
}
