//! Measures the speed of a model folder and of this machine: `cargo run --release -p larder-model
//! --example measure -- [FOLDER [PROMPT_TOKENS]]`.
//!
//! Decode is bound by the bandwidth of memory: every token reads all weights. So the program also
//! measures how fast this machine reads memory, in the same run, and prints the ratio.

use larder_kernels::cpu::argmax;
use larder_model::{Chunk, KvPool, LogitRows, Model, PageSlot};
use rayon::prelude::*;
use std::path::Path;
use std::time::{Duration, Instant};

/// Measurements per figure. Printed are the median, the lowest and the highest.
const REPEATS: usize = 5;
/// Decode steps per measurement.
const STEPS: usize = 12;
/// Prompt tokens per forward pass, as in an engine.
const CHUNK: usize = 256;
/// Buffer for the bandwidth, far larger than any cache.
const READ_BYTES: usize = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
    let dir = std::env::args().nth(1).map_or(default, Into::into);
    let prompt: usize = std::env::args().nth(2).map_or(Ok(1024), |text| text.parse())?;
    let started = Instant::now();
    let model = Model::load(&dir)?;
    println!("load: {:.1?}; {} threads", started.elapsed(), rayon::current_num_threads());
    println!("resident memory: {:.2} GB", resident_bytes()? / 1e9);
    let buffer: Vec<u64> = (0..READ_BYTES as u64 / 8).into_par_iter().collect();
    let bandwidth = figure((0..REPEATS).map(|_| READ_BYTES as f64 / read_all(&buffer).as_secs_f64() / 1e9).collect());
    drop(buffer);
    println!("memory reads: {bandwidth} GB/s");
    let speeds = (0..REPEATS).map(|_| prompt as f64 / prefill(&model, prompt).as_secs_f64()).collect();
    println!("prefill of {prompt} tokens: {} tokens/s", figure(speeds));
    let bytes = model_bytes(&dir)?;
    let mut alone = 0.0;
    for sequences in [1, 4, 8] {
        let speed = figure(decode(&model, prompt, sequences));
        println!("decode after {prompt} tokens, {sequences} together: {speed} tokens/s");
        if sequences == 1 {
            alone = speed.median;
        }
    }
    let bound = bandwidth.median * 1e9 / bytes;
    println!(
        "bytes per token: {:.3} GB as stored; memory allows {bound:.1} tokens/s; decode reaches {:.2} of that",
        bytes / 1e9,
        alone / bound
    );
    Ok(())
}

struct Figure {
    median: f64,
    lowest: f64,
    highest: f64,
}

impl std::fmt::Display for Figure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2} to {:.2})", self.median, self.lowest, self.highest)
    }
}

fn figure(mut values: Vec<f64>) -> Figure {
    values.sort_by(f64::total_cmp);
    Figure { median: values[values.len() / 2], lowest: values[0], highest: values[values.len() - 1] }
}

/// Bytes of the weights as stored. A token of decode reads all of them once. With tied embeddings,
/// the file holds no weight that a token leaves unread.
fn model_bytes(dir: &Path) -> std::io::Result<f64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == "safetensors") {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes as f64)
}

/// Memory of this process without mapped files.
fn resident_bytes() -> Result<f64, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}

fn read_all(buffer: &[u64]) -> Duration {
    let started = Instant::now();
    // One long piece per thread: memory likes few streams.
    let piece = buffer.len().div_ceil(rayon::current_num_threads());
    let sum: u64 = buffer.par_chunks(piece).map(|part| part.iter().fold(0u64, |sum, x| sum.wrapping_add(*x))).sum();
    std::hint::black_box(sum);
    started.elapsed()
}

fn tokens(model: &Model, count: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 7919 + seed * 131) % model.config().vocab) as u32).collect()
}

fn pages(model: &Model, tokens: usize) -> Vec<PageSlot> {
    let count = tokens.div_ceil(16);
    let pool = KvPool::new(model.geometry(16), count);
    (0..count).filter_map(|_| pool.allocate()).map(PageSlot::Open).collect()
}

fn prefill_into(model: &Model, tokens: &[u32], pages: &mut [PageSlot]) -> Vec<f32> {
    let mut logits = Vec::new();
    for (index, part) in tokens.chunks(CHUNK).enumerate() {
        let chunk = Chunk { tokens: part, position: index * CHUNK, pages, logits: LogitRows::Last };
        logits = model.forward(&mut [chunk], &mut ()).expect("the chunk keeps the rules").remove(0);
    }
    logits
}

fn prefill(model: &Model, count: usize) -> Duration {
    let mut pages = pages(model, count);
    let tokens = tokens(model, count, 1);
    let started = Instant::now();
    prefill_into(model, &tokens, &mut pages);
    started.elapsed()
}

/// Tokens per second of all sequences together, once per repetition.
fn decode(model: &Model, context: usize, sequences: usize) -> Vec<f64> {
    let mut state: Vec<_> = (0..sequences)
        .map(|s| {
            let mut pages = pages(model, context + REPEATS * STEPS);
            let logits = prefill_into(model, &tokens(model, context, s), &mut pages);
            (pages, [argmax(&logits)])
        })
        .collect();
    let mut speeds = Vec::new();
    for repeat in 0..REPEATS {
        let started = Instant::now();
        for step in repeat * STEPS..(repeat + 1) * STEPS {
            let mut batch: Vec<Chunk<'_>> = state
                .iter_mut()
                .map(|(pages, token)| Chunk { tokens: token, position: context + step, pages, logits: LogitRows::Last })
                .collect();
            let logits = model.forward(&mut batch, &mut ()).expect("the chunks keep the rules");
            drop(batch);
            for ((_, token), logits) in state.iter_mut().zip(&logits) {
                *token = [argmax(logits)];
            }
        }
        speeds.push((STEPS * sequences) as f64 / started.elapsed().as_secs_f64());
    }
    speeds
}
