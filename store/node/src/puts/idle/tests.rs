//! Idle puts of a store on paused time, compared with a look at all puts.

use super::*;
use crate::budget::Account;
use crate::puts::Progress;
use crate::store::Store;
use crate::test_support::{self, reserved};
use larder_format::{NamespaceId, PageKey};
use larder_runtime::{Clock, now};
use proptest::prelude::*;

const TIMEOUT: Duration = Duration::from_secs(60);
const TIME_MAX: Duration = Duration::from_secs(600);
/// Puts that the store has room for.
const PUTS_MAX: usize = 100;

/// Reserves a page for a connection, or for no connection.
fn reserve(store: &Store, account: Option<&Arc<Account>>, number: u32) -> Arc<Put> {
    let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) };
    let page = reserved(id, 100);
    let put = match account {
        Some(account) => store.reserve_for(account, id, &page, true),
        None => store.reserve(id, page),
    };
    put.ok().unwrap()
}

fn abort_idle(store: &Store) {
    let now = now();
    store.puts().abort_idle(now, (TIMEOUT, TIME_MAX), |writer| store.budget().writer_silence(writer, now));
}

#[tokio::test(start_paused = true)]
async fn search_meets_each_put_of_a_writer_at_work_at_most_once_per_timeout() {
    let store = test_support::store(Clock::at(0));
    let writer = store.budget().open().unwrap();
    let puts: Vec<_> = (0..PUTS_MAX as u32).map(|number| reserve(&store, Some(&writer), number)).collect();
    for _ in 0..300 {
        tokio::time::advance(Duration::from_secs(1)).await;
        // The writer sends one page after the other.
        puts[0].record_activity();
        writer.record_received(100);
        abort_idle(&store);
    }
    assert!(puts.iter().all(|put| matches!(put.progress(), Progress::Open(_))));
    let visits = store.puts().state.lock().idle.visits;
    assert!((PUTS_MAX..=6 * PUTS_MAX).contains(&visits), "{visits} visits in 300 searches");
    tokio::time::advance(TIMEOUT + Duration::from_secs(1)).await;
    abort_idle(&store);
    assert!(puts.iter().all(|put| put.progress() == Progress::Aborted), "the writer is silent");
    let state = store.puts().state.lock();
    assert!(state.idle.puts.is_empty());
}

/// Three connections reserve puts, and the fourth writer is none. `Bytes` are bytes of a put, from
/// its connection. After `Pass` the node searches for idle puts.
#[derive(Debug, Clone)]
enum Call {
    Reserve { writer: usize },
    Bytes { which: usize },
    End { which: usize },
    Pass { seconds: u64 },
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        4 => (0..4usize).prop_map(|writer| Call::Reserve { writer }),
        3 => any::<usize>().prop_map(|which| Call::Bytes { which }),
        1 => any::<usize>().prop_map(|which| Call::End { which }),
        4 => (1..45u64).prop_map(|seconds| Call::Pass { seconds }),
    ]
}

async fn compare(calls: Vec<Call>) {
    let store = test_support::store(Clock::at(0));
    let writers = [(); 3].map(|()| store.budget().open().unwrap());
    let mut open: Vec<(Arc<Put>, Option<&Arc<Account>>)> = Vec::new();
    for (number, call) in (0..).zip(calls) {
        match call {
            Call::Reserve { writer } if open.len() < PUTS_MAX => {
                let writer = writers.get(writer);
                open.push((reserve(&store, writer, number), writer));
            }
            Call::Bytes { which } if !open.is_empty() => {
                let (put, writer) = &open[which % open.len()];
                put.record_activity();
                if let Some(writer) = writer {
                    writer.record_received(1);
                }
            }
            Call::End { which } if !open.is_empty() => {
                let (put, _) = open.swap_remove(which % open.len());
                store.puts().abort(&put);
            }
            Call::Pass { seconds } => {
                tokio::time::advance(Duration::from_secs(seconds)).await;
                let now = now();
                let silence_of = |put: &Put| store.budget().writer_silence(put.writer()?, now);
                let is_lost = |put: &Put| {
                    let is_silent = silence_of(put).is_none_or(|silence| silence > TIMEOUT);
                    put.is_idle(now, TIMEOUT) && (is_silent || put.is_older(now, TIME_MAX))
                };
                let lost: Vec<bool> = open.iter().map(|(put, _)| is_lost(put)).collect();
                abort_idle(&store);
                for ((put, _), is_lost) in open.iter().zip(lost) {
                    assert_eq!(put.progress() == Progress::Aborted, is_lost, "{:?}", put.id.key);
                }
                open.retain(|(put, _)| put.progress() != Progress::Aborted);
            }
            _ => {}
        }
        let state = store.puts().state.lock();
        assert_eq!(state.idle.puts.len(), open.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn order_finds_the_puts_that_a_look_at_all_finds(calls in prop::collection::vec(call(), 1..200)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(compare(calls));
    }
}
