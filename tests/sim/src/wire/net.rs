//! The network of a seed: which node is where, and lines to it.
//!
//! Always true: a node that is down has no lines that carry anything.

use super::stream::{FakeSink, FakeSource, Line, LineEnd, LineFaults};
use crate::dice::{Dice, Stream};
use crate::rdma::{self, Shelter};
use crate::world::World;
use larder_client::FabricOptions;
use larder_client::sim::{Connector, Devices};
use larder_device::Arena;
use larder_node::sim::Server;
use larder_share::{Lender, Memory, Window};
use larder_wire::LocalDoor;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{OnceCell, oneshot};
use tokio::task::AbortHandle;
use tokio::time::sleep;

/// What a node that is up has on the network.
pub(super) struct Hosted {
    pub(super) server: Server,
    pub(super) arena: Arc<Arena>,
    lines: Vec<Weak<Line>>,
    tasks: Vec<AbortHandle>,
}

/// Lines to nodes, by address.
pub(super) struct Network {
    world: Arc<World>,
    pub(super) faults: Arc<Mutex<LineFaults>>,
    dice: Mutex<Dice>,
    hosts: Mutex<BTreeMap<String, Hosted>>,
    lines: Mutex<u64>,
}

/// What a reader of a node's memory keeps, and the node waits for.
struct Tenure {
    _arena: Arc<Arena>,
    _held: oneshot::Sender<()>,
}

impl Network {
    pub(super) fn new(world: Arc<World>, faults: LineFaults) -> Network {
        let dice = Mutex::new(Dice::new(world.seed, Stream::Network));
        Network { world, faults: Arc::new(Mutex::new(faults)), dice, hosts: Mutex::default(), lines: Mutex::new(0) }
    }

    /// A node is up.
    pub(super) fn up(&self, address: &str, server: Server, arena: Arc<Arena>) {
        let hosted = Hosted { server, arena, lines: Vec::new(), tasks: Vec::new() };
        self.hosts.lock().insert(address.into(), hosted);
    }

    /// A node is down: its connections end, and its clients hear of it at once, or in a minute.
    pub(super) fn down(&self, address: &str, silent: bool) {
        let Some(hosted) = self.hosts.lock().remove(address) else { return };
        hosted.lines.iter().filter_map(Weak::upgrade).filter(|_| silent).for_each(|line| line.cut(true));
        hosted.tasks.iter().for_each(AbortHandle::abort);
    }

    /// The node that is at an address now.
    pub(super) fn host(&self, address: &str) -> Option<(Server, Arc<Arena>)> {
        self.hosts.lock().get(address).map(|hosted| (hosted.server.clone(), hosted.arena.clone()))
    }

    /// A connection breaks, if there is one.
    pub(super) fn break_one(&self, address: &str, dice: &mut Dice) {
        let hosts = self.hosts.lock();
        let Some(hosted) = hosts.get(address) else { return };
        let lines: Vec<Arc<Line>> = hosted.lines.iter().filter_map(Weak::upgrade).collect();
        drop(hosts);
        if lines.is_empty() {
            return;
        }
        let which = dice.below(lines.len() as u64);
        self.world.fault("line broken", [which, lines.len() as u64, 0]);
        lines[which as usize].cut(dice.chance(200_000));
    }

    /// Another line to an address; through the door if `inside` says what is lent there.
    async fn dial(
        &self,
        address: &str,
        inside: Option<Option<&Arc<Memory>>>,
    ) -> io::Result<(LineEnd, Option<Arc<Window>>)> {
        let in_place = inside.is_some();
        let (delay, refused) = {
            let (faults, mut dice) = (*self.faults.lock(), self.dice.lock());
            (dice.between(0, faults.latency_ms_max), dice.chance(faults.refuse))
        };
        sleep(Duration::from_millis(delay)).await;
        let mut hosts = self.hosts.lock();
        let Some(hosted) = hosts.get_mut(address).filter(|_| !refused) else {
            self.world.count("connections refused", 1);
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        let number = {
            let mut lines = self.lines.lock();
            *lines += 1;
            *lines
        };
        self.world.event("connection", [number, in_place.into(), 0]);
        self.world.count(if in_place { "connections in place" } else { "connections" }, 1);
        let (line, near, (read, write)) = Line::new(self.world.clone(), self.faults.clone(), number);
        hosted.lines.retain(|line| line.strong_count() > 0);
        hosted.lines.push(Arc::downgrade(&line));
        hosted.tasks.retain(|task| !task.is_finished());
        let mut window = None;
        let serve = if let Some(memory) = inside {
            let lent = memory.map(|memory| self.lent(memory, number)).transpose()?;
            let (held, over) = oneshot::channel();
            window = Some(window_onto(&hosted.arena, held));
            // The kernel says so a little later.
            let over = async move {
                let _ = over.await;
                sleep(Duration::from_millis(1)).await;
            };
            hosted.server.serve_in_place(read, write, lent, over)
        } else {
            hosted.server.serve(read, write)
        };
        hosted.tasks.push(tokio::spawn(serve).abort_handle());
        Ok((near, window))
    }

    /// A client's memory, as the node at the end of line `number` reads it.
    fn lent(&self, memory: &Memory, number: u64) -> io::Result<Arc<dyn Lender>> {
        let file = File::from(memory.file().try_clone_to_owned()?);
        let dice = Mutex::new(Dice::new(self.world.seed, Stream::Line(number, 3)));
        Ok(Arc::new(LentMemory { file, world: self.world.clone(), faults: self.faults.clone(), dice }))
    }
}

/// Memory that a client lent: what is read is not always what was meant.
struct LentMemory {
    file: File,
    world: Arc<World>,
    faults: Arc<Mutex<LineFaults>>,
    dice: Mutex<Dice>,
}

impl Lender for LentMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let (faults, mut dice) = (*self.faults.lock(), self.dice.lock());
        self.world.count("reads of lent memory", 1);
        if dice.chance(faults.lent_short) {
            self.world.fault("lent memory is short", [offset, into.len() as u64, 0]);
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut from = offset;
        if dice.chance(faults.lent_elsewhere) {
            from = dice.below(offset + 8192);
            self.world.fault("lent memory from elsewhere", [offset, from, 0]);
        }
        self.file.read_exact_at(into, from)?;
        if dice.chance(faults.lent_flip) {
            let at = dice.below(into.len() as u64);
            self.world.fault("lent memory changes", [offset, at, 0]);
            into[at as usize] ^= 1 << dice.below(8);
        }
        Ok(())
    }
}

fn window_onto(arena: &Arc<Arena>, held: oneshot::Sender<()>) -> Arc<Window> {
    let tenure = Tenure { _arena: arena.clone(), _held: held };
    // SAFETY: an arena is initialised memory that stays where it is until its last handle is dropped, and the tenure has one.
    unsafe { Window::onto(arena.start(), arena.capacity(), Box::new(tenure)) }
}

/// Where a client is.
pub(super) struct Machine {
    network: Arc<Network>,
    /// Whether all nodes are here, too.
    is_theirs: bool,
    fabric: FabricOptions,
    devices: OnceCell<Option<Arc<Devices>>>,
}

impl Machine {
    /// One with the devices of `fabric`.
    pub(super) fn new(network: Arc<Network>, is_theirs: bool, fabric: FabricOptions) -> Machine {
        Machine { network, is_theirs, fabric, devices: OnceCell::new() }
    }
}

impl Connector for Machine {
    type Source = FakeSource;
    type Sink = FakeSink;

    async fn connect(&self, address: &str) -> io::Result<(FakeSource, FakeSink)> {
        Ok(self.network.dial(address, None).await?.0)
    }

    async fn come_in(
        &self,
        door: &LocalDoor,
        memory: Option<&Arc<Memory>>,
    ) -> io::Result<(FakeSource, FakeSink, Arc<Window>)> {
        if !self.is_theirs {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let ((source, sink), window) = self.network.dial(&door.name, Some(memory)).await?;
        Ok((source, sink, window.ok_or(io::ErrorKind::Unsupported)?))
    }

    async fn devices(&self, memory: Option<&Arc<Memory>>) -> Option<Arc<Devices>> {
        let memory = memory.filter(|_| !self.fabric.devices.is_empty())?;
        let open = || async {
            let _sheltered = Shelter::begin();
            let ((start, len), known) = (memory.span(), Arc::downgrade(memory));
            rdma::watch(start, len, move |bytes| Some(known.upgrade()?.is_taken(bytes)));
            larder_client::sim::open_devices(&self.fabric, memory).await
        };
        self.devices.get_or_init(open).await.clone()
    }
}
