//! Pages, and bytes of pages, many at a time.

use super::Places;
use super::sending::{PagePayload, ToClient};
use crate::node::Shared;
use crate::tiers::Page;
use futures::StreamExt;
use larder_format::planted::{Bug, has};
use larder_format::{PageId, whole_chunks};
use larder_wire::{Response, TierCode};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

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

    /// What the client is told; `place` is where the bytes lie in the arena, if they are not sent.
    pub(super) fn answer(&self, page: &Page, tier: TierCode, place: Option<u64>) -> Response {
        let (index, meta) = (self.index, page.meta.clone());
        match &self.bytes {
            None => Response::Page { index, tier, meta, place },
            Some(bytes) => Response::Range { index, tier, meta, bytes: bytes.clone(), place },
        }
    }
}

pub(super) async fn get(
    shared: &Shared,
    client: &ToClient,
    asked: Vec<Asked>,
    deadline: Instant,
    places: &Places,
) -> io::Result<()> {
    let (there, elsewhere): (Vec<Asked>, Vec<Asked>) =
        asked.into_iter().partition(|asked| shared.store.locate(&asked.id) == TierCode::L2);
    let send_page = async |asked: &Asked, page: Arc<Page>, tier, permit| {
        let Some(bytes) = asked.within(&page) else { return client.send(Response::Miss { index: asked.index }).await };
        if let Places::Some(held) = places
            && held.lock().len() < PLACES_MAX
            && let Some(hold) = shared.store.hold(&page)
        {
            return client.point_at(held, hold, asked, &bytes, tier).await;
        }
        let head = asked.answer(&page, tier, None);
        client.send_bytes(shared, head, PagePayload { page, bytes }, permit).await
    };
    let at_once = async {
        // A few at a time, so that a client that does not read holds no more than that.
        for group in there.chunks(GET_PAGES_AT_ONCE) {
            let ids: Vec<PageId> = group.iter().map(|asked| asked.id).collect();
            for (asked, page) in group.iter().zip(shared.store.get_l2(&ids)) {
                let permit = client.permit().await?;
                match page {
                    Some(page) => send_page(asked, page, TierCode::L2, permit).await?,
                    // It left L2 meanwhile.
                    None => match shared.store.get(&asked.id, deadline).await {
                        Some((page, tier)) => send_page(asked, page, tier, permit).await?,
                        None => client.send(Response::Miss { index: asked.index }).await?,
                    },
                }
            }
        }
        io::Result::Ok(())
    };
    let after_a_while = async {
        let mut pages = futures::stream::iter(elsewhere)
            .map(|asked| async move {
                let permit = client.permit().await?;
                let found = shared.store.get(&asked.id, deadline).await;
                io::Result::Ok((asked, found, permit))
            })
            .buffer_unordered(GET_PAGES_AT_ONCE);
        while let Some(found) = pages.next().await {
            match found? {
                (asked, Some((page, tier)), permit) => send_page(&asked, page, tier, permit).await?,
                (asked, None, _) => client.send(Response::Miss { index: asked.index }).await?,
            }
        }
        io::Result::Ok(())
    };
    futures::try_join!(at_once, after_a_while)?;
    client.send(Response::End).await
}
