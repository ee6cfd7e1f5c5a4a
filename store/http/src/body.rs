//! Bodies of requests: received in pieces, charged as they arrive, within their time.
//!
//! Large bodies yield to other tasks of their thread: copies into fresh memory take milliseconds.
//! They are not copied as they grow. A body that is no longer small gets addresses for its maximum
//! length at once, and memory only as its bytes arrive.
//!
//! A handler that keeps what it parsed takes a [`RequestBody`], and keeps its charge as long.

use crate::options::{BODY_BYTES_FREE, HttpOptions};
use crate::refusal::{Reason, Refusal};
use crate::shares::{PeerAddress, PeerCharge, PeerShare};
use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::Bytes;
use hyper::body::{Body, Frame};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Bytes of a body after which other tasks of the thread go first. A copy of as many takes about
/// 0.1 ms, with fresh memory.
const TURN_BYTES: usize = 256 << 10;
/// Longest body that is copied as it grows, in bytes. A copy takes about 0.1 ms.
const COPIED_MAX: usize = 256 << 10;

/// Memory charged for a body. Returned when the last handle is dropped.
#[derive(Debug, Clone, Default)]
pub struct BodyCharge {
    _charge: Option<Arc<PeerCharge>>,
}

/// Body of a request, in one piece. An extractor.
#[derive(Debug)]
pub struct RequestBody {
    pub bytes: Bytes,
    /// Keeps the body charged after its bytes are dropped. Without a charge for a body that this
    /// server did not receive, or that is short.
    pub charge: BodyCharge,
    pub peer: PeerAddress,
}

impl<S: Send + Sync> FromRequest<S> for RequestBody {
    type Rejection = (StatusCode, &'static str);

    async fn from_request(request: Request, _state: &S) -> Result<Self, Self::Rejection> {
        let (parts, body) = request.into_parts();
        let charge = parts.extensions.get().cloned().unwrap_or_default();
        let peer = parts.extensions.get().copied().unwrap_or_default();
        // The server has received the whole body, within its limit.
        let bytes = to_bytes(body, usize::MAX).await;
        let bytes = bytes.map_err(|_| (StatusCode::BAD_REQUEST, "the request body is incomplete"))?;
        Ok(RequestBody { bytes, charge, peer })
    }
}

/// Bytes of a body that arrives, with a charge for their memory.
#[derive(Debug)]
struct ArrivingBody {
    bytes: Vec<u8>,
    /// Length that the body cannot exceed.
    bytes_max: usize,
    /// Bytes that the body may have before it needs another charge.
    charged: usize,
    charge: Arc<PeerCharge>,
}

/// Bytes of a body with their charge, as the owner of a [`Bytes`].
struct ChargedBytes {
    bytes: Vec<u8>,
    _charge: Arc<PeerCharge>,
}

impl AsRef<[u8]> for ChargedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl ArrivingBody {
    /// Body of at most `bytes_max` bytes: the announced length, or else the limit.
    fn new(memory: &PeerShare, bytes_max: usize) -> ArrivingBody {
        ArrivingBody { bytes: Vec::new(), bytes_max, charged: 0, charge: Arc::new(memory.charge()) }
    }

    /// Makes room for `more` bytes. Returns `false` if the server has no memory for them.
    fn make_room(&mut self, more: usize) -> bool {
        let length = self.bytes.len() + more;
        if length <= self.charged {
            return true;
        }
        // Doubles, so that the copies of all growths together stay below the length.
        let charged = length.max((2 * self.charged).min(self.bytes_max));
        // The first part is free, so that small requests work while large ones fill the memory.
        let owed = charged.saturating_sub(BODY_BYTES_FREE);
        if !self.charge.raise_to(owed) {
            return false;
        }
        self.charged = charged;
        // The kernel gives memory to the pages that are written, so the rest costs addresses only.
        let capacity = if charged > COPIED_MAX { charged.max(self.bytes_max) } else { charged };
        let missing = capacity.saturating_sub(self.bytes.len());
        self.bytes.capacity() >= charged || self.bytes.try_reserve_exact(missing).is_ok()
    }

    fn finish(self) -> (Bytes, BodyCharge) {
        let bytes = ChargedBytes { bytes: self.bytes, _charge: self.charge.clone() };
        (Bytes::from_owner(bytes), BodyCharge { _charge: Some(self.charge) })
    }
}

/// Minimum pace of an upload: each time limit must bring a step, or the end. Only the time in which
/// the server waits for the client counts.
struct Pace {
    timeout: Duration,
    step_bytes: u64,
    deadline: Instant,
    /// Length at which the deadline moves on.
    bytes_due: u64,
}

impl Pace {
    fn new(options: &HttpOptions, now: Instant) -> Pace {
        let (timeout, step_bytes) = (options.body_timeout, options.step_bytes(options.body_timeout));
        Pace { timeout, step_bytes, deadline: now + timeout, bytes_due: step_bytes }
    }

    fn received(&mut self, bytes: u64, now: Instant) {
        if bytes >= self.bytes_due {
            self.bytes_due = bytes + self.step_bytes;
            self.deadline = now + self.timeout;
        }
    }

    /// Moves the deadline by the time since `begin`, in which the client had to wait.
    fn was_delayed(&mut self, begin: Instant, now: Instant) {
        self.deadline += now.duration_since(begin);
    }
}

/// Receives a whole body. Refuses it above the limits of size, time and memory. The memory stays
/// charged until the last handles of the bytes and of the charge are dropped.
pub(crate) async fn receive<B: Body<Data = Bytes> + Unpin>(
    mut body: B,
    options: &HttpOptions,
    memory: &PeerShare,
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
    let mut received = ArrivingBody::new(memory, announced.unwrap_or(options.body_bytes_max));
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
        let arrived = Instant::now();
        pace.received((received.bytes.len() + piece.len()) as u64, arrived);
        if !received.make_room(piece.len()) {
            let message = "the server has no memory left for request bodies of your address; retry later";
            return Err(Refusal::busy(Reason::BodyMemory, message));
        }
        received.bytes.extend_from_slice(&piece);
        // While a client sends fast, a poll would otherwise never end.
        if received.bytes.len() >= turn_end {
            turn_end = received.bytes.len() + TURN_BYTES;
            tokio::task::yield_now().await;
        }
        pace.was_delayed(arrived, Instant::now());
    }
    Ok(received.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::PeerBudget;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};
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

    fn append(body: &mut ArrivingBody, piece: &[u8]) -> bool {
        let has_room = body.make_room(piece.len());
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
        let memory = PeerBudget::new(2 * options.body_bytes_max).of(PeerAddress::default());
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
        let budget = PeerBudget::new(100);
        let used = || 100 - budget.free();
        let body = |of: u8, bytes| {
            let peer = PeerAddress::of([10, 0, 0, of].into());
            ArrivingBody::new(&budget.of(peer), BODY_BYTES_FREE + bytes)
        };
        let mut first = body(1, 60);
        assert!(append(&mut first, &vec![1; BODY_BYTES_FREE]) && append(&mut first, &[2; 60]));
        assert_eq!(used(), 60);
        let mut second = body(2, 41);
        assert!(append(&mut second, &vec![1; BODY_BYTES_FREE]) && !append(&mut second, &[2; 41]));
        let (bytes, charge) = first.finish();
        let slice = bytes.slice(..10);
        drop((bytes, charge.clone()));
        drop(charge);
        assert!(!append(&mut second, &[2; 41]), "a slice keeps the memory");
        drop(slice);
        assert!(append(&mut second, &[2; 41]));
        let (bytes, charge) = second.finish();
        drop(bytes);
        assert_eq!(used(), 41, "a handler keeps the charge");
        drop(charge);
        assert_eq!(used(), 0);
    }

    /// Body of which a piece arrives a moment after the server asks for it.
    struct Prompt {
        arrived: Arrived,
        is_polled: bool,
    }

    impl Body for Prompt {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.is_polled ^= true;
            if self.is_polled {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Pin::new(&mut self.arrived).poll_frame(cx)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_the_client_waits_for_the_server_does_not_count() {
        let timeout = Duration::from_secs(10);
        let options = HttpOptions { body_timeout: timeout, body_bytes_max: 4 * TURN_BYTES, ..HttpOptions::default() };
        let share = PeerBudget::new(1 << 30).of(PeerAddress::default());
        // It takes the thread at each turn of the body, and while a piece is on its way. Both
        // together take longer than the client may.
        let busy = tokio::spawn(async {
            loop {
                tokio::time::advance(Duration::from_secs(3)).await;
                tokio::task::yield_now().await;
            }
        });
        let arrived = Arrived { pieces: 4, piece: Bytes::from(vec![7; TURN_BYTES]) };
        let body = Prompt { arrived, is_polled: false };
        let received = receive(body, &options, &share).await;
        busy.abort();
        assert_eq!(received.map(|(bytes, _)| bytes.len()), Ok(4 * TURN_BYTES));
    }

    #[test]
    fn large_body_is_charged_as_it_arrives_and_not_copied() {
        const MIB: usize = 1 << 20;
        let budget = PeerBudget::new(64 * MIB);
        let mut body = ArrivingBody::new(&budget.of(PeerAddress::default()), 16 * MIB);
        let mut places = Vec::new();
        let piece = [0; 8 << 10];
        for _ in 0..(16 * MIB / piece.len()) {
            assert!(append(&mut body, &piece));
            let charged = 64 * MIB - budget.free() + BODY_BYTES_FREE;
            let length = body.bytes.len();
            assert!((length..=2 * length.max(BODY_BYTES_FREE)).contains(&charged), "{charged} for {length}");
            if length > COPIED_MAX {
                places.push(body.bytes.as_ptr());
            }
        }
        places.dedup();
        assert_eq!((places.len(), body.bytes.capacity()), (1, 16 * MIB), "an announced length is not exceeded");
    }

    #[test]
    fn body_beyond_the_addresses_of_the_process_is_refused() {
        let budget = PeerBudget::new(1 << 30);
        let mut body = ArrivingBody::new(&budget.of(PeerAddress::default()), isize::MAX as usize);
        assert!(append(&mut body, &vec![1; COPIED_MAX]) && !append(&mut body, &[2; 1]));
    }
}
