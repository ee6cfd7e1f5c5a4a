//! The `larder` command: serve, run, administer, benchmark.
//!
//! `up` starts everything on this machine; `store`, `prefill`, `decode` and `router` start one process of a larger
//! installation; `status` and `prefix` talk to a router's admin address; `verify` reads the disk of a
//! stopped node; `bench` measures.
#![forbid(unsafe_code)]

mod admin;
mod bench;
mod bundled;
mod nodes;
mod output;
mod serve;
mod signals;
mod tiers;
mod up;
mod verify;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A distributed store for the KV cache of large language models, with compute attached
#[derive(Debug, Parser)]
#[command(name = "larder", version, propagate_version = true, max_term_width = 110)]
struct Cli {
    /// What to log, e.g. `info` or `larder_node=debug,warn`
    #[arg(long, env = "LARDER_LOG", global = true, hide_env_values = true)]
    log: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything on this machine: store, prefill and decode engines, router
    Up(up::Args),
    /// Run a store node
    Store(serve::StoreArgs),
    /// Run a prefill engine
    Prefill(serve::EngineArgs),
    /// Run a decode engine
    Decode(serve::EngineArgs),
    /// Run a router: the OpenAI API, and the admin API
    Router(serve::RouterArgs),
    /// Show nodes, engines and models
    Status(admin::StatusArgs),
    /// Inspect, warm, pin or forget the cached pages of a text
    #[command(subcommand)]
    Prefix(admin::Prefix),
    /// Look through the L3 of a stopped node: 0 clean or repaired, 1 damage found, 2 cannot be read
    Verify(verify::VerifyArgs),
    /// Measure
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_logging(&cli);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("larder: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(run(cli.command));
    // What is left is detached work without anything to save.
    runtime.shutdown_background();
    match ended {
        Ok(code) => code,
        Err(error) => {
            eprintln!("larder: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Servers say what they do; `up` and the tools only what goes wrong.
fn start_logging(cli: &Cli) {
    let default = match &cli.command {
        Command::Store(_) | Command::Prefill(_) | Command::Decode(_) | Command::Router(_) => "info",
        Command::Up(_) | Command::Status(_) | Command::Prefix(_) | Command::Verify(_) | Command::Bench(_) => "warn",
    };
    let filter = EnvFilter::new(cli.log.as_deref().unwrap_or(default));
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(ansi)
        .with_target(false)
        .init();
}

async fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Verify(args) => return Ok(verify::run(args).await),
        Command::Up(args) => up::run(args).await,
        Command::Store(args) => serve::store(args).await,
        Command::Prefill(args) => serve::engine(larder_worker::Role::Prefill, args).await,
        Command::Decode(args) => serve::engine(larder_worker::Role::Decode, args).await,
        Command::Router(args) => serve::router(args).await,
        Command::Status(args) => admin::status(args).await,
        Command::Prefix(args) => admin::prefix(args).await,
        Command::Bench(args) => bench::run(args).await,
    }?;
    Ok(ExitCode::SUCCESS)
}
