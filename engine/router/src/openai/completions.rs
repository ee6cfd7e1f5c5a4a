//! `POST /v1/completions`.

use super::answer::{self, AnswerJob, Endpoint};
use super::errors::ApiError;
use super::prepare::{self, PromptRules};
use super::types::CompletionRequest;
use super::{RequestContext, RequestId, counted, stream, whole};
use crate::RouterState;
use crate::metrics::RequestRecord;
use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use larder_http::RequestBody;
use std::sync::Arc;

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
    counted(&router, "completions", serve).await
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
