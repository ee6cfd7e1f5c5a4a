//! Text from tokens that arrive one by one.
//!
//! Invariants:
//! - The concatenated pieces equal the text that [`Tokenizer::decode`](crate::Tokenizer::decode)
//!   returns for all tokens at once.
//! - No piece ends inside a character.
//!
//! One exception: a run of more than [`HELD_TOKENS_MAX`] byte tokens that is not valid UTF-8 as a
//! whole may have valid pieces.

use std::sync::Arc;

/// Tokenizer, and the property of its decoder that streams depend on.
pub(crate) struct Decoder {
    pub(crate) tokenizer: tokenizers::Tokenizer,
    /// `true` if tokens such as `<0xE2>` stand for bytes. The decoder treats a run of them as a
    /// whole. If the run is not valid UTF-8, every byte of it becomes a replacement character, even
    /// a byte before the fault.
    has_byte_tokens: bool,
    /// `true` if each letter of a token stands for a byte, as in GPT-2.
    is_byte_level: bool,
}

/// Letter that stands for a blank in vocabularies of SentencePiece.
const BLANK_LETTER: char = '\u{2581}';

/// Byte for which a letter stands in byte-level vocabularies: printable ones stand for themselves,
/// and the others for the letters from U+0100 on.
fn byte_of_letter(letter: char) -> Option<u8> {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(letter) {
        code @ 0..=0xFF => Some(code as u8).filter(|byte| is_printable(*byte)),
        code => (0..=u8::MAX).filter(|byte| !is_printable(*byte)).nth(code as usize - 0x100),
    }
}

impl Decoder {
    pub(crate) fn new(tokenizer: tokenizers::Tokenizer) -> Decoder {
        let decoder = tokenizer.get_decoder().and_then(|d| serde_json::to_string(d).ok());
        let uses = |kind: &str| decoder.as_ref().is_some_and(|decoder| decoder.contains(kind));
        Decoder { has_byte_tokens: uses("ByteFallback"), is_byte_level: uses("ByteLevel"), tokenizer }
    }

    pub(crate) fn decode(&self, ids: &[u32], skips_special: bool) -> String {
        self.tokenizer.decode(ids, skips_special).unwrap_or_default()
    }

    /// Returns `true` if `id` stands for a byte, and `None` if decoding skips it.
    fn is_byte(&self, id: u32, skips_special: bool) -> Option<bool> {
        let token = self.tokenizer.id_to_token(id)?;
        if skips_special && self.tokenizer.get_added_vocabulary().is_special_token(&token) {
            return None;
        }
        Some(self.byte_of(&token).is_some())
    }

    /// Byte for which a token such as `<0xE2>` stands.
    fn byte_of(&self, token: &str) -> Option<u8> {
        let digits = token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
        self.has_byte_tokens.then(|| u8::from_str_radix(digits, 16).ok())?
    }

    /// Bytes that token `id` adds to a text, without the changes that a decoder makes at the start
    /// of a text. Empty for an unknown id.
    pub(crate) fn bytes_of(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.tokenizer.id_to_token(id) else { return Vec::new() };
        if self.tokenizer.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id) {
            return token.into_bytes();
        }
        if let Some(byte) = self.byte_of(&token) {
            return vec![byte];
        }
        if self.is_byte_level {
            let bytes: Option<Vec<u8>> = token.chars().map(byte_of_letter).collect();
            return bytes.unwrap_or_else(|| token.into_bytes());
        }
        token.replace(BLANK_LETTER, " ").into_bytes()
    }
}

/// Decoder of one sequence whose tokens arrive one by one.
///
/// The text of a token can depend on the tokens before it. For example, a decoder drops a leading
/// space at the start of a text, and several tokens can share one character. So each step decodes a
/// short window twice, without and with the new token, and emits the difference. The window begins
/// with the tokens of the last piece.
#[derive(Clone)]
pub struct TokenStream {
    decoder: Arc<Decoder>,
    skips_special: bool,
    window: Vec<u32>,
    emitted: usize,
    /// `true` if the last token that was not skipped belongs to a run of byte tokens, which may
    /// continue.
    in_bytes: bool,
}

/// Character that decoders return for bytes that do not form a character, or do not yet.
const REPLACEMENT: char = '\u{FFFD}';
/// Maximum tokens held back. Bounds the cost of a step if a model writes bytes that never form a
/// character.
pub const HELD_TOKENS_MAX: usize = 256;
/// Maximum tokens of an unfinished character: all of its UTF-8 bytes but one.
const UNFINISHED_TOKENS_MAX: usize = 3;

impl TokenStream {
    pub(crate) fn new(decoder: Arc<Decoder>, skips_special: bool) -> TokenStream {
        TokenStream { decoder, skips_special, window: Vec::new(), emitted: 0, in_bytes: false }
    }

    fn decode(&self, ids: &[u32]) -> String {
        self.decoder.decode(ids, self.skips_special)
    }

    pub fn push(&mut self, id: u32) -> Option<String> {
        self.window.push(id);
        self.in_bytes = self.decoder.is_byte(id, self.skips_special).unwrap_or(self.in_bytes);
        let text = self.decode(&self.window);
        if !self.in_bytes && !text.ends_with(REPLACEMENT) {
            return self.emit(self.window.len());
        }
        if self.window.len() - self.emitted > HELD_TOKENS_MAX {
            return self.emit(self.safe_cut(&text));
        }
        None
    }

    pub fn finish(&mut self) -> Option<String> {
        self.emit(self.window.len())
    }

    /// Emits the window's tokens up to `end`. Tokens without text stay in the window until later
    /// tokens add some.
    fn emit(&mut self, end: usize) -> Option<String> {
        let before = self.decode(&self.window[..self.emitted]);
        let after = self.decode(&self.window[..end]);
        let piece = after.strip_prefix(before.as_str()).filter(|piece| !piece.is_empty())?.to_owned();
        self.window.drain(..self.emitted);
        self.emitted = end - self.emitted;
        Some(piece)
    }

    /// Returns the last cut, before the last token, outside an unfinished character. At such a cut,
    /// the texts of the two sides concatenate to the text of the window.
    fn safe_cut(&self, text: &str) -> usize {
        let len = self.window.len();
        let is_safe = |cut: &usize| {
            let (left, right) = self.window.split_at(*cut);
            self.decode(left) + &self.decode(right) == text
        };
        (len - 1 - UNFINISHED_TOKENS_MAX..len).rev().find(is_safe).unwrap_or(len)
    }
}

impl std::fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenStream({} tokens in the window, {} emitted)", self.window.len(), self.emitted)
    }
}
