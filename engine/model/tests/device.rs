//! The forward pass on an emulated device, which runs the CUDA sources on the CPU.
//!
//! The first test of the process waits for the C++ compiler.

mod common;

use common::*;
use larder_format::KvDtype;
use larder_kernels::cpu::argmax;
use larder_model::{
    Chunk, DeviceChoice, ForwardError, LayerHooks, LoadOptions, LogitRows, Model, PageSlot, WeightFormat, numerics,
};
use std::path::PathBuf;

const DEVICE: DeviceChoice = DeviceChoice::Emulated;
/// Tokens that are generated: each takes a pass.
const GENERATED: usize = 8;

/// Folders of the golden models whose heads the kernels compute.
fn folders() -> Vec<PathBuf> {
    let names = ["llama-gqa-untied-f32", "llama3-rope-tied-bf16", "mistral-f32", "qwen2-f16", "qwen3-sharded-f32"];
    names.iter().map(|name| golden_dir().join(name)).collect()
}

/// Computes all tokens of a sequence in chunks of `lens` (repeated), with all logits.
fn computed(model: &Model, tokens: &[u32], lens: &[usize], page_tokens: u32) -> (Vec<f32>, Vec<u8>) {
    let mut sequence = Sequence::new(model, page_tokens, tokens, tokens.len());
    let mut logits = Vec::new();
    for len in lens.iter().cycle() {
        let len = *len.min(&(tokens.len() - sequence.computed));
        if len == 0 {
            break;
        }
        logits.extend(sequence.run(model, len, LogitRows::All));
    }
    (logits, sequence.kv_bytes())
}

fn tokens(seed: usize, count: usize, model: &Model) -> Vec<u32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % model.config().vocab) as u32).collect()
}

#[test]
fn greedy_tokens_equal_those_of_transformers() {
    for folder in folders() {
        let golden = golden_on(&folder, EXACT, DEVICE);
        let room = golden.prompt.len() + GENERATED;
        let mut sequence = Sequence::new(&golden.model, 16, &golden.prompt, room);
        // The second and third chunk continue a prefix.
        for len in [9, 21] {
            assert!(sequence.run(&golden.model, len, LogitRows::None).is_empty());
        }
        let mut logits = sequence.run(&golden.model, golden.prompt.len() - 30, LogitRows::Last);
        let mut generated = Vec::new();
        while generated.len() < GENERATED {
            let token = argmax(&logits);
            generated.push(token);
            sequence.tokens.push(token);
            logits = sequence.run(&golden.model, 1, LogitRows::Last);
        }
        assert_eq!(generated, golden.greedy[..GENERATED], "{}", golden.name);
    }
}

#[test]
fn logits_agree_with_transformers_for_each_type_of_pages() {
    let f16 = Variant { kv_dtype: KvDtype::F16, tensor: Some("kv_f16"), tolerance: 2e-3, ..EXACT };
    let bf16 = Variant { kv_dtype: KvDtype::Bf16, tensor: Some("kv_bf16"), tolerance: 4e-3, ..EXACT };
    for (name, variant) in [("qwen2-f16", f16), ("llama3-rope-tied-bf16", bf16), ("qwen3-sharded-f32", bf16)] {
        let golden = golden_on(&golden_dir().join(name), variant, DEVICE);
        let vocab = golden.model.config().vocab;
        let tokens = [&golden.prompt[..], &golden.greedy[..golden.greedy.len() - 1]].concat();
        let (logits, _) = computed(&golden.model, &tokens, &[usize::MAX], 16);
        let row = |&row: &u32| &logits[row as usize * vocab..][..vocab];
        let rows = golden.rows.iter().map(row).collect::<Vec<_>>().concat();
        let difference = worst_difference(&rows, &golden.variant_logits, vocab);
        println!("{name}: {difference:.1e}");
        assert!(difference < variant.tolerance, "{name}: {difference:e}");
    }
}

#[test]
fn chunks_and_page_sizes_change_no_bit() {
    let golden = golden_on(&golden_dir().join("llama-gqa-untied-f32"), EXACT, DEVICE);
    let tokens = tokens(0, 45, &golden.model);
    let whole = computed(&golden.model, &tokens, &[usize::MAX], 16);
    for (lens, page_tokens) in [(&[1][..], 16), (&[5, 1, 17, 3], 16), (&[40, 64], 5), (&[7], 64)] {
        let other = computed(&golden.model, &tokens, lens, page_tokens);
        assert!(bits(&whole.0) == bits(&other.0), "logits in chunks of {lens:?}");
        assert!(whole.1 == other.1, "keys and values in chunks of {lens:?}");
    }
    // Negative control: another token changes the logits.
    let mut changed = tokens.clone();
    changed[20] ^= 1;
    assert!(bits(&whole.0) != bits(&computed(&golden.model, &changed, &[usize::MAX], 16).0));
}

#[test]
fn batch_neighbours_change_no_bit() {
    for name in ["llama-gqa-untied-f32", "qwen3-sharded-f32"] {
        let model = golden_on(&golden_dir().join(name), EXACT, DEVICE).model;
        let vocab = model.config().vocab;
        let lens = [37, 1, 20, 2];
        let all: Vec<Vec<u32>> = lens.iter().enumerate().map(|(seed, &len)| tokens(seed, len, &model)).collect();
        let alone: Vec<_> = all.iter().map(|tokens| computed(&model, tokens, &[usize::MAX], 8)).collect();
        let mut sequences: Vec<Sequence> =
            all.iter().map(|tokens| Sequence::new(&model, 8, tokens, tokens.len())).collect();
        let kinds = [LogitRows::All, LogitRows::Last, LogitRows::None, LogitRows::Last];
        while sequences.iter().any(|sequence| sequence.computed < sequence.tokens.len()) {
            let mut steps = Vec::new();
            let mut batch: Vec<Chunk<'_>> = Vec::new();
            for (index, sequence) in sequences.iter_mut().enumerate() {
                let start = sequence.computed;
                let len = [11, 1, 9, 1][index].min(sequence.tokens.len() - start);
                if len > 0 {
                    steps.push((index, start, len));
                    batch.push(sequence.chunk(len, kinds[index]));
                }
            }
            let logits = model.forward(&mut batch, &mut ()).unwrap();
            for (&(index, start, len), logits) in steps.iter().zip(&logits) {
                let first = match kinds[index] {
                    LogitRows::All => start,
                    LogitRows::Last => start + len - 1,
                    LogitRows::None => start + len,
                };
                let expected = &alone[index].0[first * vocab..(start + len) * vocab];
                assert!(bits(expected) == bits(logits), "{name}: sequence {index} at {start}");
            }
        }
        for (sequence, alone) in sequences.iter().zip(&alone) {
            assert!(sequence.kv_bytes() == alone.1, "{name}");
        }
    }
}

#[test]
fn decode_steps_of_several_sequences_change_no_bit() {
    let model = golden_on(&golden_dir().join("llama-gqa-untied-f32"), EXACT, DEVICE).model;
    let vocab = model.config().vocab;
    // Three sequences are padded to four rows.
    let all: Vec<Vec<u32>> = (0..3).map(|seed| tokens(seed, 12 + seed, &model)).collect();
    let alone: Vec<_> = all.iter().map(|tokens| computed(&model, tokens, &[usize::MAX], 8)).collect();
    let mut sequences: Vec<Sequence> =
        all.iter().map(|tokens| Sequence::new(&model, 8, tokens, tokens.len())).collect();
    for (index, sequence) in sequences.iter_mut().enumerate() {
        sequence.run(&model, 4 + index, LogitRows::None);
    }
    for step in 0..8 {
        let mut batch: Vec<Chunk<'_>> =
            sequences.iter_mut().map(|sequence| sequence.chunk(1, LogitRows::Last)).collect();
        let logits = model.forward(&mut batch, &mut ()).unwrap();
        for (index, logits) in logits.iter().enumerate() {
            let row = 4 + index + step;
            assert!(bits(logits) == bits(&alone[index].0[row * vocab..(row + 1) * vocab]), "{index} at {row}");
        }
    }
    for (sequence, alone) in sequences.iter().zip(&alone) {
        assert!(sequence.kv_bytes() == alone.1);
    }
}

#[test]
fn pages_that_left_the_device_or_never_were_there_are_read_from_the_host() {
    let model = golden_on(&golden_dir().join("llama-gqa-untied-f32"), EXACT, DEVICE).model;
    let vocab = model.config().vocab;
    let own = [tokens(1, 40, &model), tokens(2, 40, &model)];
    let expected = own.clone().map(|tokens| computed(&model, &tokens, &[usize::MAX], 4));
    // Of twenty pages, the device has places for half.
    assert_eq!(model.reserve_pages(4, 10).unwrap(), 10);
    let mut sequences = own.clone().map(|tokens| Sequence::new(&model, 4, &tokens, 40));
    for start in (0..40).step_by(8) {
        for (sequence, expected) in sequences.iter_mut().zip(&expected) {
            let logits = sequence.run(&model, 8, LogitRows::All);
            assert!(bits(&logits) == bits(&expected.0[start * vocab..(start + 8) * vocab]), "at {start}");
        }
    }
    // Pages as they come from a store, the last of them partly filled.
    let mut received = sequences[0].copied(30);
    let logits = received.run(&model, 10, LogitRows::All);
    assert!(bits(&logits) == bits(&expected[0].0[30 * vocab..]));
    assert!(received.kv_bytes() == expected[0].1);
    // A page that the host changes is read again.
    let mut changed = sequences[0].copied(30);
    changed.run(&model, 1, LogitRows::None);
    let PageSlot::Open(page) = &mut changed.pages[7] else { panic!("the page is not full") };
    page.fill_with(|| 0.5);
    let logits = changed.run(&model, 9, LogitRows::All);
    assert!(bits(&logits) != bits(&expected[0].0[31 * vocab..]));
}

#[test]
fn passes_larger_than_the_memory_beside_the_pages_are_refused() {
    let model = golden_on(&golden_dir().join("llama-gqa-untied-f32"), EXACT, DEVICE).model;
    assert_eq!(model.reserve_pages(4, 10).unwrap(), 10);
    model.check_pass(4, 512, 64).unwrap();
    for (rows, logit_rows) in [(1 << 40, 64), (512, 1 << 40), (usize::MAX, usize::MAX)] {
        let error = model.check_pass(4, rows, logit_rows).unwrap_err().to_string();
        assert!(error.contains("--chunk-tokens") && error.contains("[LRD0411]"), "{error}");
    }
    // Passes work after the check, which drops their buffers.
    let tokens = tokens(1, 8, &model);
    let (logits, kv_bytes) = computed(&model, &tokens, &[usize::MAX], 4);
    model.check_pass(4, 512, 64).unwrap();
    let again = computed(&model, &tokens, &[usize::MAX], 4);
    assert!(bits(&again.0) == bits(&logits) && again.1 == kv_bytes);
    let staging = |rows| model.staging_bytes(4, rows, 64);
    assert!(staging(512) > 0 && staging(1 << 20) > staging(512));
    let cpu = golden(&golden_dir().join("llama-gqa-untied-f32"), EXACT).model;
    assert_eq!((cpu.staging_bytes(4, 512, 64), cpu.check_pass(4, usize::MAX, 64).is_ok()), (0, true));
}

#[test]
fn hooks_see_each_layer_once_with_its_keys_and_values() {
    struct Recorder(Vec<(usize, bool)>);
    impl LayerHooks for Recorder {
        fn layer_done(&mut self, layer: usize, batch: &[Chunk<'_>]) {
            let page = batch[0].pages[0].page();
            let bytes = page.geometry().page_bytes() / page.geometry().layers as usize;
            // The sequence fills the page, which held NaN before.
            self.0.push((layer, page.is_finite_in(layer * bytes..(layer + 1) * bytes)));
        }
    }
    let model = golden_on(&golden_dir().join("llama3-rope-tied-bf16"), EXACT, DEVICE).model;
    let mut sequence = Sequence::new(&model, 16, &tokens(3, 16, &model), 16);
    let mut recorder = Recorder(Vec::new());
    model.forward(&mut [sequence.chunk(16, LogitRows::None)], &mut recorder).unwrap();
    assert_eq!(recorder.0, [(0, true), (1, true), (2, true)]);
}

/// Products and attention round their operands to bf16, whose relative error is 2⁻⁹. The golden
/// logits come from f32 activations.
#[test]
fn tensor_cores_keep_the_bits_of_a_token_in_all_chunks_and_stay_close() {
    let variant = Variant { kv_dtype: KvDtype::Bf16, tensor: Some("kv_bf16"), tolerance: 5e-2, ..EXACT };
    let folder = golden_dir().join("llama3-rope-tied-bf16");
    let golden = golden_on(&folder, variant, DeviceChoice::EmulatedMma);
    assert_eq!(golden.model.kernels(), "emulated 1 mma 0.0");
    let vocab = golden.model.config().vocab;
    let tokens = [&golden.prompt[..], &golden.greedy[..golden.greedy.len() - 1]].concat();
    let whole = computed(&golden.model, &tokens, &[usize::MAX], 16);
    let row = |&row: &u32| &whole.0[row as usize * vocab..][..vocab];
    let rows = golden.rows.iter().map(row).collect::<Vec<_>>().concat();
    let difference = worst_difference(&rows, &golden.variant_logits, vocab);
    println!("on tensor cores: {difference:.1e}");
    assert!(difference < variant.tolerance, "{difference:e}");
    // Decode steps, and chunks whose tiles begin elsewhere.
    for (lens, page_tokens) in [(&[1][..], 16), (&[5, 1, 17, 3], 5)] {
        let other = computed(&golden.model, &tokens, lens, page_tokens);
        assert!(bits(&whole.0) == bits(&other.0) && whole.1 == other.1, "chunks of {lens:?}");
    }
    // Negative control: the plain kernels round elsewhere.
    let plain = computed(&golden_on(&folder, variant, DEVICE).model, &tokens, &[usize::MAX], 16);
    assert!(bits(&whole.0) != bits(&plain.0));
    // A model of f32 uses no tensor cores.
    let exact = golden_on(&golden_dir().join("llama-gqa-untied-f32"), variant, DeviceChoice::EmulatedMma);
    assert_eq!(exact.model.kernels(), "emulated 1");
}

#[test]
fn numerics_name_the_device() {
    let folder = golden_dir().join("llama-gqa-untied-f32");
    let (cpu, device) = (golden(&folder, EXACT).model, golden_on(&folder, EXACT, DEVICE).model);
    assert_eq!((cpu.kernels(), device.kernels()), (String::new(), "emulated 1".to_string()));
    assert_eq!((cpu.device(), device.device().map(|device| device.kind)), (None, Some("emulated")));
    let measured = numerics::measure(&device, 16).unwrap();
    assert_eq!(numerics::measure(&device, 16).unwrap(), measured);
    assert_ne!(numerics::measure(&cpu, 16).unwrap(), measured);
    assert_eq!((device.weight_bytes(), device.fingerprint()), (0, cpu.fingerprint()));
    assert_eq!(cpu.reserve_pages(16, 7).unwrap(), 7);
    assert_eq!(device.forward(&mut [], &mut ()).unwrap(), Vec::<Vec<f32>>::new());
}

#[test]
fn models_and_batches_without_kernels_are_refused() {
    let load = |name: &str, weights, device| {
        let options = LoadOptions { weights, device, ..LoadOptions::default() };
        Model::load_with(&golden_dir().join(name), &options, &|_, _| ())
    };
    let heads = load("llama-mha-bias", WeightFormat::Stored, DEVICE).unwrap_err().to_string();
    assert!(heads.contains("emulated") && heads.contains("head_dim") && heads.contains("[LRD0411]"), "{heads}");
    let q8 = load("mistral-f32", WeightFormat::Q8, DEVICE).unwrap_err().to_string();
    assert!(q8.contains("--weights stored") && q8.contains("[LRD0411]"), "{q8}");
    let fallback = load("llama-mha-bias", WeightFormat::Stored, DeviceChoice::Auto).unwrap();
    assert_eq!(fallback.device(), None);
    let absent = load("mistral-f32", WeightFormat::Stored, DeviceChoice::Cuda(1000)).unwrap_err().to_string();
    assert!(absent.contains("cuda:1000") && absent.contains("[LRD0411]"), "{absent}");

    let model = load("mistral-f32", WeightFormat::Stored, DEVICE).unwrap();
    let mut sequences = [16, 8].map(|page_tokens| Sequence::new(&model, page_tokens, &[1, 2, 3], 3));
    let mut batch: Vec<Chunk<'_>> = sequences.iter_mut().map(|sequence| sequence.chunk(3, LogitRows::Last)).collect();
    assert_eq!(model.forward(&mut batch, &mut ()), Err(ForwardError::Geometry { chunk: 1, page: 0 }));
}
