//! Measures prefill and decode times of a model folder: `cargo run --release -p larder-model
//! --example measure -- [FOLDER]`.

use larder_kernels::cpu::argmax;
use larder_model::{Chunk, KvPool, LogitRows, Model, PageSlot};
use std::path::Path;
use std::time::{Duration, Instant};

const REPEATS: usize = 15;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
    let dir = std::env::args().nth(1).map_or(default, Into::into);
    let started = Instant::now();
    let model = Model::load(&dir)?;
    println!("load: {:.1?}; {} threads", started.elapsed(), rayon::current_num_threads());
    for tokens in [100, 1000] {
        for chunk in [tokens, 256] {
            let times = (0..REPEATS).map(|_| prefill(&model, tokens, chunk)).collect();
            println!("prefill of {tokens} tokens in chunks of {chunk}: {}", summary(times));
        }
    }
    for (context, sequences) in [(100, 1), (1000, 1), (1000, 8)] {
        println!(
            "decode after {context} tokens, {sequences} together: {}",
            summary(decode(&model, context, sequences))
        );
    }
    Ok(())
}

fn summary(mut times: Vec<Duration>) -> String {
    times.sort();
    format!("median {:.2?}, best {:.2?}", times[times.len() / 2], times[0])
}

fn tokens(model: &Model, count: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 7919 + seed * 131) % model.config().vocab) as u32).collect()
}

fn pages(model: &Model, tokens: usize) -> Vec<PageSlot> {
    let count = tokens.div_ceil(16);
    let pool = KvPool::new(model.geometry(16), count);
    (0..count).filter_map(|_| pool.allocate()).map(PageSlot::Open).collect()
}

fn prefill_into(model: &Model, tokens: &[u32], chunk: usize, pages: &mut [PageSlot]) -> Vec<f32> {
    let mut logits = Vec::new();
    for (index, part) in tokens.chunks(chunk).enumerate() {
        let chunk = Chunk { tokens: part, position: index * chunk, pages, logits: LogitRows::Last };
        logits = model.forward(&mut [chunk], &mut ()).expect("the chunk keeps the rules").remove(0);
    }
    logits
}

fn prefill(model: &Model, count: usize, chunk: usize) -> Duration {
    let mut pages = pages(model, count);
    let tokens = tokens(model, count, 1);
    let started = Instant::now();
    prefill_into(model, &tokens, chunk, &mut pages);
    started.elapsed()
}

fn decode(model: &Model, context: usize, sequences: usize) -> Vec<Duration> {
    const STEPS: usize = 50;
    let mut state: Vec<_> = (0..sequences)
        .map(|s| {
            let mut pages = pages(model, context + STEPS);
            let logits = prefill_into(model, &tokens(model, context, s), 256, &mut pages);
            (pages, [argmax(&logits)])
        })
        .collect();
    let mut times = Vec::new();
    for step in 0..STEPS {
        let started = Instant::now();
        let mut batch: Vec<Chunk<'_>> = state
            .iter_mut()
            .map(|(pages, token)| Chunk { tokens: token, position: context + step, pages, logits: LogitRows::Last })
            .collect();
        let logits = model.forward(&mut batch, &mut ()).expect("the chunks keep the rules");
        times.push(started.elapsed());
        drop(batch);
        for ((_, token), logits) in state.iter_mut().zip(&logits) {
            *token = [argmax(logits)];
        }
    }
    times
}
