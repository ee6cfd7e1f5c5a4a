//! The node that is killed: a process of this very program.

use anyhow::{Context, Result, bail, ensure};
use larder_client::StoreUrl;
use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

const SIGKILL: i32 = 9;
/// A start that takes longer has failed.
pub const START_MAX: Duration = Duration::from_secs(10);
/// Where nodes log, in the data directory.
const LOG_FILE: &str = "node.log";

/// How nodes of an episode are set up.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Data directory.
    pub dir: PathBuf,
    /// Most bytes of L3.
    pub l3_bytes: u64,
}

/// A running node. Killed on drop.
pub struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    started: Instant,
    log: PathBuf,
}

impl Process {
    /// Starts it; it is not ready yet.
    pub fn start(setup: &Setup) -> Result<Process> {
        std::fs::create_dir_all(&setup.dir).with_context(|| setup.dir.display().to_string())?;
        let log = setup.dir.join(LOG_FILE);
        let errors = OpenOptions::new().create(true).append(true).open(&log)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--log", "info", "store", "--listen", "127.0.0.1:0", "--l2", "32MiB", "--l3-bytes"])
            .arg(setup.l3_bytes.to_string())
            .arg("--data-dir")
            .arg(&setup.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a store node")?;
        let lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        Ok(Process { child, lines, started: Instant::now(), log })
    }

    /// Waits until it serves. The answer is its address and how long the start took.
    pub async fn ready(&mut self) -> Result<(StoreUrl, Duration)> {
        let Ok(line) = tokio::time::timeout(START_MAX, self.lines.next_line()).await else {
            bail!("the node was not ready after {START_MAX:?}; see {}", self.log.display());
        };
        let line = line?.with_context(|| format!("the node did not start; see {}", self.log.display()))?;
        let url = line.split_whitespace().find(|word| word.starts_with("larder://"));
        let url = url.with_context(|| format!("the node said '{line}' and no address"))?;
        Ok((url.parse()?, self.started.elapsed()))
    }

    /// SIGKILL, and waits until it is gone. The answer is when the signal was sent.
    pub async fn kill(mut self) -> Result<Instant> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the node ended by itself: {status}; see {}", self.log.display());
        }
        let killed = Instant::now();
        self.child.start_kill()?;
        let status = self.child.wait().await?;
        ensure!(status.signal() == Some(SIGKILL), "the node ended otherwise: {status}; see {}", self.log.display());
        Ok(killed)
    }
}

/// Processes that name `dir` in their command line, but for this one.
pub fn left_over(dir: &Path) -> Result<Vec<u32>> {
    let wanted = dir.as_os_str().as_encoded_bytes();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // It may be gone by now.
        let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let names = line.split(|&byte| byte == 0).any(|word| word.starts_with(wanted));
        if names && pid != std::process::id() {
            found.push(pid);
        }
    }
    Ok(found)
}
