//! The path `cufile`: libcufile moves bytes from a file to the memory of the GPU.
//!
//! Invariants:
//! - A call of libcufile that does not return keeps its thread, the file and the target.
//! - The bytes are verified where they have arrived: by a kernel, or by a copy back through pinned
//!   memory if the device has no such kernel.

mod library;

pub use library::{CuFileCode, CuFileError, Mode};

use crate::files::Files;
use crate::settle::{Buffer, Direction, copy_parts, settle};
use crate::{FileNumber, PageRead, PathKind, PathWorker, TransferError, TransferPath};
use larder_io::DeviceFile;
use larder_kernels::device::{Device, DeviceError, Memory, Place, Slice, Stream};
use larder_kernels::pages::CrcChunks;
use larder_runtime::lock::Mutex;
use library::{Functions, Handle};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;

/// Name of the library in the loader's folders.
pub(crate) const LIBRARY: &str = "libcufile.so.0";

/// Blocks of the kernel that verifies a page: at most this number of multiprocessors leaves the
/// computation.
const CRC_BLOCKS: u32 = 16;

/// libcufile with an open driver. A drop deregisters the memory. The driver stays open until the
/// process ends.
#[derive(Debug)]
pub struct CuFile {
    functions: Functions,
    mode: Mode,
    device: Arc<dyn Device>,
    /// The device has the kernel for CRCs.
    has_crc_kernel: bool,
    files: Files<Arc<OpenFile>>,
    registered: Mutex<Vec<Memory>>,
}

impl CuFile {
    /// Loads the library `name` and opens its driver. May block without limit.
    ///
    /// # Errors
    /// If the library is missing or too old, or if it refuses the machine.
    pub fn open(name: &Path, device: Arc<dyn Device>) -> Result<CuFile, TransferError> {
        let functions = Functions::load(name)?;
        bind(&*device)?;
        functions.open_driver()?;
        let mode = functions.mode()?;
        let has_crc_kernel = has_crc_kernel(&*device)?;
        Ok(CuFile { functions, mode, device, has_crc_kernel, files: Files::new(), registered: Mutex::default() })
    }

    /// Reads `target` from `offset` of the file. Short reads are continued.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before the target is full.
    fn read(&self, file: &OpenFile, offset: u64, target: &Slice) -> Result<(), TransferError> {
        let mut done = 0;
        while done < target.bytes() {
            // `PageRead::check` bounds the offsets.
            let (from, to) = ((offset + done as u64) as i64, (target.offset() + done) as i64);
            let (base, bytes) = (target.memory().address(), target.bytes() - done);
            // SAFETY: `file` keeps the handle registered. The range lies inside the target, which
            // the caller keeps allocated and unused until this call returns.
            let found = unsafe { self.functions.read(file.handle, base, bytes, from, to) }?;
            if found == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside the page").into());
            }
            done += found;
        }
        Ok(())
    }
}

impl TransferPath for CuFile {
    fn kind(&self) -> PathKind {
        PathKind::CuFile
    }

    fn mode(&self) -> String {
        let verified = if self.has_crc_kernel { "on the device" } else { "by a copy to the host" };
        format!("{}, verified {verified}", self.mode)
    }

    fn attach(&self, file: DeviceFile) -> Result<FileNumber, TransferError> {
        bind(&*self.device)?;
        let handle = self.functions.register_file(file.as_fd().as_raw_fd())?;
        self.files.add(Arc::new(OpenFile { functions: self.functions, handle, _file: file }))
    }

    fn detach(&self, file: FileNumber) -> Result<(), TransferError> {
        // The last read that uses the file deregisters it.
        self.files.remove(file).map(drop)
    }

    fn register(&self, memory: &Memory) -> Result<(), TransferError> {
        bind(&*self.device)?;
        // SAFETY: the list keeps the memory until the drop deregisters it.
        unsafe { self.functions.register_memory(memory.address(), memory.bytes()) }?;
        self.registered.lock().push(memory.clone());
        Ok(())
    }

    fn worker(self: Arc<Self>, number: usize) -> Result<Box<dyn PathWorker>, TransferError> {
        let stream = self.device.stream(&format!("{} {number}", PathKind::CuFile))?;
        let [buffer, tables, crcs] = [Buffer::default(), Buffer::default(), Buffer::default()];
        Ok(Box::new(Worker { path: self, stream, buffer, tables, crcs, is_bound: false }))
    }
}

impl Drop for CuFile {
    fn drop(&mut self) {
        let bound = bind(&*self.device);
        for memory in self.registered.lock().drain(..) {
            // SAFETY: it is registered. No read is left, because each owns this value.
            let outcome = unsafe { self.functions.deregister_memory(memory.address()) };
            if let Err(error) = outcome {
                tracing::warn!(%error, ?bound, "device memory stays allocated and pinned until the process ends");
                // The library would take a later allocation at this address for registered memory.
                std::mem::forget(memory);
            }
        }
    }
}

/// Registered file. Deregistered when the table and every read have dropped it.
#[derive(Debug)]
struct OpenFile {
    functions: Functions,
    handle: Handle,
    /// Must be open while the handle is registered, so it is dropped after it.
    _file: DeviceFile,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // SAFETY: `register_file` returned the handle, and every read owns this value.
        unsafe { self.functions.deregister_file(self.handle) };
    }
}

/// Makes the device's context current for this thread, which libcufile requires. A query of the
/// driver does so.
fn bind(device: &dyn Device) -> Result<(), TransferError> {
    device.free_bytes()?;
    Ok(())
}

/// Computes a CRC to learn if the device has the kernel.
fn has_crc_kernel(device: &dyn Device) -> Result<bool, TransferError> {
    let stream = device.stream("cufile CRC")?;
    let (chunk, crc) = (device.allocate(Place::Device, 16)?, device.allocate(Place::Pinned, 4)?);
    stream.fill(&chunk.all(), 0)?;
    let launched = CrcChunks::new(device, &[chunk.all()])?.compute(&*stream, 1, &crc.all());
    settle(&*stream)?;
    match launched {
        Ok(()) => Ok(true),
        Err(DeviceError::NoKernel(_) | DeviceError::RunsNoKernels(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

struct Worker {
    path: Arc<CuFile>,
    stream: Arc<dyn Stream>,
    /// Copy of a page. Not used if the device verifies.
    buffer: Buffer,
    /// Tables of the kernel, and its results.
    tables: Buffer,
    crcs: Buffer,
    is_bound: bool,
}

impl Worker {
    fn verify(&mut self, page: &PageRead) -> Result<(), TransferError> {
        if self.path.has_crc_kernel { self.verify_on_device(page) } else { self.verify_on_host(page) }
    }

    /// Lets the device compute the CRCs of the targets, and compares them.
    fn verify_on_device(&mut self, page: &PageRead) -> Result<(), TransferError> {
        let pieces = page.pieces()?;
        let targets: Vec<Slice> = pieces.iter().map(|piece| piece.target.clone()).collect();
        let device = &*self.path.device;
        let tables = self.tables.slice(device, CrcChunks::table_bytes(targets.len()))?;
        let mut found = vec![0; size_of::<u32>() * targets.len()];
        let crcs = self.crcs.slice(device, found.len())?;
        let launched = CrcChunks::new_in(&tables, &targets)?.compute(&*self.stream, CRC_BLOCKS, &crcs);
        settle(&*self.stream)?;
        launched?;
        crcs.read(&mut found)?;
        let found: Vec<u32> = found.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect();
        page.verify_pieces(&pieces, &found)
    }

    /// Copies the targets back and compares them with the CRCs. Costs a copy of the whole page from
    /// the device, and memory of its length twice: pinned and on the heap.
    fn verify_on_host(&mut self, page: &PageRead) -> Result<(), TransferError> {
        let buffer = self.buffer.slice(&*self.path.device, page.bytes())?;
        copy_parts(&*self.stream, &buffer, &page.targets, Direction::Gather)?;
        let mut bytes = vec![0; page.bytes()];
        buffer.read(&mut bytes)?;
        page.verify(&bytes)
    }
}

impl PathWorker for Worker {
    fn read(&mut self, page: &PageRead) -> Result<(), TransferError> {
        page.check()?;
        if !self.is_bound {
            bind(&*self.path.device)?;
            self.is_bound = true;
        }
        let file = self.path.files.get(page.file)?;
        let mut offset = page.offset;
        for target in &page.targets {
            self.path.read(&file, offset, target)?;
            offset += target.bytes() as u64;
        }
        self.verify(page)
    }
}
