//! `larder-sim`: runs seeds of the simulation, or replays one.

use clap::Parser;
use larder_sim::faults::Profile;
use larder_sim::run::{Options, SeedReport, Subject, Summary, run_seed, run_seeds};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

/// What is simulated, and which faults happen.
#[derive(Debug, Clone, Copy, Default)]
struct Which {
    subject: Subject,
    faults: Option<Profile>,
}

impl FromStr for Which {
    type Err = String;

    fn from_str(text: &str) -> Result<Which, String> {
        let (first, rest) = text.split_once('-').unwrap_or((text, ""));
        let (subject, faults) = match first {
            "node" => (Subject::Node, rest),
            "wire" => (Subject::Wire, rest),
            _ => (Subject::L3, text),
        };
        let faults = if faults.is_empty() { None } else { Some(faults.parse()?) };
        Ok(Which { subject, faults })
    }
}

/// Deterministic simulation of Larder's storage core, of a whole node's storage, or of clients and nodes together.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Seeds to run
    #[arg(long, default_value_t = 256)]
    seeds: u64,
    /// Operations per seed
    #[arg(long, default_value_t = 20_000)]
    operations: u64,
    /// The first seed when several are run
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Replay this seed alone
    #[arg(long)]
    seed: Option<u64>,
    /// Run seeds for so many minutes instead (for nightly runs)
    #[arg(long)]
    minutes: Option<f64>,
    /// Which faults: calm, crash, errors, lies, memory, all, by the seed if not given; of a whole node: node, or
    /// node-calm and so on; of clients and nodes: wire, or wire-calm and so on
    #[arg(long, default_value = "")]
    profile: Which,
    /// Go on after a seed failed
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
        subject: args.profile.subject,
        profile: args.profile.faults,
        verbose: args.verbose,
        keep_going: args.keep_going,
        lying_syncs: false,
    };
    if args.verbose {
        tracing_subscriber::fmt().with_writer(std::io::stdout).with_ansi(false).without_time().init();
    }
    let failed = match args.seed {
        Some(seed) => replay(seed, &options, args.json),
        None => many(&args, &options),
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
            report.counts.iter().for_each(|(what, count)| println!("{count:>10}  {what}"));
            print_failure(&report);
        }
    }
    !report.violations.is_empty()
}

fn many(args: &Args, options: &Options) -> bool {
    let limit = args.minutes.map(|minutes| Duration::from_secs_f64(minutes.max(0.0) * 60.0));
    let seeds = if limit.is_some() { u64::MAX } else { args.seeds };
    let summary = run_seeds(args.first, seeds, limit, options);
    match args.json {
        true => println!("{}", serde_json::to_string(&summary).unwrap_or_default()),
        false => print_summary(&summary),
    }
    !summary.failed.is_empty()
}

fn print_summary(summary: &Summary) {
    summary.counts.iter().for_each(|(what, count)| println!("{count:>10}  {what}"));
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
    println!("replay: cargo run --release -p larder-sim -- {}", report.replay());
}
