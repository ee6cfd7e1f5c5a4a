//! The way to one client: answers, page bytes from where they lie, and places.

use super::invalid;
use super::reading::Asked;
use crate::holds::Hold;
use crate::node::Shared;
use crate::tiers::Page;
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_wire::{Entry, Frame, Payload, Place, Response, TierCode};
use parking_lot::Mutex;
use std::collections::{BTreeMap, btree_map};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

pub(super) async fn send(out: &mpsc::Sender<Frame>, frame: Frame) -> io::Result<()> {
    out.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// The way to the client, for the answers of one request.
pub(super) struct ToClient {
    pub(super) out: mpsc::Sender<Frame>,
    /// Of the protocol, as agreed.
    pub(super) version: u16,
    pub(super) request: u64,
    pub(super) sending: Arc<Semaphore>,
}

impl ToClient {
    pub(super) async fn send(&self, response: Response) -> io::Result<()> {
        send(&self.out, response.frame(self.version, self.request, None)).await
    }

    /// Waits for room for a frame in the queue.
    pub(super) async fn room(&self) -> io::Result<mpsc::Permit<'_, Frame>> {
        self.out.reserve().await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Says where a page lies, which is held for the client from then on.
    pub(super) async fn point_at(
        &self,
        held: &Mutex<BTreeMap<Entry, Hold>>,
        hold: Hold,
        asked: &Asked,
        bytes: &Range<usize>,
        tier: TierCode,
    ) -> io::Result<()> {
        // With room in the queue at hand, holding and telling are one step: no page is held that the client never hears of.
        let room = self.room().await?;
        let page = hold.page().clone();
        let place = Place::Arena((page.payload.arena_offset() + bytes.start) as u64);
        let entry = Entry { request: self.request, index: asked.index };
        if let btree_map::Entry::Vacant(vacant) = held.lock().entry(entry) {
            if !has(Bug::PlaceNotHeld) {
                vacant.insert(hold);
            }
            room.send(asked.answer(&page, tier, place).frame(self.version, self.request, None));
            return Ok(());
        }
        // Its memory must not move under who reads it.
        Err(invalid(DecodeError::Invalid("a request number whose pages are still held")))
    }

    /// Waits until one more page may be on its way.
    pub(super) async fn permit(&self) -> io::Result<OwnedSemaphorePermit> {
        self.sending.clone().acquire_owned().await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Sends page bytes from where they lie; `permit` comes back when they have left.
    pub(super) async fn send_bytes<P>(
        &self,
        shared: &Shared,
        head: Response,
        bytes: P,
        permit: OwnedSemaphorePermit,
    ) -> io::Result<()>
    where
        P: AsRef<[u8]> + Send + Sync + 'static,
    {
        shared.metrics.bytes_sent.inc_by(bytes.as_ref().len() as u64);
        let payload: Payload = Box::new(Sending { bytes, _permit: permit });
        send(&self.out, head.frame(self.version, self.request, Some(payload))).await
    }
}

/// Page bytes in the send queue.
struct Sending<P> {
    bytes: P,
    _permit: OwnedSemaphorePermit,
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
