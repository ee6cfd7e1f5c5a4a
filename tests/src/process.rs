//! Start, stop and addresses of `larder` processes.

use crate::{PATIENCE, eventually, get_json, is_flushed, is_recovered, node_statuses, tiny_model_dir};
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Path of the `larder` binary: `LARDER_BIN` if set, else the release build of this workspace.
/// Builds it once per test process.
pub fn larder() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("LARDER_BIN") {
            return PathBuf::from(path);
        }
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent");
        // `--workspace` selects the features of `cargo test --workspace`: little is compiled again.
        let built = Command::new(env!("CARGO"))
            .args(["build", "--release", "--quiet", "--workspace", "--bin", "larder"])
            .current_dir(workspace)
            .status()
            .expect("cargo runs");
        assert!(built.success(), "larder builds");
        let test = std::env::current_exe().expect("a test has a path");
        let release = test.ancestors().nth(2).expect("target/release/deps/test");
        release.join("larder")
    })
}

/// A command of `larder` for tests that wait for its end. After 400 s it is killed with its
/// processes, which would hold the test otherwise.
pub fn larder_command() -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "400"]).arg(larder());
    command
}

/// Runs a benchmark that loads its own processes for `seconds`. Returns its report.
///
/// # Panics
/// Panics if it prints no report within 400 s. Its exit code does not count, because it may judge
/// time.
pub fn bench_report(bench: &str, seconds: u64) -> serde_json::Value {
    let output = larder_command()
        .args(["--log", "error", "bench", bench, "--seconds", &seconds.to_string(), "--json"])
        .output()
        .expect("timeout runs");
    println!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Temporary directory on a real file system. The default one may be in memory, without direct I/O.
pub fn data_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("larder-test").tempdir_in("/var/tmp").expect("a directory below /var/tmp")
}

/// Loopback address that nothing else uses, also while its process is stopped.
///
/// Every test process has its own IP address in 127.0.0.0/8. A free port of 127.0.0.1 would not
/// do: any connection of another process may take it before the test does.
pub fn unused_address() -> SocketAddr {
    static NEXT_PORT: AtomicU16 = AtomicU16::new(7000);
    // A process id of Linux has at most 22 bits. The bit set here keeps clear of 127.0.0.1.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    SocketAddr::from((Ipv4Addr::new(127, high | 0x80, middle, low), port))
}

/// Time between two looks at an idle process. A node that waits for room tries again more often,
/// so it is not idle.
const IDLE_INTERVAL: Duration = Duration::from_millis(25);

pub struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
    output: Vec<String>,
    errors: Arc<Mutex<String>>,
    /// Threads that collect stdout and stderr. They end with the process.
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    pub fn start(arguments: &[&str]) -> Process {
        Self::spawn(Command::new(larder()).args(arguments))
    }

    /// Starts `larder` after a shell command such as `umask 022`, in the same process.
    pub fn start_after(shell_command: &str, arguments: &[&str]) -> Process {
        let script = format!("{shell_command} && exec \"$0\" \"$@\"");
        Self::spawn(Command::new("sh").args(["-c", &script]).arg(larder()).args(arguments))
    }

    fn spawn(command: &mut Command) -> Process {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("larder starts");
        let (sender, lines) = mpsc::channel();
        let stdout = child.stdout.take().expect("stdout is piped");
        let output_reader = std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let errors = Arc::new(Mutex::new(String::new()));
        let sink = errors.clone();
        let mut stderr = child.stderr.take().expect("stderr is piped");
        let error_reader = std::thread::spawn(move || {
            let mut chunk = [0u8; 4096];
            while let Ok(read @ 1..) = stderr.read(&mut chunk) {
                sink.lock().expect("no panic under this lock").push_str(&String::from_utf8_lossy(&chunk[..read]));
            }
        });
        Process { child, lines, output: Vec::new(), errors, readers: vec![output_reader, error_reader] }
    }

    /// Waits for a line of stdout that contains `text`.
    ///
    /// # Panics
    /// Panics if the process ends first, or after [`PATIENCE`].
    pub fn wait_for_line(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(line) = self.output.iter().find(|line| line.contains(text)) {
                return line.clone();
            }
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.output.push(line),
                Err(_) => panic!("larder did not print '{text}'; stdout {:?}; stderr:\n{}", self.output, self.stderr()),
            }
        }
    }

    /// First word of stdout that starts with `scheme`, such as `http://`, without a trailing
    /// comma.
    pub fn url(&mut self, scheme: &str) -> String {
        let line = self.wait_for_line(scheme);
        let word = line.split_whitespace().find(|word| word.starts_with(scheme)).expect("the line has it");
        word.trim_end_matches(',').to_string()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn stderr(&self) -> String {
        self.errors.lock().expect("no panic under this lock").clone()
    }

    /// Value of a line of `/proc/PID/status`, such as `VmRSS`, in bytes.
    ///
    /// # Panics
    /// Panics if the process has ended or the kernel has no such line.
    pub fn memory_bytes(&self, name: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(&path).expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.unwrap_or_else(|| panic!("no {name} in {path}")) << 10
    }

    /// Waits until the process has taken what was sent to it at `address`, and waits for more: the
    /// kernel has delivered all bytes, and no thread has run since the look before. Blocks the
    /// calling thread.
    ///
    /// # Panics
    /// Panics if the process has ended, or still runs after [`PATIENCE`].
    pub fn wait_until_idle(&self, address: SocketAddr) {
        let deadline = Instant::now() + PATIENCE;
        let mut before = None;
        loop {
            // First: a delivery wakes a thread before the sender sees it.
            let is_delivered = is_delivered(address);
            let cpu_time = self.cpu_time_if_asleep().filter(|_| is_delivered);
            if cpu_time.is_some() && cpu_time == before {
                return;
            }
            before = cpu_time;
            assert!(Instant::now() < deadline, "larder is not idle; stderr:\n{}", self.stderr());
            std::thread::sleep(IDLE_INTERVAL);
        }
    }

    /// Processor time of all threads. `None` while one of them has a processor or waits for one.
    fn cpu_time_if_asleep(&self) -> Option<Duration> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the process runs");
        let mut total = Duration::ZERO;
        for task in tasks {
            // A thread that ends between two reads has run.
            let task = task.ok()?.path();
            let stat = std::fs::read_to_string(task.join("stat")).ok()?;
            // The state follows the thread's name in parentheses.
            let (_, state) = stat.rsplit_once(") ")?;
            if !state.starts_with('S') {
                return None;
            }
            let schedstat = std::fs::read_to_string(task.join("schedstat")).ok()?;
            total += Duration::from_nanos(schedstat.split_whitespace().next()?.parse().ok()?);
        }
        Some(total)
    }

    /// Number of open file descriptors of the process.
    ///
    /// # Panics
    /// Panics if the process has ended.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("the process runs").count()
    }

    /// Soft and hard limit of open files, as `/proc/PID/limits` has them.
    ///
    /// # Panics
    /// Panics if the process has ended.
    pub fn descriptor_limits(&self) -> (String, String) {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.child.id())).expect("the process runs");
        let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).expect("Linux has it");
        let mut words = line.split_whitespace().map(str::to_string);
        (words.next().expect("a soft limit"), words.next().expect("a hard limit"))
    }

    /// Sets the soft limit of open files of the running process, at most to its hard limit. Open
    /// descriptors stay open; a new one gets a number below the limit.
    ///
    /// # Panics
    /// Panics if the process has ended.
    pub fn limit_descriptors(&self, soft: u64) {
        let process = self.child.id() as i32;
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the child has not been waited for, so its process id is not reused. The kernel
        // writes `limit` during the call.
        let read = unsafe { libc::prlimit(process, libc::RLIMIT_NOFILE, std::ptr::null(), &mut limit) };
        assert_eq!(read, 0, "{}", std::io::Error::last_os_error());
        limit.rlim_cur = soft.min(limit.rlim_max);
        // SAFETY: as above, and the kernel reads `limit` during the call.
        let written = unsafe { libc::prlimit(process, libc::RLIMIT_NOFILE, &limit, std::ptr::null_mut()) };
        assert_eq!(written, 0, "{}", std::io::Error::last_os_error());
    }

    /// Process ids of the child processes.
    pub fn children(&self) -> Vec<u32> {
        let parent = self.child.id().to_string();
        let entries = std::fs::read_dir("/proc").expect("Linux has it");
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_child = |pid: &u32| {
            // Fields after the program's name in parentheses: state, parent.
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
            fields.split(' ').nth(1) == Some(&parent)
        };
        pids.filter(is_child).collect()
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub fn sigkill(mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it can be waited for");
    }

    /// Sends SIGSTOP: the process stays alive and stops responding.
    pub fn sigstop(&self) {
        // SAFETY: the child has not been waited for, so its process id is not reused.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGSTOP) };
    }

    pub fn sigcont(&self) {
        // SAFETY: the child has not been waited for, so its process id is not reused.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGCONT) };
    }

    /// Sends SIGTERM and waits for the end of the process.
    ///
    /// # Panics
    /// Panics if it does not end within [`PATIENCE`].
    pub fn stop(mut self) -> ExitStatus {
        // SAFETY: the child has not been waited for, so its process id is not reused.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        self.wait()
    }

    /// Waits for the end of the process and of its output.
    ///
    /// # Panics
    /// Panics if they do not end within [`PATIENCE`].
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.child.try_wait().expect("it can be waited for");
            if let Some(status) = status.filter(|_| self.readers.iter().all(JoinHandle::is_finished)) {
                return status;
            }
            assert!(Instant::now() < deadline, "larder does not exit; stderr:\n{}", self.stderr());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns `true` if the kernel has delivered all bytes that were sent over TCP to an IPv4 address
/// of this machine.
fn is_delivered(address: SocketAddr) -> bool {
    let SocketAddr::V4(address) = address else { panic!("{address} is not an IPv4 address") };
    let peer = format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port());
    let sockets = std::fs::read_to_string("/proc/net/tcp").expect("Linux has it");
    sockets.lines().skip(1).all(|line| {
        // Number, own address, peer, state, bytes that are not acknowledged and not read.
        let mut fields = line.split_whitespace().skip(2);
        let (to, queues) = (fields.next(), fields.nth(1));
        to != Some(peer.as_str()) || queues.is_some_and(|queues| queues.starts_with("00000000:"))
    })
}

/// Store nodes, engines and a router, each in its own process. Dropping it kills all of them.
pub struct Stack {
    /// Store nodes by number. `None` while a node is stopped.
    pub nodes: Vec<Option<Process>>,
    pub prefill: Option<Process>,
    pub decode: Option<Process>,
    pub router: Option<Process>,
    pub store_url: String,
    pub api: String,
    pub admin: String,
    addresses: Vec<SocketAddr>,
    dir: tempfile::TempDir,
}

impl Stack {
    /// Starts store nodes, a prefill engine, a decode engine and a router, with the bundled model.
    pub async fn start(nodes: usize) -> Stack {
        let addresses: Vec<SocketAddr> = (0..nodes).map(|_| unused_address()).collect();
        let list: Vec<String> = addresses.iter().map(|a| a.to_string()).collect();
        let mut stack = Stack {
            nodes: (0..nodes).map(|_| None).collect(),
            prefill: None,
            decode: None,
            router: None,
            store_url: format!("larder://{}/", list.join(",")),
            api: String::new(),
            admin: String::new(),
            addresses,
            dir: data_dir(),
        };
        for number in 0..nodes {
            stack.start_node(number);
        }
        stack.start_engines();
        stack.start_router();
        stack.ready().await;
        stack
    }

    pub fn node_dir(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("node-{number}"))
    }

    pub fn start_node(&mut self, number: usize) {
        let dir = self.node_dir(number);
        let address = self.addresses[number].to_string();
        let mut node = Process::start(&[
            "store",
            "--listen",
            &address,
            "--data-dir",
            dir.to_str().expect("a UTF-8 path"),
            "--l2",
            "64MiB",
            "--l3-bytes",
            "256MiB",
        ]);
        node.wait_for_line("larder://");
        self.nodes[number] = Some(node);
    }

    /// Starts an engine of the bundled model, attached to this store.
    pub fn engine(&self, role: &str, more: &[&str]) -> Process {
        let folder = tiny_model_dir();
        let folder = folder.to_str().expect("a UTF-8 path");
        let mut engine =
            Process::start(&[&[role, "--store", &self.store_url, "--model", folder, "--l1", "64MiB"], more].concat());
        engine.wait_for_line("http://");
        engine
    }

    pub fn start_engines(&mut self) {
        self.prefill = Some(self.engine("prefill", &[]));
        self.decode = Some(self.engine("decode", &[]));
    }

    pub fn start_router(&mut self) {
        let free = "127.0.0.1:0";
        let mut router =
            Process::start(&["router", "--store", &self.store_url, "--listen", free, "--admin-listen", free]);
        let line = router.wait_for_line("OpenAI API");
        let mut urls = line.split_whitespace().filter(|word| word.starts_with("http://"));
        self.api = urls.next().expect("the API's URL").trim_end_matches("/v1,").to_string();
        self.admin = urls.next().expect("the admin URL").to_string();
        self.router = Some(router);
    }

    /// Waits until the router knows exactly the running engines and nodes, and no node recovers
    /// pages any more.
    pub async fn ready(&mut self) {
        let nodes = self.nodes.iter().flatten().count();
        let mut engines: Vec<String> =
            [&mut self.prefill, &mut self.decode].into_iter().flatten().map(|engine| engine.url("http://")).collect();
        engines.sort();
        eventually("engines known to the router", || async {
            let Ok(status) = get_json(&format!("{}/admin/v1/status", self.admin)).await else { return false };
            let listed = |list: &str| status[list].as_array().cloned().unwrap_or_default();
            let mut known: Vec<String> = listed("engines")
                .iter()
                .filter(|engine| engine["up"] == true)
                .filter_map(|engine| engine["url"].as_str().map(str::to_string))
                .collect();
            known.sort();
            // Every engine has its own connections to the nodes, and reconnects with its own
            // backoff.
            let up = |engine: &&serde_json::Value| engine["up"] == true;
            let attached = listed("engines").iter().filter(up).all(|engine| engine["state"]["store_nodes"] == nodes);
            // A model is listed once its tokenizer has been loaded.
            let served = !listed("models").is_empty() || engines.is_empty();
            let ready = |node: &&serde_json::Value| node["up"] == true && is_recovered(&node["status"]);
            served && attached && known == engines && listed("nodes").iter().filter(ready).count() == nodes
        })
        .await;
    }

    /// Pages that the running nodes have sealed since their starts.
    pub async fn pages_put(&self) -> u64 {
        node_statuses(&self.admin).await.iter().map(pages_put).sum()
    }

    /// Waits until the running nodes have sealed at least `pages` pages since their starts and have
    /// written them to L3. Engines publish in the background, so an answer may precede its pages.
    pub async fn flushed(&self, pages: u64) {
        eventually(&format!("{pages} pages sealed and written to L3"), || async {
            let statuses = node_statuses(&self.admin).await;
            statuses.iter().map(pages_put).sum::<u64>() >= pages && statuses.iter().all(is_flushed)
        })
        .await;
    }
}

fn pages_put(status: &serde_json::Value) -> u64 {
    status["counters"]["pages_put"].as_u64().expect("a node counts its puts")
}
