//! Identity of a node: a random id, and an epoch that grows with every start.
//!
//! The identity is kept in the data directory, or beside an L3 log.
//!
//! Invariants:
//! - No two starts over the same L3 assign the same generation to puts. A generation begins with
//!   the epoch of the start, and the epoch exceeds the previous one and all generations on L3.
//! - The clock alone never decides. If the previous epoch is unknown or the new one cannot be
//!   stored, the start first reads all generations on L3. The lower half of the first generation is
//!   random, which also keeps starts without any L3 apart.
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
/// Position of the epoch in a generation.
const EPOCH_SHIFT: u32 = 32;

impl Identity {
    /// Identity of a node without a directory: new at every start.
    pub(crate) fn transient(unix_seconds: u64, rng: &mut impl Rng) -> Self {
        Self { node_id: format!("node-{:012x}", rng.random::<u64>() >> 16), epoch: unix_seconds.max(1) }
    }

    pub(crate) fn is_kept(dir: &Path) -> bool {
        dir.join(FILE).is_file()
    }

    /// Reads the identity in `dir`, or makes one, and stores it durably with the next epoch.
    /// Returns `true` with it if there was one.
    ///
    /// The epoch is durable before it is returned. Otherwise a crash could let two starts use the
    /// same generations.
    pub(crate) fn next(dir: &Path, unix_seconds: u64, rng: &mut impl Rng) -> io::Result<(Self, bool)> {
        let path = dir.join(FILE);
        let kept: Option<Self> = match fs::read(&path) {
            Ok(bytes) => Some(serde_json::from_slice(&bytes).map_err(|error| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {error}; remove the file to give the node a new identity", path.display()),
                )
            })?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let is_kept = kept.is_some();
        let mut identity = kept.unwrap_or_else(|| Self { epoch: 0, ..Self::transient(unix_seconds, rng) });
        identity.epoch = identity.epoch.saturating_add(1).max(unix_seconds);
        identity.store(dir)?;
        Ok((identity, is_kept))
    }

    /// Stores the identity durably.
    pub(crate) fn store(&self, dir: &Path) -> io::Result<()> {
        // Write aside, sync, rename, sync the directory: a crash leaves the old file or the new
        // one.
        let staged = dir.join(format!("{FILE}.new"));
        let mut file = fs::File::create(&staged)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&staged, dir.join(FILE))?;
        fs::File::open(dir)?.sync_all()
    }

    /// Raises the epoch above that of `generation`, the largest on L3. Returns `true` if it was not
    /// above it before.
    pub(crate) fn exceed(&mut self, generation: u64) -> bool {
        let is_used = self.epoch <= generation >> EPOCH_SHIFT;
        if is_used {
            self.epoch = (generation >> EPOCH_SHIFT) + 1;
        }
        is_used
    }

    /// Generation of the first put of this start. The epoch fills the upper 32 bits. The lower half
    /// begins in its first half at random, so a start has at least 2³¹ generations.
    pub(crate) fn generation_first(&self, rng: &mut impl Rng) -> u64 {
        self.epoch.saturating_mul(1 << EPOCH_SHIFT).saturating_add(u64::from(rng.random::<u32>() >> 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_grows_even_if_the_file_is_lost_or_the_clock_goes_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = rand::rng();
        let mut next = |seconds| Identity::next(dir.path(), seconds, &mut rng).unwrap().0;
        let first = next(1_800_000_000);
        assert_eq!(first.epoch, 1_800_000_000);
        assert_eq!(next(1_800_000_000).epoch, 1_800_000_001, "twice in a second");
        let back = next(5);
        assert_eq!((back.epoch, &back.node_id), (1_800_000_002, &first.node_id), "the clock went back");
        std::fs::remove_file(dir.path().join(FILE)).unwrap();
        let anew = next(1_800_000_100);
        let mut rng = rand::rng();
        assert!(anew.generation_first(&mut rng) > back.generation_first(&mut rng) && anew.node_id != first.node_id);
    }

    #[test]
    fn epoch_exceeds_every_generation_on_l3() {
        let mut identity = Identity { node_id: "n".into(), epoch: 7 };
        assert!(!identity.exceed((6 << EPOCH_SHIFT) | 99) && identity.epoch == 7);
        let used = (9 << EPOCH_SHIFT) | 5;
        assert!(identity.exceed(used) && identity.generation_first(&mut rand::rng()) > used);
    }
}
