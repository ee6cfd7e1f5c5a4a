//! Tools in a chat request, and calls of them in its answer.

use super::errors::ApiError;
use super::fields::{BoundedList, Fields};
use super::messages::{refuse_rest_inner, take_inner};
use super::tool_parser::{NAME_LEN_MAX, ToolFormat, ToolParser, ToolPiece, is_function_name};
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use serde_json::{Value, json};

pub const TOOLS_MAX: usize = 128;
/// Finish reason of an answer with calls.
pub(crate) const FINISH_REASON: &str = "tool_calls";

/// Tools that the model may call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolRequest {
    /// JSON list of the tools, as the client wrote it.
    pub list: String,
    /// The answer may have several calls.
    pub is_parallel: bool,
    pub choice: ToolChoice,
    pub functions: Vec<ToolFunction>,
}

/// Calls that the answer must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// At least one.
    Required,
    /// One of this function.
    Named(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolFunction {
    pub name: String,
    /// JSON schema of the arguments.
    pub parameters: Option<String>,
    /// The arguments must keep to the schema.
    pub is_strict: bool,
}

/// Field `tool_choice` that names a function.
struct NamedChoice(String);

impl<'de> Deserialize<'de> for NamedChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let kind: String = take_inner(&mut fields, "type")?.ok_or_else(|| D::Error::missing_field("type"))?;
        if kind != "function" {
            return Err(D::Error::custom(format!("type '{kind}' is not supported")));
        }
        let mut function: Fields<'_> =
            take_inner(&mut fields, "function")?.ok_or_else(|| D::Error::missing_field("function"))?;
        refuse_rest_inner(&fields)?;
        let name = take_inner(&mut function, "name")?.ok_or_else(|| D::Error::missing_field("name"))?;
        refuse_rest_inner(&function)?;
        Ok(Self(name))
    }
}

/// One tool. Its JSON goes to the template unchanged.
struct RawTool {
    kind: String,
    function: ToolFunction,
}

impl<'de> Deserialize<'de> for RawTool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        let kind = take_inner(&mut fields, "type")?.unwrap_or_else(|| "function".to_string());
        let mut function: Fields<'_> =
            take_inner(&mut fields, "function")?.ok_or_else(|| D::Error::missing_field("function"))?;
        refuse_rest_inner(&fields)?;
        let name = take_inner(&mut function, "name")?.ok_or_else(|| D::Error::missing_field("name"))?;
        take_inner::<String, _>(&mut function, "description")?;
        let parameters = function.get("parameters").map(str::to_string);
        take_inner::<Fields<'_>, _>(&mut function, "parameters")?;
        let is_strict = take_inner(&mut function, "strict")?.unwrap_or(false);
        refuse_rest_inner(&function)?;
        Ok(Self { kind, function: ToolFunction { name, parameters, is_strict } })
    }
}

/// Takes the fields `tools`, `tool_choice` and `parallel_tool_calls`. Returns `None` if the model
/// may call no tool.
pub(super) fn take_tools(fields: &mut Fields<'_>) -> Result<Option<ToolRequest>, ApiError> {
    let list = fields.get("tools").map(str::to_string);
    let tools = fields.take::<BoundedList<RawTool, TOOLS_MAX>>("tools")?.map_or_else(Vec::new, |tools| tools.0);
    let is_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    for tool in &tools {
        if tool.kind != "function" {
            return Err(ApiError::field("tools", format!("tools of type '{}' are not supported", tool.kind)));
        }
        if !is_function_name(&tool.function.name) {
            let message = format!("a tool's name must have 1 to {NAME_LEN_MAX} letters, digits, dots, '_' and '-'");
            return Err(ApiError::field("tools", message));
        }
    }
    let functions: Vec<ToolFunction> = tools.into_iter().map(|tool| tool.function).collect();
    let choice = match fields.get("tool_choice") {
        Some("\"none\"") => {
            fields.ignore("tool_choice");
            return Ok(None);
        }
        None | Some("\"auto\"") => ToolChoice::Auto,
        Some(_) if functions.is_empty() => {
            return Err(ApiError::field("tool_choice", "'tool_choice' needs 'tools'"));
        }
        Some("\"required\"") => ToolChoice::Required,
        Some(choice) if choice.starts_with('"') => return Err(ApiError::unsupported("tool_choice")),
        Some(_) => {
            let NamedChoice(name) = fields.require("tool_choice")?;
            if !functions.iter().any(|function| function.name == name) {
                let message = format!("'tool_choice' names '{name}', which is not in 'tools'");
                return Err(ApiError::field("tool_choice", message));
            }
            ToolChoice::Named(name)
        }
    };
    fields.ignore("tool_choice");
    Ok(list.filter(|_| !functions.is_empty()).map(|list| ToolRequest { list, is_parallel, choice, functions }))
}

/// Rules for calls in an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToolRules {
    pub(crate) format: ToolFormat,
    pub(crate) is_parallel: bool,
}

/// Part of an answer's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AnswerPart {
    Text(String),
    /// Begins a call.
    Call(CallHead),
    /// Continues the arguments of the last call, which has this index.
    Arguments {
        index: usize,
        json: String,
    },
}

/// Call without its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallHead {
    /// Place among the calls of the answer.
    pub(crate) index: usize,
    pub(crate) id: String,
    pub(crate) name: String,
}

impl CallHead {
    /// Entry of `tool_calls`.
    pub(crate) fn json(&self, arguments: &str) -> Value {
        json!({"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}})
    }
}

/// Splits the text of one choice into content and calls.
#[derive(Debug)]
pub(crate) struct ToolSplitter {
    rules: ToolRules,
    parser: ToolParser,
    /// Calls in the text, also those that the answer leaves out.
    calls: usize,
}

impl ToolSplitter {
    pub(crate) fn new(rules: ToolRules) -> Self {
        Self { rules, parser: ToolParser::new(rules.format), calls: 0 }
    }

    pub(crate) fn has_calls(&self) -> bool {
        self.calls > 0
    }

    pub(crate) fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let pieces = self.parser.push(text);
        self.parts(pieces)
    }

    pub(crate) fn finish(&mut self) -> Vec<AnswerPart> {
        let pieces = self.parser.finish();
        self.parts(pieces)
    }

    fn parts(&mut self, pieces: Vec<ToolPiece>) -> Vec<AnswerPart> {
        pieces.into_iter().filter_map(|piece| self.part(piece)).collect()
    }

    fn part(&mut self, piece: ToolPiece) -> Option<AnswerPart> {
        let part = match piece {
            ToolPiece::Text(text) => return Some(AnswerPart::Text(text)),
            ToolPiece::Call(name) => {
                let head = CallHead { index: self.calls, id: self.rules.format.new_call_id(), name };
                self.calls += 1;
                AnswerPart::Call(head)
            }
            ToolPiece::Arguments(json) => AnswerPart::Arguments { index: self.calls.checked_sub(1)?, json },
        };
        // Some clients take one call at a time. The model can repeat the others.
        (self.calls <= 1 || self.rules.is_parallel).then_some(part)
    }
}

/// Message of a whole answer. Returns `true` with it if it has calls.
pub(crate) fn message(rules: Option<ToolRules>, text: String) -> (Value, bool) {
    let mut message = json!({"role": "assistant", "refusal": null});
    let Some(rules) = rules else {
        message["content"] = json!(text);
        return (message, false);
    };
    let mut splitter = ToolSplitter::new(rules);
    let mut content = String::new();
    let mut calls: Vec<(CallHead, String)> = Vec::new();
    for part in splitter.push(&text).into_iter().chain(splitter.finish()) {
        match part {
            AnswerPart::Text(text) => content.push_str(&text),
            AnswerPart::Call(head) => calls.push((head, String::new())),
            AnswerPart::Arguments { json, .. } => calls.last_mut().into_iter().for_each(|call| call.1.push_str(&json)),
        }
    }
    let has_calls = !calls.is_empty();
    message["content"] = if content.is_empty() && has_calls { Value::Null } else { json!(content) };
    if has_calls {
        message["tool_calls"] = calls.iter().map(|(head, arguments)| head.json(arguments)).collect();
    }
    (message, has_calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(body: Value) -> Result<Option<ToolRequest>, ApiError> {
        take_tools(&mut Fields::parse(body.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn tools_go_to_the_template_unchanged() {
        let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}});
        let list = json!([tool]);
        for (choice, expected) in [
            (Value::Null, ToolChoice::Auto),
            (json!("auto"), ToolChoice::Auto),
            (json!("required"), ToolChoice::Required),
            (json!({"type": "function", "function": {"name": "f"}}), ToolChoice::Named("f".into())),
        ] {
            let taken =
                take(json!({"tools": list, "tool_choice": choice, "parallel_tool_calls": false})).unwrap().unwrap();
            assert_eq!((serde_json::from_str::<Value>(&taken.list).unwrap(), taken.is_parallel), (list.clone(), false));
            assert_eq!(taken.choice, expected);
            let parameters = Some(r#"{"type":"object"}"#.into());
            assert_eq!(taken.functions, [ToolFunction { name: "f".into(), parameters, is_strict: false }]);
        }
        assert_eq!(take(json!({"tools": list, "tool_choice": "none"})).unwrap(), None);
        assert_eq!(take(json!({"tools": []})).unwrap(), None);
        for (body, param) in [
            (json!({"tools": [{"type": "web_search"}]}), "tools"),
            (json!({"tools": [{"type": "custom", "function": {"name": "f"}}]}), "tools"),
            (json!({"tools": [{"type": "function", "function": {"name": "f g"}}]}), "tools"),
            (json!({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}), "tools"),
            (json!({"tools": [{"type": "function", "function": {"name": "f", "colour": "red"}}]}), "tools"),
            (json!({"tools": vec![tool.clone(); TOOLS_MAX + 1]}), "tools"),
            (json!({"tools": list, "tool_choice": "allowed"}), "tool_choice"),
            (json!({"tools": list, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}), "tool_choice"),
            (json!({"tools": list, "tool_choice": {"type": "function", "function": {"name": "g"}}}), "tool_choice"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": {"type": "function"}}), "tool_choice"),
        ] {
            assert_eq!(take(body).unwrap_err().body.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn message_has_the_calls_of_the_answer() {
        let text = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call><tool_call>{\"name\": \"g\"}</tool_call>\n";
        let rules = ToolRules { format: ToolFormat::Hermes, is_parallel: true };
        let (answer, has_calls) = message(Some(rules), text.into());
        assert!(has_calls && answer["content"].is_null(), "{answer}");
        assert_eq!(answer["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{\"a\": 1}"}));
        assert_eq!(answer["tool_calls"].as_array().unwrap().len(), 2);
        let one = message(Some(ToolRules { is_parallel: false, ..rules }), text.into()).0;
        assert_eq!(one["tool_calls"].as_array().unwrap().len(), 1);
        assert_eq!(one["tool_calls"][0]["function"]["arguments"], "{\"a\": 1}", "none of the second call");
        let (plain, has_calls) = message(Some(rules), "Hello.\n".into());
        assert_eq!((plain["content"].as_str(), has_calls), (Some("Hello.\n"), false));
    }
}
