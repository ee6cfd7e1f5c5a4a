//! Constrained generation: the tokens that may follow in a [`Constraint`].
//!
//! Invariants:
//! - A token that a [`Guide`] allows keeps the text within the constraint. End-of-sequence tokens
//!   are allowed exactly where the text may end.
//! - The state of one sequence never depends on another: clones share nothing that changes.
//! - No constraint and no vocabulary causes a panic. The library's panics become errors.
//! - A guide tells its memory after each step. One of more than [`GUIDE_BYTES_MAX`] ends.

use crate::constraint::Constraint;
use crate::tokenizer::Tokenizer;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser, panic_utils};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// Stack of a compilation in bytes. Schemas and grammars may nest, and the compiler recurses.
const COMPILE_STACK_BYTES: usize = 16 << 20;
/// Stack of the trial in [`GuideFactory::try_out`]: half of that of the threads that sample.
const TRIAL_STACK_BYTES: usize = 1 << 20;
/// Maximum work of one sequence, in items of the parser. They take about 16 bytes each while the
/// parser keeps them. An object with a hundred fields takes some hundred per token.
const ITEMS_MAX: usize = 16 << 20;
/// Maximum memory of a guide, as [`Guide::bytes`] estimates it.
pub const GUIDE_BYTES_MAX: usize = 128 << 20;
/// Memory by which a guide can grow in one step, in bytes. The fuel of the lexer makes up to
/// 200,000 expressions, and a guide has at most 20,000 states of about a kilobyte.
pub const GUIDE_STEP_BYTES_MAX: usize = 48 << 20;
/// Memory of a guide beside its tables.
const GUIDE_BYTES_LEAST: usize = 128 << 10;
/// Memory of the lexer, in lengths of its tables: a table may be half empty, and the lexer has a
/// copy of the expressions at its start.
const LEXER_FACTOR: usize = 3;
/// Memory of an item that the parser keeps, with its part of a row.
const ITEM_BYTES: usize = 128;
/// Memory of a byte of the text so far: it, and a state of the lexer.
const TEXT_BYTE_BYTES: usize = 64;
/// Memory of a compiled grammar per byte of its constraint.
const GRAMMAR_FACTOR: usize = 32;
/// Maximum length of a reason, in characters. The library quotes parts of grammars.
const REASON_CHARS_MAX: usize = 500;
/// Longest token that a constraint can use, in bytes.
const TOKEN_BYTES_MAX: usize = 255;

/// Failure of a constraint. The reasons reach API users.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GuideError {
    /// The constraint is wrong, or beyond a limit of the compiler.
    #[error("{0}")]
    Invalid(String),
    /// The process could not compile it, whatever the constraint is.
    #[error("the constraint could not be compiled: {0}")]
    Failed(String),
    #[error("no token of the model continues the answer within its constraint; relax the constraint")]
    NoToken,
    #[error("the constraint is too complex to continue the answer: {0}; simplify the constraint")]
    TooComplex(String),
}

fn reason(error: impl std::fmt::Display) -> String {
    // The library appends its state, or the backtrace of a panic.
    let text = error.to_string();
    let text = text.split("\n<backtrace>").next().unwrap_or_default().trim_end_matches("\n<non-verbose/>");
    text.chars().take(REASON_CHARS_MAX).collect()
}

/// Limits of one sequence. The comments give the bounds on memory and on the time of a step.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1000,
        // About 20 ms.
        initial_lexer_fuel: 1_000_000,
        // About 14 ms.
        step_lexer_fuel: 200_000,
        // About 3 ms.
        step_max_items: 50_000,
        // About 40 MB.
        max_lexer_states: 20_000,
        // A few megabytes.
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Vocabulary of a model as a trie of bytes, which compiles constraints.
///
/// It takes about 60 MiB for 150,000 tokens, and a second or two to build: share it.
pub struct GuideFactory {
    parsers: ParserFactory,
    special_tokens: BTreeMap<String, u32>,
    /// All tokens but the special ones that do not end an answer.
    text_tokens: Arc<SimpleVob>,
}

impl GuideFactory {
    /// Builds the trie of the first `vocab` tokens. `eos_tokens` end an answer.
    ///
    /// Special tokens are no text: only the marks of calls may use them.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, eos_tokens: &[u32]) -> Result<GuideFactory, GuideError> {
        let special_tokens: BTreeMap<String, u32> =
            tokenizer.special_tokens().into_iter().filter(|(_, id)| (*id as usize) < vocab).collect();
        let mut words: Vec<Vec<u8>> = (0..vocab as u32).map(|id| tokenizer.token_bytes(id)).collect();
        words.iter_mut().filter(|word| word.len() > TOKEN_BYTES_MAX).for_each(Vec::clear);
        let eos_tokens: Vec<u32> = eos_tokens.iter().copied().filter(|id| (*id as usize) < vocab).collect();
        for id in special_tokens.values().chain(&eos_tokens) {
            mark_special(&mut words[*id as usize]);
        }
        Self::build(words, eos_tokens, special_tokens)
    }

    /// Factory whose tokens are single bytes. It tells whether a constraint compiles.
    pub fn of_bytes() -> Result<GuideFactory, GuideError> {
        Self::build((0..=u8::MAX).map(|byte| vec![byte]).collect(), Vec::new(), BTreeMap::new())
    }

    fn build(
        mut words: Vec<Vec<u8>>,
        mut eos_tokens: Vec<u32>,
        special_tokens: BTreeMap<String, u32>,
    ) -> Result<GuideFactory, GuideError> {
        if eos_tokens.is_empty() {
            // The library needs one. It is beyond the vocabulary, so it is never selected.
            eos_tokens.push(words.len() as u32);
            let mut word = b"<eos>".to_vec();
            mark_special(&mut word);
            words.push(word);
        }
        let build = AssertUnwindSafe(|| {
            let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, eos_tokens[0]), &words);
            // Not canonical: the model chooses among all ways to write a text in tokens.
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie.with_eos_tokens(&eos_tokens)));
            let slices = SlicedBiasComputer::general_slices();
            let mut parsers = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
            *parsers.limits_mut() = limits();
            parsers.quiet();
            Ok(parsers)
        });
        let parsers = panic_utils::catch_unwind(build).map_err(|error| GuideError::Failed(reason(error)))?;
        let mut text_tokens = parsers.tok_env().tok_trie().alloc_token_set();
        text_tokens.set_all(true);
        for id in special_tokens.values().filter(|id| !eos_tokens.contains(id)) {
            text_tokens.disallow_token(*id);
        }
        Ok(GuideFactory { parsers, special_tokens, text_tokens: Arc::new(text_tokens) })
    }

    /// Compiles a constraint, on a thread of its own with a large stack. Takes any time: see
    /// [`Constraint`].
    pub fn compile(&self, constraint: &Constraint) -> Result<Guide, GuideError> {
        let compile = || {
            let grammar = constraint.grammar(|text| self.special_tokens.get(text).copied());
            let grammar = grammar.map_err(GuideError::Invalid)?;
            let mut parser = self.parsers.create_parser(grammar).map_err(|error| GuideError::Invalid(reason(error)))?;
            if parser.is_fresh() {
                parser.start_without_prompt();
            }
            let bytes = bytes_of(&parser, 0) + constraint.bytes() * GRAMMAR_FACTOR;
            if bytes > GUIDE_BYTES_MAX {
                return Err(GuideError::Invalid(too_large()));
            }
            // Only a grammar of a user can name tokens.
            let only = matches!(constraint, Constraint::Grammar(_)).then(|| self.text_tokens.clone());
            Ok(Guide { state: GuideState::Start(Arc::new(Mutex::new(parser))), items: 0, bytes, only })
        };
        on_stack(COMPILE_STACK_BYTES, compile)
    }

    /// Compiles a constraint and takes a first step, to see whether that needs more than a thread
    /// of an engine has.
    pub fn try_out(&self, constraint: &Constraint) -> Result<(), GuideError> {
        let mut guide = self.compile(constraint)?;
        on_stack(TRIAL_STACK_BYTES, move || guide.allowed().map(drop))
    }
}

/// Marks a token as none that text can contain.
fn mark_special(word: &mut Vec<u8>) {
    if word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
        word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
    }
}

fn on_stack<T: Send>(bytes: usize, work: impl FnOnce() -> Result<T, GuideError> + Send) -> Result<T, GuideError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(bytes).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| GuideError::Failed(format!("no thread for it: {error}")))?;
        let panicked = || GuideError::Invalid("the library for constraints panicked on it".into());
        thread.join().unwrap_or_else(|_| Err(panicked()))
    })
}

/// Estimates the memory of a parser whose masks have taken `mask_items` items.
fn bytes_of(parser: &TokenParser, mask_items: usize) -> usize {
    // The items of a mask are dropped with it, and the largest mask leaves room for its own.
    let kept = parser.parser_stats().all_items.saturating_sub(mask_items) + parser.max_step_stats().all_items;
    GUIDE_BYTES_LEAST
        + parser.parser.lexer_stats().num_bytes * LEXER_FACTOR
        + kept * ITEM_BYTES
        + parser.final_bytes().len() * TEXT_BYTE_BYTES
}

/// Place of one sequence in its constraint. A clone is independent. It costs a copy of the lexer,
/// some megabytes, which is made at the first use of a guide at its start.
pub struct Guide {
    state: GuideState,
    /// Work so far.
    items: usize,
    bytes: usize,
    /// The only tokens that may follow, whatever the constraint says.
    only: Option<Arc<SimpleVob>>,
}

enum GuideState {
    /// At the start of the constraint, as for all other guides at its start.
    Start(Arc<Mutex<TokenParser>>),
    Own(Box<TokenParser>),
    /// After an error, or released.
    Ended,
}

impl GuideState {
    /// Parser of this sequence alone. `None` after the end.
    fn own(&mut self) -> Option<&mut TokenParser> {
        if let GuideState::Start(shared) = self {
            let copy = shared.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
            *self = GuideState::Own(Box::new(copy));
        }
        if let GuideState::Own(parser) = self { Some(parser) } else { None }
    }
}

impl Clone for Guide {
    fn clone(&self) -> Self {
        let state = match &self.state {
            GuideState::Start(shared) => GuideState::Start(shared.clone()),
            GuideState::Own(parser) => GuideState::Own(Box::new(parser.deep_clone())),
            GuideState::Ended => GuideState::Ended,
        };
        Self { state, items: self.items, bytes: self.bytes, only: self.only.clone() }
    }
}

impl std::fmt::Debug for Guide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guide").field("items", &self.items).finish_non_exhaustive()
    }
}

/// Tokens that may follow.
pub struct AllowedTokens {
    mask: SimpleVob,
    only: Option<Arc<SimpleVob>>,
}

impl AllowedTokens {
    /// Sets the logits of all other tokens to negative infinity. Returns `false` if that is all of
    /// them.
    pub fn restrict(&self, logits: &mut [f32]) -> bool {
        let mut has_any = false;
        // Words of 32 tokens: most are all zero in JSON, or all ones within a string.
        for (at, logits) in logits.chunks_mut(32).enumerate() {
            let word_of = |tokens: &SimpleVob| tokens.as_slice().get(at).copied().unwrap_or(0);
            let word = word_of(&self.mask) & self.only.as_deref().map_or(u32::MAX, word_of);
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word & (1 << bit) == 0 {
                    *logit = f32::NEG_INFINITY;
                }
                has_any |= *logit > f32::NEG_INFINITY;
            }
        }
        has_any
    }
}

fn too_large() -> String {
    format!("its tables take more than {} MiB", GUIDE_BYTES_MAX >> 20)
}

fn ended() -> GuideError {
    GuideError::TooComplex("it has failed before".into())
}

impl Guide {
    /// Computes the tokens that may follow. Takes at most the limits of a step. After an error the
    /// guide has ended, and its memory is free.
    pub fn allowed(&mut self) -> Result<AllowedTokens, GuideError> {
        let allowed = self.next_mask();
        if allowed.is_err() {
            self.release();
        }
        allowed
    }

    fn next_mask(&mut self) -> Result<AllowedTokens, GuideError> {
        let parser = self.state.own().ok_or_else(ended)?;
        let items_before = self.items;
        let step = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let mask = parser.compute_mask()?;
            let items = items_before + parser.last_step_stats().all_items;
            Ok((mask, items, bytes_of(parser, items)))
        }));
        let (mask, items, bytes) = match step {
            Ok(step) => step,
            // Its name in the library. After an error, the parser has no other trace of the cause.
            Err(error) if error.to_string().starts_with("NoExtensionBias") => return Err(GuideError::NoToken),
            Err(error) => return Err(GuideError::TooComplex(reason(error))),
        };
        (self.items, self.bytes) = (items, bytes);
        if items > ITEMS_MAX {
            return Err(GuideError::TooComplex("the answer exhausts the work for one constraint".into()));
        }
        if bytes > GUIDE_BYTES_MAX {
            return Err(GuideError::TooComplex(too_large()));
        }
        Ok(AllowedTokens { mask, only: self.only.clone() })
    }

    /// Takes the next token of the sequence, one of those that [`allowed`](Self::allowed) returned.
    /// After an error the guide has ended.
    pub fn accept(&mut self, id: u32) -> Result<(), GuideError> {
        let parser = self.state.own().ok_or_else(ended)?;
        let step = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let back = parser.consume_token(id)?;
            parser.check_stop()?;
            Ok(back)
        }));
        let accepted = match step {
            Ok(0) => Ok(()),
            Ok(_) => Err(GuideError::TooComplex("the parser went back".into())),
            Err(error) => Err(GuideError::TooComplex(reason(error))),
        };
        if accepted.is_err() {
            self.release();
        }
        accepted
    }

    /// Memory of the guide in bytes, estimated at the last call of [`allowed`](Self::allowed). At
    /// the start of a constraint, it is that of the tables that all guides at its start share.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Ends the guide and frees its memory.
    pub fn release(&mut self) {
        self.state = GuideState::Ended;
        self.bytes = 0;
    }

    /// Returns `true` if the text is complete and nothing may follow, or after an error.
    pub fn has_ended(&self) -> bool {
        match &self.state {
            GuideState::Start(shared) => shared.lock().unwrap_or_else(PoisonError::into_inner).stopped(),
            GuideState::Own(parser) => parser.stopped(),
            GuideState::Ended => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constraint::{CallConstraint, CallForm, CallableFunction, Otherwise};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use serde_json::Value;

    const EOS: u32 = 256;

    /// Bytes, the end of sequence, a special token, and some longer tokens.
    fn factory() -> GuideFactory {
        let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        words.extend([b"<eos>".to_vec(), b"[TOOL_CALLS]".to_vec()]);
        words.extend(["{\"", "\": ", "name", "true", "  ", "né", "ar"].map(|word| word.as_bytes().to_vec()));
        mark_special(&mut words[256]);
        mark_special(&mut words[257]);
        GuideFactory::build(words, vec![EOS], [("[TOOL_CALLS]".to_string(), 257)].into()).unwrap()
    }

    fn bytes_of(factory: &GuideFactory, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|&id| factory.parsers.tok_env().tok_trie().token(id).to_vec()).collect()
    }

    /// Text of a random sequence of allowed tokens. `None` if it does not end.
    fn random_text(factory: &GuideFactory, guide: &Guide, seed: u64) -> Option<String> {
        let mut guide = guide.clone();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut ids = Vec::new();
        for _ in 0..2000 {
            let mut logits = vec![0.0; 265];
            assert!(guide.allowed().unwrap().restrict(&mut logits));
            let allowed: Vec<u32> = (0..265).filter(|&id| logits[id as usize] == 0.0).collect();
            let id = allowed[rng.random_range(0..allowed.len())];
            guide.accept(id).unwrap();
            if id != EOS {
                ids.push(id);
            }
            if guide.has_ended() {
                return Some(String::from_utf8(bytes_of(factory, &ids)).unwrap());
            }
        }
        None
    }

    #[test]
    fn guides_at_the_start_share_their_tables_until_the_first_use() {
        let factory = factory();
        let first = factory.compile(&Constraint::JsonSchema(PERSON.into())).unwrap();
        let is_shared = |a: &Guide, b: &Guide| match (&a.state, &b.state) {
            (GuideState::Start(a), GuideState::Start(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let (mut used, other) = (first.clone(), first.clone());
        assert!(is_shared(&first, &used) && is_shared(&first, &other));
        used.allowed().unwrap();
        used.accept(u32::from(b'{')).unwrap();
        assert!(!is_shared(&first, &used) && is_shared(&first, &other));
        // The use of one has not moved the others from the start.
        let mut logits = vec![0.0; 265];
        assert!(other.clone().allowed().unwrap().restrict(&mut logits));
        assert_eq!((logits[usize::from(b'{')], logits[usize::from(b'"')]), (0.0, f32::NEG_INFINITY));
    }

    #[test]
    fn memory_of_a_guide_grows_with_its_text_until_it_ends() {
        let factory = factory();
        let mut guide = factory.compile(&Constraint::Regex("[ab]*".into())).unwrap();
        assert!(guide.bytes() >= GUIDE_BYTES_LEAST);
        let mut sizes = Vec::new();
        for _ in 0..200 {
            guide.allowed().unwrap();
            sizes.push(guide.bytes());
            guide.accept(u32::from(b'a')).unwrap();
        }
        assert!(sizes.is_sorted(), "{sizes:?}");
        assert!(sizes[199] >= sizes[0] + 199 * TEXT_BYTE_BYTES, "{sizes:?}");
        let kept = guide.clone();
        guide.release();
        assert_eq!((guide.bytes(), guide.has_ended(), guide.allowed().is_err()), (0, true, true));
        assert!(guide.accept(u32::from(b'a')).is_err());
        assert!(kept.bytes() > 0 && !kept.has_ended(), "a clone is independent");
    }

    /// Texts of 40 seeds. Each must end.
    fn random_texts(factory: &GuideFactory, constraint: &Constraint) -> Vec<String> {
        let guide = factory.compile(constraint).unwrap();
        (0..40).map(|seed| random_text(factory, &guide, seed).expect("the text ends")).collect()
    }

    const PERSON: &str = r##"{
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
            "pet": {"oneOf": [{"type": "null"}, {"const": "cat"}]}
        },
        "required": ["name", "age", "tags", "pet"],
        "additionalProperties": false,
        "$defs": {"tag": {"enum": ["red", "grün"]}}
    }"##;

    #[test]
    fn random_tokens_keep_to_the_schema() {
        let factory = factory();
        let texts = random_texts(&factory, &Constraint::JsonSchema(PERSON.into()));
        for text in &texts {
            let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert_eq!(value.as_object().unwrap().len(), 4, "{text}");
            assert!(value["name"].as_str().unwrap().chars().count() <= 8, "{text}");
            assert!(value["age"].as_u64().unwrap() <= 150, "{text}");
            let tags = value["tags"].as_array().unwrap();
            assert!(tags.len() <= 3 && tags.iter().all(|tag| *tag == "red" || *tag == "grün"), "{text}");
            assert!(value["pet"].is_null() || value["pet"] == "cat", "{text}");
        }
        let distinct: std::collections::BTreeSet<_> = texts.iter().collect();
        assert!(distinct.len() > 30, "the seeds give different texts");
    }

    #[test]
    fn random_tokens_keep_to_expressions_choices_and_grammars() {
        let factory = factory();
        for text in random_texts(&factory, &Constraint::Regex("^[a-c]{2,4}-[0-9]$".into())) {
            let (letters, digit) = text.split_once('-').unwrap();
            assert!((2..=4).contains(&letters.len()) && digit.len() == 1, "{text}");
        }
        let choices = ["red", "grün", "a \"b\"\n", "[TOOL_CALLS]", "re", ""].map(String::from);
        for text in random_texts(&factory, &Constraint::Choice(choices.to_vec())) {
            assert!(choices.contains(&text), "{text}");
        }
        let lark = "start: sum\nsum: NUMBER (\"+\" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/";
        for text in random_texts(&factory, &Constraint::Grammar(lark.into())) {
            assert!((2..=4).contains(&text.split('+').count()), "{text}");
            assert!(text.split('+').all(|number| number.parse::<u16>().is_ok()), "{text}");
        }
    }

    #[test]
    fn calls_have_the_form_of_the_template_and_the_arguments_of_the_function() {
        let factory = factory();
        let functions = vec![
            CallableFunction { name: "get.age".into(), parameters: Some(PERSON.into()) },
            CallableFunction { name: "stop".into(), parameters: None },
        ];
        let calls = |form, is_parallel| {
            let constraint =
                CallConstraint { form, functions: functions.clone(), is_parallel, otherwise: Otherwise::Never };
            random_texts(&factory, &Constraint::Calls(constraint))
        };
        for text in calls(CallForm::Hermes, true) {
            assert!(text.starts_with("<tool_call>\n{\"name\": \"") && text.ends_with("}\n</tool_call>"), "{text}");
        }
        for text in calls(CallForm::Llama3, true) {
            let call: Value = serde_json::from_str(&text).unwrap();
            assert!(call["name"] == "stop" || call["parameters"]["age"].is_u64(), "{text}");
        }
        // The mark is a special token, which the test spells with a byte before it.
        let guide = factory.compile(&Constraint::Calls(CallConstraint {
            form: CallForm::MistralList,
            functions,
            is_parallel: false,
            otherwise: Otherwise::Never,
        }));
        let mut logits = vec![0.0; 265];
        assert!(guide.unwrap().allowed().unwrap().restrict(&mut logits));
        assert_eq!((0..265).filter(|&id| logits[id] == 0.0).collect::<Vec<_>>(), [257]);
    }

    /// Feeds a text byte by byte. Returns the bytes that may follow, and whether the text may end.
    fn after(guide: &Guide, text: &str) -> (Vec<u8>, bool) {
        let mut guide = guide.clone();
        for byte in text.bytes() {
            let mut logits = vec![0.0; 265];
            assert!(guide.allowed().unwrap().restrict(&mut logits));
            assert_eq!(logits[byte as usize], 0.0, "{} in {text}", byte as char);
            guide.accept(u32::from(byte)).unwrap();
        }
        let mut logits = vec![0.0; 265];
        assert!(guide.has_ended() || guide.allowed().unwrap().restrict(&mut logits));
        ((0..=u8::MAX).filter(|&byte| logits[byte as usize] == 0.0).collect(), logits[EOS as usize] == 0.0)
    }

    #[test]
    fn text_may_precede_calls_that_keep_to_the_schema() {
        let factory = factory();
        let parameters = Some(r#"{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}"#.into());
        let functions = vec![CallableFunction { name: "f".into(), parameters }];
        let guide = |form, otherwise| {
            let constraint = CallConstraint { form, functions: functions.clone(), is_parallel: true, otherwise };
            factory.compile(&Constraint::Calls(constraint)).unwrap()
        };
        let hermes = guide(CallForm::Hermes, Otherwise::Text);
        for text in ["", "Hello <tool", "<tool_call", "a\n\n<tool_cal>"] {
            let (next, may_end) = after(&hermes, text);
            assert!(next.len() > 150 && may_end, "{text}: {next:?}");
        }
        for before in ["", "I look.\n", "<tool_cal <"] {
            let text = format!("{before}<tool_call>");
            assert_eq!(after(&hermes, &text), (b"\n".to_vec(), false), "{text}");
            let text = format!("{text}\n{{\"name\": \"f\", \"arguments\": {{\"a\":");
            let (next, may_end) = after(&hermes, &text);
            assert!(next.contains(&b'n') && !next.contains(&b'1') && !may_end, "{next:?}");
        }
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": null}}\n</tool_call>";
        assert!(after(&hermes, call).1 && after(&hermes, &format!("{call}\nDone.")).1);
        for between in ["\n", " And <tool_\n"] {
            let text = format!("{call}{between}<tool_call>");
            assert_eq!(after(&hermes, &text), (b"\n".to_vec(), false), "{text}");
        }
        let llama = guide(CallForm::Llama3, Otherwise::Text);
        assert_eq!(after(&llama, "{"), (b"\"".to_vec(), false));
        assert!(after(&llama, " Hello {").1);
        let json = guide(CallForm::Hermes, Otherwise::Json(r#"{"const": 17}"#.into()));
        assert_eq!(after(&json, "").0, b"1<");
        assert!(after(&json, "17").1);
    }

    #[test]
    fn grammar_cannot_name_tokens() {
        let factory = factory();
        let mut guide = factory.compile(&Constraint::Grammar("start: <[257]> | <[97]>".into())).unwrap();
        let mut logits = vec![0.0; 265];
        assert!(guide.allowed().unwrap().restrict(&mut logits));
        assert_eq!((logits[97], logits[257]), (0.0, f32::NEG_INFINITY));
    }

    #[test]
    fn text_of_a_string_has_no_special_tokens() {
        let factory = factory();
        let mut guide = factory.compile(&Constraint::Regex("(?s:.)*".into())).unwrap();
        let mut logits = vec![0.0; 265];
        assert!(guide.allowed().unwrap().restrict(&mut logits));
        assert_eq!((logits[b'x' as usize], logits[EOS as usize]), (0.0, 0.0));
        assert_eq!(logits[257], f32::NEG_INFINITY);
    }

    #[test]
    fn wrong_constraints_are_refused_with_a_reason() {
        let factory = GuideFactory::of_bytes().unwrap();
        let deep = format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000));
        let nested = (0..200).fold("{\"type\": \"null\"}".to_string(), |inner, _| {
            format!("{{\"type\": \"array\", \"items\": {inner}}}")
        });
        for (constraint, part) in [
            (Constraint::JsonSchema("{".into()), "not JSON"),
            (Constraint::JsonSchema(r#"{"type": "colour"}"#.into()), "colour"),
            (Constraint::JsonSchema(r#"{"type": "array", "uniqueItems": true}"#.into()), "uniqueItems"),
            (Constraint::JsonSchema(nested), "recursion"),
            (Constraint::Regex("(".into()), ""),
            (Constraint::Regex("(?=a)b".into()), "look-around"),
            (Constraint::Grammar("start: missing".into()), "missing"),
            (Constraint::Grammar(deep), "nested"),
            (Constraint::JsonSchema(r#"{"type": "string", "pattern": "(a|b){3}c{2,9}(?!x)"}"#.into()), "look-around"),
        ] {
            let Err(error) = factory.try_out(&constraint) else { panic!("{constraint:?} is accepted") };
            assert!(matches!(&error, GuideError::Invalid(reason) if reason.contains(part)), "{constraint:?}: {error}");
            assert!(error.to_string().len() <= 4 * REASON_CHARS_MAX);
        }
    }

    #[test]
    fn vocabulary_that_cannot_write_the_text_is_an_error() {
        let words = vec![b"a".to_vec(), b"b".to_vec()];
        let factory = GuideFactory::build(words, Vec::new(), BTreeMap::new()).unwrap();
        let mut guide = factory.compile(&Constraint::Choice(vec!["ac".into()])).unwrap();
        let mut logits = vec![0.0; 2];
        assert!(guide.allowed().unwrap().restrict(&mut logits));
        assert_eq!(logits, [0.0, f32::NEG_INFINITY]);
        guide.accept(0).unwrap();
        assert_eq!(guide.allowed().err(), Some(GuideError::NoToken));
    }

    #[test]
    fn ambiguous_grammar_ends_at_a_limit() {
        let factory = GuideFactory::of_bytes().unwrap();
        let mut guide = factory.compile(&Constraint::Grammar("start: a\na: a a a | \"x\" | \"\"".into())).unwrap();
        let error = (0..100_000).find_map(|_| {
            let step = guide.allowed().and_then(|_| guide.accept(u32::from(b'x')));
            step.err()
        });
        assert!(matches!(error, Some(GuideError::TooComplex(_))), "{error:?}");
    }
}
