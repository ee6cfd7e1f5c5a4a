//! Requests of the OpenAI API, and the types its responses share.
//!
//! Invariant: every field of a request is honoured, is in [`WITHOUT_EFFECT`], or is refused by its
//! name. A field of `NEUTRAL` is accepted at the value that describes what this server does anyway.
//! Ignoring others would return a wrong answer without notice.
//!
//! If an object names a field twice, the last value counts, as in the JSON parsers of Python, on
//! which most servers of this API are built.

use super::constraint::{self, RequestedConstraint};
use super::errors::ApiError;
use super::fields::{Fields, is_empty};
use super::messages::{refuse_rest_inner, take_inner, take_messages};
use super::prompt::{PromptInput, Prompts};
use super::sampling::RequestedSampling;
use super::tools::{ToolRequest, take_tools};
use larder_model::{ChatMessage, GenerationDefaults, RESERVED_VARIABLES, RenderOptions, SamplingParams};
use larder_worker::api::{FinishReason, TOP_LOGPROBS_MAX};
use serde::de::Deserializer;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

pub const CHOICES_MAX: u32 = 128;
/// Default of `max_tokens` in `/v1/completions`, as in OpenAI's API.
pub const COMPLETION_TOKENS_DEFAULT: u32 = 16;

/// Fields that change nothing about an answer, whatever their value. They name the caller, or
/// concern billing, retention and caches of OpenAI's service.
pub const WITHOUT_EFFECT: [&str; 9] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    // A guess at the answer, for speed only.
    "prediction",
    // It concerns tokenizers that this server does not have.
    "spaces_between_special_tokens",
];

/// Field, and a test for the values of it that describe what this server does without it.
pub(super) type NeutralField = (&'static str, fn(&Value) -> bool);

const NEUTRAL: [NeutralField; 16] = [
    ("suffix", is_empty),
    ("modalities", |value| *value == serde_json::json!(["text"])),
    ("audio", is_empty),
    ("tools", is_empty),
    ("functions", is_empty),
    ("tool_choice", |value| matches!(value.as_str(), Some("auto" | "none"))),
    ("function_call", |value| matches!(value.as_str(), Some("auto" | "none"))),
    ("parallel_tool_calls", Value::is_boolean),
    ("use_beam_search", is_false),
    ("early_stopping", is_false),
    ("length_penalty", |value| value.as_f64() == Some(1.0)),
    ("priority", |value| value.as_f64() == Some(0.0)),
    ("return_token_ids", is_false),
    ("return_tokens_as_token_ids", is_false),
    ("bad_words", is_empty),
    ("documents", is_empty),
];

pub(super) fn is_false(value: &Value) -> bool {
    *value == Value::Bool(false)
}

#[derive(Debug, Clone, PartialEq)]
pub struct CommonParams {
    pub model: String,
    pub sampling: RequestedSampling,
    /// Maximum tokens to generate. `None` takes the endpoint's default. 0 only with `echo`.
    pub max_tokens: Option<u32>,
    /// Choices per prompt, from 1 to [`CHOICES_MAX`].
    pub n: u32,
    /// Choices to generate per prompt. The answer has the `n` most probable ones.
    pub best_of: u32,
    pub stream: bool,
    pub stream_options: StreamOptions,
    /// Number of best tokens to report with each token of the answer.
    pub logprobs: Option<u32>,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// Number of last tokens of the prompt to keep. -1 keeps as many as fit the context.
    pub truncate_prompt: Option<i64>,
    /// Adds the model's surrounding tokens to a text. `None` takes the endpoint's default.
    pub add_special_tokens: Option<bool>,
    /// Texts that the answer may have. `None`: any.
    pub constraint: Option<RequestedConstraint>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamOptions {
    pub include_usage: bool,
    /// Every chunk has the usage so far.
    pub continuous_usage: bool,
    /// The last chunk splits the cached tokens by tier. SGLang's `return_cached_tokens_details`.
    pub cached_details: bool,
}

impl StreamOptions {
    /// Returns `true` if a chunk about the whole answer comes last.
    pub fn has_last_chunk(self) -> bool {
        self.include_usage || self.cached_details
    }
}

impl<'de> Deserialize<'de> for StreamOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let options = Self {
            include_usage: take_inner(&mut fields, "include_usage")?.unwrap_or(false),
            continuous_usage: take_inner(&mut fields, "continuous_usage_stats")?.unwrap_or(false),
            cached_details: false,
        };
        // It asks for padding of the chunks against observers, which clients must ignore.
        fields.ignore("include_obfuscation");
        refuse_rest_inner(&fields)?;
        Ok(options)
    }
}

impl CommonParams {
    fn take(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        for name in WITHOUT_EFFECT {
            fields.ignore(name);
        }
        for (name, is_neutral) in NEUTRAL {
            fields.refuse_unless(name, is_neutral)?;
        }
        let n: u32 = fields.take("n")?.unwrap_or(1);
        if !(1..=CHOICES_MAX).contains(&n) {
            return Err(ApiError::field("n", format!("'n' is {n}; it must be from 1 to {CHOICES_MAX}")));
        }
        let max_tokens: Option<u32> = fields.take_either("max_completion_tokens", "max_tokens")?;
        let sampling = RequestedSampling::take(fields)?;
        if max_tokens.is_some_and(|max_tokens| (max_tokens as usize) < sampling.rest.min_tokens) {
            return Err(ApiError::field("min_tokens", "'min_tokens' is above the maximum number of tokens"));
        }
        let truncate_prompt: Option<i64> = fields.take("truncate_prompt_tokens")?;
        if truncate_prompt.is_some_and(|tokens| tokens < 1 && tokens != -1) {
            let message = "'truncate_prompt_tokens' must be at least 1, or -1 for the model's context";
            return Err(ApiError::field("truncate_prompt_tokens", message));
        }
        let stream_options: StreamOptions = fields.take("stream_options")?.unwrap_or_default();
        // A whole answer always has them.
        let cached_details = fields.take("return_cached_tokens_details")?.unwrap_or(false);
        Ok(Self {
            model: fields.require("model")?,
            sampling,
            max_tokens,
            n,
            best_of: n,
            stream: fields.take("stream")?.unwrap_or(false),
            stream_options: StreamOptions { cached_details, ..stream_options },
            logprobs: None,
            echo: false,
            truncate_prompt,
            add_special_tokens: fields.take("add_special_tokens")?,
            constraint: constraint::take(fields)?,
        })
    }

    /// Refuses an empty answer, unless it has the prompt.
    fn check_max_tokens(&self) -> Result<(), ApiError> {
        if self.max_tokens == Some(0) && !self.echo {
            return Err(ApiError::field("max_tokens", "'max_tokens' must be at least 1"));
        }
        Ok(())
    }

    /// Sampling parameters of choice number `choice` of a prompt. A seed is varied per choice, or
    /// all choices would be equal.
    pub fn sampling_of(&self, choice: u32, max_tokens: u32, defaults: &GenerationDefaults) -> SamplingParams {
        let sampling = self.sampling.complete(defaults);
        let seed = sampling.seed.map(|seed| seed.wrapping_add(u64::from(choice)));
        // The choice among several needs the probabilities of their tokens.
        let logprobs = self.logprobs.or((self.best_of > self.n).then_some(0));
        // Once for all choices: the prompt is the same.
        let prompt_logprobs = self.logprobs.filter(|_| self.echo && choice == 0);
        let constraint = self.constraint.as_ref().map(|requested| requested.constraint.clone());
        SamplingParams { seed, max_tokens: max_tokens as usize, logprobs, prompt_logprobs, constraint, ..sampling }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    pub common: CommonParams,
    pub prompts: Vec<PromptInput>,
}

impl CompletionRequest {
    /// Parses and validates a body. Errors name the first wrong field.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let mut common = CommonParams::take(&mut fields)?;
        fields.refuse_unless("top_logprobs", |value| value.as_f64() == Some(0.0))?;
        common.logprobs = take_count(&mut fields, "logprobs")?;
        common.echo = fields.take("echo")?.unwrap_or(false);
        common.check_max_tokens()?;
        common.best_of = fields.take("best_of")?.unwrap_or(common.n);
        if !(common.n..=CHOICES_MAX).contains(&common.best_of) {
            let message = format!("'best_of' is {}; it must be from 'n' to {CHOICES_MAX}", common.best_of);
            return Err(ApiError::field("best_of", message));
        }
        if common.best_of > common.n && common.stream {
            return Err(ApiError::field("best_of", "'best_of' above 'n' cannot be streamed"));
        }
        let Prompts(prompts) = fields.require("prompt")?;
        fields.refuse_unknown()?;
        Ok(Self { common, prompts })
    }
}

/// Takes a number of log-probabilities. `false` counts as absent.
fn take_count(fields: &mut Fields<'_>, name: &str) -> Result<Option<u32>, ApiError> {
    if fields.take_if(name, is_false) {
        return Ok(None);
    }
    let count: Option<u32> = fields.take(name)?;
    match count {
        Some(count) if count > TOP_LOGPROBS_MAX => {
            Err(ApiError::field(name, format!("'{name}' is {count}; it must be at most {TOP_LOGPROBS_MAX}")))
        }
        count => Ok(count),
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    pub common: CommonParams,
    pub messages: Vec<ChatMessage>,
    pub render: RenderOptions,
    /// `None` if the model may call no tool.
    pub tools: Option<ToolRequest>,
}

impl ChatRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::take(Fields::parse(body)?, |fields| {
            take_messages(fields)?.ok_or_else(|| ApiError::field("messages", "'messages' is required"))
        })
    }

    /// Takes all fields, and the conversation with `messages`.
    pub(super) fn take<'a>(
        mut fields: Fields<'a>,
        messages: impl FnOnce(&mut Fields<'a>) -> Result<Vec<ChatMessage>, ApiError>,
    ) -> Result<Self, ApiError> {
        let tools = take_tools(&mut fields)?;
        let mut common = CommonParams::take(&mut fields)?;
        common.check_max_tokens()?;
        fields.refuse_unless("echo", is_false)?;
        fields.refuse_unless("best_of", |value| value.as_f64() == Some(1.0))?;
        let has_logprobs = fields.take("logprobs")?.unwrap_or(false);
        let top_logprobs = take_count(&mut fields, "top_logprobs")?;
        if !has_logprobs && top_logprobs.is_some_and(|top| top > 0) {
            return Err(ApiError::field("top_logprobs", "'top_logprobs' needs 'logprobs' to be true"));
        }
        common.logprobs = has_logprobs.then_some(top_logprobs.unwrap_or(0));
        let messages = messages(&mut fields)?;
        let mut render = take_render_options(&mut fields)?;
        render.tools = tools.as_ref().map(|tools| tools.list.clone());
        let continues = render.continue_final_message;
        if continues && messages.last().is_none_or(|last| last.role != "assistant" || !last.tool_calls.is_empty()) {
            let message = "'continue_final_message' needs a last message of the role assistant, without tool calls";
            return Err(ApiError::field("continue_final_message", message));
        }
        fields.refuse_unknown()?;
        Ok(Self { common, messages, render, tools })
    }
}

pub(super) fn take_render_options(fields: &mut Fields<'_>) -> Result<RenderOptions, ApiError> {
    let continue_final_message = fields.take("continue_final_message")?.unwrap_or(false);
    let given: Option<bool> = fields.take("add_generation_prompt")?;
    if given == Some(true) && continue_final_message {
        let message = "'continue_final_message' and 'add_generation_prompt' exclude each other";
        return Err(ApiError::field("continue_final_message", message));
    }
    Ok(RenderOptions {
        add_generation_prompt: given.unwrap_or(!continue_final_message),
        continue_final_message,
        tools: None,
        variables: take_variables(fields)?,
    })
}

/// Takes the variables of the chat template, as a JSON object.
fn take_variables(fields: &mut Fields<'_>) -> Result<Option<String>, ApiError> {
    const EFFORT: &str = "reasoning_effort";
    let effort: Option<&RawValue> = fields.take(EFFORT)?;
    let given: Option<&RawValue> = fields.take("chat_template_kwargs")?;
    let wrong = |message: String| ApiError::field("chat_template_kwargs", message);
    let mut variables: Fields<'_> = match given {
        None => Fields::default(),
        Some(given) => {
            serde_json::from_str(given.get()).map_err(|_| wrong("'chat_template_kwargs' must be an object".into()))?
        }
    };
    if let Some(name) = RESERVED_VARIABLES.iter().find(|name| variables.contains(name)) {
        return Err(wrong(format!("'chat_template_kwargs' cannot set '{name}'")));
    }
    if let Some(effort) = effort {
        if !effort.get().starts_with('"') {
            return Err(ApiError::field(EFFORT, "'reasoning_effort' must be a string"));
        }
        if variables.contains(EFFORT) {
            let message = "'reasoning_effort' is also in 'chat_template_kwargs'; give it only once";
            return Err(ApiError::field(EFFORT, message));
        }
        variables.insert(EFFORT, effort);
    }
    if effort.is_none() && given.is_none() {
        return Ok(None);
    }
    let json = variables.to_json().map_err(|error| ApiError::internal("read the request", error))?;
    Ok(Some(json))
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of all prompts. A prompt with several choices counts once.
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: u32,
}

impl Usage {
    /// Derives the total. Limits `cached_tokens` to the prompt, because engines report it page by
    /// page.
    pub fn new(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: PromptTokensDetails { cached_tokens: cached_tokens.min(prompt_tokens) },
        }
    }
}

pub fn finish_reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::{MESSAGES_MAX, PARTS_MAX};
    use super::super::prompt::PROMPTS_MAX;
    use super::*;
    use serde_json::json;

    fn completion(body: Value) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(body.to_string().as_bytes())
    }

    fn chat(body: Value) -> Result<ChatRequest, ApiError> {
        ChatRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn parse_accepts_every_form_of_prompt() {
        let text = |t: &str| PromptInput::Text(t.into());
        for (prompt, expected) in [
            (json!("a"), vec![text("a")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![PromptInput::Tokens(vec![1, 2])]),
            (json!([[1], [2, 3]]), vec![PromptInput::Tokens(vec![1]), PromptInput::Tokens(vec![2, 3])]),
        ] {
            assert_eq!(completion(json!({"model": "m", "prompt": prompt})).unwrap().prompts, expected);
        }
        for prompt in [json!([1, "a"]), json!([-1]), json!({"a": 1}), json!(vec!["x"; PROMPTS_MAX + 1])] {
            let error = completion(json!({"model": "m", "prompt": prompt})).unwrap_err();
            assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some("prompt")));
        }
    }

    #[test]
    fn parse_applies_openai_defaults() {
        let common = completion(json!({"model": "m", "prompt": "a", "user": "u", "best_of": 1})).unwrap().common;
        let sampling = common.sampling_of(0, 3, &GenerationDefaults::default());
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (1.0, 1.0, 0));
        let defaults = GenerationDefaults {
            temperature: Some(0.6),
            top_p: Some(0.9),
            top_k: Some(20),
            min_p: Some(0.1),
            repetition_penalty: Some(1.1),
            ..GenerationDefaults::default()
        };
        let sampling = common.sampling_of(0, 3, &defaults);
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.6, 0.9, 20));
        assert_eq!((sampling.min_p, sampling.repetition_penalty), (0.1, 1.1));
        assert_eq!((common.n, common.stream, common.max_tokens), (1, false, None));
        let common = chat(json!({"model": "m", "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 9, "max_completion_tokens": 9, "stop": "x", "seed": -1, "top_k": -1, "temperature": 0,
            "stream": true, "stream_options": {"include_usage": true}, "n": 2}))
        .unwrap()
        .common;
        let sampling = common.sampling_of(0, 5, &defaults);
        assert_eq!((common.max_tokens, sampling.stop.as_slice()), (Some(9), &["x".to_string()][..]));
        assert_eq!((sampling.seed, sampling.top_k, sampling.temperature), (Some(u64::MAX), 0, 0.0));
        assert!(common.stream && common.stream_options.include_usage);
        assert_eq!(common.sampling_of(1, 5, &defaults).seed, Some(0));
    }

    #[test]
    fn parse_refuses_fields_that_would_change_the_answer() {
        for (field, value) in [
            ("logprobs", json!(21)),
            ("logprobs", json!(true)),
            ("top_logprobs", json!(2)),
            ("best_of", json!(0)),
            ("best_of", json!(129)),
            ("response_format", json!({"type": "structural_tag"})),
            ("tools", json!([{"type": "function"}])),
            ("functions", json!([{"name": "f"}])),
            ("tool_choice", json!("required")),
            ("guided_decoding_backend", json!("x")),
            ("tool_choice", json!({"type": "function"})),
            ("logit_bias", json!({"5": 101})),
            ("logit_bias", json!({"five": 1})),
            ("presence_penalty", json!(2.5)),
            ("repetition_penalty", json!(0)),
            ("min_p", json!(1.5)),
            ("min_tokens", json!(17)),
            ("n", json!(0)),
            ("n", json!(129)),
            ("temperature", json!(2.5)),
            ("temperature", json!("hot")),
            ("max_tokens", json!(0)),
            ("stop", json!(vec!["s"; 17])),
            ("stop_token_ids", json!(vec![1; 129])),
            ("stream", json!("yes")),
            ("stream_options", json!({"include_all": true})),
            ("truncate_prompt_tokens", json!(0)),
            ("guided_json", json!("x")),
            ("guided_regex", json!(7)),
            ("chat_template", json!("x")),
            ("priority", json!(5)),
            ("temp", json!(0.5)),
            ("messages", json!([])),
            ("chat_template_kwargs", json!({})),
        ] {
            let mut body = json!({"model": "m", "prompt": "a", "max_tokens": 16});
            body[field] = value.clone();
            let error = completion(body).unwrap_err();
            assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some(field)), "{value}");
        }
        let harmless = json!({"model": "m", "prompt": "a", "logprobs": null, "echo": false, "presence_penalty": 0,
            "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {},
            "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "parallel_tool_calls": true, "guided_json": null,
            "length_penalty": 1.0, "use_beam_search": false, "stream_options": {"include_obfuscation": false}});
        completion(harmless).unwrap();
    }

    #[test]
    fn two_names_of_one_field_must_agree() {
        for (name, other) in [("max_completion_tokens", "max_tokens"), ("min_tokens", "min_new_tokens")] {
            let both = |value: u32| completion(json!({"model": "m", "prompt": "a", name: 7, other: value}));
            both(7).unwrap();
            assert_eq!(both(6).unwrap_err().body.param.as_deref(), Some(other));
        }
    }

    #[test]
    fn parse_honours_sampling_fields() {
        let request = completion(json!({"model": "m", "prompt": "a", "presence_penalty": 0.5, "frequency_penalty": -1,
            "repetition_penalty": 1.2, "logit_bias": {"5": 1, "7": -100.0}, "min_p": 0.1, "min_tokens": 2,
            "stop_token_ids": [3, 4], "include_stop_str_in_output": true, "skip_special_tokens": false, "best_of": 3,
            "n": 2, "logprobs": 2, "echo": true, "truncate_prompt_tokens": 9, "add_special_tokens": false,
            "stream_options": {"continuous_usage_stats": true}}))
        .unwrap()
        .common;
        let sampling = request.sampling_of(0, 16, &GenerationDefaults::default());
        let expected = SamplingParams {
            temperature: 1.0,
            presence_penalty: 0.5,
            frequency_penalty: -1.0,
            repetition_penalty: 1.2,
            logit_bias: vec![(5, 1.0), (7, -100.0)],
            min_p: 0.1,
            min_tokens: 2,
            max_tokens: 16,
            stop_token_ids: vec![3, 4],
            include_stop: true,
            skip_special_tokens: false,
            logprobs: Some(2),
            prompt_logprobs: Some(2),
            ..SamplingParams::default()
        };
        assert_eq!(sampling, expected);
        assert_eq!((request.n, request.best_of, request.truncate_prompt), (2, 3, Some(9)));
        assert_eq!((request.add_special_tokens, request.stream_options.continuous_usage), (Some(false), true));
        let ranked = completion(json!({"model": "m", "prompt": "a", "best_of": 2})).unwrap().common;
        assert_eq!(ranked.sampling_of(0, 1, &GenerationDefaults::default()).logprobs, Some(0), "to rank the choices");
        let streamed = completion(json!({"model": "m", "prompt": "a", "best_of": 2, "stream": true})).unwrap_err();
        assert_eq!(streamed.body.param.as_deref(), Some("best_of"));
        completion(json!({"model": "m", "prompt": "a", "max_tokens": 0, "echo": true})).unwrap();
    }

    #[test]
    fn parse_takes_options_of_the_template() {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        let render = |mut fields: Value| {
            fields["model"] = json!("m");
            fields["messages"] = messages.clone();
            chat(fields).map(|request| request.render)
        };
        assert!(render(json!({})).unwrap().add_generation_prompt);
        assert!(!render(json!({"add_generation_prompt": false})).unwrap().add_generation_prompt);
        let continued = render(json!({"continue_final_message": true})).unwrap();
        assert!(continued.continue_final_message && !continued.add_generation_prompt);
        let variables = render(json!({"chat_template_kwargs": {"enable_thinking": false}})).unwrap().variables;
        assert_eq!(variables.as_deref(), Some(r#"{"enable_thinking":false}"#));
        let effort = render(json!({"reasoning_effort": "low"})).unwrap().variables;
        assert_eq!(effort.as_deref(), Some(r#"{"reasoning_effort":"low"}"#));
        let both = json!({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false}});
        let both = render(both).unwrap().variables;
        assert_eq!(both.as_deref(), Some(r#"{"enable_thinking":false,"reasoning_effort":"low"}"#));
        let twice = json!({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}});
        for (fields, param) in [
            (twice, "reasoning_effort"),
            (json!({"reasoning_effort": 3}), "reasoning_effort"),
            (json!({"continue_final_message": true, "add_generation_prompt": true}), "continue_final_message"),
            (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs"),
            (json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"echo": true}), "echo"),
            (json!({"prompt": "a"}), "prompt"),
        ] {
            assert_eq!(render(fields).unwrap_err().body.param.as_deref(), Some(param));
        }
        let user_last =
            json!({"model": "m", "messages": [{"role": "user", "content": "a"}], "continue_final_message": true});
        assert_eq!(chat(user_last).unwrap_err().body.param.as_deref(), Some("continue_final_message"));
        let logprobs = |fields: Value| {
            render(fields.clone()).map(|_| {
                let mut body = fields;
                body["model"] = json!("m");
                body["messages"] = messages.clone();
                chat(body).unwrap().common.logprobs
            })
        };
        assert_eq!(logprobs(json!({"logprobs": true})).unwrap(), Some(0));
        assert_eq!(logprobs(json!({"logprobs": true, "top_logprobs": 3})).unwrap(), Some(3));
        assert_eq!(logprobs(json!({"logprobs": false, "top_logprobs": 0})).unwrap(), None);
    }

    #[test]
    fn parse_accepts_messages_of_every_role() {
        let request = chat(json!({"model": "m", "messages": [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "refusal": null, "annotations": [], "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
                    {"function": {"name": "g", "arguments": {"b": 2}}},
                    {"function": {"name": "h", "arguments": ""}},
                ]},
            {"role": "tool", "content": "42", "tool_call_id": "x", "name": "f"},
        ]}))
        .unwrap();
        let read: Vec<_> = request.messages.iter().map(|m| (m.role.as_str(), m.content.text().into_owned())).collect();
        let expected = [("system", "be kind"), ("user", "a\nb"), ("assistant", ""), ("tool", "42")];
        assert_eq!(read, expected.map(|(role, text)| (role, text.to_string())));
        let [_, _, call, result] = &request.messages[..] else { panic!() };
        assert_eq!((call.reasoning_content.as_deref(), call.tool_calls[0].id.as_str()), (Some("hm"), "x"));
        let arguments: Vec<_> = call.tool_calls.iter().map(|call| call.function.arguments.as_str()).collect();
        assert_eq!(arguments, ["{\"a\": 1}", "{\"b\":2}", "{}"]);
        assert_eq!((result.tool_call_id.as_deref(), result.name.as_deref()), (Some("x"), Some("f")));
        for (messages, param) in [
            (json!([]), "messages"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
            (json!([{"role": "user", "content": "a", "tool_call_id": "x"}]), "messages[0].tool_call_id"),
            (json!([{"role": "user", "content": "a", "colour": "red"}]), "messages"),
            (json!([{"role": "assistant", "content": "a", "audio": {"id": "x"}}]), "messages"),
            (json!([{"role": "user", "content": [{"type": "text", "text": "a", "colour": "red"}]}]), "messages"),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]),
                "messages[0].tool_calls",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]),
                "messages[0].tool_calls",
            ),
        ] {
            let error = chat(json!({"model": "m", "messages": messages})).unwrap_err();
            assert_eq!(error.body.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn last_of_equal_fields_counts_at_every_level() {
        let body = br#"{"model": "x", "model": "m", "stream_options": {"include_usage": false, "include_usage": true},
            "messages": [{"role": "robot", "content": "a", "role": "user", "content": null,
                "content": [{"type": "image_url", "text": "b", "type": "text", "text": "c"}]}]}"#;
        let request = ChatRequest::parse(body).unwrap();
        let message = &request.messages[0];
        assert_eq!((message.role.as_str(), &*message.content.text()), ("user", "c"));
        assert!(request.common.model == "m" && request.common.stream_options.include_usage);
    }

    #[test]
    fn parse_bounds_prompts_messages_and_parts() {
        for prompt in [
            json!(vec!["a"; PROMPTS_MAX + 1]),
            json!(vec![vec![1]; PROMPTS_MAX + 1]),
            json!([1, "a"]),
            json!([[1], 2]),
            json!([[[1]]]),
            json!([-1]),
            json!([1.5]),
            json!([1_u64 << 32]),
        ] {
            let error = completion(json!({"model": "m", "prompt": prompt})).unwrap_err();
            assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some("prompt")), "{prompt}");
        }
        completion(json!({"model": "m", "prompt": vec!["a"; PROMPTS_MAX]})).unwrap();
        let text = json!({"role": "user", "content": "a"});
        assert_eq!(
            chat(json!({"model": "m", "messages": vec![&text; MESSAGES_MAX]})).unwrap().messages.len(),
            MESSAGES_MAX
        );
        let parts = |count| json!([{"role": "user", "content": vec![json!({"type": "text", "text": "a"}); count]}]);
        chat(json!({"model": "m", "messages": parts(PARTS_MAX)})).unwrap();
        for messages in [json!(vec![&text; MESSAGES_MAX + 1]), parts(PARTS_MAX + 1)] {
            let error = chat(json!({"model": "m", "messages": messages})).unwrap_err();
            assert_eq!(error.body.param.as_deref(), Some("messages"));
        }
    }

    #[test]
    fn errors_name_no_rust_types() {
        for (field, value) in [
            ("stop", json!(5)),
            ("stream_options", json!(5)),
            ("max_tokens", json!(-1)),
            ("temperature", json!("hot")),
            ("prompt", json!({})),
        ] {
            let message = completion(json!({"model": "m", "prompt": "a", field: value})).unwrap_err().body.message;
            for leak in ["u32", "f32", "struct", "enum", "StreamOptions", "Stop"] {
                assert!(!message.contains(leak), "{message}");
            }
        }
        for (messages, expected) in [
            (json!([5]), "expected an object"),
            (json!([{"content": "a"}]), "missing field `role`"),
            (json!([{"role": 5}]), "'role' is not valid: invalid type: integer `5`, expected a string"),
            (json!([{"role": "user", "content": [{"text": "a"}]}]), "missing field `type`"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "missing field `text`"),
        ] {
            let message = chat(json!({"model": "m", "messages": messages})).unwrap_err().body.message;
            assert!(message.contains(expected) && !message.contains("RawMessage"), "{message}");
        }
    }

    #[test]
    fn parse_refuses_bodies_that_are_not_json_objects() {
        for body in [&b"{\"model\": "[..], b"[1]", b"", b"\xff"] {
            let error = CompletionRequest::parse(body).unwrap_err();
            assert_eq!((error.status.as_u16(), error.body.kind.as_str()), (400, "invalid_request_error"));
        }
        assert_eq!(completion(json!({"prompt": "a"})).unwrap_err().body.param.as_deref(), Some("model"));
    }
}
