//! The rules one by one, and all of them against a model that is too simple to be wrong.

mod model;

use super::*;
use larder_evict::Lru;

const UNIT: u32 = 4096;

fn options(pages: u64, write_policy: WritePolicy) -> PolicyOptions {
    PolicyOptions {
        capacity_bytes: pages * u64::from(UNIT),
        dirty_bytes_max: 4 * u64::from(UNIT),
        has_l3: true,
        write_policy,
        write_after_hits: 2,
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

fn page(number: u32) -> PageFacts {
    PageFacts { id: id(1, number), parent: PageKey::NONE, position: 0, generation: 1, bytes: UNIT, expires_unix_ms: 0 }
}

fn behind(parent: u32, number: u32) -> PageFacts {
    PageFacts { parent: key(parent), position: 1, ..page(number) }
}

/// Puts a page and ends the writes that follow.
fn put(policy: &mut Residency, page: PageFacts) -> Decisions {
    let mut out = Decisions::default();
    assert!(policy.reserve(page.bytes));
    assert_eq!(policy.put(page, page.bytes, 0, &mut out), Placed::Stored);
    for id in &out.write {
        policy.written(id, 1, UNIT, true);
    }
    out
}

fn hit(policy: &mut Residency, number: u32) -> Decisions {
    let mut out = Decisions::default();
    assert!(policy.hit(&id(1, number), 1, 0, &mut out));
    out
}

fn pin(policy: &mut Residency, numbers: &[u32], kind: PinKind, until_ms: u64) -> Result<usize, PinRefused> {
    policy.pin(&numbers.iter().map(|&number| id(1, number)).collect(), kind, until_ms)
}

use larder_wire::PinKind;
use std::collections::BTreeSet;

#[test]
fn write_through_writes_what_is_put_and_evicts_without_a_word() {
    let mut policy = Residency::new(options(4, WritePolicy::Through));
    for number in 0..4 {
        assert_eq!(put(&mut policy, page(number)).write, [id(1, number)]);
    }
    let out = put(&mut policy, page(4));
    assert_eq!((out.write, out.evict.len()), (vec![id(1, 4)], 1));
    assert_eq!((policy.len(), policy.in_flight_bytes()), (4, 0));
}

#[test]
fn the_selective_policy_writes_at_the_second_hit_and_drops_what_had_none() {
    let mut policy = Residency::new(options(4, WritePolicy::Selective));
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
fn the_selective_policy_waits_for_budget() {
    let mut policy = Residency::new(options(4, WritePolicy::Selective));
    put(&mut policy, page(0));
    hit(&mut policy, 0);
    (0..4).for_each(|_| assert!(policy.reserve(UNIT)));
    assert!(hit(&mut policy, 0).write.is_empty(), "no budget");
    policy.release(UNIT);
    assert_eq!(hit(&mut policy, 0).write, [id(1, 0)]);
}

#[test]
fn write_back_writes_what_leaves_and_is_busy_while_it_cannot() {
    let mut policy = Residency::new(options(4, WritePolicy::Back));
    (0..4).for_each(|number| assert!(put(&mut policy, page(number)).write.is_empty()));
    assert_eq!(policy.dirty_pages(), 4);
    let mut out = Decisions::default();
    for number in 4..8 {
        assert!(policy.reserve(UNIT));
        policy.put(page(number), UNIT, 0, &mut out);
    }
    assert_eq!(out.write, out.evict.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    assert_eq!(out.write.len(), 4, "each that left is written");
    assert!(!policy.reserve(UNIT), "the budget is all with L3");
    assert!(!policy.loaded(page(99), 0, &mut out), "nor may a read push dirty pages out");
    policy.written(&out.write[0], 1, UNIT, true);
    policy.set_writable(false);
    assert!(!policy.reserve(UNIT), "L2 is full of pages that could not be written");
    policy.set_writable(true);
    assert!(policy.reserve(UNIT));
}

#[test]
fn a_flush_writes_all_that_is_dirty_as_the_budget_allows() {
    let mut policy = Residency::new(options(10, WritePolicy::Back));
    (0..10).for_each(|number| drop(put(&mut policy, page(number))));
    let mut flushed = 0;
    loop {
        let mut out = Decisions::default();
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
fn a_write_that_failed_leaves_the_page_in_l2_and_what_l3_lost_is_written_again() {
    let mut policy = Residency::new(options(4, WritePolicy::Through));
    let mut out = Decisions::default();
    policy.reserve(UNIT);
    policy.put(page(0), UNIT, 0, &mut out);
    policy.written(&id(1, 0), 1, UNIT, false);
    assert_eq!((policy.generation(&id(1, 0)), policy.in_flight_bytes()), (Some(1), 0));
    put(&mut policy, page(1));
    let mut out = Decisions::default();
    policy.lost_on_l3(&id(1, 0), &mut out);
    assert!(out.write.is_empty(), "L3 never had it");
    policy.lost_on_l3(&id(1, 1), &mut out);
    assert_eq!(out.write, [id(1, 1)]);
}

#[test]
fn leaves_go_before_roots() {
    let mut policy = Residency::new(options(3, WritePolicy::Through));
    put(&mut policy, page(0));
    put(&mut policy, behind(0, 1));
    put(&mut policy, page(2));
    hit(&mut policy, 1);
    hit(&mut policy, 2);
    let out = put(&mut policy, page(3));
    assert_eq!(out.evict, [(id(1, 1), Reason::Capacity)], "0 is older and has a page behind it");
}

#[test]
fn a_namespace_stays_in_its_quota() {
    let quota = |namespace: u8, pages: u64| NamespaceQuota {
        namespace: NamespaceId([namespace; 32]).to_string()[..8].parse().unwrap(),
        bytes: pages * u64::from(UNIT),
    };
    let quotas = vec![quota(2, 3)];
    let quota_default = Some(2 * u64::from(UNIT));
    let mut policy = Residency::new(PolicyOptions { quotas, quota_default, ..options(100, WritePolicy::Through) });
    for number in 0..20 {
        for namespace in 1..4 {
            put(&mut policy, PageFacts { id: id(namespace, number), ..page(number) });
        }
    }
    let pages: Vec<u64> = policy.namespaces(10).iter().map(|used| used.pages).collect();
    assert_eq!(pages, [3, 2, 2]);
    // Numbers of namespaces that have no pages any more are taken by others, with their own quotas.
    for number in 0..20 {
        policy.forget(&id(2, number));
    }
    for number in 0..20 {
        put(&mut policy, PageFacts { id: id(9, number), ..page(number) });
    }
    assert!(policy.namespaces(10).iter().all(|used| used.pages == 2 && used.bytes == 2 * u64::from(UNIT)));
}

#[test]
fn pages_end_with_their_time_and_so_do_pins() {
    let mut policy = Residency::new(options(8, WritePolicy::Back));
    put(&mut policy, PageFacts { expires_unix_ms: 100, ..page(0) });
    put(&mut policy, page(1));
    let mut out = Decisions::default();
    policy.tick(99, &mut out);
    assert_eq!(out, Decisions::default());
    policy.tick(100, &mut out);
    assert_eq!((out.evict, out.write), (vec![(id(1, 0), Reason::Expired)], vec![]), "what is over is not written");
    assert_eq!(pin(&mut policy, &[1, 2], PinKind::Hard, 200), Ok(1), "2 is not there");
    let mut out = Decisions::default();
    policy.tick(199, &mut out);
    assert_eq!(policy.pinned(), (1, u64::from(UNIT)));
    policy.tick(200, &mut out);
    assert_eq!(policy.pinned(), (0, 0));
}

#[test]
fn a_page_may_outlive_the_one_before_it() {
    let mut policy = Residency::new(options(8, WritePolicy::Back));
    put(&mut policy, PageFacts { expires_unix_ms: 100, ..page(0) });
    put(&mut policy, behind(0, 1));
    put(&mut policy, PageFacts { expires_unix_ms: 50, ..behind(0, 2) });
    let mut out = Decisions::default();
    policy.tick(60, &mut out);
    policy.tick(100, &mut out);
    assert_eq!(out.evict, [(id(1, 2), Reason::Expired), (id(1, 0), Reason::Expired)]);
    assert!(out.write.is_empty() && policy.generation(&id(1, 1)).is_some());
}

#[test]
fn hard_pins_hold_a_quarter_and_what_is_refused_changes_nothing() {
    let mut policy = Residency::new(options(16, WritePolicy::Through));
    put(&mut policy, page(0));
    (1..6).for_each(|number| drop(put(&mut policy, behind(number - 1, number))));
    put(&mut policy, page(6));
    assert_eq!(pin(&mut policy, &[1], PinKind::Soft, 9), Ok(1));
    assert_eq!(policy.pinned(), (1, 0));
    assert!(pin(&mut policy, &[5], PinKind::Hard, 9).is_err(), "it holds the five before it");
    assert!(pin(&mut policy, &[1, 2, 3, 6], PinKind::Hard, 9).is_err());
    assert_eq!(policy.pinned(), (1, 0), "the soft pin is as it was");
    assert_eq!(pin(&mut policy, &[3], PinKind::Hard, 9), Ok(1));
    assert_eq!(policy.pinned(), (2, 4 * u64::from(UNIT)));
    assert_eq!(pin(&mut policy, &[0, 2], PinKind::Hard, 9), Ok(2), "held already");
    assert!(pin(&mut policy, &[6], PinKind::Hard, 9).is_err());
    assert_eq!(pin(&mut policy, &[0, 3, 4], PinKind::None, 0), Ok(2));
    assert_eq!(policy.pinned(), (2, 3 * u64::from(UNIT)), "2 holds 0 and 1");
    policy.forget(&id(1, 1));
    assert_eq!(policy.pinned().1, u64::from(UNIT), "2 is the first of what is left");
}

#[test]
fn soft_pins_go_last_and_hard_ones_stay() {
    let mut policy = Residency::new(options(16, WritePolicy::Through));
    let names = |namespace, from| (from..from + 4).map(|number| id(namespace, number)).collect::<BTreeSet<PageId>>();
    for id in [names(1, 0), names(1, 4), names(2, 0), names(3, 0)].into_iter().flatten() {
        put(&mut policy, PageFacts { id, ..page(0) });
    }
    policy.pin(&names(1, 0), PinKind::Hard, 9).unwrap();
    for softly in [names(1, 4), names(2, 0), names(3, 0)] {
        assert_eq!(policy.pin(&softly, PinKind::Soft, 9), Ok(4));
    }
    let there = |policy: &Residency, id: &PageId| policy.generation(id).is_some();
    let out = put(&mut policy, page(20));
    assert_eq!(out.evict, [(id(1, 4), Reason::Capacity)], "all others are pinned too");
    assert!(names(1, 0).iter().all(|id| there(&policy, id)));
}

#[test]
fn soft_pins_of_a_namespace_hold_a_quarter_at_most() {
    let mut policy = Residency::new(options(16, WritePolicy::Through));
    (0..8).for_each(|number| drop(put(&mut policy, page(number))));
    put(&mut policy, PageFacts { id: id(2, 0), ..page(0) });
    assert_eq!(pin(&mut policy, &[0, 1, 2], PinKind::Soft, 9), Ok(3));
    let refused = pin(&mut policy, &[3, 4], PinKind::Soft, 9).unwrap_err();
    assert!(refused.to_string().contains("soft pins of a namespace may hold"), "{refused}");
    assert_eq!(policy.pinned().0, 3, "none of the two is pinned");
    assert_eq!(policy.pin(&[id(2, 0)].into(), PinKind::Soft, 9), Ok(1), "another namespace has its own");
    assert_eq!(pin(&mut policy, &[0, 1, 2, 3], PinKind::Soft, 20), Ok(4), "some are pinned already");
    policy.forget(&id(1, 0));
    assert_eq!(pin(&mut policy, &[1], PinKind::None, 0), Ok(1));
    assert_eq!(pin(&mut policy, &[4, 5], PinKind::Soft, 9), Ok(2), "what left or was let go counts no more");
    assert!(pin(&mut policy, &[6], PinKind::Soft, 9).is_err());
    policy.tick(30, &mut Decisions::default());
    assert_eq!(pin(&mut policy, &[4, 5, 6, 7], PinKind::Soft, 90), Ok(4), "nor what is over");
}

#[test]
fn room_is_made_as_far_as_may_be() {
    let mut policy = Residency::new(options(8, WritePolicy::Through));
    (0..6).for_each(|number| drop(put(&mut policy, page(number))));
    let mut out = Decisions::default();
    policy.make_room(3 * UNIT, 0, &mut out);
    assert_eq!((out.evict.len(), policy.len()), (3, 3));
    pin(&mut policy, &[5], PinKind::Hard, 9).unwrap();
    policy.make_room(8 * UNIT, 0, &mut out);
    assert_eq!(policy.len(), 1, "the pinned one");
    assert_eq!(policy.used_bytes(), u64::from(UNIT));
}

#[test]
fn l3_hears_of_some_hits() {
    let mut policy = Residency::new(options(8, WritePolicy::Through));
    put(&mut policy, page(0));
    let told: usize = (0..64).map(|_| hit(&mut policy, 0).touch.len()).sum();
    assert_eq!(told, 4);
}

/// Ten prefixes of fifteen pages are asked for again and again, in turn, and between any two of them sixty pages that
/// never return. Returns how many of the former are found, from the `skip`th round on.
fn hot_hit_rate(mut ask: impl FnMut(PageFacts) -> bool, rounds: u32, skip: u32) -> f64 {
    let (mut hits, mut asked, mut one_off) = (0, 0, 1_000_000);
    for round in 0..rounds {
        let mut walk = |first: u32, pages: u32| {
            let chain = (0..pages).map(|position| match position {
                0 => page(first),
                _ => PageFacts { parent: key(first + position - 1), position, ..page(first + position) },
            });
            chain.map(|page| u32::from(ask(page))).sum::<u32>()
        };
        let found = walk(round % 10 * 100, 15);
        one_off += 100;
        walk(one_off, 60);
        if round >= skip {
            (hits, asked) = (hits + found, asked + 15);
        }
    }
    f64::from(hits) / f64::from(asked)
}

#[test]
fn pages_that_never_return_do_not_wash_out_those_that_do() {
    let mut policy = Residency::new(options(400, WritePolicy::Through));
    let ask = |page: PageFacts| {
        let found = policy.hit(&page.id, 1, 0, &mut Decisions::default());
        if !found {
            put(&mut policy, page);
        }
        found
    };
    let learnt = hot_hit_rate(ask, 3000, 1500);
    assert!(learnt >= 0.9, "{learnt}");

    // The same traffic over LRU: that the above is no easy thing.
    let mut lru = Evictor::new(400 * u64::from(UNIT), Lru::default());
    let mut handles = BTreeMap::new();
    let ask = |page: PageFacts| {
        let found = handles.get(&page.id).is_some_and(|handle| lru.touch(*handle, 0));
        if !found {
            let parent = handles.get(&PageId { key: page.parent, ..page.id }).copied();
            let new = NewPage {
                name: page.id,
                fingerprint: fingerprint(&page.id),
                namespace: NamespaceIndex(0),
                parent: parent.filter(|parent| lru.contains(*parent, 0)),
                position: page.position,
                bytes: UNIT,
                deadline_ms: None,
            };
            handles.insert(page.id, lru.insert(new, 0, &mut Vec::new()).unwrap());
        }
        found
    };
    let lru = hot_hit_rate(ask, 3000, 1500);
    assert!(lru < 0.5, "{lru}");
}
