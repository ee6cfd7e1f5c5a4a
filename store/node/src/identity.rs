//! Who a node is: a random name kept in its data directory, and an epoch that grows at every start.

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
    pub(crate) fn transient() -> Self {
        Self { node_id: format!("node-{:012x}", rand::random::<u64>() >> 16), epoch: 1 }
    }

    /// The identity kept in `dir`, with the next epoch; made anew if there is none. It is durable before it is used.
    pub(crate) fn next(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        let mut identity = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {error}; remove it to start anew", path.display()),
                )
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self { epoch: 0, ..Self::transient() },
            Err(error) => return Err(error),
        };
        identity.epoch += 1;
        let staged = dir.join(format!("{FILE}.new"));
        let mut file = fs::File::create(&staged)?;
        file.write_all(&serde_json::to_vec(&identity)?)?;
        file.sync_all()?;
        fs::rename(&staged, &path)?;
        fs::File::open(dir)?.sync_all()?;
        Ok(identity)
    }
}
