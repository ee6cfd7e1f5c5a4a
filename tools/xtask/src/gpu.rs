//! `target/gpu`: the measurements of a device and of a model on it, in a folder that runs without
//! this tree.

use crate::runner::{Runner, execute};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// Largest size of the folder without results. Machines with a GPU often accept no larger upload.
const BYTES_MAX: u64 = 64 << 20;
/// Files of the package, from `benches/gpu`.
const FILES: [&str; 2] = ["run", "torch_rates.py"];
/// Programs of the package, with their crates.
const PROGRAMS: [(&str, &str); 2] = [("larder-benches", "bench-gpu"), ("larder", "larder")];

/// Builds the package. With a device, runs it here.
pub fn run(runner: &Runner, device: Option<&str>, arguments: &[String]) -> Result<()> {
    let folder = pack(runner)?;
    match device {
        Some(device) => execute(runner.command(&folder.join("run")).args(["--device", device]).args(arguments)),
        None => {
            println!("Copy {} to a machine with a GPU and run ./run there. It takes 8 minutes.", folder.display());
            Ok(())
        }
    }
}

fn pack(runner: &Runner) -> Result<PathBuf> {
    let folder = runner.root().join("target/gpu");
    std::fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    for (package, program) in PROGRAMS {
        runner.cargo(&["build", "--profile", "dist", "--quiet", "-p", package, "--bin", program])?;
        let (built, packed) = (runner.root().join("target/dist").join(program), folder.join(program));
        execute(runner.command("strip".as_ref()).arg("-o").arg(&packed).arg(&built))?;
    }
    for file in FILES {
        let from = runner.root().join("benches/gpu").join(file);
        std::fs::copy(&from, folder.join(file)).with_context(|| format!("copy {}", from.display()))?;
    }
    pack_kernels(runner, &folder)?;
    let programs = PROGRAMS.iter().map(|(_, program)| program);
    let bytes = FILES.iter().chain(programs).chain(&["kernels"]).map(|name| size(&folder.join(name)));
    let bytes = bytes.sum::<Result<u64>>()?;
    ensure!(bytes <= BYTES_MAX, "{} has {} MiB, the maximum is 64", folder.display(), bytes >> 20);
    println!("{}: {:.1} MiB", folder.display(), bytes as f64 / f64::from(1 << 20));
    Ok(folder)
}

/// Adds compiled kernels if NVRTC is installed here. `kernels/check` installs it.
fn pack_kernels(runner: &Runner, folder: &Path) -> Result<()> {
    let kernels = folder.join("kernels");
    if kernels.exists() {
        std::fs::remove_dir_all(&kernels).with_context(|| format!("remove {}", kernels.display()))?;
    }
    let Some(nvrtc) = nvrtc(&runner.tools()) else {
        println!(
            "No NVRTC here: the package runs only where NVRTC is installed. `kernels/check target/ci` installs it."
        );
        return Ok(());
    };
    let mut compile = runner.command(&folder.join("bench-gpu"));
    execute(compile.env("LD_LIBRARY_PATH", nvrtc).arg("--write-kernels").arg(kernels))
}

/// Folder of the library in the virtual environment of `.ci/run`.
fn nvrtc(tools: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(tools.join("venv/lib")).ok()?;
    let mut libraries = versions.flatten().map(|version| version.path().join("site-packages/nvidia/cu13/lib"));
    libraries.find(|library| library.join("libnvrtc.so.13").exists())
}

/// Bytes of a file, or of all files below a folder. 0 if there is none.
fn size(path: &Path) -> Result<u64> {
    if !path.exists() {
        return Ok(0);
    }
    let context = || format!("read {}", path.display());
    if path.is_dir() {
        let entries = std::fs::read_dir(path).with_context(context)?;
        return entries.map(|entry| size(&entry.with_context(context)?.path())).sum();
    }
    Ok(path.metadata().with_context(context)?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_counts_files_below_a_folder() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        std::fs::create_dir(folder.path().join("a")).expect("a folder can be made");
        std::fs::write(folder.path().join("a/b"), [0; 10]).expect("a file can be written");
        std::fs::write(folder.path().join("c"), [0; 5]).expect("a file can be written");
        assert_eq!(size(folder.path()).expect("the folder can be read"), 15);
        assert_eq!(size(&folder.path().join("absent")).expect("nothing is no error"), 0);
    }

    #[test]
    fn library_is_found_in_the_virtual_environment() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        assert_eq!(nvrtc(folder.path()), None);
        let library = folder.path().join("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&library).expect("a folder can be made");
        assert_eq!(nvrtc(folder.path()), None);
        std::fs::write(library.join("libnvrtc.so.13"), "").expect("a file can be written");
        assert_eq!(nvrtc(folder.path()), Some(library));
    }
}
