//! Checks of the machine on which the command runs.

use super::{Findings, size};
use larder_client::{ClientOptions, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN};
use rustix::process::{Resource, getrlimit};
use std::time::{Duration, Instant};

/// Directory of the kernel with the RDMA devices.
const RDMA_DEVICES: &str = "/sys/class/infiniband";

/// Maximum time for the CUDA driver, which may hang.
const CUDA_LIMIT: Duration = Duration::from_secs(2);

pub(super) fn check(deadline: Instant) -> Findings {
    let mut findings = Findings::of("this machine");
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    findings.ok(
        "version",
        format!(
            "larder {}, protocols {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}, Linux {}",
            env!("CARGO_PKG_VERSION"),
            kernel.trim()
        ),
    );
    let left = deadline.saturating_duration_since(Instant::now());
    let paths = larder_gds::machine_paths(CUDA_LIMIT.min(left / 2));
    findings.ok("device path", format!("the best that this machine allows: {paths}"));
    check_rdma(&mut findings);
    findings
}

fn check_rdma(findings: &mut Findings) {
    let devices: Vec<String> = std::fs::read_dir(RDMA_DEVICES)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    if devices.is_empty() {
        return findings.ok("rdma", "no device here, so pages of other machines travel over TCP");
    }
    let needed = ClientOptions::default().memory_bytes as u64;
    let fact = format!("devices {}", devices.join(", "));
    match getrlimit(Resource::Memlock).current {
        Some(limit) if limit < needed => findings.warn(
            "rdma",
            format!("{fact}; a process may lock {}, and a client locks {}", size(limit), size(needed)),
            "unless engines have CAP_IPC_LOCK, run them with `ulimit -l unlimited` or LimitMEMLOCK=infinity",
        ),
        _ => findings.ok("rdma", fact),
    }
}
