//! Settings of a router. The comments are the manual.

use larder_client::StoreUrl;
use std::net::SocketAddr;
use std::time::Duration;
use thiserror::Error;

/// Everything a router needs to know at start.
#[derive(Debug, Clone)]
pub struct RouterOptions {
    /// The store: where engines register and pages are looked up.
    pub store: StoreUrl,
    /// Address of the OpenAI API; port 0 takes a free one. Default `127.0.0.1:8000`.
    pub listen: SocketAddr,
    /// Address of the admin API and the metrics; port 0 takes a free one. Default `127.0.0.1:8001`.
    pub admin_listen: SocketAddr,
    /// Prompt tokens in whole pages that the store lacks, below which no prefill engine is asked and the decode engine
    /// computes them itself. Default 64, minimum 1.
    pub prefill_min_tokens: u32,
    /// Most time for a request, from its arrival to its last token. Default 120 s, minimum 100 ms.
    pub request_timeout: Duration,
    /// Answers being generated at one time (a request counts once for each of its choices); above it requests are answered
    /// 429. Default 1024, minimum 1.
    pub max_inflight: usize,
    /// Time between two looks at which engines are there. Default 250 ms, minimum 10 ms.
    pub poll_interval: Duration,
    /// Most time a request waits for the store to say what it holds; then everything counts as missing. Default 50 ms,
    /// minimum 1 ms.
    pub lookup_timeout: Duration,
    /// Most time to connect to an engine. Default 1 s, minimum 1 ms.
    pub connect_timeout: Duration,
    /// Engines of one role that one request tries before it fails. Default 3, minimum 1.
    pub attempts_max: usize,
    /// Most bytes of a request body. Default 16 MiB, minimum 1 KiB.
    pub body_bytes_max: usize,
    /// Most time a stopping router lets running answers go on. Default 5 s, minimum 0.
    pub shutdown_grace: Duration,
}

/// Which option is wrong, and what it may be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{option}: {requirement}")]
pub struct OptionsError {
    /// The field.
    pub option: &'static str,
    /// What it must be.
    pub requirement: String,
}

impl RouterOptions {
    /// Default settings.
    pub fn new(store: StoreUrl) -> Self {
        Self {
            store,
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 8001)),
            prefill_min_tokens: 64,
            request_timeout: Duration::from_secs(120),
            max_inflight: 1024,
            poll_interval: Duration::from_millis(250),
            lookup_timeout: Duration::from_millis(50),
            connect_timeout: Duration::from_secs(1),
            attempts_max: 3,
            body_bytes_max: 16 << 20,
            shutdown_grace: Duration::from_secs(5),
        }
    }

    /// Checks every setting.
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
        // A semaphore counts no further.
        if self.max_inflight > tokio::sync::Semaphore::MAX_PERMITS {
            return wrong("max_inflight", format!("must be at most {}", tokio::sync::Semaphore::MAX_PERMITS));
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
    fn defaults_are_valid_and_each_error_names_its_option() {
        let options = || RouterOptions::new("larder://127.0.0.1:1".parse().unwrap());
        assert_eq!(options().validate(), Ok(()));
        type Break = (&'static str, fn(&mut RouterOptions));
        let breakers: [Break; 5] = [
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
