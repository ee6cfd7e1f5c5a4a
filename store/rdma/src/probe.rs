//! Opening of a device, with a probe that finds out whether its memory windows are restricted to
//! their range.
//!
//! A key that opens more than its range would let a peer read other pages. Not every device that
//! claims memory windows enforces their range: the kernel's soft-RoCE (6.1) checks only the region
//! around them. The probe tries it between two endpoints of the device, before any peer receives
//! such a key.

use crate::endpoint::Endpoint;
use crate::error::{DisconnectReason, Error};
use crate::nic::{GrantKind, Nic, NicOptions};
use crate::options::EndpointOptions;
use crate::region::Region;
use ibverbs_sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR;
use larder_memory::span::{DmaBuf, DmaBufMut, DmaMemory, Span};
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;

/// Time limit of a step. A slower device counts as one without usable windows.
const STEP_MAX: Duration = Duration::from_secs(2);
const BYTES: usize = 4096;

impl Nic {
    /// Opens a device and probes its memory windows. Takes some milliseconds, or seconds if the
    /// device does not respond.
    pub async fn open(name: &str, options: &NicOptions) -> Result<Arc<Nic>, Error> {
        if let Some(kind) = options.grant_kind {
            return Nic::open_with(name, options, kind).await;
        }
        let kind = match Nic::open_with(name, options, GrantKind::MemoryWindow).await {
            Ok(nic) if windows_are_restricted(&nic).await => GrantKind::MemoryWindow,
            Ok(_) | Err(Error::NotFound(_)) => GrantKind::Registration,
            Err(error) => return Err(error),
        };
        tracing::debug!(device = name, ?kind, "opened an RDMA device");
        Nic::open_with(name, options, kind).await
    }
}

/// Memory of the probe, handed out in parts that do not overlap.
struct Page(Box<[UnsafeCell<u8>]>);

// SAFETY: only parts of it are accessed, each by one owner at a time.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

// SAFETY: the box neither moves nor is freed while the value lives.
unsafe impl DmaMemory for Page {
    fn span(&self) -> Span {
        let bytes = &*self.0;
        Span::new(std::ptr::NonNull::from(bytes).cast(), bytes.len())
    }
}

struct PagePart {
    page: Arc<Page>,
    from: usize,
    len: usize,
}

// SAFETY: it keeps the page, and the parts that exist at a time do not overlap.
unsafe impl DmaBuf for PagePart {
    fn span(&self) -> Span {
        let cells = &self.page.0[self.from..self.from + self.len];
        Span::new(std::ptr::NonNull::from(cells).cast(), cells.len())
    }
}
// SAFETY: as above.
unsafe impl DmaBufMut for PagePart {}

/// Returns `true` if a memory window grants access to its bytes and no others. A failed probe
/// counts as `false`.
async fn windows_are_restricted(nic: &Arc<Nic>) -> bool {
    let verdict = attempt(nic).await;
    if let Err(error) = &verdict {
        tracing::debug!(device = nic.name(), %error, "memory windows could not be probed; using registrations instead");
    }
    verdict.unwrap_or(false)
}

async fn attempt(nic: &Arc<Nic>) -> Result<bool, Error> {
    let page = Arc::new(Page((0..BYTES).map(|_| UnsafeCell::new(0)).collect()));
    let region = Region::register(nic, page.clone())?;
    // Inside the window, across its start, across its end, and behind it.
    for (from, len, allowed) in [(1024, 1024, true), (1023, 2, false), (2047, 2, false), (2048, 1, false)] {
        let part = PagePart { page: page.clone(), from: 1024, len: 1024 };
        let into = PagePart { page: page.clone(), from: 3072, len };
        let options = EndpointOptions {
            transfers: 1,
            grants: 1,
            stall_timeout: STEP_MAX,
            connect_deadline: STEP_MAX,
            ..EndpointOptions::default()
        };
        let here = Endpoint::new(nic, options.clone())?;
        let there = Endpoint::new(nic, options)?;
        here.connect(&there.local()).await?;
        there.connect(&here.local()).await?;
        let grant = here.grant_read(part, &region).await?;
        let mut range = grant.remote();
        range.address = range.address - 1024 + from;
        range.len = len as u64;
        let outcome = there.read(into, &region, range).await.map(drop);
        let as_expected = match outcome {
            Ok(()) => allowed,
            Err(Error::Disconnected(DisconnectReason::Failed { status: IBV_WC_REM_ACCESS_ERR, .. })) => !allowed,
            Err(error) => return Err(error),
        };
        grant.revoke().await?;
        if !as_expected {
            return Ok(false);
        }
    }
    Ok(true)
}
