//! Bad input gets a clear error and does no harm.

use larder_tests::{
    CompletionRequest, PATIENCE, Process, Reference, Stack, complete, data_dir, eventually, get_json, node_statuses,
    tiny_model_dir, unused_address,
};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;

fn copy_model(to: &Path) {
    for entry in std::fs::read_dir(tiny_model_dir()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn edit(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(path, serde_json::to_vec(&json).unwrap()).unwrap();
}

fn refused(folder: &Path) -> String {
    let store = format!("larder://{}/", unused_address());
    let mut engine = Process::start(&["decode", "--store", &store, "--model", folder.to_str().unwrap()]);
    let status = engine.wait();
    assert_eq!(status.code(), Some(1), "an error, not a panic: {}", engine.stderr());
    engine.stderr()
}

#[test]
fn decode_names_the_problem_of_an_unusable_model_folder() {
    let dir = data_dir();
    assert!(refused(&dir.path().join("absent")).contains("absent"));

    copy_model(dir.path());
    let config = dir.path().join("config.json");
    edit(&config, |c| c["architectures"] = serde_json::json!(["GPTNeoXForCausalLM"]));
    let error = refused(dir.path());
    assert!(error.contains("GPTNeoXForCausalLM") && error.contains("Qwen3ForCausalLM"), "{error}");

    copy_model(dir.path());
    edit(&config, |c| c["num_hidden_layers"] = 7.into());
    assert!(refused(dir.path()).contains("model.layers.6."), "the missing tensor is named");

    copy_model(dir.path());
    edit(&config, |c| c["intermediate_size"] = 440.into());
    let error = refused(dir.path());
    assert!(error.contains("mlp") && error.contains("440") && error.contains("448"), "{error}");

    copy_model(dir.path());
    let weights = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    assert!(refused(dir.path()).contains("model.safetensors"));
}

#[test]
fn node_that_could_outgrow_the_machine_does_not_start() {
    let refusal = |options: &[&str]| {
        let dir = data_dir();
        let data_dir = dir.path().to_str().unwrap();
        let args = [&["store", "--listen", "127.0.0.1:0", "--data-dir", data_dir], options].concat();
        let mut node = Process::start(&args);
        assert_eq!(node.wait().code(), Some(1), "an error, not a panic: {}", node.stderr());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "it has touched nothing");
        node.stderr()
    };
    let error = refusal(&["--l2", "900TiB"]);
    assert!(error.contains("LRD0106") && error.contains("lower --l2"), "{error}");
    let error = refusal(&["--l3-bytes", "60PiB"]);
    assert!(error.contains("largest part is L3 index") && error.contains("raise --l3-mean-page"), "{error}");
}

/// Reads until the node closes the connection, and fails if it keeps it open.
fn read_to_close(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => answer,
        // The node closed the connection before it had read all of the input.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => answer,
        Err(error) => panic!("the node keeps the connection open: {error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_protocols_on_the_data_port_do_no_harm() {
    let reference = Reference::load();
    let tokens = reference.prompt(1, 200);
    let stack = Stack::start(1).await;
    let address = stack.store_url.trim_start_matches("larder://").trim_end_matches('/').to_string();
    let hello = |min: u16, max: u16| {
        let hello =
            larder_wire::Request::Hello { version_min: min, version_max: max, name: "test".into(), namespace: None };
        hello.frame(1, 1, 0, None).head
    };
    let mut huge = hello(1, 1);
    huge[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    let attacks: [&[u8]; 5] = [
        b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n",
        &[0xff; 4096],
        &huge,
        &[],
        &hello(1, 1)[..20],
    ];
    for attack in attacks {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(attack).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let answer = read_to_close(&mut stream);
        assert!(answer.is_empty(), "the node answers no foreign protocol");
    }
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.write_all(&hello(900, 901)).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let answer = read_to_close(&mut stream);
    let message = String::from_utf8_lossy(&answer);
    let supported = format!("{} to {}", larder_wire::PROTOCOL_VERSION_MIN, larder_wire::PROTOCOL_VERSION);
    assert!(message.contains("900 to 901") && message.contains(&supported), "{message}");
    eventually("the node counts the rejected connections", || async {
        node_statuses(&stack.admin).await[0]["counters"]["connections_rejected"].as_u64().unwrap() >= 4
    })
    .await;
    assert_eq!(
        complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap().text,
        reference.greedy_text(&tokens, 32)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_longer_than_the_context_gets_the_error_of_openai() {
    let reference = Reference::load();
    let stack = Stack::start(1).await;
    let error =
        complete(&stack.api, &CompletionRequest::new(&reference.prompt(1, 5000))).await.unwrap_err().to_string();
    assert!(error.starts_with("400") && error.contains("context_length_exceeded"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_pages_on_disk_are_counted_as_misses() {
    let reference = Reference::load();
    let tokens = reference.prompt(1, 1000);
    let mut stack = Stack::start(1).await;
    let expected = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap().text;
    stack.flushed(31).await;
    assert!(stack.nodes[0].take().unwrap().stop().success());
    let damaged = damage(&stack.node_dir(0).join("l3"));
    assert!(damaged > 10);
    stack.start_node(0);
    stack.start_engines();
    stack.ready().await;
    let answer = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap();
    assert_eq!(answer.text, expected, "damage never changes the answer");
    assert!(answer.cached < 992, "damaged pages were not served");
    let status = node_statuses(&stack.admin).await;
    assert!(status[0]["tiers"]["l3"]["corrupt"].as_u64().unwrap() > 0, "{}", status[0]["tiers"]);
}

/// Flips a bit every 150 KiB, unless the byte is zero. Returns the number of flipped bits.
fn damage(dir: &Path) -> usize {
    let mut damaged = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "seg") {
            continue;
        }
        let mut bytes = std::fs::read(&path).unwrap();
        for at in (8 << 10..bytes.len()).step_by(150 << 10) {
            if bytes[at] != 0 {
                bytes[at] ^= 0x40;
                damaged += 1;
            }
        }
        std::fs::write(&path, bytes).unwrap();
    }
    damaged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_l3_evicts_pages_and_stays_within_its_size() {
    let reference = Reference::load();
    let dir = data_dir();
    let address = unused_address().to_string();
    let l3 = 24 << 20;
    let mut node = Process::start(&[
        "store",
        "--listen",
        &address,
        "--data-dir",
        dir.path().to_str().unwrap(),
        "--l2",
        "32MiB",
        "--l3-bytes",
        "24MiB",
    ]);
    node.wait_for_line("larder://");
    let store = format!("larder://{address}/");
    let folder = tiny_model_dir();
    let mut engine =
        Process::start(&["decode", "--store", &store, "--model", folder.to_str().unwrap(), "--l1", "32MiB"]);
    engine.wait_for_line("http://");
    let free = "127.0.0.1:0";
    let mut router = Process::start(&["router", "--store", &store, "--listen", free, "--admin-listen", free]);
    let line = router.wait_for_line("OpenAI API");
    let urls: Vec<&str> = line.split_whitespace().filter(|w| w.starts_with("http://")).collect();
    let (api, admin) = (urls[0].trim_end_matches("/v1,"), urls[1]);
    eventually("the engine is known", || async {
        get_json(&format!("{api}/v1/models")).await.is_ok_and(|m| m["data"][0]["id"] == "larder-tiny")
    })
    .await;
    // 12 prompts of 3,000 tokens at 3 KiB per token are about 105 MiB, more than four times L3.
    // With a slow disk the node refuses some of their pages, so further prompts may follow.
    let mut evicted = 0;
    for seed in 0.. {
        if seed >= 12 && evicted > 100 {
            break;
        }
        assert!(seed < 100, "L3 has evicted {evicted} pages only");
        let tokens = reference.prompt(seed, 3000);
        let ask = CompletionRequest { max_tokens: 1, ..CompletionRequest::new(&tokens) };
        let answer = complete(api, &ask).await.unwrap();
        assert_eq!(answer.text, reference.greedy_text(&tokens, 1));
        evicted = node_statuses(admin).await[0]["tiers"]["l3"]["evicted_pages"].as_u64().unwrap();
    }
    let on_disk: u64 =
        std::fs::read_dir(dir.path().join("l3")).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(on_disk <= l3 + (64 << 10), "{on_disk} bytes on disk");
}
