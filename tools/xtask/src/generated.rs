//! Pages of docs/ that are generated from code.
//!
//! To add a page, let a command print it, and add a line to [`PAGES`].

use crate::runner::Runner;
use anyhow::{Context, Result, ensure};
use std::path::Path;

struct Page {
    path: &'static str,
    arguments: &'static [&'static str],
}

const PAGES: &[Page] = &[
    Page { path: "docs/configuration.md", arguments: &["docs", "configuration"] },
    Page { path: "docs/metrics.md", arguments: &["docs", "metrics"] },
];

/// Writes every generated page. With `check`, writes nothing and fails if a page differs from what
/// the code prints.
pub fn run(runner: &Runner, check: bool) -> Result<()> {
    let larder = runner.build_larder()?;
    let mut stale = Vec::new();
    for page in PAGES {
        let path = runner.root().join(page.path);
        let printed = print(runner, &larder, page)?;
        let present = std::fs::read_to_string(&path).unwrap_or_default();
        if present == printed {
            println!("{}: up to date", page.path);
        } else if check {
            println!("{}: differs from the code{}", page.path, first_difference(&present, &printed));
            stale.push(page.path);
        } else {
            std::fs::write(&path, printed).with_context(|| format!("write {}", page.path))?;
            println!("{}: written", page.path);
        }
    }
    ensure!(stale.is_empty(), "{} differ from the code. Fix: run `cargo xtask docs`", stale.join(", "));
    Ok(())
}

fn print(runner: &Runner, larder: &Path, page: &Page) -> Result<String> {
    // Defaults must not depend on the environment of the caller.
    let output = runner
        .command(larder)
        .args(page.arguments)
        .env_remove("LARDER_STORE")
        .env_remove("LARDER_ADMIN")
        .output()
        .with_context(|| format!("run {}", larder.display()))?;
    ensure!(
        output.status.success(),
        "`larder {}` failed: {}",
        page.arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let mut text = String::from_utf8(output.stdout).with_context(|| format!("{} is not UTF-8", page.path))?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

fn first_difference(present: &str, printed: &str) -> String {
    let lines = present.lines().map(Some).chain(std::iter::repeat(None));
    let found = lines.zip(printed.lines().map(Some).chain([None])).enumerate().find(|(_, (a, b))| a != b);
    match found {
        Some((index, (present, printed))) => format!(
            " at line {}\n  file: {}\n  code: {}",
            index + 1,
            present.unwrap_or("(end)"),
            printed.unwrap_or("(end)")
        ),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_difference_is_shown() {
        assert!(first_difference("a\nb\n", "a\nc\n").contains("line 2\n  file: b\n  code: c"));
        assert!(first_difference("", "a\n").contains("(end)"));
        assert!(first_difference("a\nb\n", "a\n").contains("code: (end)"));
    }
}
