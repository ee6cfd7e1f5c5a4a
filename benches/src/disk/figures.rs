//! Medians of one round, and medians of several.

use anyhow::Result;
use hdrhistogram::Histogram;
use larder_benches::cpu::cpu_time;
use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

impl Direction {
    pub const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

    pub fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

/// Figures of one round of a measurement. Throughput is in GB (1e9 bytes) per second, CPU time in
/// user and system seconds per GiB.
#[derive(Debug, Clone, Copy, Default)]
pub struct RoundFigures {
    pub gb_per_s: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub cpu_per_gib: f64,
}

/// Medians of several rounds. Each figure is a median by itself, so they may be of different
/// rounds.
#[derive(Debug, Clone, Copy)]
pub struct Medians(pub RoundFigures);

impl Medians {
    /// Computes the medians. Of an even number of rounds, the upper one of the two in the middle
    /// counts. Returns `None` without rounds.
    pub fn median(rounds: Vec<RoundFigures>) -> Option<Medians> {
        let middle = |figure: fn(&RoundFigures) -> f64| {
            let mut all: Vec<f64> = rounds.iter().map(figure).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied()
        };
        Some(Medians(RoundFigures {
            gb_per_s: middle(|round| round.gb_per_s)?,
            p50_us: middle(|round| round.p50_us)?,
            p99_us: middle(|round| round.p99_us)?,
            cpu_per_gib: middle(|round| round.cpu_per_gib)?,
        }))
    }
}

/// Stopwatch of a round: wall-clock and CPU time since its start. The CPU time is that of the whole
/// process, with its io_uring workers.
pub struct Stopwatch {
    began: Instant,
    cpu_began: Duration,
}

impl Stopwatch {
    pub fn start() -> Stopwatch {
        Stopwatch { began: Instant::now(), cpu_began: cpu_time() }
    }

    /// Returns throughput and CPU time of a round that moved `bytes`. Latencies are added by
    /// [`RoundFigures::with`].
    pub fn stop(self, bytes: usize) -> RoundFigures {
        let time = self.began.elapsed();
        // CPU time never decreases within a process, so a plain subtraction is safe.
        let cpu = cpu_time() - self.cpu_began;
        RoundFigures {
            gb_per_s: bytes as f64 / 1e9 / time.as_secs_f64(),
            cpu_per_gib: cpu.as_secs_f64() / (bytes as f64 / (1u64 << 30) as f64),
            ..RoundFigures::default()
        }
    }
}

impl RoundFigures {
    pub fn with(self, latencies: &Histogram<u64>) -> RoundFigures {
        let us = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
        RoundFigures { p50_us: us(0.5), p99_us: us(0.99), ..self }
    }
}

/// Empty histogram of latencies in nanoseconds: at most one minute, to three significant digits.
pub fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(60_000_000_000, 3)?)
}
