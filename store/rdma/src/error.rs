//! Errors of RDMA, and the reasons why a connection is dead.

use std::io;
use thiserror::Error;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unavailable {
    #[error("libibverbs cannot be loaded: {0}")]
    NoLibrary(String),
    /// The kernel has no RDMA support, or denies access to it. Carries the errno.
    #[error("no RDMA devices: {}", io::Error::from_raw_os_error(*.0))]
    NoSupport(i32),
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The device, port or GID does not exist or is down.
    #[error("{0} was not found or is not in use")]
    NotFound(String),
    /// libibverbs or the device refused a call. For registrations, the limit on locked memory
    /// (`ulimit -l`) is the usual cause.
    #[error("{call}: {}", io::Error::from_raw_os_error(*.code))]
    Refused { call: &'static str, code: i32 },
    /// A step did not finish in time. If it finishes later, its result is dropped.
    #[error("{0} did not finish in time")]
    Late(&'static str),
    /// The call was made outside a tokio runtime, or the runtime is shutting down.
    #[error("RDMA needs a running tokio runtime")]
    NoRuntime,
    #[error("{0}")]
    Invalid(&'static str),
    /// The bytes lie outside the region, or the region belongs to another device.
    #[error("the memory is not registered with this device")]
    NotRegistered,
    #[error("the endpoint is not connected")]
    NotConnected,
    #[error("the endpoint has no grant left")]
    TooManyGrants,
    /// The caller stopped the transfer. The device is done with the memory, and the connection is
    /// intact.
    #[error("the caller stopped the transfer")]
    Stopped,
    #[error("the RDMA connection is dead: {0}")]
    Disconnected(#[from] DisconnectReason),
    /// The device has not released the memory. It is leaked.
    #[error("the device has not released the memory")]
    NotReleased,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DisconnectReason {
    #[error("closed")]
    Closed,
    #[error("a request failed with status {status} (vendor {vendor:#x})")]
    Failed {
        /// `ibv_wc_status`: 10 if the peer's key did not allow the access, 12 if the peer does not
        /// respond.
        status: u32,
        vendor: u32,
    },
    /// No request completed for too long, or the connection was not established in time.
    #[error("no progress in time")]
    Deadline,
    /// The device reported an event (`ibv_event_type`). 3 is an access by the peer that its key did
    /// not allow.
    #[error("the device reported event {0}")]
    Event(u32),
    #[error("{call}: {}", io::Error::from_raw_os_error(*.code))]
    Refused { call: &'static str, code: i32 },
    #[error("its runtime shut down")]
    Runtime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("not an RDMA address of this version")]
pub struct AddressError;

impl Error {
    pub(crate) fn last(call: &'static str) -> Error {
        Error::Refused { call, code: io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
    }

    pub(crate) fn into_reason(self) -> DisconnectReason {
        match self {
            Error::Refused { call, code } => DisconnectReason::Refused { call, code },
            Error::Disconnected(reason) => reason,
            _ => DisconnectReason::Closed,
        }
    }
}
