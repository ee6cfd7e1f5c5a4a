//! The model that comes with the binary: `larder up` works with nothing else on the machine.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the bundled model.
pub const NAME: &str = "larder-tiny";

macro_rules! files {
    ($($name:literal),+) => {
        &[$(($name, include_bytes!(concat!("../../engine/models/larder-tiny/", $name)))),+]
    };
}

const FILES: &[(&str, &[u8])] =
    files!["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

/// Writes the model folder below `data_dir`, unless it is there, and returns its path.
pub fn unpack(data_dir: &Path) -> Result<PathBuf> {
    let folder = data_dir.join("models").join(NAME);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, bytes) in FILES {
        let path = folder.join(name);
        if fs::read(&path).is_ok_and(|there| there == *bytes) {
            continue;
        }
        let staged = folder.join(format!("{name}.new"));
        fs::write(&staged, bytes)
            .and_then(|()| fs::rename(&staged, &path))
            .with_context(|| path.display().to_string())?;
    }
    Ok(folder)
}
