//! Hit rates on recorded traffic.
//!
//! A request reads the blocks of its prompt from the first one on. A block hits if it and all
//! blocks before it in the request are resident. Then the request inserts the missing blocks from
//! the first one on, as far as there is room. The hit rate is hits divided by requested blocks.

mod belady;
mod trace;

pub use belady::belady;
pub use trace::{BLOCK_TOKENS, LINE_BYTES_MAX, Request, Trace, TraceError};

use crate::{Evictor, HitDensity, Lru, NamespaceIndex, NewPage, PageHandle, Policy, S3Fifo};
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyKind {
    Lru,
    S3Fifo,
    HitDensity,
    Belady,
}

impl PolicyKind {
    pub const ALL: [PolicyKind; 4] = [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::HitDensity, PolicyKind::Belady];

    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::HitDensity => "larder",
            PolicyKind::Belady => "belady",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HitRate {
    pub hits: u64,
    pub blocks: u64,
}

impl HitRate {
    /// Hits divided by blocks, 0 without blocks.
    pub fn rate(self) -> f64 {
        if self.blocks == 0 { 0.0 } else { self.hits as f64 / self.blocks as f64 }
    }
}

/// Replays a trace in a cache of this many tokens, rounded down to whole blocks. [`HitDensity`]
/// runs with seed 0, so results repeat.
pub fn run(trace: &Trace, policy: PolicyKind, capacity_tokens: u64) -> HitRate {
    let capacity_blocks = capacity_tokens / BLOCK_TOKENS;
    match policy {
        PolicyKind::Lru => run_with(trace, Lru::new(), capacity_blocks),
        PolicyKind::S3Fifo => run_with(trace, S3Fifo::new(), capacity_blocks),
        PolicyKind::HitDensity => run_with(trace, HitDensity::new(0), capacity_blocks),
        PolicyKind::Belady => belady(trace, capacity_blocks),
    }
}

/// Replays a trace under any policy, in a cache of this many blocks. A block counts as a hit only
/// if all earlier blocks of its request hit.
pub fn run_with(trace: &Trace, policy: impl Policy, capacity_blocks: u64) -> HitRate {
    let mut cache = Cache {
        evictor: Evictor::new(capacity_blocks, policy),
        resident: vec![None; trace.blocks_distinct()],
        evicted: Vec::new(),
    };
    let mut rate = HitRate::default();
    for request in trace.requests() {
        rate.blocks += request.blocks.len() as u64;
        rate.hits += cache.serve(request);
    }
    rate
}

struct Cache<P> {
    evictor: Evictor<u32, P>,
    resident: Vec<Option<PageHandle>>,
    evicted: Vec<crate::Evicted<u32>>,
}

impl<P: Policy> Cache<P> {
    fn serve(&mut self, request: &Request) -> u64 {
        let now_ms = request.timestamp_ms;
        let mut hits = 0;
        let mut unbroken = true;
        let mut parent = None;
        for (position, block) in request.blocks.iter().enumerate() {
            if let Some(handle) = self.resident[*block as usize] {
                self.evictor.touch(handle, now_ms);
                hits += u64::from(unbroken);
                parent = Some(handle);
                continue;
            }
            unbroken = false;
            let Some(handle) = self.put(*block, parent, position as u32, now_ms) else { break };
            parent = Some(handle);
        }
        hits
    }

    fn put(&mut self, block: u32, parent: Option<PageHandle>, position: u32, now_ms: u64) -> Option<PageHandle> {
        let page = NewPage {
            name: block,
            fingerprint: u64::from(block),
            namespace: NamespaceIndex(0),
            parent,
            position,
            bytes: 1,
            deadline_ms: None,
        };
        let outcome = self.evictor.insert(page, now_ms, &mut self.evicted);
        for gone in self.evicted.drain(..) {
            self.resident[gone.name as usize] = None;
        }
        let handle = outcome.ok()?;
        self.resident[block as usize] = Some(handle);
        Some(handle)
    }
}
