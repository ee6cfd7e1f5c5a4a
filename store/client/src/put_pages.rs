//! Putting whole pages, many at a time: one reservation, all parts behind each other, and a commit for every few megabytes, so
//! that the node has a turn for others.

use crate::link::Live;
use crate::parts::Sent;
use crate::put::{CancelOnDrop, NewPage, PutOptions, PutOutcome, compare, grants, outcome_of};
use crate::rdma::OpenParts;
use crate::sink::Sink;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::join_all;
use larder_format::chunk_crcs;
use larder_wire::{CommitOutcome, Entry, Request, ReserveOutcome, Reserved, Response};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// Payload bytes that are sent before the node has said which pages it wants: a round trip's worth.
const EAGER_BYTES: usize = 1 << 20;
/// Bytes of pages that are committed together, at least one page; and how many such groups are under way at a time.
const GROUP_BYTES: usize = 16 << 20;
const GROUPS_AT_ONCE: usize = 2;

/// Pages that are written by RDMA at a time.
const WRITES_AT_ONCE: usize = 8;

/// Pages of one reservation.
struct Batch<'a> {
    node: &'a Arc<Live>,
    number: u64,
    pages: Vec<(NewPage, Bytes)>,
    part_table: &'a [u32],
    deadline: Instant,
}

/// Puts pages at `node`; how each ended, in order. Pages whose bytes are not of a page's length are lost.
pub(crate) async fn put_pages(
    node: &Arc<Live>,
    pages: Vec<(NewPage, Bytes)>,
    options: PutOptions,
    part_table: &[u32],
    deadline: Instant,
) -> Vec<PutOutcome> {
    let batch = Batch { node, number: node.number(), pages, part_table, deadline };
    // Until the last answer, the node hears of it if this is given up: it may have granted what we were not told.
    let mut open = CancelOnDrop { node, request: batch.number, armed: true };
    let outcomes = batch.run(options).await;
    open.armed = !outcomes.iter().all(|outcome| *outcome != PutOutcome::Lost);
    outcomes
}

impl Batch<'_> {
    async fn run(&self, options: PutOptions) -> Vec<PutOutcome> {
        let count = self.pages.len();
        let lost = || vec![PutOutcome::Lost; count];
        let reserved = self.pages.iter().map(|(page, _)| Reserved {
            key: page.key,
            parent: page.parent,
            position: page.position,
            ttl_ms: options.ttl_ms(),
            part_bytes: self.part_table.to_vec(),
        });
        let request = Request::Reserve(reserved.collect());
        let (reply, mut answer) = oneshot::channel();
        let begun = self.node.begin(self.number, &request, Sink::Reply(reply), self.deadline).await;
        let Some(_begun) = begun else { return lost() };

        // Parts that can be written by RDMA are open when they were granted, and not before.
        let open = self.node.open_parts(self.number, self.deadline).await;
        let pages_at_once = if open.is_some() { WRITES_AT_ONCE } else { 1 };
        // Nor is sent before it has said so what a busy node will hardly take.
        let first = if open.is_some() || self.node.is_pressed() { 0 } else { count.min(self.group_pages()) };
        let first: Vec<usize> = (0..first).collect();
        let Some(leave) = self.lend(&first).await else { return lost() };
        let (mut sent, mut payload_bytes, mut granted) = (0, 0, None);
        while sent < first.len() && payload_bytes < EAGER_BYTES && granted.is_none() {
            let Some(bytes) = self.send(sent).await else { return lost() };
            payload_bytes += bytes;
            sent += 1;
            granted = match answer.try_recv() {
                Ok(response) => Some(response),
                Err(TryRecvError::Empty) => None,
                // The connection ended, and there will be no answer.
                Err(TryRecvError::Closed) => return lost(),
            };
        }
        if sent == count && granted.is_none() {
            // All of it is on its way: so may be the commit.
            let (granted, committed) = futures::join!(self.hear(answer), self.commit(&first));
            let Some(granted) = granted else { return lost() };
            return self.conclude(granted, committed).await;
        }
        let granted = match granted {
            Some(response) => grants(response, count),
            None => self.hear(answer).await,
        };
        let Some(granted) = granted else { return lost() };
        let wanted: Vec<usize> = (0..count).filter(|&i| granted.0[i] == ReserveOutcome::Granted).collect();
        if !wanted.is_empty() {
            open.iter().for_each(OpenParts::granted);
        }
        // Those that were sent are all in the first group.
        let mut leave = Some(leave).filter(|_| sent > 0);
        let mut groups = Vec::new();
        for group in wanted.chunks(self.group_pages()) {
            groups.push(self.finish(group, sent, leave.take(), pages_at_once));
        }
        let committed: Vec<_> = futures::stream::iter(groups).buffered(GROUPS_AT_ONCE).collect().await;
        self.conclude(granted, committed.concat()).await
    }

    fn group_pages(&self) -> usize {
        let page_bytes: usize = self.part_table.iter().map(|&bytes| bytes as usize).sum();
        (GROUP_BYTES / page_bytes.max(1)).max(1)
    }

    /// Leave to tell the places of those pages that the node can copy; `None` if there is none in time.
    async fn lend(&self, pages: &[usize]) -> Option<OwnedSemaphorePermit> {
        let pages = pages.iter().map(|&index| &self.pages[index].1);
        let bytes = pages.filter(|bytes| self.node.copies_from(bytes)).map(Bytes::len).sum();
        self.node.lend(bytes, self.deadline).await
    }

    /// Sends what was not among the first `sent`, and seals; how that went, by page.
    async fn finish(
        &self,
        group: &[usize],
        sent: usize,
        leave: Option<OwnedSemaphorePermit>,
        pages_at_once: usize,
    ) -> Vec<(usize, CommitOutcome)> {
        let rest = &group[group.partition_point(|&index| index < sent)..];
        let _leave = match leave {
            Some(leave) => leave,
            None => match self.lend(rest).await {
                Some(leave) => leave,
                None => return Vec::new(),
            },
        };
        let mut pages = Vec::with_capacity(rest.len());
        for &index in rest {
            pages.push(self.send(index));
        }
        let left = futures::stream::iter(pages).buffered(pages_at_once);
        if !left.all(|sent| std::future::ready(sent.is_some())).await {
            return Vec::new();
        }
        self.commit(group).await
    }

    async fn hear(&self, answer: oneshot::Receiver<Response>) -> Option<(Vec<ReserveOutcome>, Duration)> {
        let response = tokio::time::timeout_at(self.deadline.into(), answer).await.ok()?.ok()?;
        grants(response, self.pages.len())
    }

    fn name(&self, index: usize) -> Entry {
        Entry { request: self.number, index: index as u32 }
    }

    /// Sends the parts of a page; how many of its bytes travel as payload.
    async fn send(&self, index: usize) -> Option<usize> {
        let (mut from, mut payload_bytes) = (0, 0);
        for (part, &length) in (0..).zip(self.part_table) {
            let bytes = self.pages[index].1.slice(from..from + length as usize);
            from += length as usize;
            // A batch keeps its pages until it has ended.
            match self.node.send_part(self.name(index), part, bytes, self.deadline).await? {
                Sent::Payload => payload_bytes += length as usize,
                Sent::Place(_) | Sent::Written => {}
            }
        }
        Some(payload_bytes)
    }

    /// Seals pages; how that went, by page. Nothing of those of which it is not known.
    async fn commit(&self, indices: &[usize]) -> Vec<(usize, CommitOutcome)> {
        if indices.is_empty() {
            return Vec::new();
        }
        let request = Request::Commit(indices.iter().map(|&index| self.name(index)).collect());
        match self.node.ask(&request, self.deadline).await {
            Some(Response::Committed(outcomes)) if outcomes.len() == indices.len() => {
                indices.iter().copied().zip(outcomes).collect()
            }
            _ => Vec::new(),
        }
    }

    async fn conclude(
        &self,
        (reserved, retry_after): (Vec<ReserveOutcome>, Duration),
        committed: Vec<(usize, CommitOutcome)>,
    ) -> Vec<PutOutcome> {
        if reserved.contains(&ReserveOutcome::Busy) {
            self.node.press(retry_after);
        }
        let mut sealed = vec![None; self.pages.len()];
        for (index, outcome) in committed {
            sealed[index] = Some(outcome);
        }
        let ends = reserved.iter().zip(sealed).zip(&self.pages).map(|((reserved, sealed), (page, bytes))| async move {
            match reserved {
                ReserveOutcome::Granted => sealed.map_or(PutOutcome::Lost, outcome_of),
                ReserveOutcome::Exists => {
                    let mut from = 0;
                    let crcs = self.part_table.iter().flat_map(|&length| {
                        let part = &bytes[from..from + length as usize];
                        from += length as usize;
                        chunk_crcs(part).collect::<Vec<u32>>()
                    });
                    compare(self.node, page.key, crcs.collect(), self.deadline).await
                }
                ReserveOutcome::InProgress => PutOutcome::InProgress,
                ReserveOutcome::Busy => PutOutcome::Busy { retry_after },
                ReserveOutcome::Malformed => PutOutcome::Lost,
            }
        });
        join_all(ends).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::PageKey;
    use larder_wire::{FrameWriter, PROTOCOL_VERSION, Sink as ByteSink};
    use std::io::{self, IoSlice};

    /// A connection that takes all there is.
    struct Nowhere;

    impl ByteSink for Nowhere {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            Ok(from.iter().map(|slice| slice.len()).sum())
        }
    }

    #[tokio::test]
    async fn a_connection_that_ends_in_the_middle_of_a_batch_loses_it() {
        let (node, queue) = Live::new("node".into(), 1, PROTOCOL_VERSION, None, 0);
        // More than the queue takes at once.
        let page = |number| {
            let key = PageKey::chain(None, &[number]);
            (NewPage { key, parent: PageKey::NONE, position: 0 }, Bytes::from(vec![1; 1024]))
        };
        let (pages, deadline) = ((0..400).map(page).collect(), Instant::now() + Duration::from_secs(10));
        let putting = {
            let node = node.clone();
            tokio::spawn(async move { put_pages(&node, pages, PutOptions::default(), &[1024], deadline).await })
        };
        tokio::time::sleep(Duration::from_millis(20)).await;
        node.end();
        tokio::spawn(FrameWriter::new(Nowhere).send_all(queue, Duration::from_secs(1)));
        let outcomes = putting.await.unwrap();
        assert!(outcomes.len() == 400 && outcomes.iter().all(|outcome| *outcome == PutOutcome::Lost));
    }
}
