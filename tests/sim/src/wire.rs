//! Clients and nodes together: [`larder_client::Client`] and the connections of [`larder_node::sim::Server`], over the fake
//! transport of [`stream`], with and without the node's memory in place, and over the RDMA devices of [`crate::rdma`].
//!
//! One to three nodes, each a whole node on a simulated device, start, close and crash; two to four clients put, get pages and
//! ranges of them, view, follow, look up and forget, cancel and run out of time, while lines between them are slow, break and lie, and devices and
//! memory fail as the profile says.
//!
//! Beside the promise, these must hold:
//! - what a client is told (stored, there already, other bytes, where a page is) fits what was put;
//! - what was forgotten completely is a miss, until it is put again;
//! - nothing ends later than its deadline and what the client says that may add;
//! - what a node copies from memory that a client lent is what was put there, or that put is lost;
//! - bytes that are read in place do not change before they are let go of, whatever becomes of page, connection and node;
//! - memory that an RDMA device may still touch has an owner, on either side, whatever becomes of request, line and node;
//! - while nothing fails, no device is asked for what a dead key was for: that costs a line, and what else moves on it;
//! - pages that a lookup holds are had as long as nothing fails;
//! - a node that is too busy to say what it has is not taken for one that has nothing;
//! - a put that its writer gave up, or whose writer is gone, does not stand in the way of another;
//! - when all is at rest, no put is open, nobody waits, nothing is held, no window is open, no bytes are under way at either end, all
//!   budgets are whole again, and a node's memory holds what L2 has and nothing else.
//!
//! Only in profiles without lies of the line, a node never finds damage in memory that does not fail.

mod check;
mod model;
mod net;
mod nodes;
mod operations;
mod put;
pub mod stream;

use crate::dice::{Dice, Stream};
use crate::faults::{Faults, Profile};
use crate::rdma::{DeviceSpec, Devices, RdmaFaults, Windows};
use crate::world::World;
use larder_client::{CONNECTIONS, Client, ClientOptions, StoreUrl, Transport};
use larder_client::{EndpointOptions, FabricOptions};
use larder_format::{KvDtype, NamespaceDescriptor, NamespaceId, PageGeometry, PageId};
use larder_node::WritePolicy;
use larder_wire::{PROTOCOL_VERSION, VERSION_OF_BUSY, VERSION_OF_LINES};
use model::{Asked, Model};
use net::{Machine, Network};
use nodes::{Host, address};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stream::LineFaults;
use tokio_util::sync::CancellationToken;

const KIB: u64 = 1 << 10;
/// Times that all comes to rest.
const ROUNDS: u64 = 3;
/// Nothing takes longer in virtual time.
const SEED_MAX: Duration = Duration::from_secs(24 * 3600);
/// A deadline is heard of this late at most …
const LATE_MS: u64 = 50;
/// … and a payload that is just being received may land so much later.
const LANDING_MS: u64 = 1000;

/// Sizes of a seed.
#[derive(Debug, Clone)]
pub struct WireSetup {
    profile: Profile,
    /// Nodes.
    pub nodes: usize,
    workers: u64,
    keys: u64,
    l2_bytes: u64,
    in_flight_bytes: u64,
    segments: u64,
    write_policy: WritePolicy,
    geometry: PageGeometry,
    transports: Vec<Transport>,
    /// Which clients are on the machine of all nodes.
    local: Vec<bool>,
    /// RDMA devices of each node, and of each client.
    node_devices: Vec<Vec<DeviceSpec>>,
    client_devices: Vec<Vec<DeviceSpec>>,
    endpoint: EndpointOptions,
    page_age_ms: u64,
    /// Newest version of the protocol that each node speaks, and each client: an old one here and there.
    node_protocols: Vec<u16>,
    client_protocols: Vec<u16>,
    mortal: u32,
    budget_bytes: usize,
    /// Of each client, to be lent.
    memory_bytes: usize,
    /// Whether nodes have budgets that are often too small.
    tight: bool,
}

impl WireSetup {
    /// Draws one.
    pub fn draw(profile: Profile, dice: &mut Dice) -> WireSetup {
        let clients = dice.between(2, 4);
        let kinds =
            [Transport::Tcp, Transport::Auto, Transport::Auto, Transport::Auto, Transport::Shm, Transport::Rdma];
        let policies = [WritePolicy::Through, WritePolicy::Selective, WritePolicy::Back];
        let (head_dim, scale) = [(8, 1), (32, 1), (96, 1), (96, 8)][[0, 0, 1, 1, 1, 2, 2, 3][dice.below(8) as usize]];
        let nodes = dice.between(1, 3) as usize;
        let mut protocols = |count: u64| {
            let one = |_| if dice.chance(200_000) { PROTOCOL_VERSION - 1 } else { PROTOCOL_VERSION };
            (0..count).map(one).collect()
        };
        let (node_protocols, client_protocols): (Vec<u16>, Vec<u16>) = (protocols(nodes as u64), protocols(clients));
        let mut devices = |kind: u8, count: u64| (0..count).map(|host| draw_devices(kind, host as u8, dice)).collect();
        let (node_devices, client_devices): (Vec<Vec<_>>, Vec<Vec<_>>) =
            (devices(1, nodes as u64), devices(2, clients));
        let memory_bytes = [0, 32, 128, 1024][dice.below(4) as usize] * (KIB * scale) as usize;
        let newest = |versions: &[u16]| versions.iter().all(|&version| version >= VERSION_OF_LINES);
        let nodes_have = memory_bytes > 0 && newest(&node_protocols) && node_devices.iter().all(|all| !all.is_empty());
        let transport = |client: usize| match kinds[dice.below(kinds.len() as u64) as usize] {
            // Who wants nothing else must have it.
            Transport::Rdma
                if !nodes_have || client_devices[client].is_empty() || !newest(&client_protocols[client..=client]) =>
            {
                Transport::Tcp
            }
            transport => transport,
        };
        let transports: Vec<Transport> = (0..clients as usize).map(transport).collect();
        let local = transports.iter().map(|&transport| transport == Transport::Shm || dice.chance(400_000)).collect();
        let endpoint = EndpointOptions {
            transfers: [1, 4, 64][dice.below(3) as usize],
            windows: [2, 16, 256][dice.below(3) as usize],
            chunk_bytes: [4096, 20_000, 1 << 20][dice.below(3) as usize],
            deadline: Duration::from_secs([1, 5][dice.below(2) as usize]),
            ..EndpointOptions::default()
        };
        WireSetup {
            profile,
            nodes,
            node_protocols,
            client_protocols,
            transports,
            local,
            node_devices,
            client_devices,
            endpoint,
            page_age_ms: [1_000, 60_000][dice.below(2) as usize],
            workers: dice.between(1, 3),
            keys: [12, 40, 100][dice.below(3) as usize],
            l2_bytes: [128, 256, 512][dice.below(3) as usize] * KIB * scale,
            in_flight_bytes: [128, 256, 512][dice.below(3) as usize] * KIB * scale,
            segments: dice.between(3, 6),
            write_policy: policies[dice.below(3) as usize],
            geometry: PageGeometry {
                dtype: KvDtype::F32,
                layers: 3,
                kv_heads: 2,
                head_dim,
                page_tokens: 4 * scale as u32,
                layers_per_part: dice.between(1, 3) as u32,
                head_groups: 1,
            },
            mortal: [0, 50_000, 300_000][dice.below(3) as usize],
            budget_bytes: [1 << 30, 1 << 20, 100_000][dice.below(3) as usize],
            memory_bytes,
            tight: dice.chance(500_000),
        }
    }

    /// Whether clients hear it when a node is too busy for a page: in old versions that is a miss.
    fn busy_is_told(&self) -> bool {
        let mut versions = self.node_protocols.iter().chain(&self.client_protocols);
        !self.tight || versions.all(|&version| version >= VERSION_OF_BUSY)
    }

    /// These devices, and how their connections behave.
    fn fabric(&self, devices: &[DeviceSpec]) -> FabricOptions {
        let devices = devices.iter().map(|device| device.name.clone()).collect();
        FabricOptions { devices, endpoint: self.endpoint.clone() }
    }

    fn namespace(&self) -> NamespaceDescriptor {
        NamespaceDescriptor {
            model: "simulated".into(),
            weights: [7; 32],
            geometry: self.geometry,
            tenant: "tenant".into(),
        }
    }
}

/// None, one or two devices of a machine, each on a rail of its own.
fn draw_devices(kind: u8, host: u8, dice: &mut Dice) -> Vec<DeviceSpec> {
    let count = [0, 1, 1, 2][dice.below(4) as usize];
    let device = |rail| DeviceSpec {
        name: format!("rdma-{kind}-{host}-{rail}"),
        address: [10, rail, kind, host],
        windows: [Windows::None, Windows::Narrow, Windows::Narrow, Windows::Broad][dice.below(4) as usize],
    };
    (0..count).map(device).collect()
}

/// What all tasks of a seed share.
struct Wire {
    world: Arc<World>,
    setup: WireSetup,
    network: Arc<Network>,
    rdma: Arc<Mutex<RdmaFaults>>,
    model: Mutex<Model>,
    namespace: NamespaceId,
    /// Whether anything fails now.
    chaos: AtomicBool,
    operations: AtomicU64,
}

impl Wire {
    fn asks(&self) -> Asked {
        self.model.lock().asks(self.world.unix_ms())
    }

    fn id(&self, key: u64) -> PageId {
        PageId { namespace: self.namespace, key: crate::payload::page_key(key) }
    }

    fn crashes(&self) -> bool {
        self.setup.profile.crashes()
    }

    fn violate(&self, what: String) {
        self.world.violate(what);
    }

    fn check_end(&self, what: &str, deadline: Instant, late_ms: u64) {
        let late = tokio::time::Instant::now().into_std().saturating_duration_since(deadline).as_millis() as u64;
        if late > late_ms {
            self.violate(format!("a {what} ends {late} ms after its deadline"));
        }
    }

    /// Another client of all nodes.
    fn client(&self, name: &str, machine: Machine, transport: Transport, protocol_max: u16) -> Client {
        let url = StoreUrl { nodes: (0..self.setup.nodes).map(address).collect(), transport, connections: CONNECTIONS };
        let options = ClientOptions {
            name: name.into(),
            put_queue_bytes_max: self.setup.budget_bytes,
            memory_bytes: self.setup.memory_bytes,
            protocol_max,
            seed: Some(self.world.seed),
            ..ClientOptions::default()
        };
        larder_client::sim::attach(Arc::new(machine), url, self.setup.namespace(), options)
    }
}

/// Runs a seed; the operations done.
pub(crate) fn run(world: &Arc<World>, setup: WireSetup, operations: u64, dice: &mut Dice) -> u64 {
    let faults = LineFaults::draw(setup.profile, dice);
    let rdma = Arc::new(Mutex::new(RdmaFaults::draw(setup.profile, dice)));
    let all: Vec<DeviceSpec> = setup.node_devices.iter().chain(&setup.client_devices).flatten().cloned().collect();
    // Dropped after the runtime.
    let _devices = Devices::begin(world, rdma.clone(), setup.profile == Profile::Calm, &all);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let Ok(runtime) = runtime else {
        world.violate("no runtime could be made".into());
        return 0;
    };
    runtime.block_on(async {
        world.life_begins();
        let wire = Arc::new(Wire {
            world: world.clone(),
            network: Arc::new(Network::new(world.clone(), faults)),
            rdma,
            model: Mutex::new(Model::new(setup.keys)),
            namespace: setup.namespace().id(),
            setup,
            chaos: AtomicBool::new(true),
            operations: AtomicU64::new(0),
        });
        if tokio::time::timeout(SEED_MAX, live(&wire, faults, operations)).await.is_err() {
            world.violate("something waits for ever".into());
        }
        world.life_ends();
        wire.operations.load(Ordering::Relaxed)
    })
}

async fn live(wire: &Arc<Wire>, lines: LineFaults, operations: u64) {
    let faults = *wire.world.faults.lock();
    let mut hosts: Vec<Host> = (0..wire.setup.nodes).map(|number| Host::new(wire.clone(), number)).collect();
    let speakers = wire.setup.transports.iter().zip(&wire.setup.client_protocols).enumerate();
    let client = |(number, (transport, protocol)): (usize, (&Transport, &u16))| {
        let fabric = wire.setup.fabric(&wire.setup.client_devices[number]);
        let machine = Machine::new(wire.network.clone(), wire.setup.local[number], fabric);
        wire.client(&format!("client-{number}"), machine, *transport, *protocol)
    };
    let rdma = *wire.rdma.lock();
    let clients: Vec<Client> = speakers.map(client).collect();
    for round in 0..ROUNDS {
        *wire.world.faults.lock() = faults;
        *wire.network.faults.lock() = lines;
        *wire.rdma.lock() = rdma;
        wire.chaos.store(true, Ordering::Relaxed);
        let rest = CancellationToken::new();
        let living: Vec<_> = hosts.drain(..).map(|host| tokio::spawn(host.live(rest.clone()))).collect();
        operations::work(wire, &clients, round, operations / ROUNDS).await;
        // Faults stop; after a while everything works again and nothing is left over.
        *wire.world.faults.lock() = Faults::none(faults.latency_ms_max);
        wire.network.faults.lock().calm();
        wire.rdma.lock().calm();
        wire.chaos.store(false, Ordering::Relaxed);
        wire.world.event("faults stop", [round, 0, 0]);
        rest.cancel();
        for host in living {
            match host.await {
                Ok(host) => hosts.push(host),
                Err(_) => return wire.violate("what looks after a node panicked".into()),
            }
        }
        if wire.world.failed() {
            return;
        }
        check::come_to_rest(wire, &hosts, &clients).await;
    }
    drop(clients);
    check::end(wire, hosts).await;
}

fn soon(after: Duration) -> Instant {
    (tokio::time::Instant::now() + after).into_std()
}

/// The stream of one worker.
fn worker_dice(wire: &Wire, round: u64, worker: u64) -> Dice {
    Dice::new(wire.world.seed, Stream::Worker(round, worker))
}
