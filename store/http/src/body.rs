//! Bodies of requests: received in pieces, charged as they arrive, within their time.
//!
//! Large bodies yield to other tasks of their thread: copies into fresh memory take milliseconds.
//!
//! A handler that keeps what it parsed takes a [`RequestBody`], and keeps its charge as long.

use crate::options::{BODY_BYTES_FREE, HttpOptions};
use crate::refusal::{Reason, Refusal};
use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::Bytes;
use hyper::body::{Body, Frame};
use prometheus_client::metrics::gauge::Gauge;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Bytes of a body after which other tasks of the thread go first. A copy of as many takes about
/// 0.1 ms, with fresh memory.
const TURN_BYTES: usize = 256 << 10;
/// Longest body that grows on the thread of its connection, in bytes. A growth copies the body.
const GROWN_IN_PLACE_MAX: usize = 512 << 10;

/// Memory for all bodies of a server.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    used: AtomicUsize,
    bytes_max: usize,
    /// Shows `used` to operators.
    gauge: Gauge,
}

impl BodyMemory {
    pub(crate) fn new(bytes_max: usize, gauge: Gauge) -> Arc<BodyMemory> {
        Arc::new(BodyMemory { used: AtomicUsize::new(0), bytes_max, gauge })
    }

    fn take(&self, bytes: usize) -> bool {
        // Relaxed: the counter guards no other memory.
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&used| used <= self.bytes_max)
        });
        if taken.is_ok() {
            self.gauge.inc_by(bytes as i64);
        }
        taken.is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.gauge.dec_by(bytes as i64);
    }
}

/// Memory charged for a body. Returned when the last handle is dropped.
#[derive(Debug, Clone, Default)]
pub struct BodyCharge {
    _charge: Option<Arc<Charge>>,
}

#[derive(Debug)]
struct Charge {
    bytes: AtomicUsize,
    memory: Arc<BodyMemory>,
}

impl Charge {
    /// Raises the charge to `bytes`. Returns `false` if there is no room. Only the task that
    /// receives the body calls it.
    fn raise(&self, bytes: usize) -> bool {
        // Relaxed: the counter guards no other memory.
        let has_room = self.memory.take(bytes - self.bytes.load(Ordering::Relaxed));
        if has_room {
            self.bytes.store(bytes, Ordering::Relaxed);
        }
        has_room
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.memory.give_back(*self.bytes.get_mut());
    }
}

/// Body of a request, in one piece. An extractor.
#[derive(Debug)]
pub struct RequestBody {
    pub bytes: Bytes,
    /// Keeps the body charged after its bytes are dropped. Without a charge for a body that this
    /// server did not receive, or that is short.
    pub charge: BodyCharge,
}

impl<S: Send + Sync> FromRequest<S> for RequestBody {
    type Rejection = (StatusCode, &'static str);

    async fn from_request(request: Request, _state: &S) -> Result<Self, Self::Rejection> {
        let (parts, body) = request.into_parts();
        let charge = parts.extensions.get().cloned().unwrap_or_default();
        // The server has received the whole body, within its limit.
        let bytes = to_bytes(body, usize::MAX).await;
        let bytes = bytes.map_err(|_| (StatusCode::BAD_REQUEST, "the request body is incomplete"))?;
        Ok(RequestBody { bytes, charge })
    }
}

/// Bytes of a body that arrives, with a charge for the whole buffer.
#[derive(Debug)]
struct ArrivingBody {
    bytes: Vec<u8>,
    /// Length that the body cannot exceed.
    bytes_max: usize,
    /// Shared with a growth in progress, which outlives a request that ends meanwhile.
    charge: Arc<Charge>,
}

/// Bytes of a body with their charge, as the owner of a [`Bytes`].
struct ChargedBytes {
    bytes: Vec<u8>,
    _charge: Arc<Charge>,
}

impl AsRef<[u8]> for ChargedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl ArrivingBody {
    /// Body of at most `bytes_max` bytes: the announced length, or else the limit.
    fn new(memory: Arc<BodyMemory>, bytes_max: usize) -> ArrivingBody {
        let charge = Arc::new(Charge { bytes: AtomicUsize::new(0), memory });
        ArrivingBody { bytes: Vec::new(), bytes_max, charge }
    }

    /// Makes room for `more` bytes. Returns `false` if the server has no memory for them.
    async fn make_room(&mut self, more: usize) -> bool {
        let length = self.bytes.len() + more;
        if length <= self.bytes.capacity() {
            return true;
        }
        // Doubles, so that the copies of all growths together stay below the length.
        let capacity = length.max((2 * self.bytes.capacity()).min(self.bytes_max));
        // The first part is free, so that small requests work while large ones fill the memory.
        let owed = capacity.saturating_sub(BODY_BYTES_FREE);
        if !self.charge.raise(owed) {
            return false;
        }
        if self.bytes.len() <= GROWN_IN_PLACE_MAX {
            self.bytes.reserve_exact(capacity - self.bytes.len());
            return true;
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        let charge = self.charge.clone();
        let grown = tokio::task::spawn_blocking(move || {
            bytes.reserve_exact(capacity - bytes.len());
            drop(charge);
            bytes
        });
        // It fails only while the server stops.
        let Ok(bytes) = grown.await else { return false };
        self.bytes = bytes;
        true
    }

    fn finish(self) -> (Bytes, BodyCharge) {
        let bytes = ChargedBytes { bytes: self.bytes, _charge: self.charge.clone() };
        (Bytes::from_owner(bytes), BodyCharge { _charge: Some(self.charge) })
    }
}

/// Minimum pace of an upload: each time limit must bring a step, or the end.
struct Pace {
    timeout: Duration,
    step_bytes: u64,
    deadline: Instant,
    /// Length at which the deadline moves on.
    bytes_due: u64,
}

impl Pace {
    fn new(options: &HttpOptions, now: Instant) -> Pace {
        let (timeout, step_bytes) = (options.body_timeout, options.body_step_bytes());
        Pace { timeout, step_bytes, deadline: now + timeout, bytes_due: step_bytes }
    }

    fn received(&mut self, bytes: u64, now: Instant) {
        if bytes >= self.bytes_due {
            self.bytes_due = bytes + self.step_bytes;
            self.deadline = now + self.timeout;
        }
    }
}

/// Receives a whole body. Refuses it above the limits of size, time and memory. The memory stays
/// charged until the last handles of the bytes and of the charge are dropped.
pub(crate) async fn receive<B: Body<Data = Bytes> + Unpin>(
    mut body: B,
    options: &HttpOptions,
    memory: &Arc<BodyMemory>,
) -> Result<(Bytes, BodyCharge), Refusal> {
    let too_long = || {
        let message = format!("the request body is longer than {} bytes", options.body_bytes_max);
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, Reason::BodySize, message)
    };
    let too_slow = |_| {
        let message = "the request body arrived too slowly; send it faster or in smaller requests";
        Refusal::new(StatusCode::REQUEST_TIMEOUT, Reason::BodyTimeout, message)
    };
    // The announced length, if there is one. Refused before any of it is read.
    if body.size_hint().lower() > options.body_bytes_max as u64 {
        return Err(too_long());
    }
    let announced = body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
    let mut received = ArrivingBody::new(memory.clone(), announced.unwrap_or(options.body_bytes_max));
    let mut pace = Pace::new(options, Instant::now());
    let mut turn_end = TURN_BYTES;
    loop {
        let frame = timeout_at(pace.deadline, poll_fn(|cx| Pin::new(&mut body).poll_frame(cx))).await;
        let Some(frame) = frame.map_err(too_slow)? else { break };
        // A broken body has no reader left in most cases, so its answer hardly matters.
        let broken = |_| Refusal::new(StatusCode::BAD_REQUEST, Reason::BodyBroken, "the request body is incomplete");
        let Ok(piece) = frame.map_err(broken).map(Frame::into_data)? else { continue };
        if received.bytes.len() + piece.len() > options.body_bytes_max {
            return Err(too_long());
        }
        if !timeout_at(pace.deadline, received.make_room(piece.len())).await.map_err(too_slow)? {
            let message = "the server has no memory left for request bodies; retry later";
            return Err(Refusal::busy(Reason::BodyMemory, message));
        }
        received.bytes.extend_from_slice(&piece);
        pace.received(received.bytes.len() as u64, Instant::now());
        // While a client sends fast, a poll would otherwise never end.
        if received.bytes.len() >= turn_end {
            turn_end = received.bytes.len() + TURN_BYTES;
            tokio::task::yield_now().await;
        }
    }
    Ok(received.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::task::{Context, Poll};

    #[test]
    fn deadline_moves_on_only_when_a_step_has_arrived() {
        let start = Instant::now();
        let ten_seconds = Duration::from_secs(10);
        let mut pace = Pace::new(&HttpOptions { body_timeout: ten_seconds, ..HttpOptions::default() }, start);
        let step = 10 * (64 << 10);
        pace.received(step - 1, start + Duration::from_secs(9));
        assert_eq!(pace.deadline, start + ten_seconds, "one byte short");
        pace.received(step, start + Duration::from_secs(9));
        pace.received(2 * step - 1, start + Duration::from_secs(18));
        assert_eq!(pace.deadline, start + Duration::from_secs(19));
        pace.received(2 * step, start + Duration::from_secs(18));
        assert_eq!(pace.deadline, start + Duration::from_secs(28));
    }

    async fn append(body: &mut ArrivingBody, piece: &[u8]) -> bool {
        let has_room = body.make_room(piece.len()).await;
        if has_room {
            body.bytes.extend_from_slice(piece);
        }
        has_room
    }

    /// Body whose bytes have all arrived, in pieces of this length.
    struct Arrived {
        pieces: usize,
        piece: Bytes,
    }

    impl Body for Arrived {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let left = self.pieces.checked_sub(1);
            self.pieces = left.unwrap_or_default();
            Poll::Ready(left.map(|_| Ok(Frame::data(self.piece.clone()))))
        }
    }

    #[tokio::test]
    async fn large_body_that_has_arrived_lets_other_tasks_go_first() {
        let (pieces, piece) = (128, Bytes::from(vec![7; 64 << 10]));
        let options = HttpOptions { body_bytes_max: pieces * piece.len(), ..HttpOptions::default() };
        let memory = BodyMemory::new(2 * options.body_bytes_max, Gauge::default());
        // On the same thread, so it runs only when the body yields.
        let turns = Arc::<AtomicUsize>::default();
        let other = turns.clone();
        let other = tokio::spawn(async move {
            loop {
                other.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        let (bytes, _) = receive(Arrived { pieces, piece: piece.clone() }, &options, &memory).await.unwrap();
        other.abort();
        assert_eq!(bytes.len(), options.body_bytes_max);
        assert!(bytes.iter().all(|&byte| byte == 7));
        let least = options.body_bytes_max / TURN_BYTES;
        assert!(turns.load(Ordering::Relaxed) >= least, "{turns:?} of {least}");
    }

    #[tokio::test]
    async fn memory_is_charged_above_the_free_part_and_returned_on_drop() {
        let memory = BodyMemory::new(100, Gauge::default());
        let body = |bytes| ArrivingBody::new(memory.clone(), BODY_BYTES_FREE + bytes);
        let mut first = body(60);
        assert!(append(&mut first, &vec![1; BODY_BYTES_FREE]).await && append(&mut first, &[2; 60]).await);
        assert_eq!(memory.used.load(Ordering::Relaxed), 60);
        let mut second = body(41);
        assert!(append(&mut second, &vec![1; BODY_BYTES_FREE]).await && !append(&mut second, &[2; 41]).await);
        let (bytes, charge) = first.finish();
        let slice = bytes.slice(..10);
        drop((bytes, charge.clone()));
        drop(charge);
        assert!(!append(&mut second, &[2; 41]).await, "a slice keeps the memory");
        drop(slice);
        assert!(append(&mut second, &[2; 41]).await);
        let (bytes, charge) = second.finish();
        drop(bytes);
        assert_eq!(memory.used.load(Ordering::Relaxed), 41, "a handler keeps the charge");
        drop(charge);
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn charge_covers_the_whole_buffer_in_memory() {
        const MIB: usize = 1 << 20;
        let memory = BodyMemory::new(64 * MIB, Gauge::default());
        let mut body = ArrivingBody::new(memory.clone(), 16 * MIB);
        // Doublings of a buffer for pieces of this length reach almost twice a length.
        let piece = [0; 8 << 10];
        for _ in 0..(16 * MIB / piece.len()) {
            assert!(append(&mut body, &piece).await);
            let charged = memory.used.load(Ordering::Relaxed);
            assert!(charged + BODY_BYTES_FREE >= body.bytes.capacity(), "{charged} for {}", body.bytes.capacity());
        }
        assert_eq!(body.bytes.capacity(), 16 * MIB, "an announced length is not exceeded");
    }
}
