//! Tests of the room for puts under more callers than the line has places.

use super::room_tests::{MIB, Open, PAGE, account, budget_for, empty_node, full_node, in_use, write};
use super::*;
use tokio::time::sleep;

/// Call of one writer that returns as told.
#[derive(Debug, Clone, Copy)]
struct Call {
    first_refusal: Instant,
    granted: Instant,
    refusals: u32,
}

impl Call {
    fn waited(&self) -> Duration {
        self.granted - self.first_refusal
    }
}

/// Calls after a pause, returns as told until it gets in, and writes a page.
async fn call(
    budget: Arc<Budget>,
    open: Open,
    (number, tenant): (u64, String),
    pause: Duration,
    bytes_per_second: u64,
) -> Call {
    sleep(pause).await;
    let caller = account(&budget, &tenant);
    let first_refusal = now();
    let mut refusals = 0;
    while !open.reserve(&caller) {
        let told = caller.wait_in_line(PAGE, PAGE).retry_after;
        refusals += 1;
        assert!(refusals < 1000, "caller {number} never gets in");
        // A client adds up to a quarter of the time.
        sleep(told + told.mul_f64((number * 7 % 16) as f64 / 64.0)).await;
    }
    let granted = now();
    write(&open, &caller, bytes_per_second).await;
    Call { first_refusal, granted, refusals }
}

/// Crowds of callers: their number, and the time between two of them.
async fn crowd(
    budget: &Arc<Budget>,
    open: &Open,
    (count, pace): (u64, Duration),
    tenant_of: fn(u64) -> String,
    bytes_per_second: u64,
) -> Vec<Call> {
    let calls = (0..count).map(|number| {
        let caller = (number, tenant_of(number));
        tokio::spawn(call(budget.clone(), open.clone(), caller, pace * number as u32, bytes_per_second))
    });
    let calls: Vec<_> = calls.collect();
    futures::future::join_all(calls).await.into_iter().map(Result::unwrap).collect()
}

/// Four writers of a tenant take the room, and stay silent.
fn take_room(budget: &Arc<Budget>, open: &Open) -> Vec<Arc<Account>> {
    let silent: Vec<_> = (0..4).map(|_| account(budget, "tenant")).collect();
    assert!(silent.iter().all(|writer| open.reserve(writer)));
    silent
}

/// Largest number of later callers that got in before a caller.
fn overtaken_max(calls: &[Call]) -> usize {
    let overtook = |one: &Call, other: &&Call| other.first_refusal > one.first_refusal && other.granted < one.granted;
    calls.iter().map(|one| calls.iter().filter(|other| overtook(one, other)).count()).max().unwrap_or(0)
}

fn refusals_max(calls: &[Call]) -> u32 {
    calls.iter().map(|call| call.refusals).max().unwrap_or(0)
}

fn waited_max(calls: &[Call]) -> Duration {
    calls.iter().map(Call::waited).max().unwrap_or_default()
}

fn summary(calls: &[Call]) -> String {
    let refusals: u32 = calls.iter().map(|call| call.refusals).sum();
    format!(
        "{} calls: {refusals} refusals, at most {}; waits up to {:?}; overtaken by {}",
        calls.len(),
        refusals_max(calls),
        waited_max(calls),
        overtaken_max(calls)
    )
}

/// The room takes 40 pages a second. But the node knows no put yet, and tells most callers 10 s.
#[tokio::test(start_paused = true)]
async fn more_callers_than_places_all_get_in_about_in_order() {
    let tenants: [fn(u64) -> String; 2] = [|number| number.to_string(), |_| "tenant".to_owned()];
    for tenant_of in tenants {
        let (budget, open) = empty_node();
        let silent = take_room(&budget, &open);
        let calls = crowd(&budget, &open, (300, Duration::from_millis(1)), tenant_of, 80 * MIB).await;
        let summary = summary(&calls);
        println!("{summary}");
        assert!(refusals_max(&calls) <= 12, "{summary}");
        assert!(waited_max(&calls) <= Duration::from_secs(45), "{summary}");
        assert!(overtaken_max(&calls) <= 160, "{summary}");
        for writer in &silent {
            open.end(writer);
        }
        assert_eq!((in_use(&budget), &budget.status()["writers_waiting"]), (0, &json!(0)));
    }
}

/// A page takes 2 s, so the last callers wait for 150 s. No caller is told more than 10 s.
#[tokio::test(start_paused = true)]
async fn more_callers_than_places_all_get_in_over_slow_links() {
    let tenants: [fn(u64) -> String; 2] = [|number| number.to_string(), |_| "tenant".to_owned()];
    for tenant_of in tenants {
        let (budget, open) = empty_node();
        let _silent = take_room(&budget, &open);
        let calls = crowd(&budget, &open, (300, Duration::from_millis(1)), tenant_of, 4 * MIB).await;
        let summary = summary(&calls);
        println!("{summary}");
        assert!(waited_max(&calls) <= Duration::from_secs(260), "{summary}");
        assert!(refusals_max(&calls) <= 30, "{summary}");
    }
}

/// The room takes ten pages a second, one at a time.
#[tokio::test(start_paused = true)]
async fn crowd_gets_in_one_page_at_a_time() {
    let tenants: [fn(u64) -> String; 2] = [|number| number.to_string(), |_| "tenant".to_owned()];
    for tenant_of in tenants {
        let budget = budget_for(PAGE);
        let (open, silent) = (Open::default(), account(&budget, "tenant"));
        assert!(open.reserve(&silent));
        let calls = crowd(&budget, &open, (100, Duration::from_millis(1)), tenant_of, 80 * MIB).await;
        let summary = summary(&calls);
        println!("{summary}");
        assert!(refusals_max(&calls) <= 14, "{summary}");
        assert!(waited_max(&calls) <= Duration::from_secs(90), "{summary}");
        assert_eq!((in_use(&budget), &budget.status()["writers_waiting"]), (0, &json!(0)));
    }
}

/// Others come as fast as the room takes pages, for 15 s. Without an order the first ones would
/// compete with them all the time.
#[tokio::test(start_paused = true)]
async fn newcomers_do_not_starve_callers_without_a_place() {
    let (budget, open) = empty_node();
    let _silent = take_room(&budget, &open);
    let first = crowd(&budget, &open, (300, Duration::from_millis(1)), |_| "tenant".into(), 80 * MIB);
    let later = async {
        sleep(Duration::from_secs(1)).await;
        crowd(&budget, &open, (600, Duration::from_millis(25)), |_| "tenant".into(), 80 * MIB).await
    };
    let (first, later) = futures::join!(first, later);
    println!("{}; {}", summary(&first), summary(&later));
    assert!(waited_max(&first) <= Duration::from_secs(45) && refusals_max(&first) <= 12, "{}", summary(&first));
    assert!(waited_max(&later) <= Duration::from_secs(80) && refusals_max(&later) <= 14, "{}", summary(&later));
}

/// Before, each return was another first refusal: it had no place, and newcomers took the room.
#[tokio::test(start_paused = true)]
async fn caller_told_the_longest_time_gets_a_place_when_it_returns() {
    let (budget, open, holder) = full_node("tenant");
    // 64 s for a page.
    let holder_sends = async |seconds: u32| {
        for _ in 0..10 * seconds {
            sleep(Duration::from_millis(100)).await;
            holder.record_received(MIB as usize / 80);
        }
    };
    holder_sends(2).await;
    let caller = account(&budget, "tenant");
    assert!(!open.reserve(&caller));
    assert_eq!(caller.wait_in_line(PAGE, PAGE).retry_after, Duration::from_secs(10));
    assert_eq!(budget.status()["writers_waiting"], 1);
    holder_sends(11).await;
    assert!(!open.reserve(&caller));
    assert_eq!(caller.wait_in_line(PAGE, PAGE).retry_after, Duration::from_secs(10));
    open.end(&holder);
    let newcomer = account(&budget, "tenant");
    assert!(!open.reserve(&newcomer), "the room is promised to the caller");
    assert!(open.reserve(&caller));
}

/// Clients of Redis wait at the node, which looks for room again and again. Each look must not move
/// the time for which room is promised.
#[tokio::test(start_paused = true)]
async fn caller_that_returns_early_keeps_the_time_of_its_promise() {
    let (mut line, mut tenants) = (Line::default(), TenantTable::default());
    let (early, other) = (tenants.join(Peer::Local, "early"), tenants.join(Peer::Local, "other"));
    let told = Duration::from_secs(10);
    let begin = now();
    while now() < begin + told {
        line.enter(0, (early, PAGE), None, now());
        line.keep_until(0, (now() + told, now() + 2 * told), true, now());
        sleep(Duration::from_millis(100)).await;
    }
    let by = Some(now() + Duration::from_millis(1));
    assert_eq!(line.promised((1, other), &tenants, 100 * PAGE, (now(), by)).bytes().of_all, PAGE);
}

/// Before, a connection without a place had never waited, so it could not take the excess.
#[tokio::test(start_paused = true)]
async fn tenant_behind_a_full_line_gets_its_share() {
    let (budget, open) = empty_node();
    let greedy: Vec<_> = (0..4).map(|_| account(&budget, "greedy")).collect();
    assert!(greedy.iter().all(|writer| open.reserve(writer)));
    // A put takes 4 s, so that those that queue are told 10 s.
    let progress = async |seconds: u32| {
        for _ in 0..10 * seconds {
            sleep(Duration::from_millis(100)).await;
            greedy.iter().for_each(|writer| writer.record_received(PAGE as usize / 40));
        }
    };
    progress(1).await;
    let more: Vec<_> = (0..300).map(|_| account(&budget, "greedy")).collect();
    for caller in &more {
        assert!(!open.reserve(caller));
        caller.wait_in_line(PAGE, PAGE);
    }
    let modest = account(&budget, "modest");
    assert!(!open.reserve(&modest));
    modest.wait_in_line(PAGE, PAGE);
    progress(2).await;
    assert!(open.reserve(&modest));
    assert_eq!(greedy.iter().map(|writer| open.len(writer)).sum::<usize>(), 3);
}

/// A forecast visits the writers of its scope, and serves all refusals of 10 ms. Each connection is
/// one writer at most, so the limit of connections bounds the visits.
#[tokio::test(start_paused = true)]
async fn forecasts_visit_each_writer_of_their_scope_once_per_ten_milliseconds() {
    const WRITERS: usize = 200;
    let (budget, open) = (budget_for(WRITERS as u64 * PAGE), Open::default());
    let writers: Vec<_> = (0..WRITERS).map(|number| account(&budget, &format!("tenant {}", number % 2))).collect();
    assert!(writers.iter().all(|writer| open.reserve(writer)));
    let strangers: Vec<_> = (0..50).map(|number| account(&budget, &format!("stranger {number}"))).collect();
    let visits = || budget.state.lock().forecast_visits;
    // All refusals of one moment, by the node and by the shares of both tenants.
    let refuse = || {
        for caller in writers.iter().chain(&strangers) {
            caller.wait_in_line(PAGE, PAGE);
        }
    };
    refuse();
    let first = visits();
    assert!((WRITERS..=2 * WRITERS).contains(&first), "{first} visits");
    sleep(Duration::from_millis(5)).await;
    refuse();
    assert_eq!(visits(), first, "the forecasts are current");
    let mut before = first;
    for _ in 0..20 {
        sleep(Duration::from_millis(10)).await;
        refuse();
        let after = visits();
        assert!(after - before <= 2 * WRITERS, "{} visits", after - before);
        before = after;
    }
    assert!(before > 10 * WRITERS, "{before} visits: each moment has its own forecast");
}
