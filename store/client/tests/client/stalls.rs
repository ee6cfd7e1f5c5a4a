//! Stops of the test process, as on a virtual machine that stands still for seconds. Links of a
//! fixed rate carry less then, and a node takes a writer at work for a silent one.

use futures::FutureExt;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(25);
/// Shorter delays of the watch are those of a busy machine.
const SHORTEST: Duration = Duration::from_millis(250);
const ATTEMPTS: usize = 5;

/// Number of stops since the first call.
fn stops() -> u64 {
    static WATCH: Once = Once::new();
    static STOPS: AtomicU64 = AtomicU64::new(0);
    WATCH.call_once(|| {
        std::thread::spawn(|| {
            loop {
                let begin = Instant::now();
                std::thread::sleep(TICK);
                STOPS.fetch_add(u64::from(begin.elapsed() > SHORTEST), Ordering::Relaxed);
            }
        });
    });
    STOPS.load(Ordering::Relaxed)
}

/// Runs a test. A failure beside a stop of the process shows nothing, so the test runs again.
///
/// # Panics
/// If the test fails without a stop, or in each of [`ATTEMPTS`] attempts.
pub async fn despite_stops<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for attempt in 1.. {
        let before = stops();
        let Err(panic) = AssertUnwindSafe(test()).catch_unwind().await else { return };
        // The watch counts a stop that has just ended.
        tokio::time::sleep(2 * SHORTEST).await;
        if attempt == ATTEMPTS || stops() == before {
            resume_unwind(panic);
        }
        println!("attempt {attempt} failed, and the process has stood still meanwhile");
    }
}
