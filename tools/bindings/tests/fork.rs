//! A fork while other threads of the process wait.

use larder_bindings::{after_fork_in_child, after_fork_in_parent, before_fork, runtime};
use parking_lot_core::DEFAULT_UNPARK_TOKEN;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Many times the parts that the table has in a process of few waiting threads.
const HOLDERS: usize = 256;
/// Time after which the kernel ends a child that hangs, in seconds.
const CHILD_SECONDS: u32 = 30;

/// Locks every part of the table of waiting threads that all locks of `parking_lot` share. A thread
/// that waits for such a lock, however briefly, locks its part of the table.
fn lock_table_of_waiting_threads() {
    static LOCKED: AtomicUsize = AtomicUsize::new(0);
    for holder in 0..HOLDERS {
        std::thread::spawn(move || {
            loop {
                // SAFETY: no thread parks at this address, and the callback neither panics nor
                // calls into parking_lot.
                unsafe {
                    parking_lot_core::unpark_one(0x1000 + holder * 64, |_| {
                        LOCKED.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_secs(1));
                        DEFAULT_UNPARK_TOKEN
                    })
                };
            }
        });
    }
    // Locked as a whole once no thread has found a free part for a while.
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut before = 0;
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let now = LOCKED.load(Ordering::Relaxed);
        if now > 0 && now == before {
            return;
        }
        assert!(Instant::now() < deadline, "the table is never locked as a whole");
        before = now;
    }
}

/// Waits on a new runtime, as each call of a forked child does.
fn wait_in_child() -> i32 {
    // SAFETY: a plain system call. Its signal ends the process.
    unsafe { libc::alarm(CHILD_SECONDS) };
    // SAFETY: this process is a forked child, and has no client.
    unsafe { after_fork_in_child() };
    let Ok(runtime) = runtime() else { return 1 };
    runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
    0
}

#[test]
fn child_waits_although_threads_of_its_parent_were_about_to() {
    lock_table_of_waiting_threads();
    before_fork();
    // SAFETY: the child calls the code under test, and ends without destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = wait_in_child();
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(code) };
    }
    after_fork_in_parent();
    assert!(child > 0, "the machine refuses a fork");
    let mut status = 0;
    // SAFETY: a plain system call that fills the number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(!libc::WIFSIGNALED(status), "signal {} has ended the child", libc::WTERMSIG(status));
    assert_eq!(libc::WEXITSTATUS(status), 0);
}
