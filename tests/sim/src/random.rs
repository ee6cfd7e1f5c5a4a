//! Random streams of a seed.
//!
//! Invariants:
//! - Every value follows from the seed and the stream.
//! - Streams are independent. Disabling one kind of fault leaves the workload unchanged.

use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Consumer of random numbers. Each has an independent stream: a further draw of one consumer
/// changes nothing for the others.
#[derive(Debug, Clone, Copy)]
pub enum Stream {
    Setup,
    /// One device in one incarnation: incarnation, device number.
    Device(u64, u64),
    Crash(u64),
    Incarnation(u64),
    /// One worker in one incarnation: incarnation, worker number.
    Worker(u64, u64),
    Network,
    /// One side of a connection: connection number, side.
    Connection(u64, u64),
    Host(u64),
    Rdma,
    /// A client that returns to a busy node.
    Caller(u64),
    /// Identity of a node: number of the start, number of the disk.
    Identity(u64, u64),
}

impl Stream {
    /// Number of the stream: its kind in the top 8 bits, and its arguments below. Two consumers
    /// with one number would draw the same values.
    fn number(self) -> u64 {
        match self {
            Stream::Setup => 0,
            Stream::Device(incarnation, number) => 1 << 56 | number << 48 | incarnation,
            Stream::Crash(incarnation) => 2 << 56 | incarnation,
            Stream::Incarnation(incarnation) => 4 << 56 | incarnation,
            Stream::Worker(incarnation, worker) => 3 << 56 | incarnation << 16 | worker,
            Stream::Network => 5 << 56,
            Stream::Connection(connection, side) => 6 << 56 | connection << 8 | side,
            Stream::Host(number) => 7 << 56 | number,
            Stream::Rdma => 8 << 56,
            Stream::Caller(number) => 9 << 56 | number,
            Stream::Identity(start, disk) => 10 << 56 | disk << 48 | start,
        }
    }
}

/// Stream of random numbers. All draws of the simulation go through it. A draw from elsewhere would
/// make seeds unrepeatable.
#[derive(Debug)]
pub struct RandomSource(ChaCha8Rng);

impl RandomSource {
    pub fn new(seed: u64, stream: Stream) -> RandomSource {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream.number());
        RandomSource(random)
    }

    /// Draws a number in `0..end`. `end` must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.random_range(0..end)
    }

    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0.random_range(low..=high)
    }

    /// Returns `true` with a probability of `per_million` in a million. A rate of 0 draws nothing,
    /// so a disabled fault does not shift the stream.
    pub fn chance(&mut self, per_million: u32) -> bool {
        per_million > 0 && self.0.random_range(0..1_000_000) < per_million
    }

    pub fn any(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }
}
