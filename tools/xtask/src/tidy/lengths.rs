//! The rules `file-length`, `function-length` and `stale-exception`.

use super::Violation;
use crate::lexer::lex;
use crate::rust::functions;
use crate::source::SourceFile;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fmt::Write;

const FILE_LINES: usize = 700;
/// Lines that a function may have, from `fn` to its closing brace. Longer ones need an entry in
/// `exceptions.txt`, which may only shrink.
const FUNCTION_LINES: usize = 100;
/// Lines by which something may be shorter than its exception says before the exception has to
/// follow.
const SLACK: usize = 25;

#[derive(Debug, Default)]
pub struct Exceptions {
    lines: BTreeMap<String, usize>,
}

impl Exceptions {
    pub fn parse(text: &str) -> Result<Exceptions> {
        let mut exceptions = Exceptions::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let context = || format!("exceptions.txt:{}: expected `LINES path` or `LINES path::function`", index + 1);
            let (lines, name) = line.split_once(' ').with_context(context)?;
            exceptions.lines.insert(name.trim().to_string(), lines.parse().with_context(context)?);
        }
        Ok(exceptions)
    }
}

struct Measured {
    name: String,
    path: String,
    line: usize,
    lines: usize,
    limit: usize,
    rule: &'static str,
}

fn measure(files: &[SourceFile]) -> Vec<Measured> {
    let mut measured = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        measured.push(Measured {
            name: file.path.clone(),
            path: file.path.clone(),
            line: 1,
            lines: file.text.lines().count(),
            limit: FILE_LINES,
            rule: "file-length",
        });
        for function in functions(&lex(&file.text)) {
            measured.push(Measured {
                name: format!("{}::{}", file.path, function.name),
                path: file.path.clone(),
                line: function.line,
                lines: function.lines,
                limit: FUNCTION_LINES,
                rule: "function-length",
            });
        }
    }
    measured
}

pub fn check(files: &[SourceFile], exceptions: &Exceptions, found: &mut Vec<Violation>) {
    let mut longest: BTreeMap<String, usize> = BTreeMap::new();
    for it in measure(files) {
        let accepted = exceptions.lines.get(&it.name).copied().unwrap_or(it.limit).max(it.limit);
        if it.lines > accepted {
            found.push(Violation {
                path: it.path,
                line: it.line,
                rule: it.rule,
                message: format!("{} has {} lines, {accepted} are accepted", it.name, it.lines),
                fix: "split it along its responsibilities; a limit of exceptions.txt is never raised".to_string(),
            });
        }
        // Functions of one name in one file share an exception.
        let entry = longest.entry(it.name).or_default();
        *entry = it.lines.max(*entry);
    }
    for (name, accepted) in &exceptions.lines {
        let lines = longest.get(name).copied().unwrap_or(0);
        let limit = if name.contains("::") { FUNCTION_LINES } else { FILE_LINES };
        let fix = if lines <= limit {
            format!("remove the line `{accepted} {name}`")
        } else if lines + SLACK < *accepted {
            format!("lower its number to {lines}")
        } else {
            continue;
        };
        found.push(Violation {
            path: super::EXCEPTIONS.to_string(),
            line: 1,
            rule: "stale-exception",
            message: format!("{name} has {lines} lines, the exception is for {accepted}"),
            fix,
        });
    }
}

pub fn present(files: &[SourceFile]) -> String {
    let mut longest: BTreeMap<String, usize> = BTreeMap::new();
    for it in measure(files).into_iter().filter(|it| it.lines > it.limit) {
        let entry = longest.entry(it.name).or_default();
        *entry = it.lines.max(*entry);
    }
    let mut text = format!(
        "# Files over {FILE_LINES} lines and functions over {FUNCTION_LINES}, with the lines that each may have.\n\
         # Numbers may only shrink. New entries need a reason in the commit that adds them.\n"
    );
    for (name, lines) in longest {
        let _ = writeln!(text, "{lines} {name}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(lines: usize, exceptions: &str) -> Vec<(&'static str, String)> {
        let text = format!("fn long() {{\n{}}}\n", "    x();\n".repeat(lines - 2));
        let files = [SourceFile { path: "a.rs".to_string(), text }];
        let exceptions = Exceptions::parse(exceptions).expect("the sample is well formed");
        let mut found = Vec::new();
        check(&files, &exceptions, &mut found);
        found.into_iter().map(|violation| (violation.rule, violation.fix)).collect()
    }

    fn rules(lines: usize, exceptions: &str) -> Vec<&'static str> {
        found(lines, exceptions).into_iter().map(|(rule, _)| rule).collect()
    }

    #[test]
    fn lengths_up_to_the_limit_are_accepted() {
        assert!(rules(100, "").is_empty());
        assert_eq!(rules(101, ""), ["function-length"]);
        assert_eq!(rules(701, ""), ["file-length", "function-length"]);
    }

    #[test]
    fn exceptions_accept_their_length_and_no_more() {
        assert!(rules(710, "710 a.rs\n# comment\n710 a.rs::long\n").is_empty());
        assert_eq!(rules(711, "710 a.rs\n711 a.rs::long\n"), ["file-length"]);
    }

    #[test]
    fn exceptions_that_are_too_generous_are_stale() {
        assert_eq!(found(120, "150 a.rs::long"), [("stale-exception", "lower its number to 120".to_string())]);
        assert_eq!(found(90, "150 a.rs::long"), [("stale-exception", "remove the line `150 a.rs::long`".to_string())]);
        assert_eq!(rules(90, "150 gone.rs::f"), ["stale-exception"]);
    }

    #[test]
    fn present_lengths_are_accepted() {
        let text = format!("fn long() {{\n{}}}\n", "    x();\n".repeat(800));
        let files = [SourceFile { path: "a.rs".to_string(), text }];
        let exceptions = Exceptions::parse(&present(&files)).expect("the list is well formed");
        let mut found = Vec::new();
        check(&files, &exceptions, &mut found);
        assert!(found.is_empty());
    }
}
