//! Honest clients: chats and prompts through the router, and pages put and read at the node.
//!
//! Each client sends one request at a time and waits between two, so that the latency of a request
//! does not depend on the one before.

use super::attacker::Target;
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use hdrhistogram::Histogram;
use larder_client::{Client, ClientOptions, GetOptions, NewPage, PutOptions, PutOutcome, StoreUrl, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// Time in which an honest request must succeed, with all its retries.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const CHAT_PAUSE: Duration = Duration::from_millis(100);
const PAGE_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a retry whose answer names none.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Distinct chats. The answer to each must always be the same.
const CHATS: u64 = 8;
const ANSWER_TOKENS: u32 = 8;
/// Tokens of a prompt: three whole pages, which a prefill engine computes.
const PROMPT_TOKENS: u32 = 100;
/// Upper bound of token ids in prompts. Every tokenizer has a larger vocabulary.
const TOKEN_IDS: u32 = 2000;
/// Gets between two puts, and the youngest pages that they read.
const GETS_PER_PUT: u64 = 4;
const WORKING_SET: u64 = 32;
/// Failures whose cause is kept.
const CAUSES_MAX: usize = 8;

/// Tokens of the prompt `number`, which no other prompt begins with.
pub fn prompt(number: u64) -> Vec<u32> {
    let token = |at: u32| 16 + (number as u32).wrapping_mul(7919).wrapping_add(at.wrapping_mul(131)) % (TOKEN_IDS - 16);
    (0..PROMPT_TOKENS).map(token).collect()
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

fn page_content(number: u64) -> Bytes {
    let bytes = page_namespace().geometry.page_bytes() as u64;
    (0..bytes).map(|at| (at.wrapping_mul(31) ^ number) as u8).collect()
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
    /// Gets without a page, or puts of pages that another client was putting.
    pub missed: u64,
}

impl Samples {
    fn new() -> Result<Samples> {
        let microseconds = Histogram::new_with_max(REQUEST_TIMEOUT.as_micros() as u64 * 2, 3)?;
        Ok(Samples { microseconds, refused: 0, failed: 0, causes: Vec::new(), wrong: 0, missed: 0 })
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

/// Runs all honest clients for `time`, on `threads`. Compares chats with `answers`, and adds new
/// ones.
pub async fn run(
    target: &Arc<Target>,
    answers: ChatAnswers,
    time: Duration,
    threads: &Handle,
) -> Result<(AllSamples, ChatAnswers)> {
    let stop = CancellationToken::new();
    let chats = threads.spawn(chat(target.clone(), answers, stop.clone()));
    let prompts = threads.spawn(send_prompts(target.clone(), stop.clone()));
    let pages = threads.spawn(move_pages(target.clone(), stop.clone()));
    tokio::time::sleep(time).await;
    stop.cancel();
    let (chats, answers) = chats.await??;
    let (puts, gets) = pages.await??;
    let samples = BTreeMap::from([("chats", chats), ("prompts", prompts.await??), ("puts", puts), ("gets", gets)]);
    Ok((samples, answers))
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
async fn send_prompts(target: Arc<Target>, stop: CancellationToken) -> Result<Samples> {
    let (http, mut samples) = (http()?, Samples::new()?);
    let url = format!("http://{}/v1/completions", target.ports.api);
    loop {
        let number = target.next_prompt.fetch_add(1, Ordering::Relaxed);
        let body = json!({"model": "larder-tiny", "prompt": prompt(number), "max_tokens": ANSWER_TOKENS,
            "temperature": 0, "ignore_eos": true, "stream": true});
        request(&http, &url, &body, &mut samples).await;
        if stop.run_until_cancelled(tokio::time::sleep(CHAT_PAUSE)).await.is_none() {
            return Ok(samples);
        }
    }
}

/// Sends a request until it is served, and records its latency. Returns the text of the answer.
async fn request(http: &reqwest::Client, url: &str, body: &Value, samples: &mut Samples) -> Option<String> {
    let begin = Instant::now();
    loop {
        let error = match answer(http, url, body).await {
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
    for round in 0u64.. {
        if round.is_multiple_of(GETS_PER_PUT) {
            put_page(&client, target.next_page.fetch_add(1, Ordering::Relaxed), &mut puts).await;
        }
        let next = target.next_page.load(Ordering::Relaxed);
        let oldest = first.max(next.saturating_sub(WORKING_SET));
        get_page(&client, oldest + round % (next - oldest), &mut gets).await;
        if stop.run_until_cancelled(tokio::time::sleep(PAGE_PAUSE)).await.is_none() {
            break;
        }
    }
    Ok((puts, gets))
}

async fn put_page(client: &Client, number: u64, samples: &mut Samples) {
    let page = NewPage { key: page_key(number), parent: PageKey::NONE, position: 0 };
    let content = page_content(number);
    let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
    let begin = Instant::now();
    match client.put_pages(vec![(page, content)], options, begin + REQUEST_TIMEOUT).await[..] {
        [PutOutcome::Stored] => samples.record(begin),
        // A squatter has it. The page is then a miss, as if it had never been put.
        [PutOutcome::InProgress] => samples.missed += 1,
        ref outcome => samples.fail(format!("put: {outcome:?}")),
    }
}

async fn get_page(client: &Client, number: u64, samples: &mut Samples) {
    let content = page_content(number);
    let options = GetOptions { busy_retries: u32::MAX, ..GetOptions::default() };
    let begin = Instant::now();
    let wanted = vec![(page_key(number), vec![0; content.len()])];
    let (bytes, fetched) = client.get_with(wanted, options, begin + REQUEST_TIMEOUT).await.remove(0);
    if fetched.tier().is_none() {
        samples.missed += 1;
    } else if bytes == content {
        samples.record(begin);
    } else {
        samples.wrong += 1;
    }
}
