//! Overload of a store node, measured by `larder bench overload`. This test checks memory, wrong
//! bytes and late refusals as strictly as the benchmark does. It is more lenient with goodput and
//! with probe latency, because other processes may use this machine during one of the two
//! measurements.

use larder_tests::larder;
use std::process::Command;

#[test]
fn overloaded_node_keeps_memory_and_latency_bounds() {
    let output = Command::new("timeout")
        .args(["--signal=KILL", "180"])
        .arg(larder())
        .args(["--log", "error", "bench", "overload", "--seconds", "30", "--json"])
        .output()
        .expect("timeout runs");
    let report_text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{report_text}\n{errors}");
    let report: serde_json::Value = serde_json::from_str(&report_text).expect("one JSON object");
    let value = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("no {name} in {report_text}"));
    // Without enough activity, the absence of errors proves nothing.
    for (name, least) in [("pages_read", 100.0), ("pages_put", 50.0), ("pages_busy", 100.0), ("disconnected", 10.0)] {
        assert!(value(name) >= least, "{name}: {report_text}");
    }
    assert_eq!((value("wrong_bytes"), value("bytes_in_flight")), (0.0, 0.0), "{report_text}");
    assert!(value("rss_max_mib") <= 1.05 * value("rss_budget_mib"), "{report_text}");
    assert!(value("load_factor") >= 7.0 && value("goodput_mb_s") >= 0.6 * value("best_mb_s"), "{report_text}");
    assert!(value("refusals_late") <= 0.01 * value("refusals"), "{report_text}");
    // The probe includes the time until the node reads a request. The median tolerates a machine
    // that is briefly busy.
    assert!(value("probe_refusals") >= 100.0 && value("probe_p50_us") <= 3000.0, "{report_text}");
}
