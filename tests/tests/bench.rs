//! `larder bench trace` with `--json`.

use larder_tests::{data_dir, larder};
use std::fmt::Write;
use std::process::Command;

#[test]
fn trace_replay_reports_every_policy() {
    // Ten conversations alternate. Each turn reads all earlier blocks and adds one.
    let mut trace = String::new();
    for turn in 0..30u64 {
        for conversation in 0..10u64 {
            let ids: Vec<u64> = (0..=turn).map(|block| conversation * 1000 + block).collect();
            writeln!(
                trace,
                "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": 1, \"hash_ids\": {ids:?}}}",
                turn * 10,
                (turn + 1) * 512
            )
            .unwrap();
        }
    }
    let dir = data_dir();
    let file = dir.path().join("trace.jsonl");
    std::fs::write(&file, trace).unwrap();
    let output =
        Command::new(larder()).args(["bench", "trace", "--json", "--capacity", "20k,10M"]).arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<serde_json::Value> = output
        .stdout
        .split(|&b| b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect();
    assert_eq!(lines.len(), 12);
    let rate = |policy: &str, capacity: u64| {
        let line = lines.iter().find(|l| l["policy"] == policy && l["capacity_tokens"] == capacity);
        line.and_then(|l| l["hit_rate"].as_f64()).unwrap()
    };
    // With room for everything, only the first access to each block misses: 300 of 4650.
    for policy in ["lru", "s3-fifo", "sieve", "larder", "larder+ends", "belady"] {
        assert!((rate(policy, 10_000_000) - 4350.0 / 4650.0).abs() < 1e-9, "{policy}");
        assert!(rate(policy, 20_000) <= rate("belady", 20_000), "nothing beats the optimum: {policy}");
    }
}
