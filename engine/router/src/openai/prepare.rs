//! From the inputs of a request to admitted prompts.

use super::RequestContext;
use super::answer::Endpoint;
use super::errors::ApiError;
use super::prompt::PromptInput;
use super::types::CommonParams;
use crate::RouterState;
use crate::metrics::RefusalReason;
use crate::models::{ModelLookup, ServedModel};
use crate::route::{Prompt, RouteError};
use crate::templates::TextCharge;
use crate::tokenise::{Echo, EncodeError, TOO_SLOW, encode, text_bytes_max};
use larder_http::{BodyCharge, PeerAddress, PeerCharge};
use larder_worker::api::Role;
use std::sync::Arc;

/// Maximum memory for the prompts of answers in progress, in bytes.
pub(crate) const PROMPTS_BYTES_MAX: usize = 512 << 20;
/// Part of it that one peer can have: the share of a [`larder_http::PeerBudget`].
const PEER_PROMPTS_BYTES_MAX: usize = PROMPTS_BYTES_MAX / 4 * 3;
/// A request holds at most one of so many parts of the places of answers.
const REQUEST_PART: usize = 4;
/// Maximum number of answers of one request. Each takes some memory until the last one has ended.
const REQUEST_ANSWERS_MAX: usize = 4096;
/// Granularity of [`PROMPTS_BYTES_MAX`].
pub(crate) const PROMPT_CHARGE_BYTES: usize = 1 << 10;
/// Memory of a token of a prompt: itself, its part of a page key, and the prefill request.
const PROMPT_TOKEN_BYTES: usize = 16;
/// Memory of a token in the request of one choice, as a number and as JSON.
const CHOICE_TOKEN_BYTES: usize = 10;

/// Finds the requested model. Waits up to a second for a decode engine if the model has none.
pub(crate) async fn find_model(request: &RequestContext, name: &str) -> Result<Arc<ServedModel>, ApiError> {
    let router = &request.router;
    let model = match router.models.find(name, &router.engines) {
        ModelLookup::Model(model) => model,
        lookup => return Err(ApiError::model_error(&lookup, name)),
    };
    // A model without decode engines may be restarting them. Waiting is better than a 503.
    let is_served = || (router.engines.admitted(Role::Decode, model.namespace) > 0).then_some(());
    let served = match is_served() {
        None => router.wait_for(request.deadline, is_served).await,
        served => served,
    };
    served.map(|()| model.clone()).ok_or_else(|| RouteError::NoEngine(Role::Decode).into())
}

/// Finds the requested model. Without a name it is the only one.
pub(crate) async fn find_model_or_only(
    request: &RequestContext,
    name: Option<&str>,
) -> Result<Arc<ServedModel>, ApiError> {
    let router = &request.router;
    let name = match name {
        // The name that clients of SGLang send if they know none.
        None | Some("default") => match &router.models.served(&router.engines)[..] {
            [model] => model.name.clone(),
            [] => return Err(RouteError::NoEngine(Role::Decode).into()),
            _ => return Err(ApiError::field("model", "'model' is required: this server has several")),
        },
        Some(name) => name.to_string(),
    };
    find_model(request, &name).await
}

/// Admits a request with `prompts` prompts of `choices` answers each. Never waits: a queue in front
/// of full engines would only add latency.
///
/// A request holds a quarter of the places of answers at most, or those of one prompt. Its further
/// prompts wait for its earlier ones.
///
/// # Errors
/// 429 if too few places are free for this peer. 400 if there can never be enough.
pub(crate) fn admit(request: &RequestContext, prompts: usize, choices: u32) -> Result<PeerCharge, ApiError> {
    let most = request.router.inflight.units_max_of_peer();
    let choices = choices as usize;
    let together = (request.router.options.max_inflight / REQUEST_PART / choices).max(1).min(prompts);
    // A 429 would invite retries, and none of them could succeed.
    if choices > most {
        let message =
            format!("the request needs {choices} answers; this server runs at most {most} of a client at once");
        return Err(ApiError::field("n", message));
    }
    let total = prompts * choices;
    if total > REQUEST_ANSWERS_MAX {
        let message = format!("the request needs {total} answers; it may have at most {REQUEST_ANSWERS_MAX}");
        return Err(ApiError::field("n", message));
    }
    let places = request.router.inflight.of(request.peer).take(together * choices);
    places.ok_or_else(|| {
        ApiError::overloaded("this server is at its limit of answers in progress for your address; try again later", 1)
    })
}

/// Longest context of the model's decode engines, in tokens. Engines that the circuit breaker
/// excludes count: a breaker that opens must not change the limit that clients see.
pub(crate) fn context(request: &RequestContext, model: &ServedModel) -> Result<usize, ApiError> {
    let context = request.router.engines.context_max(Role::Decode, model.namespace);
    context.ok_or_else(|| RouteError::NoEngine(Role::Decode).into())
}

/// 413 for a text of more than `bytes_max` bytes, the maximum for a context of `context` tokens.
pub(crate) fn too_many_bytes(
    router: &RouterState,
    field: &str,
    context: usize,
    bytes_max: usize,
    bytes: usize,
) -> ApiError {
    router.metrics.count_refusal(RefusalReason::PromptTooLong);
    let message = format!(
        "This model's maximum context length is {context} tokens, and this server accepts at most {bytes_max} bytes \
         of text for it. The {field} has {bytes} bytes. Please shorten it."
    );
    ApiError::prompt_too_large(field, message)
}

/// Rules for making prompts of a request's inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptRules {
    pub(crate) endpoint: Endpoint,
    /// Longest context of the model, in tokens.
    pub(crate) context: usize,
    /// Adds the model's surrounding tokens to a text.
    pub(crate) add_special: bool,
    /// Number of last tokens to keep. -1 keeps as many as fit the context.
    pub(crate) truncate: Option<i64>,
    /// The answer begins with the text of the prompt.
    pub(crate) echo: bool,
    /// The answer tells where the tokens of the echoed text begin.
    pub(crate) echo_offsets: bool,
}

impl PromptRules {
    pub(crate) fn new(endpoint: Endpoint, context: usize, common: &CommonParams) -> Self {
        // A rendered chat has its special tokens already. Adding them would double the one at the
        // start.
        let add_special = common.add_special_tokens.unwrap_or(endpoint != Endpoint::Chat);
        let echo_offsets = common.echo && common.logprobs.is_some();
        Self { endpoint, context, add_special, truncate: common.truncate_prompt, echo: common.echo, echo_offsets }
    }

    /// Tokens that a text may have. Truncation shortens longer ones, so it needs them all.
    fn tokens_max(&self) -> usize {
        if self.truncate.is_some() { usize::MAX / 4 } else { self.context }
    }
}

/// Last tokens of a prompt.
fn truncated(mut tokens: Vec<u32>, keep: Option<i64>, context: usize) -> Vec<u32> {
    let keep = match keep {
        None => tokens.len(),
        Some(keep) => usize::try_from(keep).unwrap_or(context.saturating_sub(1)),
    };
    tokens.split_off(tokens.len().saturating_sub(keep))
}

/// Tokenises the inputs and computes page keys. Refuses inputs that cannot fit the context before
/// that. The memory of the body and of a rendered text counts as free afterwards.
pub(crate) async fn prompts(
    request: &mut RequestContext,
    rules: PromptRules,
    model: &Arc<ServedModel>,
    inputs: Vec<PromptInput>,
) -> Result<Vec<Prompt>, ApiError> {
    let router = request.router.clone();
    let PromptRules { endpoint, context, .. } = rules;
    let field = endpoint.prompt_field();
    let bytes_max = text_bytes_max(&model.tokenizer, context);
    if rules.truncate.is_some_and(|keep| usize::try_from(keep).is_ok_and(|keep| keep > context)) {
        let message = format!("the model's context has {context} tokens, and a longer prompt does not fit");
        return Err(ApiError::field("truncate_prompt_tokens", message));
    }
    for input in &inputs {
        match input {
            PromptInput::Text(text) if text.len() > bytes_max => {
                return Err(too_many_bytes(&router, field, context, bytes_max, text.len()));
            }
            PromptInput::Tokens(tokens) if rules.truncate.is_none() => {
                tokens_to_generate(endpoint, None, None, tokens.len(), context)?;
            }
            _ => {}
        }
    }
    let bytes = inputs.iter().map(PromptInput::bytes).sum();
    let (model, tokenizer) = (model.clone(), model.tokenizer.clone());
    let make = move || -> Result<Vec<Prompt>, ApiError> {
        let tokenise = |input| match input {
            PromptInput::Tokens(tokens) => Ok(tokens),
            PromptInput::Text(text) => encode(&model.tokenizer, &text, rules.add_special, rules.tokens_max()),
        };
        let prompt = |input| {
            let tokens = truncated(tokenise(input)?, rules.truncate, context);
            let echo = rules.echo.then(|| Arc::new(Echo::new(&model.tokenizer, &tokens, rules.echo_offsets)));
            Ok(Prompt { echo, ..Prompt::new(tokens, model.page_tokens) })
        };
        let prompts: Result<_, EncodeError> = inputs.into_iter().map(prompt).collect();
        prompts.map_err(|error| match error {
            EncodeError::Tokenizer(error) => ApiError::field(field, error.to_string()),
            EncodeError::TooLong(tokens) => context_exceeded(endpoint, None, tokens, context),
            EncodeError::TooSlow => ApiError::field(field, TOO_SLOW),
        })
    };
    let made = tokio::time::timeout_at(request.deadline, router.tokeniser.run(request.peer, (&tokenizer, bytes), make));
    let made = made.await.map_err(|_| ApiError::from(RouteError::Deadline))?;
    let prompts = made.map_err(|error| ApiError::internal("tokenise the prompt", error))?;
    request.body = BodyCharge::default();
    request.text = TextCharge::default();
    prompts
}

/// Maximum tokens to generate after `prompt_tokens` tokens. A chat without `max_tokens` takes the
/// maximum `of_model`, if the model has one. Fails if prompt and requested answer exceed the
/// context.
pub(crate) fn tokens_to_generate(
    endpoint: Endpoint,
    max_tokens: Option<u32>,
    of_model: Option<u32>,
    prompt_tokens: usize,
    context: usize,
) -> Result<u32, ApiError> {
    // An echo without an answer computes a token too, to have the logits of the prompt.
    let requested = prompt_tokens.saturating_add(max_tokens.unwrap_or(1).max(1) as usize);
    if requested > context {
        return Err(context_exceeded(endpoint, max_tokens, prompt_tokens, context));
    }
    let default = match endpoint {
        Endpoint::Completion | Endpoint::Native => super::types::COMPLETION_TOKENS_DEFAULT,
        Endpoint::Chat => of_model.unwrap_or(u32::MAX),
    };
    // Cannot underflow: `requested`, at most `context`, is more than `prompt_tokens`.
    let room = context - prompt_tokens;
    Ok(max_tokens.unwrap_or(default).max(1).min(u32::try_from(room).unwrap_or(u32::MAX)))
}

fn context_exceeded(endpoint: Endpoint, max_tokens: Option<u32>, prompt_tokens: usize, context: usize) -> ApiError {
    let field = endpoint.prompt_field();
    let more = max_tokens.unwrap_or(1);
    let requested = prompt_tokens.saturating_add(more as usize);
    let message = format!(
        "This model's maximum context length is {context} tokens, but {requested} were requested: {prompt_tokens} in \
         the {field} and {more} for the answer. Please shorten one of them."
    );
    ApiError::context_length(field, message)
}

/// Charges of prompts of these lengths, in units of [`PROMPT_CHARGE_BYTES`]: for their tokens and
/// keys, and for the requests of `choices` choices each to engines.
///
/// # Errors
/// 400 if the prompts exceed [`PEER_PROMPTS_BYTES_MAX`] by themselves.
pub(crate) fn charges(endpoint: Endpoint, lengths: &[usize], choices: u32) -> Result<Vec<usize>, ApiError> {
    let token_bytes = PROMPT_TOKEN_BYTES + CHOICE_TOKEN_BYTES * choices as usize;
    let units = |tokens: &usize| (tokens * token_bytes).div_ceil(PROMPT_CHARGE_BYTES);
    let charges: Vec<usize> = lengths.iter().map(units).collect();
    if charges.iter().sum::<usize>() > PEER_PROMPTS_BYTES_MAX / PROMPT_CHARGE_BYTES {
        // A 429 would invite retries, and none of them could succeed.
        let message = format!(
            "the prompts have {} tokens in total, with {choices} answers each; this server has no room for as many in \
             one request. Please ask for fewer prompts or answers at once.",
            lengths.iter().sum::<usize>()
        );
        return Err(ApiError::field(endpoint.prompt_field(), message));
    }
    Ok(charges)
}

/// Number of prompts of a request that run together: as many as it has places for, and as its
/// engines have room for the choices of.
///
/// # Errors
/// 400 if the engines never have room for all choices of one prompt. 503 if they had within the
/// last minute: an engine that left may return.
pub(crate) fn prompts_together(
    request: &RequestContext,
    model: &ServedModel,
    lengths: &[usize],
    common: &CommonParams,
    permit: &PeerCharge,
) -> Result<usize, ApiError> {
    let choices = common.best_of as usize;
    let tokens = lengths.iter().copied().max().unwrap_or_default();
    let sampling = common.sampling_of(0, 1, model.tokenizer.generation_defaults());
    let parameter_bytes = serde_json::to_vec(&sampling).map_or(0, |json| json.len());
    let engines = &request.router.engines;
    let most = engines.requests_at_once(Role::Decode, model.namespace, tokens, parameter_bytes);
    let most = most.unwrap_or(usize::MAX);
    if choices > most {
        let lately = engines.requests_at_once_lately(Role::Decode, model.namespace, tokens, parameter_bytes);
        if lately.is_none_or(|lately| choices <= lately) {
            let message = format!(
                "the request needs {choices} answers to a prompt of {tokens} tokens; an engine left, and the others \
                 have room for {most} of them at once. Try again later, or ask for fewer answers."
            );
            return Err(ApiError::unavailable(message));
        }
        // The engines would be busy each time, and invite retries. None of them could succeed.
        let message = format!(
            "the request needs {choices} answers to a prompt of {tokens} tokens; the engines of this model have room \
             for {most} such answers of a server at once. Please ask for fewer answers or a shorter prompt."
        );
        return Err(ApiError::field("n", message));
    }
    Ok((permit.units() / choices).min(most / choices))
}

/// Takes the charge of a prompt.
///
/// # Errors
/// 429 if the prompts of all answers in progress exceed [`PROMPTS_BYTES_MAX`], or those of the peer
/// its share.
pub(crate) fn charge(router: &RouterState, peer: PeerAddress, units: usize) -> Result<PeerCharge, ApiError> {
    router.prompts.of(peer).take(units).ok_or_else(|| {
        router.metrics.count_refusal(RefusalReason::PromptsBusy);
        ApiError::overloaded("this server is at its limit of prompt tokens in progress; try again later", 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_that_can_never_fit_together_are_the_clients_error() {
        let single = PEER_PROMPTS_BYTES_MAX / (PROMPT_TOKEN_BYTES + CHOICE_TOKEN_BYTES);
        let refused = |lengths: &[usize]| charges(Endpoint::Completion, lengths, 1).is_err();
        assert!(!refused(&[single]) && refused(&[2 * single]), "a single prompt has copies for its answers, too");
        assert!(!refused(&[single / 2, single / 2]));
        let error = charges(Endpoint::Completion, &[single, single / 2], 1).unwrap_err();
        assert_eq!((error.status.as_u16(), error.body.param.as_deref()), (400, Some("prompt")));
    }

    #[test]
    fn tokens_to_generate_refuses_requests_beyond_the_context() {
        let tokens =
            |endpoint, max_tokens, prompt| tokens_to_generate(endpoint, max_tokens, None, prompt, 100).unwrap();
        assert_eq!(tokens(Endpoint::Chat, None, 40), 60);
        assert_eq!(tokens(Endpoint::Completion, None, 40), 16);
        assert_eq!(tokens(Endpoint::Completion, None, 95), 5);
        assert_eq!(tokens(Endpoint::Chat, Some(60), 40), 60);
        assert_eq!(tokens(Endpoint::Completion, Some(0), 99), 1, "for an echo only");
        for (max_tokens, prompt) in [(Some(61), 40), (None, 100), (Some(u32::MAX), 1), (Some(0), 100)] {
            let error = tokens_to_generate(Endpoint::Chat, max_tokens, None, prompt, 100).unwrap_err();
            assert_eq!(error.body.code.as_deref(), Some("context_length_exceeded"));
        }
    }

    #[test]
    fn maximum_of_the_model_holds_for_chats_that_state_none() {
        let tokens = |endpoint, max_tokens| tokens_to_generate(endpoint, max_tokens, Some(20), 40, 100).unwrap();
        assert_eq!(tokens(Endpoint::Chat, None), 20);
        assert_eq!(tokens(Endpoint::Chat, Some(30)), 30);
        assert_eq!(tokens(Endpoint::Completion, None), 16);
        assert_eq!(tokens_to_generate(Endpoint::Chat, None, Some(20), 95, 100).unwrap(), 5);
    }

    #[test]
    fn truncation_keeps_the_last_tokens() {
        let tokens = || vec![1, 2, 3, 4, 5];
        assert_eq!(truncated(tokens(), Some(2), 100), [4, 5]);
        assert_eq!(truncated(tokens(), Some(9), 100), tokens());
        assert_eq!(truncated(tokens(), Some(-1), 4), [3, 4, 5], "with room for a token of the answer");
        assert_eq!(truncated(tokens(), None, 4), tokens());
    }
}
