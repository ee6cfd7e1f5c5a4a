//! Enumeration of keys: `SCAN` and `DBSIZE`.
//!
//! A scan walks over L2 for keys that L3 lacks, and then over the records of each L3 device. A key
//! that exists from the first step to the last is returned at least once: a page on its way to L3
//! is found in one of the two walks, and a copied record lies behind its original.
//!
//! A cursor is a place in one of the walks. It stays below 2^63, because clients may use signed
//! numbers.

use super::manifest;
use super::values::Database;
use larder_redis::glob;
use larder_runtime::now;
use std::time::Instant;

/// Set in cursors of the walk over L3: device, epoch of the segment and block of the record.
const ON_L3: u64 = 1 << 62;
const DEVICE_SHIFT: u32 = 56;
const EPOCH_SHIFT: u32 = 24;
/// Unit of a record's offset in a cursor. Records begin at its multiples.
const BLOCK_SHIFT: u32 = 12;
/// Calls into L2's table in one step. Each passes over some hundred places.
const L2_CALLS_MAX: usize = 1000;
/// Walks of one count while pages go to L3.
const COUNTS_MAX: usize = 4;
/// Pages of L2 that are counted between two yields.
const COUNTED_PER_TURN: usize = 256;

impl Database<'_> {
    /// Returns about `count` keys behind a cursor that match `pattern`, and the next cursor: 0 at
    /// the end. A retired namespace has no keys.
    pub(super) async fn scan(
        &self,
        cursor: u64,
        pattern: Option<&[u8]>,
        count: usize,
        deadline: Instant,
    ) -> (u64, Vec<Vec<u8>>) {
        if self.tiers().is_retired(&self.namespaces.manifests) {
            return (0, Vec::new());
        }
        let (next, mut keys) = match cursor & ON_L3 {
            0 => self.scan_l2(cursor, count),
            _ => self.scan_l3(cursor, count, deadline).await,
        };
        if let Some(pattern) = pattern {
            keys.retain(|key| glob::matches(pattern, key));
        }
        (next, keys)
    }

    fn scan_l2(&self, cursor: u64, count: usize) -> (u64, Vec<Vec<u8>>) {
        let tiers = self.tiers();
        let mut place = usize::try_from(cursor).unwrap_or(usize::MAX);
        let mut keys = Vec::new();
        for _ in 0..L2_CALLS_MAX {
            let (page, next) = tiers.next_from(place);
            if let Some(page) = page.filter(|page| self.is_listed_in_l2(page))
                && let Some((key, _)) = manifest::decode(&page.payload)
            {
                keys.push(key.to_vec());
            }
            match next {
                Some(next) => place = next,
                None if tiers.devices().is_empty() => return (0, keys),
                None => return (ON_L3, keys),
            }
            if keys.len() >= count {
                break;
            }
        }
        (place as u64, keys)
    }

    /// Returns `true` for a manifest of this database that only L2 has.
    fn is_listed_in_l2(&self, page: &crate::page::Page) -> bool {
        let id = page.id();
        let expires = page.expires_unix_ms();
        let is_live = expires == 0 || self.tiers().clock().now_unix_ms() < expires;
        id.namespace == self.namespaces.manifests && is_live && !self.tiers().devices().has(&id)
    }

    async fn scan_l3(&self, cursor: u64, count: usize, deadline: Instant) -> (u64, Vec<Vec<u8>>) {
        let device = ((cursor & !ON_L3) >> DEVICE_SHIFT) as usize;
        let epoch = (cursor >> EPOCH_SHIFT) & u64::from(u32::MAX);
        let offset = (cursor & ((1 << EPOCH_SHIFT) - 1)) << BLOCK_SHIFT;
        // Memory of the manifests that are read: two units of the arena for each at most.
        let charge = self.account.charge_read((count * 2 * crate::tiers::SLOT_UNIT) as u64);
        let Ok(_charge) = tokio::time::timeout_at(deadline.into(), charge).await else { return (cursor, Vec::new()) };
        let devices = self.tiers().devices();
        let listed = devices.list(device, &self.namespaces.manifests, (epoch, offset), count, deadline).await;
        // The client may ask for the same step again.
        let Some(listed) = listed else { return (cursor, Vec::new()) };
        let key = |payload: &[u8]| manifest::decode(payload).map(|(key, _)| key.to_vec());
        let keys = listed.pages.iter().filter_map(|(_, payload)| key(payload)).collect();
        let next = match listed.next {
            Some((epoch, offset)) if epoch <= u64::from(u32::MAX) => {
                ON_L3 | (device as u64) << DEVICE_SHIFT | epoch << EPOCH_SHIFT | offset >> BLOCK_SHIFT
            }
            _ if device + 1 < devices.count() => ON_L3 | (device as u64 + 1) << DEVICE_SHIFT,
            _ => 0,
        };
        (next, keys)
    }

    /// Number of keys. A key on two devices counts twice, and one that expired a moment ago may
    /// count. While keys are set, some may be missed or counted twice. At the deadline the walk
    /// over L2 ends, and the keys beyond it are missing.
    pub(super) async fn size(&self, deadline: Instant) -> usize {
        if self.tiers().is_retired(&self.namespaces.manifests) {
            return 0;
        }
        let on_l3 = || self.tiers().devices().pages_of(&self.namespaces.manifests);
        let mut count = 0;
        for _ in 0..COUNTS_MAX {
            let before = on_l3();
            count = before as usize + self.size_of_l2(deadline).await;
            // Otherwise a page went to L3 behind the back of the walk.
            if on_l3() == before || now() >= deadline {
                break;
            }
        }
        count
    }

    /// Number of keys that L3 lacks.
    async fn size_of_l2(&self, deadline: Instant) -> usize {
        let (mut count, mut place) = (0, 0);
        for turn in 1.. {
            let (page, next) = self.tiers().next_from(place);
            count += usize::from(page.is_some_and(|page| self.is_listed_in_l2(&page)));
            let Some(next) = next else { break };
            place = next;
            if turn % COUNTED_PER_TURN == 0 {
                tokio::task::yield_now().await;
                if now() >= deadline {
                    break;
                }
            }
        }
        count
    }
}
