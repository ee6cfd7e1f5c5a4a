//! Log lines on standard error.

use crate::output::escape;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format;

/// Starts logging to standard error, with `filter`.
pub fn start(filter: &str) {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .fmt_fields(escaped_fields())
        .init();
}

/// Formats message and fields of an event in one line. Peers choose some of the values; escaped,
/// they can neither begin a line of their own nor reach the terminal.
fn escaped_fields() -> impl for<'writer> FormatFields<'writer> + 'static {
    let fields = format::debug_fn(|writer, field, value| {
        let value = escape(&format!("{value:?}"));
        match field.name() {
            "message" => write!(writer, "{value}"),
            name => write!(writer, "{name}={value}"),
        }
    });
    fields.delimited(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn values_from_peers_cannot_forge_log_lines() {
        let captured = Captured::default();
        let writer = captured.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .with_target(false)
            .fmt_fields(escaped_fields())
            .finish();
        let name = "evil\n2026-01-01 INFO all is well\u{1b}[2J";
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(engine = %name, count = 3, "lost {name}");
        });
        let text = String::from_utf8(captured.0.lock().unwrap().clone()).unwrap();
        assert!(
            text.contains("engine=evil\\u000a2026") && text.contains(" count=3") && text.contains("WARN lost evil"),
            "{text}"
        );
        assert!(text.lines().count() == 1 && !text.contains('\u{1b}'), "{text:?}");
    }
}
