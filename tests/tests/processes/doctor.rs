//! `larder doctor` against stores that are healthy, away, stopped, foreign or limited.

use larder_tests::{Process, Stack, data_dir, larder, soon, unused_address};
use larder_wire::{ErrorCode, PROTOCOL_VERSION_MIN, Response};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

struct Report {
    code: Option<i32>,
    json: Value,
}

impl Report {
    /// Checks with this name, as state, fact and action.
    fn checks(&self, name: &str) -> Vec<(&str, &str, &str)> {
        let checks = self.json["checks"].as_array().expect("a list of checks").iter();
        let named = checks.filter(|check| check["name"] == name);
        named
            .map(|check| {
                let [state, fact, action] =
                    ["state", "fact", "action"].map(|field| check[field].as_str().unwrap_or_default());
                (state, fact, action)
            })
            .collect()
    }

    /// The only check with this name.
    fn check(&self, name: &str) -> (&str, &str, &str) {
        let checks = self.checks(name);
        assert_eq!(checks.len(), 1, "{name}: {:#}", self.json);
        checks[0]
    }

    fn has(&self, name: &str, state: &str, fact: &str) -> bool {
        self.checks(name).iter().any(|check| check.0 == state && check.1.contains(fact))
    }
}

/// Runs the command until it ends. It must end by itself, whatever the store does.
fn doctor(store: &str, more: &[&str]) -> Report {
    let mut command = Command::new(larder());
    command.args(["doctor", "--store", store, "--json", "--timeout", "20"]).args(more);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("larder runs");
    let mut stdout = child.stdout.take().expect("stdout is piped");
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let end = soon();
    let status = loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            break status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            panic!("the doctor hangs");
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    let text = reader.join().expect("the reader ends").expect("UTF-8");
    Report { code: status.code(), json: serde_json::from_str(&text).unwrap_or_else(|_| panic!("no JSON: {text}")) }
}

fn options(dir: &Path) -> [&str; 7] {
    let dir = dir.to_str().expect("a UTF-8 path");
    ["--data-dir", dir, "--l2", "64MiB", "--l3-bytes", "256MiB", "--listen"]
}

/// Starts a node, and returns it with its URL.
fn start(dir: &Path) -> (Process, String) {
    let mut node = Process::start(&[&["store"], &options(dir)[..], &["127.0.0.1:0"]].concat());
    let url = node.url("larder://");
    (node, url)
}

#[tokio::test]
async fn healthy_store_passes_and_keeps_nothing() {
    let mut stack = Stack::start(2).await;
    let engine = stack.decode.as_mut().expect("it runs").url("http://");
    let report = doctor(&stack.store_url, &["--engine", &engine]);
    assert_eq!((report.code, &report.json["failures"]), (Some(0), &0.into()), "{:#}", report.json);
    for name in ["reachability", "latency", "transports", "clock", "kernel", "memory locking", "huge pages", "io_uring"]
    {
        assert!(report.checks(name).len() >= 2, "{name}: {:#}", report.json);
    }
    for (name, fact) in [
        ("version", "protocol"),
        ("device path", "the best that this machine allows: "),
        ("disk", "free"),
        ("round trip", "nothing is left"),
        ("store", "connected to 2"),
    ] {
        assert!(report.has(name, "ok", fact), "{name}: {:#}", report.json);
    }
    for node in larder_tests::node_statuses(&stack.admin).await {
        assert!(node["counters"]["pages_put"].as_u64() > Some(0), "{node}");
        assert_eq!((&node["tiers"]["l2"]["pages"], &node["tiers"]["l3"]["pages"]), (&0.into(), &0.into()), "{node}");
    }
}

#[test]
fn absent_node_fails_and_the_others_are_checked() {
    let dir = data_dir();
    let (_node, url) = start(dir.path());
    let absent = unused_address();
    let address = url.trim_start_matches("larder://").trim_end_matches('/');
    let report = doctor(&format!("larder://{absent},{address}/"), &[]);
    assert_eq!(report.code, Some(1));
    assert!(report.has("reachability", "failed", "refused") && report.has("reachability", "ok", "connected"));
    assert_eq!(report.check("round trip").0, "ok");
    let action = report.checks("reachability")[0].2;
    assert!(action.contains("start the node"), "{action}");
}

#[test]
fn stopped_node_is_told_from_an_absent_one() {
    let dir = data_dir();
    let (node, url) = start(dir.path());
    node.sigstop();
    let report = doctor(&url, &[]);
    node.sigcont();
    let (state, fact, action) = report.check("protocol");
    assert!(state == "failed" && fact.contains("nothing answers the handshake"), "{fact}");
    assert!(action.contains("stopped") && report.code == Some(1), "{action}");
}

#[test]
fn node_of_another_protocol_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("larder://{}/", listener.local_addr().expect("it is bound"));
    std::thread::spawn(move || {
        let message = "this node speaks protocols 90 to 99".into();
        let refusal = Response::Error { code: ErrorCode::Version, message };
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 4096];
            if stream.read(&mut request).is_ok_and(|read| read > 0) {
                let _ = stream.write_all(&refusal.frame(PROTOCOL_VERSION_MIN, 0, None).head);
            }
        }
    });
    let report = doctor(&url, &[]);
    let (state, fact, action) = report.check("protocol");
    assert!(state == "failed" && fact.contains("90 to 99"), "{fact}");
    assert!(action.contains("update the older side") && report.code == Some(1), "{action}");
}

#[test]
fn port_of_another_service_is_recognised() {
    let dir = data_dir();
    let admin = unused_address().to_string();
    let more = ["127.0.0.1:0", "--admin-listen", &admin];
    let mut node = Process::start(&[&["store"], &options(dir.path())[..], &more].concat());
    node.wait_for_line("metrics at");
    let report = doctor(&format!("larder://{admin}/"), &["--engine", &admin]);
    assert!(report.has("protocol", "failed", "not as a Larder node"), "{:#}", report.json);
    assert!(report.has("reachability", "failed", "not an engine"), "{:#}", report.json);
    assert_eq!(report.code, Some(1));
}

#[test]
fn wrong_urls_fail_with_the_right_form() {
    for url in ["http://127.0.0.1:7700", "larder://127.0.0.1", ""] {
        let report = doctor(url, &[]);
        assert!(report.has("url", "failed", "larder://") || report.has("url", "failed", "host:port"), "{url}");
        assert_eq!(report.code, Some(1));
    }
    let report = doctor("larder://no-such-host.invalid:7700", &[]);
    assert_eq!((report.check("name").0, report.code), ("failed", Some(1)));
}

#[test]
fn limit_of_locked_memory_is_a_warning() {
    let dir = data_dir();
    let limited = "ulimit -l 64 && exec setpriv --bounding-set -ipc_lock \"$0\" \"$@\"";
    let mut node = Process::start_after(limited, &[&["store"], &options(dir.path())[..], &["127.0.0.1:0"]].concat());
    let url = node.url("larder://");
    let report = doctor(&url, &[]);
    let (state, fact, action) = report.check("memory locking");
    assert!(state == "warning" && fact.contains("64.0 KiB") && action.contains("LimitMEMLOCK"), "{fact}");
    assert_eq!((report.check("round trip").0, report.code), ("ok", Some(0)));
    assert_eq!(doctor(&url, &["--strict"]).code, Some(1));
}

#[test]
fn l3_in_memory_is_a_warning() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("Linux has it");
    let (_node, url) = start(dir.path());
    let report = doctor(&url, &[]);
    assert!(report.has("disk", "warning", "on tmpfs"), "{:#}", report.json);
    assert_eq!(report.code, Some(0));
}
