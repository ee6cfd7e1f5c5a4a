//! Tests of the room for puts: who waits for it, who loses it, and when it is free.

use super::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::sleep;

pub(super) const MIB: u64 = 1 << 20;
pub(super) const PAGE: u64 = 8 * MIB;
/// Bytes that keep a writer from losing its room.
const PROGRESS: usize = writers::PROGRESS_BYTES as usize;

/// A node with room for puts of so many bytes.
pub(super) fn budget_for(bytes: u64) -> Arc<Budget> {
    let options = NodeOptions { in_flight_bytes: Some(2 * bytes), ..NodeOptions::default() };
    Budget::new(&options, Arc::default(), Arc::default())
}

/// A node with room for four pages.
pub(super) fn budget() -> Arc<Budget> {
    budget_for(4 * PAGE)
}

/// A node with room for four pages, without writers.
pub(super) fn empty_node() -> (Arc<Budget>, Open) {
    (budget(), Open::default())
}

pub(super) fn account(budget: &Arc<Budget>, tenant: &str) -> Arc<Account> {
    account_of(budget, Peer::Local, tenant)
}

pub(super) fn account_of(budget: &Arc<Budget>, peer: Peer, tenant: &str) -> Arc<Account> {
    let account = budget.open().unwrap();
    account.set_tenant(peer, tenant);
    account
}

fn put(account: &Arc<Account>) -> Option<Charge> {
    account.charge(Kind::Puts, PAGE).ok()
}

/// Reservations of the writers under test, by connection. Stands in for the table of open puts.
#[derive(Clone, Default)]
pub(super) struct Open(pub(super) Arc<Mutex<BTreeMap<u64, Vec<Charge>>>>);

impl Open {
    fn insert(&self, charge: Charge) {
        self.0.lock().entry(charge.connection()).or_default().push(charge);
    }

    pub(super) fn len(&self, account: &Account) -> usize {
        self.0.lock().get(&account.connection()).map_or(0, Vec::len)
    }

    pub(super) fn end(&self, account: &Account) -> bool {
        let ended = self.0.lock().get_mut(&account.connection()).and_then(Vec::pop);
        ended.is_some()
    }

    /// Reserves a page as the store does: after a refusal once more, with the room of losing
    /// writers.
    pub(super) fn reserve(&self, account: &Arc<Account>) -> bool {
        let charge = put(account).or_else(|| {
            for writer in account.losing_writers(PAGE) {
                while account.takes_from(writer, PAGE) {
                    let lost = self.0.lock().get_mut(&writer.connection).and_then(Vec::pop);
                    if lost.is_none() {
                        break;
                    }
                }
            }
            put(account)
        });
        charge.map(|charge| self.insert(charge)).is_some()
    }
}

/// A node whose four pages of room one connection of `tenant` holds.
pub(super) fn full_node(tenant: &str) -> (Arc<Budget>, Open, Arc<Account>) {
    let (budget, open) = empty_node();
    let holder = account(&budget, tenant);
    (0..4).for_each(|_| assert!(open.reserve(&holder)));
    (budget, open, holder)
}

/// Sends a page at `bytes_per_second` and ends its put.
pub(super) async fn write(open: &Open, account: &Account, bytes_per_second: u64) {
    let piece = bytes_per_second / 20;
    for _ in 0..PAGE / piece {
        sleep(Duration::from_millis(50)).await;
        account.record_received(piece as usize);
    }
    open.end(account);
}

/// Tenant of a caller by its number.
type TenantOf = fn(u64) -> String;

fn own_tenant(number: u64) -> String {
    format!("caller {number}")
}

/// Callers that are refused, return as told, and write at `bytes_per_second`. Returns how many
/// returns found room, and the number of all returns.
async fn refused_callers(
    budget: &Arc<Budget>,
    open: &Open,
    (count, tenant_of): (u64, TenantOf),
    bytes_per_second: u64,
) -> (u64, u64) {
    let truthful = Arc::<AtomicU64>::default();
    let returns = Arc::<AtomicU64>::default();
    let callers: Vec<_> = (0..count)
        .map(|number| {
            let budget = budget.clone();
            let open = open.clone();
            let truthful = truthful.clone();
            let returns = returns.clone();
            tokio::spawn(async move {
                sleep(Duration::from_millis(7 * number)).await;
                let caller = account(&budget, &tenant_of(number));
                if !open.reserve(&caller) {
                    let mut told = caller.wait_in_line(PAGE, PAGE).retry_after;
                    for attempt in 0.. {
                        // A client adds up to a quarter of the time.
                        sleep(told + told.mul_f64((number % 5) as f64 / 16.0)).await;
                        returns.fetch_add(1, Ordering::Relaxed);
                        if open.reserve(&caller) {
                            truthful.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                        told = caller.wait_in_line(PAGE, PAGE).retry_after;
                        assert!(attempt < 10, "caller {number} was sent away ten times");
                    }
                }
                write(&open, &caller, bytes_per_second).await;
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    (truthful.load(Ordering::Relaxed), returns.load(Ordering::Relaxed))
}

/// Share that the tenant of an account has of so many bytes.
pub(super) fn share(budget: &Budget, account: &Account, bytes: u64) -> u64 {
    let mut state = budget.state.lock();
    let tenant = state.connections.get(&account.connection()).unwrap().tenant;
    state.tenants.expire(now());
    state.tenants.share(tenant, Kind::Puts, bytes)
}

/// Refused callers beside writers that send a page each. All have the same speed.
async fn callers_beside(
    writers: &[Arc<Account>],
    (budget, open): (&Arc<Budget>, &Open),
    callers: (u64, TenantOf),
    bytes_per_second: u64,
) -> (u64, u64) {
    let writing = futures::future::join_all(writers.iter().map(|writer| write(open, writer, bytes_per_second)));
    let calling = async {
        // The first measurement of the writers needs a moment.
        sleep(Duration::from_millis(60)).await;
        refused_callers(budget, open, callers, bytes_per_second).await
    };
    futures::join!(writing, calling).1
}

pub(super) fn in_use(budget: &Budget) -> u64 {
    budget.usage()[0].1
}

#[tokio::test(start_paused = true)]
async fn callers_refused_by_silent_writers_get_in_when_told() {
    let (budget, open) = empty_node();
    let silent: Vec<_> = (0..4).map(|number| account(&budget, &format!("silent {number}"))).collect();
    assert!(silent.iter().all(|writer| open.reserve(writer)));
    let begin = now();
    let (truthful, returns) = refused_callers(&budget, &open, (12, own_tenant), 80 * MIB).await;
    assert!(truthful * 10 >= returns * 9, "{truthful} of {returns} returns got in");
    let took = now() - begin;
    assert!(took < Duration::from_secs(6), "{took:?}");
    let kept = silent.iter().map(|writer| open.len(writer) as u64).sum::<u64>();
    assert!(kept < 4 && in_use(&budget) == kept * PAGE, "no more is taken than others need: {kept}");
}

#[tokio::test(start_paused = true)]
async fn callers_refused_by_slow_writers_get_in_when_told() {
    let (budget, open) = empty_node();
    // Two seconds for a page each.
    let slow: Vec<_> = (0..4).map(|number| account(&budget, &format!("slow {number}"))).collect();
    assert!(slow.iter().all(|writer| open.reserve(writer)));
    let (truthful, returns) = callers_beside(&slow, (&budget, &open), (12, own_tenant), 4 * MIB).await;
    assert!(truthful * 10 >= returns * 9, "{truthful} of {returns} returns got in");
    assert_eq!(in_use(&budget), 0);
}

#[tokio::test(start_paused = true)]
async fn callers_of_one_tenant_get_in_when_told() {
    let (budget, open) = empty_node();
    let slow: Vec<_> = (0..4).map(|_| account(&budget, "tenant")).collect();
    assert!(slow.iter().all(|writer| open.reserve(writer)));
    let (truthful, returns) = callers_beside(&slow, (&budget, &open), (12, |_| "tenant".into()), 4 * MIB).await;
    assert!(truthful * 10 >= returns * 9, "{truthful} of {returns} returns got in");
}

#[tokio::test(start_paused = true)]
async fn callers_of_one_tenant_get_in_when_told_beside_a_silent_tenant() {
    let (budget, open) = empty_node();
    // It keeps its share: the callers have room for two pages.
    let silent = account(&budget, "silent");
    let slow: Vec<_> = (0..2).map(|_| account(&budget, "tenant")).collect();
    assert!(slow.iter().chain([&silent, &silent]).all(|writer| open.reserve(writer)));
    let (truthful, returns) = callers_beside(&slow, (&budget, &open), (8, |_| "tenant".into()), 8 * MIB).await;
    assert!(truthful * 10 >= returns * 9, "{truthful} of {returns} returns got in");
}

#[tokio::test(start_paused = true)]
async fn put_that_was_slow_long_ago_delays_no_caller() {
    let (budget, open) = empty_node();
    let slow = account(&budget, "slow");
    assert!(open.reserve(&slow));
    write(&open, &slow, MIB / 4).await;
    sleep(Duration::from_secs(6)).await;
    let silent: Vec<_> = (0..4).map(|number| account(&budget, &format!("silent {number}"))).collect();
    assert!(silent.iter().all(|writer| open.reserve(writer)));
    for number in 0..8 {
        let caller = account(&budget, &format!("caller {number}"));
        assert!(!open.reserve(&caller));
        let told = caller.wait_in_line(PAGE, PAGE).retry_after;
        assert!(told < Duration::from_secs(4), "caller {number} is told {told:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn caller_that_returns_late_keeps_its_turn() {
    let (budget, open, holder) = full_node("tenant");
    let late = account(&budget, "tenant");
    assert!(!open.reserve(&late));
    let told = late.wait_in_line(PAGE, PAGE).retry_after;
    sleep(Duration::from_millis(1)).await;
    let behind = account(&budget, "tenant");
    assert!(!open.reserve(&behind));
    behind.wait_in_line(PAGE, PAGE);
    sleep(told / 2).await;
    holder.record_received(PROGRESS);
    sleep(told / 2 + told / 4 + Duration::from_millis(150)).await;
    assert!(!open.reserve(&late), "the holder is not silent");
    late.wait_in_line(PAGE, PAGE);
    open.end(&holder);
    assert!(!open.reserve(&behind), "the late one is ahead");
    assert!(open.reserve(&late));
}

#[tokio::test(start_paused = true)]
async fn late_caller_holds_no_room_and_ends_after_a_while() {
    let (budget, open, holder) = full_node("holder");
    let late = account(&budget, "caller");
    assert!(!open.reserve(&late));
    let told = late.wait_in_line(PAGE, PAGE).retry_after;
    sleep(told + told / 4 + Duration::from_millis(150)).await;
    // A silent holder would lose another page.
    holder.record_received(PROGRESS);
    open.end(&holder);
    let newcomer = account(&budget, "newcomer");
    assert!(open.reserve(&newcomer), "the late one is not expected any more");
    assert_eq!(budget.status()["writers_waiting"], 1);
    sleep(Duration::from_secs(11)).await;
    open.reserve(&newcomer);
    assert_eq!(budget.status()["writers_waiting"], 0);
}

#[tokio::test(start_paused = true)]
async fn caller_is_not_told_to_return_before_those_that_room_is_promised_to() {
    let (budget, open) = empty_node();
    let holders: Vec<_> = (0..4).map(|number| account(&budget, &format!("holder {number}"))).collect();
    assert!(holders.iter().all(|holder| open.reserve(holder)));
    // 6 s for a page: longer than an empty room would make anyone wait.
    for _ in 0..20 {
        sleep(Duration::from_millis(50)).await;
        holders.iter().for_each(|holder| holder.record_received(PAGE as usize / 120));
    }
    let ahead: Vec<_> = (0..4).map(|number| account(&budget, &format!("{number}"))).collect();
    let told = ahead.iter().map(|caller| {
        assert!(!open.reserve(caller));
        caller.wait_in_line(PAGE, PAGE).retry_after
    });
    let told: Vec<_> = told.collect();
    assert!(holders.iter().all(|holder| open.end(holder)));
    // The next forecast is a new one.
    let passed = Duration::from_millis(20);
    sleep(passed).await;
    // The room is promised to callers that are not there yet. Others use it meanwhile.
    let quick: Vec<_> = (0..4).map(|number| account(&budget, &format!("quick {number}"))).collect();
    assert!(quick.iter().all(|writer| open.reserve(writer)));
    let caller = account(&budget, "caller");
    assert!(!open.reserve(&caller));
    let later = caller.wait_in_line(PAGE, PAGE).retry_after;
    assert!(told[0] > Duration::from_secs(4), "{told:?}");
    assert!(passed + later >= told[0], "{later:?}, the first one ahead returns after {:?}", told[0]);
    assert!(quick.iter().all(|writer| open.end(writer)));
    sleep(told[0] - passed - Duration::from_millis(100)).await;
    assert!(!open.reserve(&caller), "a put may take longer than the time that is left");
    sleep(Duration::from_millis(100)).await;
    assert!(open.reserve(&ahead[0]));
}

#[tokio::test(start_paused = true)]
async fn caller_that_has_waited_keeps_its_place_when_the_time_told_grows() {
    let (budget, open, holder) = full_node("holder");
    let caller = account(&budget, "caller");
    assert!(!open.reserve(&caller));
    caller.wait_in_line(PAGE, PAGE);
    // 64 s for a page.
    for _ in 0..40 {
        sleep(Duration::from_millis(100)).await;
        holder.record_received(MIB as usize / 80);
    }
    let told = caller.wait_in_line(PAGE, PAGE).retry_after;
    assert_eq!(told, Duration::from_secs(10));
    for _ in 0..95 {
        sleep(Duration::from_millis(100)).await;
        holder.record_received(MIB as usize / 80);
    }
    open.end(&holder);
    let newcomer = account(&budget, "newcomer");
    assert!(!open.reserve(&newcomer) && open.reserve(&caller));
}

#[tokio::test(start_paused = true)]
async fn caller_that_the_arena_refuses_gets_a_place_and_returns_less_and_less_often() {
    let (budget, open) = empty_node();
    let holder = account(&budget, "holder");
    (0..3).for_each(|_| assert!(open.reserve(&holder)));
    let caller = account(&budget, "caller");
    // The budget has room, but the arena has no free run of bytes for a page.
    let begin = now();
    let mut returns = 0;
    while now() - begin < Duration::from_secs(2) {
        sleep(caller.wait_in_line(PAGE, PAGE).retry_after).await;
        holder.record_received(PROGRESS);
        returns += 1;
    }
    assert!(returns <= 10, "{returns}");
    let newcomer = account(&budget, "newcomer");
    assert!(!open.reserve(&newcomer) && open.reserve(&caller));
}

#[tokio::test(start_paused = true)]
async fn caller_keeps_its_place_and_returns_less_often_while_the_arena_is_full() {
    for pages in [1, 2] {
        let (budget, open, holder) = full_node("holder");
        let caller = account(&budget, "caller");
        assert!(!open.reserve(&caller));
        let first = caller.wait_in_line(pages * PAGE, PAGE).retry_after;
        sleep(first).await;
        (0..pages).for_each(|_| assert!(open.end(&holder)));
        // The budget has room, but the arena has no free run of bytes for a page.
        put(&caller).unwrap().release_unused();
        let told = caller.wait_in_line(pages * PAGE, PAGE).retry_after;
        assert!(told >= first / 4, "{pages} pages: {told:?} after {first:?}");
        sleep(told).await;
        holder.record_received(PROGRESS);
        sleep(told / 4).await;
        let newcomer = account(&budget, "newcomer");
        assert!(!open.reserve(&newcomer), "the room is promised to the caller");
        assert!(open.reserve(&caller));
    }
}

#[tokio::test(start_paused = true)]
async fn writer_keeps_its_room_while_it_makes_progress_or_no_caller_waits() {
    let (budget, open) = empty_node();
    let slow = account(&budget, "slow");
    let lonely = account(&budget, "lonely");
    assert!(open.reserve(&slow) && open.reserve(&lonely));
    sleep(Duration::from_secs(50)).await;
    assert!(open.len(&slow) == 1 && open.len(&lonely) == 1, "nobody waits");
    slow.record_received(PROGRESS);
    let callers: Vec<_> = (0..3).map(|number| account(&budget, &format!("caller {number}"))).collect();
    assert!(callers.iter().all(|caller| open.reserve(caller)));
    assert_eq!((open.len(&slow), open.len(&lonely)), (1, 0), "only the silent one lost its room");
    let late = account(&budget, "late");
    for _ in 0..30 {
        sleep(Duration::from_millis(900)).await;
        slow.record_received(PROGRESS);
        callers.iter().for_each(|caller| caller.record_received(PROGRESS));
        assert!(!open.reserve(&late), "nobody is silent, and nobody has more than one page");
        late.wait_in_line(PAGE, PAGE);
    }
    sleep(Duration::from_millis(200)).await;
    callers.iter().for_each(|caller| caller.record_received(PROGRESS));
    sleep(Duration::from_millis(900)).await;
    assert!(open.reserve(&late) && open.len(&slow) == 0);
}

/// Each of them keeps one page. Before, a byte a second kept it for as long as the writer liked.
#[tokio::test(start_paused = true)]
async fn writers_that_trickle_give_their_room_to_callers() {
    let (budget, open) = empty_node();
    let stranger = Peer::Address([10, 0, 0, 9].into());
    let trickling: Vec<_> = (0..4).map(|number| account_of(&budget, stranger, &number.to_string())).collect();
    assert!(trickling.iter().all(|writer| open.reserve(writer)));
    let trickle_until = async |end: Instant| {
        while now() < end {
            sleep(Duration::from_millis(10)).await;
            // A sixth of the rate that keeps the room.
            trickling.iter().for_each(|writer| writer.record_received(PROGRESS / 600));
        }
    };
    trickle_until(now() + Duration::from_millis(500)).await;
    let honest = account(&budget, "honest");
    assert!(!open.reserve(&honest));
    let told = honest.wait_in_line(PAGE, PAGE).retry_after;
    assert!(told < Duration::from_secs(1), "their second is half over: {told:?}");
    trickle_until(now() + told).await;
    assert!(open.reserve(&honest), "told to return after {told:?}");
    assert_eq!(trickling.iter().map(|writer| open.len(writer)).sum::<usize>(), 3, "no more than was needed");
}

#[tokio::test(start_paused = true)]
async fn tenant_above_its_share_loses_the_excess_to_one_that_waits() {
    let (budget, open) = empty_node();
    let greedy: Vec<_> = (0..4).map(|_| account(&budget, "greedy")).collect();
    assert!(greedy.iter().all(|writer| open.reserve(writer)));
    let modest = account(&budget, "modest");
    let more = account(&budget, "greedy");
    assert!(!open.reserve(&modest) && !open.reserve(&more));
    let told = modest.wait_in_line(2 * PAGE, PAGE).retry_after;
    assert!(told >= Duration::from_secs(1), "writers at work get a second: {told:?}");
    let returns_at = now() + told;
    while now() < returns_at {
        sleep(Duration::from_millis(100)).await;
        greedy.iter().for_each(|writer| writer.record_received(PROGRESS));
    }
    assert!(!open.reserve(&more), "its own tenant is above its share");
    assert!(open.reserve(&modest) && open.reserve(&modest));
    assert!(!open.reserve(&modest), "at its share");
    assert_eq!(greedy.iter().map(|writer| open.len(writer)).sum::<usize>(), 2);
}

#[tokio::test(start_paused = true)]
async fn peer_with_many_tenants_takes_no_share_of_another_peer() {
    let (budget, open) = empty_node();
    let stranger = Peer::Address([10, 0, 0, 9].into());
    let many: Vec<_> = (0..4).map(|number| account_of(&budget, stranger, &number.to_string())).collect();
    many.iter().for_each(|account| assert!(open.reserve(account)));
    // The same tenant's name from another address is another tenant.
    let honest = account_of(&budget, Peer::Local, "0");
    assert!(!open.reserve(&honest));
    let share = |account: &Account| share(&budget, account, 4 * PAGE);
    assert_eq!((share(&honest), share(&many[0])), (2 * PAGE, PAGE / 2));
    drop((many, open));
    assert_eq!(share(&honest), 4 * PAGE);
}

#[tokio::test(start_paused = true)]
async fn second_place_of_a_tenant_comes_after_the_first_places_of_others() {
    let mut tenants = TenantTable::default();
    let (many, single) = (tenants.join(Peer::Local, "many"), tenants.join(Peer::Local, "single"));
    let mut line = Line::default();
    for (connection, tenant) in [(0, many), (1, many), (2, single)] {
        line.enter(connection, (tenant, PAGE), None, now());
    }
    // Both tenants are far below their shares.
    let ahead_of = |connection, tenant| {
        line.promised((connection, tenant), &tenants, 100 * PAGE, (now(), None)).bytes().of_all / PAGE
    };
    assert_eq!((ahead_of(0, many), ahead_of(2, single), ahead_of(1, many)), (0, 1, 2));
}

/// Before, each place that ended moved the turn, so that a newcomer came behind all places of a
/// tenant whose callers left.
#[tokio::test(start_paused = true)]
async fn caller_that_leaves_unserved_moves_no_newcomer_back() {
    let mut tenants = TenantTable::default();
    let (many, newcomer) = (tenants.join(Peer::Local, "many"), tenants.join(Peer::Local, "newcomer"));
    let mut line = Line::default();
    (0..8).for_each(|connection| line.enter(connection, (many, PAGE), None, now()));
    line.leave(7);
    line.enter(8, (newcomer, PAGE), None, now());
    let ahead = |line: &Line, connection, tenant| {
        line.promised((connection, tenant), &tenants, 100 * PAGE, (now(), None)).bytes().of_all / PAGE
    };
    assert_eq!(ahead(&line, 8, newcomer), 1);
    // A place that is served does: the next newcomer has no turn that has begun.
    line.leave(8);
    for connection in 0..3 {
        line.record_grant(connection, PAGE);
    }
    line.enter(9, (newcomer, PAGE), None, now());
    assert_eq!([ahead(&line, 3, many), ahead(&line, 9, newcomer), ahead(&line, 4, many)], [0, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn tenants_take_turns_in_the_line_and_newcomers_wait_behind_it() {
    let (budget, open, holder) = full_node("holder");
    let many: Vec<_> = (0..3).map(|_| account(&budget, "many")).collect();
    let single = account(&budget, "single");
    for caller in many.iter().chain([&single]) {
        assert!(!open.reserve(caller));
        caller.wait_in_line(PAGE, PAGE);
    }
    assert_eq!(budget.status()["writers_waiting"], 4);
    sleep(Duration::from_millis(900)).await;
    holder.record_received(PROGRESS);
    open.end(&holder);
    let newcomer = account(&budget, "newcomer");
    assert!(!open.reserve(&newcomer) && !open.reserve(&many[1]) && !open.reserve(&single), "many[0] is first");
    open.end(&holder);
    assert!(!open.reserve(&many[1]) && open.reserve(&single), "the other tenant's first place is second");
    assert!(open.reserve(&many[0]), "its room was kept");
    // A caller that does not return loses its place soon after its time.
    sleep(Duration::from_secs(3)).await;
    open.end(&holder);
    assert!(open.reserve(&newcomer));
    drop((many, single));
    assert_eq!(budget.status()["writers_waiting"], 0);
}

#[tokio::test(start_paused = true)]
async fn line_is_bounded_and_ends_with_its_connections() {
    let (budget, open) = empty_node();
    // Puts take a millisecond. Otherwise few callers would find room within the longest delay.
    let quick = put(&account(&budget, "quick"));
    sleep(Duration::from_millis(1)).await;
    drop(quick);
    let holder = account(&budget, "holder");
    (0..4).for_each(|_| assert!(open.reserve(&holder)));
    let callers: Vec<_> = (0..300).map(|number| account(&budget, &format!("{}", number % 7))).collect();
    for caller in &callers {
        assert!(!open.reserve(caller));
        let told = caller.wait_in_line(PAGE, PAGE).retry_after;
        assert!((Duration::from_millis(1)..=Duration::from_secs(10)).contains(&told), "{told:?}");
    }
    assert_eq!(budget.status()["writers_waiting"], 300);
    drop(callers);
    assert_eq!(budget.status()["writers_waiting"], 0);
    assert!(!open.reserve(&account(&budget, "next")), "the holder is silent for too short a time");
}

/// Before, each refusal visited all writers as long as one was silent and kept its room.
#[tokio::test(start_paused = true)]
async fn silent_writer_that_keeps_its_room_makes_no_search_visit_others() {
    let budget = budget_for(300 * PAGE);
    let open = Open::default();
    let writers: Vec<_> = (0..299).map(|_| account(&budget, "tenant")).collect();
    assert!(writers.iter().all(|writer| open.reserve(writer)));
    let silent = account(&budget, "silent");
    assert!(open.reserve(&silent));
    // The caller's tenant is above its share, so that it takes no room of the silent one.
    let callers: Vec<_> = (0..100).map(|_| account(&budget, "tenant")).collect();
    for _ in 0..20 {
        sleep(Duration::from_millis(250)).await;
        writers.iter().for_each(|writer| writer.record_received(PROGRESS));
        for caller in &callers {
            assert!(!open.reserve(caller));
            caller.wait_in_line(PAGE, PAGE);
        }
    }
    assert_eq!(open.len(&silent), 1);
    let visits = budget.state.lock().writers_order.visits;
    assert!(visits <= 6 * 300, "{visits} visits in 5 s");
    let stranger = account(&budget, "stranger");
    assert!(open.reserve(&stranger) && open.len(&silent) == 0, "another tenant takes it");
}

#[tokio::test(start_paused = true)]
async fn share_counts_each_tenant_with_demand_once() {
    let budget = budget();
    let accounts: Vec<_> = (0..900).map(|number| account(&budget, &format!("{number}"))).collect();
    let share = |number: usize| share(&budget, &accounts[number], 4 * PAGE);
    assert_eq!(share(0), 4 * PAGE, "899 idle tenants take nothing");
    let first = put(&accounts[1]).unwrap();
    assert_eq!((share(0), share(1)), (2 * PAGE, 4 * PAGE));
    let rest: Vec<_> = (2..5).map(|number| put(&accounts[number]).unwrap()).collect();
    assert!(put(&accounts[5]).is_none() && put(&accounts[5]).is_none() && put(&accounts[1]).is_none());
    assert_eq!((share(0), share(5)), (4 * PAGE / 6, 4 * PAGE / 5));
    drop((first, rest));
    assert_eq!((share(0), share(5)), (4 * PAGE / 3, 2 * PAGE), "the refused ones still have demand");
    sleep(DEMAND_TIME).await;
    assert_eq!(share(0), 4 * PAGE);
    let refused = put(&accounts[6]).unwrap();
    drop((refused, accounts));
    assert_eq!(budget.status()["tenants"], 0);
}

/// Before, the 64 longest silent writers hid the others for as long as their devices could reach
/// the memory of their aborted puts.
#[tokio::test(start_paused = true)]
async fn silent_writers_beyond_those_of_one_search_are_found_by_the_next() {
    let budget = budget();
    let silent: Vec<_> = (0..100).map(|number| account(&budget, &number.to_string())).collect();
    let charges: Vec<_> = silent.iter().map(|writer| writer.charge(Kind::Puts, 4 * PAGE / 100).ok().unwrap()).collect();
    sleep(Duration::from_secs(2)).await;
    let caller = account(&budget, "caller");
    let search = || caller.losing_writers(PAGE).iter().map(|writer| writer.connection).collect::<Vec<_>>();
    let (first, second) = (search(), search());
    assert_eq!(first.len(), 64);
    let mut found = [first.as_slice(), &second].concat();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found, silent.iter().map(|writer| writer.connection()).collect::<Vec<_>>());
    assert!(second.len() <= 64 && second[..36].iter().all(|number| !first.contains(number)));
    drop(charges);
    assert!(search().is_empty());
}

/// Before, the caller was told the time since its first refusal: the tiers were thought to refuse.
#[tokio::test(start_paused = true)]
async fn caller_returns_at_once_if_the_room_is_free_before_the_answer() {
    let (budget, open, holder) = full_node("tenant");
    let caller = account(&budget, "tenant");
    for _ in 0..30 {
        assert!(!open.reserve(&caller));
        caller.wait_in_line(PAGE, PAGE);
        sleep(Duration::from_millis(100)).await;
        holder.record_received(PROGRESS);
    }
    assert!(!open.reserve(&caller));
    open.end(&holder);
    let told = caller.wait_in_line(PAGE, PAGE).retry_after;
    assert!(told <= Duration::from_millis(1), "{told:?}");
    // The tiers refuse: the budget has granted the charge.
    open.end(&holder);
    put(&caller).unwrap().release_unused();
    let told = caller.wait_in_line(PAGE, PAGE).retry_after;
    assert!(told >= Duration::from_millis(20), "{told:?}");
}
