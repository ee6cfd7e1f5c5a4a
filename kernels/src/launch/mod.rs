//! Typed launchers of the model kernels.
//!
//! Invariants:
//! - A launcher refuses shapes that disagree with its slices, before it launches. The kernels check
//!   the indices that only the device sees: tokens, slots, page tables. So no call makes a kernel
//!   leave its slices.
//! - A launcher enqueues and returns. Zero rows launch nothing.
//! - The result of one row does not depend on the other rows of a launch, not even in one bit.
//!
//! Widths, strides and page sizes count elements, unless their name says bytes. A slice may be
//! longer than its shape. Each launcher fails with [`DeviceError::Shape`] where a shape and a slice
//! disagree, and with the errors of [`Stream::launch`](crate::device::Stream::launch).

mod activation;
mod attention;
mod kv_rows;
mod library;
mod matmul;
mod norm;
mod pages;
mod quantise;
mod rope;
mod sampling;

pub use activation::{Add, Embedding, Narrow, SiluMul};
pub use attention::{Attention, SPAN, SequenceRows, partial_floats, span_count, tiles};
pub use kv_rows::KvRows;
pub use library::{LibraryMatMul, is_batch_invariant};
pub use matmul::MatMul;
pub use norm::RmsNorm;
pub use pages::{DevicePages, head_starts};
pub use quantise::{BytePlanes, QuantisedPages};
pub use rope::{KvTarget, Rotate};
pub use sampling::{Argmax, Sample, SampleRow};

use crate::device::{DeviceError, DeviceInfo, Launch, Slice, Stream};

/// Threads per block of most kernels.
const THREADS: u32 = 256;
/// Bytes that a thread moves with one instruction.
const PACK_BYTES: usize = 16;

/// Units of a device that compute attention and products. The two give different bits, and each
/// gives a row the same bits in every launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// f32 arithmetic with one rounding per product, in a fixed order.
    #[default]
    Plain,
    /// Matrix instructions (tensor cores) on bf16 elements, with sums of f32. Activations, queries
    /// and weights of attention are rounded to bf16 before.
    Tensor,
}

impl Arithmetic {
    /// Selects the units of a device: those for matrices from compute capability 8.0 on.
    pub fn of(info: &DeviceInfo) -> Arithmetic {
        if info.compute_capability >= (8, 0) { Arithmetic::Tensor } else { Arithmetic::Plain }
    }

    /// Name for the identity of numerics.
    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::Plain => "plain",
            Arithmetic::Tensor => "mma",
        }
    }

    /// Units for pages of `element`: matrix instructions serve bf16 only.
    #[must_use]
    pub fn for_pages(self, element: Element) -> Arithmetic {
        if element == Element::Bf16 { self } else { Arithmetic::Plain }
    }

    /// Queries per tile of [`Attention::prefill`].
    pub fn prefill_tile(self) -> usize {
        match self {
            Arithmetic::Plain => 16,
            Arithmetic::Tensor => 64,
        }
    }

    /// Queries per tile of [`Attention::split`].
    pub fn split_tile(self) -> usize {
        match self {
            Arithmetic::Plain => 4,
            Arithmetic::Tensor => 16,
        }
    }
}

/// Element type of a tensor on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
}

impl Element {
    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
        }
    }

    /// Selects the name for this element from those for f32, f16 and bf16.
    fn select(self, names: [&'static str; 3]) -> &'static str {
        names[self as usize]
    }
}

/// Selects the name for activations of one type and stored elements of another. `names` are those
/// for f32 with f32, f16 and bf16, then f16 with f16, and bf16 with bf16.
fn select_pair(element: Element, stored: Element, names: [&'static str; 5]) -> Result<&'static str, DeviceError> {
    let index = match (element, stored) {
        (Element::F32, stored) => stored as usize,
        (Element::F16, Element::F16) => 3,
        (Element::Bf16, Element::Bf16) => 4,
        _ => return Err(DeviceError::Shape("activations of 16 bits need stored elements of the same type")),
    };
    Ok(names[index])
}

/// Number of elements of a shape.
fn elements(shape: &[usize]) -> Result<usize, DeviceError> {
    let product = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    product.ok_or(DeviceError::Shape("a shape has too many elements"))
}

/// Checks that `slice` holds a tensor of `shape`, and that its elements are aligned.
fn expect(slice: &Slice, shape: &[usize], element_bytes: usize, message: &'static str) -> Result<(), DeviceError> {
    let bytes = elements(shape)?.checked_mul(element_bytes);
    let is_aligned = slice.address().is_multiple_of(element_bytes as u64);
    if bytes.is_some_and(|bytes| bytes <= slice.bytes()) && is_aligned {
        return Ok(());
    }
    Err(DeviceError::Shape(message))
}

/// Converts a size to the type of a kernel's parameter. Kernels add sizes in 32 bits, so the upper
/// half of the range is refused.
fn size(value: usize) -> Result<u32, DeviceError> {
    match u32::try_from(value) {
        Ok(value) if value <= i32::MAX as u32 => Ok(value),
        _ => Err(DeviceError::Shape("a size is 2^31 or more")),
    }
}

/// Converts a number of blocks in y or z, of which devices take 65,535.
fn blocks(value: usize) -> Result<u32, DeviceError> {
    u16::try_from(value).map(u32::from).map_err(|_| DeviceError::Shape("a grid has more than 65,535 blocks in y or z"))
}

/// Enqueues a launch. A launcher has checked its shapes.
fn enqueue(stream: &dyn Stream, launch: &Launch) -> Result<(), DeviceError> {
    // SAFETY: the launchers pass the arguments in the order of the kernel's parameters. They have
    // checked that the slices hold the shapes, and the kernels check all indices from the device.
    unsafe { stream.launch(launch) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_the_parameters_are_refused() {
        assert_eq!(size(i32::MAX as usize), Ok(i32::MAX as u32));
        assert!(size(1 << 31).is_err() && size(usize::MAX).is_err());
        assert!(blocks(65_535).is_ok() && blocks(65_536).is_err());
        assert!(elements(&[usize::MAX, 2]).is_err());
        assert_eq!(elements(&[3, 0, 5]), Ok(0));
    }

    #[test]
    fn matrix_instructions_need_a_device_and_pages_that_have_them() {
        let info = |major| DeviceInfo {
            kind: "cuda",
            ordinal: 0,
            name: String::new(),
            memory_bytes: 0,
            compute_capability: (major, 5),
            multiprocessors: 1,
        };
        let found = [0, 7, 8, 10].map(|major| Arithmetic::of(&info(major)));
        assert_eq!(found, [Arithmetic::Plain, Arithmetic::Plain, Arithmetic::Tensor, Arithmetic::Tensor]);
        assert_eq!(Arithmetic::Tensor.for_pages(Element::Bf16), Arithmetic::Tensor);
        assert_eq!(Arithmetic::Tensor.for_pages(Element::F16), Arithmetic::Plain);
        assert_eq!(Arithmetic::Plain.for_pages(Element::Bf16), Arithmetic::Plain);
    }

    #[test]
    fn pages_of_another_16_bit_type_are_refused() {
        let names = ["a", "b", "c", "d", "e"];
        assert_eq!(select_pair(Element::F32, Element::Bf16, names), Ok("c"));
        assert_eq!(select_pair(Element::Bf16, Element::Bf16, names), Ok("e"));
        assert!(select_pair(Element::F16, Element::Bf16, names).is_err());
        assert!(select_pair(Element::Bf16, Element::F32, names).is_err());
    }
}
