//! Identity of a node: a random id, and an epoch that grows with every start.
//!
//! The identity is kept in the data directory, or beside an L3 log.
//!
//! Invariant: no two starts over the same L3 have the same epoch. The epoch exceeds the previous
//! one. It is also at least the time in seconds, so it keeps growing if the file is lost.
//! Generations of puts start from it.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the simulation passes identities in and never reads this file"
)]

use rand::Rng;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) node_id: String,
    pub(crate) epoch: u64,
}

const FILE: &str = "node.json";

impl Identity {
    /// Identity of a node without a directory: new at every start.
    pub(crate) fn transient(unix_seconds: u64, rng: &mut impl Rng) -> Self {
        Self { node_id: format!("node-{:012x}", rng.random::<u64>() >> 16), epoch: unix_seconds.max(1) }
    }

    pub(crate) fn is_kept(dir: &Path) -> bool {
        dir.join(FILE).is_file()
    }

    /// Reads the identity in `dir`, or makes one, and stores it durably with the next epoch.
    ///
    /// The epoch is durable before it is returned. Otherwise a crash could let two starts use the
    /// same generations.
    pub(crate) fn next(dir: &Path, unix_seconds: u64, rng: &mut impl Rng) -> io::Result<Self> {
        let path = dir.join(FILE);
        let mut identity = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {error}; remove the file to give the node a new identity", path.display()),
                )
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Self { epoch: 0, ..Self::transient(unix_seconds, rng) }
            }
            Err(error) => return Err(error),
        };
        identity.epoch = identity.epoch.saturating_add(1).max(unix_seconds);
        // Write aside, sync, rename, sync the directory: a crash leaves the old file or the new
        // one.
        let staged = dir.join(format!("{FILE}.new"));
        let mut file = fs::File::create(&staged)?;
        file.write_all(&serde_json::to_vec(&identity)?)?;
        file.sync_all()?;
        fs::rename(&staged, &path)?;
        fs::File::open(dir)?.sync_all()?;
        Ok(identity)
    }

    /// Generation of the first put of this start. The epoch fills the upper 32 bits, so a start has
    /// 2³² generations.
    pub(crate) fn generation_first(&self) -> u64 {
        self.epoch.saturating_mul(1 << 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_grows_even_if_the_file_is_lost_or_the_clock_goes_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = rand::rng();
        let mut next = |seconds| Identity::next(dir.path(), seconds, &mut rng).unwrap();
        let first = next(1_800_000_000);
        assert_eq!(first.epoch, 1_800_000_000);
        assert_eq!(next(1_800_000_000).epoch, 1_800_000_001, "twice in a second");
        let back = next(5);
        assert_eq!((back.epoch, &back.node_id), (1_800_000_002, &first.node_id), "the clock went back");
        std::fs::remove_file(dir.path().join(FILE)).unwrap();
        let anew = next(1_800_000_100);
        assert!(anew.generation_first() > back.generation_first() && anew.node_id != first.node_id);
    }
}
