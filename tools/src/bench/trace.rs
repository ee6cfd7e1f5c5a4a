//! Hit rates of eviction policies on a recorded trace, compared with the offline optimum (Belady).

use crate::output::say;
use anyhow::{Context, Result, bail};
use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use flate2::read::MultiGzDecoder;
use larder_evict::replay::{PolicyKind, Trace, run as replay};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

#[derive(Debug, Parser)]
pub struct Args {
    /// Trace in Mooncake's format: one JSON object per line with `timestamp` and `hash_ids`, one id
    /// per 512 tokens. May be gzipped
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Cache capacities in tokens, with suffix `k`, `M` or `G` for thousands, millions or billions
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = token_count, default_value = "300k,1M,3M,10M,30M,50M")]
    capacity: Vec<u64>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

fn token_count(text: &str) -> Result<u64> {
    let (number, unit) = match text.find(|c: char| !c.is_ascii_digit() && c != '.') {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let factor = match unit {
        "" => 1.0,
        "k" | "K" => 1e3,
        "m" | "M" => 1e6,
        "g" | "G" => 1e9,
        _ => bail!("unknown suffix '{unit}', expected k, M or G"),
    };
    let tokens = number.parse::<f64>().with_context(|| format!("'{number}' is not a number"))? * factor;
    if !(1.0..1e15).contains(&tokens) {
        bail!("a capacity must be between 1 and 1e15 tokens");
    }
    Ok(tokens as u64)
}

fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?);
    // The magic number of gzip, so that the file's name does not matter.
    let gzipped = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    Ok(if gzipped { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) })
}

pub fn run(args: &Args) -> Result<()> {
    let trace =
        Trace::read(open(&args.file)?).with_context(|| format!("cannot read the trace {}", args.file.display()))?;
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let header =
        ["capacity (tokens)".to_string()].into_iter().chain(PolicyKind::ALL.iter().map(|p| p.name().to_string()));
    table.set_header(header.chain(["larder / lru".to_string()]));
    for &capacity in &args.capacity {
        let rates = PolicyKind::ALL.map(|policy| (policy, replay(&trace, policy, capacity).rate()));
        if args.json {
            for (policy, rate) in rates {
                let line = serde_json::json!({"policy": policy.name(), "capacity_tokens": capacity, "hit_rate": rate});
                say!("{line}");
            }
            continue;
        }
        let rate = |wanted| rates.iter().find(|(policy, _)| *policy == wanted).map_or(0.0, |(_, rate)| *rate);
        let ratio = rate(PolicyKind::HitDensity) / rate(PolicyKind::Lru);
        let cells = [capacity.to_string()]
            .into_iter()
            .chain(rates.iter().map(|(_, rate)| format!("{:.2} %", rate * 100.0)))
            .chain([format!("{ratio:.2}×")]);
        table.add_row(cells.map(|text| Cell::new(text).set_alignment(CellAlignment::Right)));
    }
    if !args.json {
        say!(
            "{}: {} requests, {} distinct blocks of 512 tokens; a block is a hit only if all blocks before it are",
            args.file.display(),
            trace.requests().len(),
            trace.blocks_distinct()
        );
        say!("{table}");
    }
    Ok(())
}
