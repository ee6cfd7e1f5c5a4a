//! Reader of the log that the kernel's `log-writes` target keeps of all writes to a device.
//!
//! Format: `drivers/md/dm-log-writes.c` of Linux, and `log-writes.rst` in its documentation of the
//! device mapper. All integers are little-endian, and all positions count device sectors.
//!
//! ```text
//! sector 0   magic u64 │ version u64 │ entries u64 │ sector bytes u32
//! sector 1   entry: sector u64 │ sectors u64 │ flags u64 │ mark bytes u64 │ mark
//! sector 2   the data of that entry, then the next entry …
//! ```
//!
//! The target logs a write that has completed with the next flush that was submitted after it. So
//! the prefix of the log up to a flush is what the device had guaranteed then: no more, no less.

use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1 << 0;
pub const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;
const ENTRY_BYTES: usize = 32;
const SECTOR_BYTES_MAX: u64 = 4096;

/// Bytes written at one place of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    pub offset: u64,
    /// Place of the bytes in the log.
    logged_at: u64,
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// Without bytes for a flush alone.
    Write {
        write: Write,
        /// A flush, or a write past the device's cache. All entries up to here are durable.
        durable: bool,
    },
    Mark(String),
}

pub struct WriteLog {
    file: File,
    sector_bytes: u64,
    entries_left: u64,
    /// Position of the next entry, in bytes.
    at: u64,
}

impl WriteLog {
    /// Opens the log of a target that was removed: removal writes the last entries.
    pub fn open(path: &Path) -> Result<WriteLog> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let mut head = [0; 28];
        file.read_exact_at(&mut head, 0)?;
        ensure!(word(&head, 0) == MAGIC, "{} has no log of writes", path.display());
        ensure!(word(&head, 1) == VERSION, "the log of writes has version {}", word(&head, 1));
        let sector_bytes = word(&head, 3) & u64::from(u32::MAX);
        ensure!((512..=SECTOR_BYTES_MAX).contains(&sector_bytes), "sectors of {sector_bytes} bytes");
        Ok(WriteLog { file, sector_bytes, entries_left: word(&head, 2), at: sector_bytes })
    }

    pub fn sector_bytes(&self) -> u64 {
        self.sector_bytes
    }

    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        if self.entries_left == 0 {
            return Ok(None);
        }
        self.entries_left -= 1;
        let mut block = vec![0; self.sector_bytes as usize];
        self.file.read_exact_at(&mut block, self.at)?;
        let [sector, sectors, flags, mark_bytes] = [0, 1, 2, 3].map(|index| word(&block, index));
        let write = Write {
            offset: sector * self.sector_bytes,
            logged_at: self.at + self.sector_bytes,
            bytes: sectors * self.sector_bytes,
        };
        self.at = write.logged_at + write.bytes;
        if flags & DISCARD != 0 {
            bail!("the log has a discard, which has no defined content: make and mount the file system without");
        }
        if flags & MARK != 0 {
            let mark = block.get(ENTRY_BYTES..ENTRY_BYTES + mark_bytes as usize).context("a mark beyond its sector")?;
            return Ok(Some(Entry::Mark(String::from_utf8(mark.to_vec())?)));
        }
        Ok(Some(Entry::Write { write, durable: flags & (FLUSH | FUA) != 0 }))
    }

    pub fn data(&self, write: &Write) -> Result<Vec<u8>> {
        let mut data = vec![0; write.bytes as usize];
        self.file.read_exact_at(&mut data, write.logged_at)?;
        Ok(data)
    }
}

/// Returns the `index`-th word of eight bytes. The last one may be shorter.
fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    let found = bytes[index * 8..].len().min(8);
    word[..found].copy_from_slice(&bytes[index * 8..][..found]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub enum LogEntry {
        Write { sector: u64, sectors: u64, flags: u64 },
        Mark(String),
    }

    pub const FLUSH_ONLY: LogEntry = LogEntry::Write { sector: 0, sectors: 0, flags: FLUSH };

    pub fn write(sector: u64, flags: u64) -> LogEntry {
        LogEntry::Write { sector, sectors: 1, flags }
    }

    fn sector(words: &[u64], text: &str) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(text.as_bytes());
        bytes.resize(512, 0);
        bytes
    }

    fn open(log: Vec<u8>) -> Result<WriteLog> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), log)?;
        WriteLog::open(file.path())
    }

    /// Log in which each sector written holds its own number.
    pub fn log_of(entries: &[LogEntry]) -> WriteLog {
        let mut log = sector(&[MAGIC, VERSION, entries.len() as u64, 512], "");
        for entry in entries {
            match entry {
                LogEntry::Mark(text) => log.extend(sector(&[0, 0, MARK, text.len() as u64], text)),
                LogEntry::Write { sector: first, sectors, flags } => {
                    log.extend(sector(&[*first, *sectors, *flags, 0], ""));
                    (*first..first + sectors).for_each(|number| log.extend(sector(&[number], "")));
                }
            }
        }
        open(log).expect("a valid log")
    }

    #[test]
    fn entries_are_read_with_their_data_and_marks() {
        let mut log = log_of(&[
            LogEntry::Write { sector: 10, sectors: 2, flags: 0 },
            FLUSH_ONLY,
            LogEntry::Mark("end".into()),
            write(3, FUA | FLUSH),
        ]);
        let mut writes = Vec::new();
        let mut marks = Vec::new();
        while let Some(entry) = log.next_entry().unwrap() {
            match entry {
                Entry::Mark(mark) => marks.push((writes.len(), mark)),
                Entry::Write { write, durable } => {
                    let data = log.data(&write).unwrap();
                    let numbers: Vec<u64> = data.chunks(512).map(|sector| word(sector, 0)).collect();
                    writes.push((write.offset, numbers, durable));
                }
            }
        }
        assert_eq!(writes, [(10 * 512, vec![10, 11], false), (0, vec![], true), (3 * 512, vec![3], true)]);
        assert_eq!(marks, [(2, "end".to_string())]);
    }

    #[test]
    fn foreign_device_and_discard_are_refused() {
        assert!(open(sector(&[MAGIC + 1, VERSION, 0, 512], "")).is_err());
        assert!(open(sector(&[MAGIC, VERSION + 1, 0, 512], "")).is_err());
        assert!(log_of(&[LogEntry::Write { sector: 0, sectors: 0, flags: DISCARD }]).next_entry().is_err());
    }
}
