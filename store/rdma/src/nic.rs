//! An open device.
//!
//! Always true: whatever the device reports reaches the endpoints it is about, for as long as they exist.

use crate::apart;
use crate::counters::{Counters, NicStats};
use crate::device::PortInfo;
use crate::error::{Death, Error, Unavailable};
use crate::link::Link;
use crate::path::Path;
use crate::probe;
use crate::verbs::{Context, Domain, Event};
use ibverbs_sys as ffi;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

/// How a device is opened.
#[derive(Debug, Clone)]
pub struct NicOptions {
    /// Which port; 1 is the first.
    pub port: u8,
    /// Which entry of its table of GIDs; [`PortInfo::default_gid`] if none is given.
    pub gid_index: Option<u8>,
    /// How windows are made. If not given, by memory windows where the device has some that prove to be narrow.
    /// [`WindowKind::Type2`] is taken as it is.
    pub windows: Option<WindowKind>,
}

impl Default for NicOptions {
    fn default() -> NicOptions {
        NicOptions { port: 1, gid_index: None, windows: None }
    }
}

/// How a peer gets a key for some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowKind {
    /// A memory window of type 2: bound and withdrawn by a request, good for one connection.
    Type2,
    /// A registration of just these bytes, by a call into the kernel. Its key is good for every connection of this device.
    Registration,
}

/// An open device, and the port of it that is used.
pub struct Nic {
    name: String,
    pub(crate) port: PortInfo,
    pub(crate) path: Path,
    pub(crate) gid_index: u8,
    pub(crate) windows: WindowKind,
    /// Requests that a queue pair can hold.
    pub(crate) requests_max: u32,
    /// Reads of a peer that a connection answers at a time, and those it has under way.
    pub(crate) reads_answered: u8,
    pub(crate) reads_asked: u8,
    pub(crate) domain: Arc<Domain>,
    pub(crate) counters: Counters,
    /// By the address of their queue pair and of their completion queue.
    links: Mutex<HashMap<usize, Weak<Link>>>,
    alive: AtomicBool,
    watcher: Mutex<Option<AbortHandle>>,
}

/// The descriptor on which a device reports events. It is the context's, which therefore comes along.
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
    /// Opens a device by its name, and tries out its memory windows. May take some milliseconds; seconds on a device that does not
    /// answer.
    pub async fn open(name: &str, options: &NicOptions) -> Result<Arc<Nic>, Error> {
        if let Some(kind) = options.windows {
            return Nic::open_blocking(name, options, kind).await;
        }
        let kind = match Nic::open_blocking(name, options, WindowKind::Type2).await {
            Ok(nic) if probe::windows_hold(&nic).await => WindowKind::Type2,
            Ok(_) | Err(Error::NotFound(_)) => WindowKind::Registration,
            Err(error) => return Err(error),
        };
        tracing::debug!(device = name, ?kind, "an RDMA device is opened");
        Nic::open_blocking(name, options, kind).await
    }

    /// Opens it where calls into the kernel hold nobody up.
    async fn open_blocking(name: &str, options: &NicOptions, windows: WindowKind) -> Result<Arc<Nic>, Error> {
        let (name, options) = (name.to_string(), options.clone());
        let opening = apart(move || Nic::open_as(&name, &options, windows));
        opening.await.map_err(|_| Error::NoRuntime)?
    }

    fn open_as(name: &str, options: &NicOptions, windows: WindowKind) -> Result<Arc<Nic>, Error> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| Error::NoRuntime)?;
        if let Some(why) = ffi::missing() {
            return Err(Unavailable::NoLibrary(why.to_string()).into());
        }
        let context = Context::open(name)?;
        let abilities = context.abilities()?;
        let port = PortInfo::read(&context, options.port)?;
        if !port.active {
            return Err(Error::NotFound(format!("active port {} on {name}", options.port)));
        }
        let gid = match options.gid_index {
            Some(index) => port.gids.iter().find(|gid| gid.index == index).copied(),
            None => port.default_gid(),
        };
        let gid = gid.ok_or_else(|| Error::NotFound(format!("such GID on {name}")))?;
        let type_2 = ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A
            | ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        if windows == WindowKind::Type2 && abilities.device_cap_flags & type_2.0 == 0 {
            return Err(Error::NotFound(format!("memory windows of type 2 on {name}")));
        }
        let events = Events(context.clone());
        // SAFETY: the descriptor stays open, and the same, as long as the context that comes along.
        let events = unsafe { AsyncFd::register_with_interest(events, tokio::io::Interest::READABLE) }
            .map_err(|_| Error::last("epoll_ctl"))?;
        let reads = |most: i32| u8::try_from(most.clamp(1, 16)).unwrap_or(1);
        let nic = Arc::new(Nic {
            name: name.to_string(),
            path: Path { link: port.link, gid: gid.gid },
            port,
            gid_index: gid.index,
            windows,
            requests_max: u32::try_from(abilities.max_qp_wr.min(abilities.max_cqe)).unwrap_or(0),
            reads_answered: reads(abilities.max_qp_rd_atom),
            reads_asked: reads(abilities.max_qp_init_rd_atom),
            domain: Domain::new(context)?,
            counters: Counters::default(),
            links: Mutex::new(HashMap::new()),
            alive: AtomicBool::new(true),
            watcher: Mutex::new(None),
        });
        let watcher = runtime.spawn(watch(events, Arc::downgrade(&nic)));
        *nic.watcher.lock() = Some(watcher.abort_handle());
        Ok(nic)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port in use, as it was when the device was opened.
    pub fn port(&self) -> &PortInfo {
        &self.port
    }

    /// What a peer needs to know to choose it.
    pub fn path(&self) -> Path {
        self.path
    }

    /// How windows are made.
    pub fn windows(&self) -> WindowKind {
        self.windows
    }

    /// Whether device and port were in order when last heard of. Endpoints of a device that is not are of no use.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// What it has done.
    pub fn stats(&self) -> NicStats {
        self.counters.read()
    }

    pub(crate) fn add_link(&self, objects: [usize; 2], link: &Arc<Link>) {
        let mut links = self.links.lock();
        objects.into_iter().for_each(|object| _ = links.insert(object, Arc::downgrade(link)));
        self.counters.endpoints.add(1);
    }

    pub(crate) fn remove_link(&self, objects: [usize; 2]) {
        let mut links = self.links.lock();
        if objects.into_iter().filter(|object| links.remove(object).is_some()).count() > 0 {
            self.counters.endpoints.subtract(1);
        }
    }

    fn handle(&self, event: Event) {
        use ffi::ibv_event_type::*;
        let concerned: Vec<Weak<Link>> = match event.kind {
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR | IBV_EVENT_CQ_ERR => {
                self.links.lock().get(&event.object).cloned().into_iter().collect()
            }
            IBV_EVENT_DEVICE_FATAL => {
                self.alive.store(false, Ordering::Relaxed);
                self.links.lock().values().cloned().collect()
            }
            // Its connections recover or die by their own timers.
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
        tracing::debug!(device = self.name, event = event.kind, "an event of an RDMA device");
        let mut concerned: Vec<Arc<Link>> = concerned.iter().filter_map(Weak::upgrade).collect();
        // Where they lie says nothing of their order.
        concerned.sort_by_key(|link| link.pair.number());
        concerned.iter().for_each(|link| link.condemn(Death::Event(event.kind)));
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
        // First the flag, then the events: one that comes in between sets it again.
        ready.clear_ready();
        let Some(nic) = nic.upgrade() else { return };
        while let Some(event) = events.get_ref().0.next_event() {
            nic.handle(event);
        }
    }
}
