//! File with the namespaces of a node, for its next start.
//!
//! The file lies in the directory of the node's identity, or beside each L3 log. Of several files
//! the one with the largest number counts: a device may have missed a change. Checksums tell a
//! damaged file: as JSON it may still be valid, and name other namespaces.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the simulation starts nodes without directories and never reads this file"
)]

use crate::identity::store_durably;
use crate::state::NodeState;
use larder_format::{NamespaceDescriptor, NamespaceId, chunk_crcs};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

pub(super) const FILE: &str = "namespaces.json";
/// Upper bound of the file in bytes, more than a full table takes.
const BYTES_MAX: u64 = 4 << 20;
/// Interval of looks for descriptors that are not stored yet. A crash loses those that came since
/// the last one. Retirements do not wait for it.
const INTERVAL: Duration = Duration::from_secs(60);

/// Content of the file.
#[derive(Serialize, Deserialize)]
struct Checked<S> {
    /// CRC-32 of each 64 KiB of the JSON of `stored`, as this module writes it.
    crcs: Vec<u32>,
    stored: S,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Stored {
    /// Grows with every file.
    pub(super) sequence: u64,
    pub(super) namespaces: Vec<StoredNamespace>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredNamespace {
    pub(super) id: NamespaceId,
    pub(super) descriptor: Option<NamespaceDescriptor>,
    pub(super) last_use_unix_ms: u64,
    pub(super) retired_unix_ms: Option<u64>,
}

/// Reads the newest file. Returns nothing if there is none. Passes over a file of `unserved`
/// directories that it cannot read.
pub(super) fn read(dirs: &[PathBuf], unserved: &[PathBuf]) -> io::Result<Stored> {
    let mut newest = Stored::default();
    for dir in dirs {
        let path = dir.join(FILE);
        let found = match read_file(&path) {
            Err(error) if unserved.contains(dir) => {
                let file = path.display().to_string();
                tracing::warn!(%error, file, "cannot read the namespaces beside a log that did not open [LRD0114]");
                None
            }
            Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
            Ok(found) => found,
        };
        if let Some(found) = found.filter(|found| found.sequence > newest.sequence) {
            newest = found;
        }
    }
    Ok(newest)
}

fn read_file(path: &Path) -> io::Result<Option<Stored>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too large"));
    }
    let Checked { crcs, stored } = serde_json::from_slice::<Checked<Stored>>(&bytes)?;
    if !chunk_crcs(&serde_json::to_vec(&stored)?).eq(crcs) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the checksums do not match"));
    }
    Ok(Some(stored))
}

/// Writes the file into all directories, durably. An error means that none of them has it.
pub(super) fn write(dirs: &[PathBuf], stored: &Stored) -> io::Result<()> {
    let crcs = chunk_crcs(&serde_json::to_vec(stored)?).collect();
    let content = serde_json::to_vec(&Checked { crcs, stored })?;
    let mut is_stored = false;
    let mut failed = None;
    for dir in dirs {
        match store_durably(dir, FILE, &content) {
            Ok(()) => is_stored = true,
            Err(error) => {
                let dir = dir.display().to_string();
                tracing::warn!(
                    %error, dir,
                    "cannot store the namespaces of this node in one of its directories; check it [LRD0114]"
                );
                failed = Some(error);
            }
        }
    }
    failed.filter(|_| !is_stored).map_or(Ok(()), Err)
}

/// Stores descriptors when they change, until `stop`, and the last uses then.
pub(crate) async fn keep(state: Arc<NodeState>, stop: CancellationToken) {
    let namespaces = state.store.tiers().namespaces();
    loop {
        let is_last = stop.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_none();
        if let Err(error) = namespaces.save(is_last).await {
            tracing::warn!(%error, "after a restart, the node does not know the models of its latest namespaces");
        }
        if is_last {
            return;
        }
    }
}
