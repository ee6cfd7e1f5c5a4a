//! What can go wrong.

use std::io;
use thiserror::Error;

/// There is no RDMA on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unavailable {
    /// libibverbs is not installed, or cannot be loaded.
    #[error("libibverbs cannot be loaded: {0}")]
    NoLibrary(String),
    /// The kernel has no RDMA, or does not let us use it. The error number of libibverbs.
    #[error("no RDMA devices: {}", io::Error::from_raw_os_error(*.0))]
    NoSupport(i32),
}

/// Why something could not be done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// There is no RDMA here.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// No device, port or GID of that name or number, or it is not in use.
    #[error("no {0}")]
    NotFound(String),
    /// libibverbs, or the device, refused. For registrations, the limit of locked memory (`ulimit -l`) is the usual reason.
    #[error("{call}: {}", io::Error::from_raw_os_error(*.code))]
    Refused {
        /// What was called.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
    /// A device did not do this in time; should it be done later, it is undone.
    #[error("{0} took too long")]
    Late(&'static str),
    /// There is no tokio runtime.
    #[error("not in a tokio runtime")]
    NoRuntime,
    /// An option, an address of a peer, or a length that cannot be used.
    #[error("{0}")]
    Invalid(&'static str),
    /// These bytes do not lie in that region, or the region belongs to another device.
    #[error("memory is not of this region and device")]
    NotRegistered,
    /// The endpoint is not connected (yet).
    #[error("not connected")]
    NotConnected,
    /// As many windows are open as the endpoint may have.
    #[error("too many windows")]
    TooManyWindows,
    /// Others' transfers did not leave room before the deadline. Nothing is wrong with the connection.
    #[error("no room for the transfer before its deadline")]
    Busy,
    /// The connection is dead.
    #[error("the connection is dead: {0}")]
    Dead(#[from] Death),
    /// The device has not let go of the memory, which therefore is not given back.
    #[error("the device has not let go of the memory")]
    Stuck,
}

/// Why a connection is dead.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Death {
    /// Its endpoint was dropped.
    #[error("closed")]
    Closed,
    /// A request failed: the status of its completion (`ibv_wc_status`).
    #[error("a request failed with status {status} (vendor {vendor:#x})")]
    Failed {
        /// `ibv_wc_status`: 10 is a peer's refusal of the access, 12 a peer that does not answer.
        status: u32,
        /// The device's own word.
        vendor: u32,
    },
    /// A request was not done by its deadline.
    #[error("a deadline passed")]
    Deadline,
    /// The device reported an event (`ibv_event_type`); 3 is an access by the peer that its key did not allow.
    #[error("event {0} of the device")]
    Event(u32),
    /// The device refused what it must not refuse.
    #[error("{call}: {}", io::Error::from_raw_os_error(*.code))]
    Refused {
        /// What was called.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
    /// The runtime that drives the connection ended.
    #[error("its runtime ended")]
    Runtime,
}

impl Error {
    /// What `call` said in errno.
    pub(crate) fn last(call: &'static str) -> Error {
        Error::Refused { call, code: io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
    }

    /// Death of this, where it was a refusal.
    pub(crate) fn into_death(self) -> Death {
        match self {
            Error::Refused { call, code } => Death::Refused { call, code },
            Error::Dead(death) => death,
            _ => Death::Closed,
        }
    }
}
