//! Output: a Markdown table on standard output, and one JSON object per figure in a file.

use crate::bench::{Bench, Times};
use crate::check::Verified;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "GB/s")]
    Bytes,
    #[serde(rename = "TFLOP/s")]
    Operations,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Bytes => "GB/s",
            Unit::Operations => "TFLOP/s",
        }
    }

    fn scale(self) -> f64 {
        match self {
            Unit::Bytes => 1e9,
            Unit::Operations => 1e12,
        }
    }
}

/// Amount per time, over all rounds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Rate {
    pub unit: Unit,
    pub median: f64,
    pub slowest: f64,
    pub fastest: f64,
}

impl Rate {
    /// Rate of work that moves `bytes` bytes.
    pub fn bytes(bytes: usize, times: &Times) -> Rate {
        Rate::of(bytes as f64, Unit::Bytes, times)
    }

    /// Rate of work with `operations` additions and multiplications.
    pub fn operations(operations: f64, times: &Times) -> Rate {
        Rate::of(operations, Unit::Operations, times)
    }

    fn of(amount: f64, unit: Unit, times: &Times) -> Rate {
        let rate = |time: Duration| amount / unit.scale() / time.as_secs_f64();
        Rate { unit, median: rate(times.median()), slowest: rate(times.slowest()), fastest: rate(times.fastest()) }
    }
}

/// Rate that bounds a figure, measured in the same run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Ceiling {
    pub name: &'static str,
    pub rate: Rate,
}

/// One measured rate.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    pub name: String,
    /// Number of blocks, where the caller of a kernel chooses it.
    pub blocks: Option<u32>,
    pub rate: Rate,
    pub ceiling: Option<Ceiling>,
    /// Least ratio to the ceiling that the project wants.
    pub target: Option<f64>,
}

impl Figure {
    pub fn new(name: impl Into<String>, rate: Rate) -> Figure {
        Figure { name: name.into(), blocks: None, rate, ceiling: None, target: None }
    }

    #[must_use]
    pub fn blocks(mut self, blocks: u32) -> Figure {
        self.blocks = Some(blocks);
        self
    }

    #[must_use]
    pub fn against(mut self, name: &'static str, rate: Rate) -> Figure {
        self.ceiling = Some(Ceiling { name, rate });
        self
    }

    #[must_use]
    pub fn target(mut self, ratio: f64) -> Figure {
        self.target = Some(ratio);
        self
    }

    /// Median by the ceiling's median.
    pub fn ratio(&self) -> Option<f64> {
        self.ceiling.map(|ceiling| self.rate.median / ceiling.rate.median)
    }
}

#[derive(Debug)]
pub struct Report {
    file: Option<File>,
    multiprocessors: u32,
    figures: usize,
    problems: usize,
}

impl Report {
    /// Creates the file, and begins the table.
    pub fn begin(bench: &Bench, sizes: &str, file: Option<&Path>) -> Result<Report> {
        let create = |path: &Path| File::create(path).with_context(|| format!("create {}", path.display()));
        let file = file.map(create).transpose()?;
        let info = bench.device.info();
        let (major, minor) = info.compute_capability;
        println!(
            "{} ({}), compute capability {major}.{minor}, {} multiprocessors, {} MiB; sizes {sizes}, medians of {} rounds, GB = 1e9 bytes",
            info.name,
            info.kind,
            info.multiprocessors,
            info.memory_bytes >> 20,
            bench.rounds
        );
        if info.kind != "cuda" {
            println!("These rates are those of the emulator. They say nothing about a GPU.");
        }
        println!("\n| figure | blocks (≤ multiprocessors) | median (slowest – fastest) | ceiling | ratio | target |");
        println!("|---|---|---|---|---|---|");
        let mut report = Report { file, multiprocessors: info.multiprocessors, figures: 0, problems: 0 };
        let head = json!({"device": info.name, "kind": info.kind, "compute_capability": [major, minor],
            "multiprocessors": info.multiprocessors, "memory_bytes": info.memory_bytes, "sizes": sizes,
            "rounds": bench.rounds});
        report.line(&head)?;
        Ok(report)
    }

    /// Adds a figure, whose result has been compared.
    pub fn figure(&mut self, _: Verified, figure: &Figure) -> Result<()> {
        let Figure { name, blocks, rate, ceiling, target } = figure;
        let blocks = blocks.map_or("–".to_string(), |n| format!("{n} ({})", n.min(self.multiprocessors)));
        let ratio = figure.ratio();
        let bound = ceiling
            .map_or("–".to_string(), |it| format!("{:.3} {}: {}", it.rate.median, it.rate.unit.name(), it.name));
        let two = |value: Option<f64>| value.map_or("–".to_string(), |value| format!("{value:.2}"));
        println!(
            "| {name} | {blocks} | {:.3} ({:.3} – {:.3}) {} | {bound} | {} | {} |",
            rate.median,
            rate.slowest,
            rate.fastest,
            rate.unit.name(),
            two(ratio),
            two(*target),
        );
        self.figures += 1;
        let mut line = serde_json::to_value(figure)?;
        line["multiprocessors_at_most"] = figure.blocks.map(|blocks| blocks.min(self.multiprocessors)).into();
        line["ratio"] = ratio.into();
        self.line(&line)
    }

    /// Adds a remark to the output, such as a path that this machine does not have.
    pub fn note(&mut self, text: &str) -> Result<()> {
        println!("| {} | | | | | |", text.replace('|', "/"));
        self.line(&json!({"note": text}))
    }

    /// Adds the failure of a part. The run then fails.
    pub fn problem(&mut self, text: &str) -> Result<()> {
        self.problems += 1;
        eprintln!("bench-gpu: {text}");
        println!("| FAILED: {} | | | | | |", text.replace('|', "/").replace('\n', " "));
        self.line(&json!({"problem": text}))
    }

    /// Ends the table.
    ///
    /// # Errors
    /// If a part failed, or if there is no figure.
    pub fn end(mut self) -> Result<()> {
        let (figures, problems) = (self.figures, self.problems);
        self.line(&json!({"figures": figures, "problems": problems}))?;
        println!("\n{figures} figures, {problems} problems");
        ensure!(problems == 0, "{problems} parts failed");
        ensure!(figures > 0, "nothing was measured");
        Ok(())
    }

    fn line(&mut self, value: &serde_json::Value) -> Result<()> {
        if let Some(file) = &mut self.file {
            writeln!(file, "{value}").context("write the JSON file")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_compares_the_medians() {
        let times = |milliseconds: [u64; 3]| Times::new(milliseconds.map(Duration::from_millis).to_vec());
        let (slow, fast) = (Rate::bytes(2_000_000, &times([4, 2, 1])), Rate::bytes(2_000_000, &times([1, 1, 1])));
        assert_eq!((slow.median, slow.slowest, slow.fastest), (1.0, 0.5, 2.0));
        assert_eq!(Figure::new("a", slow).against("b", fast).ratio(), Some(0.5));
        assert_eq!(Figure::new("a", slow).ratio(), None);
    }
}
