//! `larder verify`: looks through the L3 of a stopped node, and takes out what is damaged.
//!
//! It knows the format from `larder-format` alone, shares no code with the node's own recovery, and never works beside a
//! running node.

use crate::output::say;
use anyhow::{Context, Result, bail};
use clap::Args;
use larder_format::disk::{BLOCK_BYTES, Superblock, stray_names};
use larder_format::verify::{Damage, Lives, Repair, SegmentReport, header_life, repair, verify};
use serde::Serialize;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const SUPERBLOCK_FILE: &str = "larder.sb";
const LOCK_FILE: &str = "larder.lock";
const SEGMENT_SUFFIX: &str = ".seg";
/// Digits before it.
const SEGMENT_DIGITS: usize = 8;
/// Where a node keeps its L3 in its data directory.
const L3_DIR: &str = "l3";

const CLEAN: u8 = 0;
const DAMAGED: u8 = 1;
const CANNOT_READ: u8 = 2;

/// `larder verify`
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Directory of an L3, or the data directory of a node
    dir: PathBuf,
    /// Take out what is damaged: the node then starts with the rest
    #[arg(long)]
    repair: bool,
    /// One JSON object per damage, and one at the end
    #[arg(long)]
    json: bool,
}

/// All segments together.
#[derive(Debug, Default, Serialize)]
struct Summary {
    segments: u64,
    pages: u64,
    payload_bytes: u64,
    tombstones: u64,
    damages: u64,
    /// Segments of which nothing can be used.
    segments_lost: u64,
    /// Segments that no repair helps, for which the next start removes others.
    segments_hopeless: u64,
    /// Files with the name of a segment that are none of the log's.
    strays: u64,
    /// Pages and regions taken out.
    voided: u64,
    /// Tombstones and footers written again.
    restored: u64,
}

/// Exit code 0: clean, or repaired; 1: damage found; 2: cannot be read, or written.
pub async fn run(args: VerifyArgs) -> ExitCode {
    let ended = tokio::task::spawn_blocking(move || check(&args)).await;
    match ended.map_err(Into::into).and_then(|ended| ended) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("larder: {error:#}");
            ExitCode::from(CANNOT_READ)
        }
    }
}

fn check(args: &VerifyArgs) -> Result<u8> {
    let inner = args.dir.join(L3_DIR);
    let dir = if inner.join(SUPERBLOCK_FILE).is_file() { inner } else { args.dir.clone() };
    let superblock = read_superblock(&dir)?;
    let _lock = lock(&dir)?;
    let mut summary = Summary::default();
    let segments = segments(&dir)?;
    let lives = lives(&superblock, &segments)?;
    let mut useless = Vec::new();
    for (segment, path) in segments {
        let done = look(args.repair, &superblock, segment, &lives, &path);
        let done = done.with_context(|| path.display().to_string())?;
        done.found.damages.iter().try_for_each(|damage| print_damage(args.json, damage))?;
        summary.add(&done);
        if done.remove {
            useless.push((segment, path, done.found.stray));
        }
    }
    // The next start judges what is hopeless by all the files that there are.
    if args.repair && summary.segments_hopeless == 0 {
        for (segment, path, stray) in useless {
            let gone = if stray { set_aside(&dir, segment, &path) } else { Ok(std::fs::remove_file(&path)?) };
            gone.with_context(|| path.display().to_string())?;
        }
        File::open(&dir)?.sync_all()?;
    }
    summary.print(args, &dir)?;
    let clean = summary.damages == 0 || args.repair && summary.segments_hopeless == 0;
    Ok(if clean { CLEAN } else { DAMAGED })
}

/// What the headers say, and for segments without one what else is in them.
fn lives(superblock: &Superblock, segments: &[(u32, PathBuf)]) -> Result<Lives> {
    let (mut lives, mut headless) = (Lives::default(), Vec::new());
    for (segment, path) in segments {
        let mut file = File::open(path).with_context(|| path.display().to_string())?;
        match header_life(superblock, *segment, &mut file) {
            Some(life) => lives.add(*segment, life),
            None => headless.push((*segment, file)),
        }
    }
    let by_header = lives.clone();
    for (segment, mut file) in headless {
        let found = verify(superblock, segment, &by_header, &mut file);
        lives.learn(&found);
    }
    Ok(lives)
}

/// Gives a stray the first of its names that no file has.
fn set_aside(dir: &Path, segment: u32, path: &Path) -> Result<()> {
    let free = stray_names(segment).map(|name| dir.join(name)).find(|stray| stray.symlink_metadata().is_err());
    let stray = free.context("too many files were set aside: remove them")?;
    Ok(std::fs::rename(path, stray)?)
}

fn look(fix: bool, superblock: &Superblock, segment: u32, lives: &Lives, path: &Path) -> Result<Repair> {
    let mut file = OpenOptions::new().read(true).write(fix).open(path)?;
    if fix {
        return Ok(repair(superblock, segment, lives, &mut file)?);
    }
    let found = verify(superblock, segment, lives, &mut file);
    Ok(Repair { remove: found.life.is_none() && !found.hopeless, found, voided: 0, restored: 0 })
}

fn read_superblock(dir: &Path) -> Result<Superblock> {
    let path = dir.join(SUPERBLOCK_FILE);
    let mut block = vec![0; BLOCK_BYTES];
    let read = File::open(&path).and_then(|mut file| file.read_exact(&mut block));
    read.with_context(|| format!("{}: is this the directory of an L3?", path.display()))?;
    Superblock::decode(&block).with_context(|| path.display().to_string())
}

/// Holds off nodes while we look; refuses if one runs.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK_FILE);
    let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = opened.with_context(|| path.display().to_string())?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("{} is in use: stop the node first", dir.display()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Numbers and files, in the order of numbers. Other files are none of ours.
fn segments(dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
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

fn print_damage(json: bool, damage: &Damage) -> Result<()> {
    if !json {
        say!("{damage}");
        return Ok(());
    }
    let Damage { segment, offset, bytes, page, reason } = damage;
    let namespace = page.map(|page| page.namespace);
    let line = serde_json::json!({
        "segment": segment, "offset": offset, "bytes": bytes, "reason": reason.to_string(),
        "namespace": namespace.map(|namespace| hex(&namespace.0)), "key": page.map(|page| page.key.to_string()),
    });
    say!("{line}");
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Summary {
    fn add(&mut self, done: &Repair) {
        let SegmentReport { pages, payload_bytes, tombstones, damages, hopeless, stray, .. } = &done.found;
        self.segments += 1;
        self.pages += pages;
        self.payload_bytes += payload_bytes;
        self.tombstones += tombstones;
        self.damages += damages.len() as u64;
        self.segments_lost += u64::from(done.remove && !stray);
        self.strays += u64::from(*stray);
        self.segments_hopeless += u64::from(*hopeless);
        self.voided += done.voided;
        self.restored += done.restored;
    }

    fn print(&self, args: &VerifyArgs, dir: &Path) -> Result<()> {
        if args.json {
            say!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        let Summary { segments, pages, payload_bytes, tombstones, damages, segments_lost, voided, restored, .. } = self;
        say!(
            "{}: {segments} segments, {pages} whole pages of {payload_bytes} bytes, {tombstones} tombstones",
            dir.display()
        );
        match (damages, args.repair) {
            (0, _) => say!("no damage"),
            (_, false) => say!("{damages} damages, {segments_lost} segments lost; --repair takes them out"),
            (_, true) => {
                let removed = if self.segments_hopeless > 0 { "to be removed" } else { "removed" };
                say!(
                    "{damages} damages: {voided} taken out, {restored} written again, {segments_lost} segments {removed}"
                );
            }
        }
        if self.strays > 0 {
            let set_aside = args.repair && self.segments_hopeless == 0;
            let they = if set_aside { "were set aside as *.stray" } else { "are to be set aside" };
            say!("{} files are none of the log's segments, and {they}", self.strays);
        }
        if self.segments_hopeless > 0 {
            say!(
                "{} segments cannot be repaired: the next start removes them, or sets them aside, and removes every segment \
                 that they may have had tombstones for",
                self.segments_hopeless
            );
        }
        Ok(())
    }
}
