//! The directory of a device: small files, `larder.lock`, and segments `00000000.seg`,
//! `00000001.seg` and so on.
//!
//! Invariants:
//! - The owner of a [`Directory`] holds its lock.
//! - A small file is replaced atomically. A segment appears under its name with its header written
//!   and its space allocated. Both are prepared under a temporary name and renamed.
//! - A created, removed or renamed file stays so after a crash of the machine: the directory is
//!   synced before the call returns.
//! - Opening removes what a crash left of unfinished segments and small files.
//! - Removing and syncing need no new descriptor. A process that ran out of them can thus undo a
//!   creation that failed, and the log knows the state of every segment.
//!
//! All methods block.

use crate::device::SmallFile;
use crate::file::DeviceFile;
use larder_format::disk::misplaced_names;
use std::cell::RefCell;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

const LOCK: &str = "larder.lock";
/// Suffix of a segment file that is not finished.
const NEW: &str = ".new";
// Half a second in all: a process that was just killed, or its forked child, needs a moment to
// release the lock.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(25);
/// Descriptors that a directory keeps open and gives up when the process has no other. A segment
/// takes one for good and one more while it is created, so the log can open several segments until
/// connections end.
const RESERVED_DESCRIPTORS: usize = 16;
/// Descriptors that one operation on the directory takes at a time, at most.
const OPERATION_DESCRIPTORS: usize = 2;

#[derive(Debug, Error)]
pub enum OpenError {
    /// Another process, or another device of this process, holds the lock.
    #[error("{} is in use: another store holds its lock; give every store its own directory [LRD0201]", .0.display())]
    Locked(PathBuf),
    #[error("{doing} {}: {source} [LRD0202]", path.display())]
    Io {
        /// The step, as a participle: "creating the directory".
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
        let path = path.to_path_buf();
        move |source| OpenError::Io { doing, path, source }
    }
}

/// An open and locked directory. The lock is advisory: it keeps a second store from opening the
/// same log.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The directory itself, for syncs.
    handle: File,
    /// Duplicates of `handle`, see [`RESERVED_DESCRIPTORS`].
    reserve: RefCell<Vec<File>>,
    _lock: File,
}

/// Returns `true` for an error that says that the process, or the machine, has as many open files
/// as it may have. The operation succeeds once some are closed.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

impl Directory {
    /// Creates the directory if it is missing, locks it, and removes unfinished files. Blocks for
    /// up to half a second while another process holds the lock.
    pub(crate) fn open(path: &Path) -> Result<Directory, OpenError> {
        fs::create_dir_all(path).map_err(OpenError::io("creating the directory", path))?;
        let lock_path = path.join(LOCK);
        let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = opened.map_err(OpenError::io("opening", &lock_path))?;
        match take(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OpenError::Locked(path.to_path_buf())),
            Err(TryLockError::Error(error)) => return Err(OpenError::io("locking", &lock_path)(error)),
        }
        let handle = File::open(path).map_err(OpenError::io("opening", path))?;
        let directory = Directory { path: path.to_path_buf(), handle, reserve: RefCell::default(), _lock: lock };
        directory.refill_reserve();
        directory.remove_unfinished().map_err(OpenError::io("removing unfinished segments in", path))?;
        Ok(directory)
    }

    /// Removes unfinished segments and small files, which would take space beyond the capacity. The
    /// removal is not synced: if it is lost, the next start repeats it.
    fn remove_unfinished(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str().and_then(|name| name.strip_suffix(NEW)) else { continue };
            if segment_number(name).is_some() || SmallFile::ALL.iter().any(|file| file.name() == name) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Opens duplicates up to [`RESERVED_DESCRIPTORS`], or as many as the process may.
    fn refill_reserve(&self) {
        let mut reserve = self.reserve.borrow_mut();
        while reserve.len() < RESERVED_DESCRIPTORS {
            match self.handle.try_clone() {
                Ok(duplicate) => reserve.push(duplicate),
                // A later operation tries again.
                Err(_) => break,
            }
        }
    }

    /// Runs an operation that opens files. If the process has no descriptor left, it runs once more
    /// with some of the reserve.
    fn open_files<T>(&self, operation: impl Fn() -> io::Result<T>) -> io::Result<T> {
        let mut result = operation();
        if result.as_ref().is_err_and(is_out_of_descriptors) {
            let mut reserve = self.reserve.borrow_mut();
            (0..OPERATION_DESCRIPTORS).for_each(|_| drop(reserve.pop()));
            drop(reserve);
            result = operation();
        }
        self.refill_reserve();
        result
    }

    pub(crate) fn load(&self, file: SmallFile) -> io::Result<Option<Vec<u8>>> {
        match self.open_files(|| fs::read(self.path.join(file.name()))) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn save(&self, file: SmallFile, bytes: &[u8]) -> io::Result<()> {
        let path = self.path.join(file.name());
        let new = self.path.join(format!("{}{NEW}", file.name()));
        // The content must be durable before the rename makes it visible. Otherwise a crash could
        // leave an empty file under the final name.
        let mut out = self.open_files(|| File::create(&new))?;
        out.write_all(bytes)?;
        out.sync_all()?;
        fs::rename(&new, &path)?;
        self.sync()
    }

    pub(crate) fn segments(&self) -> io::Result<Vec<u32>> {
        let mut numbers = Vec::new();
        for entry in self.open_files(|| fs::read_dir(&self.path))? {
            numbers.extend(entry?.file_name().to_str().and_then(segment_number));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn segment_path(&self, segment: u32) -> PathBuf {
        self.path.join(segment_name(segment))
    }

    /// Opens a segment file and returns its length, at most `segment_bytes`. A longer file is not
    /// truncated: it may belong to another log.
    pub(crate) fn open_segment(&self, segment: u32, segment_bytes: u64) -> io::Result<(DeviceFile, u64)> {
        let path = self.segment_path(segment);
        let file = self.open_files(|| DeviceFile::open(&path))?;
        let len = file.len()?;
        if len != segment_bytes {
            tracing::warn!(file = %path.display(), len, segment_bytes, "a segment file has an unexpected length");
        }
        Ok((file, len.min(segment_bytes)))
    }

    /// Opens a segment file for another process. Takes no descriptor of the reserve: the log needs
    /// those.
    pub(crate) fn open_read_only(&self, segment: u32) -> io::Result<DeviceFile> {
        DeviceFile::open_read_only(&self.segment_path(segment))
    }

    /// Creates a segment file, replacing an existing one. It is fully allocated and starts with
    /// `header`.
    pub(crate) fn create_segment(&self, segment: u32, segment_bytes: u64, header: &[u8]) -> io::Result<DeviceFile> {
        self.open_files(|| self.try_create_segment(segment, segment_bytes, header))
    }

    fn try_create_segment(&self, segment: u32, segment_bytes: u64, header: &[u8]) -> io::Result<DeviceFile> {
        // Frees the space of the old file first: the disk may have no room for both.
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
            // Best effort. The caller calls `remove_segment` and learns whether it worked.
            let _ = self.remove_segment(segment);
        }
        made
    }

    /// Removes a segment file and its unfinished predecessor, durably.
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

    /// Renames a segment file to the first free name for misplaced segments, and returns that path.
    /// Existing files are never replaced.
    pub(crate) fn rename_misplaced(&self, segment: u32) -> io::Result<PathBuf> {
        for name in misplaced_names(segment) {
            let target = self.path.join(name);
            match fs::symlink_metadata(&target) {
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            fs::rename(self.segment_path(segment), &target)?;
            self.sync()?;
            return Ok(target);
        }
        Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "too many misplaced segment files: remove the .stray files from the directory",
        ))
    }

    fn sync(&self) -> io::Result<()> {
        self.handle.sync_all()
    }
}

/// Tries to lock for half a second. The previous owner may be exiting, or have a child process that
/// inherited the lock.
fn take(lock: &File) -> Result<(), TryLockError> {
    for _ in 1..LOCK_TRIES {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            tried => return tried,
        }
    }
    lock.try_lock()
}

/// Returns the file name of a segment, `00000012.seg`.
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
    fn only_segment_names_parse_as_segments() {
        assert_eq!(segment_number(&segment_name(12)), Some(12));
        for name in ["12.seg", "000000012.seg", "0000001x.seg", "00000001.seg.new", "+0000001.seg", "larder.sb"] {
            assert_eq!(segment_number(name), None, "{name}");
        }
    }

    #[test]
    fn segment_is_created_atomically_and_unfinished_ones_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let unfinished = path.join(segment_name(1) + NEW);
        fs::write(&unfinished, [7; 4096]).unwrap();
        fs::write(path.join("notes.new"), [7]).unwrap();
        let unfinished_small = path.join("larder.sb2.new");
        fs::write(&unfinished_small, [7]).unwrap();
        let directory = Directory::open(path).unwrap();
        assert!(!unfinished.exists() && !unfinished_small.exists() && path.join("notes.new").exists());
        for header in [[1; 4096], [2; 4096]] {
            directory.create_segment(1, 3 * 4096, &header).unwrap();
            let bytes = fs::read(path.join(segment_name(1))).unwrap();
            assert!(bytes[..4096] == header && bytes[4096..] == [0; 2 * 4096]);
        }
        // A non-empty directory under the temporary name makes the creation fail.
        fs::create_dir_all(unfinished.join("x")).unwrap();
        assert!(directory.create_segment(1, 4096, &[3; 4096]).is_err());
        assert_eq!(directory.segments().unwrap(), [1], "the old segment stays until it can be removed");
        fs::remove_dir_all(&unfinished).unwrap();
        directory.rename_misplaced(1).unwrap();
        assert!(directory.segments().unwrap().is_empty() && path.join("00000001.stray").exists());
        assert!(directory.rename_misplaced(1).is_err());
    }

    #[test]
    fn renaming_a_misplaced_segment_replaces_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::open(dir.path()).unwrap();
        let file = dir.path().join(segment_name(3));
        for (text, name) in [("first", "00000003.stray"), ("second", "00000003.stray.1"), ("third", "00000003.stray.2")]
        {
            fs::write(&file, text).unwrap();
            assert_eq!(directory.rename_misplaced(3).unwrap(), dir.path().join(name));
        }
        let texts: Vec<_> =
            misplaced_names(3).map_while(|name| fs::read_to_string(dir.path().join(name)).ok()).collect();
        assert_eq!(texts, ["first", "second", "third"]);
        misplaced_names(3).skip(3).for_each(|name| fs::write(dir.path().join(name), "").unwrap());
        fs::write(&file, "one too many").unwrap();
        assert!(directory.rename_misplaced(3).is_err() && file.exists(), "the number of kept files is bounded");
    }
}
