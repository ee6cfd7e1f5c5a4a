//! Sources of the device kernels, and their compilation for CUDA devices.
//!
//! Invariants:
//! - Every function can be called on any machine. The bindings panic where a library is missing, so
//!   each entry point first looks for it. A missing library is an error that names it.
//! - A source needs no header of the CUDA toolkit. It includes only files of [`HEADERS`].

use crate::device::DeviceError;
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

/// One file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSource {
    /// File name, as messages of compilers show it.
    pub file: &'static str,
    /// Names of the `extern "C" __global__` functions.
    pub kernels: &'static [&'static str],
    /// Content of the file. [`text`](Self::text) is what compilers take.
    pub content: &'static str,
}

/// One file of kernels, compiled to PTX.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompiledSource {
    /// Names of the kernels, as in [`KernelSource`].
    pub kernels: &'static [&'static str],
    /// PTX for the architecture of the device or an older one.
    pub ptx: String,
}

/// All kernels of this crate.
pub const SOURCES: &[KernelSource] = &[
    KernelSource {
        file: "pages.cu",
        kernels: &["larder_gather_pages", "larder_scatter_pages"],
        content: include_str!("../cuda/pages.cu"),
    },
    KernelSource {
        file: "pages_bulk.cu",
        kernels: &["larder_gather_pages_bulk", "larder_scatter_pages_bulk"],
        content: include_str!("../cuda/pages_bulk.cu"),
    },
    KernelSource { file: "crc32.cu", kernels: &["larder_crc32_chunks"], content: include_str!("../cuda/crc32.cu") },
    KernelSource {
        file: "norm.cu",
        kernels: &[
            "rms_norm_f32",
            "rms_norm_f16",
            "rms_norm_bf16",
            "add_rms_norm_f32",
            "add_rms_norm_f16",
            "add_rms_norm_bf16",
        ],
        content: include_str!("../cuda/norm.cu"),
    },
    KernelSource {
        file: "activation.cu",
        kernels: &["silu_mul_f32", "silu_mul_f16", "silu_mul_bf16", "add_f32", "add_f16", "add_bf16", "narrow_bf16"],
        content: include_str!("../cuda/activation.cu"),
    },
    KernelSource {
        file: "embedding.cu",
        kernels: &[
            "embedding_f32_f32",
            "embedding_f32_f16",
            "embedding_f32_bf16",
            "embedding_f16_f16",
            "embedding_bf16_bf16",
        ],
        content: include_str!("../cuda/embedding.cu"),
    },
    KernelSource {
        file: "matmul.cu",
        kernels: &[
            "matmul_few_f32",
            "matmul_few_f16",
            "matmul_few_bf16",
            "matmul_many_f32",
            "matmul_many_f16",
            "matmul_many_bf16",
        ],
        content: include_str!("../cuda/matmul.cu"),
    },
    KernelSource {
        file: "matmul_mma.cu",
        kernels: &["matmul_mma_few", "matmul_mma_many"],
        content: include_str!("../cuda/matmul_mma.cu"),
    },
    KernelSource { file: "kv_rows.cu", kernels: &["kv_rows"], content: include_str!("../cuda/kv_rows.cu") },
    KernelSource {
        file: "rope.cu",
        kernels: &["rope_f32_f32", "rope_f32_f16", "rope_f32_bf16", "rope_f16_f16", "rope_bf16_bf16"],
        content: include_str!("../cuda/rope.cu"),
    },
    KernelSource {
        file: "attention_f32.cu",
        kernels: &[
            "attention_prefill_f32_f32_d64",
            "attention_prefill_f32_f32_d128",
            "attention_prefill_f32_f16_d64",
            "attention_prefill_f32_f16_d128",
            "attention_prefill_f32_bf16_d64",
            "attention_prefill_f32_bf16_d128",
            "attention_split_f32_f32_d64",
            "attention_split_f32_f32_d128",
            "attention_split_f32_f16_d64",
            "attention_split_f32_f16_d128",
            "attention_split_f32_bf16_d64",
            "attention_split_f32_bf16_d128",
            "attention_combine_f32",
        ],
        content: include_str!("../cuda/attention_f32.cu"),
    },
    KernelSource {
        file: "attention_f16.cu",
        kernels: &[
            "attention_prefill_f16_f16_d64",
            "attention_prefill_f16_f16_d128",
            "attention_split_f16_f16_d64",
            "attention_split_f16_f16_d128",
            "attention_combine_f16",
        ],
        content: include_str!("../cuda/attention_f16.cu"),
    },
    KernelSource {
        file: "attention_bf16.cu",
        kernels: &[
            "attention_prefill_bf16_bf16_d64",
            "attention_prefill_bf16_bf16_d128",
            "attention_split_bf16_bf16_d64",
            "attention_split_bf16_bf16_d128",
            "attention_combine_bf16",
        ],
        content: include_str!("../cuda/attention_bf16.cu"),
    },
    KernelSource {
        file: "attention_mma.cu",
        kernels: &[
            "attention_mma_prefill_f32_d64",
            "attention_mma_prefill_f32_d128",
            "attention_mma_prefill_bf16_d64",
            "attention_mma_prefill_bf16_d128",
            "attention_mma_split_f32_d64",
            "attention_mma_split_f32_d128",
            "attention_mma_split_bf16_d64",
            "attention_mma_split_bf16_d128",
            "attention_mma_combine_f32",
            "attention_mma_combine_bf16",
        ],
        content: include_str!("../cuda/attention_mma.cu"),
    },
    KernelSource {
        file: "sampling.cu",
        kernels: &["argmax_f32", "argmax_f16", "argmax_bf16", "sample_f32", "sample_f16", "sample_bf16"],
        content: include_str!("../cuda/sampling.cu"),
    },
    KernelSource {
        file: "quantise.cu",
        kernels: &[
            "quantise_e4m3_f32",
            "quantise_e4m3_f16",
            "quantise_e4m3_bf16",
            "quantise_int8_f32",
            "quantise_int8_f16",
            "quantise_int8_bf16",
            "dequantise_e4m3_f32",
            "dequantise_e4m3_f16",
            "dequantise_e4m3_bf16",
            "dequantise_int8_f32",
            "dequantise_int8_f16",
            "dequantise_int8_bf16",
            "planes_split",
            "planes_merge",
        ],
        content: include_str!("../cuda/quantise.cu"),
    },
];

/// Files that sources include by name.
pub const HEADERS: &[(&str, &str)] = &[
    ("crc32.cuh", include_str!("../cuda/crc32.cuh")),
    ("pages.cuh", include_str!("../cuda/pages.cuh")),
    ("element.cuh", include_str!("../cuda/element.cuh")),
    ("attention.cuh", include_str!("../cuda/attention.cuh")),
    ("mma.cuh", include_str!("../cuda/mma.cuh")),
    ("attention_mma.cuh", include_str!("../cuda/attention_mma.cuh")),
];

/// Architecture whose PTX every supported device runs: compute capability 8.0 and above.
pub const BASE_ARCHITECTURE: &str = "compute_80";

impl KernelSource {
    /// The source with its included headers in place, once each. Line numbers of messages stay
    /// those of the file.
    pub fn text(&self) -> String {
        let mut text = format!("#line 1 \"{}\"\n", self.file);
        let mut included = Vec::new();
        expand(self.file, self.content, &mut included, &mut text);
        text
    }
}

fn expand(file: &str, content: &str, included: &mut Vec<&'static str>, out: &mut String) {
    for (index, line) in content.lines().enumerate() {
        let header = HEADERS.iter().find(|(name, _)| included_name(line) == Some(*name));
        if let Some((name, content)) = header {
            if !included.contains(name) {
                included.push(*name);
                *out += &format!("#line 1 \"{name}\"\n");
                expand(name, content, included, out);
            }
            *out += &format!("#line {} \"{file}\"\n", index + 2);
        } else if line.trim() != "#pragma once" {
            *out += line;
            out.push('\n');
        } else {
            out.push('\n');
        }
    }
}

fn included_name(line: &str) -> Option<&str> {
    line.trim().strip_prefix("#include \"")?.strip_suffix('"')
}

/// Options of NVRTC for `architecture`, such as `compute_80` (PTX) or `sm_90a` (machine code).
///
/// Products and sums are fused only where a source says so, as in the emulator. Results then differ
/// only by the device's functions such as `expf`.
pub fn compile_options(architecture: &str) -> Vec<String> {
    vec![format!("--gpu-architecture={architecture}"), "--std=c++17".to_string(), "--fmad=false".to_string()]
}

/// Compiles one source to PTX. Needs the run-time compiler, but no device.
///
/// # Errors
/// If the compiler is not installed, or if it rejects the source.
pub fn compile(source: &KernelSource, architecture: &str) -> Result<Ptx, DeviceError> {
    // SAFETY: only loads the library. Its initialisers run as in any program that links to it.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(DeviceError::NoCudaCompiler);
    }
    let options = CompileOptions {
        options: compile_options(architecture),
        name: Some(source.file.to_string()),
        ..CompileOptions::default()
    };
    compile_ptx_with_opts(source.text(), options).map_err(|error| {
        let message = match &error {
            CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
            other => other.to_string(),
        };
        DeviceError::Compile { compiler: "nvrtc", file: source.file.to_string(), message }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile_if_a_compiler_is_installed() {
        for source in SOURCES {
            match compile(source, BASE_ARCHITECTURE) {
                Ok(_) => println!("{} compiled", source.file),
                Err(DeviceError::NoCudaCompiler) => println!("no compiler here"),
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn headers_are_included_once_and_lines_keep_their_numbers() {
        const CONTENT: &str = "a\n#include \"crc32.cuh\"\nb\n#include \"crc32.cuh\"\nc\n";
        let text = KernelSource { file: "x.cu", kernels: &[], content: CONTENT }.text();
        assert!(text.starts_with("#line 1 \"x.cu\"\na\n#line 1 \"crc32.cuh\"\n"));
        assert!(text.ends_with("#line 3 \"x.cu\"\nb\n#line 5 \"x.cu\"\nc\n"), "{}", &text[text.len() - 60..]);
        assert_eq!(text.matches("#line 1 \"crc32.cuh\"").count(), 1);
    }
}
