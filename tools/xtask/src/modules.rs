//! The module graph of a crate, and its cycles.
//!
//! A node is a source file. An edge leads from a file to the file that a path beginning with
//! `crate::`, `super::` or `self::` names, in `use` items and in expressions. A name that a module
//! re-exports leads to the module that defines it. Edges between a module and its ancestors or
//! descendants are left out, and so are `#[cfg(test)]` modules. A cycle is a strongly connected
//! component of at least two modules.

use crate::lexer::{Kind, Token, lex};
use std::collections::{BTreeMap, BTreeSet};

pub type ModulePath = Vec<String>;

#[derive(Debug)]
pub struct Graph {
    pub modules: Vec<ModulePath>,
    edges: Vec<BTreeSet<usize>>,
}

pub fn graph(files: &[(&str, &str)]) -> Graph {
    let modules: Vec<ModulePath> = files.iter().map(|(path, _)| module_path(path)).collect();
    let sources: Vec<Source> = files.iter().map(|(_, text)| scan(text)).collect();
    let resolver = Resolver { modules: &modules, sources: &sources };
    let mut edges = vec![BTreeSet::new(); modules.len()];
    for (from, source) in sources.iter().enumerate() {
        for path in &source.paths {
            let Some(to) = resolver.resolve(&modules[from], path) else {
                continue;
            };
            if !related(&modules[from], &modules[to]) {
                edges[from].insert(to);
            }
        }
    }
    Graph { modules, edges }
}

/// `log/scan.rs`, `log/scan/mod.rs` → `log::scan`; `lib.rs` and `main.rs` are the root.
fn module_path(path: &str) -> ModulePath {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if matches!(path, "lib" | "main" | "mod") {
        return Vec::new();
    }
    path.split('/').map(str::to_string).collect()
}

fn related(a: &[String], b: &[String]) -> bool {
    a.starts_with(b) || b.starts_with(a)
}

struct Source {
    paths: Vec<Vec<String>>,
    imports: BTreeMap<String, Vec<String>>,
}

fn scan(text: &str) -> Source {
    let tokens: Vec<Token<'_>> = lex(text).into_iter().filter(|token| !token.is_comment()).collect();
    let tokens = without_tests(&tokens);
    let mut source = Source { paths: Vec::new(), imports: BTreeMap::new() };
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at].is_ident("use") {
            let mut found = Vec::new();
            at = use_tree(&tokens, at + 1, &[], &mut found);
            for (name, path) in found {
                if starts_inside(&path) {
                    source.paths.push(path.clone());
                }
                source.imports.insert(name, path);
            }
        } else if starts_path(&tokens, at) {
            let mut found = Vec::new();
            at = use_tree(&tokens, at, &[], &mut found);
            source.paths.extend(found.into_iter().map(|(_, path)| path));
        } else {
            at += 1;
        }
    }
    source
}

fn starts_inside(path: &[String]) -> bool {
    path.first().is_some_and(|first| matches!(first.as_str(), "crate" | "super" | "self"))
}

/// `true` at `crate::`, `super::` or `self::`, except in a visibility such as `pub(in crate::log)`,
/// which is no reference.
fn starts_path(tokens: &[Token<'_>], at: usize) -> bool {
    let inside = tokens[at].kind == Kind::Ident && matches!(tokens[at].text, "crate" | "super" | "self");
    let qualified = tokens.get(at + 1).is_some_and(|token| token.is_punct(':'))
        && tokens.get(at + 2).is_some_and(|token| token.is_punct(':'));
    let visibility = at > 0 && tokens[at - 1].is_ident("in");
    inside && qualified && !visibility
}

/// Expands the use tree at `at` under `prefix` into pairs of a name and its path. Returns the index
/// behind it.
fn use_tree(tokens: &[Token<'_>], mut at: usize, prefix: &[String], found: &mut Vec<(String, Vec<String>)>) -> usize {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(at) {
        if token.is_punct('{') {
            at += 1;
            while tokens.get(at).is_some_and(|token| !token.is_punct('}')) {
                let before = at;
                at = use_tree(tokens, at, &path, found);
                // A comma, or a token that no use tree has: skip it, so that the loop ends.
                if tokens.get(at).is_some_and(|token| token.is_punct(',')) || at == before {
                    at += 1;
                }
            }
            return at + 1;
        }
        if token.is_punct('*') {
            found.push(("*".to_string(), path));
            return at + 1;
        }
        if token.kind != Kind::Ident {
            break;
        }
        path.push(token.text.to_string());
        at += 1;
        if tokens.get(at).is_some_and(|token| token.is_ident("as")) {
            let name = tokens.get(at + 1).map_or(String::new(), |token| token.text.to_string());
            found.push((name, path));
            return at + 2;
        }
        let colons = tokens.get(at).is_some_and(|token| token.is_punct(':'))
            && tokens.get(at + 1).is_some_and(|token| token.is_punct(':'));
        if !colons {
            break;
        }
        at += 2;
    }
    // `use a::{self}` names `a`.
    if path.len() > prefix.len().max(1) && path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    if path.len() > prefix.len() || path == prefix {
        let name = path.last().cloned().unwrap_or_default();
        if !path.is_empty() {
            found.push((name, path));
        }
    }
    at
}

fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if !is_cfg_test(&tokens[at..]) {
            kept.push(tokens[at]);
            at += 1;
            continue;
        }
        let mut depth = 0;
        // Up to the brace that closes the item, or to its semicolon.
        while at < tokens.len() {
            match tokens[at].kind {
                Kind::Punct('{') => depth += 1,
                Kind::Punct('}') => {
                    depth -= 1;
                    if depth == 0 {
                        break;
                    }
                }
                Kind::Punct(';') if depth == 0 => break,
                _ => {}
            }
            at += 1;
        }
        at += 1;
    }
    kept
}

fn is_cfg_test(tokens: &[Token<'_>]) -> bool {
    let texts: Vec<&str> = tokens.iter().take(7).map(|token| token.text).collect();
    texts == ["#", "[", "cfg", "(", "test", ")", "]"]
}

struct Resolver<'a> {
    modules: &'a [ModulePath],
    sources: &'a [Source],
}

/// Re-exports of re-exports that are followed. The bound makes the search end even if modules
/// re-export each other.
const REEXPORTS: usize = 8;

impl Resolver<'_> {
    fn resolve(&self, from: &[String], path: &[String]) -> Option<usize> {
        let mut full = absolute(from, path)?;
        for _ in 0..REEXPORTS {
            let module = self.longest(&full);
            let Some(name) = full.get(self.modules[module].len()) else {
                return Some(module);
            };
            let Some(import) = self.sources[module].imports.get(name) else {
                return Some(module);
            };
            let Some(next) = absolute(&self.modules[module], import) else {
                return Some(module);
            };
            if next == full {
                return Some(module);
            }
            full = next;
        }
        Some(self.longest(&full))
    }

    /// Module whose path is the longest beginning of `full`, which may go on with an item of the
    /// module. The root begins every path.
    fn longest(&self, full: &[String]) -> usize {
        let fits = |module: &&ModulePath| full.starts_with(module);
        let best = self.modules.iter().filter(fits).max_by_key(|module| module.len());
        best.and_then(|best| self.modules.iter().position(|module| module == best)).unwrap_or(0)
    }
}

/// `path` from the crate's root. A path without `crate`, `super` or `self` starts at a child of
/// `from`.
fn absolute(from: &[String], path: &[String]) -> Option<ModulePath> {
    let mut full = from.to_vec();
    let mut rest = path;
    loop {
        match rest.first().map(String::as_str) {
            Some("crate") => full.clear(),
            Some("self") => {}
            Some("super") => {
                full.pop()?;
            }
            _ => break,
        }
        rest = &rest[1..];
    }
    full.extend(rest.iter().cloned());
    Some(full)
}

impl Graph {
    /// Strongly connected components of at least two modules, the largest first. An acyclic crate
    /// has none.
    pub fn cycles(&self) -> Vec<Vec<String>> {
        let reach: Vec<BTreeSet<usize>> = (0..self.modules.len()).map(|from| self.reachable(from)).collect();
        let mut assigned: BTreeSet<usize> = BTreeSet::new();
        let mut cycles = Vec::new();
        for from in 0..self.modules.len() {
            if assigned.contains(&from) {
                continue;
            }
            let members: Vec<usize> =
                reach[from].iter().copied().filter(|to| *to != from && reach[*to].contains(&from)).collect();
            if members.is_empty() {
                continue;
            }
            let members: BTreeSet<usize> = members.into_iter().chain([from]).collect();
            assigned.extend(&members);
            cycles.push(members.into_iter().map(|module| self.name(module)).collect());
        }
        cycles.sort_by_key(|cycle: &Vec<String>| std::cmp::Reverse(cycle.len()));
        cycles
    }

    pub fn edges_among(&self, names: &[String]) -> Vec<(String, String)> {
        let mut edges = Vec::new();
        for (from, targets) in self.edges.iter().enumerate() {
            for to in targets {
                let edge = (self.name(from), self.name(*to));
                if names.contains(&edge.0) && names.contains(&edge.1) {
                    edges.push(edge);
                }
            }
        }
        edges
    }

    fn reachable(&self, from: usize) -> BTreeSet<usize> {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(module) = open.pop() {
            for next in &self.edges[module] {
                if seen.insert(*next) {
                    open.push(*next);
                }
            }
        }
        seen
    }

    fn name(&self, module: usize) -> String {
        let path = &self.modules[module];
        if path.is_empty() { "(root)".to_string() } else { path.join("::") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_that_use_each_other_are_a_cycle() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::{b::{self, B}, c as d};"),
            ("b.rs", "fn f() { crate::a::g(); }"),
            ("c.rs", "use std::fmt;"),
        ]);
        assert_eq!(graph.cycles(), [["a", "b"]]);
        assert_eq!(graph.edges_among(&graph.cycles()[0]).len(), 2);
    }

    #[test]
    fn parent_and_child_are_no_cycle() {
        let graph = graph(&[
            ("lib.rs", "mod a;"),
            ("a.rs", "mod b; use self::b::B;"),
            ("a/b.rs", "use super::A; use crate::a::X;"),
        ]);
        assert!(graph.cycles().is_empty());
    }

    #[test]
    fn a_reexported_name_leads_to_its_module() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b; pub use a::A;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "use crate::A;"),
        ]);
        assert_eq!(graph.cycles(), [["a", "b"]]);
    }

    #[test]
    fn test_modules_do_not_count() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "#[cfg(test)] mod tests { use crate::b::B; }\n#[cfg(test)] use crate::b::C;"),
            ("b.rs", "use crate::a::A; pub(in crate::a) fn f() {}"),
        ]);
        assert!(graph.cycles().is_empty());
    }
}
