//! Whether a device's memory windows keep what they promise.
//!
//! A key that opens more than its range would let a peer read other pages, and not every device that claims memory windows holds
//! them to their range: the kernel's soft-RoCE (6.1) checks the region around them only. So it is tried out, between two endpoints
//! of the one device, before any peer is given such a key.

use crate::endpoint::{Endpoint, EndpointOptions};
use crate::error::{Death, Error};
use crate::memory::{Bytes, BytesMut, Memory, Span};
use crate::nic::Nic;
use crate::region::Region;
use ibverbs_sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;

/// Longest time a step may take. A device that is slower has no windows for us.
const STEP_MAX: Duration = Duration::from_secs(2);
const BYTES: usize = 4096;

/// Memory of its own, of which this module lends pieces that do not overlap.
struct Page(Box<[UnsafeCell<u8>]>);

// SAFETY: only pieces of it are used, each by one owner at a time.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

// SAFETY: the box stays where it is.
unsafe impl Memory for Page {
    fn span(&self) -> Span {
        let bytes = &*self.0;
        Span::new(std::ptr::NonNull::from(bytes).cast(), bytes.len())
    }
}

/// Some bytes of a page.
struct Piece {
    page: Arc<Page>,
    from: usize,
    len: usize,
}

// SAFETY: it keeps the page; the pieces that are alive at a time do not overlap.
unsafe impl Bytes for Piece {
    fn span(&self) -> Span {
        let cells = &self.page.0[self.from..self.from + self.len];
        Span::new(std::ptr::NonNull::from(cells).cast(), cells.len())
    }
}
// SAFETY: as above.
unsafe impl BytesMut for Piece {}

/// Whether a window of type 2 opens its bytes and no others. A device on which this cannot be tried has none that do.
pub(crate) async fn windows_hold(nic: &Arc<Nic>) -> bool {
    let verdict = attempt(nic).await;
    if let Err(error) = &verdict {
        tracing::debug!(device = nic.name(), %error, "memory windows could not be tried out");
    }
    verdict.unwrap_or(false)
}

async fn attempt(nic: &Arc<Nic>) -> Result<bool, Error> {
    let page = Arc::new(Page((0..BYTES).map(|_| UnsafeCell::new(0)).collect()));
    let region = Region::register(nic, page.clone())?;
    // In front of the window, on both sides of its end, and behind it.
    for (from, len, allowed) in [(1024, 1024, true), (1023, 2, false), (2047, 2, false), (2048, 1, false)] {
        let window = Piece { page: page.clone(), from: 1024, len: 1024 };
        let into = Piece { page: page.clone(), from: 3072, len };
        let options = EndpointOptions {
            transfers: 1,
            windows: 1,
            deadline: STEP_MAX,
            connect_deadline: STEP_MAX,
            ..EndpointOptions::default()
        };
        let (here, there) = (Endpoint::new(nic, options.clone())?, Endpoint::new(nic, options)?);
        here.connect(&there.local()).await?;
        there.connect(&here.local()).await?;
        let window = here.readable(window, &region).await?;
        let mut range = window.remote();
        range.address = range.address - 1024 + from;
        range.len = len as u64;
        let outcome = there.read(into, &region, range).await.map(drop);
        let as_it_should = match outcome {
            Ok(()) => allowed,
            Err(Error::Dead(Death::Failed { status: IBV_WC_REM_ACCESS_ERR, .. })) => !allowed,
            Err(error) => return Err(error),
        };
        window.withdraw().await?;
        if !as_it_should {
            return Ok(false);
        }
    }
    Ok(true)
}
