//! Signals that stop a process.

use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT and SIGTERM. They are kept from the creation of this value on. Before it they kill the
/// process, so a server creates it before its first client can connect.
pub struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    pub fn listen() -> io::Result<StopSignals> {
        Ok(StopSignals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next signal. A signal that arrived since the last call ends the wait at once.
    pub async fn received(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Runs `work` until its end. Drops it and returns `None` if a signal arrives earlier.
    pub async fn unless_received<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = self.received() => None,
        }
    }
}
