//! Mechanical rules of style. Every violation names its place and tells how to fix it.
//!
//! The rules hold for every `.rs` and `.md` file of the tree except generated ones. `words.txt`
//! lists words that are not used here, `exceptions.txt` lists files and functions that are longer
//! than the limits. The numbers in `exceptions.txt` may only shrink.

mod docs;
mod errors;
mod lengths;
mod words;

use crate::comments::{Block, blocks};
use crate::lexer::{Kind, Token, lex};
use crate::prose::{COMMENT_COLUMNS, OPENERS, is_vague_test_name};
use crate::rust::functions;
use crate::source::SourceFile;
use crate::structure::is_unit_match;
use anyhow::{Context, Result};
use lengths::Exceptions;
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;
use words::WordList;

const WORDS: &str = "tools/xtask/words.txt";
const EXCEPTIONS: &str = "tools/xtask/exceptions.txt";

/// A broken rule at one place, with the text of its fix. Violations sort by path and line, which is
/// the order of their fields.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    pub path: String,
    pub line: usize,
    pub rule: &'static str,
    pub message: String,
    pub fix: String,
}

impl Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}. Fix: {}", self.path, self.line, self.rule, self.message, self.fix)
    }
}

pub const RULES: &[&str] = &[
    "comment-width",
    "doc-opener",
    "test-name",
    "private-word",
    "unit-match",
    "file-length",
    "function-length",
    "stale-exception",
    "docs-index",
    "broken-link",
    "error-code",
];

/// Checks `files`, which were read from `root`, against every rule. Violations come sorted by path
/// and line.
pub fn check(root: &Path, files: &[SourceFile]) -> Result<Vec<Violation>> {
    let words = WordList::parse(&read_or_empty(&root.join(WORDS))?)?;
    let exceptions = Exceptions::parse(&read_or_empty(&root.join(EXCEPTIONS))?)?;
    let mut found = Vec::new();
    for file in files {
        if file.is_rust() {
            check_rust(file, &words, &mut found);
        } else if file.is_markdown() {
            words.check_markdown(file, &mut found);
        }
    }
    lengths::check(files, &exceptions, &mut found);
    docs::check_links(root, files, &mut found);
    docs::check_index(files, &mut found);
    errors::check(files, &mut found);
    found.sort();
    Ok(found)
}

/// Writes the present lengths of everything over the limits to `exceptions.txt`. Entries that are
/// no longer needed disappear.
pub fn accept_lengths(root: &Path, files: &[SourceFile]) -> Result<()> {
    let path = root.join(EXCEPTIONS);
    std::fs::write(&path, lengths::present(files)).with_context(|| format!("write {}", path.display()))
}

fn read_or_empty(path: &Path) -> Result<String> {
    if !path.exists() {
        return Ok(String::new());
    }
    std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

pub fn counts(violations: &[Violation]) -> BTreeMap<&'static str, usize> {
    let mut counts: BTreeMap<&str, usize> = RULES.iter().map(|rule| (*rule, 0)).collect();
    for violation in violations {
        *counts.entry(violation.rule).or_default() += 1;
    }
    counts
}

fn check_rust(file: &SourceFile, words: &WordList, found: &mut Vec<Violation>) {
    let tokens = lex(&file.text);
    check_width(file, &tokens, found);
    let blocks = blocks(&tokens);
    for block in blocks.iter().filter(|block| block.is_doc()) {
        check_opener(file, block, found);
    }
    for test in functions(&tokens).iter().filter(|function| function.is_test) {
        if is_vague_test_name(&test.name) {
            found.push(Violation {
                path: file.path.clone(),
                line: test.line,
                rule: "test-name",
                message: format!("the test `{}` starts with a pronoun", test.name),
                fix: "name the subject and its behaviour, as in `get_returns_miss_after_forget`".to_string(),
            });
        }
    }
    words.check_rust(file, &tokens, &blocks, found);
    let code: Vec<Token<'_>> = tokens.iter().copied().filter(|token| !token.is_comment()).collect();
    for at in 0..code.len() {
        if is_unit_match(&code[at..]) {
            found.push(Violation {
                path: file.path.clone(),
                line: code[at].line,
                rule: "unit-match",
                message: "a match on () stands for a chain of conditions".to_string(),
                fix: "write `if … else if … else`".to_string(),
            });
        }
    }
}

/// A line with a URL may be longer, because it cannot be wrapped. The width counts characters, not
/// bytes.
fn check_width(file: &SourceFile, tokens: &[Token<'_>], found: &mut Vec<Violation>) {
    let lines: Vec<&str> = file.text.lines().collect();
    for token in tokens.iter().filter(|token| token.is_comment() && token.leads_line) {
        for line in token.line..=token.last_line() {
            let text = lines.get(line - 1).copied().unwrap_or("");
            let columns = text.chars().count();
            if columns > COMMENT_COLUMNS && !text.contains("://") {
                found.push(Violation {
                    path: file.path.clone(),
                    line,
                    rule: "comment-width",
                    message: format!("this comment line has {columns} columns, the limit is {COMMENT_COLUMNS}"),
                    fix: "wrap the line, or say less".to_string(),
                });
            }
        }
    }
}

fn check_opener(file: &SourceFile, block: &Block, found: &mut Vec<Violation>) {
    let Some(opener) = block.opener() else { return };
    if !OPENERS.contains(&opener.as_str()) && opener != "when" {
        return;
    }
    let kind = if block.kind == Kind::ModuleDoc { "module header" } else { "doc comment" };
    found.push(Violation {
        path: file.path.clone(),
        line: block.first_line(),
        rule: "doc-opener",
        message: format!("this {kind} opens with \"{opener}\""),
        fix: "open with a noun phrase or a third-person verb (\"Number of…\", \"Reserves…\", \"Returns `true` if…\"), \
            or delete a comment that only repeats the name"
            .to_string(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{read_tree, workspace_root};

    const PRINTED: usize = 60;

    fn rust(text: &str) -> Vec<(&'static str, usize)> {
        let file = SourceFile { path: "a.rs".to_string(), text: text.to_string() };
        let mut found = Vec::new();
        check_rust(&file, &WordList::default(), &mut found);
        found.iter().map(|violation| (violation.rule, violation.line)).collect()
    }

    #[test]
    fn wide_comment_lines_are_found() {
        let wide = "x ".repeat(55);
        assert_eq!(rust(&format!("fn a() {{}}\n/// A {wide}\nfn b() {{}}\n")), [("comment-width", 2)]);
        assert_eq!(rust(&format!("// see https://example.org/{wide}\n")), []);
        assert_eq!(rust(&format!("let a = \"{wide}\"; // short\n")), []);
        assert_eq!(rust(&format!("// {}\n", "é".repeat(97))), []);
    }

    #[test]
    fn doc_comments_that_open_with_a_pronoun_are_found() {
        assert_eq!(rust("//! How it works\n\n/// When set, x\nfn a() {}\n"), [("doc-opener", 1), ("doc-opener", 3)]);
        assert_eq!(rust("/// Number of pages.\nfn a() {}\n// What for: speed.\n"), []);
    }

    #[test]
    fn test_names_that_start_with_a_pronoun_are_found() {
        assert_eq!(rust("#[test]\nfn whoever_dies_is_gone() {}\n"), [("test-name", 2)]);
        assert_eq!(rust("#[test]\nfn whole_pages_are_read() {}\nfn what_is() {}\n"), []);
    }

    #[test]
    fn matches_on_unit_are_found() {
        assert_eq!(rust("fn a() {\n    match () {\n        () => {}\n    }\n}\n"), [("unit-match", 2)]);
        assert_eq!(rust("fn a() { match x() { () => {} } }\n"), []);
    }

    #[test]
    fn violations_tell_place_rule_and_fix() {
        let file = SourceFile { path: "a.rs".to_string(), text: "/// Whose page it is\nfn a() {}\n".to_string() };
        let mut found = Vec::new();
        check_rust(&file, &WordList::default(), &mut found);
        let text = found[0].to_string();
        assert!(
            text.starts_with("a.rs:1: doc-opener: this doc comment opens with \"whose\". Fix: open with"),
            "{text}"
        );
    }

    #[test]
    fn tree_is_tidy() {
        let root = workspace_root();
        let files = read_tree(&root).expect("the tree can be read");
        let found = check(&root, &files).expect("the lists of the rules are well formed");
        for violation in found.iter().take(PRINTED) {
            println!("{violation}");
        }
        assert!(found.is_empty(), "{} violations: {:?}. All: cargo xtask tidy", found.len(), counts(&found));
    }
}
