//! `larder bench …`: reproducible measurements.

pub mod crash;
mod events;
pub mod hostile;
pub mod isolation;
pub mod overload;
pub mod random_model;
pub mod replay;
pub mod reuse;
pub mod serve;
pub mod trace;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Kill a store node under load again and again, and verify its pages after each restart
    Crash(crash::Args),
    /// Offer a store node ten times its capacity, and check memory, goodput and refusal latency
    Overload(overload::Args),
    /// Attack every port of a store, engines and a router at once, and check honest requests,
    /// memory and leaks
    Hostile(hostile::Args),
    /// Measure the latency of one client beside writers, and the cost of a hit beside idle tenants
    Isolation(isolation::Args),
    /// Write a model folder with the sizes of a published model and random weights
    RandomModel(random_model::Args),
    /// Replay a recorded trace at a real node over TCP, and compare its hit rate with the
    /// simulator's. Exit codes: 0 within two points, 1 further apart
    Replay(replay::Args),
    /// Measure what the store saves: time to first token of computed prompts and of hits in L2 and
    /// L3, and conversations with and without the store. Starts `larder up` itself
    Reuse(reuse::Args),
    /// Measure time to first token, tokens per second and hit rate of a running router, with and
    /// without the store
    Serve(serve::Args),
    /// Compare the hit rates of eviction policies on a recorded trace with the offline optimum
    Trace(trace::Args),
}

pub async fn run(bench: Bench) -> Result<()> {
    match bench {
        Bench::Crash(args) => crash::run(args).await,
        Bench::Hostile(args) => hostile::run(args).await,
        Bench::Isolation(args) => isolation::run(args).await,
        Bench::Overload(args) => overload::run(args).await,
        Bench::RandomModel(args) => tokio::task::spawn_blocking(move || random_model::run(&args)).await?,
        Bench::Replay(args) => replay::run(args).await,
        Bench::Reuse(args) => reuse::run(args).await,
        Bench::Serve(args) => serve::run(args).await,
        // The replay computes for minutes without waiting for anything.
        Bench::Trace(args) => tokio::task::spawn_blocking(move || trace::run(&args)).await?,
    }
}
