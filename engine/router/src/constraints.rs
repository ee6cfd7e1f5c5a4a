//! Trial of constraints before engines see them.
//!
//! A schema or grammar is untrusted, and compiling it can take any time and memory. So a worker
//! process compiles each new one first, as for chat templates. Engines compile only those that
//! passed (docs/decisions/0040).
//!
//! Invariants:
//! - A trial ends after [`RENDER_TIME_MAX`](crate::templates::RENDER_TIME_MAX) or at the request's
//!   deadline.
//! - A constraint among the last [`KNOWN_MAX`] is not tried again. One that was stopped is.

use crate::templates::{ChatError, ChatRenderer, TemplateWorkers};
use larder_http::PeerAddress;
use larder_model::{Constraint, RenderError};
use larder_runtime::lock::Mutex;
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use thiserror::Error;
use tokio::time::Instant;

/// Number of verdicts to keep. Each takes at most some kilobytes.
const KNOWN_MAX: usize = 512;
/// Number of workers. A constraint that takes all its time holds up those of its worker only.
pub(crate) const WORKERS: usize = 2;

#[derive(Debug, Error)]
pub enum ConstraintError {
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
    Start(std::io::Error),
}

impl From<ChatError> for ConstraintError {
    fn from(error: ChatError) -> Self {
        match error {
            ChatError::Template(RenderError::Failed(reason)) => Self::Refused(reason),
            ChatError::Template(RenderError::TooLong) | ChatError::Exceeded => Self::Exceeded,
            ChatError::Busy | ChatError::SlowBusy => Self::Busy,
            ChatError::Deadline => Self::Deadline,
            ChatError::Start(error) => Self::Start(error),
        }
    }
}

/// Verdict on a constraint: `None` if it compiles, or the reason why not.
type Verdict = Option<String>;

pub struct ConstraintTrials {
    workers: [ChatRenderer; WORKERS],
    /// Verdicts by the hash of the constraint, latest use last.
    known: Mutex<VecDeque<(u64, Verdict)>>,
    /// Its keys are secret, so clients cannot make two constraints with one hash.
    hasher: RandomState,
}

impl ConstraintTrials {
    pub fn new(workers: &Arc<TemplateWorkers>) -> Self {
        let worker = || ChatRenderer::for_constraints(workers.clone());
        Self { workers: [worker(), worker()], known: Mutex::default(), hasher: RandomState::new() }
    }

    /// Fails if the constraint does not compile within the limits.
    pub async fn try_out(
        &self,
        constraint: &Constraint,
        peer: PeerAddress,
        deadline: Instant,
    ) -> Result<(), ConstraintError> {
        let request = serde_json::to_vec(constraint).map_err(|error| ConstraintError::Start(error.into()))?;
        let hash = self.hasher.hash_one(&request);
        if let Some(verdict) = self.known_verdict(hash) {
            return verdict.map_or(Ok(()), |reason| Err(ConstraintError::Refused(reason)));
        }
        let worker = &self.workers[hash as usize % WORKERS];
        let tried = worker.try_constraint(request, peer, deadline).await.map_err(ConstraintError::from);
        let verdict = match &tried {
            Ok(()) => None,
            Err(ConstraintError::Refused(reason)) => Some(reason.clone()),
            // A busy machine may be the cause.
            Err(_) => return tried,
        };
        let mut known = self.known.lock();
        if known.len() == KNOWN_MAX {
            known.pop_front();
        }
        known.push_back((hash, verdict));
        tried
    }

    fn known_verdict(&self, hash: u64) -> Option<Verdict> {
        let mut known = self.known.lock();
        let at = known.iter().position(|(known, _)| *known == hash)?;
        let entry = known.remove(at)?;
        let verdict = entry.1.clone();
        known.push_back(entry);
        Some(verdict)
    }
}
