//! A model's tokenizer: `tokenizer.json`, with the special tokens and the chat template that belong to it.
//!
//! What must always hold: everything is built from the files in [`Tokenizer::FILES`] alone, so that a router that has
//! fetched them from an engine sees the same tokens as the engine does.

use crate::chat::{ChatMessage, ChatTemplate};
use crate::config::eos_ids_of;
use crate::stream::{Decoder, TokenStream};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Why a tokenizer cannot be loaded, or cannot do what it was asked.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// `tokenizer.json` is not there.
    #[error("tokenizer.json is missing")]
    Missing,
    /// A file is not what it should be.
    #[error("{file}: {reason}")]
    Invalid {
        /// The file.
        file: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Text cannot be encoded.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoChatTemplate,
    /// The chat template refused the conversation, or failed.
    #[error("chat template: {0}")]
    Chat(String),
}

/// Text to tokens and back. Cheap to share by reference; streams it hands out own what they need.
pub struct Tokenizer {
    inner: Arc<Decoder>,
    eos_ids: Vec<u32>,
    bos: String,
    eos: String,
    chat: Option<ChatTemplate>,
}

impl Tokenizer {
    /// The files of a model folder that decide how text becomes tokens; all but the first may be absent.
    pub const FILES: &[&str] =
        &["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"];

    /// Loads the tokenizer of the model folder `dir`.
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

    /// Builds the tokenizer from the content of files named in [`FILES`](Self::FILES).
    pub fn from_files(files: &BTreeMap<String, Vec<u8>>) -> Result<Tokenizer, TokenizerError> {
        let bytes = files.get("tokenizer.json").ok_or(TokenizerError::Missing)?;
        let inner = guarded(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|reason| TokenizerError::Invalid { file: "tokenizer.json", reason })?;
        let settings = json(files, "tokenizer_config.json")?;
        let bos = special_token(&settings, "bos_token");
        let eos = special_token(&settings, "eos_token");
        let mut eos_ids = eos_ids_of(&json(files, "generation_config.json")?, &json(files, "config.json")?);
        if eos_ids.is_empty() {
            eos_ids.extend(inner.token_to_id(&eos));
        }
        let chat = match chat_source(files, &settings)? {
            Some(source) => Some(ChatTemplate::new(&source).map_err(|e| TokenizerError::Chat(format!("{e:#}")))?),
            None => None,
        };
        Ok(Tokenizer { inner: Arc::new(Decoder::new(inner)), eos_ids, bos, eos, chat })
    }

    /// The tokens of `text`. `add_special` adds what the model puts around a text (often one token at its start); a text
    /// made by [`chat`](Self::chat) has that already.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding =
            guarded(|| self.inner.tokenizer.encode_fast(text, add_special)).map_err(TokenizerError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`, without special tokens. Ids that do not exist give nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.inner.decode(ids)
    }

    /// Decodes a sequence whose tokens arrive one by one.
    pub fn stream(&self) -> TokenStream {
        TokenStream::new(Arc::clone(&self.inner))
    }

    /// A conversation as the text the model was trained on; encode it without special tokens.
    pub fn chat(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, TokenizerError> {
        let template = self.chat.as_ref().ok_or(TokenizerError::NoChatTemplate)?;
        template
            .render(messages, add_generation_prompt, &self.bos, &self.eos)
            .map_err(|e| TokenizerError::Chat(format!("{e:#}")))
    }

    /// Tokens that end a generation.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Whether [`chat`](Self::chat) can work.
    pub fn has_chat_template(&self) -> bool {
        self.chat.is_some()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("eos_ids", &self.eos_ids).field("chat", &self.chat.is_some()).finish()
    }
}

/// The tokenizer library panics on some malformed files; a folder is a stranger's, so that is an error here.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the tokenizer library gave up".into()),
    }
}

/// The content of a JSON file, `null` if it is absent.
fn json(files: &BTreeMap<String, Vec<u8>>, name: &'static str) -> Result<Value, TokenizerError> {
    let Some(bytes) = files.get(name) else { return Ok(Value::Null) };
    serde_json::from_slice(bytes).map_err(|e| TokenizerError::Invalid { file: name, reason: e.to_string() })
}

/// A special token is given as its text or as an object with it.
fn special_token(settings: &Value, name: &str) -> String {
    let token = &settings[name];
    token.as_str().or(token["content"].as_str()).unwrap_or_default().to_owned()
}

/// The file of its own comes first; in the settings a template is a text, or a list of named ones.
fn chat_source(files: &BTreeMap<String, Vec<u8>>, settings: &Value) -> Result<Option<String>, TokenizerError> {
    if let Some(bytes) = files.get("chat_template.jinja") {
        let source = String::from_utf8(bytes.clone());
        return source
            .map(Some)
            .map_err(|e| TokenizerError::Invalid { file: "chat_template.jinja", reason: e.to_string() });
    }
    let template = &settings["chat_template"];
    let named = template.as_array().and_then(|list| list.iter().find(|t| t["name"] == "default"));
    Ok(template.as_str().or(named.and_then(|t| t["template"].as_str())).map(str::to_owned))
}
