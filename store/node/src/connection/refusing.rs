//! Saying "busy": at once, and with a word on when to try again.

use super::conversation::Connection;
use super::sending::send;
use super::socket::FreeSince;
use crate::budget::{Busy, Kind};
use crate::clock::now;
use crate::metrics::Metrics;
use larder_wire::{ErrorCode, ReserveOutcome, Response, VERSION_OF_BUSY};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A refusal that takes longer is late.
const REFUSAL_MAX: Duration = Duration::from_millis(1);

impl Connection {
    /// Says that a request is not taken on now.
    pub(super) async fn refuse(&self, request: u64, busy: Busy) -> io::Result<()> {
        let response = if self.version < VERSION_OF_BUSY {
            Response::Error { code: ErrorCode::Busy, message: format!("try again after {:?}", busy.retry_after) }
        } else {
            Response::Busy { index: None, retry_after_ms: busy.milliseconds() }
        };
        self.send_timed(request, &response).await
    }

    /// Says that the last pages of a Get are not taken on now: misses for who does not know the word.
    pub(super) async fn refuse_pages(&self, request: u64, indices: Range<u32>, busy: Busy) -> io::Result<()> {
        self.shared.metrics.pages_refused.inc_by(indices.len() as u64);
        if self.version >= VERSION_OF_BUSY {
            let response = Response::Busy { index: Some(indices.start), retry_after_ms: busy.milliseconds() };
            return self.send_timed(request, &response).await;
        }
        for index in indices {
            self.answer(request, Response::Miss { index }).await?;
        }
        Ok(())
    }

    /// Answers a reservation.
    pub(super) async fn answer_reserved(&self, request: u64, outcomes: Vec<ReserveOutcome>) -> io::Result<()> {
        let refused = outcomes.iter().filter(|&&outcome| outcome == ReserveOutcome::Busy).count() as u64;
        let hint = (refused > 0).then(|| self.account.retry_after(Kind::Puts, refused * self.page_bytes()));
        let retry_after_ms = hint.filter(|_| self.version >= VERSION_OF_BUSY).map_or(0, Busy::milliseconds);
        let response = Response::Reserved { outcomes, retry_after_ms };
        match hint {
            Some(_) => self.send_timed(request, &response).await,
            None => self.answer(request, response).await,
        }
    }

    /// Measures how long a refusal takes to the socket, from when its request was read, or its way is free.
    async fn send_timed(&self, request: u64, refusal: &Response) -> io::Result<()> {
        self.shared.metrics.refusals.inc();
        let (heard, free_since, metrics) = (self.heard, self.free_since.clone(), self.shared.metrics.clone());
        let mut frame = refusal.frame(self.version, request, None);
        frame.keep(Timed { heard, free_since, metrics });
        send(&self.out, frame).await
    }
}

/// Dropped with its frame, which is when that has left.
struct Timed {
    heard: Instant,
    free_since: FreeSince,
    metrics: Arc<Metrics>,
}

impl Drop for Timed {
    fn drop(&mut self) {
        // What the client asked for before, and has to take first, is not the refusal's time.
        let since = self.heard.max(self.free_since.get());
        if now().saturating_duration_since(since) > REFUSAL_MAX {
            self.metrics.refusals_late.inc();
        }
    }
}
