//! fio with io_uring, at the best tuning found: registered buffers and file, no page cache, memory on huge pages.
//!
//! fio 3.33 itself asks for huge pages only of hugetlbfs, which most machines have none of; glibc does it for its `malloc`.

use super::QUEUE_DEPTH;
use super::figures::{Direction, Measured};
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

/// The fio of this machine, if there is one.
pub struct Fio {
    version: Option<String>,
}

impl Fio {
    /// Looks for it.
    pub fn find() -> Fio {
        let output = Command::new("fio").arg("--version").output().ok();
        let version = output.filter(|output| output.status.success());
        Fio { version: version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string()) }
    }

    /// What it is and how it is called, or how to get it.
    pub fn describe(&self) -> String {
        match &self.version {
            Some(version) => format!("{version} with {}={} {}", HUGE_MALLOC.0, HUGE_MALLOC.1, TUNING.join(" ")),
            None => "fio is missing, its columns are empty: apt-get install fio".into(),
        }
    }

    /// One round; `None` without fio.
    pub fn run(&self, file: &Path, direction: Direction, size: usize, count: usize) -> Result<Option<Measured>> {
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
        ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).context("fio's JSON")?;
        read_json(&json, direction).map(Some)
    }
}

fn read_json(json: &serde_json::Value, direction: Direction) -> Result<Measured> {
    let job = &json["jobs"][0];
    let way = &job[direction.name()];
    let number =
        |value: &serde_json::Value, what: &str| value.as_f64().with_context(|| format!("fio does not say {what}"));
    let bytes = number(&way["io_bytes"], "its bytes")?;
    let percentile = |name| number(&way["clat_ns"]["percentile"][name], "its latencies");
    // Percent of the run time of one thread.
    let busy = (number(&job["usr_cpu"], "its CPU time")? + number(&job["sys_cpu"], "its CPU time")?) / 100.0;
    let seconds = number(&way["runtime"], "its run time")? / 1e3;
    Ok(Measured {
        speed: number(&way["bw_bytes"], "its speed")? / 1e9,
        p50_us: percentile("50.000000")? / 1e3,
        p99_us: percentile("99.000000")? / 1e3,
        cpu_per_gib: busy * seconds / (bytes / (1u64 << 30) as f64),
    })
}
