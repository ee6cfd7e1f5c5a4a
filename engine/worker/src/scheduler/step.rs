//! One step: plan, compute, seal, publish, sample.

use super::admit::{allocate, parent};
use super::{SMOOTHING, Scheduler};
use crate::api::{ApiError, ErrorCode};
use crate::batch::{self, Candidate, Planned};
use crate::metrics::Ending;
use crate::publish::{CompletingPage, PublishHooks};
use crate::sequence::{Sequence, Work};
use larder_client::PutOutcome;
use larder_model::{Chunk, LogitRows};
use std::time::Instant;

impl Scheduler {
    /// Computes one step; `false` if there was nothing to compute.
    pub(super) fn step(&mut self) -> bool {
        for sequence in self.active.iter_mut().filter(|s| s.is_ready()) {
            Self::fill_from_cache(&mut self.radix, sequence);
        }
        self.finish_prefills();
        let planned = self.plan();
        let granted = self.grant(planned);
        if granted.is_empty() {
            return false;
        }
        self.compute(&granted);
        self.finish_prefills();
        true
    }

    /// Which requests compute how much; `candidate` is the place in `active`.
    fn plan(&self) -> Vec<Planned> {
        let mut ready: Vec<(usize, &Sequence)> = self.active.iter().enumerate().filter(|(_, s)| s.is_ready()).collect();
        // One that was put back is behind younger ones in `active`.
        ready.sort_by_key(|(_, s)| s.id);
        let candidates: Vec<Candidate<'_>> = ready
            .iter()
            .map(|(_, s)| Candidate {
                position: s.pages.computed(),
                span: s.pages.span(s.target()),
                generating: s.is_generating(),
                shared: if s.cache.uses_l1() { &s.keys[..s.cacheable_pages()] } else { &[] },
            })
            .collect();
        let planned = batch::plan(&candidates, self.parts.limits.step);
        planned.into_iter().map(|p| Planned { candidate: ready[p.candidate].0, ..p }).collect()
    }

    /// Makes room in the pages of those planned, oldest first. Who finds none has the youngest of the ready requests that
    /// came after it give way, and tries again at once, before the pages go to anybody else.
    fn grant(&mut self, planned: Vec<Planned>) -> Vec<Planned> {
        // By id: places in `active` move when a request gives way.
        let mut wanted: Vec<(u64, usize)> = planned.iter().map(|p| (self.active[p.candidate].id, p.tokens)).collect();
        wanted.sort_unstable();
        let mut granted = Vec::with_capacity(wanted.len());
        for &(id, tokens) in &wanted {
            // No place: it gave way to an older one.
            while let Some(at) = self.place_of(id) {
                if self.make_room(at, tokens) {
                    granted.push((id, tokens));
                    break;
                }
                if !self.preempt_youngest_after(id) {
                    break;
                }
            }
        }
        let is_idle = |s: &Sequence| s.is_ready() && !wanted.iter().any(|(id, _)| *id == s.id);
        if granted.is_empty()
            && let Some(&(oldest, _)) = wanted.first()
            && self.active.iter().any(is_idle)
        {
            // Nobody gets on, all younger ones gave way, and an older one had no place in this step: who had it gives way.
            self.put_back(oldest);
        }
        let mut granted: Vec<Planned> = (granted.into_iter())
            .filter_map(|(id, tokens)| Some(Planned { candidate: self.place_of(id)?, tokens }))
            .collect();
        granted.sort_by_key(|plan| plan.candidate);
        granted
    }

    fn place_of(&self, id: u64) -> Option<usize> {
        self.active.iter().position(|s| s.id == id)
    }

    fn make_room(&mut self, at: usize, tokens: usize) -> bool {
        let (radix, parts) = (&mut self.radix, &self.parts);
        self.active[at].pages.make_room(tokens, || allocate(&parts.pool, radix, &parts.metrics.pages_evicted))
    }

    fn compute(&mut self, granted: &[Planned]) {
        let started = Instant::now();
        let mut hooks = self.open_puts(granted);
        let result = {
            let mut chunks = Vec::with_capacity(granted.len());
            let mut plans = granted.iter().peekable();
            for (at, sequence) in self.active.iter_mut().enumerate() {
                if let Some(plan) = plans.next_if(|plan| plan.candidate == at) {
                    sequence.enter_computing();
                    chunks.push(chunk(sequence, plan.tokens));
                }
            }
            self.parts.model.forward(&mut chunks, &mut hooks)
        };
        match result {
            Ok(logits) => self.take_results(granted, hooks, logits),
            Err(error) => self.fail_step(granted, &error.to_string()),
        }
        self.measure(granted, started);
    }

    /// Opens the puts of pages whose computation starts now, and takes those that this step completes.
    fn open_puts(&mut self, granted: &[Planned]) -> PublishHooks {
        let mut hooks = self.parts.publisher.hooks();
        let page_tokens = self.parts.limits.step.page_tokens;
        for (chunk, plan) in granted.iter().enumerate() {
            let sequence = &mut self.active[plan.candidate];
            if !sequence.cache.uses_store() {
                continue;
            }
            let start = sequence.pages.computed();
            let end = start + plan.tokens;
            // The last, partly filled page of all tokens has no key yet.
            for page in start / page_tokens..end.div_ceil(page_tokens).min(sequence.keys.len()) {
                let put = match sequence.puts.remove(&page) {
                    Some(put) => put,
                    None => self.parts.publisher.open(&sequence.keys, page),
                };
                if end >= (page + 1) * page_tokens {
                    hooks.pages.push(CompletingPage { chunk, page, put });
                } else {
                    sequence.puts.insert(page, put);
                }
            }
        }
        hooks
    }

    fn take_results(&mut self, granted: &[Planned], hooks: PublishHooks, logits: Vec<Vec<f32>>) {
        for completing in hooks.pages {
            let commit = self.parts.publisher.commit(completing.put);
            if let Work::Prefill(work) = &mut self.active[granted[completing.chunk].candidate].work {
                work.commits.push(commit);
            }
        }
        let mut ended = Vec::new();
        for (plan, logits) in granted.iter().zip(&logits) {
            let sequence = &mut self.active[plan.candidate];
            let (uses_l1, keys, radix) = (sequence.cache.uses_l1(), &sequence.keys, &mut self.radix);
            let whole = sequence.pages.advance(plan.tokens, |index, page| match uses_l1 {
                true => radix.insert(keys[index], parent(keys, index), page),
                false => page,
            });
            sequence.count_computed(plan.tokens, whole);
            if matches!(sequence.work, Work::Decode(_)) && sequence.pending() == 0 {
                ended.extend(sequence.generate(logits).map(|ending| (sequence.id, ending)));
            }
        }
        for (id, ending) in ended {
            self.parts.metrics.request_ended(ending);
            self.active.retain(|s| s.id != id);
        }
    }

    fn fail_step(&mut self, granted: &[Planned], reason: &str) {
        tracing::error!(reason, "a step failed");
        let ids: Vec<u64> = granted.iter().map(|plan| self.active[plan.candidate].id).collect();
        let failed: Vec<Sequence> = self.active.extract_if(.., |s| ids.contains(&s.id)).collect();
        for sequence in failed {
            sequence.fail(ApiError::new(ErrorCode::Internal, format!("computing failed: {reason}")), Ending::Failed);
        }
    }

    /// Answers prefills that are computed: as soon as the store has what they put.
    fn finish_prefills(&mut self) {
        let is_done = |s: &mut Sequence| s.is_ready() && matches!(s.work, Work::Prefill(_)) && s.pending() == 0;
        let done: Vec<Sequence> = self.active.extract_if(.., is_done).collect();
        for mut sequence in done {
            let mut response = sequence.prefill_response();
            sequence.enter_computing();
            sequence.pages.clear();
            let metrics = self.parts.metrics.clone();
            self.parts.tasks.spawn(async move {
                let Sequence { work, deadline, state, cancel, .. } = sequence;
                let Work::Prefill(work) = work else { return };
                let count = work.commits.len();
                let commits = futures::future::join_all(work.commits);
                // Who follows pages that were lost must not wait for them.
                response.pages_lost = tokio::select! {
                    outcomes = tokio::time::timeout_at(deadline.into(), commits) => match outcomes {
                        Ok(outcomes) => outcomes.into_iter().filter(|o| o.as_ref().map_or(true, is_lost)).count(),
                        Err(_) => count,
                    },
                    () = cancel.cancelled() => count,
                } as u32;
                drop(state);
                let ending = if work.reply.send(Ok(response)).is_ok() { Ending::Done } else { Ending::Cancelled };
                metrics.request_ended(ending);
            });
        }
    }

    fn measure(&mut self, granted: &[Planned], started: Instant) {
        let seconds = started.elapsed().as_secs_f64();
        let tokens: usize = granted.iter().map(|plan| plan.tokens).sum();
        self.parts.metrics.step_seconds.observe(seconds);
        self.parts.metrics.tokens_computed.inc_by(tokens as u64);
        smooth(&mut self.step_ms, seconds * 1000.0);
        // Steps that only generate say nothing about prompts.
        if granted.iter().any(|plan| plan.tokens >= self.parts.limits.step.page_tokens) && seconds > 0.0 {
            smooth(&mut self.prefill_tokens_per_second, tokens as f64 / seconds);
        }
    }
}

/// Whether the store does not have the page after this, as far as the engine knows.
fn is_lost(outcome: &PutOutcome) -> bool {
    match outcome {
        PutOutcome::Lost | PutOutcome::Busy { .. } | PutOutcome::Refused => true,
        PutOutcome::Stored | PutOutcome::AlreadyThere | PutOutcome::InProgress => false,
    }
}

fn smooth(value: &mut f64, newest: f64) {
    *value = if *value == 0.0 { newest } else { *value + SMOOTHING * (newest - *value) };
}

fn chunk(sequence: &mut Sequence, tokens: usize) -> Chunk<'_> {
    let position = sequence.pages.computed();
    let is_last = position + tokens == sequence.target() && matches!(sequence.work, Work::Decode(_));
    Chunk {
        tokens: &sequence.tokens[position..position + tokens],
        position,
        pages: sequence.pages.slots_mut(),
        logits: if is_last { LogitRows::Last } else { LogitRows::None },
    }
}
