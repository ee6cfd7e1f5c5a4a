//! One node after the other at each address: it starts, serves, closes or crashes, and starts again.
//!
//! Always true: what a crashed node left of its memory is not used again; its devices are.

use super::{Wire, net::Network};
use crate::device::{Power, SimDevice};
use crate::dice::{Dice, Stream};
use crate::disk::Loss;
use crate::faults::Faults;
use crate::life::{STARTS_MAX, world_is_calm};
use crate::rdma::{self, Shelter};
use larder_device::{Arena, Clock, Device};
use larder_l3::{L3, L3Options};
use larder_node::sim::{Devices, Rdma, Server, Store};
use larder_node::{L3Device, NodeOptions, RdmaOptions};
use larder_wire::LocalDoor;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

/// By then a device was scanned, however slow it is.
const RECOVERY_MAX: Duration = Duration::from_secs(1200);
/// Most time in which a node stops, as for a real one.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);
/// Slow devices may add to it.
const CLOSE_MAX: Duration = Duration::from_secs(120);
const POWER_FAILED: &str = "power failed";
const SEGMENT_BYTES: u64 = 1 << 20;
/// Some six requests of one connection at a time.
const TIGHT_REQUEST_BYTES: u64 = 8 << 10;

/// A node that is up.
struct Running {
    server: Server,
    arena: Arc<Arena>,
    device: Arc<SimDevice>,
    power: Arc<Power>,
    l3: L3,
    stop: CancellationToken,
    upkeep: JoinHandle<()>,
}

/// An address, and what is behind it.
pub(super) struct Host {
    wire: Arc<Wire>,
    number: usize,
    dice: Dice,
    epoch: u64,
    running: Option<Running>,
}

pub(super) fn address(number: usize) -> String {
    format!("node-{number}:1")
}

impl Host {
    pub(super) fn new(wire: Arc<Wire>, number: usize) -> Host {
        let dice = Dice::new(wire.world.seed, Stream::Host(number as u64));
        Host { wire, number, dice, epoch: 0, running: None }
    }

    fn network(&self) -> &Network {
        &self.wire.network
    }

    /// Is up now and then, until `rest`; then it is up.
    pub(super) async fn live(mut self, rest: CancellationToken) -> Host {
        while !rest.is_cancelled() && !self.wire.world.failed() {
            self.start().await;
            let seconds = [3, 10, 40][self.dice.below(3) as usize];
            let until = Instant::now() + Duration::from_millis(self.dice.below(seconds * 1000));
            let Some(power) = self.running.as_ref().map(|running| running.power.clone()) else { return self };
            let mut lost = false;
            while !rest.is_cancelled() && !lost && Instant::now() < until {
                let next = until.min(Instant::now() + Duration::from_secs(1));
                lost = timeout_at(next, power.failed()).await.is_ok();
                if self.wire.crashes() && self.dice.chance(100_000) {
                    self.wire.network.break_one(&address(self.number), &mut self.dice);
                }
            }
            if rest.is_cancelled() && !lost {
                power.stays();
                lost = !power.is_on();
                if !lost {
                    break;
                }
            }
            if lost || (self.wire.crashes() && self.dice.chance(600_000)) {
                self.crash();
            } else {
                self.close().await;
            }
            sleep(Duration::from_millis(self.dice.below(4_000))).await;
        }
        self.start().await;
        self
    }

    /// Starts it if it is down.
    pub(super) async fn start(&mut self) {
        let world = self.wire.world.clone();
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
                Err(error) if error != POWER_FAILED && (last || world_is_calm(&faults)) => {
                    world.violate(format!("node {} does not start: {error}", self.number));
                }
                _ => {}
            }
        }
    }

    async fn try_start(&mut self) -> Result<(), String> {
        let Wire { world, setup, .. } = &*self.wire;
        self.epoch += 1;
        let turn = self.epoch;
        let events = match self.wire.crashes() && self.wire.chaos.load(Ordering::Relaxed) && self.dice.chance(300_000) {
            true => self.dice.between(1, 2_000),
            false => u64::MAX,
        };
        let power = Power::lasting(events);
        let arena = Arena::new((setup.l2_bytes + setup.in_flight_bytes) as usize).map_err(|error| error.to_string())?;
        let capacity = setup.segments * SEGMENT_BYTES + 16_384;
        let clock = Clock::at(world.unix_ms());
        let options = L3Options {
            segment_bytes: SEGMENT_BYTES,
            seed: Some(world.seed | (self.number as u64) << 56),
            clock,
            ..L3Options::new("/simulated", capacity)
        };
        let device = SimDevice::start(world.clone(), arena.clone(), self.number, turn, power.clone(), capacity);
        // Power that fails while the log is opened leaves nobody to answer.
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
                device.lose_power(Loss::draw(&mut self.dice), &mut self.dice);
                return Err(POWER_FAILED.into());
            }
        };
        let place = L3Device { dir: format!("/simulated/{}", self.number).into(), bytes: capacity };
        let devices = Devices::of(vec![(place, Ok(l3.clone()))]).map_err(|error| error.to_string())?;
        let page_bytes = setup.geometry.page_bytes() as u64;
        let node = NodeOptions {
            l2_bytes: setup.l2_bytes,
            in_flight_bytes: Some(setup.in_flight_bytes),
            write_policy: setup.write_policy,
            scrub_bytes_per_second: 1 << 20,
            connection_bytes: setup.tight.then_some(3 * page_bytes),
            asked_bytes: setup.tight.then_some(6 * page_bytes),
            connection_request_bytes: setup.tight.then_some(TIGHT_REQUEST_BYTES),
            seed: Some(world.seed),
            ..NodeOptions::default()
        };
        let store = Store::new(&node, arena.clone(), devices, clock, self.epoch << 32);
        let address = address(self.number);
        let door = LocalDoor { machine: "simulated".into(), name: address.clone() };
        let name = (format!("node-{}", self.number), self.epoch);
        let rdma = self.open_rdma(&arena).await;
        let server = Server::new(store, name, Some(door), rdma, setup.node_protocols[self.number]);
        let stop = CancellationToken::new();
        let kept = (server.clone(), stop.clone());
        let upkeep = tokio::spawn(async move { kept.0.store().upkeep(kept.1).await });
        world.event("node up", [self.number as u64, self.epoch, 0]);
        self.network().up(&address, server.clone(), arena.clone());
        let recovery = (l3.clone(), device.clone(), world.clone());
        tokio::spawn(async move {
            let (l3, device, world) = recovery;
            if let Ok(Ok(report)) = timeout(RECOVERY_MAX, l3.recovered()).await {
                world.count("pages recovered", report.pages);
            }
            device.started();
        });
        self.running = Some(Running { server, arena, device, power, l3, stop, upkeep });
        Ok(())
    }

    async fn open_rdma(&self, arena: &Arc<Arena>) -> Option<Rdma> {
        let setup = &self.wire.setup;
        let fabric = setup.fabric(&setup.node_devices[self.number]);
        let options = RdmaOptions {
            enabled: !fabric.devices.is_empty(),
            fabric,
            page_age_max: Duration::from_millis(setup.page_age_ms),
        };
        let _sheltered = Shelter::begin();
        let known = Arc::downgrade(arena);
        rdma::watch(arena.start(), arena.capacity(), move |bytes| Some(known.upgrade()?.is_taken(bytes)));
        larder_node::sim::open_rdma(&options, arena).await
    }

    /// It is gone, without a word or with the machine.
    fn crash(&mut self) {
        let Some(running) = self.running.take() else { return };
        let loss = Loss::draw(&mut self.dice);
        let silent = !matches!(loss, Loss::Kill);
        self.wire.world.fault("node crashes", [self.number as u64, self.epoch, silent.into()]);
        self.network().down(&address(self.number), silent);
        running.stop.cancel();
        running.upkeep.abort();
        running.device.lose_power(loss, &mut self.dice);
    }

    /// It stops as asked, and writes what waits to be written.
    pub(super) async fn close(&mut self) {
        let Some(running) = self.running.take() else { return };
        self.wire.world.event("node closes", [self.number as u64, self.epoch, 0]);
        self.wire.world.count("nodes closed", 1);
        self.network().down(&address(self.number), false);
        running.stop.cancel();
        let _ = running.upkeep.await;
        let closed = async {
            running.server.store().close((Instant::now() + CLOSE_PATIENCE).into_std()).await;
            // Its process ends when its device has answered.
            drop((running.server, running.l3));
            running.device.idle().await;
        };
        let power_failed = tokio::select! {
            biased;
            () = running.power.failed() => true,
            closed = timeout(CLOSE_MAX, closed) => {
                if closed.is_err() {
                    self.wire.violate(format!("node {} does not close", self.number));
                }
                false
            }
        };
        if power_failed {
            running.device.lose_power(Loss::draw(&mut self.dice), &mut self.dice);
        }
    }

    /// RDMA devices that it has.
    pub(super) fn devices(&self) -> usize {
        self.wire.setup.node_devices[self.number].len()
    }

    /// What it serves from, if it is up.
    pub(super) fn up(&self) -> Option<(&Server, &Arc<Arena>)> {
        self.running.as_ref().map(|running| (&running.server, &running.arena))
    }
}
