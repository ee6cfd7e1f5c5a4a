//! One connection for events: a subscriber, or one that asks for older batches.
//!
//! Invariants:
//! - A connection holds one message at a time, beside the buffers of its socket. The next one is
//!   read from the kept batches only after its client took the last one.
//! - A client that takes nothing for the stall timeout is disconnected, and so is one without a
//!   subscription or a request for [`UNUSED_TIMEOUT`](crate::event_limits::UNUSED_TIMEOUT).
//!   Heartbeats do not prolong this time.
//! - A connection reads nothing while much of its output waits, or while a replay is in progress.
//! - A snapshot begins at the earliest when the last one of its connection is as long over as its
//!   walk over L2 took, and [`SNAPSHOT_PAUSE_MIN`].

use super::seats::Seat;
use super::{EventServer, Place};
use crate::connection::prepare_tcp;
use crate::event_limits::{INPUT_BYTES, OUTPUT_PAUSE_BYTES, SNAPSHOT_PAUSE_MIN};
use larder_runtime::now;
use larder_zmtp::{Command, Frame, SocketKind, ZmtpError};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Number that ends a replay: -1, as in vLLM and SGLang.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// Reason why the node closed a connection.
#[derive(Debug, Error)]
enum Closed {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{0}")]
    Protocol(#[from] ZmtpError),
    #[error("nothing was taken or sent in time")]
    Stalled,
    #[error("it had no subscription to the topic, or asked for no replay, for {} s", .0.as_secs())]
    Unused(Duration),
}

/// Serves one connection until its client disconnects, stalls or violates the protocol.
pub(super) async fn serve(server: Arc<EventServer>, kind: SocketKind, stream: TcpStream, seat: Seat) {
    let peer = prepare_tcp(&stream);
    let (read, write) = stream.into_split();
    let mut connection = Connection::new(server, kind, seat);
    match connection.run(read, write).await {
        Ok(()) => {}
        Err(error @ Closed::Io(_)) => tracing::debug!(?peer, %error, "a connection for KV events failed"),
        Err(error) => {
            connection.server.node.metrics.kv_events_connections_refused.inc();
            tracing::debug!(?peer, %error, "closed a connection for KV events");
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The peer's greeting is missing.
    Greeting,
    /// The end of the peer's handshake is missing.
    Handshake,
    Open,
}

/// State of the request for a replay on this connection.
enum Request {
    None,
    /// The empty frame before the number has arrived.
    Begun,
    /// A replay whose batches are gone. A snapshot comes after the pause.
    Due,
    Snapshot(Snapshot),
    /// Batches that are still to be sent.
    Batches(Range<u64>),
}

/// The rest of a snapshot: the batches up to `batches_end`, and then the pages from `place` on,
/// `None` if all were sent. The pages carry the number of the batch before `next`, which follows.
///
/// Batches come between the pages, because the oldest may be gone at the end of a long walk.
struct Snapshot {
    place: Option<Place>,
    is_first: bool,
    next: u64,
    batches_end: u64,
    /// Time that the walk over L2 took so far, with its waits for other walks.
    walked: Duration,
}

/// Bytes on their way to the client.
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    sent: usize,
}

impl Output {
    fn left(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    fn is_empty(&self) -> bool {
        self.left().is_empty()
    }

    fn advance(&mut self, count: usize) {
        self.sent += count;
        if self.is_empty() {
            self.bytes.clear();
            self.sent = 0;
        }
    }
}

struct Connection {
    server: Arc<EventServer>,
    kind: SocketKind,
    phase: Phase,
    input: Vec<u8>,
    output: Output,
    /// Number of the subscriptions that the topic matches.
    subscriptions: u64,
    /// Number of the next batch for the subscriber.
    next: u64,
    request: Request,
    /// Earliest begin of the next snapshot.
    next_snapshot: Instant,
    /// End of the handshake, of the last subscription or of the last replay.
    unused_since: Instant,
    seat: Seat,
}

impl Connection {
    fn new(server: Arc<EventServer>, kind: SocketKind, seat: Seat) -> Connection {
        Connection {
            kind,
            phase: Phase::Greeting,
            input: Vec::with_capacity(INPUT_BYTES),
            output: Output::default(),
            subscriptions: 0,
            next: 0,
            request: Request::None,
            next_snapshot: now(),
            unused_since: now(),
            server,
            seat,
        }
    }

    async fn run(&mut self, mut read: OwnedReadHalf, mut write: OwnedWriteHalf) -> Result<(), Closed> {
        let handshake_end = now() + self.server.node.handshake_timeout();
        let stall_timeout = self.server.node.stall_timeout();
        let mut last_progress = now();
        self.output.bytes.extend_from_slice(&larder_zmtp::greeting());
        loop {
            self.take_input()?;
            if self.output.is_empty() && self.has_work() {
                self.work().await?;
                last_progress = now();
                // Other tasks of this thread get their turn, also while the client takes everything
                // at once.
                tokio::task::yield_now().await;
                continue;
            }
            let has_output = !self.output.is_empty();
            let (deadline, late) = match self.phase {
                Phase::Open if has_output => (Some(last_progress + stall_timeout), Closed::Stalled),
                Phase::Open => {
                    let unused_timeout = self.server.unused_timeout;
                    let is_unused = self.subscriptions == 0;
                    (is_unused.then(|| self.unused_since + unused_timeout), Closed::Unused(unused_timeout))
                }
                Phase::Greeting | Phase::Handshake => (Some(handshake_end), Closed::Stalled),
            };
            tokio::select! {
                // The deadline first: a client that always sends must not put it off.
                biased;
                () = until(deadline) => return Err(late),
                written = write.write(self.output.left()), if has_output => {
                    match written? {
                        0 => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                        count => self.output.advance(count),
                    }
                    last_progress = now();
                }
                received = read.read_buf(&mut self.input), if self.takes_input() => {
                    if received? == 0 {
                        return Ok(());
                    }
                    // An answer to a heartbeat may follow: its time to leave begins now.
                    if !has_output {
                        last_progress = now();
                    }
                }
                () = self.server.batches.wait_for(self.next), if self.subscriptions > 0 && !has_output => {}
            }
        }
    }

    fn is_replaying(&self) -> bool {
        matches!(self.request, Request::Due | Request::Snapshot(_) | Request::Batches(_))
    }

    fn takes_input(&self) -> bool {
        !self.is_replaying() && self.output.left().len() <= OUTPUT_PAUSE_BYTES
    }

    fn has_work(&self) -> bool {
        match self.kind {
            SocketKind::Pub => self.subscriptions > 0 && self.server.batches.numbers().end > self.next,
            SocketKind::Router => self.is_replaying(),
        }
    }

    /// Takes a step: writes the next message into the output, or finds that there is none.
    async fn work(&mut self) -> Result<(), Closed> {
        match self.kind {
            SocketKind::Pub => {
                let Some((number, batch)) = self.server.batches.since(self.next) else { return Ok(()) };
                let number_bytes = number.to_be_bytes();
                self.server.node.metrics.kv_events_batches_missed.inc_by(number - self.next);
                self.next = number + 1;
                let frames = [&self.server.topic[..], &number_bytes[..], &batch[..]];
                larder_zmtp::message(&mut self.output.bytes, &frames);
            }
            SocketKind::Router => {
                self.request = match std::mem::replace(&mut self.request, Request::None) {
                    Request::Due => self.begin_snapshot().await,
                    Request::Snapshot(snapshot) => self.send_snapshot(snapshot).await?,
                    Request::Batches(numbers) => self.send_batch(numbers),
                    waiting => waiting,
                };
            }
        }
        Ok(())
    }

    /// Waits for the pause after the last snapshot.
    async fn begin_snapshot(&self) -> Request {
        tokio::time::sleep_until(self.next_snapshot.into()).await;
        // At least one batch is kept, so its number is not 0.
        let next = self.server.batches.numbers().end;
        let place = Some(Place::L2(0));
        Request::Snapshot(Snapshot { place, is_first: true, next, batches_end: next, walked: Duration::ZERO })
    }

    /// Sends the next batch or the next pages of a snapshot. Returns the state after them.
    async fn send_snapshot(&mut self, snapshot: Snapshot) -> Result<Request, Closed> {
        let Snapshot { place, is_first, next, batches_end, walked } = snapshot;
        if let Some(next) = self.send_first(next..batches_end) {
            return Ok(Request::Snapshot(Snapshot { next, ..snapshot }));
        }
        let Some(from) = place else {
            self.next_snapshot = now() + walked.max(SNAPSHOT_PAUSE_MIN);
            let end = self.server.batches.numbers().end;
            return Ok(Request::Batches(next..end));
        };
        let begin = now();
        let walk = tokio::time::timeout(self.server.node.stall_timeout(), self.server.walk_for_replay(from));
        let (pages, place) = walk.await.map_err(|_| Closed::Stalled)?;
        if is_first || !pages.is_empty() {
            let batch = self.server.encode(is_first, &pages);
            self.send_replayed(&(next - 1).to_be_bytes(), &batch);
        }
        let walked = walked + (now() - begin);
        let batches_end = self.server.batches.numbers().end;
        Ok(Request::Snapshot(Snapshot { place, is_first: false, next, batches_end, walked }))
    }

    /// Sends the first of these batches that is still kept. Returns the number behind it.
    fn send_first(&mut self, numbers: Range<u64>) -> Option<u64> {
        let (number, batch) = self.server.batches.since(numbers.start).filter(|(number, _)| *number < numbers.end)?;
        self.send_replayed(&number.to_be_bytes(), &batch);
        Some(number + 1)
    }

    /// Sends the first of these batches that is still kept, or the end. Returns the state after it.
    fn send_batch(&mut self, numbers: Range<u64>) -> Request {
        match self.send_first(numbers.clone()) {
            Some(next) => Request::Batches(next..numbers.end),
            None => {
                self.unused_since = now();
                self.send_replayed(&END_OF_REPLAY, &[]);
                Request::None
            }
        }
    }

    fn send_replayed(&mut self, number: &[u8; 8], batch: &[u8]) {
        larder_zmtp::message(&mut self.output.bytes, &[b"".as_slice(), number.as_slice(), batch]);
    }

    /// Takes all that has arrived in whole, until the output must leave first.
    fn take_input(&mut self) -> Result<(), ZmtpError> {
        let mut input = std::mem::take(&mut self.input);
        let mut taken = 0;
        while self.takes_input() {
            let length = self.take_first(&input[taken..])?;
            if length == 0 {
                break;
            }
            taken += length;
        }
        input.drain(..taken);
        self.input = input;
        Ok(())
    }

    /// Takes the greeting or the frame at the start of `bytes`. Returns its length, or 0 if bytes
    /// are missing.
    fn take_first(&mut self, bytes: &[u8]) -> Result<usize, ZmtpError> {
        if self.phase == Phase::Greeting {
            let Some(length) = larder_zmtp::decode_greeting(bytes)? else { return Ok(0) };
            larder_zmtp::ready(&mut self.output.bytes, self.kind);
            self.phase = Phase::Handshake;
            return Ok(length);
        }
        let Some((frame, length)) = larder_zmtp::decode_frame(bytes)? else { return Ok(0) };
        if self.phase == Phase::Handshake {
            self.end_handshake(frame)?;
        } else if frame.is_command {
            match Command::decode(frame.body)? {
                Command::Ping { context } => larder_zmtp::pong(&mut self.output.bytes, context),
                Command::Subscribe(prefix) => self.subscribe(prefix),
                Command::Cancel(prefix) => self.unsubscribe(prefix),
                Command::Ready { .. } => return Err(ZmtpError::Unexpected),
                Command::Other => {}
            }
        } else {
            self.take_message_frame(frame)?;
        }
        Ok(length)
    }

    fn end_handshake(&mut self, frame: Frame<'_>) -> Result<(), ZmtpError> {
        let Frame { is_command: true, body, .. } = frame else { return Err(ZmtpError::Unexpected) };
        match Command::decode(body)? {
            Command::Ready { socket_type } if self.kind.accepts(socket_type) => {
                self.phase = Phase::Open;
                self.unused_since = now();
            }
            _ => return Err(ZmtpError::Unexpected),
        }
        Ok(())
    }

    fn take_message_frame(&mut self, frame: Frame<'_>) -> Result<(), ZmtpError> {
        match (self.kind, frame.body) {
            // Subscriptions of ZMTP 3.0 are messages.
            (SocketKind::Pub, [1, prefix @ ..]) => self.subscribe(prefix),
            (SocketKind::Pub, [0, prefix @ ..]) => self.unsubscribe(prefix),
            (SocketKind::Pub, _) => return Err(ZmtpError::Unexpected),
            (SocketKind::Router, body) => {
                let is_begun = matches!(self.request, Request::Begun);
                self.request = match (is_begun, frame.has_more, body) {
                    (false, true, []) => Request::Begun,
                    (true, false, &[a, b, c, d, e, f, g, h]) => {
                        self.replay(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
                    }
                    _ => return Err(ZmtpError::Unexpected),
                };
            }
        }
        Ok(())
    }

    /// Begins a replay from the batch with this number on.
    fn replay(&self, number: u64) -> Request {
        self.seat.mark_used();
        let kept = self.server.batches.numbers();
        if number >= kept.start {
            return Request::Batches(number..kept.end);
        }
        Request::Due
    }

    fn subscribe(&mut self, prefix: &[u8]) {
        if !self.server.topic.starts_with(prefix) {
            return;
        }
        if self.subscriptions == 0 {
            self.next = self.server.batches.numbers().end;
            self.seat.mark_used();
        }
        self.subscriptions += 1;
    }

    /// Ends a subscription. One that does not exist is ignored, as in libzmq.
    fn unsubscribe(&mut self, prefix: &[u8]) {
        if self.server.topic.starts_with(prefix) && self.subscriptions > 0 {
            self.subscriptions -= 1;
            self.unused_since = now();
        }
    }
}

/// Resolves at the deadline, or never without one.
async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::tests::{lose_batch_0, server_with};
    use crate::options::NodeOptions;
    use crate::places::Peer;

    /// Takes steps until one has a message. Returns its number.
    async fn next_number(connection: &mut Connection) -> [u8; 8] {
        connection.output.bytes.clear();
        while connection.output.bytes.is_empty() {
            assert!(connection.is_replaying());
            connection.work().await.unwrap();
        }
        // An empty frame, and the head of the frame with the number.
        assert_eq!(connection.output.bytes[..4], [1, 0, 1, 8]);
        connection.output.bytes[4..12].try_into().unwrap()
    }

    #[tokio::test]
    async fn snapshot_has_no_gap_although_the_batches_since_its_begin_are_not_kept() {
        /// Batches of each step of the walk. The node keeps these, but not twice as many.
        const BATCHES: u64 = 200;
        /// Batches after the walk, while those before its end are sent.
        const LATE: u64 = 2;
        let server = server_with(NodeOptions { kv_events_l3: true, ..NodeOptions::default() });
        lose_batch_0(&server);
        let append_batches = || (0..BATCHES).for_each(|_| server.batches.append(vec![3; 60_000]));
        let seat = server.replays.take(Peer::Local).unwrap();
        let mut connection = Connection::new(server.clone(), SocketKind::Router, seat);
        connection.request = connection.begin_snapshot().await;
        let first = server.batches.numbers().end;
        append_batches();
        assert_eq!(next_number(&mut connection).await, (first - 1).to_be_bytes(), "the pages of L2");
        for number in first..first + BATCHES {
            assert_eq!(next_number(&mut connection).await, number.to_be_bytes());
        }
        append_batches();
        assert!(server.batches.numbers().start > first);
        for number in first + BATCHES..first + 2 * BATCHES + LATE {
            assert_eq!(next_number(&mut connection).await, number.to_be_bytes());
            if number == first + BATCHES {
                (0..LATE).for_each(|_| server.batches.append(vec![3]));
            }
        }
        assert_eq!(next_number(&mut connection).await, END_OF_REPLAY);
        assert!(!connection.is_replaying());
    }
}
