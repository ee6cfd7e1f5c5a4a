//! Tasks of one connection's waiting requests.

use crate::budget::Charge;
use larder_runtime::sync::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// Maximum number of permits that the waiting requests of one connection hold together. Further
/// requests are answered "busy".
const PERMITS: usize = 4096;
/// Keys per permit, beyond the first permit of a request. It weighs a request by its work.
const KEYS_PER_PERMIT: usize = 64;

/// By a number of our own: a client may reuse a request number, and then cancels all tasks with it.
type RunningTasks = Arc<Mutex<BTreeMap<u64, RunningTask>>>;

struct RunningTask {
    request: u64,
    handle: AbortHandle,
}

/// Running tasks, and the permits of requests that wait. Dropping it ends no task: the connection
/// aborts them.
pub(super) struct RequestTasks {
    running: RunningTasks,
    next_number: u64,
    permits: Arc<Semaphore>,
}

impl RequestTasks {
    pub(super) fn new() -> Self {
        Self { running: Arc::default(), next_number: 0, permits: Arc::new(Semaphore::new(PERMITS)) }
    }

    /// Returns permission for a request with `keys` keys to wait, or `None` if too many wait.
    pub(super) fn permit(&self, keys: usize) -> Option<OwnedSemaphorePermit> {
        let weight = 1 + (keys / KEYS_PER_PERMIT) as u32;
        self.permits.clone().try_acquire_many_owned(weight).ok()
    }

    /// Spawns a task of a request. It keeps the request's charge until it ends.
    pub(super) fn spawn<F>(&mut self, request: u64, charge: Option<Charge>, work: F)
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let number = self.next_number;
        self.next_number += 1;
        let tasks = self.running.clone();
        // Held across the spawn, so that the task cannot end before it is in the table.
        let mut running = self.running.lock();
        let task = tokio::spawn(async move {
            // Made by the task: a runtime that shuts down drops the future under the lock above.
            let _on_end = TaskEnd { tasks, number };
            let _charge = charge;
            // An error means that the connection ended, which its reader notices itself.
            let _ = work.await;
        });
        running.insert(number, RunningTask { request, handle: task.abort_handle() });
    }

    pub(super) fn abort_request(&self, request: u64) {
        // A task that never ran has no `TaskEnd`, so it cannot remove itself.
        let tasks: Vec<RunningTask> =
            self.running.lock().extract_if(.., |_, task| task.request == request).map(|(_, task)| task).collect();
        // Without the lock: an aborted task may drop its `TaskEnd` at once, which takes it.
        tasks.iter().for_each(|task| task.handle.abort());
    }

    pub(super) fn abort_all(&self) {
        let tasks = std::mem::take(&mut *self.running.lock());
        tasks.into_values().for_each(|task| task.handle.abort());
    }
}

/// Removes a task from the table when it ends or is aborted.
struct TaskEnd {
    tasks: RunningTasks,
    number: u64,
}

impl Drop for TaskEnd {
    fn drop(&mut self) {
        self.tasks.lock().remove(&self.number);
    }
}
