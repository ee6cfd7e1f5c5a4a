//! Attacks on the data port of the node.

use super::super::overload::connection::{FrameConnection, VERSION};
use super::attacker::{Attack, Stranger, closed, hold, send};
use super::honest::{page_key, page_namespace, prompt};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use larder_format::{NamespaceDescriptor, PageKey, chunk_crcs, page_keys};
use larder_wire::{
    CommitOutcome, Delivery, Entry, Frame, FrameReader, HEADER_BYTES, MAX_BODY_BYTES, MAX_KEYS, PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN, PartLocation, PinKind, Request, ReserveOutcome, Reserved, Response,
};
use larder_worker::Role;
use larder_worker::api::EngineInfo;
use rand::Rng;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Follows of one connection, and the time in which a node refuses those that it does not admit.
const FOLLOWS: u64 = 700;
const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// Duration of pins in milliseconds: the longest that a node permits by default.
const PIN_MS: u64 = 24 * 3600 * 1000;
/// Deadline of requests whose answers no client reads, in milliseconds.
const DEADLINE_MS: u32 = 30_000;
/// Pages of one batch of the flood, and the pause between two batches.
const FLOOD_PAGES: u64 = 4;
const FLOOD_PAUSE: Duration = Duration::from_millis(100);
/// Pages that each squatter reserves ahead of the honest clients.
const SQUATTED_PAGES: u64 = 64;
pub const SQUATTED_EACH: u64 = 4;
const SQUATTED_PROMPTS: u64 = 4;
const SQUAT_TIME: Duration = Duration::from_secs(5);
/// Lookups of the maximum size that a client sends without a pause.
const LOOKUPS: usize = 4;

/// Attacks on the data port, with their number of clients and their pause.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, clients, pause_ms, run| Attack { name, clients, pause: Duration::from_millis(pause_ms), run };
    vec![
        attack("idle before Hello", 200, 2_000, before_hello),
        attack("idle after Hello", 200, 5_000, after_hello),
        attack("announced bodies", 100, 5_000, announced_body),
        attack("stalled bodies", 64, 1_000, stalled_body),
        attack("unread members", 8, 5_000, unread_members),
        attack("unread follows", 8, 5_000, unread_follows),
        attack("unread gets", 8, 5_000, unread_gets),
        attack("large lookups", 2, 500, large_lookups),
        attack("squatted pages", 2, 1_000, squat_pages),
        attack("squatted prompts", 2, 500, squat_prompts),
        attack("flood of puts and pins", 2, 200, flood),
        attack("nonsense frames", 4, 500, nonsense),
        attack("nonsense members", 1, 2_000, register),
    ]
}

/// Connection that sends requests and reads nothing by itself.
pub struct Raw {
    reader: FrameReader<OwnedReadHalf>,
    write: OwnedWriteHalf,
    next: u32,
}

impl Raw {
    /// Connects and completes the handshake.
    pub async fn connect(stranger: &Stranger, namespace: Option<NamespaceDescriptor>) -> Result<Raw> {
        let (read, write) = stranger.connect_unread(stranger.target.ports.node).await?.into_split();
        let mut raw = Raw { reader: FrameReader::new(read), write, next: 0 };
        raw.send(&hello(namespace)).await?;
        match tokio::time::timeout(ANSWER_TIMEOUT, raw.receive()).await?? {
            Response::Hello { .. } => Ok(raw),
            refusal => bail!("the node refused the connection: {refusal:?}"),
        }
    }

    /// Receives the next answer. Leaves its payload unread.
    pub async fn receive(&mut self) -> Result<Response> {
        let header = self.reader.next().await?.context("the node closed the connection")?;
        Ok(Response::decode(PROTOCOL_VERSION, header.kind, self.reader.body())?)
    }

    pub async fn send(&mut self, request: &Request) -> Result<()> {
        let mut frame = request.frame(PROTOCOL_VERSION, self.next.into(), DEADLINE_MS, None);
        frame.number(self.next);
        self.next += 1;
        Ok(self.write.write_all(&frame.head).await?)
    }

    /// Waits until the node closes the connection. Discards its answers.
    async fn closed(mut self) -> Result<()> {
        while self.reader.next().await?.is_some() {}
        Ok(())
    }
}

fn hello(namespace: Option<NamespaceDescriptor>) -> Request {
    let name = "stranger".into();
    Request::Hello { version_min: PROTOCOL_VERSION_MIN, version_max: PROTOCOL_VERSION, name, namespace }
}

fn reserve(keys: Vec<PageKey>, part_bytes: &[u32]) -> Request {
    let page = |key| Reserved::first(key, part_bytes.to_vec());
    Request::Reserve(keys.into_iter().map(page).collect())
}

/// Namespace of a stranger. Its pages have the shape of the honest client's.
pub fn own_namespace(name: &str) -> NamespaceDescriptor {
    NamespaceDescriptor { tenant: name.into(), ..page_namespace() }
}

fn before_hello(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(stranger.target.ports.node).await?;
        stream.write_all(b"LRDR").await?;
        stranger.held(closed(stream)).await
    }
    .boxed()
}

fn after_hello(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let raw = Raw::connect(&stranger, None).await?;
        stranger.held(raw.closed()).await
    }
    .boxed()
}

/// Sends a body of 1 MiB but for its last byte.
fn stalled_body(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let tenant = format!("stranger-{}", stranger.number % 4);
        let mut raw = Raw::connect(&stranger, Some(own_namespace(&tenant))).await?;
        let frame = announced_frame(raw.next);
        send(&mut raw.write, &frame.head[..frame.head.len() - 1]).await?;
        stranger.held(raw.closed()).await
    }
    .boxed()
}

/// Locate with a body of the maximum size.
fn announced_frame(number: u32) -> Frame {
    let kind = Request::Locate(vec![]).frame(PROTOCOL_VERSION, 0, 0, None).head[4];
    let mut frame = Frame::new(kind, number.into(), 0, &vec![0; MAX_BODY_BYTES], None);
    frame.number(number);
    frame
}

/// Sends headers of 32 bytes that announce bodies of 1 MiB.
fn announced_body(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let tenant = format!("stranger-{}", stranger.number % 4);
        let mut raw = Raw::connect(&stranger, Some(own_namespace(&tenant))).await?;
        raw.write.write_all(&announced_frame(raw.next).head[..HEADER_BYTES]).await?;
        stranger.held(raw.closed()).await
    }
    .boxed()
}

fn unread_members(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, None).await?;
        for _ in 0..100 {
            raw.send(&Request::Members).await?;
        }
        let answer = raw.receive().await?;
        ensure!(matches!(answer, Response::Members(_)), "{answer:?}");
        stranger.record_effect();
        hold(raw).await
    }
    .boxed()
}

fn unread_follows(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, Some(own_namespace("follower"))).await?;
        for page in 0..FOLLOWS {
            raw.send(&Request::Follow(page_key(stranger.number as u64 * 1000 + page))).await?;
        }
        // Those that the node refuses have answers at once.
        let mut refused = 0;
        let read_refusals = async {
            loop {
                raw.receive().await?;
                refused += 1;
            }
        };
        if let Ok(end) = tokio::time::timeout(REFUSAL_TIME, read_refusals).await {
            return end;
        }
        ensure!(refused < FOLLOWS, "the node refused all follows");
        stranger.record_effect();
        hold(raw).await
    }
    .boxed()
}

/// Requests the pages that the honest client has put, and reads none of them.
fn unread_gets(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, Some(page_namespace())).await?;
        let next = stranger.target.next_page.load(Ordering::Relaxed);
        let keys: Vec<PageKey> = (next.saturating_sub(100)..next).map(page_key).collect();
        for _ in 0..8 {
            raw.send(&Request::Get { keys: keys.clone(), by: Delivery::Inline }).await?;
        }
        // Some of them are missing, because strangers had reserved them.
        while !matches!(raw.receive().await?, Response::Page { .. }) {
            raw.reader.discard().await?;
        }
        stranger.record_effect();
        hold(raw).await
    }
    .boxed()
}

/// Looks up as many pages as a request may name, several times without a pause.
fn large_lookups(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, Some(own_namespace("lookups"))).await?;
        let keys: Vec<PageKey> = (0..MAX_KEYS as u64).map(|number| page_key(u64::MAX - number)).collect();
        let request = Request::Locate(keys);
        for _ in 0..LOOKUPS {
            let mut frame = request.frame(PROTOCOL_VERSION, raw.next.into(), DEADLINE_MS, None);
            frame.number(raw.next);
            raw.next += 1;
            send(&mut raw.write, &frame.head).await?;
        }
        let mut located = 0;
        for _ in 0..LOOKUPS {
            located += usize::from(matches!(raw.receive().await?, Response::Located(_)));
        }
        ensure!(located > 0, "the node refused all lookups");
        stranger.record_effect();
        Ok(())
    }
    .boxed()
}

/// Reserves pages, and sends none of them.
async fn squat(stranger: &Stranger, namespace: NamespaceDescriptor, keys: Vec<PageKey>) -> Result<()> {
    let part_bytes = namespace.geometry.part_table();
    let mut raw = Raw::connect(stranger, Some(namespace)).await?;
    raw.send(&reserve(keys, &part_bytes)).await?;
    if let Response::Reserved { outcomes, .. } = raw.receive().await?
        && outcomes.contains(&ReserveOutcome::Granted)
    {
        stranger.record_effect();
    }
    tokio::time::sleep(SQUAT_TIME).await;
    Ok(())
}

/// Squats the pages that the honest client puts next.
fn squat_pages(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let next = stranger.target.next_page.load(Ordering::Relaxed) + 1;
        // Only some, so that gets find pages to measure.
        let pages = (next..next + SQUATTED_PAGES).filter(|page| page.is_multiple_of(SQUATTED_EACH));
        squat(&stranger, page_namespace(), pages.map(page_key).collect()).await
    }
    .boxed()
}

/// Squats the pages of the prompts that the honest client sends next. An engine that followed them
/// would wait in vain.
fn squat_prompts(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let ports = &stranger.target.ports;
        let next = stranger.target.next_prompt.load(Ordering::Relaxed) + 1;
        let prompts = (next..next + SQUATTED_PROMPTS).map(prompt);
        let keys = prompts.flat_map(|tokens| page_keys(&tokens, ports.page_tokens)).collect();
        squat(&stranger, ports.engines.clone(), keys).await
    }
    .boxed()
}

/// Puts new pages until its connection ends, and pins each for as long as possible.
fn flood(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let namespace = own_namespace(&format!("flood-{}", stranger.number));
        let bytes = Bytes::from(vec![stranger.number as u8; namespace.geometry.page_bytes()]);
        let stream = stranger.connect(stranger.target.ports.node).await?;
        let connection = FrameConnection::over(stream, namespace, usize::MAX).await?;
        let mut flood = Flood { connection, next: 0 };
        let mut is_effective = false;
        for batch in 0.. {
            let first = ((stranger.round << 20) + batch) * FLOOD_PAGES;
            let keys: Vec<PageKey> = (first..first + FLOOD_PAGES).map(page_key).collect();
            let stored = flood.put(&keys, &bytes).await?;
            let pin = Request::Pin { keys, kind: PinKind::Hard, ttl_ms: PIN_MS };
            let (_, pinned) = flood.request(&pin).await?;
            if stored > 0 && matches!(pinned, Response::Count(1..)) && !is_effective {
                is_effective = true;
                stranger.record_effect();
            }
            tokio::time::sleep(FLOOD_PAUSE).await;
        }
        Ok(())
    }
    .boxed()
}

/// Client that puts pages, from the address of a stranger.
struct Flood {
    connection: FrameConnection,
    next: u64,
}

impl Flood {
    /// Sends a request and waits for the next answer. Returns the number of the request, too.
    async fn request(&mut self, request: &Request) -> Result<(u64, Response)> {
        let number = self.next;
        self.next += 1;
        self.connection.send(request.frame(VERSION, number, DEADLINE_MS, None)).await?;
        Ok((number, self.connection.receive().await?))
    }

    /// Returns the number of pages that the node stored.
    async fn put(&mut self, keys: &[PageKey], bytes: &Bytes) -> Result<usize> {
        let (reserve, _) = self.request(&reserve(keys.to_vec(), &page_namespace().geometry.part_table())).await?;
        let puts: Vec<Entry> = (0..keys.len() as u32).map(|index| Entry { request: reserve, index }).collect();
        for &put in &puts {
            let crcs = chunk_crcs(bytes).collect();
            let part = Request::Part { put, part: 0, crcs, bytes: PartLocation::Inline };
            self.connection.send(part.frame(VERSION, self.next, 0, Some(Box::new(bytes.clone())))).await?;
            self.next += 1;
        }
        let (_, Response::Committed(ends)) = self.request(&Request::Commit(puts)).await? else { return Ok(0) };
        Ok(ends.iter().filter(|end| end.outcome == CommitOutcome::Stored).count())
    }
}

fn nonsense(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut bytes = vec![0; 512];
        rand::rng().fill(&mut bytes[..]);
        if stranger.round.is_multiple_of(2) {
            let mut stream = stranger.connect(stranger.target.ports.node).await?;
            stream.write_all(&bytes).await?;
            // Or it resets the connection.
            let _ = closed(stream).await;
            stranger.record_effect();
            return Ok(());
        }
        let mut raw = Raw::connect(&stranger, Some(own_namespace("nonsense"))).await?;
        // A valid header with a body of any bytes.
        let kind = rand::rng().random_range(0..64);
        let mut frame = Frame::new(kind, raw.next.into(), DEADLINE_MS, &bytes, None);
        frame.number(raw.next);
        raw.write.write_all(&frame.head).await?;
        raw.write.write_all(&bytes).await?;
        let _ = raw.closed().await;
        stranger.record_effect();
        Ok(())
    }
    .boxed()
}

/// Registers members whose descriptions are nonsense, or name a port where no server listens.
fn register(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, None).await?;
        for number in 0..20u64 {
            let name = format!("stranger-{}", (stranger.round * 20 + number) % 200);
            let info = match number % 2 {
                0 => "{\"url\":\"http://127.0.0.1:1/x?#\"}".repeat(20),
                _ => engine_info(&stranger, number)?,
            };
            raw.send(&Request::Register { name, ttl_ms: 5_000, info }).await?;
        }
        let mut is_registered = false;
        for _ in 0..20 {
            is_registered |= raw.receive().await? == Response::Count(1);
        }
        if is_registered {
            stranger.record_effect();
        }
        Ok(())
    }
    .boxed()
}

/// Description of an engine that cannot be reached, for a model of its own.
fn engine_info(stranger: &Stranger, number: u64) -> Result<String> {
    let info = EngineInfo {
        role: Role::Decode,
        url: format!("http://{}:1", stranger.address()),
        model: format!("stranger-{number}"),
        descriptor: own_namespace("engine"),
        numerics: String::new(),
        max_context: 4096,
        page_tokens: 32,
        request_bytes_max: 0,
        requests_max: 0,
    };
    Ok(serde_json::to_string(&info)?)
}
