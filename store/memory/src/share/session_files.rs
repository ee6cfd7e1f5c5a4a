//! Files that a node sends over the session of a process that maps its arena.
//!
//! Invariant: the process keeps the files of numbers only that a caller expects. All others are
//! closed on receipt.

use super::arena_map::ArenaMap;
use super::handshake::try_receive;
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// The process's end of a session, with the files that came over it.
pub(super) struct SessionFiles {
    session: OwnedFd,
    /// By the number that a caller expects.
    expected: Mutex<BTreeMap<u64, Vec<OwnedFd>>>,
}

impl SessionFiles {
    pub(super) fn new(session: OwnedFd) -> SessionFiles {
        SessionFiles { session, expected: Mutex::default() }
    }

    /// Receives all messages that have arrived.
    fn receive(&self, expected: &mut BTreeMap<u64, Vec<OwnedFd>>) -> io::Result<()> {
        loop {
            match try_receive(self.session.as_fd()) {
                Ok((number, files)) => {
                    if let Some(slot) = expected.get_mut(&number) {
                        *slot = files;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Expectation of the files of one number. Dropping it closes those that nothing has taken.
pub struct ExpectedFiles {
    map: Arc<ArenaMap>,
    number: u64,
}

impl ExpectedFiles {
    pub(super) fn begin(map: Arc<ArenaMap>, number: u64) -> Option<ExpectedFiles> {
        map.session_files()?.expected.lock().insert(number, Vec::new());
        Some(ExpectedFiles { map, number })
    }

    /// Takes the files that have arrived. Does not wait: the node sends them before the answer that
    /// names them.
    ///
    /// # Errors
    /// If the session has ended, or if the node sent something else.
    pub fn take(&self) -> io::Result<Vec<OwnedFd>> {
        let Some(files) = self.map.session_files() else { return Ok(Vec::new()) };
        let mut expected = files.expected.lock();
        files.receive(&mut expected)?;
        Ok(expected.get_mut(&self.number).map(std::mem::take).unwrap_or_default())
    }
}

impl Drop for ExpectedFiles {
    fn drop(&mut self) {
        if let Some(files) = self.map.session_files() {
            // Closed without the lock.
            let unused = files.expected.lock().remove(&self.number);
            drop(unused);
        }
    }
}
