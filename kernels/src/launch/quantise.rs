//! Quantisation of pages to 8 bits, and byte planes of bf16.

use super::{Element, THREADS, blocks, elements, enqueue, expect, size};
use crate::cpu::EightBit;
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};

/// bf16 that a block of the plane kernels covers.
const PLANE_BLOCK: usize = 4096;

/// Pages and their quantised form: one byte per element in the place of the element, and one scale
/// per head of each page.
#[derive(Debug, Clone, Copy)]
pub struct QuantisedPages<'a> {
    pub format: EightBit,
    pub element: Element,
    pub page_count: usize,
    pub page_elements: usize,
    pub page_tokens: usize,
    pub head_dim: usize,
    /// Distance from one token of a head to the next.
    pub token_stride: usize,
    /// Heads of a page: keys and values of all layers, as far as they are quantised.
    pub heads: usize,
    /// First element of each head in a page: `[heads]`, u32. The kernels leave out a head that
    /// leaves its page.
    pub starts: &'a Slice,
    /// `[page_count][page_elements]`.
    pub pages: &'a Slice,
    /// `[page_count][heads]`, f32.
    pub scales: &'a Slice,
    /// `[page_count][page_elements]`, one byte each.
    pub codes: &'a Slice,
}

impl QuantisedPages<'_> {
    /// Enqueues the computation of scales and codes from the pages.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn quantise(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let names = match self.format {
            EightBit::E4m3 => ["quantise_e4m3_f32", "quantise_e4m3_f16", "quantise_e4m3_bf16"],
            EightBit::Int8 => ["quantise_int8_f32", "quantise_int8_f16", "quantise_int8_bf16"],
        };
        let Some(launch) = self.start(names)? else { return Ok(()) };
        let launch = self.layout(launch.arg(Arg::read(self.pages)))?;
        enqueue(stream, &launch.arg(Arg::write(self.scales)).arg(Arg::write(self.codes)))
    }

    /// Enqueues the computation of the pages from scales and codes.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn dequantise(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let names = match self.format {
            EightBit::E4m3 => ["dequantise_e4m3_f32", "dequantise_e4m3_f16", "dequantise_e4m3_bf16"],
            EightBit::Int8 => ["dequantise_int8_f32", "dequantise_int8_f16", "dequantise_int8_bf16"],
        };
        let Some(launch) = self.start(names)? else { return Ok(()) };
        let launch = self.layout(launch.arg(Arg::read(self.codes)).arg(Arg::read(self.scales)))?;
        enqueue(stream, &launch.arg(Arg::write(self.pages)))
    }

    /// Checks the shapes. Returns `None` if there is nothing to compute.
    fn start(&self, names: [&'static str; 3]) -> Result<Option<Launch>, DeviceError> {
        let shape = [self.page_count, self.page_elements];
        expect(self.pages, &shape, self.element.bytes(), "quantise: the pages are too short")?;
        expect(self.codes, &shape, 1, "quantise: the codes are shorter than the pages")?;
        expect(self.scales, &[self.page_count, self.heads], 4, "quantise: the scales are fewer than the heads")?;
        expect(self.starts, &[self.heads], 4, "quantise: the starts are fewer than the heads")?;
        // A block counts the elements of its head in 32 bits.
        let count = size(elements(&[self.page_tokens, self.head_dim])?)?;
        if self.page_count == 0 || self.heads == 0 || count == 0 || self.page_elements == 0 {
            return Ok(None);
        }
        let pages = size(self.page_count)?;
        Ok(Some(Launch::new(self.element.select(names), pages, THREADS).grid([pages, blocks(self.heads)?, 1])))
    }

    fn layout(&self, launch: Launch) -> Result<Launch, DeviceError> {
        Ok(launch
            .arg(self.page_elements as u64)
            .arg(Arg::read(self.starts))
            .arg(size(self.token_stride)?)
            .arg(size(self.page_tokens)?)
            .arg(size(self.head_dim)?))
    }
}

/// Pieces of bf16, and their byte planes. [`split_planes`](crate::cpu::split_planes) defines them.
#[derive(Debug, Clone, Copy)]
pub struct BytePlanes<'a> {
    /// At most 65,535.
    pub pieces: usize,
    /// Elements per piece.
    pub count: usize,
    /// `[pieces][count]`, bf16.
    pub elements: &'a Slice,
    /// `[pieces][2][count]`, one byte each.
    pub planes: &'a Slice,
}

impl BytePlanes<'_> {
    /// Enqueues the computation of the planes from the elements.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn split(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let Some(launch) = self.start("planes_split")? else { return Ok(()) };
        let launch = launch.arg(Arg::read(self.elements)).arg(self.count as u64);
        enqueue(stream, &launch.arg(Arg::write(self.planes)))
    }

    /// Enqueues the computation of the elements from the planes.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn merge(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let Some(launch) = self.start("planes_merge")? else { return Ok(()) };
        let launch = launch.arg(Arg::read(self.planes)).arg(self.count as u64);
        enqueue(stream, &launch.arg(Arg::write(self.elements)))
    }

    fn start(&self, kernel: &'static str) -> Result<Option<Launch>, DeviceError> {
        expect(self.elements, &[self.pieces, self.count], 2, "planes: the elements are too short")?;
        expect(self.planes, &[self.pieces, 2, self.count], 1, "planes: the planes are shorter than the elements")?;
        if self.pieces == 0 || self.count == 0 {
            return Ok(None);
        }
        let grid = [size(self.count.div_ceil(PLANE_BLOCK))?, blocks(self.pieces)?, 1];
        Ok(Some(Launch::new(kernel, grid[0], THREADS).grid(grid)))
    }
}
