//! Printing to standard output without panicking when the reader has gone, as in
//! `larder status | head`.

use std::fmt::Arguments;
use std::io::Write;

/// Prints one line to standard output and ignores a closed pipe. So `larder status | head` ends
/// quietly, unlike with `println!`.
pub fn print_line(text: Arguments<'_>) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

macro_rules! say {
    ($($text:tt)*) => { $crate::output::print_line(format_args!($($text)*)) };
}
pub(crate) use say;
