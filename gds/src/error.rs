//! Errors of transfers.

use crate::cufile::CuFileError;
use crate::path::PathKind;
use larder_kernels::device::DeviceError;
use std::io;
use thiserror::Error;

/// Reasons for which a transfer is refused or fails. The targets then contain unspecified bytes.
#[derive(Debug, Error)]
pub enum TransferError {
    #[error("the arena has no free range of {0} bytes; retry later or enlarge the arena")]
    NoRoom(usize),
    #[error("the request is not valid: {0}")]
    Invalid(&'static str),
    #[error("no attached file has the number {0}")]
    UnknownFile(u32),
    #[error("{0} files are attached, the maximum; detach one first")]
    TooManyFiles(usize),
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes differ from the ones that were put. The page is a miss. `offset` is in bytes from
    /// the start of the file. `chunk` counts from 0.
    #[error("CRC mismatch in chunk {chunk} of the page at byte {offset} of its file")]
    Damaged { offset: u64, chunk: usize },
    #[error(transparent)]
    CuFile(#[from] CuFileError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Nothing proves that the device has finished. The memory is not reused until the process
    /// ends, and the path accepts no more transfers.
    #[error("the device failed and may still access the memory, which stays reserved: {0}")]
    Unsettled(DeviceError),
    /// The transfer may still run. It keeps its memory until it ends.
    #[error("the transfer did not end before its deadline; its memory stays reserved until it ends")]
    Deadline,
    #[error("{0} requests are queued or in transfer, the maximum; retry later")]
    Busy(usize),
    #[error("the path {0} failed before and accepts no more transfers; open another one")]
    Failed(PathKind),
    #[error("the transfers have stopped")]
    Stopped,
}
