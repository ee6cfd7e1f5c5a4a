//! Request bodies: bounded one by one and together, and read to the end of a refused request.
//!
//! Invariants:
//!
//! - A body is charged as its bytes arrive, not as they are announced. All bodies together hold at
//!   most [`BODIES_BYTES_MAX`] beyond the first [`FREE_BYTES`] of each.
//! - A slow large body does not keep small requests out: the first [`FREE_BYTES`] need no budget.
//! - A client that is refused while it still sends sees the answer. Closing the socket with unread
//!   input would reset the connection, and the client would lose the answer.

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header::EXPECT;
use axum::middleware::Next;
use axum::response::Response;
use bytes::{Buf, BytesMut};
use futures::StreamExt;
use http_body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

/// Part of each body that needs no budget, in bytes. Longer than nearly all requests. Connections
/// bound the number of bodies.
pub(crate) const FREE_BYTES: usize = 256 << 10;
/// Maximum memory of all bodies beyond their first [`FREE_BYTES`], in bytes. A body is charged
/// until its prompts are tokenised.
pub(crate) const BODIES_BYTES_MAX: usize = 64 << 20;
/// Granularity of the budget in bytes. A semaphore counts to 2^32 at most.
const CHARGE_BYTES: usize = 64 << 10;
/// Maximum input that is discarded after a refusal, in bytes and time. A client that sends more is
/// cut off.
const LINGER_BYTES_MAX: usize = 64 << 20;
const LINGER_TIME_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) enum BodyError {
    TooLarge,
    /// The bodies in memory use the whole budget.
    Busy,
    /// The client disconnected or sent a malformed body.
    Broken,
    Deadline,
}

/// Budget of all bodies of a router.
#[derive(Debug, Clone)]
pub(crate) struct BodyBudget(Arc<Semaphore>);

impl Default for BodyBudget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(BODIES_BYTES_MAX / CHARGE_BYTES)))
    }
}

/// Part of the budget that one body uses. Returns it on drop.
#[derive(Debug, Default)]
pub(crate) struct BodyCharge(Option<OwnedSemaphorePermit>);

impl BodyBudget {
    /// Reads a body of at most `bytes_max` bytes.
    pub(crate) async fn read(
        &self,
        body: Body,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<(Bytes, BodyCharge), BodyError> {
        // The announced length, if there is one. Refusing now spares the transfer.
        if body.size_hint().lower() > bytes_max as u64 {
            return Err(BodyError::TooLarge);
        }
        timeout_at(deadline, self.collect(body, bytes_max)).await.map_err(|_| BodyError::Deadline)?
    }

    async fn collect(&self, body: Body, bytes_max: usize) -> Result<(Bytes, BodyCharge), BodyError> {
        let mut pieces = body.into_data_stream();
        let mut bytes = BytesMut::new();
        let mut charge = BodyCharge::default();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|_| BodyError::Broken)?;
            let len = bytes.len() + piece.len();
            if len > bytes_max {
                return Err(BodyError::TooLarge);
            }
            // Before the copy: the budget bounds the memory at every moment.
            self.charge(&mut charge, len)?;
            bytes.extend_from_slice(&piece);
        }
        Ok((bytes.freeze(), charge))
    }

    /// Raises `charge` to that of a body of `len` bytes.
    fn charge(&self, charge: &mut BodyCharge, len: usize) -> Result<(), BodyError> {
        let wanted = if len <= FREE_BYTES { 0 } else { (len - FREE_BYTES).div_ceil(CHARGE_BYTES) };
        let held = charge.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if wanted <= held {
            return Ok(());
        }
        let more = u32::try_from(wanted - held).map_err(|_| BodyError::Busy)?;
        let permit = self.0.clone().try_acquire_many_owned(more).map_err(|_| BodyError::Busy)?;
        match &mut charge.0 {
            Some(held) => held.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }
}

/// Middleware for all routes: reads what a refused client still sends.
pub(crate) async fn with_lingering(request: Request, next: Next) -> Response {
    // Such a client sends its body only after we have asked for it, by polling the body.
    let waits = request.headers().contains_key(EXPECT);
    next.run(request.map(|body| Body::new(LingeringBody { body: Some(body), may_come: !waits }))).await
}

/// Body whose rest is read and discarded after a handler has dropped it.
struct LingeringBody {
    /// `None` after the end or a failure.
    body: Option<Body>,
    may_come: bool,
}

impl HttpBody for LingeringBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.may_come = true;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for LingeringBody {
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|body| self.may_come && !body.is_end_stream()) else { return };
        // A runtime that shuts down closes the connection anyway.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(timeout(LINGER_TIME_MAX, discard(body)));
        }
    }
}

async fn discard(body: Body) {
    let mut pieces = body.into_data_stream();
    let mut discarded = 0;
    while let Some(Ok(piece)) = pieces.next().await {
        discarded += piece.remaining();
        if discarded > LINGER_BYTES_MAX {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deadline() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn bodies_share_a_budget_and_small_ones_need_none() {
        let budget = BodyBudget::default();
        let read = |len: usize| budget.read(Body::from(vec![b'x'; len]), usize::MAX, deadline());
        let (bytes, charge) = read(BODIES_BYTES_MAX).await.unwrap();
        assert_eq!(bytes.len(), BODIES_BYTES_MAX);
        assert!(read(FREE_BYTES).await.is_ok());
        assert!(read(FREE_BYTES + CHARGE_BYTES * 4).await.is_ok(), "the first bytes were free");
        assert!(matches!(read(FREE_BYTES * 3).await, Err(BodyError::Busy)));
        drop(charge);
        assert!(read(FREE_BYTES * 3).await.is_ok());
    }

    #[tokio::test]
    async fn body_is_charged_as_it_arrives() {
        let budget = BodyBudget::default();
        let pieces = futures::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from(vec![0; 1 << 20])));
        let endless = budget.read(Body::from_stream(pieces), usize::MAX, deadline());
        assert!(matches!(endless.await, Err(BodyError::Busy)));
        assert_eq!(budget.0.available_permits(), BODIES_BYTES_MAX / CHARGE_BYTES);
        let stalled = budget.read(
            Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>()),
            10,
            Instant::now(),
        );
        assert!(matches!(stalled.await, Err(BodyError::Deadline)));
    }

    #[tokio::test]
    async fn announced_and_real_lengths_are_limited() {
        let budget = BodyBudget::default();
        assert!(matches!(budget.read(Body::from("12345"), 4, deadline()).await, Err(BodyError::TooLarge)));
        let unannounced = Body::from_stream(futures::stream::iter(["123", "45"].map(Ok::<_, std::io::Error>)));
        assert!(matches!(budget.read(unannounced, 4, deadline()).await, Err(BodyError::TooLarge)));
        assert_eq!(budget.read(Body::from("1234"), 4, deadline()).await.unwrap().0, "1234");
    }
}
