//! Attacks on the data port of the node.

use super::attacker::{Attack, Stranger, closed, hold};
use super::honest::{page_key, page_namespace, prompt};
use anyhow::{Result, ensure};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use larder_format::{NamespaceDescriptor, PageKey, chunk_crcs, page_keys};
use larder_wire::{
    Delivery, Entry, Frame, FrameReader, FrameWriter, HEADER_BYTES, MAX_BODY_BYTES, MAX_PIN_MS, PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN, PartLocation, PinKind, Request, Reserved, VERSION_FRAGMENTS,
};
use larder_worker::Role;
use larder_worker::api::EngineInfo;
use rand::Rng;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Deadline of requests whose answers no client reads, in milliseconds.
const DEADLINE_MS: u32 = 30_000;
/// Pages of one batch of the flood, and the pause between two batches.
const FLOOD_PAGES: u64 = 4;
const FLOOD_PAUSE: Duration = Duration::from_millis(100);
/// Pages that each squatter reserves ahead of the honest clients.
const SQUATTED_PAGES: u64 = 32;
const SQUATTED_EACH: u64 = 4;
const SQUATTED_PROMPTS: u64 = 4;
const SQUAT_TIME: Duration = Duration::from_secs(5);

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
        attack("squatted pages", 2, 1_000, squat_pages),
        attack("squatted prompts", 2, 500, squat_prompts),
        attack("flood of puts and pins", 2, 200, flood),
        attack("nonsense frames", 4, 500, nonsense),
        attack("nonsense members", 1, 2_000, register),
    ]
}

/// Connection that sends requests and reads nothing by itself.
struct Raw {
    reader: FrameReader<OwnedReadHalf>,
    write: OwnedWriteHalf,
    next: u32,
}

impl Raw {
    /// Connects and completes the handshake.
    async fn connect(stranger: &Stranger, namespace: Option<NamespaceDescriptor>) -> Result<Raw> {
        let (read, write) = stranger.connect_unread(stranger.target.ports.node).await?.into_split();
        let mut raw = Raw { reader: FrameReader::new(read), write, next: 0 };
        raw.send(&hello(PROTOCOL_VERSION, namespace)).await?;
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, raw.reader.next()).await??;
        ensure!(answer.is_some(), "the node closed the connection");
        Ok(raw)
    }

    async fn send(&mut self, request: &Request) -> Result<()> {
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

fn hello(version_max: u16, namespace: Option<NamespaceDescriptor>) -> Request {
    Request::Hello { version_min: PROTOCOL_VERSION_MIN, version_max, name: "stranger".into(), namespace }
}

fn reserve(keys: Vec<PageKey>, part_bytes: &[u32]) -> Request {
    let page = |key| Reserved {
        key,
        parent: PageKey::NONE,
        position: 0,
        ttl_ms: 0,
        part_bytes: part_bytes.to_vec(),
        copy_of: None,
    };
    Request::Reserve(keys.into_iter().map(page).collect())
}

/// Namespace of a stranger. Its pages have the shape of the honest client's.
fn own_namespace(name: &str) -> NamespaceDescriptor {
    NamespaceDescriptor { tenant: name.into(), ..page_namespace() }
}

fn before_hello(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(stranger.target.ports.node).await?;
        stream.write_all(b"LRDR").await?;
        closed(stream).await
    }
    .boxed()
}

fn after_hello(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move { Raw::connect(&stranger, None).await?.closed().await }.boxed()
}

/// Sends a body of 1 MiB but for its last byte.
fn stalled_body(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let tenant = format!("stranger-{}", stranger.number % 4);
        let mut raw = Raw::connect(&stranger, Some(own_namespace(&tenant))).await?;
        let frame = announced_frame(raw.next);
        raw.write.write_all(&frame.head[..frame.head.len() - 1]).await?;
        raw.closed().await
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
        raw.closed().await
    }
    .boxed()
}

fn unread_members(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, None).await?;
        for _ in 0..100 {
            raw.send(&Request::Members).await?;
        }
        hold(raw).await
    }
    .boxed()
}

fn unread_follows(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, Some(own_namespace("follower"))).await?;
        for page in 0..700 {
            raw.send(&Request::Follow(page_key(stranger.number as u64 * 1000 + page))).await?;
        }
        hold(raw).await
    }
    .boxed()
}

/// Requests the pages of the flood, which exist, and reads none of them.
fn unread_gets(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut raw = Raw::connect(&stranger, Some(own_namespace(&flood_tenant(stranger.number % 2)))).await?;
        let keys: Vec<PageKey> = (0..100).map(page_key).collect();
        for _ in 0..8 {
            raw.send(&Request::Get { keys: keys.clone(), by: Delivery::Inline }).await?;
        }
        hold(raw).await
    }
    .boxed()
}

/// Reserves pages, and sends none of them.
async fn squat(stranger: &Stranger, namespace: NamespaceDescriptor, keys: Vec<PageKey>) -> Result<()> {
    let part_bytes = namespace.geometry.part_table();
    let mut raw = Raw::connect(stranger, Some(namespace)).await?;
    raw.send(&reserve(keys, &part_bytes)).await?;
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

fn flood_tenant(number: usize) -> String {
    format!("flood-{number}")
}

/// Puts new pages until its connection ends, and pins each for 30 days.
fn flood(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let namespace = own_namespace(&flood_tenant(stranger.number));
        let bytes = Bytes::from(vec![stranger.number as u8; namespace.geometry.page_bytes()]);
        let mut flood = Flood::connect(&stranger, namespace).await?;
        for batch in 0.. {
            // Each round has new pages, but for the first ones, which others get.
            let first = if batch < 25 { batch } else { batch + (stranger.round + 1) * 1_000_000 } * FLOOD_PAGES;
            let keys: Vec<PageKey> = (first..first + FLOOD_PAGES).map(page_key).collect();
            flood.put(&keys, &bytes).await?;
            flood.request(&Request::Pin { keys, kind: PinKind::Hard, ttl_ms: MAX_PIN_MS }).await?;
            tokio::time::sleep(FLOOD_PAUSE).await;
        }
        Ok(())
    }
    .boxed()
}

/// Connection that puts pages as a client does, from the address of a stranger.
struct Flood {
    reader: FrameReader<OwnedReadHalf>,
    writer: FrameWriter<OwnedWriteHalf>,
    part_bytes: Vec<u32>,
    next: u64,
}

/// Version without fragments: each payload is one frame.
const FLOOD_VERSION: u16 = VERSION_FRAGMENTS - 1;

impl Flood {
    async fn connect(stranger: &Stranger, namespace: NamespaceDescriptor) -> Result<Flood> {
        let (read, write) = stranger.connect(stranger.target.ports.node).await?.into_split();
        let part_bytes = namespace.geometry.part_table();
        let reader = FrameReader::new(read);
        let mut flood = Flood { reader, writer: FrameWriter::new(write), part_bytes, next: 0 };
        flood.request(&hello(FLOOD_VERSION, Some(namespace))).await?;
        Ok(flood)
    }

    /// Sends a request and waits for the next answer, whatever it is.
    async fn request(&mut self, request: &Request) -> Result<u64> {
        let number = self.next;
        self.next += 1;
        self.writer.send(request.frame(FLOOD_VERSION, number, DEADLINE_MS, None)).await?;
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, self.reader.next()).await??;
        ensure!(answer.is_some(), "the node closed the connection");
        self.reader.discard().await?;
        Ok(number)
    }

    async fn put(&mut self, keys: &[PageKey], bytes: &Bytes) -> Result<()> {
        let part_bytes = self.part_bytes.clone();
        let reserve = self.request(&reserve(keys.to_vec(), &part_bytes)).await?;
        let puts: Vec<Entry> = (0..keys.len() as u32).map(|index| Entry { request: reserve, index }).collect();
        for &put in &puts {
            let crcs = chunk_crcs(bytes).collect();
            let part = Request::Part { put, part: 0, crcs, bytes: PartLocation::Inline };
            self.writer.send(part.frame(FLOOD_VERSION, self.next, 0, Some(Box::new(bytes.clone())))).await?;
            self.next += 1;
        }
        self.request(&Request::Commit(puts)).await?;
        Ok(())
    }
}

fn nonsense(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut bytes = vec![0; 512];
        rand::rng().fill(&mut bytes[..]);
        if stranger.round.is_multiple_of(2) {
            let mut stream = stranger.connect(stranger.target.ports.node).await?;
            stream.write_all(&bytes).await?;
            return closed(stream).await;
        }
        let mut raw = Raw::connect(&stranger, Some(own_namespace("nonsense"))).await?;
        // A valid header with a body of any bytes.
        let kind = rand::rng().random_range(0..64);
        let mut frame = Frame::new(kind, raw.next.into(), DEADLINE_MS, &bytes, None);
        frame.number(raw.next);
        raw.write.write_all(&frame.head).await?;
        raw.write.write_all(&bytes).await?;
        raw.closed().await
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
        // Its last answer follows those to all others.
        for _ in 0..20 {
            raw.reader.next().await?;
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
    };
    Ok(serde_json::to_string(&info)?)
}
