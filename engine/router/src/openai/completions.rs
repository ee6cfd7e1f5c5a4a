//! `POST /v1/completions`.

use super::answer::{self, AnswerJob, Endpoint};
use super::errors::ApiError;
use super::prepare::{self, PromptRules};
use super::types::CompletionRequest;
use super::{ApiCall, RequestContext, stream, whole};
use crate::metrics::RequestRecord;
use axum::response::Response;
use larder_http::RequestBody;

pub(crate) async fn handle(call: ApiCall) -> Response {
    call.serve("completions", serve).await
}

async fn serve(
    mut request: RequestContext,
    body: RequestBody,
    record: &mut Option<RequestRecord>,
) -> Result<Response, ApiError> {
    let CompletionRequest { common, prompts } = request.parse(body, CompletionRequest::parse).await?;
    let model = prepare::find_model(&request, &common.model).await?;
    let permit = prepare::admit(&request, prompts.len(), common.best_of)?;
    let context = prepare::context(&request, &model)?;
    let rules = PromptRules::new(Endpoint::Completion, context, &common);
    let prompts = prepare::prompts(&mut request, rules, &model, prompts).await?;
    let is_stream = common.stream;
    let started = answer::begin(AnswerJob {
        request,
        endpoint: Endpoint::Completion,
        model,
        common,
        prompts,
        permit,
        tools: None,
    })
    .await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { whole::whole(started, record).await }
}
