//! Reading whole pages: into callers' memory, or where they lie.

use crate::Transport;
use crate::buffer::{DynBuffer, downcast};
use crate::client::{Client, Namespace, Tier, tier};
use crate::clock::now;
use crate::link::Live;
use crate::sink::{Got, PageEnd, PageSink, Sink};
use crate::stats::count;
use crate::view::{Later, PageView, ViewBytes, copy_checked};
use futures::future::join_all;
use larder_format::{PageId, PageKey};
use larder_wire::Request;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long after its deadline a get still checks and copies pages that are there.
const COPY_GRACE: Duration = Duration::from_secs(1);
/// Pages asked for in one Get.
const GET_PAGES_MAX: usize = 1024;

impl Client {
    /// Reads whole pages, each into its own buffer of exactly the page's size. The answer has the buffers in the order of
    /// the request, with where the page came from, or `None` for a miss (the buffer then holds nothing of use).
    pub async fn get<B: AsMut<[u8]> + Send + 'static>(
        &self,
        pages: Vec<(PageKey, B)>,
        deadline: Instant,
    ) -> Vec<(B, Option<Tier>)> {
        let keys: Vec<PageKey> = pages.iter().map(|(key, _)| *key).collect();
        let mut buffers: Vec<Option<(B, Option<Tier>)>> = pages.into_iter().map(|(_, b)| Some((b, None))).collect();
        let nodes = self.nodes();
        nodes.or_pause().await;
        if let Some(namespace) = &self.inner.namespace {
            let gets = Self::batches(&nodes, &keys, GET_PAGES_MAX, namespace.geometry.page_bytes()).into_iter().map(
                |(node, indices)| {
                    let wanted = indices.iter().map(|&index| {
                        let (buffer, _) = buffers[index].take().expect("each index is in one batch");
                        (PageId { namespace: namespace.id, key: keys[index] }, Box::new(buffer) as DynBuffer)
                    });
                    let wanted: Vec<_> = wanted.collect();
                    async move {
                        let ids: Vec<PageId> = wanted.iter().map(|(id, _)| *id).collect();
                        let pages = get_from(&node, wanted, deadline).await;
                        (indices, copy_from(&node, &ids, pages, deadline).await)
                    }
                },
            );
            let gets: Vec<_> = gets.collect();
            for (indices, pages) in join_all(gets).await {
                for (index, (buffer, got)) in indices.into_iter().zip(pages) {
                    buffers[index] = Some((downcast(buffer), self.note(got)));
                }
            }
        }
        let answer: Vec<_> = buffers.into_iter().map(|b| b.expect("every batch hands its buffers back")).collect();
        self.count_gets(answer.iter().filter(|(_, tier)| tier.is_some()).count(), answer.len());
        answer
    }

    /// Reads whole pages where they lie: in the memory of nodes on this machine, which keep them there until the views are
    /// dropped; others are copied. `None` is a miss.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub async fn view(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<PageView>> {
        let Namespace { id: namespace, geometry } = *self.namespace();
        let mut views: Vec<Option<PageView>> = keys.iter().map(|_| None).collect();
        let gets = Self::batches(&self.nodes(), keys, GET_PAGES_MAX, geometry.page_bytes()).into_iter().map(
            |(node, indices)| {
                let buffer = || Box::new(Later { length: geometry.page_bytes(), bytes: Vec::new() }) as DynBuffer;
                let wanted = indices.iter().map(|&index| (PageId { namespace, key: keys[index] }, buffer())).collect();
                async move {
                    let pages = get_from(&node, wanted, deadline).await;
                    (node, indices, pages)
                }
            },
        );
        for (node, indices, pages) in join_all(gets).await {
            for (index, PageEnd { buffer, got, held }) in indices.into_iter().zip(pages) {
                let id = PageId { namespace, key: keys[index] };
                let (bytes, got) = match held {
                    Some(_) if now() > deadline + COPY_GRACE => (None, Got::Missed),
                    Some((held, meta, code)) if meta.verify(&id, &held).is_ok() => {
                        (Some(ViewBytes::Held(held)), Got::Had(code))
                    }
                    Some(_) => {
                        node.suspect(&id);
                        (None, Got::Corrupt)
                    }
                    None => (Some(ViewBytes::Copied(downcast::<Later>(buffer).bytes)), got),
                };
                views[index] = self.note(got).zip(bytes).map(|(tier, bytes)| PageView { bytes, tier });
                tokio::task::yield_now().await;
            }
        }
        self.count_gets(views.iter().filter(|view| view.is_some()).count(), views.len());
        views
    }

    fn count_gets(&self, hits: usize, all: usize) {
        count(&self.inner.counters.get_hits, hits);
        count(&self.inner.counters.get_misses, all - hits);
    }

    fn note(&self, got: Got) -> Option<Tier> {
        match got {
            Got::Had(code) => tier(code),
            Got::Missed => None,
            Got::Corrupt => {
                count(&self.inner.counters.corrupt, 1);
                None
            }
        }
    }
}

/// One Get at one node. Always hands every buffer back.
async fn get_from(node: &Arc<Live>, wanted: Vec<(PageId, DynBuffer)>, deadline: Instant) -> Vec<PageEnd> {
    let keys = wanted.iter().map(|(id, _)| id.key).collect();
    let (sink, done) = PageSink::new(wanted);
    let in_place = node.transport() == Transport::Shm;
    let begun = node.begin(node.number(), &Request::Get { keys, in_place }, Sink::Pages(sink), deadline).await;
    node.settle(begun, done, deadline).await
}

/// Copies pages that lie in the node's memory into their buffers.
async fn copy_from(node: &Live, ids: &[PageId], pages: Vec<PageEnd>, deadline: Instant) -> Vec<(DynBuffer, Got)> {
    let mut copied = Vec::with_capacity(pages.len());
    for (id, PageEnd { mut buffer, got, held }) in ids.iter().zip(pages) {
        let got = match held {
            None => got,
            Some(_) if now() > deadline + COPY_GRACE => Got::Missed,
            Some((held, meta, tier)) => match copy_checked(id, &meta, &held, buffer.bytes()) {
                Ok(()) => Got::Had(tier),
                Err(_) => {
                    node.suspect(id);
                    Got::Corrupt
                }
            },
        };
        copied.push((buffer, got));
        // Copying takes the processor as long as it takes: others want it too.
        tokio::task::yield_now().await;
    }
    copied
}
