//! Answers as server-sent events: `data: {…}\n\n` per chunk, then `data: [DONE]\n\n`.
//!
//! Invariants:
//!
//! - Chunks of one choice come in order. Chunks of different choices may interleave.
//! - A failure is one event with OpenAI's error object, followed by `[DONE]`. No stream ends in any
//!   other way, unless its connection breaks.
//! - Dropping the body, because the client disconnected, drops every generation and gives all
//!   permits back. So does the deadline while the client does not read. It then finds the error
//!   after the events that were buffered.

use super::answer::{Choice, Endpoint, ResponseMeta, StartedAnswer};
use super::errors::ApiError;
use super::event_room::EventRoom;
use super::logprobs::{self, TokenEntry};
use super::native::NativeState;
use super::responses_output::{self, ResponseWriter};
use super::tools::{self, AnswerPart, ToolSplitter};
use super::types::{StreamOptions, Usage, finish_reason_name};
use super::usage::UsageTotals;
use super::whole::AnswerCharge;
use crate::metrics::RequestRecord;
use crate::route::{CachedTokens, Delta, RouteError};
use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::{BoxStream, Stream, StreamExt, empty, iter, once, unfold};
use larder_worker::api::FinishReason;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

/// Events buffered for a slow client, if there is room for them. A full buffer applies backpressure
/// to the engines' streams.
const EVENTS_AHEAD_MAX: usize = 16;
/// Copies of an answer of [`Endpoint::Native`]: its state, and a chunk that is being written.
const NATIVE_COPIES: usize = 2;

enum ChoiceEvent {
    /// Part of the echoed prompt.
    Echo {
        text: String,
        tokens: Vec<TokenEntry>,
    },
    Text {
        text: String,
        tokens: Vec<TokenEntry>,
    },
    End {
        finish_reason: FinishReason,
        completion_tokens: u32,
        cached_tokens: CachedTokens,
        charge: AnswerCharge,
    },
    Failed(RouteError),
}

pub(crate) fn respond(started: StartedAnswer, record: Option<RequestRecord>) -> Response {
    let (deadline, room) = (started.deadline, EventRoom::new(started.answers.clone()));
    // The status is sent with the first event. All choices have their first token by now, so 200 is
    // justified.
    let events = buffered(EventSource::new(started, record), room, deadline);
    let body = Body::from_stream(events.map(Ok::<_, Infallible>));
    ([(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")], body).into_response()
}

/// Moves the events of `source` through a bounded buffer, with a task that drops the source at
/// `deadline` even if the client has stopped reading. Without it, a stalled client would hold
/// engines and permits for as long as its connection lasts.
fn buffered(source: EventSource, room: EventRoom, deadline: Instant) -> impl Stream<Item = Bytes> + Send + 'static {
    let (sender, receiver) = mpsc::channel(EVENTS_AHEAD_MAX);
    // Dropping the body drops this handle. That aborts the task and with it every generation.
    let pump = AbortOnDropHandle::new(tokio::spawn(pump(source, room, sender, deadline)));
    let live = unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) });
    let rest = once(pump).flat_map(|rest| {
        // A stream that stopped in any other way must not look complete.
        let failed = |error| [event(&ApiError::internal("finish the answer", error).envelope()), done()].into();
        iter(rest.unwrap_or_else(failed))
    });
    live.chain(rest)
}

/// Sends all events to a client's buffer. Returns the events that end the stream if the client does
/// not read until `deadline`, or if there is no memory for an event.
async fn pump(
    mut source: EventSource,
    room: EventRoom,
    sender: mpsc::Sender<Bytes>,
    deadline: Instant,
) -> VecDeque<Bytes> {
    while let Some(bytes) = source.next().await {
        let send = async { Ok::<_, RouteError>(sender.send(room.hold(bytes).await?).await.is_ok()) };
        match timeout_at(deadline, send).await.unwrap_or(Err(RouteError::Deadline)) {
            Ok(true) => {}
            // The client disconnected.
            Ok(false) => break,
            Err(error) => {
                source.fail(error.into());
                return std::mem::take(&mut source.ready);
            }
        }
    }
    VecDeque::new()
}

struct EventSource {
    writer: ChunkWriter,
    events: BoxStream<'static, (u32, ChoiceEvent)>,
    ready: VecDeque<Bytes>,
    usage_totals: UsageTotals,
    /// Tokens sent so far, for the usage in chunks.
    tokens_sent: u32,
    record: Option<RequestRecord>,
    /// Held until the stream is dropped: a streaming answer counts as in progress to its end.
    _permit: larder_http::PeerCharge,
    is_over: bool,
}

impl EventSource {
    fn new(started: StartedAnswer, record: Option<RequestRecord>) -> Self {
        let StartedAnswer { meta, prompts, usage_totals, stream_options, permit, .. } = started;
        let is_native = meta.endpoint == Endpoint::Native;
        let indexes = 0..usage_totals.prompt_tokens().count() as u32;
        let native = usage_totals.prompt_tokens().filter(|_| is_native).map(NativeState::new).collect();
        let tools = indexes.clone().filter_map(|_| meta.tools.map(ToolSplitter::new)).collect();
        let response = meta.response.is_some().then(ResponseWriter::default);
        let mut writer = ChunkWriter { meta, options: stream_options, native, tools, response };
        let ready = indexes.filter_map(|index| writer.opening(index)).collect();
        let include_usage = stream_options.has_last_chunk() || is_native;
        let copies = copies(&writer.meta);
        let of_choice = move |choice| choice_events(choice, include_usage, copies);
        let events = prompts.events(of_choice, |error| (0, ChoiceEvent::Failed(error)));
        Self { writer, events, ready, usage_totals, tokens_sent: 0, record, _permit: permit, is_over: false }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.is_over {
                return None;
            }
            match self.events.next().await {
                Some((index, ChoiceEvent::Echo { text, tokens })) => {
                    let usage = self.usage();
                    self.ready.push_back(self.writer.text(index, &text, &tokens, &usage));
                }
                Some((index, ChoiceEvent::Text { text, tokens })) => {
                    self.tokens_sent += 1;
                    let usage = self.usage();
                    self.ready.extend(self.writer.answer(index, &text, &tokens, &usage));
                }
                Some((index, ChoiceEvent::End { finish_reason, completion_tokens, cached_tokens, charge })) => {
                    self.usage_totals.add(index, completion_tokens, cached_tokens);
                    if let Some(state) = self.writer.native.get_mut(index as usize) {
                        state.cached_tokens = cached_tokens.total();
                    }
                    let usage = self.usage();
                    self.ready.extend(self.writer.rest(index, &usage));
                    match &mut self.writer.response {
                        Some(response) => response.end(finish_reason, charge),
                        None => self.ready.push_back(self.writer.finish(index, finish_reason, &usage)),
                    }
                }
                Some((_, ChoiceEvent::Failed(error))) => self.fail(error.into()),
                None => self.complete(),
            }
        }
    }

    /// Usage so far. Tokens without text are counted at the end of their choice.
    fn usage(&self) -> Usage {
        let usage = self.usage_totals.usage();
        let completion_tokens = usage.completion_tokens.max(self.tokens_sent);
        Usage::new(usage.prompt_tokens, completion_tokens, usage.prompt_tokens_details.cached_tokens)
    }

    fn fail(&mut self, error: ApiError) {
        // Drops the generations of all other choices, which cancels them on their engines.
        self.events = empty().boxed();
        if let Some(record) = self.record.take() {
            record.end(error.status.as_u16());
        }
        // At the deadline, events of the normal end may still wait here.
        self.ready = self.writer.failure(&error);
        self.is_over = true;
    }

    fn complete(&mut self) {
        if let Some(record) = self.record.take() {
            self.usage_totals.end(record);
        }
        if let Some(response) = &mut self.writer.response {
            self.ready.push_back(response.complete(&self.writer.meta, &self.usage_totals.usage()));
            self.is_over = true;
            return;
        }
        if self.writer.options.has_last_chunk() {
            // OpenAI sends the usage chunk last, and with an empty list of choices.
            self.ready.push_back(self.writer.usage(&self.usage_totals));
        }
        self.ready.push_back(done());
        self.is_over = true;
    }
}

/// Copies of an answer that a slow reader leaves in memory.
fn copies(meta: &ResponseMeta) -> usize {
    match meta {
        // Each chunk has the whole text so far. Those that wait have room.
        ResponseMeta { endpoint: Endpoint::Native, .. } => NATIVE_COPIES,
        ResponseMeta { response: Some(_), .. } => responses_output::STREAM_COPIES,
        _ => 0,
    }
}

/// Events of one choice. The last one is its end or its failure. Charges `copies` of the answer.
fn choice_events(choice: Choice, include_usage: bool, copies: usize) -> BoxStream<'static, (u32, ChoiceEvent)> {
    let index = choice.index;
    // In parts, and only when the client reads: an echo can have megabytes of log-probabilities.
    let echo = iter(choice.echoed().pieces()).map(move |(text, tokens)| (index, ChoiceEvent::Echo { text, tokens }));
    let answer = unfold(Some((choice, 0)), move |choice| async move {
        let (mut choice, mut kept) = choice?;
        match choice.next().await {
            Ok(Delta::Token { id, text, logprobs }) => {
                let tokens: Vec<TokenEntry> = choice.entry(id, &text, logprobs).into_iter().collect();
                kept += copies * (text.len() + tokens.iter().map(TokenEntry::bytes).sum::<usize>());
                match choice.charge(kept) {
                    Ok(()) => Some(((index, ChoiceEvent::Text { text, tokens }), Some((choice, kept)))),
                    Err(error) => Some(((index, ChoiceEvent::Failed(error)), None)),
                }
            }
            Ok(Delta::End { finish_reason, completion_tokens }) => {
                let cached_tokens = choice.generation.cached_tokens(include_usage).await;
                let charge = choice.take_charge();
                Some(((index, ChoiceEvent::End { finish_reason, completion_tokens, cached_tokens, charge }), None))
            }
            Err(error) => Some(((index, ChoiceEvent::Failed(error)), None)),
        }
    });
    echo.chain(answer).boxed()
}

struct ChunkWriter {
    meta: ResponseMeta,
    options: StreamOptions,
    /// Answers so far of [`Endpoint::Native`], per choice.
    native: Vec<NativeState>,
    /// Empty if the request has no tools.
    tools: Vec<ToolSplitter>,
    /// Answer so far of `/v1/responses`.
    response: Option<ResponseWriter>,
}

impl ChunkWriter {
    /// First chunk of a chat choice, which carries the role. Completions have none.
    fn opening(&mut self, index: u32) -> Option<Bytes> {
        if let Some(response) = &mut self.response {
            return Some(response.opening(&self.meta));
        }
        let role = json!({"role": "assistant", "content": "", "refusal": null});
        (self.meta.endpoint == Endpoint::Chat).then(|| self.chunk(vec![chat_choice(index, role, None)], None))
    }

    /// Chunks of the next text of an answer, in which there may be calls of tools.
    fn answer(&mut self, index: u32, text: &str, tokens: &[TokenEntry], usage: &Usage) -> Vec<Bytes> {
        let Some(splitter) = self.tools.get_mut(index as usize) else {
            return vec![self.text(index, text, tokens, usage)];
        };
        let parts = splitter.push(text);
        let mut chunks = Vec::new();
        // With the log-probabilities first, because the parts may be those of earlier tokens.
        if !tokens.is_empty() {
            chunks.push(self.text(index, "", tokens, usage));
        }
        chunks.extend(self.parts(index, parts, usage));
        chunks
    }

    /// Chunks of the text held back so far.
    fn rest(&mut self, index: u32, usage: &Usage) -> Vec<Bytes> {
        let parts = self.tools.get_mut(index as usize).map(ToolSplitter::finish).unwrap_or_default();
        self.parts(index, parts, usage)
    }

    fn parts(&mut self, index: u32, parts: Vec<AnswerPart>, usage: &Usage) -> Vec<Bytes> {
        let chunk = |part| match part {
            AnswerPart::Text(text) => self.text(index, &text, &[], usage),
            AnswerPart::Call(head) => match &mut self.response {
                Some(response) => response.call(head),
                None => {
                    let mut call = head.json("");
                    call["index"] = json!(head.index);
                    self.call(index, &call, usage)
                }
            },
            AnswerPart::Arguments { index: call, json } => match &mut self.response {
                Some(response) => response.arguments(&json),
                None => self.call(index, &json!({"index": call, "function": {"arguments": json}}), usage),
            },
        };
        parts.into_iter().map(chunk).collect()
    }

    /// Chunk of an entry of `tool_calls`: its beginning, or more of its arguments.
    fn call(&self, index: u32, entry: &Value, usage: &Usage) -> Bytes {
        let choice = chat_choice(index, json!({"tool_calls": [entry]}), None);
        self.chunk(vec![choice], self.options.continuous_usage.then_some(usage))
    }

    fn text(&mut self, index: u32, text: &str, tokens: &[TokenEntry], usage: &Usage) -> Bytes {
        if let Some(state) = self.native.get_mut(index as usize) {
            state.add(text, tokens.to_vec());
            return event(&state.json(&self.meta, index, None));
        }
        if let Some(response) = &mut self.response {
            return response.text(text);
        }
        let endpoint = self.meta.endpoint;
        let mut choice = match endpoint {
            Endpoint::Completion | Endpoint::Native => completion_choice(index, text, None),
            Endpoint::Chat => chat_choice(index, json!({"content": text}), None),
        };
        if !tokens.is_empty() {
            choice["logprobs"] = logprobs::json(endpoint, &self.meta.tokenizer, tokens);
        }
        self.chunk(vec![choice], self.options.continuous_usage.then_some(usage))
    }

    fn finish(&mut self, index: u32, reason: FinishReason, usage: &Usage) -> Bytes {
        if let Some(state) = self.native.get_mut(index as usize) {
            // The charge of the text ends with its choice, and other choices may go on for long.
            return event(&std::mem::take(state).json(&self.meta, index, Some(reason)));
        }
        let has_calls = self.tools.get(index as usize).is_some_and(ToolSplitter::has_calls);
        let has_calls = has_calls && reason == FinishReason::Stop;
        let reason = Some(if has_calls { tools::FINISH_REASON } else { finish_reason_name(reason) });
        let choice = match self.meta.endpoint {
            Endpoint::Completion | Endpoint::Native => completion_choice(index, "", reason),
            Endpoint::Chat => chat_choice(index, json!({}), reason),
        };
        self.chunk(vec![choice], self.options.continuous_usage.then_some(usage))
    }

    /// Last events of an answer that fails.
    fn failure(&mut self, error: &ApiError) -> VecDeque<Bytes> {
        match &mut self.response {
            Some(response) => [response.failure(&self.meta, error)].into(),
            None => [event(&error.envelope()), done()].into(),
        }
    }

    fn usage(&self, totals: &UsageTotals) -> Bytes {
        // Without `usage` if the client asked only for the split of the cached tokens.
        let mut chunk = self.json(Vec::new(), Some(&totals.usage()));
        chunk["sglext"] = totals.sglext();
        event(&chunk)
    }

    fn chunk(&self, choices: Vec<Value>, usage: Option<&Usage>) -> Bytes {
        event(&self.json(choices, usage))
    }

    fn json(&self, choices: Vec<Value>, usage: Option<&Usage>) -> Value {
        let object = match self.meta.endpoint {
            Endpoint::Completion | Endpoint::Native => "text_completion",
            Endpoint::Chat => "chat.completion.chunk",
        };
        let mut chunk = json!({
            "id": self.meta.id,
            "object": object,
            "created": self.meta.created,
            "model": self.meta.model,
            "system_fingerprint": self.meta.fingerprint,
            "choices": choices,
        });
        if self.options.include_usage {
            chunk["usage"] = json!(usage);
        }
        chunk
    }
}

fn completion_choice(index: u32, text: &str, finish_reason: Option<&str>) -> Value {
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish_reason})
}

fn chat_choice(index: u32, delta: Value, finish_reason: Option<&str>) -> Value {
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": finish_reason})
}

fn event(value: &impl Serialize) -> Bytes {
    let mut bytes = BytesMut::from(&b"data: "[..]);
    // serde_json writes no line breaks, so one `data:` line holds the whole event. Serialising
    // these values to memory cannot fail; an empty object stands in rather than a panic.
    if serde_json::to_writer((&mut bytes).writer(), value).is_err() {
        bytes.put_slice(b"{}");
    }
    bytes.put_slice(b"\n\n");
    bytes.freeze()
}

fn done() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

#[cfg(test)]
mod tests {
    use super::super::fields::Fields;
    use super::super::responses_output::ResponseRequest;
    use super::super::tool_parser::ToolFormat;
    use super::super::tools::ToolRules;
    use super::*;
    use std::sync::Arc;

    fn writer(endpoint: Endpoint, include_usage: bool) -> ChunkWriter {
        let options = StreamOptions { include_usage, ..StreamOptions::default() };
        ChunkWriter {
            meta: ResponseMeta::for_tests(endpoint),
            options,
            native: Vec::new(),
            tools: Vec::new(),
            response: None,
        }
    }

    fn parse(event: Bytes) -> Value {
        let text = String::from_utf8(event.to_vec()).unwrap();
        let data = text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap();
        assert!(!data.contains('\n'));
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn completion_chunks_have_openai_form() {
        let mut writer = writer(Endpoint::Completion, false);
        let none = Usage::default();
        assert!(writer.opening(0).is_none());
        let expected = json!({"id": "id-1", "object": "text_completion", "created": 7, "model": "m",
            "system_fingerprint": "fp_1", "choices": [{"index": 1, "text": "a\n\"b", "logprobs": null, "finish_reason": null}]});
        assert_eq!(parse(writer.text(1, "a\n\"b", &[], &none)), expected);
        assert_eq!(parse(writer.finish(0, FinishReason::Length, &none))["choices"][0]["finish_reason"], "length");
    }

    #[test]
    fn chat_chunks_have_openai_form() {
        let mut writer = writer(Endpoint::Chat, true);
        let none = Usage::default();
        let opening = parse(writer.opening(0).unwrap());
        assert_eq!(opening["object"], "chat.completion.chunk");
        assert_eq!(opening["choices"][0]["delta"]["role"], "assistant");
        assert!(opening.get("usage").is_some_and(Value::is_null));
        assert_eq!(parse(writer.text(0, "x", &[], &none))["choices"][0]["delta"], json!({"content": "x"}));
        assert_eq!(parse(writer.finish(0, FinishReason::Stop, &none))["choices"][0]["delta"], json!({}));
        let mut totals = UsageTotals::new(vec![10], 1);
        totals.add(0, 5, CachedTokens { host: 8, ..CachedTokens::default() });
        let usage = parse(writer.usage(&totals));
        assert_eq!(usage["sglext"]["cached_tokens_details"]["host"], 8);
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 8);
        assert_eq!(usage["usage"]["total_tokens"], 15);
    }

    #[test]
    fn texts_that_stay_in_memory_are_charged() {
        let chat = ResponseMeta::for_tests(Endpoint::Chat);
        assert_eq!((copies(&chat), copies(&ResponseMeta::for_tests(Endpoint::Completion))), (0, 0));
        assert_eq!(copies(&ResponseMeta::for_tests(Endpoint::Native)), NATIVE_COPIES);
        let rules = ToolRules { format: ToolFormat::Hermes, is_parallel: true };
        assert_eq!(copies(&ResponseMeta { tools: Some(rules), ..chat.clone() }), 0, "calls are not held back");
        let request = ResponseRequest::of(&Fields::default());
        assert_eq!(
            copies(&ResponseMeta { response: Some(Arc::new(request)), ..chat }),
            responses_output::STREAM_COPIES
        );
    }

    #[test]
    fn stream_ends_with_the_done_marker() {
        assert_eq!(&done()[..], b"data: [DONE]\n\n");
    }
}
