//! fio with io_uring and the best tuning found: registered buffers and file, O_DIRECT, huge pages.
//!
//! fio 3.33 supports huge pages only from hugetlbfs, and most machines reserve none. A glibc
//! tunable puts the memory of `malloc` on transparent huge pages. That makes fio 1.2 to 1.4 times
//! as fast.

use super::QUEUE_DEPTH;
use super::figures::{Direction, RoundFigures};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

const HUGE_MALLOC: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
const TUNING: [&str; 8] = [
    "--direct=1",
    "--ioengine=io_uring",
    "--fixedbufs",
    "--registerfiles",
    "--iomem=malloc",
    "--norandommap",
    "--randrepeat=0",
    "--output-format=json",
];

pub struct Fio {
    version: Option<String>,
}

impl Fio {
    pub fn find() -> Fio {
        let output = Command::new("fio").arg("--version").output().ok();
        let version = output.filter(|output| output.status.success());
        Fio { version: version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string()) }
    }

    pub fn describe(&self) -> String {
        match &self.version {
            Some(version) => format!("{version} with {}={} {}", HUGE_MALLOC.0, HUGE_MALLOC.1, TUNING.join(" ")),
            None => "fio is missing, its columns are empty: apt-get install fio".into(),
        }
    }

    /// Runs one round, or returns `None` without fio. Fails if fio fails, or if a figure is missing
    /// in its output.
    pub fn run(&self, file: &Path, direction: Direction, size: usize, count: usize) -> Result<Option<RoundFigures>> {
        if self.version.is_none() {
            return Ok(None);
        }
        let output = Command::new("fio")
            .env(HUGE_MALLOC.0, HUGE_MALLOC.1)
            .args(TUNING)
            .arg("--name=bench")
            .arg(format!("--filename={}", file.display()))
            .arg(format!("--rw=rand{}", direction.name()))
            .args([format!("--bs={size}"), format!("--iodepth={QUEUE_DEPTH}")])
            .arg(format!("--size={}", std::fs::metadata(file)?.len()))
            .arg(format!("--io_size={}", size * count))
            .output()?;
        ensure!(output.status.success(), "fio failed: {}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).context("output of fio is not JSON")?;
        read_json(&json, direction).map(Some)
    }
}

fn read_json(json: &serde_json::Value, direction: Direction) -> Result<RoundFigures> {
    let job = &json["jobs"][0];
    let way = &job[direction.name()];
    let number =
        |value: &serde_json::Value, name: &str| value.as_f64().with_context(|| format!("output of fio has no {name}"));
    let bytes = number(&way["io_bytes"], "io_bytes")?;
    let percentile = |name| number(&way["clat_ns"]["percentile"][name], "latency percentiles");
    // fio reports CPU time in percent of the run time of its one thread.
    let busy = (number(&job["usr_cpu"], "CPU time")? + number(&job["sys_cpu"], "CPU time")?) / 100.0;
    let seconds = number(&way["runtime"], "run time")? / 1e3;
    Ok(RoundFigures {
        gb_per_s: number(&way["bw_bytes"], "bandwidth")? / 1e9,
        p50_us: percentile("50.000000")? / 1e3,
        p99_us: percentile("99.000000")? / 1e3,
        cpu_per_gib: busy * seconds / (bytes / (1u64 << 30) as f64),
    })
}
