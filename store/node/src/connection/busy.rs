//! Busy answers: immediate, with a delay before the retry, and measured.

use super::Connection;
use super::socket::UncongestedSince;
use crate::budget::{Busy, BusyBound};
use crate::metrics::Metrics;
use crate::tiers::SLOT_UNIT;
use larder_runtime::now;
use larder_wire::{ErrorCode, ReserveOutcome, Response, VERSION_RETRY_AFTER};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A busy answer that takes longer counts as late. A client that is told late has lost the time in
/// which it could have asked another node.
const LATE_AFTER: Duration = Duration::from_millis(1);

impl Connection {
    /// Answers a whole request with "busy". If the node or the tenant has no memory for it, bodies
    /// there that stall lose theirs. A client at a limit of its own costs no other client anything.
    pub(super) async fn refuse(&self, request: u64, busy: Busy) -> io::Result<()> {
        match busy.bound {
            BusyBound::Connection => {}
            BusyBound::Tenant(tenant) => self.node.end_stalled_bodies(Some(tenant)),
            BusyBound::Node => self.node.end_stalled_bodies(None),
        }
        let response = if self.outbox.version() < VERSION_RETRY_AFTER {
            Response::Error { code: ErrorCode::Busy, message: format!("try again after {:?}", busy.retry_after) }
        } else {
            Response::Busy { index: None, retry_after_ms: busy.milliseconds() }
        };
        self.send_refusal(request, &response).await
    }

    /// Answers the last pages of a Get with "busy", or as misses to a client whose version lacks
    /// that answer.
    pub(super) async fn refuse_pages(&self, request: u64, indices: Range<u32>, busy: Busy) -> io::Result<()> {
        self.node.metrics.pages_refused.inc_by(indices.len() as u64);
        if self.outbox.version() >= VERSION_RETRY_AFTER {
            let response = Response::Busy { index: Some(indices.start), retry_after_ms: busy.milliseconds() };
            return self.send_refusal(request, &response).await;
        }
        for index in indices {
            self.outbox.respond(request, Response::Miss { index }).await?;
        }
        Ok(())
    }

    /// Answers a reservation. If pages were refused, the answer carries a retry delay for all of
    /// them together.
    pub(super) async fn answer_reserved(&self, request: u64, outcomes: Vec<ReserveOutcome>) -> io::Result<()> {
        let refused = outcomes.iter().filter(|&&outcome| outcome == ReserveOutcome::Busy).count() as u64;
        // As the budget charges them: those that the page takes in the arena.
        let page_bytes = self.page_bytes().next_multiple_of(SLOT_UNIT as u64);
        let busy = (refused > 0).then(|| self.account.wait_in_line(refused * page_bytes, page_bytes));
        let retry_after_ms =
            busy.filter(|_| self.outbox.version() >= VERSION_RETRY_AFTER).map_or(0, Busy::milliseconds);
        let response = Response::Reserved { outcomes, retry_after_ms };
        match busy {
            Some(_) => self.send_refusal(request, &response).await,
            None => self.outbox.respond(request, response).await,
        }
    }

    /// Sends a refusal, and measures the time until it has left.
    async fn send_refusal(&self, request: u64, refusal: &Response) -> io::Result<()> {
        self.node.metrics.refusals.inc();
        let mut frame = refusal.frame(self.outbox.version(), request, None);
        frame.attach(RefusalTimer {
            received_at: self.received_at,
            uncongested_since: self.outbox.uncongested_since(),
            metrics: self.node.metrics.clone(),
        });
        self.outbox.send(frame).await
    }
}

/// Measures a refusal. Dropped with its frame, when the frame has left.
struct RefusalTimer {
    received_at: Instant,
    uncongested_since: UncongestedSince,
    metrics: Arc<Metrics>,
}

impl Drop for RefusalTimer {
    fn drop(&mut self) {
        // Time for pages that the client requested before does not count: it must receive them
        // first.
        let start = self.received_at.max(self.uncongested_since.get());
        if now().saturating_duration_since(start) > LATE_AFTER {
            self.metrics.refusals_late.inc();
        }
    }
}
