//! An NVIDIA GPU. The driver is loaded at run time, and NVRTC compiles the kernels at the first
//! use of a device.
//!
//! Invariants:
//! - The bindings panic where a library is missing, so [`open`] first looks for it.
//! - Memory is freed when events of the driver prove that its uses have ended. If the driver
//!   reports an error instead, the memory stays allocated.
//!
//! Memory, streams and events belong to the primary context, which other libraries of the process
//! share.

mod library;
mod stream;

use super::memory::{Owner, Region, Use};
use super::registrations::{Registrations, Undo};
use super::{Device, DeviceError, DeviceInfo, Keep, MEMORY_ALIGNMENT, Memory, Place, Stream};
use crate::cuda::{BASE_ARCHITECTURE, CompiledSource, KernelSource, SOURCES, compile};
use cudarc::driver::{DriverError, result, sys};
use library::Library;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use stream::CudaStream;

/// Memory of other owners that the driver has pinned, for all devices.
static REGISTERED: Registrations = Registrations::new();

impl From<DriverError> for DeviceError {
    fn from(error: DriverError) -> DeviceError {
        DeviceError::Driver(error.to_string())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Ignoring poison is sound: no holder of these locks panics between two related changes.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn has_driver() -> bool {
    // SAFETY: only loads the library. Its initialisers run as in any program that links to the
    // driver.
    unsafe { sys::is_culib_present() }
}

/// Lists the CUDA devices of this machine. Returns an empty list where the driver is missing or
/// fails to initialise.
pub fn devices() -> Vec<DeviceInfo> {
    if !has_driver() || result::init().is_err() {
        return Vec::new();
    }
    let count = result::device::get_count().unwrap_or(0).max(0);
    (0..count).filter_map(|ordinal| properties(ordinal).ok()).collect()
}

fn properties(ordinal: i32) -> Result<DeviceInfo, DriverError> {
    use sys::CUdevice_attribute as Attribute;
    let handle = result::device::get(ordinal)?;
    // SAFETY: the driver is initialised and has just returned `handle`.
    let (memory_bytes, major, minor, multiprocessors) = unsafe {
        (
            result::device::total_mem(handle)?,
            result::device::get_attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            result::device::get_attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            result::device::get_attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        )
    };
    let name = result::device::get_name(handle)?;
    let (ordinal, multiprocessors) = (ordinal as usize, multiprocessors.max(0) as u32);
    let compute_capability = (major, minor);
    Ok(DeviceInfo { kind: "cuda", ordinal, name, memory_bytes, compute_capability, multiprocessors })
}

/// Opens the device `ordinal`, and compiles and loads all kernels.
///
/// # Errors
/// If the driver, the device or the compiler is missing, or if one of them fails.
pub fn open(ordinal: usize) -> Result<Arc<dyn Device>, DeviceError> {
    open_with(ordinal, SOURCES)
}

/// Opens the device `ordinal` with the kernels of `sources` only.
///
/// # Errors
/// As for [`open`].
pub fn open_with(ordinal: usize, sources: &[KernelSource]) -> Result<Arc<dyn Device>, DeviceError> {
    let (mut core, info) = start(ordinal)?;
    for source in sources {
        // PTX of the device's own architecture may use all of its instructions. A compiler that is
        // older than the device knows the base architecture only.
        let (major, minor) = info.compute_capability;
        let ptx =
            compile(source, &format!("compute_{major}{minor}")).or_else(|_| compile(source, BASE_ARCHITECTURE))?;
        core.load(&ptx.to_src(), source.kernels)?;
    }
    Ok(Arc::new(Cuda { core: Arc::new(core), info }))
}

/// Opens the device `ordinal` with kernels that were compiled before. Needs no compiler.
///
/// # Errors
/// If the driver or the device is missing, or if the driver refuses a source. A driver refuses PTX
/// of a compiler that is newer than itself.
pub fn open_compiled(ordinal: usize, sources: &[CompiledSource]) -> Result<Arc<dyn Device>, DeviceError> {
    let (mut core, info) = start(ordinal)?;
    sources.iter().try_for_each(|source| core.load(&source.ptx, source.kernels))?;
    Ok(Arc::new(Cuda { core: Arc::new(core), info }))
}

/// The device `ordinal` without kernels.
fn start(ordinal: usize) -> Result<(Core, DeviceInfo), DeviceError> {
    if !has_driver() {
        return Err(DeviceError::NoDriver);
    }
    let info = devices().into_iter().find(|device| device.ordinal == ordinal);
    let info = info.ok_or(DeviceError::NoDevice(ordinal))?;
    Ok((Core::new(ordinal)?, info))
}

/// State that a device, its streams and its memory share.
struct Core {
    id: u64,
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<&'static str, sys::CUfunction>,
    /// Loaded at its first use. An error stays.
    library: OnceLock<Result<Library, DeviceError>>,
    /// Memory without handles whose uses have not ended.
    retired: Mutex<Vec<(Region, Vec<Use>)>>,
}

// SAFETY: the handles are those of the driver, whose functions may be called from any thread.
unsafe impl Send for Core {}
// SAFETY: as for `Send`. The fields without a lock are not changed after construction.
unsafe impl Sync for Core {}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {} with {} kernels", self.device, self.functions.len())
    }
}

impl Core {
    fn new(ordinal: usize) -> Result<Core, DeviceError> {
        static DEVICES: AtomicU64 = AtomicU64::new(1 << 32);
        let device = result::device::get(ordinal as i32)?;
        // SAFETY: the driver has just returned `device`. `Drop` releases the context.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let id = DEVICES.fetch_add(1, Ordering::Relaxed);
        let (modules, functions, retired) = (Vec::new(), HashMap::new(), Mutex::default());
        let library = OnceLock::new();
        let core = Core { id, device, context, modules, functions, library, retired };
        core.bind()?;
        Ok(core)
    }

    /// Makes the context current on this thread. Every call of the driver needs it.
    fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained as long as `self` lives.
        Ok(unsafe { result::ctx::set_current(self.context) }?)
    }

    /// The library of matrix products.
    fn library(&self) -> Result<&Library, DeviceError> {
        self.bind()?;
        self.library.get_or_init(Library::open).as_ref().map_err(DeviceError::clone)
    }

    fn load(&mut self, ptx: &str, kernels: &[&'static str]) -> Result<(), DeviceError> {
        let image = CString::new(ptx)
            .map_err(|error| DeviceError::System { action: "read the compiled kernels", reason: error.to_string() })?;
        // SAFETY: the image is PTX that ends with a zero byte, and the context is current.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }?;
        self.modules.push(module);
        for &kernel in kernels {
            let name = CString::new(kernel).map_err(|_| DeviceError::NoKernel(kernel.to_string()))?;
            // SAFETY: the module is loaded until `Drop`.
            let function = unsafe { result::module::get_function(module, name) }
                .map_err(|_| DeviceError::NoKernel(kernel.to_string()))?;
            self.functions.insert(kernel, function);
        }
        Ok(())
    }

    /// Frees retired memory whose uses have ended.
    fn reap(&self) {
        let ready: Vec<Region> = {
            let mut retired = lock(&self.retired);
            let (ended, open): (Vec<_>, Vec<_>) = std::mem::take(&mut *retired)
                .into_iter()
                .partition(|(_, uses): &(Region, Vec<Use>)| uses.iter().all(Use::has_ended));
            *retired = open;
            ended.into_iter().map(|(region, _)| region).collect()
        };
        for region in ready {
            self.free(&region);
        }
    }

    fn free(&self, region: &Region) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: `allocate` has obtained the region. It has no handle, and its uses have ended. An
        // error leaves the memory allocated, which is harmless.
        let _ = unsafe {
            match region.place {
                Place::Device => result::free_sync(region.address),
                Place::Pinned => result::free_host(region.address as *mut c_void),
            }
        };
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        // Streams, events and memory hold the core, so nothing uses the modules or the context. An
        // error here has no consequence. The library goes first: it may hold memory of the context.
        drop(self.library.take());
        for module in self.modules.drain(..) {
            // SAFETY: `load` has loaded the module, and this is its only unload.
            let _ = unsafe { result::module::unload(module) };
        }
        // SAFETY: `new` has retained the context once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

#[derive(Debug)]
struct Allocated(Arc<Core>);

impl Owner for Allocated {
    fn release(&self, region: Region, uses: Vec<Use>) {
        if uses.iter().all(Use::has_ended) {
            self.0.free(&region);
        } else {
            lock(&self.0.retired).push((region, uses));
        }
    }
}

/// Owner of memory that belongs to another object.
struct Adopted {
    core: Arc<Core>,
    keep: Keep,
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "adopted memory of {:?}", self.core)
    }
}

impl Owner for Adopted {
    fn release(&self, region: Region, uses: Vec<Use>) {
        if !uses.iter().all(Use::has_ended) {
            // No call could free it later: the object stays for the life of the process.
            std::mem::forget(Arc::clone(&self.keep));
            return;
        }
        if region.place == Place::Pinned {
            REGISTERED.remove(region.address);
        }
    }
}

#[derive(Debug)]
struct Cuda {
    core: Arc<Core>,
    info: DeviceInfo,
}

impl Cuda {
    fn try_allocate(&self, place: Place, bytes: usize) -> Result<u64, DriverError> {
        // SAFETY: the context is current, and `bytes` is not 0.
        unsafe {
            match place {
                Place::Device => result::malloc_sync(bytes),
                // With unified addressing the device uses the host's address (CUDA Driver API,
                // section "Unified Addressing").
                Place::Pinned => result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE).map(|start| start as u64),
            }
        }
    }
}

impl Device for Cuda {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        self.core.bind()?;
        self.core.reap();
        Ok(result::mem_get_info()?.0)
    }

    fn allocate(&self, place: Place, bytes: usize) -> Result<Memory, DeviceError> {
        if bytes == 0 {
            return Err(DeviceError::OutOfMemory { wanted: 0 });
        }
        self.core.bind()?;
        self.core.reap();
        let address = self.try_allocate(place, bytes).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory { wanted: bytes },
            _ => error.into(),
        })?;
        debug_assert_eq!(address % MEMORY_ALIGNMENT as u64, 0, "the driver aligns allocations");
        let region = Region { device: self.core.id, place, address, bytes, guarded: false };
        Ok(Memory::new(region, Arc::new(Allocated(Arc::clone(&self.core)))))
    }

    unsafe fn adopt(&self, place: Place, address: u64, bytes: usize, keep: Keep) -> Result<Memory, DeviceError> {
        self.core.bind()?;
        if place == Place::Pinned {
            // The context that has registered the memory lives until the end of the registration.
            let core = Arc::clone(&self.core);
            let register = || -> Result<Undo, DeviceError> {
                // SAFETY: the caller guarantees `bytes` bytes at `address` while `keep` lives.
                unsafe { sys::cuMemHostRegister_v2(address as *mut c_void, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) }
                    .result()?;
                let undo: Undo = Box::new(move || {
                    if core.bind().is_ok() {
                        // SAFETY: the memory is registered. The uses by all devices have ended, as
                        // each has removed itself from the users.
                        let _ = unsafe { sys::cuMemHostUnregister(address as *mut c_void) };
                    }
                });
                Ok(undo)
            };
            REGISTERED.add(address, bytes, register)?;
        }
        let region = Region { device: self.core.id, place, address, bytes, guarded: false };
        Ok(Memory::new(region, Arc::new(Adopted { core: Arc::clone(&self.core), keep })))
    }

    fn product_library(&self) -> Result<String, DeviceError> {
        Ok(self.core.library()?.name())
    }

    fn plan_product(&self, outputs: usize, inputs: usize) -> Result<String, DeviceError> {
        self.core.library()?.plan([outputs, inputs])
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError> {
        self.core.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(Arc::new(CudaStream::new(Arc::clone(&self.core), name, raw)))
    }
}
