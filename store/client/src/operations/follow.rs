//! Reading a page while another client writes it.

use super::get::PageDescription;
use crate::buffer::{DynBuffer, downcast};
use crate::client::Client;
use crate::connection::{Connection, FollowResult, PartsHandler, ResponseHandler};
use crate::stats::{Counters, PartsReceived, count};
use larder_format::{PageGeometry, PageId, PageKey};
use larder_wire::Request;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Pause of a follow when no node is connected. Callers that retry in a loop do not spin.
const ABSENT_PAUSE: Duration = Duration::from_millis(50);

/// Result of a [`Follow`]. Only [`FollowEnd::Sealed`] allows the use of the buffer's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowEnd {
    /// Every part is in the buffer and verified.
    Sealed,
    /// The writer aborted its put, or died. The content of the buffer is undefined.
    Aborted,
    /// No put began before the deadline, the put did not end in time, or no node is connected. The
    /// content of the buffer is undefined.
    Miss,
    /// The node has no memory for another follow of this client now. It has some again when one of
    /// them ends, or requests of other clients do. The content of the buffer is undefined.
    Busy,
}

type FollowedPage = (DynBuffer, FollowResult, Option<PageDescription>);

/// A page that the client follows, from [`Client::follow`]. It makes progress in the background.
/// Dropping it cancels the follow and drops the buffer.
pub struct Follow<B> {
    task: JoinHandle<FollowedPage>,
    counters: Arc<Counters>,
    _buffer: PhantomData<fn() -> B>,
}

impl<B> Drop for Follow<B> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Client {
    /// Follows the page of `key`: reads it if it exists, else receives its parts while another
    /// client puts it. The put may also begin later, but before `deadline`. Returns at once.
    ///
    /// `buffer` MUST have exactly the bytes of a page. A page costs one transfer, and its parts
    /// arrive as soon as the writer has sent them.
    ///
    /// # Panics
    /// If the client was attached without a namespace, or outside a tokio runtime.
    pub fn follow<B: AsMut<[u8]> + Send + 'static>(&self, key: PageKey, buffer: B, deadline: Instant) -> Follow<B> {
        self.follow_counted(key, buffer, PartsReceived::default(), deadline)
    }

    /// Like [`Client::follow`], and counts each part in `parts` when it is in the buffer.
    ///
    /// # Panics
    /// As [`Client::follow`].
    pub fn follow_counted<B: AsMut<[u8]> + Send + 'static>(
        &self,
        key: PageKey,
        buffer: B,
        parts: PartsReceived,
        deadline: Instant,
    ) -> Follow<B> {
        let namespace = self.namespace();
        let id = PageId { namespace: namespace.id, key };
        let task = tokio::spawn(run(self.owner(&key), id, namespace.geometry, Box::new(buffer), parts, deadline));
        Follow { task, counters: self.counters().clone(), _buffer: PhantomData }
    }
}

impl<B: AsMut<[u8]> + Send + 'static> Follow<B> {
    /// Waits for the end of the page and returns the buffer. Ends at the deadline of the follow,
    /// even in the middle of a part.
    pub async fn finish(self) -> (B, FollowEnd) {
        let (buffer, end, _) = self.finish_described().await;
        (buffer, end)
    }

    /// Like [`Follow::finish`], and returns the description of a sealed page.
    pub async fn finish_described(mut self) -> (B, FollowEnd, Option<PageDescription>) {
        // The task returns the buffer even if the connection ends.
        let (buffer, result, description) =
            (&mut self.task).await.expect("a follow neither panics nor is aborted while it is awaited");
        let end = match result {
            FollowResult::Sealed => FollowEnd::Sealed,
            FollowResult::Aborted => FollowEnd::Aborted,
            FollowResult::Missed => FollowEnd::Miss,
            FollowResult::Busy => FollowEnd::Busy,
            FollowResult::Corrupt => {
                count(&self.counters.corrupt, 1);
                FollowEnd::Miss
            }
        };
        count(if end == FollowEnd::Sealed { &self.counters.get_hits } else { &self.counters.get_misses }, 1);
        count(&self.counters.gets_busy, usize::from(end == FollowEnd::Busy));
        (downcast(buffer), end, description)
    }
}

async fn run(
    connection: Option<Arc<Connection>>,
    id: PageId,
    geometry: PageGeometry,
    buffer: DynBuffer,
    parts: PartsReceived,
    deadline: Instant,
) -> FollowedPage {
    let Some(connection) = connection else {
        tokio::time::sleep(ABSENT_PAUSE).await;
        return (buffer, FollowResult::Missed, None);
    };
    let (handler, done) = PartsHandler::new(id, geometry, buffer, parts);
    let number = connection.next_request();
    let handler = ResponseHandler::Parts(handler);
    let outstanding = connection.begin(number, &Request::Follow(id.key), handler, deadline).await;
    let (buffer, result, meta) = connection.finish(outstanding, done, deadline).await;
    (buffer, result, meta.map(|meta| PageDescription::of(meta, &connection)))
}
