//! Accounts and indices of the budget under random callers.

use super::room_tests::{Open, PAGE, account_of, budget, in_use};
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
        let budget = budget();
        let open = Open::default();
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
