//! Selection of the device that computes a model.

use crate::config::ModelConfig;
use crate::model::WeightFormat;
use crate::weights::LoadError;
use larder_kernels::device::{Device, DeviceInfo, cuda, emulated};
use larder_kernels::launch::Arithmetic;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Limit of the memory of an emulated device, in bytes. It takes only what it uses.
const EMULATED_BYTES: usize = 64 << 30;
/// Largest head that the attention kernels compute, in elements.
const HEAD_DIM_MAX: usize = 128;
/// The attention kernels take heads of whole packs.
const HEAD_DIM_STEP: usize = 8;

/// Device that computes a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    #[default]
    Cpu,
    /// Runs the CUDA kernels on the CPU, for tests. Needs a C++ compiler, and is far slower than
    /// [`Cpu`](Self::Cpu).
    Emulated,
    /// As [`Emulated`](Self::Emulated), with the kernels for tensor cores, whose matrix
    /// instructions run as loops.
    EmulatedMma,
    /// The CUDA device of this number.
    Cuda(usize),
    /// The first CUDA device if it can be used, otherwise the CPU.
    Auto,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Emulated => f.write_str("emulated"),
            DeviceChoice::EmulatedMma => f.write_str("emulated:mma"),
            DeviceChoice::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            DeviceChoice::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        match text {
            "cpu" => Ok(DeviceChoice::Cpu),
            "emulated" => Ok(DeviceChoice::Emulated),
            "emulated:mma" => Ok(DeviceChoice::EmulatedMma),
            "cuda" => Ok(DeviceChoice::Cuda(0)),
            "auto" => Ok(DeviceChoice::Auto),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(DeviceChoice::Cuda)
                .ok_or_else(|| "expected cpu, cuda, cuda:N, emulated, emulated:mma or auto".to_string()),
        }
    }
}

impl DeviceChoice {
    /// Opens the device for a model. Returns `None` for the CPU. If [`Auto`](Self::Auto) selects
    /// the CPU, the log has the reason.
    ///
    /// # Errors
    /// If the device cannot be used, or cannot compute the model.
    pub(crate) fn open(
        self,
        config: &ModelConfig,
        weights: WeightFormat,
    ) -> Result<Option<Arc<dyn Device>>, LoadError> {
        let reason = unsupported(config, weights);
        let opened = match (self, reason) {
            (DeviceChoice::Cpu, _) => return Ok(None),
            (DeviceChoice::Auto, Some(reason)) => {
                tracing::info!(reason, "no device can compute this model");
                return Ok(None);
            }
            (DeviceChoice::Auto, None) => {
                let opened = cuda::open(0);
                return Ok(opened.inspect_err(|reason| tracing::info!(%reason, "the CUDA device cannot be used")).ok());
            }
            (_, Some(reason)) => return Err(LoadError::DeviceModel { device: self, reason }),
            (DeviceChoice::Emulated | DeviceChoice::EmulatedMma, None) => emulated::open(EMULATED_BYTES),
            (DeviceChoice::Cuda(ordinal), None) => cuda::open(ordinal),
        };
        opened.map(Some).map_err(|source| LoadError::Device { device: self, source })
    }

    /// Units of the opened device that compute matrices of bf16.
    pub(crate) fn arithmetic(self, info: &DeviceInfo) -> Arithmetic {
        if self == DeviceChoice::EmulatedMma { Arithmetic::Tensor } else { Arithmetic::of(info) }
    }
}

/// Reason for which the kernels cannot compute a model.
fn unsupported(config: &ModelConfig, weights: WeightFormat) -> Option<&'static str> {
    if weights == WeightFormat::Q8 {
        return Some("weights of 8 bits are for the CPU; use --weights stored");
    }
    if config.head_dim > HEAD_DIM_MAX || !config.head_dim.is_multiple_of(HEAD_DIM_STEP) {
        return Some("its head_dim is no multiple of 8 up to 128");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_read_and_written() {
        let emulated = [DeviceChoice::Emulated, DeviceChoice::EmulatedMma];
        for choice in [DeviceChoice::Cpu, DeviceChoice::Cuda(3), DeviceChoice::Auto].into_iter().chain(emulated) {
            assert_eq!(choice.to_string().parse::<DeviceChoice>(), Ok(choice));
        }
        assert_eq!("cuda".parse::<DeviceChoice>(), Ok(DeviceChoice::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "emulated:", "CPU"] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
