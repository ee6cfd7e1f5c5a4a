use super::pace::{RETRY_ASKED_MAX, RETRY_MAX};
use super::*;

const MIB: u64 = 1 << 20;

fn budget() -> Arc<Budget> {
    let options = NodeOptions {
        in_flight_bytes: Some(64 * MIB),
        connection_bytes: Some(8 * MIB),
        asked_bytes: Some(100 * MIB),
        request_bytes: 4 * MIB,
        ..NodeOptions::default()
    };
    Budget::new(&options, Arc::default())
}

fn account(budget: &Arc<Budget>, tenant: &str) -> Arc<Account> {
    let account = budget.open().unwrap();
    account.belongs_to(tenant);
    account
}

fn used_of(budget: &Budget) -> Vec<u64> {
    budget.usage().into_iter().map(|(_, bytes)| bytes).collect()
}

#[tokio::test(start_paused = true)]
async fn bounds_hold_for_connection_and_node_and_all_comes_back() {
    let budget = budget();
    let clients: Vec<_> = (0..5).map(|_| account(&budget, "t")).collect();
    let full = |client: &Arc<Account>| {
        let charges: Vec<Charge> = (0..9).map_while(|_| client.charge(Kind::Puts, MIB).ok()).collect();
        assert!(client.charge(Kind::Puts, MIB).is_err());
        charges
    };
    let mut held: Vec<_> = clients.iter().map(full).collect();
    let counts: Vec<usize> = held.iter().map(Vec::len).collect();
    assert_eq!(counts, [8, 8, 8, 8, 0], "8 MiB for each, 32 for all");
    assert_eq!(used_of(&budget), [32 * MIB, 0, 0, 0]);
    held.remove(1);
    assert_eq!(full(&clients[4]).len(), 8);
    drop((held, clients));
    assert_eq!((used_of(&budget), budget.status()["connections"].as_u64()), (vec![0; 4], Some(0)));
    assert_eq!(budget.status()["tenants"], 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_larger_than_the_budget_moves_alone() {
    let budget = budget();
    let (one, other) = (account(&budget, "a"), account(&budget, "b"));
    let large = one.charge(Kind::Reads, 50 * MIB).ok().unwrap();
    assert!(other.charge(Kind::Reads, MIB).is_err(), "the node is full");
    drop(large);
    assert!(other.charge(Kind::Reads, MIB).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_tenant_has_all_while_alone_and_its_share_when_others_want_some() {
    let budget = budget();
    let (greedy, modest) = (account(&budget, "greedy"), account(&budget, "modest"));
    let more = account(&budget, "greedy");
    let all = |client: &Arc<Account>| (0..32).map_while(|_| client.charge(Kind::Puts, MIB / 2).ok()).collect();
    let (mut charges, rest): (Vec<Charge>, Vec<Vec<Charge>>) = (all(&greedy), vec![all(&more)]);
    let third = account(&budget, "greedy");
    let fourth = account(&budget, "greedy");
    let rest: Vec<Vec<Charge>> = rest.into_iter().chain([all(&third), all(&fourth)]).collect();
    assert_eq!(charges.len() + rest.iter().map(Vec::len).sum::<usize>(), 64, "32 MiB, all there is");
    assert!(modest.charge(Kind::Puts, MIB).is_err(), "all is taken");
    // As it comes back, it is for who has less.
    charges.clear();
    assert!(greedy.charge(Kind::Puts, MIB).is_err(), "its tenant has more than half of it");
    let taken: Vec<Charge> = (0..32).map_while(|_| modest.charge(Kind::Puts, MIB / 2).ok()).collect();
    assert_eq!(taken.len(), 16);
    drop(taken);
    // Who has nothing and asked for nothing lately is no other.
    drop(modest);
    assert!(greedy.charge(Kind::Puts, MIB).is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_hint_follows_from_what_ended_lately() {
    let budget = budget();
    let client = account(&budget, "t");
    let hint = || client.charge(Kind::Puts, 8 * MIB).err().unwrap().retry_after;
    let mut held: Vec<Charge> = (0..8).map(|_| client.charge(Kind::Puts, MIB).ok().unwrap()).collect();
    assert_eq!(hint(), RETRY_MAX, "nothing has ended yet");
    let other = account(&budget, "t");
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        other.charge(Kind::Puts, MIB).ok().unwrap().unused();
    }
    assert_eq!(hint(), RETRY_MAX, "what came to nothing tells nothing");
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        held.pop();
        held.push(client.charge(Kind::Puts, MIB).ok().unwrap());
    }
    // 100 MiB a second, and 8 too many.
    let hint = hint();
    assert!((60..110).contains(&hint.as_millis()), "{hint:?}");
}

/// Whether a future has to wait for now.
async fn waits<T>(future: impl Future<Output = T>) -> bool {
    tokio::time::timeout(Duration::from_millis(100), future).await.is_err()
}

#[tokio::test(start_paused = true)]
async fn pages_that_wait_for_their_reader_go_in_order_and_who_gives_up_is_passed_over() {
    let budget = budget();
    let reader = account(&budget, "t");
    // A quarter of what is left when it has them.
    let mut on_their_way = vec![reader.charge_read(3 * MIB).await, reader.charge_read(3 * MIB).await];
    let order = Arc::<Mutex<Vec<u32>>>::default();
    let waiters: Vec<_> = (0..6)
        .map(|number| {
            let (reader, order) = (reader.clone(), order.clone());
            tokio::spawn(async move {
                let charge = reader.charge_read(3 * MIB).await;
                order.lock().push(number);
                charge
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(order.lock().is_empty());
    // The first, which looks, and one in the middle of those that wait for it.
    waiters[0].abort();
    waiters[3].abort();
    drop(on_their_way.pop());
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(*order.lock(), [1]);
    drop(on_their_way);
    for (number, waiter) in waiters.into_iter().enumerate() {
        let had = tokio::time::timeout(Duration::from_secs(1), waiter).await.expect("nobody waits for ever");
        assert_eq!(had.is_ok(), number != 0 && number != 3, "{number}");
    }
    assert_eq!(*order.lock(), [1, 2, 4, 5]);
    assert_eq!(used_of(&budget), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn however_many_readers_are_stuck_some_is_left_and_a_reader_waits_for_itself() {
    let budget = budget();
    let stuck: Vec<_> = (0..12).map(|_| account(&budget, "t")).collect();
    let taken = stuck.iter().map(|client| (0..99).map_while(|_| client.charge(Kind::Reads, MIB / 4).ok()).collect());
    let taken: Vec<Vec<Charge>> = taken.collect();
    let used = budget.usage()[1].1;
    assert!(taken[0].len() > 20 && used > 20 * MIB && used < 31 * MIB, "{} and {used}", taken[0].len());
    let reader = account(&budget, "t");
    let first = reader.charge_read(MIB / 4).await;
    assert!(waits(reader.charge_read(4 * MIB)).await, "some of its own is on its way");
    let (had, ()) = tokio::join!(reader.charge_read(MIB / 4), async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        drop(first);
    });
    drop((had, taken));
    assert_eq!(used_of(&budget), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_room_has_it_in_turn() {
    let budget = budget();
    let (all, a, b) = (account(&budget, "a"), account(&budget, "a"), account(&budget, "b"));
    let full = all.charge(Kind::Reads, 32 * MIB).ok().unwrap();
    let order = Mutex::new(Vec::new());
    let turn = async |who: &Arc<Account>, name: &'static str, bytes: u64| {
        let charge = who.charge_read(bytes).await;
        order.lock().push(name);
        tokio::time::sleep(Duration::from_millis(10)).await;
        drop(charge);
    };
    let others: Vec<_> = (0..3).map(|_| account(&budget, "a")).collect();
    let given_up = async {
        let waiting = turn(&a, "given up", MIB);
        assert!(waits(waiting).await);
        assert!(b.try_charge(Kind::Reads, 1).is_none());
        drop(full);
    };
    tokio::join!(
        turn(&others[0], "large", 30 * MIB),
        turn(&others[1], "small", 3 * MIB),
        turn(&b, "of another tenant", 30 * MIB),
        turn(&others[2], "last", MIB),
        given_up,
    );
    // It was the turn of the other tenant, as all was the first one's, and neither large page was overtaken by a small one.
    let order = order.into_inner();
    assert_eq!((&order[..2], order.len()), (&["of another tenant", "large"][..], 4));
    assert_eq!(used_of(&budget), [0; 4]);
    assert!(b.try_charge(Kind::Reads, 1).is_some(), "nobody waits any more");
}

#[tokio::test(start_paused = true)]
async fn a_reader_asks_for_what_it_can_take_in_its_time() {
    let budget = budget();
    let (reader, soon) = (account(&budget, "t"), Duration::from_secs(8));
    let ask = |bytes| reader.charge_asked(bytes, now() + soon);
    let mut asked: Vec<Charge> = (0..200).map_while(|_| ask(MIB).ok()).collect();
    assert_eq!(asked.len(), 100, "all it may, as nothing is known of it");
    assert_eq!(ask(MIB).err().unwrap().retry_after, RETRY_ASKED_MAX);
    // 10 MiB a second, and a quarter of 8 seconds.
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        asked.pop().unwrap().sent();
    }
    assert_eq!(ask(MIB).err().unwrap().retry_after, RETRY_ASKED_MAX, "there are seven seconds too many");
    asked.truncate(5);
    tokio::time::sleep(Duration::from_millis(1)).await;
    asked.extend((0..200).map_while(|_| ask(MIB).ok()));
    assert!((18..=20).contains(&asked.len()), "{}", asked.len());
    // What was given up tells nothing, nor does a rest; taking nothing does, and then there is little left for it.
    drop(asked);
    tokio::time::sleep(Duration::from_secs(100)).await;
    let asked: Vec<Charge> = (0..200).map_while(|_| ask(MIB).ok()).collect();
    assert!((18..=20).contains(&asked.len()), "{}", asked.len());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(ask(MIB).is_err());
    drop(asked);
    let least: Vec<Charge> = (0..200).map_while(|_| ask(MIB).ok()).collect();
    assert_eq!(least.len() as u64, ASKED_MIN / MIB);
    let others = account(&budget, "t");
    assert!(others.charge_asked(100 * MIB, now() + soon).is_ok(), "that is its own affair");
}

#[tokio::test(start_paused = true)]
async fn who_asks_for_nothing_is_counted_like_others() {
    let budget = budget();
    let (one, other) = (account(&budget, "t"), account(&budget, "t"));
    let soon = || now() + Duration::from_secs(1);
    for _ in 0..3 {
        let some = one.charge_asked(MIB, soon()).ok().unwrap();
        let nothing = one.charge_asked(0, soon()).ok().unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        some.sent();
        assert_eq!(budget.state.lock().readers, 1);
        drop(nothing);
        assert_eq!(budget.state.lock().readers, 0);
        assert!(other.charge_asked(MIB, soon()).is_ok());
    }
    assert_eq!(used_of(&budget), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn a_tenant_with_its_share_holds_nobody_else_up() {
    let budget = budget();
    let (a, b, more_a, more_b) =
        (account(&budget, "a"), account(&budget, "b"), account(&budget, "a"), account(&budget, "b"));
    let large = a.charge(Kind::Reads, 16 * MIB).ok().unwrap();
    let mut small: Vec<Charge> = (0..16).map_while(|_| b.charge(Kind::Reads, MIB).ok()).collect();
    let other: Vec<Charge> =
        (small.len()..16).map(|_| account(&budget, "b").charge(Kind::Reads, MIB).ok().unwrap()).collect();
    let waiting = tokio::spawn(async move { more_a.charge_read(16 * MIB).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(waits(more_b.charge_read(MIB)).await, "all is taken");
    small.pop();
    assert!(!waits(more_b.charge_read(MIB)).await && !waiting.is_finished());
    drop((large, small, other));
    assert!(waiting.await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_nothing_is_given_up_only_when_others_wait() {
    let budget = budget();
    let (slow, quick, third) = (account(&budget, "t"), account(&budget, "t"), account(&budget, "t"));
    let queue = |client: &Arc<Account>| {
        let mut charge = client.charge(Kind::Reads, 16 * MIB).ok().unwrap();
        charge.queue();
        charge
    };
    let stuck = queue(&slow);
    tokio::time::sleep(Duration::from_millis(900)).await;
    let moving = queue(&quick);
    let given_up = |client: &Arc<Account>| client.given_up.is_cancelled();
    let waiting = async {
        let charge = third.charge_read(MIB).await;
        assert!(given_up(&slow) && !given_up(&quick), "sooner or later it is noticed");
        drop(charge);
    };
    let gone = async {
        assert!(waits(slow.given_up()).await, "not yet");
        slow.given_up().await;
        drop(stuck);
    };
    tokio::join!(waiting, gone);
    assert_eq!(budget.metrics.readers_given_up.get(), 1);
    drop(moving);
}

#[tokio::test(start_paused = true)]
async fn who_takes_a_large_page_slowly_is_not_given_up() {
    let budget = budget();
    let (stuck, slow, third) = (account(&budget, "t"), account(&budget, "t"), account(&budget, "t"));
    let queue = |client: &Arc<Account>| {
        let mut charge = client.charge(Kind::Reads, 16 * MIB).ok().unwrap();
        charge.queue();
        charge
    };
    let _waiting = [queue(&stuck), queue(&slow)];
    let taking = async {
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(400)).await;
            slow.took(MIB / 8);
            stuck.took(MIB / 1000);
        }
    };
    let waiting = tokio::time::timeout(Duration::from_secs(4), third.charge_read(MIB));
    let (had, ()) = tokio::join!(waiting, taking);
    assert!(had.is_err(), "neither gave anything back");
    assert_eq!((slow.given_up.is_cancelled(), stuck.given_up.is_cancelled()), (false, true));
}

#[tokio::test(start_paused = true)]
async fn no_more_readers_are_given_up_than_need_be_and_only_where_there_is_too_much() {
    let budget = budget();
    let queue = |client: &Arc<Account>, bytes| {
        let mut charge = client.charge(Kind::Reads, bytes).ok().unwrap();
        charge.queue();
        charge
    };
    let (one, two, third) = (account(&budget, "a"), account(&budget, "a"), account(&budget, "a"));
    let stuck = [queue(&one, 16 * MIB), queue(&two, 16 * MIB)];
    tokio::time::sleep(Duration::from_secs(2)).await;
    let given_up = || budget.metrics.readers_given_up.get();
    assert!(third.try_charge(Kind::Reads, MIB).is_none() && given_up() == 0, "a mere try");
    for _ in 0..3 {
        assert!(waits(third.charge_read(16 * MIB)).await && given_up() == 1, "one is enough");
    }
    assert!(waits(third.charge_read(17 * MIB)).await && given_up() == 2);
    drop((stuck, one, two));
    // Another tenant's reader is no help to a tenant that has its share.
    let (other, own) = (account(&budget, "b"), account(&budget, "a"));
    let longest = queue(&other, 6 * MIB);
    tokio::time::sleep(Duration::from_millis(10)).await;
    let stuck = queue(&own, 10 * MIB);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(waits(third.charge_read(8 * MIB)).await);
    assert!(own.given_up.is_cancelled() && !other.given_up.is_cancelled());
    drop((longest, stuck));
}

#[tokio::test(start_paused = true)]
async fn connections_and_requests_share_a_bound_and_what_must_be_heard_is() {
    let budget = budget();
    let clients: Vec<_> = std::iter::from_fn(|| budget.open()).collect();
    assert_eq!(clients.len() as u64, 3 * MIB / CONNECTION_BYTES);
    let requests: Vec<Charge> = clients.iter().map_while(|client| client.request(100 << 10, false).ok()).collect();
    assert!(requests.len() == 2, "{}: what connections leave", requests.len());
    assert!(clients[0].request(1 << 20, true).is_ok());
    drop(clients);
    assert_eq!(budget.status()["connections"], 2, "a request keeps its connection's account");
    drop(requests);
    assert_eq!(used_of(&budget), [0; 4]);
}
