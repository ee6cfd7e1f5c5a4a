//! Measures the memory of a tokenizer, for the plans of routers and engines:
//! `cargo run --release -p larder-model --example tokenizer_memory [-- TOKENIZER_JSON]`.
//!
//! Without a file it takes vocabularies with the most entries per byte: of the shortest tokens, and
//! of the shortest merges in both notations. Each is measured in a process of its own, because the
//! allocator keeps memory that was in use.

use larder_model::Tokenizer;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::process::Command;

const VOCAB: usize = 1_000_000;
const LETTERS: usize = 26;
/// Longest text that a router tokenises.
const TEXT_BYTES: usize = 4 << 20;
/// Longest word in the cache of a tokenizer.
const LONG_WORD_BYTES: usize = 255;

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(path) = std::env::args().nth(1) {
        return measure(&std::fs::read(path)?);
    }
    let merges = |left: &str, right: &str| json!(format!("{left} {right}"));
    let pairs = |left: &str, right: &str| json!([left, right]);
    for (name, file) in
        [("tokens", shortest_tokens()?), ("merges", shortest_merges(merges)?), ("pairs", shortest_merges(pairs)?)]
    {
        println!("{name}:");
        let path = std::env::temp_dir().join(format!("larder-{name}-{}.json", std::process::id()));
        std::fs::write(&path, file)?;
        let status = Command::new(std::env::current_exe()?).arg(&path).status();
        std::fs::remove_file(&path)?;
        let status = status?;
        if !status.success() {
            return Err(format!("{name}: {status}").into());
        }
    }
    Ok(())
}

fn measure(file: &[u8]) -> Result<(), Box<dyn Error>> {
    let file_bytes = file.len() as f64;
    let files = BTreeMap::from([("tokenizer.json".to_string(), file.to_vec())]);
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

/// Shortest words of letters.
fn shortest_words(count: usize) -> impl Iterator<Item = String> {
    let lengths = (1..).flat_map(|letters| (0..LETTERS.pow(letters)).map(move |number| (letters, number)));
    lengths.take(count).map(|(letters, number)| {
        let letter = |place: u32| char::from(b'a' + (number / LETTERS.pow(place) % LETTERS) as u8);
        (0..letters).map(letter).collect()
    })
}

/// Tokenizer of all words of up to four letters, and of some of five.
fn shortest_tokens() -> Result<Vec<u8>, Box<dyn Error>> {
    file(shortest_words(VOCAB), Vec::new())
}

/// Tokenizer of words of up to four letters, with all merges that make them.
fn shortest_merges(write: fn(&str, &str) -> Value) -> Result<Vec<u8>, Box<dyn Error>> {
    let words: Vec<String> = shortest_words(VOCAB / 4).collect();
    let merges = words.iter().flat_map(|word| (1..word.len()).map(move |at| word.split_at(at)));
    let merges = merges.map(|(left, right)| write(left, right)).collect();
    file(words.into_iter(), merges)
}

fn file(words: impl Iterator<Item = String>, merges: Vec<Value>) -> Result<Vec<u8>, Box<dyn Error>> {
    let vocab: Map<String, Value> = words.zip((0..).map(Value::from)).collect();
    let file = json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges}
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
