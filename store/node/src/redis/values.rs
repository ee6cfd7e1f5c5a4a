//! Find, set, expire and remove values.

use super::RedisServer;
use super::databases::DatabaseNamespaces;
use super::leases::Leases;
use super::manifest::{self, MANIFEST_POSITION, Manifest, Place, data_key, data_pages};
use super::receive::NewValue;
use super::swaps::Writer;
use crate::budget::Account;
use crate::page::Page;
use crate::places::Peer;
use crate::puts::Put;
use crate::tiers::{PageLocation, Tiers, TiersError};
use larder_format::{PageId, chunk_crcs};
use larder_redis::{Condition, Expiry, SetOptions};
use larder_runtime::now;
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::coop::consume_budget;

/// Pause between two tries to reserve a page, at most. Room comes back with each put that ends.
const RESERVE_PAUSE_MAX: Duration = Duration::from_millis(20);
/// Maximum time that a write waits for room.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Reason why a command was not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("OOM the node has no room for the value now; try again later")]
    NoRoom,
    #[error("BUSY other commands with the key took too long; try again later")]
    Contended,
    #[error("ERR an operator has retired the namespace of this database; it takes no values until the rollback")]
    Retired,
    #[error("ERR the change is not durable, and the key may have its old value or none: {0}")]
    NotDurable(#[from] TiersError),
}

/// Manifest of a key, as a reader found it.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) page: Arc<Page>,
    pub(super) manifest: Manifest,
}

impl Found {
    /// Bytes of a short value.
    pub(super) fn short(&self) -> Option<&[u8]> {
        match &self.manifest.place {
            Place::Here(range) => self.page.payload.get(range.clone()),
            Place::DataPages(_) => None,
        }
    }

    /// Expiry in Unix milliseconds. 0 means never.
    pub(super) fn expires_unix_ms(&self) -> u64 {
        self.page.expires_unix_ms()
    }
}

/// Bytes of a new value.
pub(super) enum Content {
    Short(Vec<u8>),
    Long(NewValue),
}

pub(super) enum SetOutcome {
    Stored,
    /// The condition of the options does not hold.
    Refused,
}

/// A database, as one connection uses it.
#[derive(Clone, Copy)]
pub(super) struct Database<'a> {
    pub(super) server: &'a Arc<RedisServer>,
    pub(super) account: &'a Arc<Account>,
    pub(super) namespaces: DatabaseNamespaces,
    pub(super) peer: Peer,
}

impl<'a> Database<'a> {
    pub(super) fn tiers(&self) -> &'a Tiers {
        self.server.node.store.tiers()
    }

    pub(super) fn manifest_id(&self, key: &[u8]) -> PageId {
        PageId { namespace: self.namespaces.manifests, key: manifest::manifest_key(key) }
    }

    /// Ids of the data pages of a value.
    pub(super) fn data_ids(&self, manifest: &Manifest) -> Vec<PageId> {
        let Place::DataPages(value) = manifest.place else { return Vec::new() };
        let id = |index| PageId { namespace: self.namespaces.data, key: data_key(value, index) };
        (0..data_pages(manifest.value_bytes)).map(id).collect()
    }

    /// Finds the manifest of a key. `None` is a miss. Counts a hit or a miss.
    pub(super) async fn find(&self, key: &[u8], deadline: Instant) -> Option<Found> {
        // A command has up to 16,384 keys, and a key in DRAM needs no wait.
        consume_budget().await;
        let id = self.manifest_id(key);
        let swaps = &self.server.swaps;
        loop {
            // The order is that of the documentation of `swaps`.
            let begun = swaps.begun(&id);
            if !swaps.ended(&id, deadline).await {
                return None;
            }
            let found = self.read_manifest(&id, key, deadline).await;
            if found.is_some() || swaps.begun(&id) == begun || now() >= deadline {
                return found;
            }
        }
    }

    async fn read_manifest(&self, id: &PageId, key: &[u8], deadline: Instant) -> Option<Found> {
        let page = self.verified(id, deadline).await?;
        let (found_key, manifest) = manifest::decode(&page.payload)?;
        (found_key == key).then_some(Found { page: page.clone(), manifest })
    }

    /// Returns a page whose bytes were verified a moment ago. A damaged copy is dropped, and L3 may
    /// have another one.
    pub(super) async fn verified(&self, id: &PageId, deadline: Instant) -> Option<Arc<Page>> {
        for _ in 0..2 {
            let (page, _) = self.tiers().get(id, deadline).await?;
            if page.meta().verify(id, &page.payload).is_ok() {
                return Some(page);
            }
            self.tiers().recheck(id);
        }
        None
    }

    /// Sets a value, unless the condition of the options does not hold.
    ///
    /// # Errors
    /// The key then has its old value or none.
    pub(super) async fn set(
        &self,
        writer: &Writer<'_>,
        key: &[u8],
        content: Content,
        options: &SetOptions,
        deadline: Instant,
    ) -> Result<SetOutcome, Failure> {
        // Before the old value is forgotten: a rollback brings it back.
        if [self.namespaces.manifests, self.namespaces.data].iter().any(|id| self.tiers().is_retired(id)) {
            return Err(Failure::Retired);
        }
        let old = self.find(key, deadline).await;
        if old.is_none() && now() >= deadline {
            // Perhaps there is one that a device did not return in time.
            return Err(Failure::Contended);
        }
        // A value whose data pages were evicted is a miss.
        let is_present = old.as_ref().is_some_and(|old| self.has_all(&self.data_ids(&old.manifest)));
        match options.condition {
            Some(Condition::Absent) if is_present => return Ok(SetOutcome::Refused),
            Some(Condition::Present) if !is_present => return Ok(SetOutcome::Refused),
            _ => {}
        }
        let now_ms = self.tiers().clock().now_unix_ms();
        let old_expiry = old.as_ref().map_or(0, Found::expires_unix_ms);
        let ttl_ms = match options.expiry {
            Some(expiry) => time_left(expiry, now_ms),
            None if options.keeps_ttl && old_expiry > 0 => i128::from(old_expiry) - i128::from(now_ms),
            None => 0,
        };
        let expires = options.expiry.is_some() || (options.keeps_ttl && old_expiry > 0);
        if expires && ttl_ms <= 0 {
            // The value would be gone at once.
            if old.is_some() || self.may_exist(&writer.id()) {
                self.forget(writer, old.as_ref()).await?;
            }
            return Ok(SetOutcome::Stored);
        }
        if !expires && old_expiry == 0 && old.as_ref().is_some_and(|old| self.is_equal(old, &content)) {
            // Engines put the same bytes under the same key again and again. A forget would cost a
            // sync of the device.
            return Ok(SetOutcome::Stored);
        }
        let ttl_ms = u64::try_from(ttl_ms).unwrap_or(u64::MAX);
        match content {
            Content::Short(value) => {
                let bytes = manifest::encode_short(key, &value);
                self.swap(writer, old.as_ref(), true, &bytes, ttl_ms, deadline).await?;
            }
            Content::Long(mut value) => {
                if !value.complete() {
                    return Err(Failure::NoRoom);
                }
                let bytes = manifest::encode_long(key, value.bytes(), value.id());
                self.swap(writer, old.as_ref(), true, &bytes, ttl_ms, deadline).await?;
                value.keep();
            }
        }
        Ok(SetOutcome::Stored)
    }

    /// Compares a value in DRAM with a new one.
    fn is_equal(&self, old: &Found, content: &Content) -> bool {
        match content {
            Content::Short(value) => old.short() == Some(&value[..]),
            Content::Long(value) => {
                let in_dram = |id: &PageId| self.tiers().get_l2(id);
                let ids = self.data_ids(&old.manifest);
                match (&ids[..], value.only_page()) {
                    // Of several pages, most are stored already. To keep them is as cheap.
                    ([id], Some(bytes)) if old.manifest.value_bytes == value.bytes() => {
                        in_dram(id).is_some_and(|page| page.payload[..] == bytes[..])
                    }
                    _ => false,
                }
            }
        }
    }

    /// Changes the expiry of a value: 0 is none. Returns `false` if there is no value.
    pub(super) async fn expire(
        &self,
        writer: &Writer<'_>,
        key: &[u8],
        expiry: Option<Expiry>,
        deadline: Instant,
    ) -> Result<bool, Failure> {
        let Some(old) = self.find(key, deadline).await else { return Ok(false) };
        let now_ms = self.tiers().clock().now_unix_ms();
        let ttl_ms = match expiry {
            None if old.expires_unix_ms() == 0 => return Ok(false),
            None => 0,
            Some(expiry) => match u64::try_from(time_left(expiry, now_ms)).unwrap_or(0) {
                0 => {
                    self.forget(writer, Some(&old)).await?;
                    return Ok(true);
                }
                left => left,
            },
        };
        let bytes = old.page.payload.to_vec();
        self.swap(writer, Some(&old), false, &bytes, ttl_ms, deadline).await?;
        Ok(true)
    }

    /// Replaces the manifest of a key, and forgets the data pages of the old value if `ends_data`.
    async fn swap(
        &self,
        writer: &Writer<'_>,
        old: Option<&Found>,
        ends_data: bool,
        bytes: &[u8],
        ttl_ms: u64,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let id = writer.id();
        let exists = old.is_some() || self.may_exist(&id);
        let _swap = exists.then(|| writer.begin_swap());
        if exists {
            let mut ids = vec![id];
            if ends_data && let Some(old) = old {
                ids.extend(self.data_ids(&old.manifest));
            }
            self.server.node.store.forget(&ids, deadline).await?;
        }
        let put = self.reserve(id, (MANIFEST_POSITION, ttl_ms), bytes.len(), deadline).await?;
        put.fill(bytes);
        if put.commit() { Ok(()) } else { Err(Failure::NoRoom) }
    }

    /// Returns `true` if there is a manifest of that id, or may be one that no reader finds now: a
    /// damaged one, one of a retired namespace, one on a quarantined device, or one that recovery
    /// has yet to read. It could come back later.
    fn may_exist(&self, id: &PageId) -> bool {
        let devices = self.tiers().devices();
        self.tiers().find(id).tier() != TierCode::Absent || devices.has(id) || devices.is_recovering()
    }

    fn has_all(&self, ids: &[PageId]) -> bool {
        ids.iter().all(|id| self.tiers().locate(id) != TierCode::Absent)
    }

    async fn forget(&self, writer: &Writer<'_>, old: Option<&Found>) -> Result<(), Failure> {
        let mut ids = vec![writer.id()];
        ids.extend(old.iter().flat_map(|old| self.data_ids(&old.manifest)));
        self.server.node.store.forget(&ids, now() + super::connection::COMMAND_TIMEOUT).await?;
        Ok(())
    }

    /// Removes keys, durably. Returns how many had a value.
    pub(super) async fn remove(&self, keys: &[Vec<u8>], deadline: Instant) -> Result<usize, Failure> {
        // In the order of their ids, so that two removals cannot wait for each other.
        let mut named: BTreeSet<(PageId, &[u8])> = BTreeSet::new();
        for key in keys {
            consume_budget().await;
            named.insert((self.manifest_id(key), &key[..]));
        }
        let mut writers = Vec::new();
        let mut ids = Vec::new();
        let mut removed = 0;
        for (id, key) in named {
            writers.push(self.server.swaps.writer(id, deadline).await.ok_or(Failure::Contended)?);
            if let Some(old) = self.find(key, deadline).await {
                removed += 1;
                ids.extend(self.data_ids(&old.manifest));
                ids.push(id);
            } else if self.may_exist(&id) {
                ids.push(id);
            }
        }
        if !ids.is_empty() {
            self.server.node.store.forget(&ids, deadline).await?;
        }
        Ok(removed)
    }

    /// Returns `true` if a key has a value, which then stays for the time of a lease.
    pub(super) async fn lease(&self, key: &[u8], deadline: Instant) -> bool {
        let Some(found) = self.find(key, deadline).await else { return false };
        let id = self.manifest_id(key);
        let generation = found.page.generation();
        let leases: &Leases = &self.server.leases;
        if leases.extend(&id, generation, now()) {
            // Pages that were only on L3 are not held.
            let ids = self.data_ids(&found.manifest);
            self.tiers().devices().touch(&ids);
            return self.has_all(&ids);
        }
        let (tiers, devices) = (self.tiers(), self.tiers().devices());
        let may_hold = leases.has_room(self.peer, found.manifest.value_bytes);
        let (mut holds, mut on_l3) = (Vec::new(), Vec::new());
        for id in self.data_ids(&found.manifest).into_iter().chain([id]) {
            let hold = match tiers.lookup(&id) {
                PageLocation::Absent => return false,
                PageLocation::OnL3(_) => None,
                _ if may_hold => tiers.hold_l2(&id),
                _ => None,
            };
            match hold {
                Some(hold) => holds.push(hold),
                None if devices.has(&id) => on_l3.push(id),
                // Only in DRAM, and not held: eviction could take it.
                None => return false,
            }
        }
        devices.touch(&on_l3);
        if may_hold {
            leases.grant(id, generation, self.peer, holds, now());
        }
        true
    }

    /// Reserves a page, and waits for room if there is none.
    pub(super) async fn reserve(
        &self,
        id: PageId,
        (position, ttl_ms): (u32, u64),
        bytes: usize,
        deadline: Instant,
    ) -> Result<OpenPut, Failure> {
        let part = u32::try_from(bytes).expect("no page is larger than 16 MiB");
        let page = Reserved { position, ttl_ms, ..Reserved::first(id.key, vec![part]) };
        let deadline = deadline.min(now() + RESERVE_TIMEOUT);
        loop {
            match self.server.node.store.reserve_for(self.account, id, &page, true) {
                Ok(put) => return Ok(OpenPut { server: self.server.clone(), put }),
                Err(ReserveOutcome::Busy) => {
                    let charged = u64::from(part).next_multiple_of(crate::tiers::SLOT_UNIT as u64);
                    let pause = self.account.wait_in_line(charged, charged).retry_after.min(RESERVE_PAUSE_MAX);
                    if now() + pause >= deadline {
                        self.server.node.metrics.refusals.inc();
                        return Err(Failure::NoRoom);
                    }
                    tokio::time::sleep(pause).await;
                }
                Err(ReserveOutcome::Retired) => return Err(Failure::Retired),
                // The one writer of the key has forgotten the page, and value ids are random.
                Err(_) => return Err(Failure::Contended),
            }
        }
    }
}

/// Milliseconds until an expiry.
fn time_left(expiry: Expiry, now_unix_ms: u64) -> i128 {
    match expiry {
        Expiry::After(left) => i128::from(left),
        Expiry::At(at) => i128::from(at) - i128::from(now_unix_ms),
    }
}

/// An open put with one part. Dropping it aborts the put, unless it was committed.
pub(super) struct OpenPut {
    server: Arc<RedisServer>,
    put: Arc<Put>,
}

impl OpenPut {
    pub(super) fn put(&self) -> &Arc<Put> {
        &self.put
    }

    /// Fills the page with its bytes. Does nothing if the node has aborted the put.
    pub(super) fn fill(&self, bytes: &[u8]) {
        let Some(mut memory) = self.put.take_part(0, bytes.len()) else { return };
        memory.copy_from_slice(bytes);
        let crcs = chunk_crcs(&memory).collect();
        self.put.land_verified(0, memory, crcs);
    }

    /// Makes the page visible. Returns `false` if the node has aborted the put, or L2 has no room.
    pub(super) fn commit(&self) -> bool {
        self.server.node.store.puts().commit(&self.put) == CommitOutcome::Stored
    }
}

impl Drop for OpenPut {
    fn drop(&mut self) {
        // Does nothing to a put that has ended.
        self.server.node.store.puts().abort(&self.put);
    }
}
