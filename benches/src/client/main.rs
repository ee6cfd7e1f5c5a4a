//! `bench-client`: client processes of `benches/peers/run`.
//!
//! A process is a client of a Larder node, or one of the baselines: a bare TCP stream or a copy in
//! memory. It takes measurements from standard input as lines of JSON (see `drive`). The Python
//! clients of the other stores speak the same protocol.
//!
//! `run --bench-client` starts programs of other builds. Subcommands and options must stay
//! compatible for such comparisons.

mod bare;
mod drive;
mod larder;

use anyhow::Result;
use clap::{Parser, Subcommand};
use larder_client::StoreUrl;
use std::net::SocketAddr;

#[derive(Parser)]
#[command(name = "bench-client", about = "Client processes of benches/peers/run")]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Run a client of a Larder node
    Larder {
        /// Address and transport of the node
        #[arg(long)]
        url: StoreUrl,
        /// Number of this client; clients with different numbers use different keys
        #[arg(long)]
        index: u32,
    },
    /// Serve bare TCP streams and print the address
    BareServer,
    /// Run a client of a bare TCP stream
    Bare {
        /// Address that `bare-server` printed
        #[arg(long)]
        server: SocketAddr,
        /// Request or await each batch in a round trip, as a client of a store must
        #[arg(long)]
        round_trip: bool,
    },
    /// Copy pages in memory with one thread
    Copy,
}

fn main() -> Result<()> {
    // A multi-threaded runtime would move the work of this one client between cores.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match Args::parse().role {
        Role::Larder { url, index } => runtime.block_on(drive::drive(larder::Larder::new(url, index))),
        Role::BareServer => bare::serve(),
        Role::Bare { server, round_trip } => runtime.block_on(drive::drive(bare::Bare::new(server, round_trip))),
        Role::Copy => runtime.block_on(drive::drive(bare::Memcpy::default())),
    }
}
