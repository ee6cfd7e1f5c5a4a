//! What one client reaches by RDMA: its lines, pages that it reads, and parts that it writes.
//!
//! Always true:
//! - a page behind a window is held until the window's key is provably dead, whatever the client says or leaves out: the window
//!   owns the hold;
//! - a part that a client wrote is looked at after its window was withdrawn, and not before;
//! - what a client gets of this is bounded: lines by [`MAX_LINES`] and by what the node has left, windows by the credits of each line,
//!   the time that a page is open to it by [`RdmaOptions::page_age_max`](crate::RdmaOptions);
//! - what is open on a line goes with it.

use super::conversation::{Connection, commit};
use super::invalid;
use super::reading::Asked;
use super::sending::ToClient;
use crate::clock::now;
use crate::holds::Hold;
use crate::node::Shared;
use crate::puts::Put;
use crate::rdma::{ClientLine, OpenPage, OpenPart, Turn, describe};
use futures::StreamExt;
use larder_format::codec::DecodeError;
use larder_rdma::{Credit, EndpointAddress, Error, Kept, SlotSlice};
use larder_wire::{Entry, ErrorCode, LineEnd, MAX_LINES, MAX_WINDOWS, PartWindow, Place, Response, TierCode};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Windows that are opened at a time for one request.
const OPENINGS_AT_ONCE: usize = 16;

/// How often pages are looked for that are open for too long.
const AGE_STEP: Duration = Duration::from_secs(1);

/// A page that is open on a line.
struct Opened {
    line: u32,
    since: Instant,
    /// Withdrawn when this is dropped.
    _page: OpenPage,
}

/// The lines of one client, and the pages that are open on them.
pub(super) struct Lines {
    /// Locked after `pages` by whoever needs both.
    lines: Mutex<BTreeMap<u32, Arc<ClientLine>>>,
    pages: Mutex<BTreeMap<Entry, Opened>>,
    /// Lines are made by one request at a time.
    making: Semaphore,
    /// Whether somebody watches the age of pages.
    watched: AtomicBool,
}

impl Default for Lines {
    fn default() -> Self {
        Self {
            lines: Mutex::default(),
            pages: Mutex::default(),
            making: Semaphore::new(1),
            watched: AtomicBool::new(false),
        }
    }
}

impl Lines {
    /// Ends lines, and makes new ones with the client's ends, as far as they can be made before `deadline`.
    pub(super) async fn make(
        self: &Arc<Self>,
        shared: &Shared,
        gone: &[u32],
        offered: Vec<LineEnd>,
        deadline: Instant,
    ) -> Response {
        let Ok(_alone) = self.making.try_acquire() else {
            let message = "lines are being made".into();
            return Response::Error { code: ErrorCode::Busy, message };
        };
        self.take_out(gone);
        let Some(rdma) = &shared.rdma else { return Response::Lines(Vec::new()) };
        let (numbers, addresses) = self.acceptable(offered);
        let rooms: Vec<OwnedSemaphorePermit> =
            addresses.iter().map_while(|_| rdma.room.clone().try_acquire_owned().ok()).collect();
        if rooms.is_empty() {
            return Response::Lines(Vec::new());
        }
        if !self.watched.swap(true, Ordering::Relaxed) {
            tokio::spawn(watch_age(Arc::downgrade(self), rdma.page_age_max));
        }
        let answer = tokio::time::timeout_at(deadline.into(), rdma.fabric.answer(&addresses[..rooms.len()]));
        let made = answer.await.unwrap_or_default();
        let mut ends = Vec::new();
        for ((number, line), room) in numbers.into_iter().zip(made).zip(rooms) {
            if let Some(line) = line {
                shared.metrics.rdma_lines_made.inc();
                ends.push(LineEnd { line: number, address: line.local().encode() });
                self.lines.lock().insert(number, Arc::new(ClientLine::new(line, room)));
            }
        }
        Response::Lines(ends)
    }

    /// Whether pages of a request of this number are open.
    pub(super) fn is_open(&self, request: u64) -> bool {
        let all = Entry { request, index: 0 }..=Entry { request, index: u32::MAX };
        self.pages.lock().range(all).next().is_some()
    }

    /// Ends these lines and those that died, and what is open on them.
    fn take_out(&self, gone: &[u32]) {
        let ended: BTreeMap<u32, Arc<ClientLine>> = {
            let mut lines = self.lines.lock();
            lines.extract_if(.., |number, line| gone.contains(number) || line.is_dead()).collect()
        };
        self.close_pages(|page| ended.contains_key(&page.line));
    }

    /// Withdraws pages; their memory is let go of when that is done.
    fn close_pages(&self, which: impl Fn(&Opened) -> bool) {
        let closed: Vec<(Entry, Opened)> = self.pages.lock().extract_if(.., |_, page| which(page)).collect();
        drop(closed);
    }

    /// Ends of lines that have new numbers and may be addresses, no more than there is room for.
    fn acceptable(&self, offered: Vec<LineEnd>) -> (Vec<u32>, Vec<EndpointAddress>) {
        let lines = self.lines.lock();
        let mut seen: BTreeSet<u32> = lines.keys().copied().collect();
        let new = offered.into_iter().filter(|end| seen.insert(end.line));
        let ends = new.filter_map(|end| Some((end.line, EndpointAddress::decode(&end.address).ok()?)));
        ends.take(MAX_LINES - lines.len().min(MAX_LINES)).unzip()
    }

    /// The `turn`th of these lines, if it can be used.
    fn line(&self, numbers: &[u32], turn: usize) -> Option<Turn> {
        let number = *numbers.get(turn.checked_rem(numbers.len())?)?;
        let line = self.lines.lock().get(&number).cloned()?;
        (!line.is_dead()).then_some((number, line))
    }

    /// Opens these bytes of a held page, and tells the client. `false` if it cannot be opened now.
    pub(super) async fn open_page(
        &self,
        client: &ToClient,
        numbers: &[u32],
        hold: Hold,
        asked: &Asked,
        bytes: &Range<usize>,
        tier: TierCode,
    ) -> io::Result<bool> {
        let Some((number, line)) = self.line(numbers, asked.index as usize) else { return Ok(false) };
        let Some(credit) = line.credit() else { return Ok(false) };
        let page = hold.page().clone();
        let Some(slice) = SlotSlice::new(page.payload.clone(), bytes.clone()) else { return Ok(false) };
        let Ok(window) = line.readable(Kept { bytes: slice, keeper: hold }, credit).await else { return Ok(false) };
        // With room in the queue at hand, keeping it open and telling are one step: none is open that the client never hears of.
        let room = client.room().await?;
        let place = Place::Window(describe(number, &window));
        let mut pages = self.pages.lock();
        if !self.lines.lock().get(&number).is_some_and(|known| Arc::ptr_eq(known, &line)) {
            // The line was taken out meanwhile, and nobody would withdraw this with it.
            return Ok(false);
        }
        match pages.entry(Entry { request: client.request, index: asked.index }) {
            btree_map::Entry::Vacant(vacant) => {
                vacant.insert(Opened { line: number, since: now(), _page: window });
            }
            // Its memory must not move under who reads it.
            btree_map::Entry::Occupied(_) => {
                return Err(invalid(DecodeError::Invalid("a request number whose pages are still open")));
            }
        }
        drop(pages);
        room.send(asked.answer(&page, tier, place).frame(client.version, client.request, None));
        Ok(true)
    }

    /// The client has read these.
    pub(super) fn release(&self, entries: &[Entry]) {
        let read: Vec<Option<Opened>> = {
            let mut pages = self.pages.lock();
            entries.iter().map(|entry| pages.remove(entry)).collect()
        };
        // Withdraws them; their memory is let go of when that is done.
        drop(read);
    }

    /// Opens parts of puts for writing, as far as they can be opened; which.
    async fn open_parts(&self, puts: Vec<(u32, Arc<Put>)>, numbers: &[u32]) -> Vec<PartWindow> {
        let parts = puts.into_iter().flat_map(|(index, put)| {
            let count = put.part_count();
            (0..count).map(move |part| (index, part, put.clone()))
        });
        // As many as the lines can take.
        let credited = parts.take(MAX_WINDOWS).enumerate().map_while(|(turn, part)| {
            let (line, credit) = self.line_to_write(numbers, turn)?;
            Some((part, line, credit))
        });
        let openings = credited.map(|((index, part, put), (number, line), credit)| async move {
            let window = lend(&put, part, &line, credit).await?;
            let told = PartWindow { index, part: part as u32, window: describe(number, &window) };
            put.lend(part, window).then_some(told)
        });
        let openings: Vec<_> = openings.collect();
        let opened = futures::stream::iter(openings).buffered(OPENINGS_AT_ONCE);
        opened.filter_map(std::future::ready).collect().await
    }

    /// The `turn`th of these lines, or the next on which a part can be opened now.
    fn line_to_write(&self, numbers: &[u32], turn: usize) -> Option<(Turn, Credit)> {
        (turn..turn + numbers.len()).find_map(|turn| {
            let (number, line) = self.line(numbers, turn)?;
            let credit = line.credit_to_write()?;
            Some(((number, line), credit))
        })
    }
}

/// Withdraws pages that are open for longer than `most`, as long as there are lines for them.
async fn watch_age(lines: Weak<Lines>, most: Duration) {
    loop {
        tokio::time::sleep(AGE_STEP.min(most)).await;
        let Some(lines) = lines.upgrade() else { return };
        lines.close_pages(|page| now().saturating_duration_since(page.since) > most);
    }
}

/// Opens a part that nothing has come for yet. One that is lost on the way costs its put, so it is tried once on a line that cannot.
async fn lend(put: &Put, part: usize, line: &ClientLine, credit: Credit) -> Option<OpenPart> {
    let slot = put.take_open(part)?;
    match line.writable(slot, credit).await {
        Ok(window) => Some(window),
        Err(error @ (Error::Dead(_) | Error::NotConnected)) => {
            tracing::debug!(id = ?put.id, part, %error, "a part was lost with its line");
            None
        }
        Err(error) => {
            if line.refuses_writing() {
                tracing::warn!(%error, "parts cannot be opened on an RDMA line to a client, and come over the stream");
            }
            None
        }
    }
}

impl Connection {
    /// Opens the parts of what a request reserved.
    pub(super) async fn open_parts(
        &mut self,
        request: u64,
        reserve: u64,
        numbers: Vec<u32>,
        deadline: Instant,
    ) -> io::Result<()> {
        let all = Entry { request: reserve, index: 0 }..=Entry { request: reserve, index: u32::MAX };
        let puts: Vec<(u32, Arc<Put>)> = self.puts.range(all).map(|(name, put)| (name.index, put.clone())).collect();
        let (lines, client) = (self.lines.clone(), self.client(request, deadline));
        self.spawn(request, puts.len(), async move {
            let windows = lines.open_parts(puts, &numbers).await;
            client.send(Response::Windows(windows)).await
        })
        .await
    }

    /// A part was written through its window, or so the client says.
    pub(super) fn land_written(&mut self, name: Entry, part: u32, crcs: Vec<u32>) {
        let Some(put) = self.puts.get(&name).cloned() else { return };
        let Some(window) = put.take_lent(part as usize) else { return };
        let shared = self.shared.clone();
        self.start(name.request, async move {
            if !land(&shared, &put, part as usize, window, crcs).await {
                shared.store.give_up(&put);
            }
            Ok(())
        });
    }
}

/// Withdraws a part's window, and only then looks at its bytes.
async fn land(shared: &Shared, put: &Put, part: usize, window: OpenPart, crcs: Vec<u32>) -> bool {
    let slot = match window.withdraw().await {
        Ok(Kept { bytes, .. }) => bytes,
        Err(error) => {
            tracing::warn!(id = ?put.id, part, %error, "memory of a part did not come back: put given up");
            return false;
        }
    };
    shared.metrics.bytes_written_rdma.inc_by(slot.len() as u64);
    let good = put.land(part, slot, crcs);
    if !good {
        shared.metrics.parts_corrupt.inc();
        tracing::warn!(id = ?put.id, part, "part damaged on its way: put given up");
    }
    good
}

/// Gives puts up unless they were sealed.
pub(super) struct Unsealed {
    pub(super) shared: Arc<Shared>,
    pub(super) puts: Vec<Option<Arc<Put>>>,
}

impl Drop for Unsealed {
    fn drop(&mut self) {
        self.puts.iter().flatten().for_each(|put| self.shared.store.abort(put));
    }
}

impl Unsealed {
    /// Seals the puts when the parts that were written have landed, or at the deadline, and tells the client.
    pub(super) async fn seal(self, client: &ToClient, deadline: Instant) -> io::Result<()> {
        let landed = futures::future::join_all(self.puts.iter().flatten().map(|put| put.written()));
        // What has not landed by then is incomplete.
        let _ = tokio::time::timeout_at(deadline.into(), landed).await;
        client.send(commit(&self.shared, &self.puts)).await
    }
}
