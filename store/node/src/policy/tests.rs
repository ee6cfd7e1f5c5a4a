//! Tests of the rules one by one. `model` tests all of them together against plain maps.

mod hints;
mod model;

use super::*;
use crate::places::Peer;
use crate::shares::Shares;
use larder_evict::Lru;
use larder_format::NamespaceId;
use std::collections::BTreeMap;

const UNIT: u32 = 4096;

type TestPolicy = L2Policy<PageInfo>;

impl Resident for PageInfo {
    fn info(&self) -> PageInfo {
        *self
    }

    fn id(&self) -> PageId {
        self.id
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn is(&self, id: &PageId) -> bool {
        self.id == *id
    }
}

fn options(pages: u64, write_policy: WritePolicy) -> PolicyOptions {
    PolicyOptions {
        capacity_bytes: pages * u64::from(UNIT),
        dirty_bytes_max: 4 * u64::from(UNIT),
        has_l3: true,
        write_policy,
        write_after_hits: 2,
        l3_write_bytes_per_day: None,
        quota_default: None,
        quotas: Vec::new(),
        seed: 1,
    }
}

fn id(namespace: u8, number: u32) -> PageId {
    PageId { namespace: NamespaceId([namespace; 32]), key: key(number) }
}

fn key(number: u32) -> PageKey {
    let mut key = [0xee; 32];
    key[..4].copy_from_slice(&number.to_be_bytes());
    PageKey(key)
}

fn page(number: u32) -> PageInfo {
    PageInfo { id: id(1, number), parent: PageKey::NONE, position: 0, generation: 1, bytes: UNIT, expires_unix_ms: 0 }
}

fn behind(parent: u32, number: u32) -> PageInfo {
    PageInfo { parent: key(parent), position: 1, ..page(number) }
}

fn put(policy: &mut TestPolicy, page: PageInfo) -> PolicyActions {
    let mut out = PolicyActions::default();
    assert!(policy.reserve(page.bytes));
    assert_eq!(policy.put(page, page.bytes, 0, &mut out), PutOutcome::Stored);
    for id in &out.write {
        policy.written(id, 1, UNIT, true);
    }
    out
}

fn hit(policy: &mut TestPolicy, number: u32) -> PolicyActions {
    let mut out = PolicyActions::default();
    let hash = policy.hash(&id(1, number));
    assert!(policy.hit(hash, 1, 0, &mut out));
    out
}

fn pin(policy: &mut TestPolicy, numbers: &[u32], kind: PinKind, until_ms: u64) -> Result<usize, PinRefused> {
    policy.pin(&numbers.iter().map(|&number| id(1, number)).collect(), kind, until_ms)
}

use larder_wire::PinKind;

#[test]
fn write_through_writes_every_put_and_evicts_without_a_write() {
    let mut policy = TestPolicy::new(options(4, WritePolicy::Through));
    for number in 0..4 {
        assert_eq!(put(&mut policy, page(number)).write, [id(1, number)]);
    }
    let out = put(&mut policy, page(4));
    assert_eq!((out.write, out.evict.len()), (vec![id(1, 4)], 1));
    assert_eq!((policy.len(), policy.in_flight_bytes()), (4, 0));
}

#[test]
fn selective_policy_writes_at_the_second_hit_and_drops_pages_without_hits() {
    let mut policy = TestPolicy::new(options(4, WritePolicy::Selective));
    for number in 0..4 {
        assert!(put(&mut policy, page(number)).write.is_empty());
    }
    assert!(hit(&mut policy, 0).write.is_empty());
    assert_eq!(hit(&mut policy, 0).write, [id(1, 0)]);
    assert!(hit(&mut policy, 0).write.is_empty(), "once");
    let out = put(&mut policy, page(4));
    assert!(out.write.is_empty() && out.evict.len() == 1, "a page without hits is dropped: {out:?}");
}

#[test]
fn short_write_budget_writes_pages_at_their_second_use() {
    // Four pages an hour, two of them for pages with a second use.
    let budget = Some(24 * 4 * u64::from(UNIT));
    let mut policy =
        TestPolicy::new(PolicyOptions { l3_write_bytes_per_day: budget, ..options(8, WritePolicy::Through) });
    assert_eq!((0..4).map(|number| put(&mut policy, page(number)).write.len()).collect::<Vec<_>>(), [1, 1, 0, 0]);
    assert_eq!(hit(&mut policy, 2).write, [id(1, 2)]);
    policy.written(&id(1, 2), 1, UNIT, true);
    assert!(hit(&mut policy, 2).write.is_empty(), "once");
    assert_eq!(hit(&mut policy, 3).write, [id(1, 3)]);
    assert!(put(&mut policy, page(4)).write.is_empty() && hit(&mut policy, 4).write.is_empty(), "it is spent");
    assert_eq!(policy.writes_denied(), 4);
}

#[test]
fn spent_write_budget_lets_dirty_pages_go() {
    let budget = Some(24 * 2 * u64::from(UNIT));
    let mut policy = TestPolicy::new(PolicyOptions { l3_write_bytes_per_day: budget, ..options(2, WritePolicy::Back) });
    let writes = (0..6).map(|number| put(&mut policy, page(number)).write.len());
    assert_eq!(writes.sum::<usize>(), 1, "the other half is for pages with hits");
    assert_eq!((policy.len(), policy.in_flight_bytes()), (2, 0));
}

#[test]
fn selective_policy_waits_for_budget() {
    let mut policy = TestPolicy::new(options(4, WritePolicy::Selective));
    put(&mut policy, page(0));
    hit(&mut policy, 0);
    (0..4).for_each(|_| assert!(policy.reserve(UNIT)));
    assert!(hit(&mut policy, 0).write.is_empty(), "no budget");
    policy.release(UNIT);
    assert_eq!(hit(&mut policy, 0).write, [id(1, 0)]);
}

#[test]
fn write_back_writes_evicted_pages_and_is_busy_while_it_cannot() {
    let mut policy = TestPolicy::new(options(4, WritePolicy::Back));
    (0..4).for_each(|number| assert!(put(&mut policy, page(number)).write.is_empty()));
    assert_eq!(policy.dirty_pages(), 4);
    let mut out = PolicyActions::default();
    for number in 4..8 {
        assert!(policy.reserve(UNIT));
        policy.put(page(number), UNIT, 0, &mut out);
    }
    assert_eq!(out.write, out.evict.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    assert_eq!(out.write.len(), 4, "each evicted page is written");
    assert!(!policy.reserve(UNIT), "writes to L3 use the whole budget");
    assert!(!policy.loaded(page(99), false, 0, &mut out), "nor may a read push dirty pages out");
    policy.written(&out.write[0], 1, UNIT, true);
    policy.set_writable(false);
    assert!(!policy.reserve(UNIT), "L2 is full of pages that could not be written");
    policy.set_writable(true);
    assert!(policy.reserve(UNIT));
}

#[test]
fn flush_writes_all_dirty_pages_as_the_budget_allows() {
    let mut policy = TestPolicy::new(options(10, WritePolicy::Back));
    (0..10).for_each(|number| drop(put(&mut policy, page(number))));
    let mut flushed = 0;
    loop {
        let mut out = PolicyActions::default();
        let all_begun = policy.flush(&mut out);
        assert!(out.write.len() <= 4 && out.evict.is_empty());
        flushed += out.write.len();
        out.write.iter().for_each(|id| policy.written(id, 1, UNIT, true));
        if all_begun {
            break;
        }
    }
    assert_eq!((flushed, policy.dirty_pages(), policy.in_flight_bytes(), policy.len()), (10, 0, 0, 10));
}

#[test]
fn a_failed_write_leaves_the_page_in_l2_and_a_page_lost_on_l3_is_written_again() {
    let mut policy = TestPolicy::new(options(4, WritePolicy::Through));
    let mut out = PolicyActions::default();
    policy.reserve(UNIT);
    policy.put(page(0), UNIT, 0, &mut out);
    policy.written(&id(1, 0), 1, UNIT, false);
    assert_eq!((policy.generation(&id(1, 0)), policy.in_flight_bytes()), (Some(1), 0));
    put(&mut policy, page(1));
    let mut out = PolicyActions::default();
    policy.lost_on_l3(&id(1, 0), &mut out);
    assert!(out.write.is_empty(), "L3 never had it");
    policy.lost_on_l3(&id(1, 1), &mut out);
    assert_eq!(out.write, [id(1, 1)]);
}

#[test]
fn children_are_evicted_before_parents() {
    let mut policy = TestPolicy::new(options(3, WritePolicy::Through));
    put(&mut policy, page(0));
    put(&mut policy, behind(0, 1));
    put(&mut policy, page(2));
    hit(&mut policy, 1);
    hit(&mut policy, 2);
    let out = put(&mut policy, page(3));
    assert_eq!(out.evict, [(id(1, 1), EvictionReason::Capacity)], "0 is older and has a page behind it");
}

#[test]
fn a_namespace_stays_within_its_quota() {
    let quota = |namespace: u8, pages: u64| NamespaceQuota {
        namespace: NamespaceId([namespace; 32]).to_string()[..8].parse().unwrap(),
        bytes: pages * u64::from(UNIT),
    };
    let quotas = vec![quota(2, 3)];
    let quota_default = Some(2 * u64::from(UNIT));
    let mut policy = TestPolicy::new(PolicyOptions { quotas, quota_default, ..options(100, WritePolicy::Through) });
    for number in 0..20 {
        for namespace in 1..4 {
            put(&mut policy, PageInfo { id: id(namespace, number), ..page(number) });
        }
    }
    let pages: Vec<u64> = policy.namespaces(10).iter().map(|used| used.pages).collect();
    assert_eq!(pages, [3, 2, 2]);
    // The index of a namespace without pages goes to another one, which has its own quota.
    for number in 0..20 {
        policy.forget(&id(2, number));
    }
    for number in 0..20 {
        put(&mut policy, PageInfo { id: id(9, number), ..page(number) });
    }
    assert!(policy.namespaces(10).iter().all(|used| used.pages == 2 && used.bytes == 2 * u64::from(UNIT)));
}

#[test]
fn pages_and_pins_expire() {
    let mut policy = TestPolicy::new(options(8, WritePolicy::Back));
    put(&mut policy, PageInfo { expires_unix_ms: 100, ..page(0) });
    put(&mut policy, page(1));
    let mut out = PolicyActions::default();
    policy.tick(99, &mut out);
    assert_eq!(out, PolicyActions::default());
    policy.tick(100, &mut out);
    assert_eq!(
        (out.evict, out.write),
        (vec![(id(1, 0), EvictionReason::Expired)], vec![]),
        "an expired page is not written"
    );
    assert_eq!(pin(&mut policy, &[1, 2], PinKind::Hard, 200), Ok(1), "2 is not there");
    let mut out = PolicyActions::default();
    policy.tick(199, &mut out);
    assert_eq!(policy.pinned(), (1, u64::from(UNIT)));
    policy.tick(200, &mut out);
    assert_eq!(policy.pinned(), (0, 0));
}

#[test]
fn a_page_may_outlive_its_parent() {
    let mut policy = TestPolicy::new(options(8, WritePolicy::Back));
    put(&mut policy, PageInfo { expires_unix_ms: 100, ..page(0) });
    put(&mut policy, behind(0, 1));
    put(&mut policy, PageInfo { expires_unix_ms: 50, ..behind(0, 2) });
    let mut out = PolicyActions::default();
    policy.tick(60, &mut out);
    policy.tick(100, &mut out);
    assert_eq!(out.evict, [(id(1, 2), EvictionReason::Expired), (id(1, 0), EvictionReason::Expired)]);
    assert!(out.write.is_empty() && policy.generation(&id(1, 1)).is_some());
}

#[test]
fn hard_pins_keep_at_most_a_quarter_and_a_refusal_changes_nothing() {
    let mut policy = TestPolicy::new(options(16, WritePolicy::Through));
    put(&mut policy, page(0));
    (1..6).for_each(|number| drop(put(&mut policy, behind(number - 1, number))));
    put(&mut policy, page(6));
    assert_eq!(pin(&mut policy, &[1], PinKind::Soft, 9), Ok(1));
    assert_eq!(policy.pinned(), (1, 0));
    assert!(pin(&mut policy, &[5], PinKind::Hard, 9).is_err(), "it keeps its five ancestors");
    assert!(pin(&mut policy, &[1, 2, 3, 6], PinKind::Hard, 9).is_err());
    assert_eq!(policy.pinned(), (1, 0), "the soft pin is as it was");
    assert_eq!(pin(&mut policy, &[3], PinKind::Hard, 9), Ok(1));
    assert_eq!(policy.pinned(), (2, 4 * u64::from(UNIT)));
    assert_eq!(pin(&mut policy, &[0, 2], PinKind::Hard, 9), Ok(2), "kept already");
    assert!(pin(&mut policy, &[6], PinKind::Hard, 9).is_err());
    assert_eq!(pin(&mut policy, &[0, 3, 4], PinKind::None, 0), Ok(2));
    assert_eq!(policy.pinned(), (2, 3 * u64::from(UNIT)), "2 keeps 0 and 1");
    policy.forget(&id(1, 1));
    assert_eq!(policy.pinned().1, u64::from(UNIT), "2 is a root now");
}

#[test]
fn soft_pinned_pages_go_last_and_hard_pinned_pages_stay() {
    let mut policy = TestPolicy::new(options(16, WritePolicy::Through));
    let names = |namespace, from| (from..from + 4).map(|number| id(namespace, number)).collect::<BTreeSet<PageId>>();
    for id in [names(1, 0), names(1, 4), names(2, 0), names(3, 0)].into_iter().flatten() {
        put(&mut policy, PageInfo { id, ..page(0) });
    }
    policy.pin(&names(1, 0), PinKind::Hard, 9).unwrap();
    for softly in [names(1, 4), names(2, 0), names(3, 0)] {
        assert_eq!(policy.pin(&softly, PinKind::Soft, 9), Ok(4));
    }
    let there = |policy: &TestPolicy, id: &PageId| policy.generation(id).is_some();
    let out = put(&mut policy, page(20));
    assert_eq!(out.evict, [(id(1, 4), EvictionReason::Capacity)], "all others are pinned too");
    assert!(names(1, 0).iter().all(|id| there(&policy, id)));
}

/// Lets these namespaces share all floors equally.
fn set_equal_floors(policy: &mut TestPolicy, namespaces: &[u8]) {
    let mut shares = Shares::default();
    namespaces.iter().for_each(|namespace| shares.join(NamespaceId([*namespace; 32]), Peer::Local));
    let capacity = policy.capacity_bytes();
    let before: Vec<_> = policy.namespaces.floors().map(|(namespace, _)| (namespace, 0)).collect();
    policy.set_floors(&before);
    policy.set_floors(&shares.changes_of_l2(capacity, usize::MAX));
}

/// Hard pins pages of a namespace one by one, and returns how many.
fn pin_all(policy: &mut TestPolicy, namespace: u8) -> usize {
    (0..100).take_while(|number| policy.pin(&[id(namespace, *number)].into(), PinKind::Hard, 9) == Ok(1)).count()
}

#[test]
fn hard_pins_of_a_namespace_leave_the_floors_of_others() {
    let mut policy = TestPolicy::new(options(400, WritePolicy::Through));
    for namespace in 1..4 {
        (0..100).for_each(|number| drop(put(&mut policy, PageInfo { id: id(namespace, number), ..page(number) })));
    }
    set_equal_floors(&mut policy, &[1]);
    assert_eq!(pin_all(&mut policy, 1), 75, "alone: three quarters of the quarter");
    set_equal_floors(&mut policy, &[1, 2]);
    assert_eq!(pin_all(&mut policy, 2), 25, "its floor: a quarter of the pinnable pages");
    set_equal_floors(&mut policy, &[1, 2, 3]);
    assert_eq!(pin_all(&mut policy, 3), 0, "nothing is left until the first pins expire");
    // The first namespace may pin 41 pages now. It keeps and renews its 75, and adds none.
    assert_eq!(policy.pin(&(0..75).map(|n| id(1, n)).collect(), PinKind::Hard, 9), Ok(75));
    assert!(policy.pin(&[id(1, 75)].into(), PinKind::Hard, 9).is_err());
    policy.tick(9, &mut PolicyActions::default());
    assert_eq!(policy.pinned(), (0, 0));
    // All three are known now: in any order, each finds its floor.
    assert_eq!(pin_all(&mut policy, 1), 16 + 50);
    assert_eq!([pin_all(&mut policy, 2), pin_all(&mut policy, 3)], [17, 16], "a sixth of 100");
    assert_eq!(policy.hard_pinned_bytes(&NamespaceId([2; 32])), 17 * u64::from(UNIT));
    set_equal_floors(&mut policy, &[1, 2, 3, 4]);
    policy.tick(99, &mut PolicyActions::default());
    let pages: Vec<u64> = policy.namespaces(9).iter().map(|used| used.floor_bytes / u64::from(UNIT)).collect();
    assert_eq!(pages, [50, 50, 50]);
}

#[test]
fn burst_of_another_namespace_evicts_no_page_below_the_floor() {
    for write_policy in [WritePolicy::Through, WritePolicy::Back] {
        let mut policy = TestPolicy::new(options(1000, write_policy));
        set_equal_floors(&mut policy, &[1, 2]);
        (0..100).for_each(|number| drop(put(&mut policy, page(number))));
        for number in 0..10_000 {
            put(&mut policy, PageInfo { id: id(2, number), ..page(number) });
        }
        assert!((0..100).all(|number| policy.generation(&id(1, number)).is_some()), "{write_policy}");
        // A namespace that is not in use has no floor.
        set_equal_floors(&mut policy, &[2]);
        for number in 10_000..12_000 {
            put(&mut policy, PageInfo { id: id(2, number), ..page(number) });
        }
        assert!((0..100).all(|number| policy.generation(&id(1, number)).is_none()), "{write_policy}");
    }
}

#[test]
fn quota_of_an_operator_bounds_the_floor() {
    let quotas = vec![NamespaceQuota { namespace: "0101".parse().unwrap(), bytes: 50 * u64::from(UNIT) }];
    let mut policy = TestPolicy::new(PolicyOptions { quotas, ..options(1000, WritePolicy::Through) });
    set_equal_floors(&mut policy, &[1, 2]);
    for number in 0..3000 {
        put(&mut policy, page(number));
        put(&mut policy, PageInfo { id: id(2, number), ..page(number) });
    }
    let uses = policy.namespaces(9);
    let of = |namespace: u8| uses.iter().find(|used| used.namespace == NamespaceId([namespace; 32])).unwrap();
    assert_eq!((of(1).pages, of(1).floor_bytes), (50, 50 * u64::from(UNIT)));
    assert_eq!((of(2).pages, of(2).floor_bytes), (950, 250 * u64::from(UNIT)));
}

#[test]
fn soft_pins_of_a_namespace_hold_at_most_a_quarter() {
    let mut policy = TestPolicy::new(options(16, WritePolicy::Through));
    (0..8).for_each(|number| drop(put(&mut policy, page(number))));
    put(&mut policy, PageInfo { id: id(2, 0), ..page(0) });
    assert_eq!(pin(&mut policy, &[0, 1, 2], PinKind::Soft, 9), Ok(3));
    let refused = pin(&mut policy, &[3, 4], PinKind::Soft, 9).unwrap_err();
    assert!(refused.to_string().contains("soft pins of a namespace may hold at most"), "{refused}");
    assert_eq!(policy.pinned().0, 3, "none of the two is pinned");
    assert_eq!(policy.pin(&[id(2, 0)].into(), PinKind::Soft, 9), Ok(1), "another namespace has its own");
    assert_eq!(pin(&mut policy, &[0, 1, 2, 3], PinKind::Soft, 20), Ok(4), "some are pinned already");
    policy.forget(&id(1, 0));
    assert_eq!(pin(&mut policy, &[1], PinKind::None, 0), Ok(1));
    assert_eq!(pin(&mut policy, &[4, 5], PinKind::Soft, 9), Ok(2), "forgotten and unpinned pages no longer count");
    assert!(pin(&mut policy, &[6], PinKind::Soft, 9).is_err());
    policy.tick(30, &mut PolicyActions::default());
    assert_eq!(pin(&mut policy, &[4, 5, 6, 7], PinKind::Soft, 90), Ok(4), "expired pins no longer count");
}

#[test]
fn make_room_evicts_as_far_as_pins_allow() {
    let mut policy = TestPolicy::new(options(8, WritePolicy::Through));
    (0..6).for_each(|number| drop(put(&mut policy, page(number))));
    let mut out = PolicyActions::default();
    policy.make_room(3 * UNIT, 0, &mut out);
    assert_eq!((out.evict.len(), policy.len()), (3, 3));
    pin(&mut policy, &[5], PinKind::Hard, 9).unwrap();
    policy.make_room(8 * UNIT, 0, &mut out);
    assert_eq!(policy.len(), 1, "the pinned one");
    assert_eq!(policy.used_bytes(), u64::from(UNIT));
}

#[test]
fn pin_ends_on_l3_when_its_page_leaves_l2() {
    let mut policy = TestPolicy::new(options(8, WritePolicy::Through));
    (0..6).for_each(|number| drop(put(&mut policy, page(number))));
    assert_eq!(pin(&mut policy, &[5], PinKind::Soft, 9), Ok(1));
    let mut out = PolicyActions::default();
    policy.make_room(5 * UNIT, 0, &mut out);
    assert_eq!((policy.len(), out.unpin.len()), (1, 0), "the pinned page is the last");
    policy.make_room(UNIT, 0, &mut out);
    assert_eq!((policy.len(), out.unpin), (0, vec![id(1, 5)]));
}

#[test]
fn make_room_evicts_dirty_pages_as_far_as_the_budget_goes() {
    let mut policy = TestPolicy::new(options(8, WritePolicy::Back));
    (0..8).for_each(|number| drop(put(&mut policy, page(number))));
    assert!(policy.reserve(3 * UNIT), "a quarter of the budget is left");
    let mut out = PolicyActions::default();
    policy.make_room(8 * UNIT, 0, &mut out);
    assert_eq!((out.evict.len(), out.write.len(), policy.in_flight_bytes()), (1, 1, 4 * u64::from(UNIT)));
    policy.make_room(UNIT, 0, &mut out);
    assert_eq!(out.evict.len(), 1, "the budget is spent");
    policy.set_writable(false);
    policy.written(&out.write[0], 0, UNIT, true);
    policy.make_room(UNIT, 0, &mut out);
    assert_eq!(out.evict.len(), 1, "no page could be written");
}

#[test]
fn read_that_was_announced_is_no_second_use() {
    for (reads, evicted) in [(0, 1), (1, 1), (2, 2)] {
        let mut policy = TestPolicy::new(options(2, WritePolicy::Through));
        for number in [1, 2] {
            assert!(policy.loaded(page(number), true, 0, &mut PolicyActions::default()));
        }
        policy.announce_read(&id(1, 1));
        (0..reads).for_each(|_| _ = hit(&mut policy, 1));
        assert_eq!(put(&mut policy, page(3)).evict, [(id(1, evicted), EvictionReason::Capacity)], "{reads} reads");
    }
}

#[test]
fn every_sixteenth_hit_touches_l3() {
    let mut policy = TestPolicy::new(options(8, WritePolicy::Through));
    put(&mut policy, page(0));
    let told: usize = (0..64).map(|_| hit(&mut policy, 0).touch.len()).sum();
    assert_eq!(told, 4);
}

/// Requests ten prefixes of fifteen pages in turn, and between any two of them sixty pages that
/// never return. Returns the hit rate of the prefixes from round `skip` on.
fn hot_hit_rate(mut request: impl FnMut(PageInfo) -> bool, rounds: u32, skip: u32) -> f64 {
    let mut hits = 0;
    let mut requested = 0;
    let mut one_off = 1_000_000;
    for round in 0..rounds {
        let mut walk = |first: u32, pages: u32| {
            let chain = (0..pages).map(|position| match position {
                0 => page(first),
                _ => PageInfo { parent: key(first + position - 1), position, ..page(first + position) },
            });
            chain.map(|page| u32::from(request(page))).sum::<u32>()
        };
        let found = walk(round % 10 * 100, 15);
        one_off += 100;
        walk(one_off, 60);
        if round >= skip {
            hits += found;
            requested += 15;
        }
    }
    f64::from(hits) / f64::from(requested)
}

/// Requests a page, and puts it after a miss. Returns the writes of the put, or `None` for a hit.
fn request(policy: &mut TestPolicy, page: PageInfo, now_ms: u64) -> Option<Vec<PageId>> {
    let mut out = PolicyActions::default();
    let hash = policy.hash(&page.id);
    if policy.hit(hash, 1, now_ms, &mut out) {
        return None;
    }
    assert!(policy.reserve(page.bytes));
    assert_eq!(policy.put(page, page.bytes, now_ms, &mut out), PutOutcome::Stored);
    out.write.iter().for_each(|id| policy.written(id, 1, UNIT, true));
    Some(out.write)
}

#[test]
fn l3_takes_the_pages_that_l2_refuses() {
    // Fewer than the returning pages, so that none of them makes room for a one-off page.
    let mut policy = TestPolicy::new(options(100, WritePolicy::Through));
    let mut now_ms = 0;
    let mut past_l2 = 0;
    let request = |page: PageInfo| {
        now_ms += 10;
        let written = request(&mut policy, page, now_ms);
        if let Some(written) = &written {
            assert_eq!(*written, [page.id]);
            past_l2 += u64::from(policy.generation(&page.id).is_none());
        }
        written.is_none()
    };
    hot_hit_rate(request, 3000, 1500);
    assert!(past_l2 > 1000, "{past_l2}");
    assert_eq!((policy.eviction().counters().refused, policy.in_flight_bytes()), (past_l2, 0));
}

#[test]
fn l2_refuses_pages_of_low_value_that_a_get_reads_from_l3_and_none_of_a_lease() {
    let mut policy = TestPolicy::new(options(100, WritePolicy::Through));
    let mut now_ms = 0;
    let mut past_l2 = 0;
    let request = |page: PageInfo| {
        now_ms += 10;
        let mut out = PolicyActions::default();
        let found = policy.hit(policy.hash(&page.id), 1, now_ms, &mut out);
        if !found {
            past_l2 += u64::from(!policy.loaded(page, true, now_ms, &mut out));
            assert!(out.write.is_empty(), "L3 has the page");
        }
        found
    };
    hot_hit_rate(request, 3000, 1500);
    assert!(past_l2 > 1000, "{past_l2}");
    assert_eq!(policy.eviction().counters().refused, past_l2);
    for number in 0..200 {
        assert!(policy.loaded(page(5_000_000 + number), false, now_ms, &mut PolicyActions::default()));
    }
}

#[test]
fn one_off_pages_do_not_evict_returning_pages() {
    let mut policy = TestPolicy::new(options(400, WritePolicy::Through));
    let mut now_ms = 0;
    // L3 takes the pages that L2 refuses.
    let with_l3 = |page: PageInfo| {
        now_ms += 10;
        request(&mut policy, page, now_ms).is_none()
    };
    let learnt = hot_hit_rate(with_l3, 3000, 1500);
    assert!(learnt >= 0.9, "{learnt}");

    // Without an L3 no tier would keep a refused page.
    let mut alone = TestPolicy::new(PolicyOptions { has_l3: false, ..options(400, WritePolicy::Through) });
    let without_l3 = |page: PageInfo| {
        now_ms += 10;
        let mut out = PolicyActions::default();
        let found = alone.hit(alone.hash(&page.id), 1, now_ms, &mut out);
        if !found {
            assert!(alone.reserve(page.bytes));
            assert_eq!(alone.put(page, page.bytes, now_ms, &mut out), PutOutcome::Stored);
            assert!(alone.generation(&page.id).is_some());
        }
        found
    };
    assert!(hot_hit_rate(without_l3, 3000, 1500) >= 0.9);

    // LRU fails on the same traffic, which proves that the traffic is hard.
    let mut lru = Evictor::new(400 * u64::from(UNIT), Lru::default());
    let mut handles = BTreeMap::new();
    let request = |page: PageInfo| {
        let found = handles.get(&page.id).is_some_and(|handle| lru.touch(*handle, 0));
        if !found {
            let parent = handles.get(&PageId { key: page.parent, ..page.id }).copied();
            let new = NewPage {
                name: page.id,
                fingerprint: page_hash(1, &page.id),
                parent_fingerprint: 0,
                namespace: NamespaceIndex(0),
                parent: parent.filter(|parent| lru.contains(*parent, 0)),
                position: page.position,
                bytes: UNIT,
                deadline_ms: None,
                may_refuse: true,
            };
            handles.insert(page.id, lru.insert(new, 0, &mut Vec::new()).unwrap());
        }
        found
    };
    let lru = hot_hit_rate(request, 3000, 1500);
    assert!(lru < 0.5, "{lru}");
}
