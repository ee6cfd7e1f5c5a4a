//! Receives, admits and dispatches the requests of one client.

use super::open_puts::commit;
use super::outbox::Responder;
use super::page_admin::PageAdmin;
use super::page_request::PageRequest;
use super::rdma::PendingCommit;
use super::turn::KEYS_PER_TURN;
use super::{Connection, protocol_error, timed_out};
use crate::budget::{Busy, Charge};
use crate::puts::Put;
use larder_format::codec::DecodeError;
use larder_format::{NamespaceId, PageId, PageKey};
use larder_runtime::{fail_point, now};
use larder_wire::{
    ByteSource, Entry, ErrorCode, FrameHead, FrameHeader, FrameReader, PageRange, PartLocation, PinKind, Request,
    ReserveOutcome, Reserved, Response,
};
use std::io;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Retry delay for a client with too many waiting requests. One of them ends soon: each has a
/// deadline.
const TOO_MANY_REQUESTS_RETRY: Duration = Duration::from_millis(10);
const DEADLINE_DEFAULT: Duration = Duration::from_secs(5);
/// Maximum deadline. It bounds the time for which a request can keep its memory.
pub(super) const DEADLINE_MAX: Duration = Duration::from_secs(600);

impl Connection {
    /// Serves requests until the client disconnects.
    ///
    /// # Errors
    /// `InvalidData` for a protocol error; any other kind if the connection was lost.
    pub(super) async fn serve<S: ByteSource>(mut self, reader: &mut FrameReader<S>) -> io::Result<()> {
        // A client may be silent between its requests, but not within a header.
        while reader.begin().await? {
            let head = tokio::time::timeout(self.node.stall_timeout(), reader.head()).await.map_err(timed_out)??;
            let Some(head) = head else { break };
            self.serve_one(reader, &head).await?;
        }
        Ok(())
    }

    async fn serve_one<S: ByteSource>(&mut self, reader: &mut FrameReader<S>, head: &FrameHead) -> io::Result<()> {
        if !self.admit(reader, head).await? {
            return Ok(());
        }
        let header = head.header;
        let decoded = Request::decode(self.outbox.version(), header.kind, reader.body());
        reader.release_body();
        let request = match decoded {
            Ok(request) => request,
            Err(error) => {
                let message = format!("a message of kind {}: {error}", header.kind);
                let response = Response::Error { code: ErrorCode::Malformed, message };
                // The answer helps to debug the client. The writer flushes it before the close.
                self.outbox.respond(header.request, response).await?;
                return Err(protocol_error(error));
            }
        };
        self.handle(reader, &header, request).await?;
        if let Some(place) = &self.place {
            place.served();
        }
        // Still here only if no task has taken it over: the request is done.
        self.charge = None;
        Ok(())
    }

    /// Serves a request that came between two fragments of a part. It has no payload, so the depth
    /// is bounded: it cannot contain another.
    pub(super) fn serve_between<'a, S: ByteSource>(
        &'a mut self,
        reader: &'a mut FrameReader<S>,
        head: &'a FrameHead,
    ) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + 'a>> {
        Box::pin(async move {
            let part_charge = self.charge.take();
            self.serve_one(reader, head).await?;
            self.charge = part_charge;
            Ok(())
        })
    }

    /// Receives the body of a request, and charges it before each growth of the memory for it.
    /// Returns `false` if the request was answered "busy".
    async fn admit<S: ByteSource>(&mut self, reader: &mut FrameReader<S>, head: &FrameHead) -> io::Result<bool> {
        let header = &head.header;
        if header.body_bytes as usize > Request::max_body_bytes(header.kind) {
            return Err(protocol_error(DecodeError::Invalid("body length of this kind of request")));
        }
        let mandatory = !Request::is_sheddable(header.kind);
        let mut charge: Option<Charge> = None;
        let mut refused = None;
        let account = &self.account;
        let received = reader.received_bytes();
        let receive = reader.take_body_if(head, |body_bytes| {
            let charged = match &mut charge {
                Some(charge) => account.grow_request(charge, body_bytes, mandatory),
                None => account.charge_request(body_bytes, mandatory).map(|first| charge = Some(first)),
            };
            refused = charged.err();
            refused.is_none()
        });
        self.node.arriving.receive(received, || account.tenant(), receive).await?;
        self.received_at = now();
        if let Some(place) = &self.place {
            place.record_activity(self.received_at);
        }
        let admission = match (refused, charge) {
            (Some(busy), _) => Err(busy),
            (None, Some(charge)) => Ok(charge),
            // Requests without a body are charged, too.
            (None, None) => self.account.charge_request(0, mandatory),
        };
        match admission {
            Ok(charge) => self.charge = Some(charge),
            Err(busy) => {
                // Only parts have a payload, and parts are never refused.
                if header.payload_bytes > 0 {
                    return Err(protocol_error(DecodeError::Invalid("payload")));
                }
                self.refuse(header.request, busy).await?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn handle<S: ByteSource>(
        &mut self,
        reader: &mut FrameReader<S>,
        header: &FrameHeader,
        request: Request,
    ) -> io::Result<()> {
        let request = match request {
            Request::Part { put, part, crcs, bytes } => {
                return self.part(reader, header.payload_bytes, put, part, crcs, bytes).await;
            }
            request => request,
        };
        if header.payload_bytes > 0 {
            return Err(protocol_error(DecodeError::Invalid("payload")));
        }
        self.dispatch(header, request).await
    }

    async fn part<S: ByteSource>(
        &mut self,
        reader: &mut FrameReader<S>,
        payload_bytes: u32,
        put: Entry,
        part: u32,
        crcs: Vec<u32>,
        bytes: PartLocation,
    ) -> io::Result<()> {
        match bytes {
            PartLocation::Inline => self.receive_part(reader, put, part, crcs, payload_bytes).await,
            _ if payload_bytes > 0 => Err(protocol_error(DecodeError::Invalid("payload"))),
            PartLocation::SharedMemory { offset, bytes } => self.copy_part(put, part, crcs, bytes, offset).await,
            PartLocation::Rdma => {
                self.land_written_part(put, part, crcs);
                Ok(())
            }
        }
    }

    async fn dispatch(&mut self, header: &FrameHeader, message: Request) -> io::Result<()> {
        let node = &self.node;
        let response = match message {
            Request::Hello { .. } => return Err(protocol_error(DecodeError::Invalid("second Hello"))),
            Request::Cancel(other) => {
                self.cancel(other);
                return Ok(());
            }
            Request::Register { name, ttl_ms, info } => {
                let ttl = Duration::from_millis(u64::from(ttl_ms));
                Response::Count(u32::from(node.members.register(self.member, name, info, ttl, now())))
            }
            Request::Withdraw(name) => Response::Count(u32::from(node.members.withdraw(self.member, &name))),
            Request::Members => {
                let members = node.members.shared(now());
                return self.outbox.send_shared(header.request, &members).await;
            }
            Request::Ping => Response::Pong,
            Request::Status => Response::Status(node.status().to_string()),
            message => match &self.namespace {
                Some(namespace) => {
                    let namespace = namespace.id;
                    return self.dispatch_page_request(header, namespace, message).await;
                }
                None => Response::Error { code: ErrorCode::State, message: "this connection has no namespace".into() },
            },
        };
        self.outbox.respond(header.request, response).await
    }

    async fn dispatch_page_request(
        &mut self,
        header: &FrameHeader,
        namespace: NamespaceId,
        message: Request,
    ) -> io::Result<()> {
        let id = |key| PageId { namespace, key };
        let ids = |keys: Vec<PageKey>| keys.into_iter().map(id).collect::<Vec<_>>();
        let deadline = deadline(header);
        let request = header.request;
        match message {
            Request::Locate(keys) => {
                let mut tiers = Vec::with_capacity(keys.len());
                for keys in keys.chunks(KEYS_PER_TURN) {
                    tiers.extend(keys.iter().map(|&key| self.node.store.tiers().locate(&id(key))));
                    self.turn.looked_up(keys.len()).await;
                }
                self.outbox.respond(request, Response::Located(tiers)).await
            }
            Request::Reserve(pages) => self.reserve(request, namespace, pages).await,
            Request::Commit(entries) => self.commit(request, entries, deadline).await,
            Request::Abort(entry) => {
                if let Some(put) = self.puts.remove(&entry) {
                    self.node.store.puts().abort(&put);
                }
                Ok(())
            }
            Request::Get { keys, by } => {
                let whole = |(index, key)| PageRequest { index, id: id(key), bytes: None };
                self.get(request, (0..).zip(keys).map(whole).collect(), by, deadline).await
            }
            Request::GetRanges { ranges, by } => {
                let range = |(index, PageRange { key, bytes })| PageRequest { index, id: id(key), bytes: Some(bytes) };
                self.get(request, (0..).zip(ranges).map(range).collect(), by, deadline).await
            }
            Request::RdmaChannels { closed, offered } => self.open_channels(request, closed, offered, deadline).await,
            Request::GrantParts { reserve, channels } => self.grant_parts(request, reserve, channels, deadline).await,
            Request::Lookup { keys, hold_ms, load_l3 } => {
                self.lookup(request, ids(keys), hold_ms, load_l3, deadline).await
            }
            Request::Release(entries) => {
                self.rdma.release(&entries);
                self.holdings.release(&entries);
                Ok(())
            }
            Request::RdmaProgress { entry, part, bytes } => {
                self.record_rdma_progress(entry, part, bytes);
                Ok(())
            }
            Request::Extents(keys) => self.extents(request, ids(keys), deadline).await,
            Request::Follow(key) => self.follow(request, id(key), deadline).await,
            Request::Pin { kind, ttl_ms, .. } if kind != PinKind::None && !self.pin_times().contains(&ttl_ms) => {
                let most = *self.pin_times().end();
                let message =
                    format!("pins last from 1 to {most} milliseconds at this node (--max-pin-time), not {ttl_ms}");
                self.outbox.respond(request, Response::Error { code: ErrorCode::Malformed, message }).await
            }
            message => {
                let Some(operation) = PageAdmin::of(message, id) else {
                    return Err(protocol_error(DecodeError::Invalid("message")));
                };
                self.administer(request, operation, deadline).await
            }
        }
    }

    /// Times to live that a pin may have, in milliseconds.
    fn pin_times(&self) -> RangeInclusive<u64> {
        1..=self.node.store.options().pin_time_max.as_millis() as u64
    }

    async fn reserve(&mut self, request: u64, namespace: NamespaceId, pages: Vec<Reserved>) -> io::Result<()> {
        // Only a connection with a namespace gets here.
        let (part_table, token_ids_max) =
            self.namespace.as_ref().map_or((&[][..], 0), |space| (&space.part_table[..], space.token_ids_max));
        let mut outcomes = Vec::with_capacity(pages.len());
        // All pages have one size. Once there is no room for one, the next would find none either.
        let mut seeks_room = true;
        for (index, page) in (0..).zip(&pages) {
            let id = PageId { namespace, key: page.key };
            let entry = Entry { request, index };
            let outcome = if page.token_ids.len() > token_ids_max {
                ReserveOutcome::Malformed
            } else {
                self.puts.reserve(&self.node, &self.account, part_table, entry, id, page, seeks_room)
            };
            seeks_room &= outcome != ReserveOutcome::Busy;
            outcomes.push(outcome);
        }
        self.answer_reserved(request, outcomes).await
    }

    async fn commit(&mut self, request: u64, entries: Vec<Entry>, deadline: Instant) -> io::Result<()> {
        let puts: Vec<Option<Arc<Put>>> = entries.iter().map(|entry| self.puts.remove(entry)).collect();
        // Without RDMA all parts have landed in the order of the stream.
        if !puts.iter().flatten().any(|put| put.is_revoking()) {
            return self.outbox.respond(request, commit(&self.node, &puts)).await;
        }
        let pending = PendingCommit::new(self.node.clone(), puts);
        let responder = self.responder(request, deadline);
        self.spawn(request, 1, async move { pending.run(&responder, deadline).await }).await
    }

    pub(super) fn responder(&self, request: u64, deadline: Instant) -> Responder {
        self.outbox.responder(request, deadline)
    }

    /// Ends the tasks of a request, its queued pages, its lease, and the puts that it reserved.
    fn cancel(&mut self, request: u64) {
        // Tasks first: a running lookup must not add holds to a lease that has ended.
        self.tasks.abort_request(request);
        self.outbox.abandon_payloads(request);
        self.holdings.end_lease(request);
        if fail_point!("node.cancel-keeps-puts") {
            return;
        }
        for put in self.puts.remove_request(request) {
            self.node.store.puts().abort(&put);
        }
    }

    /// Runs a request about `keys` keys that may wait, or answers "busy" if too many wait.
    ///
    /// A request for one key starts on this task, because it rarely waits and a spawn costs more
    /// than its work. Of several pages the first can leave while others are looked up, so they get
    /// a task.
    pub(super) async fn spawn<F>(&mut self, request: u64, keys: usize, work: F) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        self.spawn_or_inline(request, keys, keys <= 1, work).await
    }

    /// Runs a request like [`Connection::spawn`]. With `inline` it is polled once on this task, and
    /// spawned only if it has to wait.
    pub(super) async fn spawn_or_inline<F>(
        &mut self,
        request: u64,
        keys: usize,
        inline: bool,
        work: F,
    ) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let Some(permit) = self.tasks.permit(keys) else {
            return self.refuse(request, Busy::after(TOO_MANY_REQUESTS_RETRY)).await;
        };
        let work = async move {
            let _permit = permit;
            work.await
        };
        if !inline {
            self.spawn_task(request, work);
            return Ok(());
        }
        // Boxed once, so that a request that has to wait moves to its task without a copy.
        let mut work = Box::pin(work);
        match futures::poll!(&mut work) {
            Poll::Ready(ended) => ended,
            Poll::Pending => {
                self.spawn_task(request, work);
                Ok(())
            }
        }
    }

    /// Spawns a task of the current request. It takes over the request's charge.
    pub(super) fn spawn_task<F>(&mut self, request: u64, work: F)
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let charge = self.charge.take();
        self.tasks.spawn(request, charge, work);
    }
}

fn deadline(header: &FrameHeader) -> Instant {
    let timeout = match header.deadline_ms {
        0 => DEADLINE_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)).min(DEADLINE_MAX),
    };
    now() + timeout
}
