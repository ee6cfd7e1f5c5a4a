//! Memory of the words that a tokenizer remembers. A test of its own process, because it reads the
//! resident size.

use larder_model::Tokenizer;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Longest word that the library remembers.
const WORD_BYTES: usize = 255;
/// More than the library remembers by default.
const WORDS: usize = 12_000;
const WORDS_PER_TEXT: usize = 50;
/// Unit of `/proc/self/statm` on x86-64.
const PAGE_BYTES: usize = 4096;

/// Tokenizer of single letters, for which a word takes most memory.
fn letters() -> Tokenizer {
    let letters = (b'a'..=b'z').map(|letter| char::from(letter).to_string());
    let vocab: Map<String, Value> = letters.zip((0..).map(Value::from)).collect();
    let file = json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    });
    let files = BTreeMap::from([("tokenizer.json".to_string(), serde_json::to_vec(&file).unwrap())]);
    Tokenizer::from_untrusted_files(&files).unwrap()
}

/// Word number `number`. All are different.
fn word(number: usize) -> String {
    let digits: String = format!("{number:08}").bytes().map(|digit| char::from(digit - b'0' + b'a')).collect();
    digits + &"x".repeat(WORD_BYTES - 8)
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE_BYTES
}

#[test]
fn remembered_words_are_bounded_in_bytes() {
    let tokenizer = letters();
    let texts = |from: usize, to: usize| {
        for first in (from..to).step_by(WORDS_PER_TEXT) {
            let words: Vec<String> = (first..first + WORDS_PER_TEXT).map(word).collect();
            let tokens = tokenizer.encode(&words.join(" "), false).unwrap();
            assert_eq!(tokens.len(), WORDS_PER_TEXT * WORD_BYTES);
        }
    };
    // What a text takes while it is tokenised stays with the allocator.
    texts(0, WORDS_PER_TEXT);
    let before = resident_bytes();
    texts(WORDS_PER_TEXT, WORDS);
    let kept = resident_bytes().saturating_sub(before);
    assert!(kept > 8 << 20, "{kept} bytes: it remembers no words, so this test shows nothing");
    assert!(kept < Tokenizer::WORDS_BYTES_MAX + (8 << 20), "{kept} bytes of words");
}
