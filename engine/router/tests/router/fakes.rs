//! Fake store and engines whose behaviour a test sets at run time.

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router as Routes};
use futures::StreamExt;
use futures::future::BoxFuture;
use larder_client::{Explanation, Forgotten, Hint, Member, MissReason, NodeView, PagePin, PinKind, Pinned, Tier};
use larder_format::{KvDtype, NamespaceDescriptor, NamespaceFields, PageGeometry, PageKey, page_keys};
use larder_router::store::{Directory, PageIndex};
use larder_router::{Router, RouterHandle, RouterOptions};
use larder_runtime::lock::Mutex;
use larder_worker::api::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub const PAGE_TOKENS: u32 = 4;
pub const CONTEXT: u32 = 200;
pub const MODEL: &str = "fake";
/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// In-memory store that holds members and page keys, but no page data. Tests change its content to
/// simulate evictions and lost nodes.
#[derive(Default)]
pub struct FakeStore {
    pub members: Mutex<Vec<Member>>,
    pub held: Mutex<BTreeMap<PageKey, Tier>>,
    pub is_down: AtomicBool,
    /// Number of requests for the members. The router sends one with each refresh of its engines.
    pub refreshes: AtomicUsize,
}

impl FakeStore {
    fn is_up(&self) -> bool {
        !self.is_down.load(Ordering::SeqCst)
    }

    fn hold(&self, keys: &[PageKey]) {
        self.held.lock().extend(keys.iter().map(|key| (*key, Tier::L2)));
    }
}

pub struct FakeDirectory(pub Arc<FakeStore>);

impl Directory for FakeDirectory {
    fn members(&self, _: Instant) -> BoxFuture<'_, Option<Vec<Member>>> {
        self.0.refreshes.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { self.0.is_up().then(|| self.0.members.lock().clone()) })
    }

    fn status(&self, _: Instant) -> BoxFuture<'_, Vec<NodeView>> {
        let node = NodeView {
            address: "fake:1".into(),
            up: self.0.is_up(),
            node_id: None,
            epoch: Some(1),
            protocol: None,
            problem: None,
            no_shared_memory: None,
            no_rdma: None,
            transport: None,
            status: None,
        };
        Box::pin(async { vec![node] })
    }

    fn pages(&self, _: &NamespaceDescriptor) -> Arc<dyn PageIndex> {
        Arc::new(FakeDirectory(self.0.clone()))
    }
}

impl PageIndex for FakeDirectory {
    fn up(&self) -> bool {
        self.0.is_up()
    }

    fn lookup(&self, keys: Arc<[PageKey]>, _: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let held = self.0.held.lock();
            keys.iter().take_while(|key| held.contains_key(key)).count()
        })
    }

    fn locate(&self, keys: Arc<[PageKey]>, _: Instant) -> BoxFuture<'_, Vec<Option<Tier>>> {
        Box::pin(async move {
            let held = self.0.held.lock();
            keys.iter().map(|key| held.get(key).copied()).collect()
        })
    }

    /// The first page of a prefix has a hard pin, if the store holds it.
    fn pins(&self, keys: Arc<[PageKey]>, _: Instant) -> BoxFuture<'_, Vec<Option<PagePin>>> {
        Box::pin(async move {
            let held = self.0.held.lock();
            let pin = PagePin { kind: PinKind::Hard, remaining_ms: 59_001 };
            keys.iter().take(1).map(|key| held.contains_key(key).then_some(pin)).collect()
        })
    }

    /// Each page has left the store, the first of them at a known time.
    fn explain(&self, keys: Arc<[PageKey]>, _: Instant) -> BoxFuture<'_, Vec<Option<Explanation>>> {
        Box::pin(async move {
            let evicted = |at_unix_ms| Explanation {
                reason: MissReason::Evicted,
                at_unix_ms,
                differing: NamespaceFields::default(),
            };
            (0..keys.len()).map(|index| Some(evicted(if index == 0 { 77 } else { 0 }))).collect()
        })
    }

    fn hint(&self, keys: Arc<[PageKey]>, _: Hint, _: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let held = self.0.held.lock();
            keys.iter().filter(|key| held.get(key) == Some(&Tier::L2)).count()
        })
    }

    fn pin(&self, keys: Arc<[PageKey]>, kind: PinKind, ttl: Duration, _: Instant) -> BoxFuture<'_, Pinned> {
        Box::pin(async move {
            let held = self.0.held.lock();
            let refused = (kind == PinKind::Hard && keys.len() > 4).then(|| format!("no room for {ttl:?}"));
            let pages = keys.iter().filter(|key| held.contains_key(key)).count();
            Pinned { pages, refused, complete: self.0.is_up() }
        })
    }

    fn warm(&self, keys: Arc<[PageKey]>, _: Instant) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let mut held = self.0.held.lock();
            let present: Vec<_> = keys.iter().filter(|key| held.contains_key(key)).collect();
            present.into_iter().map(|key| held.insert(*key, Tier::L2)).count()
        })
    }

    fn forget(&self, keys: Arc<[PageKey]>, _: Instant) -> BoxFuture<'_, Forgotten> {
        Box::pin(async move {
            let mut held = self.0.held.lock();
            Forgotten { pages: keys.iter().filter(|key| held.remove(key).is_some()).count(), complete: true }
        })
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Behaviour {
    Serve,
    Refuse(ErrorCode),
    DieAtOnce,
    DieAfter(usize),
    HangAfter(usize),
    LeaveAfter(usize),
    /// Ends the answer after some tokens as if it were complete, without its last event.
    TruncateAfter(usize),
    Flood,
    /// Ends the answer after some tokens with an error whose code only newer engines know.
    NewErrorAfter(usize),
    /// Generates these texts, one per token.
    Write(Vec<String>),
    /// Generates as many tokens as the request allows, without waiting for a reader.
    Fill,
    LosePages,
    /// Answers that no engine of Larder sends.
    Wrong(WrongAnswer),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WrongAnswer {
    /// An event that is no JSON, after some tokens.
    NoJson,
    /// JSON that is no event.
    NoEvent,
    /// A line that never ends.
    EndlessLine,
    /// Another number of tokens of the prompt.
    OtherPrompt,
    /// A token that the model does not have.
    UnknownToken,
    /// An end that counts another number of tokens.
    WrongTotal,
    /// An end by length, far below the limit.
    EarlyLength,
    SecondStart,
    /// A prefill of more pages than the prompt has.
    TooManyPages,
}

/// HTTP server with an engine's interface. It records the requests it receives.
pub struct FakeEngine {
    pub info: EngineInfo,
    pub behaviour: Mutex<Behaviour>,
    pub is_gone: AtomicBool,
    /// Number of times that the router asked this engine for its identity.
    pub identity_checks: AtomicUsize,
    pub prefills: Mutex<Vec<PrefillRequest>>,
    pub decodes: Mutex<Vec<DecodeRequest>>,
    /// Requests to forget, each with the number of pages that the store held at that time.
    pub forgets: Mutex<Vec<(ForgetRequest, usize)>>,
    pub running: Arc<AtomicUsize>,
    template: String,
    padding: usize,
    /// Requests for files of the model.
    pub files_sent: AtomicUsize,
    store: Arc<FakeStore>,
}

struct InFlight(Arc<AtomicUsize>);

impl InFlight {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

pub fn descriptor() -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 2,
        kv_heads: 1,
        head_dim: 4,
        page_tokens: PAGE_TOKENS,
        layers_per_part: 1,
        head_groups: 1,
    };
    NamespaceDescriptor { model: MODEL.into(), weights: [3; 32], geometry, tenant: "default".into() }
}

/// Number of token ids: `[UNK]` and the words `w0` to `w499`.
pub const VOCAB_SIZE: u32 = 501;

/// Tokenizer in which each of the words `w0` to `w499` is one token.
fn tokenizer_json() -> Value {
    let mut vocab = json!({"[UNK]": 0});
    for word in 0..500 {
        vocab[format!("w{word}")] = json!(word + 1);
    }
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}})
}

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}";

impl FakeEngine {
    pub async fn start(store: &Arc<FakeStore>, name: &str, role: Role) -> Arc<FakeEngine> {
        Self::start_with_context(store, name, role, CONTEXT).await
    }

    pub async fn start_with_context(
        store: &Arc<FakeStore>,
        name: &str,
        role: Role,
        max_context: u32,
    ) -> Arc<FakeEngine> {
        Self::start_model(store, name, role, max_context, MODEL, TEMPLATE).await
    }

    pub async fn start_model(
        store: &Arc<FakeStore>,
        name: &str,
        role: Role,
        max_context: u32,
        model: &str,
        template: &str,
    ) -> Arc<FakeEngine> {
        Self::start_padded(store, name, role, max_context, (model, template), 0).await
    }

    /// Like [`FakeEngine::start_model`], with blanks at the end of `tokenizer_config.json` and
    /// `generation_config.json`.
    pub async fn start_padded(
        store: &Arc<FakeStore>,
        name: &str,
        role: Role,
        max_context: u32,
        of: (&str, &str),
        padding: usize,
    ) -> Arc<FakeEngine> {
        let host = "127.0.0.1";
        Self::start_described(store, (name, host), (role, max_context), of, padding, descriptor().weights).await
    }

    /// Decode engine with padded files, under a name of this machine.
    pub async fn start_under_host(store: &Arc<FakeStore>, host: &str, model: &str, padding: usize) -> Arc<FakeEngine> {
        let (role, of) = ((Role::Decode, CONTEXT), (model, TEMPLATE));
        Self::start_described(store, (model, host), role, of, padding, descriptor().weights).await
    }

    /// Decode engine of a model with the name of the usual one, and other weights.
    pub async fn start_other_weights(store: &Arc<FakeStore>, name: &str) -> Arc<FakeEngine> {
        let (name, role, of) = ((name, "127.0.0.1"), (Role::Decode, CONTEXT), (MODEL, TEMPLATE));
        Self::start_described(store, name, role, of, 0, [9; 32]).await
    }

    async fn start_described(
        store: &Arc<FakeStore>,
        (name, host): (&str, &str),
        (role, max_context): (Role, u32),
        (model, template): (&str, &str),
        padding: usize,
        weights: [u8; 32],
    ) -> Arc<FakeEngine> {
        let info = EngineInfo {
            role,
            url: format!("http://{host}"),
            model: model.into(),
            descriptor: NamespaceDescriptor { model: model.into(), weights, ..descriptor() },
            numerics: String::new(),
            max_context,
            page_tokens: PAGE_TOKENS,
            request_bytes_max: 0,
            requests_max: 0,
        };
        Self::start_with_info(store, name, info, template, padding).await
    }

    /// Decode engine that takes `requests_max` requests of `request_bytes_max` bytes together from
    /// the router.
    pub async fn start_with_room(
        store: &Arc<FakeStore>,
        name: &str,
        requests_max: u32,
        request_bytes_max: u64,
    ) -> Arc<FakeEngine> {
        let info = EngineInfo {
            role: Role::Decode,
            url: "http://127.0.0.1".into(),
            model: MODEL.into(),
            descriptor: descriptor(),
            numerics: String::new(),
            max_context: CONTEXT,
            page_tokens: PAGE_TOKENS,
            request_bytes_max,
            requests_max,
        };
        Self::start_with_info(store, name, info, TEMPLATE, 0).await
    }

    /// Starts an engine of this description. Its URL lacks the port.
    async fn start_with_info(
        store: &Arc<FakeStore>,
        name: &str,
        mut info: EngineInfo,
        template: &str,
        padding: usize,
    ) -> Arc<FakeEngine> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        info.url = format!("{}:{}", info.url, listener.local_addr().unwrap().port());
        let engine = Arc::new(FakeEngine {
            info: info.clone(),
            behaviour: Mutex::new(Behaviour::Serve),
            is_gone: AtomicBool::new(false),
            identity_checks: AtomicUsize::new(0),
            prefills: Mutex::default(),
            decodes: Mutex::default(),
            forgets: Mutex::default(),
            running: Arc::default(),
            template: template.into(),
            padding,
            files_sent: AtomicUsize::new(0),
            store: store.clone(),
        });
        let routes = Routes::new()
            .route(PATH_MODEL, get(identity))
            .route("/v1/model/files/{name}", get(file))
            .route(PATH_STATE, get(|| async { Json(EngineState { l1_pages: 77, ..Default::default() }) }))
            .route(PATH_PREFILL, post(prefill))
            .route(PATH_DECODE, post(decode))
            .route(PATH_FORGET, post(forget))
            .route(PATH_FLUSH, post(|| async { Json(ForgetResponse { pages: 3 }) }))
            .with_state(engine.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        store.members.lock().push(Member { name: name.into(), info: serde_json::to_value(info).unwrap() });
        engine
    }

    pub fn behave(&self, behaviour: Behaviour) {
        *self.behaviour.lock() = behaviour;
    }

    pub fn prefill_count(&self) -> usize {
        self.prefills.lock().len()
    }

    pub fn decode_count(&self) -> usize {
        self.decodes.lock().len()
    }
}

async fn identity(State(engine): State<Arc<FakeEngine>>) -> Response {
    engine.identity_checks.fetch_add(1, Ordering::SeqCst);
    match engine.is_gone.load(Ordering::SeqCst) {
        true => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        false => Json(engine.info.clone()).into_response(),
    }
}

async fn file(State(engine): State<Arc<FakeEngine>>, Path(name): Path<String>) -> Response {
    engine.files_sent.fetch_add(1, Ordering::SeqCst);
    match name.as_str() {
        "tokenizer_config.json" | "generation_config.json" if engine.padding > 0 => {
            ("{}".to_string() + &" ".repeat(engine.padding)).into_response()
        }
        "tokenizer.json" => tokenizer_json().to_string().into_response(),
        "chat_template.jinja" => engine.template.clone().into_response(),
        "config.json" => json!({"vocab_size": VOCAB_SIZE}).to_string().into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn refuse(code: ErrorCode) -> Response {
    let status = StatusCode::from_u16(code.http_status()).unwrap();
    let mut error = ApiError::new(code, "refused by the test");
    error.retry_after_ms = (code == ErrorCode::Busy).then_some(1500);
    (status, Json(error)).into_response()
}

async fn prefill(State(engine): State<Arc<FakeEngine>>, Json(request): Json<PrefillRequest>) -> Response {
    let _running = InFlight::new(&engine.running);
    engine.prefills.lock().push(request.clone());
    let behaviour = engine.behaviour.lock().clone();
    match behaviour {
        Behaviour::Refuse(code) => return refuse(code),
        Behaviour::HangAfter(_) => std::future::pending::<()>().await,
        Behaviour::DieAtOnce | Behaviour::DieAfter(_) => return broken_body(Vec::new()),
        _ => {}
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    let keys = page_keys(&request.tokens[..request.tokens.len() - 1], PAGE_TOKENS as usize);
    let cached = FakeDirectory(engine.store.clone()).lookup(keys.clone().into(), Instant::now()).await;
    let pages = keys.len() as u32;
    if behaviour == Behaviour::LosePages {
        return Json(PrefillResponse { pages, pages_lost: pages, pages_l2: 2, ..Default::default() }).into_response();
    }
    engine.store.hold(&keys);
    if behaviour == Behaviour::Wrong(WrongAnswer::TooManyPages) {
        return Json(PrefillResponse { pages: pages + 1, ..Default::default() }).into_response();
    }
    let answer =
        PrefillResponse { pages, pages_l2: cached as u32, pages_computed: pages - cached as u32, ..Default::default() };
    Json(answer).into_response()
}

async fn forget(State(engine): State<Arc<FakeEngine>>, Json(request): Json<ForgetRequest>) -> Response {
    let held = engine.store.held.lock().len();
    engine.forgets.lock().push((request, held));
    if let Behaviour::Refuse(code) = *engine.behaviour.lock() {
        return refuse(code);
    }
    Json(ForgetResponse { pages: 1 }).into_response()
}

fn broken_body(lines: Vec<String>) -> Response {
    let lines = futures::stream::iter(lines).map(|line| Ok(Bytes::from(line)));
    // Breaking the connection at once could discard lines that were not flushed yet.
    let end = futures::stream::once(async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        Err(std::io::Error::other("connection broken by the test"))
    });
    Body::from_stream(lines.chain(end)).into_response()
}

async fn decode(State(engine): State<Arc<FakeEngine>>, Json(request): Json<DecodeRequest>) -> Response {
    let running = InFlight::new(&engine.running);
    engine.decodes.lock().push(request.clone());
    let behaviour = engine.behaviour.lock().clone();
    if let Behaviour::Refuse(code) = behaviour {
        return refuse(code);
    }
    let keys: Arc<[PageKey]> = page_keys(&request.tokens[..request.tokens.len() - 1], PAGE_TOKENS as usize).into();
    let store = FakeDirectory(engine.store.clone());
    let found = if request.cache == CacheMode::None { 0 } else { store.lookup(keys.clone(), Instant::now()).await };
    // A real engine waits for pages too. One that hangs has its tokens late anyway.
    let hangs = matches!(behaviour, Behaviour::HangAfter(_));
    let deadline = Instant::now() + if hangs { Duration::ZERO } else { PATIENCE };
    while store.lookup(keys.clone(), deadline).await < request.await_pages as usize && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let start = DecodeStart {
        prompt_tokens: request.tokens.len() as u32,
        pages_l2: found as u32,
        pages_followed: request.await_pages.saturating_sub(found as u32),
        ..Default::default()
    };
    let tokens = request.sampling.max_tokens.min(10);
    let tokens = match behaviour {
        Behaviour::Flood => request.sampling.max_tokens + 5,
        Behaviour::Fill => request.sampling.max_tokens,
        Behaviour::Write(ref texts) => texts.len(),
        _ => tokens,
    };
    let line = |event: DecodeEvent| serde_json::to_string(&event).unwrap() + "\n";
    let mut lines = vec![line(DecodeEvent::Start(start))];
    let logprobs = |id: u32, top: u32| TokenLogprobs {
        logprob: -0.5 * id as f32,
        top: (0..top).map(|rank| (rank, -0.5 * rank as f32)).collect(),
    };
    if let Some(top) = request.sampling.prompt_logprobs {
        let of_prompt: Vec<_> = request.tokens[1..].iter().map(|&id| logprobs(id, top)).collect();
        let pieces = of_prompt.chunks(PROMPT_EVENT_TOKENS);
        lines.extend(pieces.map(|piece| line(DecodeEvent::Prompt { logprobs: piece.to_vec() })));
    }
    lines.extend((0..tokens).map(|i| {
        let id = i as u32 % VOCAB_SIZE;
        let logprobs = request.sampling.logprobs.map(|top| logprobs(id, top));
        let text = match &behaviour {
            Behaviour::Write(texts) => texts[i].clone(),
            _ => format!(" t{i}"),
        };
        line(DecodeEvent::Token { id, text, logprobs })
    }));
    let is_short = tokens < request.sampling.max_tokens;
    let finish_reason = if is_short { FinishReason::Stop } else { FinishReason::Length };
    match behaviour {
        Behaviour::DieAtOnce => return broken_body(Vec::new()),
        Behaviour::DieAfter(count) => return broken_body(lines.into_iter().take(count + 1).collect()),
        Behaviour::LeaveAfter(count) => {
            lines.truncate(count + 1);
            lines.push(line(DecodeEvent::Error(ApiError::busy("the engine is shutting down", 200))));
            return Body::from(lines.concat()).into_response();
        }
        Behaviour::NewErrorAfter(count) => {
            lines.truncate(count + 1);
            lines.push("{\"type\":\"error\",\"code\":\"too_hot\",\"message\":\"the device is too hot\"}\n".into());
            return Body::from(lines.concat()).into_response();
        }
        Behaviour::TruncateAfter(count) => {
            lines.truncate(count + 1);
            return Body::from(lines.concat()).into_response();
        }
        Behaviour::HangAfter(count) => {
            let lines =
                futures::stream::iter(lines).take(count + 1).map(|line| Ok::<_, std::io::Error>(Bytes::from(line)));
            let hang = futures::stream::pending().inspect(move |_| {
                let _ = &running;
            });
            return Body::from_stream(lines.chain(hang)).into_response();
        }
        _ => {}
    }
    lines.push(line(DecodeEvent::End { finish_reason, completion_tokens: tokens as u32 }));
    if let Behaviour::Wrong(wrong) = behaviour {
        spoil(&mut lines, wrong, start);
    }
    Body::from(lines.concat()).into_response()
}

/// Turns the lines of an answer into wrong ones.
fn spoil(lines: &mut [String], wrong: WrongAnswer, start: DecodeStart) {
    let line = |event: DecodeEvent| serde_json::to_string(&event).unwrap() + "\n";
    let tokens = lines.len() as u32 - 2;
    let end = |finish_reason, completion_tokens| line(DecodeEvent::End { finish_reason, completion_tokens });
    let (at, other) = match wrong {
        WrongAnswer::NoJson => (2, "token\n".to_string()),
        WrongAnswer::NoEvent => (2, "{\"type\": \"tokens\"}\n".to_string()),
        WrongAnswer::EndlessLine => (2, "x".repeat(2 << 20)),
        WrongAnswer::OtherPrompt => (0, line(DecodeEvent::Start(DecodeStart { prompt_tokens: 7777, ..start }))),
        WrongAnswer::UnknownToken => (1, line(DecodeEvent::Token { id: VOCAB_SIZE, text: "x".into(), logprobs: None })),
        WrongAnswer::WrongTotal => (lines.len() - 1, end(FinishReason::Stop, tokens + 1)),
        WrongAnswer::EarlyLength => (lines.len() - 1, end(FinishReason::Length, tokens)),
        WrongAnswer::SecondStart => (2, line(DecodeEvent::Start(start))),
        WrongAnswer::TooManyPages => return,
    };
    lines[at] = other;
}

pub struct TestCluster {
    pub store: Arc<FakeStore>,
    pub prefills: Vec<Arc<FakeEngine>>,
    pub decodes: Vec<Arc<FakeEngine>>,
    pub router: RouterHandle,
    pub http: reqwest::Client,
}

impl TestCluster {
    /// Starts everything and waits until the router knows all engines.
    pub async fn new(prefills: usize, decodes: usize) -> TestCluster {
        Self::with(prefills, decodes, |_| {}).await
    }

    pub async fn with(prefills: usize, decodes: usize, adjust: impl FnOnce(&mut RouterOptions)) -> TestCluster {
        let store = Arc::new(FakeStore::default());
        let mut started_prefills = Vec::new();
        for i in 0..prefills {
            started_prefills.push(FakeEngine::start(&store, &format!("prefill-{i}"), Role::Prefill).await);
        }
        let mut started_decodes = Vec::new();
        for i in 0..decodes {
            started_decodes.push(FakeEngine::start(&store, &format!("decode-{i}"), Role::Decode).await);
        }
        let mut options = RouterOptions::new("larder://127.0.0.1:1".parse().unwrap());
        options.listen = "127.0.0.1:0".parse().unwrap();
        options.admin_listen = options.listen;
        options.prefill_min_tokens = 8;
        options.poll_interval = Duration::from_millis(20);
        options.request_timeout = PATIENCE;
        options.template_worker = crate::template_worker_command();
        adjust(&mut options);
        let router = Router::start_with(options, Arc::new(FakeDirectory(store.clone()))).await.unwrap();
        if decodes > 0 {
            assert!(router.wait_ready(PATIENCE).await, "no engine became ready");
        }
        let cluster = TestCluster { store, prefills: started_prefills, decodes: started_decodes, router, http: http() };
        eventually("all engines join", || cluster.router.engines().len() == prefills + decodes).await;
        cluster
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.router.addr())
    }

    pub fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.router.admin_addr())
    }

    pub async fn post(&self, path: &str, body: Value) -> reqwest::Response {
        self.http.post(self.url(path)).json(&body).send().await.unwrap()
    }

    pub async fn complete(&self, words: usize) -> (u16, Value) {
        let response = self.post("/v1/completions", json!({"model": MODEL, "prompt": prompt(words)})).await;
        (response.status().as_u16(), response.json().await.unwrap())
    }

    pub async fn admin_post(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.http.post(self.admin_url(path)).json(&body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Waits until the router has refreshed its engines often enough to act on what changed before.
    pub async fn refreshed(&self) {
        let seen = self.store.refreshes.load(Ordering::SeqCst);
        // Several: the first one may have begun before the change, and failed probes are repeated.
        eventually("the engines are refreshed", || self.store.refreshes.load(Ordering::SeqCst) >= seen + 10).await;
    }

    pub fn running(&self) -> usize {
        let engines = self.prefills.iter().chain(&self.decodes);
        engines.map(|engine| engine.running.load(Ordering::SeqCst)).sum()
    }
}

fn http() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(PATIENCE).build().unwrap()
}

pub fn prompt(words: usize) -> String {
    (0..words).map(|i| format!("w{i}")).collect::<Vec<_>>().join(" ")
}

/// Waits until `is_true` returns true. Panics with `event` after [`PATIENCE`].
pub async fn eventually(event: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < deadline, "did not happen: {event}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
