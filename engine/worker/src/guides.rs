//! Compiled constraints of an engine's requests.
//!
//! Invariants:
//! - The event loop and the scheduler never compile. At most [`COMPILATIONS_MAX`] threads do.
//! - Requests with a constraint of the last [`RECENT_MAX`] ones do not compile it again, unless
//!   these take more than [`RECENT_BYTES_MAX`].
//! - A compiled constraint is charged as long as it is kept or a request has it. The guide of each
//!   request has a charge of its own: see `request_memory`.
//! - Compilations of one peer leave a place to the next one.
//! - A constraint is compiled only after it has passed a trial in a process of its own: see
//!   [`trials`](crate::trials). So a compilation ends soon, within [`COMPILE_BYTES_MAX`].
//!
//! A router has tried it out, too. But anyone who can connect could claim to be a router, so the
//! engine relies on its own trial. The parts of one process share their verdicts instead.

use crate::api::{ApiError, ErrorCode};
use crate::request_memory::CHARGE_BYTES;
use crate::scheduler::RETRY_AFTER_MS;
use crate::trials::{ConstraintTrials, TrialError};
use larder_http::{PeerAddress, PeerBudget, PeerCharge, PeerLane};
use larder_model::template_worker::COMPILE_BYTES_MAX;
use larder_model::{Constraint, Guide, GuideError, GuideFactory, Tokenizer};
use larder_runtime::lock::Mutex;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use tokio::time::Instant;

/// Maximum number of compilations at a time.
const COMPILATIONS_MAX: usize = 4;
/// Compilations of one peer that run or wait for a place. Its others wait for these.
const COMPILATIONS_PER_PEER: usize = 3;
/// Number of compiled constraints to keep: the choices and prompts of a request have the same one,
/// and agents send the same tools again. A large one takes some megabytes.
const RECENT_MAX: usize = 16;
/// Maximum memory of the compiled constraints that are kept, in bytes.
const RECENT_BYTES_MAX: usize = 64 << 20;
/// Maximum memory of the compilations that run, in bytes.
pub(crate) const COMPILING_BYTES_MAX: u64 = COMPILATIONS_MAX as u64 * COMPILE_BYTES_MAX;

/// Guide at the start of its constraint.
#[derive(Debug, Clone)]
pub(crate) struct StartedGuide {
    pub(crate) guide: Guide,
    /// Charge of the compiled constraint, which its guides share.
    pub(crate) charge: Arc<PeerCharge>,
}

type Recent = VecDeque<(Arc<Constraint>, StartedGuide)>;

pub(crate) struct Guides {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    eos_tokens: Arc<[u32]>,
    /// Built for the first constraint.
    factory: OnceLock<Result<GuideFactory, GuideError>>,
    /// Latest use last.
    recent: Mutex<Recent>,
    trials: Arc<ConstraintTrials>,
    compilations: PeerLane,
    /// Memory of constraints, in units of [`CHARGE_BYTES`].
    memory: Arc<PeerBudget>,
}

impl Guides {
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        vocab: usize,
        eos_tokens: Arc<[u32]>,
        memory: Arc<PeerBudget>,
        trials: Arc<ConstraintTrials>,
    ) -> Arc<Self> {
        Arc::new(Self {
            tokenizer,
            vocab,
            eos_tokens,
            factory: OnceLock::new(),
            recent: Mutex::default(),
            trials,
            compilations: PeerLane::new(COMPILATIONS_MAX, COMPILATIONS_PER_PEER),
            memory,
        })
    }

    /// Returns a guide at the start of `constraint`. A trial of it ends at `deadline`.
    pub(crate) async fn get(
        self: &Arc<Self>,
        constraint: &Arc<Constraint>,
        peer: PeerAddress,
        deadline: Instant,
    ) -> Result<StartedGuide, ApiError> {
        let stopped = || ApiError::new(ErrorCode::Internal, "the engine could not compile the constraint");
        // Requests that wait share its tables. The first step of each copies them.
        if let Some(guide) = self.known(constraint) {
            return Ok(guide);
        }
        // Before the place: constraints that take long delay no compilation.
        self.trials.try_out(constraint, peer, deadline).await.map_err(refusal_of)?;
        let place = self.compilations.enter(peer, 1).await.ok_or_else(stopped)?;
        let guides = self.clone();
        let constraint = constraint.clone();
        let compiled = tokio::task::spawn_blocking(move || {
            // In here: a client that disconnects must not free the place of a running compilation.
            let _place = place;
            guides.known_or_compiled(&constraint, peer)
        });
        compiled.await.map_err(|_| stopped())?
    }

    fn known_or_compiled(&self, constraint: &Arc<Constraint>, peer: PeerAddress) -> Result<StartedGuide, ApiError> {
        if let Some(guide) = self.known(constraint) {
            return Ok(guide);
        }
        let guide = self.compile(constraint).map_err(|error| match error {
            GuideError::Failed(_) => ApiError::new(ErrorCode::Internal, error.to_string()),
            _ => ApiError::new(ErrorCode::BadRequest, error.to_string()),
        })?;
        let charge = self.memory.of(peer).take(guide.bytes().div_ceil(CHARGE_BYTES)).ok_or_else(|| {
            let message = "the engine has no memory left for constraints; retry later or use another engine";
            ApiError::busy(message, RETRY_AFTER_MS)
        })?;
        let started = StartedGuide { guide, charge: Arc::new(charge) };
        keep(&mut self.recent.lock(), (constraint.clone(), started.clone()), RECENT_BYTES_MAX);
        Ok(started)
    }

    fn compile(&self, constraint: &Constraint) -> Result<Guide, GuideError> {
        let factory = self.factory.get_or_init(|| {
            let factory = GuideFactory::new(&self.tokenizer, self.vocab, &self.eos_tokens);
            if let Err(error) = &factory {
                tracing::error!(%error, "requests with constraints fail: the vocabulary has no trie; check the model's tokenizer");
            }
            factory
        });
        factory.as_ref().map_err(GuideError::clone)?.compile(constraint)
    }

    fn known(&self, constraint: &Constraint) -> Option<StartedGuide> {
        let mut recent = self.recent.lock();
        let at = recent.iter().position(|(known, _)| **known == *constraint)?;
        let entry = recent.remove(at)?;
        let guide = entry.1.clone();
        recent.push_back(entry);
        Some(guide)
    }
}

fn refusal_of(error: TrialError) -> ApiError {
    match error {
        TrialError::Refused(reason) => ApiError::new(ErrorCode::BadRequest, reason),
        TrialError::Exceeded => ApiError::new(ErrorCode::BadRequest, format!("the constraint {error}; simplify it")),
        TrialError::Busy => ApiError::busy(error.to_string(), RETRY_AFTER_MS),
        TrialError::Deadline => ApiError::new(ErrorCode::Deadline, error.to_string()),
        TrialError::Start(_) => ApiError::new(ErrorCode::Internal, format!("cannot check the constraint: {error}")),
    }
}

/// Keeps a compiled constraint for later requests. Drops those whose last use is longest ago, until
/// all of them take at most `bytes_max` bytes.
fn keep(recent: &mut Recent, compiled: (Arc<Constraint>, StartedGuide), bytes_max: usize) {
    recent.push_back(compiled);
    let bytes = |recent: &Recent| recent.iter().map(|(_, kept)| kept.guide.bytes()).sum::<usize>();
    while recent.len() > RECENT_MAX || bytes(recent) > bytes_max {
        recent.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trials::tests::trials;
    use std::path::Path;
    use std::time::Duration;

    #[test]
    fn kept_constraints_are_bounded_in_number_and_bytes() {
        const UNITS: usize = 1 << 20;
        let budget = PeerBudget::new(UNITS);
        let factory = GuideFactory::of_bytes().unwrap();
        let compiled = |number: usize| {
            let constraint = Arc::new(Constraint::Choice(vec![format!("choice {number:03}")]));
            let guide = factory.compile(&constraint).unwrap();
            let charge = budget.of(PeerAddress::default()).take(guide.bytes().div_ceil(CHARGE_BYTES)).unwrap();
            (constraint, StartedGuide { guide, charge: Arc::new(charge) })
        };
        let one = compiled(0);
        let bytes = one.1.guide.bytes();
        let mut recent = Recent::from([one]);
        (1..20).for_each(|number| keep(&mut recent, compiled(number), usize::MAX));
        assert_eq!(recent.len(), RECENT_MAX);
        keep(&mut recent, compiled(20), 3 * bytes + bytes / 2);
        assert_eq!(recent.len(), 3);
        assert!(recent.iter().any(|(constraint, _)| **constraint == Constraint::Choice(vec!["choice 020".into()])));
        let held: usize = recent.iter().map(|(_, kept)| kept.guide.bytes().div_ceil(CHARGE_BYTES)).sum();
        assert_eq!(budget.free(), UNITS - held, "charged while they are kept");
        recent.clear();
        assert_eq!(budget.free(), UNITS);
    }
    #[tokio::test]
    async fn constraint_without_room_is_refused_for_now() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let tokenizer = Arc::new(Tokenizer::load(&folder).unwrap());
        let constraint = Arc::new(Constraint::JsonObject);
        for (units, refusal) in [(0, Some(ErrorCode::Busy)), (1 << 20, None)] {
            let budget = PeerBudget::new(units);
            let guides = Guides::new(tokenizer.clone(), 4096, Vec::new().into(), budget, trials());
            let deadline = Instant::now() + Duration::from_secs(60);
            let got = guides.get(&constraint, PeerAddress::default(), deadline).await;
            assert_eq!(got.err().map(|error| error.code), refusal, "{units} units");
        }
    }
}
