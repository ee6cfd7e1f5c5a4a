//! What CI runs of the simulation. A failure prints the seed and how to replay it.

use larder_sim::faults::Profile;
use larder_sim::run::{Options, SeedReport, Subject, Summary, run_seed, run_seeds};

const SEEDS: u64 = 256;
const OPERATIONS: u64 = 20_000;
const NODE_SEEDS: u64 = 192;
const NODE_OPERATIONS: u64 = 10_000;
const WIRE_SEEDS: u64 = 144;
const WIRE_OPERATIONS: u64 = 2_000;

fn explain(failed: &[SeedReport]) -> String {
    let of = |report: &SeedReport| {
        let (tail, problems) = (report.tail.join("\n  "), report.violations.join("\n  "));
        let (seed, replay) = (report.seed, report.replay());
        format!("seed {seed} ({}):\n  {tail}\n  {problems}\nreplay: larder-sim {replay}", report.profile)
    };
    failed.iter().map(of).collect::<Vec<_>>().join("\n")
}

/// Every kind of fault happened, and the store was of use meanwhile: a run without hits would show nothing.
fn check_coverage(summary: &Summary, least: &[(&str, u64)]) {
    for (what, least) in least {
        assert!(summary.count(what) >= *least, "{what}: {} times, which is too few", summary.count(what));
    }
}

#[test]
fn five_million_operations_and_no_wrong_byte() {
    let least = [
        ("hits", 500_000),
        ("puts acknowledged", 500_000),
        ("forgets acknowledged", 100_000),
        ("cancelled", 20_000),
        ("deadlines passed", 20_000),
        ("evicted pages", 20_000),
        ("segments written anew", 2_000),
        ("pages recovered", 50_000),
        ("pages rescued", 8_000),
        ("pages pinned", 2_000),
        ("pages past their time", 2_000),
        ("pages over a quota", 2_000),
        ("scrubs", 2_000),
        ("segments read by their footer", 2_000),
        ("bad place", 100),
        ("damaged pages", 1_000),
        ("end: torn", 500),
        ("end: unsynced lost", 100),
        ("end: kept", 100),
        ("read error", 500),
        ("short read", 200),
        ("misdirected read", 500),
        ("read flip", 500),
        ("write error", 200),
        ("lost write", 200),
        ("misdirected write", 200),
        ("write flip", 200),
        ("sync error", 200),
        ("disk flip", 500),
        ("no space", 20),
        ("rot", 50),
        ("copied over", 10),
        ("renamed over", 10),
        ("file error", 20),
        ("slow", 100),
        ("stall", 20),
    ];
    let summary = run_seeds(0, SEEDS, None, &Options { operations: OPERATIONS, ..Options::default() });
    assert!(summary.failed.is_empty(), "{}", explain(&summary.failed));
    assert!(summary.seeds == SEEDS && summary.operations >= 5_000_000, "{} operations", summary.operations);
    let Summary { seeds, operations, seconds, counts, .. } = &summary;
    println!("{seeds} seeds, {operations} operations, wrong bytes: 0, {seconds:.0} s: {counts:#?}");
    check_coverage(&summary, &least);
    let durable = summary.count("pages that had to be there");
    assert!(durable > 10_000, "only {durable} pages had to outlive a crash");
}

#[test]
fn a_whole_node_serves_no_wrong_byte_and_keeps_its_bounds() {
    let options = Options { operations: NODE_OPERATIONS, subject: Subject::Node, ..Options::default() };
    let summary = run_seeds(0, NODE_SEEDS, None, &options);
    assert!(summary.failed.is_empty(), "{}", explain(&summary.failed));
    let Summary { seeds, operations, seconds, counts, .. } = &summary;
    println!("node: {seeds} seeds, {operations} operations, wrong bytes: 0, {seconds:.0} s: {counts:#?}");
    assert!(*seeds == NODE_SEEDS && *operations >= NODE_SEEDS * NODE_OPERATIONS, "{operations} operations");
    let least = [
        ("hits in L2", 100_000),
        ("hits on L3", 10_000),
        ("puts stored", 40_000),
        ("puts given up", 3_000),
        ("puts not sealed", 1_000),
        ("already there", 100_000),
        ("in progress", 9_000),
        ("busy", 9_000),
        ("compared", 10_000),
        ("cancelled", 200),
        ("follows to the end", 2_000),
        ("follows of puts given up", 1_000),
        ("waits in vain", 7_000),
        ("forgets acknowledged", 10_000),
        ("forgets not acknowledged", 4_000),
        ("pins", 10_000),
        ("pins refused", 400),
        ("damaged in L2", 1_000),
        ("L2 flip", 1_000),
        ("pages_evicted_l2", 10_000),
        ("pages_expired_l2", 300),
        ("evicted pages", 600),
        ("pages over a quota", 4_000),
        ("pages that had to be there", 2_000),
        ("pages that had to be somewhere", 30_000),
        ("pages that had to reach L3", 600),
        ("pages recovered", 10_000),
        ("devices left out", 70),
        ("broken at the start", 20),
        ("broken for a while", 1_000),
        ("broken for good", 10),
        ("full for a while", 500),
        ("end: torn", 100),
        ("end: unsynced lost", 30),
        ("end: kept", 50),
        ("l3_writes_failed", 4_000),
    ];
    check_coverage(&summary, &least);
}

#[test]
fn clients_and_nodes_over_a_line_that_breaks_and_lies() {
    let options = Options { operations: WIRE_OPERATIONS, subject: Subject::Wire, ..Options::default() };
    let summary = run_seeds(0, WIRE_SEEDS, None, &options);
    assert!(summary.failed.is_empty(), "{}", explain(&summary.failed));
    let Summary { seeds, operations, seconds, counts, .. } = &summary;
    println!("wire: {seeds} seeds, {operations} operations, wrong bytes: 0, {seconds:.0} s: {counts:#?}");
    // Operations that do not divide by the workers are left out.
    assert!(*seeds == WIRE_SEEDS && *operations > WIRE_SEEDS * WIRE_OPERATIONS * 9 / 10, "{operations} operations");
    let least = [
        ("hits in L2", 25_000),
        ("hits on L3", 1_800),
        ("views in place", 5_000),
        ("views copied", 6_000),
        ("views looked at again", 20_000),
        ("pages held", 3_000),
        ("held pages read", 10),
        ("follows to the end", 4_000),
        ("follows of puts given up", 50),
        ("puts stored", 12_000),
        ("puts already there", 2_000),
        ("puts refused", 18_000),
        ("puts in progress", 200),
        ("puts busy", 10),
        ("puts cancelled", 1_000),
        ("puts dropped", 2_000),
        ("forgets complete", 4_000),
        ("forgets not complete", 4_000),
        ("cancelled", 600),
        ("connections", 3_500),
        ("connections in place", 2_000),
        ("pages read at rest", 3_000),
        ("connections refused", 4_000),
        ("node crashes", 300),
        ("nodes closed", 400),
        ("pages recovered", 5_000),
        ("damaged in L2", 50),
        ("L2 flip", 100),
        ("reads of lent memory", 10_000),
        ("lent memory is short", 40),
        ("lent memory from elsewhere", 50),
        ("lent memory changes", 20),
        ("line cut", 300),
        ("line dies", 150),
        ("line broken", 300),
        ("line stalls", 200),
        ("line flips a bit", 200),
        ("line swallows", 200),
        ("line repeats", 300),
        ("line replays", 500),
        ("line swaps", 60),
        ("rdma reads", 3_000),
        ("rdma writes", 2_000),
        ("rdma windows", 5_000),
        ("rdma calls refused", 150),
        ("rdma late", 60),
        ("rdma lost", 20),
        ("rdma pair fails", 15),
        ("rdma stragglers", 20),
        ("rdma flips a bit", 10),
        ("rdma ends early", 6),
    ];
    check_coverage(&summary, &least);
}

#[test]
fn every_seed_replays_exactly() {
    let seeds = 0..2 * Profile::EVERY.len() as u64;
    let all = |seed| [Subject::L3, Subject::Node, Subject::Wire].map(|subject| (seed, subject));
    for (seed, subject) in seeds.flat_map(all) {
        let options = Options { operations: 4_000, subject, ..Options::default() };
        let runs: Vec<SeedReport> = std::thread::scope(|scope| {
            let both = [0, 1].map(|_| scope.spawn(|| run_seed(seed, &options)));
            both.into_iter().map(|run| run.join().unwrap()).collect()
        });
        assert_eq!((runs[0].hash, runs[0].events), (runs[1].hash, runs[1].events), "seed {seed} of {subject:?}");
        assert_eq!(runs[0].counts, runs[1].counts, "seed {seed} of {subject:?}");
    }
}

#[test]
fn other_seeds_are_other_runs() {
    for subject in [Subject::L3, Subject::Node, Subject::Wire] {
        let options = Options { operations: 500, subject, ..Options::default() };
        assert_ne!(run_seed(1, &options).hash, run_seed(7, &options).hash);
    }
}

/// The control: if syncs do nothing, what was durable is lost. (What was forgotten hardly comes back: that durable records
/// are missing is seen at the start, and nothing older is trusted then.)
#[test]
fn syncs_that_do_nothing_are_noticed() {
    for subject in [Subject::L3, Subject::Node] {
        let options =
            Options { operations: 4_000, profile: Some(Profile::Crash), lying_syncs: true, ..Options::default() };
        let summary = run_seeds(0, 20, None, &Options { subject, keep_going: true, ..options });
        let found = |what: &str| summary.failed.iter().any(|report| report.violations.iter().any(|v| v.contains(what)));
        assert!(found("was durable"), "nothing that was durable is lost");
    }
}
