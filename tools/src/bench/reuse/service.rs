//! The installation under test: `larder up` as a child process, and requests to its router.

use super::super::events::for_each_event;
use super::{Args, Clock, OutOfTime};
use anyhow::{Context, Result, bail, ensure};
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// Maximum time in which a process writes its pages to L3 and ends.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause after a refusal that names none.
const PAUSE: Duration = Duration::from_millis(200);
const LOG_LINES: usize = 5;

/// A running `larder up`. Killed on drop.
pub struct Up {
    child: Child,
    /// Kept open: the process must not fail to print.
    _stdout: Lines<BufReader<ChildStdout>>,
    log: PathBuf,
    pub router: Router,
    pub page_tokens: usize,
    pub startup: Duration,
}

impl Up {
    /// Starts the process with its data in `dir`, and waits until it serves.
    pub async fn start(args: &Args, dir: &Path, clock: Clock) -> Result<Up> {
        let log = dir.join("up.log");
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--log", "warn", "up", "--listen", "127.0.0.1:0", "--data-dir"]).arg(dir.join("data"));
        command.arg("--model").arg(&args.model).arg("--device").arg(args.device.to_string());
        for (option, size) in [("--l1", args.l1), ("--l2", args.l2), ("--l3-bytes", Some(args.l3_bytes))] {
            if let Some(size) = size {
                command.args([option, &size.as_u64().to_string()]);
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log)?).kill_on_drop(true);
        let begin = Instant::now();
        let mut child = command.spawn().context("cannot start `larder up`")?;
        let mut lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        let addresses = async {
            let mut url = None;
            loop {
                let Some(line) = lines.next_line().await? else { bail!("`larder up` ended: {}", tail(&log)) };
                let mut words = line.split_whitespace();
                url = url.or_else(|| words.find_map(|word| word.strip_suffix("/v1").map(str::to_string)));
                let page_tokens =
                    line.split_once("pages of ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<usize>().ok());
                if let (Some(url), Some(page_tokens)) = (&url, page_tokens) {
                    return Ok((url.clone(), page_tokens));
                }
            }
        };
        let (url, page_tokens) = tokio::time::timeout_at(clock.end(), addresses).await.map_err(|_| OutOfTime)??;
        ensure!(page_tokens > 0, "`larder up` has pages without tokens");
        let router = Router { http: reqwest::Client::new(), url };
        Ok(Up { child, _stdout: lines, log, router, page_tokens, startup: begin.elapsed() })
    }

    /// Stops the process and waits until it has written its pages to L3.
    pub async fn stop(mut self, clock: Clock) -> Result<()> {
        let pid = self.child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        kill_process(pid.with_context(|| format!("`larder up` has ended: {}", tail(&self.log)))?, Signal::TERM)?;
        let ended = tokio::time::timeout(STOP_TIMEOUT.min(clock.left()), self.child.wait()).await;
        let status = ended.map_err(|_| OutOfTime)??;
        ensure!(status.success(), "`larder up` stopped with {status}: {}", tail(&self.log));
        Ok(())
    }

    pub async fn kill(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("; ")
}

/// Tokens that answer a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    /// From the first attempt to the first token.
    pub first_token: Duration,
    /// Prompt tokens that were not computed.
    pub cached_tokens: usize,
}

#[derive(Debug, Clone)]
pub struct Router {
    http: reqwest::Client,
    url: String,
}

impl Router {
    /// Sends a prompt and waits for `count` tokens, the most probable ones. A refused request
    /// returns as told, until the clock ends.
    pub async fn ask(&self, prompt: &[u32], cache: &str, count: usize, clock: Clock) -> Result<Answer> {
        tokio::time::timeout_at(clock.end(), self.until_admitted(prompt, cache, count)).await.map_err(|_| OutOfTime)?
    }

    async fn until_admitted(&self, prompt: &[u32], cache: &str, count: usize) -> Result<Answer> {
        // SGLang's form of the API, because its answers name the tokens.
        let sampling = json!({"max_new_tokens": count, "temperature": 0, "ignore_eos": true});
        let body = json!({"input_ids": prompt, "stream": true, "sampling_params": sampling});
        let begin = Instant::now();
        loop {
            let request = self.http.post(format!("{}/generate", self.url)).header("x-larder-cache", cache);
            let response = request.json(&body).send().await?;
            let status = response.status();
            if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
                let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
                tokio::time::sleep(seconds.map_or(PAUSE, Duration::from_secs)).await;
                continue;
            }
            if !status.is_success() {
                bail!("the router answered {status}: {}", response.text().await?);
            }
            return read_answer(response, begin, count).await;
        }
    }
}

async fn read_answer(response: reqwest::Response, begin: Instant, count: usize) -> Result<Answer> {
    let (mut first_token, mut tokens, mut cached_tokens) = (None, Vec::new(), None);
    for_each_event(response, |event| {
        let ids = event["output_ids"].as_array().map_or(&[][..], Vec::as_slice);
        if !ids.is_empty() {
            first_token.get_or_insert_with(|| begin.elapsed());
        }
        // Each event has all tokens so far.
        tokens = ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect();
        cached_tokens = event["meta_info"]["cached_tokens"].as_u64();
        Ok(())
    })
    .await?;
    ensure!(tokens.len() == count, "the answer has {} tokens instead of {count}", tokens.len());
    Ok(Answer {
        tokens,
        first_token: first_token.context("the answer has no token")?,
        cached_tokens: cached_tokens.context("the answer does not tell how much was cached")? as usize,
    })
}
