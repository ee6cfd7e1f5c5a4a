//! Pages, and bytes of pages, many at a time.

use super::Places;
use super::rdma::Lines;
use super::sending::{PagePayload, ToClient};
use crate::node::Shared;
use crate::tiers::Page;
use futures::{StreamExt, TryStreamExt};
use larder_format::planted::{Bug, has};
use larder_format::{PageId, whole_chunks};
use larder_wire::{Place, Response, TierCode};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;

/// Pages of one Get that are read at a time.
pub(super) const GET_PAGES_AT_ONCE: usize = 16;
/// Most pages that one client reads in place at a time; more are sent.
const PLACES_MAX: usize = 65_536;

/// A page that is asked for, or bytes of it.
pub(super) struct Asked {
    /// Which of those in the request.
    pub(super) index: u32,
    pub(super) id: PageId,
    /// `None`: the whole page.
    pub(super) bytes: Option<Range<u32>>,
}

impl Asked {
    /// Where the bytes lie in the page's payload; `None` if they are not whole chunks of it.
    fn within(&self, page: &Page) -> Option<Range<usize>> {
        let Some(asked) = &self.bytes else { return Some(0..page.payload.len()) };
        let chunks = whole_chunks(&page.meta.part_bytes, asked).filter(|chunks| chunks == asked)?;
        if has(Bug::OtherChunks) {
            return Some(0..chunks.len());
        }
        Some(chunks.start as usize..chunks.end as usize)
    }

    /// What the client is told; `place` is where the bytes are.
    pub(super) fn answer(&self, page: &Page, tier: TierCode, place: Place) -> Response {
        let (index, meta) = (self.index, page.meta.clone());
        match &self.bytes {
            None => Response::Page { index, tier, meta, place },
            Some(bytes) => Response::Range { index, tier, meta, bytes: bytes.clone(), place },
        }
    }
}

/// How the bytes of pages come to a client.
pub(super) enum Way {
    /// As payload.
    Sent,
    /// It reads them in place.
    InPlace(Places),
    /// It reads them by RDMA, on these lines.
    Read(Arc<Lines>, Vec<u32>),
}

/// Delivers a page, or bytes of it; as payload if they cannot come the other way now.
async fn deliver(
    shared: &Shared,
    client: &ToClient,
    way: &Way,
    asked: &Asked,
    (page, tier): (Arc<Page>, TierCode),
    permit: OwnedSemaphorePermit,
) -> io::Result<()> {
    let Some(bytes) = asked.within(&page) else { return client.send(Response::Miss { index: asked.index }).await };
    match way {
        Way::InPlace(Places::Some(held)) if held.lock().len() < PLACES_MAX => {
            if let Some(hold) = shared.store.hold(&page) {
                shared.metrics.bytes_in_place.inc_by(bytes.len() as u64);
                return client.point_at(held, hold, asked, &bytes, tier).await;
            }
        }
        Way::Read(lines, numbers) => {
            if let Some(hold) = shared.store.hold(&page)
                && lines.open_page(client, numbers, hold, asked, &bytes, tier).await?
            {
                shared.metrics.bytes_opened_rdma.inc_by(bytes.len() as u64);
                return Ok(());
            }
        }
        Way::Sent | Way::InPlace(_) => {}
    }
    let head = asked.answer(&page, tier, Place::Payload);
    client.send_bytes(shared, head, PagePayload { page, bytes }, permit).await
}

pub(super) async fn get(
    shared: &Shared,
    client: &ToClient,
    asked: Vec<Asked>,
    deadline: Instant,
    way: &Way,
) -> io::Result<()> {
    // Opening a window takes a while, so it is done for several pages at a time, like reading them from L3.
    let opens = matches!(way, Way::Read(..));
    let (there, elsewhere): (Vec<Asked>, Vec<Asked>) =
        asked.into_iter().partition(|asked| !opens && shared.store.locate(&asked.id) == TierCode::L2);
    let send_page = async |asked: &Asked, page, permit| deliver(shared, client, way, asked, page, permit).await;
    let at_once = async {
        // A few at a time, so that a client that does not read holds no more than that.
        for group in there.chunks(GET_PAGES_AT_ONCE) {
            let ids: Vec<PageId> = group.iter().map(|asked| asked.id).collect();
            for (asked, page) in group.iter().zip(shared.store.get_l2(&ids)) {
                let permit = client.permit().await?;
                match page {
                    Some(page) => send_page(asked, (page, TierCode::L2), permit).await?,
                    // It left L2 meanwhile.
                    None => match shared.store.get(&asked.id, deadline).await {
                        Some(page) => send_page(asked, page, permit).await?,
                        None => client.send(Response::Miss { index: asked.index }).await?,
                    },
                }
            }
        }
        io::Result::Ok(())
    };
    let after_a_while = async {
        let pages = futures::stream::iter(elsewhere).map(|asked| async move {
            let permit = client.permit().await?;
            match shared.store.get(&asked.id, deadline).await {
                Some(page) => deliver(shared, client, way, &asked, page, permit).await,
                None => client.send(Response::Miss { index: asked.index }).await,
            }
        });
        pages.buffer_unordered(GET_PAGES_AT_ONCE).try_collect::<()>().await
    };
    futures::try_join!(at_once, after_a_while)?;
    client.send(Response::End).await
}
