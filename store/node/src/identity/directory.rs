//! A directory that keeps the identity of a node in a file.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "runs before a node starts; the simulation brings its own places"
)]

use super::{FILE, IdentityPlace};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Creates the directory if needed.
#[derive(Debug)]
pub(crate) struct IdentityDirectory(pub(crate) PathBuf);

impl IdentityPlace for IdentityDirectory {
    fn dir(&self) -> &Path {
        &self.0
    }

    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        fs::create_dir_all(&self.0)?;
        match fs::read(self.0.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        store_durably(&self.0, FILE, bytes)
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

#[cfg(test)]
pub(super) fn remove(dir: &Path) {
    fs::remove_file(dir.join(FILE)).unwrap();
}

#[cfg(test)]
pub(super) fn replace(dir: &Path, bytes: &[u8]) {
    fs::write(dir.join(FILE), bytes).unwrap();
}

#[cfg(test)]
pub(super) fn make_unreadable(dir: &Path) {
    fs::create_dir(dir.join(FILE)).unwrap();
}
