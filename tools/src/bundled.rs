//! Model compiled into the binary, so that `larder up` needs no download.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

pub const NAME: &str = "larder-tiny";

macro_rules! files {
    ($($name:literal),+) => {
        &[$(($name, include_bytes!(concat!("../../engine/models/larder-tiny/", $name)))),+]
    };
}

const FILES: &[(&str, &[u8])] =
    files!["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

/// Files of the model that describe its tokens.
const TOKENIZER_FILES: [&str; 3] = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"];

/// Writes the tokenizer of the bundled model to `folder`, for a model with at least as many tokens.
pub fn copy_tokenizer(folder: &Path) -> Result<()> {
    for (name, bytes) in FILES.iter().filter(|(name, _)| TOKENIZER_FILES.contains(name)) {
        let path = folder.join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Writes the bundled model below `data_dir` and returns its folder. Files that are already there
/// with the same content are left alone.
pub fn unpack(data_dir: &Path) -> Result<PathBuf> {
    let folder = data_dir.join("models").join(NAME);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, bytes) in FILES {
        let path = folder.join(name);
        if fs::read(&path).is_ok_and(|there| there == *bytes) {
            continue;
        }
        // A crash between the two steps leaves an old file or none, never half of a new one.
        let staged = folder.join(format!("{name}.new"));
        fs::write(&staged, bytes)
            .and_then(|()| fs::rename(&staged, &path))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(folder)
}
