//! Detects the transfer paths of this machine.

use serde::Serialize;

/// Path for bytes between storage and device memory, ordered from fastest to slowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferPath {
    CuFile,
    Pinned,
    Host,
}

/// Returns the paths of this machine, fastest first. The last is always [`TransferPath::Host`], so
/// a caller can fall back without a check.
pub fn transfer_paths() -> Vec<TransferPath> {
    let mut paths = Vec::new();
    if cuda_devices() > 0 {
        if cufile_present() {
            paths.push(TransferPath::CuFile);
        }
        paths.push(TransferPath::Pinned);
    }
    paths.push(TransferPath::Host);
    paths
}

fn cuda_devices() -> usize {
    // SAFETY: only loads the library. Without this check, a call into the bindings panics where the
    // library is missing.
    if !unsafe { cudarc::driver::sys::is_culib_present() } || cudarc::driver::result::init().is_err() {
        return 0;
    }
    cudarc::driver::result::device::get_count().map_or(0, |count| count.max(0) as usize)
}

fn cufile_present() -> bool {
    // SAFETY: only loads the library.
    unsafe { cudarc::cufile::sys::is_culib_present() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_path_is_always_present_and_last() {
        let paths = transfer_paths();
        assert_eq!(paths.last(), Some(&TransferPath::Host));
        assert!(paths.is_sorted());
    }
}
