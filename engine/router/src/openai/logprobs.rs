//! Log-probabilities in the forms of OpenAI's API.

use super::answer::Endpoint;
use larder_model::Tokenizer;
use larder_worker::api::TokenLogprobs;
use serde_json::{Map, Value, json};

/// A token of an answer, or of an echoed prompt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenEntry {
    pub(crate) id: u32,
    /// `None` for the first token of a prompt, before which there is nothing.
    pub(crate) logprobs: Option<TokenLogprobs>,
    /// Characters of the choice's text before that of the token. A token inside a character has no
    /// text of its own: the last one of the character has it.
    pub(crate) offset: usize,
}

impl TokenEntry {
    /// Approximate memory for a response with it, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        entry_bytes(self.logprobs.as_ref().map_or(0, |logprobs| logprobs.top.len()))
    }
}

/// Approximate memory of a token with `top` best tokens, in bytes: numbers, a tree of JSON values,
/// and its text.
pub(crate) fn entry_bytes(top: usize) -> usize {
    const LOGPROB_BYTES: usize = 128;
    LOGPROB_BYTES * (1 + top)
}

/// Field `logprobs` of a choice, or of a chunk of it.
pub(crate) fn json(endpoint: Endpoint, tokenizer: &Tokenizer, tokens: &[TokenEntry]) -> Value {
    match endpoint {
        Endpoint::Completion | Endpoint::Native => completion(tokenizer, tokens),
        Endpoint::Chat => json!({"content": chat(tokenizer, tokens), "refusal": null}),
    }
}

/// Text of a token alone. Bytes that are no whole character become replacement characters.
fn text(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned()
}

fn completion(tokenizer: &Tokenizer, tokens: &[TokenEntry]) -> Value {
    let texts: Vec<String> = tokens.iter().map(|token| text(tokenizer, token.id)).collect();
    let offsets: Vec<usize> = tokens.iter().map(|token| token.offset).collect();
    let logprobs: Vec<Option<f32>> = tokens.iter().map(|token| Some(token.logprobs.as_ref()?.logprob)).collect();
    let top = tokens.iter().zip(&texts).map(|(token, text_of_token)| {
        let logprobs = token.logprobs.as_ref()?;
        // The selected token too, as clients expect. Tokens of equal text share an entry: the more
        // probable one comes last, and stays.
        let mut entries = Map::from_iter([(text_of_token.clone(), json!(logprobs.logprob))]);
        for &(id, logprob) in logprobs.top.iter().rev() {
            entries.insert(text(tokenizer, id), json!(logprob));
        }
        Some(entries)
    });
    let top: Vec<Option<Map<String, Value>>> = top.collect();
    json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
}

fn chat(tokenizer: &Tokenizer, tokens: &[TokenEntry]) -> Vec<Value> {
    let one = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        json!({"token": String::from_utf8_lossy(&bytes), "logprob": logprob, "bytes": bytes})
    };
    let entry = |token: &TokenEntry| {
        let logprobs = token.logprobs.as_ref()?;
        let mut entry = one(token.id, logprobs.logprob);
        entry["top_logprobs"] = logprobs.top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
        Some(entry)
    };
    tokens.iter().filter_map(entry).collect()
}
