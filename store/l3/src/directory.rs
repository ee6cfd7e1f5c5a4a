//! The files of a log: `larder.sb`, `larder.lock`, `00000000.seg` ….
//!
//! Always true: whoever has a [`Directory`] holds its lock; a superblock is there whole or not at all; a file that was
//! made or removed here stays so after a crash of the machine.

use crate::{L3Error, L3Options};
use larder_device::DeviceFile;
use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, Superblock, VERSION};
use rand::RngCore;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

const SUPERBLOCK: &str = "larder.sb";
const SUPERBLOCK_NEW: &str = "larder.sb.new";
const LOCK: &str = "larder.lock";

/// An open, locked directory.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

impl Directory {
    /// Makes it if it is missing, and takes its lock.
    pub(crate) fn open(path: &Path) -> Result<Directory, L3Error> {
        fs::create_dir_all(path).map_err(L3Error::io("making the directory", path))?;
        let lock_path = path.join(LOCK);
        let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = opened.map_err(L3Error::io("opening", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Directory { path: path.to_path_buf(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(L3Error::Locked { dir: path.to_path_buf() }),
            Err(TryLockError::Error(error)) => Err(L3Error::io("locking", &lock_path)(error)),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The superblock; for a new log, one is made by the options. The flag tells whether it is new.
    pub(crate) fn superblock(&self, options: &L3Options) -> Result<(Superblock, bool), L3Error> {
        let file = self.path.join(SUPERBLOCK);
        match read_block(&file) {
            Ok(bytes) => Ok((decode_superblock(&file, &bytes)?, false)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if !self.segments()?.is_empty() {
                    return Err(L3Error::Superblock {
                        file,
                        problem: "it is missing, but there are segments".into(),
                        advice: "put the file back, or remove all *.seg files beside it to begin an empty log".into(),
                    });
                }
                Ok((self.make_superblock(options, &file)?, true))
            }
            Err(error) => Err(L3Error::io("reading", &file)(error)),
        }
    }

    fn make_superblock(&self, options: &L3Options, file: &Path) -> Result<Superblock, L3Error> {
        let segment_bytes = options.segment_bytes();
        options.segments_max(segment_bytes)?;
        let mut log_id = [0; 16];
        rand::rng().fill_bytes(&mut log_id);
        let superblock = Superblock { log_id, segment_bytes };
        let new = self.path.join(SUPERBLOCK_NEW);
        let written = File::create(&new).and_then(|mut out| {
            out.write_all(&superblock.encode())?;
            out.sync_all()
        });
        written.map_err(L3Error::io("writing", &new))?;
        fs::rename(&new, file).map_err(L3Error::io("renaming to", file))?;
        self.sync()?;
        Ok(superblock)
    }

    /// Numbers of the segments that have a file.
    pub(crate) fn segments(&self) -> Result<Vec<u32>, L3Error> {
        let failed = |error| L3Error::io("listing", &self.path)(error);
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            numbers.extend(name.to_str().and_then(segment_number));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    pub(crate) fn segment_path(&self, segment: u32) -> PathBuf {
        self.path.join(format!("{segment:08}.seg"))
    }

    /// Opens a segment's file and brings its length to what a segment has. A shorter one was damaged; what it lacks
    /// reads as zeros.
    pub(crate) fn open_segment(&self, segment: u32, segment_bytes: u64) -> Result<DeviceFile, L3Error> {
        let path = self.segment_path(segment);
        let file = DeviceFile::open(&path).map_err(L3Error::io("opening", &path))?;
        let len = file.len().map_err(L3Error::io("reading the length of", &path))?;
        if len > segment_bytes {
            tracing::warn!(file = %path.display(), len, segment_bytes, "segment file is too long and is cut");
            file.truncate(segment_bytes).map_err(L3Error::io("cutting", &path))?;
        }
        if len < segment_bytes {
            tracing::warn!(file = %path.display(), len, segment_bytes, "segment file is too short; pages in the missing part are lost");
            file.allocate(segment_bytes).map_err(L3Error::io("allocating", &path))?;
        }
        Ok(file)
    }

    /// Makes a segment's file. If that fails, none is left.
    pub(crate) fn create_segment(&self, segment: u32, segment_bytes: u64) -> io::Result<DeviceFile> {
        let path = self.segment_path(segment);
        let made = DeviceFile::create(&path, segment_bytes).and_then(|file| {
            File::open(&self.path)?.sync_all()?;
            Ok(file)
        });
        if made.is_err() {
            // Whether that works, the caller finds out by `remove_segment`.
            let _ = fs::remove_file(&path);
        }
        made
    }

    /// Removes a segment's file for good.
    pub(crate) fn remove_segment(&self, segment: u32) -> Result<(), L3Error> {
        let path = self.segment_path(segment);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(L3Error::io("removing", &path)(error)),
            _ => self.sync(),
        }
    }

    fn sync(&self) -> Result<(), L3Error> {
        let synced = File::open(&self.path).and_then(|dir| dir.sync_all());
        synced.map_err(L3Error::io("syncing the directory", &self.path))
    }
}

fn read_block(file: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(BLOCK_BYTES);
    File::open(file)?.take(BLOCK_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn decode_superblock(file: &Path, bytes: &[u8]) -> Result<Superblock, L3Error> {
    Superblock::decode(bytes).map_err(|error| {
        let advice = match error {
            DecodeError::Version { .. } => format!(
                "start the version of Larder that wrote it, or give this one (which reads version {VERSION}) another \
                 directory"
            ),
            _ => "restore the file, or remove the whole directory to begin an empty log (pages in it are lost)".into(),
        };
        L3Error::Superblock { file: file.to_path_buf(), problem: error.to_string(), advice }
    })
}

fn segment_number(name: &str) -> Option<u32> {
    let digits = name.strip_suffix(".seg")?;
    (digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_segment_names_are_segments() {
        assert_eq!(segment_number("00000012.seg"), Some(12));
        for name in ["12.seg", "000000012.seg", "0000001x.seg", "00000001.seg.new", "+0000001.seg", "larder.sb"] {
            assert_eq!(segment_number(name), None, "{name}");
        }
    }
}
