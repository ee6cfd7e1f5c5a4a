//! One put: the states of its parts, and its end.
//!
//! Lock order: `parts`, then `draining`. No lock is held while arena memory is freed or a remote
//! grant is revoked, because both can take long.

use crate::rdma::WriteGrant;
use crate::tiers::PutReservation;
use crate::token_ids::TokenIds;
use larder_format::{PageId, PageMeta, chunk_crcs};
use larder_memory::{Slot, SlotMut, SlotPart, SlotPartMut};
use larder_runtime::sync::Mutex;
use larder_runtime::{OrderedWatch, fail_point, now, race_point};
use larder_wire::Reserved;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// State of one part. The state that holds the memory owns it.
enum PartState {
    Open(SlotPartMut),
    /// The connection's task owns the memory and fills it.
    Receiving,
    Granted {
        grant: WriteGrant,
        /// Bytes that the client says it has written.
        written: u32,
    },
    /// The client has written the memory, and its grant is being revoked.
    Revoking,
    /// Verified. Immutable and shared with followers from here on.
    Landed {
        bytes: SlotPart,
        crcs: Vec<u32>,
    },
    Discarded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Number of landed parts.
    Open(usize),
    Sealed,
    Aborted,
}

/// A page while it is written, shared by the connection of its writer and by its followers. The
/// call that takes `reservation` ends it.
pub struct Put {
    pub id: PageId,
    /// Without its token ids.
    page: Reserved,
    token_ids: Option<Arc<TokenIds>>,
    generation: u64,
    parts: Mutex<Vec<PartState>>,
    progress: OrderedWatch<Progress>,
    /// Taken by the call that ends the put. The others find `None` and do nothing.
    reservation: Mutex<Option<PutReservation>>,
    /// Reservation of an aborted put while its client may still write parts of it. Memory that is
    /// exposed stays counted.
    draining: Mutex<Option<PutReservation>>,
    last_activity: Mutex<Instant>,
    reserved_at: Instant,
    /// Connection that its bytes are charged to.
    writer: Option<u64>,
}

impl Put {
    pub(super) fn new(
        id: PageId,
        page: Reserved,
        token_ids: Option<Arc<TokenIds>>,
        generation: u64,
        memory: SlotMut,
        reservation: PutReservation,
        writer: Option<u64>,
    ) -> Put {
        let lengths: Vec<usize> = page.part_bytes.iter().map(|&bytes| bytes as usize).collect();
        let parts = memory.into_parts(&lengths).into_iter().map(PartState::Open).collect();
        let reserved_at = now();
        Put {
            id,
            page,
            token_ids,
            generation,
            parts: Mutex::new(parts),
            progress: OrderedWatch::new(Progress::Open(0)),
            reservation: Mutex::new(Some(reservation)),
            draining: Mutex::new(None),
            last_activity: Mutex::new(reserved_at),
            reserved_at,
            writer,
        }
    }

    pub(super) fn writer(&self) -> Option<u64> {
        self.writer
    }

    pub(super) fn token_ids(&self) -> Option<Arc<TokenIds>> {
        self.token_ids.clone()
    }

    /// Waits until the put is sealed or aborted.
    pub(crate) async fn ended(&self) {
        self.progress.wait_for(|progress| (!matches!(progress, Progress::Open(_))).then_some(())).await
    }

    pub fn progress(&self) -> Progress {
        self.progress.get()
    }

    /// Waits until the progress differs from `seen`, and returns it.
    pub async fn progress_after(&self, seen: Progress) -> Progress {
        self.progress.wait_for(|&now| (now != seen).then_some(now)).await
    }

    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns bytes and checksums of a part, once it has landed.
    pub fn landed(&self, part: usize) -> Option<(SlotPart, Vec<u32>)> {
        match self.parts.lock().get(part)? {
            PartState::Landed { bytes, crcs } => Some((bytes.clone(), crcs.clone())),
            _ => None,
        }
    }

    pub fn part_count(&self) -> usize {
        self.page.part_bytes.len()
    }

    /// Returns the length of a part in bytes, or `None` if there is no such part.
    pub(crate) fn part_bytes(&self, part: usize) -> Option<usize> {
        self.page.part_bytes.get(part).map(|&bytes| bytes as usize)
    }

    pub(crate) fn take_open(&self, part: usize) -> Option<SlotPartMut> {
        self.take_part(part, self.part_bytes(part)?)
    }

    /// Records that a client may write a part whose memory was taken. Returns `false` and revokes
    /// the grant if the put was aborted meanwhile.
    pub(crate) fn grant_part(&self, part: usize, grant: WriteGrant) -> bool {
        let mut parts = self.parts.lock();
        let state = parts.get_mut(part).filter(|state| matches!(state, PartState::Receiving));
        let is_granted = state.is_some();
        // Dropped without the lock, because the drop of a grant posts work to the device.
        let unused = match state {
            Some(state) => std::mem::replace(state, PartState::Granted { grant, written: 0 }),
            None => PartState::Granted { grant, written: 0 },
        };
        drop(parts);
        drop(unused);
        is_granted
    }

    /// Records that a client says that it has written `bytes` of a granted part. Returns the bytes
    /// that are new.
    ///
    /// The number is a claim. It only grows, up to the length of the part, so a client gains no
    /// more time by it than by bytes that it trickles. It is no activity of an aborted put.
    pub(crate) fn record_written(&self, part: usize, bytes: u32) -> usize {
        let length = self.part_bytes(part).unwrap_or(0) as u32;
        let mut parts = self.parts.lock();
        let Some(PartState::Granted { written, .. }) = parts.get_mut(part) else { return 0 };
        let before = std::mem::replace(written, bytes.min(length).max(*written));
        let new = *written - before;
        drop(parts);
        if new > 0 && !self.is_draining() {
            self.record_activity();
        }
        new as usize
    }

    /// Takes the grant of a part, to revoke it, with the bytes that its client said it had written
    /// before. Returns `None` if the part is not granted.
    pub(crate) fn take_grant(&self, part: usize) -> Option<(WriteGrant, usize)> {
        let mut parts = self.parts.lock();
        let state = parts.get_mut(part)?;
        match std::mem::replace(state, PartState::Revoking) {
            PartState::Granted { grant, written } => Some((grant, written as usize)),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Returns `true` while the grant of a written part is being revoked.
    pub(crate) fn is_revoking(&self) -> bool {
        self.parts.lock().iter().any(|state| matches!(state, PartState::Revoking))
    }

    /// Waits until no grant is being revoked, or the put has ended.
    pub(crate) async fn revoked(&self) {
        loop {
            // Read before the check: a change in between ends the wait at once.
            let seen = self.progress();
            if !self.is_revoking() || !matches!(seen, Progress::Open(_)) {
                return;
            }
            self.progress_after(seen).await;
        }
    }

    /// Takes the memory of a part to receive into. Returns `None` if there is no such part of
    /// `bytes` bytes, or if its memory was taken before.
    pub fn take_part(&self, part: usize, bytes: usize) -> Option<SlotPartMut> {
        let mut parts = self.parts.lock();
        let state = parts.get_mut(part)?;
        match std::mem::replace(state, PartState::Receiving) {
            PartState::Open(memory) if memory.len() == bytes => Some(memory),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Verifies a received part and shows it to followers. Returns `false` if the bytes do not
    /// match `crcs`. The part is then lost, and the put can only be aborted.
    pub fn land(&self, part: usize, memory: SlotPartMut, crcs: Vec<u32>) -> bool {
        let is_valid = chunk_crcs(&memory).eq(crcs.iter().copied()) || fail_point!("node.accept-damaged-part");
        if is_valid {
            self.land_verified(part, memory, crcs);
        }
        is_valid
    }

    /// Records that bytes of a part arrived.
    pub(crate) fn record_activity(&self) {
        *self.last_activity.lock() = now();
    }

    /// Shows a part to followers. The caller has verified it against `crcs` while it arrived.
    pub(crate) fn land_verified(&self, part: usize, memory: SlotPartMut, crcs: Vec<u32>) {
        // From here on no code can write the memory.
        let bytes = memory.freeze();
        let mut parts = self.parts.lock();
        match parts.get_mut(part) {
            // The put was aborted while the grant was revoked. With the last such part, the
            // reservation is no longer needed.
            Some(state @ PartState::Revoking) if self.progress() == Progress::Aborted => {
                *state = PartState::Discarded;
                let is_exposed = |state: &PartState| matches!(state, PartState::Granted { .. } | PartState::Revoking);
                let reservation = if parts.iter().any(is_exposed) { None } else { self.draining.lock().take() };
                drop(parts);
                drop(reservation);
                return;
            }
            Some(state @ (PartState::Receiving | PartState::Revoking)) => *state = PartState::Landed { bytes, crcs },
            _ => return,
        }
        drop(parts);
        *self.last_activity.lock() = now();
        // After the state: a follower that wakes finds the part.
        self.progress.update(|progress| {
            if let Progress::Open(landed) = progress {
                *landed += 1;
            }
        });
    }

    /// Returns `true` if the put was aborted and its client may still write parts of it.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.lock().is_some()
    }

    /// Ends the put by `end`, which gets the reservation. Returns `None` if another call has ended
    /// it. Until `end` returns, every other such call waits.
    pub(super) fn end_by<T>(&self, end: impl FnOnce(PutReservation) -> T) -> Option<T> {
        // Held while a commit makes the page visible. A forget that finds the put ended then also
        // finds the page, and removes it.
        let mut guard = self.reservation.lock();
        let reservation = guard.take()?;
        let _held = (!race_point!("node.commit-after-unlock")).then_some(guard);
        Some(end(reservation))
    }

    /// Takes the reservation, and with it the right to end the put. Only one caller gets it.
    pub(super) fn take_reservation(&self) -> Option<PutReservation> {
        self.reservation.lock().take()
    }

    /// Frees all parts that the client cannot write. Returns `true` if others remain: the put then
    /// keeps its reservation until [`Put::release`].
    pub(super) fn discard(&self, reservation: PutReservation) -> bool {
        // The connection may keep this put for long. Others need its memory now.
        let mut freed = Vec::new();
        let mut parts = self.parts.lock();
        for state in parts.iter_mut().filter(|state| !matches!(state, PartState::Granted { .. })) {
            freed.push(std::mem::replace(state, PartState::Discarded));
        }
        let is_draining = freed.len() < parts.len();
        let unused = if is_draining { self.draining.lock().replace(reservation) } else { Some(reservation) };
        drop(parts);
        drop(freed);
        drop(unused);
        if is_draining {
            // The time limit of the client starts again.
            *self.last_activity.lock() = now();
        }
        is_draining
    }

    /// Revokes all grants and returns all memory with the reservation. The client is done with the
    /// put, or was silent for long.
    pub(super) fn release(&self) {
        let mut parts = self.parts.lock();
        let all = std::mem::take(&mut *parts);
        let reservation = self.draining.lock().take();
        drop(parts);
        drop(all);
        drop(reservation);
    }

    pub(super) fn close(&self, end: Progress) {
        self.progress.update(|progress| *progress = end);
    }

    /// Time at which bytes last arrived, or at which the put was reserved.
    pub(super) fn last_activity(&self) -> Instant {
        *self.last_activity.lock()
    }

    pub(super) fn reserved_at(&self) -> Instant {
        self.reserved_at
    }

    pub(super) fn is_idle(&self, now: Instant, timeout: Duration) -> bool {
        now.saturating_duration_since(*self.last_activity.lock()) > timeout
    }

    /// Returns `true` if the put was reserved longer than `time` ago.
    pub(super) fn is_older(&self, now: Instant, time: Duration) -> bool {
        now.saturating_duration_since(self.reserved_at) > time
    }

    /// Returns the page's facts without its token ids, and its payload. `None` if a part has not
    /// landed.
    pub(super) fn seal(&self, now_unix_ms: u64) -> Option<(PageMeta, Slot)> {
        let mut pieces = Vec::with_capacity(self.part_count());
        let mut page_crcs = Vec::new();
        for state in self.parts.lock().iter_mut() {
            if fail_point!("node.seal-incomplete-page") {
                *state = match std::mem::replace(state, PartState::Receiving) {
                    PartState::Open(memory) => {
                        let crcs = chunk_crcs(&memory).collect();
                        PartState::Landed { bytes: memory.freeze(), crcs }
                    }
                    other => other,
                };
            }
            let PartState::Landed { bytes, crcs } = state else { return None };
            pieces.push(bytes.clone());
            page_crcs.extend_from_slice(crcs);
        }
        let meta = PageMeta {
            id: self.id,
            parent: self.page.parent,
            position: self.page.position,
            generation: self.generation,
            expires_unix_ms: match self.page.ttl_ms {
                0 => 0,
                ttl_ms => now_unix_ms.saturating_add(ttl_ms),
            },
            part_bytes: self.page.part_bytes.clone(),
            chunk_crcs: page_crcs,
            token_ids: Vec::new(),
        };
        Some((meta, Slot::join(&pieces)?))
    }
}
