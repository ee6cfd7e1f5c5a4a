//! What the answer must be: the model, alone, in this process.

use larder_model::{Chunk, KvPool, LogitRows, Model, PageSlot, Sampler, SamplingParams, Tokenizer};
use std::path::PathBuf;

/// Folder of the bundled model.
pub fn tiny_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../engine/models/larder-tiny")
}

/// The bundled model, computed without engine, store or router.
pub struct Reference {
    model: Model,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
}

impl Reference {
    /// Loads it.
    pub fn load() -> Reference {
        let folder = tiny_folder();
        let model = Model::load(&folder).expect("the bundled model loads");
        Reference { model, tokenizer: Tokenizer::load(&folder).expect("its tokenizer loads") }
    }

    /// The greedy continuation of `prompt`, `count` tokens long whatever they are.
    pub fn greedy(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let geometry = self.model.geometry(64);
        let pages = (prompt.len() + count).div_ceil(64);
        let pool = KvPool::new(geometry, pages);
        let mut slots: Vec<PageSlot> =
            (0..pages).map(|_| PageSlot::Open(pool.allocate().expect("the pool holds the sequence"))).collect();
        let mut sampler = Sampler::new(&SamplingParams { temperature: 0.0, ..SamplingParams::default() });
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

    /// The text of [`Reference::greedy`].
    pub fn greedy_text(&self, prompt: &[u32], count: usize) -> String {
        self.tokenizer.decode(&self.greedy(prompt, count))
    }

    /// A prompt of exactly `count` tokens of plain text, different for every `seed`.
    pub fn prompt(&self, seed: usize, count: usize) -> Vec<u32> {
        let text = "And it came to pass in those days, that there went out a decree, and the people heard it gladly; ";
        let text = format!("Chapter {seed}. {}", text.repeat(count / 8 + 1));
        let mut tokens = self.tokenizer.encode(&text, false).expect("plain text");
        tokens.truncate(count);
        assert_eq!(tokens.len(), count, "the text is long enough");
        tokens
    }
}
