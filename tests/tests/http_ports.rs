//! The four kinds of HTTP ports of a running `larder up` against strangers, slow clients and web
//! pages: OpenAI API, admin API, engines and store nodes.

use larder_tests::{
    CompletionRequest, PATIENCE, Process, Reference, Stack, complete, data_dir, eventually, get_json, tiny_model_dir,
};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

struct Port {
    name: &'static str,
    addr: SocketAddr,
    /// A path that answers `GET`, and one that takes `POST`.
    get: &'static str,
    post: &'static str,
    /// `true` if web pages may use the port.
    is_public: bool,
}

fn address(url: &str) -> SocketAddr {
    url.trim().trim_start_matches("http://").trim_end_matches("/v1").parse().expect("an address")
}

/// Starts `larder up` with deadlines of one second, and returns its ports.
async fn start(dir: &Path, more: &[&str]) -> (Process, Vec<Port>) {
    let data_dir = dir.to_str().unwrap();
    let options = [
        "up",
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        data_dir,
        "--http-header-timeout",
        "1",
        "--http-body-timeout",
        "1",
        "--allowed-host",
        "larder.example",
    ];
    let mut up = Process::start(&[&options[..], more].concat());
    let api = up.url("http://");
    let admin = std::fs::read_to_string(dir.join("admin.url")).unwrap();
    let node = std::fs::read_to_string(dir.join("node-0/admin.url")).unwrap();
    let status = get_json(&format!("{}/admin/v1/status", admin.trim())).await.unwrap();
    let engine = status["engines"][0]["url"].as_str().unwrap();
    let port = |name, url: &str, get, post| Port { name, addr: address(url), get, post, is_public: name == "api" };
    let ports = vec![
        port("api", &api, "/v1/models", "/v1/completions"),
        port("admin", &admin, "/healthz", "/admin/v1/prefix/inspect"),
        port("engine", engine, "/v1/state", "/v1/prefill"),
        port("node", &node, "/healthz", "/scrub"),
    ];
    (up, ports)
}

impl Port {
    fn send(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    }

    fn ask(&self, text: &str) -> String {
        to_end(self.send(text))
    }

    fn half_a_body(&self) -> String {
        let post = self.post;
        format!(
            "POST {post} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
        )
    }
}

/// Reads until the server closes the connection, and fails if it keeps it open.
fn to_end(mut stream: TcpStream) -> String {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            panic!("the server keeps the connection open: {}", String::from_utf8_lossy(&answer))
        }
        _ => String::from_utf8_lossy(&answer).into_owned(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_requests_end_on_every_port() {
    let dir = data_dir();
    let (running, ports) = start(dir.path(), &[]).await;
    // All at once: the deadlines pass together.
    let headers: Vec<_> = ports.iter().map(|port| port.send("GET / HTTP/1.1\r\nHost: 127.")).collect();
    let bodies: Vec<_> = ports.iter().map(|port| port.send(&port.half_a_body())).collect();
    for (port, header) in ports.iter().zip(headers) {
        assert_eq!(to_end(header), "", "{}", port.name);
    }
    for (port, body) in ports.iter().zip(bodies) {
        let answer = to_end(body);
        assert!(answer.starts_with("HTTP/1.1 408"), "{}: {answer}", port.name);
    }
    let errors = running.stderr();
    assert!(errors.contains("LRD0702"), "the log says so: {errors}");
    assert!(running.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn web_pages_reach_the_openai_api_only() {
    let dir = data_dir();
    let (_running, ports) = start(dir.path(), &[]).await;
    for port in &ports {
        let get = |headers: &str| {
            port.ask(&format!("GET {} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n", port.get))[9..12].to_string()
        };
        let refused = |status: &'static str| if port.is_public { "200" } else { status };
        assert_eq!(get(&format!("Host: {}\r\n", port.addr)), "200", "{}", port.name);
        assert_eq!(get("Host: LARDER.example:80\r\n"), "200", "{}", port.name);
        assert_eq!(get("Host: rebound.example\r\n"), refused("421"), "{}", port.name);
        assert_eq!(get("Host: 127.0.0.1\r\nOrigin: http://evil.example\r\n"), refused("403"), "{}", port.name);
        // A form needs no permission of the browser. Its bytes can be JSON.
        let form = port.half_a_body().replace("application/json", "text/plain") + "\"a\":\"b\"}";
        let answer = port.ask(&form.replace("Host", "Connection: close\r\nHost"));
        assert_eq!(answer.starts_with("HTTP/1.1 415"), !port.is_public, "{}: {answer}", port.name);
    }
}

/// Opens connections until the process has logged `lines` times that a server of this name refused
/// one.
async fn logs_a_refused_connection(process: &Process, name: &str, addr: SocketAddr, connections: usize, lines: usize) {
    let server = format!("server=\"{name}\"");
    let parts = ["refused an HTTP connection", "LRD0701", "peer=127.0.0.1", server.as_str()];
    let is_refusal = |line: &&str| parts.iter().all(|part| line.contains(part));
    eventually(&format!("{name} logs a refused connection"), || async {
        // A connection that has waited for a second makes room for the next one. So only a burst is
        // refused, and a busy machine needs several.
        let open: Vec<_> = (0..connections).filter_map(|_| TcpStream::connect(addr).ok()).collect();
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(open);
        process.stderr().lines().filter(is_refusal).count() >= lines
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_port_logs_the_connection_that_it_refuses() {
    let dir = data_dir();
    let (up, ports) = start(dir.path(), &["--http-connections", "8"]).await;
    let addr = |name: &str| ports.iter().find(|port| port.name == name).unwrap().addr;
    let status = get_json(&format!("http://{}/admin/v1/status", addr("admin"))).await.unwrap();
    let store = format!("larder://{}/", status["nodes"][0]["address"].as_str().unwrap());
    logs_a_refused_connection(&up, "api", addr("api"), 16, 1).await;
    // These have 128 places, 96 for one address.
    logs_a_refused_connection(&up, "admin", addr("admin"), 130, 1).await;
    logs_a_refused_connection(&up, "admin", addr("node"), 130, 2).await;
    let model = tiny_model_dir();
    let model = model.to_str().unwrap();
    let mut engine =
        Process::start(&["prefill", "--store", &store, "--model", model, "--l1", "64MiB", "--http-connections", "8"]);
    let url = engine.url("http://");
    logs_a_refused_connection(&engine, "engine", address(&url), 16, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn router_and_engine_go_on_after_a_lack_of_descriptors() {
    const REPORT: &str = "cannot accept an HTTP connection";
    let tokens = Reference::load().prompt(11, 100);
    let start = Instant::now();
    let mut stack = Stack::start(1).await;
    println!("the processes run after {:?}", start.elapsed());
    let engine = stack.decode.as_mut().unwrap().url("http://");
    let expected = complete(&stack.api, &CompletionRequest::new(&tokens)).await.unwrap().text;
    for (process, url, path) in [(&stack.router, &stack.api, "/v1/models"), (&stack.decode, &engine, "/v1/state")] {
        let process = process.as_ref().unwrap();
        let begin = Instant::now();
        process.limit_descriptors(process.descriptors() as u64 + 8);
        let strangers: Vec<_> = (0..200).map(|_| TcpStream::connect(address(url)).unwrap()).collect();
        println!("{url}: strangers are connected after {:?}", begin.elapsed());
        eventually("the lack of descriptors is logged", || async { process.stderr().contains(REPORT) }).await;
        // Their descriptors are free again. The limit stays.
        drop(strangers);
        println!("{url}: the lack is logged after {:?}", begin.elapsed());
        eventually("the server answers", || async { get_json(&format!("{url}{path}")).await.is_ok() }).await;
        println!("{url}: the server answers after {:?}", begin.elapsed());
        let lines = process.stderr().matches(REPORT).count() as u64;
        // One per 10 s. The server tries again 20 times per second.
        assert!(lines <= 2 + begin.elapsed().as_secs() / 10, "the log is flooded: {}", process.stderr());
        process.limit_descriptors(u64::MAX);
    }
    eventually("requests are served", || async {
        complete(&stack.api, &CompletionRequest::new(&tokens)).await.is_ok_and(|answer| answer.text == expected)
    })
    .await;
    println!("requests are served after {:?}", start.elapsed());
}
