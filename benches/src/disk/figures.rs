//! What is measured, and the middle of several rounds.

use anyhow::Result;
use hdrhistogram::Histogram;
use larder_benches::cpu::cpu_time;
use std::time::{Duration, Instant};

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device.
    Read,
    /// To the device.
    Write,
}

impl Direction {
    /// Both, in the order they are measured.
    pub const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

/// One round of one of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Measured {
    /// GB (1e9 bytes) per second.
    pub speed: f64,
    /// Latency of the middle request, in microseconds.
    pub p50_us: f64,
    /// Latency that one in a hundred exceeds, in microseconds.
    pub p99_us: f64,
    /// CPU seconds per GiB, of the process and in the kernel for it.
    pub cpu_per_gib: f64,
}

/// The middle of the rounds, each figure by itself.
#[derive(Debug, Clone, Copy)]
pub struct Figures(pub Measured);

impl Figures {
    /// `None` if there was no round.
    pub fn median(rounds: Vec<Measured>) -> Option<Figures> {
        let middle = |figure: fn(&Measured) -> f64| {
            let mut all: Vec<f64> = rounds.iter().map(figure).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied()
        };
        Some(Figures(Measured {
            speed: middle(|round| round.speed)?,
            p50_us: middle(|round| round.p50_us)?,
            p99_us: middle(|round| round.p99_us)?,
            cpu_per_gib: middle(|round| round.cpu_per_gib)?,
        }))
    }
}

/// A round under way.
pub struct Round {
    began: Instant,
    cpu_began: Duration,
}

impl Round {
    /// Begins now.
    pub fn begin() -> Round {
        Round { began: Instant::now(), cpu_began: cpu_time() }
    }

    /// Ends now, after `bytes` were moved.
    pub fn end(self, bytes: usize) -> Measured {
        let (time, cpu) = (self.began.elapsed(), cpu_time().saturating_sub(self.cpu_began));
        Measured {
            speed: bytes as f64 / 1e9 / time.as_secs_f64(),
            cpu_per_gib: cpu.as_secs_f64() / (bytes as f64 / (1u64 << 30) as f64),
            ..Measured::default()
        }
    }
}

impl Measured {
    /// With the latencies of its requests, in nanoseconds.
    pub fn with(self, latencies: &Histogram<u64>) -> Measured {
        let us = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
        Measured { p50_us: us(0.5), p99_us: us(0.99), ..self }
    }
}

/// Latencies in nanoseconds up to a minute, to three digits.
pub fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(60_000_000_000, 3)?)
}
