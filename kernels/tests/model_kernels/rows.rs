//! Kernels that treat rows on their own: norm, activation, addition, embedding, rotation.

use crate::support::{Check, Emulated, Number, Random, close, rounded, same, text, widened};
use half::{bf16, f16};
use larder_kernels::cpu::{self, HeadLayout, KvElement, Rope, RopeTable};
use larder_kernels::device::Slice;
use larder_kernels::launch::{Add, DevicePages, Embedding, KvTarget, Narrow, RmsNorm, Rotate, SiluMul, head_starts};

const EPS: f32 = 1e-5;

/// Norm of random rows, with and without a residual, and of each row alone.
pub fn norm<T: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let (rows, width) = (1 + random.below(4), 1 + random.below(700));
    let (x, y): (Vec<T>, Vec<T>) = (random.numbers(rows * width), random.numbers(rows * width));
    let weight = random.floats(width);
    let weights = gpu.upload(&weight)?;
    let run = |rows: usize, x: &[T], y: Option<&[T]>| -> Result<(Vec<T>, Vec<T>), String> {
        let (input, out) = (gpu.upload(x)?, gpu.empty::<T>(x.len())?);
        let residual: Option<Slice> = y.map(|y| gpu.upload(y)).transpose()?;
        let (element, residual) = (T::ELEMENT, residual.as_ref());
        let norm = RmsNorm { element, rows, width, x: &input, residual, weight: &weights, eps: EPS, out: &out };
        norm.launch(gpu.stream()).map_err(text)?;
        Ok((gpu.download(&input)?, gpu.download(&out)?))
    };
    let reference = |x: &[T]| {
        let mut out = vec![0.0; x.len()];
        cpu::rms_norm(&widened(x), &weight, EPS, &mut out);
        out
    };
    let (kept, plain) = run(rows, &x, None)?;
    same("input of the norm", &kept, &x)?;
    close("norm", &plain, &reference(&x))?;
    let sums: Vec<f32> = widened(&x).iter().zip(widened(&y)).map(|(x, y)| x + y).collect();
    let sums: Vec<T> = rounded(&sums);
    let (kept, added) = run(rows, &x, Some(&y))?;
    same("sum before the norm", &kept, &sums)?;
    close("norm of the sum", &added, &reference(&sums))?;
    for row in 0..rows {
        let range = row * width..(row + 1) * width;
        let (_, alone) = run(1, &x[range.clone()], Some(&y[range.clone()]))?;
        same("norm of a row alone", &alone, &added[range])?;
    }
    Ok(())
}

pub fn silu<T: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let (rows, width) = (1 + random.below(4), 1 + random.below(2200));
    let gate_up: Vec<T> = random.numbers(rows * 2 * width);
    let (input, out) = (gpu.upload(&gate_up)?, gpu.empty::<T>(rows * width)?);
    let silu = SiluMul { element: T::ELEMENT, rows, width, gate_up: &input, out: &out };
    silu.launch(gpu.stream()).map_err(text)?;
    let mut expected = vec![0.0; rows * width];
    cpu::silu_mul(&widened(&gate_up), width, &mut expected);
    close("silu", &gpu.download::<T>(&out)?, &expected)
}

pub fn add<T: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let count = 1 + random.below(5000);
    // Longer than the sum, so that writes beyond it show.
    let (x, y): (Vec<T>, Vec<T>) = (random.numbers(count + 9), random.numbers(count + 9));
    let (sum, addend) = (gpu.upload(&x)?, gpu.upload(&y)?);
    Add { element: T::ELEMENT, count, x: &sum, y: &addend }.launch(gpu.stream()).map_err(text)?;
    let mut expected = widened(&x);
    cpu::add(&mut expected[..count], &widened(&y)[..count]);
    same("sum", &gpu.download::<T>(&sum)?, &rounded(&expected))
}

/// Rounding to bf16 of random numbers. Elements behind the count stay.
fn narrow(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let count = 1 + random.below(5000);
    let (x, old) = (random.floats(count + 9), random.numbers::<bf16>(count + 9));
    let (input, out) = (gpu.upload(&x)?, gpu.upload(&old)?);
    Narrow { count, x: &input, out: &out }.launch(gpu.stream()).map_err(text)?;
    let expected = [&rounded::<bf16>(&x[..count])[..], &old[count..]].concat();
    same("rounded numbers", &gpu.download::<bf16>(&out)?, &expected)
}

pub fn embedding<T: Number, E: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let (vocab, width, rows) = (1 + random.below(50), 1 + random.below(600), 1 + random.below(9));
    let table: Vec<E> = random.numbers(vocab * width);
    let mut tokens: Vec<u32> = (0..rows).map(|_| random.below(vocab) as u32).collect();
    tokens.extend([vocab as u32, u32::MAX]);
    let rows = tokens.len();
    let (weights, ids, out) = (gpu.upload(&table)?, gpu.upload(&tokens)?, gpu.empty::<T>(rows * width)?);
    let (element, table_element) = (T::ELEMENT, E::ELEMENT);
    let gather = Embedding { element, table_element, vocab, width, rows, table: &weights, tokens: &ids, out: &out };
    gather.launch(gpu.stream()).map_err(text)?;
    let row =
        |&token: &u32| table.chunks_exact(width).nth(token as usize).map_or(vec![E::zeroed(); width], <[E]>::to_vec);
    let expected: Vec<E> = tokens.iter().flat_map(row).collect();
    let expected: Vec<T> = rounded(&widened(&expected));
    same("embedding", &gpu.download(&out)?, &expected)
}

/// Rotation with a random scaling and norms, and the store into pages of random places.
pub fn rotate<T: Number, E: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let (heads, kv_heads, head_dim) = (1 + random.below(5), 1 + random.below(3), 2 * (1 + random.below(40)));
    let (rows, page_tokens, pages) = (1 + random.below(5), 1 + random.below(6), 1 + random.below(4));
    let row_stride = (heads + 2 * kv_heads) * head_dim + random.below(7);
    let scalings = [
        Rope::Default { theta: 1e4 },
        Rope::Linear { theta: 1e4, factor: 4.0 },
        Rope::Llama3 { theta: 5e5, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 },
    ];
    let mut table = RopeTable::default();
    let positions: Vec<usize> = (0..rows).map(|_| random.below(5000)).collect();
    table.fill(&scalings[random.below(3)].frequencies(head_dim), positions.into_iter());
    let norms = (random.below(2) == 1).then(|| (random.floats(head_dim), random.floats(head_dim)));
    let qkv: Vec<T> = random.numbers(rows * row_stride);
    // Some rows may have no place, and no two have the same.
    let mut slots: Vec<u32> = (0..(pages * page_tokens + rows) as u32).collect();
    random.shuffle(&mut slots);
    slots.truncate(rows);
    let stride = kv_heads * head_dim;
    let page_elements = 2 * page_tokens * stride + 8;
    let layout =
        |kind: usize, head: usize| HeadLayout { start: 8 + kind * page_tokens * stride + head * head_dim, stride };
    let layouts: Vec<Vec<HeadLayout>> =
        (0..2).map(|kind| (0..kv_heads).map(|head| layout(kind, head)).collect()).collect();
    let (starts, token_stride) = head_starts(&layouts[0], &layouts[1]).map_err(text)?;

    let mut expected_rows = widened(&qkv);
    let mut expected_pool = vec![f32::NAN; pages * page_elements];
    for (row, &slot) in slots.iter().enumerate() {
        for head in 0..heads + 2 * kv_heads {
            let at = row * row_stride + head * head_dim;
            let mut values = expected_rows[at..at + head_dim].to_vec();
            if head < heads + kv_heads {
                if let Some((query_norm, key_norm)) = &norms {
                    let input = values.clone();
                    cpu::rms_norm(&input, if head < heads { query_norm } else { key_norm }, EPS, &mut values);
                }
                table.apply(row, &mut values);
            }
            if head < heads {
                expected_rows[at..at + head_dim].copy_from_slice(&values);
                continue;
            }
            let (page, token) = (slot as usize / page_tokens, slot as usize % page_tokens);
            if page < pages {
                let at = page * page_elements + starts[head - heads] as usize + token * stride;
                expected_pool[at..at + head_dim].copy_from_slice(&values);
            }
        }
    }

    let (input, pool) = (gpu.upload(&qkv)?, gpu.upload(&rounded::<E>(&vec![f32::NAN; pages * page_elements]))?);
    let (cosines, places, starts) = (gpu.upload(table.values())?, gpu.upload(&slots)?, gpu.upload(&starts)?);
    let uploaded = norms.as_ref().map(|(q, k)| Ok::<_, String>((gpu.upload(q)?, gpu.upload(k)?))).transpose()?;
    let pages =
        DevicePages { element: E::ELEMENT, pool: &pool, page_elements, page_tokens, starts: &starts, token_stride };
    let rotate = Rotate {
        element: T::ELEMENT,
        rows,
        heads,
        kv_heads,
        head_dim,
        qkv: &input,
        row_stride,
        table: &cosines,
        query_norm: uploaded.as_ref().map(|norms| &norms.0),
        key_norm: uploaded.as_ref().map(|norms| &norms.1),
        eps: EPS,
        target: Some(KvTarget { pages, slots: &places }),
    };
    rotate.launch(gpu.stream()).map_err(text)?;
    close("rotated queries", &gpu.download::<T>(&input)?, &expected_rows)?;
    let found: Vec<E> = gpu.download(&pool)?;
    for (index, (&found, &expected)) in found.iter().zip(&expected_pool).enumerate() {
        if expected.is_nan() != KvElement::to_f32(found).is_nan() {
            return Err(format!("element {index} of the pool is {}, not {expected}", KvElement::to_f32(found)));
        }
    }
    let written = |values: Vec<f32>| -> Vec<f32> { values.into_iter().filter(|x| !x.is_nan()).collect() };
    close("stored keys and values", &rounded::<E>(&written(widened(&found))), &written(expected_pool))
}

#[test]
fn norm_agrees_with_the_cpu_and_rows_are_independent() {
    let gpu = Emulated::new();
    for seed in 0..6 {
        norm::<f32>(&gpu, seed).unwrap();
        norm::<f16>(&gpu, seed).unwrap();
        norm::<bf16>(&gpu, seed).unwrap();
    }
}

#[test]
fn activation_addition_and_rounding_agree_with_the_cpu() {
    let gpu = Emulated::new();
    for seed in 0..6 {
        silu::<f32>(&gpu, seed).and(add::<f32>(&gpu, seed)).unwrap();
        silu::<f16>(&gpu, seed).and(add::<f16>(&gpu, seed)).unwrap();
        silu::<bf16>(&gpu, seed).and(add::<bf16>(&gpu, seed)).unwrap();
        narrow(&gpu, seed).unwrap();
    }
}

#[test]
fn embedding_copies_rows_and_zeroes_unknown_tokens() {
    let gpu = Emulated::new();
    for seed in 0..6 {
        embedding::<f32, f32>(&gpu, seed).unwrap();
        embedding::<f32, f16>(&gpu, seed).unwrap();
        embedding::<f32, bf16>(&gpu, seed).unwrap();
        embedding::<f16, f16>(&gpu, seed).unwrap();
        embedding::<bf16, bf16>(&gpu, seed).unwrap();
    }
}

#[test]
fn rotation_agrees_with_the_cpu_and_stores_into_pages() {
    let gpu = Emulated::new();
    for seed in 0..8 {
        rotate::<f32, f32>(&gpu, seed).unwrap();
        rotate::<f32, f16>(&gpu, seed).unwrap();
        rotate::<f32, bf16>(&gpu, seed).unwrap();
        rotate::<f16, f16>(&gpu, seed).unwrap();
        rotate::<bf16, bf16>(&gpu, seed).unwrap();
    }
}
