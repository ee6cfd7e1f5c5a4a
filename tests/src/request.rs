//! Talking to a router.

use crate::PATIENCE;
use anyhow::{Result, bail};
use serde_json::{Value, json};

/// A completion request over token ids, greedy.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// The prompt.
    pub tokens: &'a [u32],
    /// Tokens to generate.
    pub max_tokens: usize,
    /// `all`, `store` or `none`.
    pub cache: &'a str,
}

impl<'a> Ask<'a> {
    /// 32 tokens after `tokens`, with every cache.
    pub fn new(tokens: &'a [u32]) -> Self {
        Self { tokens, max_tokens: 32, cache: "all" }
    }

    /// With another way of using the cache.
    pub fn cache(self, cache: &'a str) -> Self {
        Self { cache, ..self }
    }
}

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Prompt tokens nobody had to compute.
    pub cached: u64,
    /// Tokens generated.
    pub generated: u64,
}

/// Asks a router for a completion.
pub async fn complete(api: &str, ask: &Ask<'_>) -> Result<Answer> {
    let body = json!({
        "model": "larder-tiny", "prompt": ask.tokens, "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": true,
    });
    let response = reqwest::Client::builder()
        .timeout(PATIENCE)
        .build()?
        .post(format!("{api}/v1/completions"))
        .header("x-larder-cache", ask.cache)
        .json(&body)
        .send()
        .await?;
    let status = response.status();
    let answer: Value = response.json().await?;
    if !status.is_success() {
        bail!("{status}: {answer}");
    }
    Ok(Answer {
        text: answer["choices"][0]["text"].as_str().unwrap_or_default().to_string(),
        cached: answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default(),
        generated: answer["usage"]["completion_tokens"].as_u64().unwrap_or_default(),
    })
}

/// GET of a JSON document.
pub async fn get_json(url: &str) -> Result<Value> {
    Ok(reqwest::Client::builder().timeout(PATIENCE).build()?.get(url).send().await?.error_for_status()?.json().await?)
}

/// The state of every store node, as the router's admin API shows it.
pub async fn status_of(admin: &str) -> Vec<Value> {
    let status = get_json(&format!("{admin}/admin/v1/status")).await.expect("the admin API answers");
    let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
    nodes.into_iter().map(|node| node["status"].clone()).collect()
}
