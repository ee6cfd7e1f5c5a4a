//! Open puts in the order of their last activity, as far as the table knows it: the search for idle
//! ones.
//!
//! Each received piece is activity. Recording it must not take the lock of the table, so the order
//! lags behind: it has for each put a time that is not later than its last activity, or than that
//! of its writer. A search moves a put back that cannot have to end yet. So it meets each put at
//! most once per timeout, except for those that it aborts.

use super::{Put, PutTable, Puts};
use larder_format::PageId;
use larder_runtime::{AgeOrder, fail_point};
use std::ops::Bound;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Puts that a search looks at under one lock of the table. All puts and follows wait meanwhile.
const VISITS_AT_ONCE: usize = 64;

#[derive(Debug, Default)]
pub(super) struct IdleOrder {
    /// Those of one time in the order of their generations.
    puts: AgeOrder<(u64, PageId), Instant>,
    #[cfg(test)]
    visits: usize,
}

impl IdleOrder {
    /// Adds a put, or moves it.
    pub(super) fn set(&mut self, generation: u64, id: PageId, active_at: Instant) {
        self.puts.set((generation, id), active_at);
    }

    pub(super) fn remove(&mut self, generation: u64, id: PageId) {
        self.puts.remove(&(generation, id));
    }

    /// First put, if it may be silent for longer than `timeout`.
    fn first_due(&mut self, now: Instant, timeout: Duration) -> Option<(u64, PageId)> {
        let (time, put) = self.puts.oldest()?;
        if now.saturating_duration_since(time) <= timeout {
            return None;
        }
        #[cfg(test)]
        {
            self.visits += 1;
        }
        Some(put)
    }
}

impl PutTable {
    /// Takes the next idle puts out of the order, after [`VISITS_AT_ONCE`] visits at most. Returns
    /// `true` with them if there may be more.
    fn take_idle(&mut self, now: Instant, timeout: Duration) -> (Vec<Arc<Put>>, bool) {
        let mut idle = Vec::new();
        for _ in 0..VISITS_AT_ONCE {
            let Some((generation, id)) = self.idle.first_due(now, timeout) else { return (idle, false) };
            match self.open.get(&id) {
                Some(put) if put.is_idle(now, timeout) => {
                    idle.push(put.clone());
                    self.idle.remove(generation, id);
                }
                Some(put) => self.idle.set(generation, id, put.last_activity()),
                None => self.idle.remove(generation, id),
            }
        }
        (idle, true)
    }

    /// Puts an idle put back into the order, unless it has ended.
    fn keep_idle(&mut self, put: &Arc<Put>, active_at: Instant) {
        if self.open.get(&put.id).is_some_and(|open| Arc::ptr_eq(open, put)) {
            self.idle.set(put.generation(), put.id, active_at);
        }
    }

    /// Aborted puts of the next connection behind `after` whose client may still write parts.
    /// Removes those that are gone.
    fn next_draining(&mut self, after: Bound<Option<u64>>) -> Option<(Option<u64>, Vec<Arc<Put>>)> {
        let (&writer, puts) = self.draining.range_mut((after, Bound::Unbounded)).next()?;
        puts.retain(|put| put.strong_count() > 0);
        let live: Vec<Arc<Put>> = puts.iter().filter_map(Weak::upgrade).collect();
        if puts.is_empty() {
            self.draining.remove(&writer);
        }
        Some((writer, live))
    }
}

impl Puts {
    /// Aborts puts that received nothing for longer than `timeout`, if `silence_of` says that
    /// their writers sent nothing for as long, and puts without bytes that are older than
    /// `time_max`. Takes the remaining grants from aborted puts on the same conditions.
    /// `silence_of` returns `None` for a connection that has ended. `time_max` is at least
    /// `timeout`.
    ///
    /// A writer reserves a batch, sends its pages one by one, and commits them together. So a put
    /// may receive nothing for long while its writer sends the other pages.
    pub(crate) fn abort_idle(
        &self,
        now: Instant,
        (timeout, time_max): (Duration, Duration),
        silence_of: impl Fn(u64) -> Option<Duration>,
    ) {
        loop {
            // Each hold of the lock is short.
            let (idle, may_have_more) = self.state.lock().take_idle(now, timeout);
            for put in idle {
                // `None` if its writer is silent.
                let silence = put.writer().and_then(&silence_of).filter(|silence| *silence <= timeout);
                let silence = silence.filter(|_| !fail_point!("node.idle-put-judged-alone"));
                match silence.filter(|_| !put.is_older(now, time_max)) {
                    Some(silence) => {
                        // The next search looks at it once its writer may be silent, or it is old.
                        let is_old_from = put.reserved_at() + time_max.saturating_sub(timeout);
                        let writer_active_at = now.checked_sub(silence).unwrap_or(now);
                        self.state.lock().keep_idle(&put, is_old_from.min(writer_active_at));
                    }
                    None => self.abort_silent(&put, timeout),
                }
            }
            if !may_have_more {
                break;
            }
        }
        // A write to a released put breaks its channel, so a writer at work keeps its grants.
        let is_silent = |writer| silence_of(writer).is_none_or(|silence| silence > timeout);
        let is_over = |put: &Put| put.writer().is_none_or(&is_silent) || put.is_older(now, time_max);
        let mut after = Bound::Unbounded;
        loop {
            let next = self.state.lock().next_draining(after);
            let Some((writer, draining)) = next else { break };
            after = Bound::Excluded(writer);
            draining.iter().filter(|put| put.is_idle(now, timeout) && is_over(put)).for_each(|put| put.release());
        }
    }

    fn abort_silent(&self, put: &Arc<Put>, timeout: Duration) {
        if let Some(puts) = self.idle_lines.record() {
            let key = put.id.key;
            tracing::warn!(%key, puts, ?timeout, "puts aborted: their writers sent nothing for too long; check them");
        }
        self.abort(put);
    }
}

#[cfg(test)]
mod tests;
