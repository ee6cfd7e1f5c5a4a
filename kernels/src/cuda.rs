//! Kernels for CUDA devices.
//!
//! Invariant: every function can be called on any machine. The bindings panic where a library is
//! missing, so each entry point first looks for the driver and the compiler. A missing library is
//! an error that names it.

use crate::cpu::HeadLayout;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, result, sys};
use std::sync::Arc;
use thiserror::Error;

/// Source of the kernels. The comments there give the shapes.
pub const SOURCE: &str = include_str!("../cuda/larder.cu");

/// Threads per block. A power of two, as the tree reduction of `rms_norm` requires.
const BLOCK_THREADS: u32 = 256;

/// Reasons for which a device cannot be used.
#[derive(Debug, Error)]
pub enum CudaError {
    #[error("the CUDA driver (libcuda) is not installed; install the NVIDIA driver")]
    NoDriver,
    #[error("the CUDA run-time compiler (libnvrtc) is not installed; install the CUDA toolkit")]
    NoCompiler,
    #[error("this machine has no CUDA device {0}")]
    NoDevice(usize),
    #[error("nvrtc rejected the CUDA kernels: {0}")]
    Compile(String),
    /// The arguments have disagreeing shapes, or point outside their buffers.
    #[error("{0}")]
    Shape(&'static str),
    #[error("the CUDA driver reported {0}")]
    Driver(#[from] DriverError),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    pub ordinal: usize,
    pub name: String,
    pub memory_bytes: usize,
    pub compute_capability: (i32, i32),
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
    (0..count).filter_map(|ordinal| device(ordinal).ok()).collect()
}

fn device(ordinal: i32) -> Result<DeviceInfo, DriverError> {
    use sys::CUdevice_attribute as Attribute;
    let handle = result::device::get(ordinal)?;
    // SAFETY: the driver is initialised and has just returned `handle`.
    let (memory_bytes, major, minor) = unsafe {
        (
            result::device::total_mem(handle)?,
            result::device::get_attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            result::device::get_attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        )
    };
    let name = result::device::get_name(handle)?;
    Ok(DeviceInfo { ordinal: ordinal as usize, name, memory_bytes, compute_capability: (major, minor) })
}

/// Compiles the kernels. Needs the run-time compiler, but no device.
///
/// # Errors
/// If the compiler is not installed, or if it rejects the source.
pub fn compile() -> Result<cudarc::nvrtc::Ptx, CudaError> {
    // SAFETY: only loads the library, as for the driver.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(CudaError::NoCompiler);
    }
    cudarc::nvrtc::compile_ptx(SOURCE).map_err(|e| CudaError::Compile(e.to_string()))
}

/// Kernels loaded onto one device. Arguments and results live in host memory, and every call copies
/// them: these launchers serve correctness checks, not speed.
pub struct CudaKernels {
    stream: Arc<CudaStream>,
    rms_norm: CudaFunction,
    gather_head: CudaFunction,
}

impl CudaKernels {
    /// Compiles the kernels and loads them onto the device `ordinal`.
    ///
    /// # Errors
    /// If the driver, the device or the compiler is missing, or if one of them fails.
    pub fn load(ordinal: usize) -> Result<CudaKernels, CudaError> {
        if !has_driver() {
            return Err(CudaError::NoDriver);
        }
        if !devices().iter().any(|device| device.ordinal == ordinal) {
            return Err(CudaError::NoDevice(ordinal));
        }
        let ptx = compile()?;
        let context = CudaContext::new(ordinal)?;
        let module = context.load_module(ptx)?;
        Ok(CudaKernels {
            stream: context.default_stream(),
            rms_norm: module.load_function("rms_norm")?,
            gather_head: module.load_function("gather_head")?,
        })
    }

    /// Computes the same as [`cpu::rms_norm`](crate::cpu::rms_norm), except for the order of the
    /// sum.
    ///
    /// # Errors
    /// If the shapes disagree, or if the device fails.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32) -> Result<Vec<f32>, CudaError> {
        let width = weight.len();
        if width == 0 || x.is_empty() || !x.len().is_multiple_of(width) || i32::try_from(width).is_err() {
            return Err(CudaError::Shape("rms_norm: the input is not a whole number of rows of the weight's length"));
        }
        let rows =
            u32::try_from(x.len() / width).map_err(|_| CudaError::Shape("rms_norm: the input has too many rows"))?;
        let (x, weight) = (self.stream.clone_htod(x)?, self.stream.clone_htod(weight)?);
        let mut out = self.stream.alloc_zeros::<f32>(rows as usize * width)?;
        let width = width as i32;
        let mut launch = self.stream.launch_builder(&self.rms_norm);
        launch.arg(&x).arg(&weight).arg(&eps).arg(&width).arg(&mut out);
        // SAFETY: the arguments match the kernel's parameters in order and size. Block `r` accesses
        // row `r` of `x` and `out`, and all of `weight`. The launch provides one float of shared
        // memory per thread.
        unsafe { launch.launch(grid(rows, BLOCK_THREADS * 4)) }?;
        Ok(self.stream.clone_dtoh(&out)?)
    }

    /// Gathers the first `tokens` keys (or values) of one head into `[tokens][head_dim]`. `pool`
    /// holds whole pages, and `page_of` lists the indices of the sequence's pages.
    ///
    /// # Errors
    /// If an index points outside `pool`, or if the device fails.
    pub fn gather_head(
        &self,
        pool: &[f32],
        page_of: &[u32],
        head: PagedHead,
        tokens: usize,
    ) -> Result<Vec<f32>, CudaError> {
        let PagedHead { page_elements, page_tokens, layout, head_dim } = head;
        if tokens == 0 || tokens > i32::MAX as usize || !head.is_inside(pool, page_of, tokens) {
            return Err(CudaError::Shape("gather_head: the tokens do not lie inside the pages"));
        }
        let (pool, page_of) = (self.stream.clone_htod(pool)?, self.stream.clone_htod(page_of)?);
        let mut out = self.stream.alloc_zeros::<f32>(tokens * head_dim)?;
        let [page_tokens, start, stride, dim] = [page_tokens, layout.start, layout.stride, head_dim].map(|v| v as i32);
        let mut launch = self.stream.launch_builder(&self.gather_head);
        launch.arg(&pool).arg(&page_of).arg(&page_elements).arg(&page_tokens);
        launch.arg(&start).arg(&stride).arg(&dim).arg(&mut out);
        // SAFETY: the arguments match the kernel's parameters in order. `is_inside` has checked
        // that every token lies inside a page of `pool`, and `out` has one row per block.
        unsafe { launch.launch(grid(tokens as u32, 0)) }?;
        Ok(self.stream.clone_dtoh(&out)?)
    }
}

/// Position of one head in the pages of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagedHead {
    pub page_elements: usize,
    pub page_tokens: usize,
    pub layout: HeadLayout,
    pub head_dim: usize,
}

impl PagedHead {
    fn is_inside(&self, pool: &[f32], page_of: &[u32], tokens: usize) -> bool {
        if self.page_elements == 0 || self.page_tokens == 0 || self.head_dim == 0 {
            return false;
        }
        let last_token = (self.page_tokens - 1).saturating_mul(self.layout.stride).saturating_add(self.layout.start);
        last_token.saturating_add(self.head_dim) <= self.page_elements
            && self.page_elements <= i32::MAX as usize
            && self.page_tokens <= i32::MAX as usize
            && tokens.div_ceil(self.page_tokens) <= page_of.len()
            && page_of.iter().all(|&page| (page as usize) < pool.len() / self.page_elements)
    }
}

fn grid(blocks: u32, shared_mem_bytes: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (BLOCK_THREADS, 1, 1), shared_mem_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu;

    #[test]
    fn kernels_compile_if_a_compiler_is_installed() {
        match compile() {
            Ok(_) => println!("compiled"),
            Err(CudaError::NoCompiler) => println!("no compiler here"),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn is_inside_rejects_tokens_outside_the_pages() {
        let layout = HeadLayout { start: 27, stride: 6 };
        let head = PagedHead { page_elements: 48, page_tokens: 4, layout, head_dim: 3 };
        let pool = [0.0; 5 * 48];
        assert!(head.is_inside(&pool, &[3, 0, 4], 12));
        assert!(!head.is_inside(&pool, &[3, 0, 4], 13));
        assert!(!head.is_inside(&pool, &[3, 0, 5], 12));
        assert!(!PagedHead { head_dim: 4, ..head }.is_inside(&pool, &[0], 1));
        assert!(!PagedHead { page_tokens: usize::MAX, ..head }.is_inside(&pool, &[0], 1));
        assert!(!PagedHead { page_elements: 0, ..head }.is_inside(&pool, &[0], 1));
    }

    #[test]
    fn device_results_agree_with_the_cpu_if_a_device_exists() {
        let found = devices();
        println!("devices: {found:?}");
        let kernels = match CudaKernels::load(0) {
            Ok(kernels) => kernels,
            Err(error @ (CudaError::NoDriver | CudaError::NoDevice(_) | CudaError::NoCompiler)) => {
                assert!(found.is_empty() || matches!(error, CudaError::NoCompiler));
                return println!("{error}");
            }
            Err(other) => panic!("{other}"),
        };
        let (rows, width) = (7, 300);
        let x: Vec<f32> = (0..rows * width).map(|i| (i as f32 * 0.37).sin()).collect();
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + (i as f32).cos() * 0.1).collect();
        let mut expected = vec![0.0; x.len()];
        cpu::rms_norm(&x, &weight, 1e-5, &mut expected);
        let norm = kernels.rms_norm(&x, &weight, 1e-5).unwrap();
        assert!(norm.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));

        let (page_tokens, head_dim, tokens) = (4, 3, 10);
        let layout = HeadLayout { start: 24 + 3, stride: 6 };
        let head = PagedHead { page_elements: 48, page_tokens, layout, head_dim };
        let pool: Vec<f32> = (0..5 * 48).map(|i| i as f32).collect();
        let page_of = [3, 0, 4];
        let expected: Vec<f32> = (0..tokens)
            .flat_map(|t| {
                let at = page_of[t / page_tokens] as usize * 48 + layout.start + t % page_tokens * layout.stride;
                pool[at..at + head_dim].to_vec()
            })
            .collect();
        let found = kernels.gather_head(&pool, &page_of, head, tokens).unwrap();
        assert_eq!(found, expected);
        assert!(kernels.gather_head(&pool, &[5], head, 1).is_err());
    }
}
