//! Tests of a whole router against fake engines: small HTTP servers that speak the engines'
//! interface and fail on request.

mod admin;
mod fakes;
mod hostile;
mod openai;
mod responses;
mod routing;
mod store;

use larder_worker::worker_process::WorkerCommand;

/// Template worker of the other tests: they start this program again, with this test as its only
/// one.
#[test]
#[ignore = "it is a part of the other tests"]
fn template_worker() {
    // Not with `--include-ignored`: the worker limits the memory of its process.
    if std::env::args().any(|argument| argument == "--exact") {
        larder_model::template_worker::run().unwrap();
    }
}

fn template_worker_command() -> WorkerCommand {
    let arguments = ["template_worker", "--exact", "--ignored", "--nocapture"].map(String::from);
    WorkerCommand { program: "/proc/self/exe".into(), arguments: arguments.into() }
}
