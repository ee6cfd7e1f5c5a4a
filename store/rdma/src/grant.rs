//! Temporary access of one peer to a range of memory.
//!
//! Invariant: the memory returns only after its key is proven dead, by a completed invalidation, an
//! ended registration or a destroyed queue pair.

use crate::address::RemoteRange;
use crate::connection::Connection;
use crate::error::{DisconnectReason, Error};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Time limit for the shutdown of a dead connection. After it, the memory counts as leaked.
const END_MAX: Duration = Duration::from_secs(5);

/// A range that the peer of one connection may read or write, with a key that is valid for this
/// range alone.
///
/// [`RemoteGrant::revoke`] returns the memory. Dropping the grant also revokes it, and the
/// memory is dropped when that is done. If the connection dies, the key dies with its queue pair.
pub struct RemoteGrant<B> {
    /// Weak: grants alone must not keep an ended connection alive.
    connection: Weak<Connection>,
    number: u64,
    /// `None` once the revocation has started.
    memory: Option<Arc<B>>,
    remote: RemoteRange,
}

impl<B> RemoteGrant<B> {
    pub(crate) fn new(
        connection: &Arc<Connection>,
        number: u64,
        memory: Arc<B>,
        remote: RemoteRange,
    ) -> RemoteGrant<B> {
        RemoteGrant { connection: Arc::downgrade(connection), number, memory: Some(memory), remote }
    }

    pub fn remote(&self) -> RemoteRange {
        self.remote
    }

    /// Revokes the key and returns the memory once no peer can access it, whether the connection
    /// is alive or dead.
    ///
    /// The local invalidation is posted behind the bind on the same queue pair. Its completion
    /// proves that the device accepts no further access with this key, so the memory returns only
    /// then. If it does not complete by the deadline, the connection is retired; its destroyed
    /// queue pair is the proof. Without either proof the call returns [`Error::NotReleased`], and
    /// the memory is leaked.
    pub async fn revoke(mut self) -> Result<B, Error> {
        let memory = self.memory.take().ok_or(Error::NotReleased)?;
        if let Some(connection) = self.connection.upgrade() {
            let (done, mut gone) = oneshot::channel();
            connection.revoke(self.number, Some(done));
            match timeout(connection.options.stall_timeout, &mut gone).await {
                Ok(Ok(())) => {}
                // The queue pair is being destroyed at this moment, and the grant with it.
                Ok(Err(_)) => _ = timeout(END_MAX, connection.ended()).await,
                Err(_) => {
                    connection.retire(DisconnectReason::Deadline);
                    let _ = timeout(END_MAX, &mut gone).await;
                }
            }
        }
        // The connection drops its share of the memory when it has the proof, and not before. Being
        // the last owner is the proof here.
        Arc::into_inner(memory).ok_or(Error::NotReleased)
    }
}

impl<B> Drop for RemoteGrant<B> {
    fn drop(&mut self) {
        if self.memory.take().is_some()
            && let Some(connection) = self.connection.upgrade()
        {
            connection.revoke(self.number, None);
        }
    }
}

impl<B> std::fmt::Debug for RemoteGrant<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteGrant").field("remote", &self.remote).finish()
    }
}
