//! Tests of the times told while puts become writes to L3, which keep the room of the puts.
//!
//! Lines form at once, and then end. All callers return as told, plus up to a quarter.

use super::room_tests::{MIB, Open, PAGE, account, in_use, write};
use super::writers::WrittenPuts;
use super::*;
use rand::Rng;
use tokio::time::sleep;

/// Bytes per second of each writer. A page takes 400 ms.
const WRITER_RATE: u64 = 20 * MIB;

/// Room for puts.
#[derive(Debug, Clone, Copy)]
struct Room {
    bytes: u64,
    /// Pages that it takes at a time, so as many callers are one turn of it.
    pages: u64,
}

impl Room {
    const FOUR_PAGES: Room = Room { bytes: 4 * PAGE, pages: 4 };
    const ONE_PAGE: Room = Room { bytes: PAGE, pages: 1 };
    /// A page that is larger than the room is admitted alone.
    const PART_OF_A_PAGE: Room = Room { bytes: PAGE / 4 * 3, pages: 1 };

    /// Bytes per second of as many writers as the room takes.
    fn writers_rate(self) -> u64 {
        self.pages * WRITER_RATE
    }
}

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

#[derive(Clone)]
struct Node {
    room: Room,
    budget: Arc<Budget>,
    open: Open,
    device: Arc<Device>,
    /// Each put that ends becomes a write of its bytes.
    writes_puts: bool,
}

impl Node {
    fn new(room: Room, (device_rate, writes_puts): (u64, bool)) -> Node {
        let load = Arc::<WriteLoad>::default();
        let options = NodeOptions { in_flight_bytes: Some(2 * room.bytes), ..NodeOptions::default() };
        let budget = Budget::new(&options, load.clone(), Arc::default());
        let device = Device { load, bytes_per_second: device_rate, idle_at: Mutex::new(now()) };
        Node { room, budget, open: Open::default(), device: Arc::new(device), writes_puts }
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
            (0..self.room.pages).map(|number| account(&self.budget, &format!("writer {number}"))).collect();
        assert!(writers.iter().all(|writer| self.open.reserve(writer)));
        futures::future::join_all(writers.iter().map(|writer| self.put(writer))).await;
    }

    /// Fills the room twice, so that the node knows the pace of its puts and of its device.
    async fn warm_up(&self) {
        for _ in 0..2 {
            self.fill().await;
            sleep(self.device.time_of(self.room.pages) + Duration::from_millis(200)).await;
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

/// Callers that come while writers use the whole room, and put `pages` each.
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

/// Returns in lines of so many turns of the room, of 40 callers per turn.
async fn returns_in_line(room: Room, turns: u64, device: (u64, bool)) -> Returns {
    let mut returns = Returns::default();
    for seed in 0..40 / room.pages {
        let node = Node::new(room, device);
        let more = callers_beside_writers(&node, (turns * room.pages, 1), seed).await;
        returns = [returns, more].into_iter().sum();
    }
    returns
}

async fn assert_nine_of_ten_get_in(room: Room, (device_rate, writes_puts): (u64, bool)) {
    for turns in 2..=4 {
        let of = format!("{turns} turns, {room:?}, device of {} MiB/s, writes puts: {writes_puts}", device_rate / MIB);
        returns_in_line(room, turns, (device_rate, writes_puts)).await.assert_truthful(90, &of);
    }
}

#[tokio::test(start_paused = true)]
async fn callers_get_in_when_told_without_writes() {
    let room = Room::FOUR_PAGES;
    assert_nine_of_ten_get_in(room, (room.writers_rate(), false)).await;
}

/// Before, the forecast took a put's end for the end of its room, and most returns were in vain.
#[tokio::test(start_paused = true)]
async fn callers_get_in_when_told_beside_a_device_slower_than_the_writers() {
    let room = Room::FOUR_PAGES;
    for device_rate in [room.writers_rate() / 4, room.writers_rate() / 2] {
        assert_nine_of_ten_get_in(room, (device_rate, true)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn callers_get_in_when_told_beside_a_device_as_fast_as_the_writers() {
    let room = Room::FOUR_PAGES;
    assert_nine_of_ten_get_in(room, (room.writers_rate(), true)).await;
}

/// Before, the forecast counted the write of a put from before the end of the put. Callers that
/// returned without a delay of their own came too early for the only page.
#[tokio::test(start_paused = true)]
async fn callers_get_in_when_told_one_page_at_a_time() {
    for room in [Room::ONE_PAGE, Room::PART_OF_A_PAGE] {
        assert_nine_of_ten_get_in(room, (WRITER_RATE, false)).await;
        // A slower device takes more than 10 s for four pages, the longest time that is told.
        for device_rate in [WRITER_RATE / 2, WRITER_RATE] {
            assert_nine_of_ten_get_in(room, (device_rate, true)).await;
        }
    }
}

/// Before, the caller was told one turn of the room more.
#[tokio::test(start_paused = true)]
async fn page_larger_than_the_room_waits_only_until_the_room_is_empty() {
    let mut told = Vec::new();
    for room in [Room::ONE_PAGE, Room::PART_OF_A_PAGE] {
        let node = Node::new(room, (WRITER_RATE, false));
        node.warm_up().await;
        told.push(told_beside_half_pages(&node).await);
    }
    assert!(told[0] == told[1] && told[0] < Duration::from_millis(240), "{told:?}");
}

/// A caller that returns before one ahead of it finds that room promised. The longer the line, the
/// longer are the quarters of the delays, in which callers return in any order.
#[tokio::test(start_paused = true)]
async fn callers_in_longer_lines_return_in_vain_more_often() {
    for (turns, percent_min) in [(8, 75), (16, 50)] {
        let room = Room::FOUR_PAGES;
        let returns = returns_in_line(room, turns, (room.writers_rate(), false)).await;
        returns.assert_truthful(percent_min, &format!("{turns} turns"));
    }
}

/// The line never ends: each caller puts the next page at once.
#[tokio::test(start_paused = true)]
async fn most_callers_get_in_when_told_in_a_line_that_does_not_end() {
    for writes_puts in [false, true] {
        let room = Room::FOUR_PAGES;
        let node = Node::new(room, (room.writers_rate(), writes_puts));
        let returns = callers_beside_writers(&node, (4 * room.pages, 10), 0).await;
        returns.assert_truthful(60, &format!("callers without a pause, writes puts: {writes_puts}"));
    }
}

/// Time told to a caller that comes when the writers have sent half of their pages.
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
    let [written, not_written] =
        [true, false].map(|writes_puts| Node::new(Room::FOUR_PAGES, (WRITER_RATE, writes_puts)));
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
