//! One end of a connection, with its transfers and grants.
//!
//! Invariant: a call that takes memory returns it, or the connection keeps it until the device is
//! done with it.

use crate::address::{EndpointAddress, RemoteRange};
use crate::blocking;
use crate::connection::{Connection, Direction, Phase, Transfer};
use crate::driver;
use crate::error::{DisconnectReason, Error};
use crate::grant::RemoteGrant;
use crate::nic::{GrantKind, Nic};
use crate::options::{EndpointOptions, SLOW_CHUNK_BYTES};
use crate::path::LinkLayer;
use crate::region::Region;
use crate::verbs::{Local, Registration, Remote};
use ibverbs_sys as ffi;
use larder_memory::span::{DmaBuf, DmaBufMut};
use larder_runtime::lock::Mutex;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

/// Part of the queue that one transfer may fill, and part of its window that it posts at a time, as
/// a divisor.
const WINDOW_PART: usize = 4;

/// One end of a connection. Dropping it closes the connection; memory that the device still
/// accesses stays alive until it no longer does.
pub struct Endpoint {
    connection: Arc<Connection>,
    packet: u32,
}

impl Endpoint {
    /// Creates an endpoint that is not connected. Makes a system call of less than a millisecond.
    /// Fails outside a tokio runtime, or if the options exceed the device's limits.
    pub fn new(nic: &Arc<Nic>, options: EndpointOptions) -> Result<Endpoint, Error> {
        let runtime = Handle::try_current().map_err(|_| Error::NoRuntime)?;
        options.check(nic)?;
        let connection = Connection::new(nic, options, runtime.clone())?;
        // From here on, dropping the endpoint closes it.
        let endpoint = Endpoint { connection, packet: rand::random::<u32>() & 0xff_ffff };
        match driver::completion_events(&endpoint.connection) {
            Ok(completion_events) => drop(runtime.spawn(driver::drive(endpoint.connection.clone(), completion_events))),
            Err(_) => {
                let error = Error::last("epoll_ctl");
                endpoint.connection.destroy();
                return Err(error);
            }
        }
        Ok(endpoint)
    }

    pub fn local(&self) -> EndpointAddress {
        let nic = &self.connection.nic;
        EndpointAddress {
            path: nic.path,
            mtu: nic.port.mtu,
            port: nic.port.number,
            reads: nic.reads_accepted,
            lid: nic.port.lid,
            pair: self.connection.pair.number(),
            packet: self.packet,
        }
    }

    /// Connects to the peer's endpoint. Both sides must return from this call before either
    /// transfers anything. An endpoint connects once: a failed attempt makes it dead.
    pub async fn connect(&self, remote: &EndpointAddress) -> Result<(), Error> {
        if remote.path.link != self.connection.nic.path.link {
            return Err(Error::Invalid("the peer is on another link layer (InfiniBand or Ethernet)"));
        }
        if !self.connection.advance(&Phase::Fresh, Phase::Connecting) {
            return Err(Error::Invalid("the endpoint was connected before; create a new one"));
        }
        // The kernel may have to resolve the peer's address, which blocks.
        let (connection, packet, remote) = (self.connection.clone(), self.packet, *remote);
        let steps = blocking(move || bring_up(&connection, packet, &remote));
        let reason = match timeout(self.connection.options.connect_deadline, steps).await {
            Ok(Ok(Ok(()))) if self.connection.advance(&Phase::Connecting, Phase::Ready) => return Ok(()),
            Ok(Ok(Ok(()))) => DisconnectReason::Closed,
            Ok(Ok(Err(error))) => error.into_reason(),
            Ok(Err(_)) => DisconnectReason::Runtime,
            Err(_) => DisconnectReason::Deadline,
        };
        self.connection.retire(reason);
        Err(self.connection.error())
    }

    /// Reads the peer's bytes at `from` into `into`, which must have the same length and lie in
    /// `region`. Ends when all bytes have moved or the connection is dead. It has no time limit as
    /// long as bytes move.
    ///
    /// On an error, or if the future is dropped, the connection keeps the memory until the device
    /// is done with it.
    pub async fn read<B: DmaBufMut>(&self, into: B, region: &Arc<Region>, from: RemoteRange) -> Result<B, Error> {
        single(self.read_all(vec![(into, from)], region).await)
    }

    /// Writes `from`, which must lie in `region`, to the peer's bytes at `to`. Errors are as for
    /// [`Endpoint::read`].
    pub async fn write<B: DmaBuf>(&self, from: B, region: &Arc<Region>, to: RemoteRange) -> Result<B, Error> {
        single(self.write_all(vec![(from, to)], region).await)
    }

    /// Performs several reads as one transfer. They complete together.
    pub async fn read_all<B: DmaBufMut>(
        &self,
        parts: Vec<(B, RemoteRange)>,
        region: &Arc<Region>,
    ) -> Result<Vec<B>, Error> {
        self.transfer(Direction::Read, parts, region, &Arc::default(), pending()).await
    }

    pub async fn write_all<B: DmaBuf>(
        &self,
        parts: Vec<(B, RemoteRange)>,
        region: &Arc<Region>,
    ) -> Result<Vec<B>, Error> {
        self.transfer(Direction::Write, parts, region, &Arc::default(), pending()).await
    }

    /// Performs reads or writes as one transfer, and counts their bytes in `moved`. Once `stop`
    /// resolves, the transfer posts no more requests. It then ends with [`Error::Stopped`] when the
    /// device is done with those that it has.
    pub(crate) async fn transfer<B: DmaBuf>(
        &self,
        direction: Direction,
        parts: Vec<(B, RemoteRange)>,
        region: &Arc<Region>,
        moved: &Arc<AtomicU64>,
        stop: impl Future<Output = ()>,
    ) -> Result<Vec<B>, Error> {
        let connection = &self.connection;
        let (chunks, bytes) = self.split(&parts, region)?;
        // A long transfer is posted in batches, so that other transfers get a turn, and so that one
        // that stops is soon done with its memory.
        let window = (connection.options.transfers as usize).div_ceil(WINDOW_PART);
        let memory: Arc<Vec<B>> = Arc::new(parts.into_iter().map(|(bytes, _)| bytes).collect());
        let (done, finished) = oneshot::channel();
        let transfer = Arc::new(Transfer {
            direction,
            bytes,
            left: AtomicUsize::new(chunks.len()),
            window: Semaphore::new(window),
            moved: moved.clone(),
            done: Mutex::new(Some(done)),
            _owners: (memory.clone(), region.clone()),
        });
        let mut stop = pin!(stop);
        let mut posted = 0;
        for batch in chunks.chunks(window.div_ceil(WINDOW_PART)) {
            // Checked before taking permits: a dead connection completes nothing, so nothing would
            // return them.
            connection.ready()?;
            let room = connection.room_for(&transfer, batch.len());
            let has_room = tokio::select! {
                biased;
                has_room = room => has_room,
                () = &mut stop => break,
            };
            if !has_room {
                return Err(connection.error());
            }
            connection.post_transfer(&transfer, batch)?;
            posted += batch.len();
        }
        let unposted = chunks.len() - posted;
        // `AcqRel`, as in `finish`: the last of both sees the effects of the other.
        let is_done = unposted > 0 && transfer.left.fetch_sub(unposted, Ordering::AcqRel) == unposted;
        drop(transfer);
        // The driver retires a connection that stalls, which ends this wait.
        if !is_done {
            match finished.await {
                Ok(ended) => ended?,
                Err(_) => return Err(connection.error()),
            }
        }
        if unposted > 0 {
            return Err(Error::Stopped);
        }
        // On success the device has completed all requests and `finish` dropped the transfer: this
        // is the last owner.
        Arc::into_inner(memory).ok_or(Error::NotReleased)
    }

    /// Splits a transfer into requests. Returns them with the total of bytes.
    fn split<B: DmaBuf>(
        &self,
        parts: &[(B, RemoteRange)],
        region: &Region,
    ) -> Result<(Vec<(Local, Remote)>, usize), Error> {
        let connection = &self.connection;
        // Relaxed: an older value only chooses another length.
        let is_fast = connection.is_fast.load(Ordering::Relaxed);
        let link_max = if is_fast { u32::MAX } else { SLOW_CHUNK_BYTES };
        let chunk_bytes = connection.options.chunk_bytes.min(connection.nic.port.message_bytes_max).min(link_max);
        let (mut chunks, mut bytes) = (Vec::new(), 0);
        for (local, remote) in parts {
            let span = local.span();
            region.check(&connection.nic, span)?;
            if span.len() as u64 != remote.len {
                return Err(Error::Invalid("local and remote range differ in length"));
            }
            region.split(span, Remote { address: remote.address, key: remote.key }, chunk_bytes, &mut chunks);
            bytes += span.len();
        }
        match chunks.is_empty() {
            true => Err(Error::Invalid("the transfer is empty")),
            false => Ok((chunks, bytes)),
        }
    }

    /// Grants the peer read access to `bytes`, which must lie in `region`, and to nothing else.
    /// Resolves when the key is usable. Fails with [`Error::TooManyGrants`] at the limit of the
    /// options.
    pub async fn grant_read<B: DmaBuf>(&self, bytes: B, region: &Arc<Region>) -> Result<RemoteGrant<B>, Error> {
        self.open(bytes, region, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ).await
    }

    /// Grants the peer write access to `bytes`, which must lie in `region`, without read access.
    pub async fn grant_write<B: DmaBufMut>(&self, bytes: B, region: &Arc<Region>) -> Result<RemoteGrant<B>, Error> {
        self.open(bytes, region, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE).await
    }

    async fn open<B: DmaBuf>(
        &self,
        bytes: B,
        region: &Arc<Region>,
        access: ffi::ibv_access_flags,
    ) -> Result<RemoteGrant<B>, Error> {
        let connection = &self.connection;
        connection.ready()?;
        let span = bytes.span();
        region.check(&connection.nic, span)?;
        let owner = Arc::new(bytes);
        let piece = region.registration_of(span).filter(|_| connection.nic.grant_kind == GrantKind::MemoryWindow);
        let Some(registration) = piece else {
            let (connection, region) = (connection.clone(), region.clone());
            let adopt = move || {
                // Verbs require local write access of a registration that allows remote writes.
                let access = match access {
                    ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE => {
                        access | ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                    }
                    access => access,
                };
                // SAFETY: `owner` and `region` keep the memory, and the connection keeps both until
                // the registration has ended.
                let registration = unsafe { Registration::new(region.nic_domain(), span, access) }?;
                let (number, remote) = connection.adopt(registration, region, owner.clone())?;
                Ok(RemoteGrant::new(&connection, number, owner, remote))
            };
            return blocking(adopt).await.map_err(|_| Error::NoRuntime)?;
        };
        let deadline = Instant::now() + connection.options.stall_timeout;
        let (number, remote, open) = connection.bind(region, registration, span, access, owner.clone())?;
        // From here on, dropping the grant revokes it.
        let grant = RemoteGrant::new(connection, number, owner, remote);
        match timeout_at(deadline, open).await {
            Ok(Ok(Ok(()))) => Ok(grant),
            Ok(Ok(Err(reason))) => Err(reason.into()),
            Ok(Err(_)) => Err(connection.error()),
            Err(_) => {
                connection.retire(DisconnectReason::Deadline);
                Err(connection.error())
            }
        }
    }

    /// Returns `true` if the connection can never transfer again. The death of a peer is noticed at
    /// the next transfer.
    pub fn is_dead(&self) -> bool {
        self.disconnect_reason().is_some()
    }

    pub fn disconnect_reason(&self) -> Option<DisconnectReason> {
        match self.connection.phase() {
            Phase::Dead(reason) => Some(reason),
            _ => None,
        }
    }

    /// Waits until the connection is dead and the device has released all memory. Returns `false`
    /// if the device does not release it.
    pub async fn ended(&self) -> bool {
        self.connection.ended().await
    }

    pub fn nic(&self) -> &Arc<Nic> {
        &self.connection.nic
    }

    /// Closes the connection and waits until the device has released all memory. Returns `false` if
    /// it has not by `deadline`.
    pub async fn close(self, deadline: Duration) -> bool {
        let connection = self.connection.clone();
        drop(self);
        timeout(deadline, connection.ended()).await.unwrap_or(false)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.connection.retire(DisconnectReason::Closed);
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let phase = self.connection.phase();
        f.debug_struct("Endpoint")
            .field("nic", &self.connection.nic.name())
            .field("local", &self.local())
            .field("phase", &phase)
            .finish()
    }
}

pub(crate) fn single<B>(parts: Result<Vec<B>, Error>) -> Result<B, Error> {
    parts?.pop().ok_or(Error::NotReleased)
}

/// Takes the queue pair through its states: INIT names the port, RTR the peer to receive from, RTS
/// allows sending.
fn bring_up(connection: &Connection, packet: u32, remote: &EndpointAddress) -> Result<(), Error> {
    use ffi::ibv_qp_attr_mask as Mask;
    let nic = &connection.nic;
    let access = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    let to_init = ffi::ibv_qp_attr {
        qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
        port_num: nic.port.number,
        qp_access_flags: access.0,
        ..Default::default()
    };
    connection.pair.modify(to_init, Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS)?;

    let mut to_rtr = ffi::ibv_qp_attr {
        qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
        path_mtu: u32::from(nic.port.mtu.min(remote.mtu)),
        dest_qp_num: remote.pair,
        rq_psn: remote.packet,
        max_dest_rd_atomic: nic.reads_accepted,
        // Code 12 is 0.64 ms. This crate posts no receives, but the state transition requires a
        // value.
        min_rnr_timer: 12,
        ..Default::default()
    };
    let way = &mut to_rtr.ah_attr;
    (way.port_num, way.dlid) = (nic.port.number, remote.lid);
    // InfiniBand routes by LID within a subnet. Paths into other subnets are never chosen, so no
    // global route is needed.
    if nic.path.link == LinkLayer::Ethernet {
        way.is_global = 1;
        way.grh = ffi::ibv_global_route {
            dgid: ffi::ibv_gid { raw: remote.path.gid.0 },
            sgid_index: nic.gid_index,
            hop_limit: 64,
            ..Default::default()
        };
    }
    let mask = Mask::IBV_QP_AV
        | Mask::IBV_QP_PATH_MTU
        | Mask::IBV_QP_DEST_QPN
        | Mask::IBV_QP_RQ_PSN
        | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | Mask::IBV_QP_MIN_RNR_TIMER;
    connection.pair.modify(to_rtr, mask)?;

    let to_rts = ffi::ibv_qp_attr {
        qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
        timeout: connection.options.retry_exponent,
        retry_cnt: connection.options.retries,
        rnr_retry: connection.options.retries,
        sq_psn: packet,
        max_rd_atomic: nic.reads_initiated.min(remote.reads.max(1)),
        ..Default::default()
    };
    let mask = Mask::IBV_QP_TIMEOUT
        | Mask::IBV_QP_RETRY_CNT
        | Mask::IBV_QP_RNR_RETRY
        | Mask::IBV_QP_SQ_PSN
        | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
    connection.pair.modify(to_rts, mask)
}
