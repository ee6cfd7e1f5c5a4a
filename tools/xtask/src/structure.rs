//! Measures the structure of the workspace: crates, arrows between them, the longest chain, module
//! cycles.
//!
//! An arrow is a normal dependency of one workspace crate on another. Development and build
//! dependencies do not count. An optional dependency does. The measuring crate itself is left out,
//! so that trees with and without it compare.

use crate::lexer::{Token, lex};
use crate::modules;
use crate::source::{SourceFile, read_tree};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

#[derive(Debug)]
struct Package {
    folder: String,
    depends_on: BTreeSet<String>,
}

type Packages = BTreeMap<String, Package>;

pub fn print(root: &Path) -> Result<()> {
    let packages = packages(root)?;
    let arrows: usize = packages.values().map(|package| package.depends_on.len()).sum();
    println!("crates in the workspace                {}", packages.len());
    println!("arrows (normal dependencies)           {arrows}");
    let chain = longest_chain(&packages);
    println!("longest chain, in crates               {}: {}", chain.len(), chain.join(" → "));
    let files = read_tree(root)?;
    print_cycles(&packages, &files);
    print_patterns(&files);
    match duplicates(root) {
        Ok(names) => println!("dependencies in several versions       {}: {}", names.len(), names.join(", ")),
        Err(error) => println!("dependencies in several versions       unknown: {error:#}"),
    }
    println!();
    for (name, package) in &packages {
        let targets: Vec<&str> = package.depends_on.iter().map(String::as_str).collect();
        println!("{name} → {}", if targets.is_empty() { "(none)".to_string() } else { targets.join(", ") });
    }
    Ok(())
}

fn packages(root: &Path) -> Result<Packages> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata: Value = serde_json::from_slice(&output.stdout).context("parse cargo metadata")?;
    let root = metadata["workspace_root"].as_str().unwrap_or_default().to_string();
    let mut packages = Packages::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default().to_string();
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        let folder = Path::new(manifest).parent().unwrap_or(Path::new(""));
        let folder = folder.strip_prefix(&root).unwrap_or(folder).to_string_lossy().into_owned();
        if name == env!("CARGO_PKG_NAME") {
            continue;
        }
        let normal = package["dependencies"].as_array().into_iter().flatten().filter(|d| d["kind"].is_null());
        let depends_on = normal.filter_map(|d| d["name"].as_str().map(str::to_string)).collect();
        packages.insert(name, Package { folder, depends_on });
    }
    let names: BTreeSet<String> = packages.keys().cloned().collect();
    for package in packages.values_mut() {
        package.depends_on.retain(|name| names.contains(name));
    }
    Ok(packages)
}

fn longest_chain(packages: &Packages) -> Vec<String> {
    fn from<'a>(name: &'a str, packages: &'a Packages, known: &mut BTreeMap<&'a str, Vec<String>>) -> Vec<String> {
        if let Some(chain) = known.get(name) {
            return chain.clone();
        }
        let mut best = Vec::new();
        for next in &packages[name].depends_on {
            let chain = from(next, packages, known);
            if chain.len() > best.len() {
                best = chain;
            }
        }
        best.insert(0, name.to_string());
        known.insert(name, best.clone());
        best
    }
    let mut known = BTreeMap::new();
    packages.keys().map(|name| from(name, packages, &mut known)).max_by_key(Vec::len).unwrap_or_default()
}

fn print_cycles(packages: &Packages, files: &[SourceFile]) {
    let mut lines = Vec::new();
    for (name, package) in packages {
        let prefix = format!("{}/src/", package.folder);
        let sources: Vec<(&str, &str)> = files
            .iter()
            .filter_map(|file| Some((file.path.strip_prefix(&prefix)?, file.text.as_str())))
            .filter(|(path, _)| path.ends_with(".rs"))
            .collect();
        let graph = modules::graph(&sources);
        for cycle in graph.cycles() {
            let edges = graph.edges_among(&cycle);
            lines.push(format!(
                "  {name}: {} of {} modules, {} edges: {}",
                cycle.len(),
                graph.modules.len(),
                edges.len(),
                cycle.join(", ")
            ));
            lines.extend(edges.iter().map(|(from, to)| format!("    {from} → {to}")));
        }
    }
    let cycles = lines.iter().filter(|line| !line.starts_with("    ")).count();
    println!("module cycles beyond parent and child  {cycles}");
    lines.iter().for_each(|line| println!("{line}"));
}

fn print_patterns(files: &[SourceFile]) {
    let mut tuples = 0;
    let mut matches = 0;
    let mut saturating = 0;
    for file in files.iter().filter(|file| file.is_rust()) {
        let tokens: Vec<Token<'_>> = lex(&file.text).into_iter().filter(|token| !token.is_comment()).collect();
        for at in 0..tokens.len() {
            tuples += usize::from(is_tuple_let(&tokens[at..]));
            matches += usize::from(is_unit_match(&tokens[at..]));
            saturating += usize::from(tokens[at].is_ident("saturating_sub"));
        }
    }
    println!("let (a, b) = (x, y)                    {tuples}");
    println!("match () {{ … }}                         {matches}");
    println!("saturating_sub                         {saturating}");
}

pub fn is_unit_match(tokens: &[Token<'_>]) -> bool {
    let texts: Vec<&str> = tokens.iter().take(4).map(|token| token.text).collect();
    texts == ["match", "(", ")", "{"]
}

fn is_tuple_let(tokens: &[Token<'_>]) -> bool {
    let starts = tokens.first().is_some_and(|token| token.is_ident("let"))
        && tokens.get(1).is_some_and(|token| token.is_punct('('));
    if !starts {
        return false;
    }
    let Some(close) = closing(tokens, 1) else {
        return false;
    };
    let makes = tokens.get(close + 1).is_some_and(|token| token.is_punct('='))
        && tokens.get(close + 2).is_some_and(|token| token.is_punct('('));
    let Some(end) = makes.then(|| closing(tokens, close + 2)).flatten() else {
        return false;
    };
    tokens.get(end + 1).is_some_and(|token| token.is_punct(';') || token.is_ident("else"))
}

fn closing(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        if token.is_punct('(') {
            depth += 1;
        } else if token.is_punct(')') {
            depth -= 1;
            if depth == 0 {
                return Some(at);
            }
        }
    }
    None
}

fn duplicates(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("cargo")
        .args(["tree", "--workspace", "--duplicates", "--edges", "normal,build", "--depth", "0"])
        .args(["--prefix", "none", "--format", "{p}", "--offline", "--locked"])
        .current_dir(root)
        .output()
        .context("run cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr).trim());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            versions.entry(name).or_default().insert(version);
        }
    }
    // One version with two sets of features is listed twice, too.
    versions.retain(|_, versions| versions.len() > 1);
    Ok(versions.keys().map(|name| name.to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Vec<Token<'_>> {
        lex(text)
    }

    #[test]
    fn tuples_taken_apart_where_they_are_made_are_found() {
        assert!(is_tuple_let(&code("let (a, mut b) = (f(1, 2), 3);")));
        assert!(!is_tuple_let(&code("let (a, b) = f(1, 2);")));
        assert!(!is_tuple_let(&code("let (a, b) = (x, y).into();")));
        assert!(is_unit_match(&code("match () { () if a => b, () => c }")));
        assert!(!is_unit_match(&code("match (a) {}")));
    }

    #[test]
    fn longest_chain_follows_the_arrows() {
        let package = |names: &[&str]| Package {
            folder: String::new(),
            depends_on: names.iter().map(|name| name.to_string()).collect(),
        };
        let packages = Packages::from([
            ("a".to_string(), package(&["b", "d"])),
            ("b".to_string(), package(&["c"])),
            ("c".to_string(), package(&[])),
            ("d".to_string(), package(&[])),
        ]);
        assert_eq!(longest_chain(&packages), ["a", "b", "c"]);
    }
}
