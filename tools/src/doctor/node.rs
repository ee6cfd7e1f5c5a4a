//! Checks of one node: the way to it, its versions, and what it says of its machine.

use super::{Findings, round_trip, size, transport};
use larder_client::{Client, ClientOptions, NodeView, PROTOCOL_VERSION, StoreUrl};
use larder_format::PageKey;
use serde_json::Value;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::net::{TcpStream, lookup_host};

/// Limit of one step, so that a node that is away costs less than the whole time.
const STEP: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const ROUND_TRIPS: usize = 32;
/// Median of the round trips that is too slow for pages that engines wait for.
const SLOW_ROUND_TRIP: Duration = Duration::from_millis(10);
const CLOCK_DIFFERENCE_MAX_MS: u64 = 1000;
/// Age of the facts about the machine above which its file systems do not answer. The node reads
/// them every 10 s.
const FACTS_AGE_MAX_SECONDS: u64 = 60;

pub(super) async fn check(url: StoreUrl, deadline: Instant, findings: &mut Findings) {
    let Some(is_local) = reach(&url.nodes[0], deadline, findings).await else { return };
    let required = url.transport;
    let options = ClientOptions { name: "doctor".into(), ..ClientOptions::default() };
    let client = Client::attach(url, Some(round_trip::namespace()), options);
    let requested = unix_ms();
    let Some(view) = connect(&client, step(deadline)).await else {
        return findings.fail("protocol", "no answer to the handshake", RESTART);
    };
    let answered = unix_ms();
    if !view.up {
        return report_problem(view.problem.as_deref().unwrap_or_default(), findings);
    }
    let Some(status) = &view.status else {
        return findings.fail("status", "the node is connected, but does not answer", RESTART);
    };
    versions(&view, status, findings);
    round_trips(&client, deadline, findings).await;
    transport::check(&view, required, is_local, status, findings);
    clock(status, requested, answered, findings);
    machine(status, findings);
    round_trip::check(&client, deadline, findings).await;
}

const RESTART: &str =
    "see whether its process is stopped or overloaded (state, CPU, log), and restart it if it stays so";

/// Deadline of the next step.
fn step(deadline: Instant) -> Instant {
    deadline.min(Instant::now() + STEP)
}

/// Resolves the name and connects. Returns `true` if the node is on this machine, and `None` if it
/// cannot be reached.
async fn reach(address: &str, deadline: Instant, findings: &mut Findings) -> Option<bool> {
    let resolved = match tokio::time::timeout_at(step(deadline).into(), lookup_host(address)).await {
        Ok(Ok(addresses)) => addresses.collect::<Vec<_>>(),
        Ok(Err(error)) => {
            findings.fail("name", error.to_string(), "correct the host in the URL, or its entry in DNS or /etc/hosts");
            return None;
        }
        Err(_) => {
            findings.fail("name", "the resolver did not answer in time", "check the name servers in /etc/resolv.conf");
            return None;
        }
    };
    let mut problem = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in resolved {
        let begin = Instant::now();
        match tokio::time::timeout_at(step(deadline).into(), TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                let took = begin.elapsed();
                findings.ok("reachability", format!("connected to {address} in {}", milliseconds(took)));
                let is_local = stream.local_addr().is_ok_and(|own| own.ip() == address.ip());
                return Some(is_local);
            }
            Ok(Err(error)) => problem = error,
            Err(_) => problem = ErrorKind::TimedOut.into(),
        }
    }
    let action = match problem.kind() {
        ErrorKind::ConnectionRefused => "no process listens there: start the node, or correct the port in the URL",
        ErrorKind::TimedOut => "check that the machine is up, and firewalls and routes between",
        _ => "check the address and the network of both machines",
    };
    findings.fail("reachability", problem.to_string(), action);
    None
}

/// Waits until the node is connected and has told its status, or until the first failure.
async fn connect(client: &Client, deadline: Instant) -> Option<NodeView> {
    while Instant::now() < deadline {
        let view = client.status(deadline).await.pop()?;
        if view.up || view.problem.is_some() {
            return Some(view);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    None
}

/// Tells apart the reasons for which a handshake fails. The client words them.
fn report_problem(problem: &str, findings: &mut Findings) {
    if problem.contains("refused the client") {
        let fact = format!("{problem}; this command speaks protocols up to {PROTOCOL_VERSION}");
        findings.fail("protocol", fact, "run versions whose protocols overlap: update the older side");
    } else if problem.starts_with("shared memory is unavailable") || problem.starts_with("no RDMA") {
        findings.fail("transports", problem, "remove `transport=` from the URL, or mend the transport");
    } else if problem == io::Error::from(ErrorKind::TimedOut).to_string() {
        findings.fail("protocol", "the port accepts connections, but nothing answers the handshake", RESTART);
    } else {
        let fact = format!("the port answers, but not as a Larder node of a known version: {problem}");
        findings.fail("protocol", fact, "use the larder:// address that `larder store` prints at its start");
    }
}

fn versions(view: &NodeView, status: &Value, findings: &mut Findings) {
    let own = env!("CARGO_PKG_VERSION");
    let protocol = view.protocol.unwrap_or_default();
    let newest = status["protocol"]["max"].as_u64();
    let Some(version) = status["version"].as_str() else {
        let fact = format!("protocol {protocol}; the node is too old to tell its version and its machine");
        return findings.warn("version", fact, "update the node");
    };
    let fact = format!("software {version}, protocol {protocol} in use, the node's newest is {}", newest.unwrap_or(0));
    match version == own && newest == Some(PROTOCOL_VERSION.into()) {
        true => findings.ok("version", fact),
        false => {
            let fact = format!("{fact}; this command: {own}, protocol {PROTOCOL_VERSION}");
            findings.warn("version", fact, "run one version everywhere");
        }
    }
}

async fn round_trips(client: &Client, deadline: Instant, findings: &mut Findings) {
    let end = step(deadline);
    let key = [PageKey::chain(None, &[0])];
    let mut times = Vec::new();
    while times.len() < ROUND_TRIPS && Instant::now() < end {
        let begin = Instant::now();
        client.locate(&key, end).await;
        times.push(begin.elapsed());
    }
    times.sort();
    let Some((median, worst)) = times.get(times.len() / 2).zip(times.last()) else {
        return findings.fail("latency", "no time was left to measure it", "raise --timeout");
    };
    let fact = format!("look-up of a page: median {}, worst {}", milliseconds(*median), milliseconds(*worst));
    match *median > SLOW_ROUND_TRIP {
        false => findings.ok("latency", fact),
        true => findings.warn("latency", fact, "place engines nearer to the node, or look for load on either machine"),
    }
}

fn clock(status: &Value, requested: u64, answered: u64, findings: &mut Findings) {
    let Some(theirs) = status["unix_ms"].as_u64() else { return };
    // The node read its clock between the two moments.
    let (difference, direction) = match theirs {
        _ if theirs > answered => (theirs - answered, "ahead of"),
        _ if theirs < requested => (requested - theirs, "behind"),
        _ => (0, "ahead of"),
    };
    let fact = format!("the node's clock is at least {difference} ms {direction} that of this machine");
    match difference > CLOCK_DIFFERENCE_MAX_MS {
        false if difference == 0 => {
            findings.ok("clock", format!("equal within {} ms", answered.saturating_sub(requested)))
        }
        false => findings.ok("clock", fact),
        true => findings.warn(
            "clock",
            fact,
            "synchronise both clocks (chrony), then restart the node, which read it at its start",
        ),
    }
}

fn machine(status: &Value, findings: &mut Findings) {
    let host = &status["host"];
    let l2 = &status["tiers"]["l2"];
    if host.is_object() {
        findings.ok("kernel", format!("Linux {}", host["kernel"].as_str().unwrap_or("of unknown version")));
        memory_locking(status, findings);
    }
    match l2["huge_pages"].as_bool() {
        Some(true) => findings.ok("huge pages", "L2 is on huge pages"),
        Some(false) => findings.warn(
            "huge pages",
            format!(
                "L2 is on small pages; the node's kernel has huge pages at {}, shared ones at {}",
                host["huge_pages"].as_str().unwrap_or("?"),
                host["shared_huge_pages"].as_str().unwrap_or("?")
            ),
            "in /sys/kernel/mm/transparent_hugepage, write `madvise` to enabled and `advise` to shmem_enabled; \
             then restart the node",
        ),
        None => {}
    }
    io_uring(status, findings);
    disks(status, findings);
}

fn memory_locking(status: &Value, findings: &mut Findings) {
    let host = &status["host"];
    let locked = host["pinned_bytes"].as_u64().unwrap_or(0) + host["locked_bytes"].as_u64().unwrap_or(0);
    let arena = status["tiers"]["l2"]["arena_bytes"].as_u64().unwrap_or(0);
    let limit = host["memlock_bytes"].as_u64();
    let fact = match limit {
        _ if host["may_exceed_memlock"] == true => "no limit (CAP_IPC_LOCK)".to_string(),
        None => "no limit".to_string(),
        Some(limit) => format!("at most {}", size(limit)),
    };
    let fact = format!("{fact}; the node has locked {}", size(locked));
    let locks =
        status["tiers"]["l3"].is_object() || status["rdma"].as_array().is_some_and(|devices| !devices.is_empty());
    let is_short = locks && host["may_exceed_memlock"] != true && limit.is_some_and(|limit| limit < arena);
    match is_short {
        false => findings.ok("memory locking", fact),
        true => findings.warn(
            "memory locking",
            format!("{fact}, and its arena has {}", size(arena)),
            "run the node with LimitMEMLOCK=infinity (systemd) or `ulimit -l unlimited`: L3 and RDMA lock the arena",
        ),
    }
}

fn io_uring(status: &Value, findings: &mut Findings) {
    let l3 = &status["tiers"]["l3"];
    let sysctl = status["host"]["io_uring_disabled"].as_u64().filter(|value| *value > 0);
    let disabled = sysctl.map(|value| format!("kernel.io_uring_disabled is {value}"));
    let enable = "set `sysctl kernel.io_uring_disabled=0` on the node's machine";
    match (l3["registered_buffers"].as_bool(), disabled) {
        (Some(true), _) => findings.ok("io_uring", "L3 uses it, with registered buffers"),
        (Some(false), _) => findings.warn(
            "io_uring",
            "L3 uses it, but the kernel refused to register buffers, which costs CPU time",
            "raise the limit of locked memory (LimitMEMLOCK=infinity) and restart the node",
        ),
        (None, Some(disabled)) => findings.warn("io_uring", format!("{disabled}, so L3 cannot run"), enable),
        (None, None) => findings.ok("io_uring", "not in use: the node has no L3"),
    }
}

fn disks(status: &Value, findings: &mut Findings) {
    let Some(devices) = status["tiers"]["l3"]["devices"].as_array() else {
        return findings.ok("disk", "no L3: pages do not survive a restart");
    };
    let host = &status["host"];
    if let Some(age) = host["age_seconds"].as_u64().filter(|age| *age > FACTS_AGE_MAX_SECONDS) {
        let action = "look for a hanging mount on the node's machine (`dmesg`, processes in state D)";
        findings.warn("disk", format!("the file systems of L3 have not answered for {age} s"), action);
    }
    for device in devices {
        let disks = host["disks"].as_array().into_iter().flatten();
        let disk = disks.into_iter().find(|disk| disk["dir"] == device["dir"]).unwrap_or(&Value::Null);
        let problems = disk_problems(device, disk);
        let name = device["dir"].as_str().unwrap_or("L3");
        let fact = format!(
            "{name}: {}, {} free, L3 has {} of {}",
            disk["file_system"].as_str().unwrap_or("unknown file system"),
            bytes(&disk["bytes_free"]),
            bytes(&device["log"]["bytes_used"]),
            bytes(&device["log"]["bytes_capacity"])
        );
        if problems.is_empty() {
            findings.ok("disk", fact);
        }
        for (is_failure, problem, action) in problems {
            let fact = format!("{name}: {problem}");
            match is_failure {
                true => findings.fail("disk", fact, action),
                false => findings.warn("disk", fact, action),
            }
        }
    }
}

/// Problems of an L3 device: `true` for a failure, the fact, the remedy.
fn disk_problems(device: &Value, disk: &Value) -> Vec<(bool, String, &'static str)> {
    let mut problems = Vec::new();
    let log = &device["log"];
    let count = |value: &Value| value.as_u64().unwrap_or(0);
    if device["state"] != "healthy" || device["reason"].is_string() {
        let [state, reason] = ["state", "reason"].map(|field| device[field].as_str().unwrap_or("unknown"));
        let action = "check the drive (`dmesg`, `smartctl -a`) and the node's log, LRD0201 to LRD0207";
        problems.push((true, format!("{state}: {reason}"), action));
    }
    if disk["read_only"] == true {
        let action = "mount it writable; a kernel remounts it after errors, so look at `dmesg` first";
        problems.push((true, "the file system is read-only".into(), action));
    }
    if let Some(error) = disk["error"].as_str() {
        problems.push((true, format!("the directory cannot be examined: {error}"), "check the mount and permissions"));
    }
    let rest = count(&log["bytes_capacity"]).saturating_sub(count(&log["bytes_on_device"]));
    if disk["bytes_free"].as_u64().is_some_and(|free| free < rest) {
        let fact = format!("L3 may grow by {}, and {} are free", size(rest), bytes(&disk["bytes_free"]));
        problems.push((false, fact, "free some room, or restart the node with a smaller L3"));
    }
    if count(&device["file_system_full"]) > 0 {
        let fact = format!("{} writes found the file system full", count(&device["file_system_full"]));
        problems.push((false, fact, "free some room, or restart the node with a smaller L3"));
    }
    let errors = count(&device["errors"]) + count(&device["timeouts"]) + count(&log["io_errors"]);
    if errors > 0 || count(&log["corrupt"]) > 0 {
        let fact = format!("{errors} errors and {} damaged pages since the start", count(&log["corrupt"]));
        problems.push((false, fact, "check the drive (`smartctl -a`), and replace it if the numbers grow"));
    }
    if log["direct_io"] == false {
        problems.push((false, "no direct I/O (O_DIRECT)".into(), "place L3 on ext4 or XFS on a local drive"));
    }
    match disk["file_system"].as_str() {
        Some(kind @ ("tmpfs" | "overlay")) => {
            let fact = format!("on {kind}: its content may end with the machine or container");
            problems.push((false, fact, "place L3 on ext4 or XFS on a local drive"));
        }
        Some(kind @ ("nfs" | "cifs" | "fuse" | "ceph")) => {
            problems.push((false, format!("on {kind}, over a network"), "place L3 on ext4 or XFS on a local drive"));
        }
        _ => {}
    }
    if device["state"] == "healthy" && device["recovery"]["report"].is_null() {
        problems.push((false, "recovery has not ended".into(), "wait; until then pages on L3 may be misses"));
    }
    problems
}

fn bytes(value: &Value) -> String {
    value.as_u64().map_or("unknown room".into(), size)
}

fn milliseconds(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1e3)
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;
    use serde_json::json;

    fn status(device: Value, disk: Value) -> Value {
        let [mut device, mut disk] = [device, disk];
        device["dir"] = "/d".into();
        disk["dir"] = "/d".into();
        json!({ "tiers": { "l3": { "devices": [device] } }, "host": { "disks": [disk], "age_seconds": 3 } })
    }

    fn found(check: impl Fn(&mut Findings)) -> Vec<(State, String)> {
        let mut findings = Findings::of("node");
        check(&mut findings);
        findings.checks.into_iter().map(|check| (check.state, check.fact)).collect()
    }

    fn healthy() -> Value {
        let log = json!({ "bytes_capacity": 100, "bytes_on_device": 40, "direct_io": true });
        json!({ "state": "healthy", "recovery": { "report": {} }, "log": log })
    }

    #[test]
    fn each_problem_of_a_disk_is_found() {
        let disk = json!({ "file_system": "xfs", "bytes_free": 60, "read_only": false });
        let good = found(|findings| disks(&status(healthy(), disk.clone()), findings));
        assert!(matches!(&good[..], [(State::Ok, fact)] if fact.contains("xfs")), "{good:?}");
        let of_device = [
            ("/state", json!("quarantined"), State::Failed, "quarantined"),
            ("/errors", json!(2), State::Warning, "2 errors"),
            ("/log/corrupt", json!(1), State::Warning, "1 damaged"),
            ("/log/direct_io", json!(false), State::Warning, "O_DIRECT"),
            ("/recovery/report", json!(null), State::Warning, "recovery"),
        ];
        for (field, value, state, fact) in of_device {
            let mut device = healthy();
            match field.rsplit_once('/') {
                Some(("", name)) => device[name] = value,
                Some((parent, name)) => device.pointer_mut(parent).unwrap()[name] = value,
                None => unreachable!(),
            }
            let found = found(|findings| disks(&status(device.clone(), disk.clone()), findings));
            assert!(found.len() == 1 && found[0].0 == state && found[0].1.contains(fact), "{field}: {found:?}");
        }
        for (field, value, state, fact) in [
            ("bytes_free", json!(59), State::Warning, "may grow by 60 B, and 59 B"),
            ("read_only", json!(true), State::Failed, "read-only"),
            ("file_system", json!("nfs"), State::Warning, "over a network"),
            ("error", json!("gone"), State::Failed, "gone"),
        ] {
            let mut disk = disk.clone();
            disk[field] = value;
            let found = found(|findings| disks(&status(healthy(), disk.clone()), findings));
            assert!(found.len() == 1 && found[0].0 == state && found[0].1.contains(fact), "{field}: {found:?}");
        }
    }

    #[test]
    fn clocks_are_compared_with_the_time_of_the_request() {
        for (theirs, state, fact) in [
            (1000, State::Ok, "equal within 50 ms"),
            (1050, State::Ok, "equal"),
            (2049, State::Ok, "999 ms ahead"),
            (2051, State::Warning, "1001 ms ahead"),
            (400, State::Ok, "600 ms behind"),
        ] {
            let found = found(|findings| clock(&json!({ "unix_ms": theirs }), 1000, 1050, findings));
            assert!(found.len() == 1 && found[0].0 == state && found[0].1.contains(fact), "{theirs}: {found:?}");
        }
        assert!(found(|findings| clock(&json!({}), 0, 0, findings)).is_empty(), "an older node");
    }

    #[test]
    fn only_a_limit_that_matters_is_a_warning() {
        let node = |limit: Value, may_exceed: bool, l3: Value| {
            json!({
                "tiers": { "l2": { "arena_bytes": 1 << 20 }, "l3": l3 },
                "host": { "memlock_bytes": limit, "may_exceed_memlock": may_exceed },
            })
        };
        for (limit, may_exceed, l3, state) in [
            (json!(1000), false, json!({}), State::Warning),
            (json!(1 << 20), false, json!({}), State::Ok),
            (json!(null), false, json!({}), State::Ok),
            (json!(1000), true, json!({}), State::Ok),
            (json!(1000), false, json!(null), State::Ok),
        ] {
            let found = found(|findings| memory_locking(&node(limit.clone(), may_exceed, l3.clone()), findings));
            assert!(found.len() == 1 && found[0].0 == state, "{limit} {may_exceed} {l3}: {found:?}");
        }
    }
}
