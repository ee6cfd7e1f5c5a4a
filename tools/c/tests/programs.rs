//! C programs against real nodes, linked to the shared and to the static library.

use larder_tests::{Process, data_dir, unused_address};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Directory of the libraries: Cargo has put both beside the executable of this test.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    test.parent().expect("it is in a directory").to_path_buf()
}

/// Compiles `source` with the C compiler of this machine and these options.
fn compile_with(source: &Path, options: &[String], out: &TempDir) -> PathBuf {
    let program = out.path().join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-D_GNU_SOURCE", "-pthread", "-g"]);
    let output = cc.arg(source).args(options).arg("-o").arg(&program).output().expect("a C compiler is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Compiles `tests/contract.c` with the shared library.
fn compile_contract(out: &TempDir) -> PathBuf {
    let (root, libraries) = (Path::new(env!("CARGO_MANIFEST_DIR")), libraries());
    let options = [
        // A call that leaves out an output must not pass because of what the stack had before.
        "-ftrivial-auto-var-init=pattern".to_string(),
        format!("-I{}", root.join("include").display()),
        format!("-L{}", libraries.display()),
        "-llarder".to_string(),
        format!("-Wl,-rpath,{}", libraries.display()),
    ];
    compile_with(&root.join("tests/contract.c"), &options, out)
}

/// Asks pkg-config about a library that is installed in `prefix`.
fn pkg_config(prefix: &Path, question: &str) -> String {
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args([question, "larder"]);
    let output = command.output().expect("pkg-config is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").trim().to_string()
}

struct Node {
    process: Process,
    address: String,
    _directory: TempDir,
}

fn start_node() -> Node {
    start_node_with(&[])
}

fn start_node_with(more: &[&str]) -> Node {
    let directory = data_dir();
    let address = unused_address().to_string();
    let path = directory.path().to_str().expect("a UTF-8 path");
    let options = ["store", "--listen", &address, "--data-dir", path, "--l2", "64MiB", "--l3-bytes", "256MiB"];
    let mut process = Process::start(&[&options[..], more].concat());
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
fn installed_library_runs_the_example() {
    let (node, out, installed) = (start_node(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (prefix, libraries) = (installed.path(), libraries());
    let install = Path::new(env!("CARGO_MANIFEST_DIR")).join("install");
    run(&install, &[prefix.to_str().unwrap(), libraries.to_str().unwrap()]);
    let example = Path::new(&pkg_config(prefix, "--variable=examples")).join("put_get.c");
    let run_path = format!("-Wl,-rpath,{}", pkg_config(prefix, "--variable=libdir"));
    let shared = format!("{} {run_path}", pkg_config(prefix, "--libs"));
    for (link, is_shared) in [(shared, true), (pkg_config(prefix, "--variable=static_libs"), false)] {
        let options = format!("{} {link}", pkg_config(prefix, "--cflags"));
        let options: Vec<String> = options.split_whitespace().map(str::to_string).collect();
        let program = compile_with(&example, &options, &out);
        assert_eq!(run(Path::new("ldd"), &[program.to_str().unwrap()]).contains("liblarder.so"), is_shared);
        for transport in ["shm", "tcp"] {
            let printed = run(&program, &[&format!("larder://{}/?transport={transport}", node.address)]);
            assert!(printed.contains("4 pages put, read and forgotten"), "{printed}");
        }
    }
}

#[test]
fn calls_work_on_every_transport() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile_contract(&out);
    for transport in ["shm", "tcp"] {
        run(&program, &["calls", &format!("larder://{}/?transport={transport}", node.address)]);
    }
}

#[test]
fn wrong_arguments_give_errors() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile_contract(&out);
    run(&program, &["arguments", &format!("larder://{}", node.address)]);
}

#[test]
fn threads_share_a_client_that_one_of_them_closes() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile_contract(&out);
    run(&program, &["threads", &format!("larder://{}", node.address)]);
}

#[test]
fn absent_or_paused_store_is_a_miss_within_the_timeout() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile_contract(&out);
    run(&program, &["away", &format!("larder://{}", unused_address())]);
    for transport in ["shm", "tcp"] {
        let url = format!("larder://{}/?transport={transport}", node.address);
        // The program attaches, and stops the node itself.
        run(&program, &["paused", &url, &node.process.id().to_string()]);
    }
}

#[test]
fn follow_without_memory_at_the_node_is_busy() {
    let (node, out) = (start_node_with(&["--request-memory", "1MiB"]), tempfile::tempdir().unwrap());
    let program = compile_contract(&out);
    run(&program, &["crowded", &format!("larder://{}", node.address)]);
}

#[test]
fn forked_children_leave_nothing_behind() {
    let (node, out) = (start_node(), tempfile::tempdir().unwrap());
    let program = compile_contract(&out);
    for transport in ["shm", "tcp"] {
        run(&program, &["forks", &format!("larder://{}/?transport={transport}", node.address)]);
    }
}
