//! Faults of the network, and bytes to compare.

use std::process::Command;

fn tc(arguments: &str) {
    for device in ["ve0", "ve1"] {
        let arguments = arguments.replace("DEV", device);
        let status = Command::new("tc").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "tc {arguments}");
    }
}

/// A fault of the network (tc-netem) that lasts until this is dropped.
pub struct NetworkFault;

impl NetworkFault {
    pub fn new(netem: &str) -> NetworkFault {
        tc(&format!("qdisc add dev DEV root netem {netem}"));
        NetworkFault
    }

    pub fn packets_lost(&self) -> u64 {
        let output = Command::new("tc").args(["-s", "qdisc", "show"]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let mut words = said.split_whitespace();
        let mut lost = 0;
        while words.any(|word| word == "(dropped") {
            lost += words.next().unwrap().trim_end_matches(',').parse::<u64>().unwrap();
        }
        lost
    }
}

impl Drop for NetworkFault {
    fn drop(&mut self) {
        tc("qdisc del dev DEV root");
    }
}

pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Fails with the place of the first difference. `assert_eq` would print megabytes.
#[track_caller]
pub fn assert_bytes(found: impl AsRef<[u8]>, expected: Vec<u8>, what: &str) {
    let found = found.as_ref();
    let same = found.iter().zip(&expected).take_while(|(left, right)| left == right).count();
    assert!(same == found.len() && same == expected.len(), "differs at byte {same} of {}: {what}", expected.len());
}
