//! Whether the simulation would find bugs: each is planted, and must be found within so many seeds.
//!
//! Not planted, as safe code cannot have it: a slot that is given back while the device writes from it. A request owns
//! its memory, and only its answer gives it back. Nor a footer that lists what is not durable: reading verifies what
//! the footer names, so that it costs misses of pages that a crash took anyway.
#![cfg(feature = "planted")]

use larder_core::planted::{Bug, with};
use larder_sim::faults::Profile;
use larder_sim::run::{Options, SeedReport, Subject, run_seed};

fn operations(subject: Subject) -> u64 {
    if subject == Subject::Wire { 2_500 } else { 12_000 }
}

/// No bug may take more seeds.
const SEEDS_MAX: u64 = 500;
/// Seeds without a bug.
const CONTROL_SEEDS: u64 = 96;

fn seed(number: u64, subject: Subject, profile: Option<Profile>) -> SeedReport {
    run_seed(number, &Options { operations: operations(subject), subject, profile, ..Options::default() })
}

/// Bugs that show only with certain faults are looked for where these happen.
fn profile(bug: Bug) -> Option<Profile> {
    match bug {
        Bug::HeaderNotSynced => Some(Profile::Crash),
        Bug::FailedSyncCounts
        | Bug::BlindForgets
        | Bug::TrustsCutShort
        | Bug::LeftOutForgets
        | Bug::HeadlessIsNothing
        | Bug::RenamedIsNotMissed
        | Bug::ReplacedIsNotMissed
        | Bug::HolesAreTorn => Some(Profile::Errors),
        _ => None,
    }
}

/// Seeds until the bug is found, and what was seen first.
fn search(bug: Bug, subject: Subject) -> Option<(u64, String)> {
    (0..SEEDS_MAX).find_map(|number| {
        let report = with(bug, || seed(number, subject, profile(bug)));
        Some((number + 1, report.violations.into_iter().next()?))
    })
}

/// Runs `work` for each of `items`, on all cores; the results in their order.
fn each<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let turn = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, work(item)));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(turn)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, result)| result).collect()
}

fn find_all(bugs: &[Bug], subject: Subject) {
    let found = each(bugs, |&bug| search(bug, subject));
    let mut missed = Vec::new();
    for (bug, found) in bugs.iter().zip(&found) {
        match found {
            Some((seeds, how)) => {
                println!("{:<26} {seeds:>3} seeds: {}", format!("{bug:?}"), how.get(..90).unwrap_or(how))
            }
            None => {
                println!("{bug:?} not found");
                missed.push(bug);
            }
        }
    }
    assert!(missed.is_empty(), "not found within {SEEDS_MAX} seeds: {missed:?}");
}

#[test]
fn every_bug_planted_in_the_core_is_found() {
    find_all(&Bug::CORE, Subject::L3);
}

#[test]
fn every_bug_planted_in_the_node_is_found() {
    find_all(&Bug::NODE, Subject::Node);
}

#[test]
fn every_bug_planted_between_client_and_node_is_found() {
    find_all(&Bug::WIRE, Subject::Wire);
}

#[test]
fn without_a_bug_nothing_is_found() {
    // The core with the faults that some are looked for with, too.
    let runs = |number| {
        let forced = [Profile::Crash, Profile::Errors].into_iter().filter(move |_| number < CONTROL_SEEDS / 4);
        let forced = forced.map(move |profile| (number, Subject::L3, Some(profile)));
        forced.chain([Subject::L3, Subject::Node, Subject::Wire].map(|subject| (number, subject, None)))
    };
    let seeds: Vec<_> = (0..CONTROL_SEEDS).flat_map(runs).collect();
    for ((_, subject, profile), report) in
        seeds.iter().zip(each(&seeds, |&(number, subject, profile)| seed(number, subject, profile)))
    {
        let run = format!("seed {}, {subject:?}, profile {profile:?}", report.seed);
        assert!(report.violations.is_empty(), "{run}: {:?}", report.violations);
    }
}
