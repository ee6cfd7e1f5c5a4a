//! Paths of bytes from a file to the memory of a device.

use crate::{FileNumber, PageRead, TransferError};
use larder_io::DeviceFile;
use larder_kernels::device::Memory;
use std::fmt;
use std::sync::Arc;

/// Path for bytes from storage to device memory, ordered from the fastest to the slowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathKind {
    /// libcufile, which moves bytes from the storage device to the GPU by itself (GPUDirect
    /// Storage).
    CuFile,
    /// Direct I/O to pinned memory of the host, which the device reads by itself.
    Pinned,
    /// Direct I/O to memory of the host that is not pinned. On a GPU this costs one more copy,
    /// through a pinned buffer of the worker.
    Host,
}

impl PathKind {
    /// All paths, fastest first. [`open`](crate::open()) tries them in this order.
    pub const ALL: [PathKind; 3] = [PathKind::CuFile, PathKind::Pinned, PathKind::Host];

    pub fn name(self) -> &'static str {
        match self {
            PathKind::CuFile => "cufile",
            PathKind::Pinned => "pinned",
            PathKind::Host => "host",
        }
    }
}

impl fmt::Display for PathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One way to move bytes from files to the memory of a device. Its calls block, so
/// [`Transfers`](crate::Transfers) makes them on threads of its own.
pub trait TransferPath: fmt::Debug + Send + Sync {
    fn kind(&self) -> PathKind;

    /// Details for operators, such as the mode of a library. A [`Report`](crate::Report) shows them
    /// in parentheses after the name of the path.
    fn mode(&self) -> String;

    /// Takes an open file, which may come from another process. The path keeps it open until it is
    /// detached.
    ///
    /// # Errors
    /// If the library or the kernel refuses the file, or if the maximum number of files is
    /// attached.
    fn attach(&self, file: DeviceFile) -> Result<FileNumber, TransferError>;

    /// Closes a file after the transfers that use it. The number may be reused.
    ///
    /// # Errors
    /// If no file has this number.
    fn detach(&self, file: FileNumber) -> Result<(), TransferError>;

    /// Prepares device memory as a target of many transfers. Targets need not be registered, but
    /// some paths are slower then. The path keeps the memory.
    ///
    /// # Errors
    /// If the library refuses the memory.
    fn register(&self, memory: &Memory) -> Result<(), TransferError>;

    /// Makes the state of one thread: its stream and its buffers.
    ///
    /// # Errors
    /// If the device refuses a stream.
    fn worker(self: Arc<Self>, number: usize) -> Result<Box<dyn PathWorker>, TransferError>;
}

/// State of one thread that runs a path.
pub trait PathWorker: Send {
    /// Reads one page to its targets and verifies it. Returns only when nothing can touch the
    /// memory any more, however long that takes.
    ///
    /// # Errors
    /// If the page is not valid, if the file, the device or a library fails, or if a CRC differs.
    /// [`TransferError::Unsettled`] is the only error after which the memory may still be in use.
    fn read(&mut self, page: &PageRead) -> Result<(), TransferError>;
}
