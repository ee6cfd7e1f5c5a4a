//! Facts about the machine under a node, for the status and `larder doctor`.
//!
//! Invariant: no request waits for the machine. A file system that hangs would stop the thread that
//! asks it. So a background task reads the facts, and the status shows the latest with their age.

#![allow(clippy::disallowed_methods, reason = "reads files of the kernel; simulated nodes have no host")]

use crate::state::NodeState;
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use rustix::fs::{StatVfsMountFlags, statfs, statvfs};
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};
use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Time between two readings.
const READ_INTERVAL: Duration = Duration::from_secs(10);
/// Bit of `CAP_IPC_LOCK` in the capability sets of `/proc/self/status`.
const CAP_IPC_LOCK: u32 = 14;
/// Magic numbers of file systems, from `linux/magic.h` and the sources of ZFS.
const FILE_SYSTEMS: [(u32, &str); 11] = [
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0xf2f5_2010, "f2fs"),
    (0x2fc1_2fc1, "zfs"),
    (0x0102_1994, "tmpfs"),
    (0x794c_7630, "overlay"),
    (0x6573_5546, "fuse"),
    (0x0000_6969, "nfs"),
    (0xff53_4d42, "cifs"),
    (0x00c3_6400, "ceph"),
];

pub(crate) struct Host {
    /// Directories of the L3 devices.
    directories: Vec<PathBuf>,
    latest: Mutex<(Instant, Value)>,
}

impl Host {
    /// Reads the facts for the first time, on a blocking thread.
    pub(crate) async fn read(directories: Vec<PathBuf>) -> Host {
        let copy = directories.clone();
        let facts = tokio::task::spawn_blocking(move || facts(&copy)).await.unwrap_or_default();
        Host { directories, latest: Mutex::new((now(), facts)) }
    }

    /// The latest facts, with their age. [`keep_current`] bounds the age while the file systems
    /// answer.
    pub(crate) fn status(&self) -> Value {
        let (read_at, mut facts) = self.latest.lock().clone();
        facts["age_seconds"] = now().saturating_duration_since(read_at).as_secs().into();
        facts
    }
}

/// Reads the facts again every [`READ_INTERVAL`], until `stop`. A reading that hangs holds one
/// thread, and no other begins.
pub(crate) async fn keep_current(state: Arc<NodeState>, stop: CancellationToken) {
    let Some(host) = &state.host else { return };
    let read_again = async {
        loop {
            tokio::time::sleep(READ_INTERVAL).await;
            let directories = host.directories.clone();
            if let Ok(facts) = tokio::task::spawn_blocking(move || facts(&directories)).await {
                *host.latest.lock() = (now(), facts);
            }
        }
    };
    stop.run_until_cancelled(read_again).await;
}

fn facts(directories: &[PathBuf]) -> Value {
    let process = read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name| kib(&process, name).map(|kib| kib << 10);
    let capabilities = field(&process, "CapEff:").and_then(|set| u64::from_str_radix(set, 16).ok());
    json!({
        "kernel": text("/proc/sys/kernel/osrelease"),
        // A limit of `None` means unlimited.
        "memlock_bytes": getrlimit(Resource::Memlock).current,
        "may_exceed_memlock": capabilities.map(|set| set >> CAP_IPC_LOCK & 1 == 1),
        "locked_bytes": bytes("VmLck:"),
        "pinned_bytes": bytes("VmPin:"),
        "io_uring_disabled": text("/proc/sys/kernel/io_uring_disabled").and_then(|value| value.parse::<u8>().ok()),
        "huge_pages": huge_pages("enabled"),
        "shared_huge_pages": huge_pages("shmem_enabled"),
        "disks": directories.iter().map(|directory| disk(directory)).collect::<Vec<_>>(),
    })
}

fn disk(directory: &Path) -> Value {
    let mut disk = json!({ "dir": directory.display().to_string() });
    match (statfs(directory), statvfs(directory)) {
        (Ok(kind), Ok(room)) => {
            // The kernel's numbers have 32 bits; some platforms extend the sign.
            let magic = kind.f_type as u32;
            let known = FILE_SYSTEMS.iter().find(|(number, _)| *number == magic);
            disk["file_system"] = known.map_or(format!("{magic:#x}"), |(_, name)| name.to_string()).into();
            disk["bytes_free"] = room.f_bavail.saturating_mul(room.f_frsize).into();
            disk["bytes_total"] = room.f_blocks.saturating_mul(room.f_frsize).into();
            disk["read_only"] = room.f_flag.contains(StatVfsMountFlags::RDONLY).into();
        }
        (Err(error), _) | (_, Err(error)) => disk["error"] = error.to_string().into(),
    }
    disk
}

/// Mode of a file of `transparent_hugepage`.
fn huge_pages(file: &str) -> Option<String> {
    selected(&text(&format!("/sys/kernel/mm/transparent_hugepage/{file}"))?)
}

fn text(path: &str) -> Option<String> {
    read_to_string(path).ok().map(|text| text.trim().to_string())
}

/// Value of a line of `/proc/self/status`.
fn field<'a>(lines: &'a str, name: &str) -> Option<&'a str> {
    lines.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn kib(lines: &str, name: &str) -> Option<u64> {
    field(lines, name)?.strip_suffix("kB")?.trim().parse().ok()
}

/// The mode in brackets, as in `always [madvise] never`.
fn selected(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    rest.split_once(']').map(|(mode, _)| mode.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_this_machine_are_plausible() {
        let directory = tempfile::tempdir().unwrap();
        let facts = facts(&[directory.path().into(), "/no such directory".into()]);
        assert!(facts["kernel"].as_str().is_some_and(|kernel| kernel.contains('.')), "{facts}");
        assert!(facts["pinned_bytes"].is_u64() && facts["may_exceed_memlock"].is_boolean(), "{facts}");
        let [disk, missing] = &facts["disks"].as_array().unwrap()[..] else { panic!("{facts}") };
        assert!(disk["bytes_total"].as_u64() >= disk["bytes_free"].as_u64() && disk["read_only"] == false, "{facts}");
        assert!(missing["error"].is_string(), "{facts}");
    }

    #[test]
    fn mode_in_brackets_is_the_selected_one() {
        assert_eq!(selected("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(selected("always never"), None);
    }
}
