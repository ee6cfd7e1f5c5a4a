//! Token ids of pages in DRAM, within a bound.
//!
//! KV events carry them, and L3 stores them. No request depends on them.
//!
//! Invariants:
//! - The ids of all open puts, pages in DRAM and queued events take at most [`memory_max`]. A page
//!   that finds no room for its ids does without them.
//! - Half of the memory is divided into the floors of the namespaces in use ([`crate::shares`]),
//!   the same parts as those of L2. Beyond their floors, all namespaces share the other half. A
//!   change of the floors removes no ids: a namespace adds none until it is within its limit again.
//!
//! The lock is a leaf, also below the lock of an L3 log.

use crate::metrics::Metrics;
use larder_format::NamespaceId;
use larder_log::SharedFloors;
use larder_runtime::sync::Mutex;
use prometheus_client::metrics::counter::Counter;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Memory of a token id in bytes: in DRAM, and in two copies on the way to L3. The write has one,
/// and its attempt at a device another.
const TOKEN_BYTES: u64 = 12;
/// Memory of a list of ids in bytes, beside the ids: its two allocations and its counts.
const LIST_BYTES: u64 = 96;
/// The arena is this many times larger than the memory for token ids. Pages with 4.5 KiB per token
/// or more, 16 tokens long, then always have their ids. KV of common models takes over 30 KiB per
/// token.
const ARENA_SHARE: u64 = 256;
const MEMORY_MIN: u64 = 1 << 20;

/// Maximum memory for token ids beside an arena of this size, in bytes.
pub(crate) fn memory_max(arena_bytes: u64) -> u64 {
    (arena_bytes / ARENA_SHARE).max(MEMORY_MIN)
}

/// Memory for token ids, which their lists return when they are dropped.
pub(crate) struct TokenMemory {
    uses: Mutex<Uses>,
    floors: Arc<SharedFloors>,
    bytes_max: u64,
    /// Counts the lists that found no room.
    dropped: Counter,
}

#[derive(Default)]
struct Uses {
    /// Without zeros.
    by_namespace: BTreeMap<NamespaceId, NamespaceUse>,
    bytes: u64,
    /// Sum of the bytes of each namespace that are within its floor.
    bytes_within_floors: u64,
}

struct NamespaceUse {
    namespace: Arc<NamespaceId>,
    bytes: u64,
    /// Floor in bytes when the namespace added ids last.
    floor: u64,
}

impl NamespaceUse {
    fn within_floor(&self) -> u64 {
        self.bytes.min(self.floor)
    }
}

impl TokenMemory {
    /// Creates the memory beside an arena of this size.
    pub(crate) fn beside(arena_bytes: u64, floors: Arc<SharedFloors>, metrics: &Metrics) -> Arc<TokenMemory> {
        TokenMemory::new(memory_max(arena_bytes), floors, metrics.token_ids_dropped.clone())
    }

    fn new(bytes_max: u64, floors: Arc<SharedFloors>, dropped: Counter) -> Arc<TokenMemory> {
        Arc::new(TokenMemory { uses: Mutex::default(), floors, bytes_max, dropped })
    }

    /// Keeps the ids of a page's tokens. `None` if there are none, or no room for them.
    pub(crate) fn keep(self: &Arc<Self>, namespace: &NamespaceId, ids: Vec<u32>) -> Option<Arc<TokenIds>> {
        if ids.is_empty() {
            return None;
        }
        let bytes = LIST_BYTES + TOKEN_BYTES * ids.len() as u64;
        let Some(namespace) = self.add(namespace, bytes) else {
            self.dropped.inc();
            return None;
        };
        Some(Arc::new(TokenIds { ids: ids.into(), bytes, namespace, memory: self.clone() }))
    }

    /// Adds bytes to those of a namespace. Returns its shared name, or `None` without room.
    fn add(&self, namespace: &NamespaceId, bytes: u64) -> Option<Arc<NamespaceId>> {
        // Before the lock: both are leaves. A store without connections, as in tests, knows no
        // namespace in use.
        let has_floors = self.floors.total() > 0;
        let floor = self.floors.part_of(namespace).of(self.bytes_max);
        let mut uses = self.uses.lock();
        let (own, own_within) = uses.by_namespace.get(namespace).map_or((0, 0), |own| (own.bytes, own.within_floor()));
        let after = own + bytes;
        let within_floors = uses.bytes_within_floors - own_within + after.min(floor);
        let beyond_floors = uses.bytes + bytes - within_floors;
        let has_share = !has_floors || after <= floor || beyond_floors <= self.bytes_max / 2;
        if !has_share || uses.bytes + bytes > self.bytes_max {
            return None;
        }
        uses.bytes += bytes;
        uses.bytes_within_floors = within_floors;
        let own = uses.by_namespace.entry(*namespace).or_insert_with(|| {
            let namespace = Arc::new(*namespace);
            NamespaceUse { namespace, bytes: 0, floor }
        });
        (own.bytes, own.floor) = (after, floor);
        Some(own.namespace.clone())
    }

    fn remove(&self, namespace: &NamespaceId, bytes: u64) {
        let mut uses = self.uses.lock();
        let Some(own) = uses.by_namespace.get_mut(namespace) else { return };
        let before = own.within_floor();
        own.bytes -= bytes;
        let (after, is_last) = (own.within_floor(), own.bytes == 0);
        uses.bytes_within_floors -= before - after;
        uses.bytes -= bytes;
        if is_last {
            uses.by_namespace.remove(namespace);
        }
    }
}

/// Ids of a page's tokens, in order. A page, its put and its events share them.
pub(crate) struct TokenIds {
    ids: Box<[u32]>,
    bytes: u64,
    namespace: Arc<NamespaceId>,
    memory: Arc<TokenMemory>,
}

impl TokenIds {
    pub(crate) fn as_slice(&self) -> &[u32] {
        &self.ids
    }
}

impl Drop for TokenIds {
    fn drop(&mut self) {
        self.memory.remove(&self.namespace, self.bytes);
    }
}

/// A memory with room for some lists of a test.
#[cfg(test)]
pub(crate) fn test_memory() -> Arc<TokenMemory> {
    TokenMemory::new(1 << 20, Arc::default(), Counter::default())
}

impl fmt::Debug for TokenIds {
    /// Shows the number of the ids only: they are the text of a prompt.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenIds({})", self.ids.len())
    }
}

impl PartialEq for TokenIds {
    fn eq(&self, other: &Self) -> bool {
        self.ids == other.ids
    }
}

impl Eq for TokenIds {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::Peer;
    use crate::shares::Shares;

    #[test]
    fn pages_of_4_5_kib_per_token_have_room_for_their_ids() {
        const ARENA: u64 = 1 << 30;
        const TOKENS: u64 = 16;
        let pages = ARENA / (TOKENS * (9 << 9));
        assert!(pages * (LIST_BYTES + TOKENS * TOKEN_BYTES) <= memory_max(ARENA));
    }

    fn namespace(number: u8) -> NamespaceId {
        NamespaceId([number; 32])
    }

    /// Keeps lists of one id until there is no room for another one.
    fn fill(memory: &Arc<TokenMemory>, number: u8) -> Vec<Arc<TokenIds>> {
        (0..100).map_while(|_| memory.keep(&namespace(number), vec![1])).collect()
    }

    #[test]
    fn lists_beyond_the_memory_are_dropped_and_counted() {
        let dropped: Counter = Counter::default();
        let memory = TokenMemory::new(2 * LIST_BYTES + 5 * TOKEN_BYTES, Arc::default(), dropped.clone());
        let keep = |ids| memory.keep(&namespace(1), ids);
        let first = keep(vec![1, 2]).unwrap();
        assert_eq!(first.as_slice(), [1, 2]);
        assert!(keep(vec![1; 4]).is_none());
        let second = keep(vec![1; 3]).unwrap();
        assert!(keep(vec![1]).is_none());
        assert_eq!(dropped.get(), 2);
        drop(first);
        assert!(keep(vec![1, 2]).is_some());
        drop(second);
        let uses = memory.uses.lock();
        assert_eq!((uses.bytes, uses.bytes_within_floors, uses.by_namespace.len()), (0, 0, 0));
    }

    #[test]
    fn namespace_leaves_the_floors_of_others() {
        let peer = |last: u8| Peer::Address([10, 0, 0, last].into());
        let mut shares = Shares::default();
        shares.join(namespace(1), peer(1));
        // Room for 16 lists, of which 8 are floors.
        let memory = TokenMemory::new(16 * (LIST_BYTES + TOKEN_BYTES), shares.floors().clone(), Counter::default());
        let alone = fill(&memory, 1);
        assert_eq!(alone.len(), 16, "alone: all");
        drop(alone);
        shares.join(namespace(2), peer(2));
        let mut first = fill(&memory, 1);
        assert_eq!(first.len(), 12, "its floor, and the half without floors");
        assert_eq!(fill(&memory, 3).len(), 0, "a namespace that is not in use has no floor");
        let second = fill(&memory, 2);
        assert_eq!(second.len(), 4, "its floor");
        first.pop();
        assert!(memory.keep(&namespace(2), vec![1]).is_some(), "the half without floors is for all");
        // A newcomer lowers the floors of both, and finds its own as ids of others go.
        shares.join(namespace(3), peer(3));
        first.truncate(8);
        assert!(fill(&memory, 3).len() >= 2);
        assert!(memory.keep(&namespace(1), vec![1]).is_some(), "counts with the lower floor from now on");
        drop((first, second));
        let uses = memory.uses.lock();
        assert_eq!((uses.bytes, uses.bytes_within_floors, uses.by_namespace.len()), (0, 0, 0));
    }

    #[test]
    fn namespace_finds_its_floor_although_ids_from_before_the_floors_exceed_the_rest() {
        let peer = |last: u8| Peer::Address([10, 0, 0, last].into());
        let mut shares = Shares::default();
        // Room for 16 lists. No namespace is in use, so one may have all.
        let memory = TokenMemory::new(16 * (LIST_BYTES + TOKEN_BYTES), shares.floors().clone(), Counter::default());
        let mut first = fill(&memory, 1);
        assert_eq!(first.len(), 16);
        first.truncate(12);
        shares.join(namespace(1), peer(1));
        shares.join(namespace(2), peer(2));
        assert!(memory.keep(&namespace(1), vec![1]).is_none(), "beyond its floor");
        assert_eq!(fill(&memory, 2).len(), 4);
    }

    #[test]
    fn page_without_token_ids_takes_no_memory() {
        let dropped: Counter = Counter::default();
        let memory = TokenMemory::new(0, Arc::default(), dropped.clone());
        assert!(memory.keep(&namespace(1), Vec::new()).is_none());
        assert_eq!(dropped.get(), 0);
    }
}
