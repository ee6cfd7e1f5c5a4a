//! Client of a router's admin API.

use crate::errors::http_cause;
use crate::output::say;
use crate::up::{ADMIN_URL_FILE, DATA_DIR};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use larder_router::admin::api::ErrorResponse;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longer than the router's own limit: warming a prefix may compute it. The router's error then
/// arrives before this limit does.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Address of the admin API, and output format.
#[derive(Debug, Args)]
pub struct Target {
    /// Address of a router's admin API: URL or HOST:PORT. Default: the `larder up` that uses
    /// --data-dir
    #[arg(long, env = "LARDER_ADMIN", hide_env_values = true, value_name = "URL")]
    admin: Option<String>,
    /// Data directory of `larder up`
    #[arg(long, default_value = DATA_DIR, value_name = "DIRECTORY")]
    data_dir: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

impl Target {
    pub fn local_data_dir(&self) -> Option<&Path> {
        self.admin.is_none().then_some(self.data_dir.as_path())
    }

    fn url(&self) -> Result<String> {
        if let Some(address) = &self.admin {
            return normalized_url(address);
        }
        let file = self.data_dir.join(ADMIN_URL_FILE);
        match std::fs::read_to_string(&file) {
            Ok(url) => Ok(url.trim().to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "no `larder up` runs in {}: start it, or name a router with --admin URL or LARDER_ADMIN [LRD0603]",
                self.data_dir.display()
            ),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
        }
    }

    /// Sends a request, with POST if it has a body, and decodes the answer. Errors tell the
    /// operator whether the router refused the request, or another server answered, or none.
    pub async fn send<T: DeserializeOwned>(&self, path: &str, body: Option<&impl Serialize>) -> Result<T> {
        let url = self.url()?;
        let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?;
        let request = match body {
            Some(body) => http.post(format!("{url}{path}")).json(body),
            None => http.get(format!("{url}{path}")),
        };
        let unreachable = |error: reqwest::Error| {
            anyhow!("cannot reach the admin API at {url}: {}; is a router running there? [LRD0601]", http_cause(&error))
        };
        let response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        let bytes = response.bytes().await.map_err(unreachable)?;
        if status.is_success() {
            return serde_json::from_slice(&bytes).map_err(|error| {
                anyhow!("the server at {url} is not a Larder router of this version: {error} [LRD0602]")
            });
        }
        if let Some(server) = other_server(&http, &url, &bytes).await {
            bail!(
                "{url} is {server}; use the admin address that `larder up` or `larder router` prints at its start \
                 [LRD0602]"
            );
        }
        match serde_json::from_slice::<ErrorResponse>(&bytes) {
            Ok(failure) => bail!("{}", failure.error.message),
            Err(_) => bail!("the server at {url} answered {status}; is it a router's admin API? [LRD0602]"),
        }
    }

    pub fn print<T: Serialize>(&self, answer: &T, human: impl FnOnce(&T)) -> Result<()> {
        match self.json {
            true => say!("{}", serde_json::to_string_pretty(answer)?),
            false => human(answer),
        }
        Ok(())
    }
}

/// Completes `HOST:PORT` to a URL and removes trailing slashes.
pub fn normalized_url(address: &str) -> Result<String> {
    let url = match address.split_once("://") {
        None => format!("http://{address}"),
        Some(("http" | "https", _)) => address.to_string(),
        Some((scheme, _)) => bail!("'{address}' is not an HTTP address: it begins with {scheme}://"),
    };
    Ok(url.trim_end_matches('/').to_string())
}

/// Recognizes other Larder servers by the error they answered with, so that the message can name
/// the mistake. Returns `None` for an admin API.
async fn other_server(http: &reqwest::Client, url: &str, answer: &[u8]) -> Option<&'static str> {
    let error: Value = serde_json::from_slice(answer).unwrap_or_default();
    // Only errors in OpenAI's format have a type.
    if error["error"]["type"].is_string() {
        return Some("the OpenAI API of a router, not its admin API");
    }
    if !error.is_null() {
        return None;
    }
    let status: Value = http.get(format!("{url}/status")).send().await.ok()?.json().await.ok()?;
    status["node_id"].is_string().then_some("the admin address of a store node, not of a router")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admin_address_needs_no_scheme() {
        assert_eq!(normalized_url("localhost:8001").unwrap(), "http://localhost:8001");
        assert_eq!(normalized_url("https://larder.example/").unwrap(), "https://larder.example");
        let error = normalized_url("larder://10.0.0.1:7700/").unwrap_err().to_string();
        assert!(error.contains("larder://"), "{error}");
    }
}
