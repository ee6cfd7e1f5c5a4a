//! `larder bench …`: measurements that anybody can repeat.

pub mod crash;
pub mod overload;
pub mod serve;
pub mod trace;

use anyhow::Result;
use clap::Subcommand;

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Kill a store node under load, again and again, and check what it holds afterwards
    Crash(crash::Args),
    /// Ask a store node for ten times what it can do, and look at its memory, goodput and refusals
    Overload(overload::Args),
    /// Time to first token, tokens per second and hit rate of a running router, with and without the store
    Serve(serve::Args),
    /// Hit rates of eviction policies on a recorded trace, beside the offline optimum
    Trace(trace::Args),
}

/// Runs it.
pub async fn run(bench: Bench) -> Result<()> {
    match bench {
        Bench::Crash(args) => crash::run(args).await,
        Bench::Overload(args) => overload::run(args).await,
        Bench::Serve(args) => serve::run(args).await,
        Bench::Trace(args) => tokio::task::spawn_blocking(move || trace::run(&args)).await?,
    }
}
