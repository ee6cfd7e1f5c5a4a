//! Quantised pages and byte planes. All results equal those of the CPU bit by bit.

use crate::support::{Check, Emulated, Number, Random, rounded, same, text, widened};
use half::{bf16, f16};
use larder_kernels::cpu::{EightBit, split_planes};
use larder_kernels::launch::{BytePlanes, QuantisedPages};

pub fn pages<T: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let (page_count, heads, page_tokens) = (1 + random.below(3), 1 + random.below(4), 1 + random.below(20));
    // Odd heads take the path without packs.
    let head_dim = if random.below(2) == 0 { 8 * (1 + random.below(8)) } else { 1 + random.below(40) };
    let token_stride = heads * head_dim;
    let page_elements = page_tokens * token_stride;
    let mut values = random.floats(page_count * page_elements);
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        values[random.below(page_count * page_elements)] = special;
    }
    // A head of zeros has the scale 0.
    values[..head_dim].fill(0.0);
    let values: Vec<T> = rounded(&values);
    let starts: Vec<u32> = (0..heads).map(|head| (head * head_dim) as u32).collect();

    let (input, starts_of) = (gpu.upload(&values)?, gpu.upload(&starts)?);
    let (scales, codes) = (gpu.empty::<f32>(page_count * heads)?, gpu.empty::<u8>(values.len())?);
    let back = gpu.empty::<T>(values.len())?;
    for format in [EightBit::E4m3, EightBit::Int8] {
        let quantised = QuantisedPages {
            format,
            element: T::ELEMENT,
            page_count,
            page_elements,
            page_tokens,
            head_dim,
            token_stride,
            heads,
            starts: &starts_of,
            pages: &input,
            scales: &scales,
            codes: &codes,
        };
        quantised.quantise(gpu.stream()).map_err(text)?;
        QuantisedPages { pages: &back, ..quantised }.dequantise(gpu.stream()).map_err(text)?;
        let mut expected_codes = vec![0; values.len()];
        let (mut expected_scales, mut expected_back) = (Vec::new(), vec![0.0; values.len()]);
        let wide = widened(&values);
        for page in 0..page_count {
            for head in 0..heads {
                let places: Vec<usize> = (0..page_tokens * head_dim)
                    .map(|i| page * page_elements + i / head_dim * token_stride + head * head_dim + i % head_dim)
                    .collect();
                let of_head: Vec<f32> = places.iter().map(|&at| wide[at]).collect();
                let (mut codes, mut decoded) = (vec![0; places.len()], vec![0.0; places.len()]);
                let scale = format.encode_head(&of_head, &mut codes);
                format.decode_head(&codes, scale, &mut decoded);
                expected_scales.push(scale);
                for (index, &at) in places.iter().enumerate() {
                    (expected_codes[at], expected_back[at]) = (codes[index], decoded[index]);
                }
            }
        }
        same("scales", &gpu.download::<f32>(&scales)?, &expected_scales)?;
        same("codes", &gpu.download::<u8>(&codes)?, &expected_codes)?;
        let found: Vec<T> = gpu.download(&back)?;
        let no_nan = |values: Vec<f32>| -> Vec<f32> {
            values.into_iter().map(|x| if x.is_nan() { f32::MAX } else { x }).collect()
        };
        // The bits of a NaN may differ.
        same("decoded values", &no_nan(widened(&found)), &no_nan(widened(&rounded::<T>(&expected_back))))?;
    }
    Ok(())
}

pub fn planes(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let (pieces, count) = (1 + random.below(3), [1, 15, 16, 4096, 4097, 5000][random.below(6)]);
    let values: Vec<u16> = (0..pieces * count).map(|_| random.bits() as u16).collect();
    let (elements, planes) = (gpu.upload(&values)?, gpu.empty::<u8>(2 * values.len())?);
    BytePlanes { pieces, count, elements: &elements, planes: &planes }.split(gpu.stream()).map_err(text)?;
    let mut expected = vec![0; 2 * values.len()];
    for (piece, planes) in values.chunks_exact(count).zip(expected.chunks_exact_mut(2 * count)) {
        split_planes(piece, planes);
    }
    same("planes", &gpu.download::<u8>(&planes)?, &expected)?;
    let back = gpu.empty::<u16>(values.len())?;
    BytePlanes { pieces, count, elements: &back, planes: &planes }.merge(gpu.stream()).map_err(text)?;
    same("merged planes", &gpu.download::<u16>(&back)?, &values)
}

#[test]
fn quantised_pages_equal_those_of_the_cpu() {
    let gpu = Emulated::new();
    for seed in 0..8 {
        pages::<f32>(&gpu, seed).unwrap();
        pages::<f16>(&gpu, 100 + seed).unwrap();
        pages::<bf16>(&gpu, 200 + seed).unwrap();
    }
}

#[test]
fn byte_planes_equal_those_of_the_cpu_and_lose_nothing() {
    let gpu = Emulated::new();
    for seed in 0..12 {
        planes(&gpu, seed).unwrap();
    }
}
