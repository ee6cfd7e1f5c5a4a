//! Generated traffic.
//!
//! Invariant: the same seed gives the same trace. Each kind has one property that an eviction
//! policy may get wrong.

mod sessions;

use crate::replay::{OUTPUT_TOKEN_MS, Trace};
use sessions::{SessionKind, Sessions};

#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let a = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        b ^ (b >> 31)
    }

    fn below(&mut self, sides: u64) -> u64 {
        self.next() % sides
    }

    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number below `count`, about Zipf-distributed with exponent 1.
    fn zipf(&mut self, count: u64) -> u64 {
        ((count as f64).powf(self.part()) as u64 - 1).min(count - 1)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Conversations that grow turn by turn behind one system prompt, most of them of one turn
    /// only.
    Conversations,
    /// Questions on documents with Zipf-distributed popularity.
    Documents,
    /// As documents, with steadily shifting popularity.
    Shifting,
    /// Documents, and between them long prompts that never return (scans).
    Scans,
    /// The same documents over and over, in one order.
    Loop,
    /// Recency: the more recent a block, the more likely it returns.
    Recent,
    /// Conversations first, then shifting documents, then a loop.
    Phases,
    /// Calls of tools behind few long system prompts, popular by Zipf's law, with tails that hardly
    /// ever return.
    Tools,
    /// Conversations, each at its own pace, from a few requests to thousands between its turns.
    Paces,
    /// As paces, with occasional floods of long prompts that never return.
    Floods,
    /// Agents that ask again and again, at once and each time for a little more, until their task
    /// is done.
    Agents,
    /// Documents that are asked some questions each, most of them just one, and are then done with.
    Bursts,
    /// Coding agents: prompts of hundreds of blocks that grow turn by turn. Most sessions return
    /// after seconds, some after minutes.
    Coders,
    /// Agents whose pauses are short. Each waits for an answer of a second to minutes.
    Answers,
    /// Conversations first, then suddenly a short loop.
    Change,
    /// Conversations, and in the middle one request that is larger than most caches.
    Giant,
}

impl Kind {
    pub const ALL: [Kind; 16] = [
        Kind::Conversations,
        Kind::Documents,
        Kind::Shifting,
        Kind::Scans,
        Kind::Loop,
        Kind::Recent,
        Kind::Phases,
        Kind::Tools,
        Kind::Paces,
        Kind::Floods,
        Kind::Agents,
        Kind::Bursts,
        Kind::Coders,
        Kind::Answers,
        Kind::Change,
        Kind::Giant,
    ];

    /// A trace of this many requests of this kind. Equal seeds give equal traces, on every machine.
    pub fn trace(self, requests: usize, seed: u64) -> Trace {
        let mut traffic = Traffic {
            random: Random(seed),
            trace: Trace::default(),
            live: Vec::new(),
            sessions: Sessions::default(),
            named: 0,
            made: 0,
        };
        match self {
            Kind::Phases => {
                traffic.add(Kind::Conversations, requests / 3);
                traffic.add(Kind::Shifting, requests / 3);
                traffic.add(Kind::Loop, requests - requests / 3 * 2);
            }
            Kind::Change => {
                traffic.add(Kind::Conversations, requests / 2);
                traffic.add(Kind::Change, requests - requests / 2);
            }
            Kind::Giant => {
                traffic.add(Kind::Conversations, requests / 2);
                let giant = traffic.new_blocks(GIANT_BLOCKS);
                traffic.trace.push(traffic.made as u64 * REQUEST_MS, &giant);
                traffic.add(Kind::Conversations, requests - requests / 2);
            }
            kind => traffic.add(kind, requests),
        }
        traffic.trace
    }
}

#[derive(Debug, Clone)]
struct Conversation {
    blocks: Vec<u64>,
    due: usize,
}

struct Traffic {
    random: Random,
    trace: Trace,
    live: Vec<Conversation>,
    sessions: Sessions,
    named: u64,
    made: usize,
}

/// Time between two requests.
const REQUEST_MS: u64 = 300;
const DOCUMENTS_END: u64 = 1 << 40;
const DOCUMENT_BLOCKS: u64 = 64;
/// Blocks of the one giant request: 10 million tokens.
const GIANT_BLOCKS: u64 = 20_000;

impl Traffic {
    fn add(&mut self, kind: Kind, requests: usize) {
        for number in 0..requests {
            self.made += 1;
            let mut output_tokens = 0;
            let blocks = match kind {
                Kind::Conversations | Kind::Giant => self.turn(),
                Kind::Documents => self.question(0, 2000),
                Kind::Shifting => self.question(number as u64 / 4, 500),
                Kind::Scans if number % 3 == 0 => self.new_blocks(60),
                Kind::Scans => self.question(0, 500),
                Kind::Loop => document(number as u64 % 400),
                Kind::Change => document(number as u64 % 100),
                Kind::Recent | Kind::Phases => self.recent(number as u64),
                Kind::Floods if number % 1500 >= 1350 => self.new_blocks(60),
                Kind::Tools => self.ask(SessionKind::Tools),
                Kind::Paces | Kind::Floods => self.ask(SessionKind::Paces),
                Kind::Agents => self.ask(SessionKind::Agents),
                Kind::Bursts => self.ask(SessionKind::Bursts),
                Kind::Coders => self.ask(SessionKind::Coders),
                Kind::Answers => {
                    let blocks = self.ask(SessionKind::Answers);
                    output_tokens = self.sessions.answer_requests * REQUEST_MS / OUTPUT_TOKEN_MS;
                    blocks
                }
            };
            self.trace.push_answered(self.made as u64 * REQUEST_MS, &blocks, output_tokens);
        }
    }

    fn new_blocks(&mut self, count: u64) -> Vec<u64> {
        let first = DOCUMENTS_END + self.named;
        self.named += count;
        (first..first + count).collect()
    }

    fn turn(&mut self) -> Vec<u64> {
        let due = self.live.iter().position(|conversation| conversation.due <= self.made);
        let mut blocks = match due {
            Some(index) => self.live.swap_remove(index).blocks,
            None => vec![0],
        };
        let turn_blocks = 1 + self.random.zipf(60);
        blocks.extend(self.new_blocks(turn_blocks));
        let goes_on = if due.is_some() { 75 } else { 25 };
        if self.random.below(100) < goes_on && blocks.len() < 250 {
            let wait = 50 + self.random.below(150) as usize;
            self.live.push(Conversation { blocks: blocks.clone(), due: self.made + wait });
        }
        blocks
    }

    fn question(&mut self, first: u64, documents: u64) -> Vec<u64> {
        let mut blocks = document(first + self.random.zipf(documents));
        blocks.extend(self.new_blocks(2));
        blocks
    }

    fn recent(&mut self, number: u64) -> Vec<u64> {
        let back = if self.random.below(2) == 0 { 0 } else { 1 + self.random.zipf(400) };
        document(number.saturating_sub(back))
    }
}

fn document(number: u64) -> Vec<u64> {
    let blocks = 8 + Random(number).below(DOCUMENT_BLOCKS - 8);
    (0..blocks).map(|block| 1 + number * DOCUMENT_BLOCKS + block).collect()
}
