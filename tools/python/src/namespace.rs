//! Namespaces and keys of pages.

use larder_bindings::InvalidArgument;
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

pub(crate) fn invalid(error: InvalidArgument) -> PyErr {
    PyValueError::new_err(error.0)
}

/// Pages that may be shared: their shape, the model and engine that compute them, and the tenant.
#[pyclass(frozen, module = "larder_kv._native")]
pub(crate) struct Namespace {
    pub(crate) descriptor: NamespaceDescriptor,
}

#[pymethods]
impl Namespace {
    /// Pages of `page_bytes` bytes in `parts` equal parts, whose layout only the engine knows.
    #[new]
    #[pyo3(signature = (page_bytes, *, identity, parts=1, model="", tenant="default", weights_version=""))]
    fn new(
        page_bytes: u32,
        identity: &Bound<'_, PyAny>,
        parts: u32,
        model: &str,
        tenant: &str,
        weights_version: &str,
    ) -> PyResult<Self> {
        let text;
        let identity = if let Ok(string) = identity.cast::<PyString>() {
            text = string.extract::<String>()?;
            text.as_bytes()
        } else {
            let bytes = identity.cast::<PyBytes>().map_err(|_| PyTypeError::new_err("identity is bytes or str"))?;
            bytes.as_bytes()
        };
        let descriptor = larder_bindings::opaque(page_bytes, parts, identity, model, tenant).map_err(invalid)?;
        Namespace::checked(descriptor.with_weights_version(weights_version))
    }

    /// Pages in Larder's own layout, which its engines share.
    #[staticmethod]
    #[pyo3(signature = (
        *, dtype, layers, kv_heads, head_dim, page_tokens, weights,
        layers_per_part=None, head_groups=1, model="", tenant="default", weights_version=""
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords of Python")]
    fn kv(
        dtype: &str,
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        page_tokens: u32,
        weights: [u8; 32],
        layers_per_part: Option<u32>,
        head_groups: u32,
        model: &str,
        tenant: &str,
        weights_version: &str,
    ) -> PyResult<Self> {
        let dtype = match dtype {
            "float32" => KvDtype::F32,
            "float16" => KvDtype::F16,
            "bfloat16" => KvDtype::Bf16,
            _ => return Err(PyValueError::new_err("dtype is float32, float16 or bfloat16")),
        };
        let layers_per_part = layers_per_part.unwrap_or(layers);
        let geometry = PageGeometry { dtype, layers, kv_heads, head_dim, page_tokens, layers_per_part, head_groups };
        let descriptor = NamespaceDescriptor { model: model.into(), weights, geometry, tenant: tenant.into() };
        Namespace::checked(descriptor.with_weights_version(weights_version))
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.descriptor.geometry.page_bytes()
    }

    #[getter]
    fn part_bytes(&self) -> Vec<u32> {
        self.descriptor.geometry.part_table()
    }

    /// The namespace's identity, 64 hexadecimal digits.
    #[getter]
    fn id(&self) -> String {
        self.descriptor.id().to_string()
    }
}

impl Namespace {
    /// Refuses impossible pages, and names that are too long with the version of the weights.
    fn checked(descriptor: NamespaceDescriptor) -> PyResult<Self> {
        Ok(Namespace { descriptor: larder_bindings::checked(descriptor).map_err(invalid)? })
    }
}

/// Key of a page: 32 bytes, or their 64 hexadecimal digits.
pub(crate) fn key(object: &Bound<'_, PyAny>) -> PyResult<PageKey> {
    let wrong = || PyValueError::new_err("a key is 32 bytes, or a str of 64 hexadecimal digits");
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(PageKey(bytes.as_bytes().try_into().map_err(|_| wrong())?));
    }
    let text = object.cast::<PyString>().map_err(|_| PyTypeError::new_err("a key is bytes or str"))?;
    let mut bytes = [0; 32];
    hex::decode_to_slice(text.extract::<String>()?, &mut bytes).map_err(|_| wrong())?;
    Ok(PageKey(bytes))
}

pub(crate) fn keys(objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<PageKey>> {
    objects.iter().map(key).collect()
}

/// Key of the page with `tokens` that follows the page `previous`. SGLang uses the same chain.
#[pyfunction]
#[pyo3(signature = (tokens, previous=None))]
pub(crate) fn page_key<'py>(
    py: Python<'py>,
    tokens: Vec<u32>,
    previous: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let previous = previous.map(key).transpose()?;
    Ok(PyBytes::new(py, &PageKey::chain(previous.as_ref(), &tokens).0))
}
