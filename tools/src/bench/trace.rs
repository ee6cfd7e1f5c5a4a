//! Hit rates of eviction policies on a recorded trace, compared with the offline optimum (Belady).

use crate::output::say;
use anyhow::{Context, Result, bail};
use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use flate2::read::MultiGzDecoder;
use larder_evict::replay::{ATTENTION_TOKENS, Outcome, PolicyKind, Trace, run as replay};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Debug, Parser)]
pub struct Args {
    /// Trace in Mooncake's format: one JSON object per line with `timestamp`, `input_length` and
    /// `hash_ids`, one id per block. May be gzipped
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Cache capacities in tokens, with suffix `k`, `M` or `G` for thousands, millions or billions
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = token_count, default_value = "300k,1M,3M,10M,30M")]
    capacity: Vec<u64>,
    /// Tokens per block. By default the power of two that fits the lengths of the prompts
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<NonZeroU64>,
    /// Bytes of KV per token, for the bytes written. The default is that of Llama 3 8B in 16 bits
    #[arg(long, value_name = "BYTES", default_value = "131072")]
    token_bytes: NonZeroU64,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

pub(super) fn token_count(text: &str) -> Result<u64> {
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

/// Reads a trace. `block_tokens` replaces the block size that follows from the trace.
pub(super) fn read(path: &Path, block_tokens: Option<NonZeroU64>) -> Result<Trace> {
    let mut trace = Trace::read(open(path)?).with_context(|| format!("cannot read the trace {}", path.display()))?;
    if let Some(tokens) = block_tokens {
        trace.set_block_tokens(tokens.get());
    }
    Ok(trace)
}

fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?);
    // The magic number of gzip, so that the file's name does not matter.
    let gzipped = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    Ok(if gzipped { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) })
}

/// One row of the table: a policy at a capacity.
struct Measured {
    policy: PolicyKind,
    outcome: Outcome,
    ns_per_access: f64,
}

fn measure(trace: &Trace, policy: PolicyKind, capacity: u64) -> Measured {
    let began = Instant::now();
    let outcome = replay(trace, policy, capacity);
    Measured { policy, outcome, ns_per_access: began.elapsed().as_nanos() as f64 / outcome.blocks.max(1) as f64 }
}

impl Measured {
    fn json(&self, capacity_tokens: u64, block_bytes: u64) -> serde_json::Value {
        serde_json::json!({
            "policy": self.policy.name(),
            "capacity_tokens": capacity_tokens,
            "hit_rate": self.outcome.rate(),
            "work_saved": self.outcome.work_rate(),
            "written_bytes": self.outcome.written.saturating_mul(block_bytes),
            "ns_per_access": self.ns_per_access,
            "policy_bytes_per_block": self.outcome.policy_bytes_per_block(),
        })
    }

    fn cells(&self, capacity_tokens: u64, block_bytes: u64, lru: &Outcome) -> Vec<Cell> {
        let dash = || "-".to_string();
        let offline = self.policy == PolicyKind::Belady;
        let ratio = if lru.hits > 0 { format!("{:.2}×", self.outcome.rate() / lru.rate()) } else { dash() };
        let cells = [
            capacity_tokens.to_string(),
            self.policy.to_string(),
            format!("{:.2} %", self.outcome.rate() * 100.0),
            ratio,
            format!("{:.2} %", self.outcome.work_rate() * 100.0),
            format!("{:.0}", self.outcome.written.saturating_mul(block_bytes) as f64 / f64::from(1u32 << 30)),
            if offline { dash() } else { format!("{:.0}", self.ns_per_access) },
            self.outcome.policy_bytes_per_block().map_or_else(dash, |bytes| format!("{bytes:.0}")),
        ];
        cells.into_iter().map(|text| Cell::new(text).set_alignment(CellAlignment::Right)).collect()
    }
}

pub fn run(args: &Args) -> Result<()> {
    let trace = read(&args.file, args.block_tokens)?;
    let block_bytes = trace.block_tokens().saturating_mul(args.token_bytes.get());
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "capacity (tokens)",
        "policy",
        "hits",
        "/ lru",
        "work saved",
        "written (GiB)",
        "ns/access",
        "bytes/block",
    ]);
    for &capacity in &args.capacity {
        let measured = PolicyKind::ALL.map(|policy| measure(&trace, policy, capacity));
        let lru = measured[0].outcome;
        for row in &measured {
            if args.json {
                say!("{}", row.json(capacity, block_bytes));
            } else {
                table.add_row(row.cells(capacity, block_bytes, &lru));
            }
        }
    }
    if !args.json {
        say!(
            "{}: {} requests, {} distinct blocks of {} tokens; a block is a hit only if all blocks before it are",
            args.file.display(),
            trace.requests().len(),
            trace.blocks_distinct(),
            trace.block_tokens()
        );
        say!("{table}");
        say!(
            "work saved: hits weighted by their computation; a block at {ATTENTION_TOKENS} tokens counts twice\n\
             bytes/block: state of the policy, with its fixed tables, per resident block"
        );
    }
    Ok(())
}
