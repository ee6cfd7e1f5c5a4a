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

fn used(budget: &Budget) -> Vec<u64> {
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
    assert_eq!(used(&budget), [32 * MIB, 0, 0, 0]);
    held.remove(1);
    assert_eq!(full(&clients[4]).len(), 8);
    drop((held, clients));
    assert_eq!((used(&budget), budget.status()["connections"].as_u64()), (vec![0; 4], Some(0)));
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
    let mut charges: Vec<Charge> = (0..99).map_while(|_| greedy.charge(Kind::Asked, MIB).ok()).collect();
    assert_eq!(charges.len(), 99);
    assert!(modest.charge(Kind::Asked, 2 * MIB).is_err(), "all is taken");
    // As it comes back, it is for who has less.
    charges.truncate(60);
    assert!(greedy.charge(Kind::Asked, MIB).is_err(), "more than half of it");
    let taken: Vec<Charge> = (0..50).map_while(|_| modest.charge(Kind::Asked, MIB).ok()).collect();
    assert_eq!(taken.len(), 40);
    drop(taken);
    // Who has nothing and asked for nothing lately is no other.
    drop(modest);
    assert!(greedy.charge(Kind::Asked, MIB).is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_hint_follows_from_what_ended_lately() {
    let budget = budget();
    let client = account(&budget, "t");
    let hint = || client.charge(Kind::Asked, 8 * MIB).err().unwrap().retry_after;
    let mut held: Vec<Charge> = (0..100).map(|_| client.charge(Kind::Asked, MIB).ok().unwrap()).collect();
    assert_eq!(hint(), RETRY_MAX, "nothing has ended yet");
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        held.pop();
        held.push(client.charge(Kind::Asked, MIB).ok().unwrap());
    }
    // 100 MiB a second, and 8 too many.
    let hint = hint();
    assert!((60..110).contains(&hint.as_millis()), "{hint:?}");
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
    let first = reader.charge_read(MIB / 4).await.ok().unwrap();
    let second = tokio::time::timeout(Duration::from_secs(1), reader.charge_read(2 * MIB)).await;
    assert!(second.is_err(), "it waits while some of its own is on its way");
    let (gone, had) = tokio::join!(
        async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            drop(first);
        },
        reader.charge_read(MIB / 4)
    );
    assert!(had.is_ok());
    let () = gone;
    drop((had, taken));
    let all = reader.charge(Kind::Reads, 32 * MIB).ok().unwrap();
    assert!(stuck[0].charge_read(MIB).await.is_err(), "who has nothing on its way is told at once");
    drop(all);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_nothing_is_given_up_only_when_others_are_refused() {
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
    tokio::time::sleep(Duration::from_millis(200)).await;
    let given_up = |client: &Arc<Account>| client.given_up.is_cancelled();
    assert!(!given_up(&slow), "it is in nobody's way");
    assert!(third.charge(Kind::Reads, MIB).is_err());
    assert!(given_up(&slow) && !given_up(&quick));
    assert_eq!(budget.metrics.readers_given_up.get(), 1);
    drop(stuck);
    assert!(third.charge(Kind::Reads, MIB).is_ok());
    drop(moving);
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
    assert_eq!(used(&budget), [0; 4]);
}
