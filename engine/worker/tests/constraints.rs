//! Constraints on answers, in an engine with a real model. It was never trained on JSON, so each of
//! its texts is as good as random.

mod common;

use common::*;
use larder_model::{CallConstraint, CallForm, CallableFunction, Constraint, Otherwise};
use larder_worker::api::{DecodeEvent, DecodeRequest, ErrorCode, FinishReason, Role};
use larder_worker::trials::{ConstraintTrials, TRIAL_TIME_MAX};
use larder_worker::worker_process::WorkerCommand;
use larder_worker::{EngineHandle, EngineOptions};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SEEDS: u64 = 24;

/// Ends within 300 tokens: every text in it is short.
const SCHEMA: &str = r##"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "pet": {"anyOf": [{"type": "null"}, {"const": "cat"}]}
    },
    "required": ["name", "age", "tags", "pet"],
    "additionalProperties": false,
    "$defs": {"tag": {"enum": ["red", "grün"]}}
}"##;

/// Worker of the other tests: they start this program again, with this test as its only one.
#[test]
#[ignore = "it is a part of the other tests"]
fn template_worker() {
    // Not with `--include-ignored`: the worker limits the memory of its process.
    if std::env::args().any(|argument| argument == "--exact") {
        larder_model::template_worker::run().unwrap();
    }
}

/// Arguments with which this program is a worker.
const WORKER_ARGUMENTS: [&str; 4] = ["template_worker", "--exact", "--ignored", "--nocapture"];

fn decode_options() -> EngineOptions {
    let arguments = WORKER_ARGUMENTS.map(String::from);
    with_worker(WorkerCommand { program: "/proc/self/exe".into(), arguments: arguments.into() })
}

fn with_worker(command: WorkerCommand) -> EngineOptions {
    let mut settings = options(Role::Decode);
    settings.constraint_trials = Arc::new(ConstraintTrials::new(command));
    settings
}

async fn decode_engine() -> EngineHandle {
    engine_with(decode_options(), &MemoryStore::new()).await
}

fn keeps_to_the_schema(value: &Value) -> bool {
    let is_tag = |tag: &Value| *tag == "red" || *tag == "grün";
    value.as_object().is_some_and(|fields| fields.len() == 4)
        && value["name"].as_str().is_some_and(|name| name.chars().count() <= 6)
        && value["age"].as_u64().is_some_and(|age| age <= 150)
        && value["tags"].as_array().is_some_and(|tags| tags.len() <= 2 && tags.iter().all(is_tag))
        && (value["pet"].is_null() || value["pet"] == "cat")
}

fn constrained(seed: u64, constraint: Constraint) -> DecodeRequest {
    let mut request = decode_request(&prompt(seed, 40), 600);
    request.sampling.ignore_eos = false;
    request.sampling.temperature = 1.0;
    request.sampling.seed = Some(seed);
    request.sampling.constraint = Some(Arc::new(constraint));
    request
}

fn of_json(seed: u64) -> DecodeRequest {
    constrained(seed, Constraint::JsonSchema(SCHEMA.into()))
}

fn has_stopped(answer: &Answer) -> bool {
    matches!(answer.last, DecodeEvent::End { finish_reason: FinishReason::Stop, .. })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_seed_gives_json_that_keeps_to_the_schema() {
    let engine = decode_engine().await;
    let requests: Vec<_> = (0..SEEDS)
        .map(|seed| {
            let mut request = of_json(seed);
            // Each of them changes the choice of tokens.
            match seed % 6 {
                0 => request.sampling.temperature = 0.0,
                1 => request.sampling.top_k = 3,
                2 => request.sampling.top_p = 0.5,
                3 => request.sampling.presence_penalty = 2.0,
                4 => request.sampling.min_p = 0.3,
                _ => request.sampling.temperature = 2.0,
            }
            if seed % 4 == 0 {
                // No stop token is selected before the minimum, unless the text cannot go on.
                request.sampling.min_tokens = 500;
            }
            request.sampling.ignore_eos = seed % 5 == 0;
            request
        })
        .collect();
    let answers = futures::future::join_all(requests.iter().map(|request| decode(&engine, request))).await;
    for answer in &answers {
        let value: Value = serde_json::from_str(&answer.text).unwrap_or_else(|error| panic!("{error}: {answer:?}"));
        assert!(keeps_to_the_schema(&value) && has_stopped(answer), "{answer:?}");
    }
    let distinct: std::collections::BTreeSet<&str> = answers.iter().map(|answer| answer.text.as_str()).collect();
    assert!(distinct.len() > SEEDS as usize / 2, "{distinct:?}");
    assert!(is_idle(&engine).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn constrained_sequences_and_others_do_not_change_each_other() {
    let engine = decode_engine().await;
    let free = |seed| DecodeRequest { tokens: prompt(100 + seed, 50), ..of_json(seed) };
    let requests: Vec<DecodeRequest> = (0..4)
        .map(|seed| {
            let mut request = free(seed);
            request.sampling.constraint = None;
            request.sampling.max_tokens = 60;
            request
        })
        .chain((0..4).map(of_json))
        .collect();
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(decode(&engine, request).await);
    }
    let together = futures::future::join_all(requests.iter().map(|request| decode(&engine, request))).await;
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!((&alone.tokens, &alone.text), (&together.tokens, &together.text));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expressions_choices_grammars_and_calls_hold() {
    let engine = decode_engine().await;
    let parameters = Some(r#"{"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": false}"#.into());
    let calls = CallConstraint {
        form: CallForm::Hermes,
        functions: vec![CallableFunction { name: "f".into(), parameters }],
        is_parallel: false,
        otherwise: Otherwise::Never,
    };
    for seed in 0..8 {
        let text = async |constraint: Constraint| {
            let answer = decode(&engine, &constrained(seed, constraint)).await;
            assert!(has_stopped(&answer), "{answer:?}");
            answer.text
        };
        let date = text(Constraint::Regex("[12][0-9]{3}-[01][0-9]".into())).await;
        assert!(date.len() == 7 && date.as_bytes()[4] == b'-', "{date}");
        let choice = text(Constraint::Choice(vec!["positive".into(), "négative".into()])).await;
        assert!(choice == "positive" || choice == "négative", "{choice}");
        let sum = text(Constraint::Grammar("start: N (\"+\" N)~1..2\nN: /[0-9]{1,3}/".into())).await;
        assert!((2..=3).contains(&sum.split('+').count()), "{sum}");
        let object = text(Constraint::Calls(calls.clone())).await;
        let inner = object.strip_prefix("<tool_call>\n").and_then(|rest| rest.strip_suffix("\n</tool_call>")).unwrap();
        let call: Value = serde_json::from_str(inner).unwrap();
        assert!(call["name"] == "f" && call["arguments"]["x"].is_boolean(), "{call}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn constrained_answers_end_at_the_limit_and_at_stop_strings() {
    let engine = decode_engine().await;
    let full = decode(&engine, &of_json(7)).await;
    let mut short = of_json(7);
    short.sampling.max_tokens = 5;
    short.sampling.logprobs = Some(2);
    let cut = decode(&engine, &short).await;
    assert_eq!(cut.last, DecodeEvent::End { finish_reason: FinishReason::Length, completion_tokens: 5 });
    assert_eq!(cut.tokens, full.tokens[..5]);
    // The model's own probabilities: it would not begin with a brace.
    assert!(cut.logprobs.iter().any(|logprobs| logprobs.top.iter().all(|(_, top)| *top > logprobs.logprob)));
    let mut stopped = of_json(7);
    stopped.sampling.stop = vec!["age".into()];
    let stopped = decode(&engine, &stopped).await;
    assert!(has_stopped(&stopped) && full.text.starts_with(&stopped.text) && !stopped.text.contains("age"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preempted_sequence_stays_within_its_constraint() {
    let mut settings = decode_options();
    // Room for a few sequences, whose answers do not fit together.
    settings.l1_bytes = 24 * LOADED.model.geometry(PAGE as u32).page_bytes();
    let engine = engine_with(settings, &MemoryStore::new()).await;
    let requests: Vec<_> = (0..8)
        .map(|seed| {
            let mut request = constrained(seed, Constraint::Regex("[a-z]{150}[0-9]".into()));
            request.sampling.max_tokens = 300;
            request
        })
        .collect();
    let answers = futures::future::join_all(requests.iter().map(|request| decode(&engine, request))).await;
    for answer in answers {
        let (letters, digit) = answer.text.split_at(150);
        assert!(letters.bytes().all(|b| b.is_ascii_lowercase()) && digit.parse::<u8>().is_ok(), "{answer:?}");
    }
    assert!(metric(&engine, "larder_engine_preemptions_total").await > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_and_impossible_constraints_are_errors() {
    let engine = decode_engine().await;
    for constraint in [
        Constraint::JsonSchema("{".into()),
        Constraint::JsonSchema(r#"{"type": "colour"}"#.into()),
        Constraint::Regex("(".into()),
        Constraint::Grammar("start: missing".into()),
        Constraint::Regex("a".repeat(200_000)),
    ] {
        let (status, error) = try_decode(&engine, &constrained(1, constraint)).await.unwrap_err();
        assert_eq!((status, error.code), (400, ErrorCode::BadRequest), "{error}");
    }
    // Each token multiplies the ways to read the text.
    let mut ambiguous = constrained(1, Constraint::Grammar("start: a\na: a a a | \"x\" | \"\"".into()));
    ambiguous.sampling.logit_bias = vec![(LOADED.tokenizer.encode("x", false).unwrap()[0], 100.0)];
    ambiguous.sampling.max_tokens = 3000;
    let DecodeEvent::Error(error) = decode(&engine, &ambiguous).await.last else { panic!("it goes on for ever") };
    assert!(error.code == ErrorCode::BadRequest && error.message.contains("complex"), "{error}");
    assert!(has_stopped(&decode(&engine, &of_json(1)).await), "the engine lives on");
    assert!(is_idle(&engine).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn costly_constraints_that_compile_leave_the_engine_running() {
    let engine = decode_engine().await;
    let tokens: String = (0..3000).map(|at| format!("T{at}: \"(\" T{} \")\"\n", at + 1)).collect();
    for constraint in [
        Constraint::Regex("((((a{1,999}){1,999}){1,999}){1,999}){1,999}".into()),
        Constraint::Regex("(.*a){200}[^b]{1,100}".repeat(40)),
        Constraint::Grammar(format!("start: T0\n{tokens}T3000: \"x\"\n")),
        Constraint::Grammar((0..1500).fold("start: \"a\"".into(), |grammar, at| format!("{grammar} | \"b{at}\""))),
    ] {
        let mut request = constrained(3, constraint);
        request.sampling.max_tokens = 40;
        // An answer, or an error that says why there is none.
        match try_decode(&engine, &request).await {
            Ok(answer) => assert!(matches!(answer.last, DecodeEvent::End { .. } | DecodeEvent::Error(_)), "{answer:?}"),
            Err((status, error)) => assert_eq!((status, error.code), (400, ErrorCode::BadRequest), "{error}"),
        }
    }
    let many = Constraint::Choice((0..1024).map(|at| format!("{at} {}", "word ".repeat(20))).collect());
    assert!(has_stopped(&decode(&engine, &constrained(3, many)).await));
    assert!(has_stopped(&decode(&engine, &of_json(1)).await));
}

/// Peak of the resident memory of this process, in bytes: VmHWM of proc_pid_status(5).
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_alone_refuses_hostile_constraints_within_time_and_memory() {
    let engine = decode_engine().await;
    assert!(has_stopped(&decode(&engine, &of_json(1)).await), "the vocabulary has its trie");
    // The automaton of so many patterns together takes gigabytes.
    let pattern = |at: usize| json!({"type": "string", "pattern": format!("^(.*[a-z]{{{at}}}.*)$")});
    let patterns = json!({"allOf": (50..80).map(pattern).collect::<Vec<_>>()}).to_string();
    let deep = format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000));
    let before = peak_bytes();
    for (constraint, reason) in
        [(Constraint::JsonSchema(patterns), "too much time or memory"), (Constraint::Grammar(deep), "")]
    {
        let begin = Instant::now();
        let request = constrained(1, constraint);
        let refused = try_decode(&engine, &request);
        let other = async {
            // The constraint is being tried.
            tokio::time::sleep(Duration::from_millis(50)).await;
            decode(&engine, &decode_request(&prompt(9, 40), 5)).await
        };
        let (refused, other) = tokio::join!(refused, other);
        let (status, error) = refused.unwrap_err();
        assert_eq!((status, error.code), (400, ErrorCode::BadRequest), "{error}");
        assert!(error.message.contains(reason), "{error}");
        assert!(matches!(other.last, DecodeEvent::End { .. }), "{other:?}");
        // A trial ends at its limit. The rest is for a busy machine.
        assert!(begin.elapsed() < 12 * TRIAL_TIME_MAX, "{:?}", begin.elapsed());
    }
    // In this process, the compilation would take more.
    let grown = peak_bytes() - before;
    assert!(grown < 400 << 20, "the engine grew by {grown} bytes");
    assert!(has_stopped(&decode(&engine, &of_json(2)).await), "the engine lives on");
    assert!(is_idle(&engine).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_compiles_nothing_without_a_trial() {
    let settings = with_worker(WorkerCommand { program: "/bin/false".into(), arguments: Vec::new() });
    let engine = engine_with(settings, &MemoryStore::new()).await;
    let (status, error) = try_decode(&engine, &of_json(1)).await.unwrap_err();
    assert_eq!((status, error.code), (500, ErrorCode::Internal), "{error}");
    assert!(matches!(decode(&engine, &decode_request(&prompt(9, 40), 5)).await.last, DecodeEvent::End { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_of_one_process_share_the_verdicts_of_trials() {
    let starts = tempfile::NamedTempFile::new().unwrap();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_string();
    let program = path(&std::env::current_exe().unwrap());
    // Each start of a worker writes a line.
    let script = "echo start >> \"$0\"; exec \"$@\"".to_string();
    let mut arguments = vec!["-c".to_string(), script, path(starts.path()), program];
    arguments.extend(WORKER_ARGUMENTS.map(String::from));
    let settings = with_worker(WorkerCommand { program: "/bin/sh".into(), arguments });
    for _ in 0..2 {
        let engine = engine_with(settings.clone(), &MemoryStore::new()).await;
        assert!(has_stopped(&decode(&engine, &of_json(1)).await));
        assert_eq!(std::fs::read_to_string(starts.path()).unwrap(), "start\n");
    }
}
