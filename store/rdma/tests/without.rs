//! A machine without libibverbs: every call returns an error, and nothing panics.

use larder_rdma::{Error, Nic, NicOptions, Unavailable, devices};
use std::process::Command;

const AGAIN: &str = "LARDER_WITHOUT_LIBIBVERBS";

/// Runs itself in a child process that cannot load libibverbs. The loader finds an empty file of
/// that name first.
#[test]
fn calls_return_errors_without_libibverbs() {
    if std::env::var_os(AGAIN).is_some() {
        return calls();
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libibverbs.so.1"), "").unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["calls_return_errors_without_libibverbs", "--exact", "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(AGAIN, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("all calls returned"), "{said}\n{output:?}");
}

fn calls() {
    let why = ibverbs_sys::missing().expect("the library cannot be loaded");
    assert!(why.contains("libibverbs.so.1"), "{why}");
    assert_eq!(devices().unwrap_err(), Unavailable::NoLibrary(why.to_string()));
    let no_list = ibverbs::devices().err().expect("listing devices fails");
    assert_eq!(no_list.raw_os_error(), Some(libc::ENOSYS));

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let opened = runtime.block_on(Nic::open("mlx5_0", &NicOptions::default()));
    assert_eq!(opened.unwrap_err(), Error::Unavailable(Unavailable::NoLibrary(why.to_string())));

    // SAFETY: the library is missing, so no function receives these arguments.
    unsafe {
        use std::ptr::null_mut;
        assert!(ibverbs_sys::ibv_get_device_list(null_mut()).is_null());
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
        assert!(ibverbs_sys::ibv_reg_mr(null_mut(), null_mut(), 0, 0).is_null());
        assert_eq!(ibverbs_sys::ibv_destroy_qp(null_mut()), libc::ENOSYS);
        assert!(ibverbs_sys::_ibv_query_gid_table(null_mut(), null_mut(), 0, 0, 0) < 0);
        ibverbs_sys::ibv_free_device_list(null_mut());
    }
    println!("all calls returned");
}
