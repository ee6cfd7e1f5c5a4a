//! `POST /v1/completions`.

use super::answer::{self, AnswerJob, Endpoint};
use super::errors::ApiError;
use super::types::CompletionRequest;
use super::{RequestContext, RequestId, counted, stream};
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
    let model = answer::find_model(&request, &common.model).await?;
    let permit = answer::admit(&request, prompts.len() * common.n as usize)?;
    let context = answer::context(&request, &model)?;
    let prompts = answer::prompts(&mut request, Endpoint::Completion, &model, prompts, context).await?;
    let is_stream = common.stream;
    let started =
        answer::begin(AnswerJob { request, endpoint: Endpoint::Completion, model, common, prompts, permit }).await?;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { answer::whole(started, record).await }
}
