//! Fields `input` and `instructions` of `/v1/responses`, as messages of a conversation.
//!
//! Invariant: every field of an item reaches the chat template, or is refused by its name. Ids and
//! states of items are the exception: they name things that this server does not keep.

use super::errors::ApiError;
use super::fields::{Fields, TextOrList, is_empty};
use super::messages::{MESSAGES_MAX, PARTS_MAX, refuse_rest_inner, take_inner, tool_call};
use larder_model::{ChatMessage, MessageContent, TextPart};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

/// Text of an item: a string, or parts.
type ItemText = TextOrList<ItemPart, PARTS_MAX>;

enum InputItem {
    Message {
        role: String,
        content: ItemText,
    },
    /// Call that the model made.
    Call {
        id: String,
        name: String,
        arguments: String,
    },
    /// Result of a call.
    Output {
        id: String,
        output: ItemText,
    },
}

struct ItemPart(String);

/// Takes a field of an item, which must have it.
fn require<'a, T: Deserialize<'a>, E: Error>(fields: &mut Fields<'a>, name: &'static str) -> Result<T, E> {
    take_inner(fields, name)?.ok_or_else(|| E::missing_field(name))
}

impl<'de> Deserialize<'de> for InputItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let kind: Option<String> = take_inner(&mut fields, "type")?;
        let item = match kind.as_deref() {
            None | Some("message") => {
                Self::Message { role: require(&mut fields, "role")?, content: require(&mut fields, "content")? }
            }
            Some("function_call") => Self::Call {
                id: require(&mut fields, "call_id")?,
                name: require(&mut fields, "name")?,
                arguments: require(&mut fields, "arguments")?,
            },
            Some("function_call_output") => {
                Self::Output { id: require(&mut fields, "call_id")?, output: require(&mut fields, "output")? }
            }
            Some("item_reference") => {
                return Err(D::Error::custom("this server keeps no items, so an 'item_reference' names none"));
            }
            Some(other) => return Err(D::Error::custom(format!("items of type '{other}' are not supported"))),
        };
        fields.ignore("id");
        fields.ignore("status");
        refuse_rest_inner(&fields)?;
        Ok(item)
    }
}

impl<'de> Deserialize<'de> for ItemPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let kind: String = require(&mut fields, "type")?;
        if !matches!(kind.as_str(), "input_text" | "output_text" | "text") {
            return Err(D::Error::custom(format!("parts of type '{kind}' are not supported")));
        }
        let text = require(&mut fields, "text")?;
        for name in ["annotations", "logprobs"] {
            fields.refuse_unless(name, is_empty).map_err(|error| D::Error::custom(error.body.message))?;
        }
        refuse_rest_inner(&fields)?;
        Ok(Self(text))
    }
}

fn content(text: ItemText) -> MessageContent {
    match text {
        TextOrList::Text(text) => MessageContent::Text(text),
        TextOrList::List(parts) => {
            MessageContent::Parts(parts.into_iter().map(|ItemPart(text)| TextPart { text }).collect())
        }
    }
}

/// Takes the conversation of a request.
pub(super) fn take_input(fields: &mut Fields<'_>) -> Result<Vec<ChatMessage>, ApiError> {
    let instructions: Option<String> = fields.take("instructions")?;
    let mut messages: Vec<ChatMessage> =
        instructions.into_iter().map(|text| ChatMessage::new("system", MessageContent::Text(text))).collect();
    match fields.require::<TextOrList<InputItem, MESSAGES_MAX>>("input")? {
        TextOrList::Text(text) => messages.push(ChatMessage::new("user", MessageContent::Text(text))),
        TextOrList::List(items) if items.is_empty() => {
            let message = format!("'input' has 0 items; it must have from 1 to {MESSAGES_MAX}");
            return Err(ApiError::field("input", message));
        }
        TextOrList::List(items) => {
            for (at, item) in items.into_iter().enumerate() {
                add(&mut messages, at, item)?;
            }
        }
    }
    Ok(messages)
}

fn add(messages: &mut Vec<ChatMessage>, at: usize, item: InputItem) -> Result<(), ApiError> {
    let message = match item {
        InputItem::Message { role, content: text } => {
            let role = match role.as_str() {
                "system" | "developer" => "system",
                "user" | "assistant" => &role,
                _ => {
                    let message = format!("'{role}' is not one of system, developer, user, assistant");
                    return Err(ApiError::field(&format!("input[{at}].role"), message));
                }
            };
            ChatMessage::new(role, content(text))
        }
        InputItem::Call { id, name, arguments } => {
            let wrong = |message: String| ApiError::field(&format!("input[{at}].arguments"), message);
            let call = tool_call(id, name, arguments).map_err(wrong)?;
            // Templates expect the calls of one answer in one message, with the text before them.
            if let Some(last) = messages.last_mut().filter(|last| last.role == "assistant") {
                last.tool_calls.push(call);
                return Ok(());
            }
            ChatMessage { tool_calls: vec![call], ..ChatMessage::new("assistant", MessageContent::default()) }
        }
        InputItem::Output { id, output } => {
            ChatMessage { tool_call_id: Some(id), ..ChatMessage::new("tool", content(output)) }
        }
    };
    messages.push(message);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn input(body: Value) -> Result<Vec<ChatMessage>, ApiError> {
        take_input(&mut Fields::parse(body.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn items_become_messages() {
        let text = |role: &str, text: &str| ChatMessage::new(role, MessageContent::Text(text.into()));
        let plain = input(json!({"instructions": "Be short.", "input": "Hello"})).unwrap();
        assert_eq!(plain, [text("system", "Be short."), text("user", "Hello")]);
        let call = |id: &str| {
            json!({"type": "function_call", "id": "fc_1", "status": "completed", "call_id": id,
            "name": "f", "arguments": "{\"a\": 1}"})
        };
        let items = json!([
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
            call("c1"),
            call("c2"),
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            call("c3"),
        ]);
        let messages = input(json!({"input": items})).unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "tool", "assistant"]);
        let ids = |at: usize| messages[at].tool_calls.iter().map(|call| call.id.as_str()).collect::<Vec<_>>();
        assert_eq!((ids(2), ids(5)), (vec!["c1", "c2"], vec!["c3"]), "the calls of one answer are one message");
        assert_eq!(messages[3], ChatMessage { tool_call_id: Some("c1".into()), ..text("tool", "one") });
    }

    #[test]
    fn items_that_would_change_the_answer_are_refused() {
        for (items, part) in [
            (json!([]), "0 items"),
            (json!([{"type": "item_reference", "id": "msg_1"}]), "keeps no items"),
            (json!([{"type": "reasoning", "id": "rs_1", "summary": []}]), "'reasoning'"),
            (json!([{"role": "tool", "content": "a"}]), "'tool'"),
            (json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]), "'input_image'"),
            (json!([{"role": "user", "content": "a", "phase": "commentary"}]), "'phase'"),
            (json!([{"role": "user"}]), "`content`"),
            (json!([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]), "JSON object"),
            (json!([{"type": "function_call_output", "call_id": "c", "output": 7}]), "string or a list"),
            (json!(7), "string or a list"),
            (Value::Null, "required"),
        ] {
            let error = input(json!({"input": items})).unwrap_err();
            assert!(error.body.param.as_deref().is_some_and(|param| param.starts_with("input")), "{items}");
            assert!(error.body.message.contains(part), "{}", error.body.message);
        }
    }
}
