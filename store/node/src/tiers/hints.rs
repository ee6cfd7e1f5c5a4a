//! Hints of clients and questions for pins, in batches: none keeps the policy's lock for long.

use super::Tiers;
use crate::policy::PageHint;
use larder_format::PageId;
use larder_runtime::now;
use larder_wire::{Hint, PagePin};
use std::time::Instant;

/// Pages of a request that are handled under one lock, at about a microsecond each.
const BATCH_PAGES: usize = 64;

impl Tiers {
    /// Returns the pin of each page, if it has one.
    pub(crate) async fn pins(&self, ids: &[PageId]) -> Vec<Option<PagePin>> {
        let now_ms = self.clock.now_unix_ms();
        let mut pins = Vec::with_capacity(ids.len());
        for batch in ids.chunks(BATCH_PAGES) {
            {
                let state = self.state.lock();
                pins.extend(batch.iter().map(|id| state.policy.pin_of(id, now_ms)));
            }
            tokio::task::yield_now().await;
        }
        pins
    }

    /// Takes a hint for pages of one sequence, a batch at a time, until `deadline`. Returns how
    /// many are in L2.
    pub(crate) async fn hint(
        &self,
        ids: &[PageId],
        generated: Option<u32>,
        advice: Hint,
        retain_ms: u64,
        deadline: Instant,
    ) -> usize {
        if let Some(tokens) = generated {
            self.metrics.generations_ended.inc();
            self.metrics.tokens_generated.inc_by(tokens.into());
        }
        // A session's own pages are behind those that it shares.
        let batches: Vec<&[PageId]> = match advice {
            Hint::SessionEnded => ids.rchunks(BATCH_PAGES).collect(),
            _ => ids.chunks(BATCH_PAGES).collect(),
        };
        let (mut found, mut advice) = (0, advice);
        for batch in batches {
            if now() >= deadline {
                break;
            }
            let (in_l2, goes_on) = self.decide(|policy, now_ms, _| {
                let retain_until_ms = now_ms.saturating_add(retain_ms);
                policy.hint(batch, PageHint { ended: generated.is_some(), advice, retain_until_ms }, now_ms)
            });
            found += in_l2;
            if !goes_on {
                advice = Hint::None;
            }
            // Others may take the lock, and this thread may serve them.
            tokio::task::yield_now().await;
        }
        found
    }
}
