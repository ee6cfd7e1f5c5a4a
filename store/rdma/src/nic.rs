//! An open RDMA device.
//!
//! Invariant: events of the device reach the connections they concern, for as long as those exist.

use crate::blocking;
use crate::counters::{Counters, NicStats};
use crate::device::PortInfo;
use crate::error::{Error, Unavailable};
use crate::path::Path;
use crate::verbs::{Context, Domain, Event};
use ibverbs_sys as ffi;
use larder_runtime::lock::Mutex;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

#[derive(Debug, Clone)]
pub struct NicOptions {
    /// Port number, from 1.
    pub port: u8,
    /// Index into the port's GID table. The default is [`PortInfo::default_gid`].
    pub gid_index: Option<u8>,
    /// Mechanism of remote grants. By default, memory windows where the device has some that pass
    /// the probe. An explicit [`GrantKind::MemoryWindow`] is not probed.
    pub grant_kind: Option<GrantKind>,
}

impl Default for NicOptions {
    fn default() -> NicOptions {
        NicOptions { port: 1, gid_index: None, grant_kind: None }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrantKind {
    /// A memory window of type 2. Requests bind and invalidate it, and its key is valid on one
    /// connection only.
    MemoryWindow,
    /// A registration of just these bytes, by system call. Its key is valid on every connection of
    /// the device.
    Registration,
}

/// Listener for events that concern one connection.
pub(crate) trait ConnectionEvents: Send + Sync {
    /// Number of the queue pair, by which listeners are sorted.
    fn pair_number(&self) -> u32;

    /// Ends the connection after an event of this kind (`ibv_event_type`).
    fn on_event(&self, kind: u32);
}

pub struct Nic {
    name: String,
    pub(crate) port: PortInfo,
    pub(crate) path: Path,
    pub(crate) gid_index: u8,
    pub(crate) grant_kind: GrantKind,
    pub(crate) requests_max: u32,
    pub(crate) reads_accepted: u8,
    pub(crate) reads_initiated: u8,
    pub(crate) domain: Arc<Domain>,
    pub(crate) counters: Counters,
    /// Keyed by the addresses of queue pair and completion queue, by which the device's events name
    /// them.
    connections: Mutex<HashMap<usize, Weak<dyn ConnectionEvents>>>,
    alive: AtomicBool,
    watcher: Mutex<Option<AbortHandle>>,
}

/// The descriptor on which device events arrive. It belongs to the context, which is kept with it.
struct Events(Arc<Context>);

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event_fd()
    }
}

impl Nic {
    /// Opens a device for grants of one kind, on a thread that may block. Fails with
    /// [`Error::NotFound`] if the device has no memory windows and they are asked for.
    pub(crate) async fn open_with(name: &str, options: &NicOptions, grant_kind: GrantKind) -> Result<Arc<Nic>, Error> {
        let (name, options) = (name.to_string(), options.clone());
        let opening = blocking(move || Nic::open_blocking(&name, &options, grant_kind));
        opening.await.map_err(|_| Error::NoRuntime)?
    }

    fn open_blocking(name: &str, options: &NicOptions, grant_kind: GrantKind) -> Result<Arc<Nic>, Error> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| Error::NoRuntime)?;
        if let Some(why) = ffi::missing() {
            return Err(Unavailable::NoLibrary(why.to_string()).into());
        }
        let context = Context::open(name)?;
        let attributes = context.attributes()?;
        let port = PortInfo::read(&context, options.port)?;
        if !port.active {
            return Err(Error::NotFound(format!("an active port {} of {name}", options.port)));
        }
        let gid = match options.gid_index {
            Some(index) => port.gids.iter().find(|gid| gid.index == index).copied(),
            None => port.default_gid(),
        };
        let gid = gid.ok_or_else(|| Error::NotFound(format!("the configured or default GID of {name}")))?;
        let type_2 = ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A
            | ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        if grant_kind == GrantKind::MemoryWindow && attributes.device_cap_flags & type_2.0 == 0 {
            return Err(Error::NotFound(format!("memory windows of type 2 on {name}")));
        }
        let events = Events(context.clone());
        // SAFETY: the descriptor stays open and unchanged while the context, which is kept with it,
        // lives.
        let events = unsafe { AsyncFd::register_with_interest(events, tokio::io::Interest::READABLE) }
            .map_err(|_| Error::last("epoll_ctl"))?;
        let reads = |most: i32| u8::try_from(most.clamp(1, 16)).unwrap_or(1);
        let nic = Arc::new(Nic {
            name: name.to_string(),
            path: Path { link: port.link, gid: gid.gid },
            port,
            gid_index: gid.index,
            grant_kind,
            requests_max: u32::try_from(attributes.max_qp_wr.min(attributes.max_cqe)).unwrap_or(0),
            reads_accepted: reads(attributes.max_qp_rd_atom),
            reads_initiated: reads(attributes.max_qp_init_rd_atom),
            domain: Domain::new(context)?,
            counters: Counters::default(),
            connections: Mutex::new(HashMap::new()),
            alive: AtomicBool::new(true),
            watcher: Mutex::new(None),
        });
        let watcher = runtime.spawn(watch(events, Arc::downgrade(&nic)));
        *nic.watcher.lock() = Some(watcher.abort_handle());
        Ok(nic)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn port(&self) -> &PortInfo {
        &self.port
    }

    pub fn path(&self) -> Path {
        self.path
    }

    pub fn grant_kind(&self) -> GrantKind {
        self.grant_kind
    }

    /// Returns `true` if device and port were up at the last event. New endpoints on a failed
    /// device are useless.
    pub fn is_alive(&self) -> bool {
        // Advice only: no other memory depends on the flag, so `Relaxed` suffices.
        self.alive.load(Ordering::Relaxed)
    }

    pub fn stats(&self) -> NicStats {
        self.counters.read()
    }

    pub(crate) fn add_connection(&self, objects: [usize; 2], connection: Weak<dyn ConnectionEvents>) {
        let mut connections = self.connections.lock();
        objects.into_iter().for_each(|object| _ = connections.insert(object, connection.clone()));
        self.counters.endpoints.add(1);
    }

    pub(crate) fn remove_connection(&self, objects: [usize; 2]) {
        let mut connections = self.connections.lock();
        if objects.into_iter().filter(|object| connections.remove(object).is_some()).count() > 0 {
            self.counters.endpoints.subtract(1);
        }
    }

    fn handle(&self, event: Event) {
        use ffi::ibv_event_type::*;
        // Only clones are taken under this lock, because retiring a connection takes its own.
        let concerned: Vec<Weak<dyn ConnectionEvents>> = match event.kind {
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR | IBV_EVENT_CQ_ERR => {
                self.connections.lock().get(&event.object).cloned().into_iter().collect()
            }
            IBV_EVENT_DEVICE_FATAL => {
                self.alive.store(false, Ordering::Relaxed);
                self.connections.lock().values().cloned().collect()
            }
            // Connections of a failed port recover or die by their own retransmission timers.
            IBV_EVENT_PORT_ERR if event.object == usize::from(self.port.number) => {
                self.alive.store(false, Ordering::Relaxed);
                Vec::new()
            }
            IBV_EVENT_PORT_ACTIVE if event.object == usize::from(self.port.number) => {
                self.alive.store(true, Ordering::Relaxed);
                Vec::new()
            }
            _ => Vec::new(),
        };
        tracing::debug!(device = self.name, event = event.kind, "RDMA device reported an event");
        let mut concerned: Vec<Arc<dyn ConnectionEvents>> = concerned.iter().filter_map(Weak::upgrade).collect();
        // A hash map has no stable order. Sorting makes simulations deterministic.
        concerned.sort_by_key(|connection| connection.pair_number());
        concerned.iter().for_each(|connection| connection.on_event(event.kind));
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.lock().take() {
            watcher.abort();
        }
    }
}

impl std::fmt::Debug for Nic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nic").field("name", &self.name).field("path", &self.path).field("stats", &self.stats()).finish()
    }
}

async fn watch(events: AsyncFd<Events>, nic: Weak<Nic>) {
    while let Ok(mut ready) = events.readable().await {
        // The flag is cleared before the events are read. An event in between sets it again; the
        // other order would lose it.
        ready.clear_ready();
        let Some(nic) = nic.upgrade() else { return };
        while let Some(event) = events.get_ref().0.next_event() {
            nic.handle(event);
        }
    }
}
