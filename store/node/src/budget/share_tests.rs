//! Tests of the shares that tenants and peers have of the room for puts.

use super::room_tests::{MIB, account, account_of, budget, budget_for, share};
use super::*;
use std::collections::BTreeMap;
use tokio::time::sleep;

/// Bytes that keep a writer from losing its room.
const PROGRESS: usize = writers::PROGRESS_BYTES as usize;

/// Makes progress on each connection every 100 ms.
async fn progress_for(time: Duration, senders: &[Arc<Account>]) {
    let end = now() + time;
    while now() < end {
        sleep(Duration::from_millis(100)).await;
        senders.iter().for_each(|sender| sender.record_received(PROGRESS));
    }
}

/// Reservations of one MiB each, by connection.
type Held = Mutex<BTreeMap<u64, Vec<Charge>>>;

/// Reserves one MiB as the store does: after a refusal once more, with the room of losing writers.
fn reserve_mib(held: &Held, account: &Arc<Account>) -> bool {
    let charge = account.charge(Kind::Puts, MIB).ok().or_else(|| {
        for writer in account.losing_writers(MIB) {
            while account.takes_from(writer, MIB) && held.lock().get_mut(&writer.connection).unwrap().pop().is_some() {}
        }
        account.charge(Kind::Puts, MIB).ok()
    });
    charge.map(|charge| held.lock().entry(account.connection()).or_default().push(charge)).is_some()
}

/// Before, a share was never below a sixteenth: sixteen tenants could keep everything.
#[tokio::test(start_paused = true)]
async fn seventeenth_tenant_gets_its_share_of_the_room_that_sixteen_hold() {
    let budget = budget_for(64 * MIB);
    let held = Held::default();
    let reserve = |account: &Arc<Account>| reserve_mib(&held, account);
    let sixteen: Vec<_> = (0..16).map(|number| account(&budget, &number.to_string())).collect();
    sixteen.iter().cycle().take(64).for_each(|account| assert!(reserve(account)));
    let next = account(&budget, "17");
    assert!(!reserve(&next));
    let told = next.wait_in_line(3 * MIB, MIB).retry_after;
    progress_for(told, &sixteen).await;
    let got = (0..9).take_while(|_| reserve(&next)).count();
    assert_eq!(got, 3, "a seventeenth of 64 MiB is 3.8 pages");
}

/// Before, sixteen tenants of one address reserved 31 of 32 MiB for as long as they made progress.
#[tokio::test(start_paused = true)]
async fn sixteen_tenants_of_a_peer_share_equally_and_leave_half_to_another_peer() {
    let budget = budget();
    let held = Held::default();
    let share = |account: &Account| share(&budget, account, 32 * MIB);
    let stranger = Peer::Address([10, 0, 0, 9].into());
    let sixteen: Vec<_> = (0..16).map(|number| account_of(&budget, stranger, &number.to_string())).collect();
    sixteen.iter().cycle().take(32).for_each(|account| assert!(reserve_mib(&held, account)));
    assert!(sixteen.iter().all(|account| share(account) == 2 * MIB), "they have all of it alone");
    let honest = account_of(&budget, Peer::Local, "honest");
    assert!(!reserve_mib(&held, &honest), "the room is full");
    assert_eq!(share(&honest), 16 * MIB);
    assert!(sixteen.iter().all(|account| share(account) == MIB), "equal parts of their peer's half");
    let told = honest.wait_in_line(16 * MIB, MIB).retry_after;
    progress_for(told, &sixteen).await;
    let got = (0..20).take_while(|_| reserve_mib(&held, &honest)).count();
    assert_eq!(got, 16, "its half");
    let held = held.lock();
    assert!(
        sixteen.iter().all(|account| held[&account.connection()].len() == 1),
        "no tenant lost more than its excess"
    );
}
