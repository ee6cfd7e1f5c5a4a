//! Kills a store node under load again and again. `larder bench crash` checks every page and
//! reports violations.

use larder_tests::{data_dir, larder_command};
use serde_json::Value;

const KILLS: u64 = 24;
/// Counts that the runs must reach together. Without enough activity, the absence of errors proves
/// nothing.
const LEAST: [(&str, u64); 4] = [("stored", 500), ("hits", 2000), ("forgotten", 100), ("must_have", 200)];
/// Maximum number of runs. One is enough unless the machine is very busy.
const RUNS_MAX: usize = 8;

/// Runs `larder bench crash` once and returns its counts, which hold no violation.
fn crash_run() -> Value {
    let dir = data_dir();
    let output = larder_command()
        .args(["--log", "error", "bench", "crash", "--rounds", &KILLS.to_string(), "--json", "--dir"])
        .arg(dir.path())
        .output()
        .expect("larder runs");
    let report = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{report}\n{errors}");
    let counts: Value = serde_json::from_str(&report).expect("one JSON object");
    assert_eq!(counts["kills"], KILLS);
    for wrong in ["wrong_bytes", "resurrected", "impossible"] {
        assert_eq!(counts[wrong], 0, "{report}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory is there").count(), 0, "nothing is left behind");
    counts
}

#[test]
fn node_killed_under_load_loses_no_durable_page() {
    let mut runs = Vec::new();
    let total = |runs: &[Value], name: &str| -> u64 {
        runs.iter().map(|counts| counts[name].as_u64().unwrap_or_else(|| panic!("no {name} in {counts}"))).sum()
    };
    while LEAST.iter().any(|&(name, least)| total(&runs, name) < least) {
        assert!(runs.len() < RUNS_MAX, "too little activity to prove anything: {runs:?}");
        runs.push(crash_run());
    }
}
