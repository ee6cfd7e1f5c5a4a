//! Gain of reuse: the same prompts computed, read from L2 and read from L3, and conversations with
//! and without the store.
//!
//! - A child process `larder up` serves the model. Pages are read from L3 after its restart, which
//!   leaves L2 empty. The single prompts never use L1; conversations with the store do.
//! - Each round has prompts of its own. The median of the rounds counts.
//! - All sources must give the same tokens. A difference fails the run, and so does a hit with
//!   fewer tokens than the prompt's whole pages have.
//! - Work that the time limit has no room for is left out, with a line that says so.

mod ceilings;
mod report;
mod service;
mod turns;

use super::serve::random_tokens;
use crate::output::say;
use crate::signals::StopSignals;
use anyhow::{Context, Result, anyhow, ensure};
use bytesize::ByteSize;
use ceilings::{Bound, Ceilings, Work};
use clap::Parser;
use larder_model::DeviceChoice;
use report::{Figure, Report, median};
use service::{Answer, Up};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use turns::{Round, converse};

#[derive(Debug, Parser)]
pub struct Args {
    /// Model folder in Hugging Face layout
    #[arg(long, value_name = "DIRECTORY")]
    model: PathBuf,
    /// Device that computes the model, as for `larder up`
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Lengths of the prompts
    #[arg(long, value_delimiter = ',', default_value = "4096", value_name = "TOKENS")]
    prompts: Vec<usize>,
    /// Number of prompts of each length
    #[arg(long, default_value_t = 3, value_name = "ROUNDS")]
    rounds: usize,
    /// Number of tokens to generate per request, and to compare
    #[arg(long, default_value_t = 8, value_name = "TOKENS")]
    answer_tokens: usize,
    /// Number of clients that converse at the same time. 0 leaves the conversations out
    #[arg(long, default_value_t = 20, value_name = "CLIENTS")]
    clients: usize,
    /// Number of requests of each conversation
    #[arg(long, default_value_t = 10, value_name = "TURNS")]
    turns: usize,
    /// Number of tokens that each request adds to its conversation
    #[arg(long, default_value_t = 2048, value_name = "TOKENS")]
    turn_tokens: usize,
    /// L1 of each engine, as for `larder up`
    #[arg(long, value_name = "SIZE")]
    l1: Option<ByteSize>,
    /// L2, as for `larder up`
    #[arg(long, value_name = "SIZE")]
    l2: Option<ByteSize>,
    /// Maximum size of L3. It must hold the prompts of all rounds
    #[arg(long, default_value = "4GiB", value_name = "SIZE")]
    l3_bytes: ByteSize,
    /// Parent directory of the data. L3 uses direct I/O, so it should be on a real file system
    #[arg(long, default_value = "/var/tmp", value_name = "DIRECTORY")]
    dir: PathBuf,
    /// Maximum duration of the run, in seconds. Parts that it has no room for are left out
    #[arg(
        long,
        default_value_t = 3600,
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(..=604_800)
    )]
    limit: u64,
    /// File written by `bench-gpu --json` on this device. Its rates give the ceilings of the report
    #[arg(long, value_name = "FILE")]
    ceilings: Option<PathBuf>,
    /// Also write one JSON object per figure to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Change one token of every expectation, so that all comparisons must fail
    #[arg(long, hide = true)]
    damage: bool,
}

/// Share of the time without the restart after which no further round of prompts begins. The rest
/// is for L3 and the conversations.
const PROMPTS_SHARE: f64 = 0.5;
/// The same for the first round. Without it, there would be no figure.
const FIRST_ROUND_SHARE: f64 = 0.75;
/// Share of the remaining time for the conversations with the store, which are repeated without.
const STORE_SHARE: f64 = 0.5;
/// Tokens of the request that warms a process up. The first pass of a process is slower.
const WARM_UP_TOKENS: usize = 200;
/// Maximum number of reads of one prompt from L2. The store may lack pages at the first.
const HIT_ATTEMPTS: usize = 3;
/// Safety factor on predicted times: time grows faster than the length of a prompt.
const GROWTH: f64 = 1.5;
const SEED: u64 = 1;

/// End of the time limit, or of a part of it.
#[derive(Debug, Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn end(self) -> tokio::time::Instant {
        self.0.into()
    }

    fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Ends after a part of the time that is left.
    fn share(self, share: f64) -> Clock {
        Clock(Instant::now() + self.left().mul_f64(share))
    }
}

/// The time limit has ended a part.
#[derive(Debug)]
struct OutOfTime;

impl std::fmt::Display for OutOfTime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the time limit (--limit) has passed")
    }
}

impl std::error::Error for OutOfTime {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    /// By the decode engine alone.
    Computed,
    /// By the prefill engine, which puts the pages. The decode engine follows them.
    Put,
    L2,
    L3,
}

impl Source {
    const ALL: [Source; 4] = [Source::Computed, Source::Put, Source::L2, Source::L3];

    fn name(self) -> &'static str {
        match self {
            Source::Computed => "computed, nothing reused or put",
            Source::Put => "computed and put",
            Source::L2 => "from L2",
            Source::L3 => "from L3",
        }
    }

    fn cache(self) -> &'static str {
        if self == Source::Computed { "none" } else { "store" }
    }
}

/// A prompt whose pages the store has, and its answer.
struct Prompt {
    tokens: Vec<u32>,
    answer: Vec<u32>,
}

struct Run<'a> {
    args: &'a Args,
    dir: &'a Path,
    clock: Clock,
    work: Work,
    ceilings: Ceilings,
    report: Report,
    /// Times to the first token, by length of the prompt.
    times: BTreeMap<(usize, Source), Vec<Duration>>,
    page_tokens: usize,
}

pub async fn run(args: Args) -> Result<()> {
    ensure!(!args.prompts.is_empty() && !args.prompts.contains(&0), "--prompts: give lengths above 0");
    ensure!(args.rounds > 0 && args.answer_tokens > 0, "--rounds and --answer-tokens: give at least 1");
    let dir = tempfile::Builder::new().prefix("larder-reuse-").tempdir_in(&args.dir);
    let dir = dir.with_context(|| args.dir.display().to_string())?;
    let mut run = Run {
        args: &args,
        dir: dir.path(),
        clock: Clock(Instant::now() + Duration::from_secs(args.limit)),
        work: Work::of(&args.model)?,
        ceilings: args.ceilings.as_deref().map(Ceilings::read).transpose()?.unwrap_or_default(),
        report: Report::begin(args.json.as_deref(), args.damage)?,
        times: BTreeMap::new(),
        page_tokens: 0,
    };
    say!(
        "{}, device {}; prompts of {:?} tokens; {} clients × {} turns of {} tokens; limit {} s",
        args.model.display(),
        args.device,
        args.prompts,
        args.clients,
        args.turns,
        args.turn_tokens,
        args.limit
    );
    let ended = StopSignals::listen()?.unless_received(run.measure()).await;
    match ended.unwrap_or_else(|| Err(anyhow!("interrupted"))) {
        Err(error) if error.is::<OutOfTime>() => run.report.skipped(&format!("the rest: {error}"))?,
        Err(error) => run.report.problem(&format!("{error:#}"))?,
        Ok(()) => {}
    }
    run.prompt_figures()?;
    run.report.end()
}

impl Run<'_> {
    async fn measure(&mut self) -> Result<()> {
        let first = self.start().await?;
        let startup = first.startup;
        let prompts = self.fill(&first).await?;
        first.stop(self.clock).await.context("stop, to read from L3 after a restart")?;
        if startup.mul_f64(GROWTH) > self.clock.left() {
            let (left, needed) = (self.clock.left().as_secs(), startup.mul_f64(GROWTH).as_secs());
            let text = format!("L3 and conversations: {left} s are left, and a restart may take {needed} s");
            return self.report.skipped(&text);
        }
        let second = self.start().await?;
        for prompt in &prompts {
            let answer = self.ask(&second, &prompt.tokens, Source::L3).await?;
            self.check_hit(prompt, Source::L3, &answer)?;
        }
        self.conversations(&second).await?;
        second.kill().await
    }

    async fn start(&mut self) -> Result<Up> {
        let up = Up::start(self.args, self.dir, self.clock).await?;
        self.page_tokens = up.page_tokens;
        self.report.progress(&format!("larder is up after {:.1} s", up.startup.as_secs_f64()));
        let warm_up = random_tokens(WARM_UP_TOKENS, &[SEED, u64::MAX]);
        up.router.ask(&warm_up, Source::Computed.cache(), self.args.answer_tokens, self.clock).await?;
        Ok(up)
    }

    /// Computes and puts the prompts of all rounds, and reads them from L2. Leaves out those for
    /// which there is no time.
    async fn fill(&mut self, up: &Up) -> Result<Vec<Prompt>> {
        // If a restart would take nearly all of it, prompts are measured without one.
        let (left, startup) = (self.clock.left(), up.startup);
        let without_restart = if startup > left / 2 { left } else { left - startup };
        let [first_round, others] =
            [FIRST_ROUND_SHARE, PROMPTS_SHARE].map(|share| Clock(Instant::now() + without_restart.mul_f64(share)));
        let mut prompts = Vec::new();
        let mut spent: Option<(usize, Duration)> = None;
        for round in 0..self.args.rounds {
            let part = if round == 0 { first_round } else { others };
            for &length in &self.args.prompts {
                let growth = |(shorter, time): (usize, Duration)| {
                    time.mul_f64((length as f64 / shorter as f64).max(1.0) * GROWTH)
                };
                let (expected, left) = (spent.map_or(Duration::ZERO, growth), part.left());
                if expected > left || left.is_zero() {
                    let (expected, left) = (expected.as_secs_f64(), left.as_secs_f64());
                    let name = format!("{length} tokens, round {} of {}", round + 1, self.args.rounds);
                    let reason = format!("{left:.0} s are left for prompts, and it may take {expected:.0} s");
                    self.report.skipped(&format!("{name}: {reason}"))?;
                    continue;
                }
                let begin = Instant::now();
                let tokens = random_tokens(length, &[SEED, length as u64, round as u64]);
                prompts.push(self.compute_and_read(up, tokens).await?);
                spent = Some((length, begin.elapsed()));
            }
        }
        Ok(prompts)
    }

    /// Computes a prompt, puts its pages, and reads them from L2.
    async fn compute_and_read(&mut self, up: &Up, tokens: Vec<u32>) -> Result<Prompt> {
        let computed = self.ask(up, &tokens, Source::Computed).await?;
        let prompt = Prompt { tokens, answer: computed.tokens.clone() };
        ensure!(computed.cached_tokens == 0, "{} tokens of a new prompt were cached", computed.cached_tokens);
        self.add(&prompt, Source::Computed, &computed);
        let put = self.ask(up, &prompt.tokens, Source::Put).await?;
        ensure!(put.cached_tokens == 0, "{} tokens of a new prompt were in the store", put.cached_tokens);
        if self.same(&prompt, Source::Put, &put)? {
            self.add(&prompt, Source::Put, &put);
        }
        let mut hit = self.ask(up, &prompt.tokens, Source::L2).await?;
        for _ in 1..HIT_ATTEMPTS {
            if hit.cached_tokens >= self.reusable(&prompt) {
                break;
            }
            hit = self.ask(up, &prompt.tokens, Source::L2).await?;
        }
        self.check_hit(&prompt, Source::L2, &hit)?;
        Ok(prompt)
    }

    async fn ask(&self, up: &Up, tokens: &[u32], source: Source) -> Result<Answer> {
        let answer = up.router.ask(tokens, source.cache(), self.args.answer_tokens, self.clock).await?;
        let (seconds, cached) = (answer.first_token.as_secs_f64(), answer.cached_tokens);
        self.report.progress(&format!("{} tokens, {}: {seconds:.3} s, {cached} cached", tokens.len(), source.name()));
        Ok(answer)
    }

    /// Tokens of the whole pages below the last token, whose logits need a computation.
    fn reusable(&self, prompt: &Prompt) -> usize {
        (prompt.tokens.len() - 1) / self.page_tokens * self.page_tokens
    }

    fn same(&mut self, prompt: &Prompt, source: Source, answer: &Answer) -> Result<bool> {
        let name = format!("{} tokens {}", prompt.tokens.len(), source.name());
        self.report.compare_tokens(&name, &answer.tokens, &prompt.answer)
    }

    fn add(&mut self, prompt: &Prompt, source: Source, answer: &Answer) {
        self.times.entry((prompt.tokens.len(), source)).or_default().push(answer.first_token);
    }

    /// Adds the time of a hit that has the right tokens, and all that can be reused.
    fn check_hit(&mut self, prompt: &Prompt, source: Source, answer: &Answer) -> Result<()> {
        let (length, expected) = (prompt.tokens.len(), self.reusable(prompt));
        if answer.cached_tokens != expected {
            let (name, found) = (source.name(), answer.cached_tokens);
            self.report.problem(&format!("{length} tokens {name}: {found} were cached instead of {expected}"))?;
        } else if self.same(prompt, source, answer)? {
            self.add(prompt, source, answer);
        }
        Ok(())
    }

    fn prompt_figures(&mut self) -> Result<()> {
        for (&(length, source), times) in &self.times {
            let computed = self.times.get(&(length, Source::Computed)).map(|times| median(times));
            let cached = match source {
                Source::Computed | Source::Put => 0,
                Source::L2 | Source::L3 => (length - 1) / self.page_tokens * self.page_tokens,
            };
            let bytes = cached as f64 * self.work.token_bytes;
            let bound = match source {
                Source::Computed | Source::Put => self.ceilings.computed(self.work.operations(0, length)),
                Source::L2 => self.ceilings.l2_hit(bytes),
                Source::L3 => self.ceilings.l3_hit(bytes),
            };
            let name = format!("first token of {length}, {}", source.name());
            let computed = computed.filter(|_| source != Source::Computed);
            let cached = cached as f64 / length as f64;
            self.report.figure(&Figure { name, times: times.clone(), cached, computed, bound })?;
        }
        for &length in &self.args.prompts {
            let missing = Source::ALL.into_iter().filter(|source| !self.times.contains_key(&(length, *source)));
            for source in missing.collect::<Vec<_>>() {
                self.report.skipped(&format!("first token of {length}, {}: no figure, see above", source.name()))?;
            }
        }
        Ok(())
    }

    /// Conversations with the store and L1, and the same ones with everything computed.
    async fn conversations(&mut self, up: &Up) -> Result<()> {
        if self.args.clients == 0 {
            return Ok(());
        }
        let stored = converse(&up.router, self.args, "all", self.clock.share(STORE_SHARE)).await?;
        self.note_rounds("with the store", stored.len())?;
        let computed = converse(&up.router, self.args, "none", self.clock).await?;
        self.note_rounds("without reuse", computed.len())?;
        let common = stored.len().min(computed.len());
        for (turn, (stored, computed)) in stored.iter().zip(&computed).enumerate() {
            for (client, (stored, computed)) in stored.answers.iter().zip(&computed.answers).enumerate() {
                self.report.compare_tokens(
                    &format!("turn {turn} of client {client} with the store"),
                    stored,
                    computed,
                )?;
            }
        }
        self.conversation_figures("nothing reused", &computed[..common], None)?;
        self.conversation_figures("store and L1", &stored[..common], Some(&computed[..common]))?;
        if stored.len() > common {
            self.conversation_figures("store and L1", &stored, None)?;
        }
        Ok(())
    }

    fn note_rounds(&mut self, name: &str, rounds: usize) -> Result<()> {
        let turns = self.args.turns;
        self.report.progress(&format!("conversations {name}: {rounds} of {turns} turns"));
        if rounds < turns {
            let reason = "the time limit has no room for the next one";
            self.report.skipped(&format!("conversations {name}, turns {} to {turns}: {reason}", rounds + 1))?;
        }
        Ok(())
    }

    /// Time of some turns together, and times to the first token in them.
    fn conversation_figures(&mut self, name: &str, rounds: &[Round], computed: Option<&[Round]>) -> Result<()> {
        let (clients, turn_tokens) = (self.args.clients, self.args.turn_tokens);
        let prompts: usize = rounds.iter().map(|round| clients * round.prompt_tokens).sum();
        if prompts == 0 {
            return Ok(());
        }
        let cached = rounds.iter().map(|round| round.cached_tokens).sum::<usize>() as f64 / prompts as f64;
        // Each client reuses the same part of its prompt, as far as this bound needs to know.
        let operations = |round: &Round| {
            let reused = round.cached_tokens / clients;
            clients as f64 * self.work.operations(reused.min(round.prompt_tokens), round.prompt_tokens)
        };
        let bound: Option<Bound> = self.ceilings.computed(rounds.iter().map(operations).sum());
        let whole = |rounds: &[Round]| rounds.iter().map(|round| round.time).sum::<Duration>();
        let firsts = |rounds: &[Round]| -> Vec<Duration> {
            rounds.iter().flat_map(|round| round.first_tokens.iter().copied()).collect()
        };
        let title = format!("{clients} clients × {} turns of {turn_tokens}, {name}", rounds.len());
        self.report.figure(&Figure {
            name: format!("{title}: all"),
            times: vec![whole(rounds)],
            cached,
            computed: computed.map(whole),
            bound,
        })?;
        let computed = computed.map(|rounds| median(&firsts(rounds)));
        let name = format!("{title}: first token");
        self.report.figure(&Figure { name, times: firsts(rounds), cached, computed, bound: None })
    }
}
