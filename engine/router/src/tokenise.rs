//! Tokenising of prompts, off the event loop and in bounded memory.
//!
//! A tokenizer takes about a second and 150 MB for each MiB of text, and cannot be interrupted. So
//! the router refuses texts that cannot fit the context before it tokenises them.
//!
//! Invariants:
//!
//! - No text is longer than the context times the longest token, or than [`TEXT_BYTES_MAX`].
//! - Brief texts never wait for short ones, and short ones never for long ones.
//! - Long texts in progress have at most [`LONG_BYTES_MAX`] together, or are a single one.
//! - Texts that are not brief do not keep a thread that wakes up from a processor.
//! - A text of one peer waits for a few texts of each other peer at most, however many those send.

use crate::background;
use larder_http::PeerAddress;
use larder_model::{Tokenizer, TokenizerError};
use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
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
/// Granularity of [`LONG_BYTES_MAX`].
const CHARGE_BYTES: usize = 1 << 10;
/// Minimum bytes per token that [`text_bytes_max`] assumes. Tokenizers of small vocabularies drop
/// blanks between tokens.
const TOKEN_BYTES_MIN: usize = 16;
/// Length of the pieces of a long text that are tokenised one by one, to see if it fits.
const PIECE_BYTES: usize = 256 << 10;

/// Maximum size of a text in bytes that may fit a context of `context` tokens.
pub(crate) fn text_bytes_max(tokenizer: &Tokenizer, context: usize) -> usize {
    context.saturating_mul(tokenizer.token_bytes_max().max(TOKEN_BYTES_MIN)).min(TEXT_BYTES_MAX)
}

#[derive(Debug)]
pub(crate) enum EncodeError {
    /// The text has at least this number of tokens, more than the context.
    TooLong(usize),
    Tokenizer(TokenizerError),
}

/// Tokenises `text`. Stops early if it is far too long for `context` tokens.
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    add_special: bool,
    context: usize,
) -> Result<Vec<u32>, EncodeError> {
    // The sum over pieces exceeds the true number by a few tokens per cut. Twice the context
    // leaves room for that.
    let tokens_max = context.saturating_mul(2);
    let mut tokens = 0;
    let mut rest = if text.len() > PIECE_BYTES { text } else { "" };
    while !rest.is_empty() {
        let (piece, more) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
        tokens += tokenizer.encode(piece, false).map_err(EncodeError::Tokenizer)?.len();
        if tokens > tokens_max {
            return Err(EncodeError::TooLong(tokens));
        }
        rest = more;
    }
    tokenizer.encode(text, add_special).map_err(EncodeError::Tokenizer)
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
#[derive(Debug)]
pub(crate) struct TokeniserQueue {
    brief: Lane,
    short: Lane,
    long: Lane,
}

/// Places of which all peers have the same part while they wait.
#[derive(Debug)]
struct Lane {
    places: Arc<Semaphore>,
    per_peer: usize,
    /// Permits to wait for places, of the peers that have texts here.
    peers: Mutex<BTreeMap<PeerAddress, Weak<Semaphore>>>,
}

impl Default for TokeniserQueue {
    fn default() -> Self {
        let short = || Lane::new(SHORT_MAX, SHORT_PER_PEER);
        Self { brief: short(), short: short(), long: Lane::new(LONG_BYTES_MAX / CHARGE_BYTES, LONG_PER_PEER) }
    }
}

impl Lane {
    fn new(places: usize, per_peer: usize) -> Lane {
        Lane { places: Arc::new(Semaphore::new(places)), per_peer, peers: Mutex::default() }
    }

    /// Waits for `places` places in the order of arrival, behind earlier texts of the same peer.
    async fn enter(&self, peer: PeerAddress, places: u32) -> Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)> {
        let own = {
            let mut peers = self.peers.lock();
            peers.retain(|_, own| own.strong_count() > 0);
            let known = peers.get(&peer).and_then(Weak::upgrade);
            let own = known.unwrap_or_else(|| Arc::new(Semaphore::new(self.per_peer)));
            peers.insert(peer, Arc::downgrade(&own));
            own
        };
        // Neither is ever closed.
        let own = own.acquire_owned().await.ok()?;
        Some((own, self.places.clone().acquire_many_owned(places).await.ok()?))
    }
}

impl TokeniserQueue {
    /// Runs `work` on a thread of its own when there is room for its `bytes` of text. Waits in the
    /// order of arrival, but for the part of each peer. Dropping the future ends the wait, but not
    /// the work.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        peer: PeerAddress,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let permits = if bytes <= BRIEF_BYTES_MAX {
            self.brief.enter(peer, 1).await
        } else if bytes <= SHORT_BYTES_MAX {
            self.short.enter(peer, 1).await
        } else {
            let charge = bytes.min(LONG_BYTES_MAX).div_ceil(CHARGE_BYTES);
            self.long.enter(peer, charge as u32).await
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
    use std::sync::mpsc;

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
        use background::tests::{background_niceness, niceness};
        let queue = TokeniserQueue::default();
        for (bytes, expected) in [
            (BRIEF_BYTES_MAX, niceness()),
            (BRIEF_BYTES_MAX + 1, background_niceness()),
            (SHORT_BYTES_MAX + 1, background_niceness()),
        ] {
            assert_eq!(queue.run(peer(1), bytes, niceness).await.unwrap(), expected, "{bytes} bytes");
        }
    }

    #[tokio::test]
    async fn short_texts_pass_long_ones_and_long_ones_wait_for_each_other() {
        let queue = TokeniserQueue::default();
        let (end, wait) = mpsc::channel::<()>();
        let long = queue.run(peer(1), LONG_BYTES_MAX * 3, move || wait.recv().is_ok());
        let mut long = Box::pin(long);
        assert!(futures::poll!(&mut long).is_pending());
        let mut second = Box::pin(queue.run(peer(2), SHORT_BYTES_MAX + 1, || ()));
        assert!(futures::poll!(&mut second).is_pending());
        assert_eq!(queue.run(peer(1), SHORT_BYTES_MAX, || 7).await.unwrap(), 7);
        assert!(futures::poll!(&mut second).is_pending());
        end.send(()).unwrap();
        assert!(long.await.unwrap());
        second.await.unwrap();
    }

    #[tokio::test]
    async fn brief_texts_pass_short_ones_of_many_peers() {
        let queue = TokeniserQueue::default();
        let (end, wait) = mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let mut crowd: Vec<_> = (0..2 * SHORT_MAX as u8)
            .map(|at| {
                let wait = wait.clone();
                Box::pin(queue.run(peer(at), SHORT_BYTES_MAX, move || wait.lock().unwrap().recv().is_ok()))
            })
            .collect();
        for text in &mut crowd {
            assert!(futures::poll!(text).is_pending());
        }
        let brief = queue.run(peer(100), BRIEF_BYTES_MAX, || 7);
        let ended = tokio::time::timeout(std::time::Duration::from_secs(30), brief).await;
        assert_eq!(ended.expect("it waits for no short text").unwrap(), 7);
        drop(end);
        futures::future::join_all(crowd).await;
    }

    #[tokio::test]
    async fn texts_of_a_crowd_do_not_delay_those_of_another_peer() {
        for bytes in [BRIEF_BYTES_MAX, SHORT_BYTES_MAX, LONG_BYTES_MAX] {
            let queue = TokeniserQueue::default();
            let (end, wait) = mpsc::channel::<()>();
            let wait = Arc::new(std::sync::Mutex::new(wait));
            let work = || {
                let wait = wait.clone();
                move || wait.lock().unwrap().recv().is_ok()
            };
            let mut crowd: Vec<_> = (0..100).map(|_| Box::pin(queue.run(peer(1), bytes, work()))).collect();
            for text in &mut crowd {
                assert!(futures::poll!(text).is_pending());
            }
            let mut other = Box::pin(queue.run(peer(2), bytes, || 7));
            assert!(futures::poll!(&mut other).is_pending());
            // One text of the crowd ends.
            end.send(()).unwrap();
            let ended = tokio::time::timeout(std::time::Duration::from_secs(30), other).await;
            assert_eq!(ended.expect("it waits for one text at most").unwrap(), 7);
            drop(end);
            futures::future::join_all(crowd).await;
            assert!(queue.run(peer(3), bytes, || true).await.unwrap());
            for lane in [&queue.brief, &queue.short, &queue.long] {
                assert!(lane.peers.lock().len() <= 1, "peers without texts are forgotten");
            }
        }
    }
}
