//! Checks of an engine of Larder.

use super::Findings;
use crate::errors::http_cause;
use larder_client::PROTOCOL_VERSION;
use larder_worker::api::{EngineInfo, EngineState, PATH_MODEL, PATH_STATE};
use serde::de::DeserializeOwned;
use std::time::{Duration, Instant};

/// Limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn check(url: anyhow::Result<String>, nodes: usize, deadline: Instant, findings: &mut Findings) {
    let url = match url {
        Ok(url) => url,
        Err(error) => return findings.fail("url", error.to_string(), "name the engine's http:// URL or HOST:PORT"),
    };
    let info: EngineInfo = match get(&url, PATH_MODEL, deadline).await {
        Ok(info) => info,
        Err((fact, action)) => return findings.fail("reachability", fact, action),
    };
    let state: EngineState = match get(&url, PATH_STATE, deadline).await {
        Ok(state) => state,
        Err((fact, action)) => return findings.fail("reachability", fact, action),
    };
    findings.ok("reachability", format!("a {} engine of {}", info.role, info.model));
    let own = env!("CARGO_PKG_VERSION");
    let version = if state.version.is_empty() { "unknown, older than this command" } else { &state.version };
    let fact = format!("software {version}, protocol up to {}", state.protocol);
    match state.version == own && state.protocol == PROTOCOL_VERSION {
        true => findings.ok("version", fact),
        false => findings.warn("version", format!("{fact}; this command: {own}"), "run one version everywhere"),
    }
    let fact = format!("connected to {} store nodes, and the URL has {nodes}", state.store_nodes);
    match state.store_nodes as usize == nodes {
        true => findings.ok("store", fact),
        false => findings.fail("store", fact, "compare the engine's --store, and check its network and log"),
    }
}

/// Gets and decodes an answer. An error has the fact and the remedy.
async fn get<T: DeserializeOwned>(url: &str, path: &str, deadline: Instant) -> Result<T, (String, &'static str)> {
    let left = deadline.saturating_duration_since(Instant::now());
    let request = async {
        let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT.min(left)).build()?;
        http.get(format!("{url}{path}")).send().await
    };
    let start = "check that the engine runs, its --listen address, and firewalls between";
    let response = request.await.map_err(|error| (format!("no answer: {}", http_cause(&error)), start))?;
    let status = response.status();
    let not_engine = "name the address that `larder prefill` or `larder decode` prints at its start";
    response.json().await.map_err(|_| (format!("the server answers {path} with {status}: not an engine"), not_engine))
}
