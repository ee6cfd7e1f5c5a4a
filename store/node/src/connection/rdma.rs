//! RDMA side of one connection: its channels, pages that the client reads, and parts that it
//! writes.
//!
//! Invariants:
//! - A granted page is held until its key is provably invalid, whatever the client says or omits:
//!   the grant owns the hold.
//! - A part that the client wrote is verified after its grant was revoked, and not before.
//! - Every resource of a client is bounded: channels by [`MAX_RDMA_CHANNELS`] and by the node's
//!   permits, grants by the credit of each channel, and the time of a grant by
//!   [`RdmaOptions::page_age_max`](crate::RdmaOptions) and the deadline of its request.
//! - The grants of a channel end with it.

use super::Connection;
use super::holdings::request_number_in_use;
use super::open_puts::{commit, entries_of};
use super::outbox::Responder;
use super::page_request::PageRequest;
use crate::holds::Hold;
use crate::puts::Put;
use crate::rdma::{ClientChannel, NumberedChannel, ReadGrant, WriteGrant, describe};
use crate::state::NodeState;
use futures::StreamExt;
use larder_rdma::{EndpointAddress, Error, GrantCredit, Guarded, SlotSlice};
use larder_runtime::sync::Mutex;
use larder_runtime::{fail_point, now};
use larder_wire::{
    Entry, ErrorCode, MAX_PART_GRANTS, MAX_RDMA_CHANNELS, PartGrant, PayloadLocation, RdmaEndpoint, Response, TierCode,
};
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Grants that one request opens at a time. Each is a round trip to the device. More would fill the
/// channel's send queue and delay the grants of other requests.
const GRANTS_AT_ONCE: usize = 16;
/// Time for which the device of a client that gave up a request goes on with what was posted: a
/// quarter of its queue, 256 KiB in requests of 16 KiB, at 32 KiB/s.
const DRAIN_MAX: Duration = Duration::from_secs(8);
/// Interval of the search for expired grants. Their time limit is a minute, so a second is exact
/// enough.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);

struct GrantedPage {
    channel: u32,
    since: Instant,
    /// Deadline of the request. Its client posts no more reads then.
    deadline: Instant,
    /// Length of the granted range.
    bytes: u32,
    /// Bytes of it that the client says it has read.
    read: u32,
    /// Revoked on drop.
    _grant: ReadGrant,
}

impl GrantedPage {
    /// Returns `true` if the client has read nothing for `age_max`, of this page or of others that
    /// may come first. Reads count until [`DRAIN_MAX`] after the deadline of the request.
    fn is_expired(&self, last_read: Option<Instant>, age_max: Duration) -> bool {
        let used =
            last_read.map_or(self.since, |read| read.max(self.since)).min(self.deadline.max(self.since) + DRAIN_MAX);
        now().saturating_duration_since(used) > age_max
    }
}

/// RDMA channels of one client, and the pages granted over them. The requests' tasks share it. The
/// expiry task refers to it weakly, and so ends with the connection.
pub(super) struct ClientChannels {
    /// Lock order: `pages` before `channels`.
    channels: Mutex<BTreeMap<u32, Arc<ClientChannel>>>,
    pages: Mutex<BTreeMap<Entry, GrantedPage>>,
    /// Held while channels are opened. One request at a time may do that.
    opening: Semaphore,
    expiry_runs: AtomicBool,
}

impl Default for ClientChannels {
    fn default() -> Self {
        Self {
            channels: Mutex::default(),
            pages: Mutex::default(),
            opening: Semaphore::new(1),
            expiry_runs: AtomicBool::new(false),
        }
    }
}

impl ClientChannels {
    /// Closes channels, and opens as many of the offered ones as possible before `deadline`.
    async fn open(
        self: &Arc<Self>,
        node: &NodeState,
        closed: &[u32],
        offered: Vec<RdmaEndpoint>,
        deadline: Instant,
    ) -> Response {
        let Ok(_alone) = self.opening.try_acquire() else {
            let message = "another request of this connection opens RDMA channels; wait for its answer".into();
            return Response::Error { code: ErrorCode::Busy, message };
        };
        self.close(closed);
        let Some(rdma) = &node.rdma else { return Response::RdmaChannels(Vec::new()) };
        let (numbers, addresses) = self.acceptable(offered);
        let permits: Vec<OwnedSemaphorePermit> =
            addresses.iter().map_while(|_| rdma.channel_permits.clone().try_acquire_owned().ok()).collect();
        if permits.is_empty() {
            return Response::RdmaChannels(Vec::new());
        }
        // Relaxed: the swap alone decides which call spawns the task.
        if !self.expiry_runs.swap(true, Ordering::Relaxed) {
            tokio::spawn(revoke_expired(Arc::downgrade(self), rdma.page_age_max));
        }
        let accept = tokio::time::timeout_at(deadline.into(), rdma.fabric.accept(&addresses[..permits.len()]));
        let accepted = accept.await.unwrap_or_default();
        let mut endpoints = Vec::new();
        for ((number, channel), permit) in numbers.into_iter().zip(accepted).zip(permits) {
            if let Some(channel) = channel {
                node.metrics.rdma_channels_opened.inc();
                endpoints.push(RdmaEndpoint { channel: number, address: channel.local().encode() });
                self.channels.lock().insert(number, Arc::new(ClientChannel::new(channel, permit)));
            }
        }
        Response::RdmaChannels(endpoints)
    }

    pub(super) fn has_request(&self, request: u64) -> bool {
        self.pages.lock().range(entries_of(request)).next().is_some()
    }

    /// Closes these channels and the dead ones, with the grants over them.
    fn close(&self, numbers: &[u32]) {
        let closed: BTreeMap<u32, Arc<ClientChannel>> = {
            let mut channels = self.channels.lock();
            channels.extract_if(.., |number, channel| numbers.contains(number) || channel.is_dead()).collect()
        };
        self.revoke_pages(|page| closed.contains_key(&page.channel));
    }

    /// Revokes grants. Their memory is released when the device confirms that, not at the return.
    fn revoke_pages(&self, is_revoked: impl Fn(&GrantedPage) -> bool) {
        let revoked: Vec<(Entry, GrantedPage)> = self.pages.lock().extract_if(.., |_, page| is_revoked(page)).collect();
        drop(revoked);
    }

    /// Returns numbers and addresses of the offered endpoints that have new numbers and valid
    /// addresses, at most as many as a connection may have.
    fn acceptable(&self, offered: Vec<RdmaEndpoint>) -> (Vec<u32>, Vec<EndpointAddress>) {
        let channels = self.channels.lock();
        let mut seen: BTreeSet<u32> = channels.keys().copied().collect();
        let new = offered.into_iter().filter(|endpoint| seen.insert(endpoint.channel));
        let endpoints =
            new.filter_map(|endpoint| Some((endpoint.channel, EndpointAddress::decode(&endpoint.address).ok()?)));
        // Only this call adds channels, and it takes at most the free places.
        assert!(channels.len() <= MAX_RDMA_CHANNELS, "{} RDMA channels of one connection", channels.len());
        endpoints.take(MAX_RDMA_CHANNELS - channels.len()).unzip()
    }

    /// Returns the usable channel for an index: requests rotate over the given numbers.
    fn channel(&self, numbers: &[u32], index: usize) -> Option<NumberedChannel> {
        let number = *numbers.get(index.checked_rem(numbers.len())?)?;
        let channel = self.channels.lock().get(&number).cloned()?;
        (!channel.is_dead()).then_some((number, channel))
    }

    /// Grants a held page to the client and sends the grant. Returns `false` if that is not
    /// possible now: the page then goes inline.
    pub(super) async fn grant_page(
        &self,
        responder: &Responder,
        numbers: &[u32],
        hold: Hold,
        page_request: &PageRequest,
        bytes: &Range<usize>,
        tier: TierCode,
    ) -> io::Result<bool> {
        let Some((number, channel)) = self.channel(numbers, page_request.index as usize) else { return Ok(false) };
        let Some(credit) = channel.grant_credit() else { return Ok(false) };
        let page = hold.page().clone();
        let Some(slice) = SlotSlice::new(page.payload.clone(), bytes.clone()) else { return Ok(false) };
        let guarded = Guarded { bytes: slice, guard: hold };
        let Ok(grant) = channel.grant_read(guarded, credit).await else { return Ok(false) };
        // With the slot at hand, table entry and answer are one step. A cancelled request must not
        // leave a grant that the client does not know of.
        let slot = responder.reserve_slot().await?;
        let location = PayloadLocation::Rdma(describe(number, &grant));
        let mut pages = self.pages.lock();
        if !self.channels.lock().get(&number).is_some_and(|known| Arc::ptr_eq(known, &channel)) {
            // The channel was closed meanwhile. Its grants were revoked without this one.
            return Ok(false);
        }
        match pages.entry(Entry { request: responder.request(), index: page_request.index }) {
            btree_map::Entry::Vacant(vacant) => {
                let bytes = bytes.len() as u32;
                let deadline = responder.deadline();
                vacant.insert(GrantedPage { channel: number, since: now(), deadline, bytes, read: 0, _grant: grant });
            }
            // To replace the grant would free memory that the client reads.
            btree_map::Entry::Occupied(_) => return Err(request_number_in_use()),
        }
        drop(pages);
        slot.send(responder.frame(page_request.answer(&page, tier, location)));
        Ok(true)
    }

    fn record_read(&self, entry: Entry, bytes: u32) {
        let mut pages = self.pages.lock();
        let Some(page) = pages.get_mut(&entry) else { return };
        // A claim. It only grows, and ends with the page.
        let read = bytes.min(page.bytes);
        if read > page.read {
            page.read = read;
            if let Some(channel) = self.channels.lock().get(&page.channel) {
                channel.record_read(now());
            }
        }
    }

    pub(super) fn release(&self, entries: &[Entry]) {
        let released: Vec<Option<GrantedPage>> = {
            let mut pages = self.pages.lock();
            entries.iter().map(|entry| pages.remove(entry)).collect()
        };
        // Without the lock, because a revocation posts work to the device.
        drop(released);
    }

    /// Grants parts of puts for writing, as many as the channels have credit for.
    async fn grant_parts(&self, puts: Vec<(u32, Arc<Put>)>, numbers: &[u32]) -> Vec<PartGrant> {
        let parts = puts.into_iter().flat_map(|(index, put)| {
            let count = put.part_count();
            (0..count).map(move |part| (index, part, put.clone()))
        });
        let with_credit = parts.take(MAX_PART_GRANTS).enumerate().map_while(|(at, part)| {
            let (channel, credit) = self.channel_with_write_credit(numbers, at)?;
            Some((part, channel, credit))
        });
        let grants = with_credit.map(|((index, part, put), (number, channel), credit)| async move {
            let grant = grant_write(&put, part, &channel, credit).await?;
            let answer = PartGrant { index, part: part as u32, range: describe(number, &grant) };
            put.grant_part(part, grant).then_some(answer)
        });
        // Collected first: credit is taken in the order of the parts, before any of them waits.
        let grants: Vec<_> = grants.collect();
        let granted = futures::stream::iter(grants).buffered(GRANTS_AT_ONCE);
        granted.filter_map(std::future::ready).collect().await
    }

    /// Returns the first channel with credit for a write grant, from the index's own channel on.
    fn channel_with_write_credit(&self, numbers: &[u32], index: usize) -> Option<(NumberedChannel, GrantCredit)> {
        (index..index + numbers.len()).find_map(|index| {
            let (number, channel) = self.channel(numbers, index)?;
            let credit = channel.write_credit()?;
            Some(((number, channel), credit))
        })
    }
}

/// Revokes grants that their client has not used for `age_max`, until the connection has ended.
async fn revoke_expired(channels: Weak<ClientChannels>, age_max: Duration) {
    loop {
        tokio::time::sleep(EXPIRY_INTERVAL.min(age_max)).await;
        let Some(channels) = channels.upgrade() else { return };
        let last_reads: BTreeMap<u32, Option<Instant>> =
            channels.channels.lock().iter().map(|(number, channel)| (*number, channel.last_read())).collect();
        channels.revoke_pages(|page| page.is_expired(last_reads.get(&page.channel).copied().flatten(), age_max));
    }
}

/// Grants a part for which nothing has arrived. A failed grant loses the part's memory, and with it
/// the put. So a channel that cannot grant writes is tried only once.
async fn grant_write(put: &Put, part: usize, channel: &ClientChannel, credit: GrantCredit) -> Option<WriteGrant> {
    let memory = put.take_open(part)?;
    match channel.grant_write(memory, credit).await {
        Ok(grant) => Some(grant),
        Err(error @ (Error::Disconnected(_) | Error::NotConnected)) => {
            let key = put.id.key;
            tracing::debug!(%key, part, %error, "a part was lost with its RDMA channel; the client must put the page again");
            None
        }
        Err(error) => {
            if channel.disable_write_grants() {
                tracing::warn!(%error, "the RDMA device cannot grant writes: puts of this client move over TCP");
            }
            None
        }
    }
}

impl Connection {
    pub(super) async fn open_channels(
        &mut self,
        request: u64,
        closed: Vec<u32>,
        offered: Vec<RdmaEndpoint>,
        deadline: Instant,
    ) -> io::Result<()> {
        let node = self.node.clone();
        let channels = self.rdma.clone();
        let responder = self.responder(request, deadline);
        self.spawn(request, 1, async move {
            let response = channels.open(&node, &closed, offered, deadline).await;
            responder.send(response).await
        })
        .await
    }

    pub(super) async fn grant_parts(
        &mut self,
        request: u64,
        reserve: u64,
        numbers: Vec<u32>,
        deadline: Instant,
    ) -> io::Result<()> {
        let puts = self.puts.of_request(reserve);
        let channels = self.rdma.clone();
        let responder = self.responder(request, deadline);
        self.spawn(request, puts.len(), async move {
            let grants = channels.grant_parts(puts, &numbers).await;
            responder.send(Response::PartGrants(grants)).await
        })
        .await
    }

    /// Records the progress of a transfer that the client's device performs. The node cannot see
    /// it, and must not take the client for silent meanwhile.
    pub(super) fn record_rdma_progress(&self, entry: Entry, part: Option<u32>, bytes: u32) {
        if fail_point!("node.rdma-progress-ignored") {
            return;
        }
        match part {
            None => self.rdma.record_read(entry, bytes),
            Some(part) => {
                let Some(put) = self.puts.get(&entry) else { return };
                let written = put.record_written(part as usize, bytes);
                if written > 0 {
                    self.account.record_received(written);
                }
            }
        }
    }

    /// Lands a part that the client has written by RDMA. Its word is not trusted: the grant is
    /// revoked and the bytes are verified first.
    pub(super) fn land_written_part(&mut self, entry: Entry, part: u32, crcs: Vec<u32>) {
        let Some(put) = self.puts.get(&entry).cloned() else { return };
        let Some((grant, written)) = put.take_grant(part as usize) else { return };
        let node = self.node.clone();
        let peer = self.peer.clone();
        // Without the bytes that progress reports have recorded.
        self.account.record_received(put.part_bytes(part as usize).unwrap_or(0) - written);
        self.spawn_task(entry.request, async move {
            if !land(&node, &peer, &put, part as usize, grant, crcs).await {
                node.store.puts().abort_unannounced(&put);
            }
            Ok(())
        });
    }
}

/// Revokes a part's grant, and only then verifies its bytes. Returns `false` if the put must end.
async fn land(node: &NodeState, peer: &str, put: &Put, part: usize, grant: WriteGrant, crcs: Vec<u32>) -> bool {
    let key = put.id.key;
    let memory = match grant.revoke().await {
        Ok(Guarded { bytes, .. }) => bytes,
        Err(error) => {
            tracing::warn!(%peer, %key, part, %error, "put aborted: the RDMA device did not return a part's memory");
            return false;
        }
    };
    node.metrics.bytes_written_rdma.inc_by(memory.len() as u64);
    let is_valid = put.land(part, memory, crcs);
    if !is_valid {
        node.metrics.parts_corrupt.inc();
        tracing::warn!(%peer, %key, part, "put aborted: a part arrived damaged over RDMA; check the client");
    }
    is_valid
}

/// A commit that waits for parts whose grants are being revoked. Dropping it aborts the puts that
/// are not sealed.
pub(super) struct PendingCommit {
    node: Arc<NodeState>,
    puts: Vec<Option<Arc<Put>>>,
}

impl PendingCommit {
    pub(super) fn new(node: Arc<NodeState>, puts: Vec<Option<Arc<Put>>>) -> Self {
        Self { node, puts }
    }

    /// Commits the puts when all written parts have landed, or at the deadline, and answers.
    pub(super) async fn run(self, responder: &Responder, deadline: Instant) -> io::Result<()> {
        let revoked = futures::future::join_all(self.puts.iter().flatten().map(|put| put.revoked()));
        // At the deadline the puts with missing parts are answered as incomplete.
        let _ = tokio::time::timeout_at(deadline.into(), revoked).await;
        responder.send(commit(&self.node, &self.puts)).await
    }
}

impl Drop for PendingCommit {
    fn drop(&mut self) {
        self.puts.iter().flatten().for_each(|put| self.node.store.puts().abort(put));
    }
}
