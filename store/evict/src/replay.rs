//! Hit rates on recorded traffic.
//!
//! A request reads the blocks of its prompt from the first one on. A block hits if it and all
//! blocks before it in the request are resident. Then the request inserts the missing blocks from
//! the first one on, as far as there is room and the policy admits them. The hit rate is hits
//! divided by requested blocks.
//!
//! A block late in its request costs more to compute, since attention reads all blocks before it.
//! The *work* of a block is 1 plus its first token's position divided by [`ATTENTION_TOKENS`].

mod belady;
mod trace;

pub use belady::belady;
pub use trace::{BLOCK_TOKENS, Event, LINE_BYTES_MAX, OUTPUT_TOKEN_MS, Request, Trace, TraceError};

use crate::{
    Advice, Evictor, HitDensity, InsertError, Lru, NamespaceIndex, NewPage, PageHandle, Policy, S3Fifo, Sieve,
};
use std::fmt;

/// Position at which attention costs as much as the rest of the model, in tokens. Typical for
/// models of about 8 billion parameters.
pub const ATTENTION_TOKENS: u64 = 50_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyKind {
    Lru,
    S3Fifo,
    Sieve,
    HitDensity,
    /// The same, while engines report the ends of generations: see [`Trace::ends_ms`].
    HitDensityWithEnds,
    Belady,
}

impl PolicyKind {
    pub const ALL: [PolicyKind; 6] = [
        PolicyKind::Lru,
        PolicyKind::S3Fifo,
        PolicyKind::Sieve,
        PolicyKind::HitDensity,
        PolicyKind::HitDensityWithEnds,
        PolicyKind::Belady,
    ];

    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::Sieve => "sieve",
            PolicyKind::HitDensity => "larder",
            PolicyKind::HitDensityWithEnds => "larder+ends",
            PolicyKind::Belady => "belady",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Result of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outcome {
    pub hits: u64,
    /// Requested blocks.
    pub blocks: u64,
    /// Work of the hits, and of all requested blocks.
    pub work_saved: f64,
    pub work: f64,
    /// Blocks that became resident: those that a tier writes.
    pub written: u64,
    /// Most blocks that were resident at once.
    pub resident_max: u64,
    /// Heap bytes of the policy's state at the end. `None` if the policy does not say.
    pub policy_bytes: Option<usize>,
}

impl Outcome {
    /// Hits divided by blocks, 0 without blocks.
    pub fn rate(&self) -> f64 {
        if self.blocks == 0 { 0.0 } else { self.hits as f64 / self.blocks as f64 }
    }

    /// Share of the work that hits save, 0 without blocks.
    pub fn work_rate(&self) -> f64 {
        if self.work > 0.0 { self.work_saved / self.work } else { 0.0 }
    }

    /// Bytes of the policy's state per block that was resident at the peak.
    pub fn policy_bytes_per_block(&self) -> Option<f64> {
        self.policy_bytes.map(|bytes| bytes as f64 / self.resident_max.max(1) as f64)
    }

    /// Counts a request whose first `hits` blocks hit.
    fn count(&mut self, blocks: usize, hits: usize, block_tokens: u64) {
        let step = block_tokens as f64 / ATTENTION_TOKENS as f64;
        let work = |blocks: usize| blocks as f64 + step * (blocks * blocks.saturating_sub(1) / 2) as f64;
        self.blocks += blocks as u64;
        self.hits += hits as u64;
        self.work += work(blocks);
        self.work_saved += work(hits);
    }
}

/// Replays a trace in a cache of this many tokens, rounded down to whole blocks. [`HitDensity`]
/// runs with seed 0, so results repeat.
pub fn run(trace: &Trace, policy: PolicyKind, capacity_tokens: u64) -> Outcome {
    let capacity_blocks = capacity_tokens / trace.block_tokens();
    match policy {
        PolicyKind::Lru => run_with(trace, Lru::new(), capacity_blocks),
        PolicyKind::S3Fifo => run_with(trace, S3Fifo::new(), capacity_blocks),
        PolicyKind::Sieve => run_with(trace, Sieve::new(), capacity_blocks),
        PolicyKind::HitDensity => run_with(trace, HitDensity::new(0), capacity_blocks),
        PolicyKind::HitDensityWithEnds => {
            let ends = trace.ends_ms();
            replay(trace, HitDensity::new(0), &Replay { capacity_blocks, ends: &ends, may_refuse: true })
        }
        PolicyKind::Belady => belady(trace, capacity_blocks),
    }
}

/// Replays a trace under any policy, in a cache of this many blocks. A block counts as a hit only
/// if all earlier blocks of its request hit.
pub fn run_with(trace: &Trace, policy: impl Policy, capacity_blocks: u64) -> Outcome {
    replay(trace, policy, &Replay { capacity_blocks, ends: &[], may_refuse: true })
}

/// Conditions of a replay.
#[derive(Debug, Clone, Copy)]
pub struct Replay<'a> {
    pub capacity_blocks: u64,
    /// Reported ends of generations: times in milliseconds with the numbers of requests, in order
    /// of time.
    pub ends: &'a [(u64, usize)],
    /// The policy may refuse blocks. A node without an L3 refuses none.
    pub may_refuse: bool,
}

/// Replays a trace as [`run_with`], under these conditions.
pub fn replay(trace: &Trace, policy: impl Policy, setup: &Replay<'_>) -> Outcome {
    let mut cache = Cache {
        evictor: Evictor::new(setup.capacity_blocks, policy),
        resident: vec![None; trace.blocks_distinct()],
        evicted: Vec::new(),
        written: 0,
        may_refuse: setup.may_refuse,
    };
    let mut outcome = Outcome::default();
    for event in trace.events(setup.ends) {
        match event {
            Event::GenerationEnded { request, now_ms } => cache.end_generation(request, now_ms),
            Event::Arrived(request) => {
                let hits = cache.serve(request);
                outcome.count(request.blocks.len(), hits, trace.block_tokens());
                outcome.resident_max = outcome.resident_max.max(cache.evictor.len() as u64);
            }
        }
    }
    outcome.written = cache.written;
    outcome.policy_bytes = Some(cache.evictor.policy().memory_bytes());
    outcome
}

struct Cache<P> {
    evictor: Evictor<u32, P>,
    resident: Vec<Option<PageHandle>>,
    evicted: Vec<crate::Evicted<u32>>,
    written: u64,
    may_refuse: bool,
}

impl<P: Policy> Cache<P> {
    fn serve(&mut self, request: &Request) -> usize {
        let now_ms = request.timestamp_ms;
        let mut hits = 0;
        let mut unbroken = true;
        let mut parent = None;
        for (position, block) in request.blocks.iter().enumerate() {
            if let Some(handle) = self.resident[*block as usize] {
                self.evictor.touch(handle, now_ms);
                hits += usize::from(unbroken);
                parent = Some(handle);
                continue;
            }
            unbroken = false;
            let before = position.checked_sub(1).map_or(0, |before| fingerprint(request.blocks[before]));
            match self.put(*block, parent, before, position as u32, now_ms) {
                Ok(handle) => parent = Some(handle),
                // The policy observes the rest of the request too.
                Err(InsertError::Refused) => parent = None,
                Err(_) => break,
            }
        }
        hits
    }

    fn end_generation(&mut self, request: &Request, now_ms: u64) {
        for block in &request.blocks {
            match self.resident[*block as usize] {
                Some(handle) => _ = self.evictor.advise(handle, Advice::GenerationEnded, now_ms),
                None => self.evictor.generation_ended(fingerprint(*block), now_ms),
            }
        }
    }

    fn put(
        &mut self,
        block: u32,
        parent: Option<PageHandle>,
        parent_fingerprint: u64,
        position: u32,
        now_ms: u64,
    ) -> Result<PageHandle, InsertError> {
        let page = NewPage {
            name: block,
            fingerprint: fingerprint(block),
            parent_fingerprint,
            namespace: NamespaceIndex(0),
            parent,
            position,
            bytes: 1,
            deadline_ms: None,
            may_refuse: self.may_refuse,
        };
        let outcome = self.evictor.insert(page, now_ms, &mut self.evicted);
        for gone in self.evicted.drain(..) {
            self.resident[gone.name as usize] = None;
        }
        let handle = outcome?;
        self.written += 1;
        self.resident[block as usize] = Some(handle);
        Ok(handle)
    }
}

/// Fingerprint of a block. 0 means none.
fn fingerprint(block: u32) -> u64 {
    u64::from(block) + 1
}
