//! Registry of engines: name, description and time to live of each.
//!
//! Engines renew their entries. The registry only tells a router where to ask, so correctness never
//! depends on it.
//!
//! Invariants:
//! - Only the connection that registered a name renews or withdraws it. The entry ends with the
//!   connection.
//! - For [`RETURN_TIME`] after a start, a name that was registered before belongs to its former
//!   peer. Otherwise a client that reconnects sooner than an engine could take its name.
//! - One peer has at most half of the table. The last eighth is for peers that have, or lately had,
//!   a few entries, so that their engines can return after a restart.
//!
//! The node encodes the list once per change, and all answers share its bytes. Clients that do not
//! read them can keep [`SNAPSHOTS_MAX`] lists in memory, of half a mebibyte each.

use crate::places::Peer;
use larder_runtime::LogLimit;
use larder_runtime::sync::Mutex;
use larder_wire::{MAX_MEMBERS, MemberEntry, PROTOCOL_VERSION_MIN, Response, SharedResponse};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bound on the bytes of all entries together: they must fit into one response.
const BYTES_MAX: usize = 512 << 10;
/// Encoded size of an entry beyond its two strings.
const ENTRY_BYTES: usize = 8;
/// Encoded lists in memory at a time. While clients keep so many unread, others get the newest of
/// them, which may lack the last changes.
const SNAPSHOTS_MAX: usize = 8;
/// Part of the table for one peer.
const PEER_SHARE: usize = 2;
/// Part of the table for known peers only.
const KNOWN_SHARE: usize = 8;
/// Maximum number of entries of a known peer that uses that part.
const KNOWN_ENTRIES_MAX: usize = 16;
/// Time for which a peer counts as known after its last registration.
const KNOWN_FOR: Duration = Duration::from_secs(600);
/// Known peers that a node remembers.
const KNOWN_MAX: usize = 1024;
/// Time after a start for which former owners keep their names. A client reconnects within 3 s.
const RETURN_TIME: Duration = Duration::from_secs(10);
/// Upper bound of a time to live. A dead engine disappears after at most this time.
const TTL_MAX: Duration = Duration::from_secs(60);

/// Connection that registers members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemberOwner {
    connection: u64,
    peer: Peer,
}

struct Entry {
    info: String,
    expires: Instant,
    owner: MemberOwner,
}

/// Names and the peers that registered them.
pub(crate) type Owners = BTreeMap<String, Peer>;

#[derive(Default)]
struct Table {
    entries: BTreeMap<String, Entry>,
    /// Owners before the start. Empty from [`RETURN_TIME`] on.
    former: Owners,
    /// `None` before the first start.
    former_until: Option<Instant>,
    /// Time of the last registration of each peer.
    known: BTreeMap<Peer, Instant>,
    refused_lines: LogLimit,
}

/// Reason for a refused registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    Foreign,
    Former,
    Full,
}

impl Refusal {
    fn as_str(self) -> &'static str {
        match self {
            Self::Foreign => "another connection has registered its name; give each engine its own",
            Self::Former => {
                "before the node's start another address had registered its name; it may return within seconds"
            }
            Self::Full => "the table is full, or has too many members of this peer; stop some of them",
        }
    }
}

#[derive(Default)]
pub(crate) struct Members {
    table: Mutex<Table>,
    /// Locked before `table`.
    snapshots: Mutex<Vec<Snapshot>>,
    next_connection: AtomicU64,
    /// Number of changes to the names or descriptions so far.
    changes: AtomicU64,
}

/// List of all members, encoded.
struct Snapshot {
    encoded: SharedResponse,
    changes: u64,
    /// First end of the life of a listed member.
    valid_until: Option<Instant>,
}

impl Members {
    /// Identity of a new connection of `peer`. It must be passed to [`Members::end`] when the
    /// connection ends.
    pub(crate) fn owner(&self, peer: Peer) -> MemberOwner {
        // Relaxed: only the uniqueness of the number counts.
        MemberOwner { connection: self.next_connection.fetch_add(1, Relaxed), peer }
    }

    /// Keeps names for the peers that had registered them before the start at `now`. These peers
    /// count as known.
    pub(crate) fn expect(&self, former: Owners, now: Instant) {
        let mut table = self.table.lock();
        for peer in former.values() {
            table.remember(*peer, now);
        }
        table.former = former;
        table.former_until = Some(now + RETURN_TIME);
    }

    /// Owners of all names, with those that may still return.
    pub(crate) fn owners(&self, now: Instant) -> Owners {
        let mut table = self.table.lock();
        table.end_return_time(now);
        let mut owners = table.former.clone();
        owners.extend(table.entries.iter().map(|(name, entry)| (name.clone(), entry.owner.peer)));
        owners
    }

    /// Adds or renews an entry. Returns `false` if the name belongs to another connection, or if
    /// the table has no room for the entry.
    pub(crate) fn register(&self, owner: MemberOwner, name: String, info: String, ttl: Duration, now: Instant) -> bool {
        let mut table = self.table.lock();
        // Expired entries go first, so that dead engines do not keep new ones out.
        table.entries.retain(|_, entry| entry.expires > now);
        table.end_return_time(now);
        let entry = Entry { info, expires: now + ttl.min(TTL_MAX), owner };
        if let Err(refusal) = table.admit(&name, &entry, now) {
            // A refused client repeats its request every second.
            if table.refused_lines.record_at(now).is_some() {
                let peer = owner.peer;
                tracing::warn!(?name, ?peer, "member not registered: {}", refusal.as_str());
            }
            return false;
        }
        table.remember(owner.peer, now);
        let is_changed = table.entries.get(&name).is_none_or(|before| before.info != entry.info);
        table.entries.insert(name, entry);
        drop(table);
        if is_changed {
            self.record_change();
        }
        true
    }

    /// Removes an entry of this connection.
    pub(crate) fn withdraw(&self, owner: MemberOwner, name: &str) -> bool {
        let mut table = self.table.lock();
        let is_own = table.entries.get(name).is_some_and(|entry| entry.owner == owner);
        if is_own {
            table.entries.remove(name);
            table.former.remove(name);
            drop(table);
            self.record_change();
        }
        is_own
    }

    /// Removes all entries of a connection that has ended. Its engine has stopped, or registers
    /// again with its next connection.
    pub(crate) fn end(&self, owner: MemberOwner) {
        let mut table = self.table.lock();
        let before = table.entries.len();
        table.entries.retain(|_, entry| entry.owner != owner);
        let is_changed = table.entries.len() < before;
        drop(table);
        if is_changed {
            self.record_change();
        }
    }

    fn record_change(&self) {
        // Relaxed: the locks order the changes. A list that is encoded meanwhile is as good as one
        // that was encoded before.
        self.changes.fetch_add(1, Relaxed);
    }

    /// Returns the list of members as an answer. Its encoding is the same in all versions.
    pub(crate) fn shared(&self, now: Instant) -> SharedResponse {
        let mut snapshots = self.snapshots.lock();
        // Before the list is read: a change in between makes it outdated.
        let changes = self.changes.load(Relaxed);
        let is_current =
            |snapshot: &Snapshot| snapshot.changes == changes && snapshot.valid_until.is_none_or(|until| now < until);
        if let Some(newest) = snapshots.last().filter(|newest| is_current(newest)) {
            return newest.encoded.clone();
        }
        // Those that no answer uses any more.
        snapshots.retain(|snapshot| snapshot.encoded.owners() > 1);
        if let Some(newest) = snapshots.last().filter(|_| snapshots.len() >= SNAPSHOTS_MAX) {
            return newest.encoded.clone();
        }
        let valid_until = self.table.lock().entries.values().map(|entry| entry.expires).filter(|&at| at > now).min();
        let encoded = Response::Members(self.list(now)).shared(PROTOCOL_VERSION_MIN);
        snapshots.push(Snapshot { encoded: encoded.clone(), changes, valid_until });
        encoded
    }

    pub(crate) fn list(&self, now: Instant) -> Vec<MemberEntry> {
        let table = self.table.lock();
        let live = table.entries.iter().filter(|(_, entry)| entry.expires > now);
        live.map(|(name, entry)| MemberEntry { name: name.clone(), info: entry.info.clone() }).collect()
    }
}

impl Table {
    /// Checks that `entry` may stand under `name`.
    fn admit(&self, name: &str, entry: &Entry, now: Instant) -> Result<(), Refusal> {
        if self.entries.get(name).is_some_and(|before| before.owner != entry.owner) {
            return Err(Refusal::Foreign);
        }
        let peer = entry.owner.peer;
        if self.former.get(name).is_some_and(|former| !is_same(*former, peer)) {
            return Err(Refusal::Former);
        }
        let is_known = self.known.get(&peer).is_some_and(|at| now < *at + KNOWN_FOR);
        let mut all = Usage::default();
        let mut of_peer = Usage::default();
        // The entry that this one replaces makes room.
        let others = self.entries.iter().filter(|(other, _)| *other != name);
        for (name, entry) in others.map(|(name, entry)| (name.as_str(), entry)).chain([(name, entry)]) {
            all.add(name, entry);
            if entry.owner.peer == peer {
                of_peer.add(name, entry);
            }
        }
        let may_use_all = is_known && of_peer.entries <= KNOWN_ENTRIES_MAX;
        let fits = of_peer.fits(1, PEER_SHARE) && all.fits(KNOWN_SHARE - usize::from(!may_use_all), KNOWN_SHARE);
        if fits { Ok(()) } else { Err(Refusal::Full) }
    }

    fn end_return_time(&mut self, now: Instant) {
        if self.former_until.is_some_and(|until| now >= until) {
            self.former.clear();
        }
    }

    fn remember(&mut self, peer: Peer, now: Instant) {
        self.known.insert(peer, now);
        if self.known.len() > KNOWN_MAX
            && let Some(oldest) = self.known.iter().min_by_key(|(_, at)| **at).map(|(peer, _)| *peer)
        {
            self.known.remove(&oldest);
        }
    }
}

/// Returns `true` if `peer` may be `former`. An engine on the node's machine may change between
/// local sockets and TCP.
fn is_same(former: Peer, peer: Peer) -> bool {
    let is_here = |peer| matches!(peer, Peer::Local | Peer::Address(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    former == peer || (is_here(former) && is_here(peer))
}

#[derive(Default)]
struct Usage {
    entries: usize,
    bytes: usize,
}

impl Usage {
    fn add(&mut self, name: &str, entry: &Entry) {
        self.entries += 1;
        self.bytes += name.len() + entry.info.len() + ENTRY_BYTES;
    }

    /// Returns `true` if this is at most `parts / share` of the table.
    fn fits(&self, parts: usize, share: usize) -> bool {
        self.entries * share <= MAX_MEMBERS * parts && self.bytes * share <= BYTES_MAX * parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
