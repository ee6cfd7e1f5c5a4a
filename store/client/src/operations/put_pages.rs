//! Put of many whole pages. Each node gets one reservation, then the parts of all pages back to
//! back. The client commits every few megabytes, so that the node can serve others in between.
//!
//! Invariant: as with a streaming put, the node hears of every reservation whose outcome the client
//! does not know.

use super::put::{CancelOnDrop, NewPage, PutOptions, PutOutcome, compare, reserve_outcomes};
use crate::client::Client;
use crate::connection::{Connection, OpenParts, ResponseHandler, SentPart, open_parts, send_part, sends_location};
use crate::stats::count;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::join_all;
use larder_format::{PageKey, chunk_crcs};
use larder_runtime::now;
use larder_wire::{CommitOutcome, Entry, MAX_PUTS, Request, ReserveOutcome, Reserved, Response};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// Payload bytes that leave before the node has answered the reservation: about the bandwidth-delay
/// product of a fast network.
const EAGER_BYTES: usize = 1 << 20;
/// Bytes of pages in one commit. A larger page is committed alone.
const GROUP_BYTES: usize = 16 << 20;
/// Groups in flight at a time. The second hides the round trip of the first one's commit.
const GROUPS_IN_FLIGHT: usize = 2;
/// Token ids in one reservation: 128 KiB of them. The other fields of [`MAX_PUTS`] pages take up to
/// 600 KiB of a body, which has room for 1 MiB.
const TOKEN_IDS_MAX: usize = 32 << 10;
/// Pages that are written by RDMA at a time.
const RDMA_PAGES_IN_FLIGHT: usize = 8;

impl Client {
    /// Puts whole pages, all at once. Returns the outcomes in the order of the request. Bytes that
    /// are not exactly a page's are [`PutOutcome::Lost`].
    ///
    /// Cheaper than many calls of [`Client::put`]: each node gets one reservation for up to 1,024
    /// pages, or fewer with long lists of token ids. Bytes of a frozen [`Buffer`](crate::Buffer)
    /// save a copy.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub async fn put_pages(
        &self,
        pages: Vec<(NewPage, Bytes)>,
        options: PutOptions,
        deadline: Instant,
    ) -> Vec<PutOutcome> {
        let part_table = self.namespace().geometry.part_table();
        let split = |(page, bytes)| (page, split_into_parts(bytes, &part_table));
        self.put_parts(pages.into_iter().map(split).collect(), options, deadline).await
    }

    /// Like [`Client::put_pages`], but takes each page as its parts, which may lie apart in memory.
    /// Parts that do not have the lengths of the namespace's parts are [`PutOutcome::Lost`].
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub async fn put_parts(
        &self,
        pages: Vec<(NewPage, Vec<Bytes>)>,
        options: PutOptions,
        deadline: Instant,
    ) -> Vec<PutOutcome> {
        let geometry = self.namespace().geometry;
        let part_table = &geometry.part_table();
        let page_bytes = geometry.page_bytes();
        let pages: Vec<(NewPage, Parts)> = pages.into_iter().map(|(page, parts)| (page, parts.into())).collect();
        let keys: Vec<PageKey> = pages.iter().map(|(page, _)| page.key).collect();
        let mut outcomes = vec![PutOutcome::Lost; pages.len()];
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let pages = &pages;
        let token_ids = pages.iter().map(|(page, _)| page.sent_token_ids().len()).max().unwrap_or(0);
        let batch_max = MAX_PUTS.min(TOKEN_IDS_MAX / token_ids.max(1));
        let puts = nodes.batches(&keys, batch_max, page_bytes).into_iter().map(|(connection, mut indices)| {
            // Here, because the rest assumes a whole page.
            indices.retain(|&index| fits(&pages[index].1, part_table));
            put_with_retries(connection, pages, indices, options, part_table, deadline)
        });
        for (index, outcome) in join_all(puts).await.into_iter().flatten() {
            outcomes[index] = outcome;
        }
        let stored = outcomes.iter().filter(|&&outcome| outcome == PutOutcome::Stored).count();
        let busy = outcomes.iter().filter(|outcome| outcome.is_busy()).count();
        let lost = outcomes.iter().filter(|&&outcome| outcome == PutOutcome::Lost).count();
        count(&self.counters().puts, stored);
        count(&self.counters().puts_busy, busy);
        count(&self.counters().puts_lost, lost + busy);
        outcomes
    }
}

/// Parts of a page, in order. Retries share them.
type Parts = Arc<[Bytes]>;

/// Cuts the bytes of a page into its parts, without a copy. Returns no parts if the length is not
/// that of a page.
fn split_into_parts(mut bytes: Bytes, part_table: &[u32]) -> Vec<Bytes> {
    if bytes.len() != part_table.iter().map(|&length| length as usize).sum::<usize>() {
        return Vec::new();
    }
    part_table.iter().map(|&length| bytes.split_to(length as usize)).collect()
}

fn fits(parts: &[Bytes], part_table: &[u32]) -> bool {
    parts.iter().map(Bytes::len).eq(part_table.iter().map(|&length| length as usize))
}

/// Puts the pages of `indices` at one node, with retries of those that it is too busy for.
async fn put_with_retries(
    connection: Arc<Connection>,
    pages: &[(NewPage, Parts)],
    mut indices: Vec<usize>,
    options: PutOptions,
    part_table: &[u32],
    deadline: Instant,
) -> Vec<(usize, PutOutcome)> {
    let mut ends = Vec::new();
    let mut retries = options.busy_retries;
    loop {
        let batch = indices.iter().map(|&index| pages[index].clone()).collect();
        let outcomes = put_batch(&connection, batch, options, part_table, deadline).await;
        let pause = retry_pause(&outcomes, &connection, deadline).filter(|_| retries > 0);
        ends.extend(indices.iter().copied().zip(outcomes));
        let Some(pause) = pause else { return ends };
        retries -= 1;
        tokio::time::sleep(pause).await;
        indices = ends.extract_if(.., |(_, outcome)| outcome.is_busy()).map(|(index, _)| index).collect();
    }
}

/// Pause before a retry of the busy pages. `None` if there are none, or if the deadline is earlier.
fn retry_pause(outcomes: &[PutOutcome], connection: &Connection, deadline: Instant) -> Option<Duration> {
    let hints = outcomes.iter().filter_map(|outcome| match outcome {
        PutOutcome::Busy { retry_after } => Some(*retry_after),
        _ => None,
    });
    hints.max().map(|hint| connection.jittered(hint)).filter(|&pause| now() + pause < deadline)
}

/// Puts pages at one node with one reservation. Returns the outcomes in order.
async fn put_batch(
    connection: &Arc<Connection>,
    pages: Vec<(NewPage, Parts)>,
    options: PutOptions,
    part_table: &[u32],
    deadline: Instant,
) -> Vec<PutOutcome> {
    let batch = Batch { connection, number: connection.next_request(), pages, part_table, deadline };
    let mut open = CancelOnDrop { connection, request: batch.number, is_armed: true };
    let outcomes = batch.run(options).await;
    open.is_armed = outcomes.contains(&PutOutcome::Lost);
    outcomes
}

struct Batch<'a> {
    connection: &'a Arc<Connection>,
    /// Request number of the reservation, which names its puts.
    number: u64,
    pages: Vec<(NewPage, Parts)>,
    part_table: &'a [u32],
    deadline: Instant,
}

/// Outcomes of a reservation, and the pause before its busy pages can be retried.
type ReserveAnswer = (Vec<ReserveOutcome>, Duration);

/// Pages that were sent before the reservation was answered.
struct EagerPages {
    /// The first pages of the batch, which fit into one group.
    group: Vec<usize>,
    /// Number of those that were sent.
    sent: usize,
    copy_credit: OwnedSemaphorePermit,
    /// The reservation's answer, if it has arrived.
    answer: Option<Response>,
}

impl Batch<'_> {
    async fn run(&self, options: PutOptions) -> Vec<PutOutcome> {
        self.try_run(options).await.unwrap_or_else(|| vec![PutOutcome::Lost; self.pages.len()])
    }

    /// Returns `None` if all puts are lost.
    async fn try_run(&self, options: PutOptions) -> Option<Vec<PutOutcome>> {
        let count = self.pages.len();
        let (reply, mut answer) = oneshot::channel();
        let request = self.reserve_request(options);
        let handler = ResponseHandler::Reply(reply);
        let _outstanding = self.connection.begin(self.number, &request, handler, self.deadline).await?;

        // The node answers this after the reservation. Parts can be written by RDMA only then.
        let open = open_parts(self.connection, self.number, self.deadline).await;
        let eager = self.send_eagerly(open.is_some(), &mut answer).await?;
        if eager.sent == count && eager.answer.is_none() {
            // Everything has left: the commit need not wait for the answer either.
            let reserve = async {
                let reserved = self.receive_answer(answer).await;
                self.abandon_if_refused(reserved.as_ref());
                reserved
            };
            let (reserved, committed) = futures::join!(reserve, self.commit(&eager.group));
            return Some(self.conclude(reserved?, committed).await);
        }
        let reserved = match eager.answer {
            Some(response) => reserve_outcomes(response, count)?,
            None => self.receive_answer(answer).await?,
        };
        self.abandon_if_refused(Some(&reserved));
        let granted: Vec<usize> = (0..count).filter(|&i| reserved.0[i] == ReserveOutcome::Granted).collect();
        if !granted.is_empty() {
            open.iter().for_each(OpenParts::record_accepted);
        }
        let pages_in_flight = if open.is_some() { RDMA_PAGES_IN_FLIGHT } else { 1 };
        // All eager pages are in the first group. Its commit ends their copies.
        let mut copy_credit = Some(eager.copy_credit).filter(|_| eager.sent > 0);
        let mut groups = Vec::new();
        // The futures are created in order and start in order, which keeps the parts of a group
        // together.
        for group in granted.chunks(self.group_pages()) {
            groups.push(self.send_group(group, eager.sent, copy_credit.take(), pages_in_flight));
        }
        let committed: Vec<_> = futures::stream::iter(groups).buffered(GROUPS_IN_FLIGHT).collect().await;
        Some(self.conclude(reserved, committed.concat()).await)
    }

    /// Abandons the queued parts if the node granted no page. Over a slow link they would occupy
    /// the stream for long, and the node would discard them.
    fn abandon_if_refused(&self, answer: Option<&ReserveAnswer>) {
        if answer.is_some_and(|(outcomes, _)| !outcomes.contains(&ReserveOutcome::Granted)) {
            self.connection.abandon_parts(self.number);
        }
    }

    fn reserve_request(&self, options: PutOptions) -> Request {
        let ttl_ms = options.ttl_ms();
        let reserved = self.pages.iter().map(|(page, _)| Reserved {
            key: page.key,
            parent: page.parent,
            position: page.position,
            ttl_ms,
            part_bytes: self.part_table.to_vec(),
            copy_of: None,
            token_ids: page.sent_token_ids().to_vec(),
        });
        Request::Reserve(reserved.collect())
    }

    /// Sends the first pages until the reservation is answered, at most [`EAGER_BYTES`] of payload.
    /// Returns `None` if the puts are lost.
    async fn send_eagerly(&self, uses_rdma: bool, answer: &mut oneshot::Receiver<Response>) -> Option<EagerPages> {
        // A busy node would probably refuse pages that it has not granted.
        let waits_for_answer = uses_rdma || self.connection.are_puts_paused();
        let eager_pages = if waits_for_answer { 0 } else { self.pages.len().min(self.group_pages()) };
        let group: Vec<usize> = (0..eager_pages).collect();
        let copy_credit = self.reserve_copy_credit(&group).await?;
        let mut eager = EagerPages { group, sent: 0, copy_credit, answer: None };
        let mut payload_bytes = 0;
        while eager.sent < eager.group.len() && payload_bytes < EAGER_BYTES && eager.answer.is_none() {
            payload_bytes += self.send_page(eager.sent).await?;
            eager.sent += 1;
            eager.answer = match answer.try_recv() {
                Ok(response) => Some(response),
                Err(TryRecvError::Empty) => None,
                // The connection has ended, so there will be no answer.
                Err(TryRecvError::Closed) => return None,
            };
        }
        Some(eager)
    }

    fn group_pages(&self) -> usize {
        let page_bytes: usize = self.part_table.iter().map(|&bytes| bytes as usize).sum();
        (GROUP_BYTES / page_bytes.max(1)).max(1)
    }

    /// Reserves credit for those of the pages that the node copies from client memory.
    async fn reserve_copy_credit(&self, pages: &[usize]) -> Option<OwnedSemaphorePermit> {
        let parts = pages.iter().flat_map(|&index| &*self.pages[index].1);
        let bytes = parts.filter(|bytes| sends_location(self.connection, bytes)).map(Bytes::len).sum();
        self.connection.reserve_copy_credit(bytes, self.deadline).await
    }

    /// Sends the pages of a group beyond the first `sent` pages of the batch, and commits the
    /// group. Returns the outcomes by page, or nothing if they are unknown.
    async fn send_group(
        &self,
        group: &[usize],
        sent: usize,
        copy_credit: Option<OwnedSemaphorePermit>,
        pages_in_flight: usize,
    ) -> Vec<(usize, CommitOutcome)> {
        let rest = &group[group.partition_point(|&index| index < sent)..];
        // Held until the commit is answered: the node may copy until then.
        let _copy_credit = match copy_credit {
            Some(copy_credit) => copy_credit,
            None => match self.reserve_copy_credit(rest).await {
                Some(copy_credit) => copy_credit,
                None => return Vec::new(),
            },
        };
        let mut pages = Vec::with_capacity(rest.len());
        for &index in rest {
            pages.push(self.send_page(index));
        }
        let sending = futures::stream::iter(pages).buffered(pages_in_flight);
        if !sending.all(|sent| std::future::ready(sent.is_some())).await {
            return Vec::new();
        }
        self.commit(group).await
    }

    async fn receive_answer(&self, answer: oneshot::Receiver<Response>) -> Option<ReserveAnswer> {
        let response = tokio::time::timeout_at(self.deadline.into(), answer).await.ok()?.ok()?;
        reserve_outcomes(response, self.pages.len())
    }

    fn entry(&self, index: usize) -> Entry {
        Entry { request: self.number, index: index as u32 }
    }

    /// Sends the parts of a page. Returns the number of its bytes that travel as payload, or `None`
    /// if the page is lost.
    async fn send_page(&self, index: usize) -> Option<usize> {
        let mut payload_bytes = 0;
        for (part, bytes) in (0..).zip(&*self.pages[index].1) {
            match send_part(self.connection, self.entry(index), part, bytes.clone(), None, self.deadline).await? {
                SentPart::Payload => payload_bytes += bytes.len(),
                // The batch keeps its pages until it has ended, so the location stays valid.
                SentPart::Location(_) | SentPart::Written => {}
            }
        }
        Some(payload_bytes)
    }

    async fn commit(&self, indices: &[usize]) -> Vec<(usize, CommitOutcome)> {
        if indices.is_empty() {
            return Vec::new();
        }
        let request = Request::Commit(indices.iter().map(|&index| self.entry(index)).collect());
        match self.connection.request(&request, self.deadline).await {
            Some(Response::Committed(ends)) if ends.len() == indices.len() => {
                indices.iter().copied().zip(ends.iter().map(|end| end.outcome)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Merges the outcomes of reservation and commits. Compares pages that the node already had.
    async fn conclude(
        &self,
        (reserved, retry_after): ReserveAnswer,
        committed: Vec<(usize, CommitOutcome)>,
    ) -> Vec<PutOutcome> {
        if reserved.contains(&ReserveOutcome::Busy) {
            self.connection.pause_puts(retry_after);
        }
        let mut sealed = vec![None; self.pages.len()];
        for (index, outcome) in committed {
            sealed[index] = Some(outcome);
        }
        let ends = reserved.iter().zip(sealed).zip(&self.pages).map(|((reserved, sealed), (page, parts))| async move {
            match reserved {
                ReserveOutcome::Granted => sealed.map_or(PutOutcome::Lost, PutOutcome::from),
                ReserveOutcome::Exists => {
                    let crcs = parts.iter().flat_map(|part| chunk_crcs(part)).collect();
                    compare(self.connection, page.key, crcs, self.deadline).await.0
                }
                ReserveOutcome::InProgress => PutOutcome::InProgress,
                ReserveOutcome::Retired => PutOutcome::Retired,
                ReserveOutcome::Busy => PutOutcome::Busy { retry_after },
                // The pages are no copies, so a node that refuses them as such is broken.
                ReserveOutcome::Malformed | ReserveOutcome::Forgotten => PutOutcome::Lost,
            }
        });
        join_all(ends).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::NodeIdentity;
    use larder_wire::{ByteSink, FrameWriter, PROTOCOL_VERSION};
    use std::io::{self, IoSlice};

    /// Discards all bytes.
    struct NullSink;

    impl ByteSink for NullSink {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            Ok(from.iter().map(|slice| slice.len()).sum())
        }
    }

    #[tokio::test]
    async fn connection_that_ends_within_a_batch_loses_the_batch() {
        let node = NodeIdentity { node_id: "node".into(), epoch: 1, version: PROTOCOL_VERSION };
        let (connection, queue) = Connection::new(node, None, 0);
        // More than the queue has room for.
        let page = |number| {
            let key = PageKey::chain(None, &[number]);
            (NewPage::first(key), Parts::from([Bytes::from(vec![1; 1024])]))
        };
        let pages = (0..400).map(page).collect();
        let deadline = Instant::now() + Duration::from_secs(10);
        let putting = {
            let connection = connection.clone();
            tokio::spawn(async move { put_batch(&connection, pages, PutOptions::default(), &[1024], deadline).await })
        };
        tokio::time::sleep(Duration::from_millis(20)).await;
        connection.close();
        tokio::spawn(FrameWriter::new(NullSink).send_all(queue, Duration::from_secs(1)));
        let outcomes = putting.await.unwrap();
        assert!(outcomes.len() == 400 && outcomes.iter().all(|outcome| *outcome == PutOutcome::Lost));
    }
}
