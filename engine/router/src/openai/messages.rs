//! Messages of a conversation.
//!
//! Invariant: every field of a message reaches the chat template, or is refused by its name. A few
//! fields that clients send back from an answer are empty there, and accepted only so.

use super::errors::ApiError;
use super::fields::{BoundedList, Fields, TextOrList, is_empty};
use larder_model::{ChatMessage, FunctionCall, MessageContent, TextPart, ToolCall};
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use serde_json::value::RawValue;

pub const MESSAGES_MAX: usize = 4096;
/// Maximum number of parts of a message's content.
pub const PARTS_MAX: usize = 1024;
/// Maximum number of calls of tools in one message.
pub const CALLS_MAX: usize = 256;

struct RawMessage {
    role: String,
    content: Option<TextOrList<ContentPart, PARTS_MAX>>,
    name: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<BoundedList<RawCall, CALLS_MAX>>,
    tool_call_id: Option<String>,
}

/// Takes a field of an object inside another one. The error of the outer one quotes this error.
pub(super) fn take_inner<'a, T: Deserialize<'a>, E: Error>(
    fields: &mut Fields<'a>,
    name: &str,
) -> Result<Option<T>, E> {
    fields.take(name).map_err(|error| E::custom(error.body.message))
}

pub(super) fn refuse_rest_inner<E: Error>(fields: &Fields<'_>) -> Result<(), E> {
    fields.refuse_unknown().map_err(|error| E::custom(error.body.message))
}

impl<'de> Deserialize<'de> for RawMessage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let message = Self {
            role: take_inner(&mut fields, "role")?.ok_or_else(|| D::Error::missing_field("role"))?,
            content: take_inner(&mut fields, "content")?,
            name: take_inner(&mut fields, "name")?,
            reasoning_content: take_inner(&mut fields, "reasoning_content")?,
            tool_calls: take_inner(&mut fields, "tool_calls")?,
            tool_call_id: take_inner(&mut fields, "tool_call_id")?,
        };
        // Fields of an answer's message, which clients send back with the conversation.
        for name in ["refusal", "annotations", "audio", "function_call", "reasoning"] {
            fields.refuse_unless(name, is_empty).map_err(|error| D::Error::custom(error.body.message))?;
        }
        // lm-evaluation-harness and items of `/v1/responses` name what a message is anyway.
        fields
            .refuse_unless("type", |kind| *kind == "text" || *kind == "message")
            .map_err(|error| D::Error::custom(error.body.message))?;
        refuse_rest_inner(&fields)?;
        Ok(message)
    }
}

struct ContentPart {
    kind: String,
    text: String,
}

impl<'de> Deserialize<'de> for ContentPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let kind: String = take_inner(&mut fields, "type")?.ok_or_else(|| D::Error::missing_field("type"))?;
        let text: Option<String> = take_inner(&mut fields, "text")?;
        if kind == "text" {
            if text.is_none() {
                return Err(D::Error::missing_field("text"));
            }
            // A hint for caches, which this server does not need.
            fields.ignore("cache_control");
            refuse_rest_inner(&fields)?;
        }
        Ok(Self { kind, text: text.unwrap_or_default() })
    }
}

struct RawCall {
    id: String,
    kind: String,
    name: String,
    arguments: String,
}

impl<'de> Deserialize<'de> for RawCall {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let mut function: Fields<'_> =
            take_inner(&mut fields, "function")?.ok_or_else(|| D::Error::missing_field("function"))?;
        let id = take_inner(&mut fields, "id")?.unwrap_or_default();
        let kind = take_inner(&mut fields, "type")?.unwrap_or_else(|| "function".to_string());
        // Position of a call in a stream. Clients that collect a stream keep it.
        fields.ignore("index");
        refuse_rest_inner(&fields)?;
        let name = take_inner(&mut function, "name")?.ok_or_else(|| D::Error::missing_field("name"))?;
        let arguments = take_inner::<&RawValue, _>(&mut function, "arguments")?;
        refuse_rest_inner(&function)?;
        let arguments = match arguments.map(RawValue::get) {
            None => String::new(),
            Some(text) if text.starts_with('"') => serde_json::from_str(text).map_err(D::Error::custom)?,
            Some(object) => object.to_string(),
        };
        Ok(Self { id, kind, name, arguments })
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
        Some(TextOrList::Text(text)) => MessageContent::Text(text),
        Some(TextOrList::List(parts)) => match parts.iter().find(|part| part.kind != "text") {
            Some(part) => return wrong("content", format!("parts of type '{}' are not supported", part.kind)),
            None => MessageContent::Parts(parts.into_iter().map(|part| TextPart { text: part.text }).collect()),
        },
        // OpenAI sends null content for an assistant turn that only called tools.
        None if role == "assistant" => MessageContent::default(),
        None => return wrong("content", "'content' is required".into()),
    };
    let calls = raw.tool_calls.map_or_else(Vec::new, |calls| calls.0);
    let of_other_role = [
        ("tool_calls", !calls.is_empty(), "assistant"),
        ("reasoning_content", raw.reasoning_content.is_some(), "assistant"),
        ("tool_call_id", raw.tool_call_id.is_some(), "tool"),
    ];
    if let Some((field, _, owner)) = of_other_role.iter().find(|(_, is_given, owner)| *is_given && *owner != role) {
        return wrong(field, format!("only messages of the role {owner} have '{field}'"));
    }
    let wrong = |message: String| ApiError::field(&format!("messages[{at}].tool_calls"), message);
    let tool_call = |call: RawCall| match call.kind.as_str() {
        "function" => tool_call(call.id, call.name, call.arguments).map_err(wrong),
        other => Err(wrong(format!("calls of type '{other}' are not supported"))),
    };
    let tool_calls = calls.into_iter().map(tool_call).collect::<Result<_, _>>()?;
    Ok(ChatMessage {
        role: role.into(),
        content,
        name: raw.name,
        reasoning_content: raw.reasoning_content,
        tool_calls,
        tool_call_id: raw.tool_call_id,
    })
}

/// Call in a conversation, whose arguments must be a JSON object. Fails with the reason.
pub(super) fn tool_call(id: String, name: String, arguments: String) -> Result<ToolCall, String> {
    let arguments = if arguments.trim().is_empty() { "{}".to_string() } else { arguments };
    // Parsed to nothing: the template's process builds the values.
    if serde_json::from_str::<Fields<'_>>(&arguments).is_err() {
        return Err(format!("the arguments of the call of '{name}' are not a JSON object"));
    }
    Ok(ToolCall { id, function: FunctionCall { name, arguments } })
}
