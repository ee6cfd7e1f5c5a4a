//! Power cuts: the write log, cut at every flush, replayed to a disk and judged by a real node.

use crate::device::{FileSystem, MappedDevice, Mount, REPLAYED};
use crate::node::Node;
use crate::pages::{KINDS, all_pages};
use crate::record::{Expected, Found, Record, Violation};
use crate::workload::START_MARK;
use crate::write_log::{Entry, Write, WriteLog};
use anyhow::{Context, Result, ensure};
use larder_client::PutOutcome;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Mark that the `log-writes` target adds when it is removed, after writes that no flush covers.
const END_MARK: &str = "dm-log-writes-end";
/// End of the file system's superblock: 1 KiB at 1 KiB in ext4, the first sector in XFS.
const SUPERBLOCK_END: u64 = 2048;
const VIOLATIONS_SHOWN: u64 = 20;
/// Cases between two lines of progress.
const PROGRESS_EVERY: u64 = 100;

/// A power cut after a flush, and all that the flush made durable.
#[derive(Debug, Default)]
pub struct Cut {
    /// Writes since the previous cut.
    writes: Vec<Write>,
    /// Events before the last mark that precedes the next write.
    certain: usize,
    /// Events before the mark that follows.
    possible: usize,
    /// The node has not been started before the first cuts.
    started: bool,
}

/// Cuts the log after every flush and every write that bypasses the device's cache.
pub fn cuts(log: &mut WriteLog, record: &Record) -> Result<Vec<Cut>> {
    let mut cuts: Vec<Cut> = Vec::new();
    let mut cut = Cut::default();
    loop {
        // The kernel stops logging when the disk of the log is full.
        match log.next_entry()?.context("the log of writes has no end: its disk is too small")? {
            Entry::Mark(mark) if mark == END_MARK => break,
            Entry::Mark(mark) if mark == START_MARK => cut.started = true,
            Entry::Mark(mark) => {
                let events = mark.parse().with_context(|| format!("unknown mark '{mark}'"))?;
                cut.certain = events;
                // The mark follows a flush, which it must not precede in the judgement.
                if let Some(last) = cuts.last_mut() {
                    last.certain = events;
                }
            }
            Entry::Write { write, durable } => {
                cut.writes.push(write);
                if durable {
                    let next = Cut { writes: Vec::new(), ..cut };
                    cuts.push(std::mem::replace(&mut cut, next));
                }
            }
        }
    }
    let mut possible = record.len();
    for index in (0..cuts.len()).rev() {
        cuts[index].possible = possible;
        let earlier = index.checked_sub(1).map(|before| cuts[before].certain);
        if earlier.is_some_and(|earlier| earlier < cuts[index].certain) {
            possible = cuts[index].certain;
        }
    }
    Ok(cuts)
}

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub file_system: FileSystem,
    /// Replay every n-th cut only.
    pub every: usize,
    /// Flushes before each cut whose writes are left out.
    pub lost_flushes: usize,
    pub seed: u64,
}

#[derive(Debug, Default)]
pub struct Report {
    flushes: u64,
    cases: u64,
    /// Cases with random sectors of writes in flight.
    torn: u64,
    reads: u64,
    hits: u64,
    /// Reads of pages that had to be present.
    must_have: u64,
    /// Reads of pages with a forgotten version.
    forgotten: u64,
    /// By [`Violation`].
    violations: [u64; 5],
}

impl Report {
    /// Counts a violation, and prints the first ones at once.
    fn violation(&mut self, violation: Violation, text: &str) {
        self.violations[violation as usize] += 1;
        if self.all_violations() <= VIOLATIONS_SHOWN {
            println!("{text}: {violation:?}");
        }
    }

    fn all_violations(&self) -> u64 {
        self.violations.iter().sum()
    }

    /// Fails if a promise was broken. With lost flushes it fails if the judgement did not notice.
    pub fn ensure_expected(&self, flushes_lost: bool) -> Result<()> {
        self.ensure_activity(!flushes_lost)?;
        let [.., returned, lost, _] = self.violations;
        if flushes_lost {
            ensure!(returned > 0 && lost > 0, "the judgement missed a device that loses writes: lower --every");
        } else {
            ensure!(self.all_violations() == 0, "{} violations", self.all_violations());
        }
        Ok(())
    }

    /// Fails if some promise was not tested at all.
    fn ensure_activity(&self, torn_wanted: bool) -> Result<()> {
        for (count, name) in [
            (self.cases, "power cuts"),
            (self.hits, "pages served"),
            (self.must_have, "durable pages"),
            (self.forgotten, "forgotten pages"),
        ] {
            ensure!(count > 0, "the run had no {name}, so it proves nothing: raise --steps or lower --every");
        }
        ensure!(self.torn > 0 || !torn_wanted, "the run had no torn writes: lower --every");
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { flushes, cases, torn, reads, hits, must_have, forgotten, violations } = self;
        let [wrong, never_put, returned, lost, refused] = violations;
        writeln!(formatter, "flushes: {flushes}, power cuts: {cases}, of these with torn writes: {torn}")?;
        writeln!(formatter, "pages checked: {reads}, served: {hits}, refused: {refused}")?;
        writeln!(formatter, "durable pages required: {must_have}, missing: {lost}")?;
        writeln!(formatter, "forgotten pages checked: {forgotten}, returned: {returned}")?;
        write!(formatter, "pages with wrong bytes: {wrong}, pages never put: {never_put}")
    }
}

/// Replays cut after cut, and judges a node on the result of each.
pub struct Replay<'a> {
    options: Options,
    log: WriteLog,
    record: &'a Record,
    disk: File,
    mount_point: &'a Path,
    rng: StdRng,
    report: Report,
}

impl<'a> Replay<'a> {
    pub fn new(options: Options, log: WriteLog, record: &'a Record, mount_point: &'a Path) -> Result<Replay<'a>> {
        let disk = OpenOptions::new().write(true).open(REPLAYED).context(REPLAYED)?;
        let rng = StdRng::seed_from_u64(options.seed);
        Ok(Replay { options, log, record, disk, mount_point, rng, report: Report::default() })
    }

    /// Replays all cuts, prints the report, and fails if it is not the expected one.
    pub async fn run(mut self, cuts: &[Cut]) -> Result<()> {
        let lost_flushes = self.options.lost_flushes;
        for (index, cut) in cuts.iter().enumerate() {
            // The flushes before the start of the node are never lost: they create the file system.
            let kept = if cut.started { index.checked_sub(lost_flushes) } else { Some(index) };
            if let Some(kept) = kept.filter(|&kept| cuts[kept].started == cut.started) {
                self.write(&self.disk, &cuts[kept].writes)?;
            }
            self.report.flushes += u64::from(cut.started);
            if cut.started && index % self.options.every == 0 {
                self.case(index, cut, &[]).await?;
                // The next writes were in flight, and may have reached the device in any part.
                let in_flight = cuts.get(index + 1).map_or(&[][..], |next| &next.writes);
                if lost_flushes == 0 && in_flight.iter().any(|write| write.bytes > 0) {
                    self.case(index, cut, in_flight).await?;
                }
            }
        }
        println!("{}", self.report);
        self.report.ensure_expected(lost_flushes > 0)?;
        if lost_flushes == 0 {
            self.check_judgement(cuts.last().context("the log has no flush")?).await?;
        }
        Ok(())
    }

    fn write(&self, disk: &File, writes: &[Write]) -> Result<()> {
        for write in writes {
            disk.write_all_at(&self.log.data(write)?, write.offset)?;
        }
        // The snapshot reads the device below the page cache.
        Ok(disk.sync_data()?)
    }

    /// Judges one power cut, with random sectors of the writes in flight.
    async fn case(&mut self, index: usize, cut: &Cut, in_flight: &[Write]) -> Result<()> {
        let torn = if in_flight.is_empty() { "" } else { ", torn" };
        let mut named = NamedCase { name: format!("cut {index}{torn}"), ended: false };
        let started = self.start(in_flight).await?;
        for (page, found) in started.node.read_all().await {
            let expected = self.record.expected(page, cut.certain, cut.possible);
            self.report.reads += 1;
            self.report.hits += u64::from(found.version().is_some());
            self.report.must_have += u64::from(expected.must_have.is_some());
            self.report.forgotten += u64::from(expected.has_forgotten());
            if let Err(violation) = expected.judge(found) {
                let text = format!("{}: page {page:?}, {found:?}, {expected:?}", named.name);
                self.report.violation(violation, &text);
            }
        }
        for _ in 0..started.node.corrupt_pages() {
            self.report.violation(Violation::WrongBytes, &format!("{}: a page that fails its checksum", named.name));
        }
        started.end()?;
        named.ended = true;
        self.report.cases += 1;
        self.report.torn += u64::from(!in_flight.is_empty());
        if self.report.cases.is_multiple_of(PROGRESS_EVERY) {
            println!("{} power cuts, {} violations", self.report.cases, self.report.all_violations());
        }
        Ok(())
    }

    /// Starts a node on a view of the replayed disk, with random sectors of the writes in flight.
    async fn start(&mut self, in_flight: &[Write]) -> Result<StartedNode> {
        let device = MappedDevice::snapshot()?;
        self.tear(&device.path(), in_flight)?;
        let mount = self.options.file_system.mount(&device.path(), self.mount_point)?;
        let node = Node::start(mount.directory()).await?;
        Ok(StartedNode { node, mount, device })
    }

    /// Lets a node serve what it must not, and expects each violation to be noticed. Otherwise a
    /// judgement that accepts everything would pass.
    async fn check_judgement(&mut self, cut: &Cut) -> Result<()> {
        let mut named = NamedCase { name: "the check of the judgement".into(), ended: false };
        let started = self.start(&[]).await?;
        let node = &started.node;
        let pages = all_pages().map(|page| (page, self.record.expected(page, cut.certain, cut.possible)));
        let pages: Vec<_> = pages.collect();
        let find = |is_wanted: fn(&Expected) -> bool| {
            let found = pages.iter().find(|(_, expected)| is_wanted(expected));
            found.copied().context("the last cut has no durable page, or no forgotten one: raise --steps")
        };
        let (page, durable) = find(|expected| expected.must_have.is_some())?;
        ensure!(node.forget(page).await, "page {page:?} was not forgotten");
        expect_violation(Violation::Lost, &durable, node.read(page).await)?;

        let (page, expected) = find(Expected::has_forgotten)?;
        let mut damaged = KINDS[page.0].payload(page.1, expected.newest);
        *damaged.last_mut().context("a page without bytes")? ^= 1;
        for (violation, payload) in [
            (Violation::Forgotten, KINDS[page.0].payload(page.1, 1)),
            (Violation::NeverPut, KINDS[page.0].payload(page.1, expected.newest + 1)),
            (Violation::WrongBytes, damaged),
        ] {
            ensure!(node.forget(page).await, "page {page:?} was not forgotten");
            let put = node.put_bytes(page, payload).await;
            ensure!(put == PutOutcome::Stored, "the put of page {page:?} ended with {put:?}");
            expect_violation(violation, &expected, node.read(page).await)?;
        }
        started.end()?;
        named.ended = true;
        println!("the judgement noticed a lost page, a forgotten one, one never put, and a wrong byte");
        Ok(())
    }

    fn tear(&mut self, device: &Path, in_flight: &[Write]) -> Result<()> {
        if in_flight.is_empty() {
            return Ok(());
        }
        let disk = OpenOptions::new().write(true).open(device)?;
        let sector_bytes = self.log.sector_bytes() as usize;
        for write in in_flight {
            // Most writes are whole or missing, as on a real device. All writes of the superblock
            // are: ext4 checks its checksum before it replays the journal, and refuses to mount.
            let shares = if write.offset < SUPERBLOCK_END { &[0.0, 1.0][..] } else { &[0.0, 1.0, 0.5] };
            let share = shares[self.rng.random_range(0..shares.len())];
            let data = self.log.data(write)?;
            for (sector, offset) in data.chunks(sector_bytes).zip((write.offset..).step_by(sector_bytes)) {
                if self.rng.random_bool(share) {
                    disk.write_all_at(sector, offset)?;
                }
            }
        }
        Ok(disk.sync_data()?)
    }
}

fn expect_violation(violation: Violation, expected: &Expected, found: Found) -> Result<()> {
    let judged = expected.judge(found);
    ensure!(
        judged == Err(violation),
        "the judgement of {found:?} is {judged:?} instead of {violation:?}: {expected:?}"
    );
    Ok(())
}

/// A node on a view of the replayed disk.
struct StartedNode {
    node: Node,
    mount: Mount,
    device: MappedDevice,
}

impl StartedNode {
    /// Kills the node, and discards all changes to the disk.
    fn end(self) -> Result<()> {
        self.node.sigkill();
        self.mount.unmount()?;
        self.device.remove()
    }
}

/// Prints the name of the case in which a file system was not mounted, or a node did not answer.
struct NamedCase {
    name: String,
    ended: bool,
}

impl Drop for NamedCase {
    fn drop(&mut self) {
        if !self.ended {
            eprintln!("stopped at {}", self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Event;
    use crate::write_log::FUA;
    use crate::write_log::tests::{FLUSH_ONLY, LogEntry, log_of, write};

    #[test]
    fn cut_knows_which_events_precede_it_and_which_may() {
        let mark = |events: usize| LogEntry::Mark(events.to_string());
        let mut log = log_of(&[
            FLUSH_ONLY,
            LogEntry::Mark(START_MARK.into()),
            write(1, 0),
            FLUSH_ONLY,
            write(2, 0),
            write(3, FUA),
            mark(2),
            mark(3),
            FLUSH_ONLY,
            write(4, 0),
            FLUSH_ONLY,
            mark(6),
            LogEntry::Mark(END_MARK.into()),
            write(5, 0),
            FLUSH_ONLY,
        ]);
        let mut record = Record::default();
        (0..7).for_each(|_| record.push(Event::Restart));
        let cuts = cuts(&mut log, &record).unwrap();
        let summary = cuts.iter().map(|cut| (cut.started, cut.certain, cut.possible, cut.writes.len()));
        // The third cut was durable at the marks 2 and 3, the next one possibly not before mark 6.
        assert_eq!(
            summary.collect::<Vec<_>>(),
            [(false, 0, 3, 1), (true, 0, 3, 2), (true, 3, 6, 2), (true, 3, 6, 1), (true, 6, 7, 2)]
        );
    }

    #[test]
    fn log_without_end_is_refused() {
        let mut log = log_of(&[LogEntry::Mark(START_MARK.into()), write(1, FUA)]);
        assert!(cuts(&mut log, &Record::default()).is_err());
    }

    fn active() -> Report {
        Report { cases: 2, torn: 1, hits: 1, must_have: 1, forgotten: 1, ..Report::default() }
    }

    #[test]
    fn run_that_tested_nothing_fails() {
        assert!(active().ensure_expected(false).is_ok());
        for idle in [
            Report { cases: 0, ..active() },
            Report { torn: 0, ..active() },
            Report { hits: 0, ..active() },
            Report { must_have: 0, ..active() },
            Report { forgotten: 0, ..active() },
        ] {
            assert!(idle.ensure_expected(false).is_err());
        }
    }

    #[test]
    fn every_violation_fails_a_run_and_a_control_needs_lost_and_returned_pages() {
        let found = |violations: &[Violation]| {
            let mut report = active();
            violations.iter().for_each(|&violation| report.violation(violation, "page"));
            report
        };
        use Violation::{Forgotten, Lost, NeverPut, Refused, WrongBytes};
        for violation in [WrongBytes, NeverPut, Forgotten, Lost, Refused] {
            assert!(found(&[violation]).ensure_expected(false).is_err());
            assert!(found(&[violation]).ensure_expected(true).is_err());
        }
        assert!(found(&[]).ensure_expected(true).is_err());
        assert!(Report { torn: 0, ..found(&[Lost, Forgotten]) }.ensure_expected(true).is_ok());
    }
}
