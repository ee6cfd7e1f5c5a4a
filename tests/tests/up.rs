//! `larder up` as a person uses it.

use larder_tests::{Ask, Process, Reference, complete, data_dir, larder};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn up(dir: &Path, more: &[&str]) -> (Process, String) {
    // Built before the clock starts.
    larder();
    let begin = Instant::now();
    let mut up =
        Process::start(&[&["up", "--listen", "127.0.0.1:0", "--data-dir", dir.to_str().unwrap()], more].concat());
    let api = up.url("http://");
    assert!(begin.elapsed() < Duration::from_secs(10), "ready in under 10 s");
    (up, api.trim_end_matches("/v1").to_string())
}

/// Runs an admin command in `dir`, where `larder up` keeps its data.
fn admin(dir: &Path, arguments: &[&str]) -> Output {
    let data_dir = ["--data-dir", dir.to_str().unwrap()];
    Command::new(larder()).args(arguments).args(data_dir).output().unwrap()
}

fn admin_json(dir: &Path, arguments: &[&str]) -> Value {
    let output = admin(dir, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_start_finds_its_pages_again() {
    let reference = Reference::load();
    let dir = data_dir();
    let tokens = reference.prompt(1, 700);
    let expected = reference.greedy_text(&tokens, 32);
    let (running, api) = up(dir.path(), &["--nodes", "2"]);
    let first = complete(&api, &Ask::new(&tokens)).await.unwrap();
    assert_eq!((first.text.as_str(), first.cached), (expected.as_str(), 0));
    assert!(running.stop().success(), "a clean end");
    assert!(!dir.path().join("admin.url").exists());
    let (running, api) = up(dir.path(), &["--nodes", "2"]);
    let second = complete(&api, &Ask::new(&tokens)).await.unwrap();
    assert_eq!((second.text, second.cached), (expected, 21 * 32));
    running.kill9();
    let (_running, api) = up(dir.path(), &["--nodes", "2"]);
    assert_eq!(complete(&api, &Ask::new(&tokens)).await.unwrap().cached, 21 * 32, "after kill -9 too");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_inspect_warm_and_forget() {
    let dir = data_dir();
    let text = "In the beginning God created the heaven and the earth. ".repeat(20);
    let (running, _) = up(dir.path(), &[]);
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
    assert_eq!(warmed["computed"], pages.len(), "nobody had them: {warmed}");
    assert!(inspect(dir.path()).iter().all(|tier| tier.as_deref() == Some("L2")));

    assert!(running.stop().success());
    let (_running, _) = up(dir.path(), &[]);
    assert!(inspect(dir.path()).iter().all(|tier| tier.as_deref() == Some("L3")), "after a restart");
    let warmed = admin_json(dir.path(), &["prefix", "warm", &text]);
    assert_eq!((&warmed["loaded"], &warmed["computed"]), (&pages.len().into(), &0.into()), "{warmed}");
    assert!(inspect(dir.path()).iter().all(|tier| tier.as_deref() == Some("L2")));

    let file = dir.path().join("prefix.txt");
    std::fs::write(&file, &text).unwrap();
    let forgotten = admin_json(dir.path(), &["prefix", "forget", "--file", file.to_str().unwrap()]);
    assert_eq!(forgotten["forgotten"], pages.len(), "{forgotten}");
    assert!(inspect(dir.path()).iter().all(Option::is_none));
}

#[test]
fn mistakes_are_told_in_a_line() {
    let dir = data_dir();
    let told = |arguments: &[&str]| {
        let output = Command::new(larder()).args(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let path = dir.path().to_str().unwrap();
    let nothing_runs = told(&["status", "--data-dir", path]);
    assert!(nothing_runs.contains("larder up") && nothing_runs.contains("--admin"), "{nothing_runs}");
    assert!(told(&["prefill", "--store", "redis://x:1", "--model", path]).contains("larder://"));
    let (_running, api) = up(dir.path(), &[]);
    let unused = dir.path().join("unused");
    let taken = told(&["up", "--listen", api.trim_start_matches("http://"), "--data-dir", unused.to_str().unwrap()]);
    assert!(!unused.exists(), "nothing was made");
    assert!(taken.contains("cannot listen on"), "{taken}");
    let twice = told(&["up", "--listen", "127.0.0.1:0", "--data-dir", path]);
    assert!(twice.contains("in use"), "{twice}");
}
