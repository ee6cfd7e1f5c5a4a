//! Putting a page: reserve, hand over parts as they come into being, commit.

use crate::clock::now;
use crate::link::Live;
use crate::parts::Sent;
use crate::pin::milliseconds;
use crate::rdma::{OpenParts, PartSource};
use crate::stats::{Counters, count};
use bytes::Bytes;
use larder_format::planted::{Bug, has};
use larder_format::{PageGeometry, PageKey, chunk_crcs};
use larder_wire::{CommitOutcome, Entry, Request, ReserveOutcome, Reserved, Response};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// A page about to be put.
#[derive(Debug, Clone)]
pub struct NewPage {
    /// Its key.
    pub key: PageKey,
    /// The page before it, [`PageKey::NONE`] at the start.
    pub parent: PageKey,
    /// Place in its sequence, in pages from 0.
    pub position: u32,
}

/// What a put may ask for beside being stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// The page is a miss so long after it was sealed; `None`: never. Rounded up to milliseconds.
    pub ttl: Option<Duration>,
    /// How often it is tried again, before the deadline, when the node is too busy: each time after as long as the node says,
    /// give or take half of it. Default 0.
    pub busy_retries: u32,
}

impl PutOptions {
    pub(crate) fn ttl_ms(&self) -> u64 {
        self.ttl.map_or(0, milliseconds)
    }
}

/// How a put ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PutOutcome {
    /// The node holds it.
    Stored,
    /// The node had the same bytes already.
    AlreadyThere,
    /// The node has other bytes under this key; the first stay.
    Refused,
    /// Another writer is writing this key now.
    InProgress,
    /// The node has no room now.
    Busy {
        /// When it is worth trying again, as the node says.
        retry_after: Duration,
    },
    /// No node could be reached, or the put was given up.
    Lost,
}

/// When to try again at a node that does not say.
const RETRY_DEFAULT: Duration = Duration::from_millis(100);

/// When to try again at a node that is too busy, by what it says, in milliseconds: 0 is nothing.
pub(crate) fn hint(retry_after_ms: u32) -> Duration {
    if retry_after_ms == 0 { RETRY_DEFAULT } else { Duration::from_millis(retry_after_ms.into()) }
}

impl PutOutcome {
    pub(crate) fn busy(retry_after_ms: u32) -> PutOutcome {
        PutOutcome::Busy { retry_after: hint(retry_after_ms) }
    }

    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, PutOutcome::Busy { .. })
    }
}

/// Payload bytes that wait in this client.
pub(crate) struct Budget {
    used: AtomicUsize,
    max: usize,
}

impl Budget {
    pub(crate) fn new(max: usize) -> Self {
        Self { used: AtomicUsize::new(0), max }
    }

    /// Bytes that wait.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(self: &Arc<Self>, bytes: usize) -> Option<Taken> {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let taken = Taken { budget: self.clone(), bytes };
        (before + bytes <= self.max).then_some(taken)
    }
}

struct Taken {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !has(Bug::BudgetLeaks) {
            self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// Bytes that count until they have been sent, or their put has ended.
struct Counted {
    bytes: Bytes,
    _taken: Taken,
}

impl PartSource for Counted {
    fn shared(&self) -> Bytes {
        self.bytes.clone()
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

enum Step {
    Part { part: usize, bytes: Counted },
    Commit(oneshot::Sender<PutOutcome>),
}

/// An open put: parts in any order, then commit. Dropping it aborts it.
pub struct PagePut {
    steps: Option<mpsc::UnboundedSender<Step>>,
    budget: Arc<Budget>,
    /// Bytes of each part; 0 for those handed over. This bounds the queue.
    parts_left: Vec<u32>,
}

impl PagePut {
    /// Hands over the bytes of part `part`. Does not wait for the network. If more waits in this client than its budget
    /// allows, or there is no such part of that length left, the put is given up, and [`PagePut::commit`] says so.
    pub fn part(&mut self, part: usize, bytes: Bytes) {
        let wanted = self.parts_left.get_mut(part).filter(|left| **left > 0 && **left as usize == bytes.len());
        let (Some(left), Some(taken)) = (wanted, self.budget.take(bytes.len())) else {
            self.steps = None;
            return;
        };
        *left = 0;
        if let Some(steps) = &self.steps {
            let _ = steps.send(Step::Part { part, bytes: Counted { bytes, _taken: taken } });
        }
    }

    /// Seals the page once all parts are over.
    pub async fn commit(self, deadline: Instant) -> PutOutcome {
        let Some(steps) = &self.steps else { return PutOutcome::Lost };
        let (sender, receiver) = oneshot::channel();
        if steps.send(Step::Commit(sender)).is_err() {
            return PutOutcome::Lost;
        }
        match tokio::time::timeout_at(deadline.into(), receiver).await {
            Ok(Ok(outcome)) => outcome,
            _ => PutOutcome::Lost,
        }
    }
}

/// Begins a put at `node`.
pub(crate) fn begin(
    node: Option<Arc<Live>>,
    page: NewPage,
    options: PutOptions,
    geometry: PageGeometry,
    budget: Arc<Budget>,
    counters: Arc<Counters>,
    deadline: Instant,
) -> PagePut {
    let (steps, queue) = mpsc::unbounded_channel();
    let part_table = geometry.part_table();
    let put = PagePut { steps: Some(steps), budget, parts_left: part_table.clone() };
    tokio::spawn(async move {
        let work = run(node, page, options, part_table, queue, deadline);
        let ended = tokio::time::timeout_at(deadline.into(), work).await.ok().flatten();
        let (reply, outcome) = match ended {
            Some((reply, outcome)) => (Some(reply), outcome),
            None => (None, PutOutcome::Lost),
        };
        match outcome {
            PutOutcome::Stored => count(&counters.puts, 1),
            PutOutcome::Lost => count(&counters.puts_lost, 1),
            PutOutcome::Busy { .. } => {
                count(&counters.puts_lost, 1);
                count(&counters.puts_busy, 1);
            }
            PutOutcome::AlreadyThere | PutOutcome::Refused | PutOutcome::InProgress => {}
        }
        if let Some(reply) = reply {
            let _ = reply.send(outcome);
        }
    });
    put
}

type Queue = mpsc::UnboundedReceiver<Step>;
type Ended = Option<(oneshot::Sender<PutOutcome>, PutOutcome)>;

/// Most time to wait for one answer of the node; the put's own deadline is over it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

async fn run(
    node: Option<Arc<Live>>,
    page: NewPage,
    options: PutOptions,
    part_table: Vec<u32>,
    mut queue: Queue,
    put_by: Instant,
) -> Ended {
    let Some(node) = node else { return drain(&mut queue, PutOutcome::Lost).await };
    let parts = part_table.len();
    let NewPage { key, parent, position } = page;
    let reserve = Reserved { key, parent, position, ttl_ms: options.ttl_ms(), part_bytes: part_table };
    let request = Request::Reserve(vec![reserve]);
    let mut retries = options.busy_retries;
    loop {
        let put = node.number();
        // Whatever ends this before the commit, the node hears of it: it may have granted what we were not told.
        let mut open = CancelOnDrop { node: &node, request: put, armed: true };
        let deadline = now() + ANSWER_TIMEOUT;
        // The node opens the parts, if they can be written by RDMA, when it has granted them.
        let (answer, open_parts) = futures::join!(node.ask_as(put, &request, deadline), node.open_parts(put, deadline));
        let Some((outcomes, retry_after)) = answer.and_then(|answer| grants(answer, 1)) else {
            return drain(&mut queue, PutOutcome::Lost).await;
        };
        let refused = match outcomes[0] {
            ReserveOutcome::Granted => {
                open_parts.iter().for_each(OpenParts::granted);
                return send_parts(&mut open, &mut queue).await;
            }
            ReserveOutcome::Exists => None,
            ReserveOutcome::InProgress => Some(PutOutcome::InProgress),
            ReserveOutcome::Busy => Some(PutOutcome::Busy { retry_after }),
            ReserveOutcome::Malformed => return drain(&mut queue, PutOutcome::Lost).await,
        };
        open.armed = false;
        match refused {
            Some(outcome @ PutOutcome::Busy { .. }) if retries > 0 => {
                let pause = node.jittered(retry_after);
                if now() + pause >= put_by {
                    return drain(&mut queue, outcome).await;
                }
                retries -= 1;
                tokio::time::sleep(pause).await;
            }
            Some(outcome) => return drain(&mut queue, outcome).await,
            None => return compare_parts(&node, page.key, parts, &mut queue).await,
        }
    }
}

/// What a node says to a reservation of `count` pages, and after which time to try again those that are busy.
pub(crate) fn grants(answer: Response, count: usize) -> Option<(Vec<ReserveOutcome>, Duration)> {
    let all_busy = |retry_after| Some((vec![ReserveOutcome::Busy; count], retry_after));
    match answer {
        Response::Reserved { outcomes, retry_after_ms } if outcomes.len() == count => {
            Some((outcomes, hint(retry_after_ms)))
        }
        Response::Busy { retry_after_ms, .. } => all_busy(hint(retry_after_ms)),
        Response::Error { .. } => all_busy(RETRY_DEFAULT),
        _ => None,
    }
}

/// Takes what still comes and answers the commit with `outcome`.
async fn drain(queue: &mut Queue, outcome: PutOutcome) -> Ended {
    while let Some(step) = queue.recv().await {
        if let Step::Commit(reply) = step {
            return Some((reply, outcome));
        }
    }
    None
}

async fn send_parts(open: &mut CancelOnDrop<'_>, queue: &mut Queue) -> Ended {
    let (node, put) = (open.node, Entry { request: open.request, index: 0 });
    let mut lent = Vec::new();
    while let Some(step) = queue.recv().await {
        let deadline = now() + ANSWER_TIMEOUT;
        match step {
            Step::Part { part, bytes } => match node.send_part(put, part as u32, bytes, deadline).await {
                Some(Sent::Place(bytes)) => lent.push(bytes),
                Some(Sent::Payload | Sent::Written) => {}
                None => return drain(queue, PutOutcome::Lost).await,
            },
            Step::Commit(reply) => {
                let answer = node.ask(&Request::Commit(vec![put]), deadline).await;
                open.armed = answer.is_none();
                return Some((reply, committed(answer)));
            }
        }
    }
    None
}

/// Gives up the puts of a request unless all is over.
pub(crate) struct CancelOnDrop<'a> {
    pub(crate) node: &'a Arc<Live>,
    pub(crate) request: u64,
    pub(crate) armed: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.node.cancel_puts(self.request);
        }
    }
}

pub(crate) fn outcome_of(outcome: CommitOutcome) -> PutOutcome {
    match outcome {
        CommitOutcome::Stored => PutOutcome::Stored,
        CommitOutcome::AlreadyThere => PutOutcome::AlreadyThere,
        CommitOutcome::Refused => PutOutcome::Refused,
        CommitOutcome::Incomplete => PutOutcome::Lost,
    }
}

/// The answer to a commit of one put, or to a comparison.
fn committed(answer: Option<Response>) -> PutOutcome {
    match answer {
        Some(Response::Committed(outcomes)) => {
            outcomes.first().map_or(PutOutcome::Lost, |&outcome| outcome_of(outcome))
        }
        Some(Response::Busy { retry_after_ms, .. }) => PutOutcome::busy(retry_after_ms),
        _ => PutOutcome::Lost,
    }
}

/// The node has the page: are bytes with these chunk CRCs the same?
pub(crate) async fn compare(node: &Arc<Live>, key: PageKey, crcs: Vec<u32>, deadline: Instant) -> PutOutcome {
    committed(node.ask(&Request::Compare { key, crcs }, deadline).await)
}

/// The node has the page: are the parts that still come the same bytes?
async fn compare_parts(node: &Arc<Live>, key: PageKey, parts: usize, queue: &mut Queue) -> Ended {
    let mut crcs: Vec<Option<Vec<u32>>> = vec![None; parts];
    while let Some(step) = queue.recv().await {
        match step {
            Step::Part { part, bytes } => {
                if let Some(slot) = crcs.get_mut(part) {
                    *slot = Some(chunk_crcs(bytes.as_ref()).collect());
                }
            }
            Step::Commit(reply) => {
                let whole: Option<Vec<Vec<u32>>> = crcs.into_iter().collect();
                let outcome = match whole {
                    Some(whole) => compare(node, key, whole.concat(), now() + ANSWER_TIMEOUT).await,
                    None => PutOutcome::Lost,
                };
                return Some((reply, outcome));
            }
        }
    }
    None
}
