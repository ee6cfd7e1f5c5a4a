//! Servers under test: a store node, two engines and a router, each a child process of the same
//! binary.

use super::cpu;
use crate::bundled;
use anyhow::{Context, Result, bail};
use larder_format::NamespaceDescriptor;
use larder_router::admin::api::PATH_STATUS;
use larder_worker::api::{EngineInfo, PATH_MODEL, PATH_STATE};
use serde_json::Value;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

const START_TIMEOUT: Duration = Duration::from_secs(30);
const STATUS_TIMEOUT: Duration = Duration::from_secs(20);
/// Options of the node. Its memory plan follows from them.
const NODE_OPTIONS: [&str; 8] =
    ["--l2", "64MiB", "--in-flight", "64MiB", "--request-memory", "64MiB", "--l3-bytes", "512MiB"];
const L1: &str = "64MiB";
/// Idle time of HTTP connections between router and engines, in seconds. Short, so that only leaks
/// remain soon after the end.
const HTTP_IDLE: &str = "5";

/// Resources of a process that must return to their number before the attacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Resources {
    pub sockets: usize,
    /// Other descriptors, without the files of L3, whose number depends on the pages.
    pub descriptors: usize,
    pub threads: usize,
    pub children: usize,
}

/// Threads that a process may have beyond its baseline. Tokio ends a thread for blocking calls when
/// it was idle for 10 s. Calls that come once a second, as those of the scrub of L1, take such
/// threads in turn, so up to ten of them never are.
const IDLE_THREADS_MAX: usize = 10;

impl Resources {
    /// Resources beyond those of `baseline`, and beyond [`IDLE_THREADS_MAX`].
    pub fn beyond(&self, baseline: &Resources) -> Resources {
        Resources {
            sockets: self.sockets.saturating_sub(baseline.sockets),
            descriptors: self.descriptors.saturating_sub(baseline.descriptors),
            threads: self.threads.saturating_sub(baseline.threads + IDLE_THREADS_MAX),
            children: self.children.saturating_sub(baseline.children),
        }
    }
}

pub struct Server {
    pub name: &'static str,
    child: Child,
    log: PathBuf,
    /// Kept open: a server must not fail to print.
    _stdout: Lines<BufReader<ChildStdout>>,
}

impl Server {
    /// Starts a process and waits until it has printed `count` URLs. Returns them in their order.
    async fn start(name: &'static str, arguments: &[&str], dir: &Path, count: usize) -> Result<(Server, Vec<String>)> {
        let log = dir.join(format!("{name}.log"));
        let child = Command::new(std::env::current_exe()?)
            .args(["--log", "warn"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .kill_on_drop(true)
            .spawn();
        let mut child = child.with_context(|| format!("cannot start {name}"))?;
        let mut lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        let mut urls = Vec::new();
        let printed = async {
            while urls.len() < count {
                let Some(line) = lines.next_line().await? else {
                    let errors = std::fs::read_to_string(&log).unwrap_or_default();
                    bail!("{name} ended during its start: {}", errors.lines().last().unwrap_or("without a message"));
                };
                let words = line.split_whitespace().filter(|word| word.contains("://"));
                urls.extend(words.map(|word| word.trim_end_matches([',', '/']).to_string()));
            }
            Ok(())
        };
        tokio::time::timeout(START_TIMEOUT, printed)
            .await
            .with_context(|| format!("{name} did not start in time"))??;
        Ok((Server { name, child, log, _stdout: lines }, urls))
    }

    /// Processor time, in seconds. Includes children that have ended, such as template workers.
    pub fn cpu_seconds(&self) -> Result<f64> {
        cpu::seconds(self.child.id().with_context(|| format!("{} has ended", self.name))?)
    }

    /// Time for which its threads have waited for a processor.
    pub fn waits(&self) -> Result<cpu::Waits> {
        cpu::waits(self.child.id().with_context(|| format!("{} has ended", self.name))?)
    }

    fn proc_path(&self, file: &str) -> Result<PathBuf> {
        let pid = self.child.id().with_context(|| format!("{} has ended", self.name))?;
        Ok(format!("/proc/{pid}/{file}").into())
    }

    fn status_line(&self, name: &str) -> Result<u64> {
        let path = self.proc_path("status")?;
        let status = std::fs::read_to_string(&path).with_context(|| format!("{} has ended", self.name))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.with_context(|| format!("no {name} in {}", path.display()))
    }

    /// Largest resident memory since the start, in bytes, including touched shared memory.
    pub fn peak_memory(&self) -> Result<u64> {
        Ok(self.status_line("VmHWM")? << 10)
    }

    pub fn resources(&self, l3: &Path) -> Result<Resources> {
        let threads = self.status_line("Threads")? as usize;
        let mut found = Resources { threads, children: self.children()?, ..Resources::default() };
        for entry in std::fs::read_dir(self.proc_path("fd")?)? {
            // It may be closed by now.
            let Ok(target) = std::fs::read_link(entry?.path()) else { continue };
            if target.to_string_lossy().starts_with("socket:") {
                found.sockets += 1;
            } else if !target.starts_with(l3) {
                found.descriptors += 1;
            }
        }
        Ok(found)
    }

    fn children(&self) -> Result<usize> {
        let mut children = 0;
        for task in std::fs::read_dir(self.proc_path("task")?)? {
            // The thread may have ended by now.
            let pids = std::fs::read_to_string(task?.path().join("children")).unwrap_or_default();
            children += pids.split_whitespace().count();
        }
        Ok(children)
    }

    pub fn log_lines(&self) -> usize {
        std::fs::read_to_string(&self.log).map_or(0, |log| log.lines().count())
    }
}

/// Ports of the servers, for honest clients and strangers.
#[derive(Debug, Clone)]
pub struct Ports {
    pub node: SocketAddr,
    pub node_admin: SocketAddr,
    pub redis: SocketAddr,
    pub prefill: SocketAddr,
    pub decode: SocketAddr,
    pub api: SocketAddr,
    pub admin: SocketAddr,
    /// Namespace of the engines, and the tokens of its pages.
    pub engines: NamespaceDescriptor,
    pub page_tokens: usize,
}

pub struct Servers {
    pub all: Vec<Server>,
    pub ports: Ports,
    /// Folder of the engines' model.
    pub model_dir: PathBuf,
    l3: PathBuf,
    http: reqwest::Client,
}

fn address(urls: &[String], number: usize) -> Result<SocketAddr> {
    let url = urls.get(number).context("a server printed too few addresses")?;
    let authority = url.split("://").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    authority.parse().with_context(|| format!("a server printed the address '{url}'"))
}

impl Servers {
    /// Starts all servers and waits until the router knows the engines.
    pub async fn start(dir: &Path) -> Result<Servers> {
        let text = |path: &Path| path.to_str().map(str::to_string).context("the path of --dir is not UTF-8");
        let model_dir = bundled::unpack(dir)?;
        let (model, data) = (text(&model_dir)?, text(&dir.join("store"))?);
        let free = "127.0.0.1:0";
        let node = ["store", "--listen", free, "--admin-listen", free, "--redis-listen", free, "--data-dir", &data];
        // The second line has two addresses of the administration port.
        let (node, urls) = Server::start("store", &[&node, &NODE_OPTIONS[..]].concat(), dir, 4).await?;
        let (node_port, node_admin, redis) = (address(&urls, 0)?, address(&urls, 1)?, address(&urls, 3)?);
        let store = format!("larder://{node_port}/?transport=tcp");
        let http = ["--http-idle-timeout", HTTP_IDLE];
        let engine = ["--store", &store, "--model", &model, "--l1", L1, "--listen", free];
        let (prefill, urls) = Server::start("prefill", &[&["prefill"], &engine[..], &http].concat(), dir, 1).await?;
        let prefill_port = address(&urls, 0)?;
        let (decode, urls) = Server::start("decode", &[&["decode"], &engine[..], &http].concat(), dir, 1).await?;
        let decode_port = address(&urls, 0)?;
        let router = ["router", "--store", &store, "--listen", free, "--admin-listen", free];
        let (router, urls) = Server::start("router", &router, dir, 2).await?;
        // Without idle connections, which would count as sockets of the servers.
        let http = reqwest::Client::builder().timeout(STATUS_TIMEOUT).pool_max_idle_per_host(0).build()?;
        let info: EngineInfo = http.get(format!("http://{decode_port}{PATH_MODEL}")).send().await?.json().await?;
        let ports = Ports {
            node: node_port,
            node_admin,
            redis,
            prefill: prefill_port,
            decode: decode_port,
            api: address(&urls, 0)?,
            admin: address(&urls, 1)?,
            page_tokens: info.page_tokens as usize,
            engines: info.descriptor,
        };
        let servers =
            Servers { all: vec![node, prefill, decode, router], ports, model_dir, l3: dir.join("store"), http };
        servers.wait_for_engines().await?;
        Ok(servers)
    }

    async fn wait_for_engines(&self) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < START_TIMEOUT {
            let status = self.get(self.ports.admin, PATH_STATUS).await?;
            if status["engines"].as_array().is_some_and(|engines| engines.len() == 2) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        bail!("the engines did not register with the router in time")
    }

    async fn get(&self, port: SocketAddr, path: &str) -> Result<Value> {
        Ok(self.http.get(format!("http://{port}{path}")).send().await?.error_for_status()?.json().await?)
    }

    pub async fn node_status(&self) -> Result<Value> {
        self.get(self.ports.node_admin, "/status").await
    }

    /// Memory that every server states as its maximum, in bytes, in the order of [`Servers::all`].
    pub async fn memory_max(&self) -> Result<Vec<u64>> {
        let Ports { node_admin, prefill, decode, admin, .. } = self.ports;
        let statuses = [(node_admin, "/status"), (prefill, PATH_STATE), (decode, PATH_STATE), (admin, PATH_STATUS)];
        let mut bounds = Vec::new();
        for (server, (port, path)) in self.all.iter().zip(statuses) {
            let stated = self.get(port, path).await?["memory_max"]["bytes"].as_u64();
            bounds.push(stated.with_context(|| format!("{} states no maximum of its memory", server.name))?);
        }
        Ok(bounds)
    }

    /// Processor time of every server in seconds, in the order of [`Servers::all`].
    pub fn cpu_seconds(&self) -> Result<Vec<f64>> {
        self.all.iter().map(Server::cpu_seconds).collect()
    }

    /// Waits of the threads of every server, in the order of [`Servers::all`].
    pub fn waits(&self) -> Result<Vec<cpu::Waits>> {
        self.all.iter().map(Server::waits).collect()
    }

    /// Resources of every server, in the order of [`Servers::all`].
    pub fn resources(&self) -> Result<Vec<Resources>> {
        self.all.iter().map(|server| server.resources(&self.l3)).collect()
    }
}
