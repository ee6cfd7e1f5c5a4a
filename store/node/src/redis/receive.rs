//! Long values, from the socket into pages.
//!
//! The bytes go straight into the memory of data pages. All pages but the last are committed as
//! they are complete, so that a value takes little of the budget for puts. The last one waits for
//! the rest of the request.

use super::RedisServer;
use super::databases::DatabaseNamespaces;
use super::input::Input;
use super::manifest::{ValueId, data_key, data_page_bytes, data_pages};
use super::values::{Database, Failure, OpenPut};
use larder_format::{CHUNK_BYTES, PageId, chunk_crcs};
use larder_memory::{SlotPart, SlotPartMut};
use larder_runtime::now;
use larder_wire::ByteSource;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time to receive one value: 512 MiB at about 1 MB/s.
pub(super) const VALUE_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum time to forget the pages of a value that was not finished.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// A value whose pages no manifest names yet. Dropping it forgets them, unless it was kept.
pub(super) struct NewValue {
    server: Arc<RedisServer>,
    namespaces: DatabaseNamespaces,
    id: ValueId,
    bytes: u64,
    committed: Vec<PageId>,
    /// Last page, complete and not committed.
    last: Option<OpenPut>,
    kept: bool,
}

impl NewValue {
    /// Namespaces of the database when the value began to arrive.
    pub(super) fn namespaces(&self) -> DatabaseNamespaces {
        self.namespaces
    }

    pub(super) fn id(&self) -> ValueId {
        self.id
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a value of one page.
    pub(super) fn only_page(&self) -> Option<SlotPart> {
        let put = self.last.as_ref().filter(|_| self.committed.is_empty())?;
        put.put().landed(0).map(|(bytes, _)| bytes)
    }

    /// Commits the last page. Returns `false` if the node has no room for it.
    pub(super) fn complete(&mut self) -> bool {
        let Some(last) = self.last.take() else { return false };
        let is_committed = last.commit();
        if is_committed {
            self.committed.push(last.put().id);
        }
        is_committed
    }

    /// Records that a manifest names the pages.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for NewValue {
    fn drop(&mut self) {
        if self.kept || self.committed.is_empty() {
            return;
        }
        // Without a permit eviction frees the pages later. Nothing can find them.
        let Ok(permit) = self.server.removals.clone().try_acquire_owned() else { return };
        let (server, ids) = (self.server.clone(), std::mem::take(&mut self.committed));
        tokio::spawn(async move {
            if let Err(error) = server.node.store.forget(&ids, now() + REMOVAL_TIMEOUT).await {
                tracing::debug!(%error, pages = ids.len(), "pages of an unfinished value stay until eviction");
            }
            drop(permit);
        });
    }
}

impl Database<'_> {
    /// Receives a value of `bytes` bytes.
    ///
    /// # Errors
    /// The outer error ends the connection. After the inner one all bytes of the value are
    /// consumed.
    pub(super) async fn receive<S: ByteSource>(
        &self,
        input: &mut Input<S>,
        bytes: u64,
    ) -> io::Result<Result<NewValue, Failure>> {
        let mut value = NewValue {
            server: self.server.clone(),
            namespaces: self.namespaces,
            id: ValueId(self.server.random_id()),
            bytes,
            committed: Vec::new(),
            last: None,
            kept: false,
        };
        let deadline = now() + VALUE_TIMEOUT;
        let pages = data_pages(bytes);
        let mut left = bytes;
        for index in 0..pages {
            let length = data_page_bytes(bytes, index);
            let received = self.receive_page(input, &value, index, length, deadline).await?;
            left -= received.taken as u64;
            let put = match received.put {
                Ok(put) => put,
                Err(failure) => {
                    discard(input, left, deadline, self.server.node.stall_timeout()).await?;
                    return Ok(Err(failure));
                }
            };
            if index + 1 == pages {
                value.last = Some(put);
            } else if put.commit() {
                value.committed.push(put.put().id);
            } else {
                discard(input, left, deadline, self.server.node.stall_timeout()).await?;
                return Ok(Err(Failure::NoRoom));
            }
        }
        Ok(Ok(value))
    }

    async fn receive_page<S: ByteSource>(
        &self,
        input: &mut Input<S>,
        value: &NewValue,
        index: u32,
        length: usize,
        deadline: Instant,
    ) -> io::Result<ReceivedPage> {
        let id = PageId { namespace: value.namespaces.data, key: data_key(value.id, index) };
        let put = match self.reserve(id, (index, 0), length, deadline).await {
            Ok(put) => put,
            Err(failure) => return Ok(ReceivedPage { taken: 0, put: Err(failure) }),
        };
        let Some(memory) = put.put().take_part(0, length) else {
            return Ok(ReceivedPage { taken: 0, put: Err(Failure::NoRoom) });
        };
        let (taken, complete) = self.fill(input, memory, &put, deadline).await?;
        self.server.node.metrics.bytes_received.inc_by(taken as u64);
        Ok(match complete {
            Some((memory, crcs)) => {
                put.put().land_verified(0, memory, crcs);
                ReceivedPage { taken, put: Ok(put) }
            }
            None => ReceivedPage { taken, put: Err(Failure::NoRoom) },
        })
    }

    /// Fills a page from the socket. Returns the bytes taken, and the page if the node has not
    /// aborted its put meanwhile.
    async fn fill<S: ByteSource>(
        &self,
        input: &mut Input<S>,
        mut memory: SlotPartMut,
        put: &OpenPut,
        deadline: Instant,
    ) -> io::Result<(usize, Option<(SlotPartMut, Vec<u32>)>)> {
        let mut crcs = Vec::with_capacity(memory.len().div_ceil(CHUNK_BYTES));
        let mut at = 0;
        while at < memory.len() {
            let until = deadline.min(now() + self.server.node.stall_timeout());
            let received = tokio::select! {
                // Biased: a page that is complete must not be dropped.
                biased;
                received = tokio::time::timeout_at(until.into(), input.receive(&mut memory[at..])) => received??,
                // Others got its room, so the memory must return although the client is silent.
                () = put.put().ended() => return Ok((at, None)),
            };
            at += received;
            self.account.record_received(received);
            put.put().record_activity();
            // Chunk by chunk, while the bytes are in the cache.
            let checked = crcs.len() * CHUNK_BYTES;
            let end = if at == memory.len() { at } else { at / CHUNK_BYTES * CHUNK_BYTES };
            crcs.extend(chunk_crcs(&memory[checked..end.max(checked)]));
        }
        Ok((at, Some((memory, crcs))))
    }
}

struct ReceivedPage {
    /// Bytes consumed, also if the put ended.
    taken: usize,
    put: Result<OpenPut, Failure>,
}

/// Consumes bytes of a value that is not stored.
pub(super) async fn discard<S: ByteSource>(
    input: &mut Input<S>,
    mut left: u64,
    deadline: Instant,
    stall_timeout: Duration,
) -> io::Result<()> {
    let mut scratch = vec![0; CHUNK_BYTES.min(left as usize)];
    while left > 0 {
        let until = deadline.min(now() + stall_timeout);
        let room = scratch.len().min(left as usize);
        left -= tokio::time::timeout_at(until.into(), input.receive(&mut scratch[..room])).await?? as u64;
    }
    Ok(())
}
