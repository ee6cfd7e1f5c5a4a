//! Start and shutdown of an engine.
//!
//! Invariants:
//! - The engine serves with or without a store. It registers once, and the store client reconnects
//!   on its own.
//! - Every wait during shutdown has a time limit.

use crate::api::{EngineInfo, EngineState, MemoryMax, Role};
use crate::batch::StepLimits;
use crate::forgets::ForgetBudget;
use crate::guides::Guides;
use crate::http::{self, AppState};
use crate::l3_reads::L3Reads;
use crate::metrics::Metrics;
use crate::node_store::NodeStore;
use crate::options::{EngineOptions, OptionsError, Preloaded, context_limit};
use crate::publish::Publisher;
use crate::redis_store::RedisStore;
use crate::redis_store::url::EngineStore;
use crate::request_memory::{RequestBudget, guides_bytes_max, requests_bytes_max};
use crate::scheduler::{Scheduler, SchedulerContext, SchedulerEvent, SchedulerLimits, running_places};
use crate::store::{PUT_QUEUE_BYTES_MAX, PageStore};
use crate::{memory_plan, republish, scrub};
use axum::body::Bytes;
use futures::future::BoxFuture;
use larder_client::{Client, ClientOptions, Member, Registration};
use larder_format::NamespaceDescriptor;
use larder_format::codec::DecodeError;
use larder_http::{AllowedHosts, HttpOptions, HttpServer, PeerBudget};
use larder_model::{ForwardError, LoadError, Model, Tokenizer, TokenizerError, numerics, speed};
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Capacity of the event channel beyond queued requests. The channel then absorbs load results and
/// wake-ups without blocking the senders.
const REPORTS_MAX: usize = 1024;
/// Interval at which the engine samples its connection to the store, for metrics and the log.
/// Transitions within one interval go unnoticed.
const STORE_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit of each shutdown phase: scheduler, puts, HTTP server.
const SHUTDOWN_STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of one connection attempt to a store node, and of the wait for the store at start.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum EngineError {
    #[error("invalid engine option {0} [LRD0407]")]
    Options(#[from] OptionsError),
    #[error("cannot load the model: {0}")]
    Model(#[from] LoadError),
    #[error("cannot load the tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// The page size or geometry exceeds the limits of the page format.
    #[error("the store cannot hold pages of this model: {0}; try another page_tokens")]
    Geometry(DecodeError),
    #[error("cannot listen on {address}: {source}; choose another --listen address [LRD0406]")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("cannot start the scheduler thread: {0}")]
    Thread(std::io::Error),
    /// The forward pass refused the probe that measures the rounding of the kernels.
    #[error("cannot measure the numerics of the kernels: {0}; declare them with --numerics")]
    Numerics(#[from] ForwardError),
    #[error("loading the model panicked; see the log above")]
    Loader,
    #[error("{0} [LRD0106]")]
    MemoryPlan(String),
}

pub struct Engine;

/// A running engine: the scheduler thread, the HTTP server and the registration. Dropping it stops
/// the engine without waiting; [`EngineHandle::shutdown`] waits.
pub struct EngineHandle {
    address: SocketAddr,
    app: Arc<AppState>,
    registration: Option<Registration>,
    scheduler: Option<std::thread::JoinHandle<()>>,
    server: Option<JoinHandle<()>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Engine {
    /// Starts an engine attached to the store at `options.store` and registers it there. Must run
    /// inside a tokio runtime. An unreachable store delays the start by one connection timeout; the
    /// engine then computes all pages itself until a node answers.
    // Boxed and never inlined. The compiler generates the code of an `async fn` in each crate that
    // polls it: the whole engine, in every test program.
    #[inline(never)]
    pub fn start(options: EngineOptions) -> BoxFuture<'static, Result<EngineHandle, EngineError>> {
        Box::pin(Engine::start_registered(options))
    }

    async fn start_registered(mut options: EngineOptions) -> Result<EngineHandle, EngineError> {
        options.validate()?;
        let (loaded, descriptor) = prepare(&mut options).await?;
        let name = format!("{}-{:08x}", options.role, rand::random::<u32>());
        let client_options = ClientOptions {
            name: name.clone(),
            connect_timeout: CONNECT_TIMEOUT,
            put_queue_bytes_max: PUT_QUEUE_BYTES_MAX,
            ..ClientOptions::default()
        };
        let reads_l3 = options.l3_path.is_direct(loaded.model.device());
        let (store, directory) = attach(&options, &descriptor, reads_l3, client_options).await;
        let mut handle = launch(options, loaded, descriptor, store).await?;
        let info = serde_json::to_value(handle.info()).unwrap_or_default();
        match directory {
            Some(directory) => handle.registration = Some(directory.register(Member { name, info })),
            None => tracing::info!("registered nowhere: no router finds this engine; set --register if one should"),
        }
        tracing::info!(url = %handle.info().url, role = %handle.info().role, "engine is serving requests");
        Ok(handle)
    }

    /// Starts an engine over any [`PageStore`], without registration. Tests use it.
    // Boxed and never inlined: see `Engine::start`.
    #[inline(never)]
    pub fn start_with_store(
        mut options: EngineOptions,
        store: Arc<dyn PageStore>,
    ) -> BoxFuture<'static, Result<EngineHandle, EngineError>> {
        Box::pin(async move {
            options.validate()?;
            let (loaded, descriptor) = prepare(&mut options).await?;
            launch(options, loaded, descriptor, store).await
        })
    }
}

/// Attaches to the store of an engine, and to the nodes at which it registers itself. Waits for the
/// store, so that the first requests find stored pages. An unreachable one costs the timeout once.
async fn attach(
    options: &EngineOptions,
    descriptor: &NamespaceDescriptor,
    reads_l3: bool,
    client_options: ClientOptions,
) -> (Arc<dyn PageStore>, Option<Client>) {
    match options.store.clone() {
        EngineStore::Larder(url) => {
            let client = Client::attach(url, Some(descriptor.clone()), client_options);
            client.ready(CONNECT_TIMEOUT).await;
            let l3_reads = reads_l3.then(|| L3Reads::new(descriptor.geometry.page_bytes()));
            (Arc::new(NodeStore::new(client.clone(), l3_reads)), Some(client))
        }
        EngineStore::Redis(url) => {
            let directory = options.register.clone().map(|nodes| Client::attach(nodes, None, client_options));
            let store = RedisStore::attach(url, descriptor);
            store.ready(CONNECT_TIMEOUT).await;
            (Arc::new(store), directory)
        }
    }
}

/// Loads the model and describes its namespace. Measures the numerics if `options` declare none,
/// and stores them there.
async fn prepare(options: &mut EngineOptions) -> Result<(Preloaded, NamespaceDescriptor), EngineError> {
    let loaded = match options.preloaded.clone() {
        Some(loaded) => loaded,
        None => {
            let folder = options.model_dir.clone();
            let load_options = options.load;
            // Loading reads gigabytes and would block the event loop.
            let load = move || -> Result<Preloaded, EngineError> {
                let model = Arc::new(Model::load_with(&folder, &load_options, &|_, _| ())?);
                let tokenizer = Arc::new(Tokenizer::load(&folder)?);
                Ok(Preloaded { model, tokenizer })
            };
            tokio::task::spawn_blocking(load).await.map_err(|_| EngineError::Loader)??
        }
    };
    let geometry = loaded.model.geometry(options.page_tokens);
    geometry.validate().map_err(EngineError::Geometry)?;
    let numerics = numerics_of(options, &loaded.model).await?;
    let descriptor = NamespaceDescriptor {
        model: options.name(),
        weights: numerics::bind(loaded.model.fingerprint(), &loaded.model.kernels(), &numerics),
        geometry,
        tenant: options.tenant.clone(),
    };
    options.numerics = Some(numerics);
    Ok((loaded, descriptor))
}

async fn numerics_of(options: &EngineOptions, model: &Arc<Model>) -> Result<String, EngineError> {
    if let Some(declared) = &options.numerics {
        return Ok(declared.clone());
    }
    let (probed, page_tokens) = (model.clone(), options.page_tokens);
    // A forward pass takes up to seconds.
    let measured = tokio::task::spawn_blocking(move || numerics::measure(&probed, page_tokens));
    let measured = measured.await.map_err(|_| EngineError::Loader)??;
    tracing::info!(
        numerics = %measured,
        activations = if model.device().is_some() { "those of the device" } else { model.activations() },
        "measured the rounding of the kernels; only engines with the same numerics share pages"
    );
    Ok(measured)
}

/// Number of pages of L1. A model on a device limits it, because the device holds a copy of each
/// page that a step uses. The largest step must fit beside the pages.
async fn reserve_pages(options: &EngineOptions, model: &Arc<Model>) -> Result<usize, EngineError> {
    let page_tokens = options.page_tokens;
    let page_bytes = model.geometry(page_tokens).page_bytes();
    let wanted = options.l1_pages(page_bytes)?;
    let Some(device) = model.device() else {
        tracing::info!("the CPU computes the model");
        return Ok(wanted);
    };
    tracing::info!(kind = device.kind, ordinal = device.ordinal, name = %device.name, "a device computes the model");
    let on_device = model.clone();
    let context = context_limit(model, wanted, page_tokens) as usize;
    let (rows, logit_rows) = memory_plan::step_rows_max(options, context);
    // A driver may take a second for gigabytes.
    let reserved = tokio::task::spawn_blocking(move || -> Result<usize, LoadError> {
        let pages = on_device.reserve_pages(page_tokens, wanted)?;
        on_device.check_pass(page_tokens, rows, logit_rows)?;
        Ok(pages)
    });
    let pages = reserved.await.map_err(|_| EngineError::Loader)??;
    if pages < wanted {
        tracing::warn!(pages, wanted, "L1 is smaller than asked for: the memory of the device holds no more pages");
    }
    // The requirement of two pages also holds for what the device has room for.
    let l1_bytes = pages.saturating_mul(page_bytes);
    Ok(EngineOptions { l1_bytes, ..options.clone() }.l1_pages(page_bytes)?)
}

/// Measures the speed of the forward pass. 0 if it cannot be measured: decode engines then wait for
/// a prefill up to the limits of the options.
async fn speed_of(model: &Arc<Model>, page_tokens: u32) -> f64 {
    let model = model.clone();
    let measured = tokio::task::spawn_blocking(move || speed::tokens_per_second(&model, page_tokens).unwrap_or(0.0));
    measured.await.unwrap_or(0.0)
}

async fn launch(
    options: EngineOptions,
    loaded: Preloaded,
    descriptor: NamespaceDescriptor,
    store: Arc<dyn PageStore>,
) -> Result<EngineHandle, EngineError> {
    let geometry = descriptor.geometry;
    let capacity_pages = reserve_pages(&options, &loaded.model).await?;
    let plan = memory_plan::of(&options, &loaded.model);
    if let Some(warning) = plan.check(larder_memory::machine::total()).map_err(EngineError::MemoryPlan)? {
        tracing::warn!("{warning} [LRD0106]");
    }
    tracing::info!(bytes = plan.total(), "memory of this engine, at most: {plan}");
    let listen_error = |source| EngineError::Listen { address: options.listen, source };
    // Bind before building the pool: a taken port should fail fast.
    let (listener, address) = larder_http::listen(options.listen).map_err(listen_error)?;
    let max_context = context_limit(&loaded.model, capacity_pages, options.page_tokens);
    let requests_bytes = requests_bytes_max(options.max_batch, max_context as usize, options.page_tokens as usize);
    let memory = RequestBudget::new(requests_bytes, guides_bytes_max(options.max_batch), options.page_tokens);
    let queue = PeerBudget::new(options.queue_max);
    let requests_max = queue.units_max_of_peer().saturating_add(running_places(options.max_batch).units_max_of_peer());
    let info = EngineInfo {
        role: options.role,
        url: options.advertise.clone().unwrap_or_else(|| format!("http://{address}")),
        model: options.name(),
        descriptor,
        numerics: options.numerics.clone().unwrap_or_default(),
        max_context,
        page_tokens: options.page_tokens,
        request_bytes_max: memory.bytes_max_of_peer(),
        requests_max: u32::try_from(requests_max).unwrap_or(u32::MAX),
    };
    let metrics = Arc::new(Metrics::new(options.role));
    metrics.show_memory_max(&plan);
    let state = Arc::new(Mutex::new(EngineState::default()));
    let stop = CancellationToken::new();
    let tasks = TaskTracker::new();
    // Every queued request and every load result fits, so senders rarely wait.
    let (sender, events) = flume::bounded(options.queue_max + REPORTS_MAX);
    let (unpublished, unpublished_pages) = flume::bounded(REPORTS_MAX);
    let publisher =
        Publisher::new(store.clone(), metrics.clone(), tasks.clone(), &geometry, unpublished, options.publish_timeout);
    let commits = publisher.commits().clone();
    let scheduler = Scheduler::new(SchedulerContext {
        model: loaded.model.clone(),
        pool: loaded.model.page_pool(options.page_tokens, capacity_pages),
        store: store.clone(),
        publisher,
        metrics: metrics.clone(),
        limits: limits(&options),
        tokens_per_second: speed_of(&loaded.model, options.page_tokens).await,
        runtime: Handle::current(),
        tasks: tasks.clone(),
        stop: stop.clone(),
        state: state.clone(),
        events,
        sender: sender.clone(),
    });
    let trials = options.constraint_trials.clone();
    let eos_tokens = eos_tokens(&loaded);
    let vocab = loaded.model.config().vocab;
    let app = Arc::new(AppState {
        vocab,
        request_timeout: options.request_timeout,
        guides: Guides::new(loaded.tokenizer.clone(), vocab, eos_tokens.clone(), memory.guides(), trials),
        eos_tokens,
        tokenizer: loaded.tokenizer,
        files: model_files(&options.model_dir),
        info,
        metrics: metrics.clone(),
        state,
        store: store.clone(),
        commits,
        queue,
        constrained: PeerBudget::new(options.queue_max),
        memory,
        forgets: ForgetBudget::new(max_context as usize, options.page_tokens as usize),
        memory_max: MemoryMax::from(&plan),
        sender: sender.clone(),
        next_id: AtomicU64::new(1),
        stop: stop.clone(),
    });
    let thread = std::thread::Builder::new()
        .name(format!("larder-{}", options.role))
        .spawn(move || scheduler.run())
        .map_err(EngineError::Thread)?;
    // Not in the task tracker: it ends with `stop`, and shutdown need not wait for it.
    tokio::spawn(metrics.event_loop.clone().watch(stop.clone()));
    tokio::spawn(watch_store(store, metrics.clone(), stop.clone()));
    let waiting_max = republish::waiting_max(capacity_pages);
    tokio::spawn(republish::run(unpublished_pages, waiting_max, sender.clone(), metrics.clone(), stop.clone()));
    tokio::spawn(scrub::run(sender, geometry.page_bytes(), metrics, stop.clone()));
    let server = http_server(options.http, &app);
    let server = tokio::spawn(server.serve(listener, http::router(app.clone()), stop.clone(), SHUTDOWN_STEP_TIMEOUT));
    Ok(EngineHandle { address, app, registration: None, scheduler: Some(thread), server: Some(server), stop, tasks })
}

fn limits(options: &EngineOptions) -> SchedulerLimits {
    SchedulerLimits {
        step: StepLimits {
            page_tokens: options.page_tokens as usize,
            chunk_tokens: options.chunk_tokens,
            max_batch: options.max_batch,
        },
        follow_grace: options.follow_grace,
        follow_stall_timeout: options.follow_stall_timeout,
        follow_start_timeout: options.follow_start_timeout,
        queue_timeout: options.queue_timeout,
        load_timeout: options.load_timeout,
    }
}

/// End-of-sequence tokens from both the model configuration and the tokenizer, sorted.
fn eos_tokens(loaded: &Preloaded) -> Arc<[u32]> {
    let mut tokens = loaded.model.config().eos_token_ids.clone();
    tokens.extend(loaded.tokenizer.eos_ids());
    tokens.sort_unstable();
    tokens.dedup();
    tokens.into()
}

/// The tokenizer's files, which routers download. Skips files that the model folder lacks.
fn model_files(folder: &Path) -> BTreeMap<&'static str, Bytes> {
    Tokenizer::FILES
        .iter()
        .filter_map(|&name| Some((name, Bytes::from(std::fs::read(folder.join(name)).ok()?))))
        .collect()
}

/// Server of this engine. Its port trusts every program, but no web page.
fn http_server(options: HttpOptions, app: &AppState) -> HttpServer {
    // Routers use the advertised name.
    let allowed_hosts = AllowedHosts::new(options.allowed_hosts.clone()).with_url(&app.info.url);
    HttpServer {
        name: "engine",
        options,
        allowed_hosts: Some(allowed_hosts),
        metrics: app.metrics.http.clone(),
        render: http::refusal,
    }
}

/// Watches the connection to the store until `stop` is cancelled. Logs and counts each transition
/// once, not each sample.
async fn watch_store(store: Arc<dyn PageStore>, metrics: Arc<Metrics>, stop: CancellationToken) {
    let mut was_up = None;
    let mut damaged = 0;
    loop {
        let nodes = store.nodes_connected();
        let damaged_by_now = store.pages_damaged();
        metrics.store_damaged_pages.inc_by(damaged_by_now - damaged);
        damaged = damaged_by_now;
        metrics.store_nodes.set(nodes as i64);
        let up = nodes > 0;
        if was_up != Some(up) {
            match (was_up, up) {
                (_, true) => tracing::info!(nodes, "connected to the store"),
                (Some(_), false) => tracing::warn!(
                    "lost the connection to every store node; computing all pages locally until one is back"
                ),
                (None, false) => {
                    tracing::info!("no store node is connected yet; computing all pages locally until one is")
                }
            }
            // The first sample is no transition.
            if was_up.is_some() {
                metrics.store_connection_changes.inc();
            }
            was_up = Some(up);
        }
        tokio::select! {
            () = tokio::time::sleep(STORE_POLL_INTERVAL) => {}
            () = stop.cancelled() => return,
        }
    }
}

impl EngineHandle {
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    pub fn info(&self) -> &EngineInfo {
        &self.app.info
    }

    pub fn role(&self) -> Role {
        self.app.info.role
    }

    pub fn state(&self) -> EngineState {
        self.app.state()
    }

    /// Stops the engine in order: withdraws its registration, refuses new requests, fails running
    /// ones, and waits for puts in flight. Takes at most three times the limit of one phase.
    pub async fn shutdown(mut self) {
        // Withdraw first, so that routers stop choosing this engine while it drains.
        self.begin_shutdown();
        if let Some(thread) = self.scheduler.take() {
            // `JoinHandle::join` blocks, so it must not run on the event loop.
            let join = tokio::task::spawn_blocking(move || thread.join().is_ok());
            if !matches!(tokio::time::timeout(SHUTDOWN_STEP_TIMEOUT, join).await, Ok(Ok(true))) {
                tracing::warn!(timeout = ?SHUTDOWN_STEP_TIMEOUT, "the scheduler thread did not stop cleanly in time");
            }
        }
        // `wait` returns only after the tracker is closed.
        self.tasks.close();
        if tokio::time::timeout(SHUTDOWN_STEP_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::warn!(timeout = ?SHUTDOWN_STEP_TIMEOUT, "abandoned puts that were still in flight at shutdown; their pages are lost");
        }
        if let Some(mut server) = self.server.take()
            && tokio::time::timeout(SHUTDOWN_STEP_TIMEOUT, &mut server).await.is_err()
        {
            // Connections that outlive the limit belong to clients that do not read.
            server.abort();
        }
    }

    fn begin_shutdown(&mut self) {
        // Dropping the registration withdraws it from the store.
        self.registration = None;
        self.stop.cancel();
        // A full channel means that the thread is awake and will see `stop`.
        let _ = self.app.sender.try_send(SchedulerEvent::Wake);
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.begin_shutdown();
        // `Drop` cannot wait, so open connections are cut.
        if let Some(server) = self.server.take() {
            server.abort();
        }
    }
}
