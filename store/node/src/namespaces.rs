//! Namespaces that the node knows: descriptors, last use, and which of them are retired.
//!
//! An operator retires a namespace when no client may use its pages any more, such as those of old
//! weights. A retired namespace has no page for any reader, and takes no put. Its pages stay where
//! they are, and leave as L2 and L3 need their room. Until then a rollback makes them readable.
//!
//! Invariants:
//! - Retire and rollback change one entry of a table. Their cost does not depend on the pages.
//! - A change is durable before it is visible, if the node has a directory. A node without one
//!   loses all pages with its process.
//! - The table has at most [`KNOWN_MAX`] entries, of which at most [`RETIRED_MAX`] are retired. An
//!   entry leaves only if it is neither retired nor in use. Clients with that many namespaces do
//!   not keep an operator from retiring one: the table exceeds its maximum until they leave.
//! - A reader of a namespace takes no lock here while no retired namespace shares its bit of the
//!   filter.

mod file;

use file::{Stored, StoredNamespace};
use larder_format::{NamespaceDescriptor, NamespaceFields, NamespaceId};
use larder_runtime::sync::RwLock;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use file::keep;

/// Each entry takes about 1 KiB.
pub(crate) const KNOWN_MAX: usize = 1024;
const RETIRED_MAX: usize = 512;
/// Namespaces that are searched for a page that is missing in another one.
const NEAREST: usize = 16;
/// Bits of the filter of retired namespaces.
const FILTER_BITS: usize = 4096;
/// Maximum wait for another change that is being stored.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// An entry of the table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// `None` if no client has stated it yet, as for databases of Redis.
    pub(crate) descriptor: Option<NamespaceDescriptor>,
    /// Connections that use the namespace now.
    pub(crate) connections: u32,
    /// Time at which a connection last began or ended to use it. 0: never.
    pub(crate) last_use_unix_ms: u64,
    /// Time since which it is retired.
    pub(crate) retired_unix_ms: Option<u64>,
}

/// Reason why a namespace could not be retired or rolled back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeError {
    #[error("{} namespaces with pages are retired; roll one of them back", RETIRED_MAX)]
    TooMany,
    #[error("another change is being stored; try again")]
    Busy,
    #[error("cannot store namespaces.json: {0}; check the node's directory [LRD0114]")]
    Store(#[from] io::Error),
}

type Table = BTreeMap<NamespaceId, Known>;

pub(crate) struct Namespaces {
    /// A leaf lock.
    table: RwLock<Table>,
    /// A bit is set if a retired namespace has it.
    filter: [AtomicU64; FILTER_BITS / 64],
    /// Number of changes of which the file does not know.
    unstored: AtomicU64,
    /// Directories with the file. Empty if the node has none.
    dirs: OnceLock<Vec<PathBuf>>,
    /// Number of the latest file. Held while a file is stored.
    storing: tokio::sync::Mutex<u64>,
}

impl Namespaces {
    pub(crate) fn new() -> Namespaces {
        Namespaces {
            table: RwLock::default(),
            filter: [const { AtomicU64::new(0) }; FILTER_BITS / 64],
            unstored: AtomicU64::new(0),
            dirs: OnceLock::new(),
            storing: tokio::sync::Mutex::new(0),
        }
    }

    /// Reads what earlier processes have stored in `dirs`, and keeps changes there from now on. To
    /// be called once, before clients connect. The pages in `unserved` directories are not served.
    ///
    /// # Errors
    /// If the file of another directory cannot be read. Without it, retired pages could be served.
    pub(crate) fn open(&self, dirs: Vec<PathBuf>, unserved: &[PathBuf]) -> io::Result<()> {
        let mut stored = file::read(&dirs, unserved)?;
        // Retired ones first: they must not be left out.
        stored.namespaces.sort_by_key(|namespace| namespace.retired_unix_ms.is_none());
        if let Ok(mut latest) = self.storing.try_lock() {
            *latest = stored.sequence;
        }
        let mut table = self.table.write();
        for namespace in stored.namespaces.into_iter().take(KNOWN_MAX) {
            let StoredNamespace { id, descriptor, last_use_unix_ms, retired_unix_ms } = namespace;
            let descriptor = descriptor.filter(|descriptor| descriptor.id() == id);
            table.insert(id, Known { descriptor, connections: 0, last_use_unix_ms, retired_unix_ms });
        }
        self.update_filter(&table);
        drop(table);
        let is_first = self.dirs.set(dirs).is_ok();
        assert!(is_first, "the namespaces of a node are opened once");
        Ok(())
    }

    /// Records the descriptor of a namespace that a client states.
    pub(crate) fn introduce(&self, id: NamespaceId, descriptor: &NamespaceDescriptor) {
        let is_known = |known: &Known| known.descriptor.as_ref() == Some(descriptor);
        if self.table.read().get(&id).is_some_and(is_known) {
            return;
        }
        if let Some(known) = entry(&mut self.table.write(), id) {
            known.descriptor = Some(descriptor.clone());
            // Release: a snapshot that counts the change has it.
            self.unstored.fetch_add(1, Ordering::Release);
        }
    }

    /// Records that a connection begins to use a namespace. Returns `false` if the table has no
    /// room for it; the connection then does not count.
    pub(crate) fn enter(&self, id: NamespaceId, now_unix_ms: u64) -> bool {
        let mut table = self.table.write();
        let Some(known) = entry(&mut table, id) else { return false };
        known.connections += 1;
        known.last_use_unix_ms = now_unix_ms;
        true
    }

    /// Ends what [`Namespaces::enter`] began, if that returned `true`.
    pub(crate) fn leave(&self, id: NamespaceId, now_unix_ms: u64) {
        if let Some(known) = self.table.write().get_mut(&id) {
            known.connections -= 1;
            known.last_use_unix_ms = now_unix_ms;
        }
    }

    /// Returns `true` if no reader may have a page of the namespace, and no writer may put one.
    pub(crate) fn is_retired(&self, id: &NamespaceId) -> bool {
        let (word, bit) = filter_place(id);
        // Acquire: pairs with the release of a change. A reader that comes after its answer sees
        // it.
        self.filter[word].load(Ordering::Acquire) & bit != 0 && self.retired_unix_ms(id).is_some()
    }

    /// Time since which a namespace is retired.
    pub(crate) fn retired_unix_ms(&self, id: &NamespaceId) -> Option<u64> {
        self.table.read().get(id).and_then(|known| known.retired_unix_ms)
    }

    pub(crate) fn all(&self) -> BTreeMap<NamespaceId, Known> {
        self.table.read().clone()
    }

    /// Namespaces that differ from `id` in the fewest fields, with these fields. Those that are
    /// retired are left out. Empty if the descriptor of `id` is unknown.
    pub(crate) fn nearest(&self, id: &NamespaceId) -> Vec<(NamespaceId, NamespaceFields)> {
        let table = self.table.read();
        let Some(own) = table.get(id).and_then(|known| known.descriptor.as_ref()) else { return Vec::new() };
        let others = table.iter().filter(|(other, known)| *other != id && known.retired_unix_ms.is_none());
        let differing = |(other, known): (&NamespaceId, &Known)| {
            Some((*other, NamespaceFields::differing(own, known.descriptor.as_ref()?)))
        };
        let mut nearest: Vec<_> = others.filter_map(differing).filter(|(_, fields)| !fields.is_empty()).collect();
        nearest.sort_by_key(|(other, fields)| (fields.count(), *other));
        nearest.truncate(NEAREST);
        nearest
    }

    /// Retires a namespace, or rolls that back, durably. Returns `false` if it is so already. After
    /// an error the namespace is as before, or as asked for after the next start.
    ///
    /// If too many are retired, the one that was retired first and has no pages makes room.
    pub(crate) async fn set_retired(
        &self,
        id: NamespaceId,
        is_retired: bool,
        now_unix_ms: u64,
        has_pages: impl Fn(&NamespaceId) -> bool,
    ) -> Result<bool, ChangeError> {
        let turn = tokio::time::timeout(TURN_TIMEOUT, self.storing.lock());
        let mut latest = turn.await.map_err(|_| ChangeError::Busy)?;
        // Clients may add entries meanwhile. No other task changes which of them are retired.
        let (changes, mut next) = self.snapshot();
        if next.get(&id).is_some_and(|known| known.retired_unix_ms.is_some()) == is_retired {
            return Ok(false);
        }
        let mut freed = None;
        if is_retired && next.values().filter(|known| known.retired_unix_ms.is_some()).count() >= RETIRED_MAX {
            let retired = next.iter().filter_map(|(id, known)| Some((known.retired_unix_ms?, *id)));
            let without_pages = retired.filter(|(_, id)| !has_pages(id));
            let (_, first) = without_pages.min().ok_or(ChangeError::TooMany)?;
            next.entry(first).or_default().retired_unix_ms = None;
            freed = Some(first);
        }
        let retired_unix_ms = is_retired.then_some(now_unix_ms);
        entry_of_change(&mut next, id).retired_unix_ms = retired_unix_ms;
        self.store(&mut latest, changes, next).await?;
        let mut table = self.table.write();
        if let Some(freed) = freed
            && let Some(known) = table.get_mut(&freed)
        {
            known.retired_unix_ms = None;
        }
        // Whatever clients have added meanwhile: the file has the change.
        entry_of_change(&mut table, id).retired_unix_ms = retired_unix_ms;
        self.update_filter(&table);
        Ok(true)
    }

    /// Stores all that the node knows, if it has changed. `is_last` stores the last uses too.
    async fn save(&self, is_last: bool) -> Result<(), ChangeError> {
        let has_changed = self.unstored.load(Ordering::Relaxed) > 0;
        if !has_changed && (!is_last || self.table.read().is_empty()) {
            return Ok(());
        }
        let turn = tokio::time::timeout(TURN_TIMEOUT, self.storing.lock());
        let mut latest = turn.await.map_err(|_| ChangeError::Busy)?;
        let (changes, table) = self.snapshot();
        self.store(&mut latest, changes, table).await
    }

    /// The table, with at least the changes that are counted beside it.
    fn snapshot(&self) -> (u64, Table) {
        let changes = self.unstored.load(Ordering::Acquire);
        (changes, self.all())
    }

    /// Stores a table that includes so many of the changes.
    async fn store(&self, latest: &mut u64, changes: u64, table: Table) -> Result<(), ChangeError> {
        let Some(dirs) = self.dirs.get().filter(|dirs| !dirs.is_empty()).cloned() else { return Ok(()) };
        // A failed write may have left a file. The next one must not have the same number.
        *latest = latest.saturating_add(1);
        let sequence = *latest;
        let namespaces = table.into_iter().map(|(id, known)| {
            let Known { descriptor, last_use_unix_ms, retired_unix_ms, connections: _ } = known;
            StoredNamespace { id, descriptor, last_use_unix_ms, retired_unix_ms }
        });
        let mut namespaces: Vec<StoredNamespace> = namespaces.collect();
        // Retired ones first: they must not be left out.
        namespaces.sort_by_key(|known| (known.retired_unix_ms.is_none(), Reverse(known.last_use_unix_ms)));
        namespaces.truncate(KNOWN_MAX);
        let stored = Stored { sequence, namespaces };
        let write = tokio::task::spawn_blocking(move || file::write(&dirs, &stored));
        write.await.map_err(io::Error::other).flatten()?;
        self.unstored.fetch_sub(changes, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the filter agree with the table, whose lock the caller has.
    fn update_filter(&self, table: &Table) {
        let mut words = [0; FILTER_BITS / 64];
        for (id, _) in table.iter().filter(|(_, known)| known.retired_unix_ms.is_some()) {
            let (word, bit) = filter_place(id);
            words[word] |= bit;
        }
        self.filter.iter().zip(words).for_each(|(word, bits)| word.store(bits, Ordering::Release));
    }
}

/// Word and bit of a namespace in the filter. Ids are hashes, so their first bytes will do.
fn filter_place(id: &NamespaceId) -> (usize, u64) {
    let bit = usize::from(u16::from_le_bytes([id.0[0], id.0[1]])) % FILTER_BITS;
    (bit / 64, 1 << (bit % 64))
}

/// Entry of a namespace, a new one if there is none. In a full table those that are out of use for
/// longest make room. `None` if all are in use or retired.
fn entry(table: &mut Table, id: NamespaceId) -> Option<&mut Known> {
    while !table.contains_key(&id) && table.len() >= KNOWN_MAX {
        let unused = table.iter().filter(|(_, known)| known.connections == 0 && known.retired_unix_ms.is_none());
        let oldest = unused.min_by_key(|(_, known)| known.last_use_unix_ms).map(|(oldest, _)| *oldest)?;
        table.remove(&oldest);
    }
    Some(table.entry(id).or_default())
}

/// Like [`entry`], in a table without room too.
fn entry_of_change(table: &mut Table, id: NamespaceId) -> &mut Known {
    if entry(table, id).is_none() {
        tracing::debug!(namespace = ?id, "all known namespaces are in use");
    }
    table.entry(id).or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{KvDtype, PageGeometry};

    fn descriptor(weights: u16, tenant: &str) -> NamespaceDescriptor {
        let geometry = PageGeometry {
            dtype: KvDtype::Bf16,
            layers: 4,
            kv_heads: 2,
            head_dim: 8,
            page_tokens: 16,
            layers_per_part: 4,
            head_groups: 1,
        };
        let mut fingerprint = [7; 32];
        fingerprint[..2].copy_from_slice(&weights.to_le_bytes());
        NamespaceDescriptor { model: "m".into(), weights: fingerprint, geometry, tenant: tenant.into() }
    }

    fn introduce(namespaces: &Namespaces, descriptor: &NamespaceDescriptor) -> NamespaceId {
        namespaces.introduce(descriptor.id(), descriptor);
        descriptor.id()
    }

    async fn retire(namespaces: &Namespaces, id: NamespaceId, now_unix_ms: u64) -> Result<bool, ChangeError> {
        namespaces.set_retired(id, true, now_unix_ms, |_| true).await
    }

    #[tokio::test]
    async fn retired_namespace_is_known_to_the_next_start_until_the_rollback() {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let paths = || dirs.iter().map(|dir| dir.path().to_path_buf()).collect::<Vec<_>>();
        let open = || {
            let namespaces = Namespaces::new();
            namespaces.open(paths(), &[]).map(|()| namespaces)
        };
        let namespaces = open().unwrap();
        let [old, new] = [1, 2].map(|weights| introduce(&namespaces, &descriptor(weights, "t")));
        assert!(retire(&namespaces, old, 5).await.unwrap() && !retire(&namespaces, old, 6).await.unwrap());
        // As a device that missed the next change.
        let missed = std::fs::read(dirs[1].path().join(file::FILE)).unwrap();
        let namespaces = open().unwrap();
        assert!(namespaces.is_retired(&old) && !namespaces.is_retired(&new));
        assert_eq!(namespaces.retired_unix_ms(&old), Some(5));
        assert_eq!(namespaces.all()[&old].descriptor, Some(descriptor(1, "t")));
        assert!(namespaces.set_retired(old, false, 7, |_| true).await.unwrap());
        assert!(!namespaces.is_retired(&old));
        std::fs::write(dirs[1].path().join(file::FILE), missed).unwrap();
        assert!(!open().unwrap().is_retired(&old), "the newest file counts");
        std::fs::write(dirs[0].path().join(file::FILE), b"{\"sequence\":1").unwrap();
        assert!(open().is_err(), "a damaged file could name retired namespaces");
        let unserved = [dirs[0].path().to_path_buf()];
        Namespaces::new().open(paths(), &unserved).unwrap();
    }

    #[tokio::test]
    async fn damaged_file_is_refused_although_it_is_valid_json() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let namespaces = Namespaces::new();
            namespaces.open(vec![dir.path().to_path_buf()], &[]).map(|()| namespaces)
        };
        let id = descriptor(1, "t").id();
        assert!(retire(&open().unwrap(), id, 5).await.unwrap());
        let path = dir.path().join(file::FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(open().unwrap().is_retired(&id));
        for (from, to) in [("retired_unix_ms", "retired_unix_mr"), (":5}", ":4}"), ("sequence\":1", "sequence\":2")] {
            let damaged = text.replacen(from, to, 1);
            assert_ne!(damaged, text);
            std::fs::write(&path, damaged).unwrap();
            assert!(open().is_err(), "{from} is {to}");
        }
    }

    #[tokio::test]
    async fn file_after_a_failed_change_has_a_number_of_its_own() {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let paths = || dirs.iter().map(|dir| dir.path().to_path_buf()).collect::<Vec<_>>();
        let namespaces = Namespaces::new();
        namespaces.open(paths(), &[]).unwrap();
        let ids = [1, 2].map(|weights| descriptor(weights, "t").id());
        let staged = |dir: usize| dirs[dir].path().join(format!("{}.new", file::FILE));
        let target = |dir: usize| dirs[dir].path().join(file::FILE);
        // The first change reaches a file of the first directory, and still fails.
        [0, 1].into_iter().for_each(|dir| std::fs::create_dir(target(dir)).unwrap());
        assert!(retire(&namespaces, ids[0], 5).await.is_err());
        let content = std::fs::read(staged(0)).unwrap();
        [0, 1].into_iter().for_each(|dir| std::fs::remove_dir(target(dir)).unwrap());
        std::fs::write(target(0), content).unwrap();
        // The second one does not reach it.
        std::fs::remove_file(staged(0)).unwrap();
        std::fs::create_dir(staged(0)).unwrap();
        assert!(retire(&namespaces, ids[1], 6).await.unwrap());
        let namespaces = Namespaces::new();
        namespaces.open(paths(), &[]).unwrap();
        assert!(namespaces.is_retired(&ids[1]), "the change that was confirmed");
    }

    #[tokio::test]
    async fn table_in_full_use_lets_an_operator_retire_and_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let namespaces = Namespaces::new();
        namespaces.open(vec![dir.path().to_path_buf()], &[]).unwrap();
        // Each byte of the names takes six in the file.
        let name = "\u{1}".repeat(256);
        let long = |weights| NamespaceDescriptor { model: name.clone(), ..descriptor(weights, &name) };
        for weights in 0..KNOWN_MAX as u16 {
            assert!(namespaces.enter(introduce(&namespaces, &long(weights)), u64::MAX));
        }
        let strangers = [1, 2].map(|weights| descriptor(weights, "stranger").id());
        assert!(!namespaces.enter(strangers[0], 1));
        for id in strangers {
            assert!(retire(&namespaces, id, u64::MAX).await.unwrap());
        }
        assert_eq!(namespaces.all().len(), KNOWN_MAX + strangers.len());
        let next = Namespaces::new();
        next.open(vec![dir.path().to_path_buf()], &[]).unwrap();
        assert!(strangers.iter().all(|id| next.is_retired(id)));
        assert_eq!(next.all().len(), KNOWN_MAX);
        // The table returns to its size once there is room.
        (0..4).for_each(|weights| namespaces.leave(long(weights).id(), 1));
        introduce(&namespaces, &descriptor(1, "later"));
        assert_eq!(namespaces.all().len(), KNOWN_MAX);
    }

    #[tokio::test]
    async fn change_that_cannot_be_stored_has_no_effect() {
        let dir = tempfile::tempdir().unwrap();
        let namespaces = Namespaces::new();
        namespaces.open(vec![dir.path().join("missing")], &[]).unwrap();
        let id = introduce(&namespaces, &descriptor(1, "t"));
        assert!(matches!(retire(&namespaces, id, 5).await, Err(ChangeError::Store(_))));
        assert!(!namespaces.is_retired(&id));
    }

    #[tokio::test]
    async fn table_keeps_namespaces_in_use_and_retired_ones() {
        let namespaces = Namespaces::new();
        let used = introduce(&namespaces, &descriptor(0, "used"));
        assert!(namespaces.enter(used, 1));
        let retired = introduce(&namespaces, &descriptor(0, "retired"));
        retire(&namespaces, retired, 1).await.unwrap();
        let last = 3 * KNOWN_MAX as u16;
        for weights in 0..last {
            let id = introduce(&namespaces, &descriptor(weights, "t"));
            assert!(namespaces.enter(id, 10 + u64::from(weights)));
            namespaces.leave(id, 10 + u64::from(weights));
        }
        assert_eq!(namespaces.all().len(), KNOWN_MAX);
        let is_known = |id| namespaces.all().contains_key(&id);
        assert!(is_known(used) && namespaces.is_retired(&retired));
        assert!(is_known(descriptor(last - 1, "t").id()) && !is_known(descriptor(0, "t").id()));
    }

    #[tokio::test]
    async fn namespace_without_pages_makes_room_for_another_to_retire() {
        let namespaces = Namespaces::new();
        let ids: Vec<_> = (0..=RETIRED_MAX as u16).map(|weights| descriptor(weights, "t").id()).collect();
        for (&id, now) in ids[..RETIRED_MAX].iter().zip(1..) {
            assert!(retire(&namespaces, id, now).await.unwrap());
        }
        let last = ids[RETIRED_MAX];
        assert!(matches!(retire(&namespaces, last, 9999).await, Err(ChangeError::TooMany)));
        let empty = [ids[3], ids[7]];
        assert!(namespaces.set_retired(last, true, 9999, |id| !empty.contains(id)).await.unwrap());
        assert!(namespaces.is_retired(&last) && !namespaces.is_retired(&ids[3]) && namespaces.is_retired(&ids[7]));
    }

    #[test]
    fn nearest_namespace_differs_in_the_fewest_fields() {
        let namespaces = Namespaces::new();
        let own = introduce(&namespaces, &descriptor(1, "t"));
        let mut far = descriptor(2, "u");
        far.geometry.dtype = KvDtype::F16;
        let far = introduce(&namespaces, &far);
        let near = introduce(&namespaces, &descriptor(3, "t"));
        let found = namespaces.nearest(&own);
        let all = NamespaceFields::WEIGHTS | NamespaceFields::DTYPE | NamespaceFields::TENANT;
        assert_eq!(found, [(near, NamespaceFields::WEIGHTS), (far, all)]);
        for weights in 10..100 {
            introduce(&namespaces, &descriptor(weights, "v"));
        }
        assert_eq!((namespaces.nearest(&own).len(), namespaces.nearest(&own)[0].0), (NEAREST, near));
    }
}
