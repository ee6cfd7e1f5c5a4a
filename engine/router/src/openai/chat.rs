//! `POST /v1/chat/completions`.

use super::answer::{self, AnswerJob, Endpoint};
use super::errors::ApiError;
use super::types::ChatRequest;
use super::{RequestContext, RequestId, counted, stream};
use crate::RouterState;
use crate::metrics::RequestRecord;
use crate::models::ServedModel;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use larder_model::ChatMessage;
use std::sync::Arc;

pub(crate) async fn handle(
    State(router): State<Arc<RouterState>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let serve = async |record: &mut Option<RequestRecord>| {
        let request = RequestContext::new(router.clone(), id, &headers)?;
        serve(request, body, record).await
    };
    counted(&router, "chat", serve).await
}

async fn serve(request: RequestContext, body: Body, record: &mut Option<RequestRecord>) -> Result<Response, ApiError> {
    // Before the body is read, so that the limit also bounds the memory of bodies in flight.
    let mut permit = answer::admit(&request)?;
    let ChatRequest { common, messages } = request.read(body, ChatRequest::parse).await?;
    let model = answer::find_model(&request, &common.model).await?;
    answer::admit_choices(&request, &mut permit, common.n as usize)?;
    let bytes = messages.iter().map(|m| m.content.len()).sum();
    let prompts = answer::prompts(&model, bytes, move |model| Ok(vec![tokens(model, &messages, true)?])).await?;
    let is_stream = common.stream;
    let started =
        answer::begin(AnswerJob { request, endpoint: Endpoint::Chat, model, common, prompts, permit }).await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { answer::whole(started, record).await }
}

/// Renders a conversation with the model's chat template and tokenises it. With `generate` it ends
/// with the cue for the assistant's answer.
pub(crate) fn tokens(model: &ServedModel, messages: &[ChatMessage], generate: bool) -> Result<Vec<u32>, ApiError> {
    if !model.tokenizer.has_chat_template() {
        let message = format!("the model '{}' has no chat template; send a text prompt instead", model.name);
        return Err(ApiError::field("messages", message));
    }
    let failed = |error: larder_model::TokenizerError| ApiError::field("messages", error.to_string());
    let text = model.tokenizer.chat(messages, generate).map_err(failed)?;
    // The template has written the special tokens. Adding them here would double the one at the
    // start.
    model.tokenizer.encode(&text, false).map_err(failed)
}
