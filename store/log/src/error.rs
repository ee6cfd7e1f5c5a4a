//! Errors of L3. Each text names the object and the next step for the operator.

use crate::machine::AppendError;
use larder_format::codec::DecodeError;
use larder_io::{OpenError, RingClosed};
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

#[derive(Debug, Error)]
pub enum L3Error {
    /// The directory is unusable, or another process uses it.
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot use the L3 superblock {}: {problem}; {advice} [LRD0203]", file.display())]
    Superblock { file: PathBuf, problem: String, advice: String },
    /// The options contradict each other or the existing log.
    #[error("invalid L3 options: {0} [LRD0204]")]
    Options(String),
    #[error("cannot {action} {}: {source}; check the device and its file system [LRD0205]", path.display())]
    Io {
        /// Infinitive with its preposition, to be followed by the path.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The caller's deadline passed. The request continues on the device and may still take effect.
    /// Its memory and segment stay reserved until then.
    #[error("the deadline passed during {0}: the L3 device is overloaded, or the deadline is too short")]
    Deadline(&'static str),
    #[error("the page is invalid: {0}")]
    Invalid(#[from] DecodeError),
    /// The page is larger than a segment, or the log takes no more writes.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// The arena has no free extent for a page to read. The page on the device is not affected: the
    /// caller may free memory and retry.
    #[error("no memory to read a page: the arena has no {bytes} contiguous free bytes; raise the L2 capacity")]
    NoMemory { bytes: usize },
    #[error("the L3 log is closed")]
    Closed,
}

impl From<RingClosed> for L3Error {
    fn from(_: RingClosed) -> L3Error {
        L3Error::Closed
    }
}

impl L3Error {
    /// Converter of an I/O error into [`L3Error::Io`], for `map_err`. `action` is an infinitive
    /// with its preposition, such as `list the segments in`, and `path` follows it.
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> L3Error {
        let path = path.as_ref().to_path_buf();
        move |source| L3Error::Io { action, path, source }
    }
}
