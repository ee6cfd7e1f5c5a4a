//! Functions and test names of a Rust file, found by its tokens.

use crate::lexer::{Kind, Token};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    pub name: String,
    pub line: usize,
    /// Lines from the `fn` keyword to the closing brace, both included. Zero for a declaration
    /// without a body.
    pub lines: usize,
    pub is_test: bool,
}

pub fn functions(tokens: &[Token<'_>]) -> Vec<Function> {
    let code: Vec<Token<'_>> = tokens.iter().copied().filter(|token| !token.is_comment()).collect();
    let mut functions = Vec::new();
    for (at, token) in code.iter().enumerate() {
        let Some(name) = code.get(at + 1).filter(|name| token.is_ident("fn") && name.kind == Kind::Ident) else {
            continue;
        };
        let lines = body_end(&code, at).map_or(0, |end| end - token.line + 1);
        functions.push(Function {
            name: name.text.to_string(),
            line: token.line,
            lines,
            is_test: has_test_attribute(&code[..at]),
        });
    }
    functions
}

/// Line of the brace that closes the body of the function whose `fn` stands at `at`. `None` if it
/// has no body.
fn body_end(code: &[Token<'_>], at: usize) -> Option<usize> {
    let mut brackets = 0_i32;
    let mut braces = 0_i32;
    for token in &code[at..] {
        match token.kind {
            Kind::Punct('(' | '[') => brackets += 1,
            Kind::Punct(')' | ']') => brackets -= 1,
            // `[u8; N]` in a signature has a semicolon, too.
            Kind::Punct(';') if braces == 0 && brackets == 0 => return None,
            Kind::Punct('{') => braces += 1,
            Kind::Punct('}') => {
                braces -= 1;
                if braces == 0 && brackets == 0 {
                    return Some(token.line);
                }
            }
            _ => {}
        }
    }
    None
}

fn has_test_attribute(before: &[Token<'_>]) -> bool {
    let mut rest = before;
    loop {
        rest = trim_qualifiers(rest);
        let Some(open) = attribute_start(rest) else {
            return false;
        };
        let path: Vec<&str> = rest[open + 2..]
            .iter()
            .take_while(|token| token.kind == Kind::Ident || token.is_punct(':'))
            .filter(|token| token.kind == Kind::Ident)
            .map(|token| token.text)
            .collect();
        if path.last().is_some_and(|last| matches!(*last, "test" | "rstest")) {
            return true;
        }
        rest = &rest[..open];
    }
}

fn trim_qualifiers<'a, 'b>(mut rest: &'a [Token<'b>]) -> &'a [Token<'b>] {
    while let Some((last, before)) = rest.split_last() {
        let qualifier = match last.kind {
            Kind::Ident => matches!(last.text, "pub" | "async" | "unsafe" | "const" | "extern" | "crate" | "super"),
            Kind::Text | Kind::Punct('(' | ')') => true,
            _ => false,
        };
        if !qualifier {
            break;
        }
        rest = before;
    }
    rest
}

fn attribute_start(rest: &[Token<'_>]) -> Option<usize> {
    if !rest.last()?.is_punct(']') {
        return None;
    }
    let mut depth = 0;
    for (at, token) in rest.iter().enumerate().rev() {
        if token.is_punct(']') {
            depth += 1;
        } else if token.is_punct('[') {
            depth -= 1;
            if depth == 0 {
                return at.checked_sub(1).filter(|at| rest[*at].is_punct('#'));
            }
        }
    }
    None
}

/// Words of an identifier: `RemoteGrantTable` and `remote_grant_table` have three, in lower case.
pub fn ident_words(ident: &str) -> Vec<String> {
    let mut words = Vec::new();
    for piece in ident.trim_start_matches("r#").split('_') {
        let mut word = String::new();
        let mut previous_lower = false;
        for c in piece.chars() {
            if c.is_uppercase() && previous_lower {
                words.push(std::mem::take(&mut word));
            }
            previous_lower = !c.is_uppercase();
            word.extend(c.to_lowercase());
        }
        words.push(word);
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::lex;

    #[test]
    fn function_length_runs_to_the_closing_brace() {
        let text =
            "trait T { fn declared(a: [u8; 3]); }\npub fn long(s: &str)\nwhere\n{\n    if s == \"}\" {}\n}\nfn x() {}";
        let found: Vec<_> = functions(&lex(text)).into_iter().map(|f| (f.name, f.line, f.lines)).collect();
        assert_eq!(found, [("declared".into(), 1, 0), ("long".into(), 2, 5), ("x".into(), 7, 1)]);
    }

    #[test]
    fn test_attributes_are_recognised() {
        let text = "#[test]\n#[ignore]\nfn a() {}\n#[tokio::test(flavor = \"x\")]\npub(crate) async fn b() {}\n\
            #[cfg(test)]\nfn c() {}\nfn d() {}";
        let found: Vec<_> = functions(&lex(text)).into_iter().map(|f| (f.name, f.is_test)).collect();
        assert_eq!(found, [("a".into(), true), ("b".into(), true), ("c".into(), false), ("d".into(), false)]);
    }

    #[test]
    fn function_pointers_are_no_functions() {
        assert!(functions(&lex("struct S { f: fn(u8) -> u8 }")).is_empty());
    }

    #[test]
    fn identifiers_split_into_words() {
        assert_eq!(ident_words("RemoteGrant_tableL2"), ["remote", "grant", "table", "l2"]);
        assert_eq!(ident_words("__MAX_BYTES"), ["max", "bytes"]);
    }
}
