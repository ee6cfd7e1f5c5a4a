//! Measures the speed of a model folder and of this machine. Run it with `cargo run --release -p
//! larder-model --example measure -- [FOLDER] [OPTIONS]`. The options are `--prompt TOKENS`,
//! `--repeats N`, `--steps N`, `--sequences N,N`, `--q8`, `--activations f32` and `--json`.
//!
//! Decode is bound by the bandwidth of memory: every token reads all weights, and the keys and
//! values of all tokens before it. So the program also measures how fast this machine reads memory,
//! before and after each measurement of decode. On a shared machine this speed changes from second
//! to second, so each ratio has its own.

use larder_kernels::cpu::argmax;
use larder_model::{Activations, Chunk, KvPool, LoadOptions, LogitRows, Model, PageSlot, WeightFormat, numerics};
use rayon::prelude::*;
use serde_json::json;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Prompt tokens per forward pass, as in an engine.
const CHUNK: usize = 256;
/// Buffer for the bandwidth, far larger than any cache.
const READ_BYTES: usize = 1 << 30;

struct Arguments {
    folder: PathBuf,
    prompt: usize,
    /// Measurements per figure. Printed are the median, the lowest and the highest.
    repeats: usize,
    /// Decode steps per measurement.
    steps: usize,
    /// Numbers of sequences that decode together.
    sequences: Vec<usize>,
    weights: WeightFormat,
    activations: Activations,
    is_json: bool,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let mut found = Arguments {
        folder: Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny"),
        prompt: 1024,
        repeats: 5,
        steps: 12,
        sequences: vec![1, 4, 8],
        weights: WeightFormat::Stored,
        activations: Activations::Narrow,
        is_json: false,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--prompt" => found.prompt = value()?.parse()?,
            "--repeats" => found.repeats = value()?.parse()?,
            "--steps" => found.steps = value()?.parse()?,
            "--sequences" => found.sequences = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--q8" => found.weights = WeightFormat::Q8,
            "--activations" if value()? == "f32" => found.activations = Activations::F32,
            "--json" => found.is_json = true,
            _ if argument.starts_with('-') => return Err(format!("{argument} is unknown").into()),
            _ => found.folder = argument.into(),
        }
    }
    Ok(found)
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { folder, prompt, repeats, steps, sequences, weights, activations, is_json } = arguments()?;
    let started = Instant::now();
    let model = Model::load_with(&folder, &LoadOptions { weights, activations, ..LoadOptions::default() }, &|_, _| ())?;
    let threads = rayon::current_num_threads();
    println!("load: {:.1?}; {threads} threads; activations in {}", started.elapsed(), model.activations());
    let resident = resident_bytes()?;
    println!("resident memory: {:.2} GB", resident / 1e9);
    let started = Instant::now();
    let name = numerics::measure(&model, 16)?;
    let probe = started.elapsed();
    println!("probe of the numerics: {probe:.1?}, {name}");
    let buffer: Vec<u64> = (0..READ_BYTES as u64 / 8).into_par_iter().collect();
    let speeds = (0..repeats).map(|_| prompt as f64 / prefill(&model, prompt).as_secs_f64()).collect();
    let prefill = figure(speeds);
    println!("prefill of {prompt} tokens: {prefill} tokens/s");
    let weight_bytes = weight_bytes(&folder, weights)?;
    let kv_bytes = kv_bytes(&model, prompt + repeats * steps / 2);
    let mut figures = json!({
        "prefill": prefill.median, "weight_bytes": weight_bytes, "kv_bytes": kv_bytes, "resident_bytes": resident,
        "probe_seconds": probe.as_secs_f64(),
    });
    for count in sequences {
        let measured = decode(&model, prompt, count, (repeats, steps), &buffer);
        let speed = figure(measured.iter().map(|(speed, _)| *speed).collect());
        println!("decode after {prompt} tokens, {count} together: {speed} tokens/s");
        if count == 1 {
            let bandwidth = figure(measured.iter().map(|(_, bandwidth)| bandwidth / 1e9).collect());
            let bytes = weight_bytes + kv_bytes;
            let share = figure(measured.iter().map(|(speed, bandwidth)| speed * bytes / bandwidth).collect());
            let (weights, kv) = (weight_bytes / 1e9, kv_bytes / 1e9);
            println!("memory reads: {bandwidth} GB/s; a token reads {weights:.3} GB of weights, {kv:.3} GB of KV");
            println!("decode reaches {share} of the speed of memory");
            figures["decode"] = speed.median.into();
            figures["bandwidth"] = (bandwidth.median * 1e9).into();
            figures["share_of_bandwidth"] = share.median.into();
        }
    }
    if is_json {
        println!("{figures}");
    }
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

/// Bytes of the weights in memory. A token of decode reads all of them once. With tied embeddings,
/// the file holds no weight that a token leaves unread.
fn weight_bytes(folder: &Path, weights: WeightFormat) -> std::io::Result<f64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == "safetensors") {
            bytes += entry.metadata()?.len();
        }
    }
    // Weights of 16 bits in the file; 34 bytes for each 32 of them in memory.
    let share = if weights == WeightFormat::Q8 { 34.0 / 64.0 } else { 1.0 };
    Ok(bytes as f64 * share)
}

/// Bytes of the keys and values that a token reads after `context` others.
fn kv_bytes(model: &Model, context: usize) -> f64 {
    model.geometry(1).page_bytes() as f64 * context as f64
}

/// Memory of this process without mapped files.
fn resident_bytes() -> Result<f64, Box<dyn Error>> {
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

/// Tokens per second of all sequences together, and the bytes per second that memory delivers
/// around them, once per repetition.
fn decode(
    model: &Model,
    context: usize,
    sequences: usize,
    (repeats, steps): (usize, usize),
    buffer: &[u64],
) -> Vec<(f64, f64)> {
    let mut state: Vec<_> = (0..sequences)
        .map(|s| {
            let mut pages = pages(model, context + repeats * steps);
            let logits = prefill_into(model, &tokens(model, context, s), &mut pages);
            (pages, [argmax(&logits)])
        })
        .collect();
    let mut speeds = Vec::new();
    for repeat in 0..repeats {
        let before = read_all(buffer);
        let started = Instant::now();
        for step in repeat * steps..(repeat + 1) * steps {
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
        let speed = (steps * sequences) as f64 / started.elapsed().as_secs_f64();
        speeds.push((speed, 2.0 * size_of_val(buffer) as f64 / (before + read_all(buffer)).as_secs_f64()));
    }
    speeds
}
