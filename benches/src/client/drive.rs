//! How `benches/peers/run` drives a client: lines of JSON.
//!
//! A [`Cell`] comes in; `{"ready":true}` goes out when everything is at hand; a line comes in, at which the clock starts; a
//! [`Seen`] goes out. The end of the input is the end of the client.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Put pages that are new.
    Put,
    /// Get them, into memory of the caller.
    Get,
    /// Look at them where they lie.
    View,
    /// Ask whether they are there.
    Exists,
    /// Forget all that was put.
    Clear,
}

/// One measurement.
#[derive(Debug, Clone, Deserialize)]
pub struct Cell {
    /// What is done.
    pub op: Op,
    /// Number of this cell: pages of different cells have different keys.
    pub cell: u32,
    /// Bytes of a page.
    pub size: usize,
    /// Pages in one operation.
    pub batch: usize,
    /// Operations that one pass over the data set takes. A put ends with them at the latest, the others begin anew.
    pub batches: usize,
    /// Time after which nothing more is begun.
    pub seconds: f64,
}

impl Cell {
    /// Bytes of one operation.
    pub fn op_bytes(&self) -> usize {
        self.size * self.batch
    }

    /// Bytes of the data set.
    pub fn set_bytes(&self) -> usize {
        self.op_bytes() * self.batches
    }
}

/// What a client has seen.
#[derive(Debug, Serialize)]
pub struct Seen {
    /// From the start to the end of the last operation.
    pub seconds: f64,
    /// Time of each operation.
    pub latencies_ns: Vec<u64>,
    /// What happened beside, and how often.
    pub notes: Notes,
}

/// What may happen beside, and how often.
#[derive(Debug, Default, Serialize)]
pub struct Notes {
    /// Pages that were refused because the node had no room, and put again.
    #[serde(skip_serializing_if = "is_zero")]
    pub busy: u64,
    /// Pages that should have been read in place, and were copied.
    #[serde(skip_serializing_if = "is_zero")]
    pub copied: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What can be driven.
pub trait Subject {
    /// Makes what the operations of a cell need; not timed.
    async fn prepare(&mut self, cell: &Cell) -> Result<()>;
    /// Does one operation, on batch number `batch`.
    async fn operate(&mut self, cell: &Cell, batch: usize) -> Result<()>;
    /// Waits until everything has arrived; timed.
    async fn finish(&mut self, _cell: &Cell) -> Result<()> {
        Ok(())
    }
    /// Checks what batch number `batch` brought last; not timed.
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

/// Does what the standard input says until it ends.
pub async fn drive(mut subject: impl Subject) -> Result<()> {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut stored = 0;
    while let Some(line) = lines.next_line().await? {
        let cell: Cell = serde_json::from_str(&line).context("a line that is not a cell")?;
        subject.prepare(&cell).await?;
        answer(&serde_json::json!({ "ready": true }))?;
        if lines.next_line().await?.is_none() {
            break;
        }
        let seen = measure(&mut subject, &cell, &mut stored).await?;
        answer(&seen)?;
    }
    Ok(())
}

/// Times a cell. Batches below `stored` have been put.
async fn measure(subject: &mut impl Subject, cell: &Cell, stored: &mut usize) -> Result<Seen> {
    let (passes_end, limit) = match cell.op {
        Op::Put => (cell.batches, cell.batches),
        Op::Clear => (0, 0),
        // A bare copy puts nothing.
        _ if *stored == 0 => (usize::MAX, cell.batches),
        _ => (usize::MAX, *stored),
    };
    let (mut latencies_ns, mut done) = (Vec::new(), 0);
    let (begin, end_by) = (Instant::now(), Duration::from_secs_f64(cell.seconds));
    let mut last = begin;
    while done < passes_end && (done == 0 || last - begin < end_by) {
        subject.operate(cell, done % limit).await?;
        let now = Instant::now();
        latencies_ns.push((now - last).as_nanos() as u64);
        (last, done) = (now, done + 1);
    }
    subject.finish(cell).await?;
    let seconds = begin.elapsed().as_secs_f64();
    if cell.op == Op::Put {
        *stored = done;
    }
    let notes = subject.check(cell, done.saturating_sub(1) % limit.max(1)).await?;
    Ok(Seen { seconds, latencies_ns, notes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes which batches are operated on, some milliseconds each.
    #[derive(Default)]
    struct Noted {
        batches: Vec<usize>,
        checked: Option<usize>,
    }

    impl Subject for Noted {
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

    async fn seen(op: Op, batches: usize, seconds: f64, stored: &mut usize) -> (Noted, Seen) {
        let mut noted = Noted::default();
        let cell = Cell { op, cell: 0, size: 1, batch: 1, batches, seconds };
        let seen = measure(&mut noted, &cell, stored).await.unwrap();
        assert_eq!(seen.latencies_ns.len(), noted.batches.len());
        assert!(
            seen.latencies_ns.iter().all(|&ns| ns > 4_000_000) && seen.seconds > 0.004 * noted.batches.len() as f64
        );
        (noted, seen)
    }

    #[tokio::test]
    async fn puts_end_and_gets_begin_anew_with_what_was_put() {
        let mut stored = 0;
        let (noted, _) = seen(Op::Put, 3, 60.0, &mut stored).await;
        assert_eq!((noted.batches, noted.checked, stored), (vec![0, 1, 2], Some(2), 3));
        // In no time at all there is one operation.
        let (noted, _) = seen(Op::Put, 3, 0.0, &mut stored).await;
        assert_eq!((noted.batches, stored), (vec![0], 1));
        stored = 2;
        let (noted, seen) = seen(Op::Get, 3, 0.1, &mut stored).await;
        assert!(noted.batches.len() > 2 && noted.batches.iter().enumerate().all(|(i, &batch)| batch == i % 2));
        assert_eq!(noted.checked, noted.batches.last().copied());
        assert!((0.1..1.0).contains(&seen.seconds), "{seen:?}");
    }
}
