use super::rates::{RETRY_MAX, RETRY_OUTSTANDING, RETRY_READ_MAX};
use super::room_tests::{MIB, account, budget_for};
use super::*;

fn budget() -> Arc<Budget> {
    let options = NodeOptions {
        in_flight_bytes: Some(64 * MIB),
        connection_put_bytes: Some(8 * MIB),
        connection_outstanding_bytes: Some(100 * MIB),
        request_bytes: 4 * MIB,
        ..NodeOptions::default()
    };
    Budget::new(&options, Arc::default(), Arc::default())
}

fn used_of(budget: &Budget) -> Vec<u64> {
    budget.usage().into_iter().map(|(_, bytes)| bytes).collect()
}

#[tokio::test(start_paused = true)]
async fn connection_and_node_bounds_hold_and_all_bytes_return() {
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
async fn page_larger_than_the_budget_is_admitted_alone() {
    let budget = budget();
    let one = account(&budget, "a");
    let other = account(&budget, "b");
    let large = one.charge(Kind::Reads, 50 * MIB).ok().unwrap();
    assert!(other.charge(Kind::Reads, MIB).is_err(), "the node is full");
    drop(large);
    assert!(other.charge(Kind::Reads, MIB).is_ok());
}

#[tokio::test(start_paused = true)]
async fn tenant_uses_everything_alone_and_its_share_beside_others() {
    let budget = budget();
    let greedy = account(&budget, "greedy");
    let modest = account(&budget, "modest");
    let more = account(&budget, "greedy");
    let all = |client: &Arc<Account>| (0..32).map_while(|_| client.charge(Kind::Puts, MIB / 2).ok()).collect();
    let (mut charges, rest): (Vec<Charge>, Vec<Vec<Charge>>) = (all(&greedy), vec![all(&more)]);
    let third = account(&budget, "greedy");
    let fourth = account(&budget, "greedy");
    let rest: Vec<Vec<Charge>> = rest.into_iter().chain([all(&third), all(&fourth)]).collect();
    assert_eq!(charges.len() + rest.iter().map(Vec::len).sum::<usize>(), 64, "the whole bound of 32 MiB");
    assert!(modest.charge(Kind::Puts, MIB).is_err(), "the node is full");
    // Released bytes go to the tenant with less.
    charges.clear();
    assert!(greedy.charge(Kind::Puts, MIB).is_err(), "its tenant is above its share");
    let taken: Vec<Charge> = (0..32).map_while(|_| modest.charge(Kind::Puts, MIB / 2).ok()).collect();
    assert_eq!(taken.len(), 16);
    drop(taken);
    // A tenant without charges and without recent demand takes no share.
    drop(modest);
    assert!(greedy.charge(Kind::Puts, MIB).is_ok());
}

#[tokio::test(start_paused = true)]
async fn retry_delay_of_requests_follows_the_release_rate() {
    let budget = budget();
    let kind = Kind::Requests;
    let client = account(&budget, "t");
    let hint = || client.charge(kind, MIB).err().unwrap().retry_after;
    let mut held: Vec<Charge> = std::iter::from_fn(|| client.charge(kind, MIB / 10).ok()).collect();
    assert_eq!(hint(), RETRY_MAX, "nothing was released yet");
    let other = account(&budget, "t");
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        other.charge(kind, MIB / 10).ok().unwrap().release_unused();
    }
    assert_eq!(hint(), RETRY_MAX, "unused charges are no sample");
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        held.pop();
        held.push(client.charge(kind, MIB / 10).ok().unwrap());
    }
    // 10 MiB/s released, a bit less than 1 MiB over the bound.
    let hint = hint();
    assert!((60..110).contains(&hint.as_millis()), "{hint:?}");
}

async fn waits<T>(future: impl Future<Output = T>) -> bool {
    tokio::time::timeout(Duration::from_millis(100), future).await.is_err()
}

#[tokio::test(start_paused = true)]
async fn reads_of_one_connection_are_granted_in_order_and_cancelled_ones_skipped() {
    let budget = budget();
    let reader = account(&budget, "t");
    // Together a quarter of the memory that remains.
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
    // The first waiter, which listens for releases, and one behind it.
    waiters[0].abort();
    waiters[3].abort();
    drop(on_their_way.pop());
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(*order.lock(), [1]);
    drop(on_their_way);
    for (number, waiter) in waiters.into_iter().enumerate() {
        let had = tokio::time::timeout(Duration::from_secs(1), waiter).await.expect("no read waits for ever");
        assert_eq!(had.is_ok(), number != 0 && number != 3, "{number}");
    }
    assert_eq!(*order.lock(), [1, 2, 4, 5]);
    assert_eq!(used_of(&budget), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn stuck_readers_leave_memory_for_others() {
    let budget = budget();
    let stuck: Vec<_> = (0..12).map(|_| account(&budget, "t")).collect();
    let taken = stuck.iter().map(|client| (0..99).map_while(|_| client.charge(Kind::Reads, MIB / 4).ok()).collect());
    let taken: Vec<Vec<Charge>> = taken.collect();
    let used = budget.usage()[1].1;
    assert!(taken[0].len() > 20 && used > 20 * MIB && used < 31 * MIB, "{} and {used}", taken[0].len());
    let reader = account(&budget, "t");
    let first = reader.charge_read(MIB / 4).await;
    assert!(waits(reader.charge_read(4 * MIB)).await, "its own page is still in flight");
    let (had, ()) = tokio::join!(reader.charge_read(MIB / 4), async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        drop(first);
    });
    drop((had, taken));
    assert_eq!(used_of(&budget), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn queued_reads_are_granted_by_tenant_in_turn() {
    let budget = budget();
    let all = account(&budget, "a");
    let a = account(&budget, "a");
    let b = account(&budget, "b");
    let full = all.charge(Kind::Reads, 32 * MIB).ok().unwrap();
    let order = Mutex::new(Vec::new());
    let turn = async |who: &Arc<Account>, name: &'static str, bytes: u64| {
        let charge = who.charge_read(bytes).await;
        order.lock().push(name);
        tokio::time::sleep(Duration::from_millis(10)).await;
        drop(charge);
    };
    let others: Vec<_> = (0..3).map(|_| account(&budget, "a")).collect();
    let cancelled = async {
        let waiting = turn(&a, "cancelled", MIB);
        assert!(waits(waiting).await);
        assert!(b.try_charge(Kind::Reads, 1).is_none());
        drop(full);
    };
    tokio::join!(
        turn(&others[0], "large", 30 * MIB),
        turn(&others[1], "small", 3 * MIB),
        turn(&b, "of another tenant", 30 * MIB),
        turn(&others[2], "last", MIB),
        cancelled,
    );
    // The other tenant comes first, as the first one had everything. No small read overtakes a
    // large one.
    let order = order.lock();
    assert_eq!((&order[..2], order.len()), (&["of another tenant", "large"][..], 4));
    assert_eq!(used_of(&budget), [0; 4]);
    assert!(b.try_charge(Kind::Reads, 1).is_some(), "the queue is empty");
}

#[tokio::test(start_paused = true)]
async fn reader_may_request_what_it_can_receive_in_time() {
    let budget = budget();
    let reader = account(&budget, "t");
    let soon = Duration::from_secs(8);
    let ask = |bytes| reader.charge_outstanding(bytes, now() + soon);
    let mut outstanding: Vec<Charge> = (0..200).map_while(|_| ask(MIB).ok()).collect();
    assert_eq!(outstanding.len(), 100, "the bound of a connection: no rate is known yet");
    assert_eq!(ask(MIB).err().unwrap().retry_after, RETRY_OUTSTANDING);
    // 10 MiB/s during a quarter of 8 seconds.
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        outstanding.pop().unwrap().release_sent();
    }
    assert_eq!(ask(MIB).err().unwrap().retry_after, Duration::from_millis(7100), "71 MiB too many");
    outstanding.truncate(5);
    tokio::time::sleep(Duration::from_millis(1)).await;
    outstanding.extend((0..200).map_while(|_| ask(MIB).ok()));
    assert!((18..=20).contains(&outstanding.len()), "{}", outstanding.len());
    // Neither a cancelled request nor idle time changes the rate. A reader that receives nothing
    // slows down to the minimum.
    drop(outstanding);
    tokio::time::sleep(Duration::from_secs(100)).await;
    let outstanding: Vec<Charge> = (0..200).map_while(|_| ask(MIB).ok()).collect();
    assert!((18..=20).contains(&outstanding.len()), "{}", outstanding.len());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(ask(MIB).is_err());
    drop(outstanding);
    let least: Vec<Charge> = (0..200).map_while(|_| ask(MIB).ok()).collect();
    assert_eq!(least.len() as u64, OUTSTANDING_MIN / MIB);
    let others = account(&budget, "t");
    assert!(others.charge_outstanding(100 * MIB, now() + soon).is_ok(), "another reader is not affected");
}

#[tokio::test(start_paused = true)]
async fn refused_reads_are_told_to_return_one_after_the_other() {
    let budget = budget();
    let reader = account(&budget, "t");
    let ask = || reader.charge_outstanding(MIB, now() + Duration::from_secs(1));
    let mut outstanding = std::collections::VecDeque::new();
    let receive_one = async |outstanding: &mut std::collections::VecDeque<Charge>| {
        tokio::time::sleep(Duration::from_millis(100)).await;
        outstanding.pop_front().unwrap().release_sent();
    };
    // 10 MiB/s, which are less than the minimum of 4 MiB in a quarter of a second.
    for _ in 0..20 {
        outstanding.extend(ask().ok());
        receive_one(&mut outstanding).await;
    }
    outstanding.extend((0..20).map_while(|_| ask().ok()));
    assert_eq!(outstanding.len() as u64, OUTSTANDING_MIN / MIB);
    let mut told: Vec<Duration> = (0..5).map(|_| ask().err().unwrap().retry_after).collect();
    let begin = now();
    // Each finds room when it returns as told.
    told.reverse();
    while let Some(delay) = told.pop() {
        while now() < begin + delay {
            receive_one(&mut outstanding).await;
        }
        outstanding.push_back(ask().ok().unwrap_or_else(|| panic!("no room after {delay:?}")));
    }
    assert!(now() - begin < Duration::from_millis(700), "the reader had enough to do meanwhile");
    // Those that do not return delay later ones by ten seconds at most.
    outstanding.extend((0..20).map_while(|_| ask().ok()));
    for _ in 0..100 {
        assert!(ask().err().unwrap().retry_after <= RETRY_READ_MAX);
    }
    outstanding.clear();
    outstanding.extend((0..20).map_while(|_| ask().ok()));
    assert!(ask().err().unwrap().retry_after < Duration::from_millis(300), "all earlier ones have found room");
}

#[test]
fn reads_refused_at_one_moment_are_told_times_one_read_apart() {
    let begin = now();
    let moment = begin + Duration::from_millis(100);
    let mut rate = ReadRate::default();
    let mut refused = RefusedReads::default();
    assert_eq!(refused.refuse(&rate, MIB, MIB / 2, begin), RETRY_OUTSTANDING, "no rate is known yet");
    // 10 MiB/s.
    rate.start(begin);
    rate.record(moment, MIB);
    let told = |refused: &mut RefusedReads, after_ms: u64| {
        refused.refuse(&rate, MIB, MIB / 2, moment + Duration::from_millis(after_ms)).as_millis()
    };
    let together: Vec<u128> = (0..4).map(|_| told(&mut refused, 0)).collect();
    assert_eq!(together, [50, 150, 250, 350], "half of the first read lacks room, and each of the others wholly");
    assert_eq!(told(&mut refused, 200), 250, "behind the last one, which returns in 150 ms");
    let longest = (0..120).map(|_| told(&mut refused, 200)).max();
    assert_eq!(longest, Some(RETRY_READ_MAX.as_millis()));
    refused.clear();
    assert_eq!(told(&mut refused, 300), 50, "all earlier ones have found room");
}

#[test]
fn short_delay_is_not_told_as_none() {
    assert_eq!(Busy::after(Duration::from_micros(1)).milliseconds(), 1);
    assert_eq!(Busy::after(Duration::from_micros(1001)).milliseconds(), 2);
    assert_eq!(Busy::after(RETRY_MAX).milliseconds(), 1000);
}

#[tokio::test(start_paused = true)]
async fn empty_request_counts_as_reader_until_released() {
    let budget = budget();
    let one = account(&budget, "t");
    let other = account(&budget, "t");
    let soon = || now() + Duration::from_secs(1);
    for _ in 0..3 {
        let some = one.charge_outstanding(MIB, soon()).ok().unwrap();
        let nothing = one.charge_outstanding(0, soon()).ok().unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        some.release_sent();
        assert_eq!(budget.state.lock().readers, 1);
        drop(nothing);
        assert_eq!(budget.state.lock().readers, 0);
        assert!(other.charge_outstanding(MIB, soon()).is_ok());
    }
    assert_eq!(used_of(&budget), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn tenant_at_its_share_does_not_delay_others() {
    let budget = budget();
    let a = account(&budget, "a");
    let b = account(&budget, "b");
    let more_a = account(&budget, "a");
    let more_b = account(&budget, "b");
    let large = a.charge(Kind::Reads, 16 * MIB).ok().unwrap();
    let mut small: Vec<Charge> = (0..16).map_while(|_| b.charge(Kind::Reads, MIB).ok()).collect();
    let other: Vec<Charge> =
        (small.len()..16).map(|_| account(&budget, "b").charge(Kind::Reads, MIB).ok().unwrap()).collect();
    let waiting = tokio::spawn(async move { more_a.charge_read(16 * MIB).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(waits(more_b.charge_read(MIB)).await, "the node is full");
    small.pop();
    assert!(!waits(more_b.charge_read(MIB)).await && !waiting.is_finished());
    drop((large, small, other));
    assert!(waiting.await.is_ok());
}

/// Looks for progress of the client's full socket, as its connection does, and finds none.
fn look_for_progress(client: &Arc<Account>) {
    let client = Arc::downgrade(client);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let Some(client) = client.upgrade() else { return };
            client.record_no_progress();
        }
    });
}

#[tokio::test(start_paused = true)]
async fn stalled_reader_is_disconnected_only_when_others_wait() {
    let budget = budget();
    let slow = account(&budget, "t");
    let quick = account(&budget, "t");
    let third = account(&budget, "t");
    let queue = |client: &Arc<Account>| {
        let mut charge = client.charge(Kind::Reads, 16 * MIB).ok().unwrap();
        charge.mark_queued();
        charge
    };
    let stuck = queue(&slow);
    look_for_progress(&slow);
    look_for_progress(&quick);
    tokio::time::sleep(Duration::from_millis(900)).await;
    let moving = queue(&quick);
    let given_up = |client: &Arc<Account>| client.is_disconnecting();
    let waiting = async {
        let charge = third.charge_read(MIB).await;
        assert!(given_up(&slow) && !given_up(&quick), "the wait itself searches for stalled readers");
        drop(charge);
    };
    let gone = async {
        assert!(waits(slow.disconnect_requested()).await, "not yet");
        slow.disconnect_requested().await;
        drop(stuck);
    };
    tokio::join!(waiting, gone);
    assert_eq!(budget.metrics.slow_readers_disconnected.get(), 1);
    drop(moving);
}

/// Each stalled reader takes a quarter of what is free, so together they never fill the memory. The
/// others would have a small part of it, and no read would queue.
#[tokio::test(start_paused = true)]
async fn stalled_readers_that_leave_little_memory_are_disconnected() {
    let budget = budget();
    let stuck: Vec<_> = (0..8).map(|_| account(&budget, "t")).collect();
    let fill = |client: &Arc<Account>| {
        let mut charges: Vec<Charge> = (0..64).map_while(|_| client.try_charge(Kind::Reads, MIB / 4)).collect();
        charges.iter_mut().for_each(Charge::mark_queued);
        charges
    };
    let mut held = Vec::new();
    for client in &stuck {
        held.push(fill(client));
        look_for_progress(client);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let free = || 32 * MIB - used_of(&budget)[1];
    assert!((MIB..8 * MIB).contains(&free()), "{} bytes are free", free());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let reader = account(&budget, "t");
    let few = fill(&reader);
    assert!(waits(reader.charge_read(MIB / 4)).await, "it has its part of what is free");
    let disconnected = || stuck.iter().filter(|client| client.is_disconnecting()).count();
    assert!(stuck[0].is_disconnecting() && disconnected() == 1, "the longest silence first");
    assert!(waits(reader.charge_read(MIB / 4)).await && disconnected() == 1, "its memory will be enough");
    held.remove(0);
    let more = fill(&reader);
    assert!(!more.is_empty() && waits(reader.charge_read(MIB / 4)).await);
    assert!(disconnected() == 1 && free() >= 8 * MIB, "a quarter is free");
    drop((few, more));
}

#[tokio::test(start_paused = true)]
async fn reader_stays_connected_while_its_connection_has_no_processor_to_look_for_progress() {
    let budget = budget();
    let reader = account(&budget, "t");
    let third = account(&budget, "t");
    let mut charge = reader.charge(Kind::Reads, 32 * MIB).ok().unwrap();
    charge.mark_queued();
    tokio::time::sleep(Duration::from_millis(900)).await;
    reader.record_no_progress();
    let waiting = tokio::time::timeout(Duration::from_secs(5), third.charge_read(MIB));
    assert!(waiting.await.is_err() && !reader.is_disconnecting());
    reader.record_no_progress();
    let waiting = tokio::time::timeout(Duration::from_secs(5), third.charge_read(MIB));
    assert!(waiting.await.is_err() && reader.is_disconnecting());
    drop(charge);
}

#[tokio::test(start_paused = true)]
async fn slow_reader_of_a_large_page_stays_connected() {
    let budget = budget();
    let stuck = account(&budget, "t");
    let slow = account(&budget, "t");
    let third = account(&budget, "t");
    let queue = |client: &Arc<Account>| {
        let mut charge = client.charge(Kind::Reads, 16 * MIB).ok().unwrap();
        charge.mark_queued();
        charge
    };
    let _waiting = [queue(&stuck), queue(&slow)];
    look_for_progress(&stuck);
    look_for_progress(&slow);
    let taking = async {
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(400)).await;
            slow.record_progress();
        }
    };
    let waiting = tokio::time::timeout(Duration::from_secs(4), third.charge_read(MIB));
    let (had, ()) = tokio::join!(waiting, taking);
    assert!(had.is_err(), "neither released memory");
    assert_eq!((slow.is_disconnecting(), stuck.is_disconnecting()), (false, true));
}

#[tokio::test(start_paused = true)]
async fn search_for_a_stalled_reader_visits_each_reader_at_most_once_a_second() {
    let budget = budget_for(32 * MIB);
    let charge = |client: &Arc<Account>| {
        let mut charge = client.charge_unchecked(Kind::Reads, 64 << 10);
        charge.mark_queued();
        charge
    };
    // More than one search visits. They fill the node.
    let readers: Vec<_> = (0..600).map(|number| account(&budget, &format!("t{}", number % 7))).collect();
    let _charges: Vec<Charge> = readers.iter().map(charge).collect();
    readers.iter().for_each(look_for_progress);
    let waiting = account(&budget, "waiting");
    let waiting = tokio::spawn(async move { waiting.charge_read(MIB).await });
    let seconds = 5;
    for _ in 0..seconds * 40 {
        tokio::time::sleep(Duration::from_millis(25)).await;
        // One reader is stuck.
        readers[1..].iter().for_each(|reader| reader.record_progress());
        budget.serve_queue();
    }
    let visits = budget.state.lock().readers_order.visits;
    assert!(visits > 0 && visits <= (seconds + 1) * readers.len(), "{visits} visits");
    assert!(readers[0].is_disconnecting() && readers[1..].iter().all(|reader| !reader.is_disconnecting()));
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn no_more_stalled_readers_are_disconnected_than_needed() {
    let budget = budget();
    let queue = |client: &Arc<Account>, bytes| {
        let mut charge = client.charge(Kind::Reads, bytes).ok().unwrap();
        charge.mark_queued();
        charge
    };
    let one = account(&budget, "a");
    let two = account(&budget, "a");
    let third = account(&budget, "a");
    let stuck = [queue(&one, 16 * MIB), queue(&two, 16 * MIB)];
    look_for_progress(&one);
    look_for_progress(&two);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let given_up = || budget.metrics.slow_readers_disconnected.get();
    assert!(third.try_charge(Kind::Reads, MIB).is_none() && given_up() == 0, "try_charge disconnects nobody");
    for _ in 0..3 {
        assert!(waits(third.charge_read(16 * MIB)).await && given_up() == 1, "one is enough");
    }
    assert!(waits(third.charge_read(17 * MIB)).await && given_up() == 2);
    drop((stuck, one, two));
    // A tenant at its share gains nothing from another tenant's reader.
    let other = account(&budget, "b");
    let own = account(&budget, "a");
    let longest = queue(&other, 6 * MIB);
    look_for_progress(&other);
    look_for_progress(&own);
    tokio::time::sleep(Duration::from_millis(10)).await;
    let stuck = queue(&own, 10 * MIB);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(waits(third.charge_read(8 * MIB)).await);
    assert!(own.is_disconnecting() && !other.is_disconnecting());
    drop((longest, stuck));
}

#[tokio::test(start_paused = true)]
async fn refusal_tells_a_full_node_from_a_limit_of_the_caller() {
    let bound = |refused: Result<Charge, Busy>| refused.err().map(|busy| busy.bound);
    let budget = budget();
    let own = account(&budget, "a");
    let other = account(&budget, "b");
    let _own = own.charge(Kind::Requests, MIB).unwrap_or_else(|_| panic!("a quarter of the bound"));
    assert_eq!(bound(own.charge(Kind::Requests, 1)), Some(BusyBound::Connection));
    let more = [(); 3].map(|()| account(&budget, "a"));
    let mut charges: Vec<Charge> =
        more.iter().flat_map(|client| (0..16).map_while(|_| client.charge(Kind::Requests, MIB / 16).ok())).collect();
    assert_eq!(bound(other.charge(Kind::Requests, MIB)), Some(BusyBound::Node));
    assert_eq!(bound(own.charge(Kind::Requests, 1)), Some(BusyBound::Connection), "both bounds");
    // Half of the bound belongs to the tenant that was refused.
    drop(charges.split_off(charges.len() / 2));
    let more = account(&budget, "a");
    let tenant = more.tenant().unwrap();
    let mut rest: Vec<Charge> = (0..64).map_while(|_| more.charge(Kind::Requests, MIB / 16).ok()).collect();
    assert_eq!(bound(more.charge(Kind::Requests, MIB / 16)), Some(BusyBound::Tenant(tenant)));
    rest.clear();
}

#[tokio::test(start_paused = true)]
async fn connections_and_requests_share_a_bound_and_mandatory_requests_pass() {
    let budget = budget();
    let clients: Vec<_> = std::iter::from_fn(|| budget.open()).collect();
    assert_eq!(clients.len() as u64, 3 * MIB / CONNECTION_BYTES);
    let requests: Vec<Charge> =
        clients.iter().map_while(|client| client.charge_request(100 << 10, false).ok()).collect();
    assert!(requests.len() == 1, "{}: the quarter that connections leave, without their own parts", requests.len());
    assert!(clients[0].charge_request(1 << 20, true).is_ok());
    drop(clients);
    assert_eq!(budget.status()["connections"], 1, "a request keeps its connection's account");
    drop(requests);
    assert_eq!(used_of(&budget), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn connections_that_open_beside_requests_keep_the_bound() {
    let budget = budget();
    let held_bytes = || {
        let state = budget.state.lock();
        state.used[Kind::Requests as usize] + state.own_requests_left
    };
    let clients: Vec<_> = (0..8).map(|_| budget.open().unwrap()).collect();
    let fill = |client: &Arc<Account>| -> Vec<Charge> {
        (0..64).map_while(|_| client.charge_request(8 << 10, false).ok()).collect()
    };
    let held: Vec<Charge> = clients.iter().flat_map(fill).collect();
    let newcomers: Vec<_> = std::iter::from_fn(|| budget.open()).collect();
    let each = CONNECTION_BYTES + OWN_REQUEST_BYTES;
    assert!(newcomers.len() as u64 >= MIB / 2 / each, "{} newcomers find room", newcomers.len());
    assert!(held_bytes() <= 4 * MIB, "{} bytes are in use", held_bytes());
    assert!(newcomers.iter().all(|client| client.charge_request(1700, false).is_ok()));
    drop(held);
    let more: Vec<_> = std::iter::from_fn(|| budget.open()).collect();
    assert_eq!(8 + newcomers.len() + more.len(), 64, "three quarters of the memory");
}

#[tokio::test(start_paused = true)]
async fn small_request_passes_whatever_others_hold() {
    let budget = budget();
    let small = |client: &Arc<Account>| client.charge_request(1700, false).ok();
    let honest = [(); 2].map(|()| account(&budget, "honest"));
    let strangers: Vec<_> = (0..30).map(|number| account(&budget, ["a", "b", "c"][number % 3])).collect();
    // Bodies of decreasing size, until the smallest finds no memory.
    let fill = |client: &Arc<Account>| -> Vec<Charge> {
        let bodies = [256, 32, 8, 1].into_iter().flat_map(|kib| [kib << 10; 8]);
        bodies.filter_map(|bytes| client.charge_request(bytes, false).ok()).collect()
    };
    let mut held: Vec<Charge> = strangers.iter().flat_map(fill).collect();
    let used = || used_of(&budget)[Kind::Requests as usize] + 32 * CONNECTION_BYTES;
    let reserved = MIB / 2 + budget.state.lock().own_requests_left;
    let free = 4 * MIB - used() - reserved;
    assert!(free < 6 << 10, "{free} bytes are free");
    assert!(honest.iter().all(|client| small(client).is_some()));
    let first = small(&honest[0]);
    assert!(first.is_some() && small(&honest[0]).is_none(), "one at a time");
    assert!(honest[1].charge_request(8 << 10, false).is_err(), "a larger one competes with the bodies");
    held.extend(honest.iter().filter_map(small));
    assert!(used() <= 4 * MIB, "{} bytes are in use", used());
    drop((held, first));
    assert!(honest[1].charge_request(100 << 10, false).is_ok());
    drop((honest, strangers));
    assert_eq!((used_of(&budget), budget.state.lock().own_requests_left), (vec![0; 4], 0));
}
