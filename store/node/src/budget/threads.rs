//! Models of the budget.

use super::{Account, Budget, Charge, Kind};
use crate::model::{block_on, explore, finds};
use crate::options::NodeOptions;
use crate::places::Peer;
use larder_memory::Arena;
use shuttle::thread;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// A budget with room for two puts of 1 MiB, and for two reads.
fn accounts() -> (Arc<Budget>, [Arc<Account>; 3]) {
    let options = NodeOptions { in_flight_bytes: Some(4 * MIB), ..NodeOptions::default() };
    let budget = Budget::new(&options, Arc::default(), Arc::default());
    let accounts = ["a", "a", "b"].map(|tenant| {
        let account = budget.open().unwrap();
        account.set_tenant(Peer::Local, tenant);
        account
    });
    (budget, accounts)
}

fn used(budget: &Budget, kind: Kind) -> u64 {
    budget.state.lock().used[kind as usize]
}

/// Concurrent charges stay within the node's bound together, and all bytes return.
fn charges_beside_each_other(_: &Arc<Arena>) {
    let (budget, accounts) = accounts();
    let chargers = accounts.map(|account| thread::spawn(move || account.charge(Kind::Puts, MIB).ok()));
    let charges: Vec<Option<Charge>> = chargers.into_iter().map(|charger| charger.join().unwrap()).collect();
    assert!(used(&budget, Kind::Puts) <= 2 * MIB, "the node's bound for puts");
    assert!(charges.iter().flatten().count() >= 1, "the first charge always fits");
    drop(charges);
    assert_eq!(used(&budget, Kind::Puts), 0);
}

#[test]
fn threads_charge_no_more_than_the_bound() {
    explore(charges_beside_each_other);
}

#[test]
fn threads_find_a_charge_after_its_check() {
    finds("node.charge-after-unlock", charges_beside_each_other);
}

/// Every read that waits for memory gets it once others return theirs.
fn reads_beside_each_other(_: &Arc<Arena>) {
    let (budget, accounts) = accounts();
    let [first, second, other] = accounts;
    let readers = [(first.clone(), MIB), (first, MIB), (second, 2 * MIB), (other, MIB)].map(|(account, bytes)| {
        thread::spawn(move || {
            let charge = block_on(account.charge_read(bytes));
            thread::yield_now();
            drop(charge);
        })
    });
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert_eq!(used(&budget, Kind::Reads), 0);
}

#[test]
fn threads_that_wait_for_read_memory_all_get_it() {
    explore(reads_beside_each_other);
}

#[test]
fn threads_find_read_memory_that_never_returns() {
    finds("node.read-charge-leaks", reads_beside_each_other);
}
