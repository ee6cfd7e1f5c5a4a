//! Tests of the registry, by hand and against a model.

use super::*;
use proptest::prelude::*;

fn peer(host: u8) -> Peer {
    Peer::of(([10, 0, 0, host], 7).into())
}

#[test]
fn entries_expire_and_are_bounded() {
    let members = Members::default();
    let now = larder_runtime::now();
    let ttl = Duration::from_secs(3);
    let owner = members.owner(peer(1));
    let register = |name: &str, info: &str, at| members.register(owner, name.into(), info.into(), ttl, at);
    assert!(register("a", "{}", now) && register("a", "{1}", now + Duration::from_secs(2)));
    assert_eq!(members.list(now + Duration::from_secs(4)), [MemberEntry { name: "a".into(), info: "{1}".into() }]);
    assert!(members.list(now + Duration::from_secs(6)).is_empty());
    for host in 1..4 {
        let owner = members.owner(peer(host));
        for i in 0..MAX_MEMBERS {
            members.register(owner, format!("m{host}-{i}"), "x".repeat(1000), ttl, now);
        }
    }
    assert!(members.list(now).len() < 600, "the bytes are bounded");
    assert!(members.withdraw(owner, "a") && !members.withdraw(owner, "a"));
}

#[test]
fn name_belongs_to_the_connection_that_registered_it() {
    let members = Members::default();
    let now = larder_runtime::now();
    let ttl = Duration::from_secs(3);
    let engine = members.owner(peer(1));
    // Even one of the same machine.
    let stranger = members.owner(peer(1));
    let register = |owner, info: &str, at| members.register(owner, "decode-1".into(), info.into(), ttl, at);
    let listed = |at| members.list(at).into_iter().map(|entry| entry.info).collect::<Vec<_>>();
    assert!(register(engine, "{}", now));
    assert!(!register(stranger, "{1}", now) && !members.withdraw(stranger, "decode-1"));
    members.end(stranger);
    assert_eq!(listed(now), ["{}"]);
    members.end(engine);
    assert!(listed(now).is_empty(), "the engine's connection has ended");
    assert!(register(stranger, "{1}", now));
    assert!(!register(engine, "{}", now));
    assert!(register(engine, "{}", now + ttl), "a silent connection loses the name");
    assert_eq!(listed(now + ttl), ["{}"]);
}

#[test]
fn former_owner_keeps_its_name_for_a_while_after_a_start() {
    let before = Members::default();
    let start = larder_runtime::now();
    let ttl = Duration::from_secs(3);
    let owner = before.owner(peer(1));
    for name in ["decode-1", "decode-2"] {
        assert!(before.register(owner, name.into(), "{}".into(), ttl, start));
    }
    let members = Members::default();
    members.expect(before.owners(start), start);
    let stranger = members.owner(peer(2));
    let engine = members.owner(peer(1));
    let register = |owner, name: &str, at| members.register(owner, name.into(), "{}".into(), ttl, at);
    assert!(!register(stranger, "decode-1", start) && register(stranger, "decode-3", start));
    assert!(register(engine, "decode-1", start));
    // It restarts at once.
    members.end(engine);
    let engine = members.owner(peer(1));
    assert!(!register(stranger, "decode-1", start) && register(engine, "decode-1", start));
    assert_eq!(members.owners(start).into_keys().collect::<Vec<_>>(), ["decode-1", "decode-2", "decode-3"]);
    assert!(members.withdraw(engine, "decode-1"));
    assert!(register(stranger, "decode-1", start), "its owner gave it up");
    assert!(register(stranger, "decode-2", start + RETURN_TIME), "its owner did not return");
}

#[test]
fn engine_on_the_machine_of_the_node_may_change_its_transport() {
    let members = Members::default();
    let start = larder_runtime::now();
    let tcp = |host: [u8; 4]| Peer::of((host, 7).into());
    members.expect(Owners::from([("a".into(), Peer::Local), ("b".into(), tcp([127, 0, 0, 1]))]), start);
    let register = |peer: Peer, name: &str| {
        members.register(members.owner(peer), name.into(), "{}".into(), Duration::from_secs(3), start)
    };
    assert!(!register(tcp([127, 0, 0, 2]), "a") && !register(tcp([10, 0, 0, 1]), "a"));
    assert!(register(tcp([127, 0, 0, 1]), "a") && register(Peer::Local, "b"));
}

#[test]
fn no_peer_fills_the_table_and_known_peers_return() {
    let members = Members::default();
    let now = larder_runtime::now();
    let ttl = Duration::from_secs(3);
    let fill = |host: u8| {
        let owner = members.owner(peer(host));
        let names = (0..MAX_MEMBERS).map(|i| format!("m{host}-{i}"));
        names.filter(|name| members.register(owner, name.clone(), "{}".into(), ttl, now)).count()
    };
    let engine = members.owner(peer(1));
    assert!(members.register(engine, "decode-1".into(), "{}".into(), ttl, now));
    members.end(engine);
    assert_eq!(fill(2), MAX_MEMBERS / 2);
    assert_eq!(fill(3), MAX_MEMBERS / 2 - MAX_MEMBERS / 8, "the rest is for known peers");
    assert_eq!(fill(4), 0);
    let restarted = members.owner(peer(1));
    assert!(members.register(restarted, "decode-1".into(), "{}".into(), ttl, now));
}

#[test]
fn unread_lists_are_bounded_and_share_their_bytes() {
    let members = Members::default();
    let start = larder_runtime::now();
    let ttl = Duration::from_secs(3);
    let owner = members.owner(peer(1));
    let register = |number: u32, at| members.register(owner, format!("m{number}"), "{}".into(), ttl, at);
    assert!(register(0, start));
    let shared: Vec<_> = (0..100).map(|_| members.shared(start)).collect();
    assert_eq!(shared[0].owners(), 101, "one list for all answers");
    register(0, start);
    assert_eq!(members.shared(start).owners(), 102, "a renewal changes nothing");
    // Each change makes another list, until too many are unread.
    let mut unread = shared;
    for number in 1..50 {
        register(number, start);
        unread.push(members.shared(start));
    }
    assert_eq!(members.snapshots.lock().len(), SNAPSHOTS_MAX);
    assert_eq!(unread[99].owners(), 101);
    let old = members.shared(start);
    drop(unread);
    let new = members.shared(start);
    assert!(new.body_bytes() > old.body_bytes(), "the list is current again");
    let expired = members.shared(start + ttl);
    assert!(expired.body_bytes() < old.body_bytes(), "the lives of its members ended");
}

#[derive(Debug, Clone)]
enum Call {
    Register { connection: usize, name: u8, bytes: usize, ttl: u64 },
    Withdraw { connection: usize, name: u8 },
    End { connection: usize },
    Pass { seconds: u64 },
}

fn call() -> impl Strategy<Value = Call> {
    let connection = || 0..6usize;
    let name = || 0..14u8;
    prop_oneof![
        12 => (connection(), name(), prop_oneof![Just(2usize), Just(60_000)], 1..90u64)
            .prop_map(|(connection, name, bytes, ttl)| Call::Register { connection, name, bytes, ttl }),
        2 => (connection(), name()).prop_map(|(connection, name)| Call::Withdraw { connection, name }),
        1 => connection().prop_map(|connection| Call::End { connection }),
        2 => (0..40u64).prop_map(|seconds| Call::Pass { seconds }),
    ]
}

/// The rules of the registry, by visits of all entries.
#[derive(Default)]
struct Model {
    entries: BTreeMap<String, (String, Instant, MemberOwner)>,
    known: BTreeMap<Peer, Instant>,
}

impl Model {
    fn register(&mut self, owner: MemberOwner, name: &str, info: &str, ttl: Duration, now: Instant) -> bool {
        self.entries.retain(|_, entry| entry.1 > now);
        if self.entries.get(name).is_some_and(|entry| entry.2 != owner) {
            return false;
        }
        let used = |peer: Option<Peer>| {
            let others = self.entries.iter().filter(|(other, _)| *other != name);
            let others = others.filter(|(_, entry)| peer.is_none_or(|peer| entry.2.peer == peer));
            let others = others.map(|(name, entry)| (name.as_str(), entry.0.as_str()));
            others.chain([(name, info)]).fold((0, 0), |(entries, bytes), (name, info)| {
                (entries + 1, bytes + name.len() + info.len() + ENTRY_BYTES)
            })
        };
        let (all, of_peer) = (used(None), used(Some(owner.peer)));
        let is_known = self.known.get(&owner.peer).is_some_and(|at| now < *at + KNOWN_FOR);
        let parts = if is_known && of_peer.0 <= KNOWN_ENTRIES_MAX { KNOWN_SHARE } else { KNOWN_SHARE - 1 };
        let fits = |(entries, bytes): (usize, usize), parts: usize, share: usize| {
            entries * share <= MAX_MEMBERS * parts && bytes * share <= BYTES_MAX * parts
        };
        if !fits(of_peer, 1, PEER_SHARE) || !fits(all, parts, KNOWN_SHARE) {
            return false;
        }
        self.known.insert(owner.peer, now);
        self.entries.insert(name.into(), (info.into(), now + ttl.min(TTL_MAX), owner));
        true
    }

    fn withdraw(&mut self, owner: MemberOwner, name: &str) -> bool {
        let is_own = self.entries.get(name).is_some_and(|entry| entry.2 == owner);
        is_own && self.entries.remove(name).is_some()
    }

    /// Owner and bytes of each entry.
    fn usage(&self) -> Vec<(MemberOwner, usize)> {
        self.entries.iter().map(|(name, entry)| (entry.2, name.len() + entry.0.len() + ENTRY_BYTES)).collect()
    }
}

/// Compares the indices with the entries of the model.
fn check_indices(table: &Table, model: &Model) {
    let usage = model.usage();
    let sum = |peer: Option<Peer>| {
        let wanted = usage.iter().filter(|(owner, _)| peer.is_none_or(|peer| owner.peer == peer));
        wanted.fold(Usage::default(), |sum, (_, bytes)| Usage { entries: sum.entries + 1, bytes: sum.bytes + bytes })
    };
    assert_eq!(table.usage, sum(None));
    let peers: BTreeSet<Peer> = usage.iter().map(|(owner, _)| owner.peer).collect();
    let usage_of: BTreeMap<Peer, Usage> = peers.into_iter().map(|peer| (peer, sum(Some(peer)))).collect();
    assert_eq!(table.usage_of, usage_of);
    let names = table.by_connection.iter();
    let names = names.flat_map(|(connection, names)| names.iter().map(move |name| (name.to_string(), *connection)));
    let names: BTreeMap<String, u64> = names.collect();
    assert_eq!(names, model.entries.iter().map(|(name, entry)| (name.clone(), entry.2.connection)).collect());
    assert!(table.by_connection.values().all(|names| !names.is_empty()));
    let expiries = table.by_expiry.iter().map(|(at, name)| (*at, name.to_string()));
    let expiries: BTreeSet<(Instant, String)> = expiries.collect();
    assert_eq!(expiries, model.entries.iter().map(|(name, entry)| (entry.1, name.clone())).collect());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    /// Three peers with two connections each.
    #[test]
    fn random_calls_agree_with_the_model(calls in prop::collection::vec(call(), 1..150)) {
        let (members, mut model) = (Members::default(), Model::default());
        let mut now = larder_runtime::now();
        let mut owners: Vec<MemberOwner> = (0..6u8).map(|number| members.owner(peer(number / 2))).collect();
        for call in calls {
            match call {
                Call::Register { connection, name, bytes, ttl } => {
                    let (name, info, ttl) = (format!("m{name}"), "x".repeat(bytes), Duration::from_secs(ttl));
                    let owner = owners[connection];
                    let expected = model.register(owner, &name, &info, ttl, now);
                    prop_assert_eq!(members.register(owner, name, info, ttl, now), expected);
                }
                Call::Withdraw { connection, name } => {
                    let name = format!("m{name}");
                    let expected = model.withdraw(owners[connection], &name);
                    prop_assert_eq!(members.withdraw(owners[connection], &name), expected);
                }
                Call::End { connection } => {
                    let owner = owners[connection];
                    members.end(owner);
                    model.entries.retain(|_, entry| entry.2 != owner);
                    owners[connection] = members.owner(owner.peer);
                }
                Call::Pass { seconds } => now += Duration::from_secs(seconds),
            }
            check_indices(&members.table.lock(), &model);
            let live = model.entries.iter().filter(|(_, entry)| entry.1 > now);
            let live: Vec<_> = live.map(|(name, entry)| (name.clone(), entry.0.len())).collect();
            let listed = members.list(now).into_iter().map(|member| (member.name, member.info.len()));
            prop_assert_eq!(listed.collect::<Vec<_>>(), live);
        }
    }
}
