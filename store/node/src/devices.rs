//! The devices of L3, each with a log of its own.
//!
//! Invariants:
//! - A lookup finds the put with the highest generation that a usable device has, or nothing.
//! - A forget reaches every device. It succeeds only if each device succeeds, and never while a
//!   device is unopened: a page on it could come back.
//! - A failing device costs its own pages. It is quarantined for reads or for writes (see `health`)
//!   and probed later. It never stops a node.
//!
//! Weighted rendezvous hashing over the directories decides the device of a page; the weight is the
//! device's capacity. A write that fails goes to the next device in that order. A read asks any
//! device that has the page, so an operator may add, remove and reorder devices.

mod ranks;

use crate::health::{Admission, Fault, Health};
use crate::options::{L3Device, NodeOptions};
use crate::page_changes::L3Changes;
use crate::policy::mixed;
use futures::future::join_all;
use larder_format::{NamespaceId, PageId, PageMeta};
use larder_log::machine::AppendError;
use larder_log::{HeldRecord, L3, L3Error, L3Location, L3Options, ListedPages, NamedPage, Pin, SharedFloors};
use larder_memory::{Arena, Slot};
use larder_runtime::sync::{Mutex, MutexGuard};
use larder_runtime::{Clock, fail_point, now};
use larder_wire::PinKind;
use serde_json::{Value, json};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Maximum time for one read of one device. The reader then gets the page from another device, or a
/// miss.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that a start waits for recovery. Recovery of larger logs continues while the node
/// serves.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum time that a start without a known identity waits for recovery.
const GENERATIONS_MAX: Duration = Duration::from_secs(120);
/// Maximum time to open a log, which reads the header of each segment.
const OPEN_MAX: Duration = Duration::from_secs(120);
/// Maximum time that a write waits for the recovery of a log. The page stays readable in
/// `writeback` meanwhile.
const RECOVERY_MAX: Duration = Duration::from_secs(600);
/// Maximum time for one write to one device. After it, the write goes to the next device in the
/// order of rendezvous hashing.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

const HEALTHY: &str = "healthy";
const PROBING: &str = "probing";
const QUARANTINED: &str = "quarantined";
const UNOPENED: &str = "unopened";

pub type OnDamage = Arc<dyn Fn(PageId) + Send + Sync>;

struct Device {
    dir: PathBuf,
    bytes: u64,
    /// Hash of the directory's name: the device's identity in rendezvous hashing.
    seed: u64,
    l3: L3,
    /// `false` if the node's identity could not be stored beside the log. See `identity`.
    takes_pages: bool,
    /// Reads and writes are judged apart: a full or worn drive often still reads.
    reads: Mutex<Health>,
    writes: Mutex<Health>,
    errors: AtomicU64,
    timeouts: AtomicU64,
    full: AtomicU64,
}

#[derive(Debug)]
struct UnopenedDevice {
    dir: PathBuf,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceCondition {
    pub(crate) dir: String,
    pub(crate) usable: bool,
    pub(crate) reason: String,
}

/// Location of a page on one device. A hint: the record may move or disappear before the read,
/// which verifies it. See `Tiers::find`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceLocation {
    device: usize,
    record: L3Location,
}

impl DeviceLocation {
    pub(crate) fn id(&self) -> &PageId {
        self.record.id()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.record.generation()
    }
}

/// All devices of a node. The list is fixed at the start of the node: only logs and health change
/// afterwards.
#[derive(Default)]
pub struct Devices {
    devices: Vec<Device>,
    unopened: Vec<UnopenedDevice>,
    /// Capacity of all configured devices, the unopened ones included.
    bytes: u64,
}

impl Devices {
    /// Opens the logs of all configured devices at once and waits up to [`RECOVERY_PATIENCE`] for
    /// their recovery. Fails only if no log opens.
    pub(crate) async fn open(options: &NodeOptions, clock: Clock, arena: &Arc<Arena>) -> Result<Devices, L3Error> {
        let configured = options.l3_devices();
        let total = configured.iter().map(|device| device.bytes).sum();
        // A log starts with the largest quota of all: recovery must not drop pages of a namespace
        // whose own quota the log learns only at its first handshake.
        let own = options.quotas.iter().map(|quota| quota.bytes);
        let quota_max = options.quota_default.map(|quota| own.fold(quota, u64::max));
        let opens = configured.into_iter().map(|device| async move {
            let log = L3Options {
                quota_default: quota_max.map_or(u64::MAX, |quota| share_of(quota, device.bytes, total)),
                clock,
                ..options.log_options(&device)
            };
            // A device that hangs must not keep the others from starting.
            let opened = tokio::time::timeout(OPEN_MAX, L3::open(log, arena.clone())).await;
            (device, opened.unwrap_or(Err(L3Error::Deadline("opening"))))
        });
        let devices = Devices::of(join_all(opens).await)?;
        devices.wait_until_recovered().await;
        Ok(devices)
    }

    /// Takes devices with their logs. A log that failed to open leaves its device unopened. Returns
    /// the first error if no log is open.
    pub fn of(logs: Vec<(L3Device, Result<L3, L3Error>)>) -> Result<Devices, L3Error> {
        let bytes = logs.iter().map(|(device, _)| device.bytes).sum();
        let mut devices = Devices { bytes, ..Devices::default() };
        let mut first_error = None;
        for (L3Device { dir, bytes }, log) in logs {
            match log {
                Ok(l3) => devices.devices.push(Device::new(dir, bytes, l3)),
                Err(error) => {
                    tracing::error!(
                        dir = %dir.display(), %error,
                        "cannot open an L3 device; the node runs without it, and forgets fail until it is back"
                    );
                    devices.unopened.push(UnopenedDevice { dir, reason: error.to_string() });
                    first_error.get_or_insert(error);
                }
            }
        }
        match first_error {
            Some(error) if devices.devices.is_empty() => Err(error),
            _ => Ok(devices),
        }
    }

    /// Keeps new pages away from the devices of these directories. Their pages stay readable.
    pub(crate) fn take_no_pages(&mut self, dirs: &[PathBuf]) {
        self.devices.iter_mut().for_each(|device| device.takes_pages = !dirs.contains(&device.dir));
    }

    /// Waits until small logs are recovered, so that a restarted node does not begin with misses.
    async fn wait_until_recovered(&self) {
        let recovered = join_all(self.devices.iter().map(|device| device.l3.recovered()));
        if tokio::time::timeout(RECOVERY_PATIENCE, recovered).await.is_err() {
            tracing::info!("serving while L3 recovers; pages not found yet are misses");
        }
    }

    /// Waits until all generations on the devices are known, for at most [`GENERATIONS_MAX`].
    pub(crate) async fn wait_for_generations(&self) {
        let recovered = join_all(self.devices.iter().map(|device| device.l3.recovered()));
        if tokio::time::timeout(GENERATIONS_MAX, recovered).await.is_err() {
            // Recovery goes from the newest segment to the oldest, so the largest is known by now.
            tracing::warn!("L3 still recovers; the node starts with the largest generation found so far");
        }
    }

    /// Largest generation of a put that the recovery of any device has found so far.
    pub(crate) fn generation_max(&self) -> u64 {
        self.devices.iter().map(|device| device.l3.generation_max()).max().unwrap_or(0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    pub(crate) fn writable(&self) -> bool {
        self.devices.iter().any(Device::is_writable)
    }

    /// Finds the newest put of a page on the usable devices, with one index probe per device. Of
    /// equal generations the device that rendezvous hashing prefers wins.
    pub(crate) fn lookup(&self, id: &PageId) -> Option<DeviceLocation> {
        self.lookup_except(id, &[])
    }

    fn lookup_except(&self, id: &PageId, tried: &[usize]) -> Option<DeviceLocation> {
        let find = |(index, device): (usize, &Device)| {
            // The guard ends with this statement: the log takes its own lock without it.
            let usable = !tried.contains(&index) && device.reads.lock().usable(now());
            let record = if usable { device.l3.lookup(id) } else { None };
            Some(DeviceLocation { device: index, record: record? })
        };
        let better = |a: DeviceLocation, b: DeviceLocation| {
            // Most pages are on one device, so the score is computed for ties only.
            let order = a.generation().cmp(&b.generation()).then_with(|| {
                let score = |location: &DeviceLocation| self.devices[location.device].score(id);
                score(&a).total_cmp(&score(&b))
            });
            if order == Ordering::Less { b } else { a }
        };
        self.devices.iter().enumerate().filter_map(find).reduce(better)
    }

    pub(crate) fn generation(&self, id: &PageId) -> Option<u64> {
        self.lookup(id).map(|location| location.generation())
    }

    pub(crate) fn is_current(&self, location: &DeviceLocation) -> bool {
        self.devices[location.device].l3.is_current(&location.record)
    }

    /// Reads a page from the location of a lookup, or from another device if that one fails. Asks
    /// each device at most once. Fails only with [`L3Error::NoMemory`].
    pub(crate) async fn read(&self, location: &DeviceLocation) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        self.read_with(location, |l3, record| async move { l3.read_at(&record, now() + READ_TIMEOUT).await }).await
    }

    /// Reads the metadata of a page like [`Devices::read`], without its payload.
    pub(crate) async fn read_meta(&self, location: &DeviceLocation) -> Result<Option<PageMeta>, L3Error> {
        self.read_with(location, |l3, record| async move { l3.read_meta_at(&record, now() + READ_TIMEOUT).await }).await
    }

    /// Holds the record of a page like [`Devices::read`], without reading its payload.
    pub(crate) async fn hold(&self, location: &DeviceLocation) -> Result<Option<HeldRecord>, L3Error> {
        self.read_with(location, |l3, record| async move { l3.hold_at(&record, now() + READ_TIMEOUT).await }).await
    }

    async fn read_with<T, F: Future<Output = Result<Option<T>, L3Error>>>(
        &self,
        location: &DeviceLocation,
        read: impl Fn(L3, L3Location) -> F,
    ) -> Result<Option<T>, L3Error> {
        let id = location.id();
        let mut tried = Vec::new();
        let mut next = Some(*location);
        while let Some(location) = next {
            let device = &self.devices[location.device];
            // `None` if the device was quarantined since the lookup.
            if let Some(request) = device.request(IoKind::Reads) {
                match read(device.l3.clone(), location.record).await {
                    Ok(Some(found)) => {
                        request.succeeded();
                        return Ok(Some(found));
                    }
                    // Gone or damaged: another device may have an intact copy.
                    Ok(None) => {}
                    // The arena is full, which no other device can help.
                    Err(error @ L3Error::NoMemory { .. }) => return Err(error),
                    Err(error) => {
                        tracing::warn!(?id, dir = %device.dir.display(), %error, "L3 read failed; trying other devices");
                        request.failed(&error);
                    }
                }
            }
            tried.push(location.device);
            next = self.lookup_except(id, &tried);
        }
        Ok(None)
    }

    /// Writes a page to the device that rendezvous hashing prefers, or to the next that accepts it.
    /// `quota` is that of the page's namespace over all devices.
    pub(crate) async fn write(&self, meta: &PageMeta, payload: &Slot, quota: Option<u64>) -> Result<(), L3Error> {
        let mut last = L3Error::Closed;
        for device in self.write_order(&meta.id) {
            // A recovering device is healthy, so neither the wait nor its end counts as a fault.
            let recovered = tokio::time::timeout(RECOVERY_MAX, device.l3.recovered()).await;
            if !matches!(recovered, Ok(Ok(_))) {
                last = L3Error::Deadline("recovery");
                continue;
            }
            let Some(request) = device.request(IoKind::Writes) else { continue };
            let written = device.l3.write(meta.clone(), payload.clone(), now() + WRITE_TIMEOUT).await;
            // A log drops the quotas of namespaces without pages. This namespace has one from now
            // on.
            if let Some(bytes) = quota.map(|quota| share_of(quota, device.bytes, self.bytes))
                && device.l3.quota(&meta.id.namespace) != bytes
            {
                device.l3.set_quota(meta.id.namespace, bytes);
            }
            match written {
                Ok(()) => {
                    request.succeeded();
                    return Ok(());
                }
                // The page itself is unacceptable: no device takes it.
                Err(error @ L3Error::Invalid(_)) => return Err(error),
                Err(error) => {
                    tracing::warn!(
                        id = ?meta.id, dir = %device.dir.display(), %error,
                        "L3 write failed; trying other devices"
                    );
                    request.failed(&error);
                    last = error;
                }
            }
        }
        Err(last)
    }

    /// Usable devices in the order in which they are asked to write a page. Recovering devices come
    /// last: a write to them would wait although another device can take it.
    fn write_order(&self, id: &PageId) -> Vec<&Device> {
        let mut order: Vec<&Device> = self.devices.iter().filter(|device| device.is_writable()).collect();
        let recovering = |device: &Device| device.l3.recovery().report.is_none();
        order.sort_by(|a, b| recovering(a).cmp(&recovering(b)).then_with(|| b.score(id).total_cmp(&a.score(id))));
        order
    }

    /// Returns `true` if any open device has the page, quarantined or not.
    pub(crate) fn has(&self, id: &PageId) -> bool {
        self.devices.iter().any(|device| device.l3.lookup(id).is_some())
    }

    /// Number of open devices.
    pub(crate) fn count(&self) -> usize {
        self.devices.len()
    }

    /// Returns `true` while a device may have pages that lookups do not find yet.
    pub(crate) fn is_recovering(&self) -> bool {
        self.devices.iter().any(|device| device.l3.recovery().report.is_none())
    }

    /// Returns `true` if a configured device may have pages that no count has: its log recovers, or
    /// did not open.
    pub(crate) fn may_have_more_pages(&self) -> bool {
        !self.unopened.is_empty() || self.is_recovering()
    }

    /// Directories whose logs did not open. Their pages are not served.
    pub(crate) fn unopened_dirs(&self) -> Vec<PathBuf> {
        self.unopened.iter().map(|device| device.dir.clone()).collect()
    }

    /// Number of pages of a namespace. A page on two devices counts twice.
    pub(crate) fn pages_of(&self, namespace: &NamespaceId) -> u64 {
        self.devices.iter().map(|device| device.l3.pages_of(namespace)).sum()
    }

    /// Pages of the namespaces on all devices, and the bytes of their records. At most `max`
    /// namespaces of each device.
    pub(crate) fn namespaces(&self, max: usize) -> BTreeMap<NamespaceId, (u64, u64)> {
        let mut all = BTreeMap::<NamespaceId, (u64, u64)>::new();
        for used in self.devices.iter().flat_map(|device| device.l3.namespaces(max)) {
            let (pages, bytes) = all.entry(used.namespace).or_default();
            *pages += used.pages;
            *bytes += used.bytes;
        }
        all
    }

    /// Time at which a page last left a device for lack of room, in milliseconds since 1970.
    pub(crate) fn departed_unix_ms(&self, id: &PageId) -> Option<u64> {
        self.devices.iter().filter_map(|device| device.l3.departed_unix_ms(id)).max()
    }

    /// Reads the next pages of a namespace on one device: see [`L3::list`]. A device that is gone
    /// or fails has none. Returns `None` if the device did not answer before the deadline.
    pub(crate) async fn list(
        &self,
        device: usize,
        namespace: &NamespaceId,
        after: (u64, u64),
        max: usize,
        deadline: Instant,
    ) -> Option<ListedPages> {
        let Some(device) = self.devices.get(device) else { return Some(ListedPages::default()) };
        let list = device.l3.list(namespace, after, max);
        tokio::time::timeout_at(deadline.into(), list).await.ok().map(Result::unwrap_or_default)
    }

    /// Forgets pages on all devices, durably. After an error some may come back: the caller must
    /// try again.
    pub(crate) async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<(), ForgetError> {
        let skipped = usize::from(fail_point!("node.forget-skips-device") && self.devices.len() > 1);
        let forgets = self.devices.iter().skip(skipped).map(|device| async move {
            let forgotten = device.l3.forget(ids, deadline).await;
            forgotten.map_err(|error| {
                // The client chose the deadline, so missing it is no fault of the device.
                if !matches!(error, L3Error::Deadline(_)) {
                    device.failed(IoKind::Writes, Admission::Normal, &error);
                }
                ForgetError { dir: device.dir.clone(), reason: error.to_string() }
            })
        });
        // All devices finish before the first error returns: most of the pages are gone then.
        let all = join_all(forgets).await;
        all.into_iter().collect::<Result<Vec<usize>, _>>()?;
        match self.unopened.first().filter(|_| !fail_point!("node.forget-ignores-unopened-device")) {
            Some(UnopenedDevice { dir, .. }) => Err(ForgetError {
                dir: dir.clone(),
                reason: "the device could not be opened at start; restart the node with it, or without it".into(),
            }),
            None => Ok(()),
        }
    }

    /// Sets the quota of a namespace. Each device enforces a share in proportion to its capacity,
    /// as if the unopened devices were there.
    pub(crate) fn set_quota(&self, namespace: NamespaceId, bytes: u64) {
        for device in &self.devices {
            device.l3.set_quota(namespace, share_of(bytes, device.bytes, self.bytes));
        }
    }

    /// Lets all logs keep these floors, also as they change later.
    pub(crate) fn share_floors(&self, floors: &Arc<SharedFloors>) {
        for device in &self.devices {
            device.l3.share_floors(floors.clone());
        }
    }

    pub(crate) fn pin(&self, ids: &[PageId], kind: PinKind) {
        let pin = match kind {
            PinKind::None => Pin::None,
            PinKind::Soft => Pin::Soft,
            PinKind::Hard => Pin::Hard,
        };
        for device in &self.devices {
            device.l3.pin(ids, pin);
        }
    }

    /// Returns the directory of each open device, and `true` for those whose scrub is late.
    pub(crate) fn late_scrubs(&self) -> Vec<(String, bool)> {
        let late = |device: &Device| (device.dir.display().to_string(), device.l3.scrub_rate().is_late);
        self.devices.iter().map(late).collect()
    }

    pub fn scrub_now(&self) {
        self.devices.iter().for_each(|device| device.l3.scrub_now());
    }

    /// Reports uses of pages, so that the logs keep them longer.
    pub(crate) fn touch(&self, ids: &[PageId]) {
        self.devices.iter().for_each(|device| device.l3.touch(ids));
    }

    /// Registers a listener for damage that a device finds. The log calls it without its own lock,
    /// so the listener may take other locks.
    pub(crate) fn on_damage(&self, listener: &OnDamage) {
        for device in &self.devices {
            let listener = listener.clone();
            device.l3.on_damage(move |id| listener(id));
        }
    }

    /// Sets the listener for pages that enter and leave the logs.
    pub(crate) fn listen(&self, listener: &Arc<L3Changes>) {
        self.devices.iter().for_each(|device| device.l3.listen(listener.clone()));
    }

    /// Names of pages on a device, as [`L3::names_from`]. `None` if there is no such device.
    pub(crate) fn names_from(&self, device: usize, place: u64, max: usize) -> Option<(Vec<NamedPage>, Option<u64>)> {
        Some(self.devices.get(device)?.l3.names_from(place, max))
    }

    /// Waits for writes in flight and closes all logs.
    pub(crate) async fn close(&self) {
        join_all(self.devices.iter().map(|device| device.l3.close())).await;
    }

    pub(crate) fn conditions(&self) -> Vec<DeviceCondition> {
        let open = self.devices.iter().map(|device| {
            let (state, reason) = device.condition();
            let reason = reason.map_or(String::new(), |reason| format!("{state}: {reason}"));
            DeviceCondition { dir: device.dir.display().to_string(), usable: state != QUARANTINED, reason }
        });
        let unopened = self.unopened.iter().map(|unopened| DeviceCondition {
            dir: unopened.dir.display().to_string(),
            usable: false,
            reason: UNOPENED.into(),
        });
        open.chain(unopened).collect()
    }

    /// Figures of all logs together and of each device. Null if the node has no L3.
    pub(crate) fn status(&self) -> Value {
        if self.devices.is_empty() {
            return Value::Null;
        }
        let stats: Vec<Value> =
            self.devices.iter().filter_map(|device| serde_json::to_value(device.l3.stats()).ok()).collect();
        let mut total = sum(&stats);
        let open = self.devices.iter().zip(stats).map(|(device, stats)| device.status(stats));
        let unopened = self.unopened.iter().map(|unopened| {
            json!({ "dir": unopened.dir.display().to_string(), "state": UNOPENED, "reason": unopened.reason })
        });
        total["devices"] = open.chain(unopened).collect();
        total
    }
}

fn share_of(quota: u64, bytes: u64, total: u64) -> u64 {
    // In 128 bits: the product of two capacities overflows 64.
    let share = u128::from(quota) * u128::from(bytes) / u128::from(total.max(1));
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// Adds the numbers of several logs. A flag is true if it is true in all of them.
fn sum(stats: &[Value]) -> Value {
    let mut total = serde_json::Map::new();
    for (key, value) in stats.iter().filter_map(Value::as_object).flatten() {
        let before = total.get(key);
        let after = match (value, before) {
            (Value::Number(_), Some(before)) => {
                json!(value.as_u64().unwrap_or_default() + before.as_u64().unwrap_or_default())
            }
            (Value::Bool(flag), Some(before)) => json!(*flag && before.as_bool().unwrap_or(true)),
            _ => value.clone(),
        };
        total.insert(key.clone(), after);
    }
    Value::Object(total)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IoKind {
    Reads,
    Writes,
}

impl fmt::Display for IoKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoKind::Reads => "reads",
            IoKind::Writes => "writes",
        })
    }
}

/// A request in flight. Dropping it tells the device's health that the request has ended, so that a
/// cancelled probe does not block the next one.
struct DeviceRequest<'a> {
    device: &'a Device,
    kind: IoKind,
    admission: Admission,
}

impl DeviceRequest<'_> {
    fn succeeded(&self) {
        if self.device.health(self.kind).succeeded(self.admission) {
            tracing::info!(dir = %self.device.dir.display(), kind = %self.kind, "L3 device is healthy again");
        }
    }

    fn failed(&self, error: &L3Error) {
        self.device.failed(self.kind, self.admission, error);
    }
}

impl Drop for DeviceRequest<'_> {
    fn drop(&mut self) {
        self.device.health(self.kind).finished(self.admission, now());
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", dir.display())]
pub struct ForgetError {
    pub dir: PathBuf,
    pub reason: String,
}

impl Device {
    fn new(dir: PathBuf, bytes: u64, l3: L3) -> Device {
        let name = dir.display().to_string();
        Device {
            bytes,
            seed: name.bytes().fold(0, |folded, byte| mixed(folded ^ u64::from(byte))),
            dir,
            l3,
            takes_pages: true,
            reads: Mutex::default(),
            writes: Mutex::default(),
            errors: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
            full: AtomicU64::new(0),
        }
    }

    fn is_writable(&self) -> bool {
        self.takes_pages && self.writes.lock().usable(now())
    }

    /// Score of weighted rendezvous hashing: the probability to score highest is proportional to
    /// the device's capacity.
    fn score(&self, id: &PageId) -> f64 {
        let hash = id.key.0.chunks_exact(8).chain(id.namespace.0.chunks_exact(8)).fold(self.seed, |folded, word| {
            mixed(folded ^ word.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)))
        });
        // 53 bits fit an f64 exactly. The half keeps the result inside (0, 1), where the logarithm
        // is finite and negative.
        let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        self.bytes as f64 / -uniform.ln()
    }

    fn health(&self, kind: IoKind) -> MutexGuard<'_, Health> {
        match kind {
            IoKind::Reads => self.reads.lock(),
            IoKind::Writes => self.writes.lock(),
        }
    }

    /// Asks the device's health for a request. Returns `None` while the device is quarantined.
    fn request(&self, kind: IoKind) -> Option<DeviceRequest<'_>> {
        let admission = self.health(kind).admit(now())?;
        Some(DeviceRequest { device: self, kind, admission })
    }

    fn failed(&self, kind: IoKind, admission: Admission, error: &L3Error) {
        match error {
            // A full file system fails writes only, and the log continues in the space it has. So
            // it is counted and no fault.
            L3Error::Io { source, .. }
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
            {
                self.full.fetch_add(1, Relaxed);
            }
            // The device is not at fault. The next write tries again.
            L3Error::Io { source, .. } if larder_io::is_out_of_descriptors(source) => {}
            L3Error::Deadline(_) => self.record_fault(kind, admission, Fault::Timeout),
            L3Error::Io { .. } | L3Error::Closed | L3Error::Append(AppendError::Stopped) => {
                self.record_fault(kind, admission, Fault::Error);
            }
            _ => {}
        }
    }

    fn record_fault(&self, kind: IoKind, admission: Admission, fault: Fault) {
        let count = if fault == Fault::Error { &self.errors } else { &self.timeouts };
        // Relaxed: the status alone reads the counter.
        count.fetch_add(1, Relaxed);
        if let Some(pause) = self.health(kind).failed(admission, fault, now()) {
            tracing::error!(
                dir = %self.dir.display(), %kind, %fault, ?pause,
                "L3 device quarantined; check the drive, the node probes it after the pause [LRD0206]"
            );
        }
    }

    /// State of the device, the worse of reads and writes, and the reason if it is not healthy.
    fn condition(&self) -> (&'static str, Option<String>) {
        let kinds = [IoKind::Reads, IoKind::Writes].map(|kind| {
            let health = self.health(kind);
            (health.state_name(), health.fault().map(|fault| format!("{fault} of {kind}")))
        });
        let worst = [QUARANTINED, PROBING].into_iter().find(|name| kinds.iter().any(|(state, _)| state == name));
        let mut reasons: Vec<String> = kinds.into_iter().filter_map(|(_, reason)| reason).collect();
        if !self.takes_pages {
            reasons.push("no new pages: the node's identity cannot be stored here".into());
        }
        let reason = if reasons.is_empty() { None } else { Some(reasons.join(", ")) };
        (worst.unwrap_or(HEALTHY), reason)
    }

    fn status(&self, stats: Value) -> Value {
        let (state, reason) = self.condition();
        json!({
            "dir": self.dir.display().to_string(),
            "state": state,
            "reason": reason,
            "errors": self.errors.load(Relaxed),
            "timeouts": self.timeouts.load(Relaxed),
            "file_system_full": self.full.load(Relaxed),
            "quarantines": self.reads.lock().quarantines() + self.writes.lock().quarantines(),
            "recovery": self.l3.recovery(),
            "scrub": self.l3.scrub(),
            "scrub_rate": self.l3.scrub_rate(),
            "log": stats,
        })
    }
}
