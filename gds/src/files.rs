//! Table of attached files.

use crate::TransferError;
use larder_runtime::lock::Mutex;

/// Maximum number of attached files of one path.
pub(crate) const FILES_MAX: usize = 4096;

/// Number of an attached file. It is reused after the file is detached. A read through an old
/// number then fails at a CRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileNumber(u32);

/// Files by number. The lowest free number is given first, so the table is as long as the largest
/// number of files that were attached at the same time.
#[derive(Debug)]
pub(crate) struct Files<T> {
    entries: Mutex<Vec<Option<T>>>,
}

impl<T: Clone> Files<T> {
    pub(crate) fn new() -> Files<T> {
        Files { entries: Mutex::new(Vec::new()) }
    }

    pub(crate) fn add(&self, file: T) -> Result<FileNumber, TransferError> {
        let mut entries = self.entries.lock();
        if let Some(free) = entries.iter().position(Option::is_none) {
            entries[free] = Some(file);
            return Ok(FileNumber(free as u32));
        }
        if entries.len() == FILES_MAX {
            return Err(TransferError::TooManyFiles(FILES_MAX));
        }
        entries.push(Some(file));
        Ok(FileNumber(entries.len() as u32 - 1))
    }

    pub(crate) fn get(&self, number: FileNumber) -> Result<T, TransferError> {
        let entries = self.entries.lock();
        entries.get(number.0 as usize).and_then(Clone::clone).ok_or(TransferError::UnknownFile(number.0))
    }

    pub(crate) fn remove(&self, number: FileNumber) -> Result<T, TransferError> {
        let mut entries = self.entries.lock();
        entries.get_mut(number.0 as usize).and_then(Option::take).ok_or(TransferError::UnknownFile(number.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_after_removal() {
        let files = Files::new();
        let (a, b) = (files.add('a').unwrap(), files.add('b').unwrap());
        assert_eq!((files.get(a).unwrap(), files.get(b).unwrap()), ('a', 'b'));
        assert_eq!(files.remove(a).unwrap(), 'a');
        assert!(matches!(files.get(a), Err(TransferError::UnknownFile(0))));
        assert!(matches!(files.remove(a), Err(TransferError::UnknownFile(0))));
        assert_eq!(files.add('c').unwrap(), a);
    }

    #[test]
    fn full_table_refuses_files() {
        let files = Files::new();
        for file in 0..FILES_MAX {
            files.add(file).unwrap();
        }
        assert!(matches!(files.add(0), Err(TransferError::TooManyFiles(FILES_MAX))));
    }
}
