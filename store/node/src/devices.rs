//! The devices of L3, each with a log of its own.
//!
//! Always true:
//! - what is read is the page of the highest generation that a usable device has, or a miss;
//! - forgetting is told to every device, and succeeded only if every one says so, those that were left out included: what
//!   lies there could come back;
//! - a device that fails costs its own pages. It is set aside for reads or for writes (see `health`)
//!   and tried again later; it never stops a node.
//!
//! A page's device follows from rendezvous hashing over the directories, weighted by bytes; a write that fails goes to
//! the next one in that order. Reads ask whichever has the page, so devices may come, go and be given in another order.

use crate::clock::{Clock, now};
use crate::health::{Asked, Health, Trouble};
use crate::options::{L3Device, NodeOptions};
use crate::policy::mixed;
use futures::future::join_all;
use larder_core::log::AppendError;
use larder_core::planted::{Bug, has};
use larder_device::{Arena, Slot};
use larder_format::{NamespaceId, PageId, PageMeta};
use larder_l3::{L3, L3Entry, L3Error, L3Options, Pin};
use larder_wire::PinKind;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Most time for one read of one device.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Most time that a start waits for the logs to be scanned; then they are scanned while the node serves.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(2);
/// Most time to open a log, which is reading the header of each of its segments.
const OPEN_MAX: Duration = Duration::from_secs(120);
/// Most time that a write waits for a log to be scanned.
const RECOVERY_MAX: Duration = Duration::from_secs(600);
/// Most time for one write to one device.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

const SET_ASIDE: &str = "set aside";

/// Told whose page is damaged on a device.
pub type OnDamage = Arc<dyn Fn(PageId) + Send + Sync>;

struct Device {
    dir: PathBuf,
    bytes: u64,
    /// Of its directory's name.
    seed: u64,
    l3: L3,
    reads: Mutex<Health>,
    writes: Mutex<Health>,
    errors: AtomicU64,
    timeouts: AtomicU64,
    full: AtomicU64,
}

/// A device that could not be opened.
#[derive(Debug)]
struct LeftOut {
    dir: PathBuf,
    reason: String,
}

/// How one device is, for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceState {
    pub(crate) dir: String,
    pub(crate) usable: bool,
    /// In few words; empty if it is well.
    pub(crate) reason: String,
}

/// All devices of a node.
#[derive(Default)]
pub struct Devices {
    devices: Vec<Device>,
    left_out: Vec<LeftOut>,
    /// Of all that the node was given.
    bytes: u64,
}

impl Devices {
    /// Opens each one's log.
    pub(crate) async fn open(options: &NodeOptions, clock: Clock, arena: &Arc<Arena>) -> Result<Devices, L3Error> {
        let given = options.l3_devices();
        let total = given.iter().map(|device| device.bytes).sum();
        // What a namespace may have at most is known before it says hello; what it may have is told to the logs then.
        let own = options.quotas.iter().map(|quota| quota.bytes);
        let quota_max = options.quota_default.map(|quota| own.fold(quota, u64::max));
        let opens = given.into_iter().map(|L3Device { dir, bytes }| async move {
            let log = L3Options {
                quota_default: quota_max.map_or(u64::MAX, |quota| part(quota, bytes, total)),
                scrub_bytes_per_second: options.l3_scrub_bytes_per_second,
                executor: options.l3_executor,
                clock,
                ..L3Options::new(&dir, bytes)
            };
            // One that is silent must not keep the others.
            let opened = tokio::time::timeout(OPEN_MAX, L3::open(log, arena.clone())).await;
            (L3Device { dir, bytes }, opened.unwrap_or(Err(L3Error::Deadline("opening"))))
        });
        let devices = Devices::of(join_all(opens).await)?;
        devices.wait_until_recovered().await;
        Ok(devices)
    }

    /// Devices, and their logs if those could be opened. The others are left out, unless no log is left.
    pub fn of(logs: Vec<(L3Device, Result<L3, L3Error>)>) -> Result<Devices, L3Error> {
        let bytes = logs.iter().map(|(device, _)| device.bytes).sum();
        let (mut opened, mut first_error) = (Devices { bytes, ..Devices::default() }, None);
        for (L3Device { dir, bytes }, log) in logs {
            match log {
                Ok(l3) => opened.devices.push(Device::new(dir, bytes, l3)),
                Err(error) => {
                    tracing::error!(dir = %dir.display(), %error, "L3 device cannot be opened");
                    opened.left_out.push(LeftOut { dir, reason: error.to_string() });
                    first_error.get_or_insert(error);
                }
            }
        }
        match first_error {
            Some(error) if opened.devices.is_empty() => Err(error),
            _ => Ok(opened),
        }
    }

    /// Small logs are found whole before the node says that it is ready; large ones are found while it serves.
    async fn wait_until_recovered(&self) {
        let recovered = join_all(self.devices.iter().map(|device| device.l3.recovered()));
        if tokio::time::timeout(RECOVERY_PATIENCE, recovered).await.is_err() {
            tracing::info!("serving while L3 is still being scanned: what is not found yet is a miss");
        }
    }

    /// Whether there is no L3.
    pub(crate) fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Whether any device takes writes.
    pub(crate) fn writable(&self) -> bool {
        self.devices.iter().any(|device| device.writes.lock().usable(now()))
    }

    /// Number of the put that a read would find. It may be gone by then.
    pub(crate) fn generation(&self, id: &PageId) -> Option<u64> {
        self.holders(id).first().map(|(_, entry)| entry.generation)
    }

    /// The devices that have a page, the newest put first; of one put the device where it belongs.
    fn holders(&self, id: &PageId) -> Vec<(&Device, L3Entry)> {
        let usable = self.devices.iter().filter(|device| device.reads.lock().usable(now()));
        let mut holders: Vec<_> = usable.filter_map(|device| Some((device, device.l3.find(id)?))).collect();
        if holders.len() > 1 {
            holders.sort_by(|(a, _), (b, _)| b.score(id).total_cmp(&a.score(id)));
            holders.sort_by_key(|(_, entry)| Reverse(entry.generation));
        }
        holders
    }

    /// Reads a page. An error says that the arena has no room for it.
    pub(crate) async fn read(&self, id: &PageId) -> Result<Option<(PageMeta, Slot)>, L3Error> {
        for (device, _) in self.holders(id) {
            let Some(asking) = device.ask(Kind::Reads) else { continue };
            match device.l3.read(id, now() + READ_TIMEOUT).await {
                Ok(Some(page)) => {
                    asking.succeeded();
                    return Ok(Some(page));
                }
                // Gone or damaged: another copy may be whole.
                Ok(None) => {}
                Err(error @ L3Error::NoMemory { .. }) => return Err(error),
                Err(error) => {
                    tracing::warn!(?id, dir = %device.dir.display(), %error, "L3 read failed");
                    asking.failed(&error);
                }
            }
        }
        Ok(None)
    }

    /// Writes a page to the device where it belongs, or the next one that takes it. `quota` is that of its namespace.
    pub(crate) async fn write(&self, meta: &PageMeta, payload: &Slot, quota: Option<u64>) -> Result<(), L3Error> {
        let usable = self.devices.iter().filter(|device| device.writes.lock().usable(now()));
        let mut ranked: Vec<&Device> = usable.collect();
        // While one is being scanned nobody can write there, and nobody waits for that who can go elsewhere.
        let scanning = |device: &Device| device.l3.recovery().report.is_none();
        ranked.sort_by(|a, b| {
            scanning(a).cmp(&scanning(b)).then_with(|| b.score(&meta.id).total_cmp(&a.score(&meta.id)))
        });
        let mut last = L3Error::Closed;
        for device in ranked {
            // That it is being scanned is no fault of the device.
            let recovered = tokio::time::timeout(RECOVERY_MAX, device.l3.recovered()).await;
            if !matches!(recovered, Ok(Ok(_))) {
                last = L3Error::Deadline("recovery");
                continue;
            }
            let Some(asking) = device.ask(Kind::Writes) else { continue };
            let written = device.l3.write(meta.clone(), payload.clone(), now() + WRITE_TIMEOUT).await;
            // A log forgets the quotas of namespaces without pages. This one has some from now on.
            if let Some(bytes) = quota.map(|quota| part(quota, device.bytes, self.bytes))
                && device.l3.quota(&meta.id.namespace) != bytes
            {
                device.l3.set_quota(meta.id.namespace, bytes);
            }
            match written {
                Ok(()) => {
                    asking.succeeded();
                    return Ok(());
                }
                Err(error @ L3Error::Invalid(_)) => return Err(error),
                Err(error) => {
                    tracing::warn!(id = ?meta.id, dir = %device.dir.display(), %error, "L3 write failed");
                    asking.failed(&error);
                    last = error;
                }
            }
        }
        Err(last)
    }

    /// Whether any device has the page, usable or not.
    pub(crate) fn has(&self, id: &PageId) -> bool {
        self.devices.iter().any(|device| device.l3.find(id).is_some())
    }

    /// Forgets pages everywhere, durably. After an error some may come back: it is to be tried again.
    pub(crate) async fn forget(&self, ids: &[PageId], deadline: Instant) -> Result<(), ForgetError> {
        let skipped = usize::from(has(Bug::ForgetSkipsDevice) && self.devices.len() > 1);
        let forgets = self.devices.iter().skip(skipped).map(|device| async move {
            let forgotten = device.l3.forget(ids, deadline).await;
            forgotten.map_err(|error| {
                // The deadline is the caller's: that it was short says nothing of the device.
                if !matches!(error, L3Error::Deadline(_)) {
                    device.failed(Kind::Writes, Asked::Freely, &error);
                }
                ForgetError { dir: device.dir.clone(), reason: error.to_string() }
            })
        });
        let all = join_all(forgets).await;
        all.into_iter().collect::<Result<Vec<usize>, _>>()?;
        match self.left_out.first().filter(|_| !has(Bug::LeftOutForgets)) {
            Some(LeftOut { dir, .. }) => {
                Err(ForgetError { dir: dir.clone(), reason: "left out since the start".into() })
            }
            None => Ok(()),
        }
    }

    /// Most bytes of a namespace on all devices together; each gets its part of that, those that were left out too.
    pub(crate) fn set_quota(&self, namespace: NamespaceId, bytes: u64) {
        for device in &self.devices {
            device.l3.set_quota(namespace, part(bytes, device.bytes, self.bytes));
        }
    }

    /// Holds pages, or lets go of them.
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

    /// Begins a pass of every device's scrub.
    pub(crate) fn scrub_now(&self) {
        self.devices.iter().for_each(|device| device.l3.scrub_now());
    }

    /// Pages were asked for in L2.
    pub(crate) fn touch(&self, ids: &[PageId]) {
        self.devices.iter().for_each(|device| device.l3.touch(ids));
    }

    /// Whom to tell of damage that a device finds by itself.
    pub(crate) fn on_damage(&self, told: &OnDamage) {
        for device in &self.devices {
            let told = told.clone();
            device.l3.on_damage(move |id| told(id));
        }
    }

    /// Waits for writes under way and lets go of all of them.
    pub(crate) async fn close(&self) {
        join_all(self.devices.iter().map(|device| device.l3.close())).await;
    }

    /// How each one is.
    pub(crate) fn states(&self) -> Vec<DeviceState> {
        let opened = self.devices.iter().map(|device| {
            let (word, reason) = device.condition();
            let reason = reason.map_or(String::new(), |reason| format!("{word}: {reason}"));
            DeviceState { dir: device.dir.display().to_string(), usable: word != SET_ASIDE, reason }
        });
        let left_out = self.left_out.iter().map(|left_out| DeviceState {
            dir: left_out.dir.display().to_string(),
            usable: false,
            reason: "left out".into(),
        });
        opened.chain(left_out).collect()
    }

    /// Figures of all logs together, and each device; null without L3.
    pub(crate) fn status(&self) -> Value {
        if self.devices.is_empty() {
            return Value::Null;
        }
        let stats: Vec<Value> =
            self.devices.iter().filter_map(|device| serde_json::to_value(device.l3.stats()).ok()).collect();
        let mut total = sum(&stats);
        let opened = self.devices.iter().zip(stats).map(|(device, stats)| device.status(stats));
        let left_out = self.left_out.iter().map(|left_out| {
            json!({ "dir": left_out.dir.display().to_string(), "state": "left out", "reason": left_out.reason })
        });
        total["devices"] = opened.chain(left_out).collect();
        total
    }
}

/// What a device of `bytes` among devices of `total` bytes has of a quota.
fn part(quota: u64, bytes: u64, total: u64) -> u64 {
    let part = u128::from(quota) * u128::from(bytes) / u128::from(total.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// Adds numbers up; flags hold if they hold everywhere.
fn sum(stats: &[Value]) -> Value {
    let mut total = serde_json::Map::new();
    for (key, value) in stats.iter().filter_map(Value::as_object).flatten() {
        let before = total.get(key);
        let now = match (value, before) {
            (Value::Number(_), Some(before)) => {
                json!(value.as_u64().unwrap_or_default() + before.as_u64().unwrap_or_default())
            }
            (Value::Bool(flag), Some(before)) => json!(*flag && before.as_bool().unwrap_or(true)),
            _ => value.clone(),
        };
        total.insert(key.clone(), now);
    }
    Value::Object(total)
}

/// What a device is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reads,
    Writes,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Reads => "reads",
            Kind::Writes => "writes",
        })
    }
}

/// A request that a device was asked. However it ends, the device's health hears of it.
struct Asking<'a> {
    device: &'a Device,
    kind: Kind,
    asked: Asked,
}

impl Asking<'_> {
    fn succeeded(&self) {
        if self.device.health(self.kind).succeeded(self.asked) {
            tracing::info!(dir = %self.device.dir.display(), kind = ?self.kind, "L3 device is well again");
        }
    }

    fn failed(&self, error: &L3Error) {
        self.device.failed(self.kind, self.asked, error);
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.device.health(self.kind).ended(self.asked, now());
    }
}

/// Why pages are not durably forgotten.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", dir.display())]
pub struct ForgetError {
    /// The device.
    pub dir: PathBuf,
    /// What it said.
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
            reads: Mutex::default(),
            writes: Mutex::default(),
            errors: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
            full: AtomicU64::new(0),
        }
    }

    /// Weighted rendezvous: over all devices, the chance to score highest is in proportion to the bytes.
    fn score(&self, id: &PageId) -> f64 {
        let key = id.key.0.chunks_exact(8).chain(id.namespace.0.chunks_exact(8)).fold(self.seed, |folded, word| {
            mixed(folded ^ word.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)))
        });
        let chance = ((key >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        self.bytes as f64 / -chance.ln()
    }

    fn health(&self, kind: Kind) -> MutexGuard<'_, Health> {
        match kind {
            Kind::Reads => self.reads.lock(),
            Kind::Writes => self.writes.lock(),
        }
    }

    fn ask(&self, kind: Kind) -> Option<Asking<'_>> {
        let asked = self.health(kind).ask(now())?;
        Some(Asking { device: self, kind, asked })
    }

    fn failed(&self, kind: Kind, asked: Asked, error: &L3Error) {
        match error {
            // A full file system fails writes and nothing else; the log goes on in what it has.
            L3Error::Io { source, .. }
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
            {
                self.full.fetch_add(1, Ordering::Relaxed);
            }
            L3Error::Deadline(_) => self.in_trouble(kind, asked, Trouble::Timeout),
            L3Error::Io { .. } | L3Error::Closed => self.in_trouble(kind, asked, Trouble::Error),
            L3Error::Append(AppendError::Stopped) => self.in_trouble(kind, asked, Trouble::Error),
            _ => {}
        }
    }

    fn in_trouble(&self, kind: Kind, asked: Asked, trouble: Trouble) {
        let count = if trouble == Trouble::Error { &self.errors } else { &self.timeouts };
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(pause) = self.health(kind).failed(asked, trouble, now()) {
            tracing::error!(dir = %self.dir.display(), ?kind, %trouble, ?pause, "L3 device set aside");
        }
    }

    /// The worse of how it reads and writes, in one word; why, if it is not well.
    fn condition(&self) -> (&'static str, Option<String>) {
        let kinds = [Kind::Reads, Kind::Writes].map(|kind| {
            let health = self.health(kind);
            (health.word(), health.trouble().map(|trouble| format!("{trouble} of {kind}")))
        });
        let worst = [SET_ASIDE, "on trial"].into_iter().find(|word| kinds.iter().any(|(is, _)| is == word));
        let reasons: Vec<String> = kinds.into_iter().filter_map(|(_, reason)| reason).collect();
        (worst.unwrap_or("well"), (!reasons.is_empty()).then(|| reasons.join(", ")))
    }

    fn status(&self, stats: Value) -> Value {
        let (state, reason) = self.condition();
        json!({
            "dir": self.dir.display().to_string(),
            "state": state,
            "reason": reason,
            "errors": self.errors.load(Ordering::Relaxed),
            "timeouts": self.timeouts.load(Ordering::Relaxed),
            "file_system_full": self.full.load(Ordering::Relaxed),
            "times_set_aside": self.reads.lock().times_set_aside() + self.writes.lock().times_set_aside(),
            "recovery": self.l3.recovery(),
            "scrub": self.l3.scrub(),
            "log": stats,
        })
    }
}
