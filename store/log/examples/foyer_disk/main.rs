//! Compares the log with foyer's disk tier, in one directory of one file system.
//!
//! ```text
//! cargo run --release -p larder-log --example foyer_disk \
//!     --config 'profile.release.package.foyer-storage.opt-level=3' \
//!     -- DIR speed|kill|memory [ROUNDS]
//! ```
//!
//! Larder compiles foyer's disk tier without optimisation, because nothing runs it. `--config`
//! changes that for this command.
//!
//! Both stores have blocks of 64 MiB and O_DIRECT, and a queue depth of 16 where they use io_uring.
//! They compute checksums of what they write, and verify what they read. The caller leaves at most
//! 32 MiB of values with foyer, so that foyer drops none.
//!
//! - `speed`: values fill the store, then others are written, and read at random. Each round is a
//!   process of its own: the thread of foyer's ring never sleeps.
//! - `kill`: SIGKILL at a writer that also forgets values. Then all values are read.
//! - `memory`: heap of a store that has recovered, per value of 4 KiB.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a measurement: it reads the time")]

#[path = "../../../evict/examples/heap/mod.rs"]
mod heap;
mod kill;
mod memory;
mod speed;
mod stores;

use std::path::PathBuf;
use stores::{Kind, Result};

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [dir, command, more @ ..] = words.as_slice() else { return Err("DIR speed|kill|memory".into()) };
    let dir = PathBuf::from(dir).join("foyer_disk");
    let rounds = || more.first().map_or(Ok(5), |rounds| rounds.parse());
    match *command {
        "speed" => speed::run(&dir, rounds()?),
        "round" => speed::print_round(&dir, more).await,
        "kill" => kill::run(&dir, rounds()?).await,
        "memory" => memory::run(&dir).await,
        "write-until-killed" => {
            let name = more.first().ok_or("the name of a store")?;
            kill::write_until_killed(Kind::named(name)?, &dir).await
        }
        other => Err(format!("unknown command {other}").into()),
    }
}
