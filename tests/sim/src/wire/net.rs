//! Network of a seed: addresses of nodes, and connections to them.
//!
//! Invariant: no connection to a stopped node carries data.

use super::transport::{ConnectionEnd, FakeConnection, FakeSink, FakeSource, NetworkFaults};
use crate::random::{RandomSource, Stream};
use crate::rdma::{self, FaultPause};
use crate::world::World;
use larder_client::FabricOptions;
use larder_client::sim::{Connector, Devices};
use larder_memory::Arena;
use larder_memory::share::{ArenaMap, PeerMemory, SharedMemory};
use larder_node::sim::Server;
use larder_runtime::lock::Mutex;
use larder_wire::ArenaListenerInfo;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{OnceCell, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

pub(super) struct NodeEndpoint {
    pub(super) server: Server,
    pub(super) arena: Arc<Arena>,
    up_since: Instant,
    connections: Vec<Weak<FakeConnection>>,
    tasks: Vec<AbortHandle>,
}

pub(super) struct Network {
    world: Arc<World>,
    pub(super) faults: Arc<Mutex<NetworkFaults>>,
    random: Mutex<RandomSource>,
    hosts: Mutex<BTreeMap<String, NodeEndpoint>>,
    connections: Mutex<u64>,
}

/// Keeps the arena of a node alive while a client maps it. Dropping it tells the node that the
/// client is gone.
struct ArenaHold {
    _arena: Arc<Arena>,
    _held: oneshot::Sender<()>,
}

impl Network {
    pub(super) fn new(world: Arc<World>, faults: NetworkFaults) -> Network {
        let random = Mutex::new(RandomSource::new(world.seed, Stream::Network));
        Network {
            world,
            faults: Arc::new(Mutex::new(faults)),
            random,
            hosts: Mutex::default(),
            connections: Mutex::new(0),
        }
    }

    pub(super) fn up(&self, address: &str, server: Server, arena: Arc<Arena>) {
        let up_since = Instant::now();
        let endpoint = NodeEndpoint { server, arena, up_since, connections: Vec::new(), tasks: Vec::new() };
        self.hosts.lock().insert(address.into(), endpoint);
    }

    /// Removes a node. Its clients notice at once, or after a minute if `silent`, as when a machine
    /// loses power. Ends the tasks of its connections.
    pub(super) fn down(&self, address: &str, silent: bool) {
        let Some(endpoint) = self.hosts.lock().remove(address) else { return };
        endpoint
            .connections
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|_| silent)
            .for_each(|connection| connection.cut(true));
        endpoint.tasks.iter().for_each(AbortHandle::abort);
    }

    pub(super) fn host(&self, address: &str) -> Option<(Server, Arc<Arena>)> {
        self.hosts.lock().get(address).map(|endpoint| (endpoint.server.clone(), endpoint.arena.clone()))
    }

    /// Time since the node started. `None` if it does not run.
    pub(super) fn up_for(&self, address: &str) -> Option<Duration> {
        self.hosts.lock().get(address).map(|endpoint| endpoint.up_since.elapsed())
    }

    pub(super) fn break_one_connection(&self, address: &str, random: &mut RandomSource) {
        let hosts = self.hosts.lock();
        let Some(endpoint) = hosts.get(address) else { return };
        let connections: Vec<Arc<FakeConnection>> = endpoint.connections.iter().filter_map(Weak::upgrade).collect();
        drop(hosts);
        if connections.is_empty() {
            return;
        }
        let which = random.below(connections.len() as u64);
        self.world.fault("connection broken", [which, connections.len() as u64, 0]);
        connections[which as usize].cut(random.chance(200_000));
    }

    /// Number of connections that were ever opened.
    pub(super) fn connections(&self) -> u64 {
        *self.connections.lock()
    }

    /// Opens a connection. `inside` is set for a shared-memory session, and holds the client's
    /// shared memory if it has some.
    async fn dial(
        &self,
        address: &str,
        inside: Option<Option<&Arc<SharedMemory>>>,
    ) -> io::Result<(ConnectionEnd, Option<Arc<ArenaMap>>)> {
        let in_place = inside.is_some();
        let (delay, refused) = {
            let faults = *self.faults.lock();
            let mut random = self.random.lock();
            (random.between(0, faults.latency_ms_max), random.chance(faults.refuse))
        };
        // Look the node up after the delay: it may have stopped or restarted in the meantime.
        sleep(Duration::from_millis(delay)).await;
        let mut hosts = self.hosts.lock();
        let Some(endpoint) = hosts.get_mut(address).filter(|_| !refused) else {
            self.world.count("connections refused", 1);
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        let number = {
            let mut connections = self.connections.lock();
            *connections += 1;
            *connections
        };
        self.world.event("connection", [number, in_place.into(), 0]);
        self.world.count(if in_place { "shared-memory connections" } else { "connections" }, 1);
        let (connection, near, (read, write)) = FakeConnection::new(self.world.clone(), self.faults.clone(), number);
        endpoint.connections.retain(|connection| connection.strong_count() > 0);
        endpoint.connections.push(Arc::downgrade(&connection));
        endpoint.tasks.retain(|task| !task.is_finished());
        let mut arena_map = None;
        let serve = if let Some(memory) = inside {
            let peer_memory = memory.map(|memory| self.peer_memory(memory, number)).transpose()?;
            let (held, over) = oneshot::channel();
            arena_map = Some(map_arena(&endpoint.arena, held));
            // The kernel reports the end of a process with a delay.
            let over = async move {
                let _ = over.await;
                sleep(Duration::from_millis(1)).await;
            };
            endpoint.server.serve_in_place(read, write, peer_memory, over)
        } else {
            endpoint.server.serve(read, write)
        };
        endpoint.tasks.push(tokio::spawn(serve).abort_handle());
        Ok((near, arena_map))
    }

    fn peer_memory(&self, memory: &SharedMemory, number: u64) -> io::Result<Arc<dyn PeerMemory>> {
        let file = File::from(memory.file().try_clone_to_owned()?);
        let random = Mutex::new(RandomSource::new(self.world.seed, Stream::Connection(number, 3)));
        Ok(Arc::new(FaultyPeerMemory { file, world: self.world.clone(), faults: self.faults.clone(), random }))
    }
}

/// Client memory with read faults: short reads, wrong offsets and bit flips.
struct FaultyPeerMemory {
    file: File,
    world: Arc<World>,
    faults: Arc<Mutex<NetworkFaults>>,
    random: Mutex<RandomSource>,
}

impl PeerMemory for FaultyPeerMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let faults = *self.faults.lock();
        let mut random = self.random.lock();
        self.world.count("reads of peer memory", 1);
        if random.chance(faults.peer_memory_short) {
            self.world.fault("peer memory short read", [offset, into.len() as u64, 0]);
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut from = offset;
        if random.chance(faults.peer_memory_elsewhere) {
            from = random.below(offset + 8192);
            self.world.fault("peer memory wrong offset", [offset, from, 0]);
        }
        self.file.read_exact_at(into, from)?;
        if random.chance(faults.peer_memory_flip) {
            let at = random.below(into.len() as u64);
            self.world.fault("peer memory bit flip", [offset, at, 0]);
            into[at as usize] ^= 1 << random.below(8);
        }
        Ok(())
    }
}

fn map_arena(arena: &Arc<Arena>, held: oneshot::Sender<()>) -> Arc<ArenaMap> {
    let hold = ArenaHold { _arena: arena.clone(), _held: held };
    // SAFETY: an arena is initialised memory that does not move until its last handle is dropped,
    // and `hold` owns a handle.
    unsafe { ArenaMap::from_local(arena.start(), arena.capacity(), Box::new(hold)) }
}

pub(super) struct ClientHost {
    network: Arc<Network>,
    is_local: bool,
    fabric: FabricOptions,
    devices: OnceCell<Option<Arc<Devices>>>,
}

impl ClientHost {
    pub(super) fn new(network: Arc<Network>, is_local: bool, fabric: FabricOptions) -> ClientHost {
        ClientHost { network, is_local, fabric, devices: OnceCell::new() }
    }
}

impl Connector for ClientHost {
    type Source = FakeSource;
    type Sink = FakeSink;

    async fn connect(&self, address: &str) -> io::Result<(FakeSource, FakeSink)> {
        Ok(self.network.dial(address, None).await?.0)
    }

    async fn attach_memory(
        &self,
        listener: &ArenaListenerInfo,
        memory: Option<&Arc<SharedMemory>>,
    ) -> io::Result<(FakeSource, FakeSink, Arc<ArenaMap>)> {
        if !self.is_local {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let ((source, sink), arena_map) = self.network.dial(&listener.name, Some(memory)).await?;
        Ok((source, sink, arena_map.ok_or(io::ErrorKind::Unsupported)?))
    }

    async fn devices(&self, memory: Option<&Arc<SharedMemory>>) -> Option<Arc<Devices>> {
        let memory = memory.filter(|_| !self.fabric.devices.is_empty())?;
        let open = || async {
            let _no_faults = FaultPause::start();
            let ((start, len), known) = (memory.span(), Arc::downgrade(memory));
            rdma::track_owner(start, len, move |bytes| Some(known.upgrade()?.is_taken(bytes)));
            larder_client::sim::open_devices(&self.fabric, memory).await
        };
        self.devices.get_or_init(open).await.clone()
    }
}
