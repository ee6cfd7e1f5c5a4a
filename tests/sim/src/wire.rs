//! Clients and nodes together: [`larder_client::Client`] and the connections of
//! [`larder_node::sim::Server`] run over the fake network of [`transport`], with and without shared
//! memory, and over the RDMA devices of [`crate::rdma`].
//!
//! One to three nodes, each on a simulated device, start, close and crash. Two to four clients put,
//! get, read ranges, view, follow, look up and forget pages, cancel requests and let them time out.
//! Connections are slow, break and corrupt data. Devices and memory fail as the profile says.
//!
//! Invariants that the workers check, in addition to those of the model:
//! - The outcome of a put, and every reported page location, agrees with the puts so far.
//! - After a complete forget, the page is a miss until it is put again.
//! - No request ends later than its deadline plus the documented delay.
//! - A request over a slow network succeeds if its deadline leaves the time for it, and one that
//!   ends at its deadline costs the others nothing.
//! - A caller that a busy node refused, and that returns as told, gets in: a writer (`room`) or a
//!   reader (`refused_reads`).
//! - Without faults, a request does not miss a page that its node has all the time.
//! - A node that copies from client memory copies the bytes of the put, or the put is lost.
//! - A page that is read in place does not change until the reader releases it, whatever happens to
//!   page, connection and node.
//! - Memory that an RDMA device may still access has an owner, on both sides, whatever happens to
//!   request, connection and node.
//! - Without faults, no device uses a key that was revoked. Such a request would fail its queue
//!   pair, and with it every transfer on that path.
//! - Without faults, a page held by a lookup can be read.
//! - Clients do not treat a busy node as a node without the page.
//! - A put whose writer aborted it, or disconnected, does not block another put of the same key.
//! - An idle cluster has no open put, no waiting reader, no hold, no RDMA grant and no bytes in
//!   flight. All budgets are whole again, and the arena of a node holds the pages of L2 and nothing
//!   else.
//!
//! A client may find damaged pages only if networks or memory corrupt data. A node may find them in
//! L2 only if memory does.

mod check;
mod durable;
mod model;
mod net;
mod nodes;
mod operations;
mod presence;
mod progress;
mod put;
mod refused_reads;
mod room;
pub mod transport;

use crate::faults::{Faults, Profile};
use crate::payload::{NAMESPACES, namespace_of, page_key};
use crate::random::{RandomSource, Stream};
use crate::rdma::{DeviceSpec, FabricGuard, MemoryWindows, RdmaFaults};
use crate::world::World;
use larder_client::{Client, ClientOptions, DEFAULT_CONNECTIONS, StoreUrl, Transport};
use larder_client::{EndpointOptions, FabricOptions};
use larder_format::{KvDtype, NamespaceDescriptor, NamespaceId, PageGeometry, PageId};
use larder_node::WritePolicy;
use larder_runtime::lock::Mutex;
use larder_wire::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, TierCode, VERSION_RDMA, VERSION_RETRY_AFTER};
use model::{Model, RequestTime};
use net::{ClientHost, Network};
use nodes::{NodeHost, address};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use transport::NetworkFaults;

const KIB: u64 = 1 << 10;
const OTHER_TENANT: &str = "other tenant";
/// Number of rounds. Faults stop after each, and the cluster must become idle. The next round
/// starts from the state that this one leaves.
const ROUNDS: u64 = 3;
/// Bound on virtual time. Only a deadlock exceeds it.
const SEED_MAX: Duration = Duration::from_secs(24 * 3600);
/// Pages up to this length fit into every bound of a connection that is not tight, however many the
/// workers of a client read at a time.
const BUSY_PAGE_BYTES_MIN: u64 = 160 << 10;
/// Largest delay between a deadline and the end of the request, in milliseconds.
const LATE_MS: u64 = 50;

#[derive(Debug, Clone)]
pub struct ClusterSetup {
    profile: Profile,
    pub nodes: usize,
    workers: u64,
    /// Keys of each namespace.
    keys: u64,
    /// Number of namespaces that the clients of the workload use.
    namespaces: u64,
    l2_bytes: u64,
    in_flight_bytes: u64,
    segments: u64,
    write_policy: WritePolicy,
    geometry: PageGeometry,
    transports: Vec<Transport>,
    /// Clients on the same machine as all nodes, which may use shared memory.
    local: Vec<bool>,
    node_devices: Vec<Vec<DeviceSpec>>,
    client_devices: Vec<Vec<DeviceSpec>>,
    endpoint: EndpointOptions,
    page_age_ms: u64,
    node_protocols: Vec<u16>,
    client_protocols: Vec<u16>,
    ttl_rate: u32,
    budget_bytes: usize,
    memory_bytes: usize,
    /// True if nodes have budgets that are often exhausted.
    tight: bool,
    /// True if all clients use RDMA, and the network rarely disturbs them.
    over_rdma: bool,
}

impl ClusterSetup {
    pub fn draw(profile: Profile, random: &mut RandomSource) -> ClusterSetup {
        let clients = random.between(2, 4);
        let kinds =
            [Transport::Tcp, Transport::Auto, Transport::Auto, Transport::Auto, Transport::Shm, Transport::Rdma];
        let policies = [WritePolicy::Through, WritePolicy::Selective, WritePolicy::Back];
        // The last one has pages of 576 KiB, which travel in fragments.
        let sizes = [(8, 1), (32, 1), (96, 1), (96, 8), (96, 32)];
        let (head_dim, scale) = sizes[[0, 0, 1, 1, 1, 2, 2, 3, 3, 4][random.below(10) as usize]];
        let nodes = random.between(1, 3) as usize;
        // Otherwise few seeds use RDMA for long: any old version, machine without a device or
        // damaged frame prevents it.
        let over_rdma = random.chance(250_000);
        let mut protocols = |count: u64| {
            let old = if over_rdma { 0 } else { 200_000 };
            let one = |_| if random.chance(old) { PROTOCOL_VERSION_MIN } else { PROTOCOL_VERSION };
            (0..count).map(one).collect()
        };
        let (node_protocols, client_protocols): (Vec<u16>, Vec<u16>) = (protocols(nodes as u64), protocols(clients));
        let mut devices =
            |kind: u8, count: u64| (0..count).map(|host| draw_devices(kind, host as u8, over_rdma, random)).collect();
        let (node_devices, client_devices): (Vec<Vec<_>>, Vec<Vec<_>>) =
            (devices(1, nodes as u64), devices(2, clients));
        let memory_kib = if over_rdma { [128, 1024, 1024, 1024] } else { [0, 32, 128, 1024] };
        let memory_bytes = memory_kib[random.below(4) as usize] * (KIB * scale) as usize;
        let newest = |versions: &[u16]| versions.iter().all(|&version| version >= VERSION_RDMA);
        let nodes_have = memory_bytes > 0 && newest(&node_protocols) && node_devices.iter().all(|all| !all.is_empty());
        let transport = |client: usize| match kinds[random.below(kinds.len() as u64) as usize] {
            _ if over_rdma => Transport::Rdma,
            // A client restricted to RDMA needs devices and a protocol version that support it, on
            // both sides.
            Transport::Rdma
                if !nodes_have || client_devices[client].is_empty() || !newest(&client_protocols[client..=client]) =>
            {
                Transport::Tcp
            }
            transport => transport,
        };
        let transports: Vec<Transport> = (0..clients as usize).map(transport).collect();
        let rate = if over_rdma { 0 } else { 400_000 };
        let local = transports.iter().map(|&transport| transport == Transport::Shm || random.chance(rate)).collect();
        let endpoint = EndpointOptions {
            transfers: [1, 4, 64][random.below(3) as usize],
            grants: [2, 16, 256][random.below(3) as usize],
            chunk_bytes: [4096, 20_000, 1 << 20][random.below(3) as usize],
            stall_timeout: Duration::from_secs([1, 5][random.below(2) as usize]),
            ..EndpointOptions::default()
        };
        ClusterSetup {
            profile,
            nodes,
            node_protocols,
            client_protocols,
            transports,
            local,
            node_devices,
            client_devices,
            endpoint,
            // A large page takes longer than a second on a device that moves it in small pieces.
            page_age_ms: [1_000, 60_000][random.below(2) as usize].max(if scale > 8 { 60_000 } else { 0 }),
            workers: random.between(1, 3),
            keys: [12, 40, 100][random.below(3) as usize],
            namespaces: [1, 2, NAMESPACES][random.below(3) as usize],
            l2_bytes: [128, 256, 512][random.below(3) as usize] * KIB * scale,
            in_flight_bytes: [128, 256, 512][random.below(3) as usize] * KIB * scale,
            segments: random.between(3, 6),
            write_policy: policies[random.below(3) as usize],
            geometry: PageGeometry {
                dtype: KvDtype::F32,
                layers: 3,
                kv_heads: 2,
                head_dim,
                page_tokens: 4 * scale as u32,
                layers_per_part: random.between(1, 3) as u32,
                head_groups: 1,
            },
            ttl_rate: [0, 50_000, 300_000][random.below(3) as usize],
            budget_bytes: [1 << 30, 1 << 20, 100_000][random.below(3) as usize],
            memory_bytes,
            tight: random.chance(500_000),
            over_rdma,
        }
    }

    /// Returns `true` if clients learn that a node is too busy to read a page. Old versions report
    /// a miss.
    fn reports_busy(&self) -> bool {
        let mut versions = self.node_protocols.iter().chain(&self.client_protocols);
        !self.may_be_busy() || versions.all(|&version| version >= VERSION_RETRY_AFTER)
    }

    /// Returns `true` if a node may refuse reads of the workload.
    fn may_be_busy(&self) -> bool {
        self.tight || self.geometry.page_bytes() as u64 > BUSY_PAGE_BYTES_MIN
    }

    fn fabric(&self, devices: &[DeviceSpec]) -> FabricOptions {
        let devices = devices.iter().map(|device| device.name.clone()).collect();
        FabricOptions { devices, endpoint: self.endpoint.clone() }
    }

    /// Namespaces with equal keys: the second differs from the first in its weights, the third in
    /// its tenant.
    fn namespace(&self, number: u64) -> NamespaceDescriptor {
        NamespaceDescriptor {
            model: "simulated".into(),
            weights: [7 + u8::from(number == 1); 32],
            geometry: self.geometry,
            tenant: if number == 2 { OTHER_TENANT.into() } else { "tenant".into() },
        }
    }

    /// Namespace of a client of the workload.
    fn namespace_of_client(&self, client: usize) -> u64 {
        client as u64 % self.namespaces
    }
}

/// Draws up to two RDMA devices of a machine, each on its own rail.
fn draw_devices(kind: u8, host: u8, needs_one: bool, random: &mut RandomSource) -> Vec<DeviceSpec> {
    let count = [u8::from(needs_one), 1, 1, 2][random.below(4) as usize];
    let device = |rail| DeviceSpec {
        name: format!("rdma-{kind}-{host}-{rail}"),
        address: [10, rail, kind, host],
        windows: [MemoryWindows::None, MemoryWindows::Exact, MemoryWindows::Exact, MemoryWindows::WholeRegistration]
            [random.below(4) as usize],
    };
    (0..count).map(device).collect()
}

/// Choices of a client. [`Cluster::spec`] has the usual ones.
#[derive(Clone, Copy)]
struct ClientSpec {
    namespace: u64,
    /// Number of nodes that it knows.
    nodes: usize,
    connections: usize,
    transport: Transport,
    protocol_max: u16,
}

struct Cluster {
    world: Arc<World>,
    setup: ClusterSetup,
    network: Arc<Network>,
    rdma: Arc<Mutex<RdmaFaults>>,
    model: Mutex<Model>,
    namespaces: Vec<NamespaceId>,
    faults_enabled: AtomicBool,
    operations: AtomicU64,
}

impl Cluster {
    fn request_time(&self) -> RequestTime {
        self.model.lock().request_time(self.world.unix_ms())
    }

    fn id(&self, key: u64) -> PageId {
        PageId { namespace: self.namespaces[namespace_of(key) as usize], key: page_key(key) }
    }

    fn crashes(&self) -> bool {
        self.setup.profile.crashes()
    }

    /// Keys of all namespaces.
    fn all_keys(&self) -> u64 {
        self.setup.keys * NAMESPACES
    }

    fn all_nodes_speak(&self, version: u16) -> bool {
        self.setup.node_protocols.iter().all(|&spoken| spoken >= version)
    }

    /// Returns `true` if a node has the page. Eviction may take any page, and then a miss is legal.
    fn has_page(&self, key: u64) -> bool {
        let has = |number| {
            let node = self.network.host(&address(number)).map(|(node, _)| node);
            node.is_some_and(|node| node.store().tiers().locate(&self.id(key)) != TierCode::Absent)
        };
        (0..self.setup.nodes).any(has)
    }

    fn violate(&self, problem: String) {
        self.world.violate(problem);
    }

    fn check_end(&self, operation: &str, deadline: Instant, late_ms: u64) {
        let late = tokio::time::Instant::now().into_std().saturating_duration_since(deadline).as_millis() as u64;
        if late > late_ms {
            self.violate(format!("{operation} ended {late} ms after its deadline"));
        }
    }

    fn client(&self, name: &str, machine: ClientHost, spec: ClientSpec) -> Client {
        let url = StoreUrl {
            nodes: (0..spec.nodes).map(address).collect(),
            transport: spec.transport,
            connections: spec.connections,
        };
        let options = ClientOptions {
            name: name.into(),
            put_queue_bytes_max: self.setup.budget_bytes,
            memory_bytes: self.setup.memory_bytes,
            protocol_max: spec.protocol_max,
            seed: Some(self.world.seed),
            ..ClientOptions::default()
        };
        larder_client::sim::attach(Arc::new(machine), url, self.setup.namespace(spec.namespace), options)
    }

    /// Client outside the workload, on another machine, which uses one TCP connection per node.
    fn remote_client(&self, name: &str, spec: ClientSpec) -> Client {
        let machine = ClientHost::new(self.network.clone(), false, FabricOptions::default());
        self.client(name, machine, ClientSpec { connections: 1, ..spec })
    }

    fn spec(&self) -> ClientSpec {
        ClientSpec {
            namespace: 0,
            nodes: self.setup.nodes,
            connections: DEFAULT_CONNECTIONS,
            transport: Transport::Tcp,
            protocol_max: PROTOCOL_VERSION,
        }
    }
}

pub(crate) fn run(world: &Arc<World>, setup: ClusterSetup, operations: u64, random: &mut RandomSource) -> u64 {
    let mut faults = NetworkFaults::draw(setup.profile, random);
    if setup.over_rdma {
        faults.spare_connections();
    }
    let rdma = Arc::new(Mutex::new(RdmaFaults::draw(setup.profile, random)));
    let all: Vec<DeviceSpec> = setup.node_devices.iter().chain(&setup.client_devices).flatten().cloned().collect();
    // Declared before the runtime, so it is dropped after every user of a device.
    let _devices = FabricGuard::install(world, rdma.clone(), setup.profile == Profile::Calm, &all);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let Ok(runtime) = runtime else {
        world.violate("the runtime could not be created".into());
        return 0;
    };
    runtime.block_on(async {
        world.incarnation_begins();
        let cluster = Arc::new(Cluster {
            world: world.clone(),
            network: Arc::new(Network::new(world.clone(), faults)),
            rdma,
            model: Mutex::new(Model::new(setup.keys * NAMESPACES)),
            namespaces: (0..NAMESPACES).map(|namespace| setup.namespace(namespace).id()).collect(),
            setup,
            faults_enabled: AtomicBool::new(true),
            operations: AtomicU64::new(0),
        });
        if tokio::time::timeout(SEED_MAX, run_rounds(&cluster, faults, operations)).await.is_err() {
            world.violate("deadlock: a task waits for ever".into());
        }
        world.incarnation_ends();
        cluster.operations.load(Ordering::Relaxed)
    })
}

async fn run_rounds(cluster: &Arc<Cluster>, network: NetworkFaults, operations: u64) {
    let faults = *cluster.world.faults.lock();
    let mut hosts: Vec<NodeHost> =
        (0..cluster.setup.nodes).map(|number| NodeHost::new(cluster.clone(), number)).collect();
    let speakers = cluster.setup.transports.iter().zip(&cluster.setup.client_protocols).enumerate();
    let client = |(number, (transport, protocol)): (usize, (&Transport, &u16))| {
        let fabric = cluster.setup.fabric(&cluster.setup.client_devices[number]);
        let machine = ClientHost::new(cluster.network.clone(), cluster.setup.local[number], fabric);
        let namespace = cluster.setup.namespace_of_client(number);
        let spec = ClientSpec { namespace, transport: *transport, protocol_max: *protocol, ..cluster.spec() };
        cluster.client(&format!("client-{number}"), machine, spec)
    };
    let rdma = *cluster.rdma.lock();
    let clients: Vec<Client> = speakers.map(client).collect();
    for round in 0..ROUNDS {
        *cluster.world.faults.lock() = faults;
        *cluster.network.faults.lock() = network;
        *cluster.rdma.lock() = rdma;
        cluster.faults_enabled.store(true, Ordering::Relaxed);
        let faults_stopped = CancellationToken::new();
        let running: Vec<_> = hosts.drain(..).map(|host| tokio::spawn(host.run(faults_stopped.clone()))).collect();
        operations::work(cluster, &clients, round, operations / ROUNDS).await;
        // Faults stop. The cluster must recover and become idle.
        *cluster.world.faults.lock() = Faults::none(faults.latency_ms_max);
        cluster.network.faults.lock().stop();
        cluster.rdma.lock().stop();
        cluster.faults_enabled.store(false, Ordering::Relaxed);
        cluster.world.event("faults stop", [round, 0, 0]);
        faults_stopped.cancel();
        for host in running {
            match host.await {
                Ok(host) => hosts.push(host),
                Err(_) => return cluster.violate("the task of a node host panicked".into()),
            }
        }
        if cluster.world.failed() {
            return;
        }
        check::quiesce(cluster, &hosts, &clients, round + 1 == ROUNDS).await;
    }
    drop(clients);
    check::end(cluster, hosts).await;
}

fn soon(after: Duration) -> Instant {
    (tokio::time::Instant::now() + after).into_std()
}

fn worker_random(cluster: &Cluster, round: u64, worker: u64) -> RandomSource {
    RandomSource::new(cluster.world.seed, Stream::Worker(round, worker))
}
