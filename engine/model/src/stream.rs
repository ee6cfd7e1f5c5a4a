//! Text from tokens that arrive one by one.
//!
//! What must always hold: the pieces put together are the text that [`Tokenizer::decode`](crate::Tokenizer::decode) gives
//! for all tokens at once, and no piece ends inside a character. (The one exception is a run of more than
//! [`HELD_TOKENS_MAX`] byte tokens that are not valid text as a whole: pieces of it may be.)

use std::sync::Arc;

/// The tokenizer, and what a stream must know of its decoder.
pub(crate) struct Decoder {
    pub(crate) tokenizer: tokenizers::Tokenizer,
    /// Whether tokens such as `<0xE2>` stand for bytes. A run of them is decoded as a whole: if it is not valid UTF-8, then
    /// every byte of it becomes a replacement character, even those before the fault.
    has_byte_tokens: bool,
}

impl Decoder {
    pub(crate) fn new(tokenizer: tokenizers::Tokenizer) -> Decoder {
        let decoder = tokenizer.get_decoder().and_then(|d| serde_json::to_string(d).ok());
        Decoder { has_byte_tokens: decoder.is_some_and(|d| d.contains("ByteFallback")), tokenizer }
    }

    /// The text of `ids`, without special tokens.
    pub(crate) fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, true).unwrap_or_default()
    }

    /// Whether `id` stands for a byte; `None` if decoding skips it.
    fn is_byte(&self, id: u32) -> Option<bool> {
        let token = self.tokenizer.id_to_token(id)?;
        if self.tokenizer.get_added_vocabulary().is_special_token(&token) {
            return None;
        }
        Some(self.has_byte_tokens && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>'))
    }
}

/// Decodes the tokens of one sequence as they come.
///
/// What a token adds can depend on the tokens before it (a leading space is dropped at the start of a text, a character may
/// be spread over tokens). So each step decodes a short window twice, without and with the new token, and emits what the
/// second has more. The window begins with the tokens that gave the last piece.
#[derive(Clone)]
pub struct TokenStream {
    decoder: Arc<Decoder>,
    /// Tokens of the window.
    window: Vec<u32>,
    /// Of these, how many were emitted.
    emitted: usize,
    /// The last token that was not skipped is one of a run of bytes, which may go on.
    in_bytes: bool,
}

/// What decoders give for bytes that are not, or not yet, a character.
const REPLACEMENT: char = '\u{FFFD}';
/// Most tokens held back, so that a step stays short even if a model writes bytes that never become text.
pub const HELD_TOKENS_MAX: usize = 256;
/// Most tokens an unfinished character can be spread over: all of its bytes but one.
const UNFINISHED_TOKENS_MAX: usize = 3;

impl TokenStream {
    pub(crate) fn new(decoder: Arc<Decoder>) -> TokenStream {
        TokenStream { decoder, window: Vec::new(), emitted: 0, in_bytes: false }
    }

    /// Takes a token; gives the text that is complete now, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        self.window.push(id);
        self.in_bytes = self.decoder.is_byte(id).unwrap_or(self.in_bytes);
        let text = self.decoder.decode(&self.window);
        if !self.in_bytes && !text.ends_with(REPLACEMENT) {
            return self.emit(self.window.len());
        }
        if self.window.len() - self.emitted > HELD_TOKENS_MAX {
            return self.emit(self.safe_cut(&text));
        }
        None
    }

    /// Ends the text; gives what was held back, if anything.
    pub fn finish(&mut self) -> Option<String> {
        self.emit(self.window.len())
    }

    /// Emits the window's tokens up to `end`. If they add no text they stay, to be emitted with the next ones.
    fn emit(&mut self, end: usize) -> Option<String> {
        let before = self.decoder.decode(&self.window[..self.emitted]);
        let after = self.decoder.decode(&self.window[..end]);
        let piece = after.strip_prefix(before.as_str()).filter(|piece| !piece.is_empty())?.to_owned();
        self.window.drain(..self.emitted);
        self.emitted = end - self.emitted;
        Some(piece)
    }

    /// The last place, before the last token, that does not lie inside an unfinished character: there the text of the
    /// window is the text of its two sides.
    fn safe_cut(&self, text: &str) -> usize {
        let len = self.window.len();
        let is_safe = |cut: &usize| {
            let (left, right) = self.window.split_at(*cut);
            self.decoder.decode(left) + &self.decoder.decode(right) == text
        };
        (len - 1 - UNFINISHED_TOKENS_MAX..len).rev().find(is_safe).unwrap_or(len)
    }
}

impl std::fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenStream({} tokens in the window, {} emitted)", self.window.len(), self.emitted)
    }
}
