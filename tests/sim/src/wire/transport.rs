//! Fake transport: byte streams in memory that are slow, break, and corrupt data.
//!
//! A [`FakeConnection`] has two directions, each with a bounded buffer. It delivers bytes in order,
//! in chunks of any size, after any delay. Faults, by seed:
//! - A chunk takes seconds, or longer than any timeout. A slow connection delivers a few bytes per
//!   millisecond.
//! - All connections carry a limited number of bytes per second, evenly.
//! - At a chosen byte the connection is cut. Both ends notice at once, or neither does for a
//!   minute, or only one direction fails.
//! - Corruption: bits flip, and stretches of bytes are omitted, duplicated, replayed later or
//!   reordered.
//!
//! Invariants:
//! - A buffer holds at most [`BUFFER_BYTES`], and the bytes that faults add to one chunk.
//! - Dropping a future of a send or receive loses no bytes and sends none.
//! - When one end is dropped, the other end notices.

use crate::faults::Profile;
use crate::random::{RandomSource, Stream};
use crate::world::World;
use larder_runtime::lock::Mutex;
use larder_wire::{ByteSink, ByteSource};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Capacity of one direction, in bytes.
const BUFFER_BYTES: usize = 64 << 10;
/// Time after which both ends notice that a connection died silently. It stands for the TCP
/// keepalive of real connections.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(60);
const RECENT_MAX: usize = 8;
/// Chunks per second of a connection with a limited rate. Its bytes come evenly, as on a real link.
const STEPS_PER_SECOND: usize = 20;

/// Fault rates of the network, per million events of the named kind. All of them are 0 while the
/// cluster has to become idle.
#[derive(Debug, Clone, Copy, Default)]
pub struct NetworkFaults {
    pub refuse: u32,
    pub cut: u32,
    /// Connections that deliver a few bytes per millisecond.
    pub slow: u32,
    pub stall: u32,
    pub flip: u32,
    pub omit: u32,
    pub duplicate: u32,
    pub replay: u32,
    pub reorder: u32,
    pub peer_memory_short: u32,
    pub peer_memory_elsewhere: u32,
    pub peer_memory_flip: u32,
    pub latency_ms_max: u64,
    /// Rate of each direction of each connection. 0: no limit.
    pub bytes_per_second: u64,
}

impl NetworkFaults {
    pub fn draw(profile: Profile, random: &mut RandomSource) -> NetworkFaults {
        let mut faults =
            NetworkFaults { latency_ms_max: [0, 1, 4, 20][random.below(4) as usize], ..NetworkFaults::default() };
        let mut rate = |most: u32| [0, most / 20, most / 4, most][random.below(4) as usize];
        if profile != Profile::Calm {
            faults.refuse = rate(200_000);
            faults.cut = rate(700_000);
            faults.slow = rate(50_000);
            faults.stall = rate(2_000);
        }
        if profile.has_silent_faults() {
            faults.flip = rate(10_000);
            faults.omit = rate(10_000);
            faults.duplicate = rate(10_000);
            faults.replay = rate(20_000);
            faults.reorder = rate(10_000);
            faults.peer_memory_short = rate(50_000);
            faults.peer_memory_elsewhere = rate(50_000);
            faults.peer_memory_flip = rate(50_000);
        }
        faults
    }

    pub fn stop(&mut self) {
        *self = NetworkFaults { latency_ms_max: self.latency_ms_max, ..NetworkFaults::default() };
    }

    /// Leaves few faults that end a connection, and with it the RDMA channels.
    pub fn spare_connections(&mut self) {
        let kept = NetworkFaults { refuse: self.refuse / 20, cut: self.cut / 20, slow: 0, ..*self };
        *self = NetworkFaults { flip: 0, omit: 0, duplicate: 0, replay: 0, reorder: 0, ..kept };
    }

    fn has_silent_faults(&self) -> bool {
        self.flip + self.omit + self.duplicate + self.replay + self.reorder > 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnect {
    Reset,
    /// Neither end notices before this time.
    Silent(Instant),
}

struct Chunk {
    due: Instant,
    bytes: Vec<u8>,
    taken: usize,
}

struct DirectionState {
    random: RandomSource,
    chunks: VecDeque<Chunk>,
    buffered: usize,
    last_due: Instant,
    sent: u64,
    recent: VecDeque<Vec<u8>>,
    cut: Option<Disconnect>,
    sender_gone: bool,
    receiver_gone: bool,
}

struct Direction {
    state: Mutex<DirectionState>,
    data: Notify,
    room: Notify,
}

#[derive(Clone, Copy)]
struct CutPlan {
    direction: usize,
    at: u64,
    both: bool,
    silent: bool,
}

pub struct FakeConnection {
    world: Arc<World>,
    faults: Arc<Mutex<NetworkFaults>>,
    directions: [Direction; 2],
    plan: Mutex<Option<CutPlan>>,
    slow: bool,
}

pub struct FakeSource {
    connection: Arc<FakeConnection>,
    direction: usize,
}

pub struct FakeSink {
    connection: Arc<FakeConnection>,
    direction: usize,
}

pub type ConnectionEnd = (FakeSource, FakeSink);

impl FakeConnection {
    /// Creates connection `number` and its two ends. The number selects the random stream, so the
    /// faults of the connection follow from the seed.
    pub fn new(
        world: Arc<World>,
        faults: Arc<Mutex<NetworkFaults>>,
        number: u64,
    ) -> (Arc<FakeConnection>, ConnectionEnd, ConnectionEnd) {
        let mut random = RandomSource::new(world.seed, Stream::Connection(number, 2));
        let rates = *faults.lock();
        let cut = random.chance(rates.cut);
        let bytes = [300, 5_000, 50_000, 500_000][random.below(4) as usize];
        let plan = cut.then(|| CutPlan {
            direction: random.below(2) as usize,
            at: 1 + random.below(bytes),
            both: random.chance(700_000),
            silent: random.chance(300_000),
        });
        let slow = random.chance(rates.slow);
        let direction = |side| Direction {
            state: Mutex::new(DirectionState {
                random: RandomSource::new(world.seed, Stream::Connection(number, side)),
                chunks: VecDeque::new(),
                buffered: 0,
                last_due: Instant::now(),
                sent: 0,
                recent: VecDeque::new(),
                cut: None,
                sender_gone: false,
                receiver_gone: false,
            }),
            data: Notify::new(),
            room: Notify::new(),
        };
        let directions = [direction(0), direction(1)];
        let connection = Arc::new(FakeConnection { world, faults, directions, plan: Mutex::new(plan), slow });
        let end = |from, to| {
            let connection = connection.clone();
            let other = connection.clone();
            (FakeSource { connection, direction: from }, FakeSink { connection: other, direction: to })
        };
        let ends = (end(0, 1), end(1, 0));
        (connection, ends.0, ends.1)
    }

    pub fn cut(&self, silent: bool) {
        (0..2).for_each(|direction| self.cut_one(direction, silent));
    }

    fn cut_one(&self, direction: usize, silent: bool) {
        let Direction { state, data, room } = &self.directions[direction];
        let mut state = state.lock();
        let cut = if silent { Disconnect::Silent(Instant::now() + KEEPALIVE_TIMEOUT) } else { Disconnect::Reset };
        // The first cut decides: a later one must not shorten or extend the silence.
        state.cut.get_or_insert(cut);
        // Bytes in flight at the cut may arrive or not.
        if state.random.chance(500_000) {
            state.chunks.clear();
        }
        drop(state);
        data.notify_one();
        room.notify_one();
    }

    /// Accepts bytes from `from`. Returns `None` if the buffer is full.
    fn send_bytes(&self, direction: usize, from: &[IoSlice<'_>]) -> Option<io::Result<usize>> {
        let Direction { state, data, .. } = &self.directions[direction];
        let mut state = state.lock();
        let rate = self.faults.lock().bytes_per_second;
        // A second's worth at most: sockets limit the bytes that the kernel has not sent.
        let buffer_bytes = if rate == 0 { BUFFER_BYTES } else { BUFFER_BYTES.min(rate as usize) };
        let room = buffer_bytes.saturating_sub(state.buffered);
        match state.cut {
            _ if state.receiver_gone => return Some(Err(io::ErrorKind::BrokenPipe.into())),
            Some(Disconnect::Reset) => return Some(Err(io::ErrorKind::ConnectionReset.into())),
            Some(Disconnect::Silent(until)) if until <= Instant::now() => {
                return Some(Err(io::ErrorKind::TimedOut.into()));
            }
            _ if room == 0 => return None,
            _ => {}
        }
        let offered = from.iter().map(|slice| slice.len()).sum::<usize>().min(room);
        // The `slow` flag of a connection has no effect once faults have stopped.
        let slow = self.slow && self.faults.lock().slow > 0;
        let piece = match state.random.below(4) {
            _ if slow => state.random.between(1, 64) as usize,
            0 | 1 => offered,
            2 => state.random.between(1, 4096) as usize,
            _ => state.random.between(1, 32 << 10) as usize,
        };
        let even = if rate == 0 { offered } else { (rate as usize / STEPS_PER_SECOND).max(1) };
        let mut bytes = piece.min(offered).min(even);
        let breaks = self.faults.lock().cut > 0;
        let plan = self.plan.lock().filter(|plan| {
            breaks && plan.direction == direction && (state.sent..=state.sent + bytes as u64).contains(&plan.at)
        });
        if let Some(plan) = plan {
            bytes = (plan.at - state.sent) as usize;
            *self.plan.lock() = None;
        }
        let mut piece = Vec::with_capacity(bytes);
        for slice in from {
            let now = slice.len().min(bytes - piece.len());
            piece.extend_from_slice(&slice[..now]);
        }
        state.sent += bytes as u64;
        match state.cut {
            Some(_) => state.buffered += bytes,
            None => self.enqueue(&mut state, piece),
        }
        drop(state);
        data.notify_one();
        if let Some(plan) = plan {
            self.world.fault(
                if plan.silent { "connection dies silently" } else { "connection reset" },
                [direction as u64, plan.at, 0],
            );
            match plan.both {
                true => self.cut(plan.silent),
                false => self.cut_one(direction, plan.silent),
            }
        }
        Some(Ok(bytes))
    }

    /// Appends a chunk to the buffer, with injected delay and corruption. The bytes that faults add
    /// may exceed [`BUFFER_BYTES`].
    fn enqueue(&self, state: &mut DirectionState, mut piece: Vec<u8>) {
        let faults = *self.faults.lock();
        let mut due = Instant::now() + Duration::from_millis(state.random.between(0, faults.latency_ms_max));
        if faults.bytes_per_second > 0 {
            let time = Duration::from_secs_f64(piece.len() as f64 / faults.bytes_per_second as f64);
            due = due.max(state.last_due + time);
        }
        if self.slow && faults.slow > 0 {
            due = due.max(state.last_due + Duration::from_millis(1));
        }
        if state.random.chance(faults.stall) {
            let seconds = [1, 4, 12, 35][state.random.below(4) as usize];
            self.world.fault("network stall", [seconds, 0, 0]);
            due += Duration::from_secs(seconds);
        }
        let mut pieces = Vec::new();
        if faults.has_silent_faults() && !piece.is_empty() {
            let random = &mut state.random;
            let world = &self.world;
            let whole = piece.clone();
            let from = random.below(piece.len() as u64) as usize;
            let stretch = if random.chance(500_000) { 0..piece.len() } else { from..piece.len().min(from + 200) };
            if random.chance(faults.flip) {
                world.fault("network bit flip", [from as u64, piece.len() as u64, 0]);
                piece[from] ^= 1 << random.below(8);
            }
            if random.chance(faults.duplicate) {
                world.fault("network duplicate", [stretch.start as u64, stretch.end as u64, 0]);
                pieces.push(piece[stretch.clone()].to_vec());
            }
            if random.chance(faults.omit) {
                world.fault("network omission", [stretch.start as u64, stretch.end as u64, 0]);
                piece.drain(stretch);
            }
            if random.chance(faults.replay) && !state.recent.is_empty() {
                let which = random.below(state.recent.len() as u64) as usize;
                world.fault("network replay", [which as u64, 0, 0]);
                // Replay one chunk, or all chunks from there on.
                let until = if random.chance(500_000) { which + 1 } else { state.recent.len() };
                pieces.extend(state.recent.range(which..until).cloned());
            }
            state.recent.push_back(whole);
            if state.recent.len() > RECENT_MAX {
                state.recent.pop_front();
            }
        }
        pieces.insert(0, piece);
        due = due.max(state.last_due);
        state.last_due = due;
        for bytes in pieces.into_iter().filter(|bytes| !bytes.is_empty()) {
            state.buffered += bytes.len();
            let chunk = Chunk { due, bytes, taken: 0 };
            match state.chunks.len() {
                last @ 1.. if state.chunks[last - 1].taken == 0 && state.random.chance(faults.reorder) => {
                    self.world.fault("network reorder", [last as u64, 0, 0]);
                    let before = std::mem::replace(&mut state.chunks[last - 1].bytes, chunk.bytes);
                    state.chunks.push_back(Chunk { bytes: before, ..chunk });
                }
                _ => state.chunks.push_back(chunk),
            }
        }
    }

    /// Delivers bytes. With none due, the error is the time to wait for, if known.
    fn receive_bytes(
        &self,
        direction: usize,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<io::Result<usize>, Option<Instant>> {
        let Direction { state, room, .. } = &self.directions[direction];
        let mut state = state.lock();
        let now = Instant::now();
        if let Some(chunk) = state.chunks.front_mut() {
            if chunk.due > now {
                return Err(Some(chunk.due));
            }
            let received = (&chunk.bytes[chunk.taken..]).read_vectored(into);
            let bytes = received.as_ref().map_or(0, |bytes| *bytes);
            chunk.taken += bytes;
            if chunk.taken == chunk.bytes.len() {
                state.chunks.pop_front();
            }
            state.buffered -= bytes;
            room.notify_one();
            return Ok(received);
        }
        match state.cut {
            Some(Disconnect::Reset) => Ok(Err(io::ErrorKind::ConnectionReset.into())),
            Some(Disconnect::Silent(until)) if until <= now => Ok(Err(io::ErrorKind::TimedOut.into())),
            Some(Disconnect::Silent(until)) => Err(Some(until)),
            None if state.sender_gone => Ok(Ok(0)),
            None => Err(None),
        }
    }
}

impl ByteSource for FakeSource {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let data = &self.connection.directions[self.direction].data;
        // `Notify` stores one permit, so a notification between the check and the wait is not lost.
        loop {
            match self.connection.receive_bytes(self.direction, into) {
                Ok(received) => return received,
                Err(Some(until)) => drop(timeout_at(until, data.notified()).await),
                Err(None) => data.notified().await,
            }
        }
    }
}

impl ByteSink for FakeSink {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let Direction { state, room, .. } = &self.connection.directions[self.direction];
        loop {
            if let Some(sent) = self.connection.send_bytes(self.direction, from) {
                return sent;
            }
            let cut = state.lock().cut;
            match cut {
                Some(Disconnect::Silent(until)) => drop(timeout_at(until, room.notified()).await),
                _ => room.notified().await,
            }
        }
    }
}

impl Drop for FakeSource {
    fn drop(&mut self) {
        let Direction { state, room, .. } = &self.connection.directions[self.direction];
        state.lock().receiver_gone = true;
        room.notify_one();
    }
}

impl Drop for FakeSink {
    fn drop(&mut self) {
        let Direction { state, data, .. } = &self.connection.directions[self.direction];
        state.lock().sender_gone = true;
        data.notify_one();
    }
}
