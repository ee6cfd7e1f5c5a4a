//! Streaming put of one page: reserve, send parts as the caller produces them, commit.
//!
//! Invariants:
//! - The node hears of every put that does not reach its commit, because it may have granted a
//!   reservation whose answer was lost.
//! - Parts that wait in this client count against its put budget.
//! - Checksums that come with a part stay with it. Nothing computes them again from its bytes.

use super::durations::{RETRY_DEFAULT, milliseconds, retry_delay};
use crate::budget::{PutBudget, ReservedBytes};
use crate::client::Client;
use crate::connection::{Connection, OpenParts, PartSource, SentPart, cancel_puts, open_parts, send_part};
use crate::stats::{Counters, count};
use bytes::Bytes;
use larder_format::{CHUNK_BYTES, MAX_TOKEN_IDS, PageKey, PageOrigin, chunk_crcs};
use larder_runtime::{fail_point, now};
use larder_wire::{CommitOutcome, Entry, Request, ReserveOutcome, Reserved, Response, VERSION_COPIES};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Identity of a page to put.
#[derive(Debug, Clone)]
pub struct NewPage {
    /// Key of the page. It depends on the tokens of the page and of all pages before it.
    pub key: PageKey,
    /// Key of the page before it, or [`PageKey::NONE`] for the first of a sequence. Eviction
    /// prefers pages without children.
    pub parent: PageKey,
    /// Index of the page in its sequence, from 0.
    pub position: u32,
    /// Ids of the page's tokens, in order, for indexers that follow the node's KV events. Empty if
    /// they are unknown. The client leaves out lists above [`MAX_TOKEN_IDS`], and all lists to
    /// nodes that speak a protocol older than version 9. A node refuses more ids than a page has
    /// tokens, unless the page is opaque. The put is then [`PutOutcome::Lost`].
    pub token_ids: Vec<u32>,
}

impl NewPage {
    /// The first page of a sequence, with unknown token ids.
    pub fn first(key: PageKey) -> NewPage {
        NewPage { key, parent: PageKey::NONE, position: 0, token_ids: Vec::new() }
    }

    /// Token ids to send.
    pub(super) fn sent_token_ids(&self) -> &[u32] {
        if self.token_ids.len() > MAX_TOKEN_IDS { &[] } else { &self.token_ids }
    }
}

/// Options of [`Client::put_with`] and [`Client::put_pages`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// Time after the commit when the page becomes a miss, rounded up to milliseconds. Default:
    /// `None`, which means never.
    pub ttl: Option<Duration>,
    /// Retries at a busy node. The client waits for the node's hint before each, times a random
    /// factor between 1 and 1.25, and never beyond the deadline. Default: 0.
    pub busy_retries: u32,
}

impl PutOptions {
    pub(super) fn ttl_ms(&self) -> u64 {
        self.ttl.map_or(0, milliseconds)
    }
}

/// Result of a put. No outcome is an error: a page that is not stored is a later miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PutOutcome {
    /// The node holds the page. It is not necessarily durable yet.
    Stored,
    /// The node already had the page with the same bytes.
    AlreadyThere,
    /// The node has other bytes under this key, and keeps them.
    Refused,
    /// The put was that of a copy, and the page may have been forgotten since it was copied. The
    /// caller must drop its copy, and may put the page again after computing it.
    Forgotten,
    /// An operator has retired the namespace. Puts are refused until the rollback. Nodes that speak
    /// a protocol older than version 8 answer [`PutOutcome::Lost`] instead.
    Retired,
    /// Another client is putting this key now. The page appears when that client commits.
    InProgress,
    /// The node has no room for the put now.
    Busy {
        /// Pause that the node suggests.
        retry_after: Duration,
    },
    /// No node was connected, the put was aborted, or the node's answer did not arrive. The node
    /// may hold the page.
    Lost,
}

impl PutOutcome {
    pub(super) fn is_busy(&self) -> bool {
        matches!(self, PutOutcome::Busy { .. })
    }
}

/// A part with its share of the put budget. The share returns when the part was sent, or when its
/// put has ended.
struct BudgetedPart {
    bytes: Bytes,
    _reserved: ReservedBytes,
}

impl PartSource for BudgetedPart {
    fn shared(&self) -> Bytes {
        self.bytes.clone()
    }
}

impl AsRef<[u8]> for BudgetedPart {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

enum PutStep {
    Part {
        part: usize,
        bytes: BudgetedPart,
        /// Checksums from the caller. `None`: the client computes them when it needs them.
        crcs: Option<Vec<u32>>,
    },
    Commit(oneshot::Sender<PutEnd>),
}

/// Outcome of a put, and the origin of the node's page if it has the same bytes.
type PutEnd = (PutOutcome, Option<PageOrigin>);

/// Origin of the bytes of a put.
#[derive(Clone, Copy)]
enum PutSource {
    Computed,
    Copied(Option<PageOrigin>),
}

impl PutSource {
    /// Condition that the node checks. The error: the node cannot check it.
    fn condition(self, connection: &Connection) -> Result<Option<u64>, PutOutcome> {
        match self {
            PutSource::Computed => Ok(None),
            PutSource::Copied(_) if connection.version() < VERSION_COPIES => Err(PutOutcome::Forgotten),
            PutSource::Copied(_) if fail_point!("client.copy-states-no-generation") => Ok(Some(0)),
            PutSource::Copied(origin) => Ok(Some(connection.generation_of(origin))),
        }
    }
}

/// A put in progress, from [`Client::put`]. It takes parts in any order, then the commit. Dropping
/// it without a commit aborts the put at the node.
pub struct PagePut {
    /// `None` once the put is lost.
    steps: Option<mpsc::UnboundedSender<PutStep>>,
    budget: Arc<PutBudget>,
    /// Bytes of each part, 0 for those that were passed. This bounds the channel.
    parts_left: Vec<u32>,
    /// Origin to state if the same bytes are put again.
    origin: Option<PageOrigin>,
}

impl Client {
    /// Begins to put a page. Returns at once; the reservation proceeds in the background. The node
    /// must have sealed the page by `deadline`.
    ///
    /// # Panics
    /// If the client was attached without a namespace, or outside a tokio runtime.
    pub fn put(&self, page: NewPage, deadline: Instant) -> PagePut {
        self.put_with(page, PutOptions::default(), deadline)
    }

    /// Like [`Client::put`], with options.
    ///
    /// # Panics
    /// If the client was attached without a namespace, or outside a tokio runtime.
    pub fn put_with(&self, page: NewPage, options: PutOptions, deadline: Instant) -> PagePut {
        self.begin_put(page, PutSource::Computed, options, deadline)
    }

    /// Like [`Client::put_with`], for bytes that the caller has kept since it read or put the page.
    /// `origin` comes from [`Client::get_described`], [`Follow::finish_described`] or
    /// [`PagePut::commit_described`].
    ///
    /// The outcome is [`PutOutcome::Forgotten`] if the page was forgotten since then. It is also
    /// `Forgotten` if the node cannot know: the origin is unknown, or another node or another run
    /// of this node.
    ///
    /// [`Follow::finish_described`]: crate::Follow::finish_described
    ///
    /// # Panics
    /// If the client was attached without a namespace, or outside a tokio runtime.
    pub fn put_copy(
        &self,
        page: NewPage,
        origin: Option<PageOrigin>,
        options: PutOptions,
        deadline: Instant,
    ) -> PagePut {
        self.begin_put(page, PutSource::Copied(origin), options, deadline)
    }

    /// Returns `true` if the node of this page can tell whether the page was forgotten after
    /// `origin`. It answers `Forgotten` to every copy of which it cannot. `None` if no node is
    /// connected.
    pub fn can_judge_copy(&self, key: &PageKey, origin: PageOrigin) -> Option<bool> {
        let connection = self.owner(key)?;
        Some(connection.version() >= VERSION_COPIES && connection.generation_of(Some(origin)) > 0)
    }

    fn begin_put(&self, page: NewPage, source: PutSource, options: PutOptions, deadline: Instant) -> PagePut {
        let part_table = self.namespace().geometry.part_table();
        // Unbounded in type only: each part enters once, and the budget bounds their bytes.
        let (steps, queue) = mpsc::unbounded_channel();
        let connection = self.owner(&page.key);
        // Now, not when the put fails: a forget from now on may mean this page.
        let origin = match source {
            PutSource::Computed => connection.as_ref().and_then(|connection| connection.newest_origin()),
            PutSource::Copied(origin) => origin,
        };
        let put =
            PagePut { steps: Some(steps), budget: self.put_budget().clone(), parts_left: part_table.clone(), origin };
        let work = run(connection, page, source, options, part_table, queue, deadline);
        let counters = self.counters().clone();
        tokio::spawn(async move {
            let ended = tokio::time::timeout_at(deadline.into(), work).await.ok().flatten();
            count_outcome(&counters, ended.as_ref().map_or(PutOutcome::Lost, |(_, end)| end.0));
            if let Some((reply, end)) = ended {
                // The caller may have stopped waiting for the commit.
                let _ = reply.send(end);
            }
        });
        put
    }
}

impl PagePut {
    /// Passes the bytes of part `part`. Never waits for the network.
    ///
    /// The put is lost in these cases, which [`PagePut::commit`] reports:
    /// - the client's put budget is exhausted;
    /// - the part was passed before;
    /// - the page has no such part of that length.
    pub fn part(&mut self, part: usize, bytes: Bytes) {
        self.pass(part, bytes, None);
    }

    /// Like [`PagePut::part`], with the CRC-32 (IEEE) of each 64 KiB of the part, in order, the
    /// shorter rest included. [`PagePut::part`] computes them later, when it sends the bytes.
    ///
    /// Bytes that differ from `crcs` never become a page: the node verifies each part on arrival,
    /// and aborts the put. The commit then returns [`PutOutcome::Lost`]. Other requests of the
    /// connection go on. The put is also lost if the number of checksums is wrong.
    ///
    /// If the node has the page already, it compares the checksums and not the bytes.
    pub fn part_with_crcs(&mut self, part: usize, bytes: Bytes, crcs: Vec<u32>) {
        self.pass(part, bytes, Some(crcs));
    }

    fn pass(&mut self, part: usize, bytes: Bytes, crcs: Option<Vec<u32>>) {
        let covers_part = crcs.as_ref().is_none_or(|crcs| crcs.len() == bytes.len().div_ceil(CHUNK_BYTES));
        let is_expected = |left: &&mut u32| covers_part && **left > 0 && **left as usize == bytes.len();
        let expected = self.parts_left.get_mut(part).filter(is_expected);
        let (Some(left), Some(reserved)) = (expected, self.budget.reserve(bytes.len())) else {
            // Closes the channel, which aborts the put at the node.
            self.steps = None;
            return;
        };
        *left = 0;
        if let Some(steps) = &self.steps {
            let bytes = BudgetedPart { bytes, _reserved: reserved };
            // A failed send means that the put has ended; the commit reports it.
            let _ = steps.send(PutStep::Part { part, bytes, crcs });
        }
    }

    /// Seals the page, after all parts were passed. Waits until `deadline` for the outcome.
    pub async fn commit(self, deadline: Instant) -> PutOutcome {
        self.commit_described(deadline).await.0
    }

    /// Like [`PagePut::commit`], and returns an origin, with which a caller that keeps the page can
    /// put it again by [`Client::put_copy`]. It is that of the node's page, if that has the same
    /// bytes. After `Busy`, `Lost` and `InProgress` it stands for the time when this put began: the
    /// node then refuses the copy if the page was forgotten since. It is `None` if the client
    /// cannot know it.
    pub async fn commit_described(self, deadline: Instant) -> (PutOutcome, Option<PageOrigin>) {
        let (sender, receiver) = oneshot::channel();
        // A failed send means that the put has ended, as a dropped sender does.
        let sent = self.steps.as_ref().is_some_and(|steps| steps.send(PutStep::Commit(sender)).is_ok());
        let answer = async { if sent { receiver.await.ok() } else { None } };
        let end = tokio::time::timeout_at(deadline.into(), answer).await.ok().flatten();
        match end.unwrap_or((PutOutcome::Lost, None)) {
            (outcome @ (PutOutcome::Busy { .. } | PutOutcome::Lost | PutOutcome::InProgress), _) => {
                (outcome, self.origin)
            }
            end => end,
        }
    }
}

fn count_outcome(counters: &Counters, outcome: PutOutcome) {
    match outcome {
        PutOutcome::Stored => count(&counters.puts, 1),
        PutOutcome::Lost => count(&counters.puts_lost, 1),
        PutOutcome::Busy { .. } => {
            count(&counters.puts_lost, 1);
            count(&counters.puts_busy, 1);
        }
        PutOutcome::AlreadyThere
        | PutOutcome::Refused
        | PutOutcome::Forgotten
        | PutOutcome::Retired
        | PutOutcome::InProgress => {}
    }
}

type StepQueue = mpsc::UnboundedReceiver<PutStep>;
/// Channel for the commit's answer, with that answer. `None` if the caller never committed.
type Ended = Option<(oneshot::Sender<PutEnd>, PutEnd)>;

async fn run(
    connection: Option<Arc<Connection>>,
    page: NewPage,
    source: PutSource,
    options: PutOptions,
    part_table: Vec<u32>,
    mut queue: StepQueue,
    deadline: Instant,
) -> Ended {
    let Some(connection) = connection else { return drain(&mut queue, PutOutcome::Lost).await };
    let parts = part_table.len();
    let NewPage { key, parent, position, .. } = page;
    let copy_of = match source.condition(&connection) {
        Ok(condition) => condition,
        Err(outcome) => return drain(&mut queue, outcome).await,
    };
    let reserve = Reserved {
        key,
        parent,
        position,
        ttl_ms: options.ttl_ms(),
        part_bytes: part_table,
        copy_of,
        token_ids: page.sent_token_ids().to_vec(),
    };
    let request = Request::Reserve(vec![reserve]);
    let mut retries = options.busy_retries;
    loop {
        let put = connection.next_request();
        let mut open = CancelOnDrop { connection: &connection, request: put, is_armed: true };
        // The node answers the second request after the reservation, so both may leave together.
        let reserving = connection.request_as(put, &request, deadline);
        let (answer, open_parts) = futures::join!(reserving, open_parts(&connection, put, deadline));
        let Some((outcomes, retry_after)) = answer.and_then(|answer| reserve_outcomes(answer, 1)) else {
            return drain(&mut queue, PutOutcome::Lost).await;
        };
        let refused = match outcomes[0] {
            ReserveOutcome::Granted => {
                open_parts.iter().for_each(OpenParts::record_accepted);
                return send_parts(&mut open, &mut queue, deadline).await;
            }
            ReserveOutcome::Exists => None,
            ReserveOutcome::InProgress => Some(PutOutcome::InProgress),
            ReserveOutcome::Forgotten => Some(PutOutcome::Forgotten),
            ReserveOutcome::Retired => Some(PutOutcome::Retired),
            ReserveOutcome::Busy => Some(PutOutcome::Busy { retry_after }),
            ReserveOutcome::Malformed => return drain(&mut queue, PutOutcome::Lost).await,
        };
        // The node has refused: there is nothing to cancel.
        open.is_armed = false;
        match refused {
            Some(outcome @ PutOutcome::Busy { .. }) if retries > 0 => {
                let pause = connection.jittered(retry_after);
                if now() + pause >= deadline {
                    return drain(&mut queue, outcome).await;
                }
                retries -= 1;
                tokio::time::sleep(pause).await;
            }
            Some(outcome) => return drain(&mut queue, outcome).await,
            None => return compare_parts(&connection, key, parts, &mut queue, deadline).await,
        }
    }
}

/// Outcomes of a reservation of `count` pages, and the pause before those that are busy can be
/// retried. `None` if the response does not fit the request.
pub(super) fn reserve_outcomes(answer: Response, count: usize) -> Option<(Vec<ReserveOutcome>, Duration)> {
    let all_busy = |retry_after| Some((vec![ReserveOutcome::Busy; count], retry_after));
    match answer {
        Response::Reserved { outcomes, retry_after_ms } if outcomes.len() == count => {
            Some((outcomes, retry_delay(retry_after_ms)))
        }
        Response::Busy { retry_after_ms, .. } => all_busy(retry_delay(retry_after_ms)),
        Response::Error { .. } => all_busy(RETRY_DEFAULT),
        _ => None,
    }
}

/// Discards the remaining parts and answers the commit with `outcome`.
async fn drain(queue: &mut StepQueue, outcome: PutOutcome) -> Ended {
    // Each part is dropped at once, which returns its share of the budget.
    while let Some(step) = queue.recv().await {
        if let PutStep::Commit(reply) = step {
            return Some((reply, (outcome, None)));
        }
    }
    None
}

/// Waits for the caller, who may take as long as the deadline leaves.
async fn next_step(queue: &mut StepQueue) -> Option<PutStep> {
    if fail_point!("client.put-ends-between-parts") {
        return tokio::time::timeout(Duration::from_secs(2), queue.recv()).await.ok().flatten();
    }
    queue.recv().await
}

async fn send_parts(open: &mut CancelOnDrop<'_>, queue: &mut StepQueue, deadline: Instant) -> Ended {
    let connection = open.connection;
    let put = Entry { request: open.request, index: 0 };
    // The node copies these parts from client memory until it answers the commit.
    let mut shared_parts = Vec::new();
    while let Some(step) = next_step(queue).await {
        match step {
            PutStep::Part { part, bytes, crcs } => {
                match send_part(connection, put, part as u32, bytes, crcs, deadline).await {
                    Some(SentPart::Location(bytes)) => shared_parts.push(bytes),
                    Some(SentPart::Payload | SentPart::Written) => {}
                    None => return drain(queue, PutOutcome::Lost).await,
                }
            }
            PutStep::Commit(reply) => {
                let answer = connection.request(&Request::Commit(vec![put]), deadline).await;
                open.is_armed = answer.is_none();
                return Some((reply, put_end(connection, answer)));
            }
        }
    }
    None
}

/// Abandons the puts of a Reserve at the node when dropped, unless it was disarmed.
pub(super) struct CancelOnDrop<'a> {
    pub(super) connection: &'a Arc<Connection>,
    pub(super) request: u64,
    pub(super) is_armed: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if self.is_armed {
            cancel_puts(self.connection, self.request);
        }
    }
}

impl From<CommitOutcome> for PutOutcome {
    fn from(outcome: CommitOutcome) -> PutOutcome {
        match outcome {
            CommitOutcome::Stored => PutOutcome::Stored,
            CommitOutcome::AlreadyThere => PutOutcome::AlreadyThere,
            CommitOutcome::Refused => PutOutcome::Refused,
            CommitOutcome::Incomplete => PutOutcome::Lost,
        }
    }
}

fn put_end(connection: &Connection, answer: Option<Response>) -> PutEnd {
    match answer {
        Some(Response::Committed(ends)) => {
            ends.first().map_or((PutOutcome::Lost, None), |end| (end.outcome.into(), connection.origin(end.generation)))
        }
        Some(Response::Busy { retry_after_ms, .. }) => {
            (PutOutcome::Busy { retry_after: retry_delay(retry_after_ms) }, None)
        }
        _ => (PutOutcome::Lost, None),
    }
}

/// Compares a page that the node already has with chunk checksums of the caller's bytes.
pub(super) async fn compare(connection: &Arc<Connection>, key: PageKey, crcs: Vec<u32>, deadline: Instant) -> PutEnd {
    put_end(connection, connection.request(&Request::Compare { key, crcs }, deadline).await)
}

/// Compares a page that the node already has with the parts that the caller still passes.
async fn compare_parts(
    connection: &Arc<Connection>,
    key: PageKey,
    parts: usize,
    queue: &mut StepQueue,
    deadline: Instant,
) -> Ended {
    let mut page_crcs: Vec<Option<Vec<u32>>> = vec![None; parts];
    while let Some(step) = queue.recv().await {
        match step {
            PutStep::Part { part, bytes, crcs } => {
                if let Some(slot) = page_crcs.get_mut(part) {
                    *slot = Some(crcs.unwrap_or_else(|| chunk_crcs(bytes.as_ref()).collect()));
                }
            }
            PutStep::Commit(reply) => {
                let whole: Option<Vec<Vec<u32>>> = page_crcs.into_iter().collect();
                let end = match whole {
                    Some(whole) => compare(connection, key, whole.concat(), deadline).await,
                    None => (PutOutcome::Lost, None),
                };
                return Some((reply, end));
            }
        }
    }
    None
}
