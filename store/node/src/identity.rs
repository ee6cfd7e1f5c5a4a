//! Who a node is: a random name kept in its data directory or beside a log of L3, and an epoch that grows at every start.
//!
//! Always true: no two starts over the same L3 have the same epoch. It is above the one before, and at least the time in
//! seconds, so that it stays above all before even if the file was lost. Puts are numbered from it on.

use rand::Rng;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Name and epoch of this start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) node_id: String,
    pub(crate) epoch: u64,
}

const FILE: &str = "node.json";

impl Identity {
    /// A node without a directory: new at every start.
    pub(crate) fn transient(unix_seconds: u64, chance: &mut impl Rng) -> Self {
        Self { node_id: format!("node-{:012x}", chance.random::<u64>() >> 16), epoch: unix_seconds.max(1) }
    }

    /// Whether `dir` has one.
    pub(crate) fn is_kept(dir: &Path) -> bool {
        dir.join(FILE).is_file()
    }

    /// The identity kept in `dir`, with the next epoch; made anew if there is none. It is durable before it is used.
    pub(crate) fn next(dir: &Path, unix_seconds: u64, chance: &mut impl Rng) -> io::Result<Self> {
        let path = dir.join(FILE);
        let mut identity = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {error}; remove it to start anew", path.display()),
                )
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Self { epoch: 0, ..Self::transient(unix_seconds, chance) }
            }
            Err(error) => return Err(error),
        };
        identity.epoch = identity.epoch.saturating_add(1).max(unix_seconds);
        let staged = dir.join(format!("{FILE}.new"));
        let mut file = fs::File::create(&staged)?;
        file.write_all(&serde_json::to_vec(&identity)?)?;
        file.sync_all()?;
        fs::rename(&staged, &path)?;
        fs::File::open(dir)?.sync_all()?;
        Ok(identity)
    }

    /// Number of the first put of this start.
    pub(crate) fn generation_first(&self) -> u64 {
        self.epoch.saturating_mul(1 << 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_grows_even_if_the_file_is_lost_or_the_clock_stands_still() {
        let dir = tempfile::tempdir().unwrap();
        let mut chance = rand::rng();
        let mut next = |seconds| Identity::next(dir.path(), seconds, &mut chance).unwrap();
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
