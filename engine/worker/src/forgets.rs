//! Memory of forgets and of the holds that they begin.
//!
//! Invariants:
//! - All forgets in progress and all holds take at most [`forgets_bytes_max`].
//! - At most [`HOLDS_MAX`] holds last at a time.
//! - No address takes all of either.
//! - Holds leave room for the forgets that end them.

use larder_format::{PageKey, page_keys};
use larder_http::{PeerAddress, PeerBudget, PeerCharge};
use std::collections::HashSet;
use std::sync::Arc;

/// Maximum number of holds.
pub(crate) const HOLDS_MAX: usize = 64;
/// Least [`forgets_bytes_max`].
const FORGETS_BYTES_LEAST: usize = 64 << 20;
const CHARGE_BYTES: usize = 4 << 10;
/// Memory of a forget beside its tokens and keys: its task and channels.
const FORGET_BYTES: usize = 16 << 10;
/// Memory of a key: in a list, and in a set that may be half empty.
const KEY_BYTES: usize = 112;

/// Charge of a forget of `tokens` tokens, in units of [`CHARGE_BYTES`].
fn units(tokens: usize, page_tokens: usize) -> usize {
    let keys = (tokens / page_tokens.max(1)).saturating_mul(KEY_BYTES);
    let bytes = tokens.saturating_mul(size_of::<u32>()).saturating_add(keys).saturating_add(FORGET_BYTES);
    bytes.div_ceil(CHARGE_BYTES)
}

/// Maximum memory of forgets and holds in bytes. One address has room for a hold of a full context
/// at least, and for the forget that ends it.
pub(crate) fn forgets_bytes_max(context: usize, page_tokens: usize) -> usize {
    part_bytes_max(context, page_tokens).saturating_mul(2)
}

/// Maximum memory in bytes of forgets that begin holds, and of all others.
fn part_bytes_max(context: usize, page_tokens: usize) -> usize {
    // An address has three quarters of the budget.
    let one = units(context, page_tokens).div_ceil(3).saturating_mul(4);
    one.saturating_mul(CHARGE_BYTES).max(FORGETS_BYTES_LEAST / 2)
}

/// Memory that the forgets of an engine share.
pub(crate) struct ForgetBudget {
    context: usize,
    page_tokens: usize,
    /// Memory of forgets that begin holds.
    hold_bytes: Arc<PeerBudget>,
    /// Memory of all other forgets. With one budget for both, holds could prevent their own ends.
    other_bytes: Arc<PeerBudget>,
    holds: Arc<PeerBudget>,
}

/// A forget that has begun.
pub(crate) struct Forget {
    tokens: Vec<u32>,
    page_tokens: usize,
    charge: ForgetCharge,
}

#[derive(Debug)]
struct ForgetCharge {
    _bytes: PeerCharge,
    /// Absent if the forget begins no hold.
    _hold: Option<PeerCharge>,
}

/// Keys of the pages of a forget. The charge ends with them.
#[derive(Debug)]
pub(crate) struct ForgottenKeys {
    keys: HashSet<PageKey>,
    _charge: ForgetCharge,
}

impl ForgetBudget {
    /// Budget of an engine that holds sequences of `context` tokens.
    pub(crate) fn new(context: usize, page_tokens: usize) -> Self {
        let part = || PeerBudget::new(part_bytes_max(context, page_tokens) / CHARGE_BYTES);
        let (hold_bytes, other_bytes, holds) = (part(), part(), PeerBudget::new(HOLDS_MAX));
        Self { context, page_tokens, hold_bytes, other_bytes, holds }
    }

    /// Charges a forget of a prefix. Returns `None` if the budget or the peer's part of it has no
    /// room. Ignores tokens beyond the context: the engine holds no page of them, and a body has
    /// room for many times as many.
    pub(crate) fn begin(&self, peer: PeerAddress, mut tokens: Vec<u32>, has_hold: bool) -> Option<Forget> {
        tokens.truncate(self.context);
        tokens.shrink_to_fit();
        let hold = if has_hold { Some(self.holds.of(peer).take(1)?) } else { None };
        let bytes = if has_hold { &self.hold_bytes } else { &self.other_bytes };
        let bytes = bytes.of(peer).take(units(tokens.len(), self.page_tokens))?;
        Some(Forget { tokens, page_tokens: self.page_tokens, charge: ForgetCharge { _bytes: bytes, _hold: hold } })
    }
}

impl Forget {
    /// Computes the keys of the whole pages. Hashes all tokens.
    pub(crate) fn keys(self) -> ForgottenKeys {
        let keys = page_keys(&self.tokens, self.page_tokens).into_iter().collect();
        ForgottenKeys { keys, _charge: self.charge }
    }
}

impl ForgottenKeys {
    pub(crate) fn get(&self) -> &HashSet<PageKey> {
        &self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u8) -> PeerAddress {
        PeerAddress::of([10, 0, 0, last].into())
    }

    #[test]
    fn forget_covers_no_more_pages_than_the_context() {
        let budget = ForgetBudget::new(100, 16);
        let keys = |tokens: usize| budget.begin(peer(1), vec![1; tokens], false).unwrap().keys();
        assert_eq!((keys(1000).get().len(), keys(40).get().len()), (6, 2));
    }

    #[test]
    fn holds_of_one_address_leave_some_to_the_next_one() {
        let budget = ForgetBudget::new(100, 16);
        let begin = |last, has_hold| budget.begin(peer(last), vec![1; 40], has_hold);
        let held: Vec<ForgottenKeys> = std::iter::from_fn(|| begin(1, true)).map(Forget::keys).collect();
        assert_eq!(held.len(), HOLDS_MAX / 4 * 3);
        assert!(begin(1, false).is_some(), "the end of a hold");
        assert!(begin(2, true).is_some());
        drop(held);
        assert!(begin(1, true).is_some());
    }

    #[test]
    fn holds_leave_room_for_their_ends() {
        let context = 1 << 20;
        let budget = ForgetBudget::new(context, 1);
        let begin = |has_hold| budget.begin(peer(1), vec![1; context], has_hold);
        let held: Vec<Forget> = std::iter::from_fn(|| begin(true)).collect();
        assert_eq!(held.len(), 1, "it takes all the room for holds");
        assert!(begin(false).is_some());
    }

    #[test]
    fn forgets_are_bounded_in_bytes() {
        let (context, page_tokens) = (1 << 20, 1);
        let budget = ForgetBudget::new(context, page_tokens);
        let begin = |last| budget.begin(peer(last), vec![1; context], false);
        let held: Vec<Forget> = std::iter::from_fn(|| begin(1)).collect();
        assert_eq!(held.len(), 1, "one of a full context takes 116 MiB");
        assert!(forgets_bytes_max(context, page_tokens) >= (116 << 20) * 4 / 3);
        let small = budget.begin(peer(2), vec![1; 1000], false);
        assert!(small.is_some(), "another address has a part");
        assert_eq!(forgets_bytes_max(4096, 32), FORGETS_BYTES_LEAST);
        assert!(forgets_bytes_max(usize::MAX, 0) > usize::MAX / 2, "no overflow");
    }
}
