//! Tests of the times told while puts become writes to L3, which keep the room of the puts.
//!
//! Lines form at once, and then end. All callers return as told, plus up to a quarter.

use super::room_tests::{MIB, Open, PAGE, account, in_use, write};
use super::writers::WrittenPuts;
use super::*;
use rand::Rng;
use tokio::time::sleep;

/// Pages that the room takes, so as many callers are one turn of it.
const ROOM_PAGES: u64 = 4;
/// Bytes per second of each writer. A page takes 400 ms.
const WRITER_RATE: u64 = 20 * MIB;
const WRITERS_RATE: u64 = ROOM_PAGES * WRITER_RATE;

/// Device that writes pages one after the other, at a fixed rate.
struct Device {
    load: Arc<WriteLoad>,
    bytes_per_second: u64,
    idle_at: Mutex<Instant>,
}

impl Device {
    /// Begins the write of a page.
    fn write(&self) {
        let begin = now();
        let queued_bytes = self.load.record_begin(PAGE as u32);
        let end = {
            let mut idle_at = self.idle_at.lock();
            *idle_at = (*idle_at).max(begin) + self.time_of(1);
            *idle_at
        };
        let load = self.load.clone();
        tokio::spawn(async move {
            sleep(end.saturating_duration_since(begin)).await;
            load.record_end(PAGE as u32, queued_bytes, now().saturating_duration_since(begin));
        });
    }

    fn time_of(&self, pages: u64) -> Duration {
        Duration::from_secs_f64((pages * PAGE) as f64 / self.bytes_per_second as f64)
    }
}

/// Budget of a node with room for [`ROOM_PAGES`].
#[derive(Clone)]
struct Node {
    budget: Arc<Budget>,
    open: Open,
    device: Arc<Device>,
    /// Each put that ends becomes a write of its bytes.
    writes_puts: bool,
}

impl Node {
    fn new(device_rate: u64, writes_puts: bool) -> Node {
        let load = Arc::<WriteLoad>::default();
        let options = NodeOptions { in_flight_bytes: Some(2 * ROOM_PAGES * PAGE), ..NodeOptions::default() };
        let budget = Budget::new(&options, load.clone(), Arc::default());
        let device = Device { load, bytes_per_second: device_rate, idle_at: Mutex::new(now()) };
        Node { budget, open: Open::default(), device: Arc::new(device), writes_puts }
    }

    /// Sends a reserved page and ends its put.
    async fn put(&self, writer: &Account) {
        write(&self.open, writer, WRITER_RATE).await;
        if self.writes_puts {
            self.device.write();
        }
    }

    /// Puts as many pages at once as the room takes.
    async fn fill(&self) {
        let writers: Vec<_> =
            (0..ROOM_PAGES).map(|number| account(&self.budget, &format!("writer {number}"))).collect();
        assert!(writers.iter().all(|writer| self.open.reserve(writer)));
        futures::future::join_all(writers.iter().map(|writer| self.put(writer))).await;
    }

    /// Fills the room twice, so that the node knows the pace of its puts and of its device.
    async fn warm_up(&self) {
        for _ in 0..2 {
            self.fill().await;
            sleep(self.device.time_of(ROOM_PAGES) + Duration::from_millis(200)).await;
        }
    }
}

/// Returns of refused callers, and those of them that found room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Returns {
    all: u64,
    truthful: u64,
}

impl std::iter::Sum for Returns {
    fn sum<I: Iterator<Item = Returns>>(returns: I) -> Returns {
        returns.fold(Returns::default(), |sum, next| Returns {
            all: sum.all + next.all,
            truthful: sum.truthful + next.truthful,
        })
    }
}

impl Returns {
    fn assert_truthful(self, percent_min: u64, of: &str) {
        let Returns { all, truthful } = self;
        println!("{of}: {truthful} of {all} returns got in");
        assert!(all > 0, "{of}: no caller was refused");
        assert!(truthful * 100 >= all * percent_min, "{of}: {truthful} of {all} returns got in");
    }
}

/// Puts `pages` one after the other. Returns as told after each refusal.
async fn call(node: Node, (number, pages): (u64, u64), seed: u64) -> Returns {
    let mut random = larder_runtime::random::generator(Some(1000 * seed + number));
    sleep(Duration::from_millis(7 * number)).await;
    let caller = account(&node.budget, &format!("caller {number}"));
    let mut returns = Returns::default();
    for _ in 0..pages {
        let before = returns.all;
        while !node.open.reserve(&caller) {
            assert!(returns.all - before < 20, "caller {number} is sent away again and again");
            let told = caller.wait_in_line(PAGE, PAGE).retry_after;
            // A client adds up to a quarter of the time.
            sleep(told + told.mul_f64(random.random_range(0.0..0.25))).await;
            returns.all += 1;
        }
        returns.truthful += u64::from(returns.all > before);
        node.put(&caller).await;
    }
    returns
}

/// Callers that come while four writers are at work, and put `pages` each.
async fn callers_beside_writers(node: &Node, (count, pages): (u64, u64), seed: u64) -> Returns {
    node.warm_up().await;
    let calling = async {
        sleep(Duration::from_millis(60)).await;
        let calls = (0..count).map(|number| tokio::spawn(call(node.clone(), (number, pages), seed)));
        let calls: Vec<_> = calls.collect();
        futures::future::join_all(calls).await.into_iter().map(Result::unwrap).sum::<Returns>()
    };
    let ((), returns) = futures::join!(node.fill(), calling);
    assert_eq!(in_use(&node.budget), 0);
    returns
}

/// Returns in lines of so many turns of the room, over ten seeds.
async fn returns_in_line(turns: u64, (device_rate, writes_puts): (u64, bool)) -> Returns {
    let mut returns = Returns::default();
    for seed in 0..10 {
        let node = Node::new(device_rate, writes_puts);
        let more = callers_beside_writers(&node, (turns * ROOM_PAGES, 1), seed).await;
        returns = [returns, more].into_iter().sum();
    }
    returns
}

async fn assert_nine_of_ten_get_in(device_rate: u64, writes_puts: bool) {
    for turns in 2..=4 {
        let of = format!("{turns} turns, device of {} MiB/s, writes puts: {writes_puts}", device_rate / MIB);
        returns_in_line(turns, (device_rate, writes_puts)).await.assert_truthful(90, &of);
    }
}

#[tokio::test(start_paused = true)]
async fn callers_get_in_when_told_without_writes() {
    assert_nine_of_ten_get_in(WRITERS_RATE, false).await;
}

/// Before, the forecast took a put's end for the end of its room, and most returns were in vain.
#[tokio::test(start_paused = true)]
async fn callers_get_in_when_told_beside_a_device_slower_than_the_writers() {
    for device_rate in [WRITERS_RATE / 4, WRITERS_RATE / 2] {
        assert_nine_of_ten_get_in(device_rate, true).await;
    }
}

#[tokio::test(start_paused = true)]
async fn callers_get_in_when_told_beside_a_device_as_fast_as_the_writers() {
    assert_nine_of_ten_get_in(WRITERS_RATE, true).await;
}

/// A caller that returns before one ahead of it finds that room promised. The longer the line, the
/// longer are the quarters of the delays, in which callers return in any order.
#[tokio::test(start_paused = true)]
async fn callers_in_longer_lines_return_in_vain_more_often() {
    for (turns, percent_min) in [(8, 75), (16, 50)] {
        let returns = returns_in_line(turns, (WRITERS_RATE, false)).await;
        returns.assert_truthful(percent_min, &format!("{turns} turns"));
    }
}

/// The line never ends: each caller puts the next page at once.
#[tokio::test(start_paused = true)]
async fn most_callers_get_in_when_told_in_a_line_that_does_not_end() {
    for writes_puts in [false, true] {
        let node = Node::new(WRITERS_RATE, writes_puts);
        let returns = callers_beside_writers(&node, (4 * ROOM_PAGES, 10), 0).await;
        returns.assert_truthful(60, &format!("callers without a pause, writes puts: {writes_puts}"));
    }
}

/// Time told to a caller that comes when four writers have sent half of their pages.
async fn told_beside_half_pages(node: &Node) -> Duration {
    let calling = async {
        sleep(Duration::from_millis(210)).await;
        let caller = account(&node.budget, "caller");
        assert!(!node.open.reserve(&caller));
        caller.wait_in_line(PAGE, PAGE).retry_after
    };
    let ((), told) = futures::join!(node.fill(), calling);
    told
}

#[tokio::test(start_paused = true)]
async fn time_told_contains_the_write_of_a_put_only_if_puts_are_written() {
    // The device writes a page in 400 ms.
    let [written, not_written] = [true, false].map(|writes_puts| Node::new(WRITER_RATE, writes_puts));
    // L3 may write pages that were not put just now.
    not_written.device.write();
    sleep(Duration::from_secs(1)).await;
    for (node, milliseconds) in [(written, 600..700), (not_written, 200..240)] {
        node.warm_up().await;
        let told = told_beside_half_pages(&node).await;
        assert!(milliseconds.contains(&told.as_millis()), "{told:?}, writes puts: {}", node.writes_puts);
    }
}

#[test]
fn puts_count_as_written_while_most_of_their_bytes_are() {
    let mut puts = WrittenPuts::default();
    // Pages that L3 wrote before are no puts.
    let mut begun = 10 * PAGE;
    puts.record(PAGE, begun);
    assert!(!puts.are_most());
    for _ in 0..3 {
        begun += PAGE;
        puts.record(PAGE, begun);
        assert!(puts.are_most());
    }
    (0..8).for_each(|_| puts.record(PAGE, begun));
    assert!(!puts.are_most());
    // A small page takes far more room than L3 writes.
    for _ in 0..100 {
        begun += 100;
        puts.record(4096, begun);
    }
    assert!(!puts.are_most());
}
