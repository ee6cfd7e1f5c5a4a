//! What must always be true of a log: read at the start, or made.

use crate::{L3Error, L3Options};
use larder_device::{Device, SmallFile};
use larder_format::codec::DecodeError;
use larder_format::disk::{LogId, Superblock, VERSION};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use std::path::PathBuf;

/// The superblock; for a new log, one is made by the options. The flag tells whether it is new.
pub(crate) async fn find_or_make(device: &dyn Device, options: &L3Options) -> Result<(Superblock, bool), L3Error> {
    let file = device.path().join(SmallFile::Superblock.name());
    match device.load(SmallFile::Superblock).await.map_err(L3Error::io("reading", &file))? {
        Some(bytes) => Ok((decode(file, &bytes)?, false)),
        None => {
            let segments = device.segments().await.map_err(L3Error::io("listing", device.path()))?;
            if !segments.is_empty() {
                return Err(L3Error::Superblock {
                    file,
                    problem: "it is missing, but there are segments".into(),
                    advice: "put the file back, or remove all *.seg files beside it to begin an empty log".into(),
                });
            }
            Ok((make(device, options, file).await?, true))
        }
    }
}

async fn make(device: &dyn Device, options: &L3Options, file: PathBuf) -> Result<Superblock, L3Error> {
    let segment_bytes = options.segment_bytes();
    options.segments_max(segment_bytes)?;
    let superblock = Superblock { log_id: new_log_id(options.seed), segment_bytes };
    let saved = device.save(SmallFile::Superblock, superblock.encode()).await;
    saved.map_err(L3Error::io("writing", &file))?;
    Ok(superblock)
}

/// Strangers must not guess it, but with a seed, runs can be repeated.
fn new_log_id(seed: Option<u64>) -> LogId {
    let mut log_id = LogId::default();
    match seed {
        Some(seed) => StdRng::seed_from_u64(seed).fill_bytes(&mut log_id),
        None => rand::rng().fill_bytes(&mut log_id),
    }
    log_id
}

fn decode(file: PathBuf, bytes: &[u8]) -> Result<Superblock, L3Error> {
    Superblock::decode(bytes).map_err(|error| {
        let advice = match error {
            DecodeError::Version { .. } => format!(
                "start the version of Larder that wrote it, or give this one (which reads version {VERSION}) another \
                 directory"
            ),
            _ => "restore the file, or remove the whole directory to begin an empty log (pages in it are lost)".into(),
        };
        L3Error::Superblock { file, problem: error.to_string(), advice }
    })
}
