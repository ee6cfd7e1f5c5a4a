//! Slow and hostile clients, models and engines.

use crate::fakes::*;
use larder_http::PeerAddress;
use larder_model::{ChatMessage, ChatTemplateSource, RenderOptions};
use larder_router::templates::{ChatError, ChatRenderer, RenderedText, TEXTS_BYTES_MAX, TemplateWorkers};
use larder_worker::api::Role;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Sends a request without reading the answer.
fn send(cluster: &TestCluster, path: &str, body: &str) -> TcpStream {
    let mut socket = TcpStream::connect(cluster.router.addr()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    socket.write_all((head + body).as_bytes()).unwrap();
    socket
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_cut_off_at_the_deadline_ends_with_an_error_event() {
    let cluster = TestCluster::with(0, 0, |options| options.request_timeout = Duration::from_secs(3)).await;
    // An answer that exceeds the buffers of both sockets.
    let context = 200_000;
    let engine = FakeEngine::start_with_context(&cluster.store, "decode-0", Role::Decode, context).await;
    engine.behave(Behaviour::Fill);
    assert!(cluster.router.wait_ready(PATIENCE).await);
    let most = context - 10;
    for (number, (path, body)) in (1..).zip([
        ("/v1/completions", json!({"model": MODEL, "prompt": "w1", "stream": true, "max_tokens": most})),
        ("/generate", json!({"text": "w1", "stream": true, "sampling_params": {"max_new_tokens": 3000}})),
        ("/v1/responses", json!({"model": MODEL, "input": "w1", "stream": true, "max_output_tokens": most})),
    ]) {
        let mut socket = send(&cluster, path, &body.to_string());
        eventually("the answer begins", || cluster.router.counters().inflight == 1).await;
        eventually("the deadline ends the answer", || cluster.router.counters().inflight == 0).await;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        let end = answer.split("data: ").collect::<Vec<_>>();
        let (error, cause, last) = match &end[..] {
            // Events of responses have no mark at their end, and OpenAI's codes only.
            [.., error] if path == "/v1/responses" => (error, "time limit", ""),
            [.., error, done] => (error, "timeout", *done),
            _ => panic!("no events: {answer}"),
        };
        let tail: String = error.chars().take(2000).collect();
        assert!(error.contains("\"error\"") && error.contains(cause), "{path}: {tail}");
        assert!(last.is_empty() || last.starts_with("[DONE]"), "{path}: {last}");
        assert_eq!(cluster.router.counters().requests_failed, number, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answer_that_an_engine_truncates_is_an_error() {
    let cluster = TestCluster::with(0, 1, |options| options.attempts_max = 1).await;
    cluster.decodes[0].behave(Behaviour::TruncateAfter(3));
    let mut body = json!({"model": MODEL, "prompt": "w1", "max_tokens": 10});
    let response = cluster.post("/v1/completions", body.clone()).await;
    let status = response.status().as_u16();
    let answer: Value = response.json().await.unwrap();
    assert_eq!((status, answer["error"]["code"].as_str()), (502, Some("engine_lost")), "{answer}");
    // The breaker may exclude the engine for a moment.
    eventually("the engine is admitted", || cluster.router.engines().iter().any(|engine| engine.is_admitted())).await;
    body["stream"] = json!(true);
    let text = cluster.post("/v1/completions", body).await.text().await.unwrap();
    let end = text.split("data: ").collect::<Vec<_>>();
    let [.., error, done] = &end[..] else { panic!("no events: {text}") };
    assert!(
        error.contains("engine_lost") && done.starts_with("[DONE]") && !text.contains("\"finish_reason\":\""),
        "{text}"
    );
}

/// Starts a decode engine whose model has this template, and waits until the router serves it.
async fn engine_with_template(cluster: &TestCluster, model: &str, template: &str) -> Arc<FakeEngine> {
    let name = format!("decode-{model}");
    let engine = FakeEngine::start_model(&cluster.store, &name, Role::Decode, CONTEXT, model, template).await;
    let deadline = Instant::now() + PATIENCE;
    let url = cluster.url(&format!("/v1/models/{model}"));
    while !cluster.http.get(&url).send().await.unwrap().status().is_success() {
        assert!(Instant::now() < deadline, "{model} is not served");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    engine
}

async fn chat(cluster: &TestCluster, model: &str) -> (u16, Value) {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 4});
    let response = cluster.post("/v1/chat/completions", body).await;
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Each of these aborts its process, or takes longer than any client waits.
const HOSTILE_TEMPLATES: [&str; 6] = [
    // Doubling of a string.
    "{% set ns = namespace(x='0123456789') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(9) %}{% set ns.x = ns.x | replace('a', 'aaaaaaaaaaaaaaaa') %}{% endfor %}",
    "{{ [1, [2, [3]]] | tojson(indent=1000000000) }}",
    // Nesting that overflows the stack when it is written.
    "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    // 2^60 comparisons in one instruction.
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "{% set l = range(90000) | list %}{% for i in range(90000) %}{% set m = l | sort(reverse=true) %}{% endfor %}",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_templates_are_stopped_while_others_render() {
    let cluster = TestCluster::new(0, 1).await;
    let mut engines = Vec::new();
    for (at, template) in HOSTILE_TEMPLATES.iter().enumerate() {
        engines.push(engine_with_template(&cluster, &format!("hostile-{at}"), template).await);
    }
    let honest = async {
        for _ in 0..20 {
            let (status, answer) = chat(&cluster, MODEL).await;
            assert_eq!(status, 200, "{answer}");
        }
    };
    let names: Vec<String> = (0..engines.len()).map(|at| format!("hostile-{at}")).collect();
    let hostile = futures::future::join_all(names.iter().map(|name| chat(&cluster, name)));
    let (answers, ()) = tokio::join!(hostile, honest);
    let mut stopped = 0;
    for (template, (status, answer)) in HOSTILE_TEMPLATES.iter().zip(answers) {
        match status {
            // Too many others were slow.
            429 => {}
            _ => {
                let code = answer["error"]["code"].as_str();
                assert_eq!((status, code), (400, Some("chat_template_exceeded")), "{template}: {answer}");
                stopped += 1;
            }
        }
    }
    assert!(stopped >= 2, "as many may be slow at a time");
    let metrics = cluster.http.get(cluster.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains(&format!("larder_router_template_stops_total {stopped}")), "{metrics}");
    let decodes = engines.iter().chain(&cluster.decodes).map(|engine| engine.decode_count()).sum::<usize>();
    assert_eq!(decodes, 20, "only honest chats reach an engine");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn template_that_formats_a_gigabyte_harms_no_other_chat() {
    let cluster = TestCluster::new(0, 1).await;
    let engine = engine_with_template(&cluster, "wide", "{{ '%1000000000d' | format(1) }}").await;
    let (status, answer) = chat(&cluster, "wide").await;
    assert_eq!((status, engine.decode_count()), (400, 0), "{answer}");
    assert_eq!(chat(&cluster, MODEL).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_that_fail_by_themselves_leave_their_worker_running() {
    let cluster = TestCluster::new(0, 0).await;
    let template = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ 'w1 ' * 50 * messages | length }}";
    engine_with_template(&cluster, "strict", template).await;
    engine_with_template(&cluster, "broken", "{% if %}").await;
    let message = json!({"role": "user", "content": "w1"});
    let ask = async |model: &str, messages: Vec<&Value>| {
        let body = json!({"model": model, "messages": messages});
        let response = cluster.post("/v1/chat/completions", body).await;
        (response.status().as_u16(), response.json::<Value>().await.unwrap()["error"]["message"].to_string())
    };
    for _ in 0..3 {
        let (status, error) = ask("strict", vec![&message, &message]).await;
        assert!(status == 400 && error.contains("one message only"), "{error}");
        assert_eq!(ask("strict", vec![&message]).await.0, 200);
        let (status, error) = ask("broken", vec![&message]).await;
        assert!(status == 400 && error.contains("the chat template failed"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_does_not_wait_for_a_hostile_template() {
    let cluster = TestCluster::with(0, 0, |options| options.shutdown_grace = Duration::from_millis(10)).await;
    engine_with_template(&cluster, "hostile", HOSTILE_TEMPLATES[4]).await;
    let body = json!({"model": "hostile", "messages": [{"role": "user", "content": "w1"}]}).to_string();
    let request = cluster.http.post(cluster.url("/v1/chat/completions")).body(body);
    let request = tokio::spawn(request.send());
    eventually("the request is in progress", || cluster.router.counters().inflight == 1).await;
    cluster.router.shutdown().await;
    // The template loops for five seconds. After it, the request would have an answer.
    let ended = request.await.unwrap();
    assert!(ended.is_err(), "the stop waited for the template: {ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looping_templates_of_many_models_do_not_delay_an_honest_chat() {
    let cluster = TestCluster::new(0, 1).await;
    let mut engines = Vec::new();
    for at in 0..16 {
        engines.push(engine_with_template(&cluster, &format!("looping-{at}"), HOSTILE_TEMPLATES[5]).await);
    }
    assert_eq!(chat(&cluster, MODEL).await.0, 200);
    let names: Vec<String> = (0..engines.len()).map(|at| format!("looping-{at}")).collect();
    let stops = AtomicUsize::new(0);
    let looping = async |name: &String| {
        let answer = chat(&cluster, name).await;
        stops.fetch_add(usize::from(answer.0 == 400), Ordering::SeqCst);
        answer
    };
    let loops = futures::future::join_all(names.iter().map(looping));
    let honest = async {
        // Behind all of them.
        eventually("all loops are in progress", || cluster.router.counters().inflight == names.len() as u64).await;
        assert_eq!(chat(&cluster, MODEL).await.0, 200);
        stops.load(Ordering::SeqCst)
    };
    let (answers, before) = tokio::join!(loops, honest);
    println!("{before} loops were stopped before the honest chat had its answer");
    // Without places of their own for slow renderings, it would begin when 13 of the 16 loops have
    // had their five seconds.
    assert!(before < 10, "the honest chat waited for {before} loops");
    let stopped = answers.iter().filter(|(status, _)| *status == 400).count();
    assert!(stopped >= 1 && answers.iter().all(|(status, _)| [400, 429].contains(status)), "{answers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_address_leaves_places_to_others() {
    let cluster = TestCluster::with(0, 1, |options| options.max_inflight = 8).await;
    cluster.decodes[0].behave(Behaviour::HangAfter(1));
    let other = reqwest::Client::builder().local_address(std::net::IpAddr::from([127, 0, 0, 2])).build().unwrap();
    let body = json!({"model": MODEL, "prompt": "w1", "stream": true});
    let mut running = Vec::new();
    for _ in 0..6 {
        let response = cluster.post("/v1/completions", body.clone()).await;
        assert_eq!(response.status(), 200);
        running.push(response);
    }
    let tokenize = json!({"model": MODEL, "prompt": "w1"});
    assert_eq!(cluster.post("/v1/completions", body.clone()).await.status(), 429, "two places are for others");
    assert_eq!(cluster.post("/tokenize", tokenize.clone()).await.status(), 429);
    assert_eq!(cluster.post("/detokenize", json!({"tokens": [1]})).await.status(), 429);
    let answer = other.post(cluster.url("/tokenize")).json(&tokenize).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let answer = other.post(cluster.url("/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    drop((running, answer));
    eventually("the places are free", || cluster.router.counters().inflight == 0).await;
    assert_eq!(cluster.post("/tokenize", tokenize).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_behind_a_trusted_proxy_have_shares_of_their_own() {
    let cluster = TestCluster::with(0, 1, |options| {
        options.max_inflight = 8;
        options.http.trusted_proxies = vec![[127, 0, 0, 1].into()];
    })
    .await;
    cluster.decodes[0].behave(Behaviour::HangAfter(1));
    let stranger = reqwest::Client::builder().local_address(std::net::IpAddr::from([127, 0, 0, 2])).build().unwrap();
    let ask = async |http: &reqwest::Client, client: &str| {
        let body = json!({"model": MODEL, "prompt": "w1", "stream": true});
        let request = http.post(cluster.url("/v1/completions")).header("x-forwarded-for", client).json(&body);
        request.send().await.unwrap()
    };
    let mut running = Vec::new();
    for _ in 0..6 {
        let response = ask(&cluster.http, "192.0.2.1").await;
        assert_eq!(response.status(), 200);
        running.push(response);
    }
    assert_eq!(ask(&cluster.http, "192.0.2.1").await.status(), 429, "two places are for others");
    assert_eq!(ask(&cluster.http, "192.0.2.2, 192.0.2.1").await.status(), 429, "the proxy's entry is the last");
    let other = ask(&cluster.http, "192.0.2.2").await;
    assert_eq!(other.status(), 200, "another client of the proxy");
    drop((running, other));
    eventually("the places are free", || cluster.router.counters().inflight == 0).await;
    let mut running = Vec::new();
    for client in 0..6 {
        let response = ask(&stranger, &format!("192.0.2.{client}")).await;
        assert_eq!(response.status(), 200);
        running.push(response);
    }
    assert_eq!(ask(&stranger, "192.0.2.7").await.status(), 429, "a stranger names nobody");
}

/// Workers whose processes have `mark` in their command lines.
fn template_workers(mark: &str) -> Arc<TemplateWorkers> {
    let mut command = crate::template_worker_command();
    // One more test to run, which does not exist.
    command.arguments.push(mark.into());
    Arc::new(TemplateWorkers::new(command, Arc::default()))
}

/// Renderer of a model.
fn renderer_of(workers: &Arc<TemplateWorkers>, template: &str) -> ChatRenderer {
    let source = ChatTemplateSource { source: template.into(), ..Default::default() };
    ChatRenderer::new(workers.clone(), "m".into(), source)
}

/// Renderer whose worker process has `mark` in its command line.
fn renderer(template: &str, mark: &str) -> ChatRenderer {
    renderer_of(&template_workers(mark), template)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_rendering_waits_for_its_place_beside_looping_ones() {
    let mark = "worker-beside-looping-ones";
    let workers = template_workers(mark);
    let slow = "{% set l = range(90000) | list %}{% for i in range(120) %}{% set m = l | sort(reverse=true) %}\
                {% endfor %}w1";
    let (looping, slow) = ([0, 1].map(|_| renderer_of(&workers, HOSTILE_TEMPLATES[5])), renderer_of(&workers, slow));
    let later = async {
        let own = niceness(std::process::id() as i32);
        let are_slow = || processes_with(mark).into_iter().filter(|id| niceness(*id) == own.max(10)).count() == 2;
        eventually("both loops are slow", are_slow).await;
        let begin = Instant::now();
        let first = render(&slow, PATIENCE).await.unwrap();
        println!("the slow rendering took {:?} beside loops", begin.elapsed());
        // Its model counts as slow now.
        let second = render(&slow, PATIENCE).await.unwrap();
        assert_eq!((first.text, second.text), ("w1".into(), "w1".into()));
    };
    let (first, second, ()) = tokio::join!(render(&looping[0], PATIENCE), render(&looping[1], PATIENCE), later);
    assert!([first, second].iter().all(|loops| matches!(loops, Err(ChatError::Exceeded))));
}

async fn render(renderer: &ChatRenderer, limit: Duration) -> Result<RenderedText, ChatError> {
    render_for(renderer, PeerAddress::default(), limit).await
}

async fn render_for(renderer: &ChatRenderer, peer: PeerAddress, limit: Duration) -> Result<RenderedText, ChatError> {
    let message = ChatMessage::new("user", "w1");
    let deadline = tokio::time::Instant::now() + limit;
    renderer.render(vec![message], RenderOptions::default(), 64 << 20, peer, deadline).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_of_chats_of_one_address_leaves_the_next_turn_to_another_one() {
    const CROWD: usize = 20;
    let template = "{% set l = range(20000) | list %}{% for i in range(4) %}{% set m = l | sort(reverse=true) %}\
                    {% endfor %}w1";
    let renderer = renderer(template, "worker-of-a-crowd");
    let [crowd, other] = [1, 2].map(|last| PeerAddress::of([10, 0, 0, last].into()));
    let ended = AtomicUsize::new(0);
    let one_of_crowd = async |_: usize| {
        let rendered = render_for(&renderer, crowd, PATIENCE).await;
        ended.fetch_add(1, Ordering::SeqCst);
        rendered
    };
    let crowd_ends = futures::future::join_all((0..CROWD).map(one_of_crowd));
    let other_ends = async {
        // All others are in the line by then.
        eventually("the first chat has its text", || ended.load(Ordering::SeqCst) > 0).await;
        let before = ended.load(Ordering::SeqCst);
        let rendered = render_for(&renderer, other, PATIENCE).await;
        (rendered, ended.load(Ordering::SeqCst) - before)
    };
    let (of_crowd, (of_other, waited)) = tokio::join!(crowd_ends, other_ends);
    println!("the other address waited for {waited} of {CROWD} renderings");
    let mut all = of_crowd.into_iter().chain([of_other]);
    assert!(all.all(|rendered| rendered.is_ok_and(|rendered| rendered.text == "w1")));
    assert!(waited < CROWD / 2, "{waited} renderings");
}

/// Process that has `mark` in its command line and is no zombie.
fn process_with(mark: &str) -> Option<i32> {
    processes_with(mark).first().copied()
}

fn processes_with(mark: &str) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_one = |id: &i32| {
        let arguments = std::fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
        arguments.split('\0').any(|argument| argument == mark)
    };
    ids.filter(is_one).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_after_the_death_of_an_idle_template_worker_succeeds() {
    let mark = "worker-that-dies";
    let renderer = renderer("{{ messages[0].content }}", mark);
    for _ in 0..10 {
        assert_eq!(render(&renderer, PATIENCE).await.unwrap().text, "w1");
        let worker = process_with(mark).expect("it is kept for the next chat");
        kill_process(Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
        // The next chat comes at once: the socket of a killed process stays open for a while.
    }
}

fn niceness(process: i32) -> i32 {
    rustix::process::getpriority_process(Pid::from_raw(process)).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn template_that_loops_goes_on_at_a_lower_priority() {
    let mark = "worker-that-is-slowed";
    // Loops only for an empty conversation.
    let looping = renderer(&format!("{{% if not messages %}}{}{{% endif %}}w1", HOSTILE_TEMPLATES[5]), mark);
    assert_eq!(render(&looping, PATIENCE).await.unwrap().text, "w1");
    let worker = process_with(mark).unwrap();
    let own = niceness(std::process::id() as i32);
    assert_eq!(niceness(worker), own, "an honest conversation has full priority");
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let looks = async {
        eventually("its priority is lowered", || niceness(worker) == own.max(10)).await;
    };
    let (loops, ()) = tokio::join!(
        looping.render(vec![], RenderOptions::default(), 1 << 20, PeerAddress::default(), deadline),
        looks
    );
    assert!(matches!(loops, Err(ChatError::Exceeded)));
    assert_eq!(render(&looping, PATIENCE).await.unwrap().text, "w1");
    assert_eq!(niceness(process_with(mark).unwrap()), own, "another worker has taken its place");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadline_of_a_request_is_not_the_fault_of_the_template() {
    let renderer = renderer(HOSTILE_TEMPLATES[5], "worker-that-loops");
    let error = render(&renderer, Duration::from_millis(300)).await.unwrap_err();
    assert!(matches!(error, ChatError::Deadline), "{error}");
    let error = render(&renderer, PATIENCE).await.unwrap_err();
    assert!(matches!(error, ChatError::Exceeded), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_that_wait_for_the_tokeniser_are_bounded_by_their_bytes() {
    let bytes = 4 << 20;
    let renderer = renderer(&format!("{{{{ 'x' * {bytes} }}}}"), "worker-that-writes-much");
    let mut waiting = Vec::new();
    let refused = loop {
        match render(&renderer, PATIENCE).await {
            Ok(rendered) => waiting.push(rendered),
            Err(error) => break error,
        }
        assert!(waiting.len() <= 64, "a chat of two bytes takes {bytes} bytes each time");
    };
    assert!(matches!(refused, ChatError::Busy), "{refused}");
    let held: usize = waiting.iter().map(|rendered| rendered.text.len()).sum();
    println!("{held} bytes of texts");
    let share = TEXTS_BYTES_MAX / 4 * 3;
    assert!(held <= share && held + bytes * 2 > share);
    let worker = process_with("worker-that-writes-much");
    assert!(matches!(render(&renderer, PATIENCE).await, Err(ChatError::Busy)));
    assert_eq!(process_with("worker-that-writes-much"), worker, "a lack of room is not the worker's fault");
    waiting.truncate(waiting.len() - 2);
    assert_eq!(render(&renderer, PATIENCE).await.unwrap().text.len(), bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_of_answers_in_progress_are_bounded_by_their_bytes() {
    let cluster = TestCluster::new(0, 0).await;
    let context = 300_000;
    let engine = FakeEngine::start_with_context(&cluster.store, "decode-0", Role::Decode, context).await;
    assert!(cluster.router.wait_ready(PATIENCE).await);
    engine.behave(Behaviour::HangAfter(1));
    // A body of 3 MB. Each choice of each prompt has a copy of its tokens on the way to the engine.
    let prompts = vec![vec![1; 100_000]; 16];
    let body = json!({"model": MODEL, "prompt": prompts, "n": 8, "stream": true, "max_tokens": 4});
    let mut running = Vec::new();
    let refused = loop {
        let response = cluster.post("/v1/completions", body.clone()).await;
        if response.status() != 200 {
            break response;
        }
        running.push(response);
        assert!(running.len() < 8, "eight requests of 128 choices");
    };
    println!("{} requests of 12.8 million tokens in progress", running.len());
    assert_eq!((refused.status().as_u16(), running.len()), (429, 2), "another address has room for some");
    assert!(refused.headers().contains_key("retry-after"));
    drop(running);
    eventually("the prompts are let go", || cluster.router.counters().inflight == 0).await;
    engine.behave(Behaviour::Serve);
    assert_eq!(cluster.complete(3).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_beyond_the_context_are_refused_by_their_bytes() {
    let cluster = TestCluster::new(0, 1).await;
    let long = "x".repeat(200_000);
    let message = json!([{"role": "user", "content": long}]);
    for (path, body, field) in [
        ("/v1/completions", json!({"model": MODEL, "prompt": long}), "prompt"),
        ("/v1/completions", json!({"model": MODEL, "prompt": ["w1", long]}), "prompt"),
        ("/v1/chat/completions", json!({"model": MODEL, "messages": message}), "messages"),
    ] {
        let response = cluster.post(path, body).await;
        assert_eq!(response.status(), 413);
        let answer: Value = response.json().await.unwrap();
        let error = &answer["error"];
        assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some("context_length_exceeded"), Some(field)));
    }
    let response = cluster.post("/v1/completions", json!({"model": MODEL, "prompt": vec![1; 100_000]})).await;
    assert_eq!(response.status(), 400);
    let (status, answer) = cluster.admin_post("/admin/v1/prefix/inspect", json!({"text": long})).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (413, Some("too_large")), "{answer}");
    let (status, answer) = cluster.admin_post("/admin/v1/prefix/inspect", json!({"messages": message})).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (413, Some("too_large")), "{answer}");
    // A member that claims a huge context does not make the router tokenise huge texts.
    let huge = FakeEngine::start_model(&cluster.store, "decode-huge", Role::Decode, u32::MAX, "huge", "{{ 1 }}").await;
    eventually("it joins", || cluster.router.engines().len() == 2).await;
    let longer = "w1 ".repeat(2 << 20);
    let begin = Instant::now();
    let mut status = 404;
    // Its tokenizer is loaded soon.
    while status == 404 && begin.elapsed() < PATIENCE {
        let response = cluster.post("/v1/completions", json!({"model": "huge", "prompt": longer})).await;
        status = response.status().as_u16();
    }
    assert_eq!((status, huge.decode_count()), (413, 0));
    let metrics = cluster.http.get(cluster.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("larder_router_refusals_total{reason=\"prompt_too_long\"} 6"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_sends_too_much_reads_the_refusal() {
    let cluster = TestCluster::new(0, 1).await;
    let body = vec![b'x'; 40 << 20];
    for url in [cluster.url("/v1/completions"), cluster.url("/v1/nothing"), cluster.admin_url("/admin/v1/prefix/warm")]
    {
        let request = cluster.http.post(&url).header("content-type", "application/json").body(body.clone());
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let answer: Value = response.json().await.unwrap();
        assert!(answer["error"]["message"].is_string() && [413, 404].contains(&status), "{url}: {status} {answer}");
    }
    // Without a length, the router notices in the middle.
    let piece = bytes::Bytes::from(vec![b'x'; 1 << 20]);
    let pieces = futures::stream::iter((0..40).map(move |_| Ok::<_, std::io::Error>(piece.clone())));
    let request = cluster.http.post(cluster.url("/v1/completions")).body(reqwest::Body::wrap_stream(pieces));
    assert_eq!(request.send().await.unwrap().status(), 413);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_constraints_hold_up_no_other_request() {
    let cluster = TestCluster::new(0, 1).await;
    let ask = async |fields: Value| {
        let mut body = json!({"model": MODEL, "prompt": "w1"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let response = cluster.post("/v1/completions", body).await;
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    // Each pair of alternatives doubles the combinations.
    let pair = |at: usize| {
        let option = |key: String| json!({"type": "object", "properties": {key: {"type": "integer"}}});
        json!({"anyOf": [option(format!("a{at}")), option(format!("b{at}"))]})
    };
    let combined = json!({"allOf": (0..60).map(pair).collect::<Vec<_>>()});
    let deep = (0..4000).fold("{}".to_string(), |inner, _| format!("{{\"not\":{inner}}}"));
    let tokens = (0..3000).map(|at| format!("T{at}: \"(\" T{} \")\"\n", at + 1)).collect::<String>();
    let chain: Value =
        (0..3000).map(|at| (format!("d{at}"), json!({"$ref": format!("#/$defs/d{}", at + 1)}))).collect();
    let hostile = [
        json!({"guided_json": {"$defs": chain, "$ref": "#/$defs/d0"}}),
        json!({"guided_json": combined}),
        json!({"guided_json": deep}),
        json!({"guided_regex": "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"}),
        json!({"guided_regex": "(.*a){200}[^b]{1,100}".repeat(40)}),
        json!({"guided_regex": "(".repeat(100_000)}),
        json!({"guided_grammar": format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000))}),
        json!({"guided_grammar": format!("start: T0\n{tokens}T3000: \"x\"\n")}),
        json!({"guided_grammar": "start: %json {\"$ref\": \"#\"}"}),
        json!({"guided_json": {"$ref": "http://127.0.0.1:1/schema.json"}}),
    ];
    for fields in hostile {
        let begin = Instant::now();
        let requested = ask(fields.clone());
        let other = async {
            // The constraint is being tried.
            tokio::time::sleep(Duration::from_millis(50)).await;
            cluster.complete(3).await.0
        };
        let ((status, answer), other) = tokio::join!(requested, other);
        let text: String = fields.to_string().chars().take(80).collect();
        println!("{status} after {} ms: {text}: {}", begin.elapsed().as_millis(), answer["error"]["message"]);
        assert!(status == 400 || status == 200, "{status} {answer}");
        assert_eq!(other, 200);
    }
    let (status, answer) = ask(json!({"guided_json": {"type": "colour"}})).await;
    assert_eq!((status, answer["error"]["param"].as_str()), (400, Some("guided_json")), "{answer}");
    assert_eq!(ask(json!({"guided_regex": "a+"})).await.0, 200, "the workers live on");
}
