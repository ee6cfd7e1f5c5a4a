//! Devices: memory, streams, events, copies, launches and graphs.
//!
//! Invariants:
//! - Operations of one stream run in order. Operations of two streams are ordered only by events,
//!   or by a wait of the host between their calls.
//! - No call of this module panics where a driver, a compiler or a device is missing.
//! - Every wait has a deadline. A deadline ends the wait; memory stays allocated while an operation
//!   can touch it.
//!
//! Implementations:
//! - [`cuda`]: an NVIDIA GPU. The driver and the compiler of kernels are loaded at run time.
//! - [`emulated`]: runs the same kernels on the CPU, compiled by the system's C++ compiler, and
//!   reports races between streams.
//! - [`host`]: plain memory. Copies only; a launch is an error. The functions of [`crate::cpu`]
//!   serve engines without kernels.

pub mod cuda;
pub mod emulated;
mod error;
pub mod host;
mod launch;
mod memory;
mod pinned;
mod races;
mod registrations;
mod software;

pub use error::DeviceError;
pub use launch::{Access, Arg, Launch, Pointer};
pub use memory::{Keep, MEMORY_ALIGNMENT, Memory, Place, Slice};
pub use pinned::PinnedBytes;

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cuda`, `emulated` or `host`.
    pub kind: &'static str,
    pub ordinal: usize,
    pub name: String,
    pub memory_bytes: usize,
    /// Major and minor number. (0, 0) for a device that is no GPU.
    pub compute_capability: (i32, i32),
    /// Number of multiprocessors. Host threads for a device that is no GPU.
    pub multiprocessors: u32,
}

/// A device. Handles from it (memory, streams, events, graphs) work with this device only.
pub trait Device: Debug + Send + Sync {
    fn info(&self) -> &DeviceInfo;

    /// Free memory of the device in bytes.
    ///
    /// # Errors
    /// If the driver fails.
    fn free_bytes(&self) -> Result<usize, DeviceError>;

    /// Allocates at least one byte, aligned to [`MEMORY_ALIGNMENT`].
    ///
    /// # Errors
    /// If the memory is not free, or if the driver fails.
    fn allocate(&self, place: Place, bytes: usize) -> Result<Memory, DeviceError>;

    /// Wraps memory that belongs to another owner: device memory of another library, or memory of
    /// the host, which the device pins until the last handle is dropped. `keep` is dropped after
    /// the last use.
    ///
    /// Devices of one process may wrap the same range of the host. Its last handle ends the
    /// pinning.
    ///
    /// # Errors
    /// If the driver cannot pin the memory, or if it overlaps another range that is pinned.
    ///
    /// # Safety
    /// `address` is valid for `bytes` bytes while `keep` lives. The caller orders accesses that do
    /// not go through this device.
    unsafe fn adopt(&self, place: Place, address: u64, bytes: usize, keep: Keep) -> Result<Memory, DeviceError>;

    /// Loads the library of matrix products, cuBLASLt. Returns its name and version.
    ///
    /// # Errors
    /// If the device has none, or if it cannot be loaded.
    fn product_library(&self) -> Result<String, DeviceError> {
        Err(no_library(self.info().kind))
    }

    /// Selects the library's algorithm for matrices of this shape. Returns a text that identifies
    /// it. All products of the shape have this algorithm, so the text belongs to the identity of
    /// numerics.
    ///
    /// # Errors
    /// If there is no library, or if it has no algorithm without split sums.
    fn plan_product(&self, _outputs: usize, _inputs: usize) -> Result<String, DeviceError> {
        Err(no_library(self.info().kind))
    }

    /// Creates a stream. `name` appears in error messages.
    ///
    /// # Errors
    /// If the driver fails.
    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError>;
}

fn no_library(kind: &str) -> DeviceError {
    DeviceError::Library(format!("the device {kind} has none"))
}

/// Product `out[r][o] = Σ_i x[r][i] · weight[o][i]` by the library of the device.
#[derive(Debug, Clone, Copy)]
pub struct LibraryProduct<'a> {
    pub rows: usize,
    pub outputs: usize,
    pub inputs: usize,
    /// `[rows][inputs]`, bf16.
    pub x: &'a Slice,
    /// `[outputs][inputs]`, bf16.
    pub weight: &'a Slice,
    /// Result, `[rows][outputs]`, f32.
    pub out: &'a Slice,
}

impl LibraryProduct<'_> {
    /// Fails unless the slices hold the operands in whole elements and streams may write the
    /// result.
    fn check(&self) -> Result<(), DeviceError> {
        let holds = |slice: &Slice, lengths: [usize; 3]| {
            let bytes = lengths.into_iter().try_fold(1usize, |product, length| product.checked_mul(length));
            let is_aligned = slice.address().is_multiple_of(lengths[0] as u64);
            is_aligned && bytes.is_some_and(|bytes| bytes <= slice.bytes())
        };
        let fits = holds(self.x, [2, self.rows, self.inputs])
            && holds(self.weight, [2, self.outputs, self.inputs])
            && holds(self.out, [4, self.rows, self.outputs]);
        if !fits {
            return Err(DeviceError::Shape("product of the library: an operand is too short, or not aligned"));
        }
        self.out.memory().check_writable()
    }
}

/// Queue of operations that run in order. Calls enqueue and return; [`wait`](Stream::wait) waits.
///
/// Every call reports an error of an earlier operation of the stream, if one has failed.
pub trait Stream: Debug + Send + Sync {
    fn name(&self) -> &str;

    /// Copies `source` to `target`, which has the same length. All combinations of places work.
    ///
    /// # Errors
    /// If the lengths differ or the ranges overlap, or if a race is found.
    fn copy(&self, target: &Slice, source: &Slice) -> Result<(), DeviceError>;

    /// Sets every byte of `target` to `byte`.
    ///
    /// # Errors
    /// If a race is found.
    fn fill(&self, target: &Slice, byte: u8) -> Result<(), DeviceError>;

    /// Launches a kernel. Typed launchers wrap this call.
    ///
    /// # Errors
    /// If the kernel is unknown or the launch does not fit it, or if a race is found.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters. With these arguments the kernel accesses only
    /// the slices of its pointer arguments, within their declared ranges and accesses.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError>;

    /// Enqueues a product by the library of the device.
    ///
    /// # Errors
    /// If the slices do not hold the operands, if the result is only to be read, or if there is no
    /// library.
    fn multiply(&self, _product: &LibraryProduct<'_>) -> Result<(), DeviceError> {
        Err(no_library(self.name()))
    }

    /// Marks the present end of the stream.
    ///
    /// # Errors
    /// If the stream records a graph, or if the driver fails.
    fn record(&self) -> Result<Arc<dyn Event>, DeviceError>;

    /// Lets later operations of this stream start after `event`. The host does not wait.
    ///
    /// # Errors
    /// If the stream records a graph, or if the event belongs to another device.
    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError>;

    /// Starts to record copies, fills and launches of this stream instead of running them.
    ///
    /// # Errors
    /// If the stream records already.
    fn begin_graph(&self) -> Result<(), DeviceError>;

    /// Ends the recording.
    ///
    /// # Errors
    /// If the stream records no graph, or if the driver cannot build it.
    fn end_graph(&self) -> Result<Arc<dyn Graph>, DeviceError>;

    /// Runs all operations of `graph` in order.
    ///
    /// # Errors
    /// If a race is found, or if the graph belongs to another device.
    fn replay(&self, graph: &dyn Graph) -> Result<(), DeviceError>;

    /// Waits until all operations have ended.
    ///
    /// # Errors
    /// If one has failed, or at the deadline.
    fn wait(&self, deadline: Instant) -> Result<(), DeviceError>;
}

/// Point of a stream.
pub trait Event: Any + Debug + Send + Sync {
    /// Returns `true` if all operations before the event have ended.
    ///
    /// # Errors
    /// If one of them has failed.
    fn is_done(&self) -> Result<bool, DeviceError>;

    /// Waits for the operations before the event.
    ///
    /// # Errors
    /// If one of them has failed, or at the deadline.
    fn wait(&self, deadline: Instant) -> Result<(), DeviceError>;

    /// Time between `earlier` and this event, as the device measured it.
    ///
    /// # Errors
    /// If one of the events is not done, or belongs to another device.
    fn since(&self, earlier: &dyn Event) -> Result<Duration, DeviceError>;
}

/// Recorded operations. Keeps their memory allocated.
pub trait Graph: Any + Debug + Send + Sync {
    /// Number of recorded operations.
    fn operations(&self) -> usize;
}

/// Allocates device memory and copies `values` to it through pinned memory. Waits for the copy.
///
/// # Errors
/// If the memory is not free, or at the deadline.
pub fn upload<T: bytemuck::NoUninit>(
    device: &dyn Device,
    stream: &dyn Stream,
    values: &[T],
    deadline: Instant,
) -> Result<Memory, DeviceError> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let memory = device.allocate(Place::Device, bytes.len().max(1))?;
    if !bytes.is_empty() {
        let staging = device.allocate(Place::Pinned, bytes.len())?;
        staging.all().write(bytes)?;
        stream.copy(&memory.all(), &staging.all())?;
        stream.wait(deadline)?;
    }
    Ok(memory)
}

/// Copies `source` to a new vector through pinned memory, behind all operations of `stream`. A rest
/// that is no whole value is left out.
///
/// # Errors
/// If the memory is not free, if an operation fails, or at the deadline.
pub fn download<T: bytemuck::Pod>(
    device: &dyn Device,
    stream: &dyn Stream,
    source: &Slice,
    deadline: Instant,
) -> Result<Vec<T>, DeviceError> {
    let count = source.bytes() / size_of::<T>().max(1);
    let mut values = vec![T::zeroed(); count];
    let target: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
    if !target.is_empty() {
        let source = source.slice(0..target.len())?;
        let staging = device.allocate(Place::Pinned, target.len())?;
        stream.copy(&staging.all(), &source)?;
        stream.wait(deadline)?;
        staging.all().read(target)?;
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_need_whole_operands_and_a_result_to_write() {
        let device = host::open(1 << 20);
        let allocate = |bytes: usize| device.allocate(Place::Device, bytes).unwrap().all();
        let (x, weight, out) = (allocate(2 * 3 * 8), allocate(2 * 5 * 8), allocate(4 * 3 * 5));
        let product = LibraryProduct { rows: 3, outputs: 5, inputs: 8, x: &x, weight: &weight, out: &out };
        assert_eq!(product.check(), Ok(()));
        let wide = allocate(out.bytes() + 2);
        let odd = wide.slice(2..wide.bytes()).unwrap();
        for refused in [
            LibraryProduct { rows: 4, ..product },
            LibraryProduct { outputs: 6, ..product },
            LibraryProduct { inputs: usize::MAX, ..product },
            LibraryProduct { out: &odd, ..product },
        ] {
            assert!(matches!(refused.check(), Err(DeviceError::Shape(_))), "{refused:?}");
        }
        let pinned = PinnedBytes::new(&*device, out.bytes()).unwrap();
        let read_only = pinned.source();
        assert_eq!(LibraryProduct { out: &read_only, ..product }.check(), Err(DeviceError::ReadOnly));
    }
}
