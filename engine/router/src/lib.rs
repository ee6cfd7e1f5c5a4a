//! OpenAI-compatible router and admin API.
//!
//! The router reads from the store which engines are registered and which pages are cached. It
//! sends each prompt to the engines that can serve it at the lowest cost. A prefill engine computes
//! and publishes the pages that the store lacks. A decode engine follows those pages and generates
//! the answer.
//!
//! Invariants:
//!
//! - Nothing but the prompt's tokens affects the text of an answer. The store's replies are hints.
//!   Losing an engine costs time and never yields wrong text.
//! - Everything is bounded: answers in progress, their prompts and texts, request bodies, texts to
//!   tokenise, engines, attempts. Every wait has a deadline.
//! - No client's address takes all of it: [`PeerBudget`] leaves a part to the next one.
//! - Chat templates are untrusted code and run in other processes.
//! - A client that disconnects cancels all work done for it.
//!
//! Layout:
//!
//! - [`options`]: settings and their limits.
//! - [`store`]: the interface to the page store.
//! - [`discovery`], `turns`: finds engines and loads tokenizers.
//! - [`engines`], [`breaker`]: the engine table, load balancing and circuit breaking.
//! - [`models`]: model names, tokenizers and page indexes.
//! - [`calls`]: client of the engines' HTTP interface.
//! - [`templates`], `tokenise`: conversations to text, and text to tokens.
//! - [`route`]: prefill and decode of one prompt.
//! - [`openai`], [`admin`]: the two HTTP servers.
//! - [`metrics`]: Prometheus metrics and the counters of the status page.
//! - [`memory_plan`]: upper bound of the router's memory.
#![forbid(unsafe_code)]

pub mod admin;
mod background;
pub mod breaker;
pub mod calls;
pub mod discovery;
pub mod engines;
mod json;
pub mod memory_plan;
pub mod metrics;
pub mod models;
pub mod openai;
pub mod options;
pub mod route;
pub mod store;
pub mod templates;
mod tokenise;
mod turns;

pub use options::{OptionsError, RouterOptions};

use calls::CallError;
use engines::RemoteEngine;
use futures::future::BoxFuture;
use larder_http::{AllowedHosts, HttpOptions, HttpServer, PeerBudget};
use larder_runtime::LogLimit;
use larder_worker::api::ErrorCode;
use larder_worker::trials::ConstraintTrials;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use store::{Directory, StoreDirectory};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const READY_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum time a request waits for an engine to appear. An engine that is being restarted or
/// replaced usually registers within this time, so the client sees a slow answer instead of a 503.
const ENGINE_WAIT: Duration = Duration::from_secs(1);
const ENGINE_WAIT_INTERVAL: Duration = Duration::from_millis(10);

#[derive(Debug, Error)]
pub enum RouterError {
    #[error("invalid router option {0} [LRD0502]")]
    Options(#[from] OptionsError),
    #[error("cannot listen on {address}: {source}; check --listen and --admin-listen [LRD0501]")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("cannot set up the HTTP client for engines: {0}")]
    Http(#[from] reqwest::Error),
    #[error("{0} [LRD0106]")]
    MemoryPlan(String),
}

pub(crate) struct RouterState {
    pub(crate) options: RouterOptions,
    /// Bound address of the OpenAI API. Differs from `options.listen` when that has port 0.
    pub(crate) api_addr: SocketAddr,
    pub(crate) admin_addr: SocketAddr,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) engines: engines::EngineTable,
    pub(crate) models: models::ModelTable,
    pub(crate) engine_client: calls::EngineClient,
    pub(crate) metrics: Arc<metrics::Metrics>,
    /// Admission control: one unit per answer in progress.
    pub(crate) inflight: Arc<PeerBudget>,
    /// Log lines about answers that an engine did not end.
    pub(crate) failure_lines: LogLimit,
    /// One unit per kibibyte of prompts of answers in progress.
    pub(crate) prompts: Arc<PeerBudget>,
    /// One unit per 64 KiB of the texts of answers that are not streamed.
    pub(crate) answers: Arc<PeerBudget>,
    pub(crate) tokeniser: tokenise::TokeniserQueue,
    pub(crate) templates: Arc<templates::TemplateWorkers>,
    pub(crate) constraints: Arc<ConstraintTrials>,
    /// One permit: discovery builds one tokenizer at a time.
    pub(crate) tokenizer_builds: Arc<Semaphore>,
    pub(crate) started: Instant,
    pub(crate) refresh_soon: Notify,
}

impl RouterState {
    /// Reports a failed call to the engine's circuit breaker. Drops an engine that broke the
    /// interface.
    ///
    /// Refusals that are the client's fault or plain overload do not count against the engine. Nor
    /// do deadlines, because one may be the client's short limit; a caller that knows better counts
    /// them itself.
    pub(crate) fn note_failure(&self, error: &CallError, engine: &Arc<RemoteEngine>) {
        match error {
            CallError::Lost { .. } => engine.note_lost(),
            CallError::Violation { reason, .. } => {
                if self.engines.expel(engine) {
                    self.metrics.count_expulsion();
                    self.models.distrust_files_of(&engine.name);
                    let (name, url) = (&engine.name, &engine.info.url);
                    tracing::warn!(engine = %name, %url, %reason, "engine dropped: it sent a wrong answer; stop it, or update engine and router to the same version [LRD0504]");
                }
            }
            CallError::Refused { error, .. } if error.code == ErrorCode::Internal => engine.note_fault(),
            CallError::Refused { .. } | CallError::TooLong { .. } | CallError::Deadline { .. } => {}
        }
    }

    /// Wakes discovery and retries `find` until it returns a value. Gives up with `None` after
    /// [`ENGINE_WAIT`] or at `deadline`, whichever comes first.
    pub(crate) async fn wait_for<T>(&self, deadline: Instant, find: impl Fn() -> Option<T>) -> Option<T> {
        let give_up = deadline.min(Instant::now() + ENGINE_WAIT);
        while Instant::now() < give_up {
            // Discovery may be in the middle of a refresh that began too early, so ask again on
            // every turn. It limits its own rate.
            self.refresh_soon.notify_one();
            tokio::time::sleep_until(give_up.min(Instant::now() + ENGINE_WAIT_INTERVAL)).await;
            if let Some(found) = find() {
                return Some(found);
            }
        }
        None
    }
}

pub struct Router;

impl Router {
    /// Attaches to the store, binds both listeners and starts discovery. Must be called inside a
    /// tokio runtime. Returns before any engine is known: see [`RouterHandle::wait_ready`].
    // Boxed and never inlined: see `Router::start_with`.
    #[inline(never)]
    pub fn start(options: RouterOptions) -> BoxFuture<'static, Result<RouterHandle, RouterError>> {
        Box::pin(async move {
            // Before attaching: an invalid option must not open connections to the store.
            options.validate()?;
            let directory = Arc::new(StoreDirectory::attach(options.store.clone()));
            Self::launch(options, directory).await
        })
    }

    /// Starts like [`Router::start`], but reads engines and pages from `directory` instead of
    /// `options.store`. Tests pass a fake.
    // Boxed and never inlined. The compiler generates the code of an `async fn` in each crate that
    // polls it: the whole router, in every test program.
    #[inline(never)]
    pub fn start_with(
        options: RouterOptions,
        directory: Arc<dyn Directory>,
    ) -> BoxFuture<'static, Result<RouterHandle, RouterError>> {
        Box::pin(Self::launch(options, directory))
    }

    async fn launch(options: RouterOptions, directory: Arc<dyn Directory>) -> Result<RouterHandle, RouterError> {
        options.validate()?;
        let plan = memory_plan::of(&options);
        if let Some(warning) = plan.check(larder_memory::machine::total()).map_err(RouterError::MemoryPlan)? {
            // Other machines cannot reach it, so no stranger fills the limits.
            match options.listen.ip().is_loopback() {
                true => tracing::info!("{warning}"),
                false => tracing::warn!("{warning} [LRD0106]"),
            }
        }
        tracing::info!(bytes = plan.total(), "memory of this router, at most: {plan}");
        let (listener, addr) = listen(options.listen)?;
        // Bind both ports before any task starts, so that a failure leaves nothing running.
        let (admin_listener, admin_addr) = listen(options.admin_listen)?;
        let metrics = Arc::new(metrics::Metrics::default());
        metrics.show_memory_max(&plan);
        let templates = Arc::new(templates::TemplateWorkers::new(options.template_worker.clone(), metrics.clone()));
        let own_trials = || Arc::new(ConstraintTrials::new(options.template_worker.clone()));
        let constraints = options.constraint_trials.clone().unwrap_or_else(own_trials);
        let router = Arc::new(RouterState {
            api_addr: addr,
            admin_addr,
            directory,
            engines: Default::default(),
            models: Default::default(),
            engine_client: calls::EngineClient::new(options.connect_timeout)?,
            metrics,
            inflight: PeerBudget::new(options.max_inflight),
            failure_lines: LogLimit::default(),
            prompts: PeerBudget::new(openai::PROMPTS_BYTES_MAX / openai::PROMPT_CHARGE_BYTES),
            answers: PeerBudget::new(openai::ANSWERS_BYTES_MAX / openai::ANSWER_CHARGE_BYTES),
            tokeniser: Default::default(),
            constraints,
            tokenizer_builds: Arc::new(Semaphore::new(1)),
            templates,
            started: Instant::now(),
            refresh_soon: Notify::new(),
            options,
        });
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(router.metrics.event_loop().clone().watch(stop.clone()));
        tasks.spawn(discovery::run(router.clone(), stop.clone()));
        let grace = router.options.shutdown_grace;
        let routes = openai::routes(router.clone());
        tasks.spawn(router.api_server().serve(listener, routes, stop.clone(), grace));
        let routes = admin::handlers::routes(router.clone());
        tasks.spawn(router.admin_server().serve(admin_listener, routes, stop.clone(), grace));
        tracing::info!(%addr, %admin_addr, "router listens for requests");
        Ok(RouterHandle { router, addr, admin_addr, stop, tasks })
    }
}

fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), RouterError> {
    larder_http::listen(address).map_err(|source| RouterError::Listen { address, source })
}

impl RouterState {
    /// Server of the OpenAI API. Browsers on any page may use it, but not the paths of operators.
    fn api_server(&self) -> HttpServer {
        let options = HttpOptions { body_bytes_max: self.options.body_bytes_max, ..self.options.http.clone() };
        let hosts = AllowedHosts::new(options.allowed_hosts.clone()).only_for(&openai::OPERATOR_PATHS);
        let metrics = self.metrics.http().clone();
        HttpServer { name: "api", options, allowed_hosts: Some(hosts), metrics, render: openai::errors::refusal }
    }

    fn admin_server(&self) -> HttpServer {
        let options = self.options.admin_http.clone();
        let allowed_hosts = Some(AllowedHosts::new(options.allowed_hosts.clone()));
        let metrics = self.metrics.http().clone();
        HttpServer { name: "admin", options, allowed_hosts, metrics, render: admin::error::refusal }
    }
}

/// Location of the other port for an error message. A listener on an unspecified address (0.0.0.0
/// or ::) is reachable under several addresses, so only the port is named.
pub(crate) fn location(addr: SocketAddr) -> String {
    if addr.ip().is_unspecified() { format!("port {} of this host", addr.port()) } else { format!("http://{addr}") }
}

/// Handle of a running router. Dropping it leaves the router running without a way to stop it.
pub struct RouterHandle {
    router: Arc<RouterState>,
    addr: SocketAddr,
    admin_addr: SocketAddr,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl RouterHandle {
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn admin_addr(&self) -> SocketAddr {
        self.admin_addr
    }

    /// Waits until some model can serve requests: its tokenizer is loaded and a decode engine is
    /// admitted. Returns `false` after `timeout`. Prefill engines may still be missing.
    pub async fn wait_ready(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            if self.router.models.is_ready(&self.router.engines) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(READY_INTERVAL).await;
        }
    }

    pub fn engines(&self) -> Vec<Arc<engines::RemoteEngine>> {
        self.router.engines.list()
    }

    pub fn counters(&self) -> metrics::Counters {
        self.router.metrics.counters()
    }

    /// Closes both listeners and waits up to the option `shutdown_grace` for running answers.
    /// Answers still running after that are cut off when the runtime ends.
    pub async fn shutdown(self) {
        // Cancel before waiting: the listeners must stop accepting, or the wait might never end.
        self.stop.cancel();
        self.tasks.close();
        let grace = self.router.options.shutdown_grace;
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                ?grace,
                "router stopped while answers were running; raise the shutdown grace to let them finish"
            );
        }
        tracing::info!(addr = %self.addr, "router stopped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_names_only_the_port_of_an_unspecified_address() {
        assert_eq!(location(SocketAddr::from(([10, 0, 0, 7], 8001))), "http://10.0.0.7:8001");
        assert_eq!(location(SocketAddr::from(([0, 0, 0, 0], 8001))), "port 8001 of this host");
    }
}
