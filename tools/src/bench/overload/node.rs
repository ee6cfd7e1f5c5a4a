//! Store node under test: a child process of the same binary with small budgets.

use anyhow::{Context, Result, bail, ensure};
use larder_client::{Client, ClientOptions, StoreUrl, Transport};
use rustix::thread::CpuSet;
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// Options of the node under overload. Its memory plan follows from them.
pub const OPTIONS: [&str; 6] = ["--l2", "256MiB", "--in-flight", "64MiB", "--request-memory", "16MiB"];
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for a status answer. It is generous, because the overloaded machine delays even this
/// client.
const STATUS_TIMEOUT: Duration = Duration::from_secs(20);
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Unit of processor times in /proc, which the kernel's interface fixes for all machines of today.
pub const TICKS_PER_SECOND: f64 = 100.0;

pub struct NodeProcess {
    child: Child,
    address: String,
    admin: Client,
}

/// Reads the processor time of the node and of this process.
#[derive(Debug, Clone, Copy)]
pub struct CpuClock {
    node: Option<u32>,
}

/// Processor time in user and kernel mode, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct CpuSeconds {
    pub node: f64,
    pub load: f64,
}

impl CpuClock {
    pub fn now(self) -> Result<CpuSeconds> {
        let node = self.node.context("the node has ended")?;
        Ok(CpuSeconds { node: cpu_seconds(&node.to_string())?, load: cpu_seconds("self")? })
    }
}

impl CpuSeconds {
    pub fn since(self, before: CpuSeconds) -> CpuSeconds {
        CpuSeconds { node: self.node - before.node, load: self.load - before.load }
    }
}

fn cpu_seconds(process: &str) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name of the program may contain blanks. It is in brackets, before all numbers.
    let (_, fields) = stat.rsplit_once(')').context("/proc/PID/stat has another form")?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<f64>());
    let ticks: f64 = ticks.sum::<Result<f64, _>>().context("/proc/PID/stat has another form")?;
    Ok(ticks / TICKS_PER_SECOND)
}

pub struct Counters(Value);

impl Counters {
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name)?.as_u64()
    }
}

impl NodeProcess {
    /// Starts a node on some processors, without shared memory. `binary` is this one by default.
    pub async fn start(binary: Option<&Path>, processors: CpuSet, options: &[&str]) -> Result<NodeProcess> {
        let binary = match binary {
            Some(binary) => binary.to_path_buf(),
            None => std::env::current_exe()?,
        };
        // A child inherits the processors of the thread that spawns it.
        let here = rustix::thread::sched_getaffinity(None)?;
        rustix::thread::sched_setaffinity(None, &processors)?;
        let child = Command::new(binary)
            .args(["--log", "error", "store", "--listen", "127.0.0.1:0", "--share-memory", "never"])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn();
        rustix::thread::sched_setaffinity(None, &here)?;
        let mut child = child.context("cannot start a store node")?;
        let mut lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        let line = tokio::time::timeout(START_TIMEOUT, lines.next_line())
            .await
            .context("the node did not start in time")??;
        let line = line.context("the node ended during its start")?;
        let Some((_, url)) = line.split_once("larder://") else {
            bail!("the node printed '{line}' instead of its address")
        };
        let address = url.trim_end_matches('/').to_string();
        let url = StoreUrl { nodes: vec![address.clone()], transport: Transport::Tcp, connections: 1 };
        let admin = Client::attach(url, None, ClientOptions { name: "status".into(), ..ClientOptions::default() });
        Ok(NodeProcess { child, address, admin })
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Resident memory in bytes, including touched shared memory. `None` if it cannot be read, e.g.
    /// because the process has ended.
    pub fn rss(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()?)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kib << 10)
    }

    pub fn cpu_clock(&self) -> CpuClock {
        CpuClock { node: self.child.id() }
    }

    pub async fn status(&self) -> Result<Value> {
        let begin = Instant::now();
        loop {
            let answer = self.admin.status(Instant::now() + STATUS_TIMEOUT).await;
            if let Some(status) = answer.into_iter().find_map(|node| node.status) {
                return Ok(status);
            }
            ensure!(begin.elapsed() < STATUS_TIMEOUT, "the node did not answer a status request in time");
            // The client may have lost its connection on a machine this busy.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub async fn counters(&self) -> Result<Counters> {
        Ok(Counters(self.status().await?["counters"].take()))
    }

    /// Most memory that the node says it can take, in bytes: the sum of its plan.
    pub async fn memory_plan(&self) -> Result<u64> {
        self.status().await?["memory_max"]["bytes"].as_u64().context("the node reports no memory plan")
    }

    pub async fn bytes_in_flight(&self) -> Result<u64> {
        let begin = Instant::now();
        loop {
            let status = self.status().await?;
            let budgets = status["budget"].as_object().context("the node reports no budget")?;
            // The status request itself is one of `requests`.
            let transfers = budgets.iter().filter(|(name, _)| *name != "requests");
            let left = transfers.filter_map(|(_, budget)| budget["bytes"].as_u64()).sum();
            if left == 0 || begin.elapsed() > IDLE_TIMEOUT {
                return Ok(left);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
