//! Pages that the node holds for this client, and their release.

use larder_runtime::lock::Mutex;
use larder_wire::Entry;
use tokio::sync::Notify;

/// Queue of pages that the node may release. The driver sends them in batches.
#[derive(Debug, Default)]
pub(crate) struct ReleaseQueue {
    waiting: Mutex<Vec<Entry>>,
    added: Notify,
}

impl ReleaseQueue {
    /// Adds a page. Never blocks on the network, so that views can be dropped anywhere.
    pub(super) fn add(&self, entry: Entry) {
        self.waiting.lock().push(entry);
        self.added.notify_one();
    }

    /// Waits until the queue has entries, and takes at most `max` of them.
    pub(super) async fn take(&self, max: usize) -> Vec<Entry> {
        loop {
            // The guard ends before the wait: `add` runs in destructors, which must not block.
            let taken: Vec<Entry> = {
                let mut waiting = self.waiting.lock();
                let available = waiting.len().min(max);
                waiting.drain(..available).collect()
            };
            if !taken.is_empty() {
                return taken;
            }
            self.added.notified().await;
        }
    }
}

/// Releases a page that the node keeps readable by RDMA when it is dropped.
pub(super) struct ReleaseOnDrop {
    pub(super) entry: Entry,
    pub(super) releases: std::sync::Arc<ReleaseQueue>,
}

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        self.releases.add(self.entry);
    }
}
