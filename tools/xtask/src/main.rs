//! Developer commands: `cargo xtask COMMAND`.
//!
//! `cargo xtask ci` runs what CI runs, in the same order. `.ci/run` installs the tools that the
//! steps need and calls it. CONTRIBUTING.md explains the commands.

mod busy;
mod comments;
mod dependencies;
mod generated;
mod gpu;
mod lexer;
mod markdown;
mod modules;
mod prose;
mod runner;
mod rust;
mod source;
mod steps;
mod structure;
mod tidy;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use runner::Runner;
use source::{read_tree, workspace_root};
use std::path::PathBuf;
use std::process::ExitCode;

/// Developer commands of Larder
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    /// Parallel jobs of each build [default: 2]
    #[arg(long, env = "JOBS", global = true, default_value_t = 2, hide_default_value = true)]
    jobs: usize,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every step of CI, in order
    Ci(Selection),
    /// Run everything that is too long for CI: hours of simulation, fuzzing, crash loops, peers
    Nightly(Selection),
    /// Check formatting, lints, dependencies, spelling and the rules of style
    Lint(Selection),
    /// Run the simulation; arguments go to larder-sim (`--seed N --verbose` replays a seed)
    Sim {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Fuzz every decoder, or the named targets
    Fuzz {
        /// Seconds for each target
        #[arg(default_value_t = 30)]
        seconds: u64,
        /// Targets; all if none is given
        targets: Vec<String>,
    },
    /// Run a program of benches/: pages, client, disk or gpu; arguments go to it
    Bench {
        /// Name without `bench-`
        #[arg(value_parser = ["pages", "client", "disk", "gpu"])]
        program: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Pack the measurements of a device into target/gpu, to copy to a machine with a GPU
    Gpu {
        /// Run the package here too: on `cuda`, `cuda:N` or `emulated`
        #[arg(long)]
        device: Option<String>,
        /// Arguments of bench-gpu, with --device only
        #[arg(last = true, requires = "device")]
        arguments: Vec<String>,
    },
    /// Measure Larder beside Redis, LMCache and Mooncake; arguments go to benches/peers/run
    Peers {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run clients of others on Larder; arguments go to tests/clients/NAME
    Attach {
        /// Name of the client
        #[arg(value_parser = steps::CLIENTS)]
        client: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Write the generated pages of docs/, or compare them with the code
    Docs {
        /// Fail if a page differs, and write nothing
        #[arg(long)]
        check: bool,
    },
    /// Measure the language of documents and comments
    Prose {
        /// Root of the tree to measure [default: this workspace]
        #[arg(long)]
        root: Option<PathBuf>,
        /// Fail if a target is missed, and list the worst places
        #[arg(long)]
        check: bool,
        /// List the places of one kind, worst first
        #[arg(long, value_name = "KIND", value_parser = clap::builder::PossibleValuesParser::new(prose::Report::KINDS))]
        list: Option<String>,
    },
    /// Check the mechanical rules of style
    Tidy {
        /// Print numbers of violations by rule, and no places
        #[arg(long)]
        counts: bool,
        /// Check one rule only
        #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(tidy::RULES))]
        rule: Option<String>,
        /// Check paths only that begin so
        #[arg(long, default_value = "")]
        path: String,
        /// Accept the present lengths of files and functions in exceptions.txt
        #[arg(long)]
        accept_lengths: bool,
    },
    /// Measure crates, arrows between them, and module cycles
    Structure {
        /// Root of the workspace to measure [default: this workspace]
        #[arg(long)]
        root: Option<PathBuf>,
    },
}

#[derive(Debug, clap::Args)]
struct Selection {
    /// Run the named steps only
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Go on after a step failed
    #[arg(long)]
    keep_going: bool,
    /// List the steps
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let runner = Runner::new(workspace_root(), cli.jobs);
    match cli.command {
        Command::Ci(selection) => run_steps(&runner, steps::CI, &selection),
        Command::Nightly(selection) => run_steps(&runner, steps::NIGHTLY, &selection),
        Command::Lint(selection) => run_steps(&runner, steps::LINT, &selection),
        Command::Sim { arguments } => steps::simulation(&runner, &arguments),
        Command::Fuzz { seconds, targets } => steps::fuzz(&runner, seconds, &targets),
        Command::Bench { program, arguments } => steps::bench(&runner, &program, &arguments),
        Command::Gpu { device, arguments } => gpu::run(&runner, device.as_deref(), &arguments),
        Command::Peers { arguments } => steps::peers(&runner, &arguments),
        Command::Attach { client, arguments } => steps::attach(&runner, &client, &arguments),
        Command::Docs { check } => generated::run(&runner, check),
        Command::Prose { root, check, list } => measure_prose(root, check, list.as_deref()),
        Command::Tidy { counts, rule, path, accept_lengths } => {
            if accept_lengths {
                return tidy::accept_lengths(runner.root(), &read_tree(runner.root())?);
            }
            check_tidy(counts, rule.as_deref(), &path)
        }
        Command::Structure { root } => structure::print(&root.unwrap_or_else(workspace_root)),
    }
}

fn run_steps(runner: &Runner, steps: &[runner::Step], selection: &Selection) -> Result<()> {
    if selection.list {
        steps.iter().for_each(|step| println!("{:<14} {}", step.name, step.title));
        return Ok(());
    }
    runner.run_steps(steps, &selection.only, selection.keep_going)
}

const WORST: usize = 10;

fn measure_prose(root: Option<PathBuf>, check: bool, list: Option<&str>) -> Result<()> {
    let report = prose::measure(&read_tree(&root.unwrap_or_else(workspace_root))?);
    if let Some(kind) = list {
        for offender in report.offenders().iter().filter(|offender| offender.kind == kind) {
            println!("{}:{}: {}", offender.path, offender.line, offender.detail);
        }
        return Ok(());
    }
    println!("{}", report.tables());
    let missed = report.missed();
    if !check || missed.is_empty() {
        return Ok(());
    }
    for (line, _) in &missed {
        println!("missed: {line}");
    }
    for kind in prose::Report::KINDS.iter().filter(|kind| missed.iter().any(|(_, missed)| missed == *kind)) {
        println!("\nworst {kind} (all: cargo xtask prose --list {kind}):");
        for offender in report.offenders().iter().filter(|offender| offender.kind == *kind).take(WORST) {
            println!("{}:{}: {}", offender.path, offender.line, offender.detail);
        }
    }
    anyhow::bail!("{} targets of prose are missed", missed.len())
}

fn check_tidy(counts: bool, rule: Option<&str>, path: &str) -> Result<()> {
    let root = workspace_root();
    let mut found = tidy::check(&root, &read_tree(&root)?)?;
    found.retain(|violation| rule.is_none_or(|rule| violation.rule == rule) && violation.path.starts_with(path));
    if !counts {
        found.iter().for_each(|violation| println!("{violation}"));
    }
    for (rule, count) in tidy::counts(&found) {
        println!("{count:>6}  {rule}");
    }
    ensure!(found.is_empty(), "{} violations of style", found.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_with_hyphens_go_to_the_simulation() {
        let cli = Cli::parse_from(["xtask", "sim", "--seed", "7", "--verbose"]);
        let Command::Sim { arguments } = cli.command else { panic!("not the simulation") };
        assert_eq!(arguments, ["--seed", "7", "--verbose"]);
    }
}
