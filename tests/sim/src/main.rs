//! `larder-sim`: runs many seeds of the simulation, or replays one.

use clap::Parser;
use larder_sim::faults::Profile;
use larder_sim::forgiveness::excess;
use larder_sim::run::{Options, Scope, SeedReport, Summary, run_seed, run_seeds};
use larder_sim::world::FORGIVEN;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

/// The part of the system to simulate, and the fault profile. Parsed from `--profile`, such as
/// `node-crash`. Without a fault profile, the seed decides.
#[derive(Debug, Clone, Copy, Default)]
struct ProfileArg {
    scope: Scope,
    faults: Option<Profile>,
}

impl FromStr for ProfileArg {
    type Err = String;

    fn from_str(text: &str) -> Result<ProfileArg, String> {
        let (first, rest) = text.split_once('-').unwrap_or((text, ""));
        let (scope, faults) = match first {
            "node" => (Scope::Node, rest),
            "wire" => (Scope::Wire, rest),
            _ => (Scope::L3, text),
        };
        let faults = if faults.is_empty() { None } else { Some(faults.parse()?) };
        Ok(ProfileArg { scope, faults })
    }
}

/// Deterministic simulation of Larder: the log, a whole node, or clients and nodes together
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Number of seeds to run
    #[arg(long, default_value_t = 256)]
    seeds: u64,
    /// Operations per seed
    #[arg(long, default_value_t = 20_000)]
    operations: u64,
    /// First seed of the range
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Replay only this seed
    #[arg(long)]
    seed: Option<u64>,
    /// Start new seeds for this many minutes, instead of a fixed number (for nightly runs)
    #[arg(long)]
    minutes: Option<f64>,
    /// Fault profile: calm, crash, errors, corruption, memory or all; empty: chosen by the seed.
    /// The log is simulated alone unless a prefix says otherwise: node, node-calm and so on
    /// simulate a whole node; wire, wire-calm and so on simulate clients and nodes
    #[arg(long, default_value = "")]
    profile: ProfileArg,
    /// Simulate a log with 1.5 million keys and segments of 64 MiB, for nightly runs. Takes some
    /// gigabytes of memory per core
    #[arg(long)]
    large: bool,
    /// Continue after a seed has failed
    #[arg(long)]
    keep_going: bool,
    /// Print every event
    #[arg(long)]
    verbose: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let options = Options {
        operations: args.operations,
        scope: args.profile.scope,
        large: args.large,
        profile: args.profile.faults,
        verbose: args.verbose,
        keep_going: args.keep_going,
        ignore_syncs: false,
    };
    if args.verbose {
        tracing_subscriber::fmt().with_writer(std::io::stdout).with_ansi(false).without_time().init();
    }
    let failed = match args.seed {
        Some(seed) => replay(seed, &options, args.json),
        None => run_many(&args, &options),
    };
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn replay(seed: u64, options: &Options, json: bool) -> bool {
    let report = run_seed(seed, options);
    match json {
        true => println!("{}", serde_json::to_string(&report).unwrap_or_default()),
        false => {
            println!("seed {seed} ({}): hash {:016x}, {} events", report.profile, report.hash, report.events);
            println!("{} operations in {} virtual ms", report.operations, report.virtual_ms);
            report.counts.iter().for_each(|(counter, count)| println!("{count:>10}  {counter}"));
            print_failure(&report);
        }
    }
    !report.violations.is_empty()
}

fn run_many(args: &Args, options: &Options) -> bool {
    let limit = args.minutes.map(|minutes| Duration::from_secs_f64(minutes.max(0.0) * 60.0));
    let seeds = if limit.is_some() { u64::MAX } else { args.seeds };
    let summary = run_seeds(args.first, seeds, limit, options);
    match args.json {
        true => println!("{}", serde_json::to_string(&summary).unwrap_or_default()),
        false => print_summary(&summary),
    }
    let excess = excess(&summary, options);
    excess.iter().for_each(|excess| eprintln!("too many exemptions: {excess}"));
    !(summary.failed.is_empty() && excess.is_empty())
}

fn print_summary(summary: &Summary) {
    let checked = summary.counts.iter().filter(|(counter, _)| !counter.starts_with(FORGIVEN));
    checked.for_each(|(counter, count)| println!("{count:>10}  {counter}"));
    summary.forgiven().for_each(|(counter, count)| println!("{count:>10}  {counter}"));
    println!(
        "{} seeds, {} operations, {:.1} virtual hours in {:.1} s",
        summary.seeds, summary.operations, summary.virtual_hours, summary.seconds
    );
    summary.failed.iter().for_each(print_failure);
}

fn print_failure(report: &SeedReport) {
    if report.violations.is_empty() {
        return;
    }
    println!("seed {} ({}) FAILED; the last events:", report.seed, report.profile);
    report.tail.iter().for_each(|event| println!("  {event}"));
    report.violations.iter().for_each(|violation| println!("  {violation}"));
    println!("replay: cargo xtask sim {}", report.replay());
}
