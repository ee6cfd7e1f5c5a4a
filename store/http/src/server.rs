//! Accepts connections and serves requests on them.

use crate::body;
use crate::hosts::AllowedHosts;
use crate::metrics::HttpMetrics;
use crate::options::{BUFFER_BYTES, HttpOptions, REFUSED_MAX};
use crate::phase::{Phase, PhaseCell};
use crate::places::{Place, PlaceLimit, Places};
use crate::proxies;
use crate::refusal::{Reason, Refusal, Reporter};
use crate::shares::{PeerAddress, PeerBudget};
use crate::socket::Socket;
use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::{HeaderValue, Request, Response, header};
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Pause after a failed accept. The usual cause is a lack of file descriptors, which come back when
/// clients disconnect. Without a pause the loop would use a whole processor until then.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// Maximum time to answer a refused connection.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(5);

/// An HTTP server that is not yet running.
#[derive(Debug)]
pub struct HttpServer {
    /// Name in metrics and log lines, e.g. `api`.
    pub name: &'static str,
    pub options: HttpOptions,
    /// Names under which the server may be reached. `None` accepts every name and every web page.
    pub allowed_hosts: Option<AllowedHosts>,
    pub metrics: HttpMetrics,
    /// Writes a refusal in the form of this server's errors.
    pub render: fn(&Refusal) -> Response<Body>,
}

struct Shared {
    options: Arc<HttpOptions>,
    allowed_hosts: Option<AllowedHosts>,
    render: fn(&Refusal) -> Response<Body>,
    reporter: Arc<Reporter>,
    places: Arc<Places>,
    memory: Arc<PeerBudget>,
    routes: TowerToHyperService<Router>,
    stop: CancellationToken,
}

impl HttpServer {
    /// Serves until `stop` is cancelled. It then closes connections without a complete request, and
    /// returns when the running answers end, at most `stop_timeout` later.
    // Boxed and never inlined. The compiler generates the code of an `async fn` in each crate that
    // polls it: the whole server, in node, engine and router.
    #[inline(never)]
    pub fn serve(
        self,
        listener: TcpListener,
        routes: Router,
        stop: CancellationToken,
        stop_timeout: Duration,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.run(listener, routes, stop, stop_timeout))
    }

    async fn run(self, listener: TcpListener, routes: Router, stop: CancellationToken, stop_timeout: Duration) {
        let metrics = self.metrics.server(self.name);
        let shared = Arc::new(Shared {
            places: Places::new(&self.options),
            memory: PeerBudget::with_gauge(self.options.body_memory_bytes, metrics.body_bytes()),
            options: Arc::new(self.options),
            allowed_hosts: self.allowed_hosts,
            render: self.render,
            reporter: Arc::new(Reporter::new(self.name, metrics)),
            routes: TowerToHyperService::new(routes),
            stop: stop.clone(),
        });
        let refused = Arc::new(Semaphore::new(REFUSED_MAX));
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                // A stop goes before a flood of new connections.
                biased;
                () = stop.cancelled() => break,
                // Forgets ended tasks, which would otherwise pile up in the set.
                Some(_) = connections.join_next() => continue,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => accept(&shared, &mut connections, &refused, stream, peer),
                Err(error) => {
                    if shared.reporter.may_log(Reason::Accept, Instant::now()).is_some() {
                        let text = Reason::Accept.log_text();
                        tracing::warn!(server = self.name, %error, "{text}");
                    }
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
        drop(listener);
        let ended = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(stop_timeout, ended).await.is_err() {
            let open = connections.len();
            tracing::warn!(server = self.name, open, ?stop_timeout, "cut HTTP answers that had not ended at the stop");
        }
        // Dropping the set ends the tasks that are left.
    }
}

fn accept(
    shared: &Arc<Shared>,
    connections: &mut JoinSet<()>,
    refused: &Arc<Semaphore>,
    stream: TcpStream,
    peer: SocketAddr,
) {
    // Streamed tokens are small and a client waits for each. Nagle's algorithm would hold them back
    // to fill a segment.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY; streamed tokens may be delayed");
    }
    let peer = peer.ip();
    match shared.places.take(PeerAddress::of(peer)) {
        Ok(place) => drop(connections.spawn(serve_connection(shared.clone(), stream, peer, place))),
        Err(limit) => {
            let refusal = match limit {
                PlaceLimit::Total => {
                    Refusal::busy(Reason::Connections, "the server has too many connections; retry later")
                }
                PlaceLimit::Address => {
                    Refusal::busy(Reason::Address, "your address has too many connections to this server; retry later")
                }
            };
            shared.reporter.refused(refusal.reason, peer);
            // Without a permit the connection is closed without an answer: answers to a flood must
            // stay bounded.
            if let Ok(permit) = refused.clone().try_acquire_owned() {
                let shared = shared.clone();
                connections.spawn(async move {
                    let stop = shared.stop.clone();
                    let answered = tokio::time::timeout(REFUSED_TIMEOUT, refuse(shared, stream, peer, refusal));
                    tokio::select! {
                        () = stop.cancelled() => {}
                        _ = answered => {}
                    }
                    drop(permit);
                });
            }
        }
    }
}

/// Answers the first request of a connection with `refusal`, and closes it.
async fn refuse(shared: Arc<Shared>, stream: TcpStream, peer: IpAddr, refusal: Refusal) {
    let phase = Arc::new(PhaseCell::default());
    phase.drain();
    let socket = Socket::new((stream, peer), shared.options.clone(), phase, shared.reporter.clone());
    // After the header: a client that gets an answer before it has asked may treat it as an error.
    let service = service_fn(|_: Request<Incoming>| {
        let response = shared.answer(&refusal);
        async move { Ok::<_, Infallible>(response) }
    });
    let mut builder = http1::Builder::new();
    let connection = builder.keep_alive(false).max_buf_size(BUFFER_BYTES);
    let _ = connection.serve_connection(TokioIo::new(socket), service).await;
}

async fn serve_connection(shared: Arc<Shared>, stream: TcpStream, peer: IpAddr, place: Place) {
    let _open = shared.reporter.metrics().connection();
    let phase = place.phase.clone();
    let evicted = place.evicted.clone();
    let socket = Socket::new((stream, peer), shared.options.clone(), phase.clone(), shared.reporter.clone());
    let place = Arc::new(place);
    let service = service_fn(|request| {
        let (shared, place) = (shared.clone(), place.clone());
        async move { Ok::<_, Infallible>(exchange(&shared, &place, peer, request).await) }
    });
    let mut connection =
        pin!(http1::Builder::new().max_buf_size(BUFFER_BYTES).serve_connection(TokioIo::new(socket), service));
    tokio::select! {
        // A client that breaks the protocol or disconnects is no event for the operator.
        _ = connection.as_mut() => {}
        () = evicted.cancelled() => shared.reporter.refused(Reason::Replaced, peer),
        () = shared.stop.cancelled() => {
            // Without a complete request there is nothing to finish.
            if phase.is_answering() {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
    }
}

impl Shared {
    /// Response for `refusal`, after which the connection closes.
    fn answer(&self, refusal: &Refusal) -> Response<Body> {
        let mut response = (self.render)(refusal);
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        if let Some(seconds) = refusal.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// Checks a request and receives its body.
    async fn receive(
        &self,
        request: Request<Incoming>,
        connection: IpAddr,
        phase: &PhaseCell,
    ) -> Result<Request<Body>, Refusal> {
        let (mut parts, body) = request.into_parts();
        let peer = proxies::client(&self.options.trusted_proxies, connection, &parts.headers);
        parts.extensions.insert(peer);
        let has_body = !body.is_end_stream();
        if let Some(allowed) = &self.allowed_hosts {
            allowed.check(&parts, has_body)?;
        }
        if !has_body {
            return Ok(Request::from_parts(parts, Body::empty()));
        }
        phase.enter(Phase::Body);
        let (bytes, charge) = body::receive(body, &self.options, &self.memory.of(peer)).await?;
        parts.extensions.insert(charge);
        Ok(Request::from_parts(parts, Body::from(bytes)))
    }
}

/// Answers one request of a connection.
async fn exchange(shared: &Shared, place: &Place, peer: IpAddr, request: Request<Incoming>) -> Response<Answer> {
    let phase = place.phase.clone();
    let received = shared.receive(request, peer, &phase).await;
    phase.enter(Phase::Answering);
    let response = match received {
        Ok(request) => {
            let response = match shared.routes.call(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            // Only a useful request makes its address known.
            if response.status().as_u16() < 400 {
                place.served();
            }
            response
        }
        Err(refusal) => {
            shared.reporter.refused(refusal.reason, peer);
            phase.drain();
            shared.answer(&refusal)
        }
    };
    response.map(|body| Answer { body, phase })
}

/// Body of an answer. Its drop, which follows its last byte or the end of the connection, ends the
/// phase.
struct Answer {
    body: Body,
    phase: Arc<PhaseCell>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.phase.enter(Phase::Idle);
    }
}
