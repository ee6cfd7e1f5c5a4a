//! Memory of an engine's requests: their tokens and parameters, events that no client has read, and
//! the state of their constraints.
//!
//! Invariants:
//! - The tokens and parameters of all requests take at most [`requests_bytes_max`]. A request
//!   counts from the end of its parsing to the end of its answer.
//! - Events that wait for their clients take at most [`UNREAD_BYTES_MAX`], without the first
//!   [`EVENTS_FREE`] of each answer. So a client that reads its answer never loses it to others.
//! - The state of constraints takes at most [`guides_bytes_max`], but for their growth in one step:
//!   a guide that finds no room is dropped at once. Compiled constraints are a part of it.
//! - No address takes all of any.

use crate::batch::RUNNING_PER_BATCH;
use larder_format::PageKey;
use larder_http::{PeerAddress, PeerBudget, PeerCharge};
use std::sync::Arc;

/// Least [`requests_bytes_max`].
const REQUESTS_BYTES_LEAST: usize = 256 << 20;
pub(crate) const UNREAD_BYTES_MAX: usize = 128 << 20;
/// Least [`guides_bytes_max`].
const GUIDES_BYTES_LEAST: usize = 512 << 20;
/// Memory of a guide in use. Those of common schemas take some megabytes.
const GUIDE_BYTES: usize = 2 << 20;
/// Granularity of all.
pub(crate) const CHARGE_BYTES: usize = 4 << 10;
/// Memory of a request beside its body and tokens: its task, channels and sampler.
const REQUEST_BYTES: usize = 16 << 10;
/// Length of a token in a body: six digits and a comma, and one for the parameters.
const BODY_TOKEN_BYTES: usize = 8;
/// Memory of a token: itself, in a vector that may have grown to twice its length, and its place in
/// the sampler.
const TOKEN_BYTES: usize = 24;
/// Memory of the event of a token: the event, its place in the channel, and its text.
const EVENT_BYTES: usize = 160;
/// Memory of the log-probabilities at one place of the text, and of each of the best tokens there.
const LOGPROBS_BYTES: usize = 48;
const TOP_BYTES: usize = size_of::<(u32, f32)>();
/// Unread events of an answer that do not count.
pub(crate) const EVENTS_FREE: usize = 64;

/// Memory of a token of a request in bytes: the token, and its part of a page's key. A load has a
/// copy of the keys.
pub(crate) fn token_bytes(page_tokens: usize) -> usize {
    TOKEN_BYTES + (2 * size_of::<PageKey>()).div_ceil(page_tokens.max(1))
}

/// Maximum charge in bytes of a request that wants no log-probabilities of its prompt.
pub(crate) fn request_bytes(tokens: usize, parameter_bytes: usize, page_tokens: usize) -> usize {
    let of_tokens = tokens.saturating_mul(token_bytes(page_tokens) + BODY_TOKEN_BYTES);
    let bytes = of_tokens.saturating_add(REQUEST_BYTES).saturating_add(parameter_bytes);
    bytes.div_ceil(CHARGE_BYTES).saturating_mul(CHARGE_BYTES)
}

/// Maximum memory of the tokens and parameters of all requests in bytes. One address has room for
/// as many requests as hold pages, each with a full context. The router refuses a request for more
/// answers to a prompt than its engines have room for.
pub(crate) fn requests_bytes_max(max_batch: usize, context: usize, page_tokens: usize) -> usize {
    let units = request_bytes(context, 0, page_tokens) / CHARGE_BYTES;
    // An address has three quarters of the budget.
    let running = max_batch.saturating_mul(RUNNING_PER_BATCH);
    let all = running.saturating_mul(units).div_ceil(3).saturating_mul(4);
    all.saturating_mul(CHARGE_BYTES).max(REQUESTS_BYTES_LEAST)
}

/// Maximum memory of the state of constraints in bytes. One address has room for as many common
/// ones as hold pages, and for any single one.
pub(crate) fn guides_bytes_max(max_batch: usize) -> usize {
    let common = max_batch.saturating_mul(RUNNING_PER_BATCH).saturating_mul(GUIDE_BYTES);
    // An address has three quarters of the budget.
    common.div_ceil(3).saturating_mul(4).max(GUIDES_BYTES_LEAST)
}

/// Memory of the event of a token with the log-probabilities of the `top` best ones.
pub(crate) fn event_bytes(top: Option<usize>) -> usize {
    EVENT_BYTES + logprobs_bytes(top)
}

fn logprobs_bytes(top: Option<usize>) -> usize {
    top.map_or(0, |top| LOGPROBS_BYTES + top * TOP_BYTES)
}

/// Properties of a request that decide its memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestSize {
    /// Length of the body. Its parameters take no more.
    pub(crate) body_bytes: usize,
    pub(crate) tokens: usize,
    /// Best tokens to report for each token of the prompt.
    pub(crate) prompt_logprobs: Option<usize>,
}

/// Memory that the requests of an engine share.
pub(crate) struct RequestBudget {
    requests: Arc<PeerBudget>,
    unread: Arc<PeerBudget>,
    guides: Arc<PeerBudget>,
    token_bytes: usize,
}

/// Memory of one request. The last clone gives it back.
#[derive(Debug, Clone)]
pub(crate) struct RequestMemory(Arc<Charges>);

#[derive(Debug)]
struct Charges {
    _request: PeerCharge,
    unread: PeerCharge,
    guide: PeerCharge,
}

impl RequestBudget {
    /// Creates the budget with `requests_bytes` for tokens and parameters, and `guides_bytes` for
    /// constraints.
    pub(crate) fn new(requests_bytes: usize, guides_bytes: usize, page_tokens: u32) -> Self {
        let budget = |bytes: usize| PeerBudget::new(bytes / CHARGE_BYTES);
        Self {
            requests: budget(requests_bytes),
            unread: budget(UNREAD_BYTES_MAX),
            guides: budget(guides_bytes),
            token_bytes: token_bytes(page_tokens as usize),
        }
    }

    /// Memory of constraints, in units of [`CHARGE_BYTES`].
    pub(crate) fn guides(&self) -> Arc<PeerBudget> {
        self.guides.clone()
    }

    /// Maximum charge of the requests of one peer, in bytes.
    pub(crate) fn bytes_max_of_peer(&self) -> u64 {
        (self.requests.units_max_of_peer() as u64).saturating_mul(CHARGE_BYTES as u64)
    }

    /// Charges a request. Returns `None` if the budget or the peer's part of it has no room.
    pub(crate) fn take(&self, peer: PeerAddress, size: RequestSize) -> Option<RequestMemory> {
        // The engine collects the log-probabilities of a prompt, and then copies them into events.
        let logprobs = 2 * logprobs_bytes(size.prompt_logprobs);
        let bytes = REQUEST_BYTES + size.body_bytes + size.tokens * (self.token_bytes + logprobs);
        // A request that is larger than any share is served alone.
        let units = bytes.div_ceil(CHARGE_BYTES).min(self.requests.units_max_of_peer());
        let request = self.requests.of(peer).take(units)?;
        let (unread, guide) = (self.unread.of(peer).charge(), self.guides.of(peer).charge());
        Some(RequestMemory(Arc::new(Charges { _request: request, unread, guide })))
    }
}

impl RequestMemory {
    /// Charges `events` events of `event_bytes` bytes each that the client has not read. The charge
    /// does not fall before the request ends. Only one task may call this. Returns `false` if there
    /// is no room.
    pub(crate) fn keep_unread(&self, events: usize, event_bytes: usize) -> bool {
        let bytes = events.saturating_sub(EVENTS_FREE) * event_bytes;
        self.0.unread.raise_to(bytes.div_ceil(CHARGE_BYTES))
    }

    /// Charges the guide of the request, which has `bytes` bytes. The charge does not fall before
    /// the request ends. Only one task may call this. Returns `false` if there is no room.
    pub(crate) fn keep_guide(&self, bytes: usize) -> bool {
        self.0.guide.raise_to(bytes.div_ceil(CHARGE_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_model::GUIDE_BYTES_MAX;

    fn peer(last: u8) -> PeerAddress {
        PeerAddress::of([10, 0, 0, last].into())
    }

    fn prompt(tokens: usize) -> RequestSize {
        RequestSize { body_bytes: 0, tokens, prompt_logprobs: None }
    }

    #[test]
    fn memory_of_a_token_grows_with_the_keys() {
        assert_eq!([token_bytes(64), token_bytes(16), token_bytes(1)], [25, 28, 88]);
        assert_eq!([event_bytes(None), event_bytes(Some(0)), event_bytes(Some(20))], [160, 208, 368]);
    }

    #[test]
    fn one_address_has_room_for_as_many_full_contexts_as_hold_pages() {
        let context = 131_072;
        let budget = RequestBudget::new(requests_bytes_max(64, context, 32), 0, 32);
        let full = RequestSize { body_bytes: BODY_TOKEN_BYTES * context, ..prompt(context) };
        let held: Vec<RequestMemory> = std::iter::from_fn(|| budget.take(peer(1), full)).collect();
        assert_eq!(held.len(), 2 * 64);
        assert!(budget.take(peer(2), full).is_some(), "another address has a part");
        let of_peer = budget.bytes_max_of_peer() as usize / request_bytes(context, 0, 32);
        assert_eq!(of_peer, held.len(), "as engines tell routers");
        assert_eq!(requests_bytes_max(64, 4096, 32), REQUESTS_BYTES_LEAST);
        assert!(requests_bytes_max(usize::MAX, usize::MAX, 0) > usize::MAX / 2, "no overflow");
    }

    #[test]
    fn requests_beyond_the_budget_are_refused_until_others_end() {
        let budget = RequestBudget::new(REQUESTS_BYTES_LEAST, GUIDES_BYTES_LEAST, 16);
        let large = prompt((32 << 20) / token_bytes(16));
        let held: Vec<RequestMemory> = std::iter::from_fn(|| budget.take(peer(1), large)).collect();
        assert_eq!(held.len(), 5, "192 MiB for one address, and a little more than 32 MiB for each");
        assert!(budget.take(peer(1), prompt(1)).is_some(), "a small one still fits");
        assert!(budget.take(peer(2), large).is_some(), "another address has a part");
        let stream = held[0].clone();
        drop(held);
        let huge = RequestSize { body_bytes: 1 << 30, ..prompt(1) };
        assert!(budget.take(peer(1), huge).is_none(), "a stream is left");
        drop(stream);
        assert!(budget.take(peer(1), huge).is_some(), "served alone");
    }

    #[test]
    fn logprobs_of_a_prompt_count() {
        let budget = RequestBudget::new(REQUESTS_BYTES_LEAST, GUIDES_BYTES_LEAST, 16);
        let units = |size| {
            let _held = budget.take(peer(1), size).unwrap();
            REQUESTS_BYTES_LEAST / CHARGE_BYTES - budget.requests.free()
        };
        let logprobs = RequestSize { prompt_logprobs: Some(20), ..prompt(1000) };
        assert_eq!([units(prompt(1000)), units(logprobs), units(prompt(1000))], [11, 113, 11]);
    }

    #[test]
    fn unread_events_are_charged_beyond_the_free_ones() {
        let budget = RequestBudget::new(REQUESTS_BYTES_LEAST, GUIDES_BYTES_LEAST, 16);
        let of = |last| budget.take(peer(last), prompt(1)).unwrap();
        let (slow, reader) = (of(1), of(1));
        let share = budget.unread.units_max_of_peer() * CHARGE_BYTES / EVENT_BYTES;
        assert!(slow.keep_unread(EVENTS_FREE + share, EVENT_BYTES));
        assert!(!slow.keep_unread(EVENTS_FREE + share + 2 * CHARGE_BYTES, EVENT_BYTES));
        assert!(reader.keep_unread(EVENTS_FREE, EVENT_BYTES), "it reads its answer");
        assert!(!reader.keep_unread(EVENTS_FREE + 1, EVENT_BYTES));
        assert!(of(2).keep_unread(EVENTS_FREE + 1, EVENT_BYTES), "another address has a part");
        drop(slow);
        assert!(reader.keep_unread(EVENTS_FREE + share / 2, EVENT_BYTES));
    }
    #[test]
    fn guides_are_charged_as_they_grow() {
        let budget = RequestBudget::new(REQUESTS_BYTES_LEAST, GUIDES_BYTES_LEAST, 16);
        let of = |last| budget.take(peer(last), prompt(1)).unwrap();
        let first = of(1);
        // The largest guide, and the compiled constraints that are kept.
        assert!(first.keep_guide(GUIDE_BYTES_MAX) && first.keep_guide(1));
        let second = of(1);
        assert!(second.keep_guide(2 * GUIDE_BYTES_MAX), "384 MiB of one address");
        assert!(!of(1).keep_guide(CHARGE_BYTES));
        assert!(of(2).keep_guide(GUIDE_BYTES), "another address has a part");
        drop((first, second));
        assert_eq!(budget.guides.free(), GUIDES_BYTES_LEAST / CHARGE_BYTES);
        assert_eq!(guides_bytes_max(768), 4 << 30, "for larger batches");
        assert!(guides_bytes_max(usize::MAX) > usize::MAX / 2, "no overflow");
    }
}
