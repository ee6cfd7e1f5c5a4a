//! Stops of processes.

use larder_tests::{larder, soon, tiny_model_dir, unused_address};
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SIGINT: u32 = 2;
const SIGTERM: u32 = 15;

/// A `larder` process that cannot print its first line, because its output is full.
struct Mute {
    child: Child,
    _output: UnixStream,
}

impl Mute {
    fn start(arguments: &[&str]) -> Mute {
        let (mut full, output) = UnixStream::pair().unwrap();
        full.set_nonblocking(true).unwrap();
        let error = loop {
            if let Err(error) = full.write(&[b'\n'; 4096]) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        full.set_nonblocking(false).unwrap();
        let mut command = Command::new(larder());
        let child = command.args(arguments).stdout(OwnedFd::from(full)).stderr(Stdio::null()).spawn().unwrap();
        Mute { child, _output: output }
    }

    /// Waits until the process accepts connections.
    fn listens(&self, address: SocketAddr) {
        let deadline = soon();
        while TcpStream::connect(address).is_err() {
            assert!(Instant::now() < deadline, "it does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// True if the process has a handler for the signal.
    fn catches(&self, signal: u32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("the kernel lists them");
        u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << (signal - 1) != 0
    }
}

impl Drop for Mute {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn stop_is_handled_from_the_first_connection_on() {
    let model = tiny_model_dir();
    let model = model.to_str().unwrap();
    let store = "larder://127.0.0.1:9/";
    for role in ["store", "prefill", "decode", "router"] {
        let address = unused_address();
        let listen = address.to_string();
        let more: &[&str] = match role {
            "store" => &["--l2", "32MiB"],
            "router" => &["--store", store, "--admin-listen", "127.0.0.1:0"],
            _ => &["--store", store, "--model", model, "--l1", "64MiB"],
        };
        let process = Mute::start(&[&[role, "--listen", &listen], more].concat());
        process.listens(address);
        // A client may have put pages by now. Without a handler, the signal would kill the process.
        assert!(process.catches(SIGTERM) && process.catches(SIGINT), "{role}");
    }
}
