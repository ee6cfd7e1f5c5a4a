//! `bench-gpu`: kernels and transfers of a device, each beside a ceiling of the same run.
//!
//! - Before each figure, the program compares the same code on a small shape with the CPU. A
//!   difference fails the run.
//! - A figure is the median of the rounds.
//! - A ceiling is measured too: a copy inside the device, one large copy over the bus, arithmetic
//!   from registers, or the same reads into memory of the host.
//!
//! The emulated device runs everything with `--sizes tiny` in seconds. Its rates mean nothing.

mod attention;
mod bench;
mod ceilings;
mod check;
mod kernels;
mod pages;
mod products;
mod report;
mod sizes;
mod storage;

use anyhow::{Context, Result, bail, ensure};
use bench::Bench;
use ceilings::Ceilings;
use check::Checker;
use clap::{Parser, ValueEnum};
use larder_kernels::device::{Device, emulated};
use report::Report;
use sizes::{SizeName, Sizes};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const EMULATED_BYTES: usize = 2 << 30;

/// Measure a device: pages to and from the host, CRC-32, storage, attention, matrix products
#[derive(Debug, Parser)]
#[command(name = "bench-gpu", max_term_width = 110)]
struct Args {
    /// `cuda`, `cuda:N` for device N, or `emulated`
    #[arg(long, default_value = "cuda")]
    device: String,
    /// Amount of data [default: full on a GPU, tiny in the emulator]
    #[arg(long)]
    sizes: Option<SizeName>,
    /// Number of rounds; medians are printed
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Measure these parts only. The ceilings are always measured
    #[arg(long, value_delimiter = ',')]
    only: Vec<Section>,
    /// Directory on the file system to measure. Needs up to 514 MiB; the file is removed at the end
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Also write one JSON object per figure to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Seconds after which no further part starts. The run then fails
    #[arg(long, default_value_t = 400)]
    limit: u64,
    /// Folder of --write-kernels, for a machine without NVRTC
    #[arg(long)]
    kernels: Option<PathBuf>,
    /// Compile the kernels to PTX in this folder, and measure nothing. Needs NVRTC, and no GPU
    #[arg(long, value_name = "FOLDER")]
    write_kernels: Option<PathBuf>,
    /// Change one value of every reference behind the ceilings, so that every part must fail
    #[arg(long, hide = true)]
    damage: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// Gather and scatter of pages, and copies
    Pages,
    /// CRC-32 of device memory
    Crc,
    /// Storage to device memory
    Storage,
    /// Decoding and prefill
    Attention,
    /// Matrix products
    Products,
}

impl Section {
    const ALL: [Section; 5] = [Section::Pages, Section::Crc, Section::Storage, Section::Attention, Section::Products];

    fn measure(self, run: &mut Measurement) -> Result<()> {
        match self {
            Section::Pages => pages::measure(run),
            Section::Crc => pages::measure_crc(run),
            Section::Storage => storage::measure(run),
            Section::Attention => attention::measure(run),
            Section::Products => products::measure(run),
        }
    }
}

/// State that all parts share.
struct Measurement {
    bench: Bench,
    sizes: Sizes,
    report: Report,
    ceilings: Ceilings,
    dir: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(folder) = &args.write_kernels {
        return kernels::write(folder);
    }
    ensure!((1..=1000).contains(&args.rounds), "--rounds: from 1 to 1,000");
    let start = Instant::now();
    let device = open_device(&args)?;
    let default = if device.info().kind == "cuda" { SizeName::Full } else { SizeName::Tiny };
    let name = args.sizes.unwrap_or(default);
    let mut bench = Bench::new(device, args.rounds, Checker { damage: false })?;
    let mut report = Report::begin(&bench, name.name(), args.json.as_deref())?;
    let sizes = Sizes::of(name);
    let ceilings = ceilings::measure(&bench, &sizes, &mut report).context("measure the ceilings")?;
    bench.checker.damage = args.damage;
    let mut run = Measurement { bench, sizes, report, ceilings, dir: args.dir };
    for section in Section::ALL {
        if !args.only.is_empty() && !args.only.contains(&section) {
            continue;
        }
        if start.elapsed() > Duration::from_secs(args.limit) {
            run.report.problem(&format!("{section:?}: not measured, {} s have passed (--limit)", args.limit))?;
        } else if let Err(error) = section.measure(&mut run) {
            run.report.problem(&format!("{section:?}: {error:#}"))?;
        }
    }
    run.report.end()
}

fn open_device(args: &Args) -> Result<Arc<dyn Device>> {
    match args.device.split_once(':').unwrap_or((args.device.as_str(), "0")) {
        ("cuda", number) => {
            let number = number.parse().with_context(|| format!("--device {}: not a number", args.device))?;
            kernels::open_cuda(number, args.kernels.as_deref())
        }
        ("emulated", _) if args.device == "emulated" => {
            emulated::open_with(&kernels::sources(), EMULATED_BYTES).context("open the emulated device")
        }
        _ => bail!("--device {}: use cuda, cuda:N or emulated", args.device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_well_formed() {
        Args::command().debug_assert();
    }
}
