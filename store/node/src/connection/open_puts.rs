//! Open puts of one connection, by the names that the client gave them.

use crate::budget::Account;
use crate::puts::Put;
use crate::state::NodeState;
use larder_format::PageId;
use larder_wire::{CommitOutcome, Entry, PutEnd, ReserveOutcome, Reserved, Response};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum number of open puts of one connection. Further reservations are answered "busy". Their
/// bytes are bounded as well; this bounds the table for tiny pages.
const PUTS_MAX: usize = 4096;

/// Open puts of one connection. Not aborted on drop: the connection does that.
#[derive(Default)]
pub(super) struct OpenPuts {
    by_entry: BTreeMap<Entry, Arc<Put>>,
}

impl OpenPuts {
    /// Reserves a page under the name `entry`, charged to `account`. The parts must be those of the
    /// namespace's `part_table`, or no reader could use the page. See [`Store::reserve_for`] for
    /// `seeks_room`.
    ///
    /// [`Store::reserve_for`]: crate::store::Store::reserve_for
    #[expect(clippy::too_many_arguments, reason = "all callers have these values apart")]
    pub(super) fn reserve(
        &mut self,
        node: &NodeState,
        account: &Arc<Account>,
        part_table: &[u32],
        entry: Entry,
        id: PageId,
        page: &Reserved,
        seeks_room: bool,
    ) -> ReserveOutcome {
        // A name in use would hide its put from the client, which could then never end it.
        if page.part_bytes != part_table || self.by_entry.contains_key(&entry) {
            return ReserveOutcome::Malformed;
        }
        if self.by_entry.len() >= PUTS_MAX {
            return ReserveOutcome::Busy;
        }
        match node.store.reserve_for(account, id, page, seeks_room) {
            Ok(put) => {
                self.by_entry.insert(entry, put);
                ReserveOutcome::Granted
            }
            Err(outcome) => outcome,
        }
    }

    pub(super) fn get(&self, entry: &Entry) -> Option<&Arc<Put>> {
        self.by_entry.get(entry)
    }

    pub(super) fn remove(&mut self, entry: &Entry) -> Option<Arc<Put>> {
        self.by_entry.remove(entry)
    }

    pub(super) fn of_request(&self, request: u64) -> Vec<(u32, Arc<Put>)> {
        self.by_entry.range(entries_of(request)).map(|(entry, put)| (entry.index, put.clone())).collect()
    }

    pub(super) fn remove_request(&mut self, request: u64) -> Vec<Arc<Put>> {
        self.by_entry.extract_if(entries_of(request), |_, _| true).map(|(_, put)| put).collect()
    }

    pub(super) fn abort_all(&mut self, node: &NodeState) {
        for put in std::mem::take(&mut self.by_entry).into_values() {
            node.store.puts().abort(&put);
        }
    }
}

pub(super) fn entries_of(request: u64) -> std::ops::RangeInclusive<Entry> {
    Entry { request, index: 0 }..=Entry { request, index: u32::MAX }
}

/// Commits puts in order. An unknown put counts as incomplete.
pub(super) fn commit(node: &NodeState, puts: &[Option<Arc<Put>>]) -> Response {
    let ends = puts.iter().map(|put| {
        let outcome = put.as_ref().map_or(CommitOutcome::Incomplete, |put| node.store.puts().commit(put));
        let stored = put.as_ref().filter(|_| outcome == CommitOutcome::Stored);
        PutEnd { outcome, generation: stored.map_or(0, |put| put.generation()) }
    });
    Response::Committed(ends.collect())
}
