//! Calls of libcufile, which is loaded at run time.
//!
//! Types and numbers follow `cufile.h` of CUDA 13 and NVIDIA's reference:
//! <https://docs.nvidia.com/gpudirect-storage/api-reference-guide/index.html>

use libloading::Library;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::path::Path;
use thiserror::Error;

/// Errors of libcufile.
#[derive(Debug, Error)]
pub enum CuFileError {
    #[error("{name} cannot be loaded: {reason}; install GPUDirect Storage (package nvidia-gds)")]
    Library { name: String, reason: String },
    #[error("libcufile failed {call}: {code}")]
    Call { call: &'static str, code: CuFileCode },
    #[error("libcufile failed {call}: {error}")]
    System { call: &'static str, error: io::Error },
    /// The library broke its contract.
    #[error("libcufile reports {found} bytes for a read of {requested}")]
    Length { requested: usize, found: usize },
}

/// Code of an error, a value of `CUfileOpError`. `cufile.h` counts them from 5001
/// (`CUFILEOP_BASE_ERR` is 5000).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CuFileCode(pub i32);

impl CuFileCode {
    const ALREADY_OPEN: CuFileCode = CuFileCode(5026);

    fn words(self) -> &'static str {
        match self.0 {
            5001 => "the nvidia-fs driver is not initialised",
            5002 => "the driver has invalid properties",
            5004 => "driver and library have different versions",
            5007 => "the platform is not supported",
            5008 => "the file system is not supported",
            5009 => "the GPU is not supported",
            5010 => "the nvidia-fs driver failed",
            5011 => "the CUDA driver failed",
            5012 => "the pointer is not of the device",
            5013 => "the memory has the wrong type",
            5014 => "the range exceeds the allocation",
            5015 => "the memory belongs to another CUDA context",
            5018 => "the file type is not supported",
            5019 => "the flags of the open file are not supported",
            5020 => "the file is not open for direct I/O",
            5022 => "an argument is not valid",
            5023 => "the memory is registered already",
            5024 => "the memory is not registered",
            5025 => "the permission is missing",
            5026 => "the driver is open already",
            5027 => "the file is not registered",
            5028 => "the file is registered already",
            5029 => "no GPU was found",
            5030 => "internal error",
            5033 => "the nvidia-fs driver could not be set up",
            5034 => "GPUDirect Storage is disabled for this file in cufile.json",
            5036 => "memory of the GPU could not be pinned",
            5043 => "the library has no memory left",
            5044 => "I/O error",
            _ => "unknown code",
        }
    }
}

impl fmt::Display for CuFileCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.words(), self.0)
    }
}

/// `CUfileError_t`. The library returns it by value. The code 0 is success (`CU_FILE_SUCCESS`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Status {
    code: c_int,
    /// `CUresult` if the CUDA driver failed.
    cuda: c_int,
}

impl Status {
    fn check(self, call: &'static str) -> Result<(), CuFileError> {
        if self.code == 0 { Ok(()) } else { Err(CuFileError::Call { call, code: CuFileCode(self.code) }) }
    }
}

/// `CUfileDescr_t` with a file descriptor. `file_system` is its `fs_ops`, a table of functions for
/// file systems in user space. It is null here.
#[repr(C)]
struct Description {
    /// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`, 1.
    kind: c_int,
    handle: HandleSource,
    file_system: *const c_void,
}

#[repr(C)]
union HandleSource {
    descriptor: c_int,
    _pointer: *mut c_void,
}

/// `CUfileDrvProps_t`, with room for fields of later versions. Without the 256 bytes of room, a
/// library with a longer structure would write beyond its end.
#[repr(C)]
#[derive(Default)]
struct Properties {
    major: c_uint,
    minor: c_uint,
    poll_threshold_kib: usize,
    direct_max_kib: usize,
    status_flags: c_uint,
    control_flags: c_uint,
    _rest: [u64; 32],
}

/// Bits of `status_flags` for storage that the GPU reaches directly: NVMe, NVMe over fabrics, and
/// NVMe by peer-to-peer DMA without the nvidia-fs driver (`CUfileDriverStatusFlags_t`).
const DIRECT_FLAGS: c_uint = (1 << 4) | (1 << 5) | (1 << 11);

/// Way in which libcufile moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The storage device writes to the GPU's memory. The numbers are the version of nvidia-fs,
    /// 0.0 without that driver.
    Direct { major: u32, minor: u32 },
    /// libcufile reads to memory of the host and copies to the GPU.
    Compatibility,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Direct { major: 0, minor: 0 } => f.write_str("direct, by peer-to-peer DMA"),
            Mode::Direct { major, minor } => write!(f, "direct, nvidia-fs {major}.{minor}"),
            Mode::Compatibility => f.write_str("compatibility mode, through memory of the host"),
        }
    }
}

/// Handle of a registered file, an opaque pointer of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(usize);

type DriverOpen = unsafe extern "C" fn() -> Status;
type DriverGetProperties = unsafe extern "C" fn(*mut Properties) -> Status;
type HandleRegister = unsafe extern "C" fn(*mut *mut c_void, *mut Description) -> Status;
type HandleDeregister = unsafe extern "C" fn(*mut c_void);
type BufRegister = unsafe extern "C" fn(*const c_void, usize, c_int) -> Status;
type BufDeregister = unsafe extern "C" fn(*const c_void) -> Status;
type Read = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, Offset, Offset) -> isize;
/// `off_t` of 64-bit Linux.
type Offset = i64;

/// Functions of the loaded library.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    driver_open: DriverOpen,
    driver_get_properties: DriverGetProperties,
    handle_register: HandleRegister,
    handle_deregister: HandleDeregister,
    buf_register: BufRegister,
    buf_deregister: BufDeregister,
    read: Read,
}

impl Functions {
    /// Loads the library. It stays loaded until the process ends, because it has threads.
    pub(super) fn load(name: &Path) -> Result<Functions, CuFileError> {
        let failed = |error: libloading::Error| {
            let source = std::error::Error::source(&error);
            let reason = source.map_or_else(|| error.to_string(), ToString::to_string);
            CuFileError::Library { name: name.display().to_string(), reason }
        };
        // SAFETY: the library may be loaded at any time from any thread. Its initialisers run as in
        // any program that links to it.
        let library: &'static Library = Box::leak(Box::new(unsafe { Library::new(name) }.map_err(failed)?));
        // SAFETY: the symbols have these types (cufile.h), and the library is never unloaded.
        unsafe {
            Ok(Functions {
                driver_open: *library.get::<DriverOpen>("cuFileDriverOpen").map_err(failed)?,
                driver_get_properties: *library
                    .get::<DriverGetProperties>("cuFileDriverGetProperties")
                    .map_err(failed)?,
                handle_register: *library.get::<HandleRegister>("cuFileHandleRegister").map_err(failed)?,
                handle_deregister: *library.get::<HandleDeregister>("cuFileHandleDeregister").map_err(failed)?,
                buf_register: *library.get::<BufRegister>("cuFileBufRegister").map_err(failed)?,
                buf_deregister: *library.get::<BufDeregister>("cuFileBufDeregister").map_err(failed)?,
                read: *library.get::<Read>("cuFileRead").map_err(failed)?,
            })
        }
    }

    /// Opens the driver, which the process then keeps open. May block without limit: version 1.20
    /// does so on a machine without a GPU.
    pub(super) fn open_driver(&self) -> Result<(), CuFileError> {
        // SAFETY: the function has no arguments.
        let status = unsafe { (self.driver_open)() };
        if CuFileCode(status.code) == CuFileCode::ALREADY_OPEN { Ok(()) } else { status.check("to open its driver") }
    }

    pub(super) fn mode(&self) -> Result<Mode, CuFileError> {
        let mut properties = Properties::default();
        // SAFETY: the structure is valid for writes and longer than the library's.
        unsafe { (self.driver_get_properties)(&raw mut properties) }.check("to report its properties")?;
        let Properties { major, minor, status_flags, .. } = properties;
        Ok(if status_flags & DIRECT_FLAGS == 0 { Mode::Compatibility } else { Mode::Direct { major, minor } })
    }

    /// Registers an open file, which must stay open until [`Functions::deregister_file`].
    ///
    /// # Errors
    /// [`CuFileError::Call`], for example with code 5008 for a file system that is not supported.
    pub(super) fn register_file(&self, descriptor: c_int) -> Result<Handle, CuFileError> {
        let mut handle: *mut c_void = std::ptr::null_mut();
        let mut description =
            Description { kind: 1, handle: HandleSource { descriptor }, file_system: std::ptr::null() };
        // SAFETY: both structures are valid for the time of the call.
        unsafe { (self.handle_register)(&raw mut handle, &raw mut description) }.check("to register a file")?;
        Ok(Handle(handle as usize))
    }

    /// # Safety
    /// The handle is registered, and no read uses it.
    pub(super) unsafe fn deregister_file(&self, handle: Handle) {
        // SAFETY: the caller guarantees the handle.
        unsafe { (self.handle_deregister)(handle.0 as *mut c_void) };
    }

    /// # Safety
    /// The memory stays allocated until [`Functions::deregister_memory`].
    pub(super) unsafe fn register_memory(&self, address: u64, bytes: usize) -> Result<(), CuFileError> {
        // SAFETY: the caller guarantees the memory.
        unsafe { (self.buf_register)(address as *const c_void, bytes, 0) }.check("to register memory")
    }

    /// # Safety
    /// The memory is registered, and no read uses it.
    pub(super) unsafe fn deregister_memory(&self, address: u64) -> Result<(), CuFileError> {
        // SAFETY: the caller guarantees the memory.
        unsafe { (self.buf_deregister)(address as *const c_void) }.check("to deregister memory")
    }

    /// Reads up to `bytes` bytes from `file_offset` to the memory `base + target_offset`. Returns
    /// their number, 0 at the end of the file.
    ///
    /// # Safety
    /// The handle is registered. The memory is valid for writes until the call returns.
    pub(super) unsafe fn read(
        &self,
        handle: Handle,
        base: u64,
        bytes: usize,
        file_offset: i64,
        target_offset: i64,
    ) -> Result<usize, CuFileError> {
        let (handle, base) = (handle.0 as *mut c_void, base as *mut c_void);
        // SAFETY: the caller guarantees handle and memory.
        let found = unsafe { (self.read)(handle, base, bytes, file_offset, target_offset) };
        let call = "a read";
        match found {
            -1 => Err(CuFileError::System { call, error: io::Error::last_os_error() }),
            isize::MIN..0 => {
                let code = i32::try_from(found).map_or(i32::MAX, i32::saturating_abs);
                Err(CuFileError::Call { call, code: CuFileCode(code) })
            }
            _ if found as usize > bytes => Err(CuFileError::Length { requested: bytes, found: found as usize }),
            _ => Ok(found as usize),
        }
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Functions of libcufile")
    }
}
