//! `POST /v1/responses`, without state: translated to a chat request, and its answer translated
//! back.
//!
//! Every field of a request is honoured or refused by its name, as in [`types`](super::types).

use super::errors::ApiError;
use super::fields::{BoundedList, Fields, is_empty};
use super::messages::take_inner;
use super::responses_input::take_input;
use super::responses_output::ResponseRequest;
use super::tools::TOOLS_MAX;
use super::types::{ChatRequest, NeutralField, WITHOUT_EFFECT, is_false};
use super::{ApiCall, RequestContext, chat, prepare, stream, whole};
use crate::metrics::RequestRecord;
use axum::response::Response;
use larder_http::RequestBody;
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields with the meaning that they have in chats.
const AS_IN_CHATS: [&str; 21] = [
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "chat_template_kwargs",
];

/// Fields with other names in chats, and these names.
const RENAMED: [(&str, &str); 2] = [("max_output_tokens", "max_completion_tokens"), ("input", "messages")];

const NEUTRAL: [NeutralField; 6] = [
    ("background", is_false),
    // Nothing is kept here, so nothing can be asked for later.
    ("store", is_false),
    ("truncation", |value| *value == "disabled"),
    ("top_logprobs", |value| value.as_f64() == Some(0.0)),
    ("context_management", is_empty),
    ("include", includes_nothing),
];

/// Returns `true` for a list of parts that no answer of this server has.
fn includes_nothing(value: &Value) -> bool {
    const ABSENT: [&str; 6] = [
        "reasoning.encrypted_content",
        "web_search_call.results",
        "web_search_call.action.sources",
        "file_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
    ];
    let is_absent = |part: &Value| part.as_str().is_some_and(|part| ABSENT.contains(&part));
    value.as_array().is_some_and(|parts| parts.iter().all(is_absent))
}

/// Tool of a request, whose name and schema lie beside its type here and in an object in chats.
struct FlatTool<'a>(Fields<'a>);

impl<'de: 'a, 'a> Deserialize<'de> for FlatTool<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let kind: String = take_inner(&mut fields, "type")?.ok_or_else(|| D::Error::missing_field("type"))?;
        match kind.as_str() {
            "function" => Ok(Self(fields)),
            _ => Err(D::Error::custom(format!("tools of type '{kind}' are not supported"))),
        }
    }
}

/// Request, and what its answer repeats of it.
#[derive(Debug)]
struct ParsedRequest {
    chat: ChatRequest,
    echoed: ResponseRequest,
}

impl ParsedRequest {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let echoed = ResponseRequest::of(&fields);
        refuse_state(&mut fields)?;
        for (name, is_neutral) in NEUTRAL {
            fields.refuse_unless(name, is_neutral)?;
        }
        for name in WITHOUT_EFFECT.iter().chain(&["prompt_cache_options", "max_tool_calls"]) {
            fields.ignore(name);
        }
        let messages = take_input(&mut fields)?;
        let owned = owned_fields(&mut fields)?;
        let mut chat = Fields::default();
        for (name, value) in &owned {
            chat.insert(name, value);
        }
        for name in AS_IN_CHATS {
            if let Some(value) = fields.take(name)? {
                chat.insert(name, value);
            }
        }
        if let Some(value) = fields.take("max_output_tokens")? {
            chat.insert("max_completion_tokens", value);
        }
        fields.refuse_unknown()?;
        let chat = ChatRequest::take(chat, |_| Ok(messages)).map_err(with_names_of_responses)?;
        Ok(Self { chat, echoed })
    }
}

/// Refuses fields that name the results of earlier requests.
fn refuse_state(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    for name in ["previous_response_id", "conversation", "prompt"] {
        if fields.get(name).is_some() {
            let message = format!("'{name}' is not supported: this server keeps no responses; send the whole input");
            return Err(ApiError::field(name, message).code("unsupported_value"));
        }
    }
    Ok(())
}

/// Fields of the chat request that are not a field of this one.
fn owned_fields(fields: &mut Fields<'_>) -> Result<Vec<(&'static str, Box<RawValue>)>, ApiError> {
    let mut owned = Vec::new();
    if let Some(BoundedList(tools)) = fields.take::<BoundedList<FlatTool<'_>, TOOLS_MAX>>("tools")? {
        let tools: Result<Vec<_>, _> = tools.iter().map(|tool| nested_tool(&tool.0)).collect();
        owned.push(("tools", raw(&tools?)?));
    }
    if let Some(choice) = fields.take::<&RawValue>("tool_choice")? {
        owned.push(("tool_choice", tool_choice(choice)?));
    }
    if let Some(mut text) = fields.take::<Fields<'_>>("text")? {
        let in_text = |error: ApiError| ApiError { body: within("text", error.body), ..error };
        text.refuse_unless("verbosity", |value| *value == "medium").map_err(in_text)?;
        if let Some(format) = text.take::<Fields<'_>>("format").map_err(in_text)? {
            owned.push(("response_format", response_format(format)?));
        }
        text.refuse_unknown().map_err(in_text)?;
    }
    if let Some(mut reasoning) = fields.take::<Fields<'_>>("reasoning")? {
        let in_reasoning = |error: ApiError| ApiError { body: within("reasoning", error.body), ..error };
        if let Some(effort) = reasoning.take::<Box<RawValue>>("effort").map_err(in_reasoning)? {
            owned.push(("reasoning_effort", effort));
        }
        reasoning.refuse_unknown().map_err(in_reasoning)?;
    }
    if let Some(mut options) = fields.take::<Fields<'_>>("stream_options")? {
        options.ignore("include_obfuscation");
        options.refuse_unknown()?;
    }
    Ok(owned)
}

fn raw(value: &impl serde::Serialize) -> Result<Box<RawValue>, ApiError> {
    to_raw_value(value).map_err(|error| ApiError::internal("read the request", error))
}

fn nested_tool(tool: &Fields<'_>) -> Result<Box<RawValue>, ApiError> {
    let function = tool.to_json().map_err(|error| ApiError::internal("read the request", error))?;
    let nested = RawValue::from_string(format!(r#"{{"type": "function", "function": {function}}}"#));
    nested.map_err(|error| ApiError::internal("read the request", error))
}

/// A function by its name, which lies in an object in chats. Others stay as they are.
fn tool_choice(choice: &RawValue) -> Result<Box<RawValue>, ApiError> {
    let Ok(mut fields) = serde_json::from_str::<Fields<'_>>(choice.get()) else { return Ok(choice.to_owned()) };
    if !fields.take_if("type", |kind| *kind == "function") {
        return Ok(choice.to_owned());
    }
    let in_choice = |error: ApiError| ApiError { body: within("tool_choice", error.body), ..error };
    let name: String = fields.require("name").map_err(in_choice)?;
    raw(&json!({"type": "function", "function": {"name": name}}))
}

/// Format of the text, as the chat endpoint takes it. The one place where the two differ.
fn response_format(mut format: Fields<'_>) -> Result<Box<RawValue>, ApiError> {
    let in_format = |error: ApiError| ApiError { body: within("text.format", error.body), ..error };
    let kind: String = format.require("type").map_err(in_format)?;
    let (kind_json, rest) = (json!(kind), format.to_json());
    let rest = rest.map_err(|error| ApiError::internal("read the request", error))?;
    let text = match kind.as_str() {
        "json_schema" => format!(r#"{{"type": "json_schema", "json_schema": {rest}}}"#),
        _ if rest == "{}" => format!(r#"{{"type": {kind_json}}}"#),
        _ => return Err(ApiError::unsupported("text.format")),
    };
    RawValue::from_string(text).map_err(|error| ApiError::internal("read the request", error))
}

/// Error of a field inside `outer`.
fn within(outer: &str, mut body: super::errors::ErrorBody) -> super::errors::ErrorBody {
    if let Some(inner) = &mut body.param {
        body.message = body.message.replace(&format!("'{inner}'"), &format!("'{outer}.{inner}'"));
        *inner = format!("{outer}.{inner}");
    }
    body
}

/// Names the fields of this request instead of those of the chat request.
fn with_names_of_responses(mut error: ApiError) -> ApiError {
    let names = RENAMED.into_iter().chain([
        ("max_output_tokens", "max_tokens"),
        ("text.format", "response_format"),
        ("reasoning.effort", "reasoning_effort"),
    ]);
    // The schema lies beside the type here.
    if let Some(rest) = error.body.param.as_ref().and_then(|param| param.strip_prefix("response_format")) {
        let old = format!("response_format{rest}");
        let new = format!("text.format{}", rest.strip_prefix(".json_schema").unwrap_or(rest));
        error.body.message = error.body.message.replace(&format!("'{old}'"), &format!("'{new}'"));
        error.body.param = Some(new);
    }
    for (name, in_chats) in names {
        if error.body.param.as_deref() == Some(in_chats) {
            error.body.param = Some(name.into());
        }
        error.body.message = error.body.message.replace(&format!("'{in_chats}'"), &format!("'{name}'"));
    }
    // Of a conversation that is too long.
    error.body.message = error.body.message.replace("he messages ", "he input ");
    error
}

pub(crate) async fn handle(call: ApiCall) -> Response {
    call.serve("responses", serve).await
}

async fn serve(
    mut request: RequestContext,
    body: RequestBody,
    record: &mut Option<RequestRecord>,
) -> Result<Response, ApiError> {
    let ParsedRequest { chat, mut echoed } = request.parse(body, ParsedRequest::parse).await?;
    echoed.charge = Some(prepare::charge(&request.router, request.peer, echoed.units()?)?);
    let is_stream = chat.common.stream;
    let mut started = chat::start(request, chat).await.map_err(with_names_of_responses)?;
    started.meta.id = format!("resp_{}", super::random_id());
    started.meta.response = Some(Arc::new(echoed));
    // Its last event has the usage, always.
    started.stream_options.include_usage = true;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { whole::whole(started, record).await }
}
