//! Tokenising of prompts, off the event loop and in bounded memory.
//!
//! A tokenizer takes about a second and 150 MB for each MiB of text, and cannot be interrupted. So
//! the router refuses texts that cannot fit the context before it tokenises them.
//!
//! Invariants:
//!
//! - No text is longer than the context times the longest token, or than [`TEXT_BYTES_MAX`].
//! - Brief texts never wait for short ones, and short ones never for long ones.
//! - Long texts in progress have at most [`LONG_BYTES_MAX`] together, or are a single one. Twice as
//!   much if a model has a tokenizer that may take quadratic time: such texts have other places.
//! - Texts that are not brief do not keep a thread that wakes up from a processor.
//! - A text of one peer waits for a few texts of each other peer at most, however many those send.
//! - A tokenizer that may take quadratic time delays only texts of other such tokenizers. It gets
//!   no text whose pieces show that the whole would take it: see [`Growth`].

use crate::background;
use larder_http::{PeerAddress, PeerLane};
use larder_model::{Tokenizer, TokenizerError};
use std::time::Duration;
use tokio::task::JoinError;

/// Maximum size of a text in bytes, about a million tokens. It takes about 600 MB. A member may
/// claim any context and any token, and a context of the longest tokens has far more bytes.
pub(crate) const TEXT_BYTES_MAX: usize = 4 << 20;
/// Longest text that counts as short, in bytes. It takes about 60 ms and 12 MB.
const SHORT_BYTES_MAX: usize = 64 << 10;
/// Longest text that counts as brief, in bytes. It takes about 4 ms, a time slice, and has full
/// priority.
const BRIEF_BYTES_MAX: usize = 4 << 10;
/// Maximum number of requests with short texts in progress, and of those with brief ones.
const SHORT_MAX: usize = 8;
/// Requests of one peer that wait for a place or have one: with brief texts, with short ones, and
/// with long ones. Its others wait for these.
const SHORT_PER_PEER: usize = SHORT_MAX / 2;
const LONG_PER_PEER: usize = 1;
/// Maximum size of the long texts in progress, in bytes. They take about 400 MB.
const LONG_BYTES_MAX: usize = 2 << 20;
/// Memory for a byte of a text that is being tokenised.
const MEMORY_PER_BYTE: usize = 192;
/// Memory of all texts in progress, with tokenizers of both kinds: a single long one takes most.
pub(crate) const MEMORY_MAX: u64 =
    (2 * (TEXT_BYTES_MAX + SHORT_MAX * (SHORT_BYTES_MAX + BRIEF_BYTES_MAX)) * MEMORY_PER_BYTE) as u64;
/// Granularity of [`LONG_BYTES_MAX`].
const CHARGE_BYTES: usize = 1 << 10;
/// Minimum bytes per token that [`text_bytes_max`] assumes. Tokenizers of small vocabularies drop
/// blanks between tokens.
const TOKEN_BYTES_MIN: usize = 16;
/// Length of the pieces of a long text that are tokenised one by one, to see if it fits.
const PIECE_BYTES: usize = 256 << 10;
/// Length of the first pieces for a tokenizer that may take quadratic time. One piece then takes
/// less than a second.
const FIRST_PIECE_BYTES: usize = 16 << 10;
/// Length of a longer piece, in lengths of its own pieces.
const PIECE_GROWTH: usize = 4;
/// Maximum time for a longer piece, as a multiple of that for its own pieces together.
const GROWTH_MAX: u32 = 3;
/// Maximum time for the first pieces per byte of text: ten times what a tokenizer usually takes.
const BYTE_TIME_MAX: Duration = Duration::from_micros(10);
/// Time that a measurement may be wrong by: pages that fault, and caches that are cold.
const MEASURE_SLACK: Duration = Duration::from_millis(20);

/// Maximum size of a text in bytes that may fit a context of `context` tokens.
pub(crate) fn text_bytes_max(tokenizer: &Tokenizer, context: usize) -> usize {
    context.saturating_mul(tokenizer.token_bytes_max().max(TOKEN_BYTES_MIN)).min(TEXT_BYTES_MAX)
}

#[derive(Debug)]
pub(crate) enum EncodeError {
    /// The text has at least this number of tokens, more than the context.
    TooLong(usize),
    /// The tokenizer takes far more than linear time for the text.
    TooSlow,
    Tokenizer(TokenizerError),
}

/// Message for the client of [`EncodeError::TooSlow`].
pub(crate) const TOO_SLOW: &str =
    "the model's tokenizer takes too long for this text; send a shorter one, or less of the same character in a row";

/// Tokenises `text`. Stops early if it is far too long for `context` tokens, or if the tokenizer
/// takes far more than linear time for it.
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    add_special: bool,
    context: usize,
) -> Result<Vec<u32>, EncodeError> {
    let count = |piece: &str| tokenizer.encode(piece, false).map(|tokens| tokens.len());
    // The sum over pieces exceeds the true number by a few tokens per cut. Twice the context
    // leaves room for that.
    let tokens_max = context.saturating_mul(2);
    if !tokenizer.is_linear() {
        Growth { count, time: thread_time, tokens: 0, tokens_max }.check(text)?;
    } else if text.len() > PIECE_BYTES {
        let mut tokens = 0;
        for piece in pieces(text, PIECE_BYTES) {
            tokens += count(piece).map_err(EncodeError::Tokenizer)?;
            if tokens > tokens_max {
                return Err(EncodeError::TooLong(tokens));
            }
        }
    }
    tokenizer.encode(text, add_special).map_err(EncodeError::Tokenizer)
}

/// Pieces of a text, cut between characters.
fn pieces(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, more) = rest.split_at(rest.floor_char_boundary(bytes));
        rest = more;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Check that the time for a text grows no faster than its length, by pieces of it that grow. In
/// linear time a piece takes as long as its own pieces together, and in quadratic time
/// [`PIECE_GROWTH`] times as long.
struct Growth<C, T> {
    count: C,
    /// Processor time so far.
    time: T,
    tokens: usize,
    tokens_max: usize,
}

impl<C: FnMut(&str) -> Result<usize, TokenizerError>, T: FnMut() -> Duration> Growth<C, T> {
    /// Tries all pieces of the text, and not the whole. In quadratic time the whole takes at most
    /// [`PIECE_GROWTH`] times as long as the longest pieces together.
    fn check(&mut self, text: &str) -> Result<(), EncodeError> {
        let mut piece_bytes = FIRST_PIECE_BYTES;
        if text.len() <= piece_bytes {
            return Ok(());
        }
        while piece_bytes * PIECE_GROWTH < text.len() {
            piece_bytes *= PIECE_GROWTH;
        }
        pieces(text, piece_bytes).try_for_each(|piece| self.measure(piece, piece_bytes).map(drop))
    }

    /// Returns the time for a piece of at most `piece_bytes`, after the check of its own pieces.
    fn measure(&mut self, piece: &str, piece_bytes: usize) -> Result<Duration, EncodeError> {
        let is_shortest = piece_bytes <= FIRST_PIECE_BYTES;
        let limit = if is_shortest {
            BYTE_TIME_MAX * piece.len() as u32
        } else {
            let mut together = Duration::ZERO;
            for shorter in pieces(piece, piece_bytes / PIECE_GROWTH) {
                together += self.measure(shorter, piece_bytes / PIECE_GROWTH)?;
            }
            together * GROWTH_MAX
        };
        let begin = (self.time)();
        let tokens = (self.count)(piece).map_err(EncodeError::Tokenizer)?;
        let taken = (self.time)().saturating_sub(begin);
        if taken > limit + MEASURE_SLACK {
            return Err(EncodeError::TooSlow);
        }
        if is_shortest {
            self.tokens += tokens;
            if self.tokens > self.tokens_max {
                return Err(EncodeError::TooLong(self.tokens));
            }
        }
        Ok(taken)
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Text of a prompt with which answers begin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Echo {
    pub(crate) text: String,
    /// Characters of the text.
    pub(crate) chars: usize,
    /// Characters of the text before that of each token. Empty if no one asks for them.
    pub(crate) offsets: Vec<u32>,
}

impl Echo {
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[u32], with_offsets: bool) -> Self {
        let text = tokenizer.decode(tokens);
        if !with_offsets {
            return Self { text, ..Self::default() };
        }
        let mut stream = tokenizer.stream(true);
        let mut before = 0;
        let offset = |&id: &u32| {
            let offset = before;
            before += stream.push(id).map_or(0, |piece| piece.chars().count() as u32);
            offset
        };
        let offsets = tokens.iter().map(offset).collect();
        Self { chars: text.chars().count(), text, offsets }
    }
}

/// Places for texts in progress.
#[derive(Debug, Default)]
pub(crate) struct TokeniserQueue {
    linear: Lanes,
    /// For tokenizers that may take quadratic time.
    other: Lanes,
}

#[derive(Debug)]
struct Lanes {
    brief: PeerLane,
    short: PeerLane,
    long: PeerLane,
}

impl Default for Lanes {
    fn default() -> Self {
        let short = || PeerLane::new(SHORT_MAX, SHORT_PER_PEER);
        Self { brief: short(), short: short(), long: PeerLane::new(LONG_BYTES_MAX / CHARGE_BYTES, LONG_PER_PEER) }
    }
}

impl TokeniserQueue {
    /// Runs `work` on a thread of its own when there is room for its bytes of text. Waits in the
    /// order of arrival, but for the part of each peer. Dropping the future ends the wait, but not
    /// the work.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        peer: PeerAddress,
        (tokenizer, bytes): (&Tokenizer, usize),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let lanes = if tokenizer.is_linear() { &self.linear } else { &self.other };
        let permits = if bytes <= BRIEF_BYTES_MAX {
            lanes.brief.enter(peer, 1).await
        } else if bytes <= SHORT_BYTES_MAX {
            lanes.short.enter(peer, 1).await
        } else {
            let charge = bytes.min(LONG_BYTES_MAX).div_ceil(CHARGE_BYTES);
            lanes.long.enter(peer, charge as u32).await
        };
        let work = move || {
            // Held by the work itself: it goes on if the client disconnects.
            let _permits = permits;
            work()
        };
        match bytes {
            ..=BRIEF_BYTES_MAX => tokio::task::spawn_blocking(work).await,
            _ => background::run(work).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::{Arc, mpsc};

    fn peer(last: u8) -> PeerAddress {
        PeerAddress::of([10, 0, 0, last].into())
    }

    /// Tokenizer in which `a` is a token, and every other word is unknown.
    fn words() -> Tokenizer {
        let json = serde_json::json!({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}});
        Tokenizer::from_files(&BTreeMap::from([("tokenizer.json".to_string(), json.to_string().into_bytes())])).unwrap()
    }

    #[test]
    fn encode_stops_early_only_far_above_the_context() {
        let tokenizer = words();
        let text = "a ".repeat(PIECE_BYTES);
        assert_eq!(encode(&tokenizer, &text, false, PIECE_BYTES / 2).unwrap().len(), PIECE_BYTES);
        let stopped = encode(&tokenizer, &text, false, 1000).unwrap_err();
        assert!(matches!(stopped, EncodeError::TooLong(tokens) if tokens == PIECE_BYTES / 2), "{stopped:?}");
        // A cut falls between characters, also where that shortens a piece.
        let text = "éé ".repeat(PIECE_BYTES / 4);
        assert_eq!(encode(&tokenizer, &text, false, PIECE_BYTES).unwrap().len(), PIECE_BYTES / 4);
    }

    /// Tokenizer of words in which a run of capitals takes quadratic time.
    fn quadratic() -> Tokenizer {
        let json = serde_json::json!({"version": "1.0",
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ".*[^A-Z]|[A-Z]"}, "behavior": "Isolated",
                "invert": false},
            "model": {"type": "WordLevel", "vocab": {"A": 0, "?": 1}, "unk_token": "?"}});
        let files = BTreeMap::from([("tokenizer.json".to_string(), json.to_string().into_bytes())]);
        Tokenizer::from_untrusted_files(&files).unwrap()
    }

    #[test]
    fn text_of_quadratic_time_is_refused_before_the_whole_takes_it() {
        // Each piece takes this time per byte, and the square of its length.
        let steps = |text_bytes: usize, square: u64| {
            let spent = std::cell::Cell::new(0u64);
            let mut longest = 0;
            let mut count = |piece: &str| {
                longest = longest.max(piece.len());
                let bytes = piece.len() as u64;
                spent.set(spent.get() + 1000 * bytes + square * bytes * bytes / 1024);
                Ok(piece.len())
            };
            let text = "A".repeat(text_bytes);
            let time = || Duration::from_nanos(spent.get());
            let checked = Growth { count: &mut count, time, tokens: 0, tokens_max: usize::MAX }.check(&text);
            (checked.is_ok(), longest, time())
        };
        const MIB: usize = 1 << 20;
        // Pieces of 16 KiB, 64 KiB, 256 KiB and 1 MiB.
        assert_eq!(steps(4 * MIB, 0), (true, MIB, Duration::from_micros(4 * 4 * MIB as u64)));
        // The first piece shows it.
        let (is_ok, longest, spent) = steps(4 * MIB, 1000);
        assert!(!is_ok && longest == FIRST_PIECE_BYTES && spent < Duration::from_secs(1), "{spent:?}");
        // The first pieces take linear time, almost.
        let (is_ok, longest, spent) = steps(4 * MIB, 10);
        assert!(!is_ok && longest == MIB && spent < Duration::from_secs(20), "{longest} {spent:?}");
        assert!(steps(64 << 10, 10).0, "as a whole it takes little");
    }

    #[test]
    fn tokenizer_of_an_unusual_pattern_is_watched() {
        let tokenizer = quadratic();
        assert!(!tokenizer.is_linear() && words().is_linear());
        let text = "A".repeat(FIRST_PIECE_BYTES / 4);
        assert_eq!(encode(&tokenizer, &text, false, text.len()).unwrap(), vec![0; text.len()]);
        // Linear for this tokenizer, too.
        let text = "a ".repeat(FIRST_PIECE_BYTES);
        assert_eq!(encode(&tokenizer, &text, false, text.len()).unwrap().len(), 1);
        assert!(matches!(
            encode(&tokenizer, &"A".repeat(TEXT_BYTES_MAX), false, usize::MAX),
            Err(EncodeError::TooSlow)
        ));
    }

    #[tokio::test]
    async fn tokenizers_that_may_be_slow_delay_no_others() {
        let (slow, fast) = (quadratic(), words());
        let queue = TokeniserQueue::default();
        let (end, wait) = mpsc::channel::<()>();
        let mut long = Box::pin(queue.run(peer(1), (&slow, LONG_BYTES_MAX), move || wait.recv().is_ok()));
        assert!(futures::poll!(&mut long).is_pending());
        let mut second = Box::pin(queue.run(peer(2), (&slow, LONG_BYTES_MAX), || ()));
        assert!(futures::poll!(&mut second).is_pending());
        assert_eq!(queue.run(peer(1), (&fast, LONG_BYTES_MAX), || 7).await.unwrap(), 7);
        assert!(futures::poll!(&mut second).is_pending());
        end.send(()).unwrap();
        assert!(long.await.unwrap());
        second.await.unwrap();
    }

    #[test]
    fn echo_counts_no_text_for_the_first_special_token() {
        let bos = serde_json::json!({"id": 2, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false});
        let parts =
            serde_json::json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
        let processor = serde_json::json!({"type": "TemplateProcessing", "single": parts, "pair": parts,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}});
        let json = serde_json::json!({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"},
            "added_tokens": [bos], "post_processor": processor,
            "model": {"type": "WordLevel", "vocab": {"é": 0, "?": 1, "<s>": 2}, "unk_token": "?"}});
        let files = BTreeMap::from([("tokenizer.json".to_string(), json.to_string().into_bytes())]);
        let tokenizer = Tokenizer::from_files(&files).unwrap();
        let tokens = encode(&tokenizer, "é é é", true, 10).unwrap();
        assert_eq!(tokens, [2, 0, 0, 0]);
        let echo = Echo::new(&tokenizer, &tokens, true);
        assert_eq!(echo, Echo { text: "é é é".into(), chars: 5, offsets: vec![0, 0, 1, 3] });
    }

    #[test]
    fn text_limit_follows_the_longest_token() {
        assert_eq!(text_bytes_max(&words(), 100), 1600);
        assert_eq!(text_bytes_max(&words(), usize::MAX), TEXT_BYTES_MAX);
    }

    #[tokio::test]
    async fn only_brief_texts_have_full_priority() {
        let tokenizer = words();
        use background::tests::{background_niceness, niceness};
        let queue = TokeniserQueue::default();
        for (bytes, expected) in [
            (BRIEF_BYTES_MAX, niceness()),
            (BRIEF_BYTES_MAX + 1, background_niceness()),
            (SHORT_BYTES_MAX + 1, background_niceness()),
        ] {
            assert_eq!(queue.run(peer(1), (&tokenizer, bytes), niceness).await.unwrap(), expected, "{bytes} bytes");
        }
    }

    #[tokio::test]
    async fn short_texts_pass_long_ones_and_long_ones_wait_for_each_other() {
        let tokenizer = words();
        let queue = TokeniserQueue::default();
        let (end, wait) = mpsc::channel::<()>();
        let long = queue.run(peer(1), (&tokenizer, LONG_BYTES_MAX * 3), move || wait.recv().is_ok());
        let mut long = Box::pin(long);
        assert!(futures::poll!(&mut long).is_pending());
        let mut second = Box::pin(queue.run(peer(2), (&tokenizer, SHORT_BYTES_MAX + 1), || ()));
        assert!(futures::poll!(&mut second).is_pending());
        assert_eq!(queue.run(peer(1), (&tokenizer, SHORT_BYTES_MAX), || 7).await.unwrap(), 7);
        assert!(futures::poll!(&mut second).is_pending());
        end.send(()).unwrap();
        assert!(long.await.unwrap());
        second.await.unwrap();
    }

    #[tokio::test]
    async fn brief_texts_pass_short_ones_of_many_peers() {
        let tokenizer = words();
        let queue = TokeniserQueue::default();
        let (end, wait) = mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let mut crowd: Vec<_> = (0..2 * SHORT_MAX as u8)
            .map(|at| {
                let wait = wait.clone();
                Box::pin(
                    queue.run(peer(at), (&tokenizer, SHORT_BYTES_MAX), move || wait.lock().unwrap().recv().is_ok()),
                )
            })
            .collect();
        for text in &mut crowd {
            assert!(futures::poll!(text).is_pending());
        }
        let brief = queue.run(peer(100), (&tokenizer, BRIEF_BYTES_MAX), || 7);
        let ended = tokio::time::timeout(std::time::Duration::from_secs(30), brief).await;
        assert_eq!(ended.expect("it waits for no short text").unwrap(), 7);
        drop(end);
        futures::future::join_all(crowd).await;
    }

    #[tokio::test]
    async fn texts_of_a_crowd_do_not_delay_those_of_another_peer() {
        let tokenizer = words();
        for bytes in [BRIEF_BYTES_MAX, SHORT_BYTES_MAX, LONG_BYTES_MAX] {
            let queue = TokeniserQueue::default();
            let (end, wait) = mpsc::channel::<()>();
            let wait = Arc::new(std::sync::Mutex::new(wait));
            let work = || {
                let wait = wait.clone();
                move || wait.lock().unwrap().recv().is_ok()
            };
            let mut crowd: Vec<_> =
                (0..100).map(|_| Box::pin(queue.run(peer(1), (&tokenizer, bytes), work()))).collect();
            for text in &mut crowd {
                assert!(futures::poll!(text).is_pending());
            }
            let other = queue.run(peer(2), (&tokenizer, bytes), || 7);
            // One text of the crowd ends.
            end.send(()).unwrap();
            let ended = tokio::time::timeout(std::time::Duration::from_secs(30), other).await;
            assert_eq!(ended.expect("it waits for one text at most").unwrap(), 7);
            drop(end);
            futures::future::join_all(crowd).await;
            assert!(queue.run(peer(3), (&tokenizer, bytes), || true).await.unwrap());
            for lane in [&queue.linear.brief, &queue.linear.short, &queue.linear.long] {
                assert!(lane.peers() <= 1, "peers without texts are forgotten");
            }
        }
    }
}
