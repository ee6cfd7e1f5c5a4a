//! One client connection, over TCP or a local socket.
//!
//! One task reads requests. It answers short ones at once, receives parts straight into their
//! page's memory, and spawns a task for each request that may wait. A second task writes. Two
//! bounded queues feed it: control frames, and page bytes behind them.
//!
//! Invariants:
//! - A client that does not read delays only itself: both queues and the read window are its own.
//! - Every byte in flight is charged to the connection's [`Account`]. The node refuses at once a
//!   request that exceeds a bound.
//! - When the connection ends, its tasks end and its open puts are aborted. Pages that the client
//!   reads in place stay held until its process unmaps the arena.
//!
//! | module | contents |
//! | --- | --- |
//! | `handshake` | the first message |
//! | `refusal` | connections beyond a limit |
//! | `requests` | receive, admit and dispatch requests |
//! | `arriving` | bodies that stall while others need their memory |
//! | `open_puts`, `parts` | puts of this connection; receiving their parts |
//! | `get`, `follow`, `lookup` | reads |
//! | `extents` | reads of L3 by clients of this machine |
//! | `holdings` | pages held for this client |
//! | `rdma` | its RDMA channels and grants |
//! | `page_admin` | warm, forget, pin, suspect, compare, explain |
//! | `outbox`, `busy` | answers; busy answers |
//! | `tasks` | tasks of waiting requests |
//! | `turn` | lookups after which other connections go first |
//! | `socket` | fair sharing of socket work between connections |

mod arriving;
mod busy;
mod extents;
mod follow;
mod get;
mod handshake;
mod holdings;
mod lookup;
mod open_puts;
mod outbox;
mod page_admin;
mod page_request;
mod parts;
mod rdma;
mod refusal;
mod requests;
mod socket;
mod tasks;
mod turn;

use crate::budget::{Account, Charge};
use crate::members::MemberOwner;
use crate::places::{Peer, Place};
use crate::state::NodeState;
use crate::tiers::NamespaceUser;
pub(crate) use arriving::ArrivingBodies;
pub(crate) use extents::ExtentLimits;
use extents::ExtentSession;
use handshake::Stranger;
use holdings::{Holdings, InPlaceHolds};
use larder_format::NamespaceId;
use larder_format::codec::DecodeError;
use larder_memory::share::{ArenaSession, PeerMemory, PeerMemoryFile};
use larder_runtime::{fail_point, now};
use larder_wire::{BusyPollSource, ByteSink, ByteSource, FrameQueue, FrameReader, FrameWriter};
use open_puts::OpenPuts;
use outbox::Outbox;
use parts::SharedParts;
use rdma::ClientChannels;
pub(crate) use refusal::{
    ConnectionLimit, REFUSALS_MAX, Refusals, record as record_refusal, record_failed_accept, refuse_tcp,
};
pub(crate) use socket::{BulkScheduler, ScheduledSink, ScheduledSource};
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tasks::RequestTasks;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;
use turn::Turn;

/// Silence after which the kernel probes a client. With the interval and the retries below, a
/// client that lost power is disconnected after a minute.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;
/// Maximum time to send queued answers after the client closed its sending side.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// State of one connection, owned by the task that reads its requests. Tasks of waiting requests
/// get clones of the parts that they need.
struct Connection {
    node: Arc<NodeState>,
    account: Arc<Account>,
    peer: Arc<str>,
    outbox: Outbox,
    /// `None` for a client that only manages members or asks for the status.
    namespace: Option<Namespace>,
    /// Keeps the floor of the namespace.
    _user: Option<NamespaceUser>,
    puts: OpenPuts,
    /// Owner of the members that this connection registers.
    member: MemberOwner,
    shared_parts: SharedParts,
    holdings: Holdings,
    rdma: Arc<ClientChannels>,
    /// `None` without an arena session.
    extents: Option<Arc<ExtentSession>>,
    tasks: RequestTasks,
    turn: Turn,
    received_at: Instant,
    /// `None` in a simulation, which admits all its clients.
    place: Option<Arc<Place>>,
    /// Charge of the current request, until a task takes it over.
    charge: Option<Charge>,
}

struct Namespace {
    id: NamespaceId,
    /// Length of each part of a page, in bytes.
    part_table: Vec<u32>,
    /// Maximum number of token ids of a page. Only the engine knows the tokens of an opaque page.
    token_ids_max: usize,
}

impl Connection {
    /// Serves the client until it disconnects, violates the protocol, or is disconnected.
    async fn run<S: ByteSource, W: ByteSink>(
        self,
        mut reader: FrameReader<S>,
        writer: FrameWriter<W>,
        queue: FrameQueue,
    ) -> io::Result<()> {
        let account = self.account.clone();
        let peer = self.peer.clone();
        let node = self.node.clone();
        // Aborted on drop: a connection that is cancelled must not leave its writer behind.
        let mut writer = AbortOnDropHandle::new(tokio::spawn(writer.send_all(queue, node.stall_timeout())));
        if self.namespace.is_some() {
            self.outbox.open_window(self.node.store.options().connection_read_window_bytes(self.page_bytes()));
        }
        let ended = tokio::select! {
            // Biased: a disconnect must not lose against a client that requests all the time.
            biased;
            () = account.disconnect_requested() => None,
            ended = self.serve(&mut reader) => Some(ended),
        };
        let Some(ended) = ended else {
            // Queued frames are not flushed: they are the memory that others wait for.
            if let Some(clients) = node.refusals.stalled_readers.record() {
                tracing::warn!(%peer, clients, "disconnected clients that received nothing for 1 s while others waited");
            }
            return Ok(());
        };
        // The connection and its tasks are gone, and with them the senders of the queue. Frames
        // that are queued already may still leave.
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, &mut writer).await;
        ended
    }

    fn page_bytes(&self) -> u64 {
        let part_table = self.namespace.as_ref().map_or(&[][..], |namespace| &namespace.part_table);
        part_table.iter().map(|&bytes| u64::from(bytes)).sum()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Tasks first: a commit that still runs must not find its puts aborted halfway.
        self.tasks.abort_all();
        self.node.members.end(self.member);
        if !fail_point!("node.puts-outlive-connection") {
            self.puts.abort_all(&self.node);
        }
    }
}

/// Serves one client over TCP until it disconnects or violates the protocol. Dropping the future
/// ends the connection with its tasks, and aborts its open puts.
pub(crate) async fn serve_tcp(node: Arc<NodeState>, stream: TcpStream, place: Arc<Place>) {
    let peer = prepare_tcp(&stream).map_or_else(|| "unknown address".to_string(), |address| address.to_string());
    let (read, write) = stream.into_split();
    let read = BusyPollSource::new(read, node.busy_poll);
    run(node, peer, (read, write), None, LocalClient::default(), Some(place)).await;
}

/// Sets the options of a client's socket, and returns the client's address.
pub(crate) fn prepare_tcp(stream: &TcpStream) -> Option<SocketAddr> {
    let peer = stream.peer_addr().ok();
    if let Err(error) = larder_wire::prepare_socket(stream) {
        tracing::debug!(?peer, %error, "cannot set TCP_NODELAY: answers to this client may be delayed");
    }
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL).with_retries(KEEPALIVE_RETRIES);
    if let Err(error) = SockRef::from(stream).set_tcp_keepalive(&keepalive) {
        tracing::debug!(?peer, %error, "cannot set TCP keepalive: a dead client is noticed late");
    }
    peer
}

pub(crate) async fn serve<R: ByteSource, W: ByteSink>(node: Arc<NodeState>, peer: String, read: R, write: W) {
    run(node, peer, (read, write), None, LocalClient::default(), None).await;
}

/// Serves a process of the same machine. Pages that it reads in place stay held until it releases
/// them or unmaps the arena, however the connection ends.
pub(crate) async fn serve_local(node: Arc<NodeState>, stream: UnixStream, arena: Arc<SharedArena>, place: Arc<Place>) {
    // Without a permit the client falls back to TCP.
    let Ok(permit) = arena.sessions.clone().try_acquire_owned() else { return };
    let peer = "local client".to_string();
    let handshake = async {
        let session = ArenaSession::start(&stream, arena.file.as_fd(), arena.bytes).await?;
        io::Result::Ok((Arc::new(session), PeerMemoryFile::receive(&stream).await?))
    };
    let (session, peer_memory) = match tokio::time::timeout(node.handshake_timeout(), handshake).await {
        Ok(Ok(started)) => started,
        Ok(Err(error)) => {
            return tracing::warn!(%error, "shared memory refused to a local process; it can connect over TCP");
        }
        Err(_) => return,
    };
    let (read, write) = stream.into_split();
    // The process may map the arena for long after its connection has ended.
    let descriptor = place.keep_descriptors(1);
    let ended = session.clone();
    let session_end = async move {
        ended.ended().await;
        drop((permit, descriptor));
    };
    let memory = peer_memory.map(|memory| Arc::new(memory) as Arc<dyn PeerMemory>);
    let client = LocalClient { memory, session: Some(session) };
    serve_in_place(node, peer, (read, write), client, session_end, Some(place)).await;
}

/// Means that a process of the same machine shares with the node. The default has none.
#[derive(Default)]
pub(crate) struct LocalClient {
    /// Memory from which parts of puts are copied.
    pub(crate) memory: Option<Arc<dyn PeerMemory>>,
    /// Session over which the node sends files.
    pub(crate) session: Option<Arc<ArenaSession>>,
}

/// Serves one client that reads pages in place until `session_end` resolves.
pub(crate) async fn serve_in_place<R: ByteSource, W: ByteSink>(
    node: Arc<NodeState>,
    peer: String,
    streams: (R, W),
    client: LocalClient,
    session_end: impl Future<Output = ()> + Send + 'static,
    place: Option<Arc<Place>>,
) {
    let holds = Arc::<InPlaceHolds>::default();
    let until_session_end = Arc::clone(&holds);
    // A detached task, so that a shutdown does not wait for it: that process may run for days.
    tokio::spawn(async move {
        session_end.await;
        drop(until_session_end);
    });
    run(node, peer, streams, Some(holds.clone()), client, place).await;
    if fail_point!("node.holds-end-with-connection") {
        holds.clear();
    }
}

pub(crate) struct SharedArena {
    /// Read-only: only the node writes to its arena.
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    /// One permit per process that may still map the arena.
    pub(crate) sessions: Arc<Semaphore>,
}

async fn run<R: ByteSource, W: ByteSink>(
    node: Arc<NodeState>,
    peer: String,
    (read, write): (R, W),
    in_place: Option<Arc<InPlaceHolds>>,
    client: LocalClient,
    place: Option<Arc<Place>>,
) {
    let account = node.store.budget().open();
    let (write, uncongested_since) = ScheduledSink::new(write, node.bulk_scheduler.clone(), account.clone());
    let mut writer = FrameWriter::new(write);
    let Some(account) = account else {
        node.end_stalled_bodies(None);
        if let Some(_permit) = refusal::record(&node, &peer, ConnectionLimit::Memory) {
            refusal::answer(ConnectionLimit::Memory, read, &mut writer).await;
        }
        return;
    };
    let mut reader = FrameReader::new(ScheduledSource::new(read, node.bulk_scheduler.clone()));
    let stranger = Stranger { node: &node, account: &account, peer: &peer, place: place.as_deref() };
    let ended = match stranger.handshake(&mut reader, &mut writer).await {
        Ok(Some(greeting)) => {
            let (mut outbox, queue) = Outbox::new(account.clone(), uncongested_since);
            outbox.set_version(greeting.version);
            let connection = Connection {
                node: node.clone(),
                account,
                peer: peer.as_str().into(),
                outbox,
                namespace: greeting.namespace,
                _user: greeting.user,
                puts: OpenPuts::default(),
                member: node.members.owner(peer.parse::<SocketAddr>().map_or(Peer::Local, Peer::of)),
                shared_parts: SharedParts::new(client.memory),
                holdings: Holdings::new(in_place),
                rdma: Arc::default(),
                extents: client.session.map(ExtentSession::new),
                tasks: RequestTasks::new(),
                turn: Turn::default(),
                received_at: now(),
                place,
                charge: None,
            };
            // Boxed: a connection that serves has several times the state of a stranger.
            Box::pin(connection.run(reader, writer, queue)).await
        }
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    match ended {
        Ok(()) => tracing::debug!(%peer, "client disconnected"),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            node.metrics.connections_rejected.inc();
            if let Some(connections) = node.refusals.protocol_errors.record() {
                tracing::warn!(
                    %peer, connections, %error,
                    "connections closed after protocol errors; check that these are Larder clients"
                );
            }
        }
        Err(error) => tracing::debug!(%peer, %error, "connection lost"),
    }
}

fn protocol_error(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn timed_out(_: tokio::time::error::Elapsed) -> io::Error {
    io::ErrorKind::TimedOut.into()
}
