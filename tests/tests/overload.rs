//! Overload of a store node, applied by `larder bench overload`.
//!
//! This test compares outcomes and counters only. The command itself judges goodput, offered load,
//! late refusals, lost connections and the latency of the probe: run it on an idle machine.

use larder_tests::larder;
use std::process::Command;

/// Duration of the overload.
const SECONDS: u64 = 30;

#[test]
fn overloaded_node_refuses_what_exceeds_its_memory_and_serves_the_rest() {
    let output = Command::new("timeout")
        .args(["--signal=KILL", "300"])
        .arg(larder())
        .args(["--log", "error", "bench", "overload", "--seconds", &SECONDS.to_string(), "--json"])
        .output()
        .expect("timeout runs");
    let report_text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{report_text}\n{errors}");
    // Without a report the load has hung or an answer was wrong. The exit code alone may be an
    // error, because it also judges time.
    let report: serde_json::Value = serde_json::from_str(&report_text).expect("one JSON object");
    let value = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("no {name} in {report_text}"));
    // Without refusals there was no overload. Without served pages and disconnects the absence of
    // errors proves nothing.
    for (name, least) in [("pages_busy", 100.0), ("pages_read", 100.0), ("pages_put", 50.0), ("disconnected", 10.0)] {
        assert!(value(name) >= least, "{name}: {report_text}");
    }
    assert_eq!((value("wrong_bytes"), value("bytes_in_flight")), (0.0, 0.0), "{report_text}");
    assert!(value("rss_max_mib") <= value("memory_plan_mib"), "{report_text}");
    // The probe sends one request at a time with a deadline of a second. A node that queued it
    // until its deadline, instead of refusing it, would give at most one refusal per second.
    assert!(value("probe_refusals") > SECONDS as f64, "refusals do not wait: {report_text}");
    // The node serves again after the overload.
    assert!(value("best_after_mb_s") > 0.0, "{report_text}");
}
