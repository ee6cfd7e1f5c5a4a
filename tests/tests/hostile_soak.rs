//! Attacks on every port at once, applied by `larder bench hostile`.
//!
//! This test compares outcomes, memory and leaks only. The command itself also judges latencies:
//! run it on an idle machine. The nightly run attacks for ten minutes.

use larder_tests::larder;
use std::process::Command;

/// Duration of the attacks. Deadlines of half requests pass within it.
const SECONDS: u64 = 24;

#[test]
fn attacks_on_all_ports_leave_honest_requests_whole_and_nothing_behind() {
    let output = Command::new("timeout")
        .args(["--signal=KILL", "400"])
        .arg(larder())
        .args(["--log", "error", "bench", "hostile", "--seconds", &SECONDS.to_string(), "--json"])
        .output()
        .expect("timeout runs");
    let report_text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{report_text}\n{errors}");
    // The exit code alone may be an error, because it also judges time.
    let report: serde_json::Value = serde_json::from_str(&report_text).expect("one JSON object");
    let entries = |name: &str| report[name].as_object().unwrap_or_else(|| panic!("no {name}")).clone();
    for (name, requests) in entries("requests") {
        assert_eq!((&requests["failed"], &requests["wrong"]), (&0.into(), &0.into()), "{name}: {requests}");
        // A bystander that was never served proves nothing.
        assert!(requests["beside"].as_u64() > Some(10), "{name}: {requests}");
    }
    for (name, process) in entries("processes") {
        let mib = |field: &str| process[field].as_f64().unwrap_or_else(|| panic!("no {field} in {process}"));
        assert!(mib("memory_peak_mib") <= mib("memory_bound_mib"), "{name}: {process}");
        assert!(process["left"].as_object().unwrap().values().all(|left| *left == 0), "{name}: {process}");
        assert!(process["log_lines"].as_f64() < Some(5.0 * SECONDS as f64), "{name}: {process}");
    }
    assert!(entries("left").values().all(|left| *left == 0), "{report_text}");
    // Attacks that end by themselves, or that a deadline of a server ends.
    for name in ["half headers", "half bodies", "idle before Hello", "large JSON bodies", "nonsense frames"] {
        assert!(entries("attacks")[name].as_u64() > Some(0), "{name}: {report_text}");
    }
}
