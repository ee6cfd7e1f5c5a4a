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

use crate::places::{KNOWN_PEERS_MAX, KnownPeers, Peer};
use larder_runtime::LogLimit;
use larder_runtime::sync::Mutex;
use larder_wire::{MAX_MEMBERS, MemberEntry, PROTOCOL_VERSION_MIN, Response, SharedResponse};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
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

impl Entry {
    fn bytes(&self, name: &str) -> usize {
        name.len() + self.info.len() + ENTRY_BYTES
    }
}

/// Names and the peers that registered them.
pub(crate) type Owners = BTreeMap<String, Peer>;

/// Members, with indices that follow each change: no call visits the entries of others.
#[derive(Default)]
struct Table {
    entries: BTreeMap<Arc<str>, Entry>,
    /// Names by the connection that registered them.
    by_connection: BTreeMap<u64, BTreeSet<Arc<str>>>,
    by_expiry: BTreeSet<(Instant, Arc<str>)>,
    usage: Usage,
    /// Without zeros.
    usage_of: BTreeMap<Peer, Usage>,
    /// Owners before the start. Empty from [`RETURN_TIME`] on.
    former: Owners,
    /// `None` before the first start.
    former_until: Option<Instant>,
    /// Time of the last registration of each peer.
    known: KnownPeers,
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
            table.known.set_within(KNOWN_PEERS_MAX, *peer, now);
        }
        table.former = former;
        table.former_until = Some(now + RETURN_TIME);
    }

    /// Owners of all names, with those that may still return.
    pub(crate) fn owners(&self, now: Instant) -> Owners {
        let mut table = self.table.lock();
        table.end_return_time(now);
        let mut owners = table.former.clone();
        owners.extend(table.entries.iter().map(|(name, entry)| (name.to_string(), entry.owner.peer)));
        owners
    }

    /// Adds or renews an entry. Returns `false` if the name belongs to another connection, or if
    /// the table has no room for the entry.
    pub(crate) fn register(&self, owner: MemberOwner, name: String, info: String, ttl: Duration, now: Instant) -> bool {
        let mut table = self.table.lock();
        // Expired entries go first, so that dead engines do not keep new ones out.
        table.remove_expired(now);
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
        table.known.set_within(KNOWN_PEERS_MAX, owner.peer, now);
        let is_changed = table.entries.get(name.as_str()).is_none_or(|before| before.info != entry.info);
        table.insert(name, entry);
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
            table.remove(name);
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
        let names = table.by_connection.get(&owner.connection).cloned().unwrap_or_default();
        names.iter().for_each(|name| table.remove(name));
        drop(table);
        let is_changed = !names.is_empty();
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
        let valid_until = self.table.lock().by_expiry.iter().map(|(at, _)| *at).find(|&at| at > now);
        let encoded = Response::Members(self.list(now)).shared(PROTOCOL_VERSION_MIN);
        snapshots.push(Snapshot { encoded: encoded.clone(), changes, valid_until });
        encoded
    }

    pub(crate) fn list(&self, now: Instant) -> Vec<MemberEntry> {
        let table = self.table.lock();
        let live = table.entries.iter().filter(|(_, entry)| entry.expires > now);
        live.map(|(name, entry)| MemberEntry { name: name.to_string(), info: entry.info.clone() }).collect()
    }
}

impl Table {
    /// Adds an entry, or replaces the one of its name.
    fn insert(&mut self, name: String, entry: Entry) {
        self.remove(&name);
        let name = Arc::<str>::from(name);
        let Entry { expires, owner, .. } = entry;
        self.usage.add(&name, &entry);
        self.usage_of.entry(owner.peer).or_default().add(&name, &entry);
        self.by_connection.entry(owner.connection).or_default().insert(name.clone());
        self.by_expiry.insert((expires, name.clone()));
        self.entries.insert(name, entry);
    }

    fn remove(&mut self, name: &str) {
        let Some((name, entry)) = self.entries.remove_entry(name) else { return };
        let MemberOwner { connection, peer } = entry.owner;
        self.usage.remove(&name, &entry);
        if let Some(of_peer) = self.usage_of.get_mut(&peer) {
            of_peer.remove(&name, &entry);
            if of_peer.entries == 0 {
                self.usage_of.remove(&peer);
            }
        }
        if let Some(names) = self.by_connection.get_mut(&connection) {
            names.remove(&name);
            if names.is_empty() {
                self.by_connection.remove(&connection);
            }
        }
        self.by_expiry.remove(&(entry.expires, name));
    }

    fn remove_expired(&mut self, now: Instant) {
        while let Some((at, name)) = self.by_expiry.first()
            && *at <= now
        {
            let name = name.clone();
            self.remove(&name);
        }
    }

    /// Checks that `entry` may stand under `name`.
    fn admit(&self, name: &str, entry: &Entry, now: Instant) -> Result<(), Refusal> {
        if self.entries.get(name).is_some_and(|before| before.owner != entry.owner) {
            return Err(Refusal::Foreign);
        }
        let peer = entry.owner.peer;
        if self.former.get(name).is_some_and(|former| !is_same(*former, peer)) {
            return Err(Refusal::Former);
        }
        let is_known = self.known.time_of(&peer).is_some_and(|at| now < at + KNOWN_FOR);
        let of_peer = self.usage_of.get(&peer).copied().unwrap_or_default();
        // The entry that this one replaces makes room. It has the same owner.
        let replaced = self.entries.get(name);
        let [all, of_peer] = [self.usage, of_peer].map(|mut usage| {
            replaced.into_iter().for_each(|replaced| usage.remove(name, replaced));
            usage.add(name, entry);
            usage
        });
        let may_use_all = is_known && of_peer.entries <= KNOWN_ENTRIES_MAX;
        let fits = of_peer.fits(1, PEER_SHARE) && all.fits(KNOWN_SHARE - usize::from(!may_use_all), KNOWN_SHARE);
        if fits { Ok(()) } else { Err(Refusal::Full) }
    }

    fn end_return_time(&mut self, now: Instant) {
        if self.former_until.is_some_and(|until| now >= until) {
            self.former.clear();
        }
    }
}

/// Returns `true` if `peer` may be `former`. An engine on the node's machine may change between
/// local sockets and TCP.
fn is_same(former: Peer, peer: Peer) -> bool {
    let is_here = |peer| matches!(peer, Peer::Local | Peer::Address(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    former == peer || (is_here(former) && is_here(peer))
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Usage {
    entries: usize,
    bytes: usize,
}

impl Usage {
    fn add(&mut self, name: &str, entry: &Entry) {
        self.entries += 1;
        self.bytes += entry.bytes(name);
    }

    fn remove(&mut self, name: &str, entry: &Entry) {
        assert!(self.bytes >= entry.bytes(name), "a member leaves with more bytes than it brought");
        self.entries -= 1;
        self.bytes -= entry.bytes(name);
    }

    /// Returns `true` if this is at most `parts / share` of the table.
    fn fits(&self, parts: usize, share: usize) -> bool {
        self.entries * share <= MAX_MEMBERS * parts && self.bytes * share <= BYTES_MAX * parts
    }
}

#[cfg(test)]
mod tests;
