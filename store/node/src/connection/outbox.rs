//! The send side of one connection: queues, send credit, and the answers of one request.

use super::holdings::InPlaceHolds;
use super::page_request::{PageRequest, arena_offset};
use super::socket::UncongestedSince;
use crate::budget::{Account, Charge, Kind};
use crate::holds::Hold;
use crate::page::Page;
use crate::state::NodeState;
use larder_runtime::now;
use larder_wire::{
    ArenaPage, Frame, FrameQueue, PROTOCOL_VERSION_MIN, Payload, PayloadLocation, QueuedPayloads, Response,
    SharedResponse, TierCode,
};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Capacity of each send queue, in frames. Enough that the writer never waits for the tasks that
/// fill it, and few enough that answers to a slow client wait in its tasks, where they can be
/// cancelled.
const QUEUE_FRAMES: usize = 32;
/// Bytes of short answers that one connection may have in its queue, beyond the first answer. A
/// client that does not read its answers gets no further ones, and its next requests stay in its
/// socket.
const ANSWER_BYTES: u32 = 64 << 10;
/// Answers above this length are charged one by one. The charge of the connection covers the
/// others.
const CHARGED_ANSWER_MIN: usize = 1 << 10;
/// Unit of the read window, in bytes. A semaphore counts in u32, so bytes themselves would limit
/// the window to 4 GiB.
const WINDOW_UNIT: u64 = 4096;
/// Time after the deadline of a request from which on its queued pages are not sent. The client has
/// given them up long before, by its own clock, so it never takes them for missing.
const ABANDON_AFTER: Duration = Duration::from_secs(1);

/// Send queues and read window of one connection. Clones share them.
#[derive(Clone)]
pub(super) struct Outbox {
    /// Short frames. The writer sends them before page bytes.
    control: mpsc::Sender<Frame>,
    /// Page bytes, and the last frame of a request that sent some.
    bulk: mpsc::Sender<Frame>,
    version: u16,
    /// Free bytes of the read window, in units of [`WINDOW_UNIT`]. Empty until the handshake.
    window: Arc<Semaphore>,
    /// Free bytes for short answers, of [`ANSWER_BYTES`].
    answers: Arc<Semaphore>,
    account: Arc<Account>,
    uncongested_since: UncongestedSince,
    payloads: Arc<QueuedPayloads>,
}

impl Outbox {
    pub(super) fn new(account: Arc<Account>, uncongested_since: UncongestedSince) -> (Outbox, FrameQueue) {
        let (control, control_queue) = mpsc::channel(QUEUE_FRAMES);
        let (bulk, bulk_queue) = mpsc::channel(QUEUE_FRAMES);
        let outbox = Outbox {
            control,
            bulk,
            version: PROTOCOL_VERSION_MIN,
            window: Arc::new(Semaphore::new(0)),
            answers: Arc::new(Semaphore::new(ANSWER_BYTES as usize)),
            account,
            uncongested_since,
            payloads: Arc::default(),
        };
        (outbox, FrameQueue::new(control_queue, bulk_queue))
    }

    pub(super) fn version(&self) -> u16 {
        self.version
    }

    pub(super) fn set_version(&mut self, version: u16) {
        self.version = version;
    }

    /// Opens the read window with a size in bytes. Called once, when the page size is known.
    pub(super) fn open_window(&self, bytes: u64) {
        self.window.add_permits(bytes.div_ceil(WINDOW_UNIT) as usize);
    }

    /// Abandons the queued pages of a request. Of a page that has begun to leave, the client gets
    /// at most one fragment more.
    pub(super) fn abandon_payloads(&self, request: u64) {
        self.payloads.abandon(request);
    }

    pub(super) fn uncongested_since(&self) -> UncongestedSince {
        self.uncongested_since.clone()
    }

    /// Queues a short answer. Waits while the queue is full.
    pub(super) async fn respond(&self, request: u64, response: Response) -> io::Result<()> {
        self.send(response.frame(self.version, request, None)).await
    }

    pub(super) async fn send(&self, mut frame: Frame) -> io::Result<()> {
        frame.hold(self.answer_credit(frame.len(), true).await?);
        enqueue(&self.control, frame).await
    }

    /// Queues an answer whose bytes other frames share. Its owner accounts for their memory.
    pub(super) async fn send_shared(&self, request: u64, response: &SharedResponse) -> io::Result<()> {
        let credit = self.answer_credit(response.body_bytes(), false).await?;
        enqueue(&self.control, response.frame(request, credit)).await
    }

    /// Waits until the client has read enough of its earlier answers. The credit returns when the
    /// answer has left.
    async fn answer_credit(&self, bytes: usize, is_charged: bool) -> io::Result<AnswerCredit> {
        // An answer above the whole window goes alone.
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX).min(ANSWER_BYTES);
        let window = self.answers.clone().acquire_many_owned(permits).await;
        let _window = window.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        let _charge = (is_charged && bytes > CHARGED_ANSWER_MIN)
            .then(|| self.account.charge_unchecked(Kind::Requests, bytes as u64));
        Ok(AnswerCredit { _window, _charge })
    }

    pub(super) fn responder(&self, request: u64, deadline: Instant) -> Responder {
        Responder { outbox: self.clone(), request, deadline, has_sent_bulk: AtomicBool::new(false) }
    }
}

async fn enqueue(queue: &mpsc::Sender<Frame>, frame: Frame) -> io::Result<()> {
    // The writer drops its end only when the socket failed.
    queue.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// Space of one short answer in the window of its connection, and its memory.
struct AnswerCredit {
    _window: OwnedSemaphorePermit,
    _charge: Option<Charge>,
}

/// Permission for bytes to be in flight to the client: space in the read window, and memory of the
/// node. Returned on drop.
pub(super) struct SendCredit {
    charge: Charge,
    _window: OwnedSemaphorePermit,
}

pub(super) struct Responder {
    outbox: Outbox,
    request: u64,
    deadline: Instant,
    has_sent_bulk: AtomicBool,
}

impl Responder {
    pub(super) fn request(&self) -> u64 {
        self.request
    }

    pub(super) fn version(&self) -> u16 {
        self.outbox.version
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(super) fn frame(&self, response: Response) -> Frame {
        response.frame(self.outbox.version, self.request, None)
    }

    pub(super) async fn send(&self, response: Response) -> io::Result<()> {
        self.outbox.send(self.frame(response)).await
    }

    /// Reserves a slot in the control queue. A frame sent through it cannot fail or wait any more.
    pub(super) async fn reserve_slot(&self) -> io::Result<mpsc::Permit<'_, Frame>> {
        self.outbox.control.reserve().await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Sends the last answer of the request. It goes behind the page bytes, if there were any: the
    /// client takes it for the end of them.
    pub(super) async fn finish(&self, response: Response) -> io::Result<()> {
        // Relaxed: all answers of a request are sent by one task.
        match self.has_sent_bulk.load(Ordering::Relaxed) {
            true => enqueue(&self.outbox.bulk, self.frame(response)).await,
            false => self.send(response).await,
        }
    }

    /// Holds a page for the client and sends its location in the arena. Fails if the client already
    /// holds a page under this request and index.
    pub(super) async fn send_location(
        &self,
        holds: &InPlaceHolds,
        hold: Hold,
        page_request: &PageRequest,
        bytes: &Range<usize>,
        tier: TierCode,
    ) -> io::Result<()> {
        // With the slot at hand, hold and answer are one step. A cancelled request must not leave a
        // hold that the client does not know of.
        let slot = self.reserve_slot().await?;
        let page = hold.page().clone();
        let location = PayloadLocation::Arena(arena_offset(&page, bytes));
        holds.insert_all(self.request, vec![(page_request.index, hold)])?;
        slot.send(self.frame(page_request.answer(&page, tier, location)));
        Ok(())
    }

    /// Returns a frame with the locations of several pages. Its memory is charged until it has
    /// left.
    pub(super) fn locations_frame(&self, locations: Vec<ArenaPage>) -> Frame {
        let mut frame = self.frame(Response::ArenaPages(locations));
        frame.attach(self.outbox.account.charge_unchecked(Kind::Requests, frame.len() as u64));
        frame
    }

    /// Waits until `bytes` may be in flight: until the client has received enough of its window,
    /// and the node has `memory` bytes. A range keeps its whole page in memory. Returns `None` at
    /// the deadline of the request.
    pub(super) async fn credit(&self, bytes: u64, memory: u64) -> io::Result<Option<SendCredit>> {
        let credit = async {
            // The window first: a client that does not read must not hold memory of the node.
            let window = self.outbox.window.clone().acquire_many_owned(window_units(bytes)).await;
            let _window = window.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            Ok(SendCredit { charge: self.outbox.account.charge_read(memory).await, _window })
        };
        tokio::time::timeout_at(self.deadline.into(), credit).await.ok().transpose()
    }

    /// Returns credit as [`Responder::credit`] does, if there is some without waiting.
    pub(super) fn try_credit(&self, bytes: u64, memory: u64) -> Option<SendCredit> {
        let window = self.outbox.window.clone().try_acquire_many_owned(window_units(bytes)).ok()?;
        let charge = self.outbox.account.try_charge(Kind::Reads, memory)?;
        Some(SendCredit { charge, _window: window })
    }

    /// Queues page bytes, sent from their memory without a copy. The credit returns when they have
    /// left.
    pub(super) async fn send_bytes<P>(
        &self,
        node: &NodeState,
        head: Response,
        bytes: P,
        mut credit: SendCredit,
    ) -> io::Result<()>
    where
        P: AsRef<[u8]> + Send + Sync + 'static,
    {
        node.metrics.bytes_sent.inc_by(bytes.as_ref().len() as u64);
        credit.charge.mark_queued();
        self.has_sent_bulk.store(true, Ordering::Relaxed);
        let payload: Payload = Box::new(CreditedBytes { bytes, _credit: credit });
        let mut frame = head.frame(self.outbox.version, self.request, Some(payload));
        let guard = self.outbox.payloads.add(self.request);
        let abandon_at = self.deadline + ABANDON_AFTER;
        frame.abandon_when(move || guard.is_abandoned() || now() >= abandon_at);
        enqueue(&self.outbox.bulk, frame).await
    }
}

fn window_units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(WINDOW_UNIT)).unwrap_or(u32::MAX)
}

struct CreditedBytes<P> {
    bytes: P,
    _credit: SendCredit,
}

impl<P: AsRef<[u8]>> AsRef<[u8]> for CreditedBytes<P> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

pub(super) struct PagePayload {
    pub(super) page: Arc<Page>,
    pub(super) bytes: Range<usize>,
}

impl AsRef<[u8]> for PagePayload {
    fn as_ref(&self) -> &[u8] {
        &self.page.payload[self.bytes.clone()]
    }
}

pub(super) struct PartPayload(pub(super) larder_memory::SlotPart);

impl AsRef<[u8]> for PartPayload {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
