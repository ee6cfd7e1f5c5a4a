//! Whole pages, many at a time.

use super::Places;
use super::sending::{PagePayload, ToClient};
use crate::node::Shared;
use crate::tiers::Page;
use futures::StreamExt;
use larder_format::PageId;
use larder_wire::{Response, TierCode};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Pages of one Get that are read at a time.
pub(super) const GET_PAGES_AT_ONCE: usize = 16;
/// Most pages that one client reads in place at a time; more are sent.
const PLACES_MAX: usize = 65_536;

pub(super) async fn get(
    shared: &Shared,
    client: &ToClient,
    ids: Vec<PageId>,
    deadline: Instant,
    places: &Places,
) -> io::Result<()> {
    let (there, elsewhere): (Vec<_>, Vec<_>) =
        (0..).zip(ids).partition(|(_, id)| shared.store.locate(id) == TierCode::L2);
    let send_page = async |index, page: Arc<Page>, tier, permit| {
        if let Places::Some(held) = places
            && held.lock().len() < PLACES_MAX
            && let Some(hold) = shared.store.hold(&page)
        {
            return client.point_at(held, hold, index, tier).await;
        }
        let head = Response::Page { index, tier, meta: page.meta.clone(), place: None };
        client.send_bytes(shared, head, PagePayload(page), permit).await
    };
    let at_once = async {
        // A few at a time, so that a client that does not read holds no more than that.
        for group in there.chunks(GET_PAGES_AT_ONCE) {
            let ids: Vec<PageId> = group.iter().map(|(_, id)| *id).collect();
            for ((index, id), page) in group.iter().zip(shared.store.get_l2(&ids)) {
                let permit = client.permit().await?;
                match page {
                    Some(page) => send_page(*index, page, TierCode::L2, permit).await?,
                    // It left L2 meanwhile.
                    None => match shared.store.get(id, deadline).await {
                        Some((page, tier)) => send_page(*index, page, tier, permit).await?,
                        None => client.send(Response::Miss { index: *index }).await?,
                    },
                }
            }
        }
        io::Result::Ok(())
    };
    let after_a_while = async {
        let mut pages = futures::stream::iter(elsewhere)
            .map(|(index, id)| async move {
                let permit = client.permit().await?;
                io::Result::Ok((index, shared.store.get(&id, deadline).await, permit))
            })
            .buffer_unordered(GET_PAGES_AT_ONCE);
        while let Some(found) = pages.next().await {
            match found? {
                (index, Some((page, tier)), permit) => send_page(index, page, tier, permit).await?,
                (index, None, _) => client.send(Response::Miss { index }).await?,
            }
        }
        io::Result::Ok(())
    };
    futures::try_join!(at_once, after_a_while)?;
    client.send(Response::End).await
}
