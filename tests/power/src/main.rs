//! Power cuts under a real store node. `tests/power/run` starts this program as root of a virtual
//! machine with four empty disks.
//!
//! 1. A node runs on a file system on a device whose writes the kernel logs (`dm-log-writes`). A
//!    client puts, forgets and waits for durability, and notes in the log what was acknowledged.
//! 2. The log is replayed up to each flush: the state that a power cut leaves at least. A second
//!    case adds random sectors of the writes that were in flight.
//! 3. The file system is mounted, and a node starts on it. It must return no wrong page, no
//!    forgotten page, and every page that was acknowledged as durable.
//!
//! With `--lost-flushes 8` each cut lacks the writes of its last flushes, as on a device that
//! ignores them. Then the judgement must find lost and forgotten pages.

mod device;
mod node;
mod pages;
mod record;
mod replay;
mod workload;
mod write_log;

use anyhow::{Result, ensure};
use clap::Parser;
use device::{FileSystem, MappedDevice};
use replay::{Options, Replay};
use std::path::Path;
use std::time::Instant;
use workload::Workload;
use write_log::WriteLog;

#[derive(Debug, Parser)]
struct Args {
    /// File system below the node
    #[arg(long, value_enum, default_value = "ext4")]
    file_system: FileSystem,
    /// Steps of the workload
    #[arg(long, default_value_t = 60)]
    steps: u32,
    /// Replay every n-th flush only
    #[arg(long, default_value_t = 1)]
    every: usize,
    /// Random seed of the workload and of torn writes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Negative control: each power cut lacks the writes of this many flushes before it
    #[arg(long, default_value_t = 0)]
    lost_flushes: usize,
}

#[tokio::main]
async fn main() -> Result<()> {
    let Args { file_system, steps, every, seed, lost_flushes } = Args::parse();
    ensure!(every > 0, "--every must be at least 1");
    let mount_point = Path::new("/data");
    let began = Instant::now();

    let device = MappedDevice::logged()?;
    file_system.create(&device.path())?;
    let mount = file_system.mount(&device.path(), mount_point)?;
    let (record, counts) = Workload::new(&device, mount.directory(), seed).run(steps).await?;
    mount.unmount()?;
    device.remove()?;
    println!("{file_system}, seed {seed}: {steps} steps in {} s: {counts}", began.elapsed().as_secs());

    let cuts = replay::cuts(&mut WriteLog::open(Path::new(device::LOG))?, &record)?;
    let options = Options { file_system, every, lost_flushes, seed };
    let log = WriteLog::open(Path::new(device::LOG))?;
    Replay::new(options, log, &record, mount_point)?.run(&cuts).await?;
    println!(
        "{} s in all: {}",
        began.elapsed().as_secs(),
        if lost_flushes > 0 { "noticed, as it must" } else { "clean" }
    );
    Ok(())
}
