//! The tests beside other work, again and again: a test that fails now and then judges time.
//!
//! A failure does not end the run, so that one run lists all such tests.

use crate::runner::{Runner, capture};
use anyhow::{Result, ensure};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Threads that compute beside the tests, so that each test gets less than half a processor of two.
const BUSY_LOOPS: usize = 3;
const BUSY_PASSES: usize = 10;
/// Tests of larder-sim that are left out beside busy loops: a simulation has its own clock, so
/// other work cannot change its result.
pub const SIMULATIONS: [&str; 3] = [
    "log_keeps_its_promises_over_five_million_operations",
    "node_keeps_its_promises_and_bounds",
    "clients_and_nodes_keep_their_promises_over_faulty_networks",
];

/// Runs the tests, those of Python included, on a machine that is busy with other work.
pub fn run(runner: &Runner) -> Result<()> {
    let all = ["test", "--release", "--workspace"];
    runner.cargo(&[&all, &["--no-run"][..]].concat())?;
    let skipped = SIMULATIONS.iter().flat_map(|test| ["--skip", test]);
    let arguments: Vec<&str> = all.into_iter().chain(["--quiet", "--no-fail-fast", "--"]).chain(skipped).collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..BUSY_LOOPS {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = passes(runner, &arguments);
        is_over.store(true, Ordering::Relaxed);
        result
    })
}

/// Runs all passes, whatever fails, and prints each result at once. Returns an error if any test
/// failed in any pass.
fn passes(runner: &Runner, cargo_test: &[&str]) -> Result<()> {
    let mut failures: BTreeMap<String, usize> = BTreeMap::new();
    for number in 1..=BUSY_PASSES {
        let mut pass = Pass::default();
        let (is_success, output) = capture(&mut runner.cargo_command(cargo_test))?;
        pass.add("cargo test", is_success, &output);
        let (is_success, output) = capture(&mut runner.python_tests())?;
        pass.add("tools/python/check", is_success, &output);
        println!("pass {number} of {BUSY_PASSES}: {pass}");
        for name in pass.failed {
            *failures.entry(name).or_default() += 1;
        }
    }
    println!("failures in {BUSY_PASSES} passes:");
    failures.iter().for_each(|(name, count)| println!("{count:>4}  {name}"));
    ensure!(failures.is_empty(), "{} tests failed beside other work", failures.len());
    Ok(())
}

/// Results of all tests, once.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pass {
    passed: usize,
    failed: Vec<String>,
}

impl Pass {
    /// Adds the results of one command. If it fails and names no failed test, it counts as one: a
    /// process was killed, or did not start.
    fn add(&mut self, command: &str, is_success: bool, output: &str) {
        let before = self.failed.len();
        // The last list before a result. Messages of tests may look like one.
        let mut names: Vec<String> = Vec::new();
        for line in output.lines() {
            match line.trim_end() {
                "failures:" => names.clear(),
                line if line.starts_with("    ") => names.push(line.trim().to_string()),
                line => {
                    match line {
                        line if line.starts_with("test result: FAILED") => self.failed.append(&mut names),
                        line if line.starts_with("running ") => names.clear(),
                        _ => {}
                    }
                    self.passed += number_before(line, " passed").unwrap_or(0);
                    // pytest: "FAILED path::test - message".
                    let failure = line.strip_prefix("FAILED ").or_else(|| line.strip_prefix("ERROR "));
                    let name = failure.and_then(|rest| rest.split(" - ").next()).filter(|name| name.contains("::"));
                    self.failed.extend(name.map(str::to_string));
                }
            }
        }
        if !is_success && self.failed.len() == before {
            self.failed.push(format!("{command}, without the name of a test"));
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed.len())?;
        self.failed.iter().try_for_each(|name| write!(f, "\n    {name}"))
    }
}

/// The number in front of `word` in a line such as "test result: ok. 12 passed; 0 failed".
fn number_before(line: &str, word: &str) -> Option<usize> {
    let is_result = line.starts_with("test result:") || line.contains(" in ");
    let (before, _) = line.split_once(word).filter(|_| is_result)?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::workspace_root;

    const CARGO: &str = "
running 3 tests
.F.
failures:

---- a::late stdout ----

thread 'a::late' panicked at src/a.rs:1:1:
failures:
    of something else

---- b stdout ----
no


failures:
    a::late
    b

test result: FAILED. 12 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

running 1 test
.
test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.00s
";
    const PYTEST: &str = "
....F                                                     [100%]
=================== FAILURES ===================
FAILED tools/python/tests/test_calls.py::test_hints[tcp] - assert 1 == 2
ERROR tools/python/tests/test_calls.py::test_warm - OSError
1 failed, 97 passed, 1 error in 30.01s
";

    #[test]
    fn failed_tests_of_cargo_and_pytest_are_named_and_passed_ones_counted() {
        let mut pass = Pass::default();
        pass.add("cargo test", false, CARGO);
        assert_eq!((pass.passed, pass.failed), (19, vec!["a::late".to_string(), "b".to_string()]));
        let mut pass = Pass::default();
        pass.add("pytest", false, PYTEST);
        let [hints, warm] = ["hints[tcp]", "warm"].map(|name| format!("tools/python/tests/test_calls.py::test_{name}"));
        assert_eq!(pass, Pass { passed: 97, failed: vec![hints, warm] });
        assert!(pass.to_string().starts_with("97 passed, 2 failed\n    tools/python"));
    }

    #[test]
    fn command_that_fails_without_a_failed_test_is_a_failure() {
        let mut pass = Pass::default();
        pass.add("cargo test", true, "test result: ok. 7 passed; 0 failed");
        pass.add("cargo test", false, "error: process didn't exit successfully (signal: 11)");
        assert_eq!(pass, Pass { passed: 7, failed: vec!["cargo test, without the name of a test".into()] });
    }

    #[test]
    fn tests_left_out_beside_busy_loops_exist() {
        let path = workspace_root().join("tests/sim/tests/simulation.rs");
        let source = std::fs::read_to_string(path).unwrap();
        for name in SIMULATIONS {
            assert!(source.contains(&format!("fn {name}()")), "{name}");
        }
    }
}
