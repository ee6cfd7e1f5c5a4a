//! Turns of forward passes on the threads of the process.
//!
//! All passes share one thread pool. Two at once would wait for each other in each of their
//! kernels, so one runs at a time. Passes take turns in order of arrival. Between two layers, a
//! pass gives way to a waiting one with fewer rows. So a decode step waits for one layer of a
//! prompt's chunk, not for the whole chunk. The pass that gave way then keeps its turn for as long
//! as it has waited, so steps without a pause leave it half of the time.
//!
//! A decode step consists of some hundred parallel loops of 0.1 ms. Waking a thread for each would
//! take a tenth of that, so the other threads look for work without a pause while a pass runs.
//!
//! Invariants:
//! - A pass that has given way waits in the same queue, behind those that it gave way to. It gets
//!   its turn before any pass that arrives later, so short passes cannot starve it.

use rayon::{ThreadPool, ThreadPoolBuilder, Yield};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum time for which a pass keeps its turn after it has given way.
const KEPT_MAX: Duration = Duration::from_millis(100);

/// Maximum time that a pass waits for its helpers to begin.
const HELPERS_START_MAX: Duration = Duration::from_micros(200);
/// Times that a helper looks for work before it offers its processor to other threads.
const SPINS: u32 = 1000;
/// Marks that no further helper may begin.
const CLOSED: usize = 1 << (usize::BITS - 1);

static TURNS: Turns = Turns::new();
/// Threads of the passes, one per processor. No other work runs there: a helper keeps its thread
/// until the pass ends. `None` if the system has no threads left.
static THREADS: LazyLock<Option<ThreadPool>> =
    LazyLock::new(|| ThreadPoolBuilder::new().thread_name(|index| format!("forward-{index}")).build().ok());

struct Turns {
    queue: Mutex<Queue>,
    released: Condvar,
}

struct Queue {
    is_taken: bool,
    next_number: u64,
    /// Number and rows of each waiting pass, in order of arrival.
    waiting: VecDeque<(u64, usize)>,
}

/// The right to compute. Drop passes it on.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    rows: usize,
    kept_until: Option<Instant>,
}

impl Turns {
    const fn new() -> Turns {
        let queue = Queue { is_taken: false, next_number: 0, waiting: VecDeque::new() };
        Turns { queue: Mutex::new(queue), released: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of a pass over `rows` rows. The passes before it bound the wait, and each
    /// of them ends. A pass that goes on after it `has_given_way` keeps this turn for a while.
    fn take(&self, rows: usize, has_given_way: bool) -> Turn<'_> {
        let begin = Instant::now();
        let mut queue = self.lock();
        let number = queue.next_number;
        queue.next_number += 1;
        queue.waiting.push_back((number, rows));
        while queue.is_taken || queue.waiting.front().is_some_and(|(first, _)| *first != number) {
            queue = self.released.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.waiting.pop_front();
        queue.is_taken = true;
        let now = Instant::now();
        let kept_until = has_given_way.then(|| now + (now - begin).min(KEPT_MAX));
        Turn { turns: self, rows, kept_until }
    }
}

impl Turn<'_> {
    /// Returns `true` if the holder must give way: a pass with fewer rows waits.
    pub(crate) fn is_wanted(&self) -> bool {
        let may_give_way = self.kept_until.is_none_or(|until| Instant::now() >= until);
        may_give_way && self.turns.lock().waiting.iter().any(|(_, rows)| *rows < self.rows)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.lock().is_taken = false;
        // All: each waits for its own number.
        self.turns.released.notify_all();
    }
}

/// Calls `advance` in turns until it returns a result. It computes a pass over `rows` rows on a
/// thread of the pool, and returns `None` where it gives way. It gets no turn if the caller is a
/// thread of a pool: such a thread must not wait, because another pass may need it.
pub(crate) fn run<T: Send>(rows: usize, mut advance: impl FnMut(Option<&Turn<'_>>) -> Option<T> + Send) -> T {
    let is_on_pool = rayon::current_thread_index().is_some();
    let mut has_given_way = false;
    loop {
        let result = if is_on_pool {
            advance(None)
        } else {
            let turn = TURNS.take(rows, has_given_way);
            // From an outside thread, every kernel would wake the pool and wait for it again.
            match &*THREADS {
                Some(threads) => threads.install(|| with_helpers(|| advance(Some(&turn)))),
                None => rayon::scope(|_| advance(Some(&turn))),
            }
        };
        if let Some(result) = result {
            return result;
        }
        has_given_way = true;
    }
}

/// Calls `work` on a thread of [`THREADS`]. Meanwhile, the other threads look for its parts without
/// sleeping.
///
/// A thread may take up a helper only if no other task waits for work of this thread. So helpers
/// begin before `work`, or never.
fn with_helpers<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let (begun, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let helpers = rayon::current_num_threads() - 1;
    rayon::in_place_scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(|_| {
                if begun.fetch_add(1, Ordering::Relaxed) & CLOSED == 0 {
                    // A thread that looked for work now would take up another helper.
                    while begun.load(Ordering::Relaxed) < helpers {
                        std::hint::spin_loop();
                    }
                    help(&is_over);
                }
            });
        }
        let begin = Instant::now();
        while begun.load(Ordering::Relaxed) < helpers && begin.elapsed() < HELPERS_START_MAX {
            std::hint::spin_loop();
        }
        begun.fetch_or(CLOSED, Ordering::Relaxed);
        // After a panic as well: the scope waits for its helpers.
        let _end = EndHelp(&is_over);
        work()
    })
}

struct EndHelp<'a>(&'a AtomicBool);

impl Drop for EndHelp<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Takes parts of loops until the pass is over.
fn help(is_over: &AtomicBool) {
    let mut idle = 0;
    while !is_over.load(Ordering::Relaxed) {
        if rayon::yield_now() == Some(Yield::Executed) {
            idle = 0;
        } else if idle < SPINS {
            idle += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    /// Waits until `count` passes wait.
    fn wait_for_queue(turns: &Turns, count: usize) {
        let begin = Instant::now();
        while turns.lock().waiting.len() != count {
            assert!(begin.elapsed() < Duration::from_secs(60), "the queue never had {count} passes");
            std::thread::yield_now();
        }
    }

    #[test]
    fn long_pass_gives_way_to_a_short_one_and_goes_on_before_the_next() {
        let turns = Turns::new();
        let order = Mutex::new(Vec::new());
        let pass = |name: &'static str, rows: usize| {
            let turn = turns.take(rows, false);
            order.lock().unwrap().push(name);
            drop(turn);
        };
        std::thread::scope(|scope| {
            let long = turns.take(100, false);
            assert!(!long.is_wanted());
            scope.spawn(|| pass("equal", 100));
            wait_for_queue(&turns, 1);
            assert!(!long.is_wanted(), "a pass of the same length waits for the end");
            scope.spawn(|| pass("short", 1));
            wait_for_queue(&turns, 2);
            assert!(long.is_wanted());
            // All threads below enter the queue while another turn holds it, in a known order.
            let first = scope.spawn(|| pass("long again", 100));
            wait_for_queue(&turns, 3);
            scope.spawn(|| pass("later short", 1));
            wait_for_queue(&turns, 4);
            drop(long);
            first.join().unwrap();
        });
        assert_eq!(*order.lock().unwrap(), ["equal", "short", "long again", "later short"]);
    }

    #[test]
    fn pass_that_gave_way_keeps_its_turn_for_as_long_as_it_waited() {
        let turns = Turns::new();
        let kept = |waits: Duration| {
            std::thread::scope(|scope| {
                let short = turns.take(1, false);
                let long = scope.spawn(|| {
                    let turn = turns.take(100, true);
                    turn.kept_until.map(|until| until - Instant::now())
                });
                wait_for_queue(&turns, 1);
                std::thread::sleep(waits);
                drop(short);
                long.join().unwrap()
            })
        };
        assert!(kept(Duration::from_millis(300)).is_some_and(|kept| kept <= KEPT_MAX));
        let turn = turns.take(100, true);
        assert!(turn.kept_until.is_some_and(|until| until <= Instant::now() + KEPT_MAX));
        drop(turn);
        let held = Turn { turns: &turns, rows: 100, kept_until: Some(Instant::now() + Duration::from_secs(3600)) };
        turns.lock().waiting.push_back((0, 1));
        assert!(!held.is_wanted(), "it still keeps its turn");
        let free = Turn { turns: &turns, rows: 100, kept_until: Some(Instant::now()) };
        assert!(free.is_wanted());
    }

    #[test]
    fn panic_in_a_pass_ends_its_turn() {
        let failed = std::panic::catch_unwind(|| run(1, |_| -> Option<()> { panic!("a planned failure") }));
        assert!(failed.is_err());
        assert!(run(1, |turn| Some(turn.is_some())), "the next pass has a turn");
    }
}
