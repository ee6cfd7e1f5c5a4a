//! A store node is killed under load, again and again, and looked at each time it comes back.
//!
//! Always true of the node, whatever the moment: a read is a miss or a version that was put; what was forgotten durably
//! does not return; what was acknowledged a second before is there; it starts.
//!
//! Rounds come in episodes. Each has a directory and pages of its own, and an L3 that is either tight, so that it wraps and
//! evicts all the time, or has room for everything, so that a page that is not there was lost.
//!
//! A kill takes the process and not the machine: what the kernel was given stays. Lost and torn writes of the device are
//! the simulation's part.

mod ledger;
mod load;
mod node;
mod pages;
mod tally;

use crate::output::say;
use crate::signals;
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use comfy_table::{Table, presets};
use ledger::Ledger;
use load::{Load, Shelf};
use node::{Process, Setup};
use pages::Kind;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tally::{Counts, Tally, one};

/// Settings of the crash loop.
#[derive(Debug, Parser)]
pub struct Args {
    /// Times the node is killed
    #[arg(long, default_value_t = 2000)]
    rounds: u64,
    /// Random seed of load and moments; a repeated seed repeats them as far as real time allows
    #[arg(long)]
    seed: Option<u64>,
    /// Where the nodes' directories are made; a real file system, as L3 wants direct I/O
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Rounds on one directory.
const EPISODE_ROUNDS: u64 = 8;
/// The pages of all kinds take some 60 MB.
const L3_TIGHT_BYTES: u64 = 24 << 20;
const L3_ROOMY_BYTES: u64 = 1 << 30;
/// Half of the log, so that nothing needs to be evicted whatever headers and the ends of segments take.
const ROOMY_PUT_BYTES: u64 = L3_ROOMY_BYTES / 2;
/// Most time a node works before it is killed.
const WORK_MAX: Duration = Duration::from_millis(400);
/// Work of the rounds that see whether what was acknowledged more than a second ago is there.
const LONG_WORK: [Duration; 2] = [Duration::from_millis(1100), Duration::from_millis(1600)];
/// Most time before a node is killed that is still starting.
const START_WORK_MAX: Duration = Duration::from_millis(120);
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

/// Runs the rounds. Fails if anything was seen that must not be.
pub async fn run(args: Args) -> Result<()> {
    let seed = args.seed.unwrap_or_else(rand::random);
    let tally = Arc::new(Tally::default());
    let dir = tempfile::Builder::new().prefix("larder-crash-").tempdir_in(&args.dir);
    let dir = dir.with_context(|| args.dir.display().to_string())?;
    let ended = tokio::select! {
        ended = rounds(&args, seed, dir.path(), &tally) => ended,
        stopped = signals::stop_requested() => stopped.map_err(Into::into).and_then(|()| bail!("stopped")),
    };
    let counts = tally.counts();
    print(&args, seed, &counts)?;
    let verdict = ended.and_then(|()| {
        let left = node::left_over(dir.path())?;
        ensure!(left.is_empty(), "processes were left over: {left:?}");
        counts.verdict().map_err(anyhow::Error::msg)
    });
    if verdict.is_err() {
        tally.violations().iter().for_each(|words| eprintln!("{words}"));
        eprintln!("seed {seed}; the last node's directory is kept: {}", dir.keep().display());
    }
    verdict
}

async fn rounds(args: &Args, seed: u64, dir: &Path, tally: &Arc<Tally>) -> Result<()> {
    let (mut done, mut said) = (0, Instant::now());
    for number in 0.. {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number));
        let mut episode = Episode::new(dir.join(format!("episode-{number}")), number % 2 == 1, rng.random(), tally);
        for _ in 0..EPISODE_ROUNDS.min(args.rounds - done) {
            episode.round(&mut rng).await?;
            done += 1;
            if !args.json && said.elapsed() > PROGRESS_EVERY {
                said = Instant::now();
                let counts = tally.counts();
                say!("{done} rounds, {} puts, {} hits, {} wrong", counts.puts, counts.hits, counts.wrong_bytes);
            }
        }
        episode.end().await?;
        if done == args.rounds {
            return Ok(());
        }
    }
    Ok(())
}

/// Some rounds on one directory.
struct Episode {
    setup: Setup,
    load: Arc<Load>,
    /// The last kill of a node that served.
    killed: Option<Instant>,
}

impl Episode {
    fn new(dir: PathBuf, roomy: bool, seed: u64, tally: &Arc<Tally>) -> Episode {
        let shelf = |kind: Kind| Shelf { ledger: Ledger::new(kind.keys), kind };
        let (l3_bytes, put_bytes) = if roomy { (L3_ROOMY_BYTES, ROOMY_PUT_BYTES) } else { (L3_TIGHT_BYTES, u64::MAX) };
        let load = Load {
            shelves: Kind::all(seed).into_iter().map(shelf).collect(),
            tally: tally.clone(),
            bytes_left: AtomicU64::new(put_bytes),
            roomy,
        };
        Episode { setup: Setup { dir, l3_bytes }, load: Arc::new(load), killed: None }
    }

    /// Start, look, work, kill.
    async fn round(&mut self, rng: &mut StdRng) -> Result<()> {
        let tally = self.load.tally.clone();
        if rng.random_bool(0.25) {
            let node = Process::start(&self.setup)?;
            tokio::time::sleep(rng.random_range(Duration::ZERO..START_WORK_MAX)).await;
            node.kill().await?;
            one(&tally.kills_at_start);
        }
        let work = match self.load.roomy && rng.random_bool(0.3) {
            true => rng.random_range(LONG_WORK[0]..LONG_WORK[1]),
            false => rng.random_range(Duration::ZERO..WORK_MAX),
        };
        let node = self.start_and_check(|node, load, clients| async move {
            let running = load::start(&load, &clients, rng.random());
            tokio::time::sleep(work).await;
            let killed = node.kill().await?;
            running.stop().await?;
            Ok(killed)
        });
        self.killed = Some(node.await?);
        one(&tally.kills);
        Ok(())
    }

    /// Looks once more at what the last kill left, and removes the directory.
    async fn end(self) -> Result<()> {
        self.start_and_check(|node, _, _| async move { node.kill().await }).await?;
        let dir = &self.setup.dir;
        std::fs::remove_dir_all(dir).with_context(|| dir.display().to_string())
    }

    /// Starts a node, checks every page, and goes on with `then`.
    async fn start_and_check<F>(
        &self,
        then: impl FnOnce(Process, Arc<Load>, Vec<larder_client::Client>) -> F,
    ) -> Result<Instant>
    where
        F: Future<Output = Result<Instant>>,
    {
        let mut node = Process::start(&self.setup)?;
        let (url, time) = node.ready().await?;
        self.load.tally.started(time);
        let clients = load::attach(&self.load, &url).await?;
        self.load.shelves.iter().for_each(|shelf| shelf.ledger.restarted());
        load::check_all(&self.load, &clients, self.killed).await;
        then(node, self.load.clone(), clients).await
    }
}

fn print(args: &Args, seed: u64, counts: &Counts) -> Result<()> {
    if args.json {
        let mut line = serde_json::to_value(counts)?;
        line["seed"] = seed.into();
        say!("{line}");
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(["what", "count"]);
    for (what, count) in [
        ("rounds (kills under load)", counts.kills),
        ("kills while starting", counts.kills_at_start),
        ("puts", counts.puts),
        ("… stored", counts.stored),
        ("… already there", counts.already_there),
        ("… refused: other bytes are there", counts.refused),
        ("… busy, or cut off by a kill", counts.puts_lost),
        ("megabytes put", counts.put_bytes / 1_000_000),
        ("pages asked for", counts.gets),
        ("… hits, every byte checked", counts.hits),
        ("pages forgotten durably", counts.forgotten),
        ("wrong bytes", counts.wrong_bytes),
        ("resurrected", counts.resurrected),
        ("otherwise impossible", counts.impossible),
        ("had to be there after a kill", counts.must_have),
        ("… lost", counts.lost),
        ("slowest start, ms", counts.slowest_start_ms),
    ] {
        table.add_row([what.to_string(), count.to_string()]);
    }
    say!("seed {seed}\n{table}");
    Ok(())
}
