//! Planner of a step: selects the sequences and the number of tokens to compute.
//!
//! Pure functions, so that the policy is tested without a model.
//!
//! Invariants:
//! - Peers have fair parts of a step: of its places, and of the tokens of prompts. A peer that asks
//!   for less leaves the rest to the others (max-min fairness: Bertsekas and Gallager, "Data
//!   Networks", 1992, 6.5.2). So does one whose prompts have no place, or wait for pages of others.
//! - Every generating sequence gets its token in every step, up to the places of its peer. Prompts
//!   delay it by one step at most.
//! - Prompts of a peer share its part of `chunk_tokens` per step, oldest first.
//! - The peer of the oldest sequence has a place, however many peers there are.
//! - No page is computed twice in a step. A later sequence waits and reuses the page of the earlier
//!   one.

use larder_format::PageKey;
use larder_http::PeerAddress;
use std::collections::HashSet;

/// Requests that hold pages, as a multiple of the batch. Half of them can load while the others
/// compute.
pub const RUNNING_PER_BATCH: usize = 2;

/// A sequence that is ready to compute. The planner receives candidates oldest first.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    pub peer: PeerAddress,
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

/// Part of a step that a peer may still take.
#[derive(Debug, Clone, Copy)]
struct PeerPart {
    peer: PeerAddress,
    places: usize,
    /// Generating sequences. They take places before the prompts of the peer.
    generating: usize,
    prompt_tokens: usize,
}

/// Plans a step. Generating sequences come first, with one token each. Prompts share the places and
/// the budget that are left to their peers. The result is ordered like the candidates.
pub fn plan(candidates: &[Candidate<'_>], limits: StepLimits) -> Vec<PlannedChunk> {
    let (mut planned, waiting) = plan_parts(candidates, &HashSet::new(), limits);
    if !waiting.is_empty() {
        // Their parts go to the others.
        planned = plan_parts(candidates, &waiting, limits).0;
    }
    // Prompts may leave places of their peers still: there are no more tokens for them.
    let is_planned: HashSet<usize> = planned.iter().map(|plan| plan.candidate).collect();
    let unplanned = candidates.iter().enumerate().filter(|(index, c)| c.generating && !is_planned.contains(index));
    let rest = limits.max_batch - planned.len();
    planned.extend(unplanned.take(rest).map(|(index, _)| PlannedChunk { candidate: index, tokens: 1 }));
    // Generating sequences were planned first. Restore the order of the candidates.
    planned.sort_by_key(|p| p.candidate);
    planned
}

/// Plans the part of each peer without the prompts of `waiting`. Returns the further prompts that
/// wait for pages of others, too.
fn plan_parts(
    candidates: &[Candidate<'_>],
    waiting: &HashSet<usize>,
    limits: StepLimits,
) -> (Vec<PlannedChunk>, HashSet<usize>) {
    let mut parts = divide(candidates, waiting, limits);
    let mut planned: Vec<PlannedChunk> = Vec::new();
    let mut found_waiting = HashSet::new();
    for (index, candidate) in candidates.iter().enumerate().filter(|(_, candidate)| candidate.generating) {
        let Some(part) = parts.iter_mut().find(|part| part.peer == candidate.peer) else { continue };
        if part.places > 0 {
            part.places -= 1;
            planned.push(PlannedChunk { candidate: index, tokens: 1 });
        }
    }
    let mut claimed: HashSet<PageKey> = HashSet::new();
    for (index, candidate) in prompts(candidates, waiting) {
        let Some(part) = parts.iter_mut().find(|part| part.peer == candidate.peer) else { continue };
        if part.places == 0 || part.prompt_tokens == 0 {
            continue;
        }
        let first_page = candidate.position / limits.page_tokens;
        // Within a page, the sequence already owns a partly computed copy and goes on.
        let at_boundary = candidate.position.is_multiple_of(limits.page_tokens);
        if at_boundary && candidate.shareable.get(first_page).is_some_and(|key| claimed.contains(key)) {
            found_waiting.insert(index);
            continue;
        }
        let tokens = chunk(candidate, part.prompt_tokens, limits.page_tokens);
        let pages = (candidate.position + tokens).div_ceil(limits.page_tokens).min(candidate.shareable.len());
        // Includes the page that the chunk fills in part: the next step continues it.
        claimed.extend(candidate.shareable.get(first_page..pages).unwrap_or_default());
        part.places -= 1;
        part.prompt_tokens -= tokens;
        planned.push(PlannedChunk { candidate: index, tokens });
    }
    (planned, found_waiting)
}

/// Prompts, with their numbers, without those of `waiting`.
fn prompts<'a, 'p>(
    candidates: &'a [Candidate<'p>],
    waiting: &'a HashSet<usize>,
) -> impl Iterator<Item = (usize, &'a Candidate<'p>)> {
    let prompts = candidates.iter().enumerate().filter(|(_, candidate)| !candidate.generating);
    prompts.filter(move |(index, _)| !waiting.contains(index))
}

/// Parts of all peers, in the order of their oldest sequences, without the prompts of `waiting`.
fn divide(candidates: &[Candidate<'_>], waiting: &HashSet<usize>, limits: StepLimits) -> Vec<PeerPart> {
    let mut parts: Vec<PeerPart> = Vec::new();
    for (index, candidate) in candidates.iter().enumerate() {
        let found = parts.iter().position(|part| part.peer == candidate.peer);
        let at = found.unwrap_or(parts.len());
        if found.is_none() {
            parts.push(PeerPart { peer: candidate.peer, places: 0, generating: 0, prompt_tokens: 0 });
        }
        parts[at].places += usize::from(!waiting.contains(&index));
        parts[at].generating += usize::from(candidate.generating);
    }
    let demands: Vec<usize> = parts.iter().map(|part| part.places).collect();
    let places = fair_shares(&demands, limits.max_batch);
    parts.iter_mut().zip(places).for_each(|(part, places)| part.places = places);
    // Only those that have a place ask for tokens.
    let mut prompt_places: Vec<usize> = parts.iter().map(|part| part.places.saturating_sub(part.generating)).collect();
    for (_, candidate) in prompts(candidates, waiting) {
        let Some(at) = parts.iter().position(|part| part.peer == candidate.peer) else { continue };
        if prompt_places[at] > 0 {
            prompt_places[at] -= 1;
            parts[at].prompt_tokens += candidate.span;
        }
    }
    let demands: Vec<usize> = parts.iter().map(|part| part.prompt_tokens).collect();
    let tokens = fair_shares(&demands, limits.chunk_tokens);
    parts.iter_mut().zip(tokens).for_each(|(part, tokens)| part.prompt_tokens = tokens);
    parts
}

/// Divides `total`: each demand gets all of it, or as much as any other does. If less than one is
/// left for each, the first ones have it.
fn fair_shares(demands: &[usize], total: usize) -> Vec<usize> {
    let mut shares = vec![0; demands.len()];
    let mut left = total.min(demands.iter().sum());
    while left > 0 {
        // Not empty: at most the sum of all demands is left.
        let unmet: Vec<usize> = (0..demands.len()).filter(|&at| shares[at] < demands[at]).collect();
        let each = (left / unmet.len()).max(1);
        for at in unmet {
            let more = each.min(demands[at] - shares[at]).min(left);
            shares[at] += more;
            left -= more;
        }
    }
    shares
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
        Candidate { peer: PeerAddress::default(), position, span, generating: false, shareable }
    }

    fn generating() -> Candidate<'static> {
        Candidate { peer: PeerAddress::default(), position: 9, span: 1, generating: true, shareable: &[] }
    }

    fn of_peer(last: u8, candidate: Candidate<'_>) -> Candidate<'_> {
        Candidate { peer: PeerAddress::of([10, 0, 0, last].into()), ..candidate }
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

    #[test]
    fn shares_are_equal_up_to_the_demand() {
        assert_eq!(fair_shares(&[9, 1, 9], 10), [5, 1, 4]);
        assert_eq!(fair_shares(&[2, 3], 10), [2, 3]);
        assert_eq!(fair_shares(&[3, 5, 5], 2), [1, 1, 0], "the first ones have the rest");
        assert_eq!(fair_shares(&[0, 7], 4), [0, 4]);
        assert!(fair_shares(&[], 4).is_empty());
    }

    #[test]
    fn crowd_of_a_peer_leaves_places_of_a_step_to_the_next_one() {
        let mut candidates: Vec<Candidate<'_>> = (0..5).map(|_| of_peer(1, generating())).collect();
        candidates.push(of_peer(2, generating()));
        assert_eq!(tokens(&candidates), [(0, 1), (1, 1), (5, 1)]);
        candidates[5] = of_peer(2, prompt(0, 3, &[]));
        assert_eq!(tokens(&candidates), [(0, 1), (1, 1), (5, 3)]);
        let of_many: Vec<Candidate<'_>> = (1..6).map(|peer| of_peer(peer, generating())).collect();
        assert_eq!(tokens(&of_many), [(0, 1), (1, 1), (2, 1)], "the oldest ones");
    }

    #[test]
    fn places_that_a_peer_cannot_use_go_to_others() {
        let keys = page_keys(&(0..40).collect::<Vec<u32>>(), 4);
        // The second prompt waits for the page of the first one.
        let mut candidates: Vec<Candidate<'_>> = (0..2).map(|_| of_peer(2, prompt(0, 3, &keys))).collect();
        candidates.extend((0..3).map(|_| of_peer(1, generating())));
        assert_eq!(tokens(&candidates), [(0, 3), (2, 1), (3, 1)]);
    }

    #[test]
    fn tokens_that_a_peer_cannot_use_go_to_others() {
        let keys = page_keys(&(0..40).collect::<Vec<u32>>(), 4);
        // The second prompt waits for the page of the first one, and each step has ten tokens.
        assert_eq!(tokens(&[1, 2].map(|peer| of_peer(peer, prompt(0, 40, &keys)))), [(0, 8)]);
        // Generating sequences take both places of the first peer.
        let mut candidates: Vec<Candidate<'_>> = (0..3).map(|_| of_peer(1, generating())).collect();
        candidates.extend([of_peer(1, prompt(0, 100, &[])), of_peer(2, prompt(0, 9, &[]))]);
        assert_eq!(tokens(&candidates), [(0, 1), (1, 1), (4, 9)]);
    }

    #[test]
    fn long_prompts_of_a_peer_leave_tokens_of_a_step_to_the_next_one() {
        let long = || of_peer(1, prompt(0, 100, &[]));
        assert_eq!(tokens(&[long(), long(), of_peer(2, prompt(0, 3, &[]))]), [(0, 4), (1, 3), (2, 3)]);
        assert_eq!(tokens(&[long(), of_peer(2, prompt(0, 9, &[]))]), [(0, 4), (1, 4)]);
    }
}
