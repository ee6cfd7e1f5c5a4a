//! Speed, processor time and write amplification.

use super::stores::{Kind, Result, Store};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::task::JoinSet;

const CAPACITY: usize = 1 << 30;
/// Bytes of values that a measurement writes, and reads.
const BYTES: usize = 256 << 20;
const CALLERS: usize = 16;
const SIZES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
/// Part of the capacity, newest first, that reads choose from.
const READ_NEWEST: f64 = 0.5;

/// Figures of one direction in one round.
#[derive(Debug, Clone, Copy)]
struct Figures {
    /// In 1e9 bytes per second.
    speed: f64,
    /// In seconds per 1e9 bytes.
    cpu: f64,
    /// Bytes written to the device per byte of values.
    amplification: f64,
    misses: u64,
}

struct Meter {
    began: Instant,
    cpu: f64,
    written: f64,
}

impl Meter {
    fn start() -> Result<Meter> {
        Ok(Meter { cpu: cpu_seconds()?, written: written_bytes()?, began: Instant::now() })
    }

    fn stop(self, bytes: usize, misses: u64) -> Result<Figures> {
        let seconds = self.began.elapsed().as_secs_f64();
        let (bytes, written) = (bytes as f64, written_bytes()? - self.written);
        let cpu = (cpu_seconds()? - self.cpu) / bytes * 1e9;
        Ok(Figures { speed: bytes / 1e9 / seconds, cpu, amplification: written / bytes, misses })
    }
}

/// Processor time of the process, in seconds. The kernel counts hundredths.
fn cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The name of the program, in brackets, may contain blanks.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / 100.0)
}

fn written_bytes() -> Result<f64> {
    let io = std::fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    Ok(line.ok_or("/proc/self/io has no write_bytes")?.parse()?)
}

/// Runs `count` operations by [`CALLERS`] callers. Returns the number of misses.
async fn run_all(store: &Store, numbers: Arc<Vec<u64>>, size: usize, writes: bool) -> Result<u64> {
    let next = Arc::new(AtomicU64::new(0));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (store, numbers, next) = (store.clone(), numbers.clone(), next.clone());
        callers.spawn(async move {
            let mut misses = 0;
            while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                if writes {
                    store.write(number, size).await?;
                    continue;
                }
                match store.read(number, size).await? {
                    Some(is_right) => assert!(is_right, "wrong bytes"),
                    None => misses += 1,
                }
            }
            Ok::<u64, Box<dyn std::error::Error + Send + Sync>>(misses)
        });
    }
    let mut misses = 0;
    while let Some(caller) = callers.join_next().await {
        misses += caller??;
    }
    store.settle().await;
    Ok(misses)
}

async fn round(kind: Kind, dir: &Path, size: usize, seed: u64) -> Result<[Figures; 2]> {
    let _ = std::fs::remove_dir_all(dir);
    let store = Store::open(kind, dir, CAPACITY).await?;
    let (filled, count) = ((CAPACITY / size) as u64, (BYTES / size) as u64);
    run_all(&store, Arc::new((0..filled).collect()), size, true).await?;
    let meter = Meter::start()?;
    run_all(&store, Arc::new((filled..filled + count).collect()), size, true).await?;
    let written = meter.stop(BYTES, 0)?;
    let newest = (filled as f64 * READ_NEWEST) as u64;
    let mut state = seed | 1;
    let random = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        filled + count - 1 - state % newest
    });
    let numbers = Arc::new(random.take(count as usize).collect());
    let meter = Meter::start()?;
    let misses = run_all(&store, numbers, size, false).await?;
    let read = meter.stop(BYTES, misses)?;
    store.close().await?;
    Ok([written, read])
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs one round, and prints its figures for [`round_apart`].
pub async fn print_round(dir: &Path, arguments: &[&str]) -> Result<()> {
    let [name, size, seed] = arguments else { return Err("NAME SIZE SEED".into()) };
    let figures = round(Kind::named(name)?, dir, size.parse()?, seed.parse()?).await?;
    for Figures { speed, cpu, amplification, misses } in figures {
        println!("{speed} {cpu} {amplification} {misses}");
    }
    Ok(())
}

fn parse(line: &str) -> Result<Figures> {
    let [speed, cpu, amplification, misses] = line.split(' ').collect::<Vec<_>>()[..] else {
        return Err("a round printed no figures".into());
    };
    let (amplification, misses) = (amplification.parse()?, misses.parse()?);
    Ok(Figures { speed: speed.parse()?, cpu: cpu.parse()?, amplification, misses })
}

/// Runs one round in a process of its own.
fn round_apart(kind: Kind, dir: &Path, size: usize, seed: u64) -> Result<[Figures; 2]> {
    let mut command = Command::new(std::env::current_exe()?);
    let parent = dir.parent().ok_or("the folder has no parent")?;
    command.arg(parent).args(["round", kind.name(), &size.to_string(), &seed.to_string()]);
    let printed = String::from_utf8(command.output()?.stdout)?;
    let lines: Vec<Figures> = printed.lines().map(parse).collect::<Result<_>>()?;
    lines.try_into().map_err(|_| "a round failed".into())
}

pub fn run(dir: &Path, rounds: usize) -> Result<()> {
    for size in SIZES {
        let kinds = [Kind::Log, Kind::Foyer, Kind::FoyerUring];
        let mut found = kinds.map(|_| Vec::new());
        for turn in 0..rounds {
            for at in 0..kinds.len() {
                // Another store is first in each round.
                let at = (at + turn) % kinds.len();
                found[at].push(round_apart(kinds[at], dir, size, turn as u64 + 7)?);
            }
        }
        for (kind, rounds) in kinds.iter().zip(&found) {
            for (direction, name) in ["write", "read"].into_iter().enumerate() {
                let of = |figure: fn(&Figures) -> f64| median(rounds.iter().map(|round| figure(&round[direction])));
                println!(
                    "{:>5} KiB {:<11} {name:<5} {:.2} GB/s  {:.3} CPU-s/GB  written {:.3}  misses {}",
                    size >> 10,
                    kind.name(),
                    of(|figures| figures.speed),
                    of(|figures| figures.cpu),
                    of(|figures| figures.amplification),
                    rounds.iter().map(|round| round[direction].misses).sum::<u64>(),
                );
            }
        }
    }
    let _ = std::fs::remove_dir_all(dir);
    Ok(())
}
