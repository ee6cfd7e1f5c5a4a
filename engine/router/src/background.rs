//! Threads for work of milliseconds. They give way to the other threads of the router.
//!
//! Tokenising a long text takes a processor for up to seconds. A request wakes many threads of
//! router, engines and node, and each may wait for the end of a time slice. So long work has
//! threads of its own, with a higher nice value. They never starve: engines may compute on the same
//! processors for hours.
//!
//! A nice value acts within a cgroup, or within a session with automatic groups: see sched(7).
//! Other containers compete with long work as with other work.

use larder_worker::worker_process::give_way;
use std::sync::LazyLock;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinError;

/// `None` if the system refused it.
static THREADS: LazyLock<Option<Runtime>> = LazyLock::new(|| {
    let mut builder = Builder::new_current_thread();
    // Only its threads for blocking calls are used. Bodies and texts are bounded in bytes, so few
    // pieces of work take long at a time.
    builder.thread_name("background").on_thread_start(|| give_way(None));
    builder.build().inspect_err(|error| tracing::warn!(%error, "long work runs at full priority")).ok()
});

/// Runs work that takes a processor for milliseconds. Dropping the future does not end the work.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    match &*THREADS {
        Some(threads) => threads.spawn_blocking(work).await,
        None => tokio::task::spawn_blocking(work).await,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use larder_worker::worker_process::NICENESS;
    use rustix::process::getpriority_process;

    /// Nice value of this thread.
    pub(crate) fn niceness() -> i32 {
        getpriority_process(None).unwrap()
    }

    /// Nice value of long work that this thread starts.
    pub(crate) fn background_niceness() -> i32 {
        NICENESS.max(niceness())
    }

    #[tokio::test]
    async fn long_work_has_a_lower_priority() {
        let here = niceness();
        assert_eq!(run(niceness).await.unwrap(), background_niceness());
        assert_eq!(niceness(), here);
        assert!(here >= NICENESS || here != background_niceness());
    }
}
