//! Reading a page while it is being written.

use crate::buffer::{DynBuffer, downcast};
use crate::link::Live;
use crate::sink::{FollowResult, PartSink, Sink};
use crate::stats::{Counters, count};
use larder_format::{PageGeometry, PageId};
use larder_wire::Request;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// How a followed page ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowEnd {
    /// Every part is in the buffer and checked.
    Sealed,
    /// The writer gave up or died; the buffer holds nothing of use.
    Aborted,
    /// Not there in time, or the node is away.
    Miss,
}

/// A page being followed. It makes progress by itself; dropping it cancels it.
pub struct Follow<B> {
    task: JoinHandle<(DynBuffer, FollowResult)>,
    counters: Arc<Counters>,
    _buffer: PhantomData<fn() -> B>,
}

impl<B> Drop for Follow<B> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<B: AsMut<[u8]> + Send + 'static> Follow<B> {
    /// Waits for the end of the page and gives the buffer back.
    pub async fn finish(mut self) -> (B, FollowEnd) {
        let (buffer, result) =
            (&mut self.task).await.expect("a follow neither panics nor is aborted while it is awaited");
        let end = match result {
            FollowResult::Sealed => FollowEnd::Sealed,
            FollowResult::Aborted => FollowEnd::Aborted,
            FollowResult::Missed => FollowEnd::Miss,
            FollowResult::Corrupt => {
                count(&self.counters.corrupt, 1);
                FollowEnd::Miss
            }
        };
        count(if end == FollowEnd::Sealed { &self.counters.get_hits } else { &self.counters.get_misses }, 1);
        (downcast(buffer), end)
    }
}

/// How long a follow of a page whose node is away waits before it says so: callers that try again do not spin.
const AWAY_PAUSE: Duration = Duration::from_millis(50);
pub(crate) fn begin<B: AsMut<[u8]> + Send + 'static>(
    node: Option<Arc<Live>>,
    id: PageId,
    geometry: PageGeometry,
    buffer: B,
    counters: Arc<Counters>,
    deadline: Instant,
) -> Follow<B> {
    let task = tokio::spawn(run(node, id, geometry, Box::new(buffer), deadline));
    Follow { task, counters, _buffer: PhantomData }
}

async fn run(
    node: Option<Arc<Live>>,
    id: PageId,
    geometry: PageGeometry,
    buffer: DynBuffer,
    deadline: Instant,
) -> (DynBuffer, FollowResult) {
    let Some(node) = node else {
        tokio::time::sleep(AWAY_PAUSE).await;
        return (buffer, FollowResult::Missed);
    };
    let (sink, done) = PartSink::new(id, geometry, buffer);
    let begun = node.begin(node.number(), &Request::Follow(id.key), Sink::Parts(sink), deadline).await;
    node.settle(begun, done, deadline).await
}
