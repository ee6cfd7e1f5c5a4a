//! Engine of a stranger whose chat template takes all the memory or time it can get, and a chat
//! with its model.

use super::attacker::{Attack, Stranger, Target};
use super::data::{Raw, own_namespace};
use super::http::http;
use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use larder_wire::{Request, Response};
use larder_worker::Role;
use larder_worker::api::{EngineInfo, PATH_MODEL, PATH_MODEL_FILES};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

/// Templates that take more than a router may give them: memory in one instruction, and time.
const TEMPLATES: [&str; 3] = [
    // The first one, so that short runs have one that takes all of its time.
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}\
     {% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "{% set ns = namespace(x='0123456789') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ [1, [2, [3]]] | tojson(indent=1000000000) }}",
];
pub const NAME: &str = "hostile templates";
/// Maximum time until a router serves a model.
const SERVED_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause between two looks at the router's models.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// One client with a long pause: a template may take a processor for five seconds, which no
/// priority of the stranger lowers.
pub fn attacks() -> Vec<Attack> {
    vec![Attack { name: NAME, clients: 1, pause: Duration::from_secs(15), run: chat_with_own_model }]
}

/// Model with one of the templates, and its engine. Dropping it ends the engine.
struct OwnModel {
    name: String,
    _engine: AbortOnDropHandle<()>,
    _member: Raw,
}

impl OwnModel {
    /// Registers an engine, and waits until the router serves its model.
    async fn serve(stranger: &Stranger, template: usize) -> Result<OwnModel> {
        let listener = TcpListener::bind((stranger.address(), 0)).await?;
        let name = format!("hostile-template-{template}");
        let info = EngineInfo {
            role: Role::Decode,
            url: format!("http://{}", listener.local_addr()?),
            model: name.clone(),
            descriptor: own_namespace(&name),
            numerics: String::new(),
            max_context: 4096,
            page_tokens: own_namespace(&name).geometry.page_tokens,
            request_bytes_max: 0,
            requests_max: 0,
        };
        let info = serde_json::to_string(&info)?;
        let files = Arc::new((info.clone(), TEMPLATES[template], stranger.target.model_dir.clone()));
        let engine = AbortOnDropHandle::new(tokio::spawn(async move {
            // With this task end those of its connections.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let files = files.clone();
                connections.spawn(async move { serve(stream, &files.0, files.1, &files.2).await });
            }
        }));
        let mut member = Raw::connect(stranger, None).await?;
        member.send(&Request::Register { name: name.clone(), ttl_ms: 60_000, info }).await?;
        ensure!(member.receive().await? == Response::Count(1), "the node did not register the engine");
        let url = format!("http://{}/v1/models/{name}", stranger.target.ports.api);
        let http = http(stranger)?;
        let served = async {
            while !http.get(&url).send().await?.status().is_success() {
                tokio::time::sleep(LOOK_PAUSE).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(SERVED_TIMEOUT, served).await.context("the router does not serve the model")??;
        Ok(OwnModel { name, _engine: engine, _member: member })
    }
}

/// Has the router load each of the models once.
pub async fn introduce(target: &Arc<Target>) -> Result<()> {
    let stranger = Stranger::new(target, 0);
    for template in 0..TEMPLATES.len() {
        OwnModel::serve(&stranger, template).await?;
    }
    Ok(())
}

fn chat_with_own_model(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let model = OwnModel::serve(&stranger, stranger.round as usize % TEMPLATES.len()).await?;
        let body = json!({"model": model.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1});
        let url = format!("http://{}/v1/chat/completions", stranger.target.ports.api);
        let answer: Value = http(&stranger)?.post(url).json(&body).send().await?.json().await?;
        ensure!(answer["error"]["code"] == "chat_template_exceeded", "{answer}");
        stranger.record_effect();
        Ok(())
    }
    .boxed()
}

/// Answers the requests of a router on one connection, as an engine does until it gets a prompt.
async fn serve(stream: TcpStream, info: &str, template: &str, model_dir: &Path) -> Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Some(request) = lines.next_line().await? {
        while !lines.next_line().await?.context("the header ends early")?.is_empty() {}
        let path = request.split(' ').nth(1).unwrap_or_default();
        let file = path.strip_prefix(PATH_MODEL_FILES).map(|name| name.trim_start_matches('/'));
        let body = match file {
            Some("chat_template.jinja") => Some(template.as_bytes().to_vec()),
            Some(name) => std::fs::read(model_dir.join(name)).ok(),
            None => (path == PATH_MODEL).then(|| info.as_bytes().to_vec()),
        };
        let status = if body.is_some() { "200 OK" } else { "404 Not Found" };
        let body = body.unwrap_or_default();
        let head =
            format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        write.write_all(head.as_bytes()).await?;
        write.write_all(&body).await?;
    }
    Ok(())
}
