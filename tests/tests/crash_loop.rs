//! A store node under load is killed again and again; `larder bench crash` says what it saw.

use larder_tests::{data_dir, larder};
use std::process::Command;

#[test]
fn a_node_killed_under_load_keeps_its_promise() {
    let dir = data_dir();
    let output = Command::new(larder())
        .args(["--log", "error", "bench", "crash", "--rounds", "24", "--json", "--dir"])
        .arg(dir.path())
        .output()
        .expect("larder runs");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{errors}");
    let counts: serde_json::Value = serde_json::from_str(&said).expect("one JSON object");
    let count = |name: &str| counts[name].as_u64().unwrap_or_else(|| panic!("no {name} in {said}"));
    assert_eq!(count("kills"), 24);
    for wrong in ["wrong_bytes", "resurrected", "impossible"] {
        assert_eq!(count(wrong), 0, "{said}");
    }
    // It would prove nothing if nothing had happened.
    for (name, least) in [("stored", 500), ("hits", 2000), ("forgotten", 100), ("must_have", 200)] {
        assert!(count(name) >= least, "{name}: {said}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory is there").count(), 0, "nothing is left behind");
}
