//! Order of the line under callers of few tenants and of ever new ones.

use super::*;
use larder_runtime::now;
use proptest::prelude::*;

/// Tenants with several places. Every newcomer is a tenant of its own.
const TENANTS: TenantNumber = 3;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A caller of a tenant with several places.
    Caller(TenantNumber),
    Newcomer,
    /// Serves the first place, and the caller that has queued for the longest time returns.
    Serve,
    /// Serves a place out of order: those before it are away.
    ServeOther(usize),
    Leave(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..TENANTS).prop_map(Step::Caller),
        5 => Just(Step::Newcomer),
        5 => Just(Step::Serve),
        1 => (0..PLACES_MAX).prop_map(Step::ServeOther),
        1 => (0..PLACES_MAX).prop_map(Step::Leave),
    ]
}

/// Callers that were refused and got their place after another one, and were served before it.
#[derive(Debug, Clone, Copy)]
struct Overtaken {
    /// Number of the place, in the order in which callers got theirs.
    place: u64,
    count: u64,
    most: u64,
}

struct Callers {
    /// Stands still, so that no caller is late.
    now: Instant,
    line: Line,
    connections: u64,
    /// Connections without a place, and their tenants, in the order of their first refusals.
    queued: BTreeMap<u64, TenantNumber>,
    places: u64,
    overtaken: BTreeMap<u64, Overtaken>,
    /// Places that left unserved, by tenant.
    left: BTreeMap<TenantNumber, u64>,
    served: u64,
}

impl Callers {
    fn new() -> Callers {
        let (line, queued, overtaken, left) = Default::default();
        Callers { now: now(), line, connections: 0, queued, places: 0, overtaken, left, served: 0 }
    }

    fn call(&mut self, tenant: TenantNumber) -> u64 {
        self.connections += 1;
        self.enter(self.connections, tenant);
        self.connections
    }

    fn call_as_newcomer(&mut self) -> u64 {
        self.call(TENANTS + self.connections)
    }

    fn enter(&mut self, connection: u64, tenant: TenantNumber) {
        let ahead = self.line.places.values().filter(|place| place.tenant == tenant).count() as u64;
        let first = self.line.first_turn();
        self.line.enter(connection, (tenant, 1), None, self.now);
        let Some(&(turn, _)) = self.line.by_connection.get(&connection) else {
            self.queued.insert(connection, tenant);
            return;
        };
        self.queued.remove(&connection);
        let turns = turn - first;
        assert!(turns <= ahead + self.left.get(&tenant).copied().unwrap_or(0), "{turns} turns behind {ahead} places");
        let most = turns * (PLACES_MAX as u64 - 1);
        self.places += 1;
        self.overtaken.insert(connection, Overtaken { place: self.places, count: 0, most });
    }

    fn serve(&mut self, key: PlaceKey) {
        let connection = self.line.places[&key].connection;
        let served = self.overtaken.remove(&connection).unwrap();
        for ((turn, arrival), place) in self.line.places.range(key..).skip(1) {
            let overtaken = self.overtaken.get_mut(&place.connection).unwrap();
            // A caller may get a free place while an earlier one of the queue has not returned yet.
            overtaken.count += u64::from(*arrival < key.1 && overtaken.place < served.place);
            assert!(overtaken.count <= overtaken.most, "a place of turn {turn} is overtaken: {overtaken:?}");
        }
        assert!(self.line.record_grant(connection, 1).is_some());
        self.served += 1;
        let next = self.queued.first_key_value().map(|(&connection, &tenant)| (connection, tenant));
        if let Some((connection, tenant)) = next {
            self.enter(connection, tenant);
        }
    }

    fn serve_first(&mut self) {
        if let Some((&key, _)) = self.line.places.first_key_value() {
            self.serve(key);
        }
    }

    fn step(&mut self, step: Step) {
        let place_at = |line: &Line, at: usize| line.places.iter().nth(at).map(|(&key, place)| (key, place.tenant));
        match step {
            Step::Caller(tenant) => {
                self.call(tenant);
            }
            Step::Newcomer => {
                self.call_as_newcomer();
            }
            Step::Serve => self.serve_first(),
            Step::ServeOther(at) => {
                if let Some((key, _)) = place_at(&self.line, at) {
                    self.serve(key);
                }
            }
            Step::Leave(at) => {
                if let Some((key, tenant)) = place_at(&self.line, at) {
                    let connection = self.line.places[&key].connection;
                    self.line.leave(connection);
                    self.overtaken.remove(&connection);
                    *self.left.entry(tenant).or_default() += 1;
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// The bound of the module's documentation.
    #[test]
    fn later_callers_overtake_a_place_in_few_turns(steps in prop::collection::vec(step(), 1..1500)) {
        let mut callers = Callers::new();
        for step in steps {
            callers.step(step);
        }
    }
}

/// One newcomer always waits. Before, each got the turn that was being served.
#[test]
fn tenants_without_end_do_not_starve_the_second_place_of_a_tenant() {
    let mut callers = Callers::new();
    callers.call(0);
    let second = callers.call(0);
    callers.call_as_newcomer();
    while callers.line.has_place(second) {
        assert!(callers.served < 3, "only the first places of both tenants come before");
        callers.serve_first();
        callers.call_as_newcomer();
    }
}

#[test]
fn place_keeps_its_position_if_the_tiers_refuse_its_page() {
    let first_of = |line: &Line| line.places.first_key_value().map(|(_, place)| place.connection);
    let mut callers = Callers::new();
    let refused = callers.call(0);
    // The second place waits for a later turn.
    for _ in 0..2 {
        callers.call(1);
    }
    let served = callers.line.record_grant(refused, 1);
    callers.line.enter(refused, (0, 1), served, callers.now);
    assert_eq!(first_of(&callers.line), Some(refused));
    // The line becomes empty while the last place is granted its bytes.
    let last = callers.line.places.values().next_back().unwrap().connection;
    callers.line.leave(refused);
    while callers.line.has_place(last) && callers.line.len() > 1 {
        callers.serve_first();
    }
    let served = callers.line.record_grant(last, 1);
    callers.call_as_newcomer();
    callers.line.enter(last, (1, 1), served, callers.now);
    assert_eq!(first_of(&callers.line), Some(last));
}

/// The most that the bound allows: each turn begins with a full line.
#[test]
fn each_earlier_place_of_a_tenant_costs_one_turn_of_a_full_line() {
    const PLACES: usize = 4;
    let mut callers = Callers::new();
    let [.., last] = [0; PLACES].map(|tenant| callers.call(tenant));
    while callers.line.has_place(last) {
        while callers.line.places.len() < PLACES_MAX {
            callers.call_as_newcomer();
        }
        callers.serve_first();
    }
    let most = (PLACES as u64 - 1) * (PLACES_MAX as u64 - 1);
    assert!((most / 2..=most + PLACES as u64).contains(&callers.served), "{} served", callers.served);
}
