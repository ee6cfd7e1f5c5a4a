//! Hints of gateways: actions on the pages of a prefix, each with its own answer.
//!
//! The answer tells what the nodes have done, not what they were asked for. So after a retain the
//! router reads the pins that the pages have.

use super::Prefix;
use crate::admin::api::{HintAction, HintKind, HintResult, HintStatus, HintsResponse};
use larder_client::{Hint, PinKind, Pinned, Tier};
use std::time::Duration;
use tokio::time::Instant;

/// Longest duration of a hint in seconds: 30 days, the limit of the store's protocol. Longer ones
/// are clipped.
const SECONDS_MAX: u64 = 30 * 24 * 3600;
/// A pin counts as clipped if it ends earlier than asked for by more than this.
const CLIPPED_BY: Duration = Duration::from_secs(5);

impl Prefix {
    /// Carries out actions one after the other.
    pub(crate) async fn carry_out(&self, actions: &[HintAction], deadline: Instant) -> HintsResponse {
        let mut results = Vec::with_capacity(actions.len());
        for action in actions {
            results.push(self.carry_out_one(action, deadline).await);
        }
        HintsResponse { pages: self.keys.len() as u32, results }
    }

    async fn carry_out_one(&self, action: &HintAction, deadline: Instant) -> HintResult {
        let kind = action.action;
        let answer = |status, pages: usize, reason| HintResult { action: kind, status, pages: pages as u32, reason };
        let tiers = self.locate(deadline).await;
        let there = tiers.iter().flatten().count();
        // A forget goes on: engines may have pages that the store lacks.
        if there == 0 && kind != HintKind::Forget {
            // After the deadline no node has answered, so the pages may be there.
            let is_known = self.keys.is_empty() || self.model.pages.up() && Instant::now() < deadline;
            return answer(if is_known { HintStatus::Missing } else { HintStatus::Deferred }, 0, None);
        }
        let seconds = action.seconds.unwrap_or_default();
        let time = Duration::from_secs(seconds.min(SECONDS_MAX));
        let is_clipped = seconds > SECONDS_MAX;
        match kind {
            HintKind::Retain => {
                self.hint(Hint::Retain(time), deadline).await;
                let pins = self.pins(deadline).await;
                let left = |ms| Duration::from_millis(ms) + CLIPPED_BY;
                let retained = pins.iter().flatten().count();
                let is_clipped = is_clipped || pins.iter().flatten().any(|pin| left(pin.remaining_ms) < time);
                answer(outcome(retained, there, is_clipped), retained, None)
            }
            HintKind::Pin => {
                let pinned = self.model.pages.pin(self.keys.clone(), PinKind::Hard, time, deadline.into_std()).await;
                match pinned {
                    Pinned { refused: Some(reason), pages, .. } => answer(HintStatus::Clipped, pages, Some(reason)),
                    Pinned { complete: false, pages, .. } => answer(HintStatus::Deferred, pages, None),
                    Pinned { pages, .. } => answer(outcome(pages, there, is_clipped), pages, None),
                }
            }
            HintKind::Prefetch => {
                let loaded = self.model.pages.warm(self.keys.clone(), deadline.into_std()).await;
                let is_complete = loaded >= there;
                answer(if is_complete { HintStatus::Accepted } else { HintStatus::Deferred }, loaded, None)
            }
            // Pages on L3 alone have no rank in L2.
            HintKind::Demote => {
                let in_l2 = tiers.iter().filter(|tier| **tier == Some(Tier::L2)).count();
                let demoted = self.hint(Hint::Demote, deadline).await;
                answer(if demoted >= in_l2 { HintStatus::Accepted } else { HintStatus::Deferred }, demoted, None)
            }
            HintKind::Forget => {
                let forgotten = self.forget(deadline).await;
                let status = match (forgotten.complete, forgotten.forgotten) {
                    (false, _) => HintStatus::Deferred,
                    (true, 0) => HintStatus::Missing,
                    (true, _) => HintStatus::Accepted,
                };
                answer(status, forgotten.forgotten as usize, None)
            }
        }
    }

    async fn hint(&self, hint: Hint, deadline: Instant) -> usize {
        self.model.pages.hint(self.keys.clone(), hint, deadline.into_std()).await
    }
}

/// Status of an action that reached `done` of the pages that are there.
fn outcome(done: usize, there: usize, is_clipped: bool) -> HintStatus {
    match done {
        0 => HintStatus::Deferred,
        _ if done < there || is_clipped => HintStatus::Clipped,
        _ => HintStatus::Accepted,
    }
}
