//! Sampling parameters of a request.

use super::errors::ApiError;
use super::fields::{BoundedList, BoundedMap, Fields, TextOrList};
use larder_model::{GenerationDefaults, SamplingParams};
use larder_worker::api::{LOGIT_BIAS_MAX, STOP_BYTES_MAX, STOP_TOKENS_MAX};
use std::collections::BTreeMap;

pub const STOPS_MAX: usize = 16;

/// Sampling parameters that the model's `generation_config.json` completes.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestedSampling {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// The others. `max_tokens` is 0 here.
    pub rest: SamplingParams,
}

impl RequestedSampling {
    pub(super) fn take(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let seed: Option<i64> = fields.take("seed")?;
        // vLLM and others turn top-k off with -1, so clients send it.
        let top_k: Option<i64> = fields.take("top_k")?;
        let top_k = top_k.map(|top_k| u32::try_from(top_k.max(0))).transpose();
        let rest = SamplingParams {
            presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
            logit_bias: take_logit_bias(fields)?,
            seed: seed.map(|seed| seed as u64),
            max_tokens: 0,
            min_tokens: take_min_tokens(fields)?,
            stop: take_stop(fields)?,
            stop_token_ids: fields.take::<BoundedList<u32, STOP_TOKENS_MAX>>("stop_token_ids")?.map_or(vec![], |l| l.0),
            include_stop: fields.take("include_stop_str_in_output")?.unwrap_or(false),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            skip_special_tokens: fields.take("skip_special_tokens")?.unwrap_or(true),
            ..SamplingParams::default()
        };
        Ok(Self {
            temperature: fields.number("temperature", 0.0..=2.0)?,
            top_p: fields.number("top_p", 0.0..=1.0)?,
            top_k: top_k.map_err(|_| ApiError::field("top_k", "'top_k' is too large"))?,
            min_p: fields.number("min_p", 0.0..=1.0)?,
            repetition_penalty: fields.number("repetition_penalty", 0.01..=10.0)?,
            rest,
        })
    }

    /// Completes the parameters with those of the model, and then with those of OpenAI's API.
    pub(crate) fn complete(&self, defaults: &GenerationDefaults) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(1.0),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(0),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            ..self.rest.clone()
        }
    }
}

/// Takes `min_tokens`, or its name in SGLang's API.
fn take_min_tokens(fields: &mut Fields<'_>) -> Result<usize, ApiError> {
    let min_tokens: Option<u32> = fields.take_either("min_tokens", "min_new_tokens")?;
    Ok(min_tokens.unwrap_or(0) as usize)
}

fn take_logit_bias(fields: &mut Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(BoundedMap(bias)) = fields.take::<BoundedMap<f32, LOGIT_BIAS_MAX>>("logit_bias")? else {
        return Ok(Vec::new());
    };
    let wrong = |message: String| ApiError::field("logit_bias", message);
    let pair = |(token, bias): (String, f32)| {
        let id =
            token.parse().map_err(|_| wrong(format!("'logit_bias' has the key '{token}', which is no token id")))?;
        match (-100.0..=100.0).contains(&bias) {
            true => Ok((id, bias)),
            false => Err(wrong(format!("'logit_bias' of token {id} is {bias}; it must be from -100 to 100"))),
        }
    };
    // The last of equal keys counts.
    let bias: BTreeMap<u32, f32> = bias.into_iter().map(pair).collect::<Result<_, _>>()?;
    Ok(bias.into_iter().collect())
}

fn take_stop(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let mut stops = match fields.take::<TextOrList<String, STOPS_MAX>>("stop")? {
        None => Vec::new(),
        Some(TextOrList::Text(stop)) => vec![stop],
        Some(TextOrList::List(stops)) => stops,
    };
    stops.retain(|stop| !stop.is_empty());
    if stops.iter().any(|stop| stop.len() > STOP_BYTES_MAX) {
        return Err(ApiError::field("stop", format!("a string of 'stop' may have at most {STOP_BYTES_MAX} bytes")));
    }
    Ok(stops)
}
