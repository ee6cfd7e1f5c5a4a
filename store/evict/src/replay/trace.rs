//! The trace format of Mooncake: one JSON object per line.

use serde::Deserialize;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::io::{self, BufRead, Read};
use thiserror::Error;

/// Tokens per block of the published traces.
pub const BLOCK_TOKENS: u64 = 512;
pub const LINE_BYTES_MAX: usize = 4 << 20;
/// Time per generated token that [`Trace::ends_ms`] assumes. The gaps of the agentic trace grow by
/// about as much per token of an answer.
pub const OUTPUT_TOKEN_MS: u64 = 20;
const REQUESTS_MAX: usize = 1 << 28;

/// Reason that a trace cannot be read. Lines are numbered from 1.
#[derive(Debug, Error)]
pub enum TraceError {
    #[error("line {line}: {reason}")]
    Read { line: usize, reason: io::Error },
    #[error("line {line} is not a request: {reason}")]
    Malformed { line: usize, reason: serde_json::Error },
    #[error("line {line} is longer than {LINE_BYTES_MAX} bytes")]
    TooLong { line: usize },
    /// The trace has more requests, or more distinct blocks, than the limit.
    #[error("line {line}: the trace has too many requests or blocks")]
    TooMany { line: usize },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub timestamp_ms: u64,
    /// Length of the answer in tokens.
    pub output_tokens: u64,
    /// The blocks of its prompt, as numbers from 0 in order of first appearance in the trace.
    pub blocks: Vec<u32>,
}

/// Event of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    Arrived(&'a Request),
    /// The answer to an earlier request is complete.
    GenerationEnded {
        request: &'a Request,
        now_ms: u64,
    },
}

#[derive(Debug, Clone, Default)]
pub struct Trace {
    requests: Vec<Request>,
    numbers: HashMap<u64, u32, BuildHasherDefault<DefaultHasher>>,
    block_tokens: Option<u64>,
    /// Sum of the lengths of all prompts that state one, and of their blocks.
    stated_tokens: u64,
    stated_blocks: u64,
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    #[serde(rename = "input_length")]
    input_tokens: u64,
    #[serde(rename = "output_length")]
    output_tokens: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads all lines, and skips empty ones. Memory is bounded: a line longer than
    /// [`LINE_BYTES_MAX`] is an error before it is read as a whole.
    pub fn read(mut input: impl BufRead) -> Result<Trace, TraceError> {
        let mut trace = Trace::default();
        let mut bytes = Vec::new();
        for line in 1.. {
            bytes.clear();
            let mut bounded = input.by_ref().take(LINE_BYTES_MAX as u64 + 1);
            let read = bounded.read_until(b'\n', &mut bytes).map_err(|reason| TraceError::Read { line, reason })?;
            if read == 0 {
                break;
            }
            if bytes.trim_ascii_end().len() > LINE_BYTES_MAX || (read > LINE_BYTES_MAX && !bytes.ends_with(b"\n")) {
                return Err(TraceError::TooLong { line });
            }
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            let request: Line =
                serde_json::from_slice(&bytes).map_err(|reason| TraceError::Malformed { line, reason })?;
            if !trace.push_answered(request.timestamp, &request.hash_ids, request.output_tokens) {
                return Err(TraceError::TooMany { line });
            }
            trace.stated_tokens = trace.stated_tokens.saturating_add(request.input_tokens);
            trace.stated_blocks += request.hash_ids.len() as u64;
        }
        Ok(trace)
    }

    /// Adds a request without an answer: see [`Trace::push_answered`].
    pub fn push(&mut self, timestamp_ms: u64, ids: &[u64]) -> bool {
        self.push_answered(timestamp_ms, ids, 0)
    }

    /// Adds a request for the blocks with these ids. Returns `false` without a change if the trace
    /// is full.
    pub fn push_answered(&mut self, timestamp_ms: u64, ids: &[u64], output_tokens: u64) -> bool {
        let room = u32::MAX as usize - self.numbers.len();
        if self.requests.len() >= REQUESTS_MAX || ids.len() >= room {
            return false;
        }
        let numbers = &mut self.numbers;
        let mut number = |id: &u64| {
            let next = numbers.len() as u32;
            *numbers.entry(*id).or_insert(next)
        };
        let blocks = ids.iter().map(&mut number).collect();
        self.requests.push(Request { timestamp_ms, output_tokens, blocks });
        true
    }

    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Tokens per block. Without [`Trace::set_block_tokens`] it is the power of two that is closest
    /// to the stated length of all prompts divided by their blocks.
    pub fn block_tokens(&self) -> u64 {
        let estimate = || self.stated_tokens.checked_div(self.stated_blocks).map(|mean| mean.clamp(1, 1 << 32));
        // A third above a power of two is about half way to the next on a scale of ratios.
        self.block_tokens.or_else(|| estimate().map(|mean| (mean * 3 / 4).next_power_of_two())).unwrap_or(BLOCK_TOKENS)
    }

    /// Fixes the number of tokens per block, at least 1.
    pub fn set_block_tokens(&mut self, tokens: u64) {
        self.block_tokens = Some(tokens.max(1));
    }

    /// Number of distinct blocks. Their numbers are below it.
    pub fn blocks_distinct(&self) -> usize {
        self.numbers.len()
    }

    /// Times at which generations end, with the numbers of their requests, in order of time. An
    /// answer is taken to begin at once, and to take [`OUTPUT_TOKEN_MS`] per token.
    pub fn ends_ms(&self) -> Vec<(u64, usize)> {
        let end = |(number, request): (usize, &Request)| {
            let answer_ms = request.output_tokens.saturating_mul(OUTPUT_TOKEN_MS);
            (request.timestamp_ms.saturating_add(answer_ms), number)
        };
        let mut ends: Vec<(u64, usize)> = self.requests.iter().enumerate().map(end).collect();
        ends.sort_unstable();
        ends
    }

    /// All requests, and between them these ends of generations (see [`Trace::ends_ms`]), in order
    /// of time. An end comes after its request, and ends after the last request are left out.
    pub fn events<'a>(&'a self, ends: &'a [(u64, usize)]) -> impl Iterator<Item = Event<'a>> {
        let mut ends = ends.iter().peekable();
        let mut number = 0;
        std::iter::from_fn(move || {
            let request = self.requests.get(number)?;
            let is_due = |end: &&(u64, usize)| end.0 <= request.timestamp_ms && end.1 < number;
            if let Some((now_ms, ended)) = ends.next_if(is_due) {
                return Some(Event::GenerationEnded { request: &self.requests[*ended], now_ms: *now_ms });
            }
            number += 1;
            Some(Event::Arrived(request))
        })
    }

    /// The trace of the requests in a range of their numbers.
    pub fn part(&self, range: std::ops::Range<usize>) -> Trace {
        let mut part = Trace { block_tokens: Some(self.block_tokens()), ..Trace::default() };
        for request in &self.requests[range] {
            let ids: Vec<u64> = request.blocks.iter().map(|block| u64::from(*block)).collect();
            part.push_answered(request.timestamp_ms, &ids, request.output_tokens);
        }
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}"#;

    #[test]
    fn reads_requests_and_numbers_their_blocks() {
        let trace =
            Trace::read(format!("{GOOD}\n\n{GOOD}\r\n{}", GOOD.replace("[7, 9]", "[9, 1]")).as_bytes()).unwrap();
        let blocks: Vec<&[u32]> = trace.requests().iter().map(|request| request.blocks.as_slice()).collect();
        assert_eq!(blocks, [&[0, 1][..], &[0, 1], &[1, 2]]);
        assert_eq!(trace.requests()[0].timestamp_ms, 5);
        assert_eq!(trace.ends_ms()[0], (5 + 3 * OUTPUT_TOKEN_MS, 0));
        assert_eq!(trace.blocks_distinct(), 3);
    }

    #[test]
    fn events_are_in_order_of_time_and_ends_follow_their_requests() {
        let mut trace = Trace::default();
        // Answers end at once, at the time of the third request, and after it.
        for (timestamp_ms, tokens) in [(100, 0), (100, 5), (200, 1)] {
            assert!(trace.push_answered(timestamp_ms, &[1], tokens));
        }
        assert_eq!(OUTPUT_TOKEN_MS, 20);
        let ends = trace.ends_ms();
        let times = trace.events(&ends).map(|event| match event {
            Event::Arrived(request) => (request.output_tokens, None),
            Event::GenerationEnded { request, now_ms } => (request.output_tokens, Some(now_ms)),
        });
        let expected = [(0, None), (0, Some(100)), (5, None), (5, Some(200)), (1, None)];
        assert_eq!(times.collect::<Vec<_>>(), expected);
        assert_eq!(trace.events(&[]).count(), 3);
    }

    #[test]
    fn block_size_follows_from_the_stated_lengths() {
        // Published traces round the number of blocks up or down.
        for (tokens, blocks, expected) in [(40_671, 79, 512), (6755, 14, 512), (130, 9, 16), (5000, 3, 2048)] {
            let ids: Vec<String> = (0..blocks).map(|id| id.to_string()).collect();
            let line = GOOD.replace("600", &tokens.to_string()).replace("7, 9", &ids.join(","));
            let mut trace = Trace::read(line.as_bytes()).unwrap();
            assert_eq!(trace.block_tokens(), expected, "{tokens} in {blocks}");
            trace.set_block_tokens(100);
            assert_eq!(trace.part(0..1).block_tokens(), 100);
        }
        assert_eq!(Trace::default().block_tokens(), BLOCK_TOKENS);
    }

    #[test]
    fn bad_lines_are_refused_with_their_number() {
        for bad in ["{", "[]", "7", r#"{"timestamp": 1}"#, &GOOD.replace("7,", "-7,"), &GOOD.replace('5', "\"x\"")] {
            let error = Trace::read(format!("{GOOD}\n{bad}\n").as_bytes()).unwrap_err();
            assert!(matches!(error, TraceError::Malformed { line: 2, .. }), "{error}");
            assert!(error.to_string().starts_with("line 2 "), "{error}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused_before_it_is_held() {
        let endless = io::BufReader::new(io::repeat(b' '));
        assert!(matches!(Trace::read(endless), Err(TraceError::TooLong { line: 1 })));
    }
}
