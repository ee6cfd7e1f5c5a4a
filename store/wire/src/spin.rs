//! Waiting for the next message of a socket without sleeping, where messages come soon.
//!
//! A thread that sleeps runs again some 30 µs after bytes have come for it, on a virtual machine whose processor was idle: twice
//! in a round trip, in which 64 KiB move in less. So who waits looks again and again before it sleeps, as Seastar does
//! (`--idle-poll-time-us`) and glommio (`spin_before_park`), but only where the last message came soon, only as long as no other
//! thread is waiting for this processor, and ever more rarely where that is in vain. TCP alone: who moves pages by shared memory
//! is on the same machine as its node, where they would be in each other's way.

use crate::stream::{Ready, Source};
use std::io::{self, IoSliceMut};
use std::time::{Duration, Instant};

/// Most time without sleep, unless told otherwise: a round trip between two that sleep.
pub const SPIN: Duration = Duration::from_micros(200);
/// Who lets other threads go first and comes back only after this long has been in their way.
const IN_THE_WAY: Duration = Duration::from_micros(20);
/// Waits that are slept through after one without sleep was in vain: the first time, and at most, as they double.
const SLEEPS_MIN: u32 = 4;
const SLEEPS_MAX: u32 = 1024;

/// A socket whose next message is waited for without sleep, if it is likely to come soon.
#[derive(Debug)]
pub struct Spinning<R> {
    socket: R,
    habit: Habit,
}

impl<R> Spinning<R> {
    /// Waits without sleep for `most` at a time; never if that is zero.
    pub fn new(socket: R, most: Duration) -> Self {
        Self { socket, habit: Habit::new(most, IN_THE_WAY) }
    }
}

impl<R: Source + Ready> Source for Spinning<R> {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.socket.receive(into).await
    }

    async fn receive_next(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let begin = Instant::now();
        if self.habit.begins_without_sleep() {
            let mut looks = 0;
            loop {
                if let Some(received) = self.socket.receive_now(into) {
                    self.habit.came_while_looking(begin.elapsed(), looks);
                    return received;
                }
                looks += 1;
                // First what this thread has to do: an answer may just be leaving.
                tokio::task::yield_now().await;
                let looked = begin.elapsed();
                if looked < self.habit.most {
                    std::thread::yield_now();
                    if begin.elapsed().saturating_sub(looked) < self.habit.in_the_way {
                        continue;
                    }
                }
                self.habit.was_in_vain();
                break;
            }
        }
        let received = self.socket.receive(into).await;
        self.habit.came(begin.elapsed());
        received
    }
}

/// Whether to sleep, from how it was before.
#[derive(Debug)]
struct Habit {
    most: Duration,
    in_the_way: Duration,
    /// How long the last wait was.
    last: Duration,
    /// Waits that are still to be slept through, and how many it were the last time.
    sleep: u32,
    sleeps: u32,
}

impl Habit {
    fn new(most: Duration, in_the_way: Duration) -> Self {
        Self { most, in_the_way, last: Duration::ZERO, sleep: 0, sleeps: 0 }
    }

    fn begins_without_sleep(&mut self) -> bool {
        let rested = self.sleep == 0;
        self.sleep = self.sleep.saturating_sub(1);
        // A wait that somebody gives up has not come soon.
        rested && std::mem::replace(&mut self.last, self.most) < self.most
    }

    fn came(&mut self, wait: Duration) {
        self.last = wait;
    }

    /// What was there at the first look says nothing of looking on.
    fn came_while_looking(&mut self, wait: Duration, looks_before: u32) {
        self.last = wait;
        if looks_before > 0 {
            self.sleeps = 0;
        }
    }

    fn was_in_vain(&mut self) {
        self.sleeps = (2 * self.sleeps).clamp(SLEEPS_MIN, SLEEPS_MAX);
        self.sleep = self.sleeps;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream, tcp};

    /// Has something when it was looked at so many times, or slept for.
    #[derive(Debug, Default)]
    struct Slow {
        /// Looks that the next waits take; none: it must be slept for.
        after: VecDeque<usize>,
        looks: usize,
        /// For each wait how often it was looked at, and whether it was slept for.
        waits: Vec<(usize, bool)>,
    }

    impl Slow {
        fn came(&mut self, slept: bool) -> io::Result<usize> {
            self.waits.push((std::mem::take(&mut self.looks), slept));
            Ok(1)
        }
    }

    impl Source for Slow {
        async fn receive(&mut self, _into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            self.came(true)
        }
    }

    impl Ready for Slow {
        fn receive_now(&mut self, _into: &mut [IoSliceMut<'_>]) -> Option<io::Result<usize>> {
            self.looks += 1;
            let there = self.after.front().is_some_and(|&after| self.looks == after);
            there.then(|| {
                self.after.pop_front();
                self.came(false)
            })
        }
    }

    /// What such a socket sees of its waits.
    async fn waits(after: &[usize], most: Duration, in_the_way: Duration, waits: usize) -> Vec<(usize, bool)> {
        let slow = Slow { after: after.iter().copied().collect(), ..Slow::default() };
        let mut source = Spinning { socket: slow, habit: Habit::new(most, in_the_way) };
        for _ in 0..waits {
            assert_eq!(source.receive_next(&mut [IoSliceMut::new(&mut [0])]).await.unwrap(), 1);
        }
        source.socket.waits
    }

    #[tokio::test]
    async fn what_comes_soon_is_not_slept_for_and_what_does_not_is() {
        const LONG: Duration = Duration::from_secs(60);
        assert_eq!(waits(&[1, 2, 4], LONG, LONG, 3).await, [(1, false), (2, false), (4, false)]);
        // Nothing comes while it looks; the next one then is slept for at once.
        let seen = waits(&[], Duration::from_millis(50), LONG, 2).await;
        assert!(seen[0].0 > 1 && seen[0].1 && seen[1] == (0, true), "{seen:?}");
        // Another thread was let go first, which is not tried again at once.
        assert_eq!(waits(&[2, 1], LONG, Duration::ZERO, 2).await, [(1, true), (0, true)]);
        assert_eq!(waits(&[1], Duration::ZERO, LONG, 1).await, [(0, true)]);
    }

    #[tokio::test]
    async fn what_this_thread_has_to_do_goes_before_other_threads() {
        let done = tokio::spawn(async {});
        assert_eq!(waits(&[], Duration::from_secs(60), Duration::ZERO, 1).await, [(1, true)]);
        assert!(done.is_finished());
    }

    /// Waits that are slept through before the next without sleep.
    fn slept(habit: &mut Habit) -> u32 {
        (0..)
            .take_while(|_| {
                let sleeps = !habit.begins_without_sleep();
                habit.came(Duration::ZERO);
                sleeps
            })
            .count() as u32
    }

    #[test]
    fn a_habit_follows_how_it_was_before() {
        let most = Duration::from_micros(100);
        let mut habit = Habit::new(most, IN_THE_WAY);
        assert!(habit.begins_without_sleep());
        assert!(!habit.begins_without_sleep(), "the last wait was given up");
        habit.came(most - Duration::from_nanos(1));
        assert!(habit.begins_without_sleep());
        habit.came(most);
        assert!(!habit.begins_without_sleep());
        habit.came(Duration::ZERO);
        let mut expected = SLEEPS_MIN;
        for _ in 0..12 {
            habit.was_in_vain();
            assert_eq!(slept(&mut habit), expected);
            habit.came_while_looking(Duration::ZERO, 0);
            expected = SLEEPS_MAX.min(2 * expected);
        }
        assert_eq!(expected, SLEEPS_MAX);
        habit.came_while_looking(Duration::ZERO, 1);
        habit.was_in_vain();
        assert_eq!(slept(&mut habit), SLEEPS_MIN);
    }

    async fn pair() -> (TcpStream, Spinning<tcp::OwnedReadHalf>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (from, _) = listener.accept().await.unwrap();
        (to, Spinning::new(from.into_split().0, SPIN))
    }

    #[tokio::test]
    async fn a_socket_loses_nothing_however_long_its_bytes_take_and_whoever_stops_waiting() {
        let (mut to, mut from) = pair().await;
        // One that would rather look than sleep, on a machine as busy as it may be.
        from.habit.in_the_way = Duration::from_secs(60);
        const BYTES: usize = 3000;
        let sending = tokio::spawn(async move {
            for byte in 0..BYTES {
                // Before the look, during it, and long after.
                match byte % 7 {
                    0 => tokio::time::sleep(Duration::from_micros(300)).await,
                    1 | 2 => {}
                    _ => tokio::task::yield_now().await,
                }
                to.write_all(&[byte as u8]).await.unwrap();
            }
        });
        let (mut seen, mut stopped) = (0, 0);
        let mut memory = [0; 64];
        while seen < BYTES {
            let received = tokio::select! {
                biased;
                received = async {
                    let into = &mut [IoSliceMut::new(&mut memory)];
                    tokio::time::timeout(Duration::from_secs(30), from.receive_next(into)).await.expect("bytes come")
                } => received.unwrap(),
                () = tokio::task::yield_now(), if seen % 5 == 0 => {
                    stopped += 1;
                    tokio::task::yield_now().await;
                    continue;
                }
            };
            assert!(received > 0, "the stream ended after {seen} bytes");
            memory[..received].iter().for_each(|&byte| {
                assert_eq!(byte, seen as u8);
                seen += 1;
            });
        }
        assert!(stopped > 0);
        sending.await.unwrap();
        assert_eq!(from.receive_next(&mut [IoSliceMut::new(&mut memory)]).await.unwrap(), 0, "the end");
    }

    #[tokio::test]
    async fn who_looked_and_who_sleeps_see_the_same_stream() {
        let (mut to, Spinning { socket: mut from, .. }) = pair().await;
        let mut memory = [0; 2];
        for round in 0..100 {
            // The runtime knows that there is something, and what there is is taken without it.
            to.write_all(&[round, round + 1, round + 2]).await.unwrap();
            from.readable().await.unwrap();
            assert_eq!(from.receive_now(&mut [IoSliceMut::new(&mut memory)]).unwrap().unwrap(), 2);
            assert_eq!(memory, [round, round + 1]);
            assert_eq!(from.receive(&mut [IoSliceMut::new(&mut memory)]).await.unwrap(), 1);
            assert_eq!(memory[0], round + 2);
            assert!(from.receive_now(&mut [IoSliceMut::new(&mut memory)]).is_none());
            // Who sleeps now is woken by what comes then.
            let sleeping = tokio::spawn(async move {
                let mut memory = [0];
                let into = &mut [IoSliceMut::new(&mut memory)];
                let received = tokio::time::timeout(Duration::from_secs(30), from.receive(into)).await;
                assert_eq!((received.unwrap().unwrap(), memory), (1, [round]));
                from
            });
            tokio::task::yield_now().await;
            to.write_all(&[round]).await.unwrap();
            from = sleeping.await.unwrap();
        }
    }
}
