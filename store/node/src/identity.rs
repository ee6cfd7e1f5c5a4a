//! Identity of a node: a random id, and an epoch that grows with every start.
//!
//! The identity is kept in [places](IdentityPlace): the data directory, or beside each L3 log.
//!
//! Invariants:
//! - No two starts over the same L3 assign the same generation to puts. A generation begins with
//!   the epoch of the start, and the epoch exceeds the previous one and all generations on L3.
//! - The clock alone never decides. If a place does not tell its epoch, the start first reads all
//!   generations on L3. The lower half of the first generation is random, which also keeps starts
//!   without any L3 apart.
//! - A stored epoch exceeds all generations on L3 of that time.
//! - A log gets pages only of a start whose identity lies beside it. Otherwise a later start could
//!   have the same epoch, if the clock goes back.
//! - An epoch is at most [`EPOCH_MAX`]: generations do not wrap and do not saturate.
//! - A start gives no generation above those of the stored epoch. Before they end, it stores a
//!   larger one: see `ahead`.

mod ahead;
mod directory;

use crate::devices::Devices;
use crate::node::NodeError;
pub(crate) use ahead::keep_ahead;
pub(crate) use directory::{IdentityDirectory, store_durably};
use larder_runtime::fail_point;
use rand::Rng;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub node_id: String,
    pub epoch: u64,
}

/// Durable storage of one identity. The simulation brings its own.
pub trait IdentityPlace {
    /// Directory of the place.
    fn dir(&self) -> &Path;
    /// Stored bytes, or `None` if there are none.
    fn load(&self) -> io::Result<Option<Vec<u8>>>;
    /// Replaces the stored bytes, atomically and durably.
    fn store(&self, bytes: &[u8]) -> io::Result<()>;
}

/// Identity of a start, before the generations on L3 are known. Nothing is stored yet.
#[derive(Debug)]
pub struct NextIdentity<P> {
    identity: Identity,
    /// Places whose content is known. Once the identity is stored, those that have it.
    readable: Vec<P>,
    /// `true` if every place told its epoch.
    is_continued: bool,
    errors: PlaceErrors,
}

/// Directories of the places that do not have the identity, and the reasons.
pub type PlaceErrors = Vec<(PathBuf, io::Error)>;

/// Name of the file that keeps the identity.
const FILE: &str = "node.json";
/// Position of the epoch in a generation.
const EPOCH_SHIFT: u32 = 32;
/// Largest epoch that a generation can begin with. As seconds it is the year 2106.
const EPOCH_MAX: u64 = u32::MAX as u64;

/// No epoch is left above a generation on L3.
#[derive(Debug, PartialEq, Eq)]
struct NoEpochLeft;

impl<P: IdentityPlace> NextIdentity<P> {
    /// Makes the identity of the next start. Its epoch exceeds the largest one found. Its name is
    /// that of the first place that has one.
    pub fn new(places: Vec<P>, unix_seconds: u64, rng: &mut impl Rng) -> Self {
        let count = places.len();
        let mut errors = Vec::new();
        let mut readable = Vec::new();
        let mut kept = Vec::new();
        for place in places {
            match Identity::read(&place) {
                Ok(found) => {
                    readable.push(place);
                    kept.extend(found);
                }
                Err(error) => errors.push((place.dir().to_path_buf(), error)),
            }
        }
        let ignores_kept = fail_point!("node.epoch-follows-clock");
        let epoch = kept.iter().map(|found| found.epoch).max().filter(|_| !ignores_kept).unwrap_or(0);
        // A place without an identity may have a log all the same.
        let is_continued = count > 0 && kept.len() == count;
        let named = kept.into_iter().next().unwrap_or_else(|| Identity::transient(unix_seconds, rng));
        // `read` accepts no epoch without a next one.
        let identity = Identity { epoch: (epoch + 1).max(epoch_of_clock(unix_seconds)), ..named };
        NextIdentity { identity, readable, is_continued, errors }
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Raises the epoch above all generations on the devices, and stores the identity durably in
    /// all places. Waits for recovery if a place did not tell its epoch. Keeps new pages away from
    /// logs without the identity. A place whose identity cannot be read is left as it is.
    ///
    /// The identity is stored only now, and once: the next start takes a stored epoch for one above
    /// all generations. A crash may come at any time.
    pub async fn store_above_generations(
        &mut self,
        devices: &mut Devices,
    ) -> Result<(Identity, PlaceErrors), NodeError> {
        if fail_point!("node.epoch-stored-early") {
            self.readable.iter().for_each(|place| drop(self.identity.store(place)));
        }
        if !self.is_continued && !devices.is_empty() {
            tracing::info!("the previous epoch of this node is unknown; waiting until L3 is recovered");
            devices.wait_for_generations().await;
        }
        let generation = devices.generation_max();
        if self.identity.exceed(generation).map_err(|_| NodeError::NoEpochLeft { generation })? {
            let epoch = self.identity.epoch;
            tracing::warn!(
                epoch,
                "L3 has newer generations than the node's epoch; did the clock go back? Epoch raised"
            );
        }
        let (identity, errors) = (&self.identity, &mut self.errors);
        self.readable.retain(|place| match identity.store(place) {
            Ok(()) => true,
            Err(error) => {
                errors.push((place.dir().to_path_buf(), error));
                false
            }
        });
        let without_identity: Vec<PathBuf> = self.errors.iter().map(|(dir, _)| dir.clone()).collect();
        devices.take_no_pages(&without_identity);
        Ok((self.identity.clone(), std::mem::take(&mut self.errors)))
    }

    /// Stores the next epoch in all places that have the identity, before this start gives
    /// generations that begin with it. Returns the end of these generations. The announced epoch of
    /// the start does not change.
    fn raise_stored_epoch(&mut self) -> io::Result<u64> {
        let raised = Identity { epoch: self.identity.epoch + 1, ..self.identity.clone() };
        if raised.epoch >= EPOCH_MAX {
            return Err(io::Error::other("no epoch is left"));
        }
        self.readable.iter().try_for_each(|place| raised.store(place))?;
        self.identity = raised;
        Ok(generation_end(self.identity.epoch << EPOCH_SHIFT))
    }
}

impl Identity {
    /// Identity of a node without a place: new at every start.
    fn transient(unix_seconds: u64, rng: &mut impl Rng) -> Self {
        let node_id = format!("node-{:012x}", rng.random::<u64>() >> 16);
        Self { node_id, epoch: epoch_of_clock(unix_seconds) }
    }

    fn read(place: &impl IdentityPlace) -> io::Result<Option<Self>> {
        let unusable = |reason: String| {
            let dir = place.dir().display();
            let text = format!("{dir}/{FILE}: {reason}; remove the file to give the node a new identity");
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        let Some(bytes) = place.load()? else { return Ok(None) };
        let found: Self = serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))?;
        if found.epoch >= EPOCH_MAX {
            return Err(unusable(format!("no epoch is left after {}", found.epoch)));
        }
        Ok(Some(found))
    }

    fn store(&self, place: &impl IdentityPlace) -> io::Result<()> {
        place.store(&serde_json::to_vec(self)?)
    }

    /// Raises the epoch above that of `generation`, the largest on L3. Returns `true` if it was not
    /// above it before.
    fn exceed(&mut self, generation: u64) -> Result<bool, NoEpochLeft> {
        let used = generation >> EPOCH_SHIFT;
        if self.epoch > used || fail_point!("node.epoch-ignores-l3") {
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
    pub fn generation_first(&self, rng: &mut impl Rng) -> u64 {
        (self.epoch << EPOCH_SHIFT) + u64::from(rng.random::<u32>() >> 1)
    }
}

/// End of the generations that begin with the epoch of `generation`. The last number of an epoch is
/// not used.
pub(crate) fn generation_end(generation: u64) -> u64 {
    generation | u64::from(u32::MAX)
}

/// Epoch of a start at this time. A clock without a usable time says nothing: the epoch then only
/// counts on.
fn epoch_of_clock(unix_seconds: u64) -> u64 {
    if (1..EPOCH_MAX).contains(&unix_seconds) { unix_seconds } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    /// Stores the identity of a start without logs.
    fn next(dirs: &[&Path], unix_seconds: u64) -> (Identity, PlaceErrors, bool) {
        let places = dirs.iter().map(|dir| IdentityDirectory(dir.to_path_buf())).collect();
        let mut next = NextIdentity::new(places, unix_seconds, &mut rand::rng());
        let is_continued = next.is_continued;
        let mut devices = Devices::of(Vec::new()).unwrap();
        let stored = next.store_above_generations(&mut devices).now_or_never().expect("no log to wait for");
        let (identity, errors) = stored.unwrap();
        (identity, errors, is_continued)
    }

    #[test]
    fn the_epoch_grows_even_if_the_file_is_lost_or_the_clock_goes_back() {
        let dir = tempfile::tempdir().unwrap();
        let next = |seconds| next(&[dir.path()], seconds).0;
        let first = next(1_800_000_000);
        assert_eq!(first.epoch, 1_800_000_000);
        assert_eq!(next(1_800_000_000).epoch, 1_800_000_001, "twice in a second");
        let back = next(5);
        assert_eq!((back.epoch, &back.node_id), (1_800_000_002, &first.node_id), "the clock went back");
        directory::remove(dir.path());
        let anew = next(1_800_000_100);
        let mut rng = rand::rng();
        assert!(anew.generation_first(&mut rng) > back.generation_first(&mut rng) && anew.node_id != first.node_id);
    }

    #[test]
    fn largest_epoch_counts_and_an_unreadable_directory_leaves_it_unknown() {
        let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let dirs = [one.path(), two.path()];
        let (first, errors, is_continued) = next(&dirs, 100);
        assert!(!is_continued && errors.is_empty());
        // The first device misses a start.
        let (_, _, is_continued) = next(&dirs[1..], 500);
        assert!(is_continued);
        let (third, _, is_continued) = next(&dirs, 7);
        assert!(is_continued);
        assert_eq!((third.epoch, &third.node_id), (501, &first.node_id));
        // A file that cannot be read may have a larger epoch.
        directory::remove(two.path());
        directory::make_unreadable(two.path());
        let (unknown, errors, is_continued) = next(&dirs, 7);
        assert_eq!((is_continued, errors.len(), unknown.epoch), (false, 1, 502));
        assert_eq!(errors[0].0, two.path());
        directory::replace(one.path(), b"{");
        let (_, errors, is_continued) = next(&dirs, 7);
        assert!(!is_continued && errors.len() == 2);
        let left = IdentityDirectory(one.path().into()).load().unwrap();
        assert_eq!(left.as_deref(), Some(&b"{"[..]), "it is left to the operator");
    }

    /// The next start would take a stored epoch for one above all generations.
    #[test]
    fn nothing_is_stored_before_the_generations_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let place = IdentityDirectory(dir.path().into());
        drop(NextIdentity::new(vec![IdentityDirectory(dir.path().into())], 100, &mut rand::rng()));
        assert_eq!(place.load().unwrap(), None);
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
        let next = |seconds| next(&[dir.path()], seconds);
        assert_eq!(next(u64::MAX).0.epoch, 1, "the clock is wrong");
        assert_eq!(next(1 << 40).0.epoch, 2);
        let (last, ..) = next(EPOCH_MAX - 1);
        assert_eq!(last.epoch, EPOCH_MAX - 1);
        let mut other = Identity { epoch: EPOCH_MAX - 2, ..last.clone() };
        assert!(last.generation_first(&mut rand::rng()) > other.generation_first(&mut rand::rng()));
        let (_, errors, is_continued) = next(5);
        assert!(is_continued && errors.is_empty(), "one is left");
        let (_, errors, is_continued) = next(5);
        assert!(!is_continued && errors.len() == 1, "{errors:?}");
        assert_eq!(other.exceed(u64::MAX), Err(NoEpochLeft));
    }
}
