//! Runs steps one after the other, with a heading and the time of each.

use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub name: &'static str,
    pub title: &'static str,
    pub run: fn(&Runner) -> Result<()>,
}

/// Runs programs in the workspace. Each prints its command line first, so that a developer can
/// repeat a failed step by hand.
#[derive(Debug)]
pub struct Runner {
    root: PathBuf,
    jobs: usize,
}

impl Runner {
    pub fn new(root: PathBuf, jobs: usize) -> Runner {
        Runner { root, jobs }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn tools(&self) -> PathBuf {
        self.root.join("target/ci")
    }

    /// Path of a tool that `.ci/run` installs, or its name if the tool is on the `PATH` only. Fails
    /// with a hint if it is in neither place.
    pub fn tool(&self, name: &str) -> Result<PathBuf> {
        let places = [self.tools().join("bin").join(name), self.tools().join("venv/bin").join(name)];
        if let Some(place) = places.into_iter().find(|place| place.exists()) {
            return Ok(place);
        }
        let on_path = std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).exists()));
        ensure!(on_path, "{name} is not installed. Run `.ci/run install`, or install it yourself");
        Ok(PathBuf::from(name))
    }

    /// Runs cargo and fails if it fails. Subcommands that compile get the number of jobs, so that a
    /// small machine does not run out of memory.
    pub fn cargo(&self, arguments: &[&str]) -> Result<()> {
        self.cargo_with(&[], arguments)
    }

    /// Runs cargo like [`Runner::cargo`], with variables in its environment.
    pub fn cargo_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Result<()> {
        execute(self.cargo_command(arguments).envs(variables.iter().copied()))
    }

    pub fn cargo_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&std::env::var_os("CARGO").map_or("cargo".into(), PathBuf::from));
        let split = arguments.iter().position(|argument| *argument == "--").unwrap_or(arguments.len());
        command.args(&arguments[..split]);
        if matches!(arguments.first(), Some(&("build" | "test" | "run" | "clippy"))) {
            command.arg(format!("-j{}", self.jobs));
        }
        command.args(&arguments[split..]);
        command
    }

    /// Cargo in the scheduling class `SCHED_IDLE`, as sched(7) describes it: it and its children
    /// compute while no other process of the machine does.
    pub fn idle_cargo_command(&self, arguments: &[&str]) -> Command {
        let cargo = self.cargo_command(arguments);
        let mut command = self.command("chrt".as_ref());
        command.args(["--idle", "0"]).arg(cargo.get_program()).args(cargo.get_args());
        command
    }

    /// Builds `larder` and returns its path. `--workspace` selects the features of
    /// `cargo test --workspace`: with others, cargo would compile most of the workspace once more.
    pub fn build_larder(&self) -> Result<PathBuf> {
        self.cargo(&["build", "--release", "--quiet", "--workspace", "--bin", "larder"])?;
        Ok(self.root.join("target/release/larder"))
    }

    pub fn program(&self, program: &str, arguments: &[&str]) -> Result<()> {
        execute(self.command(&self.root.join(program)).args(arguments))
    }

    /// Builds the wheel of larder-kv and runs its tests.
    pub fn python_tests(&self) -> Command {
        let mut command = self.command(&self.root.join("tools/python/check"));
        command.arg(self.tools());
        command
    }

    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root).env("JOBS", self.jobs.to_string()).env("CARGO_TERM_COLOR", "never");
        command
    }

    /// Runs `steps`, or those of them named in `only`. Stops at the first failure unless
    /// `keep_going`.
    pub fn run_steps(&self, steps: &[Step], only: &[String], keep_going: bool) -> Result<()> {
        for name in only {
            ensure!(steps.iter().any(|step| step.name == name), "there is no step `{name}`; --list shows all");
        }
        let mut times: Vec<(&str, Duration, bool)> = Vec::new();
        let mut failed = None;
        for step in steps.iter().filter(|step| only.is_empty() || only.iter().any(|name| name == step.name)) {
            println!("\n=== {}: {}", step.name, step.title);
            let start = Instant::now();
            let outcome = (step.run)(self);
            times.push((step.name, start.elapsed(), outcome.is_ok()));
            println!("=== {}: {:.0} s", step.name, start.elapsed().as_secs_f64());
            if let Err(error) = outcome {
                println!("=== {} failed: {error:#}", step.name);
                failed.get_or_insert(step.name);
                if !keep_going {
                    break;
                }
            }
        }
        println!();
        for (name, time, passed) in &times {
            println!("{:>6.0} s  {name}{}", time.as_secs_f64(), if *passed { "" } else { "  FAILED" });
        }
        println!("{:>6.0} s  in all", times.iter().map(|(_, time, _)| time.as_secs_f64()).sum::<f64>());
        match failed {
            None => Ok(()),
            Some(name) => bail!("step {name} failed; repeat it alone with --only {name}"),
        }
    }
}

pub fn execute(command: &mut Command) -> Result<()> {
    let text = format!("{command:?}").replace('"', "");
    println!("$ {text}");
    let status = command.status().with_context(|| format!("run {text}"))?;
    ensure!(status.success(), "{status}: {text}");
    Ok(())
}

/// Runs commands at the same time and fails if one fails. Shows the output of each as a whole,
/// after the last one has ended.
pub fn execute_together(commands: &mut [Command]) -> Result<()> {
    let texts: Vec<String> = commands.iter().map(|command| format!("{command:?}").replace('"', "")).collect();
    texts.iter().for_each(|text| println!("$ {text} &"));
    let ended: Vec<std::io::Result<Output>> = std::thread::scope(|scope| {
        let running: Vec<_> = commands.iter_mut().map(|command| scope.spawn(move || command.output())).collect();
        running.into_iter().map(|thread| thread.join().expect("waiting for a command does not panic")).collect()
    });
    let shown: Vec<Result<()>> = texts.iter().zip(ended).map(|(text, ended)| show(text, ended)).collect();
    let failed: Vec<String> = shown.into_iter().filter_map(|shown| Some(format!("{:#}", shown.err()?))).collect();
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

/// Runs a command, and another one in the background. Shows the output of the latter at its end,
/// and fails if one of them fails.
pub fn execute_beside(command: &mut Command, background: &mut Command) -> Result<()> {
    let text = format!("{background:?}").replace('"', "");
    println!("$ {text} &");
    std::thread::scope(|scope| {
        let running = scope.spawn(|| background.output());
        let result = execute(command);
        let ended = running.join().expect("waiting for a command does not panic");
        show(&text, ended).and(result)
    })
}

/// Shows the output of a command that has ended, and fails if it failed.
fn show(text: &str, ended: std::io::Result<Output>) -> Result<()> {
    let Output { status, stdout, stderr } = ended.with_context(|| format!("run {text}"))?;
    println!("$ {text}");
    print!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    ensure!(status.success(), "{status}: {text}");
    Ok(())
}

/// Runs a command whose failure is a result. Returns `true` if it succeeded, and its output, which
/// is shown as well.
pub fn capture(command: &mut Command) -> Result<(bool, String)> {
    let text = format!("{command:?}").replace('"', "");
    println!("$ {text}");
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("run {text}"))?;
    let mut output = String::new();
    for line in BufReader::new(child.stdout.take().context("no pipe")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        output.push_str(&line);
        output.push('\n');
    }
    Ok((child.wait()?.success(), output))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runner() -> Runner {
        Runner::new(PathBuf::from("/"), 1)
    }

    fn passes(_: &Runner) -> Result<()> {
        Ok(())
    }

    fn fails(_: &Runner) -> Result<()> {
        bail!("no")
    }

    fn unreachable(_: &Runner) -> Result<()> {
        panic!("this step must not run")
    }

    #[test]
    fn a_failed_step_ends_the_run() {
        let step = |name, run| Step { name, title: "", run };
        let steps = [step("a", passes as fn(&Runner) -> Result<()>), step("b", fails), step("c", unreachable)];
        let error = runner().run_steps(&steps, &[], false).expect_err("b fails");
        assert!(error.to_string().contains("--only b"));
        assert!(runner().run_steps(&steps, &["a".to_string()], false).is_ok());
        assert!(runner().run_steps(&steps, &["d".to_string()], false).is_err());
    }

    #[test]
    fn keep_going_runs_later_steps_and_still_fails() {
        let step = |name, run| Step { name, title: "", run };
        let steps = [step("a", fails as fn(&Runner) -> Result<()>), step("b", passes)];
        assert!(runner().run_steps(&steps, &[], true).is_err());
    }

    #[test]
    fn captured_command_returns_its_output_and_its_failure() {
        let (is_success, output) = capture(Command::new("sh").args(["-c", "echo a; echo b; exit 3"])).unwrap();
        assert_eq!((is_success, output.as_str()), (false, "a\nb\n"));
    }

    #[test]
    fn commands_run_at_the_same_time_and_fail_together() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        assert!(execute_together(&mut [shell("true"), shell("true")]).is_ok());
        let error = execute_together(&mut [shell("exit 3"), shell("true")]).expect_err("the first one fails");
        assert!(error.to_string().contains("exit 3"), "{error}");
        // Each waits until the other has begun.
        let dir = tempfile::tempdir().unwrap();
        let meet = |own: &str, other: &str| {
            let [own, other] = [own, other].map(|name| dir.path().join(name).display().to_string());
            let wait = format!("for _ in $(seq 600); do [ -e {other} ] && exit 0; sleep 0.1; done; exit 1");
            shell(&format!("touch {own}; {wait}"))
        };
        execute_together(&mut [meet("a", "b"), meet("b", "a")]).unwrap();
    }

    #[test]
    fn failure_in_the_background_is_one() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        assert!(execute_beside(&mut shell("true"), &mut shell("true")).is_ok());
        for (script, background) in [("true", "exit 3"), ("exit 3", "true")] {
            let error = execute_beside(&mut shell(script), &mut shell(background)).expect_err("one of them fails");
            assert!(error.to_string().contains("exit 3"), "{error}");
        }
    }

    #[test]
    fn missing_tools_are_named() {
        let error = runner().tool("no-such-tool-of-anyone").expect_err("there is no such tool");
        assert!(error.to_string().contains("no-such-tool-of-anyone is not installed"));
    }
}
