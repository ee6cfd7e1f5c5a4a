//! The rule `private-word`: words that readers from outside the project do not know.

use super::Violation;
use crate::comments::Block;
use crate::lexer::{Kind, Token};
use crate::markdown::{outside_fences, without_code};
use crate::rust::ident_words;
use crate::source::SourceFile;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub struct WordList {
    words: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    replacement: String,
    identifiers_only: bool,
}

impl WordList {
    /// Parses lines of the form `word → replacement` or `identifier word → replacement`. `#` starts
    /// a comment.
    pub fn parse(text: &str) -> Result<WordList> {
        let mut list = WordList::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let context = || format!("words.txt:{}: expected `word → replacement`", index + 1);
            let (word, replacement) = line.split_once('→').with_context(context)?;
            let (identifiers_only, word) = match word.trim().strip_prefix("identifier ") {
                Some(word) => (true, word.trim()),
                None => (false, word.trim()),
            };
            ensure!(!word.contains(' ') && !word.is_empty(), context());
            let entry = Entry { replacement: replacement.trim().to_string(), identifiers_only };
            list.words.insert(word.to_lowercase(), entry);
        }
        Ok(list)
    }

    pub fn check_rust(&self, file: &SourceFile, tokens: &[Token<'_>], blocks: &[Block], found: &mut Vec<Violation>) {
        for line in blocks.iter().flat_map(|block| &block.lines) {
            self.check_prose(file, line.line, &line.text, found);
        }
        for token in tokens.iter().filter(|token| token.kind == Kind::Ident) {
            for word in ident_words(token.text) {
                if let Some(entry) = self.words.get(&word) {
                    let message = format!("the identifier `{}` has the private word \"{word}\"", token.text);
                    found.push(violation(file, token.line, message, entry));
                }
            }
        }
    }

    pub fn check_markdown(&self, file: &SourceFile, found: &mut Vec<Violation>) {
        for (line, text) in outside_fences(&file.text) {
            self.check_prose(file, line, text, found);
        }
    }

    fn check_prose(&self, file: &SourceFile, line: usize, text: &str, found: &mut Vec<Violation>) {
        for word in without_code(text).split(|c: char| !c.is_alphanumeric()) {
            let entry = self.words.get(&word.to_lowercase()).filter(|entry| !entry.identifiers_only);
            if let Some(entry) = entry {
                found.push(violation(file, line, format!("\"{word}\" is a private word"), entry));
            }
        }
    }
}

fn violation(file: &SourceFile, line: usize, message: String, entry: &Entry) -> Violation {
    Violation {
        path: file.path.clone(),
        line,
        rule: "private-word",
        message,
        fix: format!("write {}", entry.replacement),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comments::blocks;
    use crate::lexer::lex;

    const LIST: &str = "# sample\ngrommet → session\nidentifier sprocket → channel\n";

    fn rust(text: &str) -> Vec<String> {
        let list = WordList::parse(LIST).expect("the sample is well formed");
        let file = SourceFile { path: "a.rs".to_string(), text: text.to_string() };
        let tokens = lex(&file.text);
        let mut found = Vec::new();
        list.check_rust(&file, &tokens, &blocks(&tokens), &mut found);
        found.iter().map(|violation| format!("{} {}", violation.line, violation.message)).collect()
    }

    #[test]
    fn listed_words_are_found_in_comments_and_identifiers() {
        let found = rust("// A Grommet.\nstruct NodeGrommet;\nfn sprocket_count() {}\n");
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[1].contains("`NodeGrommet`"));
    }

    #[test]
    fn other_words_strings_and_code_are_left_alone() {
        assert!(rust("// Grommets, a sprocket and `grommet`.\nlet a = \"grommet\";\n").is_empty());
    }

    #[test]
    fn documents_are_checked_outside_code() {
        let list = WordList::parse(LIST).expect("the sample is well formed");
        let text = "# The grommet\n```\ngrommet\n```\n| a | `grommet` | grommet |\n".to_string();
        let mut found = Vec::new();
        list.check_markdown(&SourceFile { path: "a.md".to_string(), text }, &mut found);
        let lines: Vec<_> = found.iter().map(|violation| (violation.line, violation.fix.as_str())).collect();
        assert_eq!(lines, [(1, "write session"), (5, "write session")]);
    }

    #[test]
    fn malformed_lines_are_refused() {
        assert!(WordList::parse("word replacement").is_err());
        assert!(WordList::parse("two words → one").is_err());
    }
}
