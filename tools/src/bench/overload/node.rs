//! The node: a process of this very program, with small budgets, and what can be seen of it from outside.

use anyhow::{Context, Result, bail, ensure};
use larder_client::{Client, ClientOptions, StoreUrl, Transport};
use rustix::thread::CpuSet;
use serde_json::Value;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const L2_MIB: u64 = 256;
const IN_FLIGHT_MIB: u64 = 64;
const REQUESTS_MIB: u64 = 16;
/// What a node has beside its budgets: code, threads, index, what the allocator keeps.
const FIXED_MIB: u64 = 48;
/// Most memory it should have: resident, with the arena as far as it was ever touched.
pub const BUDGET_BYTES: u64 = (L2_MIB + IN_FLIGHT_MIB + REQUESTS_MIB + FIXED_MIB) << 20;
const START_MAX: Duration = Duration::from_secs(10);
/// Most time to say how it is.
const STATUS_MAX: Duration = Duration::from_secs(20);
/// By then nothing is under way any more.
const REST_MAX: Duration = Duration::from_secs(15);

/// A running node. Killed on drop.
pub struct Process {
    child: Child,
    address: String,
    /// Asks for its status, and nothing else.
    admin: Client,
}

/// Counters of a node at one time.
pub struct Counters(Value);

impl Counters {
    /// One of them.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name)?.as_u64()
    }
}

impl Process {
    /// Starts it on these processors, without L3.
    pub async fn start(processors: CpuSet) -> Result<Process> {
        let mib = |mib: u64| format!("{mib}MiB");
        // It gets those of the thread that starts it.
        let here = rustix::thread::sched_getaffinity(None)?;
        rustix::thread::sched_setaffinity(None, &processors)?;
        let child = Command::new(std::env::current_exe()?)
            .args(["--log", "error", "store", "--listen", "127.0.0.1:0", "--share-memory", "never"])
            .args(["--l2", &mib(L2_MIB), "--in-flight", &mib(IN_FLIGHT_MIB), "--request-memory", &mib(REQUESTS_MIB)])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn();
        rustix::thread::sched_setaffinity(None, &here)?;
        let mut child = child.context("cannot start a store node")?;
        let mut lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        let line = tokio::time::timeout(START_MAX, lines.next_line()).await.context("the node does not start")??;
        let line = line.context("the node ended at once")?;
        let Some((_, url)) = line.split_once("larder://") else { bail!("the node said '{line}' and no address") };
        let address = url.trim_end_matches('/').to_string();
        let url = StoreUrl { nodes: vec![address.clone()], transport: Transport::Tcp, connections: 1 };
        let admin = Client::attach(url, None, ClientOptions { name: "status".into(), ..ClientOptions::default() });
        Ok(Process { child, address, admin })
    }

    /// Of its data port.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its resident memory in bytes, shared memory that it touched included.
    pub fn rss(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()?)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kib << 10)
    }

    async fn status(&self) -> Result<Value> {
        let begin = Instant::now();
        loop {
            let answer = self.admin.status(Instant::now() + STATUS_MAX).await;
            if let Some(status) = answer.into_iter().find_map(|node| node.status) {
                return Ok(status);
            }
            ensure!(begin.elapsed() < STATUS_MAX, "the node does not say how it is");
            // The connection may have been lost, with so much else to do here.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What it counted so far.
    pub async fn counters(&self) -> Result<Counters> {
        Ok(Counters(self.status().await?["counters"].take()))
    }

    /// Bytes that are still counted as under way after a while of rest.
    pub async fn left_over(&self) -> Result<u64> {
        let begin = Instant::now();
        loop {
            let status = self.status().await?;
            let of = |kind: &str| status["budget"][kind]["bytes"].as_u64().unwrap_or(u64::MAX);
            // The question itself is one request.
            let left = ["puts", "reads", "asked"].map(of).into_iter().fold(0, u64::saturating_add);
            if left == 0 || begin.elapsed() > REST_MAX {
                return Ok(left);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
