//! Pages that are being put, and who waits for them.
//!
//! A put goes *reserved → parts land in any order → sealed or aborted*. There is at most one put of a page at a time. Each
//! part has its own piece of the page's slot: it belongs to the connection that receives it, or to a window through which it is
//! written from afar, until its bytes have checked, and is shared and unchangeable from then on. So followers read landed parts
//! while others are still being received. A put that somebody else than its writer gives up lingers while parts of it are open to
//! the writer, with the room that it has.

use crate::budget::Charge;
use crate::clock::now;
use crate::metrics::Metrics;
use crate::rdma::OpenPart;
use crate::tiers::{Page, Room, Tiers};
use larder_core::planted::{Bug, has};
use larder_device::{Bell, Piece, PieceMut, Slot};
use larder_format::{PageId, PageMeta, chunk_crcs};
use larder_wire::{CommitOutcome, ReserveOutcome, Reserved, TierCode};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

enum PartState {
    Open(PieceMut),
    Receiving,
    /// A client may write it.
    Lent(OpenPart),
    /// It was written, and its window is being withdrawn.
    Withdrawing,
    Landed {
        bytes: Piece,
        crcs: Vec<u32>,
    },
    /// The put was given up.
    Over,
}

/// What a follower sees of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Parts landed so far.
    Open(usize),
    /// All there, and visible.
    Sealed,
    /// Given up.
    Aborted,
}

/// One put under way.
pub struct Put {
    /// Of which page.
    pub id: PageId,
    page: Reserved,
    generation: u64,
    parts: Mutex<Vec<PartState>>,
    progress: Bell<Progress>,
    /// Taken by whoever ends the put.
    room: Mutex<Option<Room>>,
    /// The room of a put that was given up, while a client may write parts of it.
    lingers: Mutex<Option<Room>>,
    /// When something was last received for it.
    last: Mutex<Instant>,
}

impl Put {
    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.progress.now()
    }

    /// How far it is as soon as that is not `seen` any more.
    pub async fn progress_after(&self, seen: Progress) -> Progress {
        self.progress.wait(|&now| (now != seen).then_some(now)).await
    }

    /// Its number, which no other put has.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// A landed part.
    pub fn landed(&self, part: usize) -> Option<(Piece, Vec<u32>)> {
        match self.parts.lock().get(part)? {
            PartState::Landed { bytes, crcs } => Some((bytes.clone(), crcs.clone())),
            _ => None,
        }
    }

    /// Parts of the page.
    pub fn part_count(&self) -> usize {
        self.page.part_bytes.len()
    }

    /// Bytes of a part.
    pub(crate) fn part_bytes(&self, part: usize) -> Option<usize> {
        self.page.part_bytes.get(part).map(|&bytes| bytes as usize)
    }

    /// Takes the memory of a part that nothing has come for.
    pub(crate) fn take_open(&self, part: usize) -> Option<PieceMut> {
        self.take_part(part, self.part_bytes(part)?)
    }

    /// A part whose memory was taken is open for writing; `false` if the put was given up meanwhile.
    pub(crate) fn lend(&self, part: usize, window: OpenPart) -> bool {
        let mut parts = self.parts.lock();
        let state = parts.get_mut(part).filter(|state| matches!(state, PartState::Receiving));
        let taken = state.is_some();
        let rest = match state {
            Some(state) => std::mem::replace(state, PartState::Lent(window)),
            None => PartState::Lent(window),
        };
        drop(parts);
        drop(rest);
        taken
    }

    /// Takes the window of a part that was written.
    pub(crate) fn take_lent(&self, part: usize) -> Option<OpenPart> {
        let mut parts = self.parts.lock();
        let state = parts.get_mut(part)?;
        match std::mem::replace(state, PartState::Withdrawing) {
            PartState::Lent(window) => Some(window),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Whether a part was written whose window is being withdrawn.
    pub(crate) fn withdraws(&self) -> bool {
        self.parts.lock().iter().any(|state| matches!(state, PartState::Withdrawing))
    }

    /// Waits until no window is being withdrawn, or the put is over.
    pub(crate) async fn written(&self) {
        loop {
            let seen = self.progress();
            if !self.withdraws() || !matches!(seen, Progress::Open(_)) {
                return;
            }
            self.progress_after(seen).await;
        }
    }

    /// Takes the memory of a part to receive into; `None` if there is no such part of `bytes` bytes, or it was taken.
    pub fn take_part(&self, part: usize, bytes: usize) -> Option<PieceMut> {
        let mut parts = self.parts.lock();
        let state = parts.get_mut(part)?;
        match std::mem::replace(state, PartState::Receiving) {
            PartState::Open(slot) if slot.len() == bytes => Some(slot),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Checks a received part and shows it to followers; `false` if its bytes are not what `crcs` says. The put can then
    /// not be sealed any more.
    pub fn land(&self, part: usize, slot: PieceMut, crcs: Vec<u32>) -> bool {
        let good = chunk_crcs(&slot).eq(crcs.iter().copied()) || has(Bug::DamagedPartLands);
        if good {
            self.land_checked(part, slot, crcs);
        }
        good
    }

    /// Shows a part to followers that was checked against `crcs` while it arrived.
    pub(crate) fn land_checked(&self, part: usize, slot: PieceMut, crcs: Vec<u32>) {
        let bytes = slot.freeze();
        let mut parts = self.parts.lock();
        match parts.get_mut(part) {
            // It was given up meanwhile.
            Some(state @ PartState::Withdrawing) if self.progress() == Progress::Aborted => {
                *state = PartState::Over;
                let is_lent = |state: &PartState| matches!(state, PartState::Lent(_) | PartState::Withdrawing);
                let room = if parts.iter().any(is_lent) { None } else { self.lingers.lock().take() };
                drop(parts);
                drop(room);
                return;
            }
            Some(state @ (PartState::Receiving | PartState::Withdrawing)) => *state = PartState::Landed { bytes, crcs },
            _ => return,
        }
        drop(parts);
        *self.last.lock() = now();
        self.progress.change(|progress| {
            if let Progress::Open(landed) = progress {
                *landed += 1;
            }
        });
    }

    /// Whether it was given up, and its client may still write parts of it.
    pub(crate) fn lingers(&self) -> bool {
        self.lingers.lock().is_some()
    }

    /// Withdraws what a client may still write, and gives all memory back.
    fn let_go(&self) {
        let mut parts = self.parts.lock();
        let all = (std::mem::take(&mut *parts), self.lingers.lock().take());
        drop(parts);
        drop(all);
    }

    /// For a planted bug: parts that nobody sent count as landed.
    fn land_what_there_is(&self) {
        for state in self.parts.lock().iter_mut() {
            *state = match std::mem::replace(state, PartState::Receiving) {
                PartState::Open(piece) => {
                    let bytes = piece.freeze();
                    let crcs = chunk_crcs(&bytes).collect();
                    PartState::Landed { bytes, crcs }
                }
                other => other,
            };
        }
    }

    /// The sealed page, if every part has landed.
    fn seal(&self, now_unix_ms: u64) -> Option<Page> {
        if has(Bug::SealedIncomplete) {
            self.land_what_there_is();
        }
        let mut slots = Vec::with_capacity(self.part_count());
        let mut crcs = Vec::new();
        for state in self.parts.lock().iter() {
            let PartState::Landed { bytes, crcs: part } = state else { return None };
            slots.push(bytes.clone());
            crcs.extend_from_slice(part);
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
            chunk_crcs: crcs,
        };
        Some(Page { meta, payload: Slot::join(&slots)? })
    }
}

/// All puts of a node, and those who wait for a page to be begun.
pub(crate) struct Puts {
    tiers: Arc<Tiers>,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
    generation: AtomicU64,
    waiters_max: usize,
}

#[derive(Default)]
struct State {
    open: BTreeMap<PageId, Arc<Put>>,
    /// Given up, and parts of them may be written by their client, or could a while ago.
    lingering: Vec<Weak<Put>>,
    waiting: BTreeMap<PageId, BTreeMap<u64, oneshot::Sender<()>>>,
    waiters: usize,
    waiters_ever: u64,
    /// The node stops: none is begun any more.
    ended: bool,
}

/// A reader that waits for a page to be begun. Dropping it, however that comes about, takes it off the list.
pub struct Waiter<'a> {
    puts: &'a Puts,
    id: PageId,
    number: u64,
    changed: oneshot::Receiver<()>,
}

impl Waiter<'_> {
    /// Waits until the page is begun; `false` at `deadline`.
    pub async fn begun(mut self, deadline: Instant) -> bool {
        tokio::time::timeout_at(deadline.into(), &mut self.changed).await.is_ok()
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut state = self.puts.state.lock();
        let Some(waiting) = state.waiting.get_mut(&self.id) else { return };
        let removed = waiting.remove(&self.number).is_some();
        if waiting.is_empty() {
            state.waiting.remove(&self.id);
        }
        state.waiters -= usize::from(removed && !has(Bug::WaiterLeaks));
    }
}

/// What there is of a page right now.
pub enum Presence<'a> {
    /// Sealed: read it from the tiers.
    Sealed,
    /// Being written.
    Open(Arc<Put>),
    /// Nothing yet; the waiter hears when that changes.
    Nothing(Waiter<'a>),
    /// Nothing, and too many wait already.
    Crowded,
}

impl Puts {
    /// Puts are numbered from `generation_first` on; it must be above every generation that L3 holds. At most `waiters_max`
    /// readers wait for pages nobody has begun to write.
    pub(crate) fn new(tiers: Arc<Tiers>, metrics: Arc<Metrics>, generation_first: u64, waiters_max: usize) -> Self {
        Self { tiers, metrics, state: Mutex::default(), generation: AtomicU64::new(generation_first), waiters_max }
    }

    /// Room for a page, if nobody has it or writes it, and `charge` counts its bytes to somebody. They are until it is sealed
    /// or given up.
    pub(crate) fn reserve(
        &self,
        id: PageId,
        page: Reserved,
        charge: impl FnOnce(u64) -> Option<Option<Charge>>,
    ) -> Result<Arc<Put>, ReserveOutcome> {
        let bytes: usize = page.part_bytes.iter().map(|&b| b as usize).sum();
        let mut state = self.state.lock();
        if state.ended {
            self.metrics.puts_busy.inc();
            return Err(ReserveOutcome::Busy);
        }
        if state.open.contains_key(&id) {
            return Err(ReserveOutcome::InProgress);
        }
        if self.tiers.locate(&id) != TierCode::Nowhere && !has(Bug::SecondWriterReplaces) {
            self.metrics.puts_existing.inc();
            return Err(ReserveOutcome::Exists);
        }
        let reserved = charge(bytes as u64).and_then(|charge| self.tiers.reserve(bytes, charge));
        let Some((slot, room)) = reserved else {
            self.metrics.puts_busy.inc();
            return Err(ReserveOutcome::Busy);
        };
        let lengths: Vec<usize> = page.part_bytes.iter().map(|&b| b as usize).collect();
        let parts = slot.into_pieces(&lengths).into_iter().map(PartState::Open).collect();
        let put = Arc::new(Put {
            id,
            page,
            generation: self.generation.fetch_add(1, Ordering::Relaxed),
            parts: Mutex::new(parts),
            progress: Bell::new(Progress::Open(0)),
            room: Mutex::new(Some(room)),
            lingers: Mutex::new(None),
            last: Mutex::new(now()),
        });
        state.open.insert(id, put.clone());
        wake(&mut state, &id);
        Ok(put)
    }

    /// Seals a put.
    pub(crate) fn commit(&self, put: &Arc<Put>) -> CommitOutcome {
        let Some(page) = put.seal(self.tiers.clock().now_unix_ms()) else {
            self.abort(put);
            return CommitOutcome::Incomplete;
        };
        // Whoever takes the room ends the put.
        let Some(room) = put.room.lock().take() else { return CommitOutcome::Incomplete };
        // Visible before it stops being open: a reader finds it in one of the two.
        if !self.tiers.insert(Arc::new(page), room) {
            // Nothing in L2 may go for it: it was not stored.
            self.metrics.puts_without_room.inc();
            self.close(put, Progress::Aborted);
            return CommitOutcome::Incomplete;
        }
        self.metrics.pages_put.inc();
        self.close(put, Progress::Sealed);
        CommitOutcome::Stored
    }

    /// Gives a put up whose writer is done with it, or gone. Does nothing to one that is sealed.
    pub(crate) fn abort(&self, put: &Arc<Put>) {
        self.give_up(put);
        if put.progress() == Progress::Aborted {
            put.let_go();
        }
    }

    /// Gives a put up of which its writer does not know it yet. What it may write by itself stays open until it says that it is done,
    /// or says nothing for long: a key that is dead would cost it its line, and what else moves there. Does nothing to one that is
    /// sealed.
    pub(crate) fn give_up(&self, put: &Arc<Put>) {
        let Some(room) = put.room.lock().take() else { return };
        // The connection may hold on to the put for long; its memory is needed now.
        let mut over = Vec::new();
        let mut parts = put.parts.lock();
        for state in parts.iter_mut().filter(|state| !matches!(state, PartState::Lent(_))) {
            over.push(std::mem::replace(state, PartState::Over));
        }
        let lent = over.len() < parts.len();
        let room = if lent { put.lingers.lock().replace(room) } else { Some(room) };
        drop(parts);
        drop((over, room));
        if lent {
            *put.last.lock() = now();
            self.state.lock().lingering.push(Arc::downgrade(put));
        }
        self.metrics.puts_aborted.inc();
        self.close(put, Progress::Aborted);
    }

    /// Gives up puts that nothing was received for since `patience`: their writers are gone without a word.
    pub(crate) fn abort_idle(&self, now: Instant, patience: Duration) {
        let idle = |put: &Arc<Put>| now.saturating_duration_since(*put.last.lock()) > patience;
        let stale: Vec<Arc<Put>> = self.state.lock().open.values().filter(|put| idle(put)).cloned().collect();
        for put in stale {
            tracing::warn!(id = ?put.id, "nothing received for an open put: given up");
            self.abort(&put);
        }
        let lingering: Vec<Arc<Put>> = {
            let mut state = self.state.lock();
            state.lingering.retain(|put| put.strong_count() > 0);
            state.lingering.iter().filter_map(Weak::upgrade).collect()
        };
        lingering.iter().filter(|put| idle(put)).for_each(|put| put.let_go());
    }

    /// Gives up all puts, and begins none any more: the room they have is needed for what is still to reach L3.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        let open: Vec<Arc<Put>> = state.open.values().cloned().collect();
        let lingering: Vec<Arc<Put>> = state.lingering.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        open.iter().for_each(|put| self.abort(put));
        lingering.iter().for_each(|put| put.let_go());
    }

    /// Gives up whatever is being written under these keys.
    pub(crate) fn abort_all(&self, ids: &[PageId]) {
        for id in ids {
            let put = self.state.lock().open.get(id).cloned();
            if let Some(put) = put {
                self.give_up(&put);
            }
        }
    }

    fn close(&self, put: &Arc<Put>, end: Progress) {
        let mut state = self.state.lock();
        if state.open.get(&put.id).is_some_and(|open| Arc::ptr_eq(open, put)) {
            state.open.remove(&put.id);
        }
        drop(state);
        put.progress.change(|progress| *progress = end);
    }

    /// What there is of a page, and how to learn that it changed.
    pub(crate) fn presence(&self, id: &PageId) -> Presence<'_> {
        let mut state = self.state.lock();
        if let Some(put) = state.open.get(id) {
            return Presence::Open(put.clone());
        }
        if self.tiers.locate(id) != TierCode::Nowhere {
            return Presence::Sealed;
        }
        if state.waiters >= self.waiters_max {
            return Presence::Crowded;
        }
        let (sender, changed) = oneshot::channel();
        let number = state.waiters_ever;
        state.waiters_ever += 1;
        state.waiters += 1;
        state.waiting.entry(*id).or_default().insert(number, sender);
        Presence::Nothing(Waiter { puts: self, id: *id, number, changed })
    }

    /// Puts under way and readers waiting.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.open.len(), state.waiters)
    }
}

fn wake(state: &mut State, id: &PageId) {
    for (_, waiter) in state.waiting.remove(id).unwrap_or_default() {
        state.waiters -= 1;
        let _ = waiter.send(());
    }
}
