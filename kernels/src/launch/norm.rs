//! RMS norm, alone or after a residual addition.

use super::{Element, THREADS, enqueue, expect, size};
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};

/// RMS norm of rows: `out[r] = x[r] / sqrt(mean(x[r]²) + eps) · weight`.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    pub element: Element,
    pub rows: usize,
    pub width: usize,
    /// `[rows][width]`.
    pub x: &'a Slice,
    /// `[rows][width]`. If present, the kernel adds it to `x` first, and `x` keeps the sum.
    pub residual: Option<&'a Slice>,
    /// `[width]`, f32.
    pub weight: &'a Slice,
    pub eps: f32,
    /// Result, `[rows][width]`.
    pub out: &'a Slice,
}

impl RmsNorm<'_> {
    /// Enqueues the norm.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let (rows, width) = (size(self.rows)?, size(self.width)?);
        let shape = [self.rows, self.width];
        let bytes = self.element.bytes();
        expect(self.x, &shape, bytes, "norm: the input is shorter than its rows")?;
        expect(self.out, &shape, bytes, "norm: the result is shorter than its rows")?;
        expect(self.weight, &[self.width], 4, "norm: the weight is shorter than a row")?;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        let launch = match self.residual {
            None => {
                let names = ["rms_norm_f32", "rms_norm_f16", "rms_norm_bf16"];
                Launch::new(self.element.select(names), rows, THREADS).arg(Arg::read(self.x))
            }
            Some(residual) => {
                expect(residual, &shape, bytes, "norm: the residual is shorter than its rows")?;
                let names = ["add_rms_norm_f32", "add_rms_norm_f16", "add_rms_norm_bf16"];
                let launch = Launch::new(self.element.select(names), rows, THREADS);
                launch.arg(Arg::read_write(self.x)).arg(Arg::read(residual))
            }
        };
        let launch = launch.arg(Arg::read(self.weight)).arg(self.eps).arg(width).arg(Arg::write(self.out));
        enqueue(stream, &launch)
    }
}
