//! The files that are measured and checked.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

const SKIPPED_FOLDERS: &[&str] = &["target", "node_modules", "__pycache__", "corpus", "larder-data"];
const SKIPPED_FILES: &[&str] = &["store/ibverbs-sys/src/bindings.rs"];

#[derive(Debug, Clone)]
pub struct SourceFile {
    pub path: String,
    pub text: String,
}

impl SourceFile {
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub fn is_markdown(&self) -> bool {
        self.path.ends_with(".md")
    }
}

/// Reads every `.rs` and `.md` file below `root`, sorted by path. Includes files that git does not
/// track yet.
pub fn read_tree(root: &Path) -> Result<Vec<SourceFile>> {
    let mut paths = Vec::new();
    walk(root, &mut paths)?;
    let mut files = Vec::new();
    for path in paths {
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        if SKIPPED_FILES.contains(&name.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        files.push(SourceFile { path: name, text });
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn walk(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        if kind.is_dir() && !name.starts_with('.') && !SKIPPED_FOLDERS.contains(&name.as_str()) {
            walk(&entry.path(), paths)?;
        } else if kind.is_file() && (name.ends_with(".rs") || name.ends_with(".md")) {
            paths.push(entry.path());
        }
    }
    Ok(())
}

pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}
