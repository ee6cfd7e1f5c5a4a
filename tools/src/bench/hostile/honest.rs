//! Honest clients: chats and prompts through the router, pages put and read at the node, and values
//! set and read at its Redis port.
//!
//! Each client sends one request at a time and waits between two, so that the latency of a request
//! does not depend on the one before.

use super::attacker::{Target, honest_address};
use super::data::SQUATTED_EACH;
use super::redis::{RedisClient, RedisReply};
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use hdrhistogram::Histogram;
use larder_client::{Client, ClientOptions, GetOptions, NewPage, PutOptions, PutOutcome, StoreUrl, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_worker::api::{CacheMode, DecodeEvent, DecodeRequest, PATH_DECODE, SamplingParams};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// Time in which an honest request must be served, with all its retries.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const CHAT_PAUSE: Duration = Duration::from_millis(100);
/// Pause between two requests of a page or a value. Short, because a 99th percentile needs many
/// samples.
const PAGE_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a retry whose answer names none.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Distinct chats. The answer to each must always be the same.
const CHATS: u64 = 8;
const ANSWER_TOKENS: u32 = 8;
/// Tokens of a prompt: several whole pages, which a prefill engine computes.
const PROMPT_TOKENS: u32 = 100;
/// Upper bound of token ids in prompts. Every tokenizer has a larger vocabulary.
const TOKEN_IDS: u32 = 2000;
/// Gets between two puts, and the youngest pages that they read.
const GETS_PER_PUT: u64 = 2;
const WORKING_SET: u64 = 32;
/// Failures whose cause is kept.
const CAUSES_MAX: usize = 8;

/// Tokens of the prompt `number`. Its first two tokens are the digits of the number, so no other
/// prompt begins with them.
pub fn prompt(number: u64) -> Vec<u32> {
    const DIGITS: u64 = TOKEN_IDS as u64 - 16;
    let digit = |at: u64| match at {
        0 => number % DIGITS,
        1 => number / DIGITS % DIGITS,
        _ => (number * 7919 + at * 131) % DIGITS,
    };
    (0..u64::from(PROMPT_TOKENS)).map(|at| 16 + digit(at) as u32).collect()
}

pub fn page_namespace() -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 2,
        kv_heads: 4,
        head_dim: 64,
        page_tokens: 32,
        layers_per_part: 2,
        head_groups: 1,
    };
    NamespaceDescriptor { model: "hostile".into(), weights: [2; 32], geometry, tenant: "honest".into() }
}

pub fn page_key(number: u64) -> PageKey {
    PageKey::chain(None, &[number as u32, (number >> 32) as u32])
}

/// Content of the page `number`. Every word of eight bytes is different, within the page and from
/// those of other pages. So a page, or a part of one, in a wrong place is noticed.
fn page_content(number: u64) -> Bytes {
    let words = page_namespace().geometry.page_bytes() as u64 / 8;
    (0..words).flat_map(|at| (number << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

/// Latencies and outcomes of one kind of request.
#[derive(Debug)]
pub struct Samples {
    pub microseconds: Histogram<u64>,
    /// Refusals with a retry, which the latency includes.
    pub refused: u64,
    pub failed: u64,
    pub causes: Vec<String>,
    pub wrong: u64,
    /// Puts of pages that a stranger had reserved, and gets of these pages.
    pub missed: u64,
}

impl Samples {
    pub fn new() -> Result<Samples> {
        let microseconds = Histogram::new_with_max(REQUEST_TIMEOUT.as_micros() as u64 * 2, 3)?;
        Ok(Samples { microseconds, refused: 0, failed: 0, causes: Vec::new(), wrong: 0, missed: 0 })
    }

    /// Adds the samples of another turn.
    pub fn add(&mut self, other: Samples) -> Result<()> {
        let Samples { microseconds, refused, failed, causes, wrong, missed } = other;
        self.microseconds.add(microseconds).context("histograms of the same range")?;
        self.refused += refused;
        self.failed += failed;
        self.causes.extend(causes);
        self.causes.truncate(CAUSES_MAX);
        self.wrong += wrong;
        self.missed += missed;
        Ok(())
    }

    /// Values between which the true 99th percentile lies with a probability of about 95 %. The
    /// number of samples below it has a binomial distribution, here in its normal approximation.
    pub fn p99_range(&self) -> [u64; 2] {
        const QUANTILE: f64 = 0.99;
        const DEVIATIONS: f64 = 1.96;
        let samples = self.microseconds.len().max(1) as f64;
        let deviation = DEVIATIONS * (QUANTILE * (1.0 - QUANTILE) / samples).sqrt();
        let range = [(QUANTILE - deviation).max(0.0), (QUANTILE + deviation).min(1.0)];
        range.map(|quantile| self.microseconds.value_at_quantile(quantile))
    }

    fn record(&mut self, begin: Instant) {
        self.microseconds.saturating_record(begin.elapsed().as_micros() as u64);
    }

    fn fail(&mut self, cause: impl ToString) {
        self.failed += 1;
        if self.causes.len() < CAUSES_MAX {
            self.causes.push(cause.to_string());
        }
    }
}

/// Samples by kind of request.
pub type AllSamples = BTreeMap<&'static str, Samples>;

/// Answers to the chats, as first received.
pub type ChatAnswers = BTreeMap<u64, String>;

/// Answers to prompts, by number. [`check_prompts`] compares them.
pub type PromptAnswers = Vec<(u64, String)>;

/// Samples, and answers of one run.
pub struct Honest {
    pub samples: AllSamples,
    pub chats: ChatAnswers,
    pub prompts: PromptAnswers,
}

/// Runs all honest clients for `time`, on `threads`. Compares chats with `answers`, and adds new
/// ones.
pub async fn run(target: &Arc<Target>, answers: ChatAnswers, time: Duration, threads: &Handle) -> Result<Honest> {
    let stop = CancellationToken::new();
    let chats = threads.spawn(chat(target.clone(), answers, stop.clone()));
    let prompts = threads.spawn(send_prompts(target.clone(), stop.clone()));
    let pages = threads.spawn(move_pages(target.clone(), stop.clone()));
    let values = threads.spawn(set_and_get_values(target.clone(), stop.clone()));
    tokio::time::sleep(time).await;
    stop.cancel();
    let (chats, answers) = chats.await??;
    let (prompts, prompt_answers) = prompts.await??;
    let (puts, gets) = pages.await??;
    let values = values.await??;
    let samples =
        BTreeMap::from([("chats", chats), ("prompts", prompts), ("puts", puts), ("gets", gets), ("values", values)]);
    Ok(Honest { samples, chats: answers, prompts: prompt_answers })
}

fn http() -> Result<reqwest::Client> {
    Ok(reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?)
}

async fn chat(
    target: Arc<Target>,
    mut answers: ChatAnswers,
    stop: CancellationToken,
) -> Result<(Samples, ChatAnswers)> {
    let (http, mut samples) = (http()?, Samples::new()?);
    let url = format!("http://{}/v1/chat/completions", target.ports.api);
    for round in 0.. {
        let number = round % CHATS;
        let message = json!({"role": "user", "content": format!("Who lived in the days of king number {number}?")});
        let body = json!({"model": "larder-tiny", "messages": [message], "max_tokens": ANSWER_TOKENS,
            "temperature": 0, "ignore_eos": true, "stream": true});
        if let Some(answer) = request(&http, &url, &body, &mut samples).await
            && *answers.entry(number).or_insert_with(|| answer.clone()) != answer
        {
            samples.wrong += 1;
        }
        if stop.run_until_cancelled(tokio::time::sleep(CHAT_PAUSE)).await.is_none() {
            break;
        }
    }
    Ok((samples, answers))
}

/// Sends prompts that no cache has. Strangers squat their pages.
async fn send_prompts(target: Arc<Target>, stop: CancellationToken) -> Result<(Samples, PromptAnswers)> {
    let (http, mut samples, mut answers) = (http()?, Samples::new()?, Vec::new());
    let url = format!("http://{}/v1/completions", target.ports.api);
    loop {
        let number = target.next_prompt.fetch_add(1, Ordering::Relaxed);
        let body = json!({"model": "larder-tiny", "prompt": prompt(number), "max_tokens": ANSWER_TOKENS,
            "temperature": 0, "ignore_eos": true, "stream": true});
        let answer = request(&http, &url, &body, &mut samples).await;
        answers.extend(answer.map(|answer| (number, answer)));
        if stop.run_until_cancelled(tokio::time::sleep(CHAT_PAUSE)).await.is_none() {
            return Ok((samples, answers));
        }
    }
}

/// Compares answers with those of an engine that uses no cache. Counts the others as wrong.
pub async fn check_prompts(target: &Target, answers: &PromptAnswers, samples: &mut Samples) -> Result<()> {
    let http = http()?;
    let url = format!("http://{}{PATH_DECODE}", target.ports.decode);
    for (number, answer) in answers {
        let decode = DecodeRequest {
            request_id: format!("check-{number}"),
            tokens: prompt(*number),
            sampling: SamplingParams { max_tokens: ANSWER_TOKENS as usize, ignore_eos: true, ..Default::default() },
            await_pages: 0,
            cached_pages: None,
            cache: CacheMode::None,
            deadline_ms: REQUEST_TIMEOUT.as_millis() as u64,
        };
        let lines = http.post(&url).json(&decode).send().await?.error_for_status()?.text().await?;
        let mut expected = String::new();
        for line in lines.lines() {
            match serde_json::from_str(line)? {
                DecodeEvent::Token { text, .. } => expected.push_str(&text),
                DecodeEvent::Error(error) => bail!("an engine cannot answer a prompt without a cache: {error}"),
                _ => {}
            }
        }
        if *answer != expected {
            samples.wrong += 1;
        }
    }
    Ok(())
}

/// Sends a request until it is served, and records its latency. Returns the text of the answer.
async fn request(http: &reqwest::Client, url: &str, body: &Value, samples: &mut Samples) -> Option<String> {
    let begin = Instant::now();
    loop {
        let left = REQUEST_TIMEOUT.saturating_sub(begin.elapsed());
        let answer = tokio::time::timeout(left, answer(http, url, body)).await;
        let error = match answer.unwrap_or_else(|_| bail!("not served in time")) {
            Ok(Answer::Text(text)) => {
                samples.record(begin);
                return Some(text);
            }
            Ok(Answer::Retry(pause)) if begin.elapsed() + pause < REQUEST_TIMEOUT => {
                samples.refused += 1;
                tokio::time::sleep(pause).await;
                continue;
            }
            Ok(Answer::Retry(_)) => "refused until the deadline".into(),
            Err(error) => format!("{error:#}"),
        };
        samples.fail(error);
        return None;
    }
}

enum Answer {
    Text(String),
    Retry(Duration),
}

/// Reads a stream to its end, and returns its text. A stream without its last event is an error.
async fn answer(http: &reqwest::Client, url: &str, body: &Value) -> Result<Answer> {
    let response = http.post(url).json(body).send().await?;
    if matches!(response.status().as_u16(), 429 | 503) {
        let seconds = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        return Ok(Answer::Retry(seconds.map_or(RETRY_PAUSE, Duration::from_secs)));
    }
    let status = response.status();
    let text = response.text().await.context("the answer ends early")?;
    if !status.is_success() {
        bail!("{status}: {text}");
    }
    let mut answer = String::new();
    let mut is_done = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            is_done = true;
            continue;
        }
        let event: Value = serde_json::from_str(data)?;
        if let Some(error) = event.get("error") {
            bail!("the answer ends with an error: {error}");
        }
        let choice = &event["choices"][0];
        let piece = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
        answer.push_str(piece.unwrap_or_default());
    }
    if !is_done {
        bail!("the answer ends without its last event");
    }
    Ok(Answer::Text(answer))
}

/// Puts pages, and reads the youngest ones. Returns the samples of puts and of gets.
async fn move_pages(target: Arc<Target>, stop: CancellationToken) -> Result<(Samples, Samples)> {
    let (mut puts, mut gets) = (Samples::new()?, Samples::new()?);
    let url = StoreUrl { nodes: vec![target.ports.node.to_string()], transport: Transport::Tcp, connections: 1 };
    let client = Client::attach(url, Some(page_namespace()), ClientOptions::default());
    if !client.ready(REQUEST_TIMEOUT).await {
        bail!("the node cannot be reached");
    }
    let first = target.next_page.load(Ordering::Relaxed);
    // Pages of the working set that are in the store.
    let mut stored = BTreeSet::new();
    for round in 0u64.. {
        if round.is_multiple_of(GETS_PER_PUT) {
            let number = target.next_page.fetch_add(1, Ordering::Relaxed);
            if put_page(&client, number, &mut puts).await {
                stored.insert(number);
            }
        }
        let next = target.next_page.load(Ordering::Relaxed);
        let oldest = first.max(next.saturating_sub(WORKING_SET));
        stored = stored.split_off(&oldest);
        let number = oldest + round % (next - oldest);
        get_page(&client, number, stored.contains(&number), &mut gets).await;
        if stop.run_until_cancelled(tokio::time::sleep(PAGE_PAUSE)).await.is_none() {
            break;
        }
    }
    Ok((puts, gets))
}

/// Returns `true` if the page is in the store.
async fn put_page(client: &Client, number: u64, samples: &mut Samples) -> bool {
    let page = NewPage::first(page_key(number));
    let content = page_content(number);
    let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
    let begin = Instant::now();
    match client.put_pages(vec![(page, content)], options, begin + REQUEST_TIMEOUT).await[..] {
        [PutOutcome::Stored] => {
            samples.record(begin);
            return true;
        }
        // A squatter has it. The page is then a miss, as if it had never been put.
        [PutOutcome::InProgress] if number.is_multiple_of(SQUATTED_EACH) => samples.missed += 1,
        ref outcome => samples.fail(format!("put of page {number}: {outcome:?}")),
    }
    false
}

/// Gets a page of the working set. One that is in the store must be found: the floor of the
/// namespace is larger than its working set, so no stranger can have it evicted.
async fn get_page(client: &Client, number: u64, is_stored: bool, samples: &mut Samples) {
    let content = page_content(number);
    let options = GetOptions { busy_retries: u32::MAX, ..GetOptions::default() };
    let begin = Instant::now();
    let wanted = vec![(page_key(number), vec![0; content.len()])];
    let (bytes, fetched) = client.get_with(wanted, options, begin + REQUEST_TIMEOUT).await.remove(0);
    if fetched.tier().is_none() {
        match is_stored {
            true => samples.fail(format!("get: page {number} is in the store and was not found")),
            false => samples.missed += 1,
        }
    } else if bytes == content {
        samples.record(begin);
    } else {
        samples.wrong += 1;
    }
}

/// Sets values at the Redis port, and reads each at once. The latency is that of both.
async fn set_and_get_values(target: Arc<Target>, stop: CancellationToken) -> Result<Samples> {
    let mut samples = Samples::new()?;
    let connect = || RedisClient::connect(honest_address(), target.ports.redis);
    let mut client = connect().await.context("the Redis port cannot be reached")?;
    loop {
        let number = target.next_value.fetch_add(1, Ordering::Relaxed);
        let begin = Instant::now();
        let moved = tokio::time::timeout(REQUEST_TIMEOUT, set_and_get(&mut client, number, &mut samples)).await;
        match moved.unwrap_or_else(|_| bail!("not served in time")) {
            Ok(true) => samples.record(begin),
            Ok(false) => samples.wrong += 1,
            Err(error) => {
                samples.fail(format!("value {number}: {error:#}"));
                client = connect().await.context("the Redis port cannot be reached again")?;
            }
        }
        if stop.run_until_cancelled(tokio::time::sleep(PAGE_PAUSE)).await.is_none() {
            return Ok(samples);
        }
    }
}

/// Returns `false` if other bytes come back.
async fn set_and_get(client: &mut RedisClient, number: u64, samples: &mut Samples) -> Result<bool> {
    let (key, content) = (format!("honest-{number}"), page_content(number));
    loop {
        match client.call(&[b"SET", key.as_bytes(), &content]).await? {
            RedisReply::Status(_) => break,
            RedisReply::Error(error) if error.starts_with("OOM") => samples.refused += 1,
            other => bail!("{other:?}"),
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
    match client.call(&[b"GET", key.as_bytes()]).await? {
        RedisReply::Value(Some(value)) => Ok(value == content),
        RedisReply::Value(None) => bail!("it was set and is gone"),
        other => bail!("{other:?}"),
    }
}
