//! The forward pass against Hugging Face transformers, and against itself.
//!
//! Every folder of `tests/golden` with a `golden.safetensors` is a small random model. The file
//! holds the logits and the greedy continuation that transformers computes.
//! - Every variant of [`VARIANTS`] has its own definition, computed by transformers in f32 with
//!   keys, values and weights rounded as the engine rounds them. So a tolerance covers only the
//!   order of sums, and what it can do to a rounding. `tests/golden/README.md` has the
//!   measurements.
//! - Tolerances are relative to the largest absolute logit of the row.
//! - One chunk, uneven chunks and single tokens must agree in every bit, in every variant.

mod common;

use common::*;
use larder_format::KvDtype;
use larder_kernels::cpu::argmax;
use larder_model::{Activations, Chunk, LogitRows, Model, WeightFormat};
use std::path::PathBuf;

/// All ways. With keys and values of 16 bits, the last bit of an f32 may decide a rounding.
const VARIANTS: [Variant; 5] = [
    EXACT,
    Variant { kv_dtype: KvDtype::F16, tensor: Some("kv_f16"), tolerance: 2e-3, ..EXACT },
    Variant { kv_dtype: KvDtype::Bf16, tensor: Some("kv_bf16"), tolerance: 4e-3, ..EXACT },
    Variant { weights: WeightFormat::Q8, tensor: Some("q8"), ..EXACT },
    Variant {
        kv_dtype: KvDtype::Bf16,
        weights: WeightFormat::Q8,
        tensor: Some("q8_kv_bf16"),
        tolerance: 4e-3,
        ..EXACT
    },
];

fn goldens(variant: Variant) -> Vec<Golden> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(golden_dir()).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.retain(|dir| dir.join("golden.safetensors").is_file());
    dirs.sort();
    assert!(dirs.len() >= 6, "golden models are missing: {dirs:?}");
    dirs.iter().map(|dir| golden(dir, variant)).collect()
}

/// Computes prompt and greedy continuation in chunks of `lens` (repeated), in pages of
/// `page_tokens`.
fn logits_in_chunks(golden: &Golden, lens: &[usize], page_tokens: u32) -> (Vec<f32>, Vec<u8>) {
    let tokens = [&golden.prompt[..], &golden.greedy[..golden.greedy.len() - 1]].concat();
    let mut sequence = Sequence::new(&golden.model, page_tokens, &tokens, tokens.len());
    let mut logits = Vec::new();
    for len in lens.iter().cycle() {
        let len = *len.min(&(tokens.len() - sequence.computed));
        if len == 0 {
            break;
        }
        logits.extend(sequence.run(&golden.model, len, LogitRows::All));
    }
    (logits, sequence.kv_bytes())
}

#[test]
fn logits_agree_with_transformers_for_every_chunking_and_variant() {
    for variant in VARIANTS {
        for golden in goldens(variant) {
            let name = format!("{} {}", golden.name, variant.tensor.unwrap_or("exact"));
            let vocab = golden.model.config().vocab;
            let (logits, kv) = logits_in_chunks(&golden, &[usize::MAX], 16);
            // The generated tokens are those of transformers, so the last row compares too.
            let prompt = worst_difference(&logits[..golden.prompt.len() * vocab], &golden.logits, vocab);
            let last = worst_difference(&logits[logits.len() - vocab..], &golden.last_logits, vocab);
            let difference = if variant.tensor.is_some() {
                let row = |&row: &u32| &logits[row as usize * vocab..][..vocab];
                let rows = golden.rows.iter().map(row).collect::<Vec<_>>().concat();
                worst_difference(&rows, &golden.variant_logits, vocab)
            } else {
                prompt.max(last)
            };
            println!("{name}: {difference:.1e} from its definition, {:.1e} from unrounded logits", prompt.max(last));
            assert!(difference < variant.tolerance, "{name}: {difference:e}");
            for (lens, page_tokens) in [(&[1][..], 16), (&[5, 1, 17, 3], 16), (&[40, 64], 5), (&[7], 64)] {
                let (other_logits, other_kv) = logits_in_chunks(&golden, lens, page_tokens);
                assert!(bits(&logits) == bits(&other_logits), "{name}: logits in chunks of {lens:?}");
                assert!(kv == other_kv, "{name}: keys and values in chunks of {lens:?}");
            }
        }
    }
}

/// The products of rounded activations have strict tests of their own
/// (`kernels/src/cpu/matmul/tests.rs`). This one shows that the rest of the pass is the same.
#[test]
fn narrow_activations_stay_near_those_of_f32_and_keep_bits_in_every_chunking() {
    for weights in [WeightFormat::Stored, WeightFormat::Q8] {
        let wide = Variant { weights, ..EXACT };
        for (wide, narrow) in goldens(wide).iter().zip(goldens(Variant { activations: Activations::Narrow, ..wide })) {
            let name = format!("{} {weights:?}, activations in {}", narrow.name, narrow.model.activations());
            let (expected, _) = logits_in_chunks(wide, &[usize::MAX], 16);
            let (logits, kv) = logits_in_chunks(&narrow, &[usize::MAX], 16);
            let difference = worst_difference(&logits, &expected, narrow.model.config().vocab);
            println!("{name}: {difference:.1e} from f32");
            match narrow.model.activations() {
                "f32" => assert!(difference == 0.0, "{name}"),
                // The random models amplify each rounding.
                "bf16" => assert!((1e-4..0.1).contains(&difference), "{name}: {difference:e}"),
                _ => assert!((1e-3..0.5).contains(&difference), "{name}: {difference:e}"),
            }
            for (lens, page_tokens) in [(&[1][..], 16), (&[5, 1, 17, 3], 16), (&[40, 64], 5)] {
                let (other_logits, other_kv) = logits_in_chunks(&narrow, lens, page_tokens);
                assert!(bits(&logits) == bits(&other_logits), "{name}: logits in chunks of {lens:?}");
                assert!(kv == other_kv, "{name}: keys and values in chunks of {lens:?}");
            }
        }
    }
}

#[test]
fn keys_and_values_have_the_type_of_the_weights_by_default() {
    let dtype = |name: &str| Model::load(&golden_dir().join(name)).unwrap().geometry(16).dtype;
    assert_eq!(dtype("llama3-rope-tied-bf16"), KvDtype::Bf16);
    assert_eq!(dtype("qwen2-f16"), KvDtype::F16);
    assert_eq!(dtype("mistral-f32"), KvDtype::F32);
}

#[test]
fn greedy_tokens_equal_those_of_transformers() {
    for mut golden in goldens(EXACT) {
        let room = golden.prompt.len() + golden.greedy.len();
        for prefill in [&[usize::MAX][..], &[9, 30, 2], &[1]] {
            let mut sequence = Sequence::new(&golden.model, 16, &golden.prompt, room);
            let mut logits = Vec::new();
            for len in prefill.iter().cycle() {
                let len = *len.min(&(golden.prompt.len() - sequence.computed));
                if len == 0 {
                    break;
                }
                logits = sequence.run(&golden.model, len, LogitRows::Last);
            }
            let mut generated = Vec::new();
            while generated.len() < golden.greedy.len() {
                let token = argmax(&logits);
                generated.push(token);
                sequence.tokens.push(token);
                logits = sequence.run(&golden.model, 1, LogitRows::Last);
            }
            assert_eq!(generated, golden.greedy, "{}", golden.name);
        }
        // Negative control: another prompt gives other logits.
        golden.prompt[40] ^= 1;
        let mut sequence = Sequence::new(&golden.model, 16, &golden.prompt, room);
        let logits = sequence.run(&golden.model, golden.prompt.len(), LogitRows::Last);
        let original = &golden.logits[golden.logits.len() - logits.len()..];
        assert!(worst_difference(&logits, original, logits.len()) > TOLERANCE);
    }
}

#[test]
fn batch_neighbours_change_no_bit() {
    for golden in VARIANTS.into_iter().flat_map(goldens) {
        let (model, vocab) = (&golden.model, golden.model.config().vocab as u32);
        let lens = [48, 1, 96, 70, 2];
        let tokens: Vec<Vec<u32>> =
            (0..5).map(|s| (0..lens[s as usize]).map(|i| (i * 37 + s * 11) as u32 % vocab).collect()).collect();
        let alone: Vec<_> = tokens
            .iter()
            .map(|tokens| {
                let mut sequence = Sequence::new(model, 16, tokens, tokens.len());
                (sequence.run(model, tokens.len(), LogitRows::All), sequence.kv_bytes())
            })
            .collect();
        // Together, in steps of different sizes and with different pages. Some rows of logits are
        // dropped.
        let mut sequences: Vec<_> = tokens
            .iter()
            .enumerate()
            .map(|(s, tokens)| Sequence::new(model, [16, 8, 3, 64, 1][s], tokens, tokens.len()))
            .collect();
        let kinds = [LogitRows::All, LogitRows::Last, LogitRows::Last, LogitRows::None, LogitRows::All];
        while sequences.iter().any(|s| s.computed < s.tokens.len()) {
            let steps: Vec<(usize, usize, usize)> = sequences
                .iter()
                .enumerate()
                .map(|(index, s)| (index, s.computed, [11, 1, 29, 70, 1][index].min(s.tokens.len() - s.computed)))
                .filter(|step| step.2 > 0)
                .collect();
            let mut batch: Vec<Chunk<'_>> = sequences
                .iter_mut()
                .enumerate()
                .filter_map(|(index, s)| {
                    let step = steps.iter().find(|step| step.0 == index)?;
                    Some(s.chunk(step.2, kinds[index]))
                })
                .collect();
            let logits = model.forward(&mut batch, &mut ()).unwrap();
            for (&(index, start, len), logits) in steps.iter().zip(&logits) {
                let first = match kinds[index] {
                    LogitRows::All => start,
                    LogitRows::Last => start + len - 1,
                    LogitRows::None => start + len,
                };
                let expected = &alone[index].0[first * vocab as usize..(start + len) * vocab as usize];
                assert!(bits(expected) == bits(logits), "{}: sequence {index} at {start}", golden.name);
            }
        }
        for (sequence, alone) in sequences.iter().zip(&alone) {
            assert!(sequence.kv_bytes() == alone.1, "{}", golden.name);
        }
    }
}

#[test]
fn thread_count_changes_no_bit() {
    let golden = golden(&golden_dir().join("llama-gqa-untied-f32"), EXACT);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| logits_in_chunks(&golden, &[100, 1], 16))
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        let other = run(threads);
        assert!(bits(&one.0) == bits(&other.0) && one.1 == other.1, "{threads} threads");
    }
}

#[test]
fn older_and_newer_config_shapes_give_the_same_model() {
    let read = |name: &str| {
        let bytes = std::fs::read(golden_dir().join(name).join("config.json")).unwrap();
        let config = serde_json::from_slice(&bytes).unwrap();
        larder_model::ModelConfig::from_json(&config, &serde_json::Value::Null).unwrap()
    };
    assert_eq!(read("llama3-rope-tied-bf16"), read("llama3-rope-tied-bf16-oldconfig"));
}
