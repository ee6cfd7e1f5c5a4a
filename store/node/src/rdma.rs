//! The node's RDMA devices, and what is open to clients through them.

use crate::holds::Hold;
use larder_device::{Arena, PieceMut};
use larder_rdma::{Credit, Fabric, FabricOptions, Kept, Line, RemoteRange, SlotSlice, Window};
use larder_wire::LineWindow;
use std::sync::Arc;

/// Whether pages move by RDMA, and how.
#[derive(Debug, Clone)]
pub struct RdmaOptions {
    /// Whether clients that can may read and write pages by RDMA, where this machine has devices. Default yes.
    pub enabled: bool,
    /// Which devices, and how connections behave. Default all of them.
    pub fabric: FabricOptions,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self { enabled: true, fabric: FabricOptions::default() }
    }
}

/// A page that a client may read. Its hold ends when the key is dead, not before.
pub(crate) type OpenPage = Window<Kept<Kept<SlotSlice, Hold>, Credit>>;
/// A part that a client may write.
pub(crate) type OpenPart = Window<Kept<PieceMut, Credit>>;

/// Opens the devices, if there are any, and registers the arena with them.
pub(crate) async fn open(options: &RdmaOptions, arena: &Arc<Arena>) -> Option<Fabric> {
    if !options.enabled {
        return None;
    }
    match Fabric::open(&options.fabric, arena.clone()).await {
        Ok(fabric) => {
            let devices: Vec<&str> = fabric.nics().map(|nic| nic.name()).collect();
            tracing::info!(?devices, "pages move by RDMA to clients that can");
            Some(fabric)
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
pub(crate) type Turn = (u32, Arc<Line>);
