//! Transfers from files of L3 to the memory of a device.
//!
//! [`open()`] tries the paths of a machine from the fastest to the slowest, each under a deadline.
//! It returns the first that moved and verified a block of a real file, and a [`Report`] in words.
//!
//! | path | transfer | requirements |
//! | --- | --- | --- |
//! | [`PathKind::CuFile`] | device to device, by libcufile | CUDA device, libcufile |
//! | [`PathKind::Pinned`] | direct I/O to pinned memory, then a copy | a device that pins memory |
//! | [`PathKind::Host`] | direct I/O to the arena, then a copy | none |
//!
//! Invariants:
//! - A transfer owns its memory until no device can touch it any more. A deadline ends the caller's
//!   wait only. [`Transfers::read`] takes a `keep` value for that, which is dropped afterwards.
//! - Bytes count as transferred only after their CRCs have matched.
//! - Transfers read. The node is the only writer of a log.
//! - The number of pages in transfer and in the queue is bounded. More are refused at once.
//!
//! Layout:
//! - [`path`](mod@path): the trait [`TransferPath`]. `staged` and `cufile` implement it.
//! - `transfers`: the threads that run a path, deadlines, and the queue.
//! - `page`: what one page needs, and its verification.
//! - `open`: choice of a path. `machine`: the paths of a machine, without an attempt.

mod cufile;
mod error;
mod files;
mod machine;
mod open;
mod page;
pub mod path;
mod settle;
mod staged;
mod transfers;

pub use cufile::{CuFile, CuFileCode, CuFileError, Mode};
pub use error::TransferError;
pub use files::FileNumber;
pub use machine::machine_paths;
pub use open::{CuFileLibrary, OpenError, Rejected, Report, TransferOptions, open};
pub use page::{Chunk, PageRead};
pub use path::{PathKind, PathWorker, TransferPath};
pub use staged::Staged;
pub use transfers::{TransferLimits, TransferStats, Transfers};
