//! Comment blocks of a Rust file.
//!
//! A block is a run of comments of one kind on consecutive lines. A doc comment is one block of
//! `///` lines or one `//!` header. A comment behind code is a block of its own.

use crate::lexer::{Kind, Token};

#[derive(Debug, Clone)]
pub struct CommentLine {
    pub line: usize,
    pub text: String,
}

#[derive(Debug, Clone)]
pub struct Block {
    pub kind: Kind,
    pub trails_code: bool,
    pub lines: Vec<CommentLine>,
}

impl Block {
    pub fn is_doc(&self) -> bool {
        matches!(self.kind, Kind::Doc | Kind::ModuleDoc)
    }

    pub fn first_line(&self) -> usize {
        self.lines.first().map_or(0, |line| line.line)
    }

    /// First word, without markup, in lower case. `None` if the block is empty or opens with an
    /// identifier in backticks.
    pub fn opener(&self) -> Option<String> {
        let line = self.lines.iter().find(|line| !line.text.trim().is_empty())?;
        let word = line.text.split_whitespace().next()?;
        // An identifier in backticks is a noun, whatever its spelling.
        if word.starts_with(['`', '[']) {
            return None;
        }
        let word: String = word.chars().filter(|c| c.is_alphabetic()).collect();
        (!word.is_empty()).then(|| word.to_lowercase())
    }
}

pub fn blocks(tokens: &[Token<'_>]) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for token in tokens.iter().filter(|token| token.is_comment()) {
        let lines = comment_lines(token);
        let joins = blocks.last().is_some_and(|last| {
            let end = last.lines.last().map_or(0, |line| line.line);
            last.kind == token.kind && !last.trails_code && token.leads_line && end + 1 == token.line
        });
        match blocks.last_mut() {
            Some(last) if joins => last.lines.extend(lines),
            _ => blocks.push(Block { kind: token.kind, trails_code: !token.leads_line, lines }),
        }
    }
    blocks
}

fn comment_lines(token: &Token<'_>) -> Vec<CommentLine> {
    let block = token.text.starts_with("/*");
    let body = if block { token.text.trim_end_matches("*/") } else { token.text };
    body.lines()
        .enumerate()
        .map(|(offset, text)| {
            let text = text.trim_start();
            let marker = if block { text.trim_start_matches(['/', '*', '!']) } else { strip_slashes(text) };
            CommentLine { line: token.line + offset, text: marker.strip_prefix(' ').unwrap_or(marker).to_string() }
        })
        .collect()
}

fn strip_slashes(text: &str) -> &str {
    let text = text.trim_start_matches('/');
    text.strip_prefix('!').unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::lex;

    #[test]
    fn consecutive_lines_of_one_kind_are_one_block() {
        let found = blocks(&lex("//! a\n//! b\n\n/// c\n/// d\n// e\nfn f() {} // g\n// h\n"));
        let shape: Vec<_> = found.iter().map(|block| (block.lines.len(), block.is_doc(), block.trails_code)).collect();
        assert_eq!(shape, [(2, true, false), (2, true, false), (1, false, false), (1, false, true), (1, false, false)]);
        assert_eq!(found[0].lines[1].text, "b");
        assert_eq!(found[4].first_line(), 8);
    }

    #[test]
    fn opener_skips_markup_and_identifiers() {
        let opener = |text: &str| blocks(&lex(text))[0].opener();
        assert_eq!(opener("/// **What** it is").as_deref(), Some("what"));
        assert_eq!(opener("/// `of` builds one"), None);
        assert_eq!(opener("///\n/// Number of pages").as_deref(), Some("number"));
    }
}
