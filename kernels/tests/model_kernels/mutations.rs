//! Defects in the sources, each of which a check must find. A check that passes on a defect is
//! worth nothing.

use crate::support::{Check, Emulated, Random, same, source, text};
use crate::{attention, products, quantise, rows, sampling};
use half::{bf16, f16};
use larder_kernels::cpu::{PageShape, PoolLayout, gather_page};
use larder_kernels::cuda::KernelSource;
use larder_kernels::device::Slice;
use larder_kernels::pages::{CrcChunks, PageLocation, PageTransfer};

/// One replaced piece of a source, and the check that must then fail for one of its seeds.
struct Defect {
    file: &'static str,
    original: &'static str,
    replacement: &'static str,
    check: fn(&Emulated, u64) -> Check,
}

const SEEDS: std::ops::Range<u64> = 0..6;

/// Texts of errors that say nothing about a defect: of the compiler, and of a missing kernel.
const UNRELATED: [&str; 3] = ["rejected", "no kernel has the name", "the compilation of"];

const DEFECTS: &[Defect] = &[
    // The tail of a row takes elements of the next row.
    Defect {
        file: "norm.cu",
        original: "load_pack(x + at, width - at, wide, values);\n        if (ADD)",
        replacement: "load_pack(x + at, N, wide, values);\n        if (ADD)",
        check: rows::norm::<f32>,
    },
    // No barrier before the sums of other warps are read.
    Defect {
        file: "norm.cu",
        original: "__syncthreads();\n    return warp_sum(",
        replacement: "return warp_sum(",
        check: rows::norm::<f32>,
    },
    Defect {
        file: "activation.cu",
        original: "count - at < N ? (u32)(count - at) : N;\n    const bool wide = is_aligned(x) && is_aligned(y);",
        replacement: "N;\n    const bool wide = is_aligned(x) && is_aligned(y);",
        check: rows::add::<bf16>,
    },
    Defect {
        file: "embedding.cu",
        original: "load_pack(from + at, token < vocab ?",
        replacement: "load_pack(from + at, token <= vocab ?",
        check: rows::embedding::<f16, f16>,
    },
    // Every piece of the inputs lacks its last one.
    Defect {
        file: "matmul.cu",
        original: "const u32 depth = inputs - start < DEPTH ? inputs - start : DEPTH;",
        replacement: "const u32 depth = DEPTH - 1u;",
        check: products::product::<f32>,
    },
    // No barrier before the next inputs replace those in use.
    Defect {
        file: "matmul.cu",
        original: "add_input(shared, input, sums);\n            }\n            __syncthreads();",
        replacement: "add_input(shared, input, sums);\n            }",
        check: products::product::<f32>,
    },
    Defect {
        file: "kv_rows.cu",
        original: "(u64)token * token_packs",
        replacement: "(u64)token * head_packs",
        check: products::kv_rows::<bf16>,
    },
    Defect {
        file: "rope.cu",
        original: "is_value = index >= heads + kv_heads;",
        replacement: "is_value = index > heads + kv_heads;",
        check: rows::rotate::<f32, f32>,
    },
    // Each query sees one key too many.
    Defect {
        file: "attention_bf16.cu",
        original: "is_visible = lane < limits[q];",
        replacement: "is_visible = lane <= limits[q];",
        check: attention::long_batch::<bf16>,
    },
    // No barrier between the copy of a block and its use.
    Defect {
        file: "attention_bf16.cu",
        original: "load_block(shared, tile, shape, kv_head, cache, start, end);\n            __syncthreads();",
        replacement: "load_block(shared, tile, shape, kv_head, cache, start, end);",
        check: attention::long_batch::<bf16>,
    },
    // The weights of earlier spans keep their old scale.
    Defect {
        file: "attention_bf16.cu",
        original: "weight = fmaf(weight, own, span.weight * other);",
        replacement: "weight = weight + span.weight * other;",
        check: attention::long_batch::<bf16>,
    },
    // The copy of a block may still be on its way.
    Defect {
        file: "attention_mma.cu",
        original: "mma::wait_copies<1>();",
        replacement: "mma::wait_copies<2>();",
        check: attention::long_tensor_batch,
    },
    // Other threads have not waited for their copies.
    Defect {
        file: "attention_mma.cu",
        original: "mma::wait_copies<1>();\n            __syncthreads();",
        replacement: "mma::wait_copies<1>();",
        check: attention::long_tensor_batch,
    },
    Defect {
        file: "attention_mma.cu",
        original: "key < limit ? score",
        replacement: "key <= limit ? score",
        check: attention::long_tensor_batch,
    },
    // The values of the second row keep the scale of an earlier largest score.
    Defect {
        file: "attention_mma.cu",
        original: "sums.values[c][2 * row + 1] *= correction;",
        replacement: "",
        check: attention::long_tensor_batch,
    },
    // Elements behind the head count.
    Defect {
        file: "attention_mma.cu",
        original: "key_page != ~0u && at < shape.head_dim;",
        replacement: "key_page != ~0u;",
        check: attention::long_tensor_batch,
    },
    Defect {
        file: "matmul_mma.cu",
        original: "mma::wait_copies<STAGES - 2>();",
        replacement: "mma::wait_copies<STAGES - 1>();",
        check: products::tensor_product,
    },
    // Other threads have not waited for their copies.
    Defect {
        file: "matmul_mma.cu",
        original: "// All warps have used the stage that the copies below replace.\n            __syncthreads();",
        replacement: "",
        check: products::tensor_product,
    },
    // The rows of a fragment are exchanged.
    Defect {
        file: "matmul_mma.cu",
        original: "* mma::M + g + i / 2 * 8;",
        replacement: "* mma::M + g + i % 2 * 8;",
        check: products::tensor_product,
    },
    Defect {
        file: "sampling.cu",
        original: "shared.bins[threadIdx.x] > target",
        replacement: "shared.bins[threadIdx.x] >= target",
        check: sampling::samples::<f32>,
    },
    // No barrier between the reset of a result and its computation.
    Defect {
        file: "sampling.cu",
        original: "__syncthreads();\n    u64 before = 0;",
        replacement: "u64 before = 0;",
        check: sampling::samples::<f32>,
    },
    Defect {
        file: "quantise.cu",
        original: "(u64)(index / head_dim) * stride",
        replacement: "(u64)(index / stride) * stride",
        check: quantise::pages::<f32>,
    },
    Defect {
        file: "crc32.cu",
        original: "load_tile(shared, source + offset, tile);\n            __syncthreads();",
        replacement: "load_tile(shared, source + offset, tile);",
        check: crcs,
    },
    // The stores of an earlier tile may still read the buffer.
    Defect {
        file: "pages_bulk.cu",
        original: "                wait_reads();\n                __syncwarp();\n",
        replacement: "",
        check: bulk_pages,
    },
    // The bytes of a tile may still be on their way.
    Defect {
        file: "pages_bulk.cu",
        original: "wait_loads(shared, stage, phases >> stage & 1u);",
        replacement: "__syncthreads();",
        check: bulk_pages,
    },
    Defect {
        file: "pages_bulk.cu",
        original: "crc32::advance_tile(shared.crc, crc));",
        replacement: "crc);",
        check: bulk_pages,
    },
    Defect {
        file: "crc32.cu",
        original: "for (unsigned int i = done + threadIdx.x;",
        replacement: "for (unsigned int i = done + 1u + threadIdx.x;",
        check: crcs,
    },
];

/// CRCs of chunks of random lengths and offsets.
fn crcs(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let bytes: Vec<u8> = (0..40_000).map(|_| random.bits() as u8).collect();
    let memory = gpu.upload(&bytes)?;
    let ranges: Vec<_> = (0..4)
        .map(|_| {
            let start = random.below(20_000);
            start..start + 1 + random.below(20_000)
        })
        .collect();
    let chunks: Result<Vec<Slice>, String> =
        ranges.iter().map(|range| memory.slice(range.clone()).map_err(text)).collect();
    let out = gpu.empty::<u32>(ranges.len())?;
    let plan = CrcChunks::new(&*gpu.device, &chunks?).map_err(text)?;
    plan.compute(gpu.stream(), 2, &out).map_err(text)?;
    let expected: Vec<u32> = ranges.iter().map(|range| crc32fast::hash(&bytes[range.clone()])).collect();
    same("CRCs", &gpu.download::<u32>(&out)?, &expected)
}

/// A page of several tiles and chunks, gathered by bulk copies, with its CRCs.
fn bulk_pages(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let shape = PageShape {
        tokens: 50 + random.below(20) as u32,
        layers: 2,
        kv_heads: 4,
        head_bytes: 16 * (8 + random.below(8)) as u32,
        layer_tensors: 2,
        layers_per_part: 2,
        head_groups: 1,
    };
    let layout = PoolLayout::layer_first(&shape, 8);
    let table: Vec<u32> = (0..shape.tokens.div_ceil(8)).rev().collect();
    let tensor_bytes = table.len() * layout.page_stride as usize;
    let bytes: Vec<u8> = (0..4 * tensor_bytes).map(|_| random.bits() as u8).collect();
    let pool = gpu.upload(&bytes)?;
    let tensor = |index: usize| pool.slice(index * tensor_bytes..(index + 1) * tensor_bytes).map_err(text);
    let tensors = (0..4).map(tensor).collect::<Result<Vec<_>, _>>()?;
    let store = gpu.empty::<u8>(shape.page_bytes() as usize)?;
    let page = PageLocation { store: store.clone(), engine_pages: table.clone(), first_token: 0 };
    let plan = PageTransfer::new(&*gpu.device, &shape, &layout, &tensors, &[page], 0..1).map_err(text)?;
    let plan = plan.with_bulk(true);
    let crcs = gpu.empty::<u8>(plan.crc_bytes())?;
    plan.gather(gpu.stream(), 1 + (seed % 3) as u32, Some(&crcs)).map_err(text)?;
    let views: Vec<&[u8]> = bytes.chunks(tensor_bytes).collect();
    let mut expected = vec![0; store.bytes()];
    gather_page(&shape, &layout, &views, &table, 0, &mut expected);
    same("page", &gpu.download::<u8>(&store)?, &expected)?;
    let mut rest = &expected[..];
    let mut of_chunks = Vec::new();
    for &bytes in plan.chunk_lengths() {
        let (chunk, others) = rest.split_at(bytes as usize);
        of_chunks.push(crc32fast::hash(chunk));
        rest = others;
    }
    same("CRCs of a page", &gpu.download::<u32>(&crcs)?, &of_chunks)
}

/// Runs the check of a defect on a source, until a seed fails.
fn run(defect: &Defect, content: &'static str) -> Check {
    let source = KernelSource { content, ..source(defect.file) };
    let gpu = Emulated::with(source).map_err(text)?;
    for seed in SEEDS {
        (defect.check)(&gpu, seed)?;
    }
    Ok(())
}

#[test]
fn every_defect_is_found() {
    let mut missed = Vec::new();
    for defect in DEFECTS {
        let text = source(defect.file).text();
        let name = format!("{}: `{}`", defect.file, defect.replacement);
        assert_eq!(text.matches(defect.original).count(), 1, "the source has the original of {name} once");
        let changed: &'static str = text.replace(defect.original, defect.replacement).leak();
        match run(defect, changed) {
            // These would fail without the defect, too.
            Err(message) if UNRELATED.iter().any(|text| message.contains(text)) => panic!("{name}: {message}"),
            Err(message) => println!("{name}: {message}"),
            Ok(()) => missed.push(name),
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn sources_without_a_defect_pass_the_same_checks() {
    let gpu = Emulated::new();
    for defect in DEFECTS {
        for seed in SEEDS {
            (defect.check)(&gpu, seed).unwrap_or_else(|message| panic!("{}, seed {seed}: {message}", defect.file));
        }
    }
}
