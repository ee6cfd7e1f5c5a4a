//! Attacks on every port at once, applied by `larder bench hostile`.
//!
//! This test checks answers, memory and leaks, and that each attack had an effect. The command
//! itself also judges latencies: run it on an idle machine. The nightly run attacks for ten
//! minutes.

use larder_tests::bench_report;

/// Duration of the attacks: one turn. Deadlines of half requests pass within it.
const SECONDS: u64 = 16;

#[test]
fn attacks_on_all_ports_leave_honest_requests_whole_and_nothing_behind() {
    let report = bench_report("hostile", SECONDS);
    assert_eq!(report["failures"], serde_json::json!([]), "{report}");
    // A bystander that was hardly ever served proves nothing.
    for (name, requests) in report["requests"].as_object().expect("requests by name") {
        assert!(requests["beside"].as_u64() > Some(10), "{name}: {requests}");
    }
}
