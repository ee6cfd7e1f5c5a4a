//! Hints: what they change, and what they cannot.

use super::*;
use larder_wire::{Hint, PinKind};

const MINUTE_MS: u64 = 60_000;

fn hint(policy: &mut TestPolicy, ids: &[PageId], advice: Hint) -> (usize, bool) {
    policy.hint(ids, PageHint { ended: true, advice, retain_until_ms: MINUTE_MS }, 1)
}

fn full(pages: u32) -> TestPolicy {
    let mut policy = TestPolicy::new(options(pages.into(), WritePolicy::Through));
    (1..=pages).for_each(|number| _ = put(&mut policy, page(number)));
    policy
}

fn next_evicted(policy: &mut TestPolicy, newcomer: u32) -> Vec<PageId> {
    put(policy, page(newcomer)).evict.into_iter().map(|(id, _)| id).collect()
}

#[test]
fn demoted_page_leaves_first_until_it_is_used_again() {
    let mut policy = full(8);
    assert_eq!(hint(&mut policy, &[id(1, 5), id(1, 99)], Hint::Demote), (1, true));
    assert_eq!(next_evicted(&mut policy, 9), [id(1, 5)]);
    hint(&mut policy, &[id(1, 6)], Hint::Demote);
    hit(&mut policy, 6);
    assert_eq!(next_evicted(&mut policy, 10), [id(1, 1)], "the oldest");
}

#[test]
fn l3_learns_of_hits_when_l2_evicts_a_page_that_was_not_demoted() {
    let mut policy = full(4);
    hit(&mut policy, 1);
    hit(&mut policy, 2);
    hint(&mut policy, &[id(1, 2)], Hint::Demote);
    let outs: Vec<PolicyActions> = (5..9).map(|number| put(&mut policy, page(number))).collect();
    let evicted: Vec<PageId> = outs.iter().flat_map(|out| out.evict.iter().map(|gone| gone.0)).collect();
    assert_eq!(evicted, [2, 3, 4, 1].map(|number| id(1, number)));
    let told: Vec<(PageId, Outlook)> = outs.iter().flat_map(|out| out.touch.iter().copied()).collect();
    assert_eq!(told, [(id(1, 1), Outlook::Unclear)], "the policy has learnt nothing yet");
}

#[test]
fn hint_reaches_pages_of_its_namespace_only() {
    let mut policy = full(8);
    assert_eq!(hint(&mut policy, &[id(2, 5)], Hint::Demote), (0, true));
    assert_eq!(next_evicted(&mut policy, 9), [id(1, 1)]);
}

#[test]
fn end_of_a_session_spares_pages_that_others_continue() {
    let mut policy = TestPolicy::new(options(4, WritePolicy::Through));
    put(&mut policy, page(9));
    put(&mut policy, page(1));
    put(&mut policy, behind(1, 2));
    put(&mut policy, behind(1, 3));
    let before = policy.eviction().counters().demoted;
    assert_eq!(hint(&mut policy, &[id(1, 1), id(1, 3)], Hint::SessionEnded), (2, false));
    assert_eq!(policy.eviction().counters().demoted - before, 1);
    assert_eq!(next_evicted(&mut policy, 10), [id(1, 3)]);
    // Alone, the session would take the page with it.
    assert_eq!(hint(&mut policy, &[id(1, 1), id(1, 2)], Hint::SessionEnded), (2, true));
    assert_eq!(next_evicted(&mut policy, 11), [id(1, 2)]);
    assert_eq!(next_evicted(&mut policy, 12), [id(1, 1)]);
}

#[test]
fn retained_pages_take_at_most_a_quarter_and_expire() {
    let mut policy = full(16);
    let ids: Vec<PageId> = (1..=8).map(|number| id(1, number)).collect();
    assert_eq!(hint(&mut policy, &ids, Hint::Retain), (8, false));
    assert_eq!(hint(&mut policy, &ids[..4], Hint::Retain), (4, true), "the same pages again");
    let kept = |policy: &TestPolicy, now_ms| ids.iter().filter(|id| policy.pin_of(id, now_ms).is_some()).count();
    assert_eq!(kept(&policy, 2), 4);
    for newcomer in 20..60 {
        put(&mut policy, page(newcomer));
    }
    let there = |policy: &TestPolicy| ids.iter().filter(|id| policy.generation(id).is_some()).count();
    assert_eq!(there(&policy), 4);
    policy.tick(MINUTE_MS, &mut PolicyActions::default());
    assert_eq!(kept(&policy, 2), 0);
    for newcomer in 60..80 {
        put(&mut policy, page(newcomer));
    }
    assert_eq!(there(&policy), 0);
}

#[test]
fn hints_end_retention_and_leave_pins_of_clients() {
    let mut policy = full(16);
    let pinned = BTreeSet::from([id(1, 1)]);
    policy.pin(&pinned, PinKind::Soft, 2 * MINUTE_MS).unwrap();
    let ids = [id(1, 1), id(1, 2)];
    hint(&mut policy, &ids, Hint::Retain);
    assert!(policy.pin_of(&ids[1], 2).is_some());
    hint(&mut policy, &ids, Hint::SessionEnded);
    assert_eq!(policy.pin_of(&ids[0], 2).map(|pin| pin.remaining_ms), Some(2 * MINUTE_MS - 2));
    assert_eq!(policy.pin_of(&ids[1], 2), None);
}

#[test]
fn end_of_a_generation_counts_once_until_the_next_use() {
    let mut policy = full(8);
    let ends = |policy: &mut TestPolicy| {
        hint(policy, &[id(1, 5)], Hint::None);
        policy.eviction().counters().ended
    };
    assert_eq!((ends(&mut policy), ends(&mut policy)), (1, 1));
    hit(&mut policy, 5);
    assert_eq!(ends(&mut policy), 2);
}
