//! Shared-prefix workload against a running router.
//!
//! The requests of a group share a prefix and differ in their suffix. Each request is sent once per
//! cache mode. Modes alternate, so that all of them see the same load on the machine. Each mode has
//! its own prefixes, so that no mode warms the cache of another. The first request of a group is
//! cold and is reported separately.

use super::events::for_each_event;
use crate::admin::normalized_url;
use crate::errors::http_cause;
use crate::output::say;
use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use hdrhistogram::Histogram;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
pub struct Args {
    /// URL or HOST:PORT of the router's OpenAI API
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    url: String,
    /// Model name. Required if the router serves several models
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Length of the prefix that the requests of a group share, in tokens
    #[arg(long, default_value_t = 1024, value_name = "TOKENS")]
    prefix_tokens: usize,
    /// Length of the unique suffix of each request, in tokens
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    suffix_tokens: usize,
    /// Number of tokens to generate per request
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    max_tokens: usize,
    /// Number of request groups
    #[arg(long, default_value_t = 4, value_name = "GROUPS")]
    groups: usize,
    /// Number of requests per group, including the cold one
    #[arg(long, default_value_t = 12, value_name = "REQUESTS")]
    requests: usize,
    /// Number of concurrent requests
    #[arg(long, default_value_t = 1, value_name = "REQUESTS")]
    concurrency: usize,
    /// Random seed of the prompts. Default: a new seed for each run
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Cache modes: value of the header `x-larder-cache`, and row title. The first is the baseline of
/// the speedups.
const CACHE_MODES: [(&str, &str); 3] =
    [("none", "off"), ("store", "store only (L1 reuse off)"), ("all", "store and L1")];
/// Maximum duration of one request. A longer one ends the benchmark.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Upper bound of token ids in prompts. Every tokenizer has a larger vocabulary, so the prompts are
/// valid for any model.
const TOKEN_IDS: u32 = 2000;

struct Answer {
    first_token: Duration,
    total: Duration,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
}

#[derive(Debug, Serialize)]
struct ModeResult {
    cache: &'static str,
    requests: usize,
    ttft_p50_ms: f64,
    ttft_p99_ms: f64,
    cold_ttft_p50_ms: f64,
    tokens_per_second: f64,
    hit_rate: f64,
    ttft_speedup: f64,
}

pub async fn run(mut args: Args) -> Result<()> {
    args.url = normalized_url(&args.url)?;
    let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => only_model(&http, &args.url).await?,
    };
    let seed = args.seed.unwrap_or_else(rand::random);
    let mut cold: [Vec<Answer>; CACHE_MODES.len()] = Default::default();
    let mut warm: [Vec<Answer>; CACHE_MODES.len()] = Default::default();
    for group in 0..args.groups {
        for (mode, answers) in cold.iter_mut().enumerate() {
            answers.push(send_request(&http, &args, &model, mode, prompt(&args, seed, group, mode, 0)).await?);
        }
        let rest: Vec<usize> = (1..args.requests).collect();
        for batch in rest.chunks(args.concurrency.max(1)) {
            for (mode, answers) in warm.iter_mut().enumerate() {
                let requests = batch.iter().map(|&request| {
                    let prompt = prompt(&args, seed, group, mode, request);
                    send_request(&http, &args, &model, mode, prompt)
                });
                for answer in futures::future::join_all(requests).await {
                    answers.push(answer?);
                }
            }
        }
    }
    let mut results: Vec<ModeResult> = Vec::new();
    for (mode, (name, _)) in CACHE_MODES.iter().enumerate() {
        let baseline = results.first().map(|none| none.ttft_p50_ms);
        results.push(mode_result(name, &cold[mode], &warm[mode], args.concurrency, baseline)?);
    }
    print(&args, &model, seed, &results)
}

async fn only_model(http: &reqwest::Client, url: &str) -> Result<String> {
    let sent = http.get(format!("{url}/v1/models")).send().await;
    let response = sent.map_err(|error| {
        anyhow!("cannot reach a router at {url}: {}; start one with `larder up`", http_cause(&error))
    })?;
    let models: serde_json::Value = response.error_for_status()?.json().await?;
    match models["data"].as_array().map(Vec::as_slice) {
        Some([model]) => Ok(model["id"].as_str().unwrap_or_default().to_string()),
        Some([]) | None => bail!("the router at {url} serves no model"),
        Some(_) => bail!("the router at {url} serves several models; choose one with --model"),
    }
}

/// Returns the prompt of one request: the shared prefix of its group and mode, then its own suffix.
/// Modes share no prefix, so one cannot warm the cache of another.
fn prompt(args: &Args, seed: u64, group: usize, mode: usize, request: usize) -> Vec<u32> {
    let mut tokens = random_tokens(args.prefix_tokens, &[seed, group as u64, mode as u64]);
    tokens.extend(random_tokens(args.suffix_tokens, &[seed, group as u64, mode as u64, request as u64 + 1]));
    tokens
}

/// Random tokens that depend on `parts` only.
pub fn random_tokens(count: usize, parts: &[u64]) -> Vec<u32> {
    let seed = parts.iter().fold(0u64, |seed, part| (seed ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(16..TOKEN_IDS)).collect()
}

async fn send_request(
    http: &reqwest::Client,
    args: &Args,
    model: &str,
    mode: usize,
    prompt: Vec<u32>,
) -> Result<Answer> {
    let body = serde_json::json!({
        "model": model, "prompt": prompt, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let begin = Instant::now();
    let response = http
        .post(format!("{}/v1/completions", args.url))
        .header("x-larder-cache", CACHE_MODES[mode].0)
        .json(&body)
        .send()
        .await?;
    if !response.status().is_success() {
        bail!("the router answered {}: {}", response.status(), response.text().await?);
    }
    let mut first_token = None;
    let mut usage = serde_json::Value::Null;
    for_each_event(response, |event| {
        if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
            first_token.get_or_insert_with(|| begin.elapsed());
        }
        if !event["usage"].is_null() {
            usage = event["usage"].clone();
        }
        Ok(())
    })
    .await?;
    Ok(Answer {
        first_token: first_token.context("the answer has no token")?,
        total: begin.elapsed(),
        prompt_tokens: usage["prompt_tokens"].as_u64().context("the answer has no usage")?,
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0),
        completion_tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
    })
}

fn quantile_ms(answers: &[Answer], quantile: f64) -> Result<f64> {
    let mut histogram = Histogram::<u64>::new_with_max(REQUEST_TIMEOUT.as_micros() as u64, 3)?;
    for answer in answers {
        histogram.saturating_record(answer.first_token.as_micros() as u64);
    }
    Ok(histogram.value_at_quantile(quantile) as f64 / 1000.0)
}

fn mode_result(
    cache: &'static str,
    cold: &[Answer],
    warm: &[Answer],
    concurrency: usize,
    baseline: Option<f64>,
) -> Result<ModeResult> {
    let sum = |field: fn(&Answer) -> u64| warm.iter().map(field).sum::<u64>() as f64;
    let busy: f64 = warm.iter().map(|a| a.total.as_secs_f64()).sum::<f64>() / concurrency.max(1) as f64;
    let ttft_p50_ms = quantile_ms(warm, 0.5)?;
    Ok(ModeResult {
        cache,
        requests: warm.len(),
        ttft_p50_ms,
        ttft_p99_ms: quantile_ms(warm, 0.99)?,
        cold_ttft_p50_ms: quantile_ms(cold, 0.5)?,
        tokens_per_second: sum(|a| a.completion_tokens) / busy,
        hit_rate: sum(|a| a.cached_tokens) / sum(|a| a.prompt_tokens),
        ttft_speedup: baseline.unwrap_or(ttft_p50_ms) / ttft_p50_ms,
    })
}

fn print(args: &Args, model: &str, seed: u64, results: &[ModeResult]) -> Result<()> {
    if args.json {
        for result in results {
            say!("{}", serde_json::to_string(result)?);
        }
        return Ok(());
    }
    say!(
        "{model}: {} groups of {} requests; tokens: {} prefix + {} suffix + {} generated; concurrency {}, seed {seed}",
        args.groups,
        args.requests,
        args.prefix_tokens,
        args.suffix_tokens,
        args.max_tokens,
        args.concurrency
    );
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "cache",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "cold TTFT p50 ms",
        "tokens/s",
        "hit rate",
        "TTFT speedup",
    ]);
    for (result, (_, title)) in results.iter().zip(CACHE_MODES) {
        table.add_row(
            [
                title.to_string(),
                format!("{:.1}", result.ttft_p50_ms),
                format!("{:.1}", result.ttft_p99_ms),
                format!("{:.1}", result.cold_ttft_p50_ms),
                format!("{:.0}", result.tokens_per_second),
                format!("{:.1} %", result.hit_rate * 100.0),
                format!("{:.1}×", result.ttft_speedup),
            ]
            .map(|text| Cell::new(text).set_alignment(CellAlignment::Right)),
        );
    }
    say!("{table}");
    Ok(())
}
