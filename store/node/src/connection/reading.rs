//! Pages, and bytes of pages, many at a time.
//!
//! What a Get asks for is counted at once, and what is too much of it refused at once. A page that was taken on waits until
//! the client has taken those before it, and then for its turn.

use super::conversation::Connection;
use super::rdma::Lines;
use super::sending::{Leave, PagePayload, ToClient};
use super::{Held, Places, invalid};
use crate::budget::{Busy, Charge};
use crate::node::Shared;
use crate::tiers::Page;
use futures::{StreamExt, TryStreamExt};
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_format::{PageId, whole_chunks};
use larder_wire::{Delivery, Entry, MAX_PLACES, Place, Placed, Response, TierCode, VERSION_OF_PLACES};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Pages of one Get that are read at a time.
pub(super) const GET_PAGES_AT_ONCE: usize = 16;
/// Most pages that one client reads in place at a time; more are sent.
const PLACES_MAX: usize = 65_536;
/// Most pages read in place whose places are told before the next request is looked at.
const PLACED_HERE_MAX: usize = 256;

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

    /// What the client is told of a page in L2 that it reads in place; `None` as in [`Asked::within`].
    fn placed(&self, page: &Page) -> Option<Placed> {
        let bytes = self.within(page)?;
        let offset = offset(page, &bytes);
        let (index, meta, bytes) = (self.index, page.meta.clone(), bytes.start as u32..bytes.end as u32);
        Some(Placed { index, tier: TierCode::L2, meta, bytes, offset })
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

impl Way {
    /// What the client reads in place, if it hears of many pages at a time.
    fn places(&self, version: u16) -> Option<&Held> {
        match self {
            Way::InPlace(Places::Some(held)) if version >= VERSION_OF_PLACES => Some(held),
            _ => None,
        }
    }
}

/// Where bytes of a page lie in the arena.
pub(super) fn offset(page: &Page, bytes: &Range<usize>) -> u64 {
    (page.payload.arena_offset() + bytes.start) as u64
}

/// One that was taken on.
struct Taken {
    asked: Asked,
    charge: Charge,
}

/// The pages of a Get by what is made of them.
#[derive(Default)]
struct Sorted {
    at_once: Vec<Taken>,
    later: Vec<Taken>,
    nowhere: Vec<u32>,
    /// From this page on.
    refused: Option<(u32, Busy)>,
}

impl Connection {
    /// Takes on a Get, or what may be taken on of it.
    pub(super) async fn get(
        &mut self,
        request: u64,
        asked: Vec<Asked>,
        by: Delivery,
        deadline: Instant,
    ) -> io::Result<()> {
        let way = match by {
            Delivery::Sent => Way::Sent,
            Delivery::InPlace => Way::InPlace(self.places.clone()),
            Delivery::Read(lines) => Way::Read(self.lines.clone(), lines),
        };
        if self.is_kept(request) {
            // Its memory must not move under who reads it.
            return Err(invalid(DecodeError::Invalid("a request number whose pages are still held")));
        }
        // Opening a window takes a while, so it is done for several pages at a time, like reading them from L3.
        let count = asked.len() as u32;
        let sorted = self.sort(asked, matches!(way, Way::Read(..)), deadline);
        match sorted.refused {
            Some((0, busy)) => {
                self.shared.metrics.pages_refused.inc_by(count.into());
                return self.refuse(request, busy).await;
            }
            Some((first, busy)) => self.refuse_pages(request, first..count, busy).await?,
            None => {}
        }
        self.shared.store.missed(sorted.nowhere.len());
        for &index in &sorted.nowhere {
            self.answer(request, Response::Miss { index }).await?;
        }
        let taken = sorted.at_once.len() + sorted.later.len();
        if taken == 0 {
            return self.answer(request, Response::End).await;
        }
        // No bytes have to leave for a page that is read in place.
        let placed = way.places(self.version).is_some() && sorted.later.is_empty();
        let here = taken <= 1 || (placed && taken <= PLACED_HERE_MAX);
        let (shared, client, page_bytes) = (self.shared.clone(), self.client(request, deadline), self.page_bytes());
        let reading = async move { Reading { shared, client, way, page_bytes, deadline }.run(sorted).await };
        self.run_here(request, taken, here, reading).await
    }

    /// Whether the client reads pages that were asked for by a request of this number.
    fn is_kept(&self, request: u64) -> bool {
        let all = Entry { request, index: 0 }..=Entry { request, index: u32::MAX };
        let in_place = match &self.places {
            Places::Some(held) => held.lock().range(all).next().is_some(),
            Places::None => false,
        };
        in_place || self.lines.is_open(request)
    }

    /// Counts the pages that are there, as long as there is room for them.
    fn sort(&self, asked: Vec<Asked>, opens: bool, deadline: Instant) -> Sorted {
        let (mut sorted, page_bytes) = (Sorted::default(), self.page_bytes());
        for asked in asked {
            let tier = self.shared.store.locate(&asked.id);
            if tier == TierCode::Nowhere {
                sorted.nowhere.push(asked.index);
                continue;
            }
            let bytes = asked.bytes.as_ref().map_or(page_bytes, |bytes| page_bytes.min(bytes.len() as u64));
            match self.account.charge_asked(bytes, deadline) {
                Ok(charge) => {
                    let at_once = tier == TierCode::L2 && !opens;
                    let list = if at_once { &mut sorted.at_once } else { &mut sorted.later };
                    list.push(Taken { asked, charge });
                }
                // With the first page that is too much all behind it are: who reads a sequence needs its beginning.
                Err(busy) => {
                    sorted.refused = Some((asked.index, busy));
                    break;
                }
            }
        }
        sorted
    }
}

/// The pages of one Get on their way to the client.
struct Reading {
    shared: Arc<Shared>,
    client: ToClient,
    way: Way,
    page_bytes: u64,
    deadline: Instant,
}

impl Reading {
    async fn run(self, sorted: Sorted) -> io::Result<()> {
        let in_l2 = async {
            let left = self.in_place(sorted.at_once).await?;
            self.at_once(left).await
        };
        futures::try_join!(in_l2, self.after_a_while(sorted.later))?;
        self.client.end(Response::End).await
    }

    /// Leave for a page to be on its way; by the deadline of the request it is a miss.
    async fn leave(&self, asked: &Asked) -> io::Result<Option<Leave>> {
        let leave = self.client.leave(self.page_bytes).await?;
        if leave.is_none() {
            self.client.send(Response::Miss { index: asked.index }).await?;
        }
        Ok(leave)
    }

    /// Pages in L2 that the client reads in place; the others are returned.
    async fn in_place(&self, pages: Vec<Taken>) -> io::Result<Vec<Taken>> {
        let Some(held) = self.way.places(self.client.version) else { return Ok(pages) };
        let (mut pages, mut left) = (pages.into_iter(), Vec::new());
        loop {
            let most = MAX_PLACES.min(PLACES_MAX.saturating_sub(held.lock().len()));
            let group: Vec<Taken> = pages.by_ref().take(most).collect();
            if group.len() < 2 {
                left.extend(group.into_iter().chain(pages));
                return Ok(left);
            }
            // With room in the queue at hand, holding and telling are one step: no page is held that the client never hears of.
            let room = self.client.room().await?;
            let ids: Vec<PageId> = group.iter().map(|taken| taken.asked.id).collect();
            let wanted = |at: usize, page: &Page| group[at].asked.within(page).is_some();
            let holds = self.shared.store.hold_all_l2(&ids, wanted);
            let (mut places, mut kept, mut charges) = (Vec::new(), Vec::new(), Vec::new());
            for (taken, hold) in group.into_iter().zip(holds) {
                let found = hold.and_then(|hold| Some((taken.asked.placed(hold.page())?, hold)));
                let Some((placed, hold)) = found else {
                    left.push(taken);
                    continue;
                };
                kept.push((placed.index, hold));
                charges.push(taken.charge);
                places.push(placed);
            }
            if places.is_empty() {
                continue;
            }
            let bytes: usize = places.iter().map(|placed| placed.bytes.len()).sum();
            let frame = self.client.places(places);
            self.client.keep(held, kept)?;
            room.send(frame);
            self.shared.metrics.bytes_in_place.inc_by(bytes as u64);
            charges.into_iter().for_each(Charge::sent);
        }
    }

    /// The other pages in L2.
    async fn at_once(&self, pages: Vec<Taken>) -> io::Result<()> {
        let mut pages = pages.into_iter();
        while let Some(first) = pages.next() {
            let Some(leave) = self.leave(&first.asked).await? else { continue };
            // As many as may be on their way are looked up together.
            let mut group = vec![(first, leave)];
            while group.len() < GET_PAGES_AT_ONCE
                && pages.len() > 0
                && let Some(leave) = self.client.leave_now(self.page_bytes)
            {
                group.extend(pages.next().map(|next| (next, leave)));
            }
            let ids: Vec<PageId> = group.iter().map(|(taken, _)| taken.asked.id).collect();
            for ((taken, leave), page) in group.into_iter().zip(self.shared.store.get_l2(&ids)) {
                let found = match page {
                    Some(page) => Some((page, TierCode::L2)),
                    // It left L2 meanwhile.
                    None => self.shared.store.get(&taken.asked.id, self.deadline).await,
                };
                self.answer(taken, found, leave).await?;
            }
        }
        Ok(())
    }

    /// Pages that have to be read, or opened, first.
    async fn after_a_while(&self, pages: Vec<Taken>) -> io::Result<()> {
        let pages = futures::stream::iter(pages).map(|taken| async move {
            let Some(leave) = self.leave(&taken.asked).await? else { return Ok(()) };
            let found = self.shared.store.get(&taken.asked.id, self.deadline).await;
            self.answer(taken, found, leave).await
        });
        pages.buffer_unordered(GET_PAGES_AT_ONCE).try_collect::<()>().await
    }

    async fn answer(&self, taken: Taken, found: Option<(Arc<Page>, TierCode)>, leave: Leave) -> io::Result<()> {
        let Taken { asked, charge } = taken;
        self.deliver(&asked, found, leave).await?;
        charge.sent();
        Ok(())
    }

    /// Delivers a page, or bytes of it; as payload if they cannot come the other way now.
    async fn deliver(&self, asked: &Asked, found: Option<(Arc<Page>, TierCode)>, leave: Leave) -> io::Result<()> {
        let (shared, client, miss) = (&self.shared, &self.client, Response::Miss { index: asked.index });
        let found = found.and_then(|(page, tier)| asked.within(&page).map(|bytes| (page, tier, bytes)));
        let Some((page, tier, bytes)) = found else {
            // What waits from here on is no page.
            drop(leave);
            return client.send(miss).await;
        };
        match &self.way {
            Way::InPlace(Places::Some(held)) if held.lock().len() < PLACES_MAX => {
                if let Some(hold) = shared.store.hold(&page) {
                    shared.metrics.bytes_in_place.inc_by(bytes.len() as u64);
                    // What waits from here on is counted by the hold.
                    drop(leave);
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
        client.send_bytes(shared, head, PagePayload { page, bytes }, leave).await
    }
}
