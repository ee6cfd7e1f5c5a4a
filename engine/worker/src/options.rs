//! Settings of an engine. Each field's comment is its manual: meaning, default, minimum, unit.

use crate::api::Role;
use larder_client::StoreUrl;
use larder_format::namespace::{MAX_NAME_BYTES, MAX_PAGE_TOKENS};
use larder_model::{Model, Tokenizer};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// A model that is loaded already; engines of one process share it.
#[derive(Clone)]
pub struct Preloaded {
    /// Weights and configuration.
    pub model: Arc<Model>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
}

impl fmt::Debug for Preloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Preloaded")
    }
}

/// Settings of an engine; checked by [`crate::Engine::start`].
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Prefill or decode.
    pub role: Role,
    /// Folder in the Hugging Face form: config.json, safetensors, tokenizer.json.
    pub model_dir: PathBuf,
    /// The model, if it is loaded already. Default: none, it is loaded from `model_dir`.
    pub preloaded: Option<Preloaded>,
    /// Name for people. Default: the name of the folder.
    pub model_name: Option<String>,
    /// Where the pages are.
    pub store: StoreUrl,
    /// Address of the HTTP server; port 0 takes a free one. Default 127.0.0.1:0.
    pub listen: SocketAddr,
    /// URL under which routers reach this engine. Default: `http://` and the address listened on.
    pub advertise: Option<String>,
    /// Tokens per page; all engines of a model must agree. Default 32, minimum 1, at most 4096.
    pub page_tokens: u32,
    /// Memory of the L1 pool, bytes. Default 256 MiB, minimum two pages.
    pub l1_bytes: usize,
    /// Prompt tokens computed in one step, tokens: more is faster for prompts and slower for those who generate meanwhile.
    /// Default 512, minimum 1.
    pub chunk_tokens: usize,
    /// Sequences in one step, and half of the requests that may hold pages. Default 64, minimum 1.
    pub max_batch: usize,
    /// Requests that wait for pages; above it new ones are answered busy. Default 256, minimum 1.
    pub queue_max: usize,
    /// Whose pages are read and written. Default `default`; 1 to 256 bytes.
    pub tenant: String,
    /// Time without a new page after which a decode engine takes the prefill that it follows for dead, and computes the
    /// rest itself. Default 2 s, minimum 10 ms.
    pub follow_grace: Duration,
    /// Most time that a decode engine waits for the first page of the prefill that it follows, before it computes all by
    /// itself. Half of the request's remaining time bounds it too. Default 30 s, minimum 10 ms.
    pub follow_limit: Duration,
    /// Most time a request waits for pages to be reserved; then it is answered busy. Default 60 s, minimum 1 ms.
    pub queue_limit: Duration,
    /// Most time for looking up and reading pages of one request; what is not there then is computed. Default 10 s,
    /// minimum 1 ms.
    pub load_limit: Duration,
    /// Most time for one page to be put, from its first byte; then it counts as lost. Default 30 s, minimum 1 ms.
    pub publish_limit: Duration,
    /// Most time for a request, whatever its own `deadline_ms` says. Default 600 s, minimum 1 ms.
    pub request_limit: Duration,
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

impl EngineOptions {
    /// Default settings.
    pub fn new(role: Role, model_dir: impl Into<PathBuf>, store: StoreUrl) -> Self {
        Self {
            role,
            model_dir: model_dir.into(),
            preloaded: None,
            model_name: None,
            store,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            page_tokens: 32,
            l1_bytes: 256 << 20,
            chunk_tokens: 512,
            max_batch: 64,
            queue_max: 256,
            tenant: "default".into(),
            follow_grace: Duration::from_secs(2),
            follow_limit: Duration::from_secs(30),
            queue_limit: Duration::from_secs(60),
            load_limit: Duration::from_secs(10),
            publish_limit: Duration::from_secs(30),
            request_limit: Duration::from_secs(600),
        }
    }

    /// The name for people.
    pub fn name(&self) -> String {
        let folder = || self.model_dir.file_name().map(|name| name.to_string_lossy().into_owned());
        self.model_name.clone().or_else(folder).unwrap_or_else(|| "model".into())
    }

    /// Checks every setting that can be checked without the model.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let wrong = |option, requirement: String| Err(OptionsError { option, requirement });
        if !(1..=MAX_PAGE_TOKENS).contains(&self.page_tokens) {
            return wrong("page_tokens", format!("{} is not within 1 to {MAX_PAGE_TOKENS}", self.page_tokens));
        }
        for (option, value) in
            [("chunk_tokens", self.chunk_tokens), ("max_batch", self.max_batch), ("queue_max", self.queue_max)]
        {
            if value == 0 {
                return wrong(option, "must be at least 1".into());
            }
        }
        for (option, name) in [("tenant", self.tenant.clone()), ("model_name", self.name())] {
            if name.is_empty() || name.len() > MAX_NAME_BYTES {
                return wrong(option, format!("must have 1 to {MAX_NAME_BYTES} bytes"));
            }
        }
        if let Some(url) = &self.advertise
            && !(url.starts_with("http://") || url.starts_with("https://"))
        {
            return wrong("advertise", format!("'{url}' does not begin with http:// or https://"));
        }
        let ms = Duration::from_millis;
        for (option, value, least) in [
            ("follow_grace", self.follow_grace, ms(10)),
            ("follow_limit", self.follow_limit, ms(10)),
            ("queue_limit", self.queue_limit, ms(1)),
            ("load_limit", self.load_limit, ms(1)),
            ("publish_limit", self.publish_limit, ms(1)),
            ("request_limit", self.request_limit, ms(1)),
        ] {
            if value < least {
                return wrong(option, format!("must be at least {} ms", least.as_millis()));
            }
        }
        Ok(())
    }

    /// Pages of `page_bytes` bytes that the L1 holds.
    pub fn l1_pages(&self, page_bytes: usize) -> Result<usize, OptionsError> {
        match self.l1_bytes / page_bytes.max(1) {
            0 | 1 => Err(OptionsError {
                option: "l1_bytes",
                requirement: format!("must hold at least two pages of {page_bytes} bytes, {} given", self.l1_bytes),
            }),
            pages => Ok(pages),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> EngineOptions {
        EngineOptions::new(Role::Prefill, "/models/tiny", "larder://127.0.0.1:1".parse().unwrap())
    }

    #[test]
    fn defaults_are_valid_and_each_error_names_its_option() {
        assert_eq!(options().validate(), Ok(()));
        assert_eq!(options().name(), "tiny");
        type Breaker = (&'static str, fn(&mut EngineOptions));
        let breakers: [Breaker; 5] = [
            ("page_tokens", |o| o.page_tokens = 0),
            ("max_batch", |o| o.max_batch = 0),
            ("tenant", |o| o.tenant.clear()),
            ("advertise", |o| o.advertise = Some("10.0.0.1:1".into())),
            ("follow_grace", |o| o.follow_grace = Duration::ZERO),
        ];
        for (option, break_it) in breakers {
            let mut options = options();
            break_it(&mut options);
            assert_eq!(options.validate().unwrap_err().option, option);
        }
        assert_eq!(options().l1_pages(200 << 20).unwrap_err().option, "l1_bytes");
    }
}
