//! Trial of constraints before a process compiles them.
//!
//! A schema or grammar is untrusted, and compiling it can take any time and memory. So a worker
//! process compiles each new one first, as for chat templates. Routers and engines serve only
//! constraints that passed (docs/decisions/0040).
//!
//! Invariants:
//! - A trial ends after [`TRIAL_TIME_MAX`] or at the request's deadline. The worker is killed then.
//! - A compilation in a trial takes at most [`COMPILE_BYTES_MAX`] of address space, so one that
//!   passed takes no more memory elsewhere.
//! - At most [`WORKERS`] trials run at a time. Those after [`WAITING_MAX`] per worker are refused.
//! - Of each peer, one request waits in the line of a worker. Its others wait behind that one, so a
//!   peer delays the next one by one trial.
//! - A constraint among the last [`KNOWN_MAX`] is not tried again. One that was stopped is.
//! - Requests with one constraint that wait at the same time share its trial.
//!
//! [`COMPILE_BYTES_MAX`]: larder_model::template_worker::COMPILE_BYTES_MAX

use crate::worker_process::{WorkerCommand, WorkerProcess};
use larder_http::{PeerAddress, PeerBudget, PeerLane};
use larder_model::template_worker::{Answer, MEMORY_BYTES_MAX, WorkerTask};
use larder_model::{Constraint, RenderError};
use larder_runtime::LogLimit;
use larder_runtime::lock::Mutex;
use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::Instant;

/// Maximum time of a trial, the start of its worker included. Constraints in use take milliseconds;
/// the rest is for a busy machine.
pub const TRIAL_TIME_MAX: Duration = Duration::from_secs(5);
/// Number of workers. A constraint that takes all its time holds up those of its worker only.
pub const WORKERS: usize = 2;
/// Maximum number of requests that wait for one worker.
pub const WAITING_MAX: usize = 256;
/// Maximum memory of all workers, in bytes.
pub const MEMORY_MAX: u64 = WORKERS as u64 * MEMORY_BYTES_MAX;
/// Number of verdicts to keep. Each takes at most some kilobytes.
const KNOWN_MAX: usize = 512;
/// Maximum length of a verdict, in bytes. The reason in it has at most some kilobytes.
const VERDICT_BYTES_MAX: usize = 64 << 10;

#[derive(Debug, Error)]
pub enum TrialError {
    /// The constraint is wrong. The reason is for its author.
    #[error("{0}")]
    Refused(String),
    #[error("takes too much time or memory")]
    Exceeded,
    #[error("too many requests with new constraints wait; try again later")]
    Busy,
    #[error("the request took longer than its time limit")]
    Deadline,
    #[error("cannot start the worker: {0}")]
    Start(io::Error),
}

/// Verdict on a constraint: `None` if it compiles, or the reason why not.
type Verdict = Option<String>;

/// Tries out constraints. The engines and the router of one process may share one: a constraint
/// that passed for one of them has passed for all.
pub struct ConstraintTrials {
    command: WorkerCommand,
    workers: [TrialWorker; WORKERS],
    /// Verdicts by the hash of the constraint, latest use last.
    known: Mutex<VecDeque<(u64, Verdict)>>,
    /// Its keys are secret, so clients cannot make two constraints with one hash.
    hasher: RandomState,
    failure_lines: LogLimit,
}

struct TrialWorker {
    waiting: Arc<PeerBudget>,
    /// Turns of the peers.
    turns: PeerLane,
    /// `None` before the first trial and after a failure. The lock is held during a trial.
    process: tokio::sync::Mutex<Option<WorkerProcess>>,
}

impl Default for TrialWorker {
    fn default() -> Self {
        let (waiting, turns) = (PeerBudget::new(WAITING_MAX), PeerLane::new(1, 1));
        Self { waiting, turns, process: tokio::sync::Mutex::default() }
    }
}

impl fmt::Debug for ConstraintTrials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConstraintTrials")
    }
}

impl ConstraintTrials {
    /// Starts no process before the first trial.
    pub fn new(command: WorkerCommand) -> Self {
        Self {
            command,
            workers: Default::default(),
            known: Mutex::default(),
            hasher: RandomState::new(),
            failure_lines: LogLimit::default(),
        }
    }

    /// Fails if the constraint does not compile within the limits.
    pub async fn try_out(
        &self,
        constraint: &Constraint,
        peer: PeerAddress,
        deadline: Instant,
    ) -> Result<(), TrialError> {
        let request = serde_json::to_vec(constraint).map_err(|error| TrialError::Start(error.into()))?;
        let hash = self.hasher.hash_one(&request);
        if let Some(known) = self.known_result(hash) {
            return known;
        }
        let tried = self.limited(hash, &request, peer, deadline).await;
        if let Err(error) = &tried {
            self.note(error);
        }
        tried
    }

    /// Remembers the verdict of a trial, if it has one.
    fn remember(&self, hash: u64, tried: &Result<(), TrialError>) {
        let verdict = match tried {
            Ok(()) => None,
            Err(TrialError::Refused(reason)) => Some(reason.clone()),
            // A busy machine may be the cause.
            Err(_) => return,
        };
        let mut known = self.known.lock();
        if known.len() == KNOWN_MAX {
            known.pop_front();
        }
        known.push_back((hash, verdict));
    }

    /// Result of an earlier trial.
    fn known_result(&self, hash: u64) -> Option<Result<(), TrialError>> {
        let mut known = self.known.lock();
        let at = known.iter().position(|(known, _)| *known == hash)?;
        let entry = known.remove(at)?;
        let verdict = entry.1.clone();
        known.push_back(entry);
        Some(verdict.map_or(Ok(()), |reason| Err(TrialError::Refused(reason))))
    }

    /// Waits for a worker, starts its process if there is none, and has it run a trial.
    async fn limited(&self, hash: u64, request: &[u8], peer: PeerAddress, deadline: Instant) -> Result<(), TrialError> {
        let worker = &self.workers[hash as usize % WORKERS];
        let _waiting = worker.waiting.of(peer).take(1).ok_or(TrialError::Busy)?;
        let turn = async { (worker.turns.enter(peer, 1).await, worker.process.lock().await) };
        let turn = tokio::time::timeout_at(deadline, turn).await;
        let (_turn, mut place) = turn.map_err(|_| TrialError::Deadline)?;
        // A request that waited before this one may have had the same constraint.
        if let Some(known) = self.known_result(hash) {
            return known;
        }
        // Taken out: if the client disconnects, the worker is dropped with this future. Its socket
        // may hold half a frame.
        let idle = place.take();
        let longest = Instant::now() + TRIAL_TIME_MAX;
        let tried = tokio::time::timeout_at(deadline.min(longest), self.run(idle, request)).await;
        // Only the limit of a trial is the constraint's fault.
        let late = |_| if deadline < longest { TrialError::Deadline } else { TrialError::Exceeded };
        let (process, answer) = tried.map_err(late)??;
        if !answer.is_worn && !process.gives_way() {
            *place = Some(process);
        }
        let tried = answer.result.map(drop).map_err(|error| match error {
            RenderError::Failed(reason) => TrialError::Refused(reason),
            RenderError::TooLong => TrialError::Exceeded,
        });
        // Before the turn ends: the next request looks for it.
        self.remember(hash, &tried);
        tried
    }

    async fn run(&self, idle: Option<WorkerProcess>, request: &[u8]) -> Result<(WorkerProcess, Answer), TrialError> {
        if let Some(mut process) = idle {
            // If it does not begin, something else killed it since its last trial. A fresh one
            // takes its place.
            if process.begin(request).await.is_ok() {
                let answer = verdict_of(&mut process).await.ok_or(TrialError::Exceeded)?;
                return Ok((process, answer));
            }
        }
        let mut process = WorkerProcess::spawn(&self.command).map_err(TrialError::Start)?;
        let task = serde_json::to_vec(&WorkerTask::Constraints).map_err(|error| TrialError::Start(error.into()))?;
        process.begin(&task).await.map_err(TrialError::Start)?;
        let ended = || TrialError::Start(io::Error::other("it ended before its first trial"));
        verdict_of(&mut process).await.ok_or_else(ended)?;
        process.begin(request).await.map_err(TrialError::Start)?;
        let answer = verdict_of(&mut process).await.ok_or(TrialError::Exceeded)?;
        Ok((process, answer))
    }

    fn note(&self, error: &TrialError) {
        // The client learns of its own constraint. It is no matter for the operator.
        if !matches!(error, TrialError::Start(_)) {
            return;
        }
        // A client can repeat the request, and must not fill the log.
        if let Some(failures) = self.failure_lines.record() {
            tracing::warn!(
                %error, failures,
                "requests with new constraints fail; check that this program may start processes"
            );
        }
    }
}

/// Answer of a worker that has begun. `None` if the worker ends.
async fn verdict_of(process: &mut WorkerProcess) -> Option<Answer> {
    let bytes = process.answer_len(VERDICT_BYTES_MAX, || true).await.ok()?;
    process.answer(bytes).await.ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use futures::future::join_all;

    /// Worker of the other tests: they start this program again, with this test as its only one.
    #[test]
    #[ignore = "it is a part of the other tests"]
    fn template_worker() {
        // Not with `--include-ignored`: the worker limits the memory of its process.
        if std::env::args().any(|argument| argument == "--exact") {
            larder_model::template_worker::run().unwrap();
        }
    }

    pub(crate) fn trials() -> Arc<ConstraintTrials> {
        let arguments = ["trials::tests::template_worker", "--exact", "--ignored", "--nocapture"].map(String::from);
        let command = WorkerCommand { program: "/proc/self/exe".into(), arguments: arguments.into() };
        Arc::new(ConstraintTrials::new(command))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn verdicts_are_remembered_and_a_killed_worker_is_replaced() {
        let trials = trials();
        let good = Constraint::Regex("a+".into());
        let wrong = Constraint::JsonSchema(r#"{"type": "colour"}"#.into());
        let peer = PeerAddress::default();
        for _ in 0..2 {
            trials.try_out(&good, peer, soon()).await.unwrap();
            let refused = trials.try_out(&wrong, peer, soon()).await;
            assert!(matches!(&refused, Err(TrialError::Refused(reason)) if reason.contains("colour")), "{refused:?}");
        }
        assert_eq!(trials.known.lock().len(), 2);
        for worker in &trials.workers {
            *worker.process.lock().await = None;
        }
        // A known verdict needs no worker.
        trials.try_out(&good, peer, soon()).await.unwrap();
        assert!(trials.workers.iter().all(|worker| worker.process.try_lock().is_ok_and(|process| process.is_none())));
        for at in 0..8 {
            trials.try_out(&Constraint::Choice(vec![format!("{at}")]), peer, soon()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn requests_that_wait_with_one_constraint_share_its_trial() {
        let trials = trials();
        let busy: Vec<_> = join_all(trials.workers.iter().map(|worker| worker.process.lock())).await;
        let constraint = Constraint::Choice(vec!["same".into()]);
        let peer = |last| PeerAddress::of([10, 0, 0, last].into());
        let mut requests = join_all((0..8).map(|at| trials.try_out(&constraint, peer(at % 2), soon())));
        assert!(futures::poll!(&mut requests).is_pending());
        drop(busy);
        assert!(requests.await.iter().all(Result::is_ok));
        assert_eq!(trials.known.lock().len(), 1, "one trial, and one verdict");
    }

    #[tokio::test]
    async fn crowd_of_a_peer_delays_the_next_one_by_one_trial() {
        let trials = trials();
        let busy: Vec<_> = join_all(trials.workers.iter().map(|worker| worker.process.lock())).await;
        let of_first_worker = |constraint: &Constraint| {
            let request = serde_json::to_vec(constraint).unwrap();
            (trials.hasher.hash_one(&request) as usize).is_multiple_of(WORKERS)
        };
        let choices = (0..).map(|at| Constraint::Choice(vec![format!("{at}")]));
        let constraints: Vec<Constraint> = choices.filter(of_first_worker).take(5).collect();
        let ended = Mutex::new(Vec::new());
        let (all, order) = (&trials, &ended);
        // The last one is of another peer.
        let mut requests = join_all(constraints.iter().enumerate().map(|(at, constraint)| async move {
            let peer = PeerAddress::of([10, 0, 0, u8::from(at == 4)].into());
            all.try_out(constraint, peer, soon()).await.unwrap();
            order.lock().push(at);
        }));
        assert!(futures::poll!(&mut requests).is_pending());
        drop(busy);
        requests.await;
        assert_eq!(*ended.lock(), [0, 4, 1, 2, 3]);
    }

    #[tokio::test]
    async fn deadline_of_a_request_ends_its_wait() {
        let trials = trials();
        let busy: Vec<_> = join_all(trials.workers.iter().map(|worker| worker.process.lock())).await;
        let soon = Instant::now() + Duration::from_millis(50);
        let tried = trials.try_out(&Constraint::JsonObject, PeerAddress::default(), soon).await;
        assert!(matches!(tried, Err(TrialError::Deadline)), "{tried:?}");
        drop(busy);
    }

    #[tokio::test]
    async fn program_that_is_no_worker_is_an_error_of_the_operator() {
        for program in ["/bin/false", "/nonexistent"] {
            let command = WorkerCommand { program: program.into(), arguments: Vec::new() };
            let tried =
                ConstraintTrials::new(command).try_out(&Constraint::JsonObject, PeerAddress::default(), soon()).await;
            assert!(matches!(tried, Err(TrialError::Start(_))), "{program}: {tried:?}");
        }
    }

    /// Thirty patterns that must all hold: their automaton takes gigabytes.
    #[tokio::test]
    async fn constraint_that_takes_too_much_memory_ends_its_worker_only() {
        let trials = trials();
        let pattern = |at: usize| serde_json::json!({"type": "string", "pattern": format!("^(.*[a-z]{{{at}}}.*)$")});
        let schema = serde_json::json!({"allOf": (50..80).map(pattern).collect::<Vec<_>>()});
        let hostile = Constraint::JsonSchema(schema.to_string());
        let tried = trials.try_out(&hostile, PeerAddress::default(), soon()).await;
        assert!(matches!(tried, Err(TrialError::Exceeded)), "{tried:?}");
        assert!(trials.known.lock().is_empty(), "a busy machine may be the cause");
        for at in 0..8 {
            let honest = Constraint::Choice(vec![format!("{at}")]);
            trials.try_out(&honest, PeerAddress::default(), soon()).await.unwrap();
        }
    }
}
