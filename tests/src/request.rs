//! Requests to a router.

use crate::{PATIENCE, eventually};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::cell::{Ref, RefCell};

#[derive(Debug, Clone)]
pub struct CompletionRequest<'a> {
    pub tokens: &'a [u32],
    pub max_tokens: usize,
    /// Caches to use: `all`, `store` or `none`.
    pub cache: &'a str,
}

impl<'a> CompletionRequest<'a> {
    /// Requests 32 tokens after `tokens`, with every cache.
    pub fn new(tokens: &'a [u32]) -> Self {
        Self { tokens, max_tokens: 32, cache: "all" }
    }

    pub fn cache(self, cache: &'a str) -> Self {
        Self { cache, ..self }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    pub text: String,
    pub cached: u64,
    pub generated: u64,
}

/// Sends a completion request to a router. It is greedy (temperature 0) and goes on past an end of
/// sequence, so it generates `max_tokens` tokens.
///
/// # Errors
/// If the router does not answer within [`PATIENCE`], or with any status but success.
pub async fn complete(api: &str, request: &CompletionRequest<'_>) -> Result<Completion> {
    let body = json!({
        "model": "larder-tiny", "prompt": request.tokens, "max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": true,
    });
    let response = reqwest::Client::builder()
        .timeout(PATIENCE)
        .build()?
        .post(format!("{api}/v1/completions"))
        .header("x-larder-cache", request.cache)
        .json(&body)
        .send()
        .await?;
    let status = response.status();
    let answer: Value = response.json().await?;
    if !status.is_success() {
        bail!("{status}: {answer}");
    }
    Ok(Completion {
        text: answer["choices"][0]["text"].as_str().unwrap_or_default().to_string(),
        cached: answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default(),
        generated: answer["usage"]["completion_tokens"].as_u64().unwrap_or_default(),
    })
}

pub async fn get_json(url: &str) -> Result<Value> {
    Ok(reqwest::Client::builder().timeout(PATIENCE).build()?.get(url).send().await?.error_for_status()?.json().await?)
}

/// Status of every store node, from the admin API of the router. Waits until all nodes have
/// answered the router, which leaves a silent node out of its answer.
pub async fn node_statuses(admin: &str) -> Vec<Value> {
    let statuses = RefCell::new(Vec::new());
    eventually("every node reports its status", || async {
        let Ok(mut status) = get_json(&format!("{admin}/admin/v1/status")).await else { return false };
        let nodes = status["nodes"].as_array_mut().map(std::mem::take).unwrap_or_default();
        statuses.replace(nodes.into_iter().map(|mut node| node["status"].take()).collect());
        let statuses: Ref<'_, Vec<Value>> = statuses.borrow();
        !statuses.is_empty() && statuses.iter().all(Value::is_object)
    })
    .await;
    statuses.into_inner()
}

/// Sum of the samples of a metric that carry `label`, such as `outcome="done"`. 0 if there is none.
///
/// # Errors
/// If the page of metrics cannot be read. A sample whose value cannot be parsed is left out.
pub async fn metric(url: &str, name: &str, label: &str) -> Result<f64> {
    let text = reqwest::get(format!("{url}/metrics")).await?.error_for_status()?.text().await?;
    let samples = text.lines().filter(|line| line.starts_with(&format!("{name}{{")) && line.contains(label));
    Ok(samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}
