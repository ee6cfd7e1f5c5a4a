//! The node's RDMA devices, and what is open to clients through them.

use crate::holds::Hold;
use larder_device::{Arena, PieceMut};
use larder_rdma::{Credit, Fabric, FabricOptions, Kept, Line, RemoteRange, SlotSlice, Window};
use larder_wire::LineWindow;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most lines of a node, over all connections.
const LINES_MAX: usize = 256;

/// Whether pages move by RDMA, and how.
#[derive(Debug, Clone)]
pub struct RdmaOptions {
    /// Whether clients that can may read and write pages by RDMA, where this machine has devices. Default yes.
    pub enabled: bool,
    /// Which devices, and how connections behave. Default all of them.
    pub fabric: FabricOptions,
    /// How long a page stays open to a client that does not say that it has read it. Default 60 s.
    pub page_age_max: Duration,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self { enabled: true, fabric: FabricOptions::default(), page_age_max: Duration::from_secs(60) }
    }
}

/// What a node moves pages with.
pub struct Rdma {
    /// Its devices.
    pub(crate) fabric: Fabric,
    /// One for each line that may still be made.
    pub(crate) room: Arc<Semaphore>,
    /// As in [`RdmaOptions`].
    pub(crate) page_age_max: Duration,
}

/// A line to a client, counted among the node's.
pub(crate) struct ClientLine {
    line: Line,
    /// Whether windows for writing could be opened on it so far.
    writable: AtomicBool,
    _room: OwnedSemaphorePermit,
}

impl ClientLine {
    pub(crate) fn new(line: Line, room: OwnedSemaphorePermit) -> ClientLine {
        ClientLine { line, writable: AtomicBool::new(true), _room: room }
    }

    /// Leave to open a window for writing, if there is one now and such windows can be opened.
    pub(crate) fn credit_to_write(&self) -> Option<Credit> {
        if !self.writable.load(Ordering::Relaxed) { None } else { self.credit() }
    }

    /// A window for writing could not be opened, and none is tried any more; whether that is news.
    pub(crate) fn refuses_writing(&self) -> bool {
        self.writable.swap(false, Ordering::Relaxed)
    }
}

impl Deref for ClientLine {
    type Target = Line;

    fn deref(&self) -> &Line {
        &self.line
    }
}

/// A page that a client may read. Its hold ends when the key is dead, not before.
pub(crate) type OpenPage = Window<Kept<Kept<SlotSlice, Hold>, Credit>>;
/// A part that a client may write.
pub(crate) type OpenPart = Window<Kept<PieceMut, Credit>>;

/// Opens the devices, if there are any, and registers the arena with them.
pub async fn open(options: &RdmaOptions, arena: &Arc<Arena>) -> Option<Rdma> {
    if !options.enabled {
        return None;
    }
    match Fabric::open(&options.fabric, arena.clone()).await {
        Ok(fabric) => {
            let devices: Vec<&str> = fabric.nics().map(|nic| nic.name()).collect();
            tracing::info!(?devices, "pages move by RDMA to clients that can");
            let room = Arc::new(Semaphore::new(LINES_MAX));
            Some(Rdma { fabric, room, page_age_max: options.page_age_max })
        }
        Err(error) if options.fabric.devices.is_empty() => {
            tracing::debug!(%error, "no RDMA");
            None
        }
        Err(error) => {
            tracing::warn!(%error, devices = ?options.fabric.devices, "no RDMA");
            None
        }
    }
}

/// State for people and scripts.
pub(crate) fn status(fabric: &Fabric) -> serde_json::Value {
    let device = |nic: &Arc<larder_rdma::Nic>| {
        let stats = nic.stats();
        serde_json::json!({
            "device": nic.name(), "up": nic.is_alive(), "lines": stats.endpoints, "windows": stats.windows,
            "lines_died": stats.deaths, "stuck": stats.stuck,
        })
    };
    fabric.nics().map(device).collect()
}

/// What a client needs to know of a window on line `number`.
pub(crate) fn describe<B>(number: u32, window: &Window<B>) -> LineWindow {
    let RemoteRange { address, len, key } = window.remote();
    LineWindow { line: number, address, len, key }
}

/// A line that can be used now, with its number.
pub(crate) type Turn = (u32, Arc<ClientLine>);
