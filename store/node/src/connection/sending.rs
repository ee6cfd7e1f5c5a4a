//! The way to one client: answers, page bytes from where they lie, and places.

use super::conversation::Connection;
use super::reading::{Asked, offset};
use super::{Held, invalid};
use crate::budget::{Account, Charge, Kind};
use crate::holds::Hold;
use crate::node::Shared;
use crate::tiers::Page;
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_wire::{Entry, Frame, Payload, Place, Placed, Response, TierCode};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

pub(super) async fn send(out: &mpsc::Sender<Frame>, frame: Frame) -> io::Result<()> {
    out.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// The unit in which bytes on their way to one client are bounded.
pub(super) const WINDOW_UNIT: u64 = 4096;

/// Leave for bytes to be on their way to the client, until this is dropped.
pub(super) struct Leave {
    charge: Charge,
    _window: OwnedSemaphorePermit,
}

/// The way to the client, for the answers of one request.
pub(super) struct ToClient {
    out: mpsc::Sender<Frame>,
    bulk: mpsc::Sender<Frame>,
    /// Of the protocol, as agreed.
    pub(super) version: u16,
    pub(super) request: u64,
    account: Arc<Account>,
    window: Arc<Semaphore>,
    deadline: Instant,
    /// Whether page bytes were sent for this request.
    sent_bulk: AtomicBool,
}

impl ToClient {
    pub(super) fn new(connection: &Connection, request: u64, deadline: Instant) -> Self {
        Self {
            out: connection.out.clone(),
            bulk: connection.bulk.clone(),
            version: connection.version,
            request,
            account: connection.account.clone(),
            window: connection.window.clone(),
            deadline,
            sent_bulk: AtomicBool::new(false),
        }
    }

    pub(super) async fn send(&self, response: Response) -> io::Result<()> {
        send(&self.out, response.frame(self.version, self.request, None)).await
    }

    /// Waits for room for a frame in the queue.
    pub(super) async fn room(&self) -> io::Result<mpsc::Permit<'_, Frame>> {
        self.out.reserve().await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Sends the last answer of this request: behind the page bytes of others, if there are any.
    pub(super) async fn end(&self, response: Response) -> io::Result<()> {
        let queue = if self.sent_bulk.load(Ordering::Relaxed) { &self.bulk } else { &self.out };
        send(queue, response.frame(self.version, self.request, None)).await
    }

    /// Says where a page lies, which is held for the client from then on.
    pub(super) async fn point_at(
        &self,
        held: &Held,
        hold: Hold,
        asked: &Asked,
        bytes: &Range<usize>,
        tier: TierCode,
    ) -> io::Result<()> {
        // With room in the queue at hand, holding and telling are one step: no page is held that the client never hears of.
        let room = self.room().await?;
        let page = hold.page().clone();
        let place = Place::Arena(offset(&page, bytes));
        self.keep(held, vec![(asked.index, hold)])?;
        room.send(asked.answer(&page, tier, place).frame(self.version, self.request, None));
        Ok(())
    }

    /// Keeps pages of this request, by their index, for the client until it releases them: all, or none.
    pub(super) fn keep(&self, held: &Held, pages: Vec<(u32, Hold)>) -> io::Result<()> {
        let mut held = held.lock();
        let entry = |index| Entry { request: self.request, index };
        if pages.iter().any(|(index, _)| held.contains_key(&entry(*index))) {
            drop(held);
            // Its memory must not move under who reads it.
            return Err(invalid(DecodeError::Invalid("a request number whose pages are still held")));
        }
        if !has(Bug::PlaceNotHeld) {
            held.extend(pages.into_iter().map(|(index, hold)| (entry(index), hold)));
        }
        Ok(())
    }

    /// Says where many pages lie. The message is counted until it has left.
    pub(super) fn places(&self, places: Vec<Placed>) -> Frame {
        let mut frame = Response::Places(places).frame(self.version, self.request, None);
        frame.keep(self.account.counted(Kind::Requests, frame.len() as u64));
        frame
    }

    /// Waits until the client has taken so much of what is on its way that `bytes` more may be, and the node has room for them;
    /// `None`: not by the deadline of the request.
    pub(super) async fn leave(&self, bytes: u64) -> io::Result<Option<Leave>> {
        let leave = async {
            let window = self.window.clone().acquire_many_owned(units(bytes)).await;
            let _window = window.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            Ok(Leave { charge: self.account.charge_read(bytes).await, _window })
        };
        tokio::time::timeout_at(self.deadline.into(), leave).await.ok().transpose()
    }

    /// Leave for `bytes` more, if it can be had without waiting.
    pub(super) fn leave_now(&self, bytes: u64) -> Option<Leave> {
        let window = self.window.clone().try_acquire_many_owned(units(bytes)).ok()?;
        let charge = self.account.try_charge(Kind::Reads, bytes)?;
        Some(Leave { charge, _window: window })
    }

    /// Sends page bytes from where they lie; `leave` comes back when they have left.
    pub(super) async fn send_bytes<P>(
        &self,
        shared: &Shared,
        head: Response,
        bytes: P,
        mut leave: Leave,
    ) -> io::Result<()>
    where
        P: AsRef<[u8]> + Send + Sync + 'static,
    {
        shared.metrics.bytes_sent.inc_by(bytes.as_ref().len() as u64);
        leave.charge.queue();
        self.sent_bulk.store(true, Ordering::Relaxed);
        let payload: Payload = Box::new(Sending { bytes, _leave: leave });
        send(&self.bulk, head.frame(self.version, self.request, Some(payload))).await
    }
}

/// Page bytes in the send queue.
struct Sending<P> {
    bytes: P,
    _leave: Leave,
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(WINDOW_UNIT)).unwrap_or(u32::MAX)
}

impl<P: AsRef<[u8]>> AsRef<[u8]> for Sending<P> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

/// Bytes of a sealed page, sent from its slot.
pub(super) struct PagePayload {
    pub(super) page: Arc<Page>,
    pub(super) bytes: Range<usize>,
}

impl AsRef<[u8]> for PagePayload {
    fn as_ref(&self) -> &[u8] {
        &self.page.payload[self.bytes.clone()]
    }
}

/// A landed part of a page that is still being written.
pub(super) struct PiecePayload(pub(super) larder_device::Piece);

impl AsRef<[u8]> for PiecePayload {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
