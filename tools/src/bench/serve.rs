//! A shared-prefix workload against a running router.
//!
//! Groups of requests begin with the same tokens and end with their own. Every request is sent in each way of using the
//! cache, one way after the other, so that all ways see the same machine at the same time; each way has prefixes of its own,
//! so that none warms another's. The first request of a group finds nothing and is counted apart.

use crate::output::say;
use anyhow::{Context, Result, bail};
use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use futures::StreamExt;
use hdrhistogram::Histogram;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Settings of the workload.
#[derive(Debug, Parser)]
pub struct Args {
    /// The router
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    /// The model; may be left out if the router serves only one
    #[arg(long)]
    model: Option<String>,
    /// Tokens that the requests of a group share
    #[arg(long, default_value_t = 1024)]
    prefix_tokens: usize,
    /// Tokens of each request's own
    #[arg(long, default_value_t = 32)]
    suffix_tokens: usize,
    /// Tokens to generate per request
    #[arg(long, default_value_t = 32)]
    max_tokens: usize,
    /// Groups of requests
    #[arg(long, default_value_t = 4)]
    groups: usize,
    /// Requests in a group, the cold one included
    #[arg(long, default_value_t = 12)]
    requests: usize,
    /// Requests at a time
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
    /// Random seed of the prompts
    #[arg(long)]
    seed: Option<u64>,
    /// One JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// Ways of using the cache: the value of `x-larder-cache` and what it means.
const WAYS: [(&str, &str); 3] = [
    ("none", "no store, no cache"),
    ("store", "store only (engines' own pages unused)"),
    ("all", "store and engines' own pages"),
];
/// A request that takes longer has failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Token ids of prompts are below this; every tokenizer has more.
const TOKEN_IDS: u32 = 2000;

/// One answered request.
struct Answer {
    first_token: Duration,
    total: Duration,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
}

/// Figures of one way.
#[derive(Debug, Serialize)]
struct Figures {
    cache: &'static str,
    requests: usize,
    ttft_p50_ms: f64,
    ttft_p99_ms: f64,
    cold_ttft_p50_ms: f64,
    tokens_per_second: f64,
    hit_rate: f64,
    ttft_speedup: f64,
}

/// Runs the workload and prints its figures.
pub async fn run(args: Args) -> Result<()> {
    let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => only_model(&http, &args.url).await?,
    };
    let seed = args.seed.unwrap_or_else(rand::random);
    let mut cold: [Vec<Answer>; WAYS.len()] = Default::default();
    let mut warm: [Vec<Answer>; WAYS.len()] = Default::default();
    for group in 0..args.groups {
        for (way, answers) in cold.iter_mut().enumerate() {
            answers.push(ask(&http, &args, &model, way, prompt(&args, seed, group, way, 0)).await?);
        }
        let rest: Vec<usize> = (1..args.requests).collect();
        for batch in rest.chunks(args.concurrency.max(1)) {
            for (way, answers) in warm.iter_mut().enumerate() {
                let asks = batch.iter().map(|&i| ask(&http, &args, &model, way, prompt(&args, seed, group, way, i)));
                for answer in futures::future::join_all(asks).await {
                    answers.push(answer?);
                }
            }
        }
    }
    let mut figures: Vec<Figures> = Vec::new();
    for (way, (name, _)) in WAYS.iter().enumerate() {
        let baseline = figures.first().map(|none| none.ttft_p50_ms);
        figures.push(figures_of(name, &cold[way], &warm[way], args.concurrency, baseline)?);
    }
    print(&args, &model, seed, &figures)
}

async fn only_model(http: &reqwest::Client, url: &str) -> Result<String> {
    let models: serde_json::Value = http
        .get(format!("{url}/v1/models"))
        .send()
        .await
        .with_context(|| format!("no router at {url}; start one with `larder up`"))?
        .error_for_status()?
        .json()
        .await?;
    match models["data"].as_array().map(Vec::as_slice) {
        Some([model]) => Ok(model["id"].as_str().unwrap_or_default().to_string()),
        Some([]) | None => bail!("the router at {url} serves no model"),
        Some(_) => bail!("the router at {url} serves several models; choose one with --model"),
    }
}

/// The prompt of one request: the same beginning for a group and way, an end of its own.
fn prompt(args: &Args, seed: u64, group: usize, way: usize, request: usize) -> Vec<u32> {
    let mut tokens = random_tokens(args.prefix_tokens, &[seed, group as u64, way as u64]);
    tokens.extend(random_tokens(args.suffix_tokens, &[seed, group as u64, way as u64, request as u64 + 1]));
    tokens
}

fn random_tokens(count: usize, parts: &[u64]) -> Vec<u32> {
    let seed = parts.iter().fold(0u64, |seed, part| (seed ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(16..TOKEN_IDS)).collect()
}

/// Sends one request and reads its stream.
async fn ask(http: &reqwest::Client, args: &Args, model: &str, way: usize, prompt: Vec<u32>) -> Result<Answer> {
    let body = serde_json::json!({
        "model": model, "prompt": prompt, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let begin = Instant::now();
    let response = http
        .post(format!("{}/v1/completions", args.url))
        .header("x-larder-cache", WAYS[way].0)
        .json(&body)
        .send()
        .await?;
    if !response.status().is_success() {
        bail!("{}: {}", response.status(), response.text().await?);
    }
    let mut first_token = None;
    let mut usage = serde_json::Value::Null;
    let mut text = String::new();
    let mut stream = response.bytes_stream();
    while let Some(bytes) = stream.next().await {
        text.push_str(std::str::from_utf8(&bytes?)?);
        while let Some(end) = text.find("\n\n") {
            let event: String = text.drain(..end + 2).collect();
            let Some(data) = event.trim().strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
            let event: serde_json::Value = serde_json::from_str(data)?;
            if let Some(error) = event.get("error") {
                bail!("the router answered: {error}");
            }
            if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
                first_token.get_or_insert_with(|| begin.elapsed());
            }
            if !event["usage"].is_null() {
                usage = event["usage"].clone();
            }
        }
    }
    Ok(Answer {
        first_token: first_token.context("the stream had no token")?,
        total: begin.elapsed(),
        prompt_tokens: usage["prompt_tokens"].as_u64().context("the stream had no usage")?,
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

fn figures_of(
    cache: &'static str,
    cold: &[Answer],
    warm: &[Answer],
    concurrency: usize,
    baseline: Option<f64>,
) -> Result<Figures> {
    let sum = |field: fn(&Answer) -> u64| warm.iter().map(field).sum::<u64>() as f64;
    let busy: f64 = warm.iter().map(|a| a.total.as_secs_f64()).sum::<f64>() / concurrency.max(1) as f64;
    let ttft_p50_ms = quantile_ms(warm, 0.5)?;
    Ok(Figures {
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

fn print(args: &Args, model: &str, seed: u64, figures: &[Figures]) -> Result<()> {
    if args.json {
        for line in figures {
            say!("{}", serde_json::to_string(line)?);
        }
        return Ok(());
    }
    say!(
        "{model}: {} groups × {} requests, {} shared + {} own tokens, {} generated, {} at a time, seed {seed}",
        args.groups,
        args.requests,
        args.prefix_tokens,
        args.suffix_tokens,
        args.max_tokens,
        args.concurrency
    );
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["cache", "TTFT p50 ms", "p99 ms", "cold p50 ms", "tokens/s", "hit rate", "TTFT vs none"]);
    for (line, (_, meaning)) in figures.iter().zip(WAYS) {
        table.add_row(
            [
                meaning.to_string(),
                format!("{:.1}", line.ttft_p50_ms),
                format!("{:.1}", line.ttft_p99_ms),
                format!("{:.1}", line.cold_ttft_p50_ms),
                format!("{:.0}", line.tokens_per_second),
                format!("{:.1} %", line.hit_rate * 100.0),
                format!("{:.1}×", line.ttft_speedup),
            ]
            .map(|text| Cell::new(text).set_alignment(CellAlignment::Right)),
        );
    }
    say!("{table}");
    Ok(())
}
