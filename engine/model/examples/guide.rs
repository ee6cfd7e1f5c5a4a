//! Measures constraints with a vocabulary of 150,000 tokens:
//! `cargo run --release -p larder-model --example guide`.

use larder_model::{Constraint, Guide, GuideFactory, Tokenizer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use std::error::Error;
use std::time::{Duration, Instant};

const VOCAB: usize = 150_000;
const SEQUENCES: u64 = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let tokenizer = tokenizer()?;
    let before = resident_mib();
    let begin = Instant::now();
    let factory = GuideFactory::new(&tokenizer, VOCAB, &[])?;
    println!("trie: {:?}, {} MiB", begin.elapsed(), resident_mib() - before);
    let names: Vec<String> = (0..40).map(|at| format!("field_{at}")).collect();
    let field = |at: usize| match at % 4 {
        0 => json!({"type": "string", "maxLength": 40}),
        1 => json!({"type": "integer", "minimum": 0, "maximum": 100_000}),
        2 => json!({"enum": ["low", "middle", "high"]}),
        _ => json!({"type": "array", "items": {"type": "number"}, "maxItems": 4}),
    };
    let fields: Map<String, Value> = names.iter().enumerate().map(|(at, name)| (name.clone(), field(at))).collect();
    let schema = json!({"type": "object", "properties": fields, "required": names, "additionalProperties": false});
    for (name, constraint) in [
        ("object of 40 fields", Constraint::JsonSchema(schema.to_string())),
        ("any object", Constraint::JsonObject),
        ("expression", Constraint::Regex("[A-Z][a-z]{1,20}( [a-z]{1,12}){0,30}\\.".into())),
    ] {
        measure(name, &factory, &constraint)?;
    }
    println!("all: {} MiB", resident_mib() - before);
    Ok(())
}

fn measure(name: &str, factory: &GuideFactory, constraint: &Constraint) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let first = factory.compile(constraint)?;
    let compiled = begin.elapsed();
    let begin = Instant::now();
    drop(first.clone());
    let cloned = begin.elapsed();
    let mut steps = Vec::new();
    let mut kept = Vec::new();
    let before = resident_mib();
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for _ in 0..SEQUENCES {
        let mut guide = first.clone();
        while !guide.has_ended() && steps.len() < 20_000 {
            let mut logits = vec![0.0; VOCAB];
            let begin = Instant::now();
            let allowed = guide.allowed()?;
            if !allowed.restrict(&mut logits) {
                break;
            }
            let allowed: Vec<u32> = (0..).zip(&logits).filter(|(_, logit)| **logit == 0.0).map(|(id, _)| id).collect();
            let masked = begin.elapsed();
            let begin = Instant::now();
            guide.accept(allowed[random.random_range(0..allowed.len())])?;
            steps.push(masked + begin.elapsed());
        }
        kept.push(guide);
    }
    let resident = resident_mib().saturating_sub(before);
    let estimated = kept.iter().map(Guide::bytes).sum::<usize>() >> 20;
    println!("{name}: {} guides take {resident} MiB, and are charged for {estimated} MiB", kept.len());
    steps.sort_unstable();
    let mean = steps.iter().sum::<Duration>() / steps.len() as u32;
    println!(
        "{name}: compiled in {compiled:?}, cloned in {cloned:?}; {} steps: mean {mean:?}, 99% {:?}, longest {:?}",
        steps.len(),
        steps[steps.len() * 99 / 100],
        steps[steps.len() - 1]
    );
    Ok(())
}

/// Tokenizer of all printable bytes and of random words.
fn tokenizer() -> Result<Tokenizer, Box<dyn Error>> {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut vocab: Map<String, Value> =
        ('!'..='~').map(|letter| letter.to_string()).zip((0..).map(Value::from)).collect();
    while vocab.len() < VOCAB {
        let letters = random.random_range(1..10);
        let letters: String = (0..letters).map(|_| char::from(random.random_range(b'a'..=b'z'))).collect();
        // The letter for a blank in byte-level vocabularies.
        let word = if random.random() { format!("\u{120}{letters}") } else { letters };
        let id = vocab.len();
        vocab.entry(word).or_insert(json!(id));
    }
    let file = json!({
        "version": "1.0",
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "!"}
    });
    Ok(Tokenizer::from_files(&[("tokenizer.json".to_string(), serde_json::to_vec(&file)?)].into())?)
}

fn resident_mib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    (pages.unwrap_or_default() * 4096) >> 20
}
