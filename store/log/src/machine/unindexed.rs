//! Records on the device that the index does not know.
//!
//! Terms:
//! - An *unindexed record* belongs to a page that is not served (any more), and may be on the
//!   device. A crash can bring such a record back: examples are a damaged page, a failed write, a
//!   page over its quota.
//! - The *index is incomplete* up to an epoch if some segment up to that epoch could not be read to
//!   its end, or its pages are being evicted. Any page may have unindexed records there.
//!
//! Pages are named by their fingerprints. `entry.rs` has the probability that two are equal.
//!
//! Invariant: a record on the device that no durable tombstone deletes belongs to an index entry,
//! to a write in flight, or to an unindexed record, or lies where the index is incomplete. A forget
//! of any other page therefore needs no tombstone.

use super::entry::Fingerprint;
use larder_runtime::fail_point;
use std::collections::BTreeMap;
use std::ops::Bound;

#[derive(Debug, Default)]
pub(super) struct UnindexedRecords {
    in_flight: BTreeMap<Fingerprint, InFlight>,
    records: BTreeMap<Fingerprint, Unindexed>,
    /// No record of this epoch or an older one is on the device. Entries that name such an epoch
    /// count as absent.
    reclaimed_up_to: u64,
    /// Page at which [`UnindexedRecords::purge`] continues.
    purge_from: Option<Fingerprint>,
    /// Number of entries that [`UnindexedRecords::purge`] has yet to visit, so that it has seen
    /// each since the last reclaim.
    purge_left: usize,
    /// The index is incomplete up to this epoch. 0 if it is complete.
    incomplete_up_to: u64,
}

#[derive(Debug, Default)]
struct InFlight {
    writes: u32,
    /// A forget deleted the records with smaller numbers while they were being written.
    deleted_below: u64,
}

#[derive(Debug, Clone, Copy)]
struct Unindexed {
    /// All records of the page with smaller numbers are affected.
    below: u64,
    /// None of them lies in a segment of a later epoch.
    epoch: u64,
}

impl UnindexedRecords {
    pub(super) fn write_planned(&mut self, page: Fingerprint) {
        self.in_flight.entry(page).or_default().writes += 1;
    }

    /// The write of record `number` of a page has ended. Returns `true` if a forget deleted the
    /// record meanwhile.
    pub(super) fn write_ended(&mut self, page: Fingerprint, number: u64) -> bool {
        let Some(in_flight) = self.in_flight.get_mut(&page) else { return false };
        assert!(in_flight.writes > 0, "a write ended that was not planned");
        in_flight.writes -= 1;
        let deleted = number < in_flight.deleted_below;
        if in_flight.writes == 0 {
            self.in_flight.remove(&page);
        }
        deleted
    }

    /// Deletes the records of a page that are being written with numbers below `number`.
    pub(super) fn delete_in_flight_below(&mut self, page: Fingerprint, number: u64) {
        if let Some(in_flight) = self.in_flight.get_mut(&page) {
            in_flight.deleted_below = if fail_point!("log.forget-misses-write-in-flight") { 0 } else { number };
        }
    }

    /// Number of pages with an entry for unindexed records.
    pub(super) fn pages(&self) -> usize {
        self.records.len()
    }

    /// Notes that records of a page with numbers below `below`, in segments up to `epoch`, may be
    /// on the device.
    pub(super) fn add(&mut self, page: Fingerprint, below: u64, epoch: u64) {
        let known = self.records.entry(page).or_insert(Unindexed { below, epoch });
        *known = Unindexed { below: known.below.max(below), epoch: known.epoch.max(epoch) };
    }

    /// The tombstone `number` of a page is durable: it deletes all records with smaller numbers.
    pub(super) fn tombstone_durable(&mut self, page: Fingerprint, number: u64) {
        if self.records.get(&page).is_some_and(|known| known.below <= number) {
            self.records.remove(&page);
        }
    }

    pub(super) fn reclaimed_up_to(&mut self, epoch: u64) {
        if epoch > self.reclaimed_up_to {
            self.reclaimed_up_to = epoch;
            self.purge_left = self.records.len();
        }
        if self.incomplete_up_to <= epoch {
            self.incomplete_up_to = 0;
        }
    }

    /// Visits at most `max` entries, and removes those without a record on the device. Continues
    /// where the last call ended.
    pub(super) fn purge(&mut self, max: usize) {
        let first = self.purge_from.take();
        let from = first.map_or(Bound::Unbounded, Bound::Included);
        let mut gone = Vec::new();
        let mut visited = 0;
        for (page, known) in self.records.range((from, Bound::Unbounded)) {
            if visited == max {
                self.purge_from = Some(*page);
                break;
            }
            visited += 1;
            if known.epoch <= self.reclaimed_up_to {
                gone.push(*page);
            }
        }
        for page in gone {
            self.records.remove(&page);
        }
        let has_seen_all = first.is_none() && self.purge_from.is_none();
        self.purge_left = if has_seen_all { 0 } else { self.purge_left - self.purge_left.min(visited) };
    }

    /// Returns `true` if [`UnindexedRecords::purge`] may still find entries without a record.
    pub(super) fn may_have_gone_records(&self) -> bool {
        self.purge_left > 0
    }

    pub(super) fn mark_incomplete_up_to(&mut self, epoch: u64) {
        self.incomplete_up_to = self.incomplete_up_to.max(epoch);
    }

    /// Returns `true` if a record of a page without an index entry may be on the device.
    pub(super) fn may_exist(&self, page: Fingerprint) -> bool {
        let incomplete = self.incomplete_up_to > 0 && !fail_point!("log.forget-trusts-incomplete-index");
        incomplete
            || self.in_flight.contains_key(&page)
            || self.records.get(&page).is_some_and(|known| known.epoch > self.reclaimed_up_to)
    }
}
