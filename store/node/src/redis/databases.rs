//! Namespaces of the databases, and flushes.
//!
//! A database has two namespaces: one of manifests and one of data pages. Their names contain the
//! number of the database's flushes. So a flush is one change of a number. No page of an earlier
//! namespace is ever found again, and eviction frees it.
//!
//! Invariant: a flush is durable before the node answers it, if the node has a directory. A node
//! without one loses all pages with its process.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the simulation has no Redis port and never reads this file"
)]

use super::connection::COMMAND_TIMEOUT;
use crate::identity::store_durably;
use larder_format::NamespaceId;
use larder_redis::DATABASES;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const FILE: &str = "redis.json";
/// Upper bound of the file in bytes, several times what it takes.
const BYTES_MAX: u64 = 16 << 10;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Flushes {
    /// By the number of the database.
    flushes: [u64; DATABASES as usize],
}

/// The two namespaces of a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DatabaseNamespaces {
    pub(super) manifests: NamespaceId,
    pub(super) data: NamespaceId,
}

pub(crate) struct Databases {
    dir: Option<PathBuf>,
    flushes: [AtomicU64; DATABASES as usize],
    /// Held while a flush is stored.
    storing: Arc<tokio::sync::Mutex<()>>,
}

impl Databases {
    /// Reads the flushes of earlier processes.
    ///
    /// # Errors
    /// If the file cannot be read. Without it, flushed keys could come back.
    pub(crate) fn open(dir: Option<PathBuf>) -> io::Result<Databases> {
        let known = dir.as_deref().map_or(Ok(Flushes::default()), read)?;
        Ok(Databases { dir, flushes: known.flushes.map(AtomicU64::new), storing: Default::default() })
    }

    /// Number of flushes of a database. A change means other namespaces.
    pub(super) fn flushes(&self, database: u32) -> u64 {
        // Acquire: pairs with the store in `flush`.
        self.flushes[database as usize].load(Ordering::Acquire)
    }

    pub(super) fn namespaces(database: u32, flushes: u64) -> DatabaseNamespaces {
        let namespace = |kind: &[u8]| {
            let hash = Sha256::new().chain_update(b"larder redis database\0").chain_update(database.to_le_bytes());
            NamespaceId(hash.chain_update(flushes.to_le_bytes()).chain_update(kind).finalize().into())
        };
        DatabaseNamespaces { manifests: namespace(b"manifests"), data: namespace(b"data") }
    }

    /// Flushes databases, durably. After an error they are as before, or flushed by the next start.
    pub(super) async fn flush(&self, databases: impl Iterator<Item = u32>) -> io::Result<()> {
        let storing = tokio::time::timeout(COMMAND_TIMEOUT, self.storing.clone().lock_owned());
        let mut storing = storing.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        let mut next = Flushes::default();
        for (known, next) in self.flushes.iter().zip(&mut next.flushes) {
            *next = known.load(Ordering::Acquire);
        }
        databases.for_each(|database| next.flushes[database as usize] += 1);
        if let Some(dir) = self.dir.clone() {
            let content = serde_json::to_vec(&next)?;
            // The thread has the lock: if the caller goes, no other flush may write meanwhile.
            let write = tokio::task::spawn_blocking(move || store_durably(&dir, FILE, &content).map(|()| storing));
            storing = write.await.map_err(io::Error::other).flatten()?;
        }
        // Release: a connection that sees the number finds the state of the store from here on.
        self.flushes.iter().zip(next.flushes).for_each(|(known, next)| known.store(next, Ordering::Release));
        drop(storing);
        Ok(())
    }
}

fn read(dir: &Path) -> io::Result<Flushes> {
    let file = match File::open(dir.join(FILE)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Flushes::default()),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn flush_is_known_to_the_next_start_and_a_damaged_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Databases::open(Some(dir.path().into()));
        let databases = open().unwrap();
        let before = Databases::namespaces(3, databases.flushes(3));
        databases.flush([3].into_iter()).await.unwrap();
        let next = open().unwrap();
        assert_eq!((next.flushes(2), next.flushes(3)), (0, 1));
        let after = Databases::namespaces(3, next.flushes(3));
        assert!(before != after && after.manifests != after.data && Databases::namespaces(2, 1) != after);
        std::fs::write(dir.path().join(FILE), b"{\"flushes\":[1").unwrap();
        assert!(open().is_err());
    }
}
