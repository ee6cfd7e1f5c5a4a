//! `larder verify`: checks the L3 logs of stopped nodes and optionally repairs them.
//!
//! Invariants:
//! - It depends on `larder-format` only and shares no code with a node's recovery. A bug in one
//!   does not hide in the other.
//! - It holds the lock of a log while it reads it, so it never runs beside a node.

use crate::errors;
use crate::output::say;
use anyhow::{Context, Result, anyhow, bail};
use bytesize::ByteSize;
use clap::Args;
use larder_format::disk::{BLOCK_BYTES, Superblock, misplaced_names};
use larder_format::verify::{Damage, Repair, SegmentEpochs, SegmentReport, header_epoch, repair, verify};
use serde::Serialize;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const SUPERBLOCK_FILE: &str = "larder.sb";
const SUPERBLOCK_COPY_FILE: &str = "larder.sb2";
const LOCK_FILE: &str = "larder.lock";
const SEGMENT_SUFFIX: &str = ".seg";
const SEGMENT_DIGITS: usize = 8;
const L3_DIR: &str = "l3";
pub const NODE_DIR_PREFIX: &str = "node-";

const EXIT_CLEAN: u8 = 0;
const EXIT_DAMAGED: u8 = 1;
const EXIT_UNREADABLE: u8 = 2;

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Data directory of `larder up` or of a store node, or the directory of one L3 log
    #[arg(value_name = "DIRECTORY")]
    dir: PathBuf,
    /// Remove damaged pages and segments. The node then starts with the rest
    #[arg(long)]
    repair: bool,
    /// Print one JSON object per damage, then one summary object per log
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Default, Serialize)]
struct Summary {
    dir: String,
    segments: u64,
    pages: u64,
    payload_bytes: u64,
    tombstones: u64,
    damages: u64,
    segments_lost: u64,
    /// Segments that no repair can save. The next start of the node removes them, together with
    /// every segment whose tombstones they may have held.
    segments_unrepairable: u64,
    misplaced_files: u64,
    entries_removed: u64,
    entries_rewritten: u64,
}

/// Checks every log below the directory and returns the exit code. A log that cannot be read does
/// not keep the others from being checked.
pub async fn run(args: VerifyArgs) -> ExitCode {
    let checked = tokio::task::spawn_blocking(move || check_all(&args)).await;
    ExitCode::from(checked.unwrap_or_else(|error| failed(&error.into())))
}

fn failed(error: &anyhow::Error) -> u8 {
    eprintln!("larder: {}", errors::describe(error));
    EXIT_UNREADABLE
}

fn check_all(args: &VerifyArgs) -> u8 {
    match find_logs(&args.dir) {
        Ok(logs) => {
            let codes = logs.iter().map(|log| check(args, log).unwrap_or_else(|error| failed(&error)));
            codes.max().unwrap_or(EXIT_CLEAN)
        }
        Err(error) => failed(&error),
    }
}

/// Finds the logs below `dir`: in it, in its `l3`, or in the `l3` of each of its node directories.
/// The first place with a log decides.
fn find_logs(dir: &Path) -> Result<Vec<PathBuf>> {
    let has_log = |dir: &Path| [SUPERBLOCK_FILE, SUPERBLOCK_COPY_FILE].iter().any(|file| dir.join(file).is_file());
    for candidate in [dir.to_path_buf(), dir.join(L3_DIR)] {
        if has_log(&candidate) {
            return Ok(vec![candidate]);
        }
    }
    let mut logs = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(NODE_DIR_PREFIX));
        let number = name.and_then(|number| number.parse::<u32>().ok());
        let log = path.join(L3_DIR);
        if let Some(number) = number.filter(|_| has_log(&log)) {
            logs.push((number, log));
        }
    }
    if logs.is_empty() {
        bail!(
            "no L3 log in {}: no {SUPERBLOCK_FILE} there, in {L3_DIR}/ or in {NODE_DIR_PREFIX}*/{L3_DIR}/ [LRD0604]",
            dir.display()
        );
    }
    logs.sort();
    Ok(logs.into_iter().map(|(_, log)| log).collect())
}

fn check(args: &VerifyArgs, dir: &Path) -> Result<u8> {
    let superblock = read_superblock(dir)?;
    let _lock = lock(dir)?;
    let mut summary = Summary { dir: dir.display().to_string(), ..Summary::default() };
    let segments = segments(dir)?;
    let epochs = segment_epochs(&superblock, &segments)?;
    let mut unusable = Vec::new();
    for (segment, path) in segments {
        let checked = check_segment(args.repair, &superblock, segment, &epochs, &path);
        let checked = checked.with_context(|| path.display().to_string())?;
        checked.found.damages.iter().try_for_each(|damage| print_damage(args.json, dir, damage))?;
        summary.add(&checked);
        if checked.remove {
            unusable.push((segment, path, checked.found.misplaced));
        }
    }
    // The node's next start decides about unrepairable segments. It needs every file for that, so
    // nothing is removed here.
    if args.repair && summary.segments_unrepairable == 0 {
        for (segment, path, misplaced) in unusable {
            let removed = match misplaced {
                true => rename_misplaced(dir, segment, &path),
                false => std::fs::remove_file(&path).map_err(Into::into),
            };
            removed.with_context(|| path.display().to_string())?;
        }
        // Makes the removals and renames durable.
        File::open(dir)?.sync_all()?;
    }
    summary.print(args)?;
    let clean = summary.damages == 0 || args.repair && summary.segments_unrepairable == 0;
    Ok(if clean { EXIT_CLEAN } else { EXIT_DAMAGED })
}

/// Reads the epoch of every segment from its header. For a segment without a readable header, the
/// epoch is inferred from its records.
fn segment_epochs(superblock: &Superblock, segments: &[(u32, PathBuf)]) -> Result<SegmentEpochs> {
    let mut epochs = SegmentEpochs::default();
    let mut headerless = Vec::new();
    for (segment, path) in segments {
        let mut file = File::open(path).with_context(|| path.display().to_string())?;
        match header_epoch(superblock, *segment, &mut file) {
            Some(epoch) => epochs.add(*segment, epoch),
            None => headerless.push((*segment, file)),
        }
    }
    // Records are judged by the headers alone, so that the order of the segments has no influence.
    let by_header = epochs.clone();
    for (segment, mut file) in headerless {
        let found = verify(superblock, segment, &by_header, &mut file);
        epochs.learn(&found);
    }
    Ok(epochs)
}

/// Renames a misplaced file to the first free name that recovery ignores. The file stays for an
/// operator to examine.
fn rename_misplaced(dir: &Path, segment: u32, path: &Path) -> Result<()> {
    let free = misplaced_names(segment).map(|name| dir.join(name)).find(|name| name.symlink_metadata().is_err());
    let free = free.context("too many misplaced files were renamed before: remove them")?;
    Ok(std::fs::rename(path, free)?)
}

fn check_segment(
    fix: bool,
    superblock: &Superblock,
    segment: u32,
    epochs: &SegmentEpochs,
    path: &Path,
) -> Result<Repair> {
    let mut file = OpenOptions::new().read(true).write(fix).open(path)?;
    if fix {
        return Ok(repair(superblock, segment, epochs, &mut file)?);
    }
    let found = verify(superblock, segment, epochs, &mut file);
    Ok(Repair { remove: found.epoch.is_none() && !found.unrepairable, found, voided: 0, restored: 0 })
}

/// Reads the superblock, or its copy if it is not valid. The next start of the node restores the
/// invalid one.
fn read_superblock(dir: &Path) -> Result<Superblock> {
    read_superblock_in(dir, SUPERBLOCK_FILE).or_else(|error| {
        let copy = read_superblock_in(dir, SUPERBLOCK_COPY_FILE).map_err(|_| error)?;
        eprintln!("larder: {} is not valid; using {SUPERBLOCK_COPY_FILE}", dir.join(SUPERBLOCK_FILE).display());
        Ok(copy)
    })
}

fn read_superblock_in(dir: &Path, file: &str) -> Result<Superblock> {
    let path = dir.join(file);
    let mut block = vec![0; BLOCK_BYTES];
    let read = File::open(&path).and_then(|mut file| file.read_exact(&mut block));
    read.map_err(|error| anyhow!("cannot read {}: {error} [LRD0605]", path.display()))?;
    Superblock::decode(&block).map_err(|error| anyhow!("{}: {error} [LRD0605]", path.display()))
}

/// Takes the lock that a running node holds. Fails at once if the node runs, because a check of a
/// changing log means nothing.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK_FILE);
    let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = opened.with_context(|| format!("cannot open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("{} is in use: stop the node first [LRD0201]", dir.display()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

/// Returns the segment files with their numbers, in ascending order. Other files are ignored.
fn segments(dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(SEGMENT_SUFFIX));
        let digits = name.filter(|name| name.len() == SEGMENT_DIGITS && name.bytes().all(|byte| byte.is_ascii_digit()));
        if let Some(number) = digits.and_then(|digits| digits.parse().ok()) {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found)
}

fn print_damage(json: bool, dir: &Path, damage: &Damage) -> Result<()> {
    if !json {
        say!("{damage}");
        return Ok(());
    }
    let Damage { segment, offset, bytes, page, reason } = damage;
    let namespace = page.map(|page| page.namespace);
    let line = serde_json::json!({
        "dir": dir, "segment": segment, "offset": offset, "bytes": bytes, "reason": reason.to_string(),
        "namespace": namespace.map(|namespace| hex(&namespace.0)), "key": page.map(|page| page.key.to_string()),
    });
    say!("{line}");
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Summary {
    fn add(&mut self, checked: &Repair) {
        let SegmentReport { pages, payload_bytes, tombstones, damages, unrepairable, misplaced, .. } = &checked.found;
        self.segments += 1;
        self.pages += pages;
        self.payload_bytes += payload_bytes;
        self.tombstones += tombstones;
        self.damages += damages.len() as u64;
        self.segments_lost += u64::from(checked.remove && !misplaced);
        self.misplaced_files += u64::from(*misplaced);
        self.segments_unrepairable += u64::from(*unrepairable);
        self.entries_removed += checked.voided;
        self.entries_rewritten += checked.restored;
    }

    fn print(&self, args: &VerifyArgs) -> Result<()> {
        if args.json {
            say!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        let Summary { dir, segments, pages, payload_bytes, tombstones, damages, segments_lost, .. } = self;
        say!("{dir}: segments: {segments}, pages: {pages} ({}), tombstones: {tombstones}", ByteSize(*payload_bytes));
        let repaired = args.repair && self.segments_unrepairable == 0;
        match (damages, args.repair) {
            (0, _) => say!("  no damage"),
            (_, false) => say!("  damage: {damages}, segments lost: {segments_lost}; `--repair` removes them"),
            (_, true) => {
                let Summary { entries_removed, entries_rewritten, .. } = self;
                let removed = if repaired { "removed" } else { "not removed yet" };
                say!(
                    "  damage: {damages}, entries removed: {entries_removed}, rewritten: {entries_rewritten}, segments \
                     lost and {removed}: {segments_lost}"
                );
            }
        }
        if self.misplaced_files > 0 {
            let action = if repaired { "renamed to *.stray" } else { "`--repair` renames them to *.stray" };
            say!("  files that do not belong to this log: {}; {action}", self.misplaced_files);
        }
        if self.segments_unrepairable > 0 {
            say!(
                "  segments beyond repair: {}. The next start removes them, and every segment that their lost \
                 tombstones may concern",
                self.segments_unrepairable
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_of_the_superblock_replaces_a_damaged_one() {
        let dir = tempfile::tempdir().unwrap();
        let superblock = Superblock { log_id: [7; 16], segment_bytes: 1 << 20 };
        std::fs::write(dir.path().join(SUPERBLOCK_COPY_FILE), superblock.encode()).unwrap();
        for damaged in [None, Some("damaged")] {
            if let Some(bytes) = damaged {
                std::fs::write(dir.path().join(SUPERBLOCK_FILE), bytes).unwrap();
            }
            assert_eq!(find_logs(dir.path()).unwrap(), [dir.path()]);
            assert_eq!(read_superblock(dir.path()).unwrap(), superblock);
        }
        std::fs::write(dir.path().join(SUPERBLOCK_COPY_FILE), "damaged too").unwrap();
        assert!(format!("{:#}", read_superblock(dir.path()).unwrap_err()).contains("LRD0605"));
    }

    #[test]
    fn logs_are_found_in_the_directory_itself_in_l3_and_in_node_directories() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let missing = find_logs(root).unwrap_err().to_string();
        assert!(missing.contains("no L3 log in") && missing.contains("larder.sb"), "{missing}");
        let make = |dir: &Path| {
            std::fs::create_dir_all(dir).unwrap();
            std::fs::write(dir.join(SUPERBLOCK_FILE), "").unwrap();
        };
        let logs = ["node-2/l3", "node-10/l3"].map(|name| root.join(name));
        logs.iter().for_each(|log| make(log));
        std::fs::create_dir_all(root.join("node-3")).unwrap();
        assert_eq!(find_logs(root).unwrap(), logs, "in the order of their numbers");
        assert_eq!(find_logs(&root.join("node-2")).unwrap(), logs[..1]);
        assert_eq!(find_logs(&logs[0]).unwrap(), logs[..1]);
        assert!(find_logs(&root.join("absent")).is_err());
    }
}
