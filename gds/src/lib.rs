//! Transfers between storage and device memory.
//!
//! There are three paths. [`transfer_paths`] lists the ones this machine supports:
//!
//! | path | transfer | requirements |
//! | --- | --- | --- |
//! | [`TransferPath::CuFile`] | NVMe to GPU memory (GPUDirect Storage) | CUDA device, libcufile |
//! | [`TransferPath::Pinned`] | direct I/O to pinned memory, then a device copy | CUDA device |
//! | [`TransferPath::Host`] | direct I/O to the arena | none |
//!
//! Only [`TransferPath::Host`] transfers bytes in this version, because the CPU engine computes on
//! host memory. The probe still reports the GPU paths, so that an operator sees which ones the
//! machine would offer.

mod host;
mod probe;

pub use host::{HostTransfer, TransferError};
pub use probe::{TransferPath, transfer_paths};
