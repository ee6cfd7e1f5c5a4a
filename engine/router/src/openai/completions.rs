//! `POST /v1/completions`.

use super::answer::{self, Job, Shape};
use super::errors::ApiError;
use super::types::{CompletionRequest, PromptInput};
use super::{Arrival, RequestId, counted, stream};
use crate::Shared;
use crate::metrics::Record;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
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
    counted(&shared, "completions", serve).await
}

async fn serve(arrival: Arrival, body: Body, record: &mut Option<Record>) -> Result<Response, ApiError> {
    let mut permit = answer::admit(&arrival)?;
    let CompletionRequest { common, prompts } = arrival.read(body, CompletionRequest::parse).await?;
    let model = answer::find_model(&arrival, &common.model).await?;
    answer::admit_choices(&arrival, &mut permit, prompts.len() * common.n as usize)?;
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
    let begun = answer::begin(Job { arrival, shape: Shape::Completion, model, common, prompts, permit }).await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(begun, record.take())) } else { answer::whole(begun, record).await }
}

/// Bytes of a prompt, roughly.
fn size(prompt: &PromptInput) -> usize {
    match prompt {
        PromptInput::Text(text) => text.len(),
        PromptInput::Tokens(tokens) => tokens.len() * size_of::<u32>(),
    }
}
