//! Selection of tokens: largest logit, and samples.

use crate::support::{Check, Emulated, Number, Random, rounded, same, text, widened};
use half::{bf16, f16};
use larder_kernels::cpu::{self, SampleParams};
use larder_kernels::launch::{Argmax, Sample, SampleRow};

const ROWS: usize = 6;

/// Logits of one of several kinds: spread, flat, with many ties, with NaN and infinities.
fn logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    let kind = random.below(4);
    let mut values = random.floats(ROWS * vocab);
    for x in &mut values {
        match kind {
            0 => *x *= 4.0,
            1 => *x *= 0.01,
            2 => *x = (*x * 2.0).round(),
            _ => {
                let special = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0];
                if random.below(10) == 0 {
                    *x = special[random.below(5)];
                }
            }
        }
    }
    values
}

pub fn samples<T: Number>(gpu: &Emulated, seed: u64) -> Check {
    let mut random = Random::new(seed);
    let most = [5, 300, 1500][random.below(3)];
    let vocab = 1 + random.below(most);
    let logits: Vec<T> = rounded(&logits(&mut random, vocab));
    let parameters: Vec<SampleRow> = (0..ROWS)
        .map(|_| SampleRow {
            uniform: random.uniform(),
            temperature: [0.0, 0.3, 1.0, 2.0][random.below(4)],
            top_p: [1.0, 0.9, 0.5, 0.05][random.below(4)],
            min_p: [0.0, 0.0, 0.1, 0.7][random.below(4)],
            top_k: [0, 0, 1, 20, 40][random.below(5)],
        })
        .collect();
    let (input, rows_of) = (gpu.upload(&logits)?, gpu.upload(&parameters)?);
    let (weights, out) = (gpu.empty::<u64>(ROWS * vocab)?, gpu.empty::<u32>(ROWS)?);
    let element = T::ELEMENT;
    let sample =
        Sample { element, rows: ROWS, vocab, logits: &input, parameters: &rows_of, weights: &weights, out: &out };
    sample.launch(gpu.stream()).map_err(text)?;
    let sampled: Vec<u32> = gpu.download(&out)?;
    Argmax { element, rows: ROWS, vocab, logits: &input, out: &out }.launch(gpu.stream()).map_err(text)?;
    let largest: Vec<u32> = gpu.download(&out)?;

    let wide = widened(&logits);
    let expected: Vec<u32> = (wide.chunks_exact(vocab).zip(&parameters))
        .map(|(row, &SampleRow { uniform, temperature, top_p, min_p, top_k })| {
            cpu::sample_token(row, &SampleParams { temperature, top_p, min_p, top_k }, uniform)
        })
        .collect();
    same("samples", &sampled, &expected)?;
    same("largest logits", &largest, &wide.chunks_exact(vocab).map(cpu::argmax).collect::<Vec<_>>())
}

#[test]
fn samples_are_those_of_the_cpu_for_the_same_random_numbers() {
    let gpu = Emulated::new();
    for seed in 0..24 {
        samples::<f32>(&gpu, seed).unwrap();
        samples::<f16>(&gpu, 100 + seed).unwrap();
        samples::<bf16>(&gpu, 200 + seed).unwrap();
    }
}
