//! OpenAI-compatible router and admin API.
//!
//! The router knows from the store which engines there are and what is cached, and sends each prompt where it is cheapest:
//! a prefill engine computes and publishes the pages that the store lacks, while a decode engine follows them and
//! generates. What must always hold:
//!
//! - nothing here is needed for correct answers but the tokens themselves: what the store says are hints, and an engine
//!   that is lost costs time, never wrong text;
//! - everything is bounded: answers in progress, bodies, engines, attempts; and every wait has a deadline;
//! - a client that goes away takes all the work for it along.
//!
//! Where things are: [`options`] · [`store`] (the seam to the page store) · [`discovery`] (who is there) · [`engines`] (the
//! table, choice) and [`breaker`] · [`models`] (names, tokenizers) · [`calls`] (the engines' HTTP interface) · [`route`]
//! (prefill and decode of one prompt) · [`openai`] (the API) · [`admin`] (for people and scripts) · [`metrics`].
#![forbid(unsafe_code)]

pub mod admin;
pub mod breaker;
pub mod calls;
pub mod discovery;
pub mod engines;
pub mod metrics;
pub mod models;
pub mod openai;
pub mod options;
pub mod route;
pub mod store;

pub use options::{OptionsError, RouterOptions};

use axum::serve::ListenerExt;
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

/// Time between two looks of [`RouterHandle::wait_ready`].
const READY_INTERVAL: Duration = Duration::from_millis(10);

/// Most time that a request waits for an engine to come when there is none: it may be about to be replaced.
const ENGINE_WAIT: Duration = Duration::from_secs(1);
/// Time between two looks for it.
const ENGINE_WAIT_INTERVAL: Duration = Duration::from_millis(10);

/// Why a router did not start.
#[derive(Debug, Error)]
pub enum RouterError {
    /// A setting out of range.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// An address that cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The HTTP client could not be set up.
    #[error("HTTP client: {0}")]
    Http(#[from] reqwest::Error),
}

/// What every part of a router works with.
pub(crate) struct Shared {
    pub(crate) options: RouterOptions,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) engines: engines::EngineTable,
    pub(crate) models: models::ModelTable,
    pub(crate) calls: calls::Calls,
    pub(crate) metrics: Arc<metrics::Metrics>,
    /// One permit for each answer in progress.
    pub(crate) inflight: Arc<Semaphore>,
    pub(crate) started: Instant,
    /// Asks discovery to look at the members soon.
    pub(crate) look_soon: Notify,
}

impl Shared {
    /// Has discovery look for engines until `find` finds what it needs; `None` after a moment, or at `deadline`.
    pub(crate) async fn wait_for<T>(&self, deadline: Instant, find: impl Fn() -> Option<T>) -> Option<T> {
        let give_up = deadline.min(Instant::now() + ENGINE_WAIT);
        while Instant::now() < give_up {
            self.look_soon.notify_one();
            tokio::time::sleep_until(give_up.min(Instant::now() + ENGINE_WAIT_INTERVAL)).await;
            if let Some(found) = find() {
                return Some(found);
            }
        }
        None
    }
}

/// Starts routers.
pub struct Router;

impl Router {
    /// Attaches to the store, listens, and looks for engines. Must be called inside a tokio runtime. Returns before any
    /// engine is known: see [`RouterHandle::wait_ready`].
    pub async fn start(options: RouterOptions) -> Result<RouterHandle, RouterError> {
        options.validate()?;
        let directory = Arc::new(StoreDirectory::attach(options.store.clone()));
        Self::start_with(options, directory).await
    }

    /// As [`Router::start`], with another store than the one behind `options.store`.
    pub async fn start_with(
        options: RouterOptions,
        directory: Arc<dyn Directory>,
    ) -> Result<RouterHandle, RouterError> {
        options.validate()?;
        let (listener, addr) = listen(options.listen).await?;
        let (admin_listener, admin_addr) = listen(options.admin_listen).await?;
        let shared = Arc::new(Shared {
            directory,
            engines: Default::default(),
            models: Default::default(),
            calls: calls::Calls::new(options.connect_timeout)?,
            metrics: Default::default(),
            inflight: Arc::new(Semaphore::new(options.max_inflight)),
            started: Instant::now(),
            look_soon: Notify::new(),
            options,
        });
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(discovery::run(shared.clone(), stop.clone()));
        serve(&tasks, &stop, listener, openai::routes(shared.clone()));
        serve(&tasks, &stop, admin_listener, admin::handlers::routes(shared.clone()));
        tracing::info!(%addr, %admin_addr, "router ready");
        Ok(RouterHandle { shared, addr, admin_addr, stop, tasks })
    }
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), RouterError> {
    let failed = |source| RouterError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let addr = listener.local_addr().map_err(failed)?;
    Ok((listener, addr))
}

fn serve(tasks: &TaskTracker, stop: &CancellationToken, listener: TcpListener, routes: axum::Router) {
    // Tokens are small and each one matters: they must not wait for more to share a segment.
    let listener = listener.tap_io(|socket| {
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
    });
    let stopped = stop.clone().cancelled_owned();
    tasks.spawn(async move {
        if let Err(error) = axum::serve(listener, routes).with_graceful_shutdown(stopped).await {
            tracing::error!(%error, "server ended");
        }
    });
}

/// A running router.
pub struct RouterHandle {
    shared: Arc<Shared>,
    addr: SocketAddr,
    admin_addr: SocketAddr,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl RouterHandle {
    /// Address of the OpenAI API.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Address of the admin API.
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin_addr
    }

    /// Waits until a model can be asked for: its tokenizer is loaded and a decode engine is up. `false` if that takes
    /// longer than `timeout`. Prefill engines may still be on their way.
    pub async fn wait_ready(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            if self.shared.models.is_ready(&self.shared.engines) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(READY_INTERVAL).await;
        }
    }

    /// The engines in the table now.
    pub fn engines(&self) -> Vec<Arc<engines::Engine>> {
        self.shared.engines.list()
    }

    /// Counters.
    pub fn counters(&self) -> metrics::Counters {
        self.shared.metrics.counters()
    }

    /// Stops: no new connections; running answers may go on for the option `shutdown_grace`.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(self.shared.options.shutdown_grace, self.tasks.wait()).await.is_err() {
            tracing::warn!("stopped with answers still running");
        }
        tracing::info!(addr = %self.addr, "router stopped");
    }
}
