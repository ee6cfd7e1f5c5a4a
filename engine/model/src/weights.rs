//! Weights of a model folder: safetensors files, memory-mapped and checked.
//!
//! Invariant: a [`Tensor`] has the shape that the configuration requires, and an element type this
//! engine reads. Every other case is a [`LoadError`] that names the tensor or the file.

use crate::device::DeviceChoice;
use half::{bf16, f16};
use larder_kernels::cpu::WeightType;
use larder_kernels::device::DeviceError;
use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Reasons for which a model folder cannot be loaded. Every variant names the file, field or tensor
/// at fault.
#[derive(Debug, Error)]
pub enum LoadError {
    #[error("{} is not a folder [LRD0401]", .0.display())]
    NoFolder(PathBuf),
    #[error("{}: {source} [LRD0402]", file.display())]
    Io { file: PathBuf, source: io::Error },
    #[error("{}: the folder has neither model.safetensors nor model.safetensors.index.json [LRD0401]", .0.display())]
    NoWeights(PathBuf),
    #[error("{}: {reason} [LRD0402]", file.display())]
    Json { file: PathBuf, reason: String },
    /// A field of `config.json` is missing, invalid, or requests a feature this engine lacks.
    #[error("config.json: {field}: {reason} [LRD0402]")]
    Config { field: String, reason: String },
    #[error("architecture {found} is not supported; supported are {supported} [LRD0403]")]
    Architecture { found: String, supported: String },
    #[error("{}: not a complete safetensors file: {reason} [LRD0404]", file.display())]
    Safetensors { file: PathBuf, reason: String },
    /// The configuration requires a tensor that no file has.
    #[error("tensor {0} is missing [LRD0404]")]
    MissingTensor(String),
    #[error("tensor {name} has shape {found:?}, the configuration requires {expected:?} [LRD0404]")]
    Shape { name: String, expected: Vec<usize>, found: Vec<usize> },
    /// The engine does not read the element type of a tensor.
    #[error("tensor {name} holds {found}; supported are F32, BF16 and F16 [LRD0404]")]
    Dtype { name: String, found: String },
    #[error("cannot use the device {device}: {source} [LRD0411]")]
    Device { device: DeviceChoice, source: DeviceError },
    /// The kernels of devices lack something that the model needs.
    #[error("the device {device} cannot compute this model: {reason} [LRD0411]")]
    DeviceModel { device: DeviceChoice, reason: &'static str },
    /// The pages leave less memory of the device free than the largest pass takes.
    #[error(
        "the device {device} has {free} bytes beside weights and pages, but a step of {rows} tokens with the logits of \
         {logit_rows} takes up to {needed}; lower --chunk-tokens, --max-batch or --l1 [LRD0411]"
    )]
    DevicePass { device: DeviceChoice, free: usize, needed: usize, rows: usize, logit_rows: usize },
    #[error("tensor {name}: {source}")]
    Memory { name: String, source: larder_kernels::cpu::PackError },
}

pub(crate) fn read_json(file: &Path) -> Result<Value, LoadError> {
    let bytes = std::fs::read(file).map_err(|source| LoadError::Io { file: file.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|e| LoadError::Json { file: file.to_owned(), reason: e.to_string() })
}

/// Reads a JSON file. Returns `null` if the file does not exist.
pub(crate) fn read_optional_json(file: &Path) -> Result<Value, LoadError> {
    match read_json(file) {
        Err(LoadError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        result => result,
    }
}

/// Memory-mapped safetensors files of a folder. The files must not change while they are mapped.
pub(crate) struct WeightFiles {
    maps: Vec<(PathBuf, Mmap)>,
}

impl WeightFiles {
    /// Maps `model.safetensors`, or the shards listed in `model.safetensors.index.json`.
    pub(crate) fn open(dir: &Path) -> Result<WeightFiles, LoadError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let files = match (single.is_file(), index.is_file()) {
            (true, _) => vec![single],
            (false, true) => shards(dir, &index)?,
            (false, false) => return Err(LoadError::NoWeights(dir.to_owned())),
        };
        let maps = files.into_iter().map(map_file).collect::<Result<_, _>>()?;
        Ok(WeightFiles { maps })
    }

    /// Parses the headers of the files. A name in two files resolves to the later file.
    pub(crate) fn tensors(&self) -> Result<Tensors<'_>, LoadError> {
        let mut views = BTreeMap::new();
        for (file, map) in &self.maps {
            let parsed = SafeTensors::deserialize(map)
                .map_err(|e| LoadError::Safetensors { file: file.clone(), reason: e.to_string() })?;
            views.extend(parsed.tensors());
        }
        Ok(Tensors { views })
    }
}

/// Returns the shards that an index lists. Accepts only plain file names, so that a hostile index
/// cannot reach outside the folder.
fn shards(dir: &Path, index: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let content = read_json(index)?;
    let malformed = |reason: String| LoadError::Json { file: index.to_owned(), reason };
    let table = content["weight_map"].as_object().ok_or_else(|| malformed("weight_map is missing".into()))?;
    let names: BTreeSet<&str> = table.values().map(|v| v.as_str().unwrap_or_default()).collect();
    let is_plain = |name: &&str| Path::new(name).file_name().is_some_and(|f| f.to_str() == Some(name));
    if let Some(name) = names.iter().find(|name| !is_plain(name)) {
        return Err(malformed(format!("weight_map lists {name:?}, which is not the name of a file in this folder")));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

fn map_file(file: PathBuf) -> Result<(PathBuf, Mmap), LoadError> {
    let opened = File::open(&file).and_then(|f| {
        // SAFETY: the mapping is read-only, and every byte pattern is valid for the types read from
        // it. The operator must not change or truncate the files while a model loads. The mapping
        // ends with loading.
        unsafe { Mmap::map(&f) }
    });
    match opened {
        Ok(map) => Ok((file, map)),
        Err(source) => Err(LoadError::Io { file, source }),
    }
}

pub(crate) struct Tensors<'a> {
    views: BTreeMap<String, TensorView<'a>>,
}

impl<'a> Tensors<'a> {
    /// Bytes of all tensors in the files.
    pub(crate) fn bytes(&self) -> u64 {
        self.views.values().map(|view| view.data().len() as u64).sum()
    }

    /// Returns the tensor `name`, or an error if it has another shape than `shape`.
    pub(crate) fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, LoadError> {
        let view = self.views.get(name).ok_or_else(|| LoadError::MissingTensor(name.to_owned()))?;
        if view.shape() != shape {
            return Err(LoadError::Shape {
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: view.shape().to_vec(),
            });
        }
        let element_type = match view.dtype() {
            Dtype::F32 => ElementType::F32,
            Dtype::BF16 => ElementType::Bf16,
            Dtype::F16 => ElementType::F16,
            other => return Err(LoadError::Dtype { name: name.to_owned(), found: format!("{other:?}") }),
        };
        Ok(Tensor { name: name.to_owned(), shape: shape.to_vec(), element_type, bytes: view.data() })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ElementType {
    F32,
    Bf16,
    F16,
}

impl ElementType {
    fn bytes(self) -> usize {
        match self {
            ElementType::F32 => 4,
            ElementType::Bf16 | ElementType::F16 => 2,
        }
    }
}

/// Tensor with a checked shape and a supported element type. Its bytes stay in the mapped file.
#[derive(Debug, Clone)]
pub(crate) struct Tensor<'a> {
    name: String,
    shape: Vec<usize>,
    element_type: ElementType,
    bytes: &'a [u8],
}

impl Tensor<'_> {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(crate) fn is_matrix(&self) -> bool {
        self.shape.len() == 2
    }

    pub(crate) fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Type that holds the elements without loss.
    pub(crate) fn weight_type(&self) -> WeightType {
        match self.element_type {
            ElementType::F32 => WeightType::F32,
            ElementType::Bf16 => WeightType::Bf16,
            ElementType::F16 => WeightType::F16,
        }
    }

    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let bytes = out.len() * self.element_type.bytes();
        self.convert(&self.bytes[row * bytes..(row + 1) * bytes], out);
    }

    pub(crate) fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.bytes.len() / self.element_type.bytes()];
        self.convert(self.bytes, &mut out);
        out
    }

    fn convert(&self, bytes: &[u8], out: &mut [f32]) {
        match self.element_type {
            ElementType::F32 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f32::from_le_bytes(*b));
            }
            ElementType::Bf16 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = bf16::from_le_bytes(*b).to_f32());
            }
            ElementType::F16 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f16::from_le_bytes(*b).to_f32());
            }
        }
    }

    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(format!("{} {:?} {:?}\n", self.name, self.element_type, self.shape));
        hash.update(self.bytes);
        hash.finalize().into()
    }
}
