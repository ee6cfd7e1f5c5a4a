//! One step of continuous batching: plan, reserve pages, run the forward pass, seal and publish
//! pages, sample tokens.

use super::admit::{allocate, parent_key};
use super::{EWMA_WEIGHT, RETRY_AFTER_MS, Scheduler};
use crate::api::{ApiError, ErrorCode};
use crate::batch::{self, Candidate, PlannedChunk};
use crate::metrics::RequestOutcome;
use crate::publish::{CompletingPage, PublishHooks};
use crate::sampling::{Sampled, SamplingError, SamplingJob};
use crate::sequence::{RequestKind, Sequence};
use larder_client::PutOutcome;
use larder_model::{Chunk, ForwardError, LogitRows};
use rayon::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// Maximum tokens of a prompt in one step if the logits of all of them are needed. A row of a large
/// vocabulary has 600 KB. Admission lets one such prompt run at a time.
pub(crate) const LOGIT_ROWS_MAX: usize = 64;

impl Scheduler {
    /// Runs one step. Returns `false` if no request was computed: none was ready, or none got a
    /// page. The thread may then sleep.
    pub(super) fn step(&mut self) -> bool {
        // Before planning: a page that another request computed meanwhile must not be computed
        // again.
        for sequence in self.active.iter_mut().filter(|s| s.is_ready()) {
            Self::fill_from_cache(&mut self.radix, sequence);
        }
        // A prefill can finish without a step, if all its pages were cached.
        self.finish_prefills();
        let planned = self.plan();
        let granted = self.grant(planned);
        // Waiting requests hold all pages, or none is ready.
        if granted.is_empty() {
            return false;
        }
        self.compute(&granted);
        self.finish_prefills();
        true
    }

    fn plan(&self) -> Vec<PlannedChunk> {
        let mut ready: Vec<(usize, &Sequence)> = self.active.iter().enumerate().filter(|(_, s)| s.is_ready()).collect();
        // `active` is ordered by admission: a preempted request stands behind younger ones. Plan by
        // age.
        ready.sort_by_key(|(_, s)| s.id);
        let candidates: Vec<Candidate<'_>> = ready
            .iter()
            .map(|(_, s)| Candidate {
                peer: s.peer,
                position: s.pages.computed(),
                span: s.pages.span(s.target()).min(if s.wants_prompt_logits() { LOGIT_ROWS_MAX } else { usize::MAX }),
                generating: s.is_generating(),
                shareable: if s.cache.uses_l1() { &s.keys[..s.cacheable_pages()] } else { &[] },
            })
            .collect();
        let planned = batch::plan(&candidates, self.context.limits.step);
        planned.into_iter().map(|p| PlannedChunk { candidate: ready[p.candidate].0, ..p }).collect()
    }

    /// Reserves pages for the planned chunks, oldest request first. A request that finds no page
    /// preempts the youngest ready request behind it and retries at once. Trying again before any
    /// other request runs ensures that the older one gets the freed pages.
    fn grant(&mut self, planned: Vec<PlannedChunk>) -> Vec<PlannedChunk> {
        // By id: indices into `active` shift when a request is preempted.
        let mut wanted: Vec<(u64, usize)> = planned.iter().map(|p| (self.active[p.candidate].id, p.tokens)).collect();
        // Ids grow with arrival, so this is oldest first.
        wanted.sort_unstable();
        let mut granted = Vec::with_capacity(wanted.len());
        for &(id, tokens) in &wanted {
            // No index: an older request preempted this one.
            while let Some(at) = self.active_index(id) {
                if self.ensure_capacity(at, tokens) {
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
            // No request advanced, all younger ones are preempted, and an older request had no
            // place in this step. Preempt the planned one: its pages let the older request run in
            // the next step.
            self.preempt(oldest);
        }
        let mut granted: Vec<PlannedChunk> = (granted.into_iter())
            .filter_map(|(id, tokens)| Some(PlannedChunk { candidate: self.active_index(id)?, tokens }))
            .collect();
        // `compute` walks `active` and the plan side by side.
        granted.sort_by_key(|plan| plan.candidate);
        granted
    }

    fn active_index(&self, id: u64) -> Option<usize> {
        self.active.iter().position(|s| s.id == id)
    }

    fn ensure_capacity(&mut self, at: usize, tokens: usize) -> bool {
        let radix = &mut self.radix;
        let context = &self.context;
        self.active[at].pages.ensure_capacity(tokens, || allocate(&context.pool, radix, &context.metrics.pages_evicted))
    }

    fn compute(&mut self, granted: &[PlannedChunk]) {
        let started = Instant::now();
        let mut hooks = self.open_puts(granted);
        let result = {
            let mut chunks = Vec::with_capacity(granted.len());
            let mut plans = granted.iter().peekable();
            for (at, sequence) in self.active.iter_mut().enumerate() {
                if let Some(plan) = plans.next_if(|plan| plan.candidate == at) {
                    // Only requests that really run leave the waiting state.
                    sequence.enter_computing();
                    chunks.push(chunk(sequence, plan.tokens));
                }
            }
            self.context.model.forward(&mut chunks, &mut hooks)
        };
        match result {
            Ok(logits) => self.apply_results(granted, hooks, logits),
            Err(ForwardError::Damaged { chunk, page }) => {
                // Aborts the puts of the step. The next one opens them again.
                drop(hooks);
                self.discard_copy(self.active[granted[chunk].candidate].id, page);
            }
            Err(error) => self.fail_step(granted, &error.to_string()),
        }
        self.record_step(granted, started);
    }

    /// Opens puts for pages whose computation starts in this step. Returns the puts that this step
    /// completes; the others stay with their requests.
    fn open_puts(&mut self, granted: &[PlannedChunk]) -> PublishHooks {
        let mut hooks = self.context.publisher.hooks();
        let page_tokens = self.context.limits.step.page_tokens;
        for (chunk, plan) in granted.iter().enumerate() {
            let sequence = &mut self.active[plan.candidate];
            if !sequence.cache.uses_store() {
                continue;
            }
            let start = sequence.pages.computed();
            let end = start + plan.tokens;
            // The partly filled last page has no key yet.
            for page in start / page_tokens..end.div_ceil(page_tokens).min(sequence.keys.len()) {
                // A forgotten page, and those computed from it, stay here.
                if !sequence.is_shareable(page) {
                    break;
                }
                let put = match sequence.puts.remove(&page) {
                    Some(put) => put,
                    // The put opens before the computation, so that followers find it.
                    None => self.context.publisher.open(sequence.new_page(page)),
                };
                if end >= (page + 1) * page_tokens {
                    hooks.pages.push(CompletingPage::new(chunk, page, put));
                } else {
                    sequence.puts.insert(page, put);
                }
            }
        }
        hooks
    }

    /// Samples a token for every chunk with logits, in parallel: a vocabulary has 150,000 of them.
    /// Fails for logits that are not finite, and where a constraint cannot go on.
    fn sample(&mut self, granted: &[PlannedChunk], logits: &[Vec<f32>]) -> Vec<Result<Sampled, SamplingError>> {
        let vocab = self.context.model.config().vocab;
        let mut plans = granted.iter().zip(logits).peekable();
        let mut jobs = Vec::with_capacity(granted.len());
        for (at, sequence) in self.active.iter_mut().enumerate() {
            if let Some((plan, logits)) = plans.next_if(|(plan, _)| plan.candidate == at) {
                jobs.push(sequence.sampling_job(plan.tokens, logits, vocab));
            }
        }
        jobs.into_par_iter().map(SamplingJob::run).collect()
    }

    fn apply_results(&mut self, granted: &[PlannedChunk], mut hooks: PublishHooks, logits: Vec<Vec<f32>>) {
        let mut ended = Vec::new();
        let mut unusable = Vec::new();
        let mut refused = Vec::new();
        let sampled = self.sample(granted, &logits);
        for (chunk, (plan, sampled)) in granted.iter().zip(sampled).enumerate() {
            let sequence = &mut self.active[plan.candidate];
            // Before its pages enter L1. Their puts are aborted below, because they are not sealed.
            if hooks.found_unusable(chunk) {
                unusable.push(sequence.id);
                continue;
            }
            let sampled = match sampled {
                Ok(sampled) => sampled,
                Err(SamplingError::NotFinite) => {
                    unusable.push(sequence.id);
                    continue;
                }
                Err(SamplingError::Guide(error)) => {
                    let error = ApiError::new(ErrorCode::BadRequest, error.to_string());
                    refused.push((sequence.id, error, RequestOutcome::Failed));
                    continue;
                }
                Err(SamplingError::GuideMemory) => {
                    let message = "constraints of requests of your address take all the engine's memory for them; \
                                   retry later or use another engine";
                    refused.push((sequence.id, ApiError::busy(message, RETRY_AFTER_MS), RequestOutcome::Refused));
                    continue;
                }
            };
            sequence.keep_prompt_logprobs(sequence.pages.computed(), sampled.prompt);
            let uses_l1 = sequence.cache.uses_l1();
            let private_from = sequence.private_from();
            let keys = &sequence.keys;
            let radix = &mut self.radix;
            let whole = sequence.pages.advance(plan.tokens, |index, page| {
                let page = Arc::new(hooks.seal(chunk, index, page));
                if uses_l1 && index < private_from {
                    radix.insert(keys[index], parent_key(keys, index), page)
                } else {
                    page
                }
            });
            sequence.count_computed(plan.tokens, whole);
            if let Some(token) = sampled.token {
                ended.extend(sequence.generate(token).map(|outcome| (sequence.id, outcome)));
            }
        }
        // After the loop, because the commits name the pages that it sealed.
        for completing in hooks.pages {
            let sequence = &mut self.active[granted[completing.chunk].candidate];
            let Some(page) = sequence.pages.sealed(completing.page) else { continue };
            let named = sequence.new_page(completing.page);
            let commit = self.context.publisher.commit(named, completing.put, page);
            if let RequestKind::Prefill(output) = &mut sequence.kind {
                output.commits.push(commit);
            }
        }
        for (id, outcome) in ended {
            self.context.metrics.request_ended(outcome);
            // After the loop: removing earlier would shift the indices of the plan.
            for sequence in self.active.extract_if(.., |s| s.id == id).collect::<Vec<_>>() {
                self.report_end(&sequence);
            }
        }
        unusable.into_iter().for_each(|id| self.fail_unusable(id));
        for (id, error, outcome) in refused {
            let ended = self.active.extract_if(.., |s| s.id == id);
            ended.for_each(|sequence| sequence.fail(error.clone(), outcome));
        }
    }

    fn fail_step(&mut self, granted: &[PlannedChunk], reason: &str) {
        tracing::error!(reason, requests = granted.len(), "a forward pass failed; failing the requests in it");
        let ids: Vec<u64> = granted.iter().map(|plan| self.active[plan.candidate].id).collect();
        // Pages of a failed pass may be partly written, so no request of the batch can continue.
        let failed: Vec<Sequence> = self.active.extract_if(.., |s| ids.contains(&s.id)).collect();
        for sequence in failed {
            sequence.fail(
                ApiError::new(ErrorCode::Internal, format!("the forward pass failed: {reason}")),
                RequestOutcome::Failed,
            );
        }
    }

    /// Answers finished prefills. A background task waits until the store has confirmed their
    /// pages.
    fn finish_prefills(&mut self) {
        let is_done = |s: &mut Sequence| s.is_ready() && matches!(s.kind, RequestKind::Prefill(_)) && s.pending() == 0;
        let done: Vec<Sequence> = self.active.extract_if(.., is_done).collect();
        for mut sequence in done {
            let mut response = sequence.prefill_response();
            let private_pages = sequence.private_pages();
            sequence.enter_computing();
            // Release L1 before the wait. The puts own copies of the bytes.
            sequence.pages.clear();
            sequence.running_place = None;
            let metrics = self.context.metrics.clone();
            self.context.tasks.spawn(async move {
                let Sequence { kind, deadline, state, cancel, .. } = sequence;
                let RequestKind::Prefill(output) = kind else { return };
                let count = output.commits.len();
                let commits = futures::future::join_all(output.commits);
                // Report lost pages, so that decode engines do not wait for them.
                response.pages_lost = tokio::select! {
                    outcomes = tokio::time::timeout_at(deadline.into(), commits) => match outcomes {
                        Ok(outcomes) => outcomes.into_iter().filter(|o| o.as_ref().map_or(true, is_lost)).count(),
                        Err(_) => count,
                    },
                    () = cancel.cancelled() => count,
                } as u32;
                // Never put, so no decode engine may wait for them.
                response.pages_lost = response.pages.min(response.pages_lost + private_pages as u32);
                // Before the reply: a client that sees the answer also sees the metrics of a
                // finished state.
                drop(state);
                let outcome = if output.reply.send(Ok(response)).is_ok() {
                    RequestOutcome::Done
                } else {
                    RequestOutcome::Cancelled
                };
                metrics.request_ended(outcome);
            });
        }
    }

    fn record_step(&mut self, granted: &[PlannedChunk], started: Instant) {
        let seconds = started.elapsed().as_secs_f64();
        let tokens: usize = granted.iter().map(|plan| plan.tokens).sum();
        self.context.metrics.step_seconds.observe(seconds);
        self.context.metrics.tokens_computed.inc_by(tokens as u64);
        update_ewma(&mut self.step_ms, seconds * 1000.0);
        // Steps that only generate are bound by memory bandwidth and would distort the prompt
        // throughput.
        if granted.iter().any(|plan| plan.tokens >= self.context.limits.step.page_tokens) && seconds > 0.0 {
            update_ewma(&mut self.prefill_tokens_per_second, tokens as f64 / seconds);
        }
    }
}

/// Returns `true` if the store does not hold the page after this put, as far as the engine knows.
fn is_lost(outcome: &PutOutcome) -> bool {
    match outcome {
        PutOutcome::Lost | PutOutcome::Busy { .. } => true,
        PutOutcome::Refused | PutOutcome::Forgotten | PutOutcome::Retired => true,
        // The other writer may never send a byte.
        PutOutcome::InProgress => true,
        PutOutcome::Stored | PutOutcome::AlreadyThere => false,
    }
}

fn update_ewma(value: &mut f64, newest: f64) {
    // Zero means that nothing was measured yet: the first sample counts in full.
    *value = if *value == 0.0 { newest } else { *value + EWMA_WEIGHT * (newest - *value) };
}

fn chunk(sequence: &mut Sequence, tokens: usize) -> Chunk<'_> {
    let position = sequence.pages.computed();
    let is_last = position + tokens == sequence.target() && matches!(sequence.kind, RequestKind::Decode(_));
    let logits = match is_last {
        _ if sequence.wants_prompt_logits() => LogitRows::All,
        true => LogitRows::Last,
        false => LogitRows::None,
    };
    Chunk { tokens: &sequence.tokens[position..position + tokens], position, pages: sequence.pages.slots_mut(), logits }
}
