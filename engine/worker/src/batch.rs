//! Planner of a step: selects the sequences and the number of tokens to compute.
//!
//! Pure functions, so that the policy is tested without a model.
//!
//! Invariants:
//! - Every generating sequence gets its token in every step, up to `max_batch` sequences. Prompts
//!   delay it by one step at most.
//! - Prompts share `chunk_tokens` per step, oldest first.
//! - No page is computed twice in a step. A later sequence waits and reuses the page of the earlier
//!   one.

use larder_format::PageKey;
use std::collections::HashSet;

/// A sequence that is ready to compute. The planner receives candidates oldest first.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    pub position: usize,
    pub span: usize,
    /// True for a generating sequence. It computes one token, outside the prompts' budget.
    pub generating: bool,
    /// Keys of the leading pages that other sequences may reuse. Empty if the sequence shares
    /// nothing.
    pub shareable: &'a [PageKey],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedChunk {
    pub candidate: usize,
    pub tokens: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct StepLimits {
    pub page_tokens: usize,
    pub chunk_tokens: usize,
    pub max_batch: usize,
}

/// Plans a step. Generating sequences come first, with one token each. Prompts share the places and
/// the budget that are left. The result is ordered like the candidates.
pub fn plan(candidates: &[Candidate<'_>], limits: StepLimits) -> Vec<PlannedChunk> {
    let mut planned: Vec<PlannedChunk> = candidates
        .iter()
        .enumerate()
        .filter(|(_, candidate)| candidate.generating)
        .take(limits.max_batch)
        .map(|(index, _)| PlannedChunk { candidate: index, tokens: 1 })
        .collect();
    // Prompts take the batch places that generation leaves.
    let mut budget = limits.chunk_tokens;
    let mut claimed: HashSet<PageKey> = HashSet::new();
    for (index, candidate) in candidates.iter().enumerate().filter(|(_, candidate)| !candidate.generating) {
        if budget == 0 || planned.len() >= limits.max_batch {
            break;
        }
        let first_page = candidate.position / limits.page_tokens;
        // Within a page, the sequence already owns a partly computed copy and goes on.
        let at_boundary = candidate.position.is_multiple_of(limits.page_tokens);
        if at_boundary && candidate.shareable.get(first_page).is_some_and(|key| claimed.contains(key)) {
            continue;
        }
        let tokens = chunk(candidate, budget, limits.page_tokens);
        let pages = (candidate.position + tokens).div_ceil(limits.page_tokens).min(candidate.shareable.len());
        // Includes the page that the chunk fills in part: the next step continues it.
        claimed.extend(candidate.shareable.get(first_page..pages).unwrap_or_default());
        budget -= tokens;
        planned.push(PlannedChunk { candidate: index, tokens });
    }
    // Generating sequences were planned first. Restore the order of the candidates.
    planned.sort_by_key(|p| p.candidate);
    planned
}

/// Length of a prompt chunk within the budget. A chunk that does not finish the span ends on a page
/// boundary, so that pages are sealed early.
fn chunk(candidate: &Candidate<'_>, budget: usize, page_tokens: usize) -> usize {
    if candidate.span <= budget {
        return candidate.span;
    }
    let end = candidate.position + budget;
    let aligned = end - end % page_tokens;
    // A budget below one page must still make progress.
    if aligned > candidate.position { aligned - candidate.position } else { budget }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::page_keys;

    const LIMITS: StepLimits = StepLimits { page_tokens: 4, chunk_tokens: 10, max_batch: 3 };

    fn prompt(position: usize, span: usize, shareable: &[PageKey]) -> Candidate<'_> {
        Candidate { position, span, generating: false, shareable }
    }

    fn generating() -> Candidate<'static> {
        Candidate { position: 9, span: 1, generating: true, shareable: &[] }
    }

    fn tokens(candidates: &[Candidate<'_>]) -> Vec<(usize, usize)> {
        plan(candidates, LIMITS).iter().map(|p| (p.candidate, p.tokens)).collect()
    }

    #[test]
    fn generating_sequences_run_first_and_prompts_share_the_budget() {
        let candidates = [prompt(0, 100, &[]), generating(), prompt(4, 1, &[])];
        assert_eq!(tokens(&candidates), [(0, 8), (1, 1), (2, 1)]);
        let full = [prompt(0, 100, &[]), generating(), generating(), generating(), generating()];
        assert_eq!(tokens(&full), [(1, 1), (2, 1), (3, 1)]);
    }

    #[test]
    fn chunks_end_on_page_boundaries_unless_they_finish_the_span() {
        assert_eq!(tokens(&[prompt(3, 100, &[])]), [(0, 9)]);
        assert_eq!(tokens(&[prompt(0, 9, &[])]), [(0, 9)]);
        let narrow = StepLimits { chunk_tokens: 2, ..LIMITS };
        assert_eq!(plan(&[prompt(0, 9, &[])], narrow)[0].tokens, 2, "a budget below a page still moves on");
    }

    #[test]
    fn a_page_is_planned_once_per_step() {
        let keys = page_keys(&(0..40).collect::<Vec<u32>>(), 4);
        let other = page_keys(&(100..140).collect::<Vec<u32>>(), 4);
        let candidates = [prompt(0, 4, &keys), prompt(0, 6, &keys), prompt(0, 6, &other)];
        assert_eq!(tokens(&candidates), [(0, 4), (2, 6)]);
        assert_eq!(tokens(&[prompt(0, 4, &keys), prompt(4, 4, &keys)]), [(0, 4), (1, 4)], "other pages go on");
    }
}
