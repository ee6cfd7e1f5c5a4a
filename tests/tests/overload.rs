//! A store node is asked for ten times what it can do; `larder bench overload` says what it saw, and judges it.

use larder_tests::larder;
use std::process::Command;

#[test]
fn a_node_that_is_asked_for_too_much_stays_calm() {
    let output = Command::new(larder())
        .args(["--log", "error", "bench", "overload", "--seconds", "30", "--json"])
        .output()
        .expect("larder runs");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{errors}");
    let seen: serde_json::Value = serde_json::from_str(&said).expect("one JSON object");
    let figure = |name: &str| seen[name].as_f64().unwrap_or_else(|| panic!("no {name} in {said}"));
    // It would prove nothing if nothing had happened.
    for (name, least) in [("pages_had", 1000.0), ("pages_put", 500.0), ("pages_busy", 1000.0), ("vanished", 100.0)] {
        assert!(figure(name) >= least, "{name}: {said}");
    }
    assert!(figure("goodput_mb_s") >= 0.8 * figure("best_mb_s"), "{said}");
    assert!(figure("rss_max_mib") <= 1.05 * figure("rss_budget_mib"), "{said}");
}
