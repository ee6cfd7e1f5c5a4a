//! HTTP handlers of the admin API.
//!
//! Invariants:
//!
//! - Every request ends within [`REQUEST_TIMEOUT`].
//! - A node or an engine that does not answer is reported as such. It delays a status response by
//!   at most [`STATUS_TIMEOUT`].
//! - Every failure has the body [`ErrorResponse`](super::api::ErrorResponse).

use super::api::{
    CODE_WRONG_PORT, EngineStatus, HintAction, HintKind, ModelStatus, PATH_FORGET, PATH_HEALTH, PATH_HINTS,
    PATH_INSPECT, PATH_METRICS, PATH_PIN, PATH_STATUS, PATH_UNPIN, PATH_WARM, StatusResponse,
};
use super::error::AdminError;
use super::prefix::{Prefix, PrefixInput};
use crate::RouterState;
use crate::memory_plan;
use crate::openai::check_length;
use crate::openai::fields::Fields;
use crate::openai::messages::take_messages;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::future::join_all;
use larder_client::PinKind;
use larder_http::{BodyCharge, RequestBody};
use larder_worker::api::{MemoryMax, Role};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

const STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time of a prefix request. Warming is the slowest: it may compute the whole prefix.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum number of actions in one request for hints.
const HINTS_MAX: usize = 16;
/// Time that stays for the answer after the last action. Late actions are deferred, and the answer
/// still tells what the others did.
const HINTS_ANSWER_TIME: Duration = Duration::from_secs(5);
/// Maximum duration of a pin in seconds: 30 days, the limit of the store's protocol.
const PIN_SECONDS_MAX: u64 = 30 * 24 * 3600;

pub(crate) fn routes(router: Arc<RouterState>) -> Router {
    Router::new()
        .route(PATH_HEALTH, get(|| async { "ok\n" }))
        .route(PATH_METRICS, get(crate::openai::metrics))
        .route(PATH_STATUS, get(status))
        .route(PATH_INSPECT, post(inspect))
        .route(PATH_WARM, post(warm))
        .route(PATH_FORGET, post(forget))
        .route(PATH_PIN, post(pin))
        .route(PATH_UNPIN, post(unpin))
        .route(PATH_HINTS, post(hints))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(router)
}

async fn no_route(State(router): State<Arc<RouterState>>, uri: Uri) -> AdminError {
    if crate::openai::is_api_path(uri.path()) {
        let message = format!("this is the admin API port; the OpenAI API is at {}", crate::location(router.api_addr));
        return AdminError::new(StatusCode::NOT_FOUND, CODE_WRONG_PORT, message);
    }
    AdminError::new(StatusCode::NOT_FOUND, "not_found", format!("the admin API has no path {}", uri.path()))
}

async fn no_method(method: Method, uri: Uri) -> AdminError {
    let message = format!("{} does not accept {method}", uri.path());
    AdminError::new(StatusCode::METHOD_NOT_ALLOWED, "bad_request", message)
}

async fn status(State(router): State<Arc<RouterState>>) -> Json<StatusResponse> {
    let deadline = Instant::now() + STATUS_TIMEOUT;
    // The store client keeps the deadline itself. The longer timeout only guards against a client
    // that does not.
    let nodes = tokio::time::timeout(STATUS_TIMEOUT * 2, router.directory.status(deadline.into_std()));
    let engines = join_all(router.engines.list().into_iter().map(|engine| {
        let router = router.clone();
        async move {
            // A silent engine is shown without a state. It must not fail the whole status.
            let state = router.engine_client.state(&engine.info.url, deadline).await.ok();
            EngineStatus {
                name: engine.name.clone(),
                role: engine.info.role,
                url: engine.info.url.clone(),
                model: engine.info.model.clone(),
                namespace: engine.namespace.to_string(),
                max_context: engine.info.max_context,
                up: engine.is_admitted(),
                outstanding_tokens: engine.outstanding_tokens(),
                requests: engine.requests(),
                state,
            }
        }
    }));
    // Concurrently, so that slow nodes and slow engines do not add up.
    let (nodes, engines) = tokio::join!(nodes, engines);
    Json(StatusResponse {
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_seconds: router.started.elapsed().as_secs(),
        store: router.options.store.to_string(),
        nodes: nodes.unwrap_or_default(),
        engines,
        models: models(&router),
        router: router.metrics.counters(),
        memory_max: MemoryMax::from(&memory_plan::of(&router.options)),
    })
}

fn models(router: &RouterState) -> Vec<ModelStatus> {
    let engines = |role, namespace| router.engines.admitted(role, namespace) as u32;
    let models = router.models.served(&router.engines).into_iter().map(|model| ModelStatus {
        name: model.name.clone(),
        namespace: model.namespace.to_string(),
        page_tokens: model.page_tokens as u32,
        prefill_engines: engines(Role::Prefill, model.namespace),
        decode_engines: engines(Role::Decode, model.namespace),
    });
    models.collect()
}

async fn inspect(State(router): State<Arc<RouterState>>, body: RequestBody) -> Result<Response, AdminError> {
    with_time_limit(async {
        let peer = body.peer;
        let ((model, input, why), _charge) = parse(&router, body, take_inspection).await?;
        let prefix = Prefix::resolve(router, model, input, (peer, deadline())).await?;
        prefix.inspect(why, deadline()).await
    })
    .await
}

async fn warm(State(router): State<Arc<RouterState>>, body: RequestBody) -> Result<Response, AdminError> {
    with_time_limit(async {
        let prefix = resolve_prefix(router, body).await?;
        Ok(Json(prefix.warm(deadline()).await).into_response())
    })
    .await
}

async fn forget(State(router): State<Arc<RouterState>>, body: RequestBody) -> Result<Response, AdminError> {
    with_time_limit(async {
        let prefix = resolve_prefix(router, body).await?;
        Ok(Json(prefix.forget(deadline()).await).into_response())
    })
    .await
}

async fn pin(State(router): State<Arc<RouterState>>, body: RequestBody) -> Result<Response, AdminError> {
    with_time_limit(async {
        // Parsed before the model is looked up: a wrong request is a 400 even while no engine is
        // up.
        let peer = body.peer;
        let (PinOrder { model, input, seconds, soft }, _charge) = parse(&router, body, PinOrder::take).await?;
        let kind = if soft { PinKind::Soft } else { PinKind::Hard };
        let prefix = Prefix::resolve(router, model, input, (peer, deadline())).await?;
        Ok(Json(prefix.pin(kind, Duration::from_secs(seconds), deadline()).await?).into_response())
    })
    .await
}

async fn unpin(State(router): State<Arc<RouterState>>, body: RequestBody) -> Result<Response, AdminError> {
    with_time_limit(async {
        let prefix = resolve_prefix(router, body).await?;
        Ok(Json(prefix.pin(PinKind::None, Duration::ZERO, deadline()).await?).into_response())
    })
    .await
}

async fn hints(State(router): State<Arc<RouterState>>, body: RequestBody) -> Result<Response, AdminError> {
    with_time_limit(async {
        let peer = body.peer;
        let deadline = deadline() - HINTS_ANSWER_TIME;
        let (HintsOrder { model, input, actions }, _charge) = parse(&router, body, HintsOrder::take).await?;
        let prefix = Prefix::resolve(router, model, input, (peer, deadline)).await?;
        Ok(Json(prefix.carry_out(&actions, deadline).await).into_response())
    })
    .await
}

fn deadline() -> Instant {
    Instant::now() + REQUEST_TIMEOUT
}

async fn with_time_limit(work: impl Future<Output = Result<Response, AdminError>>) -> Result<Response, AdminError> {
    tokio::time::timeout(REQUEST_TIMEOUT, work).await.unwrap_or_else(|_| {
        let message = format!("the request took longer than its time limit of {} s", REQUEST_TIMEOUT.as_secs());
        Err(AdminError::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message))
    })
}

async fn resolve_prefix(router: Arc<RouterState>, body: RequestBody) -> Result<Prefix, AdminError> {
    let peer = body.peer;
    let ((model, input), _charge) = parse(&router, body, take_prefix).await?;
    Prefix::resolve(router, model, input, (peer, deadline())).await
}

/// Parses a JSON object and takes it apart with `take`. Refuses fields that `take` leaves over. The
/// caller keeps the charge until it has dropped the result.
async fn parse<T: Send + 'static>(
    router: &RouterState,
    body: RequestBody,
    take: fn(&mut Fields<'_>) -> Result<T, AdminError>,
) -> Result<(T, BodyCharge), AdminError> {
    check_length(router, &body)?;
    let RequestBody { bytes, charge, .. } = body;
    let parsed = crate::openai::parse_in_background_if_large(bytes, move |bytes| {
        let mut fields = Fields::parse(&bytes)?;
        let request = take(&mut fields)?;
        fields.refuse_rest()?;
        Ok::<_, AdminError>((request, charge))
    });
    parsed.await.map_err(|error| AdminError::internal("read the request", error))?
}

fn take_inspection(fields: &mut Fields<'_>) -> Result<(Option<String>, PrefixInput, bool), AdminError> {
    let why = fields.take("why")?.unwrap_or(false);
    let (model, input) = take_prefix(fields)?;
    Ok((model, input, why))
}

fn take_prefix(fields: &mut Fields<'_>) -> Result<(Option<String>, PrefixInput), AdminError> {
    const ONE_OF: &str = "give exactly one of 'text', 'tokens' and 'messages'";
    let model = fields.take("model")?;
    let text: Option<String> = fields.take("text")?;
    let tokens: Option<Vec<u32>> = fields.take("tokens")?;
    let messages = take_messages(fields)?;
    let input = match (text, tokens, messages) {
        (Some(text), None, None) => PrefixInput::Text(text),
        (None, Some(tokens), None) => PrefixInput::Tokens(tokens),
        (None, None, Some(messages)) => PrefixInput::Messages(messages),
        (None, None, None) => {
            // A misspelt field is the likelier mistake, and the better explanation.
            fields.refuse_rest()?;
            return Err(AdminError::bad_request(format!("{ONE_OF}; the request has none of them")));
        }
        (text, tokens, messages) => {
            let given =
                [("'text'", text.is_some()), ("'tokens'", tokens.is_some()), ("'messages'", messages.is_some())];
            let given: Vec<_> = given.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name).collect();
            return Err(AdminError::bad_request(format!("{ONE_OF}; the request has {}", given.join(" and "))));
        }
    };
    Ok((model, input))
}

struct HintsOrder {
    model: Option<String>,
    input: PrefixInput,
    actions: Vec<HintAction>,
}

impl HintsOrder {
    fn take(fields: &mut Fields<'_>) -> Result<Self, AdminError> {
        let mut prefix: Fields<'_> = fields.require("prefix")?;
        let (model, input) = take_prefix(&mut prefix)?;
        prefix.refuse_rest()?;
        let actions: Vec<HintAction> = fields.require("actions")?;
        if !(1..=HINTS_MAX).contains(&actions.len()) {
            let message = format!("'actions' has {} entries; it must have from 1 to {HINTS_MAX}", actions.len());
            return Err(AdminError::bad_request(message));
        }
        for HintAction { action, seconds } in &actions {
            let has_duration = matches!(action, HintKind::Retain | HintKind::Pin);
            if seconds.map_or(has_duration, |seconds| !has_duration || seconds == 0) {
                let message = "'seconds' must be above 0 for retain and pin, and absent for other actions";
                return Err(AdminError::bad_request(message));
            }
        }
        Ok(Self { model, input, actions })
    }
}

struct PinOrder {
    model: Option<String>,
    input: PrefixInput,
    seconds: u64,
    soft: bool,
}

impl PinOrder {
    fn take(fields: &mut Fields<'_>) -> Result<Self, AdminError> {
        let mut prefix: Fields<'_> = fields.require("prefix")?;
        let (model, input) = take_prefix(&mut prefix)?;
        prefix.refuse_rest()?;
        let seconds: u64 = fields.require("seconds")?;
        if !(1..=PIN_SECONDS_MAX).contains(&seconds) {
            let message = format!("'seconds' is {seconds}; it must be from 1 to {PIN_SECONDS_MAX} (30 days)");
            return Err(AdminError::bad_request(message));
        }
        Ok(Self { model, input, seconds, soft: fields.take("soft")?.unwrap_or(false) })
    }
}
