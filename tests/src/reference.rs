//! Reference answers: the bundled model runs alone in the test process.

use larder_model::{
    Activations, Chunk, KvPool, LoadOptions, LogitRows, Model, PageSlot, Sampler, SamplingParams, Tokenizer,
};
use std::path::PathBuf;

pub fn tiny_model_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../engine/models/larder-tiny")
}

/// The bundled model without engine, store or router. Tests compare completions with its output,
/// which no cache influences.
pub struct Reference {
    model: Model,
    pub tokenizer: Tokenizer,
}

impl Reference {
    pub fn load() -> Reference {
        let folder = tiny_model_dir();
        // As the processes under test do by default.
        let options = LoadOptions { activations: Activations::Narrow, ..LoadOptions::default() };
        let model = Model::load_with(&folder, &options, &|_, _| ()).expect("the bundled model loads");
        Reference { model, tokenizer: Tokenizer::load(&folder).expect("its tokenizer loads") }
    }

    /// Greedy continuation of `prompt`, exactly `count` tokens long, past any end-of-sequence
    /// token.
    pub fn greedy(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let geometry = self.model.geometry(64);
        let pages = (prompt.len() + count).div_ceil(64);
        let pool = KvPool::new(geometry, pages);
        let mut slots: Vec<PageSlot> =
            (0..pages).map(|_| PageSlot::Open(pool.allocate().expect("the pool holds the sequence"))).collect();
        let mut sampler = Sampler::new(&SamplingParams::default(), &[], &[]);
        let mut generated: Vec<u32> = Vec::new();
        let mut tokens = prompt.to_vec();
        let mut position = 0;
        while generated.len() < count {
            let chunk = Chunk { tokens: &tokens, position, pages: &mut slots, logits: LogitRows::Last };
            let logits = self.model.forward(&mut [chunk], &mut ()).expect("the sequence fits");
            position += tokens.len();
            generated.push(sampler.sample(&logits[0]));
            tokens = generated[generated.len() - 1..].to_vec();
        }
        generated
    }

    pub fn greedy_text(&self, prompt: &[u32], count: usize) -> String {
        self.tokenizer.decode(&self.greedy(prompt, count))
    }

    /// Prompt of exactly `count` tokens of plain text. Different seeds share no prefix pages.
    pub fn prompt(&self, seed: usize, count: usize) -> Vec<u32> {
        let text = "And it came to pass in those days, that there went out a decree, and the people heard it gladly; ";
        let text = format!("Chapter {seed}. {}", text.repeat(count / 8 + 1));
        let mut tokens = self.tokenizer.encode(&text, false).expect("plain text");
        tokens.truncate(count);
        assert_eq!(tokens.len(), count, "the text is long enough");
        tokens
    }
}
