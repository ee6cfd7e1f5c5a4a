//! A small lexer for Rust source text.
//!
//! It splits a file into comments, identifiers, literals and punctuation, each with its line
//! number. Parser crates drop plain comments, and the prose rules are about comments, so this crate
//! has a lexer of its own. It accepts any input: malformed source yields odd tokens, never a panic.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Doc,
    ModuleDoc,
    Comment,
    Ident,
    Lifetime,
    Text,
    Scalar,
    Punct(char),
}

#[derive(Debug, Clone, Copy)]
pub struct Token<'a> {
    pub kind: Kind,
    pub text: &'a str,
    pub line: usize,
    pub leads_line: bool,
}

impl Token<'_> {
    pub fn is_comment(&self) -> bool {
        matches!(self.kind, Kind::Doc | Kind::ModuleDoc | Kind::Comment)
    }

    pub fn is_punct(&self, punct: char) -> bool {
        self.kind == Kind::Punct(punct)
    }

    pub fn is_ident(&self, ident: &str) -> bool {
        self.kind == Kind::Ident && self.text == ident
    }

    pub fn last_line(&self) -> usize {
        self.line + self.text.matches('\n').count()
    }
}

/// Splits `text` into tokens and drops white space. The text need not be valid Rust: an
/// unterminated literal or comment ends with the file.
pub fn lex(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut at = 0;
    let mut line = 1;
    let mut leads_line = true;
    while let Some(first) = text[at..].chars().next() {
        if first.is_whitespace() {
            if first == '\n' {
                line += 1;
                leads_line = true;
            }
            at += first.len_utf8();
            continue;
        }
        let (kind, bytes) = token(&text[at..], first);
        let token = Token { kind, text: &text[at..at + bytes], line, leads_line };
        line = token.last_line();
        at += bytes;
        leads_line = false;
        tokens.push(token);
    }
    tokens
}

fn token(rest: &str, first: char) -> (Kind, usize) {
    if rest.starts_with("//") {
        let bytes = rest.find('\n').unwrap_or(rest.len());
        return (line_comment_kind(&rest[..bytes]), rest[..bytes].trim_end().len());
    }
    if rest.starts_with("/*") {
        return block_comment(rest);
    }
    if let Some(bytes) = text_literal(rest) {
        return (Kind::Text, bytes);
    }
    if first == '\'' {
        return quote(rest);
    }
    if first.is_alphabetic() || first == '_' {
        // `r#type` is an identifier, too.
        let raw = if rest.starts_with("r#") { 2 } else { 0 };
        return (Kind::Ident, raw + ident_bytes(&rest[raw..]));
    }
    if first.is_ascii_digit() {
        return (Kind::Scalar, number_bytes(rest));
    }
    (Kind::Punct(first), first.len_utf8())
}

fn line_comment_kind(comment: &str) -> Kind {
    if comment.starts_with("//!") {
        Kind::ModuleDoc
    } else if comment.starts_with("///") && !comment.starts_with("////") {
        Kind::Doc
    } else {
        Kind::Comment
    }
}

fn block_comment(rest: &str) -> (Kind, usize) {
    let kind = if rest.starts_with("/*!") {
        Kind::ModuleDoc
    } else if rest.starts_with("/**") && !rest.starts_with("/**/") {
        Kind::Doc
    } else {
        Kind::Comment
    };
    let bytes = rest.as_bytes();
    let mut depth = 0;
    let mut at = 0;
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return (kind, at);
        }
    }
    (kind, rest.len())
}

/// Length of a string literal with any prefix (`b`, `c`, `r`, `br`, `cr`), or `None` if `rest`
/// starts with something else.
fn text_literal(rest: &str) -> Option<usize> {
    let prefix = rest.find(|c: char| !matches!(c, 'b' | 'c' | 'r')).unwrap_or(rest.len());
    if prefix > 2 {
        return None;
    }
    let after = &rest[prefix..];
    if rest[..prefix].contains('r') {
        let hashes = after.len() - after.trim_start_matches('#').len();
        if !after[hashes..].starts_with('"') {
            return None;
        }
        let end = format!("\"{}", "#".repeat(hashes));
        let body = prefix + hashes + 1;
        return Some(rest[body..].find(&end).map_or(rest.len(), |found| body + found + end.len()));
    }
    if !after.starts_with('"') {
        return None;
    }
    Some(prefix + 1 + escaped_bytes(&after[1..], '"'))
}

fn escaped_bytes(rest: &str, end: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices() {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == end {
            return at + end.len_utf8();
        }
    }
    rest.len()
}

fn quote(rest: &str) -> (Kind, usize) {
    let mut chars = rest[1..].chars();
    let (second, third) = (chars.next(), chars.next());
    if second == Some('\\') || third == Some('\'') {
        return (Kind::Scalar, 1 + escaped_bytes(&rest[1..], '\''));
    }
    (Kind::Lifetime, 1 + ident_bytes(&rest[1..]))
}

fn ident_bytes(rest: &str) -> usize {
    rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
}

/// A number takes a dot only if a digit follows, so that ranges and method calls stay apart. For
/// example, `0..9` becomes four tokens.
fn number_bytes(rest: &str) -> usize {
    let whole = ident_bytes(rest);
    let fraction = &rest[whole..];
    if fraction.starts_with('.') && fraction[1..].starts_with(|c: char| c.is_ascii_digit()) {
        return whole + 1 + ident_bytes(&fraction[1..]);
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<(Kind, &str)> {
        lex(text).iter().map(|token| (token.kind, token.text)).collect()
    }

    #[test]
    fn comments_keep_their_kind() {
        let text = "//! a\n/// b\n// c\n//// d\n/* e /* f */ */ x";
        let found: Vec<_> = kinds(text).iter().map(|(kind, _)| *kind).collect();
        assert_eq!(found, [Kind::ModuleDoc, Kind::Doc, Kind::Comment, Kind::Comment, Kind::Comment, Kind::Ident]);
    }

    #[test]
    fn slashes_in_strings_are_no_comments() {
        let found = kinds(r##"f("// no", r#"" // no"#, b"\" // no") // yes"##);
        assert_eq!(found.iter().filter(|(kind, _)| *kind == Kind::Comment).count(), 1);
        assert_eq!(found.iter().filter(|(kind, _)| *kind == Kind::Text).count(), 3);
    }

    #[test]
    fn lifetimes_and_characters_differ() {
        let found = kinds(r"&'a '\'' 'b' '\u{1}' 'static");
        let kinds: Vec<_> = found.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [Kind::Punct('&'), Kind::Lifetime, Kind::Scalar, Kind::Scalar, Kind::Scalar, Kind::Lifetime]);
    }

    #[test]
    fn raw_identifiers_are_identifiers() {
        assert_eq!(kinds("r#type br"), [(Kind::Ident, "r#type"), (Kind::Ident, "br")]);
    }

    #[test]
    fn lines_are_counted_through_multi_line_tokens() {
        let tokens = lex("\"a\nb\"\nx /* c\nd */ y");
        let lines: Vec<_> = tokens.iter().map(|token| (token.text, token.line, token.leads_line)).collect();
        assert_eq!(lines[1], ("x", 3, true));
        assert_eq!(lines[3], ("y", 4, false));
    }

    #[test]
    fn malformed_source_does_not_panic() {
        for text in ["\"abc", "r#\"abc", "/* abc", "'", "'\\", "é'é", "/*/", "b", "1."] {
            lex(text);
        }
    }
}
