//! Protocol between `benches/peers/run` and a client: lines of JSON on standard input and output.
//!
//! 1. The client receives a [`Cell`], the description of one measurement.
//! 2. It prepares keys and memory, and answers `{"ready":true}`.
//! 3. It receives any line and starts the clock.
//! 4. It answers with a [`CellResult`].
//!
//! The client ends with its input.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    Put,
    Get,
    View,
    Exists,
    Clear,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Cell {
    pub op: Op,
    pub cell: u32,
    pub size: usize,
    pub batch: usize,
    /// Number of operations in one pass over the data set. Puts end after one pass at the latest.
    /// The other operations start again.
    pub batches: usize,
    pub seconds: f64,
}

impl Cell {
    pub fn op_bytes(&self) -> usize {
        self.size * self.batch
    }

    pub fn set_bytes(&self) -> usize {
        self.op_bytes() * self.batches
    }
}

#[derive(Debug, Serialize)]
pub struct CellResult {
    pub seconds: f64,
    pub latencies_ns: Vec<u64>,
    pub notes: Notes,
}

/// Counts of events that make a result less comparable. The report prints them beside the figures,
/// so that no reader overlooks them.
#[derive(Debug, Default, Serialize)]
pub struct Notes {
    #[serde(skip_serializing_if = "is_zero")]
    pub busy: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub copied: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A client under test. Only the methods marked as timed count, so that making keys and verifying
/// results do not distort the figures.
pub trait Workload {
    async fn prepare(&mut self, cell: &Cell) -> Result<()>;
    /// Performs one operation on batch number `batch`. Timed, so implementations do nothing else
    /// here.
    async fn operate(&mut self, cell: &Cell, batch: usize) -> Result<()>;
    async fn finish(&mut self, _cell: &Cell) -> Result<()> {
        Ok(())
    }
    async fn check(&mut self, _cell: &Cell, _batch: usize) -> Result<Notes> {
        Ok(Notes::default())
    }
}

fn answer(line: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Runs the cells that arrive on standard input until it ends. Reports when a cell is prepared and
/// waits for a line, so that several clients can start at once.
pub async fn drive(mut workload: impl Workload) -> Result<()> {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut stored = 0;
    while let Some(line) = lines.next_line().await? {
        let cell: Cell = serde_json::from_str(&line).context("standard input: a line is not a cell")?;
        workload.prepare(&cell).await?;
        answer(&serde_json::json!({ "ready": true }))?;
        if lines.next_line().await?.is_none() {
            break;
        }
        let result = measure(&mut workload, &cell, &mut stored).await?;
        answer(&result)?;
    }
    Ok(())
}

async fn measure(workload: &mut impl Workload, cell: &Cell, stored: &mut usize) -> Result<CellResult> {
    let (passes_end, limit) = match cell.op {
        Op::Put => (cell.batches, cell.batches),
        Op::Clear => (0, 0),
        // A copy in memory has no puts: its whole data set is there from the start.
        _ if *stored == 0 => (usize::MAX, cell.batches),
        _ => (usize::MAX, *stored),
    };
    let mut latencies_ns = Vec::new();
    let mut done = 0;
    let end_by = Duration::from_secs_f64(cell.seconds);
    let begin = Instant::now();
    let mut last = begin;
    // At least one operation, so that every cell has a figure.
    while done < passes_end && (done == 0 || last - begin < end_by) {
        workload.operate(cell, done % limit).await?;
        let now = Instant::now();
        latencies_ns.push((now - last).as_nanos() as u64);
        last = now;
        done += 1;
    }
    workload.finish(cell).await?;
    let seconds = begin.elapsed().as_secs_f64();
    if cell.op == Op::Put {
        *stored = done;
    }
    let notes = workload.check(cell, done.saturating_sub(1) % limit.max(1)).await?;
    Ok(CellResult { seconds, latencies_ns, notes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Recorder {
        batches: Vec<usize>,
        checked: Option<usize>,
    }

    impl Workload for Recorder {
        async fn prepare(&mut self, _cell: &Cell) -> Result<()> {
            Ok(())
        }

        async fn operate(&mut self, _cell: &Cell, batch: usize) -> Result<()> {
            self.batches.push(batch);
            tokio::time::sleep(Duration::from_millis(5)).await;
            Ok(())
        }

        async fn check(&mut self, _cell: &Cell, batch: usize) -> Result<Notes> {
            self.checked = Some(batch);
            Ok(Notes::default())
        }
    }

    async fn run(op: Op, batches: usize, seconds: f64, stored: &mut usize) -> (Recorder, CellResult) {
        let mut recorder = Recorder::default();
        let cell = Cell { op, cell: 0, size: 1, batch: 1, batches, seconds };
        let result = measure(&mut recorder, &cell, stored).await.unwrap();
        assert_eq!(result.latencies_ns.len(), recorder.batches.len());
        assert!(
            result.latencies_ns.iter().all(|&ns| ns > 4_000_000)
                && result.seconds > 0.004 * recorder.batches.len() as f64
        );
        (recorder, result)
    }

    #[tokio::test]
    async fn puts_end_after_one_pass_and_gets_cycle_over_stored_batches() {
        let mut stored = 0;
        let (recorder, _) = run(Op::Put, 3, 60.0, &mut stored).await;
        assert_eq!((recorder.batches, recorder.checked, stored), (vec![0, 1, 2], Some(2), 3));
        // One operation runs even with no time at all.
        let (recorder, _) = run(Op::Put, 3, 0.0, &mut stored).await;
        assert_eq!((recorder.batches, stored), (vec![0], 1));
        stored = 2;
        let (recorder, result) = run(Op::Get, 3, 0.1, &mut stored).await;
        assert!(recorder.batches.len() > 2 && recorder.batches.iter().enumerate().all(|(i, &batch)| batch == i % 2));
        assert_eq!(recorder.checked, recorder.batches.last().copied());
        assert!((0.1..1.0).contains(&result.seconds), "{result:?}");
    }
}
