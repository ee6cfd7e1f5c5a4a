//! Errors of devices.

use std::time::Duration;
use thiserror::Error;

/// Reasons for which a device refuses or fails a call. An error of work that runs on a stream
/// appears at a later call on this stream, and then at each one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DeviceError {
    #[error("the CUDA driver (libcuda) is not installed; install the NVIDIA driver")]
    NoDriver,
    #[error("the CUDA run-time compiler (libnvrtc) is not installed; install the CUDA toolkit or nvidia-cuda-nvrtc")]
    NoCudaCompiler,
    #[error("this machine has no CUDA device {0}")]
    NoDevice(usize),
    #[error("{compiler} cannot run: {reason}; the emulated device needs a C++17 compiler, install g++ or set CXX")]
    NoCompiler { compiler: String, reason: String },
    #[error("{compiler} rejected {file}: {message}")]
    Compile { compiler: &'static str, file: String, message: String },
    #[error("no kernel has the name {0}")]
    NoKernel(String),
    #[error("the device {0} runs no kernels")]
    RunsNoKernels(&'static str),
    /// The launch does not fit the kernel's parameters or the device's limits.
    #[error("launch of {kernel}: {reason}")]
    Launch { kernel: String, reason: String },
    /// The arguments have disagreeing shapes, or point outside their memory.
    #[error("{0}")]
    Shape(&'static str),
    #[error("bytes {start}..{end} lie outside a range of {bytes} bytes")]
    OutOfRange { start: usize, end: usize, bytes: usize },
    #[error("{wanted} bytes are not free on the device")]
    OutOfMemory { wanted: usize },
    #[error("a stream still uses this memory; wait for the stream before the host accesses it")]
    InUse,
    #[error("the host cannot access device memory; copy it to pinned memory")]
    NotHostMemory,
    #[error("streams may only read this memory; copy it to other memory first")]
    ReadOnly,
    #[error("{0} belongs to another device")]
    Foreign(&'static str),
    #[error("{0} is not possible while the stream records a graph")]
    Recording(&'static str),
    #[error("the stream records no graph")]
    NotRecording,
    /// Two operations that no event orders, of which at least one writes.
    #[error("race on {range}: {first} and {second} are not ordered; let one stream wait for an event of the other")]
    Race { first: String, second: String, range: String },
    /// The kernel broke a rule of the execution model.
    #[error("kernel {kernel}: {reason}")]
    Kernel { kernel: String, reason: String },
    #[error("{waited_for} did not end within {:.3} s", .after.as_secs_f64())]
    Deadline { waited_for: String, after: Duration },
    #[error("the CUDA driver reported {0}")]
    Driver(String),
    /// The library of matrix products is missing or has failed.
    #[error("the library of matrix products cannot be used: {0}")]
    Library(String),
    #[error("{action}: {reason}")]
    System { action: &'static str, reason: String },
}
