//! The superblock: the identity of a log and its segment size. It never changes after the log is
//! created. Two files hold it, because no segment can be used without it.
//!
//! Invariants:
//! - From the creation of the log on, at least one copy on the device is valid. A new log writes
//!   one copy durably, then the other, and uses neither before. A start replaces a damaged or
//!   missing copy by the other one, atomically, and never both.
//! - A start never chooses between two valid copies that differ: an operator mixed two logs.

use crate::{L3Error, L3Options};
use larder_format::codec::DecodeError;
use larder_format::disk::{LogId, Superblock, VERSION};
use larder_io::{Device, SmallFile};
use rand::RngCore;
use std::io;
use std::path::PathBuf;

/// The copies, in the order in which a new log writes them.
const COPIES: [SmallFile; 2] = [SmallFile::Superblock, SmallFile::SuperblockCopy];

/// State of one copy on the device.
#[derive(Debug)]
enum Copy {
    Valid(Superblock),
    Missing,
    Damaged(DecodeError),
    Unreadable(io::Error),
}

impl Copy {
    async fn load(device: &dyn Device, file: SmallFile) -> Copy {
        match device.load(file).await {
            Ok(Some(bytes)) => Superblock::decode(&bytes).map_or_else(Copy::Damaged, Copy::Valid),
            Ok(None) => Copy::Missing,
            Err(error) => Copy::Unreadable(error),
        }
    }

    fn problem(&self) -> String {
        match self {
            Copy::Valid(_) => "it is valid".into(),
            Copy::Missing => "it is missing".into(),
            Copy::Damaged(error) => error.to_string(),
            Copy::Unreadable(error) => error.to_string(),
        }
    }
}

fn path(device: &dyn Device, file: SmallFile) -> PathBuf {
    device.path().join(file.name())
}

/// Reads the superblock, or creates that of a new log. Returns `true` with it if the log is new.
///
/// Repairs a copy that is not valid. A failure of that is only logged, because the next start tries
/// again.
pub(crate) async fn load_or_create(device: &dyn Device, options: &L3Options) -> Result<(Superblock, bool), L3Error> {
    let [first, second] = COPIES;
    match (Copy::load(device, first).await, Copy::load(device, second).await) {
        // Another version may use the copies in another way.
        (Copy::Damaged(error @ DecodeError::Version { .. }), _) => Err(unusable(path(device, first), &error)),
        (_, Copy::Damaged(error @ DecodeError::Version { .. })) => Err(unusable(path(device, second), &error)),
        (Copy::Valid(superblock), Copy::Valid(other)) if superblock == other => Ok((superblock, false)),
        (Copy::Valid(_), Copy::Valid(_)) => Err(L3Error::Superblock {
            file: path(device, first),
            problem: format!("it is of another log than {}", second.name()),
            advice: format!(
                "remove the one of {} and {} that does not belong to the segments",
                first.name(),
                second.name()
            ),
        }),
        (Copy::Valid(superblock), broken) => Ok((repair(device, second, broken, superblock).await, false)),
        (broken, Copy::Valid(superblock)) => Ok((repair(device, first, broken, superblock).await, false)),
        (Copy::Damaged(error), _) => Err(unusable(path(device, first), &error)),
        (_, Copy::Damaged(error)) => Err(unusable(path(device, second), &error)),
        // It may be readable later, so the log is not new.
        (Copy::Unreadable(error), _) => Err(L3Error::io("read", path(device, first))(error)),
        (_, Copy::Unreadable(error)) => Err(L3Error::io("read", path(device, second))(error)),
        (Copy::Missing, Copy::Missing) => create(device, options).await.map(|superblock| (superblock, true)),
    }
}

/// Replaces the copy `file` by the other one.
async fn repair(device: &dyn Device, file: SmallFile, broken: Copy, superblock: Superblock) -> Superblock {
    let problem = broken.problem();
    let saved = device.save(file, superblock.encode()).await;
    let file = path(device, file);
    let file = file.display();
    match saved {
        Ok(()) => tracing::warn!(%file, %problem, "L3: a copy of the superblock was not valid; it was written again"),
        Err(error) => tracing::warn!(
            %file, %problem, %error,
            "L3: a copy of the superblock is not valid and cannot be written; the next start tries again"
        ),
    }
    superblock
}

async fn create(device: &dyn Device, options: &L3Options) -> Result<Superblock, L3Error> {
    let segments = device.segments().await.map_err(L3Error::io("list the segments in", device.path()))?;
    // A new superblock would have another identity, and recovery would take all segments for
    // foreign files.
    if !segments.is_empty() {
        return Err(L3Error::Superblock {
            file: path(device, SmallFile::Superblock),
            problem: "it and its copy are missing, but there are segments".into(),
            advice: "restore the file, or remove all *.seg files beside it to start with an empty log".into(),
        });
    }
    let segment_bytes = options.segment_bytes();
    // Refuses options that contradict each other before anything is written.
    options.segments_max(segment_bytes)?;
    let superblock = Superblock { log_id: new_log_id(options.seed), segment_bytes };
    // One after the other: a crash leaves none, the first, or both.
    for file in COPIES {
        let saved = device.save(file, superblock.encode()).await;
        saved.map_err(L3Error::io("write", path(device, file)))?;
    }
    Ok(superblock)
}

/// Chooses a random identity. It is secret: a client that knew it could forge records inside the
/// payload of a page. With a seed, a simulation repeats it.
fn new_log_id(seed: Option<u64>) -> LogId {
    let mut log_id = LogId::default();
    larder_runtime::random::generator(seed).fill_bytes(&mut log_id);
    log_id
}

fn unusable(file: PathBuf, error: &DecodeError) -> L3Error {
    let advice = match error {
        DecodeError::Version { .. } => format!(
            "start the version of Larder that wrote it, or give this one (which reads version {VERSION}) another \
             directory"
        ),
        _ => "restore the file, or remove the whole directory to start with an empty log (its pages are lost)".into(),
    };
    L3Error::Superblock { file, problem: error.to_string(), advice }
}
