//! Attacks on every port at once, applied by `larder bench hostile`.
//!
//! This test checks answers, memory and leaks, and that each attack had an effect. The command
//! itself also judges latencies: run it on an idle machine. The nightly run attacks for ten
//! minutes.

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
    assert_eq!(report["failures"], serde_json::json!([]), "{report_text}");
    // A bystander that was hardly ever served proves nothing.
    for (name, requests) in report["requests"].as_object().expect("requests by name") {
        assert!(requests["beside"].as_u64() > Some(10), "{name}: {requests}");
    }
}
