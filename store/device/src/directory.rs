//! The directory of a device: small files, `larder.lock`, and segments `00000000.seg`, `00000001.seg` ….
//!
//! Always true: whoever has a [`Directory`] holds its lock; a small file, and a segment's first block and its room, are
//! there whole or not at all, as all are made under other names; what was made, removed or set aside here stays so after
//! a crash of the machine. What a crash left of something that was being made is removed when the directory is opened.
//!
//! Its methods block.

use crate::file::DeviceFile;
use crate::seam::SmallFile;
use larder_format::disk::stray_names;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

const LOCK: &str = "larder.lock";
/// Behind the name of a segment that is being made.
const NEW: &str = ".new";
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(25);

/// Why a directory cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Another process, or another device of this one, uses it.
    #[error("{} is in use: another store holds its lock; give every store a directory of its own", .0.display())]
    Locked(PathBuf),
    /// The system said no.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
        let path = path.to_path_buf();
        move |source| OpenError::Io { doing, path, source }
    }
}

/// An open, locked directory.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

impl Directory {
    /// Makes it if it is missing, and takes its lock.
    pub(crate) fn open(path: &Path) -> Result<Directory, OpenError> {
        fs::create_dir_all(path).map_err(OpenError::io("making the directory", path))?;
        let lock_path = path.join(LOCK);
        let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = opened.map_err(OpenError::io("opening", &lock_path))?;
        let directory = match take(&lock) {
            Ok(()) => Directory { path: path.to_path_buf(), _lock: lock },
            Err(TryLockError::WouldBlock) => return Err(OpenError::Locked(path.to_path_buf())),
            Err(TryLockError::Error(error)) => return Err(OpenError::io("locking", &lock_path)(error)),
        };
        directory.remove_begun().map_err(OpenError::io("removing what was begun in", path))?;
        Ok(directory)
    }

    /// Removes segments that were being made. Not durably: they mean nothing, and the next one does it again.
    fn remove_begun(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_str().and_then(|name| name.strip_suffix(NEW)).and_then(segment_number).is_some() {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    pub(crate) fn load(&self, file: SmallFile) -> io::Result<Option<Vec<u8>>> {
        match fs::read(self.path.join(file.name())) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn save(&self, file: SmallFile, bytes: &[u8]) -> io::Result<()> {
        let path = self.path.join(file.name());
        let new = path.with_extension(format!("{}.new", path.extension().unwrap_or_default().display()));
        let mut out = File::create(&new)?;
        out.write_all(bytes)?;
        out.sync_all()?;
        fs::rename(&new, &path)?;
        self.sync()
    }

    /// Numbers of the segments that have a file, in order.
    pub(crate) fn segments(&self) -> io::Result<Vec<u32>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            numbers.extend(entry?.file_name().to_str().and_then(segment_number));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn segment_path(&self, segment: u32) -> PathBuf {
        self.path.join(segment_name(segment))
    }

    /// Opens a segment's file; how many of its bytes there are. One that is too long stays so: it may be none of the log's.
    pub(crate) fn open_segment(&self, segment: u32, segment_bytes: u64) -> io::Result<(DeviceFile, u64)> {
        let path = self.segment_path(segment);
        let file = DeviceFile::open(&path)?;
        let len = file.len()?;
        if len != segment_bytes {
            tracing::warn!(file = %path.display(), len, segment_bytes, "segment file has another length");
        }
        Ok((file, len.min(segment_bytes)))
    }

    /// Makes a segment's file anew, allocated and with `header` in front.
    pub(crate) fn create_segment(&self, segment: u32, segment_bytes: u64, header: &[u8]) -> io::Result<DeviceFile> {
        // What is there takes room that the new one needs.
        self.remove_segment(segment)?;
        let path = self.segment_path(segment);
        let new = self.path.join(segment_name(segment) + NEW);
        let made = DeviceFile::create(&new, segment_bytes).and_then(|file| {
            let front = OpenOptions::new().write(true).open(&new)?;
            front.write_all_at(header, 0)?;
            front.sync_all()?;
            fs::rename(&new, &path)?;
            self.sync()?;
            Ok(file)
        });
        if made.is_err() {
            // Whether that works, the caller finds out by `remove_segment`.
            let _ = self.remove_segment(segment);
        }
        made
    }

    /// Removes a segment's file for good, and what was begun of one.
    pub(crate) fn remove_segment(&self, segment: u32) -> io::Result<()> {
        let name = segment_name(segment);
        for name in [name.clone() + NEW, name] {
            if let Err(error) = fs::remove_file(self.path.join(name))
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error);
            }
        }
        self.sync()
    }

    /// Gives a segment's file a name that is none of a segment and that no file has, and says which.
    pub(crate) fn set_aside(&self, segment: u32) -> io::Result<PathBuf> {
        for name in stray_names(segment) {
            let stray = self.path.join(name);
            match fs::symlink_metadata(&stray) {
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            fs::rename(self.segment_path(segment), &stray)?;
            self.sync()?;
            return Ok(stray);
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, "too many files were set aside: remove them"))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

/// Whoever had it before may be about to end, or may have a child that has not let go of it yet.
fn take(lock: &File) -> Result<(), TryLockError> {
    for _ in 1..LOCK_TRIES {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            tried => return tried,
        }
    }
    lock.try_lock()
}

/// The file name of a segment.
pub fn segment_name(segment: u32) -> String {
    format!("{segment:08}.seg")
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
        assert_eq!(segment_number(&segment_name(12)), Some(12));
        for name in ["12.seg", "000000012.seg", "0000001x.seg", "00000001.seg.new", "+0000001.seg", "larder.sb"] {
            assert_eq!(segment_number(name), None, "{name}");
        }
    }

    #[test]
    fn a_segment_has_its_name_only_with_its_header_and_what_was_begun_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let begun = path.join(segment_name(1) + NEW);
        fs::write(&begun, [7; 4096]).unwrap();
        fs::write(path.join("notes.new"), [7]).unwrap();
        let directory = Directory::open(path).unwrap();
        assert!(!begun.exists() && path.join("notes.new").exists());
        for header in [[1; 4096], [2; 4096]] {
            directory.create_segment(1, 3 * 4096, &header).unwrap();
            let bytes = fs::read(path.join(segment_name(1))).unwrap();
            assert!(bytes[..4096] == header && bytes[4096..] == [0; 2 * 4096]);
        }
        // A directory stands in its way.
        fs::create_dir_all(begun.join("x")).unwrap();
        assert!(directory.create_segment(1, 4096, &[3; 4096]).is_err());
        assert_eq!(directory.segments().unwrap(), [1], "the old one is there until it could be removed");
        fs::remove_dir_all(&begun).unwrap();
        directory.set_aside(1).unwrap();
        assert!(directory.segments().unwrap().is_empty() && path.join("00000001.stray").exists());
        assert!(directory.set_aside(1).is_err());
    }

    #[test]
    fn what_is_set_aside_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::open(dir.path()).unwrap();
        let file = dir.path().join(segment_name(3));
        for (text, name) in [("first", "00000003.stray"), ("second", "00000003.stray.1"), ("third", "00000003.stray.2")]
        {
            fs::write(&file, text).unwrap();
            assert_eq!(directory.set_aside(3).unwrap(), dir.path().join(name));
        }
        let texts: Vec<_> = stray_names(3).map_while(|name| fs::read_to_string(dir.path().join(name)).ok()).collect();
        assert_eq!(texts, ["first", "second", "third"]);
        stray_names(3).skip(3).for_each(|name| fs::write(dir.path().join(name), "").unwrap());
        fs::write(&file, "one too many").unwrap();
        assert!(directory.set_aside(3).is_err() && file.exists(), "there is a bound");
    }
}
