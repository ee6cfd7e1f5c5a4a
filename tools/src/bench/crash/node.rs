//! Store node under test: a child process of the same binary.

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
/// Deadline of a start. A node that takes longer hangs, however busy the machine is. The report
/// names the slowest start.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
const LOG_FILE: &str = "node.log";

#[derive(Debug, Clone)]
pub struct NodeSettings {
    pub dir: PathBuf,
    pub l3_bytes: u64,
}

/// A running store node. Killed on drop, so that a failed round leaves no process that holds the
/// directory's lock.
pub struct NodeProcess {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    started: Instant,
    log: PathBuf,
}

impl NodeProcess {
    pub fn start(settings: &NodeSettings) -> Result<NodeProcess> {
        std::fs::create_dir_all(&settings.dir).with_context(|| settings.dir.display().to_string())?;
        let log = settings.dir.join(LOG_FILE);
        let errors = OpenOptions::new().create(true).append(true).open(&log)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--log", "info", "store", "--listen", "127.0.0.1:0", "--l2", "32MiB", "--l3-bytes"])
            .arg(settings.l3_bytes.to_string())
            .arg("--data-dir")
            .arg(&settings.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a store node")?;
        let lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        Ok(NodeProcess { child, lines, started: Instant::now(), log })
    }

    /// Waits until the node serves, for at most [`START_TIMEOUT`]. Returns its URL and the duration
    /// of the start.
    pub async fn ready(&mut self) -> Result<(StoreUrl, Duration)> {
        let Ok(line) = tokio::time::timeout(START_TIMEOUT, self.lines.next_line()).await else {
            bail!("the node was not ready after {START_TIMEOUT:?}; see {}", self.log.display());
        };
        let line = line?.with_context(|| format!("the node ended during its start; see {}", self.log.display()))?;
        let url = line.split_whitespace().find(|word| word.starts_with("larder://"));
        let url = url.with_context(|| format!("the node printed '{line}' instead of its address"))?;
        Ok((url.parse()?, self.started.elapsed()))
    }

    /// Sends SIGKILL and waits for the end of the process. Fails if the node had ended by itself.
    pub async fn kill(mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the node crashed before it was killed: {status}; see {}", self.log.display());
        }
        self.child.start_kill()?;
        let status = self.child.wait().await?;
        ensure!(
            status.signal() == Some(SIGKILL),
            "the node did not end by SIGKILL: {status}; see {}",
            self.log.display()
        );
        Ok(())
    }
}

/// Returns other processes whose command line names `dir`. A process that remains would share the
/// directory with the next node.
pub fn remaining_processes(dir: &Path) -> Result<Vec<u32>> {
    let wanted = dir.as_os_str().as_encoded_bytes();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // The process may have ended since the directory was listed.
        let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let names = line.split(|&byte| byte == 0).any(|word| word.starts_with(wanted));
        if names && pid != std::process::id() {
            found.push(pid);
        }
    }
    Ok(found)
}
