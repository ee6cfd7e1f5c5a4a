//! Pages of keys and values on a device, as the kernels of one layer address them.

use super::{Element, PACK_BYTES, elements, expect, size};
use crate::cpu::HeadLayout;
use crate::device::{DeviceError, Slice};

/// Pool of equal pages, and the place of one layer's heads in a page. Element `d` of token `t` of
/// head `h` in page `p` is element `p · page_elements + starts[h] + t · token_stride + d`.
#[derive(Debug, Clone, Copy)]
pub struct DevicePages<'a> {
    pub element: Element,
    /// Whole pages. A rest that is no whole page is not used.
    pub pool: &'a Slice,
    pub page_elements: usize,
    pub page_tokens: usize,
    /// First element of each key head in a page, then of each value head: `[2 · kv_heads]`, u32.
    /// See [`head_starts`].
    pub starts: &'a Slice,
    /// Distance from one token of a head to the next.
    pub token_stride: usize,
}

/// Sizes of the pages as parameters of kernels.
pub(super) struct PageSizes {
    pub(super) page_elements: u64,
    pub(super) page_count: u32,
    pub(super) page_tokens: u32,
    pub(super) token_stride: u32,
}

impl DevicePages<'_> {
    pub(super) fn check(&self, kv_heads: usize, head_dim: usize) -> Result<PageSizes, DeviceError> {
        expect(self.starts, &[2, kv_heads], 4, "pages: the starts are fewer than the heads")?;
        if self.page_tokens == 0 || self.page_elements == 0 {
            return Err(DeviceError::Shape("pages: a page holds no token"));
        }
        if elements(&[self.page_tokens - 1, self.token_stride])?.saturating_add(head_dim) > self.page_elements {
            return Err(DeviceError::Shape("pages: the tokens of a head are longer than a page"));
        }
        expect(self.pool, &[0], self.element.bytes(), "pages: the pool is not aligned")?;
        let page_bytes = elements(&[self.page_elements, self.element.bytes()])?;
        Ok(PageSizes {
            page_elements: self.page_elements as u64,
            page_count: size(self.pool.bytes() / page_bytes)?,
            page_tokens: size(self.page_tokens)?,
            token_stride: size(self.token_stride)?,
        })
    }

    /// Checks that every token of a head begins at a multiple of 16 bytes, if the starts do. The
    /// kernels check the starts.
    pub(super) fn check_alignment(&self) -> Result<(), DeviceError> {
        let pack = PACK_BYTES / self.element.bytes();
        let is_aligned = self.pool.address().is_multiple_of(PACK_BYTES as u64)
            && self.page_elements.is_multiple_of(pack)
            && self.token_stride.is_multiple_of(pack);
        if is_aligned { Ok(()) } else { Err(DeviceError::Shape("pages: tokens do not begin at multiples of 16 bytes")) }
    }
}

/// Returns the starts for [`DevicePages`] and the distance from token to token, from the layouts of
/// one layer's key heads and value heads.
///
/// # Errors
/// If the heads differ in number or stride, or if a start is 2³² or more.
pub fn head_starts(keys: &[HeadLayout], values: &[HeadLayout]) -> Result<(Vec<u32>, usize), DeviceError> {
    let stride = keys.first().map_or(0, |layout| layout.stride);
    let is_uniform = keys.len() == values.len() && keys.iter().chain(values).all(|layout| layout.stride == stride);
    if !is_uniform {
        return Err(DeviceError::Shape("pages: the heads of a layer have different strides"));
    }
    let start = |layout: &HeadLayout| u32::try_from(layout.start).ok();
    let starts: Option<Vec<u32>> = keys.iter().chain(values).map(start).collect();
    starts.map(|starts| (starts, stride)).ok_or(DeviceError::Shape("pages: a head begins beyond element 2^32"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_those_of_the_keys_then_of_the_values() {
        let layout = |start, stride| HeadLayout { start, stride };
        let keys = [layout(0, 16), layout(8, 16)];
        let found = head_starts(&keys, &[layout(64, 16), layout(72, 16)]);
        assert_eq!(found, Ok((vec![0, 8, 64, 72], 16)));
        assert!(head_starts(&keys, &[layout(64, 16), layout(72, 8)]).is_err());
        assert!(head_starts(&keys, &[layout(64, 16)]).is_err());
        assert!(head_starts(&[layout(usize::MAX, 1)], &[layout(0, 1)]).is_err());
    }
}
