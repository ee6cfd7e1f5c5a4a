//! Tokenizers: the bundled model's, and synthetic ones of other kinds.

use larder_model::{ChatMessage, ChatTemplate, RenderOptions, Tokenizer, TokenizerError};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const TEXTS: &[&str] = &[
    "The harvest is stored in the larder, and nobody goes hungry.",
    "  two spaces, a tab\tand\n\nnew lines  ",
    "naïve café — “quotes” … 日本語 🦀🧑‍🌾 ẞ",
    "fn main() { println!(\"{:?}\", 1 << 20); }",
    "",
    "\u{FFFD} stays",
];

fn bundled() -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny")).unwrap()
}

/// Byte-level BPE without merges: every byte is a token.
fn byte_level() -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    let printable = |b: &u32| (33..=126).contains(b) || (161..=172).contains(b) || (174..=255).contains(b);
    let mut shifted = 256;
    for byte in 0..256u32 {
        let code = if printable(&byte) {
            byte
        } else {
            shifted += 1;
            shifted - 1
        };
        vocab.insert(char::from_u32(code).unwrap().to_string(), json!(byte));
    }
    from_json(&json!({
        "version": "1.0",
        "added_tokens": [special(256, "<|end|>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }))
}

/// Tokenizer of Llama 2's kind: spaces become a letter, the decoder drops the first one, unknown
/// characters fall back to bytes.
fn sentence_piece() -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    vocab.insert("<unk>".into(), json!(0));
    for byte in 0..256 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(byte + 1));
    }
    for (index, c) in "▁abcdefghijklmnopqrstuvwxyzTH.,".chars().enumerate() {
        vocab.insert(c.to_string(), json!(index + 257));
    }
    from_json(&json!({
        "version": "1.0",
        "added_tokens": [special(300, "<s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": true},
    }))
}

fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": true})
}

fn from_json(tokenizer: &Value) -> Tokenizer {
    let bytes = serde_json::to_vec(tokenizer).unwrap();
    Tokenizer::from_files(&BTreeMap::from([("tokenizer.json".to_owned(), bytes)])).unwrap()
}

fn stream_all(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = tokenizer.stream(true);
    let mut text: String = ids.iter().filter_map(|&id| stream.push(id)).collect();
    text.extend(stream.finish());
    text
}

#[test]
fn text_round_trips_and_streams_as_decoded() {
    for (name, tokenizer) in [("bundled", bundled()), ("bytes", byte_level()), ("sentencepiece", sentence_piece())] {
        for text in TEXTS {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids), *text, "{name}");
            assert_eq!(stream_all(&tokenizer, &ids), *text, "{name}");
        }
    }
}

#[test]
fn random_tokens_stream_as_decoded() {
    let kinds = [("bundled", bundled(), 4096), ("bytes", byte_level(), 257), ("sentencepiece", sentence_piece(), 301)];
    for (name, tokenizer, vocab) in kinds {
        let mut state = 12_345u32;
        for len in (0..600).map(|n| n % 60) {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) % vocab
            };
            let ids: Vec<u32> = (0..len).map(|_| next()).collect();
            assert_eq!(stream_all(&tokenizer, &ids), tokenizer.decode(&ids), "{name}: {ids:?}");
        }
    }
}

#[test]
fn stream_holds_back_at_most_a_bounded_run_of_noise() {
    let tokenizer = byte_level();
    // Bytes that never form a character, then a character, with the bound at every offset inside
    // it.
    for noise in 250..270 {
        let mut ids = vec![0xBF; noise];
        ids.extend(tokenizer.encode("🦀 ok", false).unwrap());
        let mut stream = tokenizer.stream(true);
        let mut pieces: Vec<String> = ids.iter().filter_map(|&id| stream.push(id)).collect();
        pieces.extend(stream.finish());
        assert_eq!(pieces.concat(), tokenizer.decode(&ids));
        assert!(pieces.len() > 1);
    }
    let mut stream = tokenizer.stream(true);
    assert!((0..300).any(|_| stream.push(0xBF).is_some()));
}

#[test]
fn stream_emits_whole_characters() {
    let tokenizer = byte_level();
    let ids = tokenizer.encode("a🦀b", false).unwrap();
    assert_eq!(ids.len(), 6);
    let mut stream = tokenizer.stream(true);
    let pieces: Vec<Option<String>> = ids.iter().map(|&id| stream.push(id)).collect();
    let expected = [Some("a"), None, None, None, Some("🦀"), Some("b")];
    assert_eq!(pieces, expected.map(|p| p.map(str::to_owned)));
    assert_eq!(stream.finish(), None);
    let mut stream = tokenizer.stream(true);
    assert_eq!(stream.push(ids[1]), None);
    assert_eq!(stream.finish().as_deref(), Some("\u{FFFD}"));
}

#[test]
fn bundled_model_renders_chats() {
    let tokenizer = bundled();
    let template = ChatTemplate::new(tokenizer.chat_template().unwrap().clone()).unwrap();
    let chat = |messages: &[ChatMessage], add_generation_prompt| {
        let options = RenderOptions { add_generation_prompt, ..RenderOptions::default() };
        template.render(messages, &options, 1000).unwrap()
    };
    assert_eq!(tokenizer.eos_ids(), [2]);
    let messages = [ChatMessage::new("system", "Be kind."), ChatMessage::new("user", "Who are you?")];
    let text = chat(&messages, true);
    let ids = tokenizer.encode(&text, false).unwrap();
    assert!(text.contains("Be kind.") && text.contains("Who are you?"), "{text}");
    // Each role mark is one token.
    assert!(ids.contains(&3) && ids.contains(&4) && ids.contains(&5), "{text}: {ids:?}");
    assert!(text.starts_with(&chat(&messages, false)));
}

#[test]
fn longest_token_bounds_the_text_of_every_token() {
    for (name, tokenizer, vocab) in [("bundled", bundled(), 4096), ("bytes", byte_level(), 257)] {
        let longest = (0..vocab).map(|id| tokenizer.decode(&[id]).len()).max().unwrap();
        assert!((longest..100).contains(&tokenizer.token_bytes_max()), "{name}: {longest}");
    }
}

#[test]
fn eos_ids_follow_the_precedence_of_the_files() {
    let tokenizer = serde_json::to_vec(&json!({
        "version": "1.0", "added_tokens": [special(1, "<e>")],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<e>": 1}, "unk_token": "a"},
    }))
    .unwrap();
    let ids = |files: &[(&str, &str)]| {
        let mut all = BTreeMap::from([("tokenizer.json".to_owned(), tokenizer.clone())]);
        all.extend(files.iter().map(|(name, content)| (name.to_string(), content.as_bytes().to_vec())));
        Tokenizer::from_files(&all).unwrap().eos_ids().to_vec()
    };
    let (generation, config) = ("generation_config.json", "config.json");
    assert_eq!(ids(&[(generation, r#"{"eos_token_id": [7, 8]}"#), (config, r#"{"eos_token_id": 2}"#)]), [7, 8]);
    assert_eq!(ids(&[(generation, "{}"), (config, r#"{"eos_token_id": 2}"#)]), [2]);
    assert_eq!(ids(&[("tokenizer_config.json", r#"{"eos_token": "<e>"}"#)]), [1]);
    assert_eq!(ids(&[("tokenizer_config.json", r#"{"eos_token": {"content": "<e>"}}"#)]), [1]);
    assert!(ids(&[]).is_empty());
    let stale = [(config, r#"{"eos_token_id": 0}"#), ("tokenizer_config.json", r#"{"eos_token": "<e>"}"#)];
    assert_eq!(ids(&stale), [0, 1], "a fine-tuned model ends its messages with the tokenizer's token");
}

#[test]
fn token_of_many_bytes_is_refused() {
    let load = |bytes: usize| {
        let vocab = json!({"a": 0, ("b".repeat(bytes)): 1});
        let file = json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}});
        Tokenizer::from_files(&BTreeMap::from([("tokenizer.json".to_owned(), serde_json::to_vec(&file).unwrap())]))
    };
    assert!(load(4096).is_ok());
    assert!(load(4097).unwrap_err().to_string().contains("4097 bytes"));
}

#[test]
fn malformed_files_are_errors() {
    assert!(matches!(Tokenizer::from_files(&BTreeMap::new()), Err(TokenizerError::Missing)));
    assert!(Tokenizer::load(Path::new("/no/such/folder")).is_err());
    for content in ["", "{}", "null", r#"{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}"#] {
        let files = BTreeMap::from([("tokenizer.json".to_owned(), content.as_bytes().to_vec())]);
        let error = Tokenizer::from_files(&files).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
    let tokenizer = serde_json::to_vec(&json!({
        "version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}))
    .unwrap();
    let mut files = BTreeMap::from([("tokenizer.json".to_owned(), tokenizer)]);
    assert!(Tokenizer::from_files(&files).unwrap().chat_template().is_none());
    files.insert("chat_template.jinja".into(), vec![b' '; (1 << 20) + 1]);
    assert!(Tokenizer::from_files(&files).unwrap_err().to_string().contains("chat template"));
    files.insert("chat_template.jinja".into(), vec![0xFF]);
    assert!(Tokenizer::from_files(&files).is_err());
    files.remove("chat_template.jinja");
    files.insert("tokenizer_config.json".into(), b"{".to_vec());
    assert!(Tokenizer::from_files(&files).unwrap_err().to_string().contains("tokenizer_config.json"));
}

#[test]
fn token_bytes_concatenate_to_the_text() {
    for tokenizer in [bundled(), byte_level()] {
        for text in TEXTS {
            let ids = tokenizer.encode(text, false).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
            assert_eq!(String::from_utf8(bytes).unwrap(), *text);
        }
    }
    let tokenizer = sentence_piece();
    let ids = tokenizer.encode("the é", false).unwrap();
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), " the é", "the decoder drops the first blank, and a token keeps it");
    assert!(tokenizer.token_bytes(1 << 30).is_empty());
}

#[test]
fn special_tokens_are_in_the_text_on_request() {
    let tokenizer = byte_level();
    assert_eq!((tokenizer.decode(&[65, 256]), tokenizer.decode_all(&[65, 256])), ("A".into(), "A<|end|>".into()));
    let text = |skips_special| {
        let mut stream = tokenizer.stream(skips_special);
        [65, 256, 66].iter().filter_map(|&id| stream.push(id)).collect::<String>()
    };
    assert_eq!((text(true), text(false)), ("AB".into(), "A<|end|>B".into()));
}

#[test]
fn generation_config_gives_the_defaults() {
    let defaults = bundled().generation_defaults().clone();
    assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (Some(0.7), Some(0.9), None));
    let max_of = |max: serde_json::Value| {
        let files = small_files("generation_config.json", &json!({"max_new_tokens": max}));
        Tokenizer::from_files(&files).unwrap().generation_defaults().max_new_tokens
    };
    assert_eq!([max_of(json!(512)), max_of(json!(0)), max_of(json!("many"))], [Some(512), None, None]);
    let temperature_of = |file: serde_json::Value| {
        let files = small_files("generation_config.json", &file);
        Tokenizer::from_files(&files).unwrap().generation_defaults().temperature
    };
    assert_eq!(temperature_of(json!({"do_sample": false, "temperature": 0.6})), Some(0.0), "as in transformers");
    assert_eq!(temperature_of(json!({"do_sample": true, "temperature": 0.6})), Some(0.6));
    assert_eq!(temperature_of(json!({"top_p": 0.5})), None, "without `do_sample`, the API's default");
}

/// Files of a model of one token, and one more.
fn small_files(name: &str, content: &serde_json::Value) -> BTreeMap<String, Vec<u8>> {
    let tokenizer = json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
    let files = [("tokenizer.json", &tokenizer), (name, content)];
    files.map(|(name, json)| (name.to_owned(), serde_json::to_vec(json).unwrap())).into()
}

#[test]
fn template_for_tools_renders_requests_with_tools() {
    let of = |templates: serde_json::Value| {
        let files = small_files("tokenizer_config.json", &json!({"chat_template": templates}));
        let source = Tokenizer::from_files(&files).unwrap().chat_template()?.clone();
        let template = ChatTemplate::new(source).unwrap();
        let render = |tools: Option<&str>| {
            let options = RenderOptions { tools: tools.map(str::to_owned), ..RenderOptions::default() };
            template.render(&[ChatMessage::new("user", "x")], &options, 100).unwrap()
        };
        Some([render(Some(r#"[{"name": "f"}]"#)), render(Some("[]")), render(None)])
    };
    let named = |name: &str, template: &str| json!({"name": name, "template": template});
    let default = named("default", "{% if messages %}<{{ messages[0].content }}>{% endif %}\n");
    let with_tools = named("tool_use", "{% for t in tools %}{{ t.name }}{% endfor %}\n");
    assert_eq!(of(json!([with_tools, default])).unwrap(), ["f", "<x>", "<x>"]);
    assert_eq!(of(json!([default, named("rag", "r")])).unwrap(), ["<x>", "<x>", "<x>"]);
    assert!(of(json!([with_tools])).is_none());
}
