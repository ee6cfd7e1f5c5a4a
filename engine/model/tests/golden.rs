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

use larder_format::KvDtype;
use larder_kernels::cpu::argmax;
use larder_model::{Chunk, KvPool, LoadOptions, LogitRows, Model, PageSlot, WeightFormat};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tolerance for keys and values in f32, where no rounding can differ.
const TOLERANCE: f32 = 1e-5;

/// A way to load a model.
#[derive(Clone, Copy)]
struct Variant {
    kv_dtype: KvDtype,
    weights: WeightFormat,
    /// Tensor of `golden.safetensors` with its logits at some positions.
    tensor: Option<&'static str>,
    tolerance: f32,
}

impl Variant {
    fn options(&self) -> LoadOptions {
        LoadOptions { kv_dtype: Some(self.kv_dtype), weights: self.weights }
    }
}

const EXACT: Variant =
    Variant { kv_dtype: KvDtype::F32, weights: WeightFormat::Stored, tensor: None, tolerance: TOLERANCE };

/// All ways. With keys and values of 16 bits, the last bit of an f32 may decide a rounding.
const VARIANTS: [Variant; 5] = [
    EXACT,
    Variant { kv_dtype: KvDtype::F16, tensor: Some("kv_f16"), tolerance: 2e-3, ..EXACT },
    Variant { kv_dtype: KvDtype::Bf16, tensor: Some("kv_bf16"), tolerance: 4e-3, ..EXACT },
    Variant { weights: WeightFormat::Q8, tensor: Some("q8"), ..EXACT },
    Variant { kv_dtype: KvDtype::Bf16, weights: WeightFormat::Q8, tensor: Some("q8_kv_bf16"), tolerance: 4e-3 },
];

fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

struct Golden {
    name: String,
    model: Model,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    logits: Vec<f32>,
    last_logits: Vec<f32>,
    /// Positions at which `variant_logits` holds the logits of the variant.
    rows: Vec<u32>,
    variant_logits: Vec<f32>,
}

fn goldens(variant: Variant) -> Vec<Golden> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(golden_dir()).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.retain(|dir| dir.join("golden.safetensors").is_file());
    dirs.sort();
    assert!(dirs.len() >= 6, "golden models are missing: {dirs:?}");
    dirs.iter().map(|dir| golden(dir, variant)).collect()
}

fn golden(dir: &Path, variant: Variant) -> Golden {
    let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = |name: &str| file.tensor(name).unwrap().data();
    let floats = |name: &str| data(name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let tokens = |name| data(name).as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
    Golden {
        name: dir.file_name().unwrap().to_string_lossy().into_owned(),
        model: Model::load_with(dir, &variant.options(), &|_, _| ()).unwrap(),
        prompt: tokens("prompt"),
        greedy: tokens("greedy"),
        logits: floats("logits"),
        last_logits: floats("last_logits"),
        rows: tokens("rows"),
        variant_logits: variant.tensor.map(floats).unwrap_or_default(),
    }
}

struct Sequence {
    pages: Vec<PageSlot>,
    page_tokens: usize,
    tokens: Vec<u32>,
    computed: usize,
}

impl Sequence {
    fn new(model: &Model, page_tokens: u32, tokens: &[u32], room: usize) -> Sequence {
        let count = room.div_ceil(page_tokens as usize);
        let pool: Arc<KvPool> = KvPool::new(model.geometry(page_tokens), count);
        let page = || {
            let mut page = pool.allocate().unwrap();
            // NaN makes a read of a slot that was not computed visible in the result.
            page.fill_with(|| f32::NAN);
            PageSlot::Open(page)
        };
        let pages = (0..count).map(|_| page()).collect();
        Sequence { pages, page_tokens: page_tokens as usize, tokens: tokens.to_vec(), computed: 0 }
    }

    fn chunk(&mut self, len: usize, logits: LogitRows) -> Chunk<'_> {
        let position = self.computed;
        self.computed += len;
        // An engine seals pages once they are full.
        for slot in &mut self.pages[..position / self.page_tokens] {
            if let PageSlot::Open(_) = slot {
                let filler = KvPool::new(*slot.page().geometry(), 1).allocate().unwrap();
                let full = std::mem::replace(slot, PageSlot::Open(filler));
                *slot = full.seal();
            }
        }
        Chunk { tokens: &self.tokens[position..position + len], position, pages: &mut self.pages, logits }
    }

    fn run(&mut self, model: &Model, len: usize, logits: LogitRows) -> Vec<f32> {
        model.forward(&mut [self.chunk(len, logits)], &mut ()).unwrap().remove(0)
    }

    /// Returns the bytes of the keys and values computed so far, token by token.
    fn kv_bytes(&self) -> Vec<u8> {
        let geometry = *self.pages[0].page().geometry();
        let width = (geometry.kv_heads * geometry.head_dim) as usize * geometry.dtype.bytes();
        let mut bytes = Vec::new();
        for position in 0..self.computed {
            let page: &[u8] = self.pages[position / self.page_tokens].page().as_ref();
            for block in 0..2 * geometry.layers as usize {
                let start = (block * self.page_tokens + position % self.page_tokens) * width;
                bytes.extend_from_slice(&page[start..start + width]);
            }
        }
        bytes
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Largest difference, relative to the largest absolute logit of its row.
fn worst_difference(found: &[f32], expected: &[f32], vocab: usize) -> f32 {
    assert_eq!(found.len(), expected.len());
    let of_row = |(found, expected): (&[f32], &[f32])| {
        let scale = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        found.iter().zip(expected).fold(0.0f32, |worst, (a, b)| {
            let difference = (a - b).abs() / scale;
            if difference.is_nan() { f32::INFINITY } else { worst.max(difference) }
        })
    };
    found.chunks(vocab).zip(expected.chunks(vocab)).map(of_row).fold(0.0, f32::max)
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
