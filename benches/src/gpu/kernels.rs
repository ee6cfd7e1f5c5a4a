//! Kernels that the program needs, compiled here or on the machine with the GPU.

use anyhow::{Context, Result, anyhow};
use larder_kernels::cuda::{CompiledSource, KernelSource, SOURCES, compile};
use larder_kernels::device::{Device, DeviceError, cuda};
use std::path::Path;
use std::sync::Arc;

/// Files of the crate's kernels that are measured. The others would only take time to compile.
const FILES: [&str; 8] = [
    "pages.cu",
    "pages_bulk.cu",
    "crc32.cu",
    "matmul.cu",
    "matmul_mma.cu",
    "attention_f32.cu",
    "attention_bf16.cu",
    "attention_mma.cu",
];
const RATES: KernelSource =
    KernelSource { file: "rates.cu", kernels: &["rate_fma_f32", "rate_mma_bf16"], content: include_str!("rates.cu") };
/// Architectures of compiled kernels with their compute capability, newest first. A device runs
/// PTX of its own architecture or of an older one.
const ARCHITECTURES: [(&str, (i32, i32)); 2] = [("compute_90", (9, 0)), ("compute_80", (8, 0))];

pub fn sources() -> Vec<KernelSource> {
    SOURCES.iter().copied().filter(|source| FILES.contains(&source.file)).chain([RATES]).collect()
}

/// Compiles all kernels for all architectures, to `folder/ARCHITECTURE/FILE.ptx`.
pub fn write(folder: &Path) -> Result<()> {
    for (architecture, _) in ARCHITECTURES {
        let folder = folder.join(architecture);
        std::fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        for source in sources() {
            let ptx = compile(&source, architecture)?.to_src();
            let path = folder.join(source.file).with_extension("ptx");
            std::fs::write(&path, ptx).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(())
}

/// Opens a GPU. Its own NVRTC compiles the kernels. Without one, they come from `folder`, which
/// [`write`] has filled.
pub fn open_cuda(number: usize, folder: Option<&Path>) -> Result<Arc<dyn Device>> {
    match (cuda::open_with(number, &sources()), folder) {
        (Err(DeviceError::NoCudaCompiler), Some(folder)) => {
            let compiled = read(folder, number)?;
            cuda::open_compiled(number, &compiled).context("load the kernels of --kernels")
        }
        (opened, _) => opened.context("open the CUDA device"),
    }
}

fn read(folder: &Path, number: usize) -> Result<Vec<CompiledSource>> {
    let info = cuda::devices().into_iter().find(|device| device.ordinal == number);
    let capability = info.context("the device is gone")?.compute_capability;
    let architecture = newest(capability).ok_or_else(|| anyhow!("compute capability {capability:?} is below 8.0"))?;
    let read = |source: KernelSource| {
        let path = folder.join(architecture).join(source.file).with_extension("ptx");
        let ptx = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        Ok::<_, anyhow::Error>(CompiledSource { kernels: source.kernels, ptx })
    };
    sources().into_iter().map(read).collect()
}

/// The newest architecture that a device with this compute capability runs.
fn newest(capability: (i32, i32)) -> Option<&'static str> {
    ARCHITECTURES.into_iter().find(|(_, needed)| *needed <= capability).map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measured_file_is_a_source() {
        assert_eq!(sources().len(), FILES.len() + 1);
        assert!(RATES.kernels.iter().all(|kernel| RATES.content.contains(kernel)));
    }

    #[test]
    fn devices_run_kernels_of_their_architecture_or_an_older_one() {
        assert_eq!(newest((9, 0)), Some("compute_90"));
        assert_eq!(newest((10, 3)), Some("compute_90"));
        assert_eq!(newest((8, 9)), Some("compute_80"));
        assert_eq!(newest((7, 5)), None);
    }
}
