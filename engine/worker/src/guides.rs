//! Compiled constraints of an engine's requests.
//!
//! Invariants:
//! - The event loop and the scheduler never compile. At most [`COMPILATIONS_MAX`] threads do.
//! - Requests with a constraint of the last [`RECENT_MAX`] ones do not compile it again.
//!
//! - Compilations of one peer leave a place to the next one.
//!
//! The router has tried out each constraint in a process of its own, so a compilation for it ends
//! soon. Other clients of the engine's port have tried nothing.

use crate::api::{ApiError, ErrorCode};
use larder_http::{PeerAddress, PeerLane};
use larder_model::{Constraint, Guide, GuideError, GuideFactory, Tokenizer};
use larder_runtime::lock::Mutex;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// Maximum number of compilations at a time.
const COMPILATIONS_MAX: usize = 4;
/// Compilations of one peer that run or wait for a place. Its others wait for these.
const COMPILATIONS_PER_PEER: usize = 3;
/// Number of compiled constraints to keep: the choices and prompts of a request have the same one,
/// and agents send the same tools again. A large one takes some megabytes.
pub(crate) const RECENT_MAX: usize = 16;

type Recent = VecDeque<(Arc<Constraint>, Guide)>;

pub(crate) struct Guides {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    eos_tokens: Arc<[u32]>,
    /// Built for the first constraint.
    factory: OnceLock<Result<GuideFactory, GuideError>>,
    /// Latest use last.
    recent: Mutex<Recent>,
    compilations: PeerLane,
}

impl Guides {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, vocab: usize, eos_tokens: Arc<[u32]>) -> Arc<Self> {
        Arc::new(Self {
            tokenizer,
            vocab,
            eos_tokens,
            factory: OnceLock::new(),
            recent: Mutex::default(),
            compilations: PeerLane::new(COMPILATIONS_MAX, COMPILATIONS_PER_PEER),
        })
    }

    /// Returns a guide at the start of `constraint`.
    pub(crate) async fn get(
        self: &Arc<Self>,
        constraint: &Arc<Constraint>,
        peer: PeerAddress,
    ) -> Result<Guide, ApiError> {
        let stopped = || ApiError::new(ErrorCode::Internal, "the engine could not compile the constraint");
        // Requests that wait share its tables. The first step of each copies them.
        if let Some(guide) = self.known(constraint) {
            return Ok(guide);
        }
        let place = self.compilations.enter(peer, 1).await.ok_or_else(stopped)?;
        let guides = self.clone();
        let constraint = constraint.clone();
        let compiled = tokio::task::spawn_blocking(move || {
            // In here: a client that disconnects must not free the place of a running compilation.
            let _place = place;
            guides.known_or_compiled(&constraint)
        });
        compiled.await.map_err(|_| stopped())?.map_err(|error| match error {
            GuideError::Failed(_) => ApiError::new(ErrorCode::Internal, error.to_string()),
            _ => ApiError::new(ErrorCode::BadRequest, error.to_string()),
        })
    }

    fn known_or_compiled(&self, constraint: &Arc<Constraint>) -> Result<Guide, GuideError> {
        if let Some(guide) = self.known(constraint) {
            return Ok(guide);
        }
        let factory = self.factory.get_or_init(|| {
            let factory = GuideFactory::new(&self.tokenizer, self.vocab, &self.eos_tokens);
            if let Err(error) = &factory {
                tracing::error!(%error, "requests with constraints fail: the vocabulary has no trie; check the model's tokenizer");
            }
            factory
        });
        let guide = factory.as_ref().map_err(GuideError::clone)?.compile(constraint)?;
        let mut recent = self.recent.lock();
        if recent.len() == RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back((constraint.clone(), guide.clone()));
        Ok(guide)
    }

    fn known(&self, constraint: &Constraint) -> Option<Guide> {
        let mut recent = self.recent.lock();
        let at = recent.iter().position(|(known, _)| **known == *constraint)?;
        let entry = recent.remove(at)?;
        let guide = entry.1.clone();
        recent.push_back(entry);
        Some(guide)
    }
}
