//! Output: progress, a table at the end, and one JSON object per figure in a file.

use super::ceilings::Bound;
use crate::output::say;
use anyhow::{Context, Result, ensure};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Times of one kind of work, each to its first token or of the whole.
///
/// `times` is not empty.
#[derive(Debug)]
pub struct Figure {
    pub name: String,
    pub times: Vec<Duration>,
    /// Share of the prompt tokens that were not computed.
    pub cached: f64,
    /// Time of the same work with everything computed.
    pub computed: Option<Duration>,
    pub bound: Option<Bound>,
}

impl Figure {
    pub fn median(&self) -> f64 {
        median(&self.times).as_secs_f64()
    }

    /// Factor by which it ends sooner than computation.
    fn speedup(&self) -> Option<f64> {
        self.computed.map(|computed| computed.as_secs_f64() / self.median())
    }

    fn json(&self) -> Value {
        let seconds: Vec<f64> = self.times.iter().map(Duration::as_secs_f64).collect();
        json!({
            "name": self.name, "seconds": seconds, "median": self.median(), "cached": self.cached,
            "speedup": self.speedup(),
            "ceiling": self.bound.map(|bound| json!({"name": bound.name, "seconds": bound.seconds})),
            "ratio": self.bound.map(|bound| bound.seconds / self.median()),
        })
    }
}

/// Median of times, of an even number the later one. 0 if there is none.
pub fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

#[derive(Debug)]
pub struct Report {
    file: Option<File>,
    table: Table,
    figures: usize,
    skipped: usize,
    problems: usize,
    /// Changes one token of every expectation, so that each comparison must fail.
    damage: bool,
}

impl Report {
    pub fn begin(file: Option<&Path>, damage: bool) -> Result<Report> {
        let create = |path: &Path| File::create(path).with_context(|| format!("cannot create {}", path.display()));
        let file = file.map(create).transpose()?;
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header([
            "figure",
            "median s (fastest – slowest, runs)",
            "from caches",
            "speedup over computed",
            "ceiling s",
            "ceiling / median",
        ]);
        Ok(Report { file, table, figures: 0, skipped: 0, problems: 0, damage })
    }

    pub fn progress(&self, text: &str) {
        say!("{text}");
    }

    pub fn figure(&mut self, figure: &Figure) -> Result<()> {
        let seconds = || figure.times.iter().map(Duration::as_secs_f64);
        let (fastest, slowest) = (seconds().fold(f64::INFINITY, f64::min), seconds().fold(0.0, f64::max));
        let number = |value: Option<f64>| value.map_or("–".to_string(), |value| format!("{value:.2}"));
        self.table.add_row([
            figure.name.clone(),
            format!("{:.3} ({fastest:.3} – {slowest:.3}, {})", figure.median(), figure.times.len()),
            format!("{:.1} %", figure.cached * 100.0),
            number(figure.speedup()),
            figure.bound.map_or("–".to_string(), |bound| format!("{:.4} {}", bound.seconds, bound.name)),
            number(figure.bound.map(|bound| bound.seconds / figure.median())),
        ]);
        self.figures += 1;
        self.line(&figure.json())
    }

    /// Tells that a part was left out. The run can still succeed.
    pub fn skipped(&mut self, text: &str) -> Result<()> {
        self.skipped += 1;
        say!("SKIPPED: {text}");
        self.line(&json!({"skipped": text}))
    }

    /// Adds the failure of a part. The run then fails.
    pub fn problem(&mut self, text: &str) -> Result<()> {
        self.problems += 1;
        say!("FAILED: {text}");
        self.line(&json!({"problem": text}))
    }

    /// Compares an answer with that of the computed prompt. A difference is a problem.
    pub fn compare_tokens(&mut self, name: &str, found: &[u32], computed: &[u32]) -> Result<bool> {
        let mut expected = computed.to_vec();
        if let Some(token) = expected.first_mut().filter(|_| self.damage) {
            *token ^= 1;
        }
        if found == expected && !found.is_empty() {
            return Ok(true);
        }
        self.problem(&format!("{name}: the answer is {found:?} instead of {expected:?}"))?;
        Ok(false)
    }

    /// Prints the table.
    ///
    /// # Errors
    /// If a part failed, or if there is no figure.
    pub fn end(mut self) -> Result<()> {
        let Report { figures, skipped, problems, .. } = self;
        self.line(&json!({"figures": figures, "skipped": skipped, "problems": problems}))?;
        say!("\n{}\n\n{figures} figures, {skipped} skipped, {problems} problems", self.table);
        ensure!(problems == 0, "{problems} parts failed");
        ensure!(figures > 0, "nothing was measured");
        Ok(())
    }

    fn line(&mut self, value: &Value) -> Result<()> {
        if let Some(file) = &mut self.file {
            writeln!(file, "{value}").context("cannot write the JSON file")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_is_compared_with_computation_and_ceiling() {
        let times = [30, 10, 20].map(Duration::from_millis).to_vec();
        let bound = Some(Bound { seconds: 0.005, name: "storage" });
        let computed = Some(Duration::from_millis(100));
        let json = Figure { name: "a".into(), times, cached: 0.5, computed, bound }.json();
        assert_eq!(json["median"], 0.02);
        assert_eq!(json["speedup"], 5.0);
        assert_eq!(json["ratio"], 0.25);
    }

    #[test]
    fn different_answers_and_damage_fail_the_run() {
        let times = vec![Duration::from_millis(1)];
        let figure = Figure { name: "a".into(), times, cached: 0.0, computed: None, bound: None };
        let mut report = Report::begin(None, false).unwrap();
        report.figure(&figure).unwrap();
        assert!(report.compare_tokens("a", &[1, 2], &[1, 2]).unwrap());
        assert!(
            !report.compare_tokens("a", &[1, 2], &[1, 3]).unwrap() && !report.compare_tokens("a", &[], &[]).unwrap()
        );
        assert!(report.end().is_err());
        let mut report = Report::begin(None, true).unwrap();
        report.figure(&figure).unwrap();
        assert!(!report.compare_tokens("a", &[1, 2], &[1, 2]).unwrap());
        assert!(report.end().is_err());
        let mut report = Report::begin(None, false).unwrap();
        report.figure(&figure).unwrap();
        report.end().unwrap();
    }

    #[test]
    fn run_without_figures_fails() {
        let mut report = Report::begin(None, false).unwrap();
        report.skipped("everything").unwrap();
        assert!(report.end().is_err());
    }
}
