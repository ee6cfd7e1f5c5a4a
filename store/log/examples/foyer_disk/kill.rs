//! Values and deletions after SIGKILL.

use super::stores::{Kind, Result, Store};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const CAPACITY: usize = 4 << 30;
const SIZE: usize = 256 << 10;
/// Values that are written together, then reported.
const BATCH: u64 = 64;
/// One of so many values is forgotten after the next batch.
const FORGOTTEN: u64 = 8;
/// Reported values after which the writer is killed.
const KILLED_AFTER: usize = 3000;

/// Writes values, and prints `w` or `f` with the numbers that the store has written or forgotten.
pub async fn write_until_killed(kind: Kind, dir: &Path) -> Result<()> {
    let store = Store::open(kind, dir, CAPACITY).await?;
    let mut before: Vec<u64> = Vec::new();
    for first in (0..).step_by(BATCH as usize) {
        let batch = first..first + BATCH;
        for number in batch.clone() {
            store.write(number, SIZE).await?;
        }
        store.settle().await;
        report("w", batch.clone())?;
        store.forget(&before).await?;
        report("f", before.iter().copied())?;
        before = batch.filter(|number| number % FORGOTTEN == 0).collect();
    }
    Ok(())
}

fn report(what: &str, numbers: impl Iterator<Item = u64>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for number in numbers {
        writeln!(out, "{what} {number}")?;
    }
    Ok(out.flush()?)
}

/// Reports of a killed writer.
#[derive(Default)]
struct Reported {
    written: BTreeSet<u64>,
    forgotten: BTreeSet<u64>,
}

fn kill_a_writer(kind: Kind, dir: &Path) -> Result<Reported> {
    let parent = dir.parent().ok_or("the folder has no parent")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(parent).args(["write-until-killed", kind.name()]).stdout(Stdio::piped());
    let mut writer = command.spawn()?;
    let mut reported = Reported::default();
    for line in BufReader::new(writer.stdout.take().ok_or("the writer has no output")?).lines() {
        let line = line?;
        let (what, number) = line.split_once(' ').ok_or("an empty line")?;
        let list = if what == "w" { &mut reported.written } else { &mut reported.forgotten };
        list.insert(number.parse()?);
        if reported.written.len() == KILLED_AFTER {
            writer.kill()?;
        }
    }
    writer.wait()?;
    Ok(reported)
}

pub async fn run(dir: &Path, rounds: usize) -> Result<()> {
    for (name, kind) in Kind::ALL {
        let (mut values, mut lost, mut wrong, mut deleted, mut returned) = (0, 0, 0, 0, 0);
        let mut opened = Vec::new();
        for _ in 0..rounds {
            let _ = std::fs::remove_dir_all(dir);
            let Reported { written, forgotten } = kill_a_writer(kind, dir)?;
            let began = Instant::now();
            let store = Store::open(kind, dir, CAPACITY).await?;
            opened.push(began.elapsed().as_secs_f64());
            // The writer may have forgotten values without a report.
            for number in written {
                let found = store.read(number, SIZE).await?;
                wrong += u32::from(found == Some(false));
                if forgotten.contains(&number) {
                    deleted += 1;
                    returned += u32::from(found.is_some());
                } else if number % FORGOTTEN != 0 {
                    values += 1;
                    lost += u32::from(found.is_none());
                }
            }
            store.close().await?;
        }
        opened.sort_by(f64::total_cmp);
        println!(
            "{name:<16} {rounds} kills: {lost} of {values} values lost, {returned} of {deleted} deletions undone, \
             {wrong} wrong, opened in {:.3} s",
            opened[rounds / 2]
        );
    }
    let _ = std::fs::remove_dir_all(dir);
    Ok(())
}
