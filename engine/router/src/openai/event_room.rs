//! Memory of the events of a stream that its client has not read.
//!
//! Invariant: the events of one answer that wait for the client take at most [`EVENTS_BYTES_MAX`],
//! and as much again for the one that waits for room. What a larger event takes beyond that is
//! charged, like the texts of whole answers.

use super::whole::{ANSWER_CHARGE_BYTES, AnswerCharge};
use crate::route::RouteError;
use bytes::Bytes;
use larder_http::PeerShare;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum size of the events of one answer that wait for its client, in bytes. An event without
/// log-probabilities has a few hundred.
pub(crate) const EVENTS_BYTES_MAX: usize = 256 << 10;

/// Room for the events of one answer.
pub(super) struct EventRoom {
    /// One permit per byte.
    bytes: Arc<Semaphore>,
    /// Room for the texts of answers.
    answers: PeerShare,
}

/// Event that waits for the client, or for the socket.
struct HeldEvent {
    event: Bytes,
    _room: Option<OwnedSemaphorePermit>,
    _charge: AnswerCharge,
}

impl AsRef<[u8]> for HeldEvent {
    fn as_ref(&self) -> &[u8] {
        &self.event
    }
}

impl EventRoom {
    pub(super) fn new(answers: PeerShare) -> Self {
        Self { bytes: Arc::new(Semaphore::new(EVENTS_BYTES_MAX)), answers }
    }

    /// Waits until there is room for `event`. The room is free again when the result and its clones
    /// are dropped: the connection has written them by then.
    ///
    /// # Errors
    /// [`RouteError::AnswersFull`] if the event is larger than all the room, and texts of answers
    /// leave no memory for the rest.
    pub(super) async fn hold(&self, event: Bytes) -> Result<Bytes, RouteError> {
        let charge = AnswerCharge::new(&self.answers);
        // Nothing for the first `ANSWER_CHARGE_BYTES`.
        charge.grow_to(event.len().saturating_sub(EVENTS_BYTES_MAX) + ANSWER_CHARGE_BYTES)?;
        let bytes = event.len().min(EVENTS_BYTES_MAX) as u32;
        // Never closed.
        let room = self.bytes.clone().acquire_many_owned(bytes).await.ok();
        Ok(Bytes::from_owner(HeldEvent { event, _room: room, _charge: charge }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use larder_http::{PeerAddress, PeerBudget};

    fn event(bytes: usize) -> Bytes {
        Bytes::from(vec![b'x'; bytes])
    }

    #[test]
    fn events_wait_until_the_client_has_read_earlier_ones() {
        let answers = PeerBudget::new(8);
        let room = EventRoom::new(answers.of(PeerAddress::default()));
        let hold = |bytes| room.hold(event(bytes)).now_or_never().map(Result::unwrap);
        let mut held: Vec<Bytes> = (0..4).map(|_| hold(EVENTS_BYTES_MAX / 4).unwrap()).collect();
        assert_eq!(held[0], event(EVENTS_BYTES_MAX / 4));
        assert!(hold(1).is_none());
        let copy = held.pop();
        assert!(hold(1).is_none(), "the connection still has it");
        drop(copy);
        assert!(hold(EVENTS_BYTES_MAX / 4).is_some());
        assert_eq!(answers.free(), 8, "such events are free");
    }

    #[test]
    fn large_events_are_charged_beyond_the_room() {
        let answers = PeerBudget::new(8);
        let room = EventRoom::new(answers.of(PeerAddress::default()));
        let hold = |bytes| room.hold(event(bytes)).now_or_never();
        let large = EVENTS_BYTES_MAX + 3 * ANSWER_CHARGE_BYTES;
        let held = hold(large).unwrap().unwrap();
        assert_eq!(answers.free(), 5);
        assert!(hold(1).is_none(), "it has all the room");
        assert!(matches!(hold(large + ANSWER_CHARGE_BYTES), Some(Err(RouteError::AnswersFull))));
        drop(held);
        assert_eq!(answers.free(), 8);
        assert!(hold(1).is_some());
    }
}
