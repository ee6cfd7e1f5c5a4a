//! Registry of engines: name, description and time to live of each.
//!
//! Engines renew their entries. The registry only tells a router where to ask, so correctness never
//! depends on it.
//!
//! The node encodes the list once per change, and all answers share its bytes. Clients that do not
//! read them can keep [`SNAPSHOTS_MAX`] lists in memory, of half a mebibyte each.

use larder_runtime::sync::Mutex;
use larder_wire::{MAX_MEMBERS, MemberEntry, PROTOCOL_VERSION_MIN, Response, SharedResponse};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bound on the bytes of all entries together: they must fit into one response.
const BYTES_MAX: usize = 512 << 10;
/// Encoded size of an entry beyond its two strings.
const ENTRY_BYTES: usize = 8;
/// Encoded lists in memory at a time. While clients keep so many unread, others get the newest of
/// them, which may lack the last changes.
const SNAPSHOTS_MAX: usize = 8;
/// Upper bound of a time to live. A dead engine disappears after at most this time.
const TTL_MAX: Duration = Duration::from_secs(60);

struct Entry {
    info: String,
    expires: Instant,
}

#[derive(Default)]
pub(crate) struct Members {
    entries: Mutex<BTreeMap<String, Entry>>,
    /// Locked before `entries`.
    snapshots: Mutex<Vec<Snapshot>>,
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
    /// Adds or renews an entry. Returns `false` if the table is full.
    pub(crate) fn register(&self, name: String, info: String, ttl: Duration, now: Instant) -> bool {
        let mut entries = self.entries.lock();
        // Expired entries go first, so that dead engines do not keep new ones out.
        entries.retain(|_, entry| entry.expires > now);
        let others: usize =
            entries.iter().filter(|(n, _)| **n != name).map(|(n, e)| n.len() + e.info.len() + ENTRY_BYTES).sum();
        let full = entries.len() >= MAX_MEMBERS && !entries.contains_key(&name);
        if full || others + name.len() + info.len() + ENTRY_BYTES > BYTES_MAX {
            return false;
        }
        let entry = Entry { info, expires: now + ttl.min(TTL_MAX) };
        let is_changed = entries.get(&name).is_none_or(|before| before.info != entry.info);
        entries.insert(name, entry);
        if is_changed {
            self.record_change();
        }
        true
    }

    pub(crate) fn withdraw(&self, name: &str) -> bool {
        let is_removed = self.entries.lock().remove(name).is_some();
        if is_removed {
            self.record_change();
        }
        is_removed
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
        let valid_until = self.entries.lock().values().map(|entry| entry.expires).filter(|&at| at > now).min();
        let encoded = Response::Members(self.list(now)).shared(PROTOCOL_VERSION_MIN);
        snapshots.push(Snapshot { encoded: encoded.clone(), changes, valid_until });
        encoded
    }

    pub(crate) fn list(&self, now: Instant) -> Vec<MemberEntry> {
        let entries = self.entries.lock();
        let live = entries.iter().filter(|(_, entry)| entry.expires > now);
        live.map(|(name, entry)| MemberEntry { name: name.clone(), info: entry.info.clone() }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_expire_and_are_bounded() {
        let members = Members::default();
        let now = larder_runtime::now();
        let ttl = Duration::from_secs(3);
        assert!(members.register("a".into(), "{}".into(), ttl, now));
        assert!(members.register("a".into(), "{1}".into(), ttl, now + Duration::from_secs(2)));
        assert_eq!(members.list(now + Duration::from_secs(4)), [MemberEntry { name: "a".into(), info: "{1}".into() }]);
        assert!(members.list(now + Duration::from_secs(6)).is_empty());
        for i in 0..2 * MAX_MEMBERS {
            members.register(format!("m{i}"), "x".repeat(1000), ttl, now);
        }
        assert!(members.list(now).len() < 600, "the bytes are bounded");
        assert!(members.withdraw("m1") && !members.withdraw("m1"));
    }

    #[test]
    fn unread_lists_are_bounded_and_share_their_bytes() {
        let members = Members::default();
        let start = larder_runtime::now();
        let ttl = Duration::from_secs(3);
        let register = |number: u32, at| members.register(format!("m{number}"), "{}".into(), ttl, at);
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
