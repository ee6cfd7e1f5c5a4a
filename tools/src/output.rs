//! Printing, safe from the texts of other processes. A reader of standard output that has gone, as
//! in `larder status | head`, causes no panic.

use larder_format::codec::is_printable_char;
use std::fmt::Arguments;
use std::io::Write;

/// Prints one line to standard output and ignores a closed pipe. So `larder status | head` ends
/// quietly, unlike with `println!`.
pub fn print_line(text: Arguments<'_>) {
    let _ = writeln!(std::io::stdout().lock(), "{}", escape_lines(&text.to_string()));
}

macro_rules! say {
    ($($text:tt)*) => { $crate::output::print_line(format_args!($($text)*)) };
}
pub(crate) use say;

/// Replaces characters that a terminal would obey by their escapes, e.g. a line feed by `\u000a`.
/// The escapes are those of JSON, so JSON stays JSON.
pub fn escape(text: &str) -> String {
    escape_except(text, |_| false)
}

/// Escapes like [`escape`], but keeps line feeds and tabs: for texts of several lines, whose cells
/// were escaped before.
pub fn escape_lines(text: &str) -> String {
    escape_except(text, |c| matches!(c, '\n' | '\t'))
}

fn escape_except(text: &str, is_kept: impl Fn(char) -> bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match is_printable_char(c) || is_kept(c) {
            true => escaped.push(c),
            false => escaped.push_str(&format!("\\u{:04x}", u32::from(c))),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_what_a_terminal_would_obey() {
        assert_eq!(escape("größe 模型 \\"), "größe 模型 \\");
        assert_eq!(escape("a\n\u{1b}[2J\u{9b}\u{202e}"), r"a\u000a\u001b[2J\u009b\u202e");
        assert_eq!(escape_lines("a\n\tb\r"), "a\n\tb\\u000d");
    }
}
