//! Accounts: random callers, and clients at the limit of their own connection.

use super::room_tests::{MIB, Open, PAGE, account_of, empty_node, in_use, write};
use super::*;
use tokio::time::sleep;

/// Numbers of a linear congruential generator (Knuth's MMIX).
fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

/// Callers reserve, return early, in time or late, write, or vanish at any moment.
#[tokio::test(start_paused = true)]
async fn room_and_line_are_empty_once_all_callers_have_vanished() {
    for seed in 0..40 {
        let mut random = numbers(seed);
        let (budget, open) = empty_node();
        let mut callers: Vec<Arc<Account>> = Vec::new();
        for _ in 0..400 {
            sleep(Duration::from_millis(random(200))).await;
            let peer = [Peer::Local, Peer::Address([10, 0, 0, 9].into())][random(2) as usize];
            if callers.len() < 40 {
                callers.push(account_of(&budget, peer, &format!("{}", random(6))));
            }
            let index = random(callers.len() as u64) as usize;
            let caller = callers[index].clone();
            match random(6) {
                0 => {
                    open.0.lock().remove(&caller.connection());
                    drop(caller);
                    callers.swap_remove(index);
                }
                1 => drop(open.end(&caller)),
                2 => caller.record_received(random(PAGE) as usize),
                _ if open.reserve(&caller) => {}
                _ => drop(caller.wait_in_line(PAGE * (1 + random(3)), PAGE)),
            }
            let held: u64 = open.0.lock().values().flatten().map(Charge::bytes).sum();
            assert_eq!(in_use(&budget), held, "seed {seed}");
            budget.state.lock().check_indices(budget.node_max[Kind::Puts as usize]);
        }
        callers.clear();
        open.0.lock().clear();
        let status = budget.status();
        assert_eq!((in_use(&budget), &status["writers_waiting"], &status["tenants"]), (0, &json!(0), &json!(0)));
        budget.state.lock().check_indices(budget.node_max[Kind::Puts as usize]);
    }
}

/// Client with both pages reserved that its connection may have, on a node with room for four.
fn client_at_its_own_limit() -> (Open, Arc<Account>) {
    let (in_flight_bytes, connection_put_bytes) = (Some(8 * PAGE), Some(2 * PAGE));
    let options = NodeOptions { in_flight_bytes, connection_put_bytes, ..NodeOptions::default() };
    let budget = Budget::new(&options, Arc::default(), Arc::default());
    let (open, client) = (Open::default(), account_of(&budget, Peer::Local, "tenant"));
    assert!(open.reserve(&client) && open.reserve(&client));
    (open, client)
}

/// Time told to a client that is refused.
fn told(open: &Open, client: &Arc<Account>) -> Duration {
    assert!(!open.reserve(client));
    client.wait_in_line(PAGE, PAGE).retry_after
}

#[tokio::test(start_paused = true)]
async fn client_at_its_own_limit_is_told_when_its_own_page_ends() {
    for rate in [MIB, 4 * MIB, 40 * MIB] {
        let (open, client) = client_at_its_own_limit();
        let page_time = Duration::from_secs_f64(PAGE as f64 / rate as f64);
        let calling = async {
            let waited = Duration::from_millis(120);
            sleep(waited).await;
            let told = told(&open, &client);
            assert!(waited + told <= page_time.mul_f64(1.1) + Duration::from_millis(50), "{told:?} of {page_time:?}");
            sleep(told).await;
            assert!(open.reserve(&client), "told {told:?} of {page_time:?}");
        };
        futures::join!(write(&open, &client, rate), calling);
    }
}

/// Others take the room of a writer that is silent, or sends less than 8 KiB/s. Its own connection
/// never does. It was told less than a second, and after seven seconds of silence a millisecond.
#[tokio::test(start_paused = true)]
async fn silent_client_at_its_own_limit_is_told_longer_and_longer_times() {
    let (open, client) = client_at_its_own_limit();
    let begin = now();
    let mut returns = 0;
    while now() - begin < Duration::from_secs(60) {
        sleep(told(&open, &client)).await;
        returns += 1;
        assert!(returns <= 12, "{returns} returns within {:?}", now() - begin);
    }
    assert!(open.end(&client) && open.reserve(&client));
}

#[tokio::test(start_paused = true)]
async fn client_at_its_own_limit_that_trickles_is_told_the_longest_time() {
    let (open, client) = client_at_its_own_limit();
    for _ in 0..30 {
        sleep(Duration::from_millis(100)).await;
        client.record_received(400);
    }
    assert_eq!(told(&open, &client), Duration::from_secs(10));
    assert_eq!(open.len(&client), 2);
}
