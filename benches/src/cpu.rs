//! CPU time of the benchmark itself.

use std::time::Duration;

/// User and system CPU time of this process since its start. Includes all threads and the io_uring
/// workers of the kernel that act for it.
pub fn cpu_time() -> Duration {
    // SAFETY: rusage has only integer fields, for which zero is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live rusage. With RUSAGE_SELF the call cannot fail.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}
