//! A model's tokenizer: `tokenizer.json`, special tokens and chat template.
//!
//! Invariant: the files in [`Tokenizer::FILES`] determine the tokenizer completely. A router that
//! fetches them from an engine gets the same tokens as the engine.

use crate::chat::ChatTemplateSource;
use crate::config::eos_token_ids;
use crate::sampling::{REPETITION_PENALTY_RANGE, TEMPERATURE_RANGE};
use crate::stream::{Decoder, TokenStream};
use crate::tokenizer_rules;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;
use tokenizers::models::ModelWrapper;

#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error("{file}: {source} [LRD0405]")]
    Io { file: String, source: io::Error },
    #[error("tokenizer.json is missing [LRD0405]")]
    Missing,
    #[error("{file}: {reason} [LRD0405]")]
    Invalid { file: &'static str, reason: String },
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}

/// Conversion between text and tokens. Share it by reference. The streams it creates own their
/// data.
pub struct Tokenizer {
    inner: Arc<Decoder>,
    eos_ids: Vec<u32>,
    token_bytes_max: usize,
    is_linear: bool,
    chat: Option<ChatTemplateSource>,
    defaults: GenerationDefaults,
}

/// Sampling parameters in `generation_config.json`. `None` where the file has none, or one out of
/// range.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// 0 if `do_sample` is `false`.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Maximum tokens of an answer. At least 1.
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    fn from_json(file: &Value) -> Self {
        let number = |name: &str, range: std::ops::RangeInclusive<f32>| {
            file[name].as_f64().map(|value| value as f32).filter(|value| range.contains(value))
        };
        // transformers selects the best token then, whatever the temperature.
        let is_greedy = file["do_sample"] == Value::Bool(false);
        Self {
            temperature: if is_greedy { Some(0.0) } else { number("temperature", TEMPERATURE_RANGE) },
            top_p: number("top_p", 0.0..=1.0),
            top_k: file["top_k"].as_u64().and_then(|top_k| u32::try_from(top_k).ok()),
            min_p: number("min_p", 0.0..=1.0),
            repetition_penalty: number("repetition_penalty", REPETITION_PENALTY_RANGE),
            max_new_tokens: file["max_new_tokens"]
                .as_u64()
                .and_then(|max| u32::try_from(max).ok())
                .filter(|max| *max > 0),
        }
    }
}

/// Maximum length of a token in bytes. The longest in use have a few hundred. It bounds the text of
/// a given number of tokens, also in a hostile vocabulary.
const TOKEN_BYTES_MAX: usize = 4 << 10;
/// Maximum memory of a word that a BPE model remembers, in bytes. The library remembers words of up
/// to 255 bytes, with 32 bytes for each of theirs, and has an entry of 49 bytes in a hash table.
const WORD_BYTES_MAX: usize = 9 << 10;
/// Maximum size of a chat template, in bytes. The longest in use have about 30 KiB.
const TEMPLATE_BYTES_MAX: usize = 1 << 20;

impl Tokenizer {
    /// Files of a model folder that determine the tokenizer. All but the first are optional.
    pub const FILES: &[&str] =
        &["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"];

    /// Maximum memory of a tokenizer per byte of its files: two maps of the vocabulary, and one of
    /// the merges. The words that it remembers take more.
    pub const BYTES_PER_FILE_BYTE: u64 = 12;
    /// Maximum memory of a tokenizer that is being built, per byte of its files: the JSON of its
    /// model as a tree, and the result.
    pub const BUILD_BYTES_PER_FILE_BYTE: u64 = 30;
    /// Maximum memory of the words that a tokenizer of untrusted files remembers, in bytes.
    pub const WORDS_BYTES_MAX: usize = 32 << 20;

    pub fn load(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        let mut files = BTreeMap::new();
        for &name in Self::FILES {
            match std::fs::read(dir.join(name)) {
                Ok(bytes) => drop(files.insert(name.to_owned(), bytes)),
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(TokenizerError::Io { file: dir.join(name).display().to_string(), source });
                }
            }
        }
        Self::from_files(&files)
    }

    /// Builds the tokenizer of an engine that is not trusted. Refuses rules that can take much time
    /// or memory, and bounds the words that it remembers by
    /// [`WORDS_BYTES_MAX`](Self::WORDS_BYTES_MAX).
    pub fn from_untrusted_files(files: &BTreeMap<String, Vec<u8>>) -> Result<Tokenizer, TokenizerError> {
        let bytes = files.get("tokenizer.json").ok_or(TokenizerError::Missing)?;
        tokenizer_rules::check(bytes).map_err(|reason| TokenizerError::Invalid { file: "tokenizer.json", reason })?;
        Self::build(files, bound_words)
    }

    /// Builds the tokenizer from file contents. The keys are names in [`FILES`](Self::FILES).
    pub fn from_files(files: &BTreeMap<String, Vec<u8>>) -> Result<Tokenizer, TokenizerError> {
        Self::build(files, |_| ())
    }

    fn build(
        files: &BTreeMap<String, Vec<u8>>,
        adjust: impl FnOnce(&mut tokenizers::Tokenizer),
    ) -> Result<Tokenizer, TokenizerError> {
        let bytes = files.get("tokenizer.json").ok_or(TokenizerError::Missing)?;
        let mut inner = catch_panic(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|reason| TokenizerError::Invalid { file: "tokenizer.json", reason })?;
        // Left over from training in some files. They would cut prompts or fill them up.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| TokenizerError::Encode(error.to_string()))?;
        adjust(&mut inner);
        let settings = json(files, "tokenizer_config.json")?;
        let bos = special_token(&settings, "bos_token");
        let eos = special_token(&settings, "eos_token");
        let generation = json(files, "generation_config.json")?;
        let mut eos_ids = eos_token_ids(&generation, &json(files, "config.json")?);
        // Beside those of the other files: fine-tuned models often leave the old token there.
        eos_ids.extend(inner.token_to_id(&eos).filter(|id| !eos_ids.contains(id)));
        let chat = chat_source(files, &settings)?.map(|source| ChatTemplateSource { source, bos, eos });
        if chat.as_ref().is_some_and(|chat| chat.source.len() > TEMPLATE_BYTES_MAX) {
            let reason = format!("the chat template has more than {TEMPLATE_BYTES_MAX} bytes");
            return Err(TokenizerError::Invalid { file: "chat_template.jinja", reason });
        }
        let token_bytes_max = inner.get_vocab(true).keys().map(String::len).max().unwrap_or_default();
        if token_bytes_max > TOKEN_BYTES_MAX {
            let reason = format!("a token has {token_bytes_max} bytes; at most {TOKEN_BYTES_MAX} are supported");
            return Err(TokenizerError::Invalid { file: "tokenizer.json", reason });
        }
        let defaults = GenerationDefaults::from_json(&generation);
        let is_linear = tokenizer_rules::is_linear(bytes);
        Ok(Tokenizer { inner: Arc::new(Decoder::new(inner)), eos_ids, token_bytes_max, is_linear, chat, defaults })
    }

    /// Returns `true` if the time for any text is known to grow linearly with its length. Other
    /// tokenizers may take quadratic time.
    pub fn is_linear(&self) -> bool {
        self.is_linear
    }

    /// Length of the longest token in bytes, as the vocabulary spells it. It spells some bytes with
    /// two, so the text of a token may be shorter.
    pub fn token_bytes_max(&self) -> usize {
        self.token_bytes_max
    }

    /// Returns the tokens of `text`. `add_special` adds the model's surrounding tokens, often one
    /// at the start. Text of a chat template already contains them.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding =
            catch_panic(|| self.inner.tokenizer.encode_fast(text, add_special)).map_err(TokenizerError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the text of `ids`, without special tokens. Unknown ids add no text.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.inner.decode(ids, true)
    }

    /// Returns the text of `ids`, special tokens included.
    pub fn decode_all(&self, ids: &[u32]) -> String {
        self.inner.decode(ids, false)
    }

    /// Decoder of one sequence. With `skips_special` its text has no special tokens.
    pub fn stream(&self, skips_special: bool) -> TokenStream {
        TokenStream::new(Arc::clone(&self.inner), skips_special)
    }

    /// Bytes that a token adds to a text. They need not be whole characters. Empty for an unknown
    /// id.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.inner.bytes_of(id)
    }

    /// Texts and ids of the tokens that [`decode`](Self::decode) leaves out.
    pub fn special_tokens(&self) -> Vec<(String, u32)> {
        let added = self.inner.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        added.iter().filter(|(_, token)| token.special).map(|(id, token)| (token.content.clone(), *id)).collect()
    }

    /// Sampling parameters of a request that sets none.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Chat template of the model, not compiled: it is untrusted. Encode its text without special
    /// tokens.
    pub fn chat_template(&self) -> Option<&ChatTemplateSource> {
        self.chat.as_ref()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("eos_ids", &self.eos_ids).field("chat", &self.chat.is_some()).finish()
    }
}

/// Bounds the words that a tokenizer remembers. The library counts words, and not their bytes.
fn bound_words(tokenizer: &mut tokenizers::Tokenizer) {
    // The other models that `tokenizer_rules` accepts remember no words.
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return };
    // The library gives no other access. The JSON of the file is gone by now, so this takes less
    // memory than the build.
    let mut model = model.clone();
    model.resize_cache(Tokenizer::WORDS_BYTES_MAX / WORD_BYTES_MAX);
    tokenizer.with_model(model);
}

/// Converts a panic of the tokenizer library into an error. The library panics on some malformed
/// files, and a model folder is untrusted.
fn catch_panic<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the tokenizer library panicked on this input".into()),
    }
}

fn json(files: &BTreeMap<String, Vec<u8>>, name: &'static str) -> Result<Value, TokenizerError> {
    let Some(bytes) = files.get(name) else { return Ok(Value::Null) };
    serde_json::from_slice(bytes).map_err(|e| TokenizerError::Invalid { file: name, reason: e.to_string() })
}

/// Returns the text of a special token, which the file gives as a string or as an object.
fn special_token(settings: &Value, name: &str) -> String {
    let token = &settings[name];
    token.as_str().or(token["content"].as_str()).unwrap_or_default().to_owned()
}

/// Returns the source of the chat template. `chat_template.jinja` takes precedence over
/// `tokenizer_config.json`, which holds one template or a list of named ones. Of these, `tool_use`
/// renders requests with tools, and `default` the others, as in transformers.
fn chat_source(files: &BTreeMap<String, Vec<u8>>, settings: &Value) -> Result<Option<String>, TokenizerError> {
    if let Some(bytes) = files.get("chat_template.jinja") {
        let source = String::from_utf8(bytes.clone());
        return source
            .map(Some)
            .map_err(|e| TokenizerError::Invalid { file: "chat_template.jinja", reason: e.to_string() });
    }
    let template = &settings["chat_template"];
    let named = |name: &str| {
        let found = template.as_array()?.iter().find(|template| template["name"] == name)?;
        found["template"].as_str()
    };
    Ok(match (template.as_str().or_else(|| named("default")), named("tool_use")) {
        (Some(others), Some(with_tools)) => {
            // Alone, each would lose its last line feed.
            let [with_tools, others] = [with_tools, others].map(|source| source.strip_suffix('\n').unwrap_or(source));
            Some(format!("{{% if tools %}}{with_tools}{{% else %}}{others}{{% endif %}}"))
        }
        (others, _) => others.map(str::to_owned),
    })
}
