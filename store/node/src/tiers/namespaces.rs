//! Namespaces with their pages, for operators.

use super::Tiers;
use crate::namespaces::{ChangeError, KNOWN_MAX, Known, Namespaces};
use larder_format::NamespaceId;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Maximum number of namespaces in a list. Those that the node knows come first.
const LISTED_MAX: usize = 2 * KNOWN_MAX;
/// Maximum number of namespaces that a list takes from one log.
const OF_LOG_MAX: usize = 64 << 10;

impl Tiers {
    pub(crate) fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    /// Returns `true` if no reader may have a page of the namespace, and no writer may put one.
    pub(crate) fn is_retired(&self, namespace: &NamespaceId) -> bool {
        self.namespaces.is_retired(namespace)
    }

    /// Returns `true` if any tier may have a page of the namespace, retired or not. Pages that no
    /// count has, such as those on a log that recovers, may be of any namespace.
    pub(crate) fn may_have_pages_of(&self, namespace: &NamespaceId) -> bool {
        // A statement of its own: no log is asked under this lock.
        let (in_l2, _) = self.state.lock().policy.used_by(namespace);
        // In the order of a page on its way to L3.
        in_l2 > 0
            || self.writeback.has_pages_of(namespace)
            || self.devices.pages_of(namespace) > 0
            || self.devices.may_have_more_pages()
    }

    /// Retires a namespace, or rolls that back: see [`Namespaces::set_retired`].
    pub(crate) async fn set_retired(&self, id: NamespaceId, is_retired: bool) -> Result<bool, ChangeError> {
        let now_unix_ms = self.clock.now_unix_ms();
        self.namespaces.set_retired(id, is_retired, now_unix_ms, |id| self.may_have_pages_of(id)).await
    }

    /// Namespaces that the node knows, and others with pages, those with most bytes first.
    /// `docs/operations.md` describes the fields.
    pub(crate) fn list_namespaces(&self) -> Value {
        let known = self.namespaces.all();
        let on_l3 = self.devices.namespaces(OF_LOG_MAX);
        let mut others: BTreeMap<NamespaceId, u64> = on_l3.iter().map(|(id, (_, bytes))| (*id, *bytes)).collect();
        let in_l2 = self.state.lock().policy.namespaces(LISTED_MAX);
        for used in in_l2 {
            *others.entry(used.namespace).or_default() += used.bytes;
        }
        others.retain(|id, _| !known.contains_key(id));
        let mut others: Vec<(NamespaceId, u64)> = others.into_iter().collect();
        others.sort_by_key(|(id, bytes)| (Reverse(*bytes), *id));
        let shown = others.len().min(LISTED_MAX - known.len().min(LISTED_MAX));
        let left_out = others.len() - shown;
        let others = others.into_iter().take(shown).map(|(id, _)| (id, Known::default()));
        let rows = known.into_iter().chain(others).map(|(id, known)| {
            let in_l2 = self.state.lock().policy.used_by(&id);
            row(id, &known, in_l2, on_l3.get(&id).copied().unwrap_or_default())
        });
        json!({ "namespaces": rows.collect::<Vec<_>>(), "left_out": left_out })
    }
}

fn row(id: NamespaceId, known: &Known, in_l2: (u64, u64), on_l3: (u64, u64)) -> Value {
    let Known { descriptor, connections, last_use_unix_ms, retired_unix_ms } = known;
    let descriptor = descriptor.as_ref();
    json!({
        "namespace": id.to_string(),
        "model": descriptor.map(|descriptor| &descriptor.model),
        "weights": descriptor.map(|descriptor| NamespaceId(descriptor.weights).to_string()),
        "tenant": descriptor.map(|descriptor| &descriptor.tenant),
        "geometry": descriptor.map(|descriptor| &descriptor.geometry),
        "connections": connections,
        "last_use_unix_ms": Some(*last_use_unix_ms).filter(|&time| time > 0),
        "retired_unix_ms": retired_unix_ms,
        "l2_pages": in_l2.0,
        "l2_bytes": in_l2.1,
        "l3_pages": on_l3.0,
        "l3_bytes": on_l3.1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Devices;
    use crate::options::L3Device;
    use crate::puts::{Presence, Put};
    use crate::store::Store;
    use crate::test_support::{self, open_log, open_put, options, put, reserved, soon};
    use crate::tiers::turns::Turn;
    use larder_format::{PageId, PageKey};
    use larder_log::L3Error;
    use larder_memory::Arena;
    use larder_runtime::Clock;
    use larder_wire::{CommitOutcome, Hint, MissReason, PinKind, ReserveOutcome, TierCode};
    use std::sync::Arc;

    const PAGE: [u8; 100] = [0; 100];
    const RETIRED: NamespaceId = NamespaceId([1; 32]);
    /// Shares the bit of the filter.
    const OTHER: NamespaceId = {
        let mut id = [1; 32];
        id[31] = 2;
        NamespaceId(id)
    };

    fn store() -> Store {
        test_support::store(Clock::at(5_000))
    }

    fn id(namespace: NamespaceId, number: u32) -> PageId {
        PageId { namespace, key: PageKey::chain(None, &[number]) }
    }

    fn reserve(store: &Store, id: PageId) -> Result<Arc<Put>, ReserveOutcome> {
        store.reserve(id, reserved(id, 100))
    }

    #[tokio::test]
    async fn namespace_without_known_pages_may_have_some_on_a_log_that_did_not_open() {
        assert!(!store().tiers().may_have_pages_of(&RETIRED));
        let with_page = store();
        put(&with_page, id(RETIRED, 1), &PAGE);
        let tiers = with_page.tiers();
        assert!(tiers.may_have_pages_of(&RETIRED) && !tiers.may_have_pages_of(&OTHER));

        let dirs = [(); 2].map(|()| tempfile::tempdir_in("/var/tmp").unwrap());
        let options = options(1 << 20);
        let arena = Arena::new(options.arena_bytes() as usize).unwrap();
        let unopened = L3Device { dir: dirs[1].path().to_path_buf(), bytes: 64 << 20 };
        let logs = vec![open_log(dirs[0].path(), &arena).await, (unopened, Err(L3Error::Closed))];
        let devices = Devices::of(logs).unwrap();
        let store = Store::new(&options, arena, devices, Clock::at(5_000), 1);
        assert!(store.tiers().may_have_pages_of(&OTHER), "nobody knows what the other log has");
        store.close(soon()).await;
    }

    #[tokio::test]
    async fn retired_namespace_has_no_pages_for_anybody_until_the_rollback() {
        let store = store();
        let tiers = store.tiers();
        let [first, second, third] = [1, 2, 3].map(|number| id(RETIRED, number));
        [first, second, id(OTHER, 1)].into_iter().for_each(|id| put(&store, id, &PAGE));
        let open = open_put(&store, third, &PAGE);
        assert!(tiers.set_retired(RETIRED, true).await.unwrap());

        assert_eq!((tiers.locate(&first), tiers.locate(&id(OTHER, 1))), (TierCode::Absent, TierCode::L2));
        assert!(tiers.get(&first, soon()).await.is_none() && tiers.get_l2(&first).is_none());
        assert!(tiers.hold_l2(&first).is_none() && tiers.fetch(&first, Turn::alone(), soon()).await.is_none());
        assert_eq!(store.pin(&[first], PinKind::Hard, 60_000, soon()).await.unwrap(), 0);
        assert_eq!(store.hint(&[first], None, Hint::Retain, 60_000, soon()).await, 0);
        assert!(matches!(store.puts().presence(&first), Presence::Absent(_)));
        assert!(matches!(store.puts().presence(&third), Presence::Absent(_)), "an open put");
        assert_eq!(reserve(&store, first).err(), Some(ReserveOutcome::Retired));
        assert_eq!(store.explain(&[first]).await[0].reason, MissReason::Retired);
        let rows = tiers.list_namespaces();
        let row = rows["namespaces"].as_array().unwrap().iter().find(|row| row["namespace"] == RETIRED.to_string());
        assert_eq!(row.unwrap()["l2_pages"], 2);
        // The clock goes on from 5 s.
        assert!(row.unwrap()["retired_unix_ms"].as_u64().is_some_and(|ms| (5_000..100_000).contains(&ms)));

        // What began before may end, and a forget works as ever.
        assert_eq!(store.puts().commit(&open), CommitOutcome::Stored);
        assert_eq!(tiers.locate(&third), TierCode::Absent);
        assert_eq!(store.forget(&[second], soon()).await.unwrap(), 1);

        assert!(tiers.set_retired(RETIRED, false).await.unwrap());
        let found = [first, second, third].map(|id| tiers.locate(&id));
        assert_eq!(found, [TierCode::L2, TierCode::Absent, TierCode::L2]);
        assert_eq!(reserve(&store, first).err(), Some(ReserveOutcome::Exists), "a page is never replaced");
        assert_eq!(store.explain(&[second]).await[0].reason, MissReason::Forgotten);
    }
}
