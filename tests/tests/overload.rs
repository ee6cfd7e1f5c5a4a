//! Overload of a store node, applied by `larder bench overload`.
//!
//! This test compares outcomes and counters only. The command itself judges goodput, offered load,
//! late refusals, lost connections and the latency of the probe: run it on an idle machine.

use larder_tests::bench_report;

/// Duration of the overload.
const SECONDS: u64 = 12;

#[test]
fn overloaded_node_refuses_what_exceeds_its_memory_and_serves_the_rest() {
    // Without a report the load has hung or an answer was wrong.
    let report = bench_report("overload", SECONDS);
    let value = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("no {name} in {report}"));
    // Without refusals there was no overload. Without served pages and disconnects the absence of
    // errors proves nothing.
    for (name, least) in [("pages_busy", 100.0), ("pages_read", 100.0), ("pages_put", 50.0), ("disconnected", 10.0)] {
        assert!(value(name) >= least, "{name}: {report}");
    }
    assert_eq!((value("wrong_bytes"), value("bytes_in_flight")), (0.0, 0.0), "{report}");
    assert!(value("rss_max_mib") <= value("memory_plan_mib"), "{report}");
    // The probe sends one request at a time with a deadline of a second. A node that queued it
    // until its deadline, instead of refusing it, would give at most one refusal per second.
    assert!(value("probe_refusals") > SECONDS as f64, "refusals do not wait: {report}");
    // The node serves again after the overload.
    assert!(value("best_after_mb_s") > 0.0, "{report}");
}
