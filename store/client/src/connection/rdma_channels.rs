//! State of the RDMA channels to one node.
//!
//! Invariants:
//! - The client does not abandon a put at the node while one of its parts is being written. That
//!   would break the channel.

use larder_memory::share::SharedMemory;
use larder_rdma::{Fabric, FabricOptions, RdmaChannel, RemoteRange};
use larder_runtime::lock::Mutex;
use larder_wire::{Entry, GrantedRange, PartGrant};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Notify;

/// Answers in a row without a grant after which the client takes the node's ends of its channels
/// for dead.
const UNUSED_MAX: usize = 64;

/// Open RDMA devices, and the memory that is registered with them. Opening pins that memory, so all
/// connections of a client share one of these.
pub struct Devices {
    pub(super) fabric: Fabric,
    pub(crate) memory: Arc<SharedMemory>,
}

/// Opens this machine's RDMA devices and registers `memory` with each. Registration pins the
/// memory. Returns `None` if there is no usable device.
pub async fn open_devices(options: &FabricOptions, memory: &Arc<SharedMemory>) -> Option<Arc<Devices>> {
    match Fabric::open(options, memory.clone()).await {
        Ok(fabric) => Some(Arc::new(Devices { fabric, memory: memory.clone() })),
        // Without named devices, a machine that has none is the usual case.
        Err(error) if options.devices.is_empty() => {
            tracing::debug!(%error, "no usable RDMA device");
            None
        }
        Err(error) => {
            tracing::warn!(%error, devices = ?options.devices, "cannot use the RDMA devices; pages travel over TCP");
            None
        }
    }
}

/// RDMA channels to one node, and the transfers on them. One lock guards all state, and no caller
/// holds it while it waits.
#[derive(Default)]
pub(crate) struct RdmaChannels {
    state: Mutex<ChannelsState>,
    /// Rotates the first choice among channels.
    turn: AtomicUsize,
    /// Answers in a row without a grant.
    unused: AtomicUsize,
    /// Notified when the client abandons channels that the node does not use.
    abandoned: Notify,
}

#[derive(Default)]
struct ChannelsState {
    channels: BTreeMap<u32, Arc<RdmaChannel>>,
    devices: Option<Arc<Devices>>,
    /// Grants to write parts, by the number of their Reserve, then by page and part.
    open_parts: BTreeMap<u64, BTreeMap<(u32, u32), GrantedRange>>,
    writes: BTreeMap<u64, ReserveWrites>,
}

/// Writes in progress for the parts of one Reserve.
#[derive(Default)]
struct ReserveWrites {
    count: usize,
    /// The last write to end sends the Cancel.
    is_cancelled: bool,
}

impl RdmaChannels {
    pub(super) fn is_up(&self) -> bool {
        self.state.lock().channels.values().any(|channel| !channel.is_dead())
    }

    /// Numbers of the channels that work. Each call starts with the next one, which spreads the
    /// load over devices.
    pub(super) fn in_turn(&self) -> Vec<u32> {
        let state = self.state.lock();
        let alive = state.channels.iter().filter(|(_, channel)| !channel.is_dead());
        let mut numbers: Vec<u32> = alive.map(|(number, _)| *number).collect();
        if !numbers.is_empty() {
            // Relaxed: any value is a valid start.
            let first = self.turn.fetch_add(1, Ordering::Relaxed) % numbers.len();
            numbers.rotate_left(first);
        }
        numbers
    }

    /// Channels to read pages on, and the memory to read them into. `None` if no channel works.
    pub(crate) fn for_reading(&self) -> Option<(Vec<u32>, Arc<Devices>)> {
        let numbers = self.in_turn();
        let devices = self.state.lock().devices.clone()?;
        (!numbers.is_empty()).then_some((numbers, devices))
    }

    pub(super) fn channel(&self, number: u32) -> Option<Arc<RdmaChannel>> {
        self.state.lock().channels.get(&number).cloned()
    }

    /// Records an answer of the node to a request that offered channels. After [`UNUSED_MAX`]
    /// answers in a row without a grant, the client abandons its channels and makes new ones.
    pub(super) fn record_answer(&self, has_grant: bool) {
        // Relaxed: the count is a heuristic, and a lost update delays it by one answer.
        if has_grant {
            return self.unused.store(0, Ordering::Relaxed);
        }
        if self.unused.fetch_add(1, Ordering::Relaxed) + 1 < UNUSED_MAX {
            return;
        }
        self.unused.store(0, Ordering::Relaxed);
        // Transfers in progress hold their channel until they end.
        let unused = std::mem::take(&mut self.state.lock().channels);
        if !unused.is_empty() {
            tracing::debug!(channels = unused.len(), "the node does not use the RDMA channels; replacing them");
            self.abandoned.notify_one();
        }
    }

    pub(super) async fn abandoned(&self) {
        self.abandoned.notified().await;
    }

    pub(super) fn set_devices(&self, devices: Arc<Devices>) {
        self.state.lock().devices = Some(devices);
    }

    pub(super) fn insert(&self, number: u32, channel: RdmaChannel) {
        self.state.lock().channels.insert(number, Arc::new(channel));
    }

    pub(super) fn all(&self) -> Vec<Arc<RdmaChannel>> {
        self.state.lock().channels.values().cloned().collect()
    }

    /// Removes a channel that is dead. Returns `true` if there is none of that number any more.
    pub(super) fn remove_dead(&self, number: u32) -> bool {
        let mut state = self.state.lock();
        let is_dead = state.channels.get(&number).is_none_or(|channel| channel.is_dead());
        if is_dead {
            // Transfers in progress keep the channel alive until they fail.
            state.channels.remove(&number);
        }
        is_dead
    }

    pub(super) fn open_parts(&self, reserve: u64, grants: Vec<PartGrant>) -> usize {
        let by_part = |open: PartGrant| ((open.index, open.part), open.range);
        let grants: BTreeMap<_, _> = grants.into_iter().map(by_part).collect();
        let count = grants.len();
        self.state.lock().open_parts.insert(reserve, grants);
        count
    }

    pub(super) fn close_parts(&self, reserve: u64) {
        let grants = self.state.lock().open_parts.remove(&reserve);
        drop(grants);
    }

    /// Takes the grant for a part, which serves one write. `None` if there is none on a channel
    /// that works.
    pub(super) fn take_part(&self, put: Entry, part: u32) -> Option<WritablePart> {
        let mut state = self.state.lock();
        let grant = state.open_parts.get_mut(&put.request)?.remove(&(put.index, part))?;
        let channel = state.channels.get(&grant.channel).filter(|channel| !channel.is_dead())?;
        Some(WritablePart { channel: channel.clone(), grant, devices: state.devices.clone()? })
    }

    pub(super) fn begin_write(&self, reserve: u64) {
        self.state.lock().writes.entry(reserve).or_default().count += 1;
    }

    /// Ends a write. Returns `true` if it was the last one of a cancelled Reserve: the caller then
    /// sends the Cancel.
    pub(super) fn end_write(&self, reserve: u64) -> bool {
        let mut state = self.state.lock();
        match state.writes.get_mut(&reserve) {
            Some(writes) if writes.count > 1 => {
                writes.count -= 1;
                false
            }
            // The last one, or `close` has cleared the writes.
            _ => state.writes.remove(&reserve).is_some_and(|writes| writes.is_cancelled),
        }
    }

    /// Postpones the Cancel of a Reserve until its writes have ended. Returns `false` if there are
    /// none.
    pub(super) fn cancel_after_writes(&self, reserve: u64) -> bool {
        self.state.lock().writes.get_mut(&reserve).map(|writes| writes.is_cancelled = true).is_some()
    }

    /// Drops all channels and grants, because the connection has ended.
    pub(super) fn close(&self) {
        // Dropped without the lock: the destructors of channels take locks of their own.
        // Also forgets writes in progress: a closed connection has nothing left to cancel.
        let state = std::mem::take(&mut *self.state.lock());
        drop(state);
    }
}

/// Right to write one part once.
pub(super) struct WritablePart {
    pub(super) channel: Arc<RdmaChannel>,
    pub(super) grant: GrantedRange,
    pub(super) devices: Arc<Devices>,
}

pub(super) fn remote_range(grant: GrantedRange) -> RemoteRange {
    RemoteRange { address: grant.address, len: grant.len, key: grant.key }
}
