//! `larder up` and the commands that use it.

use larder_tests::{
    CompletionRequest, Process, Reference, complete, data_dir, eventually, is_recovered, larder_command, node_statuses,
    unused_address,
};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

/// Starts `larder up` and waits until it serves and its nodes have recovered their pages. Returns
/// the URL of the API as well.
async fn up(dir: &Path, more: &[&str]) -> (Process, String) {
    let mut up =
        Process::start(&[&["up", "--listen", "127.0.0.1:0", "--data-dir", dir.to_str().unwrap()], more].concat());
    let api = up.url("http://");
    let admin = std::fs::read_to_string(dir.join("admin.url")).unwrap();
    eventually("the nodes have recovered", || async { node_statuses(admin.trim()).await.iter().all(is_recovered) })
        .await;
    (up, api.trim_end_matches("/v1").to_string())
}

/// Runs an admin command against the `larder up` with this data directory.
fn admin(dir: &Path, arguments: &[&str]) -> Output {
    let data_dir = ["--data-dir", dir.to_str().unwrap()];
    larder_command().args(arguments).args(data_dir).output().unwrap()
}

fn admin_json(dir: &Path, arguments: &[&str]) -> Value {
    let output = admin(dir, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_serves_pages_of_the_previous_run() {
    let reference = Reference::load();
    let dir = data_dir();
    let tokens = reference.prompt(1, 700);
    let expected = reference.greedy_text(&tokens, 32);
    let (running, api) = up(dir.path(), &["--nodes", "2"]).await;
    let first = complete(&api, &CompletionRequest::new(&tokens)).await.unwrap();
    assert_eq!((first.text.as_str(), first.cached), (expected.as_str(), 0));
    assert!(running.stop().success(), "exit code 0");
    assert!(!dir.path().join("admin.url").exists());
    let (running, api) = up(dir.path(), &["--nodes", "2"]).await;
    let second = complete(&api, &CompletionRequest::new(&tokens)).await.unwrap();
    assert_eq!((second.text, second.cached), (expected, 21 * 32));
    running.sigkill();
    let (_running, api) = up(dir.path(), &["--nodes", "2"]).await;
    assert_eq!(
        complete(&api, &CompletionRequest::new(&tokens)).await.unwrap().cached,
        21 * 32,
        "pages survive kill -9"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefix_commands_inspect_warm_and_forget() {
    let dir = data_dir();
    let text = "In the beginning God created the heaven and the earth. ".repeat(20);
    let (running, _) = up(dir.path(), &[]).await;
    let status = admin_json(dir.path(), &["status"]);
    assert_eq!(status["nodes"].as_array().unwrap().len(), 1);
    let human = admin(dir.path(), &["status"]);
    let human = String::from_utf8_lossy(&human.stdout).into_owned();
    assert!(human.contains("larder-tiny") && human.contains("prefill") && human.contains("L3"), "{human}");

    let tiers = |answer: &Value| -> Vec<Option<String>> {
        let pages = answer["pages"].as_array().unwrap();
        pages.iter().map(|page| page["tier"].as_str().map(str::to_string)).collect()
    };
    let inspect = |dir: &Path| tiers(&admin_json(dir, &["prefix", "inspect", &text]));
    let pages = inspect(dir.path());
    assert!(pages.len() > 4 && pages.iter().all(Option::is_none), "{pages:?}");
    let warmed = admin_json(dir.path(), &["prefix", "warm", &text]);
    assert_eq!(warmed["computed"], pages.len(), "no tier had the pages: {warmed}");
    assert!(inspect(dir.path()).iter().all(|tier| tier.as_deref() == Some("L2")));

    let pinned = admin_json(dir.path(), &["prefix", "pin", "--for", "1h", &text]);
    assert_eq!(pinned["pinned"], pages.len(), "{pinned}");
    let table = admin(dir.path(), &["prefix", "inspect", &text]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("hard, 3"), "{table:?}");

    assert!(running.stop().success());
    let (_running, _) = up(dir.path(), &[]).await;
    assert!(inspect(dir.path()).iter().all(|tier| tier.as_deref() == Some("L3")), "after a restart");
    let warmed = admin_json(dir.path(), &["prefix", "warm", &text]);
    assert_eq!((&warmed["loaded"], &warmed["computed"]), (&pages.len().into(), &0.into()), "{warmed}");
    assert!(inspect(dir.path()).iter().all(|tier| tier.as_deref() == Some("L2")));

    let file = dir.path().join("prefix.txt");
    std::fs::write(&file, &text).unwrap();
    let forgotten = admin_json(dir.path(), &["prefix", "forget", "--file", file.to_str().unwrap()]);
    assert_eq!(forgotten["forgotten"], pages.len(), "{forgotten}");
    assert!(inspect(dir.path()).iter().all(Option::is_none));
    let explained = admin_json(dir.path(), &["prefix", "inspect", "--why", &text]);
    let reasons = explained["pages"].as_array().unwrap().iter().map(|page| page["miss"]["reason"].as_str());
    assert!(reasons.clone().all(|reason| reason == Some("forgotten")), "{explained}");
    let list = admin_json(dir.path(), &["namespace", "ls"]);
    let listed = &list["nodes"][0]["answer"]["namespaces"][0];
    assert!(listed["model"] == "larder-tiny" && listed["namespace"] == explained["namespace"], "{list}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mistakes_get_one_line_with_the_cause() {
    let dir = data_dir();
    let error_of = |arguments: &[&str]| {
        let output = larder_command().args(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let path = dir.path().to_str().unwrap();
    let nothing_runs = error_of(&["status", "--data-dir", path]);
    assert!(nothing_runs.contains("larder up") && nothing_runs.contains("--admin"), "{nothing_runs}");
    assert!(error_of(&["prefill", "--store", "http://x:1", "--model", path]).contains("larder://"));
    let (_running, api) = up(dir.path(), &[]).await;
    let unused = dir.path().join("unused");
    let taken =
        error_of(&["up", "--listen", api.trim_start_matches("http://"), "--data-dir", unused.to_str().unwrap()]);
    assert!(!unused.exists(), "nothing is created on disk");
    assert!(taken.contains("cannot listen on") && taken.trim_end().ends_with("[LRD0501]"), "{taken}");
    let twice = error_of(&["--log", "off", "up", "--listen", "127.0.0.1:0", "--data-dir", path]);
    assert_eq!(twice.matches("in use").count(), 1, "said once: {twice}");
    assert_eq!(twice.matches("[LRD").count(), 1, "one code, of the innermost error: {twice}");
    assert_eq!(twice.lines().count(), 1, "{twice}");

    let refused = error_of(&["status", "--admin", &unused_address().to_string()]);
    assert!(refused.contains("cannot reach the admin API") && refused.contains("Connection refused"), "{refused}");
    assert!(!refused.contains("error sending request"), "{refused}");
    let api_port = error_of(&["status", "--admin", api.trim_start_matches("http://")]);
    assert!(api_port.contains("is the OpenAI API of a router, not its admin API"), "{api_port}");
    let node = std::fs::read_to_string(dir.path().join("node-0/admin.url")).unwrap();
    let node_port = error_of(&["status", "--admin", node.trim()]);
    assert!(node_port.contains("is the admin address of a store node"), "{node_port}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn up_exposes_metrics_and_scrub_of_each_node() {
    let dir = data_dir();
    let (mut running, _) = up(dir.path(), &["--nodes", "2"]).await;
    for number in 0..2 {
        let file = dir.path().join(format!("node-{number}/admin.url"));
        let url = std::fs::read_to_string(&file).unwrap().trim().to_string();
        assert!(running.wait_for_line(&format!("node {number}")).contains(&url), "{url} is printed");
        let metrics = reqwest::get(format!("{url}/metrics")).await.unwrap().text().await.unwrap();
        assert!(metrics.contains("# EOF"), "{metrics}");
        let scrub = reqwest::Client::new().post(format!("{url}/scrub")).send().await.unwrap();
        assert!(scrub.status().is_success());
    }
    assert!(running.stop().success());
    assert!(!dir.path().join("node-0/admin.url").exists(), "the address of a stopped node is removed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_fits_120_columns_and_prefix_commands_take_chats() {
    let dir = data_dir();
    let (_running, _) = up(dir.path(), &["--nodes", "2"]).await;
    let default = String::from_utf8(admin(dir.path(), &["status"]).stdout).unwrap();
    assert!(default.lines().all(|line| line.chars().count() <= 120), "{default}");
    let wide = String::from_utf8(admin(dir.path(), &["status", "--wide"]).stdout).unwrap();
    assert!(wide.contains("EPOCH") && wide.contains("L3 DEVICES") && wide.contains("NODE METRICS"), "{wide}");
    // Not a URL: HOST:PORT is enough.
    let address = std::fs::read_to_string(dir.path().join("admin.url")).unwrap();
    let address = address.trim().trim_start_matches("http://");
    let status = larder_command().args(["status", "--admin", address]).output().unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));

    let chat = dir.path().join("chat.json");
    let content = "In the beginning God created the heaven and the earth. ".repeat(20);
    std::fs::write(&chat, serde_json::json!([{"role": "user", "content": content}]).to_string()).unwrap();
    let inspected = admin_json(dir.path(), &["prefix", "inspect", "--messages", chat.to_str().unwrap()]);
    assert!(inspected["pages"].as_array().unwrap().len() > 4, "{inspected}");
    let unknown = admin(dir.path(), &["prefix", "inspect", "--tokens", "1,4000000000"]);
    let error = String::from_utf8_lossy(&unknown.stderr);
    assert!(!unknown.status.success() && error.contains("vocabulary"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verify_accepts_the_data_directory_of_up() {
    let dir = data_dir();
    let (running, api) = up(dir.path(), &["--nodes", "2"]).await;
    complete(&api, &CompletionRequest::new(&Reference::load().prompt(1, 700))).await.unwrap();
    let verify = || larder_command().args(["verify", "--json"]).arg(dir.path()).output().unwrap();
    assert_eq!(verify().status.code(), Some(2), "the nodes are running");
    assert!(running.stop().success());
    let output = verify();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let summaries: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let dirs: Vec<&str> = summaries.iter().map(|summary| summary["dir"].as_str().unwrap()).collect();
    assert!(dirs[0].ends_with("node-0/l3") && dirs[1].ends_with("node-1/l3"), "{dirs:?}");
    let pages: u64 = summaries.iter().map(|summary| summary["pages"].as_u64().unwrap()).sum();
    // 21 pages of the prompt. The generated tokens may complete another one.
    assert!((21..=22).contains(&pages), "{text}");
}

/// Memory that processes of this test may take: that of the machine, or the smallest limit of its
/// control groups.
fn memory_of_the_machine() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")).unwrap();
    let total = total.parse::<u64>().unwrap() << 10;
    let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = cgroup.lines().find_map(|line| line.strip_prefix("0::/"));
    let groups = group.into_iter().flat_map(|group| Path::new(group).ancestors());
    let limits = groups.filter_map(|group| {
        let limit = std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(group).join("memory.max")).ok()?;
        // `max` in a group without a limit.
        limit.trim().parse::<u64>().ok()
    });
    limits.fold(total, u64::min)
}

#[test]
fn nodes_that_exceed_the_machine_only_together_do_not_start() {
    let total = memory_of_the_machine();
    // The index takes 128 bytes per 8 KiB of L3, which is an eighth of the machine for each node.
    // Unlike L2 it takes no memory at the start, should the check be missing.
    let l3_bytes = (8 * total).to_string();
    let l3 = ["--l3-bytes", &l3_bytes, "--l3-mean-page", "4KiB"];
    let l2 = ["--l2", "32MiB", "--in-flight", "16MiB"];
    let dir = data_dir();
    let first = ["up", "--nodes", "16", "--listen", "127.0.0.1:0", "--data-dir", dir.path().to_str().unwrap()];
    let mut up = Process::start(&[&first[..], &l2, &l3].concat());
    assert_eq!(up.wait().code(), Some(1), "an error, not a panic: {}", up.stderr());
    let error = up.stderr();
    assert!(error.contains("raise --l3-mean-page") && error.trim_end().ends_with("[LRD0106]"), "{error}");
    assert!(!dir.path().join("node-0").exists(), "no node has started");
}
