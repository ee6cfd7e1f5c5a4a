//! Products of activations with a bf16 weight matrix, against the library of the device, and
//! against the rates of arithmetic or of memory.

use crate::Measurement;
use crate::bench::{Bench, Random, Times, soon};
use crate::ceilings::{FMA, MEMORY, MMA};
use crate::check::Verified;
use crate::report::{Figure, Rate};
use crate::sizes::{CHECKED_FEW_ROWS, CHECKED_MANY_ROWS, ProductSize};
use anyhow::Result;
use half::bf16;
use larder_kernels::cpu::{self, PackedMatrix, WeightType};
use larder_kernels::device::{DeviceError, LibraryProduct, Slice};
use larder_kernels::launch::{Arithmetic, Element, MatMul, is_batch_invariant};

const TILE_VALUES: usize = 1 << 20;
const LIBRARY: &str = "product by cuBLASLt, bf16";

/// Code that computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// A kernel of larder, which takes f32 rows.
    Kernel(Arithmetic),
    /// The library, which takes bf16 rows.
    Library,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Kernel(Arithmetic::Plain) => "bf16 weights",
            Way::Kernel(Arithmetic::Tensor) => "bf16 weights, tensor cores",
            Way::Library => "bf16, cuBLASLt",
        }
    }
}

/// A product on the device.
struct Product {
    way: Way,
    size: ProductSize,
    x: Slice,
    weight: Slice,
    out: Slice,
}

impl Product {
    /// Inputs and weights repeat `values`, which are exact in bf16.
    fn new(bench: &Bench, way: Way, size: ProductSize, values: &[f32]) -> Result<Product> {
        let ProductSize { rows, inputs, outputs } = size;
        let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let x = match way {
            Way::Kernel(_) => bench.tiled(4 * rows * inputs, values)?,
            Way::Library => bench.tiled(2 * rows * inputs, &narrow)?,
        };
        let weight = bench.tiled(2 * outputs * inputs, &narrow)?;
        Ok(Product { way, size, x, weight, out: bench.allocate(4 * rows * outputs)? })
    }

    fn launch(&self, bench: &Bench) -> Result<()> {
        let ProductSize { rows, inputs, outputs } = self.size;
        let Product { x, weight, out, .. } = self;
        match self.way {
            Way::Kernel(arithmetic) => {
                let element = Element::Bf16;
                let product = MatMul { arithmetic, element, rows, inputs, outputs, x, weight, bias: None, out };
                product.launch(&*bench.stream)?;
            }
            Way::Library => bench.stream.multiply(&LibraryProduct { rows, outputs, inputs, x, weight, out })?,
        }
        Ok(())
    }
}

/// Compares a small product with the CPU, bit by bit if its order of sums is that of the CPU.
fn verify(bench: &Bench, way: Way, size: ProductSize) -> Result<Verified> {
    let ProductSize { rows, inputs, outputs } = size;
    let values = Random::new(10).numbers(TILE_VALUES);
    let product = Product::new(bench, way, size, &values)?;
    product.launch(bench)?;
    let found: Vec<f32> = bench.download(&product.out)?;
    let fill = |output: usize, row: &mut [f32]| row.copy_from_slice(&values[output * inputs..(output + 1) * inputs]);
    let weight = PackedMatrix::new(outputs, inputs, WeightType::Bf16, fill)?;
    let mut expected = vec![0.0; rows * outputs];
    cpu::matmul(&values[..rows * inputs], &weight, None, &mut expected);
    let name = format!("product of {rows} rows, {}", way.name());
    if way == Way::Kernel(Arithmetic::Plain) {
        return bench.checker.same(&name, &found, &expected);
    }
    bench.checker.close(&name, &found, &expected, 1e-3)
}

/// Measures a product, after the comparison of a small one. `rate` turns times into a figure's
/// rate.
fn figure(
    bench: &Bench,
    way: Way,
    [checked, size]: [ProductSize; 2],
    rate: &dyn Fn(&Times) -> Rate,
) -> Result<(Verified, Figure)> {
    let verified = verify(bench, way, checked)?;
    let values = Random::new(11).numbers(TILE_VALUES);
    let product = Product::new(bench, way, size, &values)?;
    let times = bench.device_time(&|| product.launch(bench))?;
    let ProductSize { rows, inputs, outputs } = size;
    let name = format!("product, {rows} × {inputs} × {outputs}, {}", way.name());
    Ok((verified, Figure::new(name, rate(&times))))
}

/// Notes which library the device has, and whether its rows keep their bits.
fn has_library(run: &mut Measurement) -> Result<bool> {
    let bench = &run.bench;
    let library = match bench.device.product_library() {
        Ok(library) => library,
        Err(DeviceError::Library(reason)) => {
            run.report.note(&format!("cuBLASLt: not measured, {reason}"))?;
            return Ok(false);
        }
        Err(error) => return Err(error.into()),
    };
    let ProductSize { inputs, outputs, .. } = run.sizes.many_rows;
    let algorithm = bench.device.plan_product(outputs, inputs)?;
    let weight = Product::new(bench, Way::Library, run.sizes.few_rows, &Random::new(12).numbers(TILE_VALUES))?.weight;
    let keeps_bits = is_batch_invariant(&*bench.device, &*bench.stream, &weight, [outputs, inputs], soon())?;
    let verdict = if keeps_bits { "rows keep their bits" } else { "rows change their bits, so engines do not use it" };
    run.report.note(&format!("{library}, {outputs} × {inputs}, algorithm {algorithm}: {verdict}"))?;
    Ok(true)
}

pub fn measure(run: &mut Measurement) -> Result<()> {
    let has_library = has_library(run)?;
    let bench = &run.bench;
    let ways = [Way::Kernel(Arithmetic::Tensor), Way::Kernel(Arithmetic::Plain)];

    let size = run.sizes.many_rows;
    let operations = 2.0 * size.rows as f64 * size.inputs as f64 * size.outputs as f64;
    let rate = |times: &Times| Rate::operations(operations, times);
    let sizes = [CHECKED_MANY_ROWS, size];
    let mut library = None;
    if has_library {
        let (verified, figure) = figure(bench, Way::Library, sizes, &rate)?;
        library = Some(figure.rate);
        run.report.figure(verified, &figure.against(MMA, run.ceilings.mma))?;
    }
    for way in ways {
        let (verified, figure) = figure(bench, way, sizes, &rate)?;
        if let Some(library) = library {
            run.report.figure(verified, &figure.clone().against(LIBRARY, library))?;
        }
        run.report.figure(verified, &figure.clone().against(FMA, run.ceilings.fma))?;
        run.report.figure(verified, &figure.against(MMA, run.ceilings.mma))?;
    }

    let size = run.sizes.few_rows;
    let rate = |times: &Times| Rate::bytes(2 * size.inputs * size.outputs, times);
    let sizes = [CHECKED_FEW_ROWS, size];
    for way in ways.into_iter().chain(has_library.then_some(Way::Library)) {
        let (verified, figure) = figure(bench, way, sizes, &rate)?;
        run.report.figure(verified, &figure.against(MEMORY, run.ceilings.memory))?;
    }
    Ok(())
}
