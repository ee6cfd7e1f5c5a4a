//! Options of an engine. The comment of each field is its manual: meaning, default, range and unit.

use crate::api::{Role, is_engine_url};
use crate::l3_reads::L3Path;
use crate::redis_store::url::EngineStore;
use crate::trials::ConstraintTrials;
use crate::worker_process::WorkerCommand;
use larder_client::StoreUrl;
use larder_format::codec::is_printable;
use larder_format::namespace::{MAX_NAME_BYTES, MAX_PAGE_TOKENS};
use larder_http::HttpOptions;
use larder_model::{LoadOptions, Model, Tokenizer};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// A loaded model. Several engines of one process can share it.
#[derive(Clone)]
pub struct Preloaded {
    pub model: Arc<Model>,
    pub tokenizer: Arc<Tokenizer>,
}

impl fmt::Debug for Preloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Preloaded")
    }
}

#[derive(Debug, Clone)]
pub struct EngineOptions {
    pub role: Role,
    /// Model folder in Hugging Face layout: config.json, safetensors files, tokenizer.json.
    pub model_dir: PathBuf,
    /// Loaded model to use. Default: none, the engine loads `model_dir`.
    pub preloaded: Option<Preloaded>,
    /// Types of weights and of pages, if the engine loads `model_dir`. Default: those of the model.
    pub load: LoadOptions,
    /// Model name that clients use. Default: the name of the folder.
    pub model_name: Option<String>,
    pub store: EngineStore,
    /// Nodes at which an engine on a Redis server registers itself, so that routers find it.
    /// Default: none, and no router uses the engine. An engine on nodes registers there.
    pub register: Option<StoreUrl>,
    /// Address of the HTTP server. Port 0 selects a free port. Default 127.0.0.1:0.
    pub listen: SocketAddr,
    /// Limits of the HTTP server. Default: those of [`HttpOptions`], but bodies of up to
    /// [`BODY_BYTES_MAX`](crate::api::BODY_BYTES_MAX).
    pub http: HttpOptions,
    /// URL under which routers reach this engine. Default: `http://` and the bound address.
    pub advertise: Option<String>,
    /// Way of pages from the L3 of a node of this machine. Default: `auto`, by the node unless a
    /// CUDA device computes the model.
    pub l3_path: L3Path,
    /// Number of tokens per page. All engines of a model must agree, or they cannot share pages.
    /// Default 32, range 1 to 4096.
    pub page_tokens: u32,
    /// Memory of the L1 pool, in bytes. Default 256 MiB, minimum two pages.
    pub l1_bytes: usize,
    /// Maximum number of prompt tokens computed per step. A larger value speeds up prompts and
    /// slows down concurrent generation. Default 512, minimum 1.
    pub chunk_tokens: usize,
    /// Maximum number of sequences per step. Twice as many requests may hold pages, those of one
    /// address three quarters of them at most. Default 64, minimum 1.
    pub max_batch: usize,
    /// Maximum number of requests that wait for pages. The engine refuses further ones as busy. The
    /// clients of one address have three quarters at most. Default 256, minimum 1.
    pub queue_max: usize,
    /// Tenant whose pages the engine reads and writes. Default `default`, 1 to 256 bytes.
    pub tenant: String,
    /// Name of the kernels' rounding, 1 to 256 bytes. Engines share pages only if they have the
    /// same one. Default: none, the engine measures it with a probe at start.
    pub numerics: Option<String>,
    /// Trials of constraints, in processes of their own. Parts of one process may share one.
    /// Default: of this engine alone, with the hidden command `template-worker` of this program.
    pub constraint_trials: Arc<ConstraintTrials>,
    /// Minimum time that a decode engine waits for the next part of a page from a prefill. It waits
    /// longer only if computing the missing pages itself would take longer. Default 100 ms, minimum
    /// 1 ms.
    pub follow_grace: Duration,
    /// Maximum time without a new part after which a decode engine treats a suspected prefill as
    /// dead and computes the remaining pages itself. A prefill that shows no fault gets four times
    /// as long. Default 2 s, minimum 10 ms.
    pub follow_stall_timeout: Duration,
    /// Maximum time that a decode engine waits for the first part of a prefill before it computes
    /// all pages itself. Half of the request's remaining time is a further bound. Default 30 s,
    /// minimum 10 ms.
    pub follow_start_timeout: Duration,
    /// Maximum time that a request waits for L1 pages. The engine then refuses it as busy. Default
    /// 60 s, minimum 1 ms.
    pub queue_timeout: Duration,
    /// Maximum time to look up and read the pages of one request. The engine computes pages that
    /// did not arrive by then. Default 10 s, minimum 1 ms.
    pub load_timeout: Duration,
    /// Maximum duration of the put of one page, from its first byte. The page then counts as lost.
    /// Default 30 s, minimum 1 ms.
    pub publish_timeout: Duration,
    /// Maximum duration of a request. Caps the request's own `deadline_ms`. Default 600 s, minimum
    /// 1 ms.
    pub request_timeout: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{option}: {requirement}")]
pub struct OptionsError {
    pub option: &'static str,
    pub requirement: String,
}

impl EngineOptions {
    pub fn new(role: Role, model_dir: impl Into<PathBuf>, store: EngineStore) -> Self {
        Self {
            role,
            model_dir: model_dir.into(),
            preloaded: None,
            load: LoadOptions::default(),
            model_name: None,
            store,
            register: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            http: HttpOptions { body_bytes_max: crate::api::BODY_BYTES_MAX, ..HttpOptions::default() },
            advertise: None,
            l3_path: L3Path::default(),
            page_tokens: 32,
            l1_bytes: 256 << 20,
            chunk_tokens: 512,
            max_batch: 64,
            queue_max: 256,
            tenant: "default".into(),
            numerics: None,
            constraint_trials: Arc::new(ConstraintTrials::new(WorkerCommand::default())),
            follow_grace: Duration::from_millis(100),
            follow_stall_timeout: Duration::from_secs(2),
            follow_start_timeout: Duration::from_secs(30),
            queue_timeout: Duration::from_secs(60),
            load_timeout: Duration::from_secs(10),
            publish_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(600),
        }
    }

    pub fn name(&self) -> String {
        let folder = || self.model_dir.file_name().map(|name| name.to_string_lossy().into_owned());
        self.model_name.clone().or_else(folder).unwrap_or_else(|| "model".into())
    }

    /// Validates every option that does not depend on the model. Reports the first violation.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let wrong = |option, requirement: String| Err(OptionsError { option, requirement });
        if !(1..=MAX_PAGE_TOKENS).contains(&self.page_tokens) {
            return wrong("page_tokens", format!("is {}, must be within 1 to {MAX_PAGE_TOKENS}", self.page_tokens));
        }
        for (option, value) in
            [("chunk_tokens", self.chunk_tokens), ("max_batch", self.max_batch), ("queue_max", self.queue_max)]
        {
            if value == 0 {
                return wrong(option, "must be at least 1".into());
            }
        }
        let numerics = self.numerics.clone().unwrap_or_else(|| "measured".into());
        for (option, name) in [("tenant", self.tenant.clone()), ("model_name", self.name()), ("numerics", numerics)] {
            if name.is_empty() || name.len() > MAX_NAME_BYTES {
                return wrong(option, format!("must have 1 to {MAX_NAME_BYTES} bytes"));
            }
            if !is_printable(&name) {
                return wrong(option, format!("is {name:?}, must not contain control characters"));
            }
        }
        if let Some(url) = &self.advertise
            && !is_engine_url(url)
        {
            let requirement = "must be http://HOST:PORT, without user, path, query or fragment";
            return wrong("advertise", format!("is '{url}', {requirement}"));
        }
        if self.register.is_some() && matches!(self.store, EngineStore::Larder(_)) {
            return wrong("register", "is for an engine on a Redis server: others register at their store".into());
        }
        self.http.validate().map_err(|error| OptionsError { option: error.flag, requirement: error.requirement })?;
        let ms = Duration::from_millis;
        for (option, value, least) in [
            ("follow_grace", self.follow_grace, ms(1)),
            ("follow_stall_timeout", self.follow_stall_timeout, ms(10)),
            ("follow_start_timeout", self.follow_start_timeout, ms(10)),
            ("queue_timeout", self.queue_timeout, ms(1)),
            ("load_timeout", self.load_timeout, ms(1)),
            ("publish_timeout", self.publish_timeout, ms(1)),
            ("request_timeout", self.request_timeout, ms(1)),
        ] {
            if value < least {
                return wrong(option, format!("must be at least {} ms", least.as_millis()));
            }
        }
        Ok(())
    }

    /// Number of pages of `page_bytes` bytes that fit L1. Fails for fewer than two.
    pub fn l1_pages(&self, page_bytes: usize) -> Result<usize, OptionsError> {
        match self.l1_bytes / page_bytes.max(1) {
            0 | 1 => Err(OptionsError {
                option: "l1_bytes",
                requirement: format!("is {} bytes, must hold at least two pages of {page_bytes} bytes", self.l1_bytes),
            }),
            pages => Ok(pages),
        }
    }
}

/// Maximum tokens of prompt and answer together: the model's limit, or the capacity of L1 if that
/// is smaller.
pub(crate) fn context_limit(model: &Model, capacity_pages: usize, page_tokens: u32) -> u32 {
    let held = capacity_pages.saturating_mul(page_tokens as usize);
    u32::try_from(model.config().max_context.min(held)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> EngineOptions {
        EngineOptions::new(Role::Prefill, "/models/tiny", "larder://127.0.0.1:1".parse().unwrap())
    }

    #[test]
    fn defaults_are_valid_and_errors_name_their_option() {
        assert_eq!(options().validate(), Ok(()));
        assert_eq!(options().name(), "tiny");
        type InvalidSetting = (&'static str, fn(&mut EngineOptions));
        let invalid_settings: [InvalidSetting; 8] = [
            ("register", |o| o.register = "larder://127.0.0.1:1".parse().ok()),
            ("page_tokens", |o| o.page_tokens = 0),
            ("max_batch", |o| o.max_batch = 0),
            ("tenant", |o| o.tenant.clear()),
            ("numerics", |o| o.numerics = Some(String::new())),
            ("model_name", |o| o.model_name = Some("a\n\u{1b}[2J".into())),
            ("advertise", |o| o.advertise = Some("10.0.0.1:1".into())),
            ("follow_stall_timeout", |o| o.follow_stall_timeout = Duration::ZERO),
        ];
        for (option, apply) in invalid_settings {
            let mut options = options();
            apply(&mut options);
            assert_eq!(options.validate().unwrap_err().option, option);
        }
        assert_eq!(options().l1_pages(200 << 20).unwrap_err().option, "l1_bytes");
    }
}
