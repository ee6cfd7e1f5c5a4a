//! Test support: an in-memory store with injectable faults, engines attached to it, and a reference
//! implementation of generation.
#![allow(dead_code)]

pub mod fake_redis;
pub mod link;
pub mod real;

use futures::future::BoxFuture;
use larder_client::{Lookup, NewPage, PartsReceived, PutOutcome, Tier};
use larder_format::{PageKey, PageOrigin, chunk_crcs};
use larder_model::{Chunk, KvPage, KvPool, LogitRows, Model, PageSeal, PageSlot, Sampler, SamplingParams, Tokenizer};
use larder_runtime::lock::Mutex;
use larder_worker::api::{
    ApiError, CacheMode, DecodeEvent, DecodeRequest, DecodeStart, PrefillRequest, PrefillResponse, TokenLogprobs,
};
use larder_worker::store::{Fetched, Followed, Got, LookupPurpose, OpenPut, PageStore, PutSource};
use larder_worker::{Engine, EngineHandle, EngineOptions, Preloaded, Role};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;

pub const PAGE: usize = 16;

pub fn model_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny")
}

/// The model, loaded once per test binary because loading dominates the run time.
pub static LOADED: LazyLock<Preloaded> = LazyLock::new(|| Preloaded {
    model: Arc::new(Model::load(&model_dir()).unwrap()),
    tokenizer: Arc::new(Tokenizer::load(&model_dir()).unwrap()),
});

/// A prompt of `len` pseudorandom tokens. Prompts of different seeds share no prefix.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let vocab = LOADED.model.config().vocab as u64;
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (3 + (x >> 33) % (vocab - 3)) as u32
        })
        .collect()
}

/// Reference answer: `tokens` greedy tokens after `prompt`, computed without an engine. The prompt
/// runs in one chunk, the rest token by token.
pub fn expected(prompt: &[u32], tokens: usize) -> Vec<u32> {
    expected_of(&LOADED.model, prompt, tokens)
}

/// Reference answer of another model.
pub fn expected_of(model: &Model, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let geometry = model.geometry(PAGE as u32);
    let count = (prompt.len() + tokens).div_ceil(PAGE);
    let pool = KvPool::new(geometry, count);
    let mut pages: Vec<PageSlot> = (0..count).map(|_| PageSlot::Open(pool.allocate().unwrap())).collect();
    let mut sampler = Sampler::new(&SamplingParams::default(), &[], &[]);
    let mut out: Vec<u32> = Vec::new();
    let mut position = 0;
    while out.len() < tokens {
        let next: &[u32] = if position == 0 { prompt } else { &out[out.len() - 1..] };
        let chunk = Chunk { tokens: next, position, pages: &mut pages, logits: LogitRows::Last };
        let logits = model.forward(&mut [chunk], &mut ()).unwrap();
        position += next.len();
        out.push(sampler.sample(&logits[0]));
    }
    out
}

#[derive(Clone)]
struct StoredPage {
    bytes: Vec<u8>,
    /// Checksums of the parts as they were put: engines of other types of pages have longer ones.
    chunk_crcs: Vec<u32>,
    generation: u64,
}

#[derive(Default)]
struct Inner {
    pages: HashMap<PageKey, StoredPage>,
    /// Number of the last put or forget.
    generation: u64,
    restarts: u64,
    aborted: HashSet<PageKey>,
    down: bool,
    lose_puts: bool,
    busy_to_puts: bool,
    flip_bits: bool,
    flip_bits_in_puts: bool,
    forgotten: HashMap<PageKey, u64>,
    commit_delay: Duration,
    lookup_delay: Duration,
    follow_calls: usize,
    puts_begun: Vec<PageKey>,
    puts_open: usize,
    /// Reported ends of generations: named pages that the store has, and generated tokens.
    generations_ended: Vec<(usize, u32)>,
}

pub struct MemoryStore {
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
}

impl MemoryStore {
    pub fn generations_ended(&self) -> Vec<(usize, u32)> {
        self.inner.lock().generations_ended.clone()
    }

    pub fn new() -> Arc<Self> {
        Arc::new(Self { inner: Mutex::default(), changed: watch::channel(0).0 })
    }

    pub fn len(&self) -> usize {
        self.inner.lock().pages.len()
    }

    pub fn keys(&self) -> HashSet<PageKey> {
        self.inner.lock().pages.keys().copied().collect()
    }

    /// Evicts all pages.
    pub fn clear(&self) {
        self.inner.lock().pages.clear();
    }

    /// Restarts empty. As a node does, the store then knows no earlier forget.
    pub fn restart(&self) {
        let mut inner = self.inner.lock();
        inner.pages.clear();
        inner.forgotten.clear();
        inner.restarts += 1;
    }

    pub fn forget(&self, key: &PageKey) {
        self.inner.lock().pages.remove(key);
    }

    pub fn abort(&self, key: PageKey) {
        self.inner.lock().aborted.insert(key);
    }

    pub fn set_down(&self, down: bool) {
        self.inner.lock().down = down;
    }

    pub fn lose_puts(&self, lose: bool) {
        self.inner.lock().lose_puts = lose;
    }

    /// Answers puts that it has no room for them now.
    pub fn answer_busy_to_puts(&self, busy: bool) {
        self.inner.lock().busy_to_puts = busy;
    }

    /// Forgets pages as nodes do: no copy from before may bring them back.
    pub fn forget_durably(&self, keys: &[PageKey]) {
        let mut inner = self.inner.lock();
        inner.generation += 1;
        let generation = inner.generation;
        for key in keys {
            inner.pages.remove(key);
            inner.forgotten.insert(*key, generation);
        }
    }

    pub fn delay_commits(&self, delay: Duration) {
        self.inner.lock().commit_delay = delay;
    }

    /// Flips a bit of each page after a get has verified it. This is damage in L1, which no check
    /// of the store or of its client can find.
    pub fn flip_bits_in_l1(&self, flip: bool) {
        self.inner.lock().flip_bits = flip;
    }

    /// Flips a bit of each part after the engine has written it and before the store verifies it:
    /// damage in the memory of the client, or on the link.
    pub fn flip_bits_in_puts(&self, flip: bool) {
        self.inner.lock().flip_bits_in_puts = flip;
    }

    pub fn page(&self, key: &PageKey) -> Option<Vec<u8>> {
        self.inner.lock().pages.get(key).map(|page| page.bytes.clone())
    }

    pub fn delay_lookups(&self, delay: Duration) {
        self.inner.lock().lookup_delay = delay;
    }

    pub fn puts_begun(&self) -> usize {
        self.inner.lock().puts_begun.len()
    }

    /// Number of puts that have neither ended nor been dropped.
    pub fn puts_open(&self) -> usize {
        self.inner.lock().puts_open
    }

    pub fn follow_calls(&self) -> usize {
        self.inner.lock().follow_calls
    }
}

struct MemoryPut {
    store: Arc<MemoryStore>,
    key: PageKey,
    source: PutSource,
    /// Origin that a later put of the same bytes states.
    origin: Option<PageOrigin>,
    /// Bytes and checksums of each part.
    parts: Vec<(Vec<u8>, Vec<u32>)>,
}

impl Inner {
    fn origin(&self, generation: u64) -> PageOrigin {
        PageOrigin { run: self.restarts, generation }
    }

    /// True if a copy from `origin` may be older than the last forget of its page.
    fn may_be_forgotten(&self, key: &PageKey, origin: Option<PageOrigin>) -> bool {
        let forgotten = self.forgotten.get(key).copied().unwrap_or(0);
        origin.is_none_or(|origin| origin.run != self.restarts || origin.generation < forgotten)
    }
}

/// Seal of a page as a node would send it.
fn seal(inner: &Inner, page: &StoredPage) -> PageSeal {
    PageSeal { chunk_crcs: page.chunk_crcs.clone(), origin: Some(inner.origin(page.generation)) }
}

/// Handle of an engine to the store. Shares the faults of all other handles.
#[derive(Clone)]
pub struct Attached(pub Arc<MemoryStore>);

impl PageStore for Attached {
    fn lookup(&self, keys: Vec<PageKey>, _purpose: LookupPurpose, _deadline: Instant) -> BoxFuture<'_, Lookup> {
        Box::pin(async move {
            let delay = self.0.inner.lock().lookup_delay;
            tokio::time::sleep(delay).await;
            let inner = self.0.inner.lock();
            if inner.down {
                return Lookup::default();
            }
            let tiers = keys.iter().map_while(|key| inner.pages.get(key).map(|_| Tier::L2)).collect();
            Lookup { tiers, answered: true, ..Lookup::default() }
        })
    }

    fn get(&self, pages: Vec<(PageKey, KvPage)>, _deadline: Instant) -> BoxFuture<'_, Vec<Got>> {
        Box::pin(async move {
            let inner = self.0.inner.lock();
            let read = |(key, mut page): (PageKey, KvPage)| match inner.pages.get(&key).filter(|_| !inner.down) {
                Some(stored) => {
                    page.as_mut().copy_from_slice(&stored.bytes);
                    if inner.flip_bits {
                        page.as_mut()[77] ^= 4;
                    }
                    Got::Hit(page, Fetched { tier: Tier::L2, is_direct: false, seal: seal(&inner, stored) })
                }
                None => {
                    // Poison the buffer of a miss: an engine that used it would generate wrong
                    // tokens.
                    page.as_mut().fill(0xEE);
                    Got::Miss(Some(page))
                }
            };
            pages.into_iter().map(read).collect()
        })
    }

    fn follow(
        &self,
        key: PageKey,
        mut buffer: KvPage,
        _parts: PartsReceived,
        deadline: Instant,
    ) -> BoxFuture<'_, (KvPage, Followed)> {
        Box::pin(async move {
            self.0.inner.lock().follow_calls += 1;
            // Subscribe before the first look, or a put in between would go unnoticed.
            let mut changes = self.0.changed.subscribe();
            loop {
                {
                    let mut inner = self.0.inner.lock();
                    if inner.down {
                        return (buffer, Followed::Missed);
                    }
                    if inner.aborted.remove(&key) {
                        buffer.as_mut().fill(0xEE);
                        return (buffer, Followed::Aborted);
                    }
                    if let Some(page) = inner.pages.get(&key) {
                        buffer.as_mut().copy_from_slice(&page.bytes);
                        return (buffer, Followed::Sealed(seal(&inner, page)));
                    }
                }
                if tokio::time::timeout_at(deadline.into(), changes.changed()).await.is_err() {
                    return (buffer, Followed::Missed);
                }
            }
        })
    }

    fn put(&self, page: NewPage, source: PutSource, _deadline: Instant) -> Box<dyn OpenPut> {
        let mut inner = self.0.inner.lock();
        inner.puts_begun.push(page.key);
        inner.puts_open += 1;
        let origin = match source {
            PutSource::Computed => Some(inner.origin(inner.generation)),
            PutSource::Copy { origin } => origin,
        };
        Box::new(MemoryPut { store: self.0.clone(), key: page.key, source, origin, parts: Vec::new() })
    }

    fn forget_copies(&self, pages: Vec<(PageKey, Option<PageOrigin>)>, _: Instant) -> BoxFuture<'_, usize> {
        let keys: Vec<PageKey> = pages.into_iter().map(|(key, _)| key).collect();
        self.0.forget_durably(&keys);
        Box::pin(async move { keys.len() })
    }

    fn generation_ended(&self, keys: Vec<PageKey>, tokens: u32, _: Instant) -> BoxFuture<'_, ()> {
        let mut inner = self.0.inner.lock();
        // A report before the pages are there would reach nothing.
        let there = keys.iter().filter(|key| inner.pages.contains_key(key)).count();
        inner.generations_ended.push((there, tokens));
        Box::pin(async {})
    }

    fn can_judge_copy(&self, _key: &PageKey, origin: PageOrigin) -> Option<bool> {
        let inner = self.0.inner.lock();
        (!inner.down).then_some(origin.run == inner.restarts)
    }

    fn nodes_connected(&self) -> usize {
        usize::from(!self.0.inner.lock().down)
    }

    fn pages_damaged(&self) -> u64 {
        0
    }
}

impl Drop for MemoryPut {
    fn drop(&mut self) {
        self.store.inner.lock().puts_open -= 1;
    }
}

impl OpenPut for MemoryPut {
    fn write_part(&mut self, part: usize, bytes: &[u8], crcs: &[u32]) {
        assert_eq!(part, self.parts.len(), "each part once");
        let mut copy = bytes.to_vec();
        if self.store.inner.lock().flip_bits_in_puts {
            copy[77] ^= 4;
        }
        self.parts.push((copy, crcs.to_vec()));
    }

    fn commit(self: Box<Self>, _deadline: Instant) -> BoxFuture<'static, (PutOutcome, Option<PageOrigin>)> {
        Box::pin(async move {
            let delay = self.store.inner.lock().commit_delay;
            tokio::time::sleep(delay).await;
            let mut inner = self.store.inner.lock();
            if inner.down || inner.lose_puts {
                return (PutOutcome::Lost, self.origin);
            }
            if inner.busy_to_puts {
                return (PutOutcome::Busy { retry_after: Duration::from_millis(20) }, self.origin);
            }
            let bytes: Vec<u8> = self.parts.iter().flat_map(|(bytes, _)| bytes).copied().collect();
            let page_crcs: Vec<u32> = self.parts.iter().flat_map(|(_, crcs)| crcs).copied().collect();
            // As a node does, it takes only bytes that match the checksums of their writer.
            if !self.parts.iter().all(|(bytes, crcs)| chunk_crcs(bytes).eq(crcs.iter().copied())) {
                return (PutOutcome::Lost, self.origin);
            }
            if let Some(present) = inner.pages.get(&self.key) {
                // Batch invariance: a page is bit-identical wherever it is computed.
                assert!(present.bytes == bytes, "two engines computed different bytes for one page");
                return (PutOutcome::AlreadyThere, Some(inner.origin(present.generation)));
            }
            if let PutSource::Copy { origin } = self.source
                && inner.may_be_forgotten(&self.key, origin)
            {
                return (PutOutcome::Forgotten, None);
            }
            inner.generation += 1;
            let generation = inner.generation;
            inner.pages.insert(self.key, StoredPage { bytes, chunk_crcs: page_crcs, generation });
            let origin = inner.origin(generation);
            drop(inner);
            self.store.changed.send_modify(|n| *n += 1);
            (PutOutcome::Stored, Some(origin))
        })
    }
}

pub fn options(role: Role) -> EngineOptions {
    let mut options = EngineOptions::new(role, model_dir(), "larder://127.0.0.1:9".parse().unwrap());
    options.preloaded = Some(LOADED.clone());
    options.page_tokens = PAGE as u32;
    options.l1_bytes = 16 << 20;
    options.chunk_tokens = 64;
    options.follow_stall_timeout = Duration::from_millis(150);
    options
}

/// Options of an engine that waits for a prefill, however slow the machine is.
pub fn patient(role: Role) -> EngineOptions {
    let mut options = options(role);
    options.follow_grace = Duration::from_secs(60);
    options
}

pub async fn engine(role: Role, store: &Arc<MemoryStore>) -> EngineHandle {
    engine_with(options(role), store).await
}

pub async fn engine_with(options: EngineOptions, store: &Arc<MemoryStore>) -> EngineHandle {
    Engine::start_with_store(options, Arc::new(Attached(store.clone()))).await.unwrap()
}

pub fn decode_request(tokens: &[u32], max_tokens: usize) -> DecodeRequest {
    DecodeRequest {
        request_id: "test".into(),
        tokens: tokens.to_vec(),
        sampling: SamplingParams { max_tokens, ignore_eos: true, ..Default::default() },
        await_pages: 0,
        cached_pages: None,
        cache: CacheMode::All,
        deadline_ms: 30_000,
    }
}

pub async fn post(engine: &EngineHandle, path: &str, body: &impl serde::Serialize) -> reqwest::Response {
    let url = format!("http://{}{path}", engine.addr());
    reqwest::Client::new().post(url).json(body).send().await.unwrap()
}

pub async fn prefill(engine: &EngineHandle, tokens: &[u32], cache: CacheMode) -> PrefillResponse {
    let request = PrefillRequest { request_id: "test".into(), tokens: tokens.to_vec(), cache, deadline_ms: 30_000 };
    let response = post(engine, "/v1/prefill", &request).await;
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub start: DecodeStart,
    pub tokens: Vec<u32>,
    pub text: String,
    /// Log-probabilities of the prompt from its second token on, if requested.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Log-probabilities of `tokens`, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    pub last: DecodeEvent,
}

pub async fn decode(engine: &EngineHandle, request: &DecodeRequest) -> Answer {
    try_decode(engine, request).await.unwrap()
}

pub async fn try_decode(engine: &EngineHandle, request: &DecodeRequest) -> Result<Answer, (u16, ApiError)> {
    let response = post(engine, "/v1/decode", request).await;
    let status = response.status().as_u16();
    let body = response.bytes().await.unwrap();
    if status != 200 {
        return Err((status, serde_json::from_slice(&body).unwrap()));
    }
    let mut events: Vec<DecodeEvent> = body
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    let DecodeEvent::Start(start) = events.remove(0) else { panic!("an answer begins with start") };
    let last = events.pop().unwrap();
    let mut tokens = Vec::new();
    let mut text = String::new();
    let mut prompt_logprobs = Vec::new();
    let mut logprobs = Vec::new();
    for event in events {
        match event {
            DecodeEvent::Prompt { logprobs } if tokens.is_empty() => prompt_logprobs.extend(logprobs),
            DecodeEvent::Token { id, text: piece, logprobs: own } => {
                tokens.push(id);
                text.push_str(&piece);
                logprobs.extend(own);
            }
            event => panic!("{event:?} between tokens"),
        }
    }
    Ok(Answer { start, tokens, text, prompt_logprobs, logprobs, last })
}

pub async fn metric(engine: &EngineHandle, line_start: &str) -> f64 {
    let text = reqwest::get(format!("http://{}/metrics", engine.addr())).await.unwrap().text().await.unwrap();
    let line = text.lines().find(|line| line.starts_with(line_start));
    line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

/// Waits up to a minute until `condition` holds. Returns `false` on timeout.
#[must_use]
pub async fn eventually(condition: impl AsyncFn() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(60);
    while !condition().await {
        if Instant::now() >= until {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    true
}

/// Waits until the engine holds no pages except cached ones. Returns `false` on timeout.
pub async fn is_idle(engine: &EngineHandle) -> bool {
    let is_idle = eventually(async || {
        let s = engine.state();
        s.queue == 0 && s.running == 0 && s.l1_pages > 0 && s.l1_pages_free + s.l1_pages_cached == s.l1_pages
    });
    is_idle.await || failed(engine)
}

fn failed(engine: &EngineHandle) -> bool {
    eprintln!("{:?}", engine.state());
    false
}

/// Waits until L1 caches `pages` pages. Returns `false` on timeout.
pub async fn caches(engine: &EngineHandle, pages: usize) -> bool {
    eventually(async || engine.state().l1_pages_cached as usize == pages).await
}

/// Waits until the scrub has verified each page that L1 caches, at least `pages`, and the engine
/// knows the result. Returns `false` on timeout.
pub async fn scrubs_l1(engine: &EngineHandle, pages: usize) -> bool {
    const VERIFIED: &str = "larder_engine_l1_scrubbed_pages_total";
    let before = metric(engine, VERIFIED).await;
    let scrubbed = eventually(async || {
        let cached = engine.state().l1_pages_cached as usize;
        // Three rounds: the first may have begun earlier, and the third begins after the scheduler
        // has handled the reports of the second.
        cached >= pages && metric(engine, VERIFIED).await >= before + 3.0 * cached as f64
    });
    scrubbed.await || failed(engine)
}
