//! One end of a connection.
//!
//! Always true: a call that takes memory gives it back, or it stays with the connection until the device is done with it.

use crate::address::{EndpointAddress, RemoteRange};
use crate::apart;
use crate::driver;
use crate::error::{Death, Error};
use crate::link::{Direction, Link, Phase, Transfer};
use crate::memory::{Bytes, BytesMut};
use crate::nic::{Nic, WindowKind};
use crate::path::LinkLayer;
use crate::region::Region;
use crate::verbs::{Registration, Remote};
use crate::window::Window;
use ibverbs_sys as ffi;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

/// How an endpoint behaves.
#[derive(Debug, Clone)]
pub struct EndpointOptions {
    /// Most requests of transfers that are with the device at a time.
    pub transfers: u32,
    /// Most windows that are open at a time.
    pub windows: u32,
    /// Longest request: longer transfers are cut. The port's own limit holds too.
    pub chunk_bytes: u32,
    /// How long a transfer, or the opening or withdrawing of a window, may take. A connection on which one takes longer is dead.
    pub deadline: Duration,
    /// How long connecting may take.
    pub connect_deadline: Duration,
    /// How long to look for completions before sleeping until one is announced. Costs a core, saves some microseconds.
    pub spin: Duration,
    /// How long the device waits for a word of the peer before it asks again: 4.096 µs × 2^n, n in 1..=31. Longer than the peer
    /// ever takes: a request that is repeated needlessly may arrive when its window is withdrawn already, and kills the connection.
    pub retry_exponent: u8,
    /// How often it asks again before it gives the connection up, 0..=7. To some devices 7 means without end; then the deadline
    /// ends it.
    pub retries: u8,
}

impl Default for EndpointOptions {
    fn default() -> EndpointOptions {
        EndpointOptions {
            transfers: 64,
            windows: 256,
            chunk_bytes: 1 << 20,
            deadline: Duration::from_secs(5),
            connect_deadline: Duration::from_secs(5),
            spin: Duration::ZERO,
            retry_exponent: 16,
            retries: 6,
        }
    }
}

impl EndpointOptions {
    /// Requests that the queue pair must hold: a window can be bound and withdrawn before the first is done.
    pub(crate) fn requests(&self) -> u32 {
        self.transfers.saturating_add(self.windows.saturating_mul(2))
    }

    fn check(&self, nic: &Nic) -> Result<(), Error> {
        match () {
            () if self.transfers == 0 || self.chunk_bytes == 0 => Err(Error::Invalid("no requests, or empty ones")),
            () if self.requests() > nic.requests_max => Err(Error::Invalid("the device cannot hold so many requests")),
            () if !(1..=31).contains(&self.retry_exponent) => Err(Error::Invalid("the exponent of retries is 1..=31")),
            () if self.retries > 7 => Err(Error::Invalid("at most 7 retries")),
            () => Ok(()),
        }
    }
}

/// One end of a connection. It is closed on drop; what a device still touches then stays alive until it does not.
pub struct Endpoint {
    link: Arc<Link>,
    packet: u32,
}

impl Endpoint {
    /// An endpoint that is not connected. A call into the kernel of less than a millisecond.
    pub fn new(nic: &Arc<Nic>, options: EndpointOptions) -> Result<Endpoint, Error> {
        let runtime = Handle::try_current().map_err(|_| Error::NoRuntime)?;
        options.check(nic)?;
        let link = Link::new(nic, options, runtime.clone())?;
        // Dropped from here on, it is closed.
        let endpoint = Endpoint { link, packet: rand::random::<u32>() & 0xff_ffff };
        match driver::announcements(&endpoint.link) {
            Ok(announcements) => drop(runtime.spawn(driver::drive(endpoint.link.clone(), announcements))),
            Err(_) => {
                let error = Error::last("epoll_ctl");
                endpoint.link.destroy();
                return Err(error);
            }
        }
        Ok(endpoint)
    }

    /// What the peer needs to connect to it.
    pub fn local(&self) -> EndpointAddress {
        let nic = &self.link.nic;
        EndpointAddress {
            path: nic.path,
            mtu: nic.port.mtu,
            port: nic.port.number,
            reads: nic.reads_answered,
            lid: nic.port.lid,
            pair: self.link.pair.number(),
            packet: self.packet,
        }
    }

    /// Connects it to the endpoint that said this of itself. Both sides must do this before either transfers anything. Once only: an
    /// endpoint that could not be connected is dead.
    pub async fn connect(&self, remote: &EndpointAddress) -> Result<(), Error> {
        if remote.path.link != self.link.nic.path.link {
            return Err(Error::Invalid("the peer is on another kind of network"));
        }
        if !self.link.advance(&Phase::Fresh, Phase::Connecting) {
            return Err(Error::Invalid("an endpoint is connected once"));
        }
        // The kernel may have to ask the network where the peer is.
        let (link, packet, remote) = (self.link.clone(), self.packet, *remote);
        let steps = apart(move || introduce(&link, packet, &remote));
        let death = match timeout(self.link.options.connect_deadline, steps).await {
            Ok(Ok(Ok(()))) if self.link.advance(&Phase::Connecting, Phase::Ready) => return Ok(()),
            Ok(Ok(Ok(()))) => Death::Closed,
            Ok(Ok(Err(error))) => error.into_death(),
            Ok(Err(_)) => Death::Runtime,
            Err(_) => Death::Deadline,
        };
        self.link.condemn(death);
        Err(self.link.why())
    }

    /// Reads the peer's bytes at `from` into `into`, which lie in `region` and are as many. If it answers an error, the memory stays
    /// with the connection until the device is done with it; the same if the future is dropped.
    pub async fn read<B: BytesMut>(&self, into: B, region: &Arc<Region>, from: RemoteRange) -> Result<B, Error> {
        single(self.read_all(vec![(into, from)], region).await)
    }

    /// Writes `from`, which lies in `region`, to the peer's bytes at `to`, as [`Endpoint::read`] reads.
    pub async fn write<B: Bytes>(&self, from: B, region: &Arc<Region>, to: RemoteRange) -> Result<B, Error> {
        single(self.write_all(vec![(from, to)], region).await)
    }

    /// Many reads as one: they go to the device together, and the answer comes when the last is done.
    pub async fn read_all<B: BytesMut>(
        &self,
        parts: Vec<(B, RemoteRange)>,
        region: &Arc<Region>,
    ) -> Result<Vec<B>, Error> {
        self.transfer(Direction::Read, parts, region).await
    }

    /// Many writes as one.
    pub async fn write_all<B: Bytes>(
        &self,
        parts: Vec<(B, RemoteRange)>,
        region: &Arc<Region>,
    ) -> Result<Vec<B>, Error> {
        self.transfer(Direction::Write, parts, region).await
    }

    async fn transfer<B: Bytes>(
        &self,
        direction: Direction,
        parts: Vec<(B, RemoteRange)>,
        region: &Arc<Region>,
    ) -> Result<Vec<B>, Error> {
        let link = &self.link;
        let deadline = Instant::now() + link.options.deadline;
        let chunk_bytes = link.options.chunk_bytes.min(link.nic.port.message_bytes_max);
        let (mut chunks, mut bytes) = (Vec::new(), 0);
        for (local, remote) in &parts {
            let span = local.span();
            region.check(&link.nic, span)?;
            if span.len() as u64 != remote.len {
                return Err(Error::Invalid("as many bytes here as there"));
            }
            region.cut(span, Remote { address: remote.address, key: remote.key }, chunk_bytes, &mut chunks);
            bytes += span.len();
        }
        if chunks.is_empty() {
            return Err(Error::Invalid("no bytes to transfer"));
        }
        let memory: Arc<Vec<B>> = Arc::new(parts.into_iter().map(|(bytes, _)| bytes).collect());
        let (done, finished) = oneshot::channel();
        let transfer = Arc::new(Transfer {
            direction,
            bytes,
            left: AtomicUsize::new(chunks.len()),
            done: Mutex::new(Some(done)),
            _keeps: (memory.clone(), region.clone()),
        });
        // A long transfer goes out in several batches, so that it does not wait for the queue to be empty, and others get a turn.
        let batch = (link.options.transfers as usize).div_ceil(4);
        for batch in chunks.chunks(batch) {
            // Whoever is not connected takes no permits, as nobody would give them back.
            link.ready()?;
            match timeout_at(deadline, link.permits.acquire_many(batch.len() as u32)).await {
                Ok(Ok(permits)) => permits.forget(),
                Ok(Err(_)) => return Err(link.why()),
                Err(_) => return Err(Error::Busy),
            }
            link.post_transfer(&transfer, batch, deadline)?;
        }
        drop(transfer);
        match timeout_at(deadline, finished).await {
            Ok(Ok(Ok(()))) => Arc::into_inner(memory).ok_or(Error::Stuck),
            Ok(Ok(Err(death))) => Err(death.into()),
            Ok(Err(_)) => Err(link.why()),
            Err(_) => {
                link.condemn(Death::Deadline);
                Err(link.why())
            }
        }
    }

    /// Opens a window through which the peer may read `bytes`, and nothing else. They lie in `region`.
    pub async fn readable<B: Bytes>(&self, bytes: B, region: &Arc<Region>) -> Result<Window<B>, Error> {
        self.open(bytes, region, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ).await
    }

    /// Opens a window through which the peer may write `bytes`, and not read them. They lie in `region`.
    pub async fn writable<B: BytesMut>(&self, bytes: B, region: &Arc<Region>) -> Result<Window<B>, Error> {
        self.open(bytes, region, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE).await
    }

    async fn open<B: Bytes>(
        &self,
        bytes: B,
        region: &Arc<Region>,
        access: ffi::ibv_access_flags,
    ) -> Result<Window<B>, Error> {
        let link = &self.link;
        link.ready()?;
        let span = bytes.span();
        region.check(&link.nic, span)?;
        let hold = Arc::new(bytes);
        let piece = region.piece(span).filter(|_| link.nic.windows == WindowKind::Type2);
        let Some(registration) = piece else {
            let (link, region) = (link.clone(), region.clone());
            let adopt = move || {
                // Who may write from afar must be able to write from here, says the device.
                let access = match access {
                    ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE => {
                        access | ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                    }
                    access => access,
                };
                // SAFETY: `hold` and `region` keep the memory, and the table keeps both until the registration has ended.
                let registration = unsafe { Registration::new(region.nic_domain(), span, access) }?;
                let (number, remote) = link.adopt(registration, region, hold.clone())?;
                Ok(Window::new(&link, number, hold, remote))
            };
            return apart(adopt).await.map_err(|_| Error::NoRuntime)?;
        };
        let deadline = Instant::now() + link.options.deadline;
        let (number, remote, open) = link.bind(region, registration, span, access, hold.clone(), deadline)?;
        // Dropped from here on, it is withdrawn.
        let window = Window::new(link, number, hold, remote);
        match timeout_at(deadline, open).await {
            Ok(Ok(Ok(()))) => Ok(window),
            Ok(Ok(Err(death))) => Err(death.into()),
            Ok(Err(_)) => Err(link.why()),
            Err(_) => {
                link.condemn(Death::Deadline);
                Err(link.why())
            }
        }
    }

    /// Whether it can never transfer anything again. A peer that is gone is noticed when something is asked of it.
    pub fn is_dead(&self) -> bool {
        self.death().is_some()
    }

    /// Why it is dead.
    pub fn death(&self) -> Option<Death> {
        match self.link.phase() {
            Phase::Dead(death) => Some(death),
            _ => None,
        }
    }

    /// Waits until it is dead and the device has let go of all memory; `false` if the device does not let go of it.
    pub async fn ended(&self) -> bool {
        self.link.ended().await
    }

    /// The device it is on.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.link.nic
    }

    /// Closes it, and waits until the device has let go of all memory; `false` if it has not by `deadline`.
    pub async fn close(self, deadline: Duration) -> bool {
        let link = self.link.clone();
        drop(self);
        timeout(deadline, link.ended()).await.unwrap_or(false)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.link.condemn(Death::Closed);
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let phase = self.link.phase();
        f.debug_struct("Endpoint")
            .field("nic", &self.link.nic.name())
            .field("local", &self.local())
            .field("phase", &phase)
            .finish()
    }
}

fn single<B>(parts: Result<Vec<B>, Error>) -> Result<B, Error> {
    parts?.pop().ok_or(Error::Stuck)
}

/// Takes the queue pair through its states: it knows its port, then whom it hears, then that it may speak.
fn introduce(link: &Link, packet: u32, remote: &EndpointAddress) -> Result<(), Error> {
    use ffi::ibv_qp_attr_mask as Mask;
    let nic = &link.nic;
    let access = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    let init = ffi::ibv_qp_attr {
        qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
        port_num: nic.port.number,
        qp_access_flags: access.0,
        ..Default::default()
    };
    link.pair.modify(init, Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS)?;

    let mut hear = ffi::ibv_qp_attr {
        qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
        path_mtu: u32::from(nic.port.mtu.min(remote.mtu)),
        dest_qp_num: remote.pair,
        rq_psn: remote.packet,
        max_dest_rd_atomic: nic.reads_answered,
        // 0.64 ms; there are no receives to wait for, but the state wants it.
        min_rnr_timer: 12,
        ..Default::default()
    };
    let way = &mut hear.ah_attr;
    (way.port_num, way.dlid) = (nic.port.number, remote.lid);
    // On InfiniBand the LID leads through the subnet, and paths in other subnets are not chosen.
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
    link.pair.modify(hear, mask)?;

    let speak = ffi::ibv_qp_attr {
        qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
        timeout: link.options.retry_exponent,
        retry_cnt: link.options.retries,
        rnr_retry: link.options.retries,
        sq_psn: packet,
        max_rd_atomic: nic.reads_asked.min(remote.reads.max(1)),
        ..Default::default()
    };
    let mask = Mask::IBV_QP_TIMEOUT
        | Mask::IBV_QP_RETRY_CNT
        | Mask::IBV_QP_RNR_RETRY
        | Mask::IBV_QP_SQ_PSN
        | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
    link.pair.modify(speak, mask)
}
