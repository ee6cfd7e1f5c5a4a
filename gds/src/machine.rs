//! Paths that a machine could offer, without an attempt to use them.

use crate::cufile::LIBRARY;
use crate::open::{Rejected, Report, within};
use crate::path::PathKind;
use std::path::Path;
use std::time::Duration;

/// Folder that the driver nvidia-fs creates. Without it, libcufile may still work: by peer-to-peer
/// DMA, or in compatibility mode.
const NVIDIA_FS: &str = "/proc/driver/nvidia-fs";

/// Returns the fastest path that this machine's drivers and libraries would allow, and the reasons
/// against faster ones. Waits at most `limit` for the CUDA driver.
///
/// Only [`open`](crate::open()) tells if the path works with the files of a log.
pub fn machine_paths(limit: Duration) -> Report {
    let devices = within(limit, "the CUDA driver", cuda_devices);
    let reason = match devices {
        Ok(Ok(0)) => "the CUDA driver finds no device".to_string(),
        Ok(Ok(_)) => return with_devices(),
        Ok(Err(reason)) | Err(reason) => reason,
    };
    let rejected = [PathKind::CuFile, PathKind::Pinned].map(|path| Rejected { path, reason: reason.clone() });
    Report { path: PathKind::Host, mode: "memory of the host".to_string(), rejected: rejected.into() }
}

fn with_devices() -> Report {
    // SAFETY: only loads the library.
    if !unsafe { cudarc::cufile::sys::is_culib_present() } {
        let reason = format!("{LIBRARY} is not installed (package nvidia-gds)");
        let rejected = vec![Rejected { path: PathKind::CuFile, reason }];
        return Report { path: PathKind::Pinned, mode: "memory of the host, pinned".to_string(), rejected };
    }
    let driver = if Path::new(NVIDIA_FS).exists() { "nvidia-fs is loaded" } else { "nvidia-fs is not loaded" };
    Report { path: PathKind::CuFile, mode: driver.to_string(), rejected: Vec::new() }
}

fn cuda_devices() -> Result<usize, String> {
    // SAFETY: only loads the library. Without this check, a call into the bindings panics where the
    // library is missing.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err("the CUDA driver (libcuda) is not installed".to_string());
    }
    let failed = |error: cudarc::driver::DriverError| format!("the CUDA driver failed: {error}");
    cudarc::driver::result::init().map_err(failed)?;
    let count = cudarc::driver::result::device::get_count().map_err(failed)?;
    Ok(usize::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_report_names_every_faster_path() {
        let report = machine_paths(Duration::from_secs(20));
        let rejected: Vec<PathKind> = report.rejected.iter().map(|rejected| rejected.path).collect();
        let faster: Vec<PathKind> = PathKind::ALL.into_iter().filter(|path| *path < report.path).collect();
        assert_eq!(rejected, faster);
        assert!(report.rejected.iter().all(|rejected| report.to_string().contains(&rejected.reason)));
    }
}
