//! Threads for work of milliseconds. They give way to all other threads of the machine.
//!
//! Tokenising a long text takes a processor for up to seconds. A thread that wakes up on that
//! processor may wait for the end of a time slice, up to 4 ms, and a request wakes many threads of
//! router, engines and node. So long work has threads of its own.
//!
//! - A higher nice value gives them a smaller part of a busy processor. They never starve: engines
//!   may compute on the same processors for hours.
//! - A longer time slice makes others interrupt them. Since Linux 6.12 a thread that wakes up
//!   interrupts one whose slice is longer than its own. Older kernels ignore the slice.

use rustix::process::{Pid, getpriority_process, setpriority_process};
use std::io;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinError;

/// Nice value of long work. On a busy machine it gets about a tenth of the time of a thread with
/// full priority, so an honest request still ends within its limit.
const NICENESS: i32 = 10;
/// Time slice of long work: longer than that of other threads, at most 4 ms. Short enough that
/// short work soon has its turn among long work.
const SLICE: Duration = Duration::from_millis(10);
/// Maximum number of threads. Bodies and texts are bounded in bytes, so few pieces of work take
/// long at a time.
const THREADS_MAX: usize = 64;

/// `None` if the system refused it.
static THREADS: LazyLock<Option<Runtime>> = LazyLock::new(|| {
    let mut builder = Builder::new_current_thread();
    // Only its threads for blocking calls are used.
    builder.max_blocking_threads(THREADS_MAX).thread_name("background").on_thread_start(|| give_way(None));
    builder.build().inspect_err(|error| tracing::warn!(%error, "long work runs at full priority")).ok()
});

/// Runs work that takes a processor for milliseconds. Dropping the future does not end the work.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    match &*THREADS {
        Some(threads) => threads.spawn_blocking(work).await,
        None => tokio::task::spawn_blocking(work).await,
    }
}

/// Lowers the priority of a thread for good: of this one, or of one of another process. Never
/// raises it.
pub(crate) fn give_way(thread: Option<Pid>) {
    let current = getpriority_process(thread).unwrap_or(0);
    let niceness = NICENESS.max(current);
    // The work goes on even if the system forbids it.
    let _ = setpriority_process(thread, niceness);
    let _ = set_slice(thread, niceness);
}

/// Sets the time slice of a thread with this nice value. Source: sched_setattr(2).
#[allow(unsafe_code)]
fn set_slice(thread: Option<Pid>, niceness: i32) -> io::Result<()> {
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: 0,
        sched_flags: libc::SCHED_FLAG_KEEP_POLICY as u64,
        sched_nice: niceness,
        sched_priority: 0,
        sched_runtime: SLICE.as_nanos() as u64,
        sched_deadline: 0,
        sched_period: 0,
    };
    let thread = thread.map_or(0, |thread| thread.as_raw_nonzero().get());
    // SAFETY: the kernel reads `size` bytes of the structure, which outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Nice value and time slice of this thread, in nanoseconds. Kernels before 6.12 tell a slice
    /// of 0.
    #[allow(unsafe_code)]
    pub(crate) fn priority() -> (i32, u64) {
        // SAFETY: all fields are integers, for which zero is a value.
        let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
        let size = size_of::<libc::sched_attr>() as u32;
        // SAFETY: the kernel writes at most `size` bytes to the structure.
        let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
        assert_eq!(result, 0);
        (attributes.sched_nice, attributes.sched_runtime)
    }

    /// Priority of long work that this thread starts.
    pub(crate) fn background_priority() -> (i32, u64) {
        let (niceness, slice) = priority();
        (NICENESS.max(niceness), if slice == 0 { 0 } else { SLICE.as_nanos() as u64 })
    }

    #[tokio::test]
    async fn long_work_has_a_lower_priority_and_a_longer_slice() {
        let here = priority();
        assert_eq!(run(priority).await.unwrap(), background_priority());
        assert_eq!(priority(), here);
        assert!(here.0 >= NICENESS || here != background_priority());
    }
}
