//! What processors were used for.

use std::time::Duration;

/// CPU time of this process, its threads and the kernel's workers for it.
pub fn cpu_time() -> Duration {
    // SAFETY: rusage is plain numbers, for which zeros are values.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live rusage. It cannot fail for this process.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}
