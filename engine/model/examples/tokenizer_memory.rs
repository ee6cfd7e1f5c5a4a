//! Measures the memory of a tokenizer, for the plans of routers and engines:
//! `cargo run --release -p larder-model --example tokenizer_memory [-- TOKENIZER_JSON]`.
//!
//! Without a file it takes a vocabulary of the shortest tokens, which has the most entries per
//! byte.

use larder_model::Tokenizer;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::error::Error;

const VOCAB: usize = 1_000_000;
const LETTERS: usize = 26;
/// Longest text that a router tokenises.
const TEXT_BYTES: usize = 4 << 20;
/// Longest word in the cache of a tokenizer.
const LONG_WORD_BYTES: usize = 255;

fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args().nth(1).map_or_else(shortest_tokens, |path| Ok(std::fs::read(path)?))?;
    let file_bytes = file.len() as f64;
    let files = BTreeMap::from([("tokenizer.json".to_string(), file)]);
    let before = memory("VmRSS")?;
    reset_peak()?;
    let tokenizer = Tokenizer::from_untrusted_files(&files)?;
    let (kept, peak) = (memory("VmRSS")? - before, memory("VmHWM")? - before);
    println!("a file of {:.1} MiB:", file_bytes / f64::from(1 << 20));
    println!("  {:.1} bytes per byte, {:.1} while it is built", kept / file_bytes, peak / file_bytes);
    for (name, word_bytes) in [("short words", 7), ("long words", LONG_WORD_BYTES)] {
        let text = text(word_bytes);
        let before = memory("VmRSS")?;
        reset_peak()?;
        let tokens = tokenizer.encode(&text, false)?.len();
        let (kept, peak) = (memory("VmRSS")? - before, memory("VmHWM")? - before);
        let (per_byte, kept) = (peak / text.len() as f64, kept / f64::from(1 << 20));
        println!("a text of {name}: {tokens} tokens, {per_byte:.0} bytes per byte, {kept:.1} MiB stay");
    }
    Ok(())
}

/// Tokenizer of all words of up to four letters, and of some of five.
fn shortest_tokens() -> Result<Vec<u8>, Box<dyn Error>> {
    let mut vocab = Map::new();
    let lengths = (1..).flat_map(|letters| (0..LETTERS.pow(letters)).map(move |number| (letters, number)));
    for (id, (letters, number)) in lengths.take(VOCAB).enumerate() {
        let letter = |place: u32| char::from(b'a' + (number / LETTERS.pow(place) % LETTERS) as u8);
        vocab.insert((0..letters).map(letter).collect(), Value::from(id));
    }
    let file = json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    });
    Ok(serde_json::to_vec(&file)?)
}

/// Text of random words, almost all different.
fn text(word_bytes: usize) -> String {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let letter = |at: usize| match at % (word_bytes + 1) {
        0 => ' ',
        _ => char::from(random.random_range(b'a'..=b'z')),
    };
    (0..TEXT_BYTES).map(letter).collect()
}

/// Resident memory of this process, or its peak, in bytes.
fn memory(name: &str) -> Result<f64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).ok_or("no such line")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024.0)
}

/// Sets the peak to the present value.
fn reset_peak() -> Result<(), Box<dyn Error>> {
    Ok(std::fs::write("/proc/self/clear_refs", "5")?)
}
