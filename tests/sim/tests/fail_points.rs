//! Negative controls of the simulation: each fail point is a known defect that some seed must
//! expose.
//!
//! Two defects have no fail point:
//! - Returning a slot while the device writes from it. Safe Rust excludes it: a request owns its
//!   memory until the device completes it.
//! - A footer that lists records which are not durable. Reads verify every record, so it costs
//!   misses of pages that the crash lost anyway.
#![cfg(feature = "fail-points")]

use larder_runtime::fail::with;
use larder_sim::faults::Profile;
use larder_sim::run::{Options, Scope, SeedReport, run_seed};
use std::collections::BTreeSet;
use std::path::Path;

/// Deliberate defect, and the fault profile that exposes it. The simulation must report a violation
/// within [`SEEDS_MAX`] seeds.
struct FailPoint {
    name: &'static str,
    defect: &'static str,
    /// `None` if the profiles that seeds cycle through expose it.
    profile: Option<Profile>,
    /// Words of the violation that must report it: a control of one oracle. `None` if any will do.
    violation: Option<&'static str>,
}

const fn any(name: &'static str, defect: &'static str) -> FailPoint {
    FailPoint { name, defect, profile: None, violation: None }
}

const fn crash(name: &'static str, defect: &'static str) -> FailPoint {
    FailPoint { name, defect, profile: Some(Profile::Crash), violation: None }
}

const fn errors(name: &'static str, defect: &'static str) -> FailPoint {
    FailPoint { name, defect, profile: Some(Profile::Errors), violation: None }
}

const fn calm(name: &'static str, defect: &'static str, violation: &'static str) -> FailPoint {
    FailPoint { name, defect, profile: Some(Profile::Calm), violation: Some(violation) }
}

const LOG: [FailPoint; 31] = [
    any("log.read-skips-checksum", "A read does not verify the checksums of the page."),
    any("log.index-ignores-namespace", "The index finds a page by its key alone, without its namespace."),
    any("log.index-exceeds-page-bound", "A full index does not make the log reclaim segments."),
    any("log.read-skips-identity", "A read does not verify that the record belongs to the requested page."),
    any("log.acknowledge-before-write", "A write is acknowledged when it is submitted to the device."),
    any("log.visible-before-write", "A page is visible before its write has completed."),
    any("log.reuse-segment-under-read", "A segment is reused while reads of it are in flight."),
    any("log.reuse-segment-under-write", "A segment is reused while writes to it are in flight."),
    any("log.forget-writes-no-tombstone", "A forget writes no tombstone."),
    any("log.forget-skips-sync", "A forget does not wait for the sync of its tombstones."),
    any("log.recovery-ignores-tombstones", "Recovery ignores tombstones."),
    any("log.forget-misses-write-in-flight", "A page that is forgotten during its write becomes visible."),
    any("log.damage-needs-no-tombstone", "A forget writes no tombstone for a page that was dropped as damaged."),
    crash(
        "log.record-before-durable-header",
        "The first record of a segment is written before the segment header is durable.",
    ),
    any("log.segment-epoch-reused", "Two prepared segments get the same epoch."),
    any("log.reclaim-newest-segment", "The log reclaims the newest segment instead of the oldest."),
    any("log.older-record-replaces-newer", "Recovery replaces a newer record of a page with an older one."),
    errors("log.failed-sync-counts", "A failed sync counts as successful."),
    any("log.no-background-sync", "No background task syncs the log."),
    any("log.abandoned-read-leaks", "A cancelled read is never ended."),
    any("log.one-segment-over-capacity", "The log creates one segment more than its capacity allows."),
    any("log.footer-omits-tombstones", "Segment footers do not list tombstones."),
    any(
        "log.copy-forward-after-forget",
        "Reclaim copies a page forward although it was forgotten or replaced in the meantime.",
    ),
    any("log.torn-copy-hides-original", "Recovery serves a torn copy although its original is intact."),
    errors(
        "log.forget-trusts-incomplete-index",
        "A forget trusts the index although recovery could not read a segment to its end.",
    ),
    errors(
        "log.trust-below-truncated-segment",
        "Recovery serves pages that are older than a segment it could not read to its end.",
    ),
    any("log.serve-expired", "The log does not check the expiry of a page."),
    errors("log.headerless-segment-is-empty", "Recovery treats a segment without a header as empty."),
    errors(
        "log.renamed-segment-not-missed",
        "Recovery trusts older records although the segment that a renamed file came from is missing.",
    ),
    errors(
        "log.overwritten-segment-not-missed",
        "Recovery trusts older records although a misplaced file may have replaced a segment.",
    ),
    errors("log.hole-is-torn-write", "Recovery treats a hole in the durable part of a segment as a torn write."),
];

const NODE: [FailPoint; 24] = [
    any("node.seal-incomplete-page", "A put is sealed although parts are missing."),
    any("node.accept-damaged-part", "A part becomes visible although its bytes do not match its checksums."),
    any("node.second-writer-replaces", "A put of a page that is present is accepted."),
    any("node.epoch-follows-clock", "The epoch of a start is the clock's, although an earlier one was larger."),
    any("node.epoch-ignores-l3", "A start without a known epoch ignores the generations on L3."),
    any("node.epoch-stored-early", "An epoch is stored before it exceeds the generations on L3."),
    any("node.open-puts-ignore-namespace", "An open put blocks puts of the same key in other namespaces."),
    any("node.aborted-put-leaks-reservation", "An aborted put does not return its reserved memory."),
    any("node.cancelled-follower-leaks", "A follower that stopped waiting is still counted."),
    any("node.forget-keeps-l2", "A forget leaves the copy in L2."),
    any("node.forget-misses-page-in-writeback", "A forget ignores a page that is being written to L3."),
    any("node.forget-skips-device", "A forget skips one of several devices."),
    errors("node.forget-ignores-unopened-device", "A forget succeeds although a device could not be opened."),
    any("node.load-after-forget", "A page that was forgotten during its read from L3 enters L2."),
    any("node.write-back-drops-dirty", "Write-back drops dirty pages instead of writing them."),
    any("node.shutdown-keeps-dirty", "Shutdown does not write dirty pages to L3."),
    any("node.gap-before-written", "A page evicted from L2 is in no tier until its write to L3 has completed."),
    any("node.serve-evicted", "L2 still serves pages that it has evicted."),
    any("node.recheck-keeps-damaged", "L2 keeps a page that a reader reported as damaged."),
    any("node.compare-skips-bytes", "A second put reports that its bytes are stored, without comparing them."),
    any("node.serve-expired", "L2 serves expired pages."),
    any("node.ignore-quota", "L2 ignores quotas."),
    any("node.pins-never-expire", "Pins never expire."),
    any("node.lookup-misses-now-and-then", MISSES_NOW_AND_THEN),
];

const WIRE: [FailPoint; 48] = [
    any("wire.accept-damaged-frame", "A frame is accepted without verifying its checksum."),
    any("wire.accept-out-of-order-frame", "A frame is accepted without verifying its sequence number."),
    any("client.get-skips-checksum", "The client returns a page without verifying its checksums."),
    any(
        "client.release-before-read",
        "The client releases a page in shared memory as soon as the node sends its location.",
    ),
    any("client.no-payload-deadline", "The client waits for an announced payload without a deadline."),
    any("client.deadline-ends-connection", "A deadline within a payload ends the connection."),
    any("client.silence-counts-frames", "Only whole responses count as signs of life of a node."),
    any("client.forget-only-owner", "The client sends a forget to the owner of a page only."),
    any(
        "client.forget-ignores-absent-node",
        "The client reports a forget as complete although a node is not connected.",
    ),
    any("client.send-budget-leaks", "Sent bytes still count against the send queue."),
    any("node.accept-damaged-wire-part", "A received part is accepted although its bytes do not match its checksums."),
    any(
        "node.accept-damaged-shared-part",
        "A part in shared client memory is accepted although its bytes do not match its checksums.",
    ),
    any(
        "node.holds-end-with-connection",
        "The node releases pages that a client still reads in place when the connection ends.",
    ),
    any("node.ignore-release", "The node ignores releases."),
    any("node.lease-never-ends", "A lease lasts as long as its connection."),
    any("node.cancel-keeps-puts", "A cancelled request leaves its puts open."),
    any("node.puts-outlive-connection", "Open puts survive the end of their connection."),
    any(
        "node.location-without-hold",
        "The node sends the location of a page in shared memory without holding the page.",
    ),
    any("node.range-returns-other-chunks", "A range read returns other chunks of the page."),
    any("client.range-skips-checksum", "The client returns a range without verifying its checksums."),
    any("node.serve-forgotten-held", "The node serves a forgotten page from a hold."),
    any("node.silent-writer-keeps-room", "Silent writers keep their room while others wait for it."),
    any("node.idle-put-judged-alone", "A put without bytes is aborted while its writer sends those of another one."),
    any("node.line-forgets-callers", "A refused caller gets no place in the line."),
    any("node.time-told-too-short", "A refused caller is told to return at once."),
    any("node.refused-reads-told-together", "Refused reads of a connection are told to return at the same time."),
    any("node.read-told-too-short", "A refused read is told to return at once."),
    any("node.read-charge-leaks", "Sent bytes still count against the read budget."),
    any(
        "rdma.memory-returned-on-disconnect",
        "Memory is returned when a connection ends, although a device may still access it.",
    ),
    any("rdma.memory-returned-before-invalidate", "Memory is returned before its remote key was invalidated."),
    any("rdma.grant-never-withdrawn", "Withdrawn remote grants stay usable."),
    any("client.release-before-rdma-read", "The client releases a page before its RDMA read has completed."),
    any("client.cancel-under-rdma-write", "The client cancels a put while RDMA writes of its parts are in flight."),
    any("client.copy-ignores-node-run", "The client states the generation of a copy to a node that did not give it."),
    any("node.reserve-ignores-copy-condition", "The node takes a copy of a page that was forgotten since."),
    any("node.forget-records-late", "A forget takes its generation after its tombstones."),
    any("node.rdma-progress-ignored", "The node takes a client for silent that reads or writes by RDMA."),
    any("node.get-misses-l3", "A page that is only on L3 is a miss."),
    any("node.range-misses-l3", "A range of a page that is only on L3 is a miss."),
    any("node.follow-ends-early", "A follow ends when no part lands for 5 s."),
    any("client.view-misses-held-page", "A view of a page in the memory of the node is a miss."),
    any("client.hedge-gives-up-begun-page", "A hedged get gives up a page that is arriving."),
    any("client.put-ends-between-parts", "A put ends when its caller passes no part for 2 s."),
    any("client.copy-states-no-generation", "A put of a copy states no generation, so the node must refuse it."),
    any("client.pool-keeps-ended-connection", "The client still uses a further connection that has ended."),
    any("node.full-holds-are-a-miss", "A page in place is a miss when the node holds too many, instead of a copy."),
    any("node.warm-misses-l3", "A warm does not read a page that is only on L3."),
    // Checks of an idle cluster find it too. This one must be found while the workload runs.
    calm("node.lookup-misses-now-and-then", MISSES_NOW_AND_THEN, "which was there all the time"),
];

const MISSES_NOW_AND_THEN: &str = "One lookup in 25 does not find a page in L2.";

fn operations(scope: Scope) -> u64 {
    if scope == Scope::Wire { 2_500 } else { 12_000 }
}

/// Variable that restricts the search to the fail points whose names contain its value.
const ONLY: &str = "LARDER_FAIL_POINT";
/// Variable with a number N: one in N fail points is searched for, and one in N control seeds runs.
const EVERY: &str = "LARDER_FAIL_POINT_EVERY";
const SEEDS_MAX: u64 = 500;
/// Number of seeds without a defect, which must all pass. A simulation that reports violations
/// everywhere would prove nothing.
const CONTROL_SEEDS: u64 = 96;

fn seed(number: u64, scope: Scope, profile: Option<Profile>) -> SeedReport {
    run_seed(number, &Options { operations: operations(scope), scope, profile, ..Options::default() })
}

fn search(point: &FailPoint, scope: Scope) -> Option<(u64, String)> {
    (0..SEEDS_MAX).find_map(|number| {
        let report = with(point.name, || seed(number, scope, point.profile));
        let reports_it = |violation: &String| point.violation.is_none_or(|words| violation.contains(words));
        Some((number + 1, report.violations.into_iter().find(reports_it)?))
    })
}

fn run_all<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
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

fn every() -> usize {
    let Ok(value) = std::env::var(EVERY) else { return 1 };
    let every = value.parse().unwrap_or(0);
    assert!(every > 0, "{EVERY} must be a whole number from 1 up, not {value:?}");
    every
}

fn find_all(points: &[FailPoint], scope: Scope) {
    let only = std::env::var(ONLY).unwrap_or_default();
    let points = points.iter().filter(|point| point.name.contains(&only));
    let points: Vec<&FailPoint> = points.step_by(every()).collect();
    let found = run_all(&points, |point| search(point, scope));
    let mut missed = Vec::new();
    for (point, found) in points.iter().zip(&found) {
        match found {
            Some((seeds, how)) => {
                println!("{:<40} {seeds:>3} seeds: {}", point.name, how.get(..90).unwrap_or(how))
            }
            None => {
                println!("{} MISSED: {}", point.name, point.defect);
                missed.push(point.name);
            }
        }
    }
    assert!(missed.is_empty(), "{SEEDS_MAX} seeds did not expose these fail points: {missed:?}");
}

#[test]
fn fail_points_of_the_log_are_found() {
    find_all(&LOG, Scope::L3);
}

#[test]
fn fail_points_of_the_node_are_found() {
    find_all(&NODE, Scope::Node);
}

#[test]
fn fail_points_of_client_and_wire_are_found() {
    find_all(&WIRE, Scope::Wire);
}

#[test]
fn no_violation_without_a_fail_point() {
    // Some fail points need a forced profile. Those profiles must pass without a defect as well.
    const FORCED: [(Scope, Profile); 3] =
        [(Scope::L3, Profile::Crash), (Scope::L3, Profile::Errors), (Scope::Wire, Profile::Calm)];
    let runs = |number| {
        let forced = FORCED.into_iter().filter(move |_| number < CONTROL_SEEDS / 4);
        let forced = forced.map(move |(scope, profile)| (number, scope, Some(profile)));
        forced.chain([Scope::L3, Scope::Node, Scope::Wire].map(|scope| (number, scope, None)))
    };
    let seeds: Vec<_> = (0..CONTROL_SEEDS / every() as u64).flat_map(runs).collect();
    for ((_, scope, profile), report) in
        seeds.iter().zip(run_all(&seeds, |&(number, scope, profile)| seed(number, scope, profile)))
    {
        let run = format!("seed {}, {scope:?}, profile {profile:?}", report.seed);
        assert!(report.violations.is_empty(), "{run}: {:?}", report.violations);
    }
}

/// The list and the `fail_point!` uses in the source code must name the same fail points.
#[test]
fn list_matches_the_source_code() {
    let mut found = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../../store")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let uses = text.split("fail_point!(\"").skip(1);
                found.extend(uses.filter_map(|rest| Some(rest.split_once('"')?.0.to_string())));
            }
        }
    }
    let listed = LOG.iter().chain(&NODE).chain(&WIRE).map(|point| point.name.to_string()).collect();
    assert_eq!(found, listed);
}
