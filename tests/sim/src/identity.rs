//! Identities of simulated nodes: a node takes its epoch as in production, from beside its logs.
//!
//! Faults: an identity is lost between two starts, cannot be read or stored, or is stored although
//! the device reported an error. The clock of a start may be late, because the machine has not set
//! it yet.
//!
//! Check: the first generation of a start exceeds all generations on the logs.

use crate::random::{RandomSource, Stream};
use crate::world::World;
use larder_log::L3;
use larder_node::NodeError;
use larder_node::sim::{Devices, Identity, IdentityPlace, NextIdentity};
use larder_runtime::lock::Mutex;
use larder_runtime::random::generator;
use rand::rngs::StdRng;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EIO: i32 = 5;
/// Share of starts in a million at which the clock is late, and by at most so many seconds.
const LATE_CLOCK_RATE: u32 = 300_000;
const LATE_SECONDS_MAX: u64 = 7200;

/// Directory of the log on a disk.
pub(crate) fn dir_of(disk: usize) -> PathBuf {
    format!("/simulated/{disk}").into()
}

/// Identity file beside the log on one disk. Its faults have a random stream of their own for each
/// start.
pub(crate) struct SimPlace {
    world: Arc<World>,
    disk: usize,
    dir: PathBuf,
    random: Mutex<RandomSource>,
}

impl SimPlace {
    /// Place of the start number `start` of the seed.
    fn new(world: &Arc<World>, disk: usize, start: u64) -> SimPlace {
        let mut random = RandomSource::new(world.seed, Stream::Identity(start, disk as u64));
        let is_lost = random.chance(world.faults.lock().identity_lost);
        if is_lost && world.disks[disk].lock().identity.take().is_some() {
            world.fault("identity lost", [disk as u64, 0, 0]);
        }
        SimPlace { world: world.clone(), disk, dir: dir_of(disk), random: Mutex::new(random) }
    }

    fn fails(&self, rate: u32) -> bool {
        let fails = self.random.lock().chance(rate);
        fails || self.world.disks[self.disk].lock().is_broken(self.world.now_ms())
    }

    fn failure(&self, name: &'static str) -> io::Error {
        self.world.fault(name, [self.disk as u64, 0, 0]);
        io::Error::from_raw_os_error(EIO)
    }
}

impl IdentityPlace for SimPlace {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        match self.fails(self.world.faults.lock().file_error) {
            true => Err(self.failure("identity not read")),
            false => Ok(self.world.disks[self.disk].lock().identity.clone()),
        }
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        // A start stores once, so the rate of other file operations would hardly reach this one.
        let fails = self.fails(10 * self.world.faults.lock().file_error);
        if !fails || self.random.lock().chance(500_000) {
            self.world.disks[self.disk].lock().identity = Some(bytes.to_vec());
        }
        if fails { Err(self.failure("identity not stored")) } else { Ok(()) }
    }
}

/// Identity of one start of a node. It is chosen but not yet stored: [`NodeIdentity::store`] does
/// that.
pub(crate) struct NodeIdentity {
    found: NextIdentity<SimPlace>,
    random: StdRng,
}

impl NodeIdentity {
    /// Takes the identity from beside the logs on `disks`. `start` numbers the starts of the seed.
    pub(crate) fn take(world: &Arc<World>, disks: std::ops::Range<usize>, start: u64) -> NodeIdentity {
        let mut source = RandomSource::new(world.seed, Stream::Identity(start, 128 + disks.start as u64));
        let mut random = generator(Some(source.any()));
        let mut unix_seconds = world.unix_ms() / 1000;
        if source.chance(LATE_CLOCK_RATE) {
            unix_seconds -= source.below(LATE_SECONDS_MAX);
            world.fault("clock late at start", [unix_seconds, 0, 0]);
        }
        let places = disks.map(|disk| SimPlace::new(world, disk, start)).collect();
        let found = NextIdentity::new(places, unix_seconds, &mut random);
        NodeIdentity { found, random }
    }

    /// The identity, and the generation of the first put. Waits for the recovery of `devices` if
    /// the epoch may not exceed the generations there.
    pub(crate) async fn store(mut self, devices: &mut Devices) -> Result<(Identity, u64), NodeError> {
        let (identity, _) = self.found.store_above_generations(devices).await?;
        let first = identity.generation_first(&mut self.random);
        Ok((identity, first))
    }
}

/// Checks the first generation of a start against those that were on its logs before. Reports a
/// violation unless it exceeds all of them.
pub(crate) fn check_first_generation(world: &World, first: u64, logs: &[L3]) {
    let largest = logs.iter().map(L3::generation_max).max().unwrap_or(0);
    if first <= largest {
        world.violate(format!("the first generation is {first:#x}, and L3 has {largest:#x}"));
    }
}
