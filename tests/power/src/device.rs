//! Block devices and file systems of the guest, by the programs that administrators use.

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use larder_tests::PATIENCE;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Disks of the virtual machine, in the order in which `tests/power/run` adds them.
const DATA: &str = "/dev/vda";
pub const LOG: &str = "/dev/vdb";
pub const REPLAYED: &str = "/dev/vdc";
const CHANGES: &str = "/dev/vdd";
/// Sectors per chunk of a snapshot: 4 KiB, the block size of the file systems.
const CHUNK_SECTORS: u32 = 8;
const KERNEL_MESSAGES_SHOWN: usize = 4;
const RETRY_PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum FileSystem {
    Ext4,
    Xfs,
}

impl FileSystem {
    fn name(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "ext4",
            FileSystem::Xfs => "xfs",
        }
    }

    /// Creates the file system without discards, which have no defined content. ext4 writes its
    /// tables now instead of later, beside the node.
    pub fn create(self, device: &Path) -> Result<()> {
        let options: &[&str] = match self {
            FileSystem::Ext4 => &["-q", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"],
            FileSystem::Xfs => &["-q", "-K"],
        };
        let program = format!("mkfs.{}", self.name());
        run(&program, options.iter().map(OsStr::new).chain([device.as_os_str()]))
    }

    /// Mounts `device`, which repeats or undoes what its journal says about the last writes.
    pub fn mount(self, device: &Path, directory: &Path) -> Result<Mount> {
        std::fs::create_dir_all(directory)?;
        let arguments = [OsStr::new("-t"), OsStr::new(self.name()), device.as_os_str(), directory.as_os_str()];
        run("mount", arguments).with_context(last_kernel_messages)?;
        Ok(Mount { directory: directory.to_path_buf() })
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

pub struct Mount {
    directory: PathBuf,
}

impl Mount {
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Unmounts once the last process has left the file system. The kernel closes the files of an
    /// io_uring shortly after the end of its process.
    pub fn unmount(self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = run("umount", [self.directory.as_os_str()]) {
            ensure!(Instant::now() < deadline, "{error:#}");
            std::thread::sleep(RETRY_PAUSE);
        }
        Ok(())
    }
}

/// A device of the device mapper.
pub struct MappedDevice {
    name: &'static str,
}

impl MappedDevice {
    /// The data disk, with a log of all its writes on the log disk.
    pub fn logged() -> Result<MappedDevice> {
        MappedDevice::create("logged", &format!("0 {} log-writes {DATA} {LOG}", sectors(DATA)?))
    }

    /// A view of the replayed disk. Changes go to another disk, and end with the view.
    pub fn snapshot() -> Result<MappedDevice> {
        let sectors = sectors(REPLAYED)?;
        MappedDevice::create("snapshot", &format!("0 {sectors} snapshot {REPLAYED} {CHANGES} N {CHUNK_SECTORS}"))
    }

    fn create(name: &'static str, table: &str) -> Result<MappedDevice> {
        run("dmsetup", ["create", name, "--table", table])?;
        Ok(MappedDevice { name })
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/dev/mapper").join(self.name)
    }

    /// Adds a mark to the log of a logged device, behind all writes that a flush has made durable.
    pub fn mark(&self, mark: &str) -> Result<()> {
        run("dmsetup", ["message", self.name, "0", "mark", mark])
    }

    pub fn remove(self) -> Result<()> {
        run("dmsetup", ["remove", self.name])
    }
}

/// Messages in which a file system says why it was not mounted.
fn last_kernel_messages() -> String {
    let output = Command::new("dmesg").output().map(|output| output.stdout).unwrap_or_default();
    let output = String::from_utf8_lossy(&output);
    let last = output.lines().rev().take(KERNEL_MESSAGES_SHOWN).collect::<Vec<_>>();
    last.into_iter().rev().collect::<Vec<_>>().join("\n")
}

fn sectors(disk: &str) -> Result<u64> {
    let path = Path::new("/sys/class/block").join(disk.trim_start_matches("/dev/")).join("size");
    let size = std::fs::read_to_string(&path).with_context(|| format!("there is no disk {disk}"))?;
    Ok(size.trim().parse()?)
}

fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Result<()> {
    // The guest has no udev that would create the device nodes.
    let mut command = Command::new(program);
    command.args(arguments).env("DM_DISABLE_UDEV", "1");
    let output = command.output().with_context(|| format!("cannot run {program}"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
