//! C programs against real nodes, linked to the shared and to the static library.

use larder_tests::{Process, data_dir, unused_address};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Libraries that the static one needs, as `rustc --print native-static-libs` lists them.
const STATIC_LIBS: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

#[derive(Clone, Copy)]
enum Link {
    Shared,
    Static,
}

/// Compiles `source` with the C compiler of this machine. Cargo has put both libraries beside the
/// executable of this test.
fn compile(source: &str, link: Link, out: &TempDir) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let test = std::env::current_exe().expect("a test has a path");
    let libraries = test.parent().expect("it is in a directory");
    let program = out.path().join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-D_GNU_SOURCE", "-pthread", "-g"]);
    cc.arg("-I").arg(root.join("include")).arg(root.join(source)).arg("-o").arg(&program);
    match link {
        Link::Shared => {
            cc.arg("-L").arg(libraries).arg("-llarder").arg(format!("-Wl,-rpath,{}", libraries.display()));
        }
        Link::Static => {
            cc.arg(libraries.join("liblarder.a")).args(STATIC_LIBS);
        }
    }
    let output = cc.output().expect("a C compiler is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

struct Node {
    process: Process,
    address: String,
    _directory: TempDir,
}

fn start_node() -> Node {
    let directory = data_dir();
    let address = unused_address().to_string();
    let path = directory.path().to_str().expect("a UTF-8 path");
    let options = ["--l2", "64MiB", "--l3-bytes", "256MiB"];
    let mut process = Process::start(&[&["store", "--listen", &address, "--data-dir", path], &options[..]].concat());
    process.wait_for_line("larder://");
    Node { process, address, _directory: directory }
}

fn run(program: &Path, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("the program starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{:?} {arguments:?}: {}\n{stdout}{stderr}", program, output.status);
    stdout.into_owned()
}

#[test]
fn example_runs_against_a_node() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    for link in [Link::Shared, Link::Static] {
        let example = compile("examples/put_get.c", link, &out);
        for transport in ["shm", "tcp"] {
            let printed = run(&example, &[&format!("larder://{}/?transport={transport}", node.address)]);
            assert!(printed.contains("4 pages put, read and forgotten"), "{printed}");
        }
    }
}

#[test]
fn calls_work_on_every_transport() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile("tests/contract.c", Link::Shared, &out);
    for transport in ["shm", "tcp"] {
        run(&program, &["calls", &format!("larder://{}/?transport={transport}", node.address)]);
    }
}

#[test]
fn wrong_arguments_give_errors() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile("tests/contract.c", Link::Shared, &out);
    run(&program, &["arguments", &format!("larder://{}", node.address)]);
}

#[test]
fn threads_share_a_client_that_one_of_them_closes() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile("tests/contract.c", Link::Shared, &out);
    run(&program, &["threads", &format!("larder://{}", node.address)]);
}

#[test]
fn absent_or_paused_store_is_a_miss_within_the_timeout() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile("tests/contract.c", Link::Shared, &out);
    run(&program, &["away", &format!("larder://{}", unused_address())]);
    for transport in ["shm", "tcp"] {
        let url = format!("larder://{}/?transport={transport}", node.address);
        // The program attaches, and stops the node itself.
        run(&program, &["paused", &url, &node.process.id().to_string()]);
    }
}

#[test]
fn forked_children_leave_nothing_behind() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile("tests/contract.c", Link::Shared, &out);
    for transport in ["shm", "tcp"] {
        run(&program, &["forks", &format!("larder://{}/?transport={transport}", node.address)]);
    }
}
