//! Request parsing of the OpenAI API, and the types its responses share.
//!
//! Unknown fields are ignored, as OpenAI's own server does. Known fields that this server does not
//! implement are refused if their value would change the answer. Ignoring those would return wrong
//! text without notice. If an object names a field twice, the last value counts, as in the JSON
//! parsers of Python, on which most servers of this API are built.

use super::errors::ApiError;
use super::fields::{BoundedList, Fields, TextOrList};
use larder_model::{ChatMessage, SamplingParams};
use larder_worker::api::{FinishReason, STOP_BYTES_MAX};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;

pub const PROMPTS_MAX: usize = 16;
pub const CHOICES_MAX: u32 = 8;
pub const STOPS_MAX: usize = 16;
pub const MESSAGES_MAX: usize = 4096;
/// Maximum number of parts of a message's content.
pub const PARTS_MAX: usize = 1024;
/// Default of `max_tokens` in `/v1/completions`, as in OpenAI's API.
pub const COMPLETION_TOKENS_DEFAULT: u32 = 16;

#[derive(Debug, Clone, PartialEq)]
pub struct CommonParams {
    pub model: String,
    /// Sampling parameters. `max_tokens` is 0 here: [`CommonParams::sampling_of`] sets it for each
    /// prompt.
    pub sampling: SamplingParams,
    /// Maximum tokens to generate, at least 1. `None` takes the endpoint's default.
    pub max_tokens: Option<u32>,
    /// Choices per prompt, from 1 to [`CHOICES_MAX`].
    pub n: u32,
    pub stream: bool,
    pub include_usage: bool,
}

struct StreamOptions {
    include_usage: bool,
}

impl<'de> Deserialize<'de> for StreamOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        Ok(Self { include_usage: take_inner(&mut fields, "include_usage")?.unwrap_or(false) })
    }
}

/// Takes a field of an object inside another one. The error of the outer one quotes this error.
fn take_inner<'a, T: Deserialize<'a>, E: Error>(fields: &mut Fields<'a>, name: &str) -> Result<Option<T>, E> {
    fields.take(name).map_err(|error| E::custom(error.body.message))
}

impl CommonParams {
    fn take(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let n: u32 = fields.take("n")?.unwrap_or(1);
        if !(1..=CHOICES_MAX).contains(&n) {
            return Err(ApiError::field("n", format!("'n' is {n}; it must be from 1 to {CHOICES_MAX}")));
        }
        let best_of: u32 = fields.take("best_of")?.unwrap_or(1);
        if best_of > 1 {
            return Err(ApiError::unsupported("best_of"));
        }
        // The newer name wins: some clients send both for compatibility with older servers.
        let newer: Option<u32> = fields.take("max_completion_tokens")?;
        let max_tokens = newer.or(fields.take("max_tokens")?);
        if max_tokens == Some(0) {
            return Err(ApiError::field("max_tokens", "'max_tokens' must be at least 1"));
        }
        let stream_options: Option<StreamOptions> = fields.take("stream_options")?;
        Ok(Self {
            model: fields.require("model")?,
            sampling: take_sampling(fields)?,
            max_tokens,
            n,
            stream: fields.take("stream")?.unwrap_or(false),
            include_usage: stream_options.is_some_and(|o| o.include_usage),
        })
    }

    /// Sampling parameters of choice number `choice` of a prompt. A seed is varied per choice, or
    /// all choices would be equal.
    pub fn sampling_of(&self, choice: u32, max_tokens: u32) -> SamplingParams {
        let seed = self.sampling.seed.map(|seed| seed.wrapping_add(u64::from(choice)));
        SamplingParams { seed, max_tokens: max_tokens as usize, ..self.sampling.clone() }
    }
}

fn take_sampling(fields: &mut Fields<'_>) -> Result<SamplingParams, ApiError> {
    let seed: Option<i64> = fields.take("seed")?;
    // vLLM and others turn top-k off with -1, so clients send it.
    let top_k: i64 = fields.take("top_k")?.unwrap_or(0);
    let top_k = u32::try_from(top_k.max(0)).map_err(|_| ApiError::field("top_k", "'top_k' is too large"))?;
    Ok(SamplingParams {
        temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(1.0),
        top_k,
        seed: seed.map(|seed| seed as u64),
        max_tokens: 0,
        stop: take_stop(fields)?,
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
    })
}

fn take_stop(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let mut stops = match fields.take::<TextOrList<String, STOPS_MAX>>("stop")? {
        None => Vec::new(),
        Some(TextOrList::Text(stop)) => vec![stop],
        Some(TextOrList::List(stops)) => stops,
    };
    stops.retain(|stop| !stop.is_empty());
    if stops.iter().any(|stop| stop.len() > STOP_BYTES_MAX) {
        return Err(ApiError::field("stop", format!("a string of 'stop' may have at most {STOP_BYTES_MAX} bytes")));
    }
    Ok(stops)
}

/// Refuses known but unimplemented fields, except at values that leave the answer unchanged.
fn refuse_unsupported(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let is_zero = |value: &Value| value.as_f64() == Some(0.0);
    let is_false = |value: &Value| *value == Value::Bool(false);
    let is_empty = |value: &Value| {
        value.as_object().is_some_and(|v| v.is_empty())
            || value.as_array().is_some_and(|v| v.is_empty())
            || value.as_str().is_some_and(|v| v.is_empty())
    };
    let is_text = |value: &Value| value.get("type").and_then(Value::as_str) == Some("text");
    let is_optional = |value: &Value| matches!(value.as_str(), Some("auto" | "none"));
    let is_text_only = |value: &Value| *value == serde_json::json!(["text"]);
    // `logprobs` is a bool in chat requests and a number in completions, where even 0 asks for
    // data.
    fields.refuse_unless("logprobs", is_false)?;
    fields.refuse_unless("top_logprobs", is_zero)?;
    fields.refuse_unless("echo", is_false)?;
    fields.refuse_unless("suffix", is_empty)?;
    fields.refuse_unless("logit_bias", is_empty)?;
    fields.refuse_unless("presence_penalty", is_zero)?;
    fields.refuse_unless("frequency_penalty", is_zero)?;
    fields.refuse_unless("response_format", is_text)?;
    // Ignoring tools would make the model answer as if it had none.
    fields.refuse_unless("tools", is_empty)?;
    fields.refuse_unless("functions", is_empty)?;
    fields.refuse_unless("tool_choice", is_optional)?;
    fields.refuse_unless("function_call", is_optional)?;
    fields.refuse_unless("modalities", is_text_only)?;
    fields.refuse_unless("audio", is_empty)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

impl PromptInput {
    pub fn bytes(&self) -> usize {
        match self {
            PromptInput::Text(text) => text.len(),
            PromptInput::Tokens(tokens) => tokens.len() * size_of::<u32>(),
        }
    }
}

/// Field `prompt`: a string, a list of token ids, or a list of such prompts.
struct Prompts(Vec<PromptInput>);

/// Element of a list in the field `prompt`.
enum PromptItem {
    Id(u32),
    Prompt(PromptInput),
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids, or a list of those")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![PromptInput::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
        let mut ids = Vec::new();
        let mut prompts = Vec::new();
        while let Some(item) = items.next_element()? {
            match item {
                PromptItem::Id(id) => ids.push(id),
                PromptItem::Prompt(prompt) => prompts.push(prompt),
            }
            if prompts.len() > PROMPTS_MAX {
                return Err(A::Error::custom(format!("more than {PROMPTS_MAX} prompts")));
            }
            if !ids.is_empty() && !prompts.is_empty() {
                return Err(A::Error::custom("a list of both token ids and prompts"));
            }
        }
        Ok(Prompts(if prompts.is_empty() { vec![PromptInput::Tokens(ids)] } else { prompts }))
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = PromptItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id, or a list of token ids")
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<PromptItem, E> {
        u32::try_from(id).map(PromptItem::Id).map_err(|_| E::custom(format!("{id} is not a token id")))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PromptItem, E> {
        Ok(PromptItem::Prompt(PromptInput::Text(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PromptItem, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = items.next_element()? {
            ids.push(id);
        }
        Ok(PromptItem::Prompt(PromptInput::Tokens(ids)))
    }
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
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
        let common = CommonParams::take(&mut fields)?;
        let Prompts(prompts) = fields.require("prompt")?;
        Ok(Self { common, prompts })
    }
}

struct RawMessage {
    role: String,
    content: Option<TextOrList<ContentPart, PARTS_MAX>>,
}

impl<'de> Deserialize<'de> for RawMessage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let role = take_inner(&mut fields, "role")?.ok_or_else(|| D::Error::missing_field("role"))?;
        Ok(Self { role, content: take_inner(&mut fields, "content")? })
    }
}

struct ContentPart {
    kind: String,
    text: String,
}

impl<'de> Deserialize<'de> for ContentPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let kind = take_inner(&mut fields, "type")?.ok_or_else(|| D::Error::missing_field("type"))?;
        Ok(Self { kind, text: take_inner(&mut fields, "text")?.unwrap_or_default() })
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    pub common: CommonParams,
    pub messages: Vec<ChatMessage>,
}

impl ChatRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let common = CommonParams::take(&mut fields)?;
        let messages =
            take_messages(&mut fields)?.ok_or_else(|| ApiError::field("messages", "'messages' is required"))?;
        Ok(Self { common, messages })
    }
}

/// Takes and validates the field `messages`. Accepts the roles of OpenAI's API, and text as a
/// string or as parts.
pub fn take_messages(fields: &mut Fields<'_>) -> Result<Option<Vec<ChatMessage>>, ApiError> {
    let Some(BoundedList(raw)) = fields.take::<BoundedList<RawMessage, MESSAGES_MAX>>("messages")? else {
        return Ok(None);
    };
    if raw.is_empty() {
        let message = format!("'messages' has 0 messages; it must have from 1 to {MESSAGES_MAX}");
        return Err(ApiError::field("messages", message));
    }
    let messages: Result<Vec<_>, _> = raw.into_iter().enumerate().map(|(at, raw)| message(at, raw)).collect();
    messages.map(Some)
}

fn message(at: usize, raw: RawMessage) -> Result<ChatMessage, ApiError> {
    let wrong = |field: &str, message: String| Err(ApiError::field(&format!("messages[{at}].{field}"), message));
    let role = match raw.role.as_str() {
        // `developer` is OpenAI's newer name of `system`. Chat templates know only the older one.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        other => return wrong("role", format!("'{other}' is not one of system, developer, user, assistant, tool")),
    };
    let content = match raw.content {
        Some(TextOrList::Text(text)) => text,
        Some(TextOrList::List(parts)) => match parts.iter().find(|part| part.kind != "text") {
            Some(part) => return wrong("content", format!("parts of type '{}' are not supported", part.kind)),
            None => parts.into_iter().map(|part| part.text).collect::<Vec<_>>().join("\n"),
        },
        // OpenAI sends null content for an assistant turn that only called tools.
        None if role == "assistant" => String::new(),
        None => return wrong("content", "'content' is required".into()),
    };
    Ok(ChatMessage { role: role.into(), content })
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
        for prompt in [json!([1, "a"]), json!([-1]), json!({"a": 1}), json!(vec!["x"; 17])] {
            let error = completion(json!({"model": "m", "prompt": prompt})).unwrap_err();
            assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some("prompt")));
        }
    }

    #[test]
    fn parse_applies_openai_defaults() {
        let common = completion(json!({"model": "m", "prompt": "a", "user": "u", "best_of": 1})).unwrap().common;
        assert_eq!((common.sampling.temperature, common.sampling.top_p), (1.0, 1.0));
        assert_eq!((common.n, common.stream, common.max_tokens), (1, false, None));
        let common = chat(json!({"model": "m", "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1, "max_completion_tokens": 9, "stop": "x", "seed": -1, "top_k": -1, "temperature": 0,
            "stream": true, "stream_options": {"include_usage": true}, "n": 2}))
        .unwrap()
        .common;
        assert_eq!((common.max_tokens, common.sampling.stop.as_slice()), (Some(9), &["x".to_string()][..]));
        assert_eq!((common.sampling.seed, common.sampling.top_k), (Some(u64::MAX), 0));
        assert!(common.stream && common.include_usage);
        assert_eq!(common.sampling_of(1, 5).seed, Some(0));
    }

    #[test]
    fn parse_refuses_fields_that_would_change_the_answer() {
        for (field, value) in [
            ("logprobs", json!(0)),
            ("logprobs", json!(true)),
            ("top_logprobs", json!(2)),
            ("echo", json!(true)),
            ("best_of", json!(2)),
            ("response_format", json!({"type": "json_object"})),
            ("tools", json!([{"type": "function"}])),
            ("functions", json!([{"name": "f"}])),
            ("tool_choice", json!("required")),
            ("tool_choice", json!({"type": "function"})),
            ("logit_bias", json!({"5": 1})),
            ("presence_penalty", json!(0.5)),
            ("n", json!(0)),
            ("n", json!(9)),
            ("temperature", json!(2.5)),
            ("temperature", json!("hot")),
            ("max_tokens", json!(0)),
            ("stop", json!(vec!["s"; 17])),
            ("stream", json!("yes")),
        ] {
            let error = completion(json!({"model": "m", "prompt": "a", field: value})).unwrap_err();
            assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some(field)), "{value}");
        }
        let harmless = json!({"model": "m", "prompt": "a", "logprobs": null, "echo": false, "presence_penalty": 0,
            "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}});
        completion(harmless).unwrap();
    }

    #[test]
    fn parse_accepts_messages_of_every_role() {
        let request = chat(json!({"model": "m", "messages": [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": []},
            {"role": "tool", "content": "42", "tool_call_id": "x"},
        ]}))
        .unwrap();
        let read: Vec<_> = request.messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
        assert_eq!(read, [("system", "be kind"), ("user", "a\nb"), ("assistant", ""), ("tool", "42")]);
        for (messages, param) in [
            (json!([]), "messages"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
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
        assert_eq!((message.role.as_str(), message.content.as_str()), ("user", "c"));
        assert!(request.common.model == "m" && request.common.include_usage);
    }

    #[test]
    fn parse_bounds_prompts_messages_and_parts() {
        for prompt in [
            json!(vec!["a"; 17]),
            json!(vec![vec![1]; 17]),
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
