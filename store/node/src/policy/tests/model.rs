//! Random sequences of calls, checked against a model of plain maps.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const PAGES: u64 = 12;
const BUDGET: u64 = 5 * UNIT as u64;
const UNITS_MAX: u32 = 3;

#[derive(Debug, Clone)]
enum Call {
    Put { number: u32, parent: u32, units: u32, ttl: u64 },
    Load { number: u32, parent: u32 },
    Hit(u32),
    Written { nth: usize, ok: bool },
    Forget(u32),
    Pin { numbers: Vec<u32>, kind: PinKind, ttl: u64 },
    Tick(u64),
    MakeRoom(u32),
    Writable(bool),
    Flush,
    Lost(u32),
    Floor { namespace: u8, units: u32 },
}

fn call() -> impl Strategy<Value = Call> {
    let number = || 0..24u32;
    let kind = prop_oneof![Just(PinKind::None), Just(PinKind::Soft), Just(PinKind::Hard)];
    prop_oneof![
        10 => (number(), number(), 1..=UNITS_MAX, prop_oneof![4 => Just(0u64), 1 => 1..50u64])
            .prop_map(|(number, parent, units, ttl)| Call::Put { number, parent, units, ttl }),
        2 => (number(), number()).prop_map(|(number, parent)| Call::Load { number, parent }),
        6 => number().prop_map(Call::Hit),
        6 => (0..8usize, prop::bool::weighted(0.9)).prop_map(|(nth, ok)| Call::Written { nth, ok }),
        1 => number().prop_map(Call::Forget),
        2 => (prop::collection::vec(number(), 1..4), kind, 1..50u64)
            .prop_map(|(numbers, kind, ttl)| Call::Pin { numbers, kind, ttl }),
        2 => (1..20u64).prop_map(Call::Tick),
        1 => (1..8u32).prop_map(Call::MakeRoom),
        1 => any::<bool>().prop_map(Call::Writable),
        1 => Just(Call::Flush),
        1 => number().prop_map(Call::Lost),
        1 => (0..2u8, 0..4u32).prop_map(|(namespace, units)| Call::Floor { namespace, units }),
    ]
}

#[derive(Debug, Clone)]
struct Resident {
    page: PageInfo,
    /// Parent, with its generation, at the time when the page came.
    parent: Option<(PageId, u64)>,
    /// The page came from L3, or its write to L3 was requested.
    covered: bool,
    pin: Option<(PinKind, u64)>,
}

struct Model {
    policy: TestPolicy,
    residents: BTreeMap<PageId, Resident>,
    writing: Vec<(PageId, u64, u32)>,
    generation: u64,
    now_ms: u64,
}

impl Model {
    fn new(write_policy: WritePolicy) -> Model {
        let quotas = Vec::new();
        let quota_default = Some(9 * u64::from(UNIT));
        let options = PolicyOptions { dirty_bytes_max: BUDGET, quotas, quota_default, ..options(PAGES, write_policy) };
        let policy = TestPolicy::new(options);
        Model { policy, residents: BTreeMap::new(), writing: Vec::new(), generation: 0, now_ms: 1 }
    }

    fn facts(&mut self, number: u32, parent: u32, units: u32, ttl: u64) -> PageInfo {
        self.generation += 1;
        PageInfo {
            id: id((number % 2) as u8, number),
            parent: key(parent),
            position: number,
            generation: self.generation,
            bytes: units * UNIT,
            expires_unix_ms: if ttl == 0 { 0 } else { self.now_ms + ttl },
        }
    }

    fn apply(&mut self, out: PolicyActions, put: Option<PageInfo>) {
        for id in out.write {
            let page = put.filter(|page| page.id == id).or(self.residents.get(&id).map(|resident| resident.page));
            let page = page.expect("only resident pages and the put are written");
            self.writing.push((id, page.generation, page.bytes));
            if let Some(resident) = self.residents.get_mut(&id) {
                resident.covered = true;
            }
        }
        for (id, _) in out.evict {
            let gone = self.residents.remove(&id).expect("only residents are evicted");
            let over = gone.page.expires_unix_ms != 0 && gone.page.expires_unix_ms <= self.now_ms;
            let may_be_lost = self.policy.write_policy() == WritePolicy::Selective;
            assert!(gone.covered || over || may_be_lost, "a page is on no tier: {gone:?}");
            assert!(!matches!(gone.pin, Some((PinKind::Hard, until)) if until > self.now_ms), "pinned: {gone:?}");
        }
    }

    fn arrive(&mut self, page: PageInfo, covered: bool, out: PolicyActions) {
        let parent = PageId { key: page.parent, ..page.id };
        let end = |page: &PageInfo| page.expires_unix_ms.wrapping_sub(1);
        let live = |parent: &&Resident| end(&parent.page) >= end(&page).max(self.now_ms);
        let parent = self.residents.get(&parent).filter(live).map(|resident| (parent, resident.page.generation));
        self.residents.remove(&page.id);
        let taken = self.policy.generation(&page.id) == Some(page.generation);
        if taken {
            let parent = parent.filter(|(id, _)| *id != page.id);
            self.residents.insert(page.id, Resident { page, parent, covered, pin: None });
        }
        self.apply(out, Some(page));
    }

    fn call(&mut self, call: Call) {
        let mut out = PolicyActions::default();
        match call {
            Call::Put { number, parent, units, ttl } => {
                let page = self.facts(number, parent, units, ttl);
                if self.policy.reserve(page.bytes) {
                    let placed = self.policy.put(page, page.bytes, self.now_ms, &mut out);
                    let somewhere =
                        self.policy.generation(&page.id) == Some(page.generation) || out.write.contains(&page.id);
                    assert_eq!(placed == PutOutcome::Stored, somewhere, "{page:?}");
                    self.arrive(page, false, out);
                }
            }
            Call::Load { number, parent } => {
                let page = self.facts(number, parent, 1, 0);
                if !self.residents.contains_key(&page.id) {
                    self.policy.loaded(page, number.is_multiple_of(3), self.now_ms, &mut out);
                    self.arrive(page, true, out);
                }
            }
            Call::Hit(number) => {
                let id = id((number % 2) as u8, number);
                let generation = self.residents.get(&id).map_or(0, |resident| resident.page.generation);
                let found = self.policy.hit(self.policy.hash(&id), generation, self.now_ms, &mut out);
                assert!(!found || self.residents.contains_key(&id));
                self.apply(out, None);
            }
            Call::Written { nth, ok } => {
                if nth < self.writing.len() {
                    let (id, generation, bytes) = self.writing.remove(nth);
                    self.policy.written(&id, generation, bytes, ok);
                }
            }
            Call::Forget(number) => {
                let id = id((number % 2) as u8, number);
                assert_eq!(self.policy.forget(&id), self.residents.remove(&id).is_some());
            }
            Call::Pin { numbers, kind, ttl } => {
                let ids: BTreeSet<PageId> = numbers.iter().map(|&number| id((number % 2) as u8, number)).collect();
                let until = self.now_ms + ttl;
                if self.policy.pin(&ids, kind, until).is_ok() {
                    for id in ids {
                        if let Some(resident) = self.residents.get_mut(&id) {
                            resident.pin = (kind != PinKind::None).then_some((kind, until));
                        }
                    }
                }
            }
            Call::Tick(ms) => {
                self.now_ms += ms;
                let now_ms = self.now_ms;
                for resident in self.residents.values_mut() {
                    resident.pin = resident.pin.filter(|(_, until)| *until > now_ms);
                }
                self.policy.tick(now_ms, &mut out);
                self.apply(out, None);
            }
            Call::MakeRoom(units) => {
                self.policy.make_room(units * UNIT, self.now_ms, &mut out);
                self.apply(out, None);
            }
            Call::Writable(writable) => self.policy.set_writable(writable),
            Call::Flush => {
                self.policy.flush(&mut out);
                assert!(out.evict.is_empty());
                self.apply(out, None);
            }
            Call::Lost(number) => {
                self.policy.lost_on_l3(&id((number % 2) as u8, number), &mut out);
                self.apply(out, None);
            }
            Call::Floor { namespace, units } => {
                self.policy.set_floors(&[(NamespaceId([namespace; 32]), u64::from(units * UNIT))]);
            }
        }
        self.check();
    }

    /// Bytes of hard-pinned pages and of their ancestors, as far as those are the same puts still.
    fn held_bytes(&self) -> u64 {
        let mut held = BTreeSet::new();
        for resident in self.residents.values() {
            if !matches!(resident.pin, Some((PinKind::Hard, _))) {
                continue;
            }
            let mut next = Some(resident);
            while let Some(resident) = next {
                held.insert(resident.page.id);
                let parent = resident.parent;
                next = parent.and_then(|(id, generation)| {
                    self.residents.get(&id).filter(|parent| parent.page.generation == generation)
                });
            }
        }
        held.iter().map(|id| u64::from(self.residents[id].page.bytes)).sum()
    }

    fn check(&self) {
        let mut in_policy = Vec::new();
        let mut place = Some(0);
        while let Some(at) = place {
            let (page, next) = self.policy.next_from(at);
            in_policy.extend(page.map(|page| page.id));
            place = next;
        }
        in_policy.sort_unstable();
        assert_eq!(in_policy, self.residents.keys().copied().collect::<Vec<_>>());
        let bytes = |resident: &Resident| u64::from(resident.page.bytes);
        let used: u64 = self.residents.values().map(bytes).sum();
        assert_eq!(self.policy.used_bytes(), used);
        assert!(used <= PAGES * u64::from(UNIT));
        for quota in self.policy.namespaces(9) {
            let own = self.residents.values().filter(|resident| resident.page.id.namespace == quota.namespace);
            assert_eq!(quota.bytes, own.map(bytes).sum::<u64>());
            assert!(quota.bytes <= 9 * u64::from(UNIT));
        }
        let writing: u64 = self.writing.iter().map(|(_, _, bytes)| u64::from(*bytes)).sum();
        assert_eq!(self.policy.in_flight_bytes(), writing);
        assert!(writing <= BUDGET + u64::from(UNITS_MAX * UNIT), "{writing}");
        let pinned = self.residents.values().filter(|resident| resident.pin.is_some()).count();
        assert_eq!(self.policy.pinned(), (pinned, self.held_bytes()));
        assert!(self.held_bytes() <= PAGES * u64::from(UNIT) / 4);
        self.policy.check_floors_of_pins();
        let mut soft: BTreeMap<NamespaceId, u64> = BTreeMap::new();
        for resident in self.residents.values().filter(|r| matches!(r.pin, Some((PinKind::Soft, _)))) {
            *soft.entry(resident.page.id.namespace).or_default() += bytes(resident);
        }
        assert!(soft.values().all(|&bytes| bytes <= PAGES * u64::from(UNIT) / 4), "{soft:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_sequence_of_calls_keeps_the_invariants(
        policy in prop_oneof![Just(WritePolicy::Through), Just(WritePolicy::Selective), Just(WritePolicy::Back)],
        calls in prop::collection::vec(call(), 1..200),
    ) {
        let mut model = Model::new(policy);
        for call in calls {
            model.call(call);
        }
    }
}
