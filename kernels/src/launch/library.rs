//! Products by the library of the device, and a check that they are batch-invariant.

use super::activation::Narrow;
use super::{Element, expect};
use crate::device::{Device, DeviceError, LibraryProduct, Place, Slice, Stream, download, upload};
use half::bf16;
use std::time::Instant;

/// Rows of the product that the check takes as the reference.
const CHECKED_ROWS: usize = 300;
/// First row and number of the rows that must keep their bits: decode steps, and chunks that begin
/// and end inside tiles of any size.
const CHECKED_PARTS: [(usize, usize); 5] = [(0, 1), (299, 1), (5, 8), (17, 64), (100, 129)];

/// Product `out[r][o] = Σ_i x[r][i] · weight[o][i]` of f32 rows, which are rounded to bf16 before.
#[derive(Debug, Clone, Copy)]
pub struct LibraryMatMul<'a> {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// `[rows][inputs]`, f32.
    pub x: &'a Slice,
    /// Working memory, `[rows][inputs]`, bf16.
    pub narrow: &'a Slice,
    /// `[outputs][inputs]`, bf16.
    pub weight: &'a Slice,
    /// Result, `[rows][outputs]`, f32.
    pub out: &'a Slice,
}

impl LibraryMatMul<'_> {
    /// Enqueues the rounding and the product.
    ///
    /// # Errors
    /// See [`launch`](super). Also if the device has no library.
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let &LibraryMatMul { rows, inputs, outputs, x, narrow, weight, out } = self;
        let element = Element::Bf16.bytes();
        expect(x, &[rows, inputs], 4, "product: the input is shorter than its rows")?;
        expect(narrow, &[rows, inputs], element, "product: the working memory is shorter than the input")?;
        expect(weight, &[outputs, inputs], element, "product: the weights are fewer than the outputs need")?;
        expect(out, &[rows, outputs], 4, "product: the result is shorter than its rows")?;
        if rows == 0 || outputs == 0 {
            return Ok(());
        }
        Narrow { count: rows * inputs, x, out: narrow }.launch(stream)?;
        stream.multiply(&LibraryProduct { rows, outputs, inputs, x: narrow, weight, out })
    }
}

/// Compares rows of a large product with the same rows in smaller ones, bit by bit. `weight` is
/// `[outputs][inputs]` of bf16. Takes memory for 300 rows meanwhile.
///
/// # Errors
/// If the memory is not free, if the library fails, or at the deadline.
pub fn is_batch_invariant(
    device: &dyn Device,
    stream: &dyn Stream,
    weight: &Slice,
    [outputs, inputs]: [usize; 2],
    deadline: Instant,
) -> Result<bool, DeviceError> {
    let values: Vec<u16> = test_values(CHECKED_ROWS * inputs).map(|x| bf16::from_f32(x).to_bits()).collect();
    let all = upload(device, stream, &values, deadline)?;
    let result = device.allocate(Place::Device, 4 * CHECKED_ROWS * outputs)?;
    let multiply = |first: usize, rows: usize| -> Result<Vec<u32>, DeviceError> {
        let x = all.slice(2 * first * inputs..2 * (first + rows) * inputs)?;
        let out = result.slice(0..4 * rows * outputs)?;
        stream.multiply(&LibraryProduct { rows, outputs, inputs, x: &x, weight, out: &out })?;
        download(device, stream, &out, deadline)
    };
    let whole = multiply(0, CHECKED_ROWS)?;
    for (first, rows) in CHECKED_PARTS {
        if multiply(first, rows)? != whole[first * outputs..(first + rows) * outputs] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Numbers from −1 to 1 of a fixed sequence (xorshift64*, <https://arxiv.org/abs/1402.6246>).
fn test_values(count: usize) -> impl Iterator<Item = f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    (0..count).map(move |_| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host;
    use std::time::Duration;

    #[test]
    fn devices_without_a_library_say_so() {
        let device = host::open(1 << 20);
        let stream = device.stream("test").unwrap();
        let weight = device.allocate(Place::Device, 64).unwrap().all();
        let deadline = Instant::now() + Duration::from_secs(60);
        let checked = is_batch_invariant(&*device, &*stream, &weight, [2, 8], deadline);
        assert!(matches!(checked, Err(DeviceError::Library(_))), "{checked:?}");
        assert!(matches!(device.product_library(), Err(DeviceError::Library(_))));
        assert!(matches!(device.plan_product(2, 8), Err(DeviceError::Library(_))));
    }

    #[test]
    fn checked_parts_lie_inside_the_reference() {
        assert!(CHECKED_PARTS.iter().all(|(first, rows)| first + rows <= CHECKED_ROWS));
        let values: Vec<f32> = test_values(1000).collect();
        assert!(values.iter().all(|x| (-1.0..=1.0).contains(x)) && values.iter().any(|&x| x < -0.9));
    }
}
