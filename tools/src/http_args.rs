//! Options of the HTTP servers of nodes, engines and routers.

use bytesize::ByteSize;
use clap::Args;
use larder_http::HttpOptions;
use larder_router::RouterOptions;
use larder_router::openai::tool_parser::ToolFormat;
use std::net::IpAddr;
use std::time::Duration;

/// Options of the OpenAI API.
#[derive(Debug, Args)]
pub struct ApiArgs {
    /// Maximum duration of a request, in seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    request_timeout: u64,
    /// Origin of web pages that may read answers of the OpenAI API, such as `http://app.example`,
    /// or `*` for all. Metrics and caches are never open to pages
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Format of calls of tools in answers: hermes (also Qwen), llama3 or mistral. Default: that of
    /// the model's chat template
    #[arg(long, value_name = "FORMAT")]
    tool_parser: Option<ToolFormat>,
}

impl ApiArgs {
    pub fn apply(&self, options: &mut RouterOptions) {
        options.request_timeout = self.request_timeout();
        options.cors_origins = self.cors_origin.clone();
        options.tool_parser = self.tool_parser;
    }

    pub fn request_timeout(&self) -> Duration {
        Duration::from_secs(self.request_timeout)
    }
}

#[derive(Debug, Args)]
pub struct HttpArgs {
    /// Maximum number of HTTP connections: to the OpenAI API of a router, to an engine, or to the
    /// admin port of a node. A quarter is reserved for addresses served within ten minutes.
    /// Default: 2048 for a router, 1024 for an engine, 128 for a node
    #[arg(long, value_name = "CONNECTIONS")]
    http_connections: Option<usize>,
    /// Part of --http-connections that one address may use, or one /64 network with IPv6. Clients
    /// behind one proxy share it. Default: three quarters
    #[arg(long, value_name = "CONNECTIONS")]
    http_connections_per_address: Option<usize>,
    /// Maximum time from the connect, or from the first byte of a later request, to the end of the
    /// HTTP header, in seconds
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    http_header_timeout: u64,
    /// Time in which an HTTP body must end or bring 64 KiB per second of it, in seconds. It then
    /// starts anew
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    http_body_timeout: u64,
    /// Maximum time that an HTTP connection stays open between two requests, in seconds
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    http_idle_timeout: u64,
    /// Maximum time that an HTTP client may leave its socket full, in seconds. Each 64 KiB that it
    /// receives gives it a second more. Time without tokens to send does not count
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    http_write_timeout: u64,
    /// Maximum memory for HTTP bodies that are arriving or not yet parsed, without the first 64 KiB
    /// of each. One address has three quarters of it at most
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    http_body_memory: ByteSize,
    /// Host name under which the ports of engines and of operators may be reached, besides IP
    /// addresses, `localhost` and the name in --advertise. Web pages could misuse other names. The
    /// OpenAI API accepts every name, except for metrics and caches
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// Address of a reverse proxy that appends its clients to `X-Forwarded-For`. These clients then
    /// have shares of their own, instead of one together. The proxy's connections still count as
    /// those of one address, see --http-connections-per-address
    #[arg(long, value_name = "ADDRESS")]
    trusted_proxy: Vec<IpAddr>,
}

impl HttpArgs {
    /// Sets the limits of the server that most clients of a process use.
    pub fn apply(&self, options: &mut HttpOptions) {
        self.apply_common(options);
        options.connections_max = self.http_connections.unwrap_or(options.connections_max);
        options.connections_per_address = self.http_connections_per_address;
    }

    /// Sets the limits of a further server of the process, whose number of connections is fixed.
    pub fn apply_common(&self, options: &mut HttpOptions) {
        options.header_timeout = Duration::from_secs(self.http_header_timeout);
        options.body_timeout = Duration::from_secs(self.http_body_timeout);
        options.idle_timeout = Duration::from_secs(self.http_idle_timeout);
        options.write_timeout = Duration::from_secs(self.http_write_timeout);
        options.body_memory_bytes = usize::try_from(self.http_body_memory.as_u64()).unwrap_or(usize::MAX);
        options.allowed_hosts = self.allowed_host.clone();
        options.trusted_proxies = self.trusted_proxy.clone();
    }
}
