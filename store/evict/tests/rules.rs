//! The evictor's rules under every policy, checked against a model without any order.
//!
//! After every step model and evictor have the same resident pages, within capacity and quotas. No
//! evicted page was pinned, had resident children, or was soft-pinned while another page could have
//! made room.

use larder_evict::{
    Evicted, EvictionReason, Evictor, HitDensity, InsertError, Lru, NamespaceIndex, NewPage, PageHandle, Policy, S3Fifo,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const CAPACITY_BYTES: u64 = 60;
const QUOTA_BYTES: u64 = 25;
const LIMITED: NamespaceIndex = NamespaceIndex(1);

#[derive(Debug, Clone)]
enum Step {
    /// A page below the resident one of this number, or a first one.
    Insert {
        parent: Option<usize>,
        bytes: u32,
        limited: bool,
        lives_ms: Option<u64>,
    },
    Touch(usize),
    Remove(usize),
    Pin(usize),
    Unpin(usize),
    SoftPin(usize, bool),
    Wait(u64),
    Quota(u64),
    Floor {
        limited: bool,
        bytes: u64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let insert = (
        proptest::option::weighted(0.7, 0..100usize),
        1..9u32,
        any::<bool>(),
        proptest::option::weighted(0.2, 1..40u64),
    )
        .prop_map(|(parent, bytes, limited, lives_ms)| Step::Insert { parent, bytes, limited, lives_ms });
    let step = prop_oneof![
        12 => insert,
        4 => (0..100usize).prop_map(Step::Touch),
        1 => (0..100usize).prop_map(Step::Remove),
        1 => (0..100usize).prop_map(Step::Pin),
        2 => (0..100usize).prop_map(Step::Unpin),
        2 => (0..100usize, any::<bool>()).prop_map(|(page, soft)| Step::SoftPin(page, soft)),
        1 => (1..30u64).prop_map(Step::Wait),
        1 => (0..60u64).prop_map(Step::Quota),
        1 => (any::<bool>(), 0..CAPACITY_BYTES / 2).prop_map(|(limited, bytes)| Step::Floor { limited, bytes }),
    ];
    proptest::collection::vec(step, 1..400)
}

#[derive(Debug, Clone)]
struct Known {
    handle: PageHandle,
    parent: Option<u32>,
    namespace: NamespaceIndex,
    bytes: u32,
    deadline_ms: u64,
    pins: u32,
    soft: bool,
}

struct Model<P> {
    evictor: Evictor<u32, P>,
    pages: BTreeMap<u32, Known>,
    named: u32,
    now_ms: u64,
    quota_bytes: u64,
    floors: BTreeMap<NamespaceIndex, u64>,
}

impl<P: Policy> Model<P> {
    fn new(policy: P) -> Model<P> {
        let mut evictor = Evictor::new(CAPACITY_BYTES, policy);
        evictor.set_quota(LIMITED, QUOTA_BYTES, &mut Vec::new());
        Model {
            evictor,
            pages: BTreeMap::new(),
            named: 0,
            now_ms: 0,
            quota_bytes: QUOTA_BYTES,
            floors: BTreeMap::new(),
        }
    }

    fn nth(&self, number: usize) -> Option<u32> {
        self.pages.keys().copied().nth(number % self.pages.len().max(1))
    }

    fn children(&self, name: u32) -> usize {
        self.pages.values().filter(|page| page.parent == Some(name)).count()
    }

    fn may_go(&self, name: u32) -> bool {
        self.pages[&name].pins == 0 && self.children(name) == 0
    }

    fn bytes_of(&self, namespace: NamespaceIndex) -> u64 {
        self.pages.values().filter(|page| page.namespace == namespace).map(|page| u64::from(page.bytes)).sum()
    }

    fn is_above_floor(&self, namespace: NamespaceIndex) -> bool {
        self.bytes_of(namespace) > self.floors.get(&namespace).copied().unwrap_or(0)
    }

    /// Applies evictions in this order. `spared` is the parent of the page being inserted.
    fn gone(&mut self, evicted: &[Evicted<u32>], spared: Option<u32>) {
        for gone in evicted {
            assert!(self.may_go(gone.name), "{gone:?} was pinned or had children");
            assert_ne!(Some(gone.name), spared);
            let page = self.pages[&gone.name].clone();
            if gone.reason == EvictionReason::Expired {
                assert!(page.deadline_ms <= self.now_ms);
            } else if page.soft {
                let any = gone.reason == EvictionReason::Capacity && self.floors.is_empty();
                let helps = |other: &Known| any || other.namespace == page.namespace;
                let better = self
                    .pages
                    .iter()
                    .find(|(name, other)| !other.soft && helps(other) && Some(**name) != spared && self.may_go(**name));
                assert!(better.is_none(), "{gone:?} was soft-pinned, {better:?} was not");
            }
            if gone.reason == EvictionReason::Quota {
                assert_eq!(page.namespace, LIMITED);
            }
            if gone.reason == EvictionReason::Capacity && !self.is_above_floor(page.namespace) {
                let may_go = |name: u32| Some(name) != spared && self.may_go(name);
                let above =
                    self.pages.iter().find(|(name, other)| self.is_above_floor(other.namespace) && may_go(**name));
                assert!(above.is_none(), "{gone:?} is of a namespace at its floor, {above:?} is not");
            }
            self.pages.remove(&gone.name);
        }
    }

    fn insert(&mut self, parent: Option<usize>, bytes: u32, limited: bool, lives_ms: Option<u64>) {
        let parent = parent.and_then(|number| self.nth(number));
        let namespace = if limited { LIMITED } else { NamespaceIndex(0) };
        let deadline_ms = lives_ms.map(|lives_ms| self.now_ms + lives_ms);
        let handle = parent.map(|name| self.pages[&name].handle);
        let (name, position) = (self.named, parent.map_or(0, |_| 1));
        let new = NewPage {
            name,
            fingerprint: u64::from(name % 50) + 1,
            parent_fingerprint: parent.map_or(0, |name| u64::from(name % 50) + 1),
            namespace,
            parent: handle,
            position,
            bytes,
            deadline_ms,
            may_refuse: true,
        };
        let mut evicted = Vec::new();
        let outcome = self.evictor.insert(new, self.now_ms, &mut evicted);
        let expired = evicted.iter().take_while(|gone| gone.reason == EvictionReason::Expired).count();
        self.gone(&evicted[..expired], None);
        let spared = parent.filter(|name| self.pages.contains_key(name));
        self.gone(&evicted[expired..], spared);
        match outcome {
            Ok(handle) => {
                self.named += 1;
                let parents_ms = parent.map_or(u64::MAX, |name| self.pages[&name].deadline_ms);
                let deadline_ms = deadline_ms.unwrap_or(u64::MAX).min(parents_ms);
                let page = Known { handle, parent, namespace, bytes, deadline_ms, pins: 0, soft: false };
                self.pages.insert(name, page);
                assert!(!limited || self.bytes_of(LIMITED) <= self.quota_bytes);
            }
            Err(InsertError::Pinned) => {
                let helps = |page: &Known| !limited || page.namespace == LIMITED;
                let missed =
                    self.pages.iter().find(|(name, page)| helps(page) && Some(**name) != spared && self.may_go(**name));
                assert!(missed.is_none(), "{missed:?} could have gone");
            }
            Err(InsertError::ParentGone | InsertError::Expired) => assert!(parent.is_some()),
            Err(InsertError::Refused) => {
                let used: u64 = self.pages.values().map(|page| u64::from(page.bytes)).sum();
                assert!(used + u64::from(bytes) > CAPACITY_BYTES, "there is room");
                let floor = self.floors.get(&namespace).copied().unwrap_or(0);
                assert!(self.bytes_of(namespace) + u64::from(bytes) > floor, "the namespace is within its floor");
                assert!(!limited || self.bytes_of(LIMITED) + u64::from(bytes) <= self.quota_bytes);
            }
            Err(InsertError::TooLarge { .. }) => assert!(u64::from(bytes) > self.quota_bytes),
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Insert { parent, bytes, limited, lives_ms } => self.insert(parent, bytes, limited, lives_ms),
            Step::Wait(ms) => self.now_ms += ms,
            Step::Quota(bytes) => {
                let mut evicted = Vec::new();
                self.quota_bytes = bytes;
                self.evictor.set_quota(LIMITED, bytes, &mut evicted);
                self.gone(&evicted, None);
                let left = self.pages.iter().find(|(name, page)| page.namespace == LIMITED && self.may_go(**name));
                assert!(self.bytes_of(LIMITED) <= bytes || left.is_none(), "{left:?} could have gone");
            }
            Step::Floor { limited, bytes } => {
                let namespace = if limited { LIMITED } else { NamespaceIndex(0) };
                self.evictor.set_floor(namespace, bytes);
                self.floors.insert(namespace, bytes);
            }
            Step::Touch(n) | Step::Remove(n) | Step::Pin(n) | Step::Unpin(n) | Step::SoftPin(n, _) => {
                if let Some(name) = self.nth(n) {
                    self.step_at(step, name);
                }
            }
        }
        self.check();
    }

    fn step_at(&mut self, step: &Step, name: u32) {
        let (children, now_ms) = (self.children(name), self.now_ms);
        let Some(page) = self.pages.get_mut(&name) else { return };
        match step {
            Step::Touch(_) => assert_eq!(self.evictor.touch(page.handle, now_ms), now_ms < page.deadline_ms),
            Step::Pin(_) => {
                page.pins += 1;
                assert!(self.evictor.pin(page.handle));
            }
            Step::Unpin(_) => {
                assert_eq!(self.evictor.unpin(page.handle), page.pins > 0);
                page.pins = page.pins.saturating_sub(1);
            }
            Step::SoftPin(_, soft) => {
                page.soft = *soft;
                assert!(self.evictor.soft_pin(page.handle, *soft));
            }
            _ => {
                assert_eq!(self.evictor.remove(page.handle), Some(name));
                assert!(!self.evictor.contains(page.handle, 0));
                self.pages.remove(&name);
                if children > 0 {
                    let orphans = self.pages.values_mut().filter(|page| page.parent == Some(name));
                    orphans.for_each(|page| page.parent = None);
                }
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.evictor.len(), self.pages.len());
        assert!(self.evictor.used_bytes() <= CAPACITY_BYTES);
        let bytes: u64 = self.pages.values().map(|page| u64::from(page.bytes)).sum();
        assert_eq!(self.evictor.used_bytes(), bytes);
        assert_eq!(self.evictor.namespace_bytes(LIMITED), self.bytes_of(LIMITED));
        for page in self.pages.values() {
            assert_eq!(self.evictor.contains(page.handle, self.now_ms), self.now_ms < page.deadline_ms);
        }
    }
}

fn keeps_the_rules(policy: impl Policy, steps: &[Step]) {
    let mut model = Model::new(policy);
    steps.iter().for_each(|step| model.step(step));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn lru_keeps_the_rules(steps in steps()) {
        keeps_the_rules(Lru::new(), &steps);
    }

    #[test]
    fn s3_fifo_keeps_the_rules(steps in steps()) {
        keeps_the_rules(S3Fifo::new(), &steps);
    }

    #[test]
    fn refusing_policy_keeps_the_rules(steps in steps()) {
        keeps_the_rules(RefusesAll::default(), &steps);
    }

    #[test]
    fn hit_density_keeps_the_rules(steps in steps()) {
        keeps_the_rules(HitDensity::new(7), &steps);
    }
}

#[test]
fn refusals_spare_floors_quotas_and_free_room() {
    let mut evictor = Evictor::new(10, RefusesAll::default());
    let [poor, limited, rich] = [NamespaceIndex(1), NamespaceIndex(2), NamespaceIndex(3)];
    evictor.set_floor(poor, 2);
    evictor.set_quota(limited, 2, &mut Vec::new());
    let mut evicted = Vec::new();
    let mut insert =
        |name, namespace| evictor.insert(NewPage { namespace, ..page(name, None, 0) }, 0, &mut evicted).map(|_| ());
    (0..2).for_each(|name| assert_eq!(insert(name, limited), Ok(())));
    (2..10).for_each(|name| assert_eq!(insert(name, rich), Ok(()), "there is room"));
    assert_eq!(insert(10, rich), Err(InsertError::Refused));
    assert_eq!(insert(14, limited), Ok(()), "its quota makes room");
    assert_eq!([insert(11, poor), insert(12, poor)], [Ok(()); 2], "within the floor");
    assert_eq!(insert(13, poor), Err(InsertError::Refused));
    let needed = NewPage { namespace: rich, may_refuse: false, ..page(15, None, 0) };
    assert!(evictor.insert(needed, 0, &mut Vec::new()).is_ok());
}

/// Negative control: a policy that proposes victims that were not offered to it.
struct AnyPage(Vec<larder_evict::Slot>);

const NEVER: larder_evict::Stamp = larder_evict::Stamp { run: 0, position: std::cmp::Reverse(0) };

impl Policy for AnyPage {
    fn insert(&mut self, slot: larder_evict::Slot, _: &larder_evict::Arrival) {
        self.0.push(slot);
    }
    fn touch(&mut self, _: larder_evict::Slot, _: larder_evict::Stamp) {}
    fn stamp(&self, _: larder_evict::Slot) -> larder_evict::Stamp {
        NEVER
    }
    fn offer(&mut self, _: larder_evict::Slot) {}
    fn withdraw(&mut self, _: larder_evict::Slot) {}
    fn victim(&mut self) -> Option<larder_evict::Slot> {
        self.0.first().copied()
    }
    fn remove(&mut self, slot: larder_evict::Slot, _: larder_evict::Removal) {
        self.0.retain(|other| *other != slot);
    }
    fn memory_bytes(&self) -> usize {
        0
    }
}

/// A policy that refuses every page it is asked about.
#[derive(Default)]
struct RefusesAll(Lru);

impl Policy for RefusesAll {
    fn insert(&mut self, slot: larder_evict::Slot, arrival: &larder_evict::Arrival) {
        self.0.insert(slot, arrival);
    }
    fn touch(&mut self, slot: larder_evict::Slot, stamp: larder_evict::Stamp) {
        self.0.touch(slot, stamp);
    }
    fn stamp(&self, slot: larder_evict::Slot) -> larder_evict::Stamp {
        self.0.stamp(slot)
    }
    fn offer(&mut self, slot: larder_evict::Slot) {
        self.0.offer(slot);
    }
    fn withdraw(&mut self, slot: larder_evict::Slot) {
        self.0.withdraw(slot);
    }
    fn victim(&mut self) -> Option<larder_evict::Slot> {
        self.0.victim()
    }
    fn remove(&mut self, slot: larder_evict::Slot, removal: larder_evict::Removal) {
        self.0.remove(slot, removal);
    }
    fn refuses(&mut self, _: &larder_evict::Arrival) -> bool {
        true
    }
    fn memory_bytes(&self) -> usize {
        0
    }
}

#[test]
#[should_panic(expected = "not evictable")]
fn evictor_panics_on_a_policy_that_breaks_the_rules() {
    let insert = |parent| Step::Insert { parent, bytes: 8, limited: false, lives_ms: None };
    let steps: Vec<Step> = std::iter::once(insert(None)).chain((0..20).map(|n| insert(Some(n)))).collect();
    keeps_the_rules(AnyPage(Vec::new()), &steps);
}

fn page(name: u32, parent: Option<PageHandle>, position: u32) -> NewPage<u32> {
    let namespace = NamespaceIndex(0);
    let fingerprint = u64::from(name) + 1;
    NewPage {
        name,
        fingerprint,
        parent_fingerprint: 0,
        namespace,
        parent,
        position,
        bytes: 1,
        deadline_ms: None,
        may_refuse: true,
    }
}

#[test]
fn sequence_is_evicted_from_its_end() {
    let policies: [Box<dyn Policy>; 3] = [Box::new(Lru::new()), Box::new(S3Fifo::new()), Box::new(HitDensity::new(0))];
    for policy in policies {
        let mut evictor = Evictor::new(4, policy);
        let mut evicted = Vec::new();
        let mut parent = None;
        for name in 0..4 {
            parent = Some(evictor.insert(page(name, parent, name), 0, &mut evicted).unwrap());
        }
        for name in 4..8 {
            let handle = evictor.insert(page(name, None, 0), 0, &mut evicted).unwrap();
            evictor.pin(handle);
        }
        let names: Vec<u32> = evicted.iter().map(|gone| gone.name).collect();
        assert_eq!(names, [3, 2, 1, 0]);
        assert_eq!(evictor.insert(page(8, None, 0), 0, &mut evicted), Err(InsertError::Pinned));
    }
}

#[test]
fn child_never_outlives_its_parent() {
    let mut evictor = Evictor::new(10, Lru::new());
    let mut evicted = Vec::new();
    let first = evictor.insert(NewPage { deadline_ms: Some(50), ..page(0, None, 0) }, 0, &mut evicted).unwrap();
    let second = evictor.insert(NewPage { deadline_ms: Some(90), ..page(1, Some(first), 1) }, 0, &mut evicted).unwrap();
    evictor.pin(second);
    assert!(evictor.touch(second, 49) && !evictor.touch(second, 50));
    evictor.expire(60, &mut evicted);
    assert!(evicted.is_empty(), "a pin holds what is out of date");
    evictor.unpin(second);
    evictor.expire(60, &mut evicted);
    assert_eq!(evicted.iter().map(|gone| gone.name).collect::<Vec<_>>(), [1, 0]);
}

/// Puts one-page sequences of a namespace, as many as fit the tier several times.
fn flood(evictor: &mut Evictor<u32, impl Policy>, namespace: NamespaceIndex, names: std::ops::Range<u32>) -> Vec<u32> {
    let mut evicted = Vec::new();
    for name in names {
        evictor.insert(NewPage { namespace, ..page(name, None, 0) }, 0, &mut evicted).unwrap();
    }
    evicted.iter().map(|gone| gone.name).collect()
}

#[test]
fn flood_of_one_namespace_leaves_the_floors_of_others() {
    let policies: [Box<dyn Policy>; 3] = [Box::new(Lru::new()), Box::new(S3Fifo::new()), Box::new(HitDensity::new(0))];
    for policy in policies {
        let mut evictor = Evictor::new(1000, policy);
        let [small, large, hostile] = [NamespaceIndex(1), NamespaceIndex(2), NamespaceIndex(3)];
        for namespace in [small, large, hostile] {
            evictor.set_floor(namespace, 166);
        }
        flood(&mut evictor, small, 0..100);
        flood(&mut evictor, large, 1000..1900);
        let gone = flood(&mut evictor, hostile, 10_000..20_000);
        assert!(gone.iter().all(|name| *name >= 1000), "all pages of the small namespace are below its floor");
        let bytes = [small, large, hostile].map(|namespace| evictor.namespace_bytes(namespace));
        assert!(bytes[0] == 100 && bytes[1] >= 166 && bytes.iter().sum::<u64>() == 1000, "{bytes:?}");
        // Without floors the flood takes everything.
        for namespace in [small, large] {
            evictor.set_floor(namespace, 0);
        }
        evictor.set_floor(hostile, 500);
        let before = evictor.namespace_bytes(hostile).min(500);
        flood(&mut evictor, NamespaceIndex(4), 30_000..40_000);
        assert_eq!([small, large].map(|namespace| evictor.namespace_bytes(namespace)), [0, 0]);
        assert_eq!(evictor.namespace_bytes(hostile), before);
    }
}

#[test]
fn namespaces_with_pinned_pages_only_do_not_hide_those_that_can_make_room() {
    let mut evictor = Evictor::new(1000, Lru::new());
    let mut evicted = Vec::new();
    let honest = NamespaceIndex(0);
    evictor.set_floor(honest, 100);
    flood(&mut evictor, honest, 0..100);
    // Each of these is further above its floor than any that follows, and its pages are pinned.
    let pinned: Vec<PageHandle> = (1..40)
        .map(|number| {
            let new = NewPage { namespace: NamespaceIndex(number), bytes: 10, ..page(number * 1000, None, 0) };
            let handle = evictor.insert(new, 0, &mut evicted).unwrap();
            evictor.pin(handle);
            handle
        })
        .collect();
    for name in 100_000..110_000 {
        flood(&mut evictor, NamespaceIndex(100 + name % 600), name..name + 1);
    }
    assert_eq!(evictor.namespace_bytes(honest), 100);
    // Without its pin, such a page makes room before all others.
    evictor.unpin(pinned[7]);
    assert_eq!(flood(&mut evictor, NamespaceIndex(100), 0..11).first(), Some(&8000));
}

#[test]
fn namespace_above_its_floor_loses_sequences_from_their_end_and_touched_ones_last() {
    let mut evictor = Evictor::new(9, Lru::new());
    let mut evicted = Vec::new();
    let mut parents = Vec::new();
    for sequence in 0..3 {
        let mut parent = None;
        for position in 0..3 {
            let new = page(10 * sequence + position, parent, position);
            parent = Some(evictor.insert(new, 0, &mut evicted).unwrap());
            parents.extend(parent);
        }
    }
    // The first sequence was used again.
    parents[..3].iter().for_each(|handle| assert!(evictor.touch(*handle, 0)));
    evictor.set_quota(NamespaceIndex(0), 5, &mut evicted);
    assert_eq!(evicted.iter().map(|gone| gone.name).collect::<Vec<_>>(), [12, 11, 10, 22]);
}
