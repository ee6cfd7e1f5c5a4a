//! Products of activations with a weight matrix.

use super::{Arithmetic, Element, PACK_BYTES, THREADS, blocks, enqueue, expect, size};
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};

/// Outputs of a block.
const BLOCK_OUTPUTS: usize = 64;
/// Rows of a block, for few rows and for many.
const BLOCK_ROWS: [usize; 2] = [8, 64];
/// Fewest rows for which blocks of many rows are faster: a smaller number leaves most of them idle.
const MANY_ROWS: usize = 24;
const KERNELS: [[&str; 3]; 2] = [
    ["matmul_few_f32", "matmul_few_f16", "matmul_few_bf16"],
    ["matmul_many_f32", "matmul_many_f16", "matmul_many_bf16"],
];

/// A kernel on tensor cores, with the rows and outputs of a block and its threads.
struct TensorKernel {
    name: &'static str,
    rows: usize,
    outputs: usize,
    threads: u32,
}

/// For few rows and for many. Same bits.
const TENSOR_KERNELS: [TensorKernel; 2] = [
    TensorKernel { name: "matmul_mma_few", rows: 16, outputs: 32, threads: 64 },
    TensorKernel { name: "matmul_mma_many", rows: 128, outputs: 128, threads: 256 },
];
/// Fewest rows for which the tensor kernel of many rows is selected. Up to this number, the other
/// one reads each weight at most three times.
const TENSOR_MANY_ROWS: usize = 49;
/// Inputs of a matrix on tensor cores are a multiple of this.
const TENSOR_INPUTS_STEP: usize = 8;

/// Product `out[r][o] = Σ_i x[r][i] · weight[o][i] + bias[o]` of f32 rows. A row has the same bits
/// whatever the number of rows. Those of [`Arithmetic::Plain`] are the bits of
/// [`matmul`](crate::cpu::matmul).
#[derive(Debug, Clone, Copy)]
pub struct MatMul<'a> {
    /// [`Arithmetic::Tensor`] needs what [`MatMul::arithmetic_for`] states.
    pub arithmetic: Arithmetic,
    /// Type of the weights.
    pub element: Element,
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// `[rows][inputs]`, f32.
    pub x: &'a Slice,
    /// `[outputs][inputs]`.
    pub weight: &'a Slice,
    /// `[outputs]`, f32.
    pub bias: Option<&'a Slice>,
    /// Result, `[rows][outputs]`, f32.
    pub out: &'a Slice,
}

impl MatMul<'_> {
    /// Units for a matrix: matrix instructions serve weights of bf16 whose rows begin at multiples
    /// of 16 bytes. The choice depends on the matrix only, so all rows have it.
    pub fn arithmetic_for(arithmetic: Arithmetic, element: Element, inputs: usize) -> Arithmetic {
        let is_fit = element == Element::Bf16 && inputs.is_multiple_of(TENSOR_INPUTS_STEP);
        if is_fit { arithmetic } else { Arithmetic::Plain }
    }

    /// Enqueues the product.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let (rows, inputs, outputs) = (size(self.rows)?, size(self.inputs)?, size(self.outputs)?);
        let (weight, bytes) = ([self.outputs, self.inputs], self.element.bytes());
        expect(self.x, &[self.rows, self.inputs], 4, "product: the input is shorter than its rows")?;
        expect(self.weight, &weight, bytes, "product: the weights are fewer than the outputs need")?;
        expect(self.out, &[self.rows, self.outputs], 4, "product: the result is shorter than its rows")?;
        if let Some(bias) = self.bias {
            expect(bias, &[self.outputs], 4, "product: the bias is shorter than the outputs")?;
        }
        if rows == 0 || outputs == 0 {
            return Ok(());
        }
        let (kernel, block_outputs, block_rows, threads) = match self.arithmetic {
            Arithmetic::Plain => {
                let variant = usize::from(self.rows >= MANY_ROWS);
                (self.element.select(KERNELS[variant]), BLOCK_OUTPUTS, BLOCK_ROWS[variant], THREADS)
            }
            Arithmetic::Tensor => {
                self.check_tensor()?;
                let kernel = &TENSOR_KERNELS[usize::from(self.rows >= TENSOR_MANY_ROWS)];
                (kernel.name, kernel.outputs, kernel.rows, kernel.threads)
            }
        };
        let across = size(self.outputs.div_ceil(block_outputs))?;
        let down = blocks(self.rows.div_ceil(block_rows))?;
        let launch = Launch::new(kernel, across, threads)
            .grid([across, down, 1])
            .arg(Arg::read(self.x))
            .arg(rows)
            .arg(inputs)
            .arg(Arg::read(self.weight))
            .arg(outputs)
            .arg(self.bias.map_or(Arg::Null, Arg::read))
            .arg(Arg::write(self.out));
        enqueue(stream, &launch)
    }

    /// Checks what the kernels on tensor cores need: they move 16 bytes at a time.
    fn check_tensor(&self) -> Result<(), DeviceError> {
        if Self::arithmetic_for(Arithmetic::Tensor, self.element, self.inputs) != Arithmetic::Tensor {
            return Err(DeviceError::Shape("a product on tensor cores needs weights of bf16 with 8 n inputs"));
        }
        let is_aligned = |slice: &Slice| slice.address().is_multiple_of(PACK_BYTES as u64);
        if !is_aligned(self.x) || !is_aligned(self.weight) {
            return Err(DeviceError::Shape("a product on tensor cores needs operands at multiples of 16 bytes"));
        }
        Ok(())
    }
}
