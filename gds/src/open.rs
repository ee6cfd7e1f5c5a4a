//! Choice of a path: each is tried under a deadline, and the report says why a faster one is not in
//! use.

use crate::TransferError;
use crate::cufile::{CuFile, LIBRARY};
use crate::page::{Chunk, PageRead};
use crate::path::{PathKind, TransferPath};
use crate::staged::Staged;
use crate::transfers::{TransferLimits, Transfers};
use larder_format::disk::BLOCK_BYTES;
use larder_io::{Block, DeviceFile};
use larder_kernels::device::{Device, Place};
use larder_memory::Arena;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use thiserror::Error;

const NO_DEVICE: &str = "the device is memory of the host";

/// Library for [`PathKind::CuFile`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CuFileLibrary {
    /// The machine's libcufile, for CUDA devices only. Other devices have no memory that it knows.
    #[default]
    Installed,
    /// This file, for any device that is not the host.
    File(PathBuf),
}

/// Options of [`open`].
#[derive(Debug, Clone)]
pub struct TransferOptions {
    pub device: Arc<dyn Device>,
    /// Memory for pages on their way. `pinned` pins all of it. `cufile` does not use it. A page
    /// takes one contiguous range, and fails with [`TransferError::NoRoom`] if none is free.
    pub arena: Arc<Arena>,
    /// File that each path must be able to read, of the log or on its file system. Its first block
    /// of 4,096 bytes must not change meanwhile. A shorter file fails every path.
    pub probe_file: Arc<DeviceFile>,
    /// Maximum time for each path. It covers loading the library or pinning the arena, the read of
    /// one block, and the start of the threads.
    pub probe_limit: Duration,
    pub library: CuFileLibrary,
    pub limits: TransferLimits,
    /// Paths that are not tried, with the reason for the report. A caller whose path fails opens
    /// again without it.
    pub skip: Vec<(PathKind, String)>,
}

impl TransferOptions {
    /// Returns defaults: 5 s for each path, the installed libcufile, and all paths.
    pub fn new(device: Arc<dyn Device>, arena: Arc<Arena>, probe_file: Arc<DeviceFile>) -> TransferOptions {
        TransferOptions {
            device,
            arena,
            probe_file,
            probe_limit: Duration::from_secs(5),
            library: CuFileLibrary::default(),
            limits: TransferLimits::default(),
            skip: Vec::new(),
        }
    }
}

/// Path that is not in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    pub path: PathKind,
    pub reason: String,
}

/// Path in use, and the reasons against faster ones. [`fmt::Display`] writes it for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub path: PathKind,
    pub mode: String,
    /// Faster paths, fastest first.
    pub rejected: Vec<Rejected>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.path, self.mode)?;
        write_rejected(f, &self.rejected)
    }
}

fn write_rejected(f: &mut fmt::Formatter<'_>, rejected: &[Rejected]) -> fmt::Result {
    rejected.iter().try_for_each(|Rejected { path, reason }| write!(f, "; not {path}: {reason}"))
}

/// No path works. The error names every path with the reason against it, those of
/// [`TransferOptions::skip`] included.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub struct OpenError {
    pub rejected: Vec<Rejected>,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no path from storage to the device works")?;
        write_rejected(f, &self.rejected)
    }
}

/// Opens the fastest path that reads and verifies a block of the probe file. Blocks for at most
/// [`TransferOptions::probe_limit`] per path.
///
/// An attempt that exceeds its limit keeps its thread and memory until it ends by itself.
///
/// # Errors
/// If no path works. The error has the reason for each.
pub fn open(options: &TransferOptions) -> Result<(Transfers, Report), OpenError> {
    let mut rejected = Vec::new();
    for path in PathKind::ALL {
        match attempt(path, options) {
            Ok(transfers) => {
                let report = Report { path, mode: transfers.mode(), rejected };
                return Ok((transfers, report));
            }
            Err(reason) => rejected.push(Rejected { path, reason }),
        }
    }
    Err(OpenError { rejected })
}

fn attempt(path: PathKind, options: &TransferOptions) -> Result<Transfers, String> {
    if let Some((_, reason)) = options.skip.iter().find(|(skipped, _)| *skipped == path) {
        return Err(reason.clone());
    }
    let own = options.clone();
    within(options.probe_limit, path.name(), move || start(path, &own))?
}

/// Runs `call` on a thread of its own. Returns its result, or the reason if it takes longer than
/// `limit`. A later result is dropped on that thread.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    name: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let (reply, answer) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("larder-gds-probe".to_string());
    let started = thread.spawn(move || {
        let _ = reply.send(call());
    });
    started.map_err(|error| format!("no thread can be started: {error}"))?;
    answer.recv_timeout(limit).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => format!("{name} did not answer within {} ms", limit.as_millis()),
        mpsc::RecvTimeoutError::Disconnected => format!("the attempt with {name} panicked"),
    })
}

fn start(kind: PathKind, options: &TransferOptions) -> Result<Transfers, String> {
    let words = |error: TransferError| error.to_string();
    let (device, arena) = (Arc::clone(&options.device), Arc::clone(&options.arena));
    let path: Arc<dyn TransferPath> = match kind {
        PathKind::CuFile => Arc::new(CuFile::open(&library(options)?, device).map_err(words)?),
        PathKind::Pinned if device.info().kind == "host" => return Err(NO_DEVICE.to_string()),
        PathKind::Pinned => Arc::new(Staged::pinned(device, arena).map_err(words)?),
        PathKind::Host => Arc::new(Staged::host(device, arena).map_err(words)?),
    };
    probe(&path, options).map_err(words)?;
    Transfers::start(path, options.limits).map_err(words)
}

fn library(options: &TransferOptions) -> Result<PathBuf, String> {
    match (&options.library, options.device.info().kind) {
        (_, "host") => Err(NO_DEVICE.to_string()),
        (CuFileLibrary::File(file), _) => Ok(file.clone()),
        (CuFileLibrary::Installed, "cuda") => Ok(PathBuf::from(LIBRARY)),
        (CuFileLibrary::Installed, kind) => Err(format!("libcufile does not know the memory of the {kind} device")),
    }
}

/// Reads the first block of the probe file and compares it with the same block read by the kernel.
/// Detaches the file in either case.
///
/// # Errors
/// If the file is shorter than a block, or if the path cannot read it.
fn probe(path: &Arc<dyn TransferPath>, options: &TransferOptions) -> Result<(), TransferError> {
    let mut block = Block::of(&[]);
    options.probe_file.read_exact_at(&mut block[..], 0)?;
    let chunk = Chunk { bytes: BLOCK_BYTES as u32, crc: crc32fast::hash(&block[..]) };
    // Twice the length, so that it has a range that starts at a multiple of a block.
    let memory = options.device.allocate(Place::Device, 2 * BLOCK_BYTES)?;
    let start = (memory.address().next_multiple_of(BLOCK_BYTES as u64) - memory.address()) as usize;
    let target = memory.slice(start..start + BLOCK_BYTES)?;
    let file = path.attach(options.probe_file.try_clone()?)?;
    let page = PageRead { file, offset: 0, chunks: vec![chunk], targets: vec![target] };
    let read = Arc::clone(path).worker(0).and_then(|mut worker| worker.read(&page));
    read.and(path.detach(file))
}
