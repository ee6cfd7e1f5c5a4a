//! `bench-client`: the processes of `benches/peers/run` that are not Python: a client of a Larder node, and the limits that
//! all are measured against, a bare socket and a bare copy.
//!
//! A client reads one line of JSON for each measurement from its standard input, answers when it is ready, begins on the next
//! line, and answers with what it has seen (`drive`). The clients of other stores, in Python, speak the same.

mod bare;
mod drive;
mod larder;

use anyhow::Result;
use clap::{Parser, Subcommand};
use larder_client::StoreUrl;
use std::net::SocketAddr;

#[derive(Parser)]
#[command(name = "bench-client", about = "One process of benches/peers/run")]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// A client of a Larder node
    Larder {
        /// Where the node is, and how pages move
        #[arg(long)]
        url: StoreUrl,
        /// Which of the clients this is: each has pages of its own
        #[arg(long)]
        index: u32,
    },
    /// The far end of bare sockets; says where it listens
    BareServer,
    /// A bare socket
    Bare {
        /// Where the far end listens
        #[arg(long)]
        server: SocketAddr,
        /// Wait for the far end after each operation, as a client of a store must
        #[arg(long)]
        asked: bool,
    },
    /// One thread that copies
    Copy,
}

fn main() -> Result<()> {
    // One thread: what a client does beside waiting would otherwise be handed from core to core.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match Args::parse().role {
        Role::Larder { url, index } => runtime.block_on(drive::drive(larder::Larder::new(url, index))),
        Role::BareServer => bare::serve(),
        Role::Bare { server, asked } => runtime.block_on(drive::drive(bare::Bare::new(server, asked))),
        Role::Copy => runtime.block_on(drive::drive(bare::Copy::default())),
    }
}
