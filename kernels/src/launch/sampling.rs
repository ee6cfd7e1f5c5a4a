//! Selection of tokens from logits.

use super::{Element, THREADS, enqueue, expect, size};
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};
use bytemuck::{Pod, Zeroable};

/// Largest vocabulary of [`Sample`]. The sum of that many weights fits into 63 bits.
const MAX_VOCAB: usize = 1 << 18;

/// Parameters and random number of one row, as the kernel reads them. Their meaning is that of
/// [`SampleParams`](crate::cpu::SampleParams).
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SampleRow {
    /// Random number from 0 to 1, without 1.
    pub uniform: f64,
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub top_k: u32,
}

/// Index of the largest logit per row, as [`argmax`](crate::cpu::argmax) returns it.
#[derive(Debug, Clone, Copy)]
pub struct Argmax<'a> {
    pub element: Element,
    pub rows: usize,
    pub vocab: usize,
    /// `[rows][vocab]`.
    pub logits: &'a Slice,
    /// Result, `[rows]`, u32.
    pub out: &'a Slice,
}

impl Argmax<'_> {
    /// Enqueues the selection.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let (rows, vocab) = (size(self.rows)?, size(self.vocab)?);
        expect(self.logits, &[self.rows, self.vocab], self.element.bytes(), "argmax: the logits are too short")?;
        expect(self.out, &[self.rows], 4, "argmax: the result is shorter than the rows")?;
        if rows == 0 {
            return Ok(());
        }
        let kernel = self.element.select(["argmax_f32", "argmax_f16", "argmax_bf16"]);
        let launch = Launch::new(kernel, rows, THREADS).arg(Arg::read(self.logits)).arg(vocab);
        enqueue(stream, &launch.arg(Arg::write(self.out)))
    }
}

/// A sample per row. It is that of [`sample_token`](crate::cpu::sample_token) for the same random
/// number, except where the number falls within 10⁻⁸ of the border between two tokens.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    pub element: Element,
    pub rows: usize,
    /// At most 2¹⁸.
    pub vocab: usize,
    /// `[rows][vocab]`.
    pub logits: &'a Slice,
    /// `[rows]`, [`SampleRow`].
    pub parameters: &'a Slice,
    /// Working memory, `[rows][vocab]`, u64.
    pub weights: &'a Slice,
    /// Result, `[rows]`, u32.
    pub out: &'a Slice,
}

impl Sample<'_> {
    /// Enqueues the selection.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let (rows, vocab) = (size(self.rows)?, size(self.vocab)?);
        if self.vocab > MAX_VOCAB {
            return Err(DeviceError::Shape("sample: the vocabulary has more than 2^18 tokens"));
        }
        let shape = [self.rows, self.vocab];
        expect(self.logits, &shape, self.element.bytes(), "sample: the logits are too short")?;
        expect(self.weights, &shape, 8, "sample: the working memory is too short")?;
        // A row is three words of 8 bytes.
        expect(self.parameters, &[self.rows, 3], 8, "sample: the parameters are fewer than the rows")?;
        expect(self.out, &[self.rows], 4, "sample: the result is shorter than the rows")?;
        if rows == 0 {
            return Ok(());
        }
        let kernel = self.element.select(["sample_f32", "sample_f16", "sample_bf16"]);
        let launch = Launch::new(kernel, rows, THREADS)
            .arg(Arg::read(self.logits))
            .arg(vocab)
            .arg(Arg::read(self.parameters))
            .arg(Arg::write(self.weights))
            .arg(Arg::write(self.out));
        enqueue(stream, &launch)
    }
}

const _: () = assert!(size_of::<SampleRow>() == 24);
