//! `POST /v1/chat/completions`.

use super::answer::{self, AnswerJob, Endpoint, StartedAnswer};
use super::constraint;
use super::errors::ApiError;
use super::prepare::{self, PromptRules};
use super::prompt::PromptInput;
use super::tool_parser::ToolFormat;
use super::tools::{ToolRequest, ToolRules};
use super::types::{ChatRequest, CommonParams};
use super::{ApiCall, RequestContext, stream, whole};
use crate::RouterState;
use crate::metrics::{RefusalReason, RequestRecord};
use crate::models::ServedModel;
use crate::route::RouteError;
use crate::templates::{ChatError, RenderedText};
use crate::tokenise::text_bytes_max;
use axum::response::Response;
use larder_http::{PeerAddress, RequestBody};
use larder_model::{ChatMessage, RenderError, RenderOptions};
use tokio::time::Instant;

pub(crate) async fn handle(call: ApiCall) -> Response {
    call.serve("chat", serve).await
}

async fn serve(
    mut request: RequestContext,
    body: RequestBody,
    record: &mut Option<RequestRecord>,
) -> Result<Response, ApiError> {
    let chat = request.parse(body, ChatRequest::parse).await?;
    let is_stream = chat.common.stream;
    let started = start(request, chat).await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { whole::whole(started, record).await }
}

/// Starts the answer of a conversation.
pub(super) async fn start(mut request: RequestContext, chat: ChatRequest) -> Result<StartedAnswer, ApiError> {
    let ChatRequest { mut common, messages, render, tools } = chat;
    let model = prepare::find_model(&request, &common.model).await?;
    let tools = tools.map(|tools| tool_rules(&request, &model, &tools, &mut common)).transpose()?;
    if tools.is_some() {
        // The marks of calls may be special tokens, which texts leave out otherwise.
        common.sampling.rest.skip_special_tokens = false;
    }
    let permit = prepare::admit(&request, 1, common.n)?;
    let context = prepare::context(&request, &model)?;
    let rendered = text(&request, &model, messages, render, context).await?;
    request.text = rendered.charge;
    let inputs = vec![PromptInput::Text(rendered.text)];
    let rules = PromptRules::new(Endpoint::Chat, context, &common);
    let prompts = prepare::prompts(&mut request, rules, &model, inputs).await?;
    answer::begin(AnswerJob { request, endpoint: Endpoint::Chat, model, common, prompts, permit, tools }).await
}

/// Format of the model's calls of tools, to which the answer is constrained if the request says so.
/// Fails if the model has none that this server knows.
fn tool_rules(
    request: &RequestContext,
    model: &ServedModel,
    tools: &ToolRequest,
    common: &mut CommonParams,
) -> Result<ToolRules, ApiError> {
    let of_template = || ToolFormat::of_template(&model.tokenizer.chat_template()?.source);
    match request.router.options.tool_parser.or_else(of_template) {
        Some(format) => {
            constraint::add_calls(common, tools, format, model)?;
            Ok(ToolRules { format, is_parallel: tools.is_parallel })
        }
        None => {
            let message = format!(
                "the chat template of '{}' has no format of tool calls that this server knows; its operator can name \
                 one with --tool-parser",
                model.name
            );
            Err(ApiError::field("tools", message).code("unsupported_value"))
        }
    }
}

/// Renders a conversation with the model's chat template, to a text that can fit `context` tokens.
pub(super) async fn text(
    request: &RequestContext,
    model: &ServedModel,
    messages: Vec<ChatMessage>,
    options: RenderOptions,
    context: usize,
) -> Result<RenderedText, ApiError> {
    text_for(&request.router, model, messages, options, context, (request.peer, request.deadline)).await
}

/// Renders a conversation of a peer before a deadline.
pub(crate) async fn text_for(
    router: &RouterState,
    model: &ServedModel,
    messages: Vec<ChatMessage>,
    options: RenderOptions,
    context: usize,
    (peer, deadline): (PeerAddress, Instant),
) -> Result<RenderedText, ApiError> {
    let Some(chat) = &model.chat else {
        let message = format!("the model '{}' has no chat template; send a text prompt instead", model.name);
        return Err(ApiError::field("messages", message));
    };
    let bytes_max = text_bytes_max(&model.tokenizer, context);
    let bytes = messages.iter().map(ChatMessage::bytes).sum::<usize>() + options.bytes();
    // Before the rendering, which would copy it all.
    if bytes > bytes_max {
        return Err(prepare::too_many_bytes(router, "messages", context, bytes_max, bytes));
    }
    chat.render(messages, options, bytes_max, peer, deadline).await.map_err(|error| {
        let message = error.to_string();
        match error {
            ChatError::Template(RenderError::TooLong) => {
                prepare::too_many_bytes(router, "messages", context, bytes_max, bytes)
            }
            ChatError::Template(_) => ApiError::field("messages", message),
            ChatError::Exceeded => ApiError::field("messages", message).code("chat_template_exceeded"),
            ChatError::Busy | ChatError::SlowBusy => {
                router.metrics.count_refusal(RefusalReason::TemplateBusy);
                ApiError::overloaded(message, 1)
            }
            ChatError::Deadline => RouteError::Deadline.into(),
            ChatError::Start(error) => ApiError::internal("render the conversation", error),
        }
    })
}
