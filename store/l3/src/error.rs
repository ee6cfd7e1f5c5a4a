//! What can go wrong in L3, said so that an operator knows what to do.

use larder_core::log::AppendError;
use larder_device::{OpenError, RingGone};
use larder_format::codec::DecodeError;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why something could not be done.
#[derive(Debug, Error)]
pub enum L3Error {
    /// The directory cannot be used, or another store uses it.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The superblock cannot be used.
    #[error("{}: {problem}; {advice}", file.display())]
    Superblock {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
        /// What to do.
        advice: String,
    },
    /// The options contradict themselves or what is on the device.
    #[error("L3 options: {0}")]
    Options(String),
    /// A device or file system said no.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The deadline passed first. What was begun may still happen.
    #[error("deadline passed while waiting for {0}")]
    Deadline(&'static str),
    /// The page's tables contradict each other or the payload.
    #[error("page refused: {0}")]
    Invalid(#[from] DecodeError),
    /// The record is larger than a segment, or the log takes no more writes.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// The arena has no free extent for what should be read.
    #[error("no {bytes} bytes in a row are free in the arena")]
    NoMemory {
        /// What is needed.
        bytes: usize,
    },
    /// It was closed.
    #[error("L3 is closed")]
    Closed,
}

impl From<RingGone> for L3Error {
    fn from(_: RingGone) -> L3Error {
        L3Error::Closed
    }
}

impl L3Error {
    pub(crate) fn io(doing: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> L3Error {
        let path = path.as_ref().to_path_buf();
        move |source| L3Error::Io { doing, path, source }
    }
}
