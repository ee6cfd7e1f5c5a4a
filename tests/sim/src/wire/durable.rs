//! Pages that a crash may have torn.
//!
//! A node promises that a page on L3 for [`DURABLE_AFTER_MS`] survives a crash. Recovery reads no
//! payloads, so the index may also name pages that the crash tore. Only these may be missed by the
//! read that a lookup announced.
//!
//! A page of this life of its node cannot be torn. A page of an earlier life is whole if it was
//! seen early enough on the log, or if that life ended without a loss of power.

use super::Cluster;
use super::nodes::NodeHost;
use crate::incarnation::DURABLE_AFTER_MS;
use larder_format::PageId;
use larder_log::L3;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::Instant;

#[derive(Default)]
pub(super) struct DurablePages {
    /// First generation of this life.
    first: u64,
    /// Generations of this life, and when they were first seen on the log.
    seen: BTreeMap<u64, Instant>,
    /// Durable generations of earlier lives.
    durable: BTreeSet<u64>,
}

impl DurablePages {
    /// A life begins with this generation.
    pub(super) fn begin(&mut self, first: u64) {
        self.first = first;
    }

    /// Records the pages that the log has now.
    pub(super) fn note(&mut self, cluster: &Cluster, l3: &L3) {
        for key in 0..cluster.all_keys() {
            let found = l3.find(&cluster.id(key)).filter(|entry| entry.generation >= self.first);
            if let Some(entry) = found {
                self.seen.entry(entry.generation).or_insert_with(Instant::now);
            }
        }
    }

    /// Ends a life. `lost_power` tells if writes without a sync may be lost.
    pub(super) fn end(&mut self, lost_power: bool) {
        let early = |seen: &Instant| seen.elapsed() >= Duration::from_millis(DURABLE_AFTER_MS);
        let seen = std::mem::take(&mut self.seen);
        self.durable.extend(seen.into_iter().filter(|(_, seen)| !lost_power || early(seen)).map(|(number, _)| number));
    }

    /// Returns `true` if a crash may have torn the page that the log has under this name.
    pub(super) fn may_be_torn(&self, id: &PageId, l3: &L3) -> bool {
        l3.find(id).is_some_and(|entry| entry.generation < self.first && !self.durable.contains(&entry.generation))
    }
}

/// Returns `true` if a page that a lookup finds may be damaged: devices or memory fail, or a crash
/// may have torn it.
pub(super) fn may_be_damaged(cluster: &Cluster, hosts: &[NodeHost], key: u64) -> bool {
    let fails = !cluster.setup.profile.is_reliable();
    fails || hosts.iter().any(|host| host.may_have_torn(key))
}
