//! Matrix products by cuBLASLt, loaded at run time.
//!
//! Invariants:
//! - A matrix has one algorithm, whatever the number of rows. It splits no sum and has no working
//!   memory. So the library cannot select another order of sums for another number of rows.
//! - Whether rows keep their bits is the library's affair: nothing documents it. The caller
//!   compares before it relies on it:
//!   see [`is_batch_invariant`](crate::launch::is_batch_invariant).
//!
//! Matrices of the library are column-major. Rows of ours are its columns, so it computes
//! `out = weightᵀ · x` with `weight` of `[inputs][outputs]` and `x` of `[inputs][rows]`.
//!
//! Source: <https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api>.

use super::lock;
use crate::device::DeviceError;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Mutex;

/// Number of rows for which the library selects its algorithm: a large chunk of a prompt.
const PLANNED_ROWS: usize = 2048;
/// Numbers of rows that an algorithm must accept as well.
const CHECKED_ROWS: [usize; 4] = [1, 8, 65, 8192];
/// Algorithms that the library is asked for.
const CANDIDATES: usize = 32;
/// Most algorithms that are kept. A model has some ten shapes of matrices.
const ALGORITHMS_MAX: usize = 256;
/// `CUBLAS_OP_T` of `cublasOperation_t` in cublas_api.h.
static TRANSPOSED: i32 = 1;

impl From<CublasError> for DeviceError {
    fn from(error: CublasError) -> DeviceError {
        DeviceError::Library(format!("cuBLASLt reported {error}"))
    }
}

/// Outputs and inputs of a weight matrix.
pub(super) type MatrixShape = [usize; 2];

/// Device addresses of a product.
pub(super) struct Operands {
    /// `[rows][inputs]`, bf16.
    pub(super) x: u64,
    /// `[outputs][inputs]`, bf16.
    pub(super) weight: u64,
    /// `[rows][outputs]`, f32.
    pub(super) out: u64,
}

#[derive(Clone)]
struct Algorithm {
    raw: sys::cublasLtMatmulAlgo_t,
    /// Attributes that tell algorithms apart.
    config: String,
}

/// The library, for the context that was current when it was opened.
pub(super) struct Library {
    handle: sys::cublasLtHandle_t,
    version: usize,
    algorithms: Mutex<HashMap<MatrixShape, Algorithm>>,
}

// SAFETY: the library permits calls with one handle from any thread (cuBLAS documentation, section
// "cublasLtHandle_t").
unsafe impl Send for Library {}
// SAFETY: as for `Send`.
unsafe impl Sync for Library {}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuBLASLt {}", self.version)
    }
}

impl Library {
    /// Loads the library. The context of the device is current.
    pub(super) fn open() -> Result<Library, DeviceError> {
        // SAFETY: only loads the library. Its initialisers run as in any program that links to it.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::Library("libcublasLt is not installed".to_string()));
        }
        let handle = result::create_handle()?;
        // SAFETY: the library is loaded, and the function only returns a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        Ok(Library { handle, version, algorithms: Mutex::default() })
    }

    /// Name of the library and its version.
    pub(super) fn name(&self) -> String {
        format!("cublaslt {}", self.version)
    }

    /// Selects the algorithm of a matrix, and returns a text that identifies it.
    pub(super) fn plan(&self, shape: MatrixShape) -> Result<String, DeviceError> {
        Ok(self.algorithm(shape)?.config)
    }

    /// Enqueues a product on `stream`.
    ///
    /// # Safety
    /// The addresses are those of device memory that holds the operands until the stream has passed
    /// the product.
    pub(super) unsafe fn multiply(
        &self,
        shape: MatrixShape,
        rows: usize,
        operands: &Operands,
        stream: sys::cudaStream_t,
    ) -> Result<(), DeviceError> {
        let algorithm = self.algorithm(shape)?;
        let call = Call::new(shape, rows)?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let (out, layout) = (operands.out as *mut c_void, call.out.0);
        // SAFETY: the descriptors live until the end of the call, which copies them and the two
        // factors. The caller guarantees the memory. The algorithm needs no working memory.
        unsafe {
            result::matmul(
                self.handle,
                call.operation.0,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                operands.weight as *const c_void,
                call.weight.0,
                operands.x as *const c_void,
                call.x.0,
                out.cast_const(),
                layout,
                out,
                layout,
                &raw const algorithm.raw,
                std::ptr::null_mut(),
                0,
                stream,
            )
        }?;
        Ok(())
    }

    fn algorithm(&self, shape: MatrixShape) -> Result<Algorithm, DeviceError> {
        if let Some(known) = lock(&self.algorithms).get(&shape) {
            return Ok(known.clone());
        }
        let found = self.search(shape)?;
        let mut algorithms = lock(&self.algorithms);
        if algorithms.len() >= ALGORITHMS_MAX {
            algorithms.clear();
        }
        algorithms.insert(shape, found.clone());
        Ok(found)
    }

    /// The first algorithm of the library's list that splits no sum and serves all numbers of rows.
    fn search(&self, shape: MatrixShape) -> Result<Algorithm, DeviceError> {
        let call = Call::new(shape, PLANNED_ROWS)?;
        let preference = Preference::new()?;
        let mut found = [const { MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed() }; CANDIDATES];
        let mut count = 0;
        // SAFETY: the descriptors live until the end of the call. The array has room for the number
        // of results that the call asks for.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                call.operation.0,
                call.weight.0,
                call.x.0,
                call.out.0,
                call.out.0,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr().cast(),
                &raw mut count,
            )
        }
        .result()?;
        let count = usize::try_from(count).unwrap_or(0).min(CANDIDATES);
        // SAFETY: the library has written this number of results.
        let candidates = found[..count].iter().map(|result| unsafe { result.assume_init_ref() });
        for candidate in candidates.filter(|it| it.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS) {
            let config = config(&candidate.algo)?;
            if config.splits_no_sum() && self.serves_all_rows(shape, &candidate.algo)? {
                return Ok(Algorithm { raw: candidate.algo, config: config.text() });
            }
        }
        let [outputs, inputs] = shape;
        Err(DeviceError::Library(format!("cuBLASLt has no algorithm for {outputs} × {inputs} without split sums")))
    }

    fn serves_all_rows(&self, shape: MatrixShape, algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<bool, DeviceError> {
        for rows in CHECKED_ROWS {
            let call = Call::new(shape, rows)?;
            let mut result = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
            // SAFETY: the descriptors live until the end of the call, which writes `result`.
            let status = unsafe {
                sys::cublasLtMatmulAlgoCheck(
                    self.handle,
                    call.operation.0,
                    call.weight.0,
                    call.x.0,
                    call.out.0,
                    call.out.0,
                    algorithm,
                    result.as_mut_ptr(),
                )
            };
            // SAFETY: zeros are a value of the type, so it is initialised even if the call fails.
            let result = unsafe { result.assume_init() };
            if status.result().is_err() || result.workspaceSize > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: `open` has created the handle, and this is its only end. An error has no
        // consequence.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Attributes of an algorithm, in the order of [`ATTRIBUTES`].
struct Config([u32; 9]);

/// Attributes that select the code and its order of sums.
const ATTRIBUTES: [sys::cublasLtMatmulAlgoConfigAttributes_t; 9] = {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    [
        Attribute::CUBLASLT_ALGO_CONFIG_ID,
        Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID,
        Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
        Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
        Attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
        Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
        Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID,
        Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID,
        Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
    ]
};

impl Config {
    fn splits_no_sum(&self) -> bool {
        let [_, _, splits, reduction, ..] = self.0;
        splits <= 1 && reduction == sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32
    }

    fn text(&self) -> String {
        self.0.map(|value| value.to_string()).join(".")
    }
}

/// Reads the attributes. Those that have 16 bits leave the upper half zero.
fn config(algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<Config, DeviceError> {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let mut values = [0; ATTRIBUTES.len()];
    for (value, attribute) in values.iter_mut().zip(ATTRIBUTES) {
        let is_short = matches!(
            attribute,
            Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID | Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID
        );
        let bytes = if is_short { size_of::<u16>() } else { size_of::<u32>() };
        let mut written = 0;
        // SAFETY: `value` has room for `bytes` bytes.
        let status = unsafe {
            sys::cublasLtMatmulAlgoConfigGetAttribute(
                algorithm,
                attribute,
                (&raw mut *value).cast(),
                bytes,
                &raw mut written,
            )
        };
        status.result()?;
    }
    Ok(Config(values))
}

/// Descriptors of one product.
struct Call {
    operation: Operation,
    weight: Layout,
    x: Layout,
    out: Layout,
}

impl Call {
    fn new([outputs, inputs]: MatrixShape, rows: usize) -> Result<Call, DeviceError> {
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
        Ok(Call {
            operation: Operation::new()?,
            weight: Layout::new(CUDA_R_16BF, inputs, outputs)?,
            x: Layout::new(CUDA_R_16BF, inputs, rows)?,
            out: Layout::new(CUDA_R_32F, outputs, rows)?,
        })
    }
}

/// Sums of f32, with the first matrix transposed.
struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new() -> Result<Operation, DeviceError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let operation = Operation(result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?);
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let value = (&raw const TRANSPOSED).cast();
        // SAFETY: the descriptor exists, and the call copies the value.
        unsafe { result::set_matmul_desc_attribute(operation.0, attribute, value, size_of::<i32>()) }?;
        Ok(operation)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: this is the only owner.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// Layout of a column-major matrix without gaps.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(element: sys::cudaDataType_t, rows: usize, columns: usize) -> Result<Layout, DeviceError> {
        Ok(Layout(result::create_matrix_layout(element, rows as u64, columns as u64, rows as i64)?))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: this is the only owner.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// Search for algorithms without working memory and without split sums.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Preference, DeviceError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference(result::create_matmul_pref()?);
        let (bytes, scheme) = (0_u64, sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32);
        // SAFETY: the descriptor exists, and the calls copy the values.
        unsafe {
            let attribute = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let value = (&raw const bytes).cast();
            result::set_matmul_pref_attribute(preference.0, attribute, value, size_of::<u64>())?;
            let attribute = Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            let value = (&raw const scheme).cast();
            result::set_matmul_pref_attribute(preference.0, attribute, value, size_of::<u32>())?;
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: this is the only owner.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithms_that_split_sums_are_told_apart() {
        let config = |splits, reduction| Config([7, 20, splits, reduction, 0, 0, 4, 0, 2]);
        assert!(config(0, 0).splits_no_sum() && config(1, 0).splits_no_sum());
        assert!(!config(2, 0).splits_no_sum() && !config(1, 2).splits_no_sum());
        assert_eq!(config(1, 0).text(), "7.20.1.0.0.0.4.0.2");
    }
}
