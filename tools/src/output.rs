//! Printing. Nobody may be reading any more (`larder status | head`): that is no reason to fail.

use std::fmt::Arguments;
use std::io::Write;

/// Prints one line to standard output, as far as somebody reads it.
pub fn line(text: Arguments<'_>) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// Like `println!`, but never panics.
macro_rules! say {
    ($($text:tt)*) => { $crate::output::line(format_args!($($text)*)) };
}
pub(crate) use say;
