//! A store node is asked for far more than it can do; `larder bench overload` says what it saw. Here memory, pages and refusals in
//! the node are judged as there; the probe by its median; goodput, for which two moments are compared, less strictly: this machine may have other things to do in
//! one of them.

use larder_tests::larder;
use std::process::Command;

#[test]
fn a_node_that_is_asked_for_too_much_stays_calm() {
    let output = Command::new("timeout")
        .args(["--signal=KILL", "180"])
        .arg(larder())
        .args(["--log", "error", "bench", "overload", "--seconds", "30", "--json"])
        .output()
        .expect("timeout runs");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}\n{errors}");
    let seen: serde_json::Value = serde_json::from_str(&said).expect("one JSON object");
    let figure = |name: &str| seen[name].as_f64().unwrap_or_else(|| panic!("no {name} in {said}"));
    // It would prove nothing if nothing had happened.
    for (name, least) in [("pages_had", 100.0), ("pages_put", 50.0), ("pages_busy", 100.0), ("vanished", 10.0)] {
        assert!(figure(name) >= least, "{name}: {said}");
    }
    assert_eq!((figure("wrong_bytes"), figure("left_over")), (0.0, 0.0), "{said}");
    assert!(figure("rss_max_mib") <= 1.05 * figure("rss_budget_mib"), "{said}");
    assert!(figure("load_times") >= 7.0 && figure("goodput_mb_s") >= 0.6 * figure("best_mb_s"), "{said}");
    assert!(figure("refusals_late") <= 0.01 * figure("refusals"), "{said}");
    // Beside that the time until a request is read: a processor that is taken away for a while does not move the median.
    assert!(figure("probe_refusals") >= 100.0 && figure("probe_p50_us") <= 3000.0, "{said}");
}
