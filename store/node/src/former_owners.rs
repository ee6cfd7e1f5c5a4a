//! File with the peers that registered the members of a node, for the node's next start.
//!
//! The file lies in the directory of the node's identity. A node without one keeps none.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the simulation starts nodes without members and never reads this file"
)]

use crate::identity::store_durably;
use crate::members::Owners;
use crate::places::Peer;
use crate::state::NodeState;
use larder_runtime::now;
use larder_wire::MAX_MEMBERS;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const FILE: &str = "members.json";
/// Upper bound of the file in bytes, more than the table of members takes.
const BYTES_MAX: u64 = 1 << 20;
/// Interval of looks at the members. A crash loses the names that changed since the last one.
const INTERVAL: Duration = Duration::from_secs(1);

/// Reads the owners of names before this start. Returns none if the file is unusable: engines then
/// only lose the precedence.
pub(crate) fn read(dir: &Path) -> Owners {
    read_file(&dir.join(FILE)).unwrap_or_else(|error| {
        let file = dir.join(FILE).display().to_string();
        tracing::warn!(
            %error, file,
            "cannot read the names of engines from before this start; an engine that uses one of them may lose it to another client until it registers; check the file's permissions, or remove it [LRD0113]"
        );
        Owners::new()
    })
}

fn read_file(path: &Path) -> io::Result<Owners> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Owners::new()),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too large"));
    }
    let names: BTreeMap<String, Peer> = serde_json::from_slice(&bytes)?;
    Ok(names.into_iter().take(MAX_MEMBERS).collect())
}

/// Stores the owners when they change, until `stop`. A stop ends all connections and so all
/// entries: what was stored before it stays.
pub(crate) async fn keep(state: Arc<NodeState>, dir: PathBuf, stop: CancellationToken) {
    let mut stored = None;
    let mut has_failed = false;
    while stop.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_some() {
        let owners = state.members.owners(now());
        // After the list: connections end only after the stop.
        if stop.is_cancelled() {
            return;
        }
        if stored.as_ref() == Some(&owners) {
            continue;
        }
        let (to, list) = (dir.clone(), owners.clone());
        let write = tokio::task::spawn_blocking(move || store_durably(&to, FILE, &serde_json::to_vec(&list)?));
        match write.await.map_err(io::Error::other).flatten() {
            Ok(()) => {
                stored = Some(owners);
                has_failed = false;
            }
            // Once: the next look tries again.
            Err(error) if !has_failed => {
                has_failed = true;
                let dir = dir.display().to_string();
                tracing::warn!(
                    %error, dir,
                    "cannot store the names of engines; after a restart of this node, another client may register them first; check the directory [LRD0113]"
                );
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_read_as_they_were_stored_and_a_damaged_file_tells_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), Owners::new());
        let address = |ip: &str| Peer::of((ip.parse::<std::net::IpAddr>().unwrap(), 1).into());
        let owners = Owners::from([
            ("decode \u{e9}".into(), Peer::Local),
            ("prefill-1".into(), address("10.0.0.1")),
            ("prefill-2".into(), address("2001:db8::1")),
        ]);
        store_durably(dir.path(), FILE, &serde_json::to_vec(&owners).unwrap()).unwrap();
        assert_eq!(read(dir.path()), owners);
        for damaged in [&b"{\"a\":"[..], b"{\"a\":7}", b"\xff", &[b' '; BYTES_MAX as usize + 1]] {
            std::fs::write(dir.path().join(FILE), damaged).unwrap();
            assert_eq!(read(dir.path()), Owners::new());
        }
    }
}
