//! Weights in the memory of a device.

use crate::model::{LayerWeights, Linear, Weights};
use half::{bf16, f16};
use larder_kernels::cpu::{PackedMatrix, WeightType};
use larder_kernels::device::{Device, DeviceError, Place, Slice, Stream, upload};
use larder_kernels::launch::{Arithmetic, Element, LibraryMatMul, MatMul, is_batch_invariant};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Bytes that are converted at a time on their way to the device.
const STAGING_BYTES: usize = 16 << 20;
/// Maximum time of one copy to the device.
const COPY_LIMIT: Duration = Duration::from_secs(60);

pub(super) struct DeviceWeights {
    /// `None` if the model ties it to the output matrix.
    embedding: Option<DeviceMatrix>,
    pub(super) layers: Vec<DeviceLayer>,
    pub(super) norm: Slice,
    pub(super) output: DeviceMatrix,
    /// Name, version and algorithms of the library that computes products, if one does.
    library: Option<String>,
}

pub(super) struct DeviceLayer {
    pub(super) attention_norm: Slice,
    pub(super) qkv: DeviceMatrix,
    /// Norm weights of the query heads and of the key heads.
    pub(super) qk_norm: Option<(Slice, Slice)>,
    pub(super) attention_output: DeviceMatrix,
    pub(super) mlp_norm: Slice,
    pub(super) gate_up: DeviceMatrix,
    pub(super) down: DeviceMatrix,
}

/// A matrix `[outputs][inputs]` with an optional bias.
pub(super) struct DeviceMatrix {
    arithmetic: Arithmetic,
    uses_library: bool,
    pub(super) element: Element,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) weight: Slice,
    bias: Option<Slice>,
}

impl DeviceMatrix {
    /// Enqueues `out[r] = weight · x[r] + bias` for `rows` rows. `spare` is working memory of
    /// `rows` times [`spare_bytes`](Self::spare_bytes).
    pub(super) fn multiply(
        &self,
        stream: &dyn Stream,
        rows: usize,
        x: &Slice,
        spare: &Slice,
        out: &Slice,
    ) -> Result<(), DeviceError> {
        let &DeviceMatrix { arithmetic, uses_library, element, outputs, inputs, ref weight, ref bias } = self;
        if uses_library {
            return LibraryMatMul { rows, inputs, outputs, x, narrow: spare, weight, out }.launch(stream);
        }
        MatMul { arithmetic, element, rows, inputs, outputs, x, weight, bias: bias.as_ref(), out }.launch(stream)
    }
}

impl DeviceMatrix {
    /// Returns `true` if a library could compute the products. It adds no bias.
    fn fits_library(&self) -> bool {
        self.arithmetic == Arithmetic::Tensor && self.bias.is_none()
    }

    /// Working memory of a row for products by the library, in bytes.
    fn spare_bytes(&self) -> usize {
        self.inputs * Element::Bf16.bytes()
    }
}

impl DeviceWeights {
    /// Copies all weights to the device. `arithmetic` computes the matrices that it serves.
    pub(super) fn new(
        device: &dyn Device,
        stream: &dyn Stream,
        weights: &Weights,
        arithmetic: Arithmetic,
    ) -> Result<Self, DeviceError> {
        let uploader = Uploader { device, stream, arithmetic };
        let embedding = weights.embedding.as_ref().map(|matrix| uploader.matrix(matrix, None)).transpose()?;
        let layers = weights.layers.iter().map(|layer| uploader.layer(layer)).collect::<Result<_, _>>()?;
        let norm = uploader.vector(&weights.norm)?;
        let output = uploader.matrix(&weights.output, None)?;
        let mut weights = DeviceWeights { embedding, layers, norm, output, library: None };
        weights.select_library(device, stream);
        Ok(weights)
    }

    /// Lets the library of the device compute all products that it can, if it is there and keeps
    /// the bits of rows. The log tells the decision.
    fn select_library(&mut self, device: &dyn Device, stream: &dyn Stream) {
        if !self.matrices().any(|matrix| matrix.fits_library()) {
            return;
        }
        match self.plan_library(device, stream) {
            Ok(library) => {
                tracing::info!(library, "products are computed by the library of the device");
                self.library = Some(library);
                self.matrices_mut().filter(|matrix| matrix.fits_library()).for_each(|it| it.uses_library = true);
            }
            Err(reason) => tracing::info!(%reason, "products are computed by the kernels of larder"),
        }
    }

    /// Selects and checks an algorithm for each shape of the matrices. Returns the name of the
    /// library with these algorithms.
    fn plan_library(&self, device: &dyn Device, stream: &dyn Stream) -> Result<String, DeviceError> {
        let mut name = device.product_library()?;
        // Passes lend the buffers of the MLP as working memory.
        let row_bytes = self.layers.iter().map(|layer| layer.down.inputs * size_of::<f32>()).min().unwrap_or(0);
        let mut shapes = BTreeMap::new();
        for matrix in self.matrices().filter(|matrix| matrix.fits_library()) {
            if matrix.spare_bytes() > row_bytes {
                return Err(DeviceError::Shape("the MLP is too narrow for the working memory of products"));
            }
            shapes.entry([matrix.outputs, matrix.inputs]).or_insert(&matrix.weight);
        }
        for ([outputs, inputs], weight) in shapes {
            let algorithm = device.plan_product(outputs, inputs)?;
            let deadline = Instant::now() + COPY_LIMIT;
            if !is_batch_invariant(device, stream, weight, [outputs, inputs], deadline)? {
                return Err(DeviceError::Library(format!("algorithm {algorithm} of {name} changes the bits of rows")));
            }
            name += &format!(" {outputs}x{inputs}:{algorithm}");
        }
        Ok(name)
    }

    fn matrices(&self) -> impl Iterator<Item = &DeviceMatrix> {
        let of_layers =
            self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.attention_output, &layer.gate_up, &layer.down]);
        of_layers.chain([&self.output])
    }

    fn matrices_mut(&mut self) -> impl Iterator<Item = &mut DeviceMatrix> {
        let of_layers = self
            .layers
            .iter_mut()
            .flat_map(|layer| [&mut layer.qkv, &mut layer.attention_output, &mut layer.gate_up, &mut layer.down]);
        of_layers.chain([&mut self.output])
    }

    /// Library that computes products, with its algorithms.
    pub(super) fn library(&self) -> Option<&str> {
        self.library.as_deref()
    }

    /// Returns `true` if matrix instructions compute some matrix. The matrices of a model may have
    /// different types, and rows of different lengths.
    pub(super) fn uses_tensor(&self) -> bool {
        self.matrices().any(|matrix| matrix.arithmetic == Arithmetic::Tensor)
    }

    /// Units that compute the layers. The attention follows their matrices, so that a model of f32
    /// stays one.
    pub(super) fn arithmetic(&self) -> Arithmetic {
        self.layers.first().map_or(Arithmetic::Plain, |layer| layer.qkv.arithmetic)
    }

    pub(super) fn embedding(&self) -> &DeviceMatrix {
        self.embedding.as_ref().unwrap_or(&self.output)
    }
}

struct Uploader<'a> {
    device: &'a dyn Device,
    stream: &'a dyn Stream,
    arithmetic: Arithmetic,
}

impl Uploader<'_> {
    fn layer(&self, layer: &LayerWeights) -> Result<DeviceLayer, DeviceError> {
        let qk_norm = match &layer.qk_norm {
            Some((query, key)) => Some((self.vector(query)?, self.vector(key)?)),
            None => None,
        };
        Ok(DeviceLayer {
            attention_norm: self.vector(&layer.attention_norm)?,
            qkv: self.linear(&layer.qkv)?,
            qk_norm,
            attention_output: self.linear(&layer.attention_output)?,
            mlp_norm: self.vector(&layer.mlp_norm)?,
            gate_up: self.linear(&layer.gate_up)?,
            down: self.linear(&layer.down)?,
        })
    }

    fn linear(&self, linear: &Linear) -> Result<DeviceMatrix, DeviceError> {
        self.matrix(&linear.weight, linear.bias.as_deref())
    }

    fn vector(&self, values: &[f32]) -> Result<Slice, DeviceError> {
        Ok(upload(self.device, self.stream, values, Instant::now() + COPY_LIMIT)?.all())
    }

    fn matrix(&self, matrix: &PackedMatrix, bias: Option<&[f32]>) -> Result<DeviceMatrix, DeviceError> {
        let element = match matrix.weight_type() {
            WeightType::F32 => Element::F32,
            WeightType::F16 => Element::F16,
            WeightType::Bf16 => Element::Bf16,
            WeightType::Q8 | WeightType::Q8Quads => {
                return Err(DeviceError::Shape("weights of 8 bits have no kernels"));
            }
            WeightType::Bf16Pairs => return Err(DeviceError::Shape("weights in pairs are for a processor")),
        };
        let (outputs, inputs) = (matrix.outputs(), matrix.inputs());
        let row_bytes = inputs * element.bytes();
        let total = outputs.checked_mul(row_bytes).ok_or(DeviceError::OutOfMemory { wanted: usize::MAX })?;
        let memory = self.device.allocate(Place::Device, total)?;
        let piece_rows = (STAGING_BYTES / row_bytes.max(1)).clamp(1, outputs.max(1));
        let staging = self.device.allocate(Place::Pinned, piece_rows * row_bytes)?;
        let mut piece = vec![0; piece_rows * row_bytes];
        for first in (0..outputs).step_by(piece_rows) {
            let count = piece_rows.min(outputs - first);
            let bytes = &mut piece[..count * row_bytes];
            bytes.par_chunks_exact_mut(row_bytes).enumerate().for_each_init(
                || vec![0.0; inputs],
                |row, (index, out)| {
                    matrix.copy_row(first + index, row);
                    write_row(element, row, out);
                },
            );
            let source = staging.slice(0..bytes.len())?;
            source.write(bytes)?;
            let start = first * row_bytes;
            self.stream.copy(&memory.slice(start..start + bytes.len())?, &source)?;
            self.stream.wait(Instant::now() + COPY_LIMIT)?;
        }
        let bias = bias.map(|bias| self.vector(bias)).transpose()?;
        let arithmetic = MatMul::arithmetic_for(self.arithmetic, element, inputs);
        Ok(DeviceMatrix { arithmetic, uses_library: false, element, outputs, inputs, weight: memory.all(), bias })
    }
}

/// Writes values that `element` holds without loss.
fn write_row(element: Element, row: &[f32], out: &mut [u8]) {
    match element {
        Element::F32 => {
            out.as_chunks_mut().0.iter_mut().zip(row).for_each(|(out, x)| *out = x.to_ne_bytes());
        }
        Element::F16 => {
            out.as_chunks_mut().0.iter_mut().zip(row).for_each(|(out, x)| *out = f16::from_f32(*x).to_ne_bytes());
        }
        Element::Bf16 => {
            out.as_chunks_mut().0.iter_mut().zip(row).for_each(|(out, x)| *out = bf16::from_f32(*x).to_ne_bytes());
        }
    }
}
