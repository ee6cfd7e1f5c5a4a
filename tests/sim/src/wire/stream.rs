//! The fake transport: byte streams in memory that are slow, break, and lie.
//!
//! A [`Line`] is one connection: two directions, each with a bounded buffer. Bytes leave in pieces of any size after any
//! delay, in order. What goes wrong, as its seed says:
//! - a piece takes seconds, or longer than any peer's patience; a line gives a few bytes per millisecond;
//! - at some byte, the line is cut: both ends hear of it at once, or neither does for a minute, or one direction dies alone;
//! - it lies: bits flip, stretches are swallowed, repeated, sent again later, or overtake others, whole writes among them.
//!
//! Always true: a buffer holds at most [`ROOM`] bytes (and what lies add to one piece); dropping a future loses nothing and
//! sends nothing; when one end is dropped, the other hears of it.

use crate::dice::{Dice, Stream};
use crate::faults::Profile;
use crate::world::World;
use larder_wire::{Sink, Source};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Bytes that a direction holds.
const ROOM: usize = 64 << 10;
/// When both ends of a line that died without a word hear of it.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// Earlier pieces that may be sent again.
const REMEMBERED: usize = 8;

/// How often lines go wrong, per million.
#[derive(Debug, Clone, Copy, Default)]
pub struct LineFaults {
    /// Lines: refused.
    pub refuse: u32,
    /// Lines: cut at some byte.
    pub cut: u32,
    /// Lines: a few bytes per millisecond.
    pub slow: u32,
    /// Pieces: held back for seconds.
    pub stall: u32,
    /// Pieces: a bit flips.
    pub flip: u32,
    /// Pieces: a stretch is left out.
    pub swallow: u32,
    /// Pieces: a stretch comes twice.
    pub repeat: u32,
    /// Pieces: an earlier one comes again.
    pub replay: u32,
    /// Pieces: one overtakes the one before.
    pub overtake: u32,
    /// Reads of a client's memory: not all of it is there.
    pub lent_short: u32,
    /// Reads of a client's memory: what lies elsewhere.
    pub lent_elsewhere: u32,
    /// Reads of a client's memory: a bit is another meanwhile.
    pub lent_flip: u32,
    /// Most milliseconds of any piece.
    pub latency_ms_max: u64,
}

impl LineFaults {
    /// The rates of a seed.
    pub fn draw(profile: Profile, dice: &mut Dice) -> LineFaults {
        let mut faults = LineFaults { latency_ms_max: [0, 1, 4, 20][dice.below(4) as usize], ..LineFaults::default() };
        let mut rate = |most: u32| [0, most / 20, most / 4, most][dice.below(4) as usize];
        if profile != Profile::Calm {
            faults.refuse = rate(200_000);
            faults.cut = rate(700_000);
            faults.slow = rate(50_000);
            faults.stall = rate(2_000);
        }
        if profile.lies() {
            faults.flip = rate(10_000);
            faults.swallow = rate(10_000);
            faults.repeat = rate(10_000);
            faults.replay = rate(20_000);
            faults.overtake = rate(10_000);
            faults.lent_short = rate(50_000);
            faults.lent_elsewhere = rate(50_000);
            faults.lent_flip = rate(50_000);
        }
        faults
    }

    /// None from now on.
    pub fn calm(&mut self) {
        *self = LineFaults { latency_ms_max: self.latency_ms_max, ..LineFaults::default() };
    }

    fn lies(&self) -> bool {
        self.flip + self.swallow + self.repeat + self.replay + self.overtake > 0
    }
}

/// How a line ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Both ends hear of it.
    Reset,
    /// Nobody hears of it before this time.
    Silent(Instant),
}

struct Flight {
    due: Instant,
    bytes: Vec<u8>,
    taken: usize,
}

/// One direction.
struct Way {
    dice: Dice,
    flights: VecDeque<Flight>,
    buffered: usize,
    last_due: Instant,
    sent: u64,
    remembered: VecDeque<Vec<u8>>,
    cut: Option<Cut>,
    sender_gone: bool,
    receiver_gone: bool,
}

struct Direction {
    way: Mutex<Way>,
    /// Rung when there is something to receive.
    data: Notify,
    /// Rung when there is room.
    room: Notify,
}

/// When a line is cut.
#[derive(Clone, Copy)]
struct Plan {
    direction: usize,
    at: u64,
    both: bool,
    silent: bool,
}

/// One connection.
pub struct Line {
    world: Arc<World>,
    faults: Arc<Mutex<LineFaults>>,
    directions: [Direction; 2],
    plan: Mutex<Option<Plan>>,
    slow: bool,
}

/// Where bytes come out.
pub struct FakeSource {
    line: Arc<Line>,
    direction: usize,
}

/// Where bytes go in.
pub struct FakeSink {
    line: Arc<Line>,
    direction: usize,
}

/// One end of a line.
pub type LineEnd = (FakeSource, FakeSink);

impl Line {
    /// Line `number`, and its two ends.
    pub fn new(world: Arc<World>, faults: Arc<Mutex<LineFaults>>, number: u64) -> (Arc<Line>, LineEnd, LineEnd) {
        let mut dice = Dice::new(world.seed, Stream::Line(number, 2));
        let rates = *faults.lock();
        let cut = dice.chance(rates.cut);
        let bytes = [300, 5_000, 50_000, 500_000][dice.below(4) as usize];
        let plan = cut.then(|| Plan {
            direction: dice.below(2) as usize,
            at: 1 + dice.below(bytes),
            both: dice.chance(700_000),
            silent: dice.chance(300_000),
        });
        let slow = dice.chance(rates.slow);
        let direction = |side| Direction {
            way: Mutex::new(Way {
                dice: Dice::new(world.seed, Stream::Line(number, side)),
                flights: VecDeque::new(),
                buffered: 0,
                last_due: Instant::now(),
                sent: 0,
                remembered: VecDeque::new(),
                cut: None,
                sender_gone: false,
                receiver_gone: false,
            }),
            data: Notify::new(),
            room: Notify::new(),
        };
        let directions = [direction(0), direction(1)];
        let line = Arc::new(Line { world, faults, directions, plan: Mutex::new(plan), slow });
        let end = |from, to| {
            let (line, other) = (line.clone(), line.clone());
            (FakeSource { line, direction: from }, FakeSink { line: other, direction: to })
        };
        let ends = (end(0, 1), end(1, 0));
        (line, ends.0, ends.1)
    }

    /// Ends both directions.
    pub fn cut(&self, silent: bool) {
        (0..2).for_each(|direction| self.cut_one(direction, silent));
    }

    fn cut_one(&self, direction: usize, silent: bool) {
        let Direction { way, data, room } = &self.directions[direction];
        let mut way = way.lock();
        let cut = if silent { Cut::Silent(Instant::now() + KEEPALIVE) } else { Cut::Reset };
        way.cut.get_or_insert(cut);
        // What was on its way may have arrived.
        if way.dice.chance(500_000) {
            way.flights.clear();
        }
        drop(way);
        data.notify_one();
        room.notify_one();
    }

    /// Takes bytes from `from`; `None` if there is no room.
    fn take(&self, direction: usize, from: &[IoSlice<'_>]) -> Option<io::Result<usize>> {
        let Direction { way, data, .. } = &self.directions[direction];
        let mut way = way.lock();
        let room = ROOM.saturating_sub(way.buffered);
        match way.cut {
            _ if way.receiver_gone => return Some(Err(io::ErrorKind::BrokenPipe.into())),
            Some(Cut::Reset) => return Some(Err(io::ErrorKind::ConnectionReset.into())),
            Some(Cut::Silent(until)) if until <= Instant::now() => return Some(Err(io::ErrorKind::TimedOut.into())),
            _ if room == 0 => return None,
            _ => {}
        }
        let offered = from.iter().map(|slice| slice.len()).sum::<usize>().min(room);
        // Once faults have stopped, no line is slow any more.
        let slow = self.slow && self.faults.lock().slow > 0;
        let piece = match way.dice.below(4) {
            _ if slow => way.dice.between(1, 64) as usize,
            0 | 1 => offered,
            2 => way.dice.between(1, 4096) as usize,
            _ => way.dice.between(1, 32 << 10) as usize,
        };
        let mut bytes = piece.min(offered);
        let breaks = self.faults.lock().cut > 0;
        let plan = self.plan.lock().filter(|plan| {
            breaks && plan.direction == direction && (way.sent..=way.sent + bytes as u64).contains(&plan.at)
        });
        if let Some(plan) = plan {
            bytes = (plan.at - way.sent) as usize;
            *self.plan.lock() = None;
        }
        let mut piece = Vec::with_capacity(bytes);
        for slice in from {
            let now = slice.len().min(bytes - piece.len());
            piece.extend_from_slice(&slice[..now]);
        }
        way.sent += bytes as u64;
        match way.cut {
            Some(_) => way.buffered += bytes,
            None => self.lay(&mut way, piece),
        }
        drop(way);
        data.notify_one();
        if let Some(plan) = plan {
            self.world.fault(if plan.silent { "line dies" } else { "line cut" }, [direction as u64, plan.at, 0]);
            match plan.both {
                true => self.cut(plan.silent),
                false => self.cut_one(direction, plan.silent),
            }
        }
        Some(Ok(bytes))
    }

    /// Lays a piece onto the line, with what lies make of it.
    fn lay(&self, way: &mut Way, mut piece: Vec<u8>) {
        let faults = *self.faults.lock();
        let mut due = Instant::now() + Duration::from_millis(way.dice.between(0, faults.latency_ms_max));
        if self.slow && faults.slow > 0 {
            due = due.max(way.last_due + Duration::from_millis(1));
        }
        if way.dice.chance(faults.stall) {
            let seconds = [1, 4, 12, 35][way.dice.below(4) as usize];
            self.world.fault("line stalls", [seconds, 0, 0]);
            due += Duration::from_secs(seconds);
        }
        let mut pieces = Vec::new();
        if faults.lies() && !piece.is_empty() {
            let (dice, world) = (&mut way.dice, &self.world);
            let whole = piece.clone();
            let from = dice.below(piece.len() as u64) as usize;
            let stretch = if dice.chance(500_000) { 0..piece.len() } else { from..piece.len().min(from + 200) };
            if dice.chance(faults.flip) {
                world.fault("line flips a bit", [from as u64, piece.len() as u64, 0]);
                piece[from] ^= 1 << dice.below(8);
            }
            if dice.chance(faults.repeat) {
                world.fault("line repeats", [stretch.start as u64, stretch.end as u64, 0]);
                pieces.push(piece[stretch.clone()].to_vec());
            }
            if dice.chance(faults.swallow) {
                world.fault("line swallows", [stretch.start as u64, stretch.end as u64, 0]);
                piece.drain(stretch);
            }
            if dice.chance(faults.replay) && !way.remembered.is_empty() {
                let which = dice.below(way.remembered.len() as u64) as usize;
                world.fault("line replays", [which as u64, 0, 0]);
                // One piece, or all from there on.
                let until = if dice.chance(500_000) { which + 1 } else { way.remembered.len() };
                pieces.extend(way.remembered.range(which..until).cloned());
            }
            way.remembered.push_back(whole);
            if way.remembered.len() > REMEMBERED {
                way.remembered.pop_front();
            }
        }
        pieces.insert(0, piece);
        due = due.max(way.last_due);
        way.last_due = due;
        for bytes in pieces.into_iter().filter(|bytes| !bytes.is_empty()) {
            way.buffered += bytes.len();
            let flight = Flight { due, bytes, taken: 0 };
            match way.flights.len() {
                last @ 1.. if way.flights[last - 1].taken == 0 && way.dice.chance(faults.overtake) => {
                    self.world.fault("line swaps", [last as u64, 0, 0]);
                    let before = std::mem::replace(&mut way.flights[last - 1].bytes, flight.bytes);
                    way.flights.push_back(Flight { bytes: before, ..flight });
                }
                _ => way.flights.push_back(flight),
            }
        }
    }

    /// Gives bytes into `into`, or says until when there is nothing.
    fn give(&self, direction: usize, into: &mut [IoSliceMut<'_>]) -> Result<io::Result<usize>, Option<Instant>> {
        let Direction { way, room, .. } = &self.directions[direction];
        let mut way = way.lock();
        let now = Instant::now();
        if let Some(flight) = way.flights.front_mut() {
            if flight.due > now {
                return Err(Some(flight.due));
            }
            let received = (&flight.bytes[flight.taken..]).read_vectored(into);
            let bytes = received.as_ref().map_or(0, |bytes| *bytes);
            flight.taken += bytes;
            if flight.taken == flight.bytes.len() {
                way.flights.pop_front();
            }
            way.buffered -= bytes;
            room.notify_one();
            return Ok(received);
        }
        match way.cut {
            Some(Cut::Reset) => Ok(Err(io::ErrorKind::ConnectionReset.into())),
            Some(Cut::Silent(until)) if until <= now => Ok(Err(io::ErrorKind::TimedOut.into())),
            Some(Cut::Silent(until)) => Err(Some(until)),
            None if way.sender_gone => Ok(Ok(0)),
            None => Err(None),
        }
    }
}

impl Source for FakeSource {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let data = &self.line.directions[self.direction].data;
        loop {
            match self.line.give(self.direction, into) {
                Ok(received) => return received,
                Err(Some(until)) => drop(timeout_at(until, data.notified()).await),
                Err(None) => data.notified().await,
            }
        }
    }
}

impl Sink for FakeSink {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let Direction { way, room, .. } = &self.line.directions[self.direction];
        loop {
            if let Some(sent) = self.line.take(self.direction, from) {
                return sent;
            }
            let cut = way.lock().cut;
            match cut {
                Some(Cut::Silent(until)) => drop(timeout_at(until, room.notified()).await),
                _ => room.notified().await,
            }
        }
    }
}

impl Drop for FakeSource {
    fn drop(&mut self) {
        let Direction { way, room, .. } = &self.line.directions[self.direction];
        way.lock().receiver_gone = true;
        room.notify_one();
    }
}

impl Drop for FakeSink {
    fn drop(&mut self) {
        let Direction { way, data, .. } = &self.line.directions[self.direction];
        way.lock().sender_gone = true;
        data.notify_one();
    }
}
