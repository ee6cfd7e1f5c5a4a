//! Sampling parameters as the engine's interface honours them.

use crate::common::*;
use larder_worker::Role;
use larder_worker::api::{DecodeEvent, DecodeRequest, FinishReason};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn sampled(seed: u64) -> DecodeRequest {
    let mut request = decode_request(&prompt(seed, 90), 24);
    request.sampling.temperature = 1.0;
    request.sampling.seed = Some(seed);
    request.sampling.min_p = 0.01;
    request.sampling.presence_penalty = 0.5;
    request.sampling.frequency_penalty = 0.25;
    request.sampling.repetition_penalty = 1.2;
    request.sampling.logprobs = Some(3);
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeded_answers_do_not_depend_on_the_batch() {
    let store = MemoryStore::new();
    let engine = engine(Role::Decode, &store).await;
    let mut alone = Vec::new();
    for seed in 0..6 {
        alone.push(decode(&engine, &sampled(seed)).await);
    }
    let requests: Vec<_> = (0..6).map(sampled).collect();
    let together = futures::future::join_all(requests.iter().map(|request| decode(&engine, request))).await;
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!((&alone.tokens, &alone.logprobs), (&together.tokens, &together.logprobs));
        assert!(alone.logprobs.iter().all(|logprobs| logprobs.top.len() == 3 && logprobs.logprob <= 0.0));
    }
    assert_ne!(alone[0].tokens, alone[1].tokens);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_logprobs_are_those_of_the_generation() {
    let store = MemoryStore::new();
    let engine = engine(Role::Decode, &store).await;
    let mut request = decode_request(&prompt(3, 150), 20);
    request.sampling.logprobs = Some(2);
    let generated = decode(&engine, &request).await;
    assert!(generated.prompt_logprobs.is_empty());
    assert!(generated.logprobs.iter().all(|logprobs| logprobs.logprob == logprobs.top[0].1), "greedy");
    // The prompt spans several chunks, and is cached. Two such requests share the engine.
    let mut whole = decode_request(&[&request.tokens[..], &generated.tokens].concat(), 1);
    whole.sampling.prompt_logprobs = Some(2);
    let other = {
        let mut other = decode_request(&prompt(4, 100), 2);
        other.sampling.prompt_logprobs = Some(0);
        other
    };
    let (answer, other) = tokio::join!(decode(&engine, &whole), decode(&engine, &other));
    assert_eq!(answer.prompt_logprobs.len(), 169);
    assert_eq!(answer.prompt_logprobs[149..], generated.logprobs);
    assert_eq!((answer.logprobs.len(), answer.tokens.len()), (0, 1));
    assert_eq!((other.prompt_logprobs.len(), other.tokens.len()), (99, 2));
    assert!(other.prompt_logprobs.iter().all(|logprobs| logprobs.top.is_empty() && logprobs.logprob < 0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_overtake_those_that_wait_for_logits_of_their_prompts() {
    const WHOLE: usize = 40;
    let store = MemoryStore::new();
    let mut settings = options(Role::Decode);
    // Room for one of the long prompts, and for the short one, in L1 and in a step.
    settings.l1_bytes = 32 * LOADED.model.geometry(PAGE as u32).page_bytes();
    settings.chunk_tokens = 256;
    let engine = engine_with(settings, &store).await;
    let whole = |seed| {
        let mut request = decode_request(&prompt(seed, 24 * PAGE), 1);
        request.sampling.prompt_logprobs = Some(0);
        request
    };
    let requests: Vec<_> = (0..WHOLE as u64).map(|at| whole(50 + at)).collect();
    let ended = AtomicUsize::new(0);
    let all = futures::future::join_all(requests.iter().map(async |request| {
        let answer = decode(&engine, request).await;
        ended.fetch_add(1, Ordering::Relaxed);
        answer.prompt_logprobs.len()
    }));
    let short = async {
        // The others have arrived by then.
        while ended.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        decode(&engine, &decode_request(&prompt(60, PAGE), 1)).await;
        ended.load(Ordering::Relaxed)
    };
    let (lengths, before) = tokio::join!(all, short);
    assert_eq!(lengths, [24 * PAGE - 1; WHOLE]);
    assert!(before < WHOLE / 2, "{before} requests that came earlier held it back");
    assert!(is_idle(&engine).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_tokens_and_strings_end_the_answer_after_the_minimum() {
    let store = MemoryStore::new();
    let engine = engine(Role::Decode, &store).await;
    let request = decode_request(&prompt(5, 40), 12);
    let full = decode(&engine, &request).await;
    let end = |answer: &Answer| answer.last.clone();
    let stopped = |tokens| DecodeEvent::End { finish_reason: FinishReason::Stop, completion_tokens: tokens };

    let first = full.tokens.iter().position(|id| *id == full.tokens[4]).unwrap();
    let mut by_id = request.clone();
    by_id.sampling.stop_token_ids = vec![full.tokens[4]];
    let without = decode(&engine, &by_id).await;
    assert_eq!(end(&without), stopped(first as u32 + 1));
    assert_eq!(without.tokens, full.tokens[..=first]);
    by_id.sampling.include_stop = true;
    let with = decode(&engine, &by_id).await;
    assert!(with.text.len() > without.text.len() && full.text.starts_with(&with.text), "{with:?} {without:?}");
    by_id.sampling.min_tokens = 12;
    let never = decode(&engine, &by_id).await;
    assert_eq!(never.tokens.len(), 12);
    assert!(!never.tokens.contains(&full.tokens[4]), "it is not selected before the minimum");

    let mut by_text = request.clone();
    let stop: String = full.text.chars().skip(6).take(3).collect();
    by_text.sampling.stop = vec![stop.clone()];
    let cut = decode(&engine, &by_text).await;
    assert_eq!(cut.text, full.text[..full.text.find(&stop).unwrap()]);
    by_text.sampling.include_stop = true;
    assert_eq!(decode(&engine, &by_text).await.text, cut.text.clone() + &stop);
    by_text.sampling.min_tokens = 12;
    assert_eq!(decode(&engine, &by_text).await.text, full.text, "a stop string counts after the minimum only");
}
