//! Negative controls: the model detects broken environments, and exercises what it is meant to.

use super::*;

fn cases() -> impl Iterator<Item = Vec<Step>> {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    std::iter::from_fn(move || Some(steps().new_tree(&mut runner).unwrap().current()))
}

/// Runs the negative controls: the model must detect each of them.
#[test]
fn model_detects_broken_environments() {
    for control in [Control::IgnoredSyncs, Control::NoTombstonesInFooters, Control::NoCopies, Control::Backwards] {
        let noticed = cases().take(3000).position(|steps| run(&steps, control).is_err());
        println!("{control:?}: noticed in case {noticed:?}");
        assert!(noticed.is_some(), "{control:?}");
    }
}

#[cfg(feature = "fail-points")]
#[test]
fn model_detects_trusted_damage() {
    use larder_runtime::fail::with;
    for bug in ["log.headerless-segment-is-empty", "log.hole-is-torn-write"] {
        let noticed = cases().take(20_000).position(|steps| with(bug, || run(&steps, Control::None).is_err()));
        println!("{bug:?}: noticed in case {noticed:?}");
        assert!(noticed.is_some(), "{bug:?}");
    }
}

/// The model proves something only if the cases exercise copies, footers and damage.
#[test]
fn model_exercises_copies_footers_and_rot() {
    let (mut copied, mut footers, mut rotted) = (0, 0, 0);
    for steps in cases().take(400) {
        let model = run(&steps, Control::None).unwrap();
        copied += model.copies.len();
        footers += model.footers_found;
        rotted += model.rotted;
    }
    let happened = format!("{copied} pages copied, {footers} footers found, {rotted} headers rotted");
    println!("{happened}");
    assert!(copied > 20 && footers > 50 && rotted > 50, "{happened}");
}
