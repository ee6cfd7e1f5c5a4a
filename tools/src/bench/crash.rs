//! Crash loop: kills a store node under load again and again, and verifies its pages after each
//! restart.
//!
//! Invariants checked after every restart:
//! - A read returns a miss or a version that was put.
//! - A page that was forgotten durably does not return.
//! - A put is not lost if it was acknowledged before the node reported that no write was in flight.
//! - The node starts, and ends its recovery, within 60 seconds.
//!
//! Rounds are grouped into episodes. An episode has its own directory and its own pages. Its L3 is
//! either tight, so that it wraps and evicts all the time, or roomy. A roomy L3 holds every page,
//! so a missing page was lost.
//!
//! SIGKILL ends the process but not the machine: data that reached the kernel survives. The
//! simulation covers lost and torn device writes.

mod counters;
mod node;
mod node_state;
mod oracle;
mod pages;
mod workload;

use crate::output::say;
use crate::signals::StopSignals;
use anyhow::{Context, Result, anyhow, ensure};
use clap::Parser;
use comfy_table::{Table, presets};
use counters::{Counters, CrashReport, increment};
use node::{NodeProcess, NodeSettings};
use oracle::Oracle;
use pages::PageKind;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use workload::{PageSet, Workload};

#[derive(Debug, Parser)]
pub struct Args {
    /// Number of kills
    #[arg(long, default_value_t = 2000, value_name = "KILLS")]
    rounds: u64,
    /// Random seed of the workload and of the moments of the kills. The same seed repeats a run as
    /// far as timing allows. Default: a new seed for each run
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Parent directory of the nodes' data directories. L3 uses direct I/O, so it should be on a
    /// real file system
    #[arg(long, default_value = "/var/tmp", value_name = "DIRECTORY")]
    dir: PathBuf,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

const EPISODE_ROUNDS: u64 = 8;
/// Limit of a tight L3. Well below the 60 MB that the pages of all kinds take, so the log wraps and
/// evicts all the time.
const L3_TIGHT_BYTES: u64 = 24 << 20;
const L3_ROOMY_BYTES: u64 = 1 << 30;
/// Half of the log. Headers and unused segment ends never fill the other half, so nothing is
/// evicted.
const ROOMY_PUT_BYTES: u64 = L3_ROOMY_BYTES / 2;
const WORK_MAX: Duration = Duration::from_millis(400);
const START_KILL_MAX: Duration = Duration::from_millis(120);
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

pub async fn run(args: Args) -> Result<()> {
    let seed = args.seed.unwrap_or_else(rand::random);
    let counters = Arc::new(Counters::default());
    let dir = tempfile::Builder::new().prefix("larder-crash-").tempdir_in(&args.dir);
    let dir = dir.with_context(|| args.dir.display().to_string())?;
    let ended = StopSignals::listen()?.unless_received(rounds(&args, seed, dir.path(), &counters)).await;
    let ended = ended.unwrap_or_else(|| Err(anyhow!("interrupted")));
    let report = counters.report();
    print(&args, seed, &report)?;
    let result = ended.and_then(|()| {
        let left = node::remaining_processes(dir.path())?;
        ensure!(left.is_empty(), "child processes still run: {left:?}");
        report.check().map_err(anyhow::Error::msg)
    });
    if result.is_err() {
        counters.violations().iter().for_each(|text| eprintln!("{text}"));
        eprintln!("seed {seed}; the data directories are kept in {}", dir.keep().display());
    }
    result
}

async fn rounds(args: &Args, seed: u64, dir: &Path, counters: &Arc<Counters>) -> Result<()> {
    let mut done = 0;
    let mut reported = Instant::now();
    for number in 0.. {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number));
        let mut episode = Episode::new(dir.join(format!("episode-{number}")), number % 2 == 1, rng.random(), counters);
        for _ in 0..EPISODE_ROUNDS.min(args.rounds - done) {
            episode.round(&mut rng).await?;
            done += 1;
            if !args.json && reported.elapsed() > PROGRESS_EVERY {
                reported = Instant::now();
                let report = counters.report();
                say!(
                    "{done} rounds, {} puts, {} hits, {} pages with wrong bytes",
                    report.puts,
                    report.hits,
                    report.wrong_bytes
                );
            }
        }
        episode.end().await?;
        if done == args.rounds {
            return Ok(());
        }
    }
    Ok(())
}

struct Episode {
    settings: NodeSettings,
    workload: Arc<Workload>,
    /// Time at which the last process had no write in flight. `None` if the round did not wait for
    /// that.
    flushed: Option<Instant>,
}

impl Episode {
    fn new(dir: PathBuf, roomy: bool, seed: u64, counters: &Arc<Counters>) -> Episode {
        let pages = |kind: PageKind| PageSet { oracle: Oracle::new(kind.keys), kind };
        let (l3_bytes, put_bytes) = if roomy { (L3_ROOMY_BYTES, ROOMY_PUT_BYTES) } else { (L3_TIGHT_BYTES, u64::MAX) };
        let workload = Workload {
            page_sets: PageKind::all(seed).into_iter().map(pages).collect(),
            counters: counters.clone(),
            bytes_left: AtomicU64::new(put_bytes),
            roomy,
        };
        Episode { settings: NodeSettings { dir, l3_bytes }, workload: Arc::new(workload), flushed: None }
    }

    /// Starts the node, verifies all pages, applies load, and kills it. The check covers the kills
    /// of the previous round and of this round's start.
    async fn round(&mut self, rng: &mut StdRng) -> Result<()> {
        let counters = self.workload.counters.clone();
        if rng.random_bool(0.25) {
            let node = NodeProcess::start(&self.settings)?;
            tokio::time::sleep(rng.random_range(Duration::ZERO..START_KILL_MAX)).await;
            node.kill().await?;
            increment(&counters.kills_at_start);
        }
        // Such a round proves durability. The others kill the node while it writes all pages.
        let flushes = self.workload.roomy && rng.random_bool(0.3);
        let [work, work_after] = [(); 2].map(|()| rng.random_range(Duration::ZERO..WORK_MAX));
        let ended = self.start_and_check(|node, workload, clients| async move {
            let tasks = workload::start(&workload, &clients, rng.random());
            tokio::time::sleep(work).await;
            let mut flushed = None;
            if flushes {
                tasks.pause_writers(true);
                flushed = Some(node_state::wait_until_flushed(&clients[0]).await?);
                tasks.pause_writers(false);
                tokio::time::sleep(work_after).await;
            }
            node.kill().await?;
            tasks.stop().await?;
            Ok(flushed)
        });
        self.flushed = ended.await?;
        increment(&counters.kills);
        Ok(())
    }

    async fn end(self) -> Result<()> {
        self.start_and_check(|node, _, _| async move { node.kill().await.map(|()| None) }).await?;
        let dir = &self.settings.dir;
        std::fs::remove_dir_all(dir).with_context(|| dir.display().to_string())
    }

    async fn start_and_check<F>(
        &self,
        then: impl FnOnce(NodeProcess, Arc<Workload>, Vec<larder_client::Client>) -> F,
    ) -> Result<Option<Instant>>
    where
        F: Future<Output = Result<Option<Instant>>>,
    {
        let mut node = NodeProcess::start(&self.settings)?;
        let (url, time) = node.ready().await?;
        self.workload.counters.started(time);
        let clients = workload::attach(&self.workload, &url).await?;
        self.workload.page_sets.iter().for_each(|pages| pages.oracle.restarted());
        workload::check_all(&self.workload, &clients, self.flushed).await?;
        then(node, self.workload.clone(), clients).await
    }
}

fn print(args: &Args, seed: u64, report: &CrashReport) -> Result<()> {
    if args.json {
        let mut line = serde_json::to_value(report)?;
        line["seed"] = seed.into();
        say!("{line}");
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(["event", "count"]);
    for (event, count) in [
        ("kills under load", report.kills),
        ("kills during start", report.kills_at_start),
        ("puts", report.puts),
        ("… stored", report.stored),
        ("… already there", report.already_there),
        ("… refused: page exists with other bytes", report.refused),
        ("… busy, or no answer because of a kill", report.puts_lost),
        ("MB put", report.put_bytes / 1_000_000),
        ("pages requested", report.gets),
        ("… returned, every byte checked", report.hits),
        ("pages deleted durably", report.forgotten),
        ("pages with wrong bytes", report.wrong_bytes),
        ("deleted pages that returned", report.resurrected),
        ("other impossible versions", report.impossible),
        ("pages that had to survive a kill", report.must_have),
        ("… lost", report.lost),
        ("slowest start, ms", report.slowest_start_ms),
    ] {
        table.add_row([event.to_string(), count.to_string()]);
    }
    say!("seed {seed}\n{table}");
    Ok(())
}
