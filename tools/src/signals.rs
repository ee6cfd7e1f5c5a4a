//! Waiting for the end.

use tokio::signal::unix::{SignalKind, signal};

/// Returns at the first SIGINT (Ctrl-C) or SIGTERM.
pub async fn stop_requested() -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
