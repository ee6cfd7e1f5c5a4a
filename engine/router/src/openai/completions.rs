//! `POST /v1/completions`.

use super::answer::{self, AnswerJob, Endpoint};
use super::errors::ApiError;
use super::types::{CompletionRequest, PromptInput};
use super::{RequestContext, RequestId, counted, stream};
use crate::RouterState;
use crate::metrics::RequestRecord;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
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
    counted(&router, "completions", serve).await
}

async fn serve(request: RequestContext, body: Body, record: &mut Option<RequestRecord>) -> Result<Response, ApiError> {
    // Before the body is read, so that the limit also bounds the memory of bodies in flight.
    let mut permit = answer::admit(&request)?;
    let CompletionRequest { common, prompts } = request.read(body, CompletionRequest::parse).await?;
    let model = answer::find_model(&request, &common.model).await?;
    answer::admit_choices(&request, &mut permit, prompts.len() * common.n as usize)?;
    let bytes = prompts.iter().map(size).sum();
    let prompts = answer::prompts(&model, bytes, move |model| {
        let tokenise = |prompt| match prompt {
            PromptInput::Tokens(tokens) => Ok(tokens),
            PromptInput::Text(text) => {
                model.tokenizer.encode(&text, true).map_err(|error| ApiError::field("prompt", error.to_string()))
            }
        };
        prompts.into_iter().map(tokenise).collect()
    })
    .await?;
    let is_stream = common.stream;
    let started =
        answer::begin(AnswerJob { request, endpoint: Endpoint::Completion, model, common, prompts, permit }).await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { answer::whole(started, record).await }
}

/// Approximate size of a prompt in bytes. It decides whether tokenising leaves the event loop.
fn size(prompt: &PromptInput) -> usize {
    match prompt {
        PromptInput::Text(text) => text.len(),
        PromptInput::Tokens(tokens) => tokens.len() * size_of::<u32>(),
    }
}
