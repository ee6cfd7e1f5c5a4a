//! Tests of the table, by hand and against a model.

use super::*;
use proptest::prelude::*;
use std::net::Ipv4Addr;

/// Bytes of L2, of which half is for floors.
const L2: u64 = 96_000;

fn id(number: u32) -> NamespaceId {
    let mut id = [0; 32];
    id[..4].copy_from_slice(&number.to_be_bytes());
    NamespaceId(id)
}

fn peer(host: u32) -> Peer {
    Peer::Address(Ipv4Addr::from_bits(host).into())
}

/// Floors of all namespaces in bytes of L2.
fn floors(shares: &Shares) -> BTreeMap<NamespaceId, u64> {
    let mut floors = BTreeMap::new();
    let mut after = Bound::Unbounded;
    while let Some(namespace) = shares.floors.next_after(after) {
        floors.insert(namespace, shares.floors.part_of(&namespace).of(L2));
        after = Bound::Excluded(namespace);
    }
    floors
}

/// Floor of a namespace, without the error of rounding.
fn floor(shares: &Shares, namespace: u32) -> u64 {
    let bytes = shares.floors.part_of(&id(namespace)).of(L2);
    if bytes == 0 { 0 } else { (bytes + 1) / 10 * 10 }
}

/// Takes all changes of L2, and returns their number.
fn take_changes(shares: &mut Shares) -> usize {
    shares.changes_of_l2(L2, usize::MAX).len()
}

#[test]
fn peers_share_equally_and_so_do_the_namespaces_of_a_peer() {
    let mut shares = Shares::default();
    shares.join(id(1), peer(1));
    assert_eq!((floor(&shares, 1), floors(&shares)[&id(1)]), (48_000, 48_000));
    shares.join(id(2), peer(1));
    shares.join(id(3), peer(2));
    assert_eq!([1, 2, 3].map(|n| floor(&shares, n)), [12_000, 12_000, 24_000]);
    // A second peer of a namespace adds its part.
    shares.join(id(1), peer(2));
    assert_eq!([1, 2, 3].map(|n| floor(&shares, n)), [24_000, 12_000, 12_000]);
    assert_eq!(take_changes(&mut shares), 3);
    shares.join(id(1), peer(2));
    assert!(!shares.has_changes_of_l2());
}

#[test]
fn peer_with_many_namespaces_takes_nothing_from_others_and_little_from_its_own_first_ones() {
    let mut shares = Shares::default();
    shares.join(id(1), peer(1));
    shares.join(id(2), peer(2));
    let now = larder_runtime::now();
    for number in 100..5000 {
        shares.join(id(number), peer(2));
        if number % 2 == 0 {
            shares.leave(id(number), peer(2), now);
        }
    }
    assert_eq!((floor(&shares, 1), floor(&shares, 2)), (24_000, 1_500));
    let all = floors(&shares);
    assert_eq!(all.len(), 1 + FLOORS_PER_PEER);
    let sum: u64 = all.values().sum();
    assert!(sum <= L2 / 2, "{sum}");
    (101..5000).step_by(2).for_each(|number| shares.leave(id(number), peer(2), now));
    shares.join(id(6000), peer(2));
    shares.expire(now + USED_FOR);
    assert_eq!(floors(&shares).len(), 3, "1, 2 and 6000 have connections");
}

#[test]
fn namespace_keeps_its_floor_for_a_while_after_its_last_connection() {
    let mut shares = Shares::default();
    let now = larder_runtime::now();
    shares.join(id(1), peer(1));
    shares.join(id(2), peer(1));
    shares.leave(id(1), peer(1), now);
    take_changes(&mut shares);
    shares.expire(now + USED_FOR - Duration::from_secs(1));
    assert!(!shares.has_changes_of_l2());
    shares.expire(now + USED_FOR);
    assert_eq!((floor(&shares, 1), floor(&shares, 2)), (0, 48_000));
    assert_eq!(take_changes(&mut shares), 2);
}

#[test]
fn uses_without_a_floor_begin_and_end_without_a_change() {
    let mut shares = Shares::default();
    let now = larder_runtime::now();
    (0..17).for_each(|number| shares.join(id(number), peer(1)));
    take_changes(&mut shares);
    shares.leave(id(16), peer(1), now);
    for number in 100..300 {
        shares.join(id(number), peer(1));
        shares.leave(id(number), peer(1), now);
    }
    assert!(!shares.has_changes_of_l2());
    shares.expire(now + USED_FOR);
    assert!(!shares.has_changes_of_l2());
    shares.leave(id(3), peer(1), now);
    shares.expire(now + USED_FOR);
    assert!(shares.has_changes_of_l2());
    assert_eq!(floors(&shares).len(), 15);
}

#[test]
fn changes_of_l2_are_only_those_and_never_exceed_half_of_it() {
    let mut shares = Shares::default();
    let mut of_l2 = BTreeMap::new();
    let mut update = |shares: &mut Shares| {
        let changes = shares.changes_of_l2(L2, usize::MAX);
        for (namespace, bytes) in &changes {
            of_l2.insert(*namespace, *bytes);
            assert!(of_l2.values().sum::<u64>() <= L2 / 2);
        }
        of_l2.retain(|_, bytes| *bytes > 0);
        let mut wanted = floors(shares);
        wanted.retain(|_, bytes| *bytes > 0);
        assert_eq!(of_l2, wanted);
        changes.len()
    };
    for host in 0..300 {
        (0..=host % 3).for_each(|number| shares.join(id(1000 * number + host), peer(host)));
        update(&mut shares);
    }
    // A third namespace changes those of its peer only.
    shares.join(id(9000), peer(1));
    assert_eq!(update(&mut shares), 3);
    let now = larder_runtime::now();
    (0..100).for_each(|host| shares.leave(id(host), peer(host), now));
    shares.expire(now + USED_FOR);
    assert!(update(&mut shares) >= 100);
}

#[test]
fn table_is_bounded_in_peers_and_in_namespaces() {
    let mut shares = Shares::default();
    let now = larder_runtime::now();
    shares.join(id(1), peer(0));
    for host in 1..3000 {
        shares.join(id(host), peer(host));
        shares.leave(id(host), peer(host), now + Duration::from_millis(host.into()));
    }
    assert_eq!(shares.peers.len(), PEERS_MAX);
    assert!(shares.peers.contains_key(&peer(0)) && shares.peers.contains_key(&peer(2999)));
    assert!(!shares.peers.contains_key(&peer(1976)) && shares.peers.contains_key(&peer(1977)), "the oldest left");
    for number in 0..500 {
        shares.join(id(number), peer(0));
        shares.leave(id(number), peer(0), now);
    }
    assert!(shares.peers[&peer(0)].uses.len() <= ENDED_PER_PEER + 2);
}

/// The table is full of peers with floors.
#[test]
fn handshake_looks_at_few_namespaces_however_many_are_in_use() {
    let mut shares = Shares::default();
    for host in 0..1000 {
        (0..16).for_each(|number| shares.join(id(16 * host + number), peer(host)));
    }
    let visits = |shares: &mut Shares, slice: usize| {
        shares.visits = 0;
        shares.changes_of_l2(L2 << 20, slice);
        shares.visits
    };
    visits(&mut shares, usize::MAX);
    // The seventeenth namespace of a peer changes nothing.
    shares.join(id(100_000), peer(1));
    assert_eq!(visits(&mut shares, usize::MAX), 0);
    // A namespace that two peers use: the two namespaces of the second one.
    shares.join(id(100_001), peer(2000));
    visits(&mut shares, usize::MAX);
    shares.join(id(0), peer(2000));
    let looked = visits(&mut shares, usize::MAX);
    assert!((2..=4).contains(&looked), "{looked} visits");
    // Another peer changes all floors: those of L2 follow in slices.
    shares.join(id(100_002), peer(2001));
    assert_eq!(visits(&mut shares, 64), 64);
    assert!(shares.has_changes_of_l2());
    let rest = visits(&mut shares, usize::MAX);
    assert!(rest <= 16_010, "{rest} visits");
    assert!(!shares.has_changes_of_l2());
}

/// `Leave` ends a connection, if there is one. `Visit` is a connection that begins and ends.
/// `Slice` takes changes of L2.
#[derive(Debug, Clone)]
enum Call {
    Join { namespace: u32, host: u32 },
    Leave { namespace: u32, host: u32 },
    Visit { namespace: u32, host: u32 },
    Expire { seconds: u64 },
    Slice { visits: usize },
}

fn call() -> impl Strategy<Value = Call> {
    let namespace = || 0..120u32;
    let host = || prop_oneof![8 => 0..2u32, 1 => 2..8u32];
    prop_oneof![
        3 => (namespace(), host()).prop_map(|(namespace, host)| Call::Join { namespace, host }),
        3 => (namespace(), host()).prop_map(|(namespace, host)| Call::Leave { namespace, host }),
        6 => (namespace(), host()).prop_map(|(namespace, host)| Call::Visit { namespace, host }),
        1 => (0..300u64).prop_map(|seconds| Call::Expire { seconds }),
        3 => (0..20usize).prop_map(|visits| Call::Slice { visits }),
    ]
}

/// Number, connections, and end of a use.
type ModelUse = (u64, usize, Option<Instant>);

/// The rules of the table, by visits of all its entries.
#[derive(Debug, Default)]
struct Model {
    peers: BTreeMap<Peer, BTreeMap<NamespaceId, ModelUse>>,
    begun: u64,
}

impl Model {
    fn join(&mut self, namespace: NamespaceId, peer: Peer) {
        let uses = self.peers.entry(peer).or_default();
        let number = self.begun;
        self.begun += 1;
        let used = uses.entry(namespace).or_insert((number, 0, None));
        (used.1, used.2) = (used.1 + 1, None);
        if used.0 != number {
            return;
        }
        let ended = uses.iter().filter_map(|(namespace, used)| Some((used.2?, *namespace)));
        let ended: Vec<_> = ended.collect();
        if ended.len() > ENDED_PER_PEER
            && let Some((_, first)) = ended.into_iter().min()
        {
            uses.remove(&first);
        }
    }

    fn is_connected(&self, namespace: NamespaceId, peer: Peer) -> bool {
        self.peers.get(&peer).and_then(|uses| uses.get(&namespace)).is_some_and(|used| used.1 > 0)
    }

    fn leave(&mut self, namespace: NamespaceId, peer: Peer, now: Instant) {
        let used = self.peers.get_mut(&peer).and_then(|uses| uses.get_mut(&namespace)).unwrap();
        used.1 -= 1;
        used.2 = (used.1 == 0).then_some(now + USED_FOR);
    }

    fn expire(&mut self, now: Instant) {
        for uses in self.peers.values_mut() {
            uses.retain(|_, used| used.2.is_none_or(|end| end > now));
        }
        self.peers.retain(|_, uses| !uses.is_empty());
    }

    fn floors(&self) -> BTreeMap<NamespaceId, u64> {
        let mut weights = BTreeMap::<NamespaceId, u64>::new();
        for uses in self.peers.values() {
            let mut numbers: Vec<_> = uses.iter().map(|(namespace, used)| (used.0, *namespace)).collect();
            numbers.sort_unstable();
            numbers.truncate(FLOORS_PER_PEER);
            let weight = PEER_WEIGHT / numbers.len() as u64;
            numbers.iter().for_each(|(_, namespace)| *weights.entry(*namespace).or_default() += weight);
        }
        let total = u128::from(PEER_WEIGHT) * self.peers.len() as u128;
        let bytes = |weight: u64| {
            let part = (1u128 << 32) * u128::from(weight) / total;
            ((u128::from(L2 / 2) * part) >> 32) as u64
        };
        weights.into_iter().map(|(namespace, weight)| (namespace, bytes(weight))).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn random_calls_agree_with_the_model(calls in prop::collection::vec(call(), 1..700)) {
        let (mut shares, mut model) = (Shares::default(), Model::default());
        let mut now = larder_runtime::now();
        let mut of_l2 = BTreeMap::new();
        let mut slice = |shares: &mut Shares, visits: usize| {
            for (namespace, bytes) in shares.changes_of_l2(L2, visits) {
                of_l2.insert(namespace, bytes);
                assert!(of_l2.values().sum::<u64>() <= L2 / 2, "floors exceed half of L2");
            }
            of_l2.clone()
        };
        for call in calls {
            match call {
                Call::Join { namespace, host } => {
                    shares.join(id(namespace), peer(host));
                    model.join(id(namespace), peer(host));
                }
                Call::Leave { namespace, host } if model.is_connected(id(namespace), peer(host)) => {
                    shares.leave(id(namespace), peer(host), now);
                    model.leave(id(namespace), peer(host), now);
                }
                Call::Leave { .. } => {}
                Call::Visit { namespace, host } => {
                    shares.join(id(namespace), peer(host));
                    model.join(id(namespace), peer(host));
                    shares.leave(id(namespace), peer(host), now);
                    model.leave(id(namespace), peer(host), now);
                }
                Call::Expire { seconds } => {
                    now += Duration::from_secs(seconds);
                    shares.expire(now);
                    model.expire(now);
                }
                Call::Slice { visits } => _ = slice(&mut shares, visits),
            }
            prop_assert_eq!(floors(&shares), model.floors());
        }
        let mut of_l2 = slice(&mut shares, usize::MAX);
        prop_assert!(!shares.has_changes_of_l2());
        of_l2.retain(|_, bytes| *bytes > 0);
        let mut wanted = model.floors();
        wanted.retain(|_, bytes| *bytes > 0);
        prop_assert_eq!(of_l2, wanted);
    }
}
