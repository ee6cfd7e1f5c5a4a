//! Memory of Python objects, which transfers read and write without the GIL.
//!
//! Invariants:
//! - The object that owns the memory stays referenced until the last transfer that can touch it has
//!   dropped its span. Deadlines and cancelled calls do not change this.

use crate::fork::PerProcess;
use crate::namespace::invalid;
use crate::owner::Owner;
use bytes::Bytes;
use larder_bindings::{Holds, Span};
use larder_runtime::lock::Mutex;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

/// Device types of DLPack whose memory the processor can address.
const DLPACK_HOST_DEVICES: [i32; 3] = [1, 3, 11];

/// `Py_buffer`. The stable ABI has it from CPython 3.11, with the layout that 3.10 already had.
#[repr(C)]
struct BufferView {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut BufferView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut BufferView);
}

/// `DLTensor`, with which a `DLManagedTensor` begins.
#[repr(C)]
struct DlTensor {
    data: *mut u8,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

pub(crate) type Target = larder_bindings::Target<Owner>;

/// A run of bytes that a Python object owns.
pub(crate) struct Memory {
    span: Span<Owner>,
    is_readonly: bool,
}

impl Memory {
    fn new(start: *mut u8, len: usize, is_readonly: bool, owner: Option<Py<PyAny>>) -> Memory {
        let owner = Owner::new(owner);
        // SAFETY: the callers below state why the owner keeps the memory. The caller of the Python
        // method promises to leave it alone during the call.
        Memory { span: unsafe { Span::new(start, len, owner) }, is_readonly }
    }

    /// Memory of `object`: a [`Pointer`], a [`Buffer`], or an object with the buffer protocol or
    /// DLPack. Fails unless the bytes are contiguous and in the memory of the processor.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
        if let Ok(pointer) = object.cast::<Pointer>() {
            let Pointer { address, size, is_readonly, owner } = pointer.get();
            let owner = owner.as_ref().map(|owner| owner.clone_ref(object.py()));
            let start = std::ptr::with_exposed_provenance_mut(*address);
            return Ok(Memory::new(start, *size, *is_readonly, owner));
        }
        if let Ok(buffer) = object.cast::<Buffer>() {
            let Buffer { address, size, memory, .. } = buffer.get();
            if memory.lock().get().is_none() {
                return Err(PyValueError::new_err("the buffer belongs to the process that forked this one"));
            }
            let owner = Some(object.clone().unbind());
            let start = std::ptr::with_exposed_provenance_mut(*address);
            return Ok(Memory::new(start, *size, false, owner));
        }
        match PyMemoryView::from(object) {
            Ok(view) => Self::of_view(&view),
            Err(_) if object.hasattr("__dlpack__")? => Self::of_dlpack(object),
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => Err(PyTypeError::new_err(format!(
                "{} is no buffer: pass a bytes-like object, an object with __dlpack__, a Pointer or a Buffer",
                object.get_type().name()?
            ))),
            Err(error) => Err(error),
        }
    }

    fn of_view(view: &Bound<'_, PyMemoryView>) -> PyResult<Memory> {
        let mut raw = BufferView {
            buf: std::ptr::null_mut(),
            obj: std::ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: std::ptr::null_mut(),
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
        };
        // SAFETY: a live object and a view that the call fills. `PyBUF_SIMPLE` (0) refuses memory
        // that is not contiguous.
        if unsafe { PyObject_GetBuffer(view.as_ptr(), &mut raw, 0) } != 0 {
            return Err(PyErr::fetch(view.py()));
        }
        let (start, len, is_readonly) = (raw.buf.cast(), raw.len.unsigned_abs(), raw.readonly != 0);
        // SAFETY: the view that the call above has filled. The memoryview still exports the memory.
        unsafe { PyBuffer_Release(&mut raw) };
        Ok(Memory::new(start, len, is_readonly, Some(view.clone().into_any().unbind())))
    }

    /// The capsule stays unconsumed: its destructor calls the producer's deleter.
    fn of_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let device: Bound<'_, PyTuple> = object.call_method0("__dlpack_device__")?.cast_into()?;
        let device_type: i32 = device.get_item(0)?.extract()?;
        if !DLPACK_HOST_DEVICES.contains(&device_type) {
            return Err(PyBufferError::new_err("the tensor is not in host memory: copy it to the CPU first"));
        }
        let capsule = object.call_method0("__dlpack__")?;
        // SAFETY: the call checks the type and the name of the capsule.
        let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dltensor".as_ptr()) };
        if tensor.is_null() {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: a capsule of this name points to a `DLManagedTensor`, which begins with this.
        let tensor = unsafe { &*tensor.cast::<DlTensor>() };
        let len = contiguous_bytes(tensor).ok_or_else(|| PyBufferError::new_err("the tensor is not contiguous"))?;
        let start = tensor.data.wrapping_add(tensor.byte_offset as usize);
        Ok(Memory::new(start, len, false, Some(capsule.unbind())))
    }

    /// Memory that a transfer writes, of exactly `expected` bytes.
    pub(crate) fn into_target(self, expected: usize, holds: &Arc<Holds>) -> PyResult<Target> {
        self.span.check_bytes(expected).map_err(invalid)?;
        if self.is_readonly {
            return Err(PyBufferError::new_err("the buffer is read-only"));
        }
        Ok(self.span.into_target(holds))
    }

    /// Memory that a transfer reads, of exactly `expected` bytes.
    pub(crate) fn into_bytes(self, expected: usize, holds: &Arc<Holds>) -> PyResult<Bytes> {
        self.span.check_bytes(expected).map_err(invalid)?;
        Ok(self.span.into_bytes(holds))
    }
}

/// Bytes of the tensor, or `None` if its elements do not follow each other in C order.
fn contiguous_bytes(tensor: &DlTensor) -> Option<usize> {
    let ndim = usize::try_from(tensor.ndim).ok()?;
    let item_bytes = (usize::from(tensor.bits) * usize::from(tensor.lanes)).div_ceil(8);
    let mut items: i64 = 1;
    for at in (0..ndim).rev() {
        // SAFETY: DLPack tensors have `ndim` lengths, and as many strides unless these are null.
        let (length, stride) =
            unsafe { (*tensor.shape.add(at), (!tensor.strides.is_null()).then(|| *tensor.strides.add(at))) };
        // The stride of a dimension of one element means nothing.
        if length != 1 && stride.is_some_and(|stride| stride != items) {
            return None;
        }
        items = items.checked_mul(length)?;
    }
    usize::try_from(items).ok()?.checked_mul(item_bytes)
}

/// Memory given by address and size.
///
/// `owner` stays referenced until no transfer can touch the memory. Without an owner, the memory
/// MUST stay mapped until the process ends.
#[pyclass(frozen, module = "larder_kv._native")]
pub(crate) struct Pointer {
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    size: usize,
    #[pyo3(get, name = "readonly")]
    is_readonly: bool,
    owner: Option<Py<PyAny>>,
}

#[pymethods]
impl Pointer {
    #[new]
    #[pyo3(signature = (address, size, owner=None, *, readonly=false))]
    fn new(address: usize, size: usize, owner: Option<Py<PyAny>>, readonly: bool) -> PyResult<Self> {
        if (size > 0 && address == 0) || address.checked_add(size).is_none_or(|end| end > isize::MAX as usize) {
            return Err(PyValueError::new_err("address and size are no range of memory"));
        }
        Ok(Pointer { address, size, is_readonly: readonly, owner })
    }
}

/// A block of the client's shared memory, from [`Client.buffer`](crate::client::Client::buffer). It
/// never moves.
#[pyclass(frozen, module = "larder_kv._native")]
pub(crate) struct Buffer {
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    size: usize,
    /// `True` if a node on this machine can copy from the block.
    #[pyo3(get, name = "shared")]
    is_shared: bool,
    /// Its bytes are accessed by address only.
    memory: Mutex<PerProcess<larder_client::Buffer>>,
}

impl Buffer {
    pub(crate) fn new(mut memory: larder_client::Buffer) -> Self {
        let (address, size, is_shared) = (memory.as_mut_ptr().expose_provenance(), memory.len(), memory.is_shared());
        Buffer { address, size, is_shared, memory: Mutex::new(PerProcess::new(memory)) }
    }
}
