//! The forward pass against Hugging Face transformers, and against itself.
//!
//! Every folder of `tests/golden` with a `golden.safetensors` is a small random model. The file
//! holds the logits and the greedy continuation that transformers computes.
//! - Tolerance: each logit within 1e-5 of the largest absolute logit of its row.
//! - One chunk, uneven chunks and single tokens must agree in every bit.

use larder_kernels::cpu::argmax;
use larder_model::{Chunk, KvPool, LogitRows, Model, PageSlot};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Relative to the largest absolute logit of the row.
const TOLERANCE: f32 = 1e-5;

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
}

fn goldens() -> Vec<Golden> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(golden_dir()).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.retain(|dir| dir.join("golden.safetensors").is_file());
    dirs.sort();
    assert!(dirs.len() >= 6, "golden models are missing: {dirs:?}");
    dirs.iter().map(|dir| golden(dir)).collect()
}

fn golden(dir: &Path) -> Golden {
    let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = |name: &str| file.tensor(name).unwrap().data();
    let floats = |name| data(name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let tokens = |name| data(name).as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
    Golden {
        name: dir.file_name().unwrap().to_string_lossy().into_owned(),
        model: Model::load(dir).unwrap(),
        prompt: tokens("prompt"),
        greedy: tokens("greedy"),
        logits: floats("logits"),
        last_logits: floats("last_logits"),
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
            page.as_f32_mut().fill(f32::NAN);
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

    /// Returns the bits of the keys and values computed so far, token by token.
    fn kv_bits(&self) -> Vec<u32> {
        let geometry = *self.pages[0].page().geometry();
        let width = (geometry.kv_heads * geometry.head_dim) as usize;
        let mut bits = Vec::new();
        for position in 0..self.computed {
            let page = self.pages[position / self.page_tokens].page().as_f32();
            for block in 0..2 * geometry.layers as usize {
                let start = (block * self.page_tokens + position % self.page_tokens) * width;
                bits.extend(page[start..start + width].iter().map(|x| x.to_bits()));
            }
        }
        bits
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
fn logits_in_chunks(golden: &Golden, lens: &[usize], page_tokens: u32) -> (Vec<f32>, Vec<u32>) {
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
    (logits, sequence.kv_bits())
}

#[test]
fn logits_agree_with_transformers_for_every_chunking() {
    for golden in goldens() {
        let vocab = golden.model.config().vocab;
        let (logits, kv) = logits_in_chunks(&golden, &[usize::MAX], 16);
        let prompt = worst_difference(&logits[..golden.prompt.len() * vocab], &golden.logits, vocab);
        let last = worst_difference(&logits[logits.len() - vocab..], &golden.last_logits, vocab);
        println!("{}: largest difference {prompt:.1e} in the prompt, {last:.1e} in the last row", golden.name);
        assert!(prompt < TOLERANCE && last < TOLERANCE, "{}: {prompt:e} {last:e}", golden.name);
        for (lens, page_tokens) in [(&[1][..], 16), (&[5, 1, 17, 3], 16), (&[40, 64], 5), (&[7], 64)] {
            let (other_logits, other_kv) = logits_in_chunks(&golden, lens, page_tokens);
            assert!(bits(&logits) == bits(&other_logits), "{}: logits in chunks of {lens:?}", golden.name);
            assert!(kv == other_kv, "{}: keys and values in chunks of {lens:?}", golden.name);
        }
    }
}

#[test]
fn greedy_tokens_equal_those_of_transformers() {
    for mut golden in goldens() {
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
    for golden in goldens() {
        let (model, vocab) = (&golden.model, golden.model.config().vocab as u32);
        let lens = [48, 1, 96, 70, 2];
        let tokens: Vec<Vec<u32>> =
            (0..5).map(|s| (0..lens[s as usize]).map(|i| (i * 37 + s * 11) as u32 % vocab).collect()).collect();
        let alone: Vec<_> = tokens
            .iter()
            .map(|tokens| {
                let mut sequence = Sequence::new(model, 16, tokens, tokens.len());
                (sequence.run(model, tokens.len(), LogitRows::All), sequence.kv_bits())
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
            assert!(sequence.kv_bits() == alone.1, "{}", golden.name);
        }
    }
}

#[test]
fn thread_count_changes_no_bit() {
    let golden = golden(&golden_dir().join("llama-gqa-untied-f32"));
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
