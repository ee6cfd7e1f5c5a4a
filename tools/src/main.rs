//! The `larder` command.
//!
//! - `up` starts a complete installation in one process.
//! - `store`, `prefill`, `decode` and `router` start one process of a larger installation.
//! - `status` and `prefix` send requests to a router's admin API.
//! - `namespace` sends requests to the admin addresses of store nodes.
//! - `doctor` checks a running store from a client's machine.
//! - `verify` checks the L3 logs of stopped nodes.
//! - `bench` runs measurements.
//! - `docs` prints reference pages for docs/, and `template-worker` renders chat templates for a
//!   router, or tries out constraints for a router or an engine. Both are hidden from the help.
#![forbid(unsafe_code)]

mod admin;
mod bench;
mod bundled;
mod docs;
mod doctor;
mod errors;
mod http_args;
mod logging;
mod model_args;
mod namespace;
mod output;
mod prefix;
mod process;
mod serve;
mod signals;
mod sizes;
mod status;
mod table;
mod tiers;
mod time;
mod up;
mod verify;

use anyhow::Result;
use clap::{Parser, Subcommand};
use larder_model::template_worker;
use std::process::ExitCode;

/// A distributed KV cache store for large language models, with compute attached
#[derive(Debug, Parser)]
#[command(name = "larder", version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    /// Log filter, e.g. `info` or `larder_node=debug,warn`. Servers log at `info` by default, other
    /// commands at `warn`. Logs go to standard error
    #[arg(long, env = "LARDER_LOG", global = true, hide_env_values = true, value_name = "FILTER")]
    log: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a store, a prefill engine, a decode engine and a router in one process
    Up(up::Args),
    /// Run a store node
    Store(serve::StoreArgs),
    /// Run a prefill engine
    Prefill(serve::EngineArgs),
    /// Run a decode engine
    Decode(serve::EngineArgs),
    /// Run a router: OpenAI API and admin API
    Router(serve::RouterArgs),
    /// Show store nodes, engines and models
    Status(status::StatusArgs),
    /// Check a running store, and say what to change. Exit codes: 0 no failure, 1 failure
    Doctor(doctor::DoctorArgs),
    /// Inspect, warm, pin or forget the cached pages of a prompt
    #[command(subcommand)]
    Prefix(prefix::Prefix),
    /// List the namespaces of store nodes, retire them, and roll that back
    #[command(subcommand)]
    Namespace(namespace::Namespace),
    /// Verify the L3 logs of stopped nodes. Exit codes: 0 clean or repaired, 1 damage found, 2
    /// unreadable
    Verify(verify::VerifyArgs),
    /// Run a measurement
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Render chat templates or try out constraints for a router or an engine, which starts this
    /// command
    #[command(hide = true)]
    TemplateWorker,
    /// Print a generated reference page
    #[command(subcommand, hide = true)]
    Docs(docs::Docs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::TemplateWorker = cli.command {
        // Before any thread starts. Its memory limit has no room for their stacks, and its standard
        // error leads nowhere.
        return template_worker::run().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    start_logging(&cli);
    process::restrict_new_files();
    process::raise_descriptor_limit();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("larder: cannot start worker threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run(cli.command));
    // Only detached tasks are left. They hold no state that needs saving.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("larder: {}", output::escape_lines(&errors::describe(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Starts logging to standard error. Without `--log`, servers log at `info`, other commands at
/// `warn`.
fn start_logging(cli: &Cli) {
    let default = match &cli.command {
        Command::Store(_) | Command::Prefill(_) | Command::Decode(_) | Command::Router(_) => "info",
        // It reports each failure itself.
        Command::Doctor(_) => "error",
        _ => "warn",
    };
    logging::start(cli.log.as_deref().unwrap_or(default));
}

async fn run(command: Command) -> Result<ExitCode> {
    match command {
        // The exit code tells scripts more than success or failure.
        Command::Verify(args) => return Ok(verify::run(args).await),
        Command::Doctor(args) => return Ok(doctor::run(args).await),
        Command::Up(args) => up::run(args).await,
        Command::Store(args) => serve::store(args).await,
        Command::Prefill(args) => serve::engine(larder_worker::Role::Prefill, args).await,
        Command::Decode(args) => serve::engine(larder_worker::Role::Decode, args).await,
        Command::Router(args) => serve::router(args).await,
        Command::Status(args) => status::run(args).await,
        Command::Prefix(args) => prefix::run(args).await,
        Command::Namespace(args) => namespace::run(args).await,
        Command::Bench(args) => bench::run(args).await,
        Command::Docs(page) => {
            docs::print(&page);
            Ok(())
        }
        // `main` runs it without a runtime.
        Command::TemplateWorker => Ok(()),
    }?;
    Ok(ExitCode::SUCCESS)
}
