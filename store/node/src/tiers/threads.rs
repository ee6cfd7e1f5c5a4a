//! Models of L2 over L3, of puts and of holds.

use super::load::LoadFor;
use super::turns::TurnBefore;
use super::{PageLocation, StampedLocation, Tiers};
use crate::budget::LosingWriter;
use crate::holds::Holds;
use crate::model::{
    block_on, explore, finds, id, land, open_put, options, page, put, reserve, reserved, soon, store, store_with_log,
};
use crate::options::NodeOptions;
use crate::page::PageShapes;
use crate::places::Peer;
use crate::policy::WritePolicy;
use crate::puts::{Presence, Progress};
use crate::store::Store;
use larder_memory::Arena;
use larder_wire::{CommitOutcome, ReserveOutcome, TierCode};
use shuttle::thread;
use std::sync::Arc;

fn assert_forgotten(tiers: &Tiers, number: u8) {
    assert_eq!(tiers.lookup(&id(number)).tier(), TierCode::Absent, "a forgotten page is served");
    assert!(tiers.get_l2(&id(number)).is_none() && tiers.policy_generation(number).is_none());
}

impl Tiers {
    fn policy_generation(&self, number: u8) -> Option<u64> {
        self.state.lock().policy.generation(&id(number))
    }

    fn bytes_in_flight(&self) -> u64 {
        self.state.lock().policy.in_flight_bytes()
    }
}

/// A put that was open when the forget began is aborted, or is forgotten with its page.
fn commit_beside_forget(arena: &Arc<Arena>) {
    let (store, _) = store_with_log(arena, &options(WritePolicy::Through));
    let open = open_put(&store, 1, 7);
    let writer = thread::spawn({
        let store = store.clone();
        move || store.puts().commit(&open)
    });
    block_on(store.forget(&[id(1)], soon())).unwrap();
    writer.join().unwrap();
    assert_forgotten(store.tiers(), 1);
    block_on(store.tiers().drain(soon()));
    assert_forgotten(store.tiers(), 1);
}

#[test]
fn threads_never_seal_a_put_after_a_forget_that_found_it_open() {
    explore(commit_beside_forget);
}

#[test]
fn threads_find_a_commit_that_a_forget_overtakes() {
    finds("node.commit-after-unlock", commit_beside_forget);
}

/// The commit of a silent writer arrives while the node takes the room of its put for others. One
/// of them ends the put, and its room returns once.
fn commit_beside_take_back(arena: &Arc<Arena>) {
    let store = store(arena);
    let account = store.budget().open().unwrap();
    account.set_tenant(Peer::Local, "a");
    let put = store.reserve_for(&account, id(1), &reserved(1), true).unwrap();
    land(&put, 7);
    let writer = thread::spawn({
        let (store, put) = (store.clone(), put.clone());
        move || store.puts().commit(&put)
    });
    let silent = LosingWriter { connection: account.connection(), is_silent: true };
    store.puts().take_back(&[silent], |_| true);
    let is_stored = writer.join().unwrap() == CommitOutcome::Stored;
    let taken_back = store.metrics().puts_taken_back.get();
    assert_eq!(taken_back, u64::from(!is_stored), "both ended the put, or none");
    assert_eq!(put.progress(), if is_stored { Progress::Sealed } else { Progress::Aborted });
    let page = store.tiers().get_l2(&id(1));
    assert_eq!(page.is_some(), is_stored, "the answer of the commit");
    assert!(page.is_none_or(|page| page.payload.iter().all(|&byte| byte == 7)));
    // A second return would have panicked: the put's bytes are all that is reserved.
    assert!(store.tiers().bytes_in_flight() == 0 && account.is_idle(), "the room of the put did not return");
    assert_eq!(store.puts().counts(), (0, 0));
}

#[test]
fn threads_end_a_put_once_when_its_room_is_taken_during_its_commit() {
    explore(commit_beside_take_back);
}

#[test]
fn threads_find_an_abort_that_trusts_the_progress_of_a_put() {
    finds("node.abort-after-unlock", commit_beside_take_back);
}

/// A hold that begins beside a forget does not keep the page readable for others.
fn hold_beside_forget(arena: &Arc<Arena>) {
    let store = store(arena);
    put(&store, 1, 7);
    hold_and_forget(&store);
}

/// The same for a page that L3 has too, and that a hold may therefore name after L2 lost it.
fn hold_beside_durable_forget(arena: &Arc<Arena>) {
    let (store, _) = store_with_log(arena, &options(WritePolicy::Through));
    put(&store, 1, 7);
    block_on(store.tiers().drain(soon()));
    hold_and_forget(&store);
}

fn hold_and_forget(store: &Arc<Store>) {
    let reader = thread::spawn({
        let store = store.clone();
        move || {
            let page = store.tiers().get_l2(&id(1))?;
            let hold = store.tiers().hold(&page)?;
            assert!(hold.page().payload.iter().all(|&byte| byte == 7));
            Some(hold)
        }
    });
    block_on(store.forget(&[id(1)], soon())).unwrap();
    let hold = reader.join().unwrap();
    assert_forgotten(store.tiers(), 1);
    drop(hold);
    assert_eq!(store.tiers().holds.usage(), (0, 0));
}

#[test]
fn threads_never_serve_a_forgotten_page_from_a_hold() {
    explore(hold_beside_forget);
    explore(hold_beside_durable_forget);
}

#[test]
fn threads_find_a_hold_that_is_taken_after_its_check() {
    finds("node.hold-after-unlock", hold_beside_forget);
    finds("node.hold-after-unlock", hold_beside_durable_forget);
}

#[test]
fn threads_find_a_hold_that_a_forget_does_not_withhold() {
    finds("node.serve-forgotten-held", hold_beside_forget);
}

/// The bytes of a held page stay in place while L2 evicts it and another put takes its room.
fn hold_beside_eviction(arena: &Arc<Arena>) {
    let store = store(arena);
    put(&store, 1, 7);
    let reader = thread::spawn({
        let store = store.clone();
        move || {
            let hold = store.tiers().hold_l2(&id(1));
            thread::yield_now();
            assert!(
                hold.is_none_or(|hold| hold.page().payload.iter().all(|&byte| byte == 7)),
                "held memory was reused"
            );
        }
    });
    store.tiers().make_room();
    put(&store, 2, 9);
    reader.join().unwrap();
    assert_eq!(store.tiers().holds.usage(), (0, 0));
}

#[test]
fn threads_keep_held_memory_in_place_during_eviction() {
    explore(hold_beside_eviction);
}

/// Concurrent holds stay within the bound together.
fn holds_beside_each_other(arena: &Arc<Arena>) {
    let (first, second) = (page(arena, 1, 1, 8192), page(arena, 2, 2, 8192));
    let holds = Holds::new(8192);
    let holders = [first, second].map(|(meta, payload)| {
        let holds = holds.clone();
        let page = Arc::new(PageShapes::default().page(meta, payload));
        thread::spawn(move || holds.hold(&page, || true))
    });
    let held = holders.map(|holder| holder.join().unwrap());
    assert!(holds.usage().1 <= 8192, "the bound of held bytes");
    drop(held);
    assert_eq!(holds.usage(), (0, 0));
}

#[test]
fn threads_hold_no_more_bytes_than_the_bound() {
    explore(holds_beside_each_other);
}

#[test]
fn threads_find_holds_that_pass_their_bound_together() {
    finds("node.held-bytes-after-unlock", holds_beside_each_other);
}

/// A page on its way from L2 to L3 is found at every moment.
fn lookup_beside_eviction(arena: &Arc<Arena>) {
    let (store, _) = store_with_log(arena, &options(WritePolicy::Back));
    put(&store, 1, 7);
    let reader = thread::spawn({
        let store = store.clone();
        move || {
            for _ in 0..4 {
                assert_ne!(store.tiers().lookup(&id(1)).tier(), TierCode::Absent, "a page between the tiers");
            }
        }
    });
    store.tiers().make_room();
    block_on(store.tiers().drain(soon()));
    assert_ne!(store.tiers().lookup(&id(1)).tier(), TierCode::Absent, "a page that was written");
    reader.join().unwrap();
}

#[test]
fn threads_find_a_page_at_every_moment_of_its_eviction() {
    explore(lookup_beside_eviction);
}

#[test]
fn threads_find_a_gap_between_the_tiers() {
    finds("node.gap-before-written", lookup_beside_eviction);
}

/// A node with page 1 on L3 only, and its location.
fn store_with_page_on_l3(arena: &Arc<Arena>) -> (Arc<Store>, StampedLocation) {
    let (store, l3) = store_with_log(arena, &options(WritePolicy::Through));
    let (meta, payload) = page(arena, 1, 1, 4096);
    block_on(l3.write(meta, payload, soon())).unwrap();
    let PageLocation::OnL3(found) = store.tiers().lookup(&id(1)) else { panic!("the page is on L3") };
    (store, found)
}

/// A read of L3 does not bring a forgotten page back into L2.
fn load_beside_forget(arena: &Arc<Arena>) {
    let (store, found) = store_with_page_on_l3(arena);
    let reader = thread::spawn({
        let store = store.clone();
        move || block_on(store.tiers().read_into_l2(id(1), found, LoadFor::L2, TurnBefore::none()))
    });
    block_on(store.forget(&[id(1)], soon())).unwrap();
    reader.join().unwrap();
    assert_forgotten(store.tiers(), 1);
}

/// A read of L3 does not replace a newer put by an older one.
fn load_beside_put(arena: &Arc<Arena>) {
    let (store, found) = store_with_page_on_l3(arena);
    let reader = thread::spawn({
        let store = store.clone();
        move || block_on(store.tiers().read_into_l2(id(1), found, LoadFor::L2, TurnBefore::none()))
    });
    block_on(store.forget(&[id(1)], soon())).unwrap();
    put(&store, 1, 9);
    reader.join().unwrap();
    let page = store.tiers().get_l2(&id(1)).expect("the newer put is in L2");
    assert!(page.payload.iter().all(|&byte| byte == 9), "the forgotten put replaced the newer one");
}

#[test]
fn threads_never_replace_a_newer_put_by_a_load() {
    explore(load_beside_put);
}

#[test]
fn threads_never_load_a_forgotten_page_into_l2() {
    explore(load_beside_forget);
}

#[test]
fn threads_find_a_load_after_a_forget() {
    finds("node.load-after-forget", load_beside_forget);
}

#[test]
fn threads_find_a_load_after_its_check() {
    finds("node.load-after-unlock", load_beside_forget);
}

/// Two writers of one page compete, and one gets the put.
fn writers_of_one_page(arena: &Arc<Arena>) {
    let store = store(arena);
    let writers = [1, 1].map(|number| {
        let store = store.clone();
        thread::spawn(move || reserve(&store, number).map(drop))
    });
    let outcomes = writers.map(|writer| writer.join().unwrap());
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
    assert!(outcomes.iter().all(|outcome| !matches!(outcome, Err(ReserveOutcome::Busy))));
    store.puts().shut_down();
}

#[test]
fn threads_open_one_put_of_a_page_at_a_time() {
    explore(writers_of_one_page);
}

#[test]
fn threads_find_two_puts_of_one_page() {
    finds("node.reserve-after-unlock", writers_of_one_page);
}

/// A writer that looks a page up while another puts it finds that put, or its page.
fn reserve_beside_put(arena: &Arc<Arena>) {
    let store = store(arena);
    let writer = thread::spawn({
        let store = store.clone();
        move || {
            let put = reserve(&store, 1)?;
            land(&put, 7);
            Ok::<_, ReserveOutcome>(store.puts().commit(&put))
        }
    });
    let second = reserve(&store, 1);
    let first = writer.join().unwrap();
    assert!(first.is_ok() != second.is_ok(), "both or none put the page: {first:?}");
    store.puts().shut_down();
}

#[test]
fn threads_put_a_page_once_while_its_put_ends() {
    explore(reserve_beside_put);
}

#[test]
fn threads_find_a_lookup_that_is_trusted_too_long() {
    finds("node.lookup-trusted-after-unlock", reserve_beside_put);
    finds("node.lookup-trusted-after-unlock", wait_beside_reserve);
}

/// A reader that waits for an absent page learns of every put of it.
fn wait_beside_reserve(arena: &Arc<Arena>) {
    wait_beside_put(&store(arena));
}

/// As above, for a put that L2 refuses and that goes to L3 at once.
fn wait_beside_put_past_l2(arena: &Arc<Arena>) {
    let options = NodeOptions { l2_bytes: 0, ..options(WritePolicy::Through) };
    let (store, _) = store_with_log(arena, &options);
    wait_beside_put(&store);
    block_on(store.tiers().drain(soon()));
}

fn wait_beside_put(store: &Arc<Store>) {
    let reader = thread::spawn({
        let store = store.clone();
        move || match store.puts().presence(&id(1)) {
            // No deadline passes in a model: a missed wake-up is a deadlock.
            Presence::Absent(waiter) => assert!(block_on(waiter.put_started(soon()))),
            Presence::Open(_) | Presence::Sealed => {}
            Presence::TooManyWaiters => panic!("one reader is not too many"),
        }
    });
    put(store, 1, 7);
    reader.join().unwrap();
}

#[test]
fn threads_that_wait_for_a_put_are_woken() {
    explore(wait_beside_reserve);
    explore(wait_beside_put_past_l2);
}

#[test]
fn threads_find_a_put_past_l2_that_changes_no_stamp() {
    finds("node.refused-put-keeps-stamp", wait_beside_put_past_l2);
}

#[test]
fn threads_find_a_missed_wake_up() {
    finds("node.wait-after-unlock", wait_beside_reserve);
}
