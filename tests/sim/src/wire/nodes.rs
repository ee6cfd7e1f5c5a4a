//! Successive nodes at one address: each starts, serves, closes or crashes, and is replaced.
//!
//! Invariant: a restarted node reuses the disk of its predecessor, never its memory.

use super::durable::DurablePages;
use super::{Cluster, net::Network};
use crate::device::{Power, SimDevice};
use crate::disk::CrashEffect;
use crate::faults::{Faults, Profile};
use crate::identity::{NodeIdentity, check_first_generation, dir_of};
use crate::incarnation::{STARTS_MAX, has_no_faults};
use crate::random::{RandomSource, Stream};
use crate::rdma::{self, FaultPause};
use larder_io::Device;
use larder_log::{L3, L3Options};
use larder_memory::Arena;
use larder_node::sim::{Devices, Rdma, Server, Store};
use larder_node::{L3Device, NodeOptions, RdmaOptions};
use larder_runtime::Clock;
use larder_wire::ArenaListenerInfo;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

const RECOVERY_MAX: Duration = Duration::from_secs(1200);
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);
/// Bound on closing, with the delay of a slow device.
const CLOSE_MAX: Duration = Duration::from_secs(120);
const POWER_FAILED: &str = "power failed";
const SEGMENT_BYTES: u64 = 1 << 20;
/// Request budget of a connection in bytes, enough for about six requests.
const TIGHT_REQUEST_BYTES: u64 = 8 << 10;

struct RunningNode {
    server: Server,
    arena: Arc<Arena>,
    device: Arc<SimDevice>,
    power: Arc<Power>,
    l3: L3,
    stop: CancellationToken,
    upkeep: JoinHandle<()>,
}

pub(super) struct NodeHost {
    cluster: Arc<Cluster>,
    number: usize,
    random: RandomSource,
    /// Number of starts so far.
    starts: u64,
    running: Option<RunningNode>,
    durable: DurablePages,
}

pub(super) fn address(number: usize) -> String {
    format!("node-{number}:1")
}

impl NodeHost {
    pub(super) fn new(cluster: Arc<Cluster>, number: usize) -> NodeHost {
        let random = RandomSource::new(cluster.world.seed, Stream::Host(number as u64));
        NodeHost { cluster, number, random, starts: 0, running: None, durable: DurablePages::default() }
    }

    fn network(&self) -> &Network {
        &self.cluster.network
    }

    /// Starts and stops nodes until faults stop. Returns with a running node, unless a violation
    /// has ended the seed.
    pub(super) async fn run(mut self, faults_stopped: CancellationToken) -> NodeHost {
        while !faults_stopped.is_cancelled() && !self.cluster.world.failed() {
            self.start().await;
            let seconds = [3, 10, 40][self.random.below(3) as usize];
            let until = Instant::now() + Duration::from_millis(self.random.below(seconds * 1000));
            let Some(power) = self.running.as_ref().map(|running| running.power.clone()) else { return self };
            let mut lost = false;
            while !faults_stopped.is_cancelled() && !lost && Instant::now() < until {
                let next = until.min(Instant::now() + Duration::from_secs(1));
                // Short waits, so that connections break while the node serves.
                lost = timeout_at(next, power.failed()).await.is_ok();
                self.note_pages();
                if self.cluster.crashes() && self.random.chance(100_000) {
                    self.cluster.network.break_one_connection(&address(self.number), &mut self.random);
                }
            }
            if faults_stopped.is_cancelled() && !lost {
                // Power may have failed between the wait and this call.
                power.keep_on();
                lost = !power.is_on();
                if !lost {
                    break;
                }
            }
            if lost || (self.cluster.crashes() && self.random.chance(600_000)) {
                self.crash();
            } else {
                self.close().await;
            }
            sleep(Duration::from_millis(self.random.below(4_000))).await;
        }
        self.start().await;
        self
    }

    pub(super) async fn start(&mut self) {
        let world = self.cluster.world.clone();
        let mut attempt = 0;
        while self.running.is_none() && !world.failed() {
            attempt += 1;
            let faults = *world.faults.lock();
            let last = attempt >= STARTS_MAX;
            if last {
                *world.faults.lock() = Faults::none(faults.latency_ms_max);
            }
            let started = self.try_start().await;
            if last {
                *world.faults.lock() = faults;
            }
            world.count(if started.is_ok() { "starts" } else { "starts failed" }, 1);
            match started {
                Err(error) if error != POWER_FAILED && (last || has_no_faults(&faults)) => {
                    world.violate(format!("node {} does not start: {error}", self.number));
                }
                _ => {}
            }
        }
    }

    async fn try_start(&mut self) -> Result<(), String> {
        let Cluster { world, setup, .. } = &*self.cluster;
        self.starts += 1;
        let turn = self.starts;
        let events = match self.cluster.crashes()
            && self.cluster.faults_enabled.load(Ordering::Relaxed)
            && self.random.chance(300_000)
        {
            true => self.random.between(1, 2_000),
            false => u64::MAX,
        };
        let power = Power::lasting(events);
        let arena = Arena::new((setup.l2_bytes + setup.in_flight_bytes) as usize).map_err(|error| error.to_string())?;
        let capacity = setup.segments * SEGMENT_BYTES + 16_384;
        let identity = NodeIdentity::take(world, self.number..self.number + 1, turn);
        let clock = Clock::at(world.unix_ms());
        let options = L3Options {
            segment_bytes: SEGMENT_BYTES,
            seed: Some(world.seed | (self.number as u64) << 56),
            clock,
            ..L3Options::new("/simulated", capacity)
        };
        let device = SimDevice::start(world.clone(), arena.clone(), self.number, turn, power.clone(), capacity);
        // After a power failure the device never answers, so opening the log would wait for ever.
        let opened = tokio::select! {
            biased;
            () = power.failed() => None,
            opened = L3::open_on(device.clone(), options, arena.clone()) => Some(opened),
        };
        let l3 = match opened {
            Some(Ok(l3)) => l3,
            Some(Err(error)) => {
                // It may still stop answering, and closing waits for answers.
                device.close().await;
                return Err(error.to_string());
            }
            None => {
                device.lose_power(CrashEffect::draw(&mut self.random), &mut self.random);
                return Err(POWER_FAILED.into());
            }
        };
        let place = L3Device { dir: dir_of(self.number), bytes: capacity };
        let mut devices = Devices::of(vec![(place, Ok(l3.clone()))]).map_err(|error| error.to_string())?;
        let named = tokio::select! {
            biased;
            () = power.failed() => None,
            named = identity.store(&mut devices) => Some(named),
        };
        let (identity, first) = match named {
            Some(Ok(named)) => named,
            Some(Err(error)) => {
                // The process ends, and its memory and requests with it.
                device.lose_power(CrashEffect::ProcessKilled, &mut self.random);
                return Err(error.to_string());
            }
            None => {
                device.lose_power(CrashEffect::draw(&mut self.random), &mut self.random);
                return Err(POWER_FAILED.into());
            }
        };
        check_first_generation(world, first, std::slice::from_ref(&l3));
        self.durable.begin(first);
        let page_bytes = setup.geometry.page_bytes() as u64;
        let node = NodeOptions {
            l2_bytes: setup.l2_bytes,
            in_flight_bytes: Some(setup.in_flight_bytes),
            write_policy: setup.write_policy,
            scrub_bytes_per_second: 1 << 20,
            connection_put_bytes: setup.tight.then_some(3 * page_bytes),
            connection_outstanding_bytes: setup.tight.then_some(6 * page_bytes),
            connection_request_bytes: setup.tight.then_some(TIGHT_REQUEST_BYTES),
            seed: Some(world.seed),
            ..NodeOptions::default()
        };
        let store = Store::new(&node, arena.clone(), devices, clock, first);
        let address = address(self.number);
        let listener = ArenaListenerInfo { machine: "simulated".into(), name: address.clone() };
        let rdma = self.open_rdma(&arena).await;
        let server = Server::new(store, identity, Some(listener), rdma, setup.node_protocols[self.number]);
        let stop = CancellationToken::new();
        let kept = (server.clone(), stop.clone());
        let upkeep = tokio::spawn(async move { kept.0.store().upkeep(kept.1).await });
        world.event("node up", [self.number as u64, turn, first]);
        self.network().up(&address, server.clone(), arena.clone());
        let recovery = (l3.clone(), device.clone(), world.clone());
        tokio::spawn(async move {
            let (l3, device, world) = recovery;
            if let Ok(Ok(report)) = timeout(RECOVERY_MAX, l3.recovered()).await {
                world.count("pages recovered", report.pages);
            }
            device.started();
        });
        self.running = Some(RunningNode { server, arena, device, power, l3, stop, upkeep });
        Ok(())
    }

    async fn open_rdma(&self, arena: &Arc<Arena>) -> Option<Rdma> {
        let setup = &self.cluster.setup;
        let fabric = setup.fabric(&setup.node_devices[self.number]);
        let options = RdmaOptions {
            enabled: !fabric.devices.is_empty(),
            fabric,
            page_age_max: Duration::from_millis(setup.page_age_ms),
        };
        let _no_faults = FaultPause::start();
        let known = Arc::downgrade(arena);
        rdma::track_owner(arena.start(), arena.capacity(), move |bytes| Some(known.upgrade()?.is_taken(bytes)));
        larder_node::sim::open_rdma(&options, arena).await
    }

    /// Tells which pages the log has. Only crashes make a difference between them.
    fn note_pages(&mut self) {
        if let Some(running) = self.running.as_ref().filter(|_| self.cluster.setup.profile == Profile::Crash) {
            self.durable.note(&self.cluster, &running.l3);
        }
    }

    /// Returns `true` if a crash may have torn the page. Its next read tells.
    pub(super) fn may_have_torn(&self, key: u64) -> bool {
        self.running.as_ref().is_some_and(|running| self.durable.may_be_torn(&self.cluster.id(key), &running.l3))
    }

    fn crash(&mut self) {
        let effect = CrashEffect::draw(&mut self.random);
        let silent = !matches!(effect, CrashEffect::ProcessKilled);
        self.note_pages();
        let Some(running) = self.running.take() else { return };
        self.durable.end(silent);
        self.cluster.world.fault("node crashes", [self.number as u64, self.starts, silent.into()]);
        self.network().down(&address(self.number), silent);
        running.stop.cancel();
        running.upkeep.abort();
        running.device.lose_power(effect, &mut self.random);
    }

    pub(super) async fn close(&mut self) {
        let Some(running) = self.running.take() else { return };
        self.cluster.world.event("node closes", [self.number as u64, self.starts, 0]);
        self.cluster.world.count("nodes closed", 1);
        self.network().down(&address(self.number), false);
        running.stop.cancel();
        let _ = running.upkeep.await;
        let closed = async {
            running.server.store().close((Instant::now() + CLOSE_PATIENCE).into_std()).await;
            if self.cluster.setup.profile == Profile::Crash {
                self.durable.note(&self.cluster, &running.l3);
            }
            // The process ends only after its device has completed all requests.
            drop((running.server, running.l3));
            running.device.idle().await;
        };
        let power_failed = tokio::select! {
            biased;
            () = running.power.failed() => true,
            closed = timeout(CLOSE_MAX, closed) => {
                if closed.is_err() {
                    self.cluster.violate(format!("node {} does not close in time", self.number));
                }
                false
            }
        };
        self.durable.end(power_failed);
        if power_failed {
            running.device.lose_power(CrashEffect::draw(&mut self.random), &mut self.random);
        }
    }

    pub(super) fn devices(&self) -> usize {
        self.cluster.setup.node_devices[self.number].len()
    }

    pub(super) fn up(&self) -> Option<(&Server, &Arc<Arena>)> {
        self.running.as_ref().map(|running| (&running.server, &running.arena))
    }
}
