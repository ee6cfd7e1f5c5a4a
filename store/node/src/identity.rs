//! Identity of a node: a random id, and an epoch that grows with every start.
//!
//! The identity is kept in the data directory, or beside each L3 log.
//!
//! Invariants:
//! - No two starts over the same L3 assign the same generation to puts. A generation begins with
//!   the epoch of the start, and the epoch exceeds the previous one and all generations on L3.
//! - The clock alone never decides. If a directory does not tell its epoch or cannot store the new
//!   one, the start first reads all generations on L3. The lower half of the first generation is
//!   random, which also keeps starts without any L3 apart.
//! - A log gets pages only of a start whose identity lies beside it. Otherwise a later start could
//!   have the same epoch, if the clock goes back.
//! - An epoch is at most [`EPOCH_MAX`]: generations do not wrap and do not saturate.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the simulation passes identities in and never reads this file"
)]

use rand::Rng;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) node_id: String,
    pub(crate) epoch: u64,
}

/// Result of [`Identity::next`].
#[derive(Debug)]
pub(crate) struct NextIdentity {
    pub(crate) identity: Identity,
    /// Directories that store it.
    pub(crate) stored_in: Vec<PathBuf>,
    /// `true` if every directory told its epoch, and stores the new one.
    pub(crate) is_continued: bool,
    pub(crate) errors: Vec<(PathBuf, io::Error)>,
}

const FILE: &str = "node.json";
/// Position of the epoch in a generation.
const EPOCH_SHIFT: u32 = 32;
/// Largest epoch that a generation can begin with. As seconds it is the year 2106.
const EPOCH_MAX: u64 = u32::MAX as u64;

/// No epoch is left above a generation on L3.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoEpochLeft;

impl Identity {
    /// Identity of a node without a directory: new at every start.
    pub(crate) fn transient(unix_seconds: u64, rng: &mut impl Rng) -> Self {
        let node_id = format!("node-{:012x}", rng.random::<u64>() >> 16);
        Self { node_id, epoch: epoch_of_clock(unix_seconds) }
    }

    /// Makes the identity of the next start, and stores it durably in all directories. Its epoch
    /// exceeds the largest one found. Its name is that of the first directory that has one. A
    /// directory whose identity cannot be read is left as it is.
    ///
    /// The epoch is durable before it is returned. Otherwise a crash could let two starts use the
    /// same generations.
    pub(crate) fn next(dirs: &[&Path], unix_seconds: u64, rng: &mut impl Rng) -> NextIdentity {
        let mut errors = Vec::new();
        let mut readable = Vec::new();
        let mut kept = Vec::new();
        for dir in dirs {
            match fs::create_dir_all(dir).and_then(|()| Self::read(dir)) {
                Ok(found) => {
                    readable.push(*dir);
                    kept.extend(found);
                }
                Err(error) => errors.push((dir.to_path_buf(), error)),
            }
        }
        let epoch = kept.iter().map(|found| found.epoch).max().unwrap_or(0);
        // A directory without an identity may have a log all the same.
        let are_all_known = !dirs.is_empty() && kept.len() == dirs.len();
        let named = kept.into_iter().next().unwrap_or_else(|| Self::transient(unix_seconds, rng));
        // `read` accepts no epoch without a next one.
        let identity = Self { epoch: (epoch + 1).max(epoch_of_clock(unix_seconds)), ..named };
        let mut stored_in = Vec::new();
        for dir in readable {
            match identity.store(dir) {
                Ok(()) => stored_in.push(dir.to_path_buf()),
                Err(error) => errors.push((dir.to_path_buf(), error)),
            }
        }
        let is_continued = are_all_known && errors.is_empty();
        NextIdentity { identity, stored_in, is_continued, errors }
    }

    fn read(dir: &Path) -> io::Result<Option<Self>> {
        let path = dir.join(FILE);
        let unusable = |reason: String| {
            let text = format!("{}: {reason}; remove the file to give the node a new identity", path.display());
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let found: Self = serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))?;
        if found.epoch >= EPOCH_MAX {
            return Err(unusable(format!("no epoch is left after {}", found.epoch)));
        }
        Ok(Some(found))
    }

    /// Stores the identity durably.
    pub(crate) fn store(&self, dir: &Path) -> io::Result<()> {
        store_durably(dir, FILE, &serde_json::to_vec(self)?)
    }

    /// Raises the epoch above that of `generation`, the largest on L3. Returns `true` if it was not
    /// above it before.
    pub(crate) fn exceed(&mut self, generation: u64) -> Result<bool, NoEpochLeft> {
        let used = generation >> EPOCH_SHIFT;
        if self.epoch > used {
            return Ok(false);
        }
        if used >= EPOCH_MAX {
            return Err(NoEpochLeft);
        }
        self.epoch = used + 1;
        Ok(true)
    }

    /// Generation of the first put of this start. The epoch fills the upper 32 bits. The lower half
    /// begins in its first half at random, so a start has at least 2³¹ generations.
    pub(crate) fn generation_first(&self, rng: &mut impl Rng) -> u64 {
        (self.epoch << EPOCH_SHIFT) + u64::from(rng.random::<u32>() >> 1)
    }
}

/// Replaces a file of `dir` durably. A crash leaves the old file or the new one.
pub(crate) fn store_durably(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    // Write aside, sync, rename, sync the directory.
    let staged = dir.join(format!("{name}.new"));
    let mut file = fs::File::create(&staged)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&staged, dir.join(name))?;
    fs::File::open(dir)?.sync_all()
}

/// Epoch of a start at this time. A clock without a usable time says nothing: the epoch then only
/// counts on.
fn epoch_of_clock(unix_seconds: u64) -> u64 {
    if (1..EPOCH_MAX).contains(&unix_seconds) { unix_seconds } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_grows_even_if_the_file_is_lost_or_the_clock_goes_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = rand::rng();
        let mut next = |seconds| Identity::next(&[dir.path()], seconds, &mut rng).identity;
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
    fn largest_epoch_counts_and_an_unreadable_directory_leaves_it_unknown() {
        let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let dirs = [one.path(), two.path()];
        let mut rng = rand::rng();
        let first = Identity::next(&dirs, 100, &mut rng);
        assert!(!first.is_continued && first.errors.is_empty());
        assert_eq!(first.stored_in, dirs);
        // The first device misses a start.
        let missed = Identity::next(&dirs[1..], 500, &mut rng);
        let third = Identity::next(&dirs, 7, &mut rng);
        assert!(missed.is_continued && third.is_continued);
        assert_eq!((third.identity.epoch, &third.identity.node_id), (501, &first.identity.node_id));
        // A file that cannot be read may have a larger epoch.
        std::fs::remove_file(two.path().join(FILE)).unwrap();
        std::fs::create_dir(two.path().join(FILE)).unwrap();
        let unknown = Identity::next(&dirs, 7, &mut rng);
        assert_eq!((unknown.is_continued, unknown.errors.len(), unknown.identity.epoch), (false, 1, 502));
        assert_eq!(unknown.stored_in, dirs[..1]);
        std::fs::write(one.path().join(FILE), "{").unwrap();
        let damaged = Identity::next(&dirs, 7, &mut rng);
        assert!(!damaged.is_continued && damaged.stored_in.is_empty());
        assert_eq!(std::fs::read(one.path().join(FILE)).unwrap(), b"{", "it is left to the operator");
    }

    #[test]
    fn epoch_exceeds_every_generation_on_l3() {
        let mut identity = Identity { node_id: "n".into(), epoch: 7 };
        assert!(identity.exceed((6 << EPOCH_SHIFT) | 99) == Ok(false) && identity.epoch == 7);
        let used = (9 << EPOCH_SHIFT) | 5;
        assert_eq!(identity.exceed(used), Ok(true));
        assert!(identity.generation_first(&mut rand::rng()) > used);
    }

    #[test]
    fn epochs_do_not_saturate_and_the_last_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = rand::rng();
        let mut next = |seconds| Identity::next(&[dir.path()], seconds, &mut rng);
        assert_eq!(next(u64::MAX).identity.epoch, 1, "the clock is wrong");
        assert_eq!(next(1 << 40).identity.epoch, 2);
        let last = next(EPOCH_MAX - 1);
        assert_eq!(last.identity.epoch, EPOCH_MAX - 1);
        let mut other = Identity { epoch: EPOCH_MAX - 2, ..last.identity.clone() };
        assert!(last.identity.generation_first(&mut rand::rng()) > other.generation_first(&mut rand::rng()));
        assert!(next(5).is_continued, "one is left");
        let beyond = next(5);
        assert!(!beyond.is_continued && beyond.stored_in.is_empty() && beyond.errors.len() == 1, "{beyond:?}");
        assert_eq!(other.exceed(u64::MAX), Err(NoEpochLeft));
    }
}
