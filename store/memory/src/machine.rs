//! Memory that a process may take on this machine.
//!
//! Source: `Documentation/admin-guide/cgroup-v2.rst` of Linux. Control groups of version 1 are not
//! looked at.

/// Origin of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemorySource {
    Machine,
    /// A control group that contains this process.
    Cgroup,
}

/// Memory that this process may take: that of the machine, or of a control group that has less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineMemory {
    pub bytes: u64,
    pub source: MemorySource,
}

/// Reads the memory of this machine, taken or not. `None` if the kernel does not tell.
pub fn total() -> Option<MachineMemory> {
    total_of(read)
}

/// Reads the memory that this process could take now without swapping: free memory, and caches of
/// files that the kernel can drop. `None` if the kernel does not tell.
pub fn available() -> Option<MachineMemory> {
    available_of(read)
}

#[allow(clippy::disallowed_methods, reason = "reads files of the kernel, before a node starts")]
fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn total_of(read: impl Fn(&str) -> Option<String>) -> Option<MachineMemory> {
    let limits = groups(&read).into_iter().filter_map(|group| limit_of(&read, &group));
    least(limits, meminfo(&read, "MemTotal:"))
}

fn available_of(read: impl Fn(&str) -> Option<String>) -> Option<MachineMemory> {
    let left = groups(&read).into_iter().filter_map(|group| {
        let limit = limit_of(&read, &group)?;
        let used = read(&format!("{group}/memory.current"))?.trim().parse::<u64>().ok()?;
        let stat = read(&format!("{group}/memory.stat")).unwrap_or_default();
        let cached = ["inactive_file ", "active_file "].map(|name| field(&stat, name).unwrap_or(0));
        // A group can be above a limit that was lowered.
        Some((limit + cached.iter().sum::<u64>()).saturating_sub(used).min(limit))
    });
    least(left, meminfo(&read, "MemAvailable:"))
}

fn least(of_groups: impl Iterator<Item = u64>, of_machine: Option<u64>) -> Option<MachineMemory> {
    let of = |source| move |bytes| MachineMemory { bytes, source };
    let all = of_groups.map(of(MemorySource::Cgroup)).chain(of_machine.map(of(MemorySource::Machine)));
    all.min_by_key(|memory| memory.bytes)
}

/// Value in bytes of a line of `/proc/meminfo`.
fn meminfo(read: impl Fn(&str) -> Option<String>, name: &str) -> Option<u64> {
    let meminfo = read("/proc/meminfo")?;
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok())
        .map(|kib: u64| kib << 10)
}

fn field(lines: &str, name: &str) -> Option<u64> {
    lines.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// Limit of a group. `None` if it has none.
fn limit_of(read: impl Fn(&str) -> Option<String>, group: &str) -> Option<u64> {
    read(&format!("{group}/memory.max"))?.trim().parse().ok()
}

/// Directories of the control group of this process and of all groups above it. A limit holds for
/// all groups below.
fn groups(read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let cgroup = read("/proc/self/cgroup").unwrap_or_default();
    // Version 2 has one hierarchy, with an empty list of controllers.
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::/"));
    let all = path.into_iter().flat_map(|path| std::iter::successors(Some(path), |path| group_above(path)));
    all.map(|path| format!("/sys/fs/cgroup/{path}").trim_end_matches('/').to_string()).collect()
}

/// The group above `path`. That of the root is the empty path.
fn group_above(path: &str) -> Option<&str> {
    let above = path.rsplit_once('/').map_or("", |(above, _)| above);
    (!path.is_empty()).then_some(above)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn files(path: &str) -> Option<String> {
        let text = match path {
            "/proc/meminfo" => "MemFree: 1 kB\nMemTotal:       1048576 kB\nMemAvailable:  524288 kB\n",
            "/proc/self/cgroup" => "0::/a/b\n",
            "/sys/fs/cgroup/a/b/memory.max" => "max\n",
            "/sys/fs/cgroup/a/memory.max" => "1000000\n",
            "/sys/fs/cgroup/a/memory.current" => "900000\n",
            "/sys/fs/cgroup/a/memory.stat" => "anon 500000\ninactive_file 200000\nactive_file 100000\n",
            _ => return None,
        };
        Some(text.to_string())
    }

    fn memory(bytes: u64, source: MemorySource) -> Option<MachineMemory> {
        Some(MachineMemory { bytes, source })
    }

    #[test]
    fn limit_of_a_control_group_above_counts() {
        assert_eq!(total_of(files), memory(1_000_000, MemorySource::Cgroup));
        let unlimited = |path: &str| files(path).filter(|_| path != "/sys/fs/cgroup/a/memory.max");
        assert_eq!(total_of(unlimited), memory(GIB, MemorySource::Machine));
        assert_eq!(total_of(|_| None), None);
    }

    #[test]
    fn available_memory_counts_caches_of_files_as_free() {
        assert_eq!(available_of(files), memory(400_000, MemorySource::Cgroup));
        let above_its_limit = |path: &str| match path {
            "/sys/fs/cgroup/a/memory.current" => Some("9000000".to_string()),
            _ => files(path),
        };
        assert_eq!(available_of(above_its_limit), memory(0, MemorySource::Cgroup));
        let unlimited = |path: &str| files(path).filter(|_| path != "/sys/fs/cgroup/a/memory.max");
        assert_eq!(available_of(unlimited), memory(GIB / 2, MemorySource::Machine));
    }

    #[test]
    fn figures_of_this_machine_are_plausible() {
        let (total, available) = (total().unwrap(), available().unwrap());
        assert!(0 < available.bytes && available.bytes <= total.bytes, "{available:?} of {total:?}");
    }
}
