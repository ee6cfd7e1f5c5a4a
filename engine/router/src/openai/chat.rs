//! `POST /v1/chat/completions`.

use super::answer::{self, AnswerJob, Endpoint};
use super::errors::ApiError;
use super::types::{ChatRequest, PromptInput};
use super::{RequestContext, RequestId, counted, stream};
use crate::RouterState;
use crate::metrics::{RefusalReason, RequestRecord};
use crate::models::ServedModel;
use crate::route::RouteError;
use crate::templates::{ChatError, RenderedText};
use crate::tokenise::text_bytes_max;
use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use larder_http::RequestBody;
use larder_model::{ChatMessage, RenderError};
use std::sync::Arc;
use tokio::time::Instant;

pub(crate) async fn handle(
    State(router): State<Arc<RouterState>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    body: RequestBody,
) -> Response {
    let serve = async |record: &mut Option<RequestRecord>| {
        let request = RequestContext::new(router.clone(), id, &headers)?;
        serve(request, body, record).await
    };
    counted(&router, "chat", serve).await
}

async fn serve(
    mut request: RequestContext,
    body: RequestBody,
    record: &mut Option<RequestRecord>,
) -> Result<Response, ApiError> {
    let ChatRequest { common, messages } = request.parse(body, ChatRequest::parse).await?;
    let model = answer::find_model(&request, &common.model).await?;
    let permit = answer::admit(&request, common.n as usize)?;
    let context = answer::context(&request, &model)?;
    let rendered = text(&request.router, &model, messages, true, context, request.deadline).await?;
    request.text = rendered.charge;
    let inputs = vec![PromptInput::Text(rendered.text)];
    let prompts = answer::prompts(&mut request, Endpoint::Chat, &model, inputs, context).await?;
    let is_stream = common.stream;
    let started =
        answer::begin(AnswerJob { request, endpoint: Endpoint::Chat, model, common, prompts, permit }).await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { answer::whole(started, record).await }
}

/// Renders a conversation with the model's chat template, to a text that can fit `context` tokens.
/// With `generate` it ends with the cue for the assistant's answer.
pub(crate) async fn text(
    router: &RouterState,
    model: &ServedModel,
    messages: Vec<ChatMessage>,
    generate: bool,
    context: usize,
    deadline: Instant,
) -> Result<RenderedText, ApiError> {
    let Some(chat) = &model.chat else {
        let message = format!("the model '{}' has no chat template; send a text prompt instead", model.name);
        return Err(ApiError::field("messages", message));
    };
    let bytes_max = text_bytes_max(&model.tokenizer, context);
    let bytes = messages.iter().map(|message| message.content.len()).sum();
    // Before the rendering, which would copy it all.
    if bytes > bytes_max {
        return Err(answer::too_many_bytes(router, "messages", context, bytes_max, bytes));
    }
    chat.render(messages, generate, bytes_max, deadline).await.map_err(|error| {
        let message = error.to_string();
        match error {
            ChatError::Template(RenderError::TooLong) => {
                answer::too_many_bytes(router, "messages", context, bytes_max, bytes)
            }
            ChatError::Template(_) => ApiError::field("messages", message),
            ChatError::Exceeded => ApiError::field("messages", message).code("chat_template_exceeded"),
            ChatError::Busy => {
                router.metrics.count_refusal(RefusalReason::TemplateBusy);
                ApiError::overloaded(message, 1)
            }
            ChatError::Deadline => RouteError::Deadline.into(),
            ChatError::Start(error) => ApiError::internal("render the conversation", error),
        }
    })
}
