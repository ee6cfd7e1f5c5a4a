//! Tables for people, objects for scripts.

use super::figures::{Direction, Figures};
use super::fio::Fio;
use super::l3::DuringScrub;
use super::recovery::Start;
use anyhow::{Context, Result};
use larder_l3::{L3Stats, RecoveryReport};
use serde_json::json;
use std::path::Path;

/// Prints each size as soon as it is measured, and what belongs to the whole log at the end.
pub struct Report {
    json: bool,
    recoveries: Vec<String>,
}

const GIB: f64 = (1u64 << 30) as f64;

impl Report {
    /// Says what is measured, and how.
    pub fn begin(
        json: bool,
        dir: &Path,
        (rounds, at_once): (usize, usize),
        fio: &Fio,
        huge_pages: bool,
    ) -> Result<Report> {
        if json {
            println!(
                "{}",
                json!({"fio": fio.describe(), "rounds": rounds, "at_once": at_once, "huge_pages": huge_pages})
            );
        } else {
            let depth = super::QUEUE_DEPTH;
            println!(
                "{}: queue depth {depth}, L3 is asked for {at_once} pages at a time, median of {rounds} rounds, GB = 1e9 bytes",
                dir.display()
            );
            println!("arena on huge pages: {huge_pages}; {}\n", fio.describe());
            println!(
                "| | page KiB | L3 GB/s | bare | fio | L3 / better | p50 / p99 µs L3 | bare | fio | CPU s/GiB L3 | bare | fio |"
            );
            println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
        }
        Ok(Report { json, recoveries: Vec::new() })
    }

    /// One line: ours, bare, fio.
    pub fn size(&mut self, direction: Direction, size: usize, figures: [Option<Figures>; 3]) -> Result<()> {
        let [ours, bare, fio] = figures;
        let ours = ours.context("a round of L3")?.0;
        let better = [bare, fio].iter().flatten().map(|figures| figures.0.speed).fold(0.0, f64::max);
        let ratio = ours.speed / better;
        let all = [Some(ours), bare.map(|bare| bare.0), fio.map(|fio| fio.0)];
        if self.json {
            let object = |name: &str| {
                let index = ["l3", "bare", "fio"].iter().position(|&known| known == name).unwrap_or(0);
                all[index].map(|m| {
                    json!({"gb_per_s": m.speed, "p50_us": m.p50_us, "p99_us": m.p99_us, "cpu_s_per_gib": m.cpu_per_gib})
                })
            };
            let line = json!({"direction": direction.name(), "page_bytes": size, "ratio": ratio,
                "l3": object("l3"), "bare": object("bare"), "fio": object("fio")});
            println!("{line}");
            return Ok(());
        }
        let speed = all.map(|m| m.map_or("–".into(), |m| format!("{:.2}", m.speed)));
        let latency = all.map(|m| m.map_or("–".into(), |m| format!("{:.0} / {:.0}", m.p50_us, m.p99_us)));
        let cpu = all.map(|m| m.map_or("–".into(), |m| format!("{:.3}", m.cpu_per_gib)));
        let [speed, latency, cpu] = [speed, latency, cpu].map(|cells| cells.join(" | "));
        println!("| {} | {} | {speed} | {ratio:.2} | {latency} | {cpu} |", direction.name(), size >> 10);
        Ok(())
    }

    /// The next start of the log, its index, and reads during a scrub.
    pub fn recovery(&mut self, size: usize, found: RecoveryReport, stats: &L3Stats, scrub: Option<DuringScrub>) {
        let per_100_gib = found.milliseconds as f64 / (stats.bytes_on_device as f64 / GIB) * 100.0;
        let per_4_tib = per_100_gib * 40.96 / 1e3;
        // The field comes with the index that counts its bytes.
        let index_bytes = serde_json::to_value(stats).ok().and_then(|stats| stats["index_bytes"].as_f64());
        let per_page = index_bytes.map(|bytes| bytes / stats.pages.max(1) as f64);
        if self.json {
            let scrub = scrub.map(|s| json!({"p99_without_us": s.without_us, "p99_during_us": s.during_us}));
            let line = json!({"page_bytes": size, "recovery": found, "log_bytes": stats.bytes_on_device,
                "recovery_ms_per_100_gib": per_100_gib, "index_bytes_per_page": per_page, "scrub": scrub});
            println!("{line}");
            return;
        }
        let scrub = match scrub {
            Some(s) => format!("{:.0} → {:.0} ({:.2}×)", s.without_us, s.during_us, s.during_us / s.without_us),
            None => "no scrub yet".into(),
        };
        let per_page = per_page.map_or("not counted yet".into(), |bytes| format!("{bytes:.0}"));
        self.recoveries.push(format!(
            "| {} | {:.2} | {} | {} | {per_100_gib:.0} | {per_4_tib:.1} | {per_page} | {scrub} |",
            size >> 10,
            stats.bytes_on_device as f64 / GIB,
            found.pages,
            found.milliseconds,
        ));
    }

    /// The second table.
    pub fn end(self) {
        if self.json {
            return;
        }
        println!("\nThe next start, from the log alone:\n");
        println!(
            "| page KiB | log GiB | pages | ms | ms per 100 GiB | s per 4 TiB | index bytes per page | read p99 µs, without → during scrub |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        self.recoveries.iter().for_each(|line| println!("{line}"));
    }
}

/// Head of the table of starts.
pub fn begin_starts(json: bool) {
    if !json {
        println!(
            "| start after | caches dropped | page KiB | log GiB | segments (by footer) | pages | open ms | first page ms | all ms | ms per 100 GiB | s per 4 TiB |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|");
    }
}

/// One start.
pub fn start(json: bool, size: usize, start: &Start) {
    let Start { after, cold, open, first_page, index, report, log_bytes } = start;
    let [open, first_page, index] = [open, first_page, index].map(|time| time.as_secs_f64() * 1e3);
    let gib = *log_bytes as f64 / GIB;
    let per_100_gib = index / gib * 100.0;
    if json {
        let line = json!({"after": after, "cold": cold, "page_bytes": size, "log_bytes": log_bytes, "open_ms": open,
            "first_page_ms": first_page, "all_ms": index, "ms_per_100_gib": per_100_gib, "recovery": report});
        return println!("{line}");
    }
    let RecoveryReport { pages, segments, segments_by_footer, .. } = report;
    println!(
        "| {after} | {cold} | {} | {gib:.2} | {segments} ({segments_by_footer}) | {pages} | {open:.0} | {first_page:.0} | {index:.0} | {per_100_gib:.0} | {:.1} |",
        size >> 10,
        per_100_gib * 40.96 / 1e3,
    );
}
