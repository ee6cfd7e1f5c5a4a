//! Get: pages and page ranges, many at a time.
//!
//! 1. Each page is located once. Absent pages are answered as misses.
//! 2. The present pages are charged as outstanding bytes, in order, until a bound is reached. The
//!    rest is refused at once.
//! 3. Each admitted page waits for send credit, is read if it is on L3, and leaves.
//!
//! Between steps 2 and 3 a page holds no memory, so a long list costs only its table.
//!
//! The eviction policy learns of the pages in the order of the request: of those in DRAM first,
//! then of those on L3 in turns. A sequence is in this order, except where L2 has a page behind one
//! that only L3 has.

use super::Connection;
use super::holdings::{InPlaceHolds, request_number_in_use};
use super::outbox::{PagePayload, Responder, SendCredit};
use super::page_request::PageRequest;
use super::rdma::ClientChannels;
use crate::budget::{Busy, Charge};
use crate::page::Page;
use crate::state::NodeState;
use crate::tiers::{PageLocation, ReadRecord, StampedLocation, Turns};
use futures::{StreamExt, TryStreamExt};
use larder_format::PageId;
use larder_runtime::fail_point;
use larder_wire::{Delivery, MAX_ARENA_PAGES, PayloadLocation, Response, TierCode, VERSION_ARENA_PAGES};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Pages of one request that are read at a time. Enough to keep an NVMe queue busy, and few enough
/// that one request does not fill it.
pub(super) const READS_AT_ONCE: usize = 16;
/// Maximum number of pages that one client reads in place at a time. Further pages are sent. It
/// bounds the table of holds of a client that never releases.
const IN_PLACE_PAGES_MAX: usize = 65_536;
/// A request for at most this many pages in place is answered on the task that reads requests. No
/// bytes have to leave, so it takes less time than a spawn. More pages would delay other requests.
const INLINE_PAGES_MAX: usize = 256;

enum PageTransport {
    Inline,
    InPlace(Arc<InPlaceHolds>),
    Rdma(Arc<ClientChannels>, Vec<u32>),
}

impl PageTransport {
    /// Returns the table of holds if the client reads in place and accepts several pages per
    /// message.
    fn batched_holds(&self, version: u16) -> Option<&InPlaceHolds> {
        match self {
            PageTransport::InPlace(holds) if version >= VERSION_ARENA_PAGES => Some(holds),
            _ => None,
        }
    }
}

/// A page that was admitted, with its charge as outstanding bytes. It takes no memory until it has
/// send credit.
struct AdmittedPage {
    page: PageRequest,
    charge: Charge,
    /// Location on L3, if the page was only there. It stays valid or is looked up again.
    on_l3: Option<StampedLocation>,
}

#[derive(Default)]
struct SortedPages {
    in_dram: Vec<AdmittedPage>,
    /// On L3, or to be granted over RDMA, which takes a round trip to the device.
    delayed: Vec<AdmittedPage>,
    absent: Vec<u32>,
    /// Index of the first refused page. All pages behind it are refused as well.
    refused: Option<(u32, Busy)>,
}

impl Connection {
    pub(super) async fn get(
        &mut self,
        request: u64,
        pages: Vec<PageRequest>,
        by: Delivery,
        deadline: Instant,
    ) -> io::Result<()> {
        if self.holdings.has_request(request) || self.rdma.has_request(request) {
            return Err(request_number_in_use());
        }
        let transport = match (by, self.holdings.in_place()) {
            (Delivery::InPlace, Some(holds)) => PageTransport::InPlace(holds.clone()),
            (Delivery::Rdma(channels), _) => PageTransport::Rdma(self.rdma.clone(), channels),
            // A client that has not mapped the arena gets the bytes.
            (Delivery::Inline | Delivery::InPlace, _) => PageTransport::Inline,
        };
        let count = pages.len() as u32;
        let sorted = self.admit_pages(pages, matches!(transport, PageTransport::Rdma(..)), deadline);
        match sorted.refused {
            Some((0, busy)) => {
                self.node.metrics.pages_refused.inc_by(count.into());
                return self.refuse(request, busy).await;
            }
            Some((first, busy)) => self.refuse_pages(request, first..count, busy).await?,
            None => {}
        }
        self.node.store.tiers().count_misses(sorted.absent.len());
        for &index in &sorted.absent {
            self.outbox.respond(request, Response::Miss { index }).await?;
        }
        let admitted = sorted.in_dram.len() + sorted.delayed.len();
        if admitted == 0 {
            return self.outbox.respond(request, Response::End).await;
        }
        let only_locations = transport.batched_holds(self.outbox.version()).is_some() && sorted.delayed.is_empty();
        let inline = admitted <= 1 || (only_locations && admitted <= INLINE_PAGES_MAX);
        let sender = PageSender {
            node: self.node.clone(),
            responder: self.responder(request, deadline),
            transport,
            page_bytes: self.page_bytes(),
            deadline,
        };
        self.spawn_or_inline(request, admitted, inline, sender.run(sorted)).await
    }

    /// Locates pages and charges the present ones, until a bound is reached.
    fn admit_pages(&self, pages: Vec<PageRequest>, by_rdma: bool, deadline: Instant) -> SortedPages {
        let mut sorted = SortedPages::default();
        let page_bytes = self.page_bytes();
        for page in pages {
            let on_l3 = match self.node.store.tiers().lookup(&page.id) {
                PageLocation::Absent => {
                    sorted.absent.push(page.index);
                    continue;
                }
                PageLocation::OnL3(location) => Some(location),
                // The page itself is not kept: until it has credit, eviction must be able to free
                // it.
                PageLocation::InL2(_) | PageLocation::BeingWritten(_) | PageLocation::Held(_) => None,
            };
            match self.account.charge_outstanding(page.sent_bytes(page_bytes), deadline) {
                Ok(charge) => {
                    let is_delayed = on_l3.is_some() || by_rdma;
                    let list = if is_delayed { &mut sorted.delayed } else { &mut sorted.in_dram };
                    list.push(AdmittedPage { page, charge, on_l3 });
                }
                // The pages behind are refused too: a reader of a sequence needs its start.
                Err(busy) => {
                    sorted.refused = Some((page.index, busy));
                    break;
                }
            }
        }
        sorted
    }
}

/// Sends the pages of one Get. A request that is cancelled returns its charges, and leaves no hold
/// that its client does not know of.
struct PageSender {
    node: Arc<NodeState>,
    responder: Responder,
    transport: PageTransport,
    page_bytes: u64,
    deadline: Instant,
}

impl PageSender {
    async fn run(self, sorted: SortedPages) -> io::Result<()> {
        let mut record = ReadRecord::HitAndTouch;
        if !sorted.in_dram.is_empty() && !sorted.delayed.is_empty() {
            // Now: the pages that L2 loads meanwhile could otherwise displace them as unused ones.
            self.node.store.tiers().touch_all_l2(sorted.in_dram.iter().map(|admitted| &admitted.page.id));
            record = ReadRecord::Hit;
        }
        let in_dram = async {
            let rest = self.send_locations(sorted.in_dram, record).await?;
            self.send_in_dram(rest, record).await
        };
        // Both at once: a slow device must not delay pages that are in DRAM.
        futures::try_join!(in_dram, self.send_delayed(sorted.delayed))?;
        self.responder.finish(Response::End).await
    }

    /// Waits for send credit. At the deadline of the request it answers a miss and returns `None`.
    async fn credit(&self, page: &PageRequest) -> io::Result<Option<SendCredit>> {
        let credit = self.responder.credit(page.sent_bytes(self.page_bytes), self.page_bytes).await?;
        if credit.is_none() {
            self.responder.send(Response::Miss { index: page.index }).await?;
        }
        Ok(credit)
    }

    /// Sends the locations of pages in L2 to a client that reads in place, several per message.
    /// Returns the pages that must go another way.
    async fn send_locations(&self, pages: Vec<AdmittedPage>, record: ReadRecord) -> io::Result<Vec<AdmittedPage>> {
        let Some(held) = self.transport.batched_holds(self.responder.version()) else { return Ok(pages) };
        let mut pages = pages.into_iter();
        let mut rest = Vec::new();
        loop {
            // Saturates because the requests of one connection add their holds concurrently.
            let group_max = MAX_ARENA_PAGES.min(IN_PLACE_PAGES_MAX.saturating_sub(held.len()));
            let group: Vec<AdmittedPage> = pages.by_ref().take(group_max).collect();
            // A single page goes the usual way: a batch saves nothing.
            if group.len() < 2 {
                rest.extend(group.into_iter().chain(pages));
                return Ok(rest);
            }
            // With the slot at hand, hold and answer are one step. A cancelled request must not
            // leave a hold that the client does not know of.
            let slot = self.responder.reserve_slot().await?;
            let ids: Vec<PageId> = group.iter().map(|admitted| admitted.page.id).collect();
            let wanted = |at: usize, page: &Page| group[at].page.range(page).is_some();
            let found = self.node.store.tiers().hold_all_l2(&ids, wanted, record);
            let mut locations = Vec::new();
            let mut holds = Vec::new();
            let mut charges = Vec::new();
            for (admitted, hold) in group.into_iter().zip(found) {
                let located = hold.and_then(|hold| Some((admitted.page.arena_page(hold.page())?, hold)));
                let Some((location, hold)) = located else {
                    rest.push(admitted);
                    continue;
                };
                holds.push((location.index, hold));
                charges.push(admitted.charge);
                locations.push(location);
            }
            if locations.is_empty() {
                continue;
            }
            let bytes: usize = locations.iter().map(|location| location.bytes.len()).sum();
            let frame = self.responder.locations_frame(locations);
            held.insert_all(self.responder.request(), holds)?;
            slot.send(frame);
            self.node.metrics.bytes_in_place.inc_by(bytes as u64);
            charges.into_iter().for_each(Charge::release_sent);
        }
    }

    async fn send_in_dram(&self, pages: Vec<AdmittedPage>, record: ReadRecord) -> io::Result<()> {
        let mut pages = pages.into_iter();
        while let Some(first) = pages.next() {
            let Some(credit) = self.credit(&first.page).await? else { continue };
            // All pages that have credit now are looked up under one lock.
            let mut group = vec![(first, credit)];
            while group.len() < READS_AT_ONCE
                && let Some(next) = pages.as_slice().first()
                && let Some(credit) = self.responder.try_credit(next.page.sent_bytes(self.page_bytes), self.page_bytes)
            {
                group.extend(pages.next().map(|next| (next, credit)));
            }
            let ids: Vec<PageId> = group.iter().map(|(admitted, _)| admitted.page.id).collect();
            let in_dram = self.node.store.tiers().get_all_l2(&ids, record);
            for ((admitted, credit), page) in group.into_iter().zip(in_dram) {
                let found = match page {
                    Some(page) => Some((page, TierCode::L2)),
                    // Evicted since the request came.
                    None => self.node.store.tiers().get(&admitted.page.id, self.deadline).await,
                };
                self.send_page(admitted, found, credit).await?;
            }
        }
        Ok(())
    }

    /// Sends pages that have to be read from L3, or granted over RDMA, first. A page has its turn
    /// until it is read, and no longer: the client may take its time to receive it.
    async fn send_delayed(&self, pages: Vec<AdmittedPage>) -> io::Result<()> {
        let mut turns = Turns::default();
        let in_turn = pages.into_iter().map(|admitted| (admitted, turns.next_turn()));
        let pages = futures::stream::iter(in_turn).map(|(admitted, turn)| async move {
            let Some(credit) = self.credit(&admitted.page).await? else { return Ok(()) };
            let tiers = self.node.store.tiers();
            let id = &admitted.page.id;
            let found = match admitted.on_l3 {
                Some(_) if admitted.page.bytes.is_some() && fail_point!("node.range-misses-l3") => None,
                Some(location) => tiers.get_in_turn(id, PageLocation::OnL3(location), turn, self.deadline).await,
                None => tiers.get_in_turn(id, tiers.lookup(id), turn, self.deadline).await,
            };
            self.send_page(admitted, found, credit).await
        });
        pages.buffer_unordered(READS_AT_ONCE).try_collect::<()>().await
    }

    async fn send_page(
        &self,
        admitted: AdmittedPage,
        found: Option<(Arc<Page>, TierCode)>,
        credit: SendCredit,
    ) -> io::Result<()> {
        self.deliver(&admitted.page, found, credit).await?;
        admitted.charge.release_sent();
        Ok(())
    }

    /// Delivers a page by the request's transport, or inline if that is not possible now.
    async fn deliver(
        &self,
        page_request: &PageRequest,
        found: Option<(Arc<Page>, TierCode)>,
        credit: SendCredit,
    ) -> io::Result<()> {
        let node = &self.node;
        let responder = &self.responder;
        let found = found.and_then(|(page, tier)| page_request.range(&page).map(|bytes| (page, tier, bytes)));
        let Some((page, tier, bytes)) = found else {
            // The answer may wait for a full queue, and then without memory for a page.
            drop(credit);
            return responder.send(Response::Miss { index: page_request.index }).await;
        };
        match &self.transport {
            PageTransport::InPlace(held) if held.len() < IN_PLACE_PAGES_MAX => {
                if let Some(hold) = node.store.tiers().hold(&page) {
                    node.metrics.bytes_in_place.inc_by(bytes.len() as u64);
                    // The hold counts the page from here on.
                    drop(credit);
                    return responder.send_location(held, hold, page_request, &bytes, tier).await;
                }
                if fail_point!("node.full-holds-are-a-miss") {
                    drop(credit);
                    return responder.send(Response::Miss { index: page_request.index }).await;
                }
            }
            PageTransport::Rdma(channels, numbers) => {
                if let Some(hold) = node.store.tiers().hold(&page)
                    && channels.grant_page(responder, numbers, hold, page_request, &bytes, tier).await?
                {
                    node.metrics.bytes_exposed_rdma.inc_by(bytes.len() as u64);
                    return Ok(());
                }
            }
            PageTransport::Inline | PageTransport::InPlace(_) => {}
        }
        let head = page_request.answer(&page, tier, PayloadLocation::Inline);
        responder.send_bytes(node, head, PagePayload { page, bytes }, credit).await
    }
}
