//! `POST /generate`, the native API of SGLang, for its clients and benchmarks.
//!
//! Every field of a request is honoured or refused by its name, as in [`types`](super::types).

use super::answer::{self, AnswerJob, Endpoint, ResponseMeta, StartedAnswer};
use super::constraint;
use super::errors::ApiError;
use super::fields::{BoundedList, Fields, TextOrList, is_empty};
use super::logprobs::TokenEntry;
use super::prepare::{self, PromptRules};
use super::prompt::{PROMPTS_MAX, PromptInput};
use super::sampling::RequestedSampling;
use super::types::{CHOICES_MAX, CommonParams, NeutralField, StreamOptions, is_false};
use super::whole::{FinishedAnswer, FinishedChoice, charged_json};
use super::{ApiCall, RequestContext, stream};
use crate::metrics::RequestRecord;
use axum::response::Response;
use larder_http::RequestBody;
use larder_worker::api::{FinishReason, TOP_LOGPROBS_MAX};
use serde_json::{Value, json};
use std::sync::Arc;

/// Default of `max_new_tokens`, as in SGLang.
const NEW_TOKENS_DEFAULT: u32 = 128;
/// Maximum length in bytes of a name that a client gives to a prompt.
const NAME_BYTES_MAX: usize = 128;

const NEUTRAL: [NeutralField; 14] = [
    ("image_data", is_empty),
    ("video_data", is_empty),
    ("audio_data", is_empty),
    ("lora_path", is_empty),
    ("session_params", is_empty),
    ("return_hidden_states", is_false),
    ("return_routed_experts", is_false),
    ("return_text_in_logprobs", Value::is_boolean),
    ("logprob_start_len", |value| value.as_i64() == Some(-1)),
    ("token_ids_logprob", is_empty),
    ("background", is_false),
    ("log_metrics", Value::is_boolean),
    ("custom_logit_processor", is_empty),
    ("return_bytes", is_false),
];

#[derive(Debug)]
struct NativeRequest {
    model: Option<String>,
    prompts: Vec<PromptInput>,
    /// The answer is a list, because the prompts are.
    is_list: bool,
    names: Option<PromptNames>,
    common: CommonParams,
    with_logprobs: bool,
}

impl NativeRequest {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        for (name, is_neutral) in NEUTRAL {
            fields.refuse_unless(name, is_neutral)?;
        }
        // Hints for routing.
        for name in ["priority", "data_parallel_rank"] {
            fields.ignore(name);
        }
        let (prompts, is_list) = take_prompts(&mut fields)?;
        let names = take_names(&mut fields, prompts.len(), is_list)?;
        let mut params: Fields<'_> = fields.take("sampling_params")?.unwrap_or_default();
        let common = take_common(&mut params, fields.take("stream")?.unwrap_or(false))?;
        params.refuse_unknown()?;
        let with_logprobs = fields.take("return_logprob")?.unwrap_or(false);
        let top: u32 = fields.take("top_logprobs_num")?.unwrap_or(0);
        if top > TOP_LOGPROBS_MAX {
            let message = format!("'top_logprobs_num' is {top}; it must be at most {TOP_LOGPROBS_MAX}");
            return Err(ApiError::field("top_logprobs_num", message));
        }
        // Always, because the token ids come with them.
        let common = CommonParams { logprobs: Some(if with_logprobs { top } else { 0 }), ..common };
        let model = fields.take("model")?;
        fields.refuse_unknown()?;
        let names = names.map(|of_prompts| PromptNames { of_prompts, choices: common.n });
        Ok(Self { model, prompts, is_list, names, common, with_logprobs })
    }
}

/// Names of a request's prompts. Answers repeat them.
#[derive(Debug, Clone)]
pub(crate) struct PromptNames {
    of_prompts: Arc<[String]>,
    /// Choices per prompt.
    choices: u32,
}

impl PromptNames {
    fn of(&self, index: u32) -> String {
        let name = self.of_prompts.get((index / self.choices) as usize).map_or("", String::as_str);
        if self.choices == 1 { name.to_owned() } else { format!("{name}-{}", index % self.choices) }
    }
}

/// Takes the names of `prompts` prompts. Prompts of a list have names of their own, or one with
/// their positions appended.
fn take_names(fields: &mut Fields<'_>, prompts: usize, is_list: bool) -> Result<Option<Arc<[String]>>, ApiError> {
    let wrong = |message: String| Err(ApiError::field("rid", message));
    let names: Vec<String> = match fields.take::<TextOrList<String, PROMPTS_MAX>>("rid")? {
        None => return Ok(None),
        Some(TextOrList::Text(name)) if is_list => (0..prompts).map(|at| format!("{name}_{at}")).collect(),
        Some(TextOrList::Text(name)) => vec![name],
        Some(TextOrList::List(names)) => names,
    };
    if names.len() != prompts {
        return wrong(format!("'rid' has {} names for {prompts} prompts", names.len()));
    }
    if names.iter().any(|name| name.len() > NAME_BYTES_MAX) {
        return wrong(format!("a name in 'rid' may have at most {NAME_BYTES_MAX} bytes"));
    }
    Ok(Some(names.into()))
}

fn take_prompts(fields: &mut Fields<'_>) -> Result<(Vec<PromptInput>, bool), ApiError> {
    let text: Option<TextOrList<String, PROMPTS_MAX>> = fields.take("text")?;
    let ids = fields.get("input_ids");
    let is_batch = ids.and_then(|ids| ids.strip_prefix('[')).is_some_and(|rest| rest.trim_start().starts_with('['));
    let inputs = match text {
        Some(TextOrList::Text(text)) => Some((vec![PromptInput::Text(text)], false)),
        Some(TextOrList::List(texts)) => Some((texts.into_iter().map(PromptInput::Text).collect(), true)),
        None if is_batch => {
            let lists: Option<BoundedList<Vec<u32>, PROMPTS_MAX>> = fields.take("input_ids")?;
            lists.map(|lists| (lists.0.into_iter().map(PromptInput::Tokens).collect(), true))
        }
        None => fields.take("input_ids")?.map(|ids| (vec![PromptInput::Tokens(ids)], false)),
    };
    let inputs = inputs.ok_or_else(|| ApiError::field("text", "give one of 'text' and 'input_ids'"))?;
    match fields.get("input_ids") {
        Some(_) => Err(ApiError::field("input_ids", "give only one of 'text' and 'input_ids'")),
        None => Ok(inputs),
    }
}

fn take_common(params: &mut Fields<'_>, stream: bool) -> Result<CommonParams, ApiError> {
    params.ignore("spaces_between_special_tokens");
    let seed: Option<i64> = params.take_either("sampling_seed", "seed")?;
    let mut sampling = RequestedSampling::take(params)?;
    sampling.rest.seed = seed.map(|seed| seed as u64);
    sampling.rest.include_stop |= params.take("no_stop_trim")?.unwrap_or(false);
    let max_tokens: u32 = params.take("max_new_tokens")?.unwrap_or(NEW_TOKENS_DEFAULT);
    if max_tokens == 0 {
        return Err(ApiError::field("max_new_tokens", "'max_new_tokens' must be at least 1"));
    }
    if sampling.rest.min_tokens > max_tokens as usize {
        return Err(ApiError::field("min_new_tokens", "'min_new_tokens' is above 'max_new_tokens'"));
    }
    let n: u32 = params.take("n")?.unwrap_or(1);
    if !(1..=CHOICES_MAX).contains(&n) {
        return Err(ApiError::field("n", format!("'n' is {n}; it must be from 1 to {CHOICES_MAX}")));
    }
    Ok(CommonParams {
        model: String::new(),
        sampling,
        max_tokens: Some(max_tokens),
        n,
        best_of: n,
        stream,
        stream_options: StreamOptions::default(),
        logprobs: None,
        echo: false,
        truncate_prompt: None,
        add_special_tokens: None,
        constraint: constraint::take_native(params)?,
    })
}

pub(super) async fn handle(call: ApiCall) -> Response {
    call.serve("generate", serve).await
}

async fn serve(
    mut request: RequestContext,
    body: RequestBody,
    record: &mut Option<RequestRecord>,
) -> Result<Response, ApiError> {
    let NativeRequest { model, prompts, is_list, names, common, with_logprobs } =
        request.parse(body, NativeRequest::parse).await?;
    let model = prepare::find_model_or_only(&request, model.as_deref()).await?;
    let permit = prepare::admit(&request, prompts.len(), common.n)?;
    let context = prepare::context(&request, &model)?;
    let rules = PromptRules::new(Endpoint::Native, context, &common);
    let prompts = prepare::prompts(&mut request, rules, &model, prompts).await?;
    let is_stream = common.stream;
    let is_list = is_list || common.n > 1;
    let job = AnswerJob { request, endpoint: Endpoint::Native, model, common, prompts, permit, tools: None };
    let mut started = answer::begin(job).await?;
    started.meta.has_logprobs = with_logprobs;
    started.meta.is_list = is_list;
    started.meta.names = names;
    if let Some(record) = record {
        record.first_token();
    }
    if is_stream { Ok(stream::respond(started, record.take())) } else { whole(started, record).await }
}

async fn whole(started: StartedAnswer, record: &mut Option<RequestRecord>) -> Result<Response, ApiError> {
    let StartedAnswer { meta, prompts, answers, mut usage_totals, permit, .. } = started;
    let FinishedAnswer { choices, charge, .. } = prompts.finish(&answers).await?;
    drop(permit);
    let mut texts = Vec::new();
    for choice in choices {
        usage_totals.add(choice.index, choice.completion_tokens, choice.cached_tokens);
        let FinishedChoice { index, text, tokens, finish_reason, prompt_tokens, cached_tokens, .. } = choice;
        let mut state = NativeState { prompt_tokens, cached_tokens: cached_tokens.total(), ..NativeState::default() };
        state.add(&text, tokens);
        texts.push(state.json(&meta, index, Some(finish_reason)));
    }
    let answer = if meta.is_list { Value::from(texts) } else { texts.into_iter().next().unwrap_or_default() };
    let response = charged_json(&answer, charge)?;
    if let Some(record) = record.take() {
        usage_totals.end(record);
    }
    Ok(response)
}

/// Answer of one choice so far. Chunks of a stream have the whole text each.
#[derive(Debug, Default)]
pub(super) struct NativeState {
    prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    text: String,
    tokens: Vec<TokenEntry>,
}

impl NativeState {
    pub(super) fn new(prompt_tokens: u32) -> Self {
        Self { prompt_tokens, ..Self::default() }
    }

    pub(super) fn add(&mut self, text: &str, tokens: Vec<TokenEntry>) {
        self.text.push_str(text);
        self.tokens.extend(tokens);
    }

    pub(super) fn json(&self, meta: &ResponseMeta, index: u32, reason: Option<FinishReason>) -> Value {
        let ids: Vec<u32> = self.tokens.iter().map(|token| token.id).collect();
        let reason = reason.map(|reason| match reason {
            FinishReason::Stop => json!({"type": "stop"}),
            FinishReason::Length => json!({"type": "length", "length": ids.len()}),
        });
        let mut info = json!({
            "id": meta.names.as_ref().map_or_else(|| format!("{}-{index}", meta.id), |names| names.of(index)),
            "finish_reason": reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": ids.len(),
            "cached_tokens": self.cached_tokens,
            "weight_version": meta.fingerprint,
        });
        if meta.has_logprobs {
            let all = || self.tokens.iter().filter_map(|token| Some((token.id, token.logprobs.as_ref()?)));
            let own: Vec<Value> = all().map(|(id, logprobs)| json!([logprobs.logprob, id, null])).collect();
            let top =
                |top: &[(u32, f32)]| top.iter().map(|(id, logprob)| json!([logprob, id, null])).collect::<Value>();
            info["output_token_logprobs"] = json!(own);
            info["output_top_logprobs"] = all().map(|(_, logprobs)| top(&logprobs.top)).collect();
        }
        let mut answer = json!({"text": self.text, "output_ids": ids, "meta_info": info});
        if meta.is_list {
            answer["index"] = json!(index);
        }
        answer
    }
}
