//! Which ways this machine has.

use serde::Serialize;

/// A way for bytes between storage and device memory, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// GPUDirect Storage.
    CuFile,
    /// Through pinned host memory.
    Pinned,
    /// Host memory is where the bytes are wanted.
    Host,
}

/// The ways this machine has, best first. Never empty: [`Way::Host`] is always there.
pub fn ways() -> Vec<Way> {
    let mut ways = Vec::new();
    if cuda_devices() > 0 {
        if cufile_present() {
            ways.push(Way::CuFile);
        }
        ways.push(Way::Pinned);
    }
    ways.push(Way::Host);
    ways
}

fn cuda_devices() -> usize {
    // SAFETY: only looks for the library. Calling into it without this check would panic where there is none.
    if !unsafe { cudarc::driver::sys::is_culib_present() } || cudarc::driver::result::init().is_err() {
        return 0;
    }
    cudarc::driver::result::device::get_count().map_or(0, |count| count.max(0) as usize)
}

fn cufile_present() -> bool {
    // SAFETY: only looks for the library.
    unsafe { cudarc::cufile::sys::is_culib_present() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_way_is_last_and_always_there() {
        let ways = ways();
        assert_eq!(ways.last(), Some(&Way::Host));
        assert!(ways.is_sorted());
    }
}
