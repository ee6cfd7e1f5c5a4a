//! `larder bench trace`, `larder bench replay` and `larder bench reuse` with `--json`.

use larder_tests::{data_dir, larder_command};
use std::fmt::Write;
use std::path::Path;
use std::process::Output;

/// Runs a command of `larder bench`, which must succeed. Returns the lines that it prints.
fn bench(arguments: &[&str], file: &Path) -> Vec<serde_json::Value> {
    let output = larder_command().arg("bench").args(arguments).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = output.stdout.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
}

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
    let lines = bench(&["trace", "--json", "--capacity", "20k,10M"], &file);
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

/// A loop over 300 blocks, one request per second. In an L2 of 195 blocks LRU always misses. A
/// policy can keep some of them, if it knows their ages on the trace's clock.
fn write_loop(file: &Path, requests: u64, blocks_each: u64) {
    let mut trace = String::new();
    for request in 0..requests {
        let first = request * blocks_each % 300;
        let ids: Vec<u64> = (first..first + blocks_each).collect();
        writeln!(
            trace,
            "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": 1, \"hash_ids\": {ids:?}}}",
            request * 1000,
            blocks_each * 512
        )
        .unwrap();
    }
    std::fs::write(file, trace).unwrap();
}

#[test]
fn hit_rate_of_a_node_is_that_of_the_simulator() {
    let dir = data_dir();
    let file = dir.path().join("trace.jsonl");
    write_loop(&file, 600, 10);
    for ends in [false, true] {
        let mut arguments = vec!["replay", "--json", "--capacity", "100k"];
        if ends {
            arguments.push("--ends");
        }
        // The command fails if the rates are more than two points apart.
        let lines = bench(&arguments, &file);
        let [line] = lines.as_slice() else { panic!("{lines:?}") };
        let rate = |name: &str| line[name].as_f64().unwrap();
        assert_eq!((line["pages"].as_u64(), line["puts_failed"].as_u64()), (Some(6000), Some(0)), "{line}");
        assert!(rate("lru_hit_rate") == 0.0 && rate("node_hit_rate") > 0.2, "{line}");
        assert_eq!(line["eviction"]["pages_ended"].as_u64().unwrap() > 0, ends, "{line}");
    }
}

/// Reads of L3 end in any order. The rate is that of the simulator only if pages of a request enter
/// L2 in their order, and after the hits of the request.
#[test]
#[ignore = "a page waits 100 ms for its turn, so a busy machine changes the hit rate"]
fn hit_rate_of_a_node_with_l3_is_that_of_the_simulator() {
    let dir = data_dir();
    let file = dir.path().join("trace.jsonl");
    // More blocks than a node reads from L3 at a time.
    write_loop(&file, 300, 30);
    let l3_dir = dir.path().to_str().unwrap();
    let lines = bench(&["replay", "--json", "--capacity", "100k", "--l3-dir", l3_dir], &file);
    let [line] = lines.as_slice() else { panic!("{lines:?}") };
    let count = |value: &serde_json::Value| value.as_u64().unwrap();
    assert_eq!((count(&line["pages"]), count(&line["puts_failed"])), (9000, 0), "{line}");
    assert!(count(&line["eviction"]["pages_refused"]) > 0 && count(&line["pages_from_l3"]) > 0, "{line}");
    assert!(line["node_hit_rate"].as_f64().unwrap() > 0.2, "{line}");
    // L3 has room for all pages: it writes each once, and copies none.
    assert!(line["written_per_byte_put"].as_f64().unwrap() <= 1.0, "{line}");
}

#[test]
fn replay_without_room_for_a_block_is_refused() {
    let dir = data_dir();
    let file = dir.path().join("trace.jsonl");
    std::fs::write(&file, r#"{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}"#).unwrap();
    let output = larder_command().args(["bench", "replay", "--capacity", "100"]).arg(&file).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("--capacity 100 is less than a block"), "{errors}");
}

/// Runs `larder bench reuse` over a small random model in `dir`. Returns its output, and the lines
/// of its file.
fn reuse(dir: &Path, options: &[&str]) -> (Output, Vec<serde_json::Value>) {
    let (model, file) = (dir.join("model"), dir.join("reuse.jsonl"));
    let made = larder_command().args(["bench", "random-model", "small"]).arg(&model).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut command = larder_command();
    command.args(["bench", "reuse", "--prompts", "64,128", "--rounds", "2", "--answer-tokens", "3", "--clients", "2"]);
    command.args(["--turns", "2", "--turn-tokens", "40", "--l1", "64MiB", "--l2", "64MiB", "--l3-bytes", "256MiB"]);
    command.arg("--model").arg(&model).arg("--dir").arg(dir).arg("--json").arg(&file).args(options);
    let output = command.output().unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    (output, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn text(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}\n{err}", output.status)
}

#[test]
fn reuse_measures_every_source_and_both_kinds_of_conversations() {
    let dir = data_dir();
    let (output, lines) = reuse(dir.path(), &[]);
    assert!(output.status.success(), "{}", text(&output));
    let end = lines.last().unwrap();
    assert_eq!((&end["problems"], &end["skipped"]), (&0.into(), &0.into()), "{}", text(&output));
    let figure = |name: &str| {
        let found = lines.iter().find(|line| line["name"] == name);
        found.unwrap_or_else(|| panic!("no figure {name}: {}", text(&output)))
    };
    for (length, cached) in [(64, 0.5), (128, 0.75)] {
        for (source, cached) in [
            ("computed, nothing reused or put", 0.0),
            ("computed and put", 0.0),
            ("from L2", cached),
            ("from L3", cached),
        ] {
            let figure = figure(&format!("first token of {length}, {source}"));
            assert_eq!(figure["seconds"].as_array().map(Vec::len), Some(2), "{figure}");
            assert_eq!(figure["cached"], cached, "{figure}");
        }
    }
    // Of four prompts. The store may lack pages at the first read of one, but not of each.
    let is_empty = |line: &&str| line.contains("from L2: ") && line.ends_with(" 0 cached");
    assert!(text(&output).lines().filter(is_empty).count() < 4, "nothing was put: {}", text(&output));
    for part in ["all", "first token"] {
        let computed = figure(&format!("2 clients × 2 turns of 40, nothing reused: {part}"));
        let stored = figure(&format!("2 clients × 2 turns of 40, store and L1: {part}"));
        assert_eq!(computed["cached"], 0.0);
        assert!(stored["cached"].as_f64() > Some(0.0) && stored["speedup"].is_f64(), "{stored}");
    }
}

#[test]
fn reuse_fails_if_an_answer_differs_from_the_computed_one() {
    let dir = data_dir();
    let (output, lines) = reuse(dir.path(), &["--damage"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let problems: Vec<&str> = lines.iter().filter_map(|line| line["problem"].as_str()).collect();
    let starts = ["64 tokens computed and put: ", "64 tokens from L2: ", "128 tokens from L3: ", "turn 1 of client 1 "];
    for start in starts {
        assert!(problems.iter().any(|problem| problem.starts_with(start)), "{start}: {}", text(&output));
    }
}

#[test]
fn reuse_tells_what_the_time_limit_left_out() {
    let dir = data_dir();
    let (output, lines) = reuse(dir.path(), &["--limit", "0"]);
    assert_eq!(output.status.code(), Some(1), "nothing was measured: {}", text(&output));
    let skipped: Vec<&str> = lines.iter().filter_map(|line| line["skipped"].as_str()).collect();
    assert!(skipped.iter().any(|text| text.starts_with("the rest: ")), "{}", text(&output));
    assert!(skipped.iter().any(|text| text.starts_with("first token of 128, from L3: ")), "{}", text(&output));
}
