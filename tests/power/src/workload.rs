//! Random puts, forgets, waits for durability, reads and restarts. Marks in the write log say which
//! events precede which writes.

use crate::device::MappedDevice;
use crate::node::Node;
use crate::pages::{KINDS, all_pages};
use crate::record::{Event, Found, Page, Record};
use anyhow::{Result, anyhow, ensure};
use futures::future::try_join_all;
use larder_client::PutOutcome;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// Mark before the first write of the node.
pub const START_MARK: &str = "start";
const PUTS_MAX: usize = 6;
const FORGETS_MAX: usize = 4;
/// Longest time for which puts run before the node is killed.
const KILL_AFTER_MAX: Duration = Duration::from_millis(60);

#[derive(Debug, Default, Clone, Copy)]
struct State {
    /// Last version whose put has begun.
    newest: u64,
    /// Version that the node has. After a crash it may be an older one, which the log had evicted.
    present: Option<u64>,
    durable: bool,
}

/// Counts of a workload.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    pub puts: u64,
    /// More than the capacity of the log, if segments are to be reclaimed.
    pub put_bytes: u64,
    pub forgets: u64,
    pub waits: u64,
    pub stops: u64,
    pub kills: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { puts, put_bytes, forgets, waits, stops, kills } = self;
        write!(formatter, "{puts} puts of {} MiB in all, {forgets} forgets, ", put_bytes >> 20)?;
        write!(formatter, "{waits} waits for durability, {stops} restarts, {kills} kills")
    }
}

pub struct Workload<'a> {
    device: &'a MappedDevice,
    directory: &'a Path,
    record: RefCell<Record>,
    states: RefCell<BTreeMap<Page, State>>,
    counts: RefCell<Counts>,
    rng: StdRng,
}

impl<'a> Workload<'a> {
    pub fn new(device: &'a MappedDevice, directory: &'a Path, seed: u64) -> Workload<'a> {
        Workload {
            device,
            directory,
            record: RefCell::default(),
            states: RefCell::new(all_pages().map(|page| (page, State::default())).collect()),
            counts: RefCell::default(),
            rng: StdRng::seed_from_u64(seed),
        }
    }

    /// Runs on a new node for `steps` steps, and stops it.
    pub async fn run(mut self, steps: u32) -> Result<(Record, Counts)> {
        self.device.mark(START_MARK)?;
        let mut node = Node::start(self.directory).await?;
        for _ in 0..steps {
            node = self.step(node).await?;
        }
        self.wait_until_durable(&node).await?;
        node.stop()?;
        Ok((self.record.into_inner(), self.counts.into_inner()))
    }

    async fn step(&mut self, node: Node) -> Result<Node> {
        let absent = self.choose(PUTS_MAX, |state| state.present.is_none());
        let present = self.choose(FORGETS_MAX, |state| state.present.is_some());
        match self.rng.random_range(0..100) {
            0..30 => self.put_all(&node, &absent, false).await?,
            30..55 => {
                let (put, forgotten) =
                    tokio::join!(self.put_all(&node, &absent, false), self.forget_all(&node, &present));
                put.and(forgotten)?;
            }
            55..70 => self.forget_all(&node, &present).await?,
            70..88 => self.wait_until_durable(&node).await?,
            // Retention copies pages that were read.
            88..92 => {
                for page in present {
                    self.judge(page, node.read(page).await)?;
                }
            }
            92..96 => return self.restart(node).await,
            _ => return self.kill(node, &absent).await,
        }
        Ok(node)
    }

    /// Chooses up to `max` pages. Every kind is equally likely, so the large ones fill the log.
    fn choose(&mut self, max: usize, is_wanted: impl Fn(&State) -> bool) -> Vec<Page> {
        let states = self.states.borrow();
        let pages: Vec<Page> = states.iter().filter(|(_, state)| is_wanted(state)).map(|(&page, _)| page).collect();
        let count = self.rng.random_range(1..=max);
        let weight = |page: &Page| 1.0 / KINDS[page.0].pages as f64;
        let chosen = pages.choose_multiple_weighted(&mut self.rng, count, weight);
        chosen.expect("all weights are positive").copied().collect()
    }

    fn push(&self, event: Event) {
        self.record.borrow_mut().push(event);
    }

    fn update(&self, page: Page, change: impl FnOnce(&mut State)) -> State {
        let mut states = self.states.borrow_mut();
        let state = states.get_mut(&page).expect("every page has a state");
        change(state);
        *state
    }

    /// Names the events so far in the write log. Whatever the log has before the mark happened
    /// before it.
    fn mark(&self) -> Result<()> {
        let events = self.record.borrow().len();
        self.device.mark(&events.to_string())
    }

    /// Puts pages in parallel. While the node is being killed, a put may have any end.
    async fn put_all(&self, node: &Node, pages: &[Page], killed: bool) -> Result<()> {
        let puts = pages.iter().map(|&page| async move {
            let version = self.update(page, |state| state.newest += 1).newest;
            let bytes = KINDS[page.0].bytes() as u64;
            self.push(Event::PutBegun { page, version, bytes });
            self.counts.borrow_mut().puts += 1;
            self.counts.borrow_mut().put_bytes += bytes;
            match node.put(page, version).await {
                PutOutcome::Stored => drop(self.update(page, |state| state.present = Some(version))),
                outcome => ensure!(killed, "the put of version {version} of page {page:?} ended with {outcome:?}"),
            }
            Ok(())
        });
        try_join_all(puts).await.map(drop)
    }

    async fn forget_all(&self, node: &Node, pages: &[Page]) -> Result<()> {
        let forgets = pages.iter().map(|&page| async move {
            self.push(Event::ForgetBegun { page });
            let below =
                self.update(page, |state| *state = State { newest: state.newest, ..State::default() }).newest + 1;
            ensure!(node.forget(page).await, "page {page:?} was not forgotten");
            self.push(Event::Forgotten { page, below });
            self.counts.borrow_mut().forgets += 1;
            self.mark()
        });
        try_join_all(forgets).await.map(drop)
    }

    async fn wait_until_durable(&self, node: &Node) -> Result<()> {
        node.durable().await;
        self.counts.borrow_mut().waits += 1;
        for (&page, state) in self.states.borrow_mut().iter_mut() {
            if let Some(version) = state.present.filter(|_| !state.durable) {
                state.durable = true;
                self.push(Event::Durable { page, version });
            }
        }
        self.mark()
    }

    async fn restart(&mut self, node: Node) -> Result<Node> {
        node.stop()?;
        self.counts.borrow_mut().stops += 1;
        self.start_again().await
    }

    /// Kills the node while it receives and writes pages.
    async fn kill(&mut self, node: Node, pages: &[Page]) -> Result<Node> {
        let time = self.rng.random_range(Duration::ZERO..KILL_AFTER_MAX);
        // The other puts are abandoned, as by a client that loses its power, too.
        if let Ok(ended) = tokio::time::timeout(time, self.put_all(&node, pages, true)).await {
            ended?;
        }
        node.sigkill();
        self.counts.borrow_mut().kills += 1;
        self.start_again().await
    }

    /// Starts the node, and learns from it which pages it still has.
    async fn start_again(&mut self) -> Result<Node> {
        self.push(Event::Restart);
        let node = Node::start(self.directory).await?;
        for (page, found) in node.read_all().await {
            self.judge(page, found)?;
            let present = found.version();
            self.update(page, |state| {
                *state = State { durable: state.durable && state.present == present, present, ..*state }
            });
        }
        Ok(node)
    }

    /// Judges a read of a node that did not lose its power.
    fn judge(&self, page: Page, found: Found) -> Result<()> {
        let record = self.record.borrow();
        let expected = record.expected(page, record.len(), record.len());
        let judged = expected.judge(found);
        judged.map_err(|violation| anyhow!("{violation:?} without a power cut: page {page:?}, {found:?}, {expected:?}"))
    }
}
