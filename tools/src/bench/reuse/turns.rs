//! Conversations of many clients at a time.

use super::super::serve::random_tokens;
use super::service::Router;
use super::{Args, Clock, OutOfTime};
use anyhow::Result;
use futures::future::try_join_all;
use std::time::{Duration, Instant};

/// Seed of the conversations. Both workloads have the same ones.
const SEED: u64 = 2;

/// One turn of every client, all at the same time.
#[derive(Debug)]
pub struct Round {
    pub time: Duration,
    pub first_tokens: Vec<Duration>,
    /// Length of one prompt. Those of a round are equally long, because answers have a fixed number
    /// of tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that were not computed, of all clients.
    pub cached_tokens: usize,
    pub answers: Vec<Vec<u32>>,
}

/// Runs rounds until all are done, or the next one would not end in time. Each prompt is the
/// conversation so far and `turn_tokens` new tokens.
pub async fn converse(router: &Router, args: &Args, cache: &str, clock: Clock) -> Result<Vec<Round>> {
    let mut conversations: Vec<Vec<u32>> = vec![Vec::new(); args.clients];
    let mut rounds: Vec<Round> = Vec::new();
    for turn in 0..args.turns {
        let expected = rounds.last().map_or(Duration::ZERO, |round| round.time.mul_f64(super::GROWTH));
        if expected > clock.left() {
            break;
        }
        for (client, conversation) in conversations.iter_mut().enumerate() {
            conversation.extend(random_tokens(args.turn_tokens, &[SEED, client as u64, turn as u64]));
        }
        let begin = Instant::now();
        let requests = conversations.iter().map(|prompt| router.ask(prompt, cache, args.answer_tokens, clock));
        let answers = match try_join_all(requests).await {
            // The rounds before it count.
            Err(error) if error.is::<OutOfTime>() => break,
            answers => answers?,
        };
        let round = Round {
            time: begin.elapsed(),
            first_tokens: answers.iter().map(|answer| answer.first_token).collect(),
            prompt_tokens: conversations.first().map_or(0, Vec::len),
            cached_tokens: answers.iter().map(|answer| answer.cached_tokens).sum(),
            answers: answers.into_iter().map(|answer| answer.tokens).collect(),
        };
        for (conversation, answer) in conversations.iter_mut().zip(&round.answers) {
            conversation.extend(answer);
        }
        rounds.push(round);
    }
    Ok(rounds)
}
