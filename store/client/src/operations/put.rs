//! Streaming put of one page: reserve, send parts as the caller produces them, commit.
//!
//! Invariants:
//! - The node hears of every put that does not reach its commit, because it may have granted a
//!   reservation whose answer was lost.
//! - Parts that wait in this client count against its put budget.

use super::durations::{RETRY_DEFAULT, milliseconds, retry_delay};
use crate::budget::{PutBudget, ReservedBytes};
use crate::client::Client;
use crate::connection::{Connection, OpenParts, PartSource, SentPart, cancel_puts, open_parts, send_part};
use crate::stats::{Counters, count};
use bytes::Bytes;
use larder_format::{PageKey, chunk_crcs};
use larder_runtime::now;
use larder_wire::{CommitOutcome, Entry, Request, ReserveOutcome, Reserved, Response};
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
    Part { part: usize, bytes: BudgetedPart },
    Commit(oneshot::Sender<PutOutcome>),
}

/// A put in progress, from [`Client::put`]. It takes parts in any order, then the commit. Dropping
/// it without a commit aborts the put at the node.
pub struct PagePut {
    /// `None` once the put is lost.
    steps: Option<mpsc::UnboundedSender<PutStep>>,
    budget: Arc<PutBudget>,
    /// Bytes of each part, 0 for those that were passed. This bounds the channel.
    parts_left: Vec<u32>,
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
        let part_table = self.namespace().geometry.part_table();
        // Unbounded in type only: each part enters once, and the budget bounds their bytes.
        let (steps, queue) = mpsc::unbounded_channel();
        let put = PagePut { steps: Some(steps), budget: self.put_budget().clone(), parts_left: part_table.clone() };
        let work = run(self.owner(&page.key), page, options, part_table, queue, deadline);
        let counters = self.counters().clone();
        tokio::spawn(async move {
            let ended = tokio::time::timeout_at(deadline.into(), work).await.ok().flatten();
            let (reply, outcome) = match ended {
                Some((reply, outcome)) => (Some(reply), outcome),
                None => (None, PutOutcome::Lost),
            };
            count_outcome(&counters, outcome);
            if let Some(reply) = reply {
                // The caller may have stopped waiting for the commit.
                let _ = reply.send(outcome);
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
        let expected = self.parts_left.get_mut(part).filter(|left| **left > 0 && **left as usize == bytes.len());
        let (Some(left), Some(reserved)) = (expected, self.budget.reserve(bytes.len())) else {
            // Closes the channel, which aborts the put at the node.
            self.steps = None;
            return;
        };
        *left = 0;
        if let Some(steps) = &self.steps {
            // A failed send means that the put has ended; the commit reports it.
            let _ = steps.send(PutStep::Part { part, bytes: BudgetedPart { bytes, _reserved: reserved } });
        }
    }

    /// Seals the page, after all parts were passed. Waits until `deadline` for the outcome.
    pub async fn commit(self, deadline: Instant) -> PutOutcome {
        let Some(steps) = &self.steps else { return PutOutcome::Lost };
        let (sender, receiver) = oneshot::channel();
        if steps.send(PutStep::Commit(sender)).is_err() {
            return PutOutcome::Lost;
        }
        match tokio::time::timeout_at(deadline.into(), receiver).await {
            Ok(Ok(outcome)) => outcome,
            _ => PutOutcome::Lost,
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
        PutOutcome::AlreadyThere | PutOutcome::Refused | PutOutcome::InProgress => {}
    }
}

type StepQueue = mpsc::UnboundedReceiver<PutStep>;
/// Channel for the commit's answer, with that answer. `None` if the caller never committed.
type Ended = Option<(oneshot::Sender<PutOutcome>, PutOutcome)>;

async fn run(
    connection: Option<Arc<Connection>>,
    page: NewPage,
    options: PutOptions,
    part_table: Vec<u32>,
    mut queue: StepQueue,
    deadline: Instant,
) -> Ended {
    let Some(connection) = connection else { return drain(&mut queue, PutOutcome::Lost).await };
    let parts = part_table.len();
    let NewPage { key, parent, position } = page;
    let reserve = Reserved { key, parent, position, ttl_ms: options.ttl_ms(), part_bytes: part_table };
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
            None => return compare_parts(&connection, page.key, parts, &mut queue, deadline).await,
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
            return Some((reply, outcome));
        }
    }
    None
}

async fn send_parts(open: &mut CancelOnDrop<'_>, queue: &mut StepQueue, deadline: Instant) -> Ended {
    let connection = open.connection;
    let put = Entry { request: open.request, index: 0 };
    // The node copies these parts from client memory until it answers the commit.
    let mut shared_parts = Vec::new();
    while let Some(step) = queue.recv().await {
        match step {
            PutStep::Part { part, bytes } => match send_part(connection, put, part as u32, bytes, deadline).await {
                Some(SentPart::Location(bytes)) => shared_parts.push(bytes),
                Some(SentPart::Payload | SentPart::Written) => {}
                None => return drain(queue, PutOutcome::Lost).await,
            },
            PutStep::Commit(reply) => {
                let answer = connection.request(&Request::Commit(vec![put]), deadline).await;
                open.is_armed = answer.is_none();
                return Some((reply, commit_outcome(answer)));
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

fn commit_outcome(answer: Option<Response>) -> PutOutcome {
    match answer {
        Some(Response::Committed(outcomes)) => {
            outcomes.first().map_or(PutOutcome::Lost, |&outcome| PutOutcome::from(outcome))
        }
        Some(Response::Busy { retry_after_ms, .. }) => PutOutcome::Busy { retry_after: retry_delay(retry_after_ms) },
        _ => PutOutcome::Lost,
    }
}

/// Compares a page that the node already has with chunk checksums of the caller's bytes.
pub(super) async fn compare(
    connection: &Arc<Connection>,
    key: PageKey,
    crcs: Vec<u32>,
    deadline: Instant,
) -> PutOutcome {
    commit_outcome(connection.request(&Request::Compare { key, crcs }, deadline).await)
}

/// Compares a page that the node already has with the parts that the caller still passes.
async fn compare_parts(
    connection: &Arc<Connection>,
    key: PageKey,
    parts: usize,
    queue: &mut StepQueue,
    deadline: Instant,
) -> Ended {
    let mut crcs: Vec<Option<Vec<u32>>> = vec![None; parts];
    while let Some(step) = queue.recv().await {
        match step {
            PutStep::Part { part, bytes } => {
                if let Some(slot) = crcs.get_mut(part) {
                    *slot = Some(chunk_crcs(bytes.as_ref()).collect());
                }
            }
            PutStep::Commit(reply) => {
                let whole: Option<Vec<Vec<u32>>> = crcs.into_iter().collect();
                let outcome = match whole {
                    Some(whole) => compare(connection, key, whole.concat(), deadline).await,
                    None => PutOutcome::Lost,
                };
                return Some((reply, outcome));
            }
        }
    }
    None
}
