//! Settings of a router. The comments of the fields are the manual.

use crate::openai::tool_parser::ToolFormat;
use larder_client::StoreUrl;
use larder_http::HttpOptions;
use larder_worker::trials::ConstraintTrials;
use larder_worker::worker_process::WorkerCommand;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Largest value of [`RouterOptions::max_inflight`].
const MAX_INFLIGHT_MAX: usize = 1 << 24;

#[derive(Debug, Clone)]
pub struct RouterOptions {
    pub store: StoreUrl,
    /// Address of the OpenAI API. Port 0 takes a free one. Default `127.0.0.1:8000`.
    pub listen: SocketAddr,
    /// Address of the admin API and the metrics. Port 0 takes a free one. Default `127.0.0.1:8001`.
    pub admin_listen: SocketAddr,
    /// Limits of the OpenAI API's HTTP server. `body_bytes_max` replaces the one in here. Default:
    /// those of [`HttpOptions`], but 2048 connections.
    pub http: HttpOptions,
    /// Limits of the admin API's HTTP server. Default: those of [`HttpOptions`], but 128
    /// connections and bodies of 16 MiB: the longest text, or two million token ids.
    pub admin_http: HttpOptions,
    /// Minimum number of uncached prompt tokens in whole pages for which the router uses a prefill
    /// engine. Below it the decode engine computes them itself. Default 64, minimum 1.
    pub prefill_min_tokens: u32,
    /// Format of the calls of tools in answers. Default: that of the model's chat template.
    pub tool_parser: Option<ToolFormat>,
    /// Origins of web pages that may read answers of the OpenAI API, such as `http://a.example`, or
    /// `*` for all. The paths of operators are never open to pages. Default: none.
    pub cors_origins: Vec<String>,
    /// Maximum time of a request, from the end of its body to its last token. Default 600 s,
    /// minimum 100 ms.
    pub request_timeout: Duration,
    /// Maximum number of answers in progress. A request counts once for each of its choices. One
    /// address has at most three quarters, and less while others have the rest. The router answers
    /// 429 to requests above the limit. Default 1024, minimum 1.
    pub max_inflight: usize,
    /// Interval at which discovery reads the registered engines from the store. Default 250 ms,
    /// minimum 10 ms.
    pub poll_interval: Duration,
    /// Maximum time a request waits for the store's lookup. After it every page counts as missing.
    /// Default 50 ms, minimum 1 ms.
    pub lookup_timeout: Duration,
    /// Time for which the router keeps the files of a model without engines, so that an engine that
    /// restarts need not send them again. Default 300 s, minimum 0.
    pub model_retention: Duration,
    /// Maximum time to connect to an engine. Default 1 s, minimum 1 ms.
    pub connect_timeout: Duration,
    /// Maximum number of engines of one role that one request tries before it fails. Default 3,
    /// minimum 1.
    pub attempts_max: usize,
    /// Maximum size of a request body, in bytes. The contexts of the models may lower it: no body
    /// may be longer than 16 prompts of the longest tokens, plus 1 MiB. Default 16 MiB, minimum 1
    /// KiB.
    pub body_bytes_max: usize,
    /// Command that renders chat templates, in a process of its own. Default: this program with the
    /// hidden command `template-worker`, which `larder` has.
    pub template_worker: WorkerCommand,
    /// Trials of constraints, in processes of their own. Engines of this process may share them, so
    /// that a constraint that has passed is not tried again. Default: of this router alone, with
    /// the command of `template_worker`.
    pub constraint_trials: Option<Arc<ConstraintTrials>>,
    /// Maximum time a stopping router waits for running answers. Default 5 s, minimum 0.
    pub shutdown_grace: Duration,
}

/// Setting out of range. The message names the option and its limits.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{option}: {requirement}")]
pub struct OptionsError {
    pub option: &'static str,
    pub requirement: String,
}

impl RouterOptions {
    pub fn new(store: StoreUrl) -> Self {
        Self {
            store,
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 8001)),
            http: HttpOptions { connections_max: 2048, ..HttpOptions::default() },
            admin_http: HttpOptions { connections_max: 128, body_bytes_max: 16 << 20, ..HttpOptions::default() },
            prefill_min_tokens: 64,
            tool_parser: None,
            cors_origins: Vec::new(),
            request_timeout: Duration::from_secs(600),
            max_inflight: 1024,
            poll_interval: Duration::from_millis(250),
            lookup_timeout: Duration::from_millis(50),
            model_retention: Duration::from_secs(300),
            connect_timeout: Duration::from_secs(1),
            attempts_max: 3,
            body_bytes_max: 16 << 20,
            template_worker: WorkerCommand::default(),
            constraint_trials: None,
            shutdown_grace: Duration::from_secs(5),
        }
    }

    /// Checks every setting against its limits. The error names the first one that is out of range.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let wrong = |option, requirement: String| Err(OptionsError { option, requirement });
        for (option, value, least) in [
            ("prefill_min_tokens", self.prefill_min_tokens as usize, 1),
            ("max_inflight", self.max_inflight, 1),
            ("attempts_max", self.attempts_max, 1),
            ("body_bytes_max", self.body_bytes_max, 1024),
        ] {
            if value < least {
                return wrong(option, format!("is {value}, must be at least {least}"));
            }
        }
        let is_origin = |origin: &String| {
            origin == "*"
                || (origin.contains("://") && !origin.ends_with('/') && origin.bytes().all(|b| b.is_ascii_graphic()))
        };
        if let Some(origin) = self.cors_origins.iter().find(|origin| !is_origin(origin)) {
            let requirement = "must be * or SCHEME://HOST[:PORT], without a path";
            return wrong("cors_origin", format!("is '{origin}', {requirement}"));
        }
        for http in [&self.http, &self.admin_http] {
            http.validate().map_err(|error| OptionsError { option: error.flag, requirement: error.requirement })?;
        }
        if self.max_inflight > MAX_INFLIGHT_MAX {
            return wrong("max_inflight", format!("must be at most {MAX_INFLIGHT_MAX}"));
        }
        for (option, value, least_ms) in [
            ("request_timeout", self.request_timeout, 100),
            ("poll_interval", self.poll_interval, 10),
            ("lookup_timeout", self.lookup_timeout, 1),
            ("connect_timeout", self.connect_timeout, 1),
        ] {
            if value < Duration::from_millis(least_ms) {
                return wrong(option, format!("is {value:?}, must be at least {least_ms} ms"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validate_accepts_defaults_and_names_the_option_out_of_range() {
        let options = || RouterOptions::new("larder://127.0.0.1:1".parse().unwrap());
        assert_eq!(options().validate(), Ok(()));
        type Break = (&'static str, fn(&mut RouterOptions));
        let breakers: [Break; 6] = [
            ("cors_origin", |o| o.cors_origins = vec!["http://a.example/".into()]),
            ("prefill_min_tokens", |o| o.prefill_min_tokens = 0),
            ("max_inflight", |o| o.max_inflight = usize::MAX),
            ("body_bytes_max", |o| o.body_bytes_max = 10),
            ("request_timeout", |o| o.request_timeout = Duration::ZERO),
            ("poll_interval", |o| o.poll_interval = Duration::from_millis(1)),
        ];
        for (option, break_it) in breakers {
            let mut options = options();
            break_it(&mut options);
            assert_eq!(options.validate().unwrap_err().option, option);
        }
    }
}
