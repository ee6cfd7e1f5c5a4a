//! The superblock: the identity of a log and its segment size. It never changes after the log is
//! created.

use crate::{L3Error, L3Options};
use larder_format::codec::DecodeError;
use larder_format::disk::{LogId, Superblock, VERSION};
use larder_io::{Device, SmallFile};
use rand::RngCore;
use std::path::PathBuf;

/// Reads the superblock, or creates that of a new log. Returns `true` with it if the log is new.
pub(crate) async fn load_or_create(device: &dyn Device, options: &L3Options) -> Result<(Superblock, bool), L3Error> {
    let file = device.path().join(SmallFile::Superblock.name());
    if let Some(bytes) = device.load(SmallFile::Superblock).await.map_err(L3Error::io("read", &file))? {
        return Ok((decode(file, &bytes)?, false));
    }
    let segments = device.segments().await.map_err(L3Error::io("list the segments in", device.path()))?;
    // A new superblock would have another identity, and recovery would take all segments for
    // foreign files.
    if !segments.is_empty() {
        return Err(L3Error::Superblock {
            file,
            problem: "it is missing, but there are segments".into(),
            advice: "restore the file, or remove all *.seg files beside it to start with an empty log".into(),
        });
    }
    Ok((create(device, options, file).await?, true))
}

async fn create(device: &dyn Device, options: &L3Options, file: PathBuf) -> Result<Superblock, L3Error> {
    let segment_bytes = options.segment_bytes();
    // Refuses options that contradict each other before anything is written.
    options.segments_max(segment_bytes)?;
    let superblock = Superblock { log_id: new_log_id(options.seed), segment_bytes };
    let saved = device.save(SmallFile::Superblock, superblock.encode()).await;
    saved.map_err(L3Error::io("write", &file))?;
    Ok(superblock)
}

/// Chooses a random identity. It is secret: a client that knew it could forge records inside the
/// payload of a page. With a seed, a simulation repeats it.
fn new_log_id(seed: Option<u64>) -> LogId {
    let mut log_id = LogId::default();
    larder_runtime::random::generator(seed).fill_bytes(&mut log_id);
    log_id
}

fn decode(file: PathBuf, bytes: &[u8]) -> Result<Superblock, L3Error> {
    Superblock::decode(bytes).map_err(|error| {
        let advice = match error {
            DecodeError::Version { .. } => format!(
                "start the version of Larder that wrote it, or give this one (which reads version {VERSION}) another \
                 directory"
            ),
            _ => {
                "restore the file, or remove the whole directory to start with an empty log (its pages are lost)".into()
            }
        };
        L3Error::Superblock { file, problem: error.to_string(), advice }
    })
}
