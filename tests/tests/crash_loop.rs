//! Kills a store node under load again and again. `larder bench crash` checks every page and
//! reports violations.

use larder_tests::{data_dir, larder};
use std::process::Command;

#[test]
fn node_killed_under_load_loses_no_durable_page() {
    let dir = data_dir();
    let output = Command::new(larder())
        .args(["--log", "error", "bench", "crash", "--rounds", "24", "--json", "--dir"])
        .arg(dir.path())
        .output()
        .expect("larder runs");
    let report = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{report}\n{errors}");
    let counts: serde_json::Value = serde_json::from_str(&report).expect("one JSON object");
    let count = |name: &str| counts[name].as_u64().unwrap_or_else(|| panic!("no {name} in {report}"));
    assert_eq!(count("kills"), 24);
    for wrong in ["wrong_bytes", "resurrected", "impossible"] {
        assert_eq!(count(wrong), 0, "{report}");
    }
    // Without enough activity, the absence of errors proves nothing.
    for (name, least) in [("stored", 500), ("hits", 2000), ("forgotten", 100), ("must_have", 200)] {
        assert!(count(name) >= least, "{name}: {report}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory is there").count(), 0, "nothing is left behind");
}
