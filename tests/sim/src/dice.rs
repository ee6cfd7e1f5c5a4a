//! Randomness of a run.
//!
//! Always true: everything that is drawn follows from the seed and the stream. Streams do not disturb each other, so that
//! switching a kind of fault off leaves the workload as it was.

use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Who draws.
#[derive(Debug, Clone, Copy)]
pub enum Stream {
    /// How the seed is set up.
    Setup,
    /// A device, by number, in one life of the node.
    Device(u64, u64),
    /// What a loss of power leaves, after one life.
    Loss(u64),
    /// How one life goes.
    Life(u64),
    /// One worker in one life.
    Worker(u64, u64),
    /// The network between clients and nodes.
    Network,
    /// One side of a line of it.
    Line(u64, u64),
    /// What becomes of the nodes at one address.
    Host(u64),
    /// RDMA devices.
    Rdma,
}

impl Stream {
    fn number(self) -> u64 {
        match self {
            Stream::Setup => 0,
            Stream::Device(life, number) => 1 << 56 | number << 48 | life,
            Stream::Loss(life) => 2 << 56 | life,
            Stream::Life(life) => 4 << 56 | life,
            Stream::Worker(life, worker) => 3 << 56 | life << 16 | worker,
            Stream::Network => 5 << 56,
            Stream::Line(line, side) => 6 << 56 | line << 8 | side,
            Stream::Host(number) => 7 << 56 | number,
            Stream::Rdma => 8 << 56,
        }
    }
}

/// A stream of random numbers.
#[derive(Debug)]
pub struct Dice(ChaCha8Rng);

impl Dice {
    /// The stream of a seed.
    pub fn new(seed: u64, stream: Stream) -> Dice {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream.number());
        Dice(random)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.random_range(0..end)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0.random_range(low..=high)
    }

    /// True `per_million` times in a million.
    pub fn chance(&mut self, per_million: u32) -> bool {
        per_million > 0 && self.0.random_range(0..1_000_000) < per_million
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Fills bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }
}
