use super::*;
use std::collections::VecDeque;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, tcp};

/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

/// A source that delivers a byte at a given poll, or when the reader sleeps.
#[derive(Debug, Default)]
struct ScriptedSource {
    /// For each coming wait, the poll that succeeds. Empty: no poll does.
    polls_needed: VecDeque<usize>,
    polls: usize,
    /// For each past wait, the number of polls and whether the reader slept.
    waits: Vec<(usize, bool)>,
}

impl ScriptedSource {
    fn deliver(&mut self, slept: bool) -> io::Result<usize> {
        self.waits.push((std::mem::take(&mut self.polls), slept));
        Ok(1)
    }
}

impl ByteSource for ScriptedSource {
    async fn receive(&mut self, _into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.deliver(true)
    }
}

impl TryReceive for ScriptedSource {
    fn try_receive(&mut self, _into: &mut [IoSliceMut<'_>]) -> Option<io::Result<usize>> {
        self.polls += 1;
        let arrived = self.polls_needed.front().is_some_and(|&after| self.polls == after);
        arrived.then(|| {
            self.polls_needed.pop_front();
            self.deliver(false)
        })
    }
}

/// Runs `waits` waits and returns what the source saw of each.
async fn waits(polls_needed: &[usize], limit: Duration, contended_yield: Duration, waits: usize) -> Vec<(usize, bool)> {
    let socket = ScriptedSource { polls_needed: polls_needed.iter().copied().collect(), ..ScriptedSource::default() };
    let mut source = BusyPollSource { socket, policy: PollPolicy::new(limit, contended_yield) };
    for _ in 0..waits {
        assert_eq!(source.receive_next(&mut [IoSliceMut::new(&mut [0])]).await.unwrap(), 1);
    }
    source.socket.waits
}

#[tokio::test]
async fn source_spins_for_prompt_messages_and_sleeps_for_late_ones() {
    assert_eq!(waits(&[1, 2, 4], PATIENCE, PATIENCE, 3).await, [(1, false), (2, false), (4, false)]);
    // The spin is in vain, so the next wait sleeps at once. Two polls fit into the limit on a busy
    // machine, too.
    let seen = waits(&[], Duration::from_millis(500), PATIENCE, 2).await;
    assert!(seen[0].0 > 1 && seen[0].1 && seen[1] == (0, true), "{seen:?}");
    // The yield to another thread took long, so neither this wait nor the next one spins on.
    assert_eq!(waits(&[2, 1], PATIENCE, Duration::ZERO, 2).await, [(1, true), (0, true)]);
    assert_eq!(waits(&[1], Duration::ZERO, PATIENCE, 1).await, [(0, true)]);
}

#[tokio::test]
async fn tasks_of_the_thread_run_before_other_threads() {
    let done = tokio::spawn(async {});
    assert_eq!(waits(&[], PATIENCE, Duration::ZERO, 1).await, [(1, true)]);
    assert!(done.is_finished());
}

fn slept(policy: &mut PollPolicy) -> u32 {
    (0..)
        .take_while(|_| {
            let sleeps = !policy.should_spin();
            policy.received_sleeping(Duration::ZERO);
            sleeps
        })
        .count() as u32
}

#[test]
fn policy_backs_off_after_spins_in_vain() {
    let most = Duration::from_micros(100);
    let mut policy = PollPolicy::new(most, CONTENDED_YIELD);
    assert!(policy.should_spin());
    assert!(!policy.should_spin(), "the last wait was cancelled");
    policy.received_sleeping(most - Duration::from_nanos(1));
    assert!(policy.should_spin());
    policy.received_sleeping(most);
    assert!(!policy.should_spin());
    policy.received_sleeping(Duration::ZERO);
    let mut expected = BACKOFF_MIN;
    for _ in 0..12 {
        policy.spun_in_vain();
        assert_eq!(slept(&mut policy), expected);
        policy.received_spinning(Duration::ZERO, 0);
        expected = BACKOFF_MAX.min(2 * expected);
    }
    assert_eq!(expected, BACKOFF_MAX);
    policy.received_spinning(Duration::ZERO, 1);
    policy.spun_in_vain();
    assert_eq!(slept(&mut policy), BACKOFF_MIN);
}

async fn pair() -> (TcpStream, BusyPollSource<tcp::OwnedReadHalf>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (from, _) = listener.accept().await.unwrap();
    (to, BusyPollSource::new(from.into_split().0, DEFAULT_BUSY_POLL))
}

#[tokio::test]
async fn cancelled_receive_loses_no_bytes() {
    let (mut to, mut from) = pair().await;
    // No yield counts as contended: the reader spins on a busy machine, too.
    from.policy.contended_yield = PATIENCE;
    const BYTES: usize = 3000;
    let sending = tokio::spawn(async move {
        for byte in 0..BYTES {
            // Bytes arrive before, during and long after a spin.
            match byte % 7 {
                0 => tokio::time::sleep(Duration::from_micros(300)).await,
                1 | 2 => {}
                _ => tokio::task::yield_now().await,
            }
            to.write_all(&[byte as u8]).await.unwrap();
        }
    });
    let mut seen = 0;
    let mut cancelled = 0;
    let mut memory = [0; 64];
    while seen < BYTES {
        let received = tokio::select! {
            biased;
            received = async {
                let into = &mut [IoSliceMut::new(&mut memory)];
                tokio::time::timeout(PATIENCE, from.receive_next(into)).await.expect("bytes come")
            } => received.unwrap(),
            () = tokio::task::yield_now(), if seen % 5 == 0 => {
                cancelled += 1;
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
    assert!(cancelled > 0);
    sending.await.unwrap();
    assert_eq!(from.receive_next(&mut [IoSliceMut::new(&mut memory)]).await.unwrap(), 0, "the end");
}

#[tokio::test]
async fn polling_and_sleeping_read_the_same_stream() {
    let (mut to, BusyPollSource { socket: mut from, .. }) = pair().await;
    let mut memory = [0; 2];
    for round in 0..100 {
        // The runtime has seen readiness, and the poll takes the bytes behind its back.
        to.write_all(&[round, round + 1, round + 2]).await.unwrap();
        from.readable().await.unwrap();
        assert_eq!(from.try_receive(&mut [IoSliceMut::new(&mut memory)]).unwrap().unwrap(), 2);
        assert_eq!(memory, [round, round + 1]);
        assert_eq!(from.receive(&mut [IoSliceMut::new(&mut memory)]).await.unwrap(), 1);
        assert_eq!(memory[0], round + 2);
        assert!(from.try_receive(&mut [IoSliceMut::new(&mut memory)]).is_none());
        // A reader that sleeps now wakes up for the next byte.
        let sleeping = tokio::spawn(async move {
            let mut memory = [0];
            let into = &mut [IoSliceMut::new(&mut memory)];
            let received = tokio::time::timeout(PATIENCE, from.receive(into)).await;
            assert_eq!((received.unwrap().unwrap(), memory), (1, [round]));
            from
        });
        tokio::task::yield_now().await;
        to.write_all(&[round]).await.unwrap();
        from = sleeping.await.unwrap();
    }
}
