//! Answers of `/v1/responses`: items, and the events of a stream of them.
//!
//! Invariant: the items of a stream are those of the same answer in one piece, apart from ids.

use super::PROMPT_CHARGE_BYTES;
use super::answer::ResponseMeta;
use super::errors::ApiError;
use super::fields::Fields;
use super::tools::{AnswerPart, CallHead, ToolSplitter};
use super::types::Usage;
use super::whole::{AnswerCharge, ChargedBody};
use bytes::Bytes;
use larder_worker::api::FinishReason;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Copies of the text of an answer at the end of its stream: the text so far, and four events.
pub(crate) const STREAM_COPIES: usize = 5;

/// Maximum size in bytes of the fields that an answer repeats.
const REPEATED_BYTES_MAX: usize = 1 << 20;
/// Copies of these fields: the object, and the events of a stream that have the whole response.
const REPEATED_COPIES: usize = 5;

/// Fields of a request that its answer repeats.
#[derive(Debug, Serialize)]
pub(crate) struct ResponseRequest {
    instructions: Option<Box<RawValue>>,
    max_output_tokens: Option<Box<RawValue>>,
    metadata: Box<RawValue>,
    parallel_tool_calls: Box<RawValue>,
    reasoning: Option<Box<RawValue>>,
    temperature: Option<Box<RawValue>>,
    text: Box<RawValue>,
    tool_choice: Box<RawValue>,
    tools: Box<RawValue>,
    top_p: Option<Box<RawValue>>,
    user: Option<Box<RawValue>>,
    /// Charge of the memory of this object and of its copies in events.
    #[serde(skip)]
    pub(crate) charge: Option<larder_http::PeerCharge>,
}

impl ResponseRequest {
    /// Units of [`PROMPT_CHARGE_BYTES`] of this object and its copies.
    ///
    /// # Errors
    /// 400 above [`REPEATED_BYTES_MAX`].
    pub(crate) fn units(&self) -> Result<usize, ApiError> {
        let always = [&self.metadata, &self.parallel_tool_calls, &self.text, &self.tool_choice, &self.tools];
        let optional =
            [&self.instructions, &self.max_output_tokens, &self.reasoning, &self.temperature, &self.top_p, &self.user];
        let fields = always.into_iter().chain(optional.into_iter().flatten());
        let bytes: usize = fields.map(|field| field.get().len()).sum();
        if bytes > REPEATED_BYTES_MAX {
            let message = format!(
                "the fields that the answer repeats, such as 'metadata', have {bytes} bytes; at most \
                 {REPEATED_BYTES_MAX} are repeated. Send long instructions as a message of 'input'."
            );
            return Err(ApiError::field("metadata", message));
        }
        Ok((bytes * REPEATED_COPIES).div_ceil(PROMPT_CHARGE_BYTES))
    }

    pub(crate) fn of(fields: &Fields<'_>) -> Self {
        let given = |name: &str| fields.get(name).and_then(|json| RawValue::from_string(json.into()).ok());
        let or = |name: &str, default: &str| {
            given(name).or_else(|| RawValue::from_string(default.into()).ok()).unwrap_or_default()
        };
        Self {
            instructions: given("instructions"),
            max_output_tokens: given("max_output_tokens"),
            metadata: or("metadata", "{}"),
            parallel_tool_calls: or("parallel_tool_calls", "true"),
            reasoning: given("reasoning"),
            temperature: given("temperature"),
            text: or("text", r#"{"format": {"type": "text"}}"#),
            tool_choice: or("tool_choice", "\"auto\""),
            tools: or("tools", "[]"),
            top_p: given("top_p"),
            user: given("user"),
            charge: None,
        }
    }
}

/// A response, complete or in progress.
#[derive(Serialize)]
struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    background: bool,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    model: &'a str,
    output: &'a [Value],
    previous_response_id: Option<()>,
    store: bool,
    truncation: &'static str,
    usage: Option<Value>,
    #[serde(flatten)]
    request: Option<&'a ResponseRequest>,
}

impl<'a> ResponseObject<'a> {
    fn new(meta: &'a ResponseMeta, status: &'static str, output: &'a [Value]) -> Self {
        let incomplete_details = (status == INCOMPLETE).then(|| json!({"reason": "max_output_tokens"}));
        Self {
            id: &meta.id,
            object: "response",
            created_at: meta.created,
            status,
            background: false,
            error: None,
            incomplete_details,
            model: &meta.model,
            output,
            previous_response_id: None,
            store: false,
            truncation: "disabled",
            usage: None,
            request: meta.response.as_deref(),
        }
    }
}

const COMPLETED: &str = "completed";
const INCOMPLETE: &str = "incomplete";
const IN_PROGRESS: &str = "in_progress";

fn status_of(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => COMPLETED,
        FinishReason::Length => INCOMPLETE,
    }
}

fn usage_json(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    })
}

fn new_id(kind: &str) -> String {
    format!("{kind}_{}", super::random_id())
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn message_item(id: &str, status: &str, content: &[Value]) -> Value {
    json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
}

fn call_item(id: &str, status: &str, head: &CallHead, arguments: &str) -> Value {
    json!({"id": id, "type": "function_call", "status": status, "call_id": head.id, "name": head.name,
        "arguments": arguments})
}

/// Item to which the model still adds.
enum OpenItem {
    Message { id: String, text: String },
    Call { id: String, head: CallHead, arguments: String },
}

/// Writes the answer of one choice as items. Each step returns its events, in order.
#[derive(Default)]
pub(crate) struct ResponseWriter {
    items: Vec<Value>,
    open: Option<OpenItem>,
    /// Events so far.
    sequence: u64,
    status: Option<&'static str>,
    charge: Option<AnswerCharge>,
}

impl ResponseWriter {
    /// First events of a stream.
    pub(crate) fn opening(&mut self, meta: &ResponseMeta) -> Bytes {
        let mut events = Events::default();
        for kind in ["response.created", "response.in_progress"] {
            self.response_event(&mut events, kind, &ResponseObject::new(meta, IN_PROGRESS, &[]));
        }
        events.bytes.into()
    }

    /// Events of the next text.
    pub(crate) fn text(&mut self, text: &str) -> Bytes {
        let mut events = Events::default();
        if !text.is_empty() {
            self.add_text(&mut events, text);
        }
        events.bytes.into()
    }

    /// Events of the beginning of a call.
    pub(crate) fn call(&mut self, head: CallHead) -> Bytes {
        let mut events = Events::default();
        self.close_item(&mut events, COMPLETED);
        let id = new_id("fc");
        let (at, item) = (self.items.len(), call_item(&id, IN_PROGRESS, &head, ""));
        self.event(&mut events, json!({"type": "response.output_item.added", "output_index": at, "item": item}));
        self.open = Some(OpenItem::Call { id, head, arguments: String::new() });
        events.bytes.into()
    }

    /// Events of the next part of the arguments of the call that has begun.
    pub(crate) fn arguments(&mut self, json: &str) -> Bytes {
        let mut events = Events::default();
        let at = self.items.len();
        if let Some(OpenItem::Call { id, arguments, .. }) = &mut self.open {
            arguments.push_str(json);
            let kind = "response.function_call_arguments.delta";
            let event = json!({"type": kind, "item_id": id, "output_index": at, "delta": json});
            self.event(&mut events, event);
        }
        events.bytes.into()
    }

    /// Notes the end of the text. `charge` covers it until the last event is sent.
    pub(crate) fn end(&mut self, reason: FinishReason, charge: AnswerCharge) {
        self.status = Some(status_of(reason));
        self.charge = Some(charge);
    }

    /// Last events of a complete stream.
    pub(crate) fn complete(&mut self, meta: &ResponseMeta, usage: &Usage) -> Bytes {
        let mut events = Events::default();
        let status = self.status.unwrap_or(COMPLETED);
        self.finish_items(&mut events, status);
        let items = std::mem::take(&mut self.items);
        let response = ResponseObject { usage: Some(usage_json(usage)), ..ResponseObject::new(meta, status, &items) };
        let kind = if status == COMPLETED { "response.completed" } else { "response.incomplete" };
        self.response_event(&mut events, kind, &response);
        match self.charge.take() {
            // A slow client keeps the events in memory.
            Some(charge) => Bytes::from_owner(ChargedBody::new(events.bytes, charge)),
            None => events.bytes.into(),
        }
    }

    /// Last event of a stream that fails.
    pub(crate) fn failure(&mut self, meta: &ResponseMeta, error: &ApiError) -> Bytes {
        let mut events = Events::default();
        let code = match error.status.as_u16() {
            429 => "rate_limit_exceeded",
            400..500 => "invalid_prompt",
            _ => "server_error",
        };
        let error = json!({"code": code, "message": error.body.message});
        let response = ResponseObject { error: Some(error), ..ResponseObject::new(meta, "failed", &[]) };
        self.response_event(&mut events, "response.failed", &response);
        events.bytes.into()
    }

    fn add_text(&mut self, events: &mut Events, text: &str) {
        if !matches!(self.open, Some(OpenItem::Message { .. })) {
            self.close_item(events, COMPLETED);
            let (at, id) = (self.items.len(), new_id("msg"));
            let item = message_item(&id, IN_PROGRESS, &[]);
            self.event(events, json!({"type": "response.output_item.added", "output_index": at, "item": item}));
            self.event(
                events,
                json!({"type": "response.content_part.added", "item_id": id, "output_index": at, "content_index": 0,
                    "part": text_part("")}),
            );
            self.open = Some(OpenItem::Message { id, text: String::new() });
        }
        let at = self.items.len();
        if let Some(OpenItem::Message { id, text: so_far }) = &mut self.open {
            so_far.push_str(text);
            let event = json!({"type": "response.output_text.delta", "item_id": id, "output_index": at,
                "content_index": 0, "delta": text, "logprobs": []});
            self.event(events, event);
        }
    }

    /// Ends the open item. Its answer has at least one item.
    fn finish_items(&mut self, events: &mut Events, status: &str) {
        if self.items.is_empty() && self.open.is_none() {
            self.add_text(events, "");
        }
        self.close_item(events, status);
    }

    fn close_item(&mut self, events: &mut Events, status: &str) {
        let at = self.items.len();
        let item = match self.open.take() {
            None => return,
            Some(OpenItem::Message { id, text }) => {
                let part = text_part(&text);
                self.event(
                    events,
                    json!({"type": "response.output_text.done", "item_id": id, "output_index": at, "content_index": 0,
                        "text": text, "logprobs": []}),
                );
                self.event(
                    events,
                    json!({"type": "response.content_part.done", "item_id": id, "output_index": at,
                        "content_index": 0, "part": part}),
                );
                message_item(&id, status, &[part])
            }
            Some(OpenItem::Call { id, head, arguments }) => {
                self.event(
                    events,
                    json!({"type": "response.function_call_arguments.done", "item_id": id, "output_index": at,
                        "name": head.name, "arguments": arguments}),
                );
                call_item(&id, status, &head, &arguments)
            }
        };
        self.event(events, json!({"type": "response.output_item.done", "output_index": at, "item": item}));
        self.items.push(item);
    }

    fn response_event(&mut self, events: &mut Events, kind: &str, response: &ResponseObject<'_>) {
        #[derive(Serialize)]
        struct Event<'a> {
            #[serde(rename = "type")]
            kind: &'a str,
            sequence_number: u64,
            response: &'a ResponseObject<'a>,
        }
        events.push(kind, &Event { kind, sequence_number: self.sequence, response });
        self.sequence += 1;
    }

    fn event(&mut self, events: &mut Events, mut event: Value) {
        event["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        events.push(event["type"].as_str().unwrap_or_default(), &event);
    }
}

/// Server-sent events with their types.
#[derive(Default)]
struct Events {
    bytes: Vec<u8>,
}

impl Events {
    fn push(&mut self, kind: &str, data: &impl Serialize) {
        self.bytes.extend_from_slice(format!("event: {kind}\ndata: ").as_bytes());
        // Serialising to memory cannot fail here. An empty object stands in rather than a panic.
        if serde_json::to_writer(&mut self.bytes, data).is_err() {
            self.bytes.extend_from_slice(b"{}");
        }
        self.bytes.extend_from_slice(b"\n\n");
    }
}

/// JSON of a whole answer with the text of its only choice.
pub(crate) fn whole(meta: &ResponseMeta, text: &str, reason: FinishReason, usage: &Usage) -> Result<Vec<u8>, ApiError> {
    let mut writer = ResponseWriter::default();
    let mut events = Events::default();
    let parts = match meta.tools.map(ToolSplitter::new) {
        None => vec![AnswerPart::Text(text.into())],
        Some(mut splitter) => splitter.push(text).into_iter().chain(splitter.finish()).collect(),
    };
    for part in parts {
        match part {
            AnswerPart::Text(text) if text.is_empty() => {}
            AnswerPart::Text(text) => writer.add_text(&mut events, &text),
            AnswerPart::Call(head) => drop(writer.call(head)),
            AnswerPart::Arguments { json, .. } => drop(writer.arguments(&json)),
        }
        // The items are all that counts here.
        events.bytes.clear();
    }
    let status = status_of(reason);
    writer.finish_items(&mut events, status);
    let response =
        ResponseObject { usage: Some(usage_json(usage)), ..ResponseObject::new(meta, status, &writer.items) };
    serde_json::to_vec(&response).map_err(|error| ApiError::internal("write the answer", error))
}
