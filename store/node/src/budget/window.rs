//! Window of pages from DRAM that are on their way to fast readers.
//!
//! A page in DRAM can leave at once, so few bytes keep all links busy. More bytes in flight are
//! spread over more sockets, and leave the processor's cache before the kernel has sent them.
//!
//! Invariants:
//! - The window counts the reads of pages in DRAM of readers that are not blocked. A reader is
//!   *blocked* from the moment its socket is full until the socket takes a send without a wait.
//!   So slow readers take nothing from the window, however many they are.
//! - The window limits which reads start, within the bounds of the budget. It refuses nothing.

use super::{BudgetState, subtract};

/// Size of the window, in bytes. Two sends of a mebibyte for each of four connections: a link takes
/// one while its page follows.
const WINDOW_BYTES: u64 = 8 << 20;
/// Pages that fit into the window, however large they are.
const PAGES_MIN: u64 = 2;

/// Place of a page that is about to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadFrom {
    Dram,
    /// L3, or DRAM of a client that the page is exposed to. The bytes take time of a device.
    Device,
}

impl BudgetState {
    /// Returns `true` if a read of `bytes` waits until pages have left.
    pub(super) fn window_is_full(&self, from: ReadFrom, bytes: u64) -> bool {
        from == ReadFrom::Dram && self.window > 0 && self.window + bytes > WINDOW_BYTES.max(PAGES_MIN * bytes)
    }

    pub(super) fn add_to_window(&mut self, number: u64, bytes: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.dram_reads += bytes;
        if !connection.is_blocked {
            self.window += bytes;
        }
    }

    pub(super) fn remove_from_window(&mut self, number: u64, bytes: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        subtract(&mut connection.dram_reads, bytes);
        if !connection.is_blocked {
            subtract(&mut self.window, bytes);
        }
    }

    /// Takes the reads of a connection out of the window, or puts them back.
    pub(super) fn set_blocked(&mut self, number: u64, is_blocked: bool) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if std::mem::replace(&mut connection.is_blocked, is_blocked) == is_blocked {
            return;
        }
        match is_blocked {
            true => subtract(&mut self.window, connection.dram_reads),
            false => self.window += connection.dram_reads,
        }
    }
}
