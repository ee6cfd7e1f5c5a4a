//! Answers as server-sent events: `data: {…}\n\n`, and at the end `data: [DONE]\n\n`.
//!
//! What always holds: pieces of a choice come in their order, choices may alternate; a failure is one last event with
//! OpenAI's error object; and when the body is dropped (the client is gone), or the request's time is over while the client
//! does not read, every generation is dropped and all places are given back.

use super::answer::{Begun, Choice, Heading, Shape, Tally};
use super::errors::ApiError;
use super::types::{Usage, finish_word};
use crate::metrics::Record;
use crate::route::{Piece, RouteError};
use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::{BoxStream, SelectAll, Stream, StreamExt, unfold};
use larder_worker::api::FinishReason;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::pin;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

/// Events that wait for a client that reads slowly.
const EVENTS_AHEAD_MAX: usize = 16;

/// What a choice gives.
enum Step {
    Text(String),
    End { finish_reason: FinishReason, completion_tokens: u32, cached_tokens: u32 },
    Failed(RouteError),
}

/// Answers with a stream.
pub(crate) fn respond(begun: Begun, record: Option<Record>) -> Response {
    let deadline = begun.deadline;
    let events = Events::new(begun, record);
    let events = unfold(events, |mut events| async move { Some((events.next().await?, events)) });
    let body = Body::from_stream(pumped(events, deadline).map(Ok::<_, Infallible>));
    ([(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")], body).into_response()
}

/// The same events, taken from `events` by a task of its own, which ends by `deadline` even if nobody reads them.
fn pumped(
    events: impl Stream<Item = Bytes> + Send + 'static,
    deadline: Instant,
) -> impl Stream<Item = Bytes> + Send + 'static {
    let (sender, receiver) = mpsc::channel(EVENTS_AHEAD_MAX);
    let pump = AbortOnDropHandle::new(tokio::spawn(async move {
        let mut events = pin!(events);
        while let Some(bytes) = events.next().await {
            match timeout_at(deadline, sender.send(bytes)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }));
    unfold((receiver, pump), |(mut receiver, pump)| async move { Some((receiver.recv().await?, (receiver, pump))) })
}

struct Events {
    writer: Writer,
    steps: SelectAll<BoxStream<'static, (u32, Step)>>,
    ready: VecDeque<Bytes>,
    tally: Tally,
    record: Option<Record>,
    /// Given back when the stream is dropped.
    _permit: OwnedSemaphorePermit,
    is_over: bool,
}

impl Events {
    fn new(begun: Begun, record: Option<Record>) -> Self {
        let Begun { heading, choices, tally, include_usage, permit, deadline: _ } = begun;
        let writer = Writer { heading, include_usage };
        let ready = choices.iter().filter_map(|choice| writer.opening(choice.index)).collect();
        let steps = choices.into_iter().map(|choice| steps(choice, include_usage)).collect();
        Self { writer, steps, ready, tally, record, _permit: permit, is_over: false }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.is_over {
                return None;
            }
            match self.steps.next().await {
                Some((index, Step::Text(text))) => return Some(self.writer.text(index, &text)),
                Some((index, Step::End { finish_reason, completion_tokens, cached_tokens })) => {
                    self.tally.add(index, completion_tokens, cached_tokens);
                    return Some(self.writer.finish(index, finish_reason));
                }
                Some((_, Step::Failed(error))) => self.fail(error.into()),
                None => self.complete(),
            }
        }
    }

    fn fail(&mut self, error: ApiError) {
        self.steps.clear();
        if let Some(record) = self.record.take() {
            record.end(error.status.as_u16());
        }
        self.ready.extend([event(&error.envelope()), done()]);
        self.is_over = true;
    }

    fn complete(&mut self) {
        if let Some(record) = self.record.take() {
            self.tally.end(record);
        }
        if self.writer.include_usage {
            self.ready.push_back(self.writer.usage(self.tally.usage()));
        }
        self.ready.push_back(done());
        self.is_over = true;
    }
}

/// The steps of one choice, the last one being its end or its failure.
fn steps(choice: Choice, include_usage: bool) -> BoxStream<'static, (u32, Step)> {
    let index = choice.index;
    unfold(Some(choice), move |choice| async move {
        let mut choice = choice?;
        match choice.generation.next().await {
            Ok(Piece::Text(text)) => Some(((index, Step::Text(text)), Some(choice))),
            Ok(Piece::End { finish_reason, completion_tokens }) => {
                let cached_tokens = choice.generation.cached_tokens(include_usage).await;
                Some(((index, Step::End { finish_reason, completion_tokens, cached_tokens }), None))
            }
            Err(error) => Some(((index, Step::Failed(error)), None)),
        }
    })
    .boxed()
}

/// Writes events in the shape of one endpoint.
struct Writer {
    heading: Heading,
    include_usage: bool,
}

impl Writer {
    /// The first event of a chat choice says who speaks.
    fn opening(&self, index: u32) -> Option<Bytes> {
        let role = json!({"role": "assistant", "content": "", "refusal": null});
        (self.heading.shape == Shape::Chat).then(|| self.chunk(vec![chat_choice(index, role, None)], None))
    }

    fn text(&self, index: u32, text: &str) -> Bytes {
        let choice = match self.heading.shape {
            Shape::Completion => completion_choice(index, text, None),
            Shape::Chat => chat_choice(index, json!({"content": text}), None),
        };
        self.chunk(vec![choice], None)
    }

    fn finish(&self, index: u32, reason: FinishReason) -> Bytes {
        let reason = Some(finish_word(reason));
        let choice = match self.heading.shape {
            Shape::Completion => completion_choice(index, "", reason),
            Shape::Chat => chat_choice(index, json!({}), reason),
        };
        self.chunk(vec![choice], None)
    }

    fn usage(&self, usage: Usage) -> Bytes {
        self.chunk(Vec::new(), Some(usage))
    }

    fn chunk(&self, choices: Vec<Value>, usage: Option<Usage>) -> Bytes {
        let object = match self.heading.shape {
            Shape::Completion => "text_completion",
            Shape::Chat => "chat.completion.chunk",
        };
        let mut chunk = json!({
            "id": self.heading.id,
            "object": object,
            "created": self.heading.created,
            "model": self.heading.model,
            "choices": choices,
        });
        if self.include_usage {
            chunk["usage"] = json!(usage);
        }
        event(&chunk)
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
    // JSON text holds no line breaks, so one line is the whole event. These values cannot fail to be written.
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
    use super::*;

    fn writer(shape: Shape, include_usage: bool) -> Writer {
        Writer { heading: Heading { shape, id: "id-1".into(), created: 7, model: "m".into() }, include_usage }
    }

    fn parse(event: Bytes) -> Value {
        let text = String::from_utf8(event.to_vec()).unwrap();
        let data = text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap();
        assert!(!data.contains('\n'));
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn completion_events_have_openais_shape() {
        let writer = writer(Shape::Completion, false);
        assert!(writer.opening(0).is_none());
        let expected = json!({"id": "id-1", "object": "text_completion", "created": 7, "model": "m",
            "choices": [{"index": 1, "text": "a\n\"b", "logprobs": null, "finish_reason": null}]});
        assert_eq!(parse(writer.text(1, "a\n\"b")), expected);
        assert_eq!(parse(writer.finish(0, FinishReason::Length))["choices"][0]["finish_reason"], "length");
    }

    #[test]
    fn chat_events_have_openais_shape() {
        let writer = writer(Shape::Chat, true);
        let opening = parse(writer.opening(0).unwrap());
        assert_eq!(opening["object"], "chat.completion.chunk");
        assert_eq!(opening["choices"][0]["delta"]["role"], "assistant");
        assert!(opening.get("usage").is_some_and(Value::is_null));
        assert_eq!(parse(writer.text(0, "x"))["choices"][0]["delta"], json!({"content": "x"}));
        assert_eq!(parse(writer.finish(0, FinishReason::Stop))["choices"][0]["delta"], json!({}));
        let usage = parse(writer.usage(Usage::new(10, 5, 8)));
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 8);
        assert_eq!(usage["usage"]["total_tokens"], 15);
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_holds_nothing_beyond_the_deadline() {
        let held = std::sync::Arc::new(());
        let copy = held.clone();
        let endless = futures::stream::repeat_with(move || (&copy, done()).1);
        let unread = pumped(endless, Instant::now() + std::time::Duration::from_millis(50));
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        assert_eq!(std::sync::Arc::strong_count(&held), 2);
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        assert_eq!(std::sync::Arc::strong_count(&held), 1);
        assert_eq!(unread.count().await, EVENTS_AHEAD_MAX);
        let three = futures::stream::iter([done(), done(), done()]);
        let read = pumped(three, Instant::now() + std::time::Duration::from_secs(5));
        assert_eq!(read.count().await, 3);
    }

    #[test]
    fn the_end_is_marked() {
        assert_eq!(&done()[..], b"data: [DONE]\n\n");
    }
}
