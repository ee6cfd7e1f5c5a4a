//! One step: plan, compute, seal, publish, sample.

use super::admit::{allocate, parent};
use super::{SMOOTHING, Scheduler};
use crate::api::{ApiError, ErrorCode};
use crate::batch::{self, Candidate, Planned};
use crate::metrics::Ending;
use crate::publish::{CompletingPage, PublishHooks};
use crate::sequence::{Sequence, Work};
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
        let ready: Vec<(usize, &Sequence)> = self.active.iter().enumerate().filter(|(_, s)| s.is_ready()).collect();
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

    /// Makes room in the pages of those planned; who finds none does not compute in this step, and the youngest of those
    /// who do not compute gives way.
    fn grant(&mut self, planned: Vec<Planned>) -> Vec<Planned> {
        let (radix, parts) = (&mut self.radix, &self.parts);
        let mut granted = Vec::with_capacity(planned.len());
        let mut starved = false;
        for plan in planned {
            let pages = &mut self.active[plan.candidate].pages;
            if pages.make_room(plan.tokens, || allocate(&parts.pool, radix, &parts.metrics.pages_evicted)) {
                granted.push(plan);
            } else {
                starved = true;
            }
        }
        if starved {
            let ids: Vec<u64> = granted.iter().map(|plan| self.active[plan.candidate].id).collect();
            let tokens: Vec<usize> = granted.iter().map(|plan| plan.tokens).collect();
            self.preempt_youngest(&ids);
            // Places in `active` may have moved.
            granted = (ids.iter().zip(tokens))
                .filter_map(|(id, tokens)| {
                    let candidate = self.active.iter().position(|s| s.id == *id)?;
                    Some(Planned { candidate, tokens })
                })
                .collect();
        }
        granted
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
            let response = sequence.prefill_response();
            sequence.enter_computing();
            sequence.pages.clear();
            let metrics = self.parts.metrics.clone();
            self.parts.tasks.spawn(async move {
                let Sequence { work, deadline, state, cancel, .. } = sequence;
                let Work::Prefill(work) = work else { return };
                let commits = futures::future::join_all(work.commits);
                tokio::select! {
                    _ = tokio::time::timeout_at(deadline.into(), commits) => {}
                    () = cancel.cancelled() => {}
                }
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
