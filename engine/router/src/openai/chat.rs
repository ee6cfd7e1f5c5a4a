//! `POST /v1/chat/completions`.

use super::answer::{self, Job, Shape};
use super::errors::ApiError;
use super::types::ChatRequest;
use super::{Arrival, RequestId, counted, stream};
use crate::Shared;
use crate::metrics::Record;
use crate::models::ServedModel;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use larder_model::ChatMessage;
use std::sync::Arc;

/// Answers a request.
pub(crate) async fn handle(
    State(shared): State<Arc<Shared>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let serve = async |record: &mut Option<Record>| {
        let arrival = Arrival::new(shared.clone(), id, &headers)?;
        serve(arrival, body, record).await
    };
    counted(&shared, "chat", serve).await
}

async fn serve(arrival: Arrival, body: Body, record: &mut Option<Record>) -> Result<Response, ApiError> {
    let mut permit = answer::admit(&arrival)?;
    let ChatRequest { common, messages } = arrival.read(body, ChatRequest::parse).await?;
    let model = answer::find_model(&arrival, &common.model).await?;
    answer::admit_choices(&arrival, &mut permit, common.n as usize)?;
    let bytes = messages.iter().map(|m| m.content.len()).sum();
    let prompts = answer::prompts(&model, bytes, move |model| Ok(vec![tokens(model, &messages, true)?])).await?;
    let is_stream = common.stream;
    let begun = answer::begin(Job { arrival, shape: Shape::Chat, model, common, prompts, permit }).await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(begun, record.take())) } else { answer::whole(begun, record).await }
}

/// A conversation as the model reads it; with `generate`, up to where the assistant is to speak.
pub(crate) fn tokens(model: &ServedModel, messages: &[ChatMessage], generate: bool) -> Result<Vec<u32>, ApiError> {
    if !model.tokenizer.has_chat_template() {
        let message = format!("the model '{}' has no chat template; use /v1/completions", model.name);
        return Err(ApiError::field("messages", message));
    }
    let failed = |error: larder_model::TokenizerError| ApiError::field("messages", error.to_string());
    let text = model.tokenizer.chat(messages, generate).map_err(failed)?;
    // The template writes the special tokens itself.
    model.tokenizer.encode(&text, false).map_err(failed)
}
