//! Starting and ending an engine.

use crate::api::{EngineInfo, EngineState, Role};
use crate::batch::StepLimits;
use crate::http::{self, App};
use crate::metrics::Metrics;
use crate::options::{EngineOptions, OptionsError, Preloaded};
use crate::publish::Publisher;
use crate::scheduler::{Event, Limits, Parts, Scheduler};
use crate::store::PageStore;
use axum::body::Bytes;
use axum::serve::ListenerExt;
use larder_client::{Client, ClientOptions, Member, Registration};
use larder_format::NamespaceDescriptor;
use larder_format::codec::DecodeError;
use larder_model::{KvPool, LoadError, Model, Tokenizer, TokenizerError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Reports that may wait for the scheduler beside the requests in the queue.
const EVENTS_MAX: usize = 1024;
/// How often the engine looks whether the store is there.
const STORE_WATCH: Duration = Duration::from_millis(500);
/// Most time for each part of an orderly end.
const SHUTDOWN_STEP: Duration = Duration::from_secs(5);
/// Time for one connection attempt to a store node.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Payload bytes of puts that may wait in the client.
const PUT_QUEUE_BYTES_MAX: usize = 256 << 20;

/// Why an engine cannot start.
#[derive(Debug, Error)]
pub enum EngineError {
    /// A setting is out of range.
    #[error("engine option {0}")]
    Options(#[from] OptionsError),
    /// The model cannot be loaded.
    #[error("model: {0}")]
    Model(#[from] LoadError),
    /// The tokenizer cannot be loaded.
    #[error("tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// A page of this model and size cannot be stored.
    #[error("pages of this model cannot be stored: {0}")]
    Geometry(DecodeError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The scheduler's thread could not be started.
    #[error("cannot start the scheduler: {0}")]
    Thread(std::io::Error),
    /// Loading the model panicked.
    #[error("loading the model failed unexpectedly")]
    Loader,
}

/// An engine: a model, its L1, and an HTTP server.
pub struct Engine;

/// A running engine. Dropping it ends the engine without waiting; [`EngineHandle::shutdown`] waits.
pub struct EngineHandle {
    address: SocketAddr,
    app: Arc<App>,
    registration: Option<Registration>,
    scheduler: Option<std::thread::JoinHandle<()>>,
    server: Option<JoinHandle<()>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Engine {
    /// Starts an engine attached to the store at `options.store`, inside a tokio runtime, and registers it there. A store
    /// that is away does not matter: the engine computes without it until it comes.
    pub async fn start(options: EngineOptions) -> Result<EngineHandle, EngineError> {
        options.validate()?;
        let (loaded, descriptor) = prepare(&options).await?;
        let name = format!("{}-{:08x}", options.role, rand::random::<u32>());
        let client_options = ClientOptions {
            name: name.clone(),
            connect_timeout: CONNECT_TIMEOUT,
            put_queue_bytes_max: PUT_QUEUE_BYTES_MAX,
            ..ClientOptions::default()
        };
        let client = Client::attach(options.store.clone(), Some(descriptor.clone()), client_options);
        // So that the first requests already find what the store has; a store that is away costs this once.
        client.ready(CONNECT_TIMEOUT).await;
        let mut handle = launch(options, loaded, descriptor, Arc::new(client.clone())).await?;
        let info = serde_json::to_value(handle.info()).unwrap_or_default();
        handle.registration = Some(client.register(Member { name, info }));
        tracing::info!(url = %handle.info().url, role = %handle.info().role, "engine serves");
        Ok(handle)
    }

    /// Starts an engine over any store, without registering it.
    pub async fn start_with_store(
        options: EngineOptions,
        store: Arc<dyn PageStore>,
    ) -> Result<EngineHandle, EngineError> {
        options.validate()?;
        let (loaded, descriptor) = prepare(&options).await?;
        launch(options, loaded, descriptor, store).await
    }
}

/// Loads what is not loaded yet, and says whose pages the engine reads and writes.
async fn prepare(options: &EngineOptions) -> Result<(Preloaded, NamespaceDescriptor), EngineError> {
    let loaded = match options.preloaded.clone() {
        Some(loaded) => loaded,
        None => {
            let folder = options.model_dir.clone();
            let load = move || -> Result<Preloaded, EngineError> {
                let model = Arc::new(Model::load(&folder)?);
                let tokenizer = Arc::new(Tokenizer::load(&folder)?);
                Ok(Preloaded { model, tokenizer })
            };
            tokio::task::spawn_blocking(load).await.map_err(|_| EngineError::Loader)??
        }
    };
    let descriptor = NamespaceDescriptor {
        model: options.name(),
        weights: loaded.model.fingerprint(),
        geometry: loaded.model.geometry(options.page_tokens),
        tenant: options.tenant.clone(),
    };
    descriptor.geometry.validate().map_err(EngineError::Geometry)?;
    Ok((loaded, descriptor))
}

async fn launch(
    options: EngineOptions,
    loaded: Preloaded,
    descriptor: NamespaceDescriptor,
    store: Arc<dyn PageStore>,
) -> Result<EngineHandle, EngineError> {
    let geometry = descriptor.geometry;
    let capacity_pages = options.l1_pages(geometry.page_bytes())?;
    let listen_error = |source| EngineError::Listen { address: options.listen, source };
    let listener = TcpListener::bind(options.listen).await.map_err(listen_error)?;
    let address = listener.local_addr().map_err(listen_error)?;
    let info = EngineInfo {
        role: options.role,
        url: options.advertise.clone().unwrap_or_else(|| format!("http://{address}")),
        model: options.name(),
        descriptor,
        max_context: context_limit(&loaded.model, capacity_pages, options.page_tokens),
        page_tokens: options.page_tokens,
    };
    let metrics = Arc::new(Metrics::new(options.role));
    let state = Arc::new(Mutex::new(EngineState::default()));
    let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
    let (sender, events) = flume::bounded(options.queue_max + EVENTS_MAX);
    let scheduler = Scheduler::new(Parts {
        model: loaded.model.clone(),
        pool: KvPool::new(geometry, capacity_pages),
        store: store.clone(),
        publisher: Publisher::new(store.clone(), metrics.clone(), tasks.clone(), &geometry, options.publish_limit),
        metrics: metrics.clone(),
        limits: limits(&options),
        runtime: Handle::current(),
        tasks: tasks.clone(),
        stop: stop.clone(),
        state: state.clone(),
        events,
        sender: sender.clone(),
    });
    let app = Arc::new(App {
        vocab: loaded.model.config().vocab,
        request_limit: options.request_limit,
        ends: end_tokens(&loaded),
        tokenizer: loaded.tokenizer,
        files: model_files(&options.model_dir),
        info,
        metrics: metrics.clone(),
        state,
        store: store.clone(),
        queue: Arc::new(Semaphore::new(options.queue_max.min(Semaphore::MAX_PERMITS))),
        sender,
        next_id: AtomicU64::new(1),
        stop: stop.clone(),
    });
    let thread = std::thread::Builder::new()
        .name(format!("larder-{}", options.role))
        .spawn(move || scheduler.run())
        .map_err(EngineError::Thread)?;
    tokio::spawn(watch_store(store, metrics, stop.clone()));
    let server = tokio::spawn(serve(listener, app.clone(), stop.clone()));
    Ok(EngineHandle { address, app, registration: None, scheduler: Some(thread), server: Some(server), stop, tasks })
}

/// Tokens of prompt and answer that the model allows and the L1 can hold.
fn context_limit(model: &Model, capacity_pages: usize, page_tokens: u32) -> u32 {
    let held = capacity_pages.saturating_mul(page_tokens as usize);
    u32::try_from(model.config().max_context.min(held)).unwrap_or(u32::MAX)
}

fn limits(options: &EngineOptions) -> Limits {
    Limits {
        step: StepLimits {
            page_tokens: options.page_tokens as usize,
            chunk_tokens: options.chunk_tokens,
            max_batch: options.max_batch,
        },
        follow_grace: options.follow_grace,
        follow_limit: options.follow_limit,
        queue_limit: options.queue_limit,
        load_limit: options.load_limit,
    }
}

/// The tokens at which an answer ends: what the configuration and the tokenizer name.
fn end_tokens(loaded: &Preloaded) -> Arc<[u32]> {
    let mut ends = loaded.model.config().eos_token_ids.clone();
    ends.extend(loaded.tokenizer.eos_ids());
    ends.sort_unstable();
    ends.dedup();
    ends.into()
}

/// The tokenizer's files, for routers that do not have them; those absent are left out.
fn model_files(folder: &Path) -> BTreeMap<&'static str, Bytes> {
    Tokenizer::FILES
        .iter()
        .filter_map(|&name| Some((name, Bytes::from(std::fs::read(folder.join(name)).ok()?))))
        .collect()
}

async fn serve(listener: TcpListener, app: Arc<App>, stop: CancellationToken) {
    // Tokens are small and must not wait for more bytes.
    let listener = listener.tap_io(|socket| {
        let _ = socket.set_nodelay(true);
    });
    let server = axum::serve(listener, http::router(app)).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = server.await {
        tracing::error!(%error, "the HTTP server failed");
    }
}

/// Tells when the store goes away and when it comes back, once each time.
async fn watch_store(store: Arc<dyn PageStore>, metrics: Arc<Metrics>, stop: CancellationToken) {
    let mut was_up = None;
    loop {
        let nodes = store.nodes_connected();
        metrics.store_nodes.set(nodes as i64);
        let up = nodes > 0;
        if was_up != Some(up) {
            match (was_up, up) {
                (_, true) => tracing::info!("the store is connected"),
                (Some(_), false) => tracing::warn!("the store is away; computing without it"),
                (None, false) => tracing::info!("the store is not connected yet; computing without it"),
            }
            if was_up.is_some() {
                metrics.store_transitions.inc();
            }
            was_up = Some(up);
        }
        tokio::select! {
            () = tokio::time::sleep(STORE_WATCH) => {}
            () = stop.cancelled() => return,
        }
    }
}

impl EngineHandle {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// What it says of itself.
    pub fn info(&self) -> &EngineInfo {
        &self.app.info
    }

    /// Prefill or decode.
    pub fn role(&self) -> Role {
        self.app.info.role
    }

    /// How it is doing.
    pub fn state(&self) -> EngineState {
        self.app.state()
    }

    /// Ends the engine in order: withdraws it from the store, refuses new requests, ends the running ones with an error,
    /// waits for puts under way. Takes no more than a few seconds.
    pub async fn shutdown(mut self) {
        self.begin_end();
        if let Some(thread) = self.scheduler.take() {
            let join = tokio::task::spawn_blocking(move || thread.join().is_ok());
            if !matches!(tokio::time::timeout(SHUTDOWN_STEP, join).await, Ok(Ok(true))) {
                tracing::warn!("the scheduler did not end in order");
            }
        }
        self.tasks.close();
        if tokio::time::timeout(SHUTDOWN_STEP, self.tasks.wait()).await.is_err() {
            tracing::warn!("puts were still under way at the end");
        }
        if let Some(mut server) = self.server.take()
            && tokio::time::timeout(SHUTDOWN_STEP, &mut server).await.is_err()
        {
            server.abort();
        }
    }

    fn begin_end(&mut self) {
        self.registration = None;
        self.stop.cancel();
        let _ = self.app.sender.try_send(Event::Nudge);
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.begin_end();
        if let Some(server) = self.server.take() {
            server.abort();
        }
    }
}
