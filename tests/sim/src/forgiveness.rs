//! Bounds on the exemptions that the oracles grant.
//!
//! An oracle that forgives too much proves nothing. Both CI and the nightly runs fail above these
//! bounds. They grow with the operations, and are about twice the usual numbers.

use crate::faults::Profile;
use crate::run::{Options, Scope, Summary};

/// Exemptions in a million operations, by the scope and the counter. Others are not granted.
const MOST: [(Scope, &str, u64); 16] = [
    (Scope::L3, "forgiven: durable pages of failing devices", 15_000),
    (Scope::L3, "forgiven: durable pages of a full index", 600),
    (Scope::L3, "forgiven: suspect key", 40),
    (Scope::Node, "forgiven: damage by failing memory", 4_200),
    (Scope::Node, "forgiven: durable pages of failing devices", 9_400),
    (Scope::Node, "forgiven: log stopped", 110),
    (Scope::Node, "forgiven: recovery of a failing device", 30),
    (Scope::Node, "forgiven: suspect key", 130),
    (Scope::Wire, "forgiven: damage by failing memory", 1_400),
    (Scope::Wire, "forgiven: damage in transit", 10_500),
    (Scope::Wire, "forgiven: log stopped", 180),
    (Scope::Wire, "forgiven: lost pages of failing nodes", 700),
    (Scope::Wire, "forgiven: pages evicted during a request", 100),
    (Scope::Wire, "forgiven: progress of failing nodes", 1_800),
    (Scope::Wire, "forgiven: refusals by an old protocol", 110),
    (Scope::Wire, "forgiven: suspect key", 180),
];

/// Exemptions that a run of any length may have: its first seeds may have more than others.
const SLACK: u64 = 30;

/// Callers of a thousand that return as told and are refused again. The promise is one of ten.
const IN_VAIN_PER_MILLE: u64 = 100;

/// Returns a description of each bound that a run exceeds.
pub fn excess(summary: &Summary, options: &Options) -> Vec<String> {
    // Most exemptions belong to one profile. A run with that one alone has them in every seed.
    let profiles = if options.profile.is_some() { Profile::EVERY.len() as u64 } else { 1 };
    let bound = |counter: &str| {
        let listed = MOST.iter().find(|(scope, listed, _)| *scope == options.scope && *listed == counter);
        listed.map_or(0, |(_, _, most)| SLACK + most * profiles * summary.operations.div_ceil(1_000) / 1_000)
    };
    let forgiven = summary.forgiven().filter(|&(counter, count)| count > bound(counter));
    let mut excess: Vec<String> =
        forgiven.map(|(counter, count)| format!("{counter}: {count} times, more than {}", bound(counter))).collect();
    let (vain, successful) = (summary.count("returns in vain"), summary.count("returns that got in"));
    if vain > (vain + successful) * IN_VAIN_PER_MILLE / 1_000 + 1 {
        excess.push(format!("returns in vain: {vain}, and {successful} returns that got in"));
    }
    excess
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(operations: u64, counts: &[(&'static str, u64)]) -> Summary {
        Summary { operations, counts: counts.iter().copied().collect(), ..Summary::default() }
    }

    #[test]
    fn exemptions_are_bounded_by_scope_and_operations() {
        let wire = Options { scope: Scope::Wire, ..Options::default() };
        let stopped = |count| summary(1_000_000, &[("forgiven: log stopped", count)]);
        assert!(excess(&stopped(210), &wire).is_empty());
        assert_eq!(excess(&stopped(211), &wire).len(), 1);
        assert_eq!(excess(&stopped(1), &Options::default()).len(), 1, "the log alone has no such exemption");
        assert_eq!(excess(&summary(1_000_000, &[("forgiven: something new", 1)]), &wire).len(), 1);
        let one = Options { profile: Some(Profile::Errors), ..wire };
        assert!(excess(&stopped(6 * 180 + 30), &one).is_empty());
    }

    #[test]
    fn one_of_ten_callers_may_return_in_vain() {
        let returns = |vain| summary(1, &[("returns in vain", vain), ("returns that got in", 180)]);
        assert!(excess(&returns(20), &Options::default()).is_empty());
        assert_eq!(excess(&returns(25), &Options::default()).len(), 1);
    }
}
