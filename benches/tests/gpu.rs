//! The package of `cargo xtask gpu` in the emulator: every part agrees with its references and
//! reports rates.

use larder_tests::larder;
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_bench-gpu");
/// Beginnings of the figures that the emulator must report.
const FIGURES: [&str; 12] = [
    "copy inside the device",
    "f32 fma",
    "bf16 mma",
    "one copy, device to pinned",
    "one copy, pinned to device",
    "gather, device to pinned",
    "scatter, pinned to device",
    "CRC-32 of device memory",
    "storage to device by pinned",
    "decode attention",
    "prefill attention",
    "product,",
];

/// Figures of the served model that the emulator must report.
const SERVING: [&str; 10] = [
    "first token of 64, computed, nothing reused or put",
    "first token of 64, computed and put",
    "first token of 64, from L2",
    "first token of 64, from L3",
    "first token of 128, computed, nothing reused or put",
    "first token of 128, computed and put",
    "first token of 128, from L2",
    "first token of 128, from L3",
    "2 clients × 2 turns of 32, nothing reused: all",
    "2 clients × 2 turns of 32, store and L1: all",
];

fn text(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}\n{err}", output.status)
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the program writes the file");
    text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect()
}

#[test]
fn packed_script_measures_every_part_in_the_emulator() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/run");
    for (file, name) in [(Path::new(PROGRAM), "bench-gpu"), (larder(), "larder"), (script.as_path(), "run")] {
        symlink(file, folder.path().join(name)).expect("a link can be made");
    }
    let mut command = Command::new(folder.path().join("run"));
    // The machine may be busy. A part that runs out of time would be left out.
    command.args(["--device", "emulated", "--rounds", "1"]).env("LIMIT_S", "3600");
    let output = command.output().expect("bash runs the script");
    assert!(output.status.success(), "{}", text(&output));

    let lines = lines(&folder.path().join("results/figures.jsonl"));
    assert_eq!(lines.first().map(|head| head["kind"] == "emulated"), Some(true));
    assert_eq!(lines.last().map(|end| end["problems"] == 0), Some(true));
    let figures: Vec<&Value> = lines.iter().filter(|line| line["rate"].is_object()).collect();
    for figure in &figures {
        let median = figure["rate"]["median"].as_f64().unwrap_or(0.0);
        assert!(median > 0.0 && median.is_finite(), "{figure}");
        let ratio = figure["ratio"].as_f64().unwrap_or(0.0);
        assert!(figure["ceiling"].is_null() || ratio > 0.0, "{figure}");
    }
    for name in FIGURES {
        let is_reported = |figure: &&Value| figure["name"].as_str().is_some_and(|found| found.starts_with(name));
        assert!(figures.iter().any(is_reported), "no figure {name}: {}", text(&output));
    }
    let table = std::fs::read_to_string(folder.path().join("results/figures.md")).expect("the script writes the table");
    assert!(figures.iter().all(|figure| table.contains(figure["name"].as_str().unwrap_or("no name"))), "{table}");
    check_serving(folder.path(), &output);
}

/// Checks the figures of the served model. Each has a ceiling from the figures before.
fn check_serving(folder: &Path, output: &Output) {
    let lines = lines(&folder.join("results/serving.jsonl"));
    let end = lines.last().expect("the file has lines");
    assert_eq!((&end["problems"], &end["skipped"]), (&0.into(), &0.into()), "{}", text(output));
    let table = std::fs::read_to_string(folder.join("results/serving.md")).expect("the script writes the table");
    for name in SERVING {
        let figure = lines.iter().find(|line| line["name"] == name);
        let figure = figure.unwrap_or_else(|| panic!("no figure {name}: {}", text(output)));
        assert!(figure["ceiling"]["seconds"].as_f64() > Some(0.0) && figure["ratio"].is_f64(), "{figure}");
        assert!(table.contains(name), "{table}");
    }
}

#[test]
fn part_without_time_is_skipped_with_a_line() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/run");
    symlink(script, folder.path().join("run")).expect("a link can be made");
    let mut command = Command::new(folder.path().join("run"));
    command.args(["--device", "emulated"]).env("LIMIT_S", "20");
    let output = command.output().expect("bash runs the script");
    assert!(output.status.success(), "{}", text(&output));
    for part in ["kernels", "serving"] {
        assert!(text(&output).contains(&format!("SKIPPED: {part}: ")), "{}", text(&output));
    }
}

#[test]
fn result_that_differs_from_its_reference_fails_every_part() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let json = folder.path().join("figures.jsonl");
    let mut command = Command::new(PROGRAM);
    command.args(["--device", "emulated", "--rounds", "1", "--damage", "--json"]).arg(&json);
    let output = command.output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let lines = lines(&json);
    let problems: Vec<&str> = lines.iter().filter_map(|line| line["problem"].as_str()).collect();
    for part in ["Pages", "Crc", "Storage", "Attention", "Products"] {
        let has_failed = problems.iter().any(|problem| problem.starts_with(&format!("{part}: ")));
        assert!(has_failed, "{part}: {}", text(&output));
    }
    let figures = lines.iter().filter(|line| line["rate"].is_object()).count();
    assert_eq!(figures, 3, "only the ceilings: {}", text(&output));
}
