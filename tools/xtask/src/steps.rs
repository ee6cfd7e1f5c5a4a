//! The steps of CI and of the longer runs.

use crate::runner::{Runner, Step, execute, execute_beside, execute_together};
use crate::source::read_tree;
use crate::{busy, dependencies, generated, prose, tidy};
use anyhow::{Result, ensure};

/// Test of larder-sim that activates one fail point after the other. It needs the feature
/// `fail-points`, so it is built and run on its own.
const FAIL_POINT_TEST: &str = "fail_points";
/// CI searches for one in so many fail points, in the order of their list. The nightly run searches
/// for all.
const CI_FAIL_POINTS_EVERY: &str = "4";
/// Tests of a program that run at the same time. Most of them wait, for links of limited rate and
/// for deadlines, so more of them than cores.
const TEST_THREADS: &str = "6";
const CI_FUZZ_SECONDS: u64 = 10;
const NIGHTLY_FUZZ_SECONDS: u64 = 30 * 60;
const NIGHTLY_SIMULATION_MINUTES: &str = "60";
/// Schedules of each thread model and scheduler. CI runs the default of `store/node/src/model.rs`.
const NIGHTLY_SCHEDULES: &str = "100000";
/// No large seed starts after this time. One takes some minutes.
const NIGHTLY_LARGE_MINUTES: &str = "15";
/// Enough puts to reach every key of a large log.
const LARGE_OPERATIONS: &str = "4000000";

const FMT: Step = Step { name: "fmt", title: "cargo fmt", run: fmt };
const TIDY: Step = Step { name: "tidy", title: "rules of style", run: check_tidy };
const TYPOS: Step = Step { name: "typos", title: "spelling", run: typos };
const DENY: Step = Step { name: "deny", title: "licenses, sources and places of dependencies", run: deny };
const CLIPPY: Step = Step { name: "clippy", title: "cargo clippy, warnings denied", run: clippy };
const THREADS: Step =
    Step { name: "threads", title: "thread models of node and log, and their negative controls", run: threads };
const DEPLOY: Step = Step { name: "deploy", title: "systemd units and the settings that they run under", run: deploy };

/// Steps of CI. The sum must stay under 40 minutes on two busy cores: everything longer belongs to
/// [`NIGHTLY`]. Quick steps come first, so that a trifle fails in seconds.
pub const CI: &[Step] = &[
    FMT,
    TIDY,
    Step { name: "prose", title: "targets of language", run: check_prose },
    TYPOS,
    DENY,
    Step { name: "kernels", title: "NVRTC compiles every CUDA kernel, within its budget", run: kernels },
    Step { name: "test", title: "tests of the workspace, with doc examples", run: test },
    Step { name: "fail-points", title: "the simulation finds one in four fail points", run: ci_fail_points },
    THREADS,
    Step { name: "docs", title: "generated pages match the code", run: check_docs },
    Step { name: "smoke", title: "larder up, used with curl and the packages of its clients", run: smoke },
    Step { name: "python", title: "the wheel of larder-kv, and its tests against nodes", run: python },
    DEPLOY,
    Step { name: "machines", title: "RDMA, and power cuts at some flushes, in two virtual machines", run: machines },
    Step { name: "fuzz", title: "every decoder, fuzzed for seconds", run: ci_fuzz },
    CLIPPY,
];

pub const LINT: &[Step] = &[FMT, TIDY, TYPOS, DENY, CLIPPY];

/// Steps that are too long for CI, or need a network that CI does not have.
pub const NIGHTLY: &[Step] = &[
    Step { name: "advisories", title: "security advisories of dependencies", run: advisories },
    Step { name: "ignored", title: "tests that are marked #[ignore]", run: ignored },
    Step { name: "busy", title: "ten passes of the tests beside three busy loops", run: busy::run },
    Step { name: "fail-points", title: "the simulation finds every fail point", run: fail_points },
    Step { name: "threads", title: "many more schedules of the thread models", run: nightly_threads },
    Step { name: "tsan", title: "ThreadSanitizer over the tests of node and client", run: tsan },
    Step { name: "miri", title: "Miri over the unsafe code of memory and ring", run: miri },
    Step { name: "sim-log", title: "simulation of the log", run: simulate_log },
    Step { name: "sim-large", title: "simulation of a log with more than a million keys", run: simulate_large },
    Step { name: "sim-node", title: "simulation of a node", run: simulate_node },
    Step { name: "sim-wire", title: "simulation of clients and nodes", run: simulate_wire },
    Step { name: "crash", title: "a node under load, killed again and again", run: crash },
    Step { name: "power", title: "power cuts at every flush of a node's device", run: nightly_power },
    Step { name: "overload", title: "ten minutes of ten times the load", run: overload },
    Step { name: "hostile", title: "ten minutes of attacks on every port", run: hostile },
    DEPLOY,
    Step { name: "rdma", title: "RDMA between two soft-RoCE devices in a virtual machine", run: rdma },
    Step { name: "fuzz", title: "every decoder, fuzzed for half an hour", run: nightly_fuzz },
    Step { name: "peers", title: "Larder beside its peers", run: all_peers },
];

pub fn simulation(runner: &Runner, arguments: &[String]) -> Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    runner.cargo(&[&["run", "--release", "--quiet", "-p", "larder-sim", "--"], arguments.as_slice()].concat())
}

pub fn fuzz(runner: &Runner, seconds: u64, targets: &[String]) -> Result<()> {
    let seconds = seconds.to_string();
    let targets = targets.iter().map(String::as_str);
    runner.program("tests/fuzz/run", &std::iter::once(seconds.as_str()).chain(targets).collect::<Vec<_>>())
}

pub fn bench(runner: &Runner, program: &str, arguments: &[String]) -> Result<()> {
    let program = format!("bench-{program}");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let run = ["run", "--profile", "dist", "--quiet", "-p", "larder-benches", "--bin", &program, "--"];
    runner.cargo(&[&run, arguments.as_slice()].concat())
}

pub fn peers(runner: &Runner, arguments: &[String]) -> Result<()> {
    runner.program("benches/peers/run", &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Programs of `tests/clients` that [`attach`] runs.
pub const CLIENTS: [&str; 5] = ["sglang", "vllm", "lmcache", "mooncake", "redis"];

pub fn attach(runner: &Runner, client: &str, arguments: &[String]) -> Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    runner.program(&format!("tests/clients/{client}"), &arguments)
}

fn fmt(runner: &Runner) -> Result<()> {
    runner.cargo(&["fmt", "--all", "--check"])
}

fn check_tidy(runner: &Runner) -> Result<()> {
    let found = tidy::check(runner.root(), &read_tree(runner.root())?)?;
    found.iter().for_each(|violation| println!("{violation}"));
    ensure!(found.is_empty(), "{} violations: {:?}", found.len(), tidy::counts(&found));
    Ok(())
}

fn check_prose(runner: &Runner) -> Result<()> {
    let report = prose::measure(&read_tree(runner.root())?);
    println!("{}", report.tables());
    let missed = report.missed();
    missed.iter().for_each(|(line, _)| println!("missed: {line}"));
    ensure!(missed.is_empty(), "{} targets are missed. Fix: see `cargo xtask prose --check`", missed.len());
    Ok(())
}

fn typos(runner: &Runner) -> Result<()> {
    execute(runner.command(&runner.tool("typos")?).arg("--color=never"))
}

fn deny(runner: &Runner) -> Result<()> {
    dependencies::check(runner.root())?;
    let deny = runner.tool("cargo-deny")?;
    // CI has no network for the advisory database. The nightly run checks it.
    execute(runner.command(&deny).args(["check", "licenses", "bans", "sources"]))
}

fn advisories(runner: &Runner) -> Result<()> {
    execute(runner.command(&runner.tool("cargo-deny")?).args(["check", "advisories"]))
}

fn clippy(runner: &Runner) -> Result<()> {
    runner.cargo(&["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    // `--all-targets` leaves out the tests that run in the virtual machine only.
    // `--workspace` selects the features of the check before, which then checked all dependencies.
    let in_vm = ["--workspace", "--test", "soft_roce", "--test", "rdma"];
    runner.cargo(&[&["clippy", "--release"], in_vm.as_slice(), &["--", "-D", "warnings"]].concat())?;
    let models = ["-p", "larder-node", "--lib", "--tests", "--features", "shuttle"];
    runner.cargo(&[&["clippy", "--release"], models.as_slice(), &["--", "-D", "warnings"]].concat())
}

/// Tests that compute for minutes and take no account of time. CI runs them in the time that other
/// tests wait.
const COMPUTING: [&str; 4] = [
    "hit_density_is_never_below_lru_nor_above_the_optimum",
    busy::SIMULATIONS[0],
    busy::SIMULATIONS[1],
    busy::SIMULATIONS[2],
];
/// Programs with the tests of [`COMPUTING`].
const COMPUTING_PROGRAMS: [&str; 2] = ["rates", "simulation"];

/// Without `--tests`, cargo would also link every example. Clippy checks that these compile.
fn test(runner: &Runner) -> Result<()> {
    let all = ["test", "--release", "--workspace"];
    runner.cargo(&[&all, &["--tests", "--no-run"][..]].concat())?;
    let skipped = COMPUTING.iter().flat_map(|test| ["--skip", test]);
    let others: Vec<&str> = all.into_iter().chain(["--tests", "--"]).chain(skipped).collect();
    let programs = COMPUTING_PROGRAMS.iter().flat_map(|program| ["--test", program]);
    let computing: Vec<&str> = all.into_iter().chain(programs).chain(["--"]).chain(COMPUTING).collect();
    let mut others = runner.cargo_command(&others);
    others.env("RUST_TEST_THREADS", TEST_THREADS);
    execute_beside(&mut others, &mut runner.idle_cargo_command(&computing))?;
    runner.cargo(&[&all, &["--doc"][..]].concat())
}

fn ignored(runner: &Runner) -> Result<()> {
    runner.cargo(&["test", "--release", "--workspace", "--", "--ignored"])
}

fn fail_points(runner: &Runner) -> Result<()> {
    runner.cargo(FAIL_POINTS)
}

fn ci_fail_points(runner: &Runner) -> Result<()> {
    runner.cargo_with(&[("LARDER_FAIL_POINT_EVERY", CI_FAIL_POINTS_EVERY)], FAIL_POINTS)
}

/// Arguments that run the search for fail points. `--workspace` selects the dependencies of `cargo
/// test --workspace`, which are compiled already. Node and simulation wait for each other, so each
/// is divided among the processors.
const FAIL_POINTS: &[&str] = &[
    "test",
    "--release",
    "--workspace",
    "--features",
    "larder-sim/fail-points",
    "--test",
    FAIL_POINT_TEST,
    "--config",
    "profile.release.package.larder-node.codegen-units=4",
    "--config",
    "profile.release.package.larder-sim.codegen-units=4",
];

/// Arguments that select the thread models. With the feature, other tests of the crate cannot run,
/// but they are compiled. The models take less time than their optimisation would.
const THREAD_MODELS: &[&str] = &[
    "test",
    "--release",
    "-p",
    "larder-node",
    "--lib",
    "--features",
    "shuttle",
    "--config",
    "profile.release.package.larder-node.opt-level=1",
    "--config",
    "profile.release.package.larder-node.codegen-units=16",
    "--",
    "threads",
];

fn threads(runner: &Runner) -> Result<()> {
    runner.cargo(THREAD_MODELS)
}

fn nightly_threads(runner: &Runner) -> Result<()> {
    // Other schedules each night. A failure prints its own.
    let seed = std::time::UNIX_EPOCH.elapsed()?.as_secs().to_string();
    runner.cargo_with(&[("LARDER_MODEL_SCHEDULES", NIGHTLY_SCHEDULES), ("LARDER_MODEL_SEED", &seed)], THREAD_MODELS)
}

fn tsan(runner: &Runner) -> Result<()> {
    runner.program("tests/threads/tsan", &[])
}

fn miri(runner: &Runner) -> Result<()> {
    runner.program("tests/threads/miri", &[])
}

fn check_docs(runner: &Runner) -> Result<()> {
    generated::run(runner, true)
}

fn smoke(runner: &Runner) -> Result<()> {
    // It takes a minute. A process that does not end on request would keep CI waiting.
    let limited = ["--verbose", "--kill-after=10", "15m", "bash", "tests/smoke.sh"];
    execute(runner.command("timeout".as_ref()).args(limited).arg(runner.tools()))
}

fn python(runner: &Runner) -> Result<()> {
    execute(&mut runner.python_tests())
}

fn kernels(runner: &Runner) -> Result<()> {
    execute(runner.command(&runner.root().join("kernels/check")).arg(runner.tools()))
}

fn deploy(runner: &Runner) -> Result<()> {
    let larder = runner.build_larder()?;
    execute(runner.command(&runner.root().join("tests/deploy/run")).env("LARDER", larder))
}

fn rdma(runner: &Runner) -> Result<()> {
    runner.program("tests/rdma/run", &[])
}

/// RDMA, and power cuts in a short workload at every twelfth flush. Both guests often wait: for
/// deadlines, and for their disks.
fn machines(runner: &Runner) -> Result<()> {
    let rdma = runner.command(&runner.root().join("tests/rdma/run"));
    let mut power = runner.command(&runner.root().join("tests/power/run"));
    power.args(["--steps", "30", "--every", "12"]);
    execute_together(&mut [rdma, power])
}

/// Cuts the power on two file systems. The control loses flushes, and must find lost pages.
fn nightly_power(runner: &Runner) -> Result<()> {
    runner.program("tests/power/run", &["--file-system", "ext4"])?;
    runner.program("tests/power/run", &["--file-system", "xfs"])?;
    runner.program("tests/power/run", &["--lost-flushes", "8", "--every", "4"])
}

fn ci_fuzz(runner: &Runner) -> Result<()> {
    fuzz(runner, CI_FUZZ_SECONDS, &[])
}

fn nightly_fuzz(runner: &Runner) -> Result<()> {
    fuzz(runner, NIGHTLY_FUZZ_SECONDS, &[])
}

fn simulate(runner: &Runner, profile: &str) -> Result<()> {
    let arguments = ["--minutes", NIGHTLY_SIMULATION_MINUTES, "--keep-going", "--profile", profile];
    simulation(runner, &arguments.map(str::to_string))
}

fn simulate_log(runner: &Runner) -> Result<()> {
    simulate(runner, "")
}

fn simulate_large(runner: &Runner) -> Result<()> {
    let arguments = ["--large", "--operations", LARGE_OPERATIONS, "--minutes", NIGHTLY_LARGE_MINUTES, "--keep-going"];
    simulation(runner, &arguments.map(str::to_string))
}

fn simulate_node(runner: &Runner) -> Result<()> {
    simulate(runner, "node")
}

fn simulate_wire(runner: &Runner) -> Result<()> {
    simulate(runner, "wire")
}

fn larder(runner: &Runner, arguments: &[&str]) -> Result<()> {
    let larder = runner.build_larder()?;
    execute(runner.command(&larder).args(arguments))
}

fn crash(runner: &Runner) -> Result<()> {
    larder(runner, &["bench", "crash", "--rounds", "2000"])
}

fn overload(runner: &Runner) -> Result<()> {
    larder(runner, &["bench", "overload", "--minutes", "10"])
}

fn hostile(runner: &Runner) -> Result<()> {
    larder(runner, &["bench", "hostile", "--minutes", "10"])
}

fn all_peers(runner: &Runner) -> Result<()> {
    peers(runner, &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::workspace_root;
    use std::collections::BTreeSet;

    #[test]
    fn step_names_are_unique() {
        for steps in [CI, LINT, NIGHTLY] {
            let names: BTreeSet<_> = steps.iter().map(|step| step.name).collect();
            assert_eq!(names.len(), steps.len());
        }
    }

    #[test]
    fn lint_is_part_of_ci() {
        assert!(LINT.iter().all(|step| CI.iter().any(|ci| ci.name == step.name)));
    }

    /// A name that matches no test would select none, and the step would pass.
    #[test]
    fn computing_tests_exist() {
        let files = ["store/evict/tests/rates.rs", "tests/sim/tests/simulation.rs"];
        let sources = files.map(|file| std::fs::read_to_string(workspace_root().join(file)).unwrap()).concat();
        for name in COMPUTING {
            assert!(sources.contains(&format!("fn {name}()")), "{name}");
        }
        for (file, program) in files.into_iter().zip(COMPUTING_PROGRAMS) {
            assert!(file.ends_with(&format!("/{program}.rs")), "{file}");
        }
    }

    #[test]
    fn scripts_and_tests_of_the_steps_exist() {
        let test = format!("tests/sim/tests/{FAIL_POINT_TEST}.rs");
        let scripts = [
            "tests/smoke.sh",
            "tools/python/check",
            "kernels/check",
            "tests/deploy/run",
            "tests/rdma/run",
            "tests/power/run",
            "tests/fuzz/run",
            "tests/threads/tsan",
            "tests/threads/miri",
            "benches/peers/run",
            "benches/gpu/run",
        ];
        let clients = CLIENTS.map(|client| format!("tests/clients/{client}"));
        let paths = scripts.into_iter().chain([test.as_str()]).chain(clients.iter().map(String::as_str));
        for path in paths {
            assert!(workspace_root().join(path).exists(), "{path}");
        }
    }
}
