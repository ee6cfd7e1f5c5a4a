//! Output: Markdown tables, or one JSON object per line.

use super::figures::{Direction, Medians};
use super::fio::Fio;
use super::l3::ScrubLatency;
use super::recovery::Restart;
use anyhow::{Context, Result};
use larder_log::{L3Stats, RecoveryReport};
use serde_json::json;
use std::path::Path;

pub struct Report {
    json: bool,
    recoveries: Vec<String>,
}

const GIB: f64 = (1u64 << 30) as f64;

impl Report {
    pub fn begin(
        json: bool,
        dir: &Path,
        (rounds, concurrency): (usize, usize),
        fio: &Fio,
        huge_pages: bool,
    ) -> Result<Report> {
        if json {
            println!(
                "{}",
                json!({"fio": fio.describe(), "rounds": rounds, "concurrency": concurrency, "huge_pages": huge_pages})
            );
        } else {
            let depth = super::QUEUE_DEPTH;
            println!(
                "{}: queue depth {depth}, {concurrency} concurrent requests to L3, medians of {rounds} rounds, GB = 1e9 bytes",
                dir.display()
            );
            println!("arena on huge pages: {huge_pages}; {}\n", fio.describe());
            println!(
                "| | page KiB | L3 GB/s | io_uring | fio | L3 / faster of both | p50 / p99 µs L3 | io_uring | fio | CPU s/GiB L3 | io_uring | fio |"
            );
            println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
        }
        Ok(Report { json, recoveries: Vec::new() })
    }

    pub fn size(&mut self, direction: Direction, size: usize, figures: [Option<Medians>; 3]) -> Result<()> {
        let [ours, bare, fio] = figures;
        let ours = ours.context("no round of L3")?.0;
        let faster = [bare, fio].iter().flatten().map(|figures| figures.0.gb_per_s).fold(0.0, f64::max);
        let ratio = ours.gb_per_s / faster;
        let all = [Some(ours), bare.map(|bare| bare.0), fio.map(|fio| fio.0)];
        if self.json {
            let [ours, bare, fio] = all.map(|m| {
                m.map(|m| {
                    json!({"gb_per_s": m.gb_per_s, "p50_us": m.p50_us, "p99_us": m.p99_us, "cpu_s_per_gib": m.cpu_per_gib})
                })
            });
            let line = json!({"direction": direction.name(), "page_bytes": size, "ratio": ratio,
                "l3": ours, "io_uring": bare, "fio": fio});
            println!("{line}");
            return Ok(());
        }
        let speed = all.map(|m| m.map_or("–".into(), |m| format!("{:.2}", m.gb_per_s)));
        let latency = all.map(|m| m.map_or("–".into(), |m| format!("{:.0} / {:.0}", m.p50_us, m.p99_us)));
        let cpu = all.map(|m| m.map_or("–".into(), |m| format!("{:.3}", m.cpu_per_gib)));
        let [speed, latency, cpu] = [speed, latency, cpu].map(|cells| cells.join(" | "));
        println!("| {} | {} | {speed} | {ratio:.2} | {latency} | {cpu} |", direction.name(), size >> 10);
        Ok(())
    }

    pub fn recovery(&mut self, size: usize, found: RecoveryReport, stats: &L3Stats, scrub: ScrubLatency) {
        let per_100_gib = found.milliseconds as f64 / (stats.bytes_on_device as f64 / GIB) * 100.0;
        let per_4_tib = per_100_gib * 40.96 / 1e3;
        let index_bytes = serde_json::to_value(stats).ok().and_then(|stats| stats["index_bytes"].as_f64());
        let per_page = index_bytes.map(|bytes| bytes / stats.pages.max(1) as f64);
        if self.json {
            let scrub = json!({"p99_without_us": scrub.without_us, "p99_during_us": scrub.during_us});
            let line = json!({"page_bytes": size, "recovery": found, "log_bytes": stats.bytes_on_device,
                "recovery_ms_per_100_gib": per_100_gib, "index_bytes_per_page": per_page, "scrub": scrub});
            println!("{line}");
            return;
        }
        let ratio = scrub.during_us / scrub.without_us;
        let scrub = format!("{:.0} → {:.0} ({ratio:.2}×)", scrub.without_us, scrub.during_us);
        let per_page = per_page.map_or("–".into(), |bytes| format!("{bytes:.0}"));
        self.recoveries.push(format!(
            "| {} | {:.2} | {} | {} | {per_100_gib:.0} | {per_4_tib:.1} | {per_page} | {scrub} |",
            size >> 10,
            stats.bytes_on_device as f64 / GIB,
            found.pages,
            found.milliseconds,
        ));
    }

    pub fn end(self) {
        if self.json {
            return;
        }
        println!("\nRestart of the log:\n");
        println!(
            "| page KiB | log GiB | pages | recovery ms | ms per 100 GiB | s per 4 TiB | index bytes per page | read p99 µs, without → during scrub |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        self.recoveries.iter().for_each(|line| println!("{line}"));
    }
}

pub fn begin_restarts(json: bool) {
    if !json {
        println!(
            "| previous shutdown | caches dropped | page KiB | log GiB | segments (by footer) | pages | open ms | first page ms | index ms | ms per 100 GiB | s per 4 TiB |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|");
    }
}

pub fn restart(json: bool, size: usize, restart: &Restart) {
    let Restart { after, cold, open, first_page, index, report, log_bytes } = restart;
    let [open, first_page, index] = [open, first_page, index].map(|time| time.as_secs_f64() * 1e3);
    let gib = *log_bytes as f64 / GIB;
    let per_100_gib = index / gib * 100.0;
    if json {
        let line = json!({"after": after, "cold": cold, "page_bytes": size, "log_bytes": log_bytes, "open_ms": open,
            "first_page_ms": first_page, "index_ms": index, "ms_per_100_gib": per_100_gib, "recovery": report});
        return println!("{line}");
    }
    let RecoveryReport { pages, segments, segments_by_footer, .. } = report;
    let cold = if *cold { "yes" } else { "no" };
    println!(
        "| {after} | {cold} | {} | {gib:.2} | {segments} ({segments_by_footer}) | {pages} | {open:.0} | {first_page:.0} | {index:.0} | {per_100_gib:.0} | {:.1} |",
        size >> 10,
        per_100_gib * 40.96 / 1e3,
    );
}
