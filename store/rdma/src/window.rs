//! Bytes that one peer may touch for a while.

use crate::address::RemoteRange;
use crate::error::{Death, Error};
use crate::link::Link;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long the end of a dead connection may take, beyond which memory is not waited for.
const END_MAX: Duration = Duration::from_secs(5);

/// Bytes that the peer of one connection may read, or may write, with a key that is good for them alone.
///
/// The memory comes back from [`Window::withdraw`]. A window that is dropped is withdrawn as well, and its memory is dropped when
/// that is done; a window whose connection dies is dead when the connection's queue pair has been destroyed.
pub struct Window<B> {
    /// Of itself it keeps no link that nobody else needs: one that ended is gone, however many windows it had.
    link: Weak<Link>,
    number: u64,
    /// `None` once it is being withdrawn.
    memory: Option<Arc<B>>,
    remote: RemoteRange,
}

impl<B> Window<B> {
    pub(crate) fn new(link: &Arc<Link>, number: u64, memory: Arc<B>, remote: RemoteRange) -> Window<B> {
        Window { link: Arc::downgrade(link), number, memory: Some(memory), remote }
    }

    /// What the peer needs to use it.
    pub fn remote(&self) -> RemoteRange {
        self.remote
    }

    /// Withdraws the key. Answers the memory when no peer can touch it any more, be the connection alive or dead. If the device
    /// does not say so before a deadline, the connection dies; if it does not even let go of that, the answer is
    /// [`Error::Stuck`], and the memory is never freed.
    pub async fn withdraw(mut self) -> Result<B, Error> {
        let memory = self.memory.take().ok_or(Error::Stuck)?;
        if let Some(link) = self.link.upgrade() {
            let (done, mut gone) = oneshot::channel();
            link.withdraw(self.number, Some(done));
            match timeout(link.options.deadline, &mut gone).await {
                Ok(Ok(())) => {}
                // The queue pair is being destroyed just now, and the window with it.
                Ok(Err(_)) => _ = timeout(END_MAX, link.ended()).await,
                Err(_) => {
                    link.condemn(Death::Deadline);
                    let _ = timeout(END_MAX, &mut gone).await;
                }
            }
        }
        // The connection's own share of it is dropped with the proof that the key is dead, and not before.
        Arc::into_inner(memory).ok_or(Error::Stuck)
    }
}

impl<B> Drop for Window<B> {
    fn drop(&mut self) {
        if self.memory.take().is_some()
            && let Some(link) = self.link.upgrade()
        {
            link.withdraw(self.number, None);
        }
    }
}

impl<B> std::fmt::Debug for Window<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("remote", &self.remote).finish()
    }
}
