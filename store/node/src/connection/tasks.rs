//! What runs for the requests of one connection.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::task::AbortHandle;

/// Tasks by a number of our own: a client may repeat its request numbers, and then cancels all of that number.
pub(super) type Tasks = Arc<Mutex<BTreeMap<u64, RunningTask>>>;

pub(super) struct RunningTask {
    pub(super) request: u64,
    pub(super) handle: AbortHandle,
}

/// Takes a task off the list when it ends, however it ends.
pub(super) struct Done {
    pub(super) tasks: Tasks,
    pub(super) number: u64,
}

impl Drop for Done {
    fn drop(&mut self) {
        self.tasks.lock().remove(&self.number);
    }
}
