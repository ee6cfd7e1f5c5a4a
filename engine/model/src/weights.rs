//! Weights of a model folder: safetensors files, mapped and checked.
//!
//! What must always hold: a [`Tensor`] has the shape that the configuration demands and a type this engine reads; every
//! other case is a [`LoadError`] that names the tensor or the file.

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a model folder cannot be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// There is no such folder.
    #[error("{} is not a folder", .0.display())]
    NoFolder(PathBuf),
    /// A file cannot be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Neither of the files that can hold weights is there.
    #[error("{}: neither model.safetensors nor model.safetensors.index.json is there", .0.display())]
    NoWeights(PathBuf),
    /// A JSON file is malformed.
    #[error("{}: {reason}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A field of `config.json` is missing, wrong, or asks for what this engine does not compute.
    #[error("config.json: {field}: {reason}")]
    Config {
        /// The field.
        field: String,
        /// What is wrong.
        reason: String,
    },
    /// An architecture this engine does not compute.
    #[error("architecture {found} is not supported; supported are {supported}")]
    Architecture {
        /// What `config.json` names.
        found: String,
        /// What is supported.
        supported: String,
    },
    /// A safetensors file is malformed or truncated.
    #[error("{}: not a whole safetensors file: {reason}", file.display())]
    Safetensors {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that the configuration demands is in no file.
    #[error("tensor {0} is missing")]
    MissingTensor(String),
    /// A tensor has another shape than the configuration demands.
    #[error("tensor {name} has shape {found:?}, the configuration demands {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// What the configuration demands.
        expected: Vec<usize>,
        /// What the file says.
        found: Vec<usize>,
    },
    /// A tensor's elements are of a type that is not read.
    #[error("tensor {name} holds {found}; supported are F32, BF16 and F16")]
    Dtype {
        /// The tensor.
        name: String,
        /// The type found.
        found: String,
    },
    /// The weights do not fit into memory.
    #[error("tensor {name}: {source}")]
    Memory {
        /// The tensor.
        name: String,
        /// How large it is.
        source: larder_kernels::cpu::PackError,
    },
}

/// Reads a JSON file.
pub(crate) fn read_json(file: &Path) -> Result<Value, LoadError> {
    let bytes = std::fs::read(file).map_err(|source| LoadError::Io { file: file.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|e| LoadError::Json { file: file.to_owned(), reason: e.to_string() })
}

/// As [`read_json`], `null` if the file is not there.
pub(crate) fn read_optional_json(file: &Path) -> Result<Value, LoadError> {
    match read_json(file) {
        Err(LoadError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        result => result,
    }
}

/// The mapped safetensors files of a folder.
pub(crate) struct WeightFiles {
    maps: Vec<(PathBuf, Mmap)>,
}

impl WeightFiles {
    /// Maps `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    pub(crate) fn open(dir: &Path) -> Result<WeightFiles, LoadError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let files = match (single.is_file(), index.is_file()) {
            (true, _) => vec![single],
            (false, true) => shards(dir, &index)?,
            (false, false) => return Err(LoadError::NoWeights(dir.to_owned())),
        };
        let maps = files.into_iter().map(map).collect::<Result<_, _>>()?;
        Ok(WeightFiles { maps })
    }

    /// Reads the tables of tensors.
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

/// The shard files an index names: plain file names of the same folder, nothing else.
fn shards(dir: &Path, index: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let content = read_json(index)?;
    let malformed = |reason: String| LoadError::Json { file: index.to_owned(), reason };
    let table = content["weight_map"].as_object().ok_or_else(|| malformed("weight_map is missing".into()))?;
    let names: BTreeSet<&str> = table.values().map(|v| v.as_str().unwrap_or_default()).collect();
    let is_plain = |name: &&str| Path::new(name).file_name().is_some_and(|f| f.to_str() == Some(name));
    if let Some(name) = names.iter().find(|name| !is_plain(name)) {
        return Err(malformed(format!("{name:?} is not the name of a file in this folder")));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

fn map(file: PathBuf) -> Result<(PathBuf, Mmap), LoadError> {
    let opened = File::open(&file).and_then(|f| {
        // SAFETY: the mapping is read-only, and every byte pattern is valid for what it is read as. That nobody changes
        // or cuts the file while it is loaded is demanded of whoever runs an engine on it; the mapping ends with loading.
        unsafe { Mmap::map(&f) }
    });
    match opened {
        Ok(map) => Ok((file, map)),
        Err(source) => Err(LoadError::Io { file, source }),
    }
}

/// All tensors of a folder, by name.
pub(crate) struct Tensors<'a> {
    views: BTreeMap<String, TensorView<'a>>,
}

impl<'a> Tensors<'a> {
    /// The tensor `name`, which must have `shape`.
    pub(crate) fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, LoadError> {
        let view = self.views.get(name).ok_or_else(|| LoadError::MissingTensor(name.to_owned()))?;
        if view.shape() != shape {
            return Err(LoadError::Shape {
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: view.shape().to_vec(),
            });
        }
        let element = match view.dtype() {
            Dtype::F32 => Element::F32,
            Dtype::BF16 => Element::Bf16,
            Dtype::F16 => Element::F16,
            other => return Err(LoadError::Dtype { name: name.to_owned(), found: format!("{other:?}") }),
        };
        Ok(Tensor { name: name.to_owned(), shape: shape.to_vec(), element, bytes: view.data() })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    F32,
    Bf16,
    F16,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }
}

/// A tensor of the right shape and a known type, still as it is in its file.
#[derive(Debug, Clone)]
pub(crate) struct Tensor<'a> {
    name: String,
    shape: Vec<usize>,
    element: Element,
    bytes: &'a [u8],
}

impl Tensor<'_> {
    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Rows of a matrix.
    pub(crate) fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Converts row `row` of a matrix.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let bytes = out.len() * self.element.bytes();
        self.convert(&self.bytes[row * bytes..(row + 1) * bytes], out);
    }

    /// Converts all elements.
    pub(crate) fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.bytes.len() / self.element.bytes()];
        self.convert(self.bytes, &mut out);
        out
    }

    fn convert(&self, bytes: &[u8], out: &mut [f32]) {
        match self.element {
            Element::F32 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f32::from_le_bytes(*b));
            }
            Element::Bf16 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = bf16::from_le_bytes(*b).to_f32());
            }
            Element::F16 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f16::from_le_bytes(*b).to_f32());
            }
        }
    }

    /// SHA-256 over name, type, shape and the bytes as they are in the file.
    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(format!("{} {:?} {:?}\n", self.name, self.element, self.shape));
        hash.update(self.bytes);
        hash.finalize().into()
    }
}
