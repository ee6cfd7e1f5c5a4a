//! Crates that must not be part of another one.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

/// Libraries whose programs may fork and go on in the child.
const FORKED: [&str; 2] = ["larder-python", "larder-capi"];
/// Its table of waiting threads does not survive a fork: docs/decisions/0067-locks-and-forks.md.
const PARKING: &str = "parking_lot_core";

/// Fails if a client library contains the table of waiting threads. The features of all crates
/// count, as in a build of the workspace.
pub fn check(root: &Path) -> Result<()> {
    let output = Command::new("cargo")
        .args(["tree", "--workspace", "--invert", PARKING, "--edges", "normal"])
        .args(["--prefix", "none", "--format", "{p}", "--locked"])
        .current_dir(root)
        .output()
        .context("run cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr).trim());
    let found = forked_among(&String::from_utf8_lossy(&output.stdout));
    ensure!(
        found.is_empty(),
        "{} must not contain {PARKING}. Fix: use larder_runtime::lock, and see `cargo tree --workspace --invert \
         {PARKING} --edges normal,features`",
        found.join(" and ")
    );
    Ok(())
}

/// Libraries among the lines of a tree of packages.
fn forked_among(tree: &str) -> Vec<&'static str> {
    let names: Vec<&str> = tree.lines().filter_map(|line| line.split_whitespace().next()).collect();
    FORKED.into_iter().filter(|library| names.contains(library)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_that_contain_the_crate_are_found() {
        let tree = "parking_lot_core v0.9.12\ntokio v1.54.1\nlarder-python v0.1.0 (/larder/tools/python)\n";
        assert_eq!(forked_among(tree), ["larder-python"]);
        assert!(forked_among("parking_lot_core v0.9.12\nlarder-node v0.1.0 (/larder/store/node)\n").is_empty());
    }
}
