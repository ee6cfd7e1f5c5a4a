//! Matrix products, and the copy of keys and values out of their pages.

use crate::support::{Check, Emulated, Number, Random, close_within, same, text, widened};
use half::{bf16, f16};
use larder_kernels::cpu::{self, PackedMatrix, WeightType};
use larder_kernels::launch::{Arithmetic, DevicePages, Element, KvRows, MatMul};

fn weight_type(element: Element) -> WeightType {
    match element {
        Element::F32 => WeightType::F32,
        Element::F16 => WeightType::F16,
        Element::Bf16 => WeightType::Bf16,
    }
}

/// Product of random rows, and of each row alone: both have the bits of the CPU.
pub fn product<W: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let rows = [1 + random.below(9), 24 + random.below(60)][random.below(2)];
    let (inputs, outputs) = (1 + random.below(100), 1 + random.below(150));
    let (x, bias) = (random.floats(rows * inputs), random.floats(outputs));
    let weight: Vec<W> = random.numbers(outputs * inputs);
    let has_bias = random.below(2) == 1;
    let wide = widened(&weight);
    let fill = |output: usize, row: &mut [f32]| row.copy_from_slice(&wide[output * inputs..(output + 1) * inputs]);
    let packed =
        PackedMatrix::new(outputs, inputs, weight_type(W::ELEMENT), fill).map_err(|error| error.to_string())?;
    let mut expected = vec![0.0; rows * outputs];
    cpu::matmul(&x, &packed, has_bias.then_some(&bias[..]), &mut expected);
    let (weights, biases) = (gpu.upload(&weight)?, gpu.upload(&bias)?);
    let run = |rows: usize, x: &[f32]| -> Result<Vec<f32>, String> {
        let (input, out) = (gpu.upload(x)?, gpu.empty::<f32>(rows * outputs)?);
        let bias = has_bias.then_some(&biases);
        let (element, weight) = (W::ELEMENT, &weights);
        let arithmetic = Arithmetic::Plain;
        let product = MatMul { arithmetic, element, rows, inputs, outputs, x: &input, weight, bias, out: &out };
        product.launch(gpu.stream()).map_err(text)?;
        gpu.download(&out)
    };
    same("product", &run(rows, &x)?, &expected)?;
    let last = rows - 1;
    same("product of a row alone", &run(1, &x[last * inputs..])?, &expected[last * outputs..])
}

/// Product on tensor cores of random rows, against the CPU with inputs of bf16. The last row alone
/// has the same bits, also by the kernel for few rows.
pub fn tensor_product(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let rows = [1 + random.below(40), 130 + random.below(20)][random.below(2)];
    let (inputs, outputs) = (8 * (1 + random.below(30)), 1 + random.below(150));
    let (x, bias) = (random.floats(rows * inputs), random.floats(outputs));
    let weight: Vec<bf16> = random.numbers(outputs * inputs);
    let has_bias = random.below(2) == 1;
    let wide = widened(&weight);
    let fill = |output: usize, row: &mut [f32]| row.copy_from_slice(&wide[output * inputs..(output + 1) * inputs]);
    let packed = PackedMatrix::new(outputs, inputs, WeightType::Bf16, fill).map_err(|error| error.to_string())?;
    let narrow: Vec<f32> = x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    let mut expected = vec![0.0; rows * outputs];
    cpu::matmul(&narrow, &packed, has_bias.then_some(&bias[..]), &mut expected);
    let (weights, biases) = (gpu.upload(&weight)?, gpu.upload(&bias)?);
    let run = |rows: usize, x: &[f32]| -> Result<Vec<f32>, String> {
        let (input, out) = (gpu.upload(x)?, gpu.empty::<f32>(rows * outputs)?);
        let (arithmetic, element, weight) = (Arithmetic::Tensor, Element::Bf16, &weights);
        let bias = has_bias.then_some(&biases);
        let product = MatMul { arithmetic, element, rows, inputs, outputs, x: &input, weight, bias, out: &out };
        product.launch(gpu.stream()).map_err(text)?;
        gpu.download(&out)
    };
    let found = run(rows, &x)?;
    // Products of bf16 are exact in f32, so only the order of the sums differs.
    close_within("product on tensor cores", &found, &expected, 1e-4, 1.0)?;
    let last = rows - 1;
    same("product of a row alone", &run(1, &x[last * inputs..])?, &found[last * outputs..])
}

/// Rows of random places in random pages, some of them outside the pool.
pub fn kv_rows<E: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let (kv_heads, head_dim) = (1 + random.below(3), 8 * (1 + random.below(5)));
    let (page_tokens, page_count, rows) = (1 + random.below(6), 1 + random.below(4), 1 + random.below(9));
    let stride = kv_heads * head_dim;
    let page_elements = 2 * page_tokens * stride;
    let pool: Vec<E> = random.numbers(page_count * page_elements);
    let slots: Vec<u32> = (0..rows).map(|_| random.below((page_count + 1) * page_tokens) as u32).collect();
    let start = |kind: usize, head: usize| (kind * page_tokens * stride + head * head_dim) as u32;
    let starts: Vec<u32> = (0..2).flat_map(|kind| (0..kv_heads).map(move |head| start(kind, head))).collect();
    let mut expected = vec![E::zeroed(); rows * 2 * stride];
    for (row, &slot) in slots.iter().enumerate() {
        let (page, token) = (slot as usize / page_tokens, slot as usize % page_tokens);
        for kind in (0..2).filter(|_| page < page_count) {
            let from = page * page_elements + (kind * page_tokens + token) * stride;
            let to = (2 * row + kind) * stride;
            expected[to..to + stride].copy_from_slice(&pool[from..from + stride]);
        }
    }
    let (memory, places, starts) = (gpu.upload(&pool)?, gpu.upload(&slots)?, gpu.upload(&starts)?);
    let out = gpu.empty::<E>(rows * 2 * stride)?;
    let (element, token_stride) = (E::ELEMENT, stride);
    let pages = DevicePages { element, pool: &memory, page_elements, page_tokens, starts: &starts, token_stride };
    let copy = KvRows { pages, rows, kv_heads, head_dim, slots: &places, out: &out };
    copy.launch(gpu.stream()).map_err(text)?;
    same("rows of keys and values", &gpu.download::<E>(&out)?, &expected)
}

#[test]
fn products_have_the_bits_of_the_cpu_whatever_the_number_of_rows() {
    let gpu = Emulated::new();
    for seed in 0..6 {
        product::<f32>(&gpu, seed).unwrap();
        product::<f16>(&gpu, seed).unwrap();
        product::<bf16>(&gpu, seed).unwrap();
    }
}

#[test]
fn products_on_tensor_cores_agree_with_the_cpu_whatever_the_number_of_rows() {
    let gpu = Emulated::new();
    for seed in 0..8 {
        tensor_product(&gpu, seed).unwrap();
    }
}

#[test]
fn keys_and_values_are_copied_out_of_their_pages() {
    let gpu = Emulated::new();
    for seed in 0..6 {
        kv_rows::<f32>(&gpu, seed).unwrap();
        kv_rows::<f16>(&gpu, seed).unwrap();
        kv_rows::<bf16>(&gpu, seed).unwrap();
    }
}
