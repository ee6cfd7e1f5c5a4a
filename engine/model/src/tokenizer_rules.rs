//! Rules for the `tokenizer.json` of an engine that the router does not trust.
//!
//! A tokenizer runs inside the router and cannot be interrupted. It is data, but its rules can
//! multiply a text or search it for ever. So the router accepts only rules whose work it can bound
//! beforehand:
//!
//! - The replacements of a text together make it at most [`GROWTH_MAX`] times as long.
//! - Regular expressions are those that the library searches for one match in linear time, and the
//!   look-ahead in use, `\s+(?!\S)`. All matches of an unusual one together can take quadratic
//!   time.
//! - A template adds at most [`ADDED_TOKENS_MAX`] tokens, and a model takes linear time per word.
//! - A model makes at most one token of each byte of a word.
//!
//! The tokenizers of Llama, Mistral and Qwen keep these rules, and have [`LINEAR_PATTERNS`] only.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// Maximum length of a text after all replacements, in lengths of the text.
const GROWTH_MAX: usize = 32;
/// Growth by Unicode's compatibility forms: U+FDFA has 3 bytes, and 33 afterwards.
const COMPATIBILITY_GROWTH: usize = 11;
/// Maximum length in bytes of the part of the file without vocabulary.
const RULES_BYTES_MAX: usize = 256 << 10;
const PATTERN_BYTES_MAX: usize = 4 << 10;
/// Maximum memory of a compiled pattern, in bytes.
const PATTERN_MEMORY_MAX: usize = 8 << 20;
/// Maximum number of tokens that a template adds to a text.
const ADDED_TOKENS_MAX: usize = 64;
/// Maximum length of a word in characters for models whose time grows with its square.
const WORD_CHARS_MAX: u64 = 200;
/// Maximum length of the prefix and of the suffix of parts of words, in bytes. Those in use have up
/// to four.
const AFFIX_BYTES_MAX: usize = 16;
/// Maximum depth of rules within rules.
const DEPTH_MAX: usize = 4;
/// The only look-ahead in use: all blanks of a run but the last one.
const LOOK_AHEAD: &str = r"\s+(?!\S)";

/// Patterns in use. Each of their matches ends where its search ended, but for a few characters, so
/// all matches of a text together take linear time.
const LINEAR_PATTERNS: [&str; 4] = [
    // GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // Llama 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Mistral Nemo.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Parts of a `tokenizer.json`. The vocabulary is skipped.
#[derive(Deserialize)]
struct File<'a> {
    #[serde(borrow, default)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow, default)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow, default)]
    decoder: Option<&'a RawValue>,
    model: ModelKind,
}

#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: Option<bool>,
}

/// Returns the rule that the file breaks.
pub(crate) fn check(file: &[u8]) -> Result<(), String> {
    let File { normalizer, pre_tokenizer, post_processor, decoder, model } =
        serde_json::from_slice(file).map_err(|error| error.to_string())?;
    check_model(&model)?;
    let growth = growth_of(&parse(normalizer)?, 0)?.saturating_mul(growth_of(&parse(pre_tokenizer)?, 0)?);
    if growth > GROWTH_MAX {
        return Err(format!("it can make a text {growth} times as long; at most {GROWTH_MAX} times are supported"));
    }
    let growth = growth_of(&parse(decoder)?, 0)?;
    if growth > GROWTH_MAX {
        return Err(format!("its decoder can make a text {growth} times as long"));
    }
    let added = tokens_in(&parse(post_processor)?, 0)?;
    if added > ADDED_TOKENS_MAX {
        return Err(format!("it adds {added} tokens to a text; at most {ADDED_TOKENS_MAX} are supported"));
    }
    Ok(())
}

/// Returns `true` if a file that keeps the rules takes linear time for any text. A file with other
/// patterns may, too.
pub(crate) fn is_linear(file: &[u8]) -> bool {
    let Ok(File { normalizer, pre_tokenizer, .. }) = serde_json::from_slice(file) else { return false };
    [normalizer, pre_tokenizer].into_iter().all(|rules| parse(rules).is_ok_and(|rules| has_linear_patterns(&rules)))
}

fn has_linear_patterns(rules: &Value) -> bool {
    match rules {
        Value::Object(fields) => fields.iter().all(|(name, value)| match value.as_str() {
            Some(pattern) if name == "Regex" => LINEAR_PATTERNS.contains(&pattern),
            _ => has_linear_patterns(value),
        }),
        Value::Array(rules) => rules.iter().all(has_linear_patterns),
        _ => true,
    }
}

fn parse(rules: Option<&RawValue>) -> Result<Value, String> {
    let Some(rules) = rules else { return Ok(Value::Null) };
    if rules.get().len() > RULES_BYTES_MAX {
        return Err(format!("its rules have more than {RULES_BYTES_MAX} bytes"));
    }
    serde_json::from_str(rules.get()).map_err(|error| error.to_string())
}

fn check_model(model: &ModelKind) -> Result<(), String> {
    let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
    let longest = affixes.into_iter().flatten().map(String::len).max().unwrap_or(0);
    // The library replaces an unknown character, with its affixes, by its bytes.
    let most = if model.byte_fallback == Some(true) { 0 } else { AFFIX_BYTES_MAX };
    if longest > most {
        return Err(format!("its model adds {longest} bytes to parts of words; at most {most} are supported"));
    }
    match model.kind.as_deref() {
        // Not `Unigram`: the library drops its vocabulary recursively, one level per byte of a
        // token.
        Some("BPE" | "WordLevel") => Ok(()),
        Some("WordPiece") if model.max_input_chars_per_word.is_none_or(|most| most <= WORD_CHARS_MAX) => Ok(()),
        Some(kind) => Err(format!("a model of type '{kind}' is not supported")),
        // The library would try one type after the other.
        None => Err("a model without a type is not supported".into()),
    }
}

/// Factor by which a normalizer, pre-tokenizer or decoder can make a text longer.
fn growth_of(rule: &Value, depth: usize) -> Result<usize, String> {
    if rule.is_null() {
        return Ok(1);
    }
    if depth > DEPTH_MAX {
        return Err(format!("its rules are nested deeper than {DEPTH_MAX}"));
    }
    let text = |name: &str| rule[name].as_str().unwrap_or_default();
    match text("type") {
        "Sequence" => {
            let lists =
                ["normalizers", "pretokenizers", "decoders"].into_iter().filter_map(|name| rule[name].as_array());
            let mut growth = 1usize;
            for rule in lists.flatten() {
                growth = growth.saturating_mul(growth_of(rule, depth + 1)?);
            }
            Ok(growth)
        }
        "Replace" => replacement_growth(&rule["pattern"], text("content").len()),
        "Split" => {
            check_pattern(&rule["pattern"])?;
            Ok(1)
        }
        "Prepend" => Ok(1 + text("prepend").len()),
        "NFKC" | "NFKD" => Ok(COMPATIBILITY_GROWTH),
        // A blank becomes a mark of three bytes, with one before the text.
        "Metaspace" => Ok(4),
        "BertNormalizer" => Ok(9),
        "NFC" | "NFD" | "Lowercase" | "Nmt" => Ok(4),
        "ByteLevel" => Ok(2),
        "Strip" | "StripAccents" | "BertPreTokenizer" | "CharDelimiterSplit" | "Whitespace" | "WhitespaceSplit"
        | "Punctuation" | "Digits" | "UnicodeScripts" | "FixedLength" | "ByteFallback" | "Fuse" | "WordPiece"
        | "BPEDecoder" | "CTC" => Ok(1),
        kind => Err(format!("a rule of type '{kind}' is not supported")),
    }
}

fn replacement_growth(pattern: &Value, content_bytes: usize) -> Result<usize, String> {
    check_pattern(pattern)?;
    match pattern["String"].as_str() {
        Some(replaced) if !replaced.is_empty() => Ok(content_bytes.div_ceil(replaced.len()).max(1)),
        // It may match between all characters.
        _ => Ok(1 + content_bytes),
    }
}

/// Fails for a pattern whose search for one match may take more than linear time.
fn check_pattern(pattern: &Value) -> Result<(), String> {
    let Some(regex) = pattern["Regex"].as_str() else { return Ok(()) };
    if regex.len() > PATTERN_BYTES_MAX {
        return Err(format!("a pattern has more than {PATTERN_BYTES_MAX} bytes"));
    }
    let parts: Vec<&str> = regex.split('|').collect();
    // Both sides compile by themselves, so the look-ahead is in no group. In a repeated group it
    // could be searched again and again.
    for plain in parts.split(|part| *part == LOOK_AHEAD) {
        let compiled = regex::RegexBuilder::new(&plain.join("|")).size_limit(PATTERN_MEMORY_MAX).build();
        compiled.map_err(|_| format!("the pattern {regex:?} may take too long"))?;
    }
    Ok(())
}

/// Tokens that a post-processor adds to a text.
fn tokens_in(rule: &Value, depth: usize) -> Result<usize, String> {
    let kind = rule["type"].as_str().unwrap_or_default();
    match kind {
        _ if rule.is_null() => Ok(0),
        _ if depth > DEPTH_MAX => Err(format!("its post-processors are nested deeper than {DEPTH_MAX}")),
        "Sequence" => {
            let rules = rule["processors"].as_array().into_iter().flatten();
            rules.map(|rule| tokens_in(rule, depth + 1)).sum()
        }
        "TemplateProcessing" => {
            let special = rule["special_tokens"].as_object().into_iter().flatten();
            let ids = special.map(|(_, token)| token["ids"].as_array().map_or(0, Vec::len)).max().unwrap_or(0);
            let pieces = rule["single"].as_array().into_iter().flatten();
            // The text itself counts once. Twice would double it.
            let texts = pieces.clone().filter(|piece| !piece["Sequence"].is_null()).count();
            match texts {
                0 | 1 => Ok(pieces.count() * ids),
                _ => Err("its template repeats the text".into()),
            }
        }
        "BertProcessing" | "RobertaProcessing" => Ok(2),
        "ByteLevel" => Ok(0),
        _ => Err(format!("a post-processor of type '{kind}' is not supported")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file_with(changes: Value) -> Value {
        let mut file = json!({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        file
    }

    fn verdict(changes: Value) -> Result<(), String> {
        check(file_with(changes).to_string().as_bytes())
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn tokenizers_in_use_keep_the_rules() {
        let split = |regex: &str| {
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]})
        };
        // Llama 3 and Qwen 2.
        let llama = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let qwen = llama.replace("{1,3}", "");
        let bos = json!({"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}});
        // Llama 2 and Mistral.
        let marks = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(json!({"String": " "}), "▁")]});
        let decoder = json!({"type": "Sequence", "decoders": [replace(json!({"String": "▁"}), " "),
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        for changes in [
            json!({"pre_tokenizer": split(llama), "post_processor": {"type": "Sequence", "processors": [
                {"type": "ByteLevel"}, bos]}, "decoder": {"type": "ByteLevel"}}),
            json!({"normalizer": {"type": "NFC"}, "pre_tokenizer": split(&qwen), "normaliser": null}),
            json!({"normalizer": marks, "post_processor": bos, "decoder": decoder}),
            json!({"model": {"type": "BPE", "byte_fallback": true, "continuing_subword_prefix": null,
                "end_of_word_suffix": ""}}),
            json!({"model": {"type": "BPE", "byte_fallback": false, "end_of_word_suffix": "</w>"}}),
        ] {
            assert_eq!(verdict(changes.clone()), Ok(()));
            assert!(is_linear(file_with(changes).to_string().as_bytes()));
        }
    }

    #[test]
    fn file_with_an_unusual_pattern_may_take_more_than_linear_time() {
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"});
        for pattern in LINEAR_PATTERNS {
            assert_eq!(verdict(json!({"pre_tokenizer": split(pattern)})), Ok(()));
        }
        let unusual = split(".*[^A-Z]|[A-Z]");
        assert_eq!(verdict(json!({"pre_tokenizer": unusual})), Ok(()));
        let nested = json!({"type": "Sequence", "pretokenizers": [split(LINEAR_PATTERNS[0]), unusual]});
        let normalizer = replace(json!({"Regex": "a+b|a"}), "a");
        for changes in
            [json!({"pre_tokenizer": unusual}), json!({"pre_tokenizer": nested}), json!({"normalizer": normalizer})]
        {
            assert!(!is_linear(file_with(changes).to_string().as_bytes()));
        }
    }

    #[test]
    fn rules_that_multiply_a_text_or_search_for_ever_are_refused() {
        let doubling = replace(json!({"String": "a"}), "aa");
        let many = json!({"type": "Sequence", "normalizers": vec![doubling.clone(); 6]});
        let many_more = json!({"type": "Sequence", "normalizers": vec![doubling; 63]});
        let pattern = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"});
        let ids: Vec<u32> = vec![0; ADDED_TOKENS_MAX + 1];
        let template = |single: Value| {
            json!({"type": "TemplateProcessing", "single": single,
            "special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": []}}})
        };
        let nested = (0..9).fold(json!({"type": "NFC"}), |rule, _| json!({"type": "Sequence", "normalizers": [rule]}));
        for (changes, reason) in [
            (json!({"normalizer": many}), "64 times"),
            (json!({"normalizer": replace(json!({"Regex": ""}), &"a".repeat(40))}), "41 times"),
            (json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}), "'Precompiled'"),
            (json!({"normalizer": nested}), "nested"),
            (json!({"decoder": replace(json!({"String": "a"}), &"a".repeat(40))}), "decoder"),
            (json!({"pre_tokenizer": pattern(r"(a+)+(?!\S)|b")}), "too long"),
            (json!({"pre_tokenizer": pattern(r"(?:a|\s+(?!\S)|b)+")}), "too long"),
            (json!({"pre_tokenizer": pattern(r"(a*)\1")}), "too long"),
            (json!({"pre_tokenizer": pattern(r"(((a{1,99}){1,99}){1,99}){1,99}")}), "too long"),
            (json!({"post_processor": template(json!([{"SpecialToken": {"id": "<s>"}}]))}), "65 tokens"),
            (
                json!({"post_processor": template(json!([{"Sequence": {"id": "A"}}, {"Sequence": {"id": "A"}}]))}),
                "repeats",
            ),
            (json!({"model": {"type": "WordPiece", "max_input_chars_per_word": 1_000_000}}), "'WordPiece'"),
            (json!({"model": {"type": "Unigram"}}), "'Unigram'"),
            (json!({"model": {"type": "BPE", "continuing_subword_prefix": "#".repeat(17)}}), "17 bytes"),
            (json!({"model": {"type": "BPE", "byte_fallback": true, "end_of_word_suffix": "</w>"}}), "4 bytes"),
            (json!({"model": {"max_input_chars_per_word": 1_000_000}}), "without a type"),
            // 2^63 times 2 does not wrap to 0.
            (json!({"normalizer": many_more, "pre_tokenizer": {"type": "ByteLevel"}}), "times as long"),
        ] {
            let error = verdict(changes).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
