//! Which tokens the next step computes.
//!
//! What always holds:
//! - every sequence that generates gets its token in every step, up to `max_batch` of them: prompts never hold it back
//!   longer than one step;
//! - prompts share `chunk_tokens` per step, oldest first;
//! - no page is computed twice in a step: who comes later waits and takes the page of who came first.

use larder_format::PageKey;
use std::collections::HashSet;

/// A sequence that could compute now, oldest first.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// Tokens computed so far: where the next chunk begins.
    pub position: usize,
    /// Tokens that may be computed in one go; at least 1.
    pub span: usize,
    /// Whether it generates: one token, not charged to the prompts' share.
    pub generating: bool,
    /// Keys of the pages of the sequence that others may want, from its start; empty if it shares nothing.
    pub shared: &'a [PageKey],
}

/// A part of the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Index of the candidate.
    pub candidate: usize,
    /// Tokens to compute.
    pub tokens: usize,
}

/// Limits of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepLimits {
    /// Tokens per page.
    pub page_tokens: usize,
    /// Prompt tokens per step.
    pub chunk_tokens: usize,
    /// Sequences per step.
    pub max_batch: usize,
}

/// Plans a step; the answer is in the order of the candidates.
pub fn plan(candidates: &[Candidate<'_>], limits: StepLimits) -> Vec<Planned> {
    let mut planned: Vec<Planned> = candidates
        .iter()
        .enumerate()
        .filter(|(_, candidate)| candidate.generating)
        .take(limits.max_batch)
        .map(|(index, _)| Planned { candidate: index, tokens: 1 })
        .collect();
    let mut budget = limits.chunk_tokens;
    let mut claimed: HashSet<PageKey> = HashSet::new();
    for (index, candidate) in candidates.iter().enumerate().filter(|(_, candidate)| !candidate.generating) {
        if budget == 0 || planned.len() >= limits.max_batch {
            break;
        }
        let first_page = candidate.position / limits.page_tokens;
        let at_boundary = candidate.position.is_multiple_of(limits.page_tokens);
        if at_boundary && candidate.shared.get(first_page).is_some_and(|key| claimed.contains(key)) {
            continue;
        }
        let tokens = chunk(candidate, budget, limits.page_tokens);
        let pages = (candidate.position + tokens).div_ceil(limits.page_tokens).min(candidate.shared.len());
        claimed.extend(candidate.shared.get(first_page..pages).unwrap_or_default());
        budget -= tokens;
        planned.push(Planned { candidate: index, tokens });
    }
    planned.sort_by_key(|p| p.candidate);
    planned
}

/// As much as the budget allows; ends on a page boundary if it cannot end the span, so that pages are sealed early.
fn chunk(candidate: &Candidate<'_>, budget: usize, page_tokens: usize) -> usize {
    if candidate.span <= budget {
        return candidate.span;
    }
    let end = candidate.position + budget;
    let aligned = end - end % page_tokens;
    if aligned > candidate.position { aligned - candidate.position } else { budget }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::page_keys;

    const LIMITS: StepLimits = StepLimits { page_tokens: 4, chunk_tokens: 10, max_batch: 3 };

    fn prompt(position: usize, span: usize, shared: &[PageKey]) -> Candidate<'_> {
        Candidate { position, span, generating: false, shared }
    }

    fn generating() -> Candidate<'static> {
        Candidate { position: 9, span: 1, generating: true, shared: &[] }
    }

    fn tokens(candidates: &[Candidate<'_>]) -> Vec<(usize, usize)> {
        plan(candidates, LIMITS).iter().map(|p| (p.candidate, p.tokens)).collect()
    }

    #[test]
    fn generation_goes_first_and_prompts_share_the_budget() {
        let candidates = [prompt(0, 100, &[]), generating(), prompt(4, 1, &[])];
        assert_eq!(tokens(&candidates), [(0, 8), (1, 1), (2, 1)]);
        let full = [prompt(0, 100, &[]), generating(), generating(), generating(), generating()];
        assert_eq!(tokens(&full), [(1, 1), (2, 1), (3, 1)]);
    }

    #[test]
    fn chunks_end_on_pages_unless_they_end_the_span() {
        assert_eq!(tokens(&[prompt(3, 100, &[])]), [(0, 9)]);
        assert_eq!(tokens(&[prompt(0, 9, &[])]), [(0, 9)]);
        let narrow = StepLimits { chunk_tokens: 2, ..LIMITS };
        assert_eq!(plan(&[prompt(0, 9, &[])], narrow)[0].tokens, 2, "a budget below a page still moves on");
    }

    #[test]
    fn nobody_computes_a_page_that_is_being_computed() {
        let keys = page_keys(&(0..40).collect::<Vec<u32>>(), 4);
        let other = page_keys(&(100..140).collect::<Vec<u32>>(), 4);
        let candidates = [prompt(0, 4, &keys), prompt(0, 6, &keys), prompt(0, 6, &other)];
        assert_eq!(tokens(&candidates), [(0, 4), (2, 6)]);
        assert_eq!(tokens(&[prompt(0, 4, &keys), prompt(4, 4, &keys)]), [(0, 4), (1, 4)], "other pages go on");
    }
}
