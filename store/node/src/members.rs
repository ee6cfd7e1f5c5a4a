//! Registry of engines: name, description and time to live of each.
//!
//! Engines renew their entries. The registry only tells a router where to ask, so correctness never
//! depends on it.

use larder_runtime::sync::Mutex;
use larder_wire::{MAX_MEMBERS, MemberEntry};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Bound on the bytes of all entries together: they must fit into one response.
const BYTES_MAX: usize = 512 << 10;
/// Encoded size of an entry beyond its two strings.
const ENTRY_BYTES: usize = 8;
/// Upper bound of a time to live. A dead engine disappears after at most this time.
const TTL_MAX: Duration = Duration::from_secs(60);

struct Entry {
    info: String,
    expires: Instant,
}

#[derive(Default)]
pub(crate) struct Members {
    entries: Mutex<BTreeMap<String, Entry>>,
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
        entries.insert(name, Entry { info, expires: now + ttl.min(TTL_MAX) });
        true
    }

    pub(crate) fn withdraw(&self, name: &str) -> bool {
        self.entries.lock().remove(name).is_some()
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
}
